"""Who writes to a folder: one thread of one process at a time, for as long as it lives.

The lock is the operating system's (flock), so it ends with its holder, however that ends. The file
that carries it says who holds it, and is gone when it was given back. The package `filelock` is no
substitute: it does not name the holder, and does not notice that the locked folder was replaced.
"""

import contextlib
import fcntl
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedmuon.core.errors import InputError
from fedmuon.core.files import mendable, read_text, regular
from fedmuon.core.signals import whole

LOCK, DRIVER = ".lock", ".driver.lock"
PAUSE = 0.1
_handles: dict[tuple[Path, int], int] = {}  # by lock and thread


@contextlib.contextmanager
def held(folder: Path, name: str = LOCK, patience: float = 0.0) -> Iterator[None]:
    """Be the only one that writes to the folder, which is made if need be.

    A thread may take its own lock again. Another holder is waited for at most `patience` seconds;
    then the error names it.
    """
    with mendable(folder, "create"):
        file = Path(os.path.realpath(folder), name)  # `resolve` refuses links in a circle
        made = not folder.exists()
    if (mine := (file, threading.get_ident())) in _handles:
        yield
        return
    end = time.monotonic() + patience
    try:
        with mendable(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        while True:
            with whole():  # a signal in its midst would leave a lock that nobody gives back
                if (handle := _try(file)) is not None:
                    _handles[mine] = handle
                    break
            if time.monotonic() > end:
                raise InputError(
                    f"{file.parent} is in use by {_holder(file)}: wait until it ends, or choose "
                    "another folder with --out"
                )
            time.sleep(PAUSE)
        words = [Path(sys.argv[0]).name, *sys.argv[1:2]]  # without options, which may be secrets
        command = shlex.join(word for word in words if not word.startswith("-"))
        with mendable(file, "lock"):
            said = f"process {os.getpid()} on {socket.gethostname()} ({command})"
            os.pwrite(handle, said.encode(), 0)
        yield
    finally:
        try:
            _give_back(mine, made)
        finally:  # a signal may have come before the first was begun
            _give_back(mine, made)


def _give_back(mine: tuple[Path, int], made: bool) -> None:
    file = mine[0]
    with whole():
        if (handle := _handles.pop(mine, None)) is not None:
            if _is_still(file, handle):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            os.close(handle)
        if made:
            with contextlib.suppress(OSError):  # it holds something
                file.parent.rmdir()


def _try(file: Path) -> int | None:
    """A handle that holds the lock, or None while somebody else does."""
    with mendable(file, "lock"):
        handle = regular(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(file, handle):
                os.ftruncate(handle, 0)
                return handle
        except BlockingIOError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return None


def _is_still(file: Path, handle: int) -> bool:
    """Whether the file is the one that was opened: its holder may have removed it since."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def require_place(folder: Path) -> None:
    """Reject a locked folder that was moved or replaced: the lock does not protect what is there
    now."""
    place = Path(os.path.realpath(folder))
    for (file, _), handle in list(_handles.items()):
        if file.parent == place and not _is_still(file, handle):
            raise InputError(
                f"{folder} was moved or replaced during the run: put it back, and continue with "
                "--resume"
            )


def _holder(file: Path) -> str:
    """Who holds the lock, in words."""
    try:
        return read_text(file, errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def writer(folder: Path) -> str:
    """Who writes to the folder now, in words; empty if nobody does. A process on another machine
    counts as alive."""
    said = _holder(folder / LOCK) if (folder / LOCK).exists() else ""
    found = re.match(r"process (\d+) on (.+) \(", said)
    if found and found[2] == socket.gethostname():
        try:
            os.kill(int(found[1]), 0)
        except PermissionError:  # it lives, and is somebody else's
            pass
        except (ProcessLookupError, OverflowError):
            return ""
    return said
