"""Start processes together, and end them without leaving a process, port or folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from fedmuon.core.files import regular
from fedmuon.experiments.engines.orphan_cleanup import GuardedFolder, kill, processes_of

SCRIPTS = sysconfig.get_path("scripts")


class Processes:
    """Running commands in one guarded folder, each with its own log file and home folder.

    A command may start child processes in other process groups. Child processes are found by the
    name of the folder in their environment.
    """

    def __init__(self, settings: dict[str, str]) -> None:
        self._guarded = GuardedFolder("fedmuon-")
        self.folder = self._guarded.path
        self.logs = self.folder / "logs"
        self._settings = settings
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("logs", "home", "tmp"):
            (self.folder / name).mkdir()

    def start(self, name: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a command of this Python environment, with its output in logs/name.log."""
        with open(self.logs / f"{name}.log", "ab", opener=regular) as log:
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
        """Return the FLWR_HOME of one process.

        Each process has its own, because processes that share an app would overwrite it.
        """
        return self.folder / "home" / name

    def log(self, name: str) -> str:
        """Return the output of a process so far."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def kill(self, *names: str) -> None:
        """Kill the processes with these names and all of their children at once."""
        for name in names:
            kill(processes_of(self.home(name)))

    def running(self, name: str, command: str) -> set[int]:
        """Return the ids of processes with this name whose command line contains `command`."""
        pids, line = set(), command.encode()
        for pid in processes_of(self.home(name)):
            with contextlib.suppress(OSError):
                if line in Path(f"/proc/{pid}/cmdline").read_bytes():
                    pids.add(pid)
        return pids

    def stop(self) -> None:
        """Kill all processes without waiting for clean exits, and remove the folder."""
        self._guarded.close()
        for process in self._running:
            if process.poll() is None:  # the guard finds no processes on a system without /proc
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def _environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([SCRIPTS, os.environ.get("PATH", "")])
        places = {"PATH": path, "FLWR_HOME": str(self.home(name)), "TMPDIR": f"{self.folder}/tmp"}
        return {**os.environ, **self._settings, **places}


def importable() -> str:
    """Return a PYTHONPATH with which another process imports the same modules in the same order.

    The current folder comes last.
    """
    places = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    places = [*filter(None, places), "."]
    return os.pathsep.join(dict.fromkeys(str(Path(place).absolute()) for place in places))


def free_ports(count: int) -> list[int]:
    """Return free ports on loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
