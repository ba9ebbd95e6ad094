"""A folder whose processes end with its owner, even if that is killed.

Processes that the owner starts name the folder in their environment. A guard, a process in a
session of its own, waits until the owner's end of a pipe is closed (kill -9 closes it, too). Then
it kills all processes of the folder and removes it. If the guard was killed as well, the next call
that makes a folder removes those without an owner.

The guard runs this file as a program, without the packages of the environment, hence only the
standard library.
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

OWNER = ".owner"  # a file that the owner holds locked
PATIENCE = 8.0  # seconds; a process in a system call dies only when that returns
PAUSE = 0.02


class GuardedFolder:
    """A folder that only its owner can read (0700). `close` ends its processes."""

    def __init__(self, prefix: str, place: str | None = None) -> None:
        clear_abandoned(Path(place or tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        # The file is locked before it appears, so that a new folder is never taken for an abandoned
        # one.
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
            start_new_session=True,  # signals to the owner's group do not reach it
        )

    def close(self) -> None:
        """Kill all processes of the folder and remove it, by the guard or here."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._guard.communicate(timeout=PATIENCE)
        end(self.path)
        os.close(self._held)


def clear_abandoned(place: Path, prefix: str) -> None:
    """End the folders of this user whose owner and guard are both dead."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            held = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(held)
            end(folder)


def end(folder: Path) -> None:
    """Kill all that belongs to the folder, until a second look finds nothing more; remove it."""
    limit, quiet = time.monotonic() + PATIENCE, 0
    while quiet < 2 and time.monotonic() < limit:
        found = processes_of(folder)
        kill(found)
        quiet = 0 if found else quiet + 1
        time.sleep(PAUSE if found else 0)
    with contextlib.suppress(OSError):  # its mark goes last, so that a half-removed folder is found
        for held in [one for one in folder.iterdir() if one.name != OWNER]:
            if held.is_dir() and not held.is_symlink():
                shutil.rmtree(held, ignore_errors=True)
            else:
                held.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def kill(processes: set[int]) -> None:
    """Send SIGKILL; ignore those that are gone."""
    for number in processes:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)


def processes_of(folder: Path) -> set[int]:
    """Numbers of the processes whose environment names the folder, and of their descendants, which
    may have overwritten theirs; none where there is no /proc."""
    named = re.compile(rb"=" + re.escape(os.fsencode(folder)) + rb"(/|\0)")
    members, parents = set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(entry.name)
            line = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if line[0] in b"ZX":  # a zombie: dead, but not waited for
                continue
            parents[number] = int(line[1])
            if named.search((entry / "environ").read_bytes()):
                members.add(number)
    while more := {one for one, parent in parents.items() if parent in members} - members:
        members |= more
    return members - {os.getpid()}


if __name__ == "__main__":  # the guard: wait until the owner's end of the pipe is closed
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]))
