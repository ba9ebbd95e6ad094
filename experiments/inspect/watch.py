"""`fedmuon watch`: a page in the browser that follows runs, served by Python's own HTTP server.

The page can be read on this machine only. A request must reach 127.0.0.1, know the path of 128
random bits, and name this machine as its Host: if another site makes its name mean 127.0.0.1, the
Host is that site.

Runs are read again for every request; nothing is cached or written. The page says how far it has
read a rounds.jsonl, and gets the whole lines that were appended since. Writers replace files. A
file that `--resume` cut back is therefore another file, and is read from its start.
"""

import contextlib
import hmac
import json
import math
import os
import re
import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, regular, unsealed
from fedmuon.experiments.inspect.status import RunStatus, runs_below, settings
from fedmuon.runs.directory import UNTRAINED, RunDirectory

ROUNDS = "rounds.jsonl"
SPENT = ("released", "epsilon", "delta", "certified")
PART = 1 << 20  # bytes of a file that are read at a time
PAGE = Path(__file__).parent / "assets"
FILES = {"": "html", "page.css": "css", "page.js": "javascript"}
HERE = ("127.0.0.1", "localhost")  # with any port: ssh may forward another one
MOST = 50  # runs on the page
LOOKED_AT, PATIENCE = 3.0, 4.0  # seconds since the page last asked; seconds to wait for it
POLL = 0.1  # seconds within which the server stops
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # it would contain the path
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; "
    "style-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
Answer = tuple[int, str, bytes]  # status, content type, content
NOTHING: Answer = (404, "text/plain", b"There is nothing at this address.")


def runs_of(folder: Path) -> dict[str, Path]:
    """Name -> path of the runs in the folder and below it, or of the folder itself; newest first.

    A run that is about to begin has no folder yet.
    """
    begun: dict[Path, float] = {}
    for run in runs_below(folder) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            last = run.path / "schedule.npy"  # missing if the run is damaged, or just begins
            file = last if last.exists() else run.path / "config.toml"
            begun[run.path] = file.stat().st_mtime
    newest = sorted(begun, key=lambda one: begun[one], reverse=True)
    alone = folder.resolve().name
    return {alone if one == folder else str(one.relative_to(folder)): one for one in newest}


