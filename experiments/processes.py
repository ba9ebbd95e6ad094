"""Processes that are started together and leave nothing behind: no process, port or folder."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE = 10.0  # seconds that a process may take to end by itself
SCRIPTS = sysconfig.get_path("scripts")


class Processes:
    """Commands with a log file and a home each, below one temporary folder.

    A child may start children of its own, in other process groups: they are known by the folder,
    which their environment names.
    """

    def __init__(self, settings: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedmuon-"))
        self.logs = self.folder / "logs"
        self._settings = settings
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("logs", "home", "tmp"):
            (self.folder / name).mkdir()

    def start(self, name: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a command of this environment; what it says goes to logs/name.log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [Path(SCRIPTS, command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment(name),
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def home(self, name: str) -> Path:
        """The FLWR_HOME of one process: two that unpacked an app into one would collide."""
        return self.folder / "home" / name

    def log(self, name: str) -> str:
        """What a process has said so far."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def kill(self, process: subprocess.Popen[bytes], name: str) -> None:
        """End a process and all that it started, at once and without a word."""
        for number in {process.pid, *descendants(self.home(name))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all, the first one last because the others talk to it; then remove the folder."""
        _end(self._running[1:])
        _end(self._running[:1])
        self._running.clear()
        for number in descendants(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([SCRIPTS, os.environ.get("PATH", "")])
        places = {"PATH": path, "FLWR_HOME": str(self.home(name)), "TMPDIR": f"{self.folder}/tmp"}
        return {**os.environ, **self._settings, **places}


def descendants(folder: Path) -> list[int]:
    """Numbers of the processes whose environment names the folder; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if re.search(rb"=" + re.escape(str(folder).encode()) + rb"(/|\0)", entry.read_bytes()):
                found.append(int(entry.parent.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the program as Ctrl-C does, so that `finally` blocks run."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(end, signal.default_int_handler) for end in ends]
    try:
        yield
    finally:
        for end, handler in zip(ends, before, strict=True):
            signal.signal(end, handler)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, and kill the groups of those that do not."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + PATIENCE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.0))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
