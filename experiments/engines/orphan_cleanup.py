"""A temporary folder, and a guard that kills its processes when the owner of the folder ends.

The environment of each process that the owner starts contains the name of the folder. A guard
process, in its own session, waits until the owner's end of a pipe is closed. Even `kill -9` of the
owner closes the pipe. Then the guard kills all processes of the folder and removes the folder. If
the guard was killed as well, the next creation of such a folder removes folders without an owner.

The guard runs this file as a program outside the Python environment. This file therefore uses only
the standard library.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OWNER = ".owner"  # a file that the owner keeps locked
PATIENCE = 8.0  # seconds; a killed process dies only when its current system call returns
PAUSE = 0.02


class GuardedFolder:
    """A folder that only its owner can read (0700). `close` kills all of its processes."""

    def __init__(self, prefix: str, place: str | None = None) -> None:
        clear_abandoned(Path(place or tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        # The file is locked before it gets its final name, so that another process never mistakes
        # a new folder for an abandoned one.
        new, flags = self.path / f"{OWNER}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        self._held = os.open(new, flags, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path / OWNER)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,  # so that signals to the owner's process group do not reach it
        )

    def close(self) -> None:
        """End the guard, kill all processes of the folder, and remove the folder."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._guard.communicate(timeout=PATIENCE)
        end(self.path)
        os.close(self._held)


def clear_abandoned(place: Path, prefix: str) -> None:
    """Remove this user's folders that have neither owner nor guard, and kill their processes."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
            end(folder)


def end(folder: Path) -> None:
    """Kill all processes of the folder until two scans find none, then remove the folder."""
    limit, quiet = time.monotonic() + PATIENCE, 0
    while quiet < 2 and time.monotonic() < limit:
        processes = processes_of(folder)
        kill(processes)
        quiet = 0 if processes else quiet + 1
        time.sleep(PAUSE if processes else 0)
    with contextlib.suppress(OSError):  # the owner file goes last, so that a later call finds it
        for entry in [path for path in folder.iterdir() if path.name != OWNER]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def kill(processes: set[int]) -> None:
    """Send SIGKILL to all processes, and ignore processes that have ended."""
    for number in processes:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)


def processes_of(folder: Path) -> set[int]:
    """Return the ids of the processes whose environment names the folder, and their descendants.

    Descendants may have overwritten their environment. Without /proc, the set is empty.
    """
    pattern = re.compile(rb"=" + re.escape(os.fsencode(folder)) + rb"(/|\0)")
    members, parents = set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(entry.name)
            line = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if line[0] in b"ZX":  # skip a zombie: it is dead, but its parent has not read its code
                continue
            parents[number] = int(line[1])
            if pattern.search((entry / "environ").read_bytes()):
                members.add(number)
    while children := {child for child, parent in parents.items() if parent in members} - members:
        members |= children
    return members - {os.getpid()}


if __name__ == "__main__":  # the guard waits until the owner's end of the pipe is closed
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
