"""`fedmuon watch`: a web page that follows runs, served by Python's own HTTP server.

Only this machine can read the page. A request must reach 127.0.0.1, contain the path of 128 random
bits, and name this machine as its Host. Another site can make its own name resolve to 127.0.0.1,
but then the Host header contains that name.

The server reads the runs again for every request and writes no files. The page sends the position
up to which it has read rounds.jsonl, and receives the complete lines that were appended since. To
replace a file, fedmuon writes a new one. If `--resume` shortens rounds.jsonl, the page therefore
recognizes a new file and reads it from the start.
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
from fedmuon.experiments.inspect.status import RunStatus, folders_below, settings
from fedmuon.runs.directory import UNTRAINED, RunDirectory

ROUNDS = "rounds.jsonl"
SPENT = ("released", "epsilon", "delta", "certified")
PART = 1 << 20  # bytes of a file that one request reads
PAGE = Path(__file__).parent / "assets"
FILES = {"": "html", "page.css": "css", "page.js": "javascript"}
HERE = ("127.0.0.1", "localhost")  # with any port, because ssh may forward another port
MOST = 50  # maximum number of runs on the page
LOOKED_AT, PATIENCE = 3.0, 4.0  # seconds since the last request of the page; seconds to wait for it
POLL = 0.1  # seconds between two checks whether the server should stop
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # a referrer would contain the secret path
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; "
    "style-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
Answer = tuple[int, str, bytes]  # status, content type, content
NOTHING: Answer = (404, "text/plain", b"There is nothing at this address.")


def runs_of(folder: Path) -> dict[str, Path]:
    """Return a dictionary from the names to the paths of all runs in the folder, newest first.

    The folder may itself be a run. If the run has not created its folder yet, the dictionary is
    empty.
    """
    begun: dict[Path, float] = {}
    for run, file in folders_below(folder).items() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # the run was removed in the meantime
            begun[run] = file.stat().st_mtime
    newest = sorted(begun, key=lambda path: begun[path], reverse=True)
    alone, root = folder.resolve().name, f"{folder}/".replace("//", "/")
    # For thousands of runs, `relative_to` would take a third of the time of this function.
    return {alone if path == folder else str(path).removeprefix(root): path for path in newest}


def about(name: str, folder: Path) -> Record:
    """Return the data that the page shows about a run, except its rounds.

    If the run is damaged, the data explain the damage.
    """
    run = RunStatus(folder, brief=True)
    try:
        RunDirectory(folder).require_fixed()
        run.require_unchanged()
        config = _settings(folder, (folder / "config.toml").stat().st_mtime_ns)
        state, _, reason = run.state.partition(": ")
        summary = run.summary or {}
    except InputError as error:
        return {"name": name, "state": "damaged", "why": str(error)}
    resume_command = run.again if state == "unfinished" else ""
    record = {"name": name, "state": state, "why": reason, "again": resume_command, **config}
    with contextlib.suppress(FileNotFoundError):  # there is no file before the first round
        record["size"] = _place((folder / ROUNDS).stat())
    spent = {key: summary["privacy"].get(key) for key in SPENT} if "privacy" in summary else None
    start = {name: value for name, value in summary.get(UNTRAINED, {}).items()
             if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
    notes = {"stopped": summary.get("stopped", ""), "note": run.note, "untrained": start}
    return record | notes | {"spent": spent}


@lru_cache(256)
def _settings(folder: Path, changed: int) -> Record:
    """Return the number of rounds, and the settings of the run.

    `changed` is not read. It is only a part of the cache key, so that a new config is read again.
    """
    config = RunStatus(folder).config
    return {"total": config.federation.rounds, "card": [*settings(config).items()]}


def _place(status: os.stat_result, at: int | None = None) -> str:
    """Return the inode of a file and a position in the file. The default is the end of the file.

    A file that replaces another file has a new inode.
    """
    return f"{status.st_ino}-{status.st_size if at is None else at}"


def rounds_since(folder: Path, since: str) -> Record:
    """Return the complete lines that were appended to rounds.jsonl since an earlier answer.

    Args:
        folder: The run folder.
        since: The field `at` of an earlier answer. If `since` is not a position in the file, the
            lines are read from the start.
    """
    try:
        file = os.fdopen(regular(folder / ROUNDS), "rb")
    except FileNotFoundError:
        return {"at": "", "afresh": True, "rounds": [], "damaged": 0, "more": False}
    with file:
        status = os.fstat(file.fileno())
        position = int(since.partition("-")[2]) if re.fullmatch(r"[0-9]+-[0-9]{1,18}", since) else 0
        start = position if since == _place(status, position) and position <= status.st_size else 0
        file.seek(start)
        content = file.read(PART) + file.readline()
    complete, mark = content[: content.rfind(b"\n") + 1], RunDirectory(folder).mark
    rounds, damaged = [], 0
    for line in complete.decode("utf-8", errors="replace").split("\n")[:-1]:
        if not (record := unsealed(f"{line}\n", mark)):
            damaged += record is None
            continue
        values: Record = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if faults := record.get("faults"):
            values["faults"] = [f"client {fault['client']}: {fault['why']}" for fault in faults]
        if "dropped" in record:
            values["dropped"] = record["dropped"]
        rounds.append(values)
    return {
        "at": _place(status, start + len(complete)),
        "afresh": start == 0,
        "rounds": rounds,
        "damaged": damaged,
        "more": start + len(content) < status.st_size,
    }


class Server(ThreadingHTTPServer):
    """A server of the runs in `folder`. The folder may itself be a run.

    `url` is the address of the page.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self._secret = folder, secrets.token_urlsafe(16)
        self._looks, self._last = 0, -math.inf  # number and time of the page's requests
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/{self._secret}/"

    def server_bind(self) -> None:
        """Bind without looking up the machine's name, which the base class would do."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def answer(self, hosts: list[str], target: str) -> Answer:
        """Return the answer to a request for `target` with these Host headers."""
        if len(hosts) != 1 or hosts[0].partition(":")[0] not in HERE:
            return 403, "text/plain", b"ask 127.0.0.1"
        try:
            url = urlsplit(target)
        except ValueError:  # the text is not an address
            return NOTHING
        secret, slash, name = url.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return NOTHING
        if name in FILES:
            return 200, f"text/{FILES[name]}", (PAGE / (name or "page.html")).read_bytes()
        if name == "runs":
            self._looks, self._last = self._looks + 1, time.monotonic()
            places = runs_of(self.folder)
            records = [about(name, path) for name, path in [*places.items()][:MOST]]
            response = {"folder": str(self.folder), "runs": records, "all": len(places)}
        elif name == "rounds":
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            if (run := runs_of(self.folder).get(query.get("run", ""))) is None:
                return NOTHING
            response = rounds_since(run, query.get("from", ""))
        else:
            return NOTHING
        return 200, "application/json", json.dumps(response, allow_nan=False).encode()

    def linger(self) -> None:
        """If a browser shows the page, wait until the page shows the end of the run."""
        now, enough = time.monotonic(), self._looks + 2
        looked_at = self._last > now - LOOKED_AT
        while looked_at and self._looks < enough and time.monotonic() < now + PATIENCE:
            time.sleep(POLL / 2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a browser that closed the page in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds within which a request must arrive

    def do_GET(self) -> None:
        """Answer the request. If a file cannot be read, answer with the reason."""
        try:
            answer = cast(Server, self.server).answer(self.headers.get_all("Host", []), self.path)
        except (InputError, OSError) as error:
            answer = 500, "text/plain", str(error).encode()
        status, kind, content = answer
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the terminal shows the output of the run."""


@contextlib.contextmanager
def watched(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a run from a thread, and pass its address to `tell`.

    If no page can be served, `tell` receives the reason and the run continues without a page.
    """
    try:
        server = Server(folder)
    except OSError as error:
        tell(
            "The run continues without a page, because no port of 127.0.0.1 could be opened "
            f"({error.strerror})."
        )
        yield
        return
    with server:
        threading.Thread(target=server.serve_forever, args=(POLL,), daemon=True).start()
        tell(f"Watch the run at {server.url}")
        try:
            yield
            server.linger()
        finally:
            server.shutdown()
