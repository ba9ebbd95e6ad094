"""Work on several threads, with results that do not depend on the number of threads.

Work is divided into pieces, and each piece runs in one thread. The pieces depend only on the size
of the work. Within a piece, torch uses only one thread. Otherwise, torch's threads would wait for
each other, and work would be several times slower on a busy machine. The thread that divides the
work also computes pieces. A piece can itself be divided into pieces.
"""

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

Found = TypeVar("Found")
LEAST = sys.float_info.min  # half of this number is subnormal
LEAVE = 20.0  # seconds to wait for running pieces when the program ends
_here = threading.local()  # its attribute `crew` describes the threads that help this thread


def spread(pieces: Sequence[Callable[[], Found]], apart: bool = True) -> list[Found]:
    """Call all functions in `pieces`, using as many threads as torch is set to use.

    Args:
        pieces: Functions without arguments. They run with the torch settings of this thread (see
            `_Job`). However, each function must itself set whether torch records gradients.
        apart: If false, the functions are called one after the other, and each can use all threads
            of torch or a GPU.

    Returns:
        The results, in the order of the functions. If a function raises an error, no further
        function starts, and this error is raised.
    """
    if not apart:
        return [piece() for piece in pieces]
    with _crew() as crew:
        if len(pieces) == 1:
            return [pieces[0]()]
        job = _Job(pieces, crew)
        try:
            for _ in range(min(crew.size, len(pieces)) - 1):
                _offer(job)
            job.help()
            return job.results()
        finally:
            job.close()


def parts(size: int, count: float) -> list[slice]:
    """Divide the range from 0 to `size` into about `count` slices of nearly equal length.

    There is at least one slice. No slice is empty if `size` is positive.
    """
    number = max(1, min(size, round(count)))
    ends = [size * k // number for k in range(number + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class Turns:
    """A fixed order in which several threads add their results, as a single thread would.

    Each piece of work has a number, and adds its results after all pieces with smaller numbers. A
    piece never waits for a piece with a larger number, so no deadlock occurs.
    """

    def __init__(self) -> None:
        self._ended, self._failed = 0, sys.maxsize
        self._change = threading.Condition()

    @contextmanager
    def of(self, number: int) -> Iterator[Callable[[], None]]:
        """Yield a function that waits until the piece with this number may add its result.

        The next piece can add its result when this context ends.
        """
        turn = partial(self._wait, number)
        try:
            yield turn
            turn()
        except BaseException:
            self._failed = min(self._failed, number)
            raise
        finally:
            with self._change:
                self._ended += self._ended == number
                self._change.notify_all()

    def _wait(self, number: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._ended == number or self._failed < number)
        if self._failed < number:  # `spread` raises its error
            raise RuntimeError("a piece before this one failed")


class PerThread(Generic[Found]):
    """A separate object for each thread, such as a module that changes when it is called."""

    def __init__(self, make: Callable[[], Found]) -> None:
        self._make, self._local = make, threading.local()

    def __call__(self) -> Found:
        """Return the object of the calling thread, which is created at the first call."""
        if not hasattr(self._local, "found"):
            self._local.found = self._make()
        return self._local.found

    def __reduce__(self) -> tuple[type, tuple[Callable[[], Found]]]:
        """Pickle only the function that creates objects, so that copies create new objects."""
        return PerThread, (self._make,)


@dataclass(frozen=True)
class _Crew:
    """The helper threads of one thread.

    If a piece is divided again, the same helper threads compute the new pieces.
    """

    size: int
    others: threading.Semaphore


@contextmanager
def one_thread() -> Iterator[int]:
    """Let torch use one thread within this context, and yield its previous number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield before
    finally:
        torch.set_num_threads(before)


@contextmanager
def _crew() -> Iterator[_Crew]:
    """Yield the threads that help the calling thread. In each thread, torch uses one thread."""
    if hasattr(_here, "crew"):
        yield _here.crew
        return
    try:
        with one_thread() as before:
            _here.crew = _Crew(before, threading.Semaphore(before - 1))
            yield _here.crew
    finally:
        vars(_here).pop("crew", None)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable torch's autocast in this thread.

    Operations then keep the precision of their inputs.
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class _Job:
    """The pieces of work of one `spread` call. Several threads take these pieces one by one.

    Helper threads do not inherit torch's settings. A helper thread copies the settings of the
    thread that creates the job: autocast, inference mode, and whether subnormal numbers become 0.
    """

    def __init__(self, pieces: Sequence[Callable[[], Any]], crew: _Crew) -> None:
        self.crew, self._pieces, self._count = crew, pieces, len(pieces)
        self._casts, self._dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._inference = torch.is_inference_mode_enabled()
        self._flushes = LEAST / 2 == 0
        self._found: list[Any] = [None] * len(pieces)
        self._errors: dict[int, BaseException] = {}
        self._taken, self._ended = 0, 0
        self._change = threading.Condition()

    def help_elsewhere(self) -> None:
        """Compute pieces in a helper thread, after copying torch's settings to this thread."""
        torch.set_flush_denormal(self._flushes)
        if not (self._casts or self._inference):
            self.help()
            return
        with torch.inference_mode(self._inference), torch.autocast("cpu", self._dtype, self._casts):
            self.help()

    def help(self) -> None:
        """Compute pieces of the job until none is left."""
        while True:
            with self._change:
                if self._errors or self._taken == self._count:
                    return
                number = self._taken
                self._taken += 1
            try:
                self._found[number] = self._pieces[number]()
            except BaseException as error:  # `results` raises it when all threads have ended
                self._errors[number] = error
            finally:
                with self._change:
                    self._ended += 1
                    self._change.notify_all()

    def results(self) -> list[Any]:
        """Return the results of all pieces, or raise an error.

        If there are several errors, a request to stop has priority. Otherwise, the error of the
        first piece is raised.
        """
        with self._change:
            self._change.wait_for(lambda: self._ended == self._taken)
        for _, error in sorted(
            self._errors.items(), key=lambda item: (isinstance(item[1], Exception), item[0])
        ):
            raise error
        return self._found

    def close(self) -> None:
        """Start no more pieces, and free the results, because the job may stay in the queue."""
        with self._change:
            self._count = self._taken
            if self._ended == self._taken:
                self._pieces, self._found, self._errors = [], [], {}


@dataclass
class _Helpers:
    jobs: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)


