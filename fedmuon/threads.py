"""Work spread over the processor's cores in pieces.

How work is cut is decided by its size alone, and each piece is computed by one thread, so that a
result does not depend on how many threads there are; nor do torch's own threads wait for each
other, which on a busy machine costs a multiple of the work. Who cuts work takes part in it, and a
piece may be cut in turn.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Found = TypeVar("Found")
_here = threading.local()  # `threads`: how many the work that this thread takes part in may use


def spread(pieces: Sequence[Callable[[], Found]], apart: bool = True) -> list[Found]:
    """The results of the pieces, in their order, by as many threads as torch was to use; the first
    piece that fails ends it. What a thread is told of gradients a piece must say itself. Pieces
    that are not `apart` are done one after the other by all of torch's threads, or a device's."""
    if not apart:
        return [piece() for piece in pieces]
    with _section() as threads:
        job = _Job(pieces, threads)
        for _ in range(min(threads, len(pieces)) - 1):
            _offer(job)
        job.help()
        return job.results()


def parts(size: int, count: float) -> list[slice]:
    """0 to `size` in about so many even parts, at least one."""
    ends = [size * k // max(1, round(count)) for k in range(max(1, round(count)) + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class PerThread(Generic[Found]):
    """One of it for each thread that asks, as of modules, whose calls change them meanwhile."""

    def __init__(self, make: Callable[[], Found]) -> None:
        self._make, self._local = make, threading.local()

    def __call__(self) -> Found:
        """This thread's."""
        if not hasattr(self._local, "found"):
            self._local.found = self._make()
        return self._local.found

    def __reduce__(self) -> tuple[type, tuple[Callable[[], Found]]]:
        """Made anew where it arrives, and in a copy."""
        return PerThread, (self._make,)


class _Job:
    """Pieces that several threads take in turn."""

    def __init__(self, pieces: Sequence[Callable[[], Any]], threads: int) -> None:
        self.threads, self._pieces = threads, pieces
        self._found: list[Any] = [None] * len(pieces)
        self._errors: dict[int, BaseException] = {}
        self._taken, self._ended = 0, 0
        self._change = threading.Condition()

    def help(self) -> None:
        """Work on what nobody has taken yet."""
        while (number := self._take()) is not None:
            try:
                self._found[number] = self._pieces[number]()
            except BaseException as error:  # told by `results`, once nobody works any more
                self._errors[number] = error
            finally:
                with self._change:
                    self._ended += 1
                    self._change.notify_all()

    def _take(self) -> int | None:
        with self._change:
            if self._errors or self._taken == len(self._pieces):
                return None
            self._taken += 1
            return self._taken - 1

    def results(self) -> list[Any]:
        """All of them, or the error that would have come first; a wish to stop before any."""
        with self._change:
            self._change.wait_for(lambda: self._ended == self._taken)
        for _, error in sorted(self._errors.items(), key=_urgency):
            raise error
        return self._found


def _urgency(failed: tuple[int, BaseException]) -> tuple[bool, int]:
    number, error = failed
    return isinstance(error, Exception), number


_jobs: SimpleQueue[_Job] = SimpleQueue()
_lock, _begun, _helpers = threading.Lock(), [0, 1], [0]


@contextmanager
def _section() -> Iterator[int]:
    """torch works in one thread within; yields how many threads there are for pieces."""
    if hasattr(_here, "threads"):
        yield _here.threads
        return
    with _lock:
        _begun[0] += 1
        if _begun[0] == 1:
            _begun[1] = torch.get_num_threads()
        _here.threads = _begun[1]
        torch.set_num_threads(1)
    try:
        yield _here.threads
    finally:
        del _here.threads
        with _lock:
            _begun[0] -= 1
            if not _begun[0]:
                torch.set_num_threads(_begun[1])


def _offer(job: _Job) -> None:
    """Let one more thread take part, as soon as it has nothing else to do."""
    with _lock:
        wanted = job.threads - 1 - _helpers[0]
        _helpers[0] += max(0, wanted)
    for _ in range(wanted):
        ready = threading.Event()
        threading.Thread(target=_help_others, args=(ready,), daemon=True).start()
        ready.wait()  # what it says of torch's threads holds for all of some libraries
    _jobs.put(job)


def _help_others(ready: threading.Event) -> None:
    torch.set_num_threads(1)
    ready.set()
    while True:
        job = _jobs.get()
        _here.threads = job.threads
        job.help()
        del job  # with its results
