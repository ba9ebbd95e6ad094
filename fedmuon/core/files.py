"""Files that are written completely or not at all, with checksums that detect damage.

Only regular files are opened. Opening a named pipe, for example, would wait for a writer that may
never come.

The file `SHA256SUMS` in a folder lists every file that no longer changes, in the format of the
command `sha256sum`. In a file that still grows, each line ends with its own checksum. The checksums
detect accidental damage, but not forgery.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import stat
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from fedmuon.core.errors import InputError

Record = dict[str, Any]
SUMS, PART = "SHA256SUMS", ".part"
SUITE_LOCK = "suite.lock"  # the first file in the folder of a suite, a sweep or several seeds
AFRESH = "start a new run in another folder with --out"
KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder",
         stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFLNK: "looping link"}  # fmt: skip
# Error numbers of a full disk, a full quota and a limit on file size -> advice.
FULL = {errno.ENOSPC: "delete files to make room",
        errno.EDQUOT: "delete files, because your quota is used up,",
        errno.EFBIG: "raise the maximum file size (ulimit -f)"}  # fmt: skip
STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # opened by the caller of this process


def finite(value: float | None) -> float | None:
    """Return the number, or None for NaN and infinity, because JSON cannot represent them."""
    return float(value) if value is not None and math.isfinite(value) else None


@contextlib.contextmanager
def mendable(path: Path, doing: str) -> Iterator[None]:
    """Convert an error of the operating system within this context to an InputError with advice."""
    try:
        yield
    except OSError as error:
        if doing == "read":  # another place, or more room, would not help
            remedy = f"({error.strerror}): check the path, and your permission to read the file"
        else:
            remedy = why_and_remedy(error, path)
        raise InputError(f"cannot {doing} {path} {remedy}") from None


def why_and_remedy(error: OSError, path: Path | None = None, elsewhere: bool = True) -> str:
    """Format an error of the operating system as the end of a message: `(REASON): WHAT TO DO`.

    Args:
        error: The error of the operating system.
        path: The file or folder that could not be written. If the disk is full, the message states
            how many bytes are free. If a file has the path of a folder, the message names the file.
        elsewhere: Whether the user can choose another file or folder. If so, the message advises to
            choose another place.
    """
    other = ", or choose another place" if elsewhere else ""
    if path is not None and error.errno in (errno.EEXIST, errno.ENOTDIR):
        blocking = [
            place for place in (path, *path.parents) if place.exists() and not place.is_dir()
        ]
        if blocking:
            return f"({blocking[0]} is a file, but a folder is needed): choose another path"
    if error.errno not in FULL:
        return f"({error.strerror}): choose another place that is writable and has enough room"
    free = ""
    with contextlib.suppress(OSError, StopIteration):
        if path is not None and error.errno != errno.EFBIG:
            folder = next(place for place in (path, *path.parents) if place.is_dir())
            free = f"; {folder} has {shutil.disk_usage(folder).free:,} bytes free"
    return (
        f"({error.strerror}{free}): {FULL[error.errno]} and run the command again, with --resume "
        f"if a run had begun{other}"
    )


def disk_full(path: Path | None = None) -> str:
    """Return the end of an error message about a full disk.

    The text is for files that the user cannot store elsewhere.
    """
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return why_and_remedy(error, path, elsewhere=False)


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its file descriptor.

    `open` accepts this function as the argument `opener`. A path to another kind of file, such as a
    named pipe, is rejected without opening it. If the function creates the file, only the file's
    owner can read the file.
    """
    if str(path).startswith(STREAMS):
        return os.open(path, flags)
    try:  # check the kind first, because opening a device may already have an effect
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        kind = stat.S_IFLNK
    if kind == stat.S_IFREG:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o600)
        kind = stat.S_IFMT(os.fstat(handle).st_mode)  # the file may have been replaced meanwhile
        if kind == stat.S_IFREG:
            return handle
        os.close(handle)
    raise InputError(
        f"{path} is a {KINDS.get(kind, 'special file')}, not a regular file: choose another "
        "path, or put a regular file in its place"
    )