def about(name: str, folder: Path) -> Record:
    """What the page shows of a run apart from its rounds; of a damaged one, the damage."""
    run = RunStatus(folder, brief=True)
    try:
        RunDirectory(folder).require_fixed()
        run.require_unchanged()
        config = _settings(folder, (folder / "config.toml").stat().st_mtime_ns)
        state, _, why = run.state.partition(": ")
        summary = run.summary or {}
    except InputError as error:
        return {"name": name, "state": "damaged", "why": str(error)}
    again = run.again if state == "unfinished" else ""
    found = {"name": name, "state": state, "why": why, "again": again, **config}
    with contextlib.suppress(FileNotFoundError):  # before its first round
        found["size"] = _place((folder / ROUNDS).stat())
    spent = {one: summary["privacy"].get(one) for one in SPENT} if "privacy" in summary else None
    start = {name: value for name, value in summary.get(UNTRAINED, {}).items()
             if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
    told = {"stopped": summary.get("stopped", ""), "note": run.note, "untrained": start}
    return found | told | {"spent": spent}


@lru_cache(256)
def _settings(folder: Path, changed: int) -> Record:
    """The number of rounds and the card of a config that was last changed at that time."""
    config = RunStatus(folder).config
    return {"total": config.federation.rounds, "card": [*settings(config).items()]}


def _place(of: os.stat_result, at: int | None = None) -> str:
    """A position in a file, by default its end, with the inode, which a replaced file changes."""
    return f"{of.st_ino}-{of.st_size if at is None else at}"


def rounds_since(folder: Path, since: str) -> Record:
    """The whole lines that were appended to rounds.jsonl.

    Args:
        folder: The run.
        since: The `at` of an earlier answer. Anything that is no position in this file means its
            start.
    """
    try:
        file = os.fdopen(regular(folder / ROUNDS), "rb")
    except FileNotFoundError:
        return {"at": "", "afresh": True, "rounds": [], "damaged": 0, "more": False}
    with file:
        status = os.fstat(file.fileno())
        asked = int(since.partition("-")[2]) if re.fullmatch(r"[0-9]+-[0-9]{1,18}", since) else 0
        start = asked if since == _place(status, asked) and asked <= status.st_size else 0
        file.seek(start)
        content = file.read(PART) + file.readline()
    whole, mark = content[: content.rfind(b"\n") + 1], RunDirectory(folder).mark
    rounds, damaged = [], 0
    for line in whole.decode("utf-8", errors="replace").split("\n")[:-1]:
        if not (record := unsealed(f"{line}\n", mark)):
            damaged += record is None
            continue
        found: Record = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if faults := record.get("faults"):
            found["faults"] = [f"client {one['client']}: {one['why']}" for one in faults]
        if "dropped" in record:
            found["dropped"] = record["dropped"]
        rounds.append(found)
    return {
        "at": _place(status, start + len(whole)),
        "afresh": start == 0,
        "rounds": rounds,
        "damaged": damaged,
        "more": start + len(content) < status.st_size,
    }


class Server(ThreadingHTTPServer):
    """Answers for the runs that `folder` is or holds; `url` is the address of the page."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self._secret = folder, secrets.token_urlsafe(16)
        self._looks, self._last = 0, -math.inf  # how often the page asked, and when
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/{self._secret}/"

    def server_bind(self) -> None:
        """Bind without looking up the machine's name, as the base class would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def answer(self, hosts: list[str], target: str) -> Answer:
        """The answer to a request for `target` with these Host headers."""
        if len(hosts) != 1 or hosts[0].partition(":")[0] not in HERE:
            return 403, "text/plain", b"ask 127.0.0.1"
        try:
            asked = urlsplit(target)
        except ValueError:  # no address
            return NOTHING
        secret, slash, name = asked.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return NOTHING
        if name in FILES:
            return 200, f"text/{FILES[name]}", (PAGE / (name or "page.html")).read_bytes()
        if name == "runs":
            self._looks, self._last = self._looks + 1, time.monotonic()
            places = runs_of(self.folder)
            shown = [about(name, one) for name, one in [*places.items()][:MOST]]
            found = {"folder": str(self.folder), "runs": shown, "all": len(places)}
        elif name == "rounds":
            given = {key: values[0] for key, values in parse_qs(asked.query).items()}
            if (run := runs_of(self.folder).get(given.get("run", ""))) is None:
                return NOTHING
            found = rounds_since(run, given.get("from", ""))
        else:
            return NOTHING
        return 200, "application/json", json.dumps(found, allow_nan=False).encode()

    def linger(self) -> None:
        """If somebody looks at the page, wait until it has asked for the end and drawn it."""
        now, enough = time.monotonic(), self._looks + 2
        looked_at = self._last > now - LOOKED_AT
        while looked_at and self._looks < enough and time.monotonic() < now + PATIENCE:
            time.sleep(POLL / 2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a page was closed in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds within which a request must arrive

    def do_GET(self) -> None:
        """Answer; if something cannot be read, say why."""
        try:
            found = cast(Server, self.server).answer(self.headers.get_all("Host", []), self.path)
        except (InputError, OSError) as error:
            found = 500, "text/plain", str(error).encode()
        status, kind, content = found
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the run."""


@contextlib.contextmanager
def watched(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a run from a thread, and pass its address to `tell`.

    If no page can be served, `tell` gets the reason and the run goes on without.
    """
    try:
        server = Server(folder)
    except OSError as error:
        tell(f"Cannot serve a page on 127.0.0.1 ({error.strerror}). The run continues.")
        yield
        return
    with server:
        threading.Thread(target=server.serve_forever, args=(POLL,), daemon=True).start()
        tell(f"Watch it at {server.url}")
        try:
            yield
            server.linger()
        finally:
            server.shutdown()