_helpers = [_Helpers()]


def _in_a_child() -> None:
    """Reset the helper threads in a forked process.

    A forked process contains none of the threads.
    """
    _helpers[0] = _Helpers()
    if hasattr(_here, "crew"):
        torch.set_num_threads(_here.crew.size)
        del _here.crew


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


def _offer(job: _Job) -> None:
    """Let one more idle helper thread compute pieces of the job."""
    helpers = _helpers[0]
    with helpers.lock:
        while len(helpers.threads) < job.crew.size - 1:
            ready = threading.Event()
            thread = threading.Thread(target=_help_others, args=(helpers.jobs, ready), daemon=True)
            thread.start()
            helpers.threads.append(thread)
            ready.wait()  # in some libraries, its number of threads applies to the whole process
    helpers.jobs.put(job)


@atexit.register
def _end_helpers() -> None:
    """End the helper threads before Python ends.

    If Python stopped a thread inside C++ code, the program would abort.
    """
    helpers = _helpers[0]
    for _ in helpers.threads:
        helpers.jobs.put(None)
    for thread in helpers.threads:
        thread.join(LEAVE)


def _help_others(jobs: SimpleQueue[_Job | None], ready: threading.Event) -> None:
    torch.set_num_threads(1)
    ready.set()
    while (job := jobs.get()) is not None:
        if job.crew.others.acquire(blocking=False):
            _here.crew = job.crew
            try:
                job.help_elsewhere()
            finally:
                job.crew.others.release()
        del job


def helper_threads() -> list[int | None]:
    """Return the identifiers of the threads that help to compute pieces of work."""
    return [thread.ident for thread in _helpers[0].threads]
