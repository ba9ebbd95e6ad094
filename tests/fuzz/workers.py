"""Forked workers: what crashes, hangs or asks for the moon ends a child, and the rest goes on."""

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.calls import bar
from tests.fuzz.outcome import Case, Outcome, other

MEMORY = 2 << 30  # bytes that a case may ask for beyond what is loaded
GRACE = 100.0  # seconds after which a child that ignores its clock is killed


@dataclass
class Child:
    """A process that performs some cases in turn and writes each outcome as a line."""

    pid: int
    pipe: int
    left: list[int]  # numbers of the cases that it has not told of
    heard: float = field(default_factory=time.monotonic)
    text: bytes = b""


def perform_all(
    cases: Sequence[Case], folder: Path, workers: int, end: float = float("inf")
) -> list[Outcome | None]:
    found: list[Outcome | None] = [None] * len(cases)
    shares = [list(range(worker, len(cases), workers)) for worker in range(workers)]
    children = [_fork(cases, share, folder, end) for share in shares if share]
    while children:
        ready, _, _ = select.select([one.pipe for one in children], [], [], 0.5)
        for child in list(children):
            if child.pipe in ready and _hear(child, found):
                continue
            late = time.monotonic() - child.heard > GRACE
            if child.pipe in ready or late or time.monotonic() > end + GRACE:
                children.remove(child)
                children += _after(child, cases, folder, found, end)
    return found


def _hear(child: Child, found: list[Outcome | None]) -> bool:
    content = os.read(child.pipe, 1 << 16)
    *lines, child.text = (child.text + content).split(b"\n")
    for line in lines:
        number, end, why = json.loads(line)
        found[number] = Outcome(end, why)
        child.left.remove(number)
        child.heard = time.monotonic()
    return bool(content)


def _after(
    child: Child, cases: Sequence[Case], folder: Path, found: list[Outcome | None], end: float
) -> list[Child]:
    """Bury a child; the case that it died of is a finding, and another child does the rest."""
    os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    if not child.left or time.monotonic() > end:
        return []
    killed = os.WIFSIGNALED(status) and time.monotonic() - child.heard > GRACE
    found[child.left[0]] = other("it hangs" if killed else f"the process died, status {status}")
    rest = child.left[1:]
    return [_fork(cases, rest, folder, end)] if rest else []


def _fork(cases: Sequence[Case], share: list[int], folder: Path, end: float) -> Child:
    """A child for these cases, as far as it gets by `end`."""
    reader, writer = os.pipe()

    def work() -> None:
        os.close(reader)
        _limit()
        for number in share:
            if time.monotonic() > end:
                return
            outcome = alone(cases[number], folder / f"case-{os.getpid()}-{number}")
            line = json.dumps([number, outcome.end, outcome.why]) + "\n"
            os.write(writer, line.encode())

    pid = _begin(work)
    os.close(writer)
    return Child(pid, reader, list(share))


def apart(work: Callable[[], None]) -> None:
    """Do it in a child, so that nothing of it stays in this process."""
    if os.waitpid(_begin(work), 0)[1]:
        raise RuntimeError("the child failed, and said why on stderr")


def _begin(work: Callable[[], None]) -> int:
    """The id of a child that does it, barred from processes and networks."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch keeps threads, which a child does without
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        bar()
        work()
        status = 0
    except BaseException as error:
        os.write(2, f"worker: {error!r}\n".encode())
    finally:
        os._exit(status)


def alone(case: Case, place: Path) -> Outcome:
    """The case in a new folder, which is its home and is gone afterwards."""
    from tests.fuzz.campaign import perform

    place.mkdir()
    os.environ.update(HOME=str(place), FEDMUON_CACHE=str(place / ".cache"), COLUMNS="200")
    try:
        return perform(case, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _limit() -> None:
    """No more memory than the cases may need; what the program prints elsewhere goes nowhere."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
