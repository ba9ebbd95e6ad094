"""Who may look at the page, and what is answered: by Python's own HTTP server, on loopback.

Whoever asks must reach 127.0.0.1, know the path, of 128 random bits, and name this machine as the
Host: a page of another site, whose name was made to mean 127.0.0.1, names that site.
"""

import contextlib
import hmac
import json
import math
import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from fedmuon.core.errors import InputError
from fedmuon.experiments.inspect.watch_runs import about, rounds_since, runs_of

PAGE = Path(__file__).parent / "assets"
FILES = {"": "html", "page.css": "css", "page.js": "javascript"}
HERE = ("127.0.0.1", "localhost")  # with any port: one that ssh forwards is another
MOST = 50  # runs that are shown
LOOKED_AT, PATIENCE = 3.0, 4.0  # seconds since a page last asked, and that it is waited for
POLL = 0.1  # seconds within which the server ends
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # it would have the path
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; "
    "style-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
Answer = tuple[int, str, bytes]  # status, kind, content
NOTHING: Answer = (404, "text/plain", b"nothing is here")


class Server(ThreadingHTTPServer):
    """Answers for the runs that `folder` is or holds."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self._secret = folder, secrets.token_urlsafe(16)
        self._looks, self._last = 0, -math.inf  # how often a page asked, and when
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        """Without the question to a name server that the class above has."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/{self._secret}/"

    def answer(self, hosts: list[str], target: str) -> Answer:
        """What there is to say to a request for `target` of these hosts."""
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
        given = {key: values[0] for key, values in parse_qs(asked.query).items()}
        found = {"runs": self._runs, "rounds": self._rounds}.get(name, lambda given: None)(given)
        if found is None:
            return NOTHING
        return 200, "application/json", json.dumps(found, allow_nan=False).encode()

    def _runs(self, given: dict[str, str]) -> dict[str, Any]:
        self._looks, self._last = self._looks + 1, time.monotonic()
        places = runs_of(self.folder)
        shown = [about(name, one) for name, one in [*places.items()][:MOST]]
        return {"folder": str(self.folder), "runs": shown, "all": len(places)}

    def _rounds(self, given: dict[str, str]) -> dict[str, Any] | None:
        run = runs_of(self.folder).get(given.get("run", ""))
        return run and rounds_since(run, given.get("from", ""))

    def linger(self) -> None:
        """Wait, for a page that is looked at, until it has asked for the end and drawn it."""
        now, enough = time.monotonic(), self._looks + 2
        looked_at = self._last > now - LOOKED_AT
        while looked_at and self._looks < enough and time.monotonic() < now + PATIENCE:
            time.sleep(POLL / 2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed amid an answer is no news."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds that a request may take to come in

    def do_GET(self) -> None:
        """Answer, and say of what cannot be read why."""
        try:
            told = cast(Server, self.server).answer(self.headers.get_all("Host", []), self.path)
        except (InputError, OSError) as error:
            told = 500, "text/plain", str(error).encode()
        status, kind, content = told
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is the run's."""


@contextlib.contextmanager
def watched(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a run while this lasts, from a thread; `tell` is told where, or why not:
    that no page can be served is no reason not to run."""
    try:
        server = Server(folder)
    except OSError as error:
        tell(f"no page can be served on 127.0.0.1 ({error.strerror}); the run goes on")
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
