"""Locks of folders: one thread of one process writes to a folder at a time.

The operating system manages the lock (flock), so a lock ends when its process ends or is killed.
The lock file contains a description of the process that holds the lock. The file is removed when
the lock is released. The package `filelock` is not sufficient. It does not name the process that
holds the lock, and does not notice a replaced folder.
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
_handles: dict[tuple[Path, int], int] = {}  # (lock file, thread) -> open handle


@contextlib.contextmanager
def held(folder: Path, name: str = LOCK, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder within this context. A missing folder is created.

    A thread that holds the lock can take it again. If another thread or process holds the lock for
    longer than `patience` seconds, an error names that process.
    """
    with mendable(folder, "create"):
        file = Path(os.path.realpath(folder), name)  # `resolve` fails for circular links
        created = not folder.exists()
    if (key := (file, threading.get_ident())) in _handles:
        yield
        return
    end = time.monotonic() + patience
    try:
        with mendable(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        while True:
            with whole():  # after a signal in this block, the lock would never be released
                if (handle := _try(file)) is not None:
                    _handles[key] = handle
                    break
            if time.monotonic() > end:
                raise InputError(
                    f"{file.parent} is in use by {_holder(file)}: wait until this process ends, "
                    "or choose another folder with --out"
                )
            time.sleep(PAUSE)
        words = [Path(sys.argv[0]).name, *sys.argv[1:2]]  # no options, which may contain secrets
        command = shlex.join(word for word in words if not word.startswith("-"))
        with mendable(file, "lock"):
            holder = f"process {os.getpid()} on {socket.gethostname()} ({command})"
            os.pwrite(handle, holder.encode(), 0)
        yield
    finally:
        try:
            _give_back(key, created)
        finally:  # a signal may have interrupted the first call
            _give_back(key, created)


def _give_back(key: tuple[Path, int], created: bool) -> None:
    file = key[0]
    with whole():
        if (handle := _handles.pop(key, None)) is not None:
            if _is_still(file, handle):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            os.close(handle)
        if created:
            with contextlib.suppress(OSError):  # the folder is not empty
                file.parent.rmdir()


def _try(file: Path) -> int | None:
    """Return an open file handle with the lock, or None if another process holds the lock."""
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
    """Return whether the path still leads to the opened lock file.

    The previous holder may have removed the lock file in the meantime.
    """
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def require_place(folder: Path) -> None:
    """Raise an error if a locked folder was moved or replaced.

    The lock does not protect a new folder at the same path.
    """
    place = Path(os.path.realpath(folder))
    for (file, _), handle in list(_handles.items()):
        if file.parent == place and not _is_still(file, handle):
            raise InputError(
                f"{folder} was moved or replaced during the run. Move the folder back to this "
                "path, and continue the run with --resume."
            )


def _holder(file: Path) -> str:
    try:
        return read_text(file, errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def writer(folder: Path) -> str:
    """Describe the process that is writing to the folder.

    Return an empty text if no process is writing.

    A process on another machine is assumed to be alive.
    """
    holder = _holder(folder / LOCK) if (folder / LOCK).exists() else ""
    match = re.match(r"process (\d+) on (.+) \(", holder)
    if match and match[2] == socket.gethostname():
        try:
            os.kill(int(match[1]), 0)
        except PermissionError:  # the process is alive and belongs to another user
            pass
        except (ProcessLookupError, OverflowError):
            return ""
    return holder
