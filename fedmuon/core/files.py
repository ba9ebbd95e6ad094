"""Files that are written whole or not at all, with checksums that show damage.

Only regular files are opened: a named pipe would wait for a writer that may never come.

`SHA256SUMS` in a folder, as the command `sha256sum` writes it, lists every file that no longer
changes. Every line of a file that grows ends in a checksum of its own. They find accidents, not
forgeries.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedmuon.core.errors import InputError

Record = dict[str, Any]
SUMS, PART = "SHA256SUMS", ".part"
AFRESH = "start a new run in another folder with --out"
KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder",
         stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFLNK: "looping link"}  # fmt: skip
# Errors of a full disk, a full quota and a limit on files -> what to do.
FULL = {errno.ENOSPC: "free space there", errno.EDQUOT: "free some of your quota",
        errno.EFBIG: "raise the maximum file size (ulimit -f)"}  # fmt: skip
STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # the caller of this process opened them


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite, because JSON has no infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


@contextlib.contextmanager
def mendable(path: Path, doing: str) -> Iterator[None]:
    """Turn an error of the operating system into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot {doing} {path} {why_and_remedy(error, path)}") from None


def why_and_remedy(error: OSError, path: Path | None = None, elsewhere: bool = True) -> str:
    """The end of a message about an error of the operating system: `(WHY): WHAT TO DO`.

    Args:
        error: The error.
        path: A place on the disk. Where a disk is full, the message has the free bytes of its
            folder.
        elsewhere: Whether the user can choose another place.
    """
    other = ", or choose another place" if elsewhere else ""
    if error.errno not in FULL:
        return f"({error.strerror}): choose another place, which is writable and has room"
    free = ""
    with contextlib.suppress(OSError, StopIteration):
        if path is not None and error.errno != errno.EFBIG:
            folder = next(one for one in (path, *path.parents) if one.is_dir())
            free = f"; {folder} has {shutil.disk_usage(folder).free:,} bytes free"
    return (
        f"({error.strerror}{free}): {FULL[error.errno]} and run the command again, with --resume "
        f"if it began a run{other}"
    )


def disk_full(path: Path | None = None) -> str:
    """The end of a message about a full disk where only its owner chooses the place."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return why_and_remedy(error, path, elsewhere=False)


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, as the `opener` of `open` or by itself.

    Anything else is rejected without waiting for it, and named. Only its owner may read a new file.
    """
    if str(path).startswith(STREAMS):
        return os.open(path, flags)
    try:  # first: opening a device may already do something
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        kind = stat.S_IFLNK
    if kind == stat.S_IFREG:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o600)
        kind = stat.S_IFMT(os.fstat(handle).st_mode)  # something else may stand there since
        if kind == stat.S_IFREG:
            return handle
        os.close(handle)
    raise InputError(
        f"{path} is a {KINDS.get(kind, 'special file')}, not a regular file: give another path, "
        "or put a regular file there"
    )


def require_regular(path: Path) -> Path:
    """The path if it is a regular file, for libraries that open files themselves."""
    os.close(regular(path))
    return path


def read_bytes(path: Path) -> bytes:
    """The content of a regular file."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_text(
    path: Path, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None
) -> str:
    """The text of a regular file; `newline` is that of `open`."""
    with open(path, encoding=encoding, errors=errors, newline=newline, opener=regular) as file:
        return file.read()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file atomically: a reader sees the old bytes or the new ones, never a part."""
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


def append(path: Path, lines: Iterable[str], durable: bool = False) -> None:
    """Add lines at the end of a file, which only its owner may read if it is new."""
    with mendable(path, "write"), open(path, "a", encoding="utf-8", opener=regular) as log:
        log.write("".join(lines))
        if durable:
            log.flush()
            os.fsync(log.fileno())


def remove_drafts(folder: Path) -> None:
    """Remove the leftovers of killed calls of `write_bytes`. Call it only while holding the
    folder's lock."""
    with mendable(folder, "write to"):
        for draft in folder.glob(f".*{PART}"):
            draft.unlink(missing_ok=True)


def sealed(record: Record, home: str = "") -> str:
    """A record as one line of JSON. Its last key, `check`, is the CRC-32 of its `home` and of all
    before it, so that a line of another home does not pass."""
    body = json.dumps(record)[:-1]
    return f'{body}, "check": "{crc(home + body):08x}"}}\n'


def unsealed(line: str, home: str = "") -> Record | None:
    """The record of a sealed line; None if it is damaged or of another home."""
    body, found, _ = line.rpartition(', "check": "')
    if not found or line != f'{body}{found}{crc(home + body):08x}"}}\n':
        return None
    return json.loads(body + "}")


def crc(text: str, before: int = 0) -> int:
    """The CRC-32 of a text after another one whose CRC-32 is `before`."""
    return zlib.crc32(text.encode(), before)


def whole_lines(path: Path) -> list[str]:
    """The lines of a text file, each with its end; none where there is no file.

    A last line without its end is left out. Bytes that are not UTF-8 become characters that fail
    every check.
    """
    if not path.exists():
        return []
    with mendable(path, "read"):
        content = read_bytes(path)
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    return [line + "\n" for line in text.split("\n")[:-1]]


def sums_of(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 from the folder's SHA256SUMS; empty without that file."""
    entries = [line.rstrip("\n").partition("  ") for line in whole_lines(folder / SUMS)]
    return {name: digest for digest, _, name in entries}


def announce(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Add the sums of files that are about to be written to SHA256SUMS.

    Sums are written first, so that every file of ours has one.
    """
    sums = sums_of(folder) | {name: digest(content) for name, content in contents.items()}
    lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
    write_bytes(folder / SUMS, "".join(lines).encode())


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def require_sound(folder: Path, names: Iterable[str]) -> None:
    """Reject files that are missing or disagree with SHA256SUMS."""
    sums = sums_of(folder)
    for name in names:
        file = folder / name
        with mendable(file, "read"):
            held = digest(read_bytes(file)) if file.exists() else ""
        if not held or sums.get(name) != held:
            if held and name not in sums:
                raise InputError(
                    f"{file} has no checksum in {folder / SUMS}. That file is damaged or "
                    f"incomplete, or an older version wrote the folder: {AFRESH}"
                )
            what = "is not as" if held else "is missing or not as"
            raise InputError(
                f"{file} {what} {folder / SUMS} says, so the folder is damaged: {AFRESH}"
            )


# Temporary run folders, which live as long as a result in them, and copies that stay


class Temporary:
    """A new folder, removed with this object or when Python ends, by the process that made it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="out-of-fedmuon-"))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Temporary":
        return self  # copies of a result lie in the same folder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # unpickled copies do not remove the folder


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)


def copied(folder: Path, place: Path) -> None:
    """Copy a folder to a new place, whole or not at all."""
    if os.path.lexists(place):
        raise InputError(f"{place} already exists: choose another path, or remove it first")
    if place.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{place} lies inside the run folder {folder}: choose a path outside it")
    with mendable(place, "write"):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            (whole := draft / "run").mkdir()  # with the permissions of a new folder
            for one in folder.iterdir():
                (shutil.copytree if one.is_dir() else shutil.copy2)(one, whole / one.name)
            whole.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