def require_regular(path: Path) -> Path:
    """Return the path if it names a regular file.

    If the path names another kind of file, raise an error.

    Call this function before you pass the path to a library that opens the file.
    """
    os.close(regular(path))
    return path


def is_path(text: str) -> bool:
    """Return whether a text is a path, and not a name of the form `name` or `owner/name`."""
    path = Path(text).expanduser()
    return path.exists() or path.is_absolute() or text[0] == "." or text.count("/") > 1


def read_bytes(path: Path) -> bytes:
    """Read the content of a regular file."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_text(
    path: Path, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None
) -> str:
    """Read the text of a regular file. The options are those of Python's function `open`."""
    with open(path, encoding=encoding, errors=errors, newline=newline, opener=regular) as file:
        return file.read()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically.

    Another process that reads the file sees either the complete old content or the complete new
    content.
    """
    with mendable(path, "write"):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def require_writable(file: Path) -> None:
    """Raise an error if `write_bytes` cannot write this file, before its content is computed."""
    with mendable(file, "write"):
        is_folder, has_folder = file.is_dir(), file.parent.is_dir()
    if is_folder:
        raise InputError(f"{file} is a folder. Choose the path of a file.")
    if not has_folder:
        raise InputError(
            f"cannot write {file}, because the folder {file.parent} does not exist. Create the "
            "folder, or choose another place."
        )
    if not os.access(file.parent, os.W_OK):
        raise InputError(
            f"cannot write {file}, because the folder {file.parent} is not writable. Choose "
            "another place."
        )


def append(path: Path, lines: Iterable[str], durable: bool = False) -> None:
    """Append lines to a file. If the function creates the file, only the file's owner can read it.

    Args:
        path: The file.
        lines: The lines to append, each with a line end.
        durable: Whether to wait until the lines are on the disk.
    """
    with mendable(path, "write"), open(path, "a", encoding="utf-8", opener=regular) as log:
        log.write("".join(lines))
        if durable:
            log.flush()
            os.fsync(log.fileno())


def cache_folder() -> Path:
    """Return the folder for files that can be computed again. The folder may not exist yet.

    The folder is `$FEDMUON_CACHE`, or `fedmuon/` in the user's cache.

    Raises:
        InputError: If the user's cache folder is unknown.
    """
    if folder := os.environ.get("FEDMUON_CACHE"):
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() / "fedmuon"
    except RuntimeError:  # the home folder in the path is unknown
        raise InputError(
            f"the cache folder {home} cannot be used, because its home folder is unknown. Set the "
            "environment variable FEDMUON_CACHE to a folder for cached files."
        ) from None


def remove_drafts(folder: Path) -> None:
    """Remove the temporary files that `write_bytes` left in a folder when a process was killed.

    The caller must hold the lock of the folder.
    """
    with mendable(folder, "write to"):
        for draft in folder.glob(f".*{PART}"):
            draft.unlink(missing_ok=True)


def sealed(record: Record, home: str = "") -> str:
    """Format a record as one line of JSON with a checksum.

    The last key, `check`, is the CRC-32 of the text `home` and of the rest of the line. `home`
    names the owner of the line, such as a run. Lines of another owner are rejected by `unsealed`.
    """
    body = json.dumps(record)[:-1]
    return f'{body}, "check": "{crc(home + body):08x}"}}\n'


def unsealed(line: str, home: str = "") -> Record | None:
    """Return the record in a line written by `sealed`, or None if the line is damaged.

    A line with another `home` counts as damaged.
    """
    body, separator, _ = line.rpartition(', "check": "')
    if not separator or line != f'{body}{separator}{crc(home + body):08x}"}}\n':
        return None
    return json.loads(body + "}")


def crc(text: str, before: int = 0) -> int:
    """Return the CRC-32 of a text. To continue an earlier text, pass its CRC-32 as `before`."""
    return zlib.crc32(text.encode(), before)


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a text file, with their line ends.

    The result is empty if the file is missing. A last line without a line end is omitted. Bytes
    that are not UTF-8 become replacement characters, so the checksum of a line with such bytes is
    wrong.
    """
    if not path.exists():
        return []
    with mendable(path, "read"):
        content = read_bytes(path)
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    return [line + "\n" for line in text.split("\n")[:-1]]


