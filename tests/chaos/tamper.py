"""What is done to a process from within: writes that fail, files that may not grow, false clocks.

`python -m tests.chaos.tamper ORDER` is the command in a process of its own, with all that done.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")

FREEING = ("os.remove", "os.rmdir")  # what a full disk lets happen
DRAFT = re.compile(r"\.\w{8}\.part$")
ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = tuple(f"{ROOT / room}{os.sep}" for room in ("fedmuon", "experiments", "analysis"))

PIPES: dict[int, int] = {}  # stream -> the process that carries it on


def command(arguments: Sequence[str]) -> int:
    from fedmuon.experiments.cli import main

    try:
        main(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def child(order: Mapping[str, Any], tell: int) -> NoReturn:
    code = 1
    try:
        _settle(Path(order["folder"]))
        os.chdir(order["at"])
        tampered(order["tamper"])
        os.write(tell, b"!")
        os.close(tell)
        code = command(order["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        _say_all()
        os._exit(code)


def _settle(folder: Path) -> None:
    """A session and files of its own for what it says; Ctrl-C ends it as it would any program."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream, path in ((0, os.devnull), (1, folder / "out"), (2, folder / "err")):
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, stream)
        os.close(handle)


def _piped() -> None:
    """What is said goes through another process: limits on files shall not silence it."""
    for stream in (1, 2):
        read, write = os.pipe()
        if not (number := os.fork()):
            os.close(write)
            while said := os.read(read, 1 << 16):
                os.write(stream, said)
            os._exit(0)
        os.dup2(write, stream)
        os.close(read)
        os.close(write)
        PIPES[stream] = number


def _say_all() -> None:
    """Until what was said is in its files."""
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    for stream in PIPES:  # all of them first: the later one's process holds the earlier one's end
        os.close(stream)
    for number in PIPES.values():
        os.waitpid(number, 0)


def tampered(what: Mapping[str, Any]) -> None:
    if "fail" in what:
        _failing(what["below"], what["fail"], what["code"], what["again"])
    if "kill" in what:
        _killing(what["below"], what["kill"])
    if "stack" in what:
        _small_stacks(what["stack"])
    if "listed" in what:
        _listing(what["below"], what["listed"])
    if "longest" in what:
        _piped()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (what["longest"],) * 2)
    if "clock" in what:
        _false_clock(**what["clock"])


def _failing(below: str, number: int, code: str, again: bool) -> None:
    """The operation of that number (from 1) on files below the folder fails; all later ones too,
    if `again`. A full disk lets files be removed; a flush to the disk counts as an operation."""
    count, refused = itertools.count(1), getattr(errno, code)

    def operate(what: str, path: str) -> None:
        if code == "ENOSPC" and what in FREEING:
            return
        now = next(count)
        if now == number or (again and now > number):
            raise OSError(refused, os.strerror(refused), path)

    _before_each(below, operate)


def _killing(below: str, number: int) -> None:
    """The process kills itself before the operation of that number (from 1) below the folder."""
    count = itertools.count(1)

    def operate(what: str, path: str) -> None:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _before_each(below, operate)


def _small_stacks(most: int) -> None:
    """At most so many neighbours are trained together, so that a small census has many stacks."""
    from fedmuon.experiments.stability import neighbours

    neighbours.MOST = most


def _listing(below: str, listed: str) -> None:
    """Write into the file `listed`, a line each: what those operations are, whether they make
    room, and their kind: the file's suffix, and the lines of ours that want it."""
    told = os.open(listed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)

    def operate(what: str, path: str) -> None:
        name = Path(DRAFT.sub("", path)).name
        kind = [what, Path(name.lstrip(".")).suffix or name, *_asked_by()]
        os.write(told, (json.dumps([what in FREEING, kind]) + "\n").encode())

    _before_each(below, operate)


def _asked_by() -> list[str]:
    frame, found = sys._getframe(1), []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOMS):
            found.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _before_each(below: str, operate: Callable[[str, str], None]) -> None:
    """Call it with the name and the path of every operation that changes files below a folder."""

    def change(what: str, path: str) -> None:
        if path.startswith(below):
            operate(what, path)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(given[2], int) and given[2] & CHANGES
        if opened or event in MOVES:
            change(event, _path(given[0]))

    flush = os.fsync

    def fsync(handle: int) -> None:
        change("os.fsync", str(Path(f"/proc/self/fd/{handle}").readlink()))
        flush(handle)

    os.fsync = fsync
    sys.addaudithook(hook)


def _path(given: Any) -> str:
    if isinstance(given, int):
        return str(Path(f"/proc/self/fd/{given}").readlink()) if given >= 0 else ""
    return os.fsdecode(given) if isinstance(given, str | bytes | os.PathLike) else ""


def _false_clock(wall: Sequence[float], steady: Sequence[float]) -> None:
    """The clock on the wall, and those that should only run on, are wrong by these seconds, one
    after the other, each time that they are read."""
    for names, leaps in ((("time",), wall), (("monotonic", "perf_counter"), steady)):
        for name in names:
            setattr(time, name, _leaping(getattr(time, name), itertools.cycle(leaps)))


def _leaping(clock: Callable[[], float], leaps: Iterator[float]) -> Callable[[], float]:
    return lambda: clock() + next(leaps)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    tampered(order["tamper"])
    code = command(order["arguments"])
    _say_all()
    os._exit(code)