def sums_of(folder: Path) -> dict[str, str]:
    """Return the checksums in a folder's SHA256SUMS, by file name.

    The result is empty if the file SHA256SUMS is missing.
    """
    entries = [line.rstrip("\n").partition("  ") for line in whole_lines(folder / SUMS)]
    return {name: digest for digest, _, name in entries}


def announce(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Add the checksums of files to SHA256SUMS. Call this function before you write the files.

    Therefore, no file of a run is ever without a checksum.
    """
    sums = sums_of(folder) | {name: digest(content) for name, content in contents.items()}
    lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
    write_bytes(folder / SUMS, "".join(lines).encode())


def digest(content: bytes) -> str:
    """Return the SHA-256 of the content in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def require_sound(folder: Path, names: Iterable[str]) -> None:
    """Raise an error if a file is missing or does not match its checksum in SHA256SUMS."""
    sums = sums_of(folder)
    for name in names:
        file = folder / name
        with mendable(file, "read"):
            actual = digest(read_bytes(file)) if file.exists() else ""
        if not actual or sums.get(name) != actual:
            if actual and name not in sums:
                raise InputError(
                    f"{file} has no checksum in {folder / SUMS}. The list of checksums is "
                    "damaged or incomplete, or an older version of fedmuon wrote the folder: "
                    f"{AFRESH}"
                )
            problem = f"does not match its checksum in {folder / SUMS}" if actual else "is missing"
            raise InputError(
                f"{file} {problem}, so the folder is damaged: restore the file from a copy, or "
                f"{AFRESH}"
            )


def several_runs(folder: Path) -> str:
    """Say what a folder of several runs contains, and how to resume them.

    Return an empty text if the folder is not one of a suite, a sweep or several seeds.
    """
    lock = folder / SUITE_LOCK
    if not lock.exists():
        return ""
    with contextlib.suppress(ValueError, InputError, OSError, RecursionError):  # damaged
        content = json.loads(read_text(lock))
        if isinstance(content, list) and content and content[0] == "seeds":
            return (
                "contains runs with several seeds. To resume them, pass the same config, options "
                "and --seeds as before, and --resume."
            )
        if isinstance(content, list) and content and content[0] == "sweep":
            return (
                "contains a sweep. To resume it, repeat the command or call that started it, and "
                "add --resume."
            )
    return (
        "contains several runs. To resume them, repeat the command that started them, such as "
        "`fedmuon suite`, and add --resume."
    )


# Temporary run folders, and copies of run folders


class Temporary:
    """A temporary folder that is removed when this object is deleted or Python ends.

    SIGTERM and SIGHUP remove the folder, too, unless the program has its own handlers. Only the
    process that created the folder removes the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="out-of-fedmuon-"))
        _TEMPORARY[self] = weakref.finalize(self, _remove, self.path, os.getpid())
        _on_end_signals()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Temporary":
        return self  # copies of a result share the folder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # unpickled copies do not remove the folder


_TEMPORARY: weakref.WeakKeyDictionary[Temporary, Callable[[], object]] = weakref.WeakKeyDictionary()


def _on_end_signals() -> None:
    """Remove temporary folders before a signal ends Python, which then calls no finalizers."""
    if threading.current_thread() is not threading.main_thread():
        return
    for end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(end) is signal.SIG_DFL:
            signal.signal(end, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for remove in [*_TEMPORARY.values()]:
        remove()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)


def copied(folder: Path, place: Path) -> None:
    """Copy a folder to a path that does not exist yet, completely or not at all."""
    if os.path.lexists(place):
        raise InputError(f"{place} already exists: choose another path, or remove it first")
    if place.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{place} lies inside the run folder {folder}: choose a path outside it")
    with mendable(place, "write"):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            (target := draft / "run").mkdir()  # with the permissions of a new folder
            for entry in folder.iterdir():
                (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, target / entry.name)
            target.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
