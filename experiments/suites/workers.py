"""Cells in worker processes of this machine, which are started once and compute many.

This module, run as a program, loads torch while its parent checks the input. Then it forks the
workers, so that libraries are loaded once, and each answers one cell after the other. Signals are
heard by the parent alone, which passes them on, so that a run saves a checkpoint. Workers end with
their parent, however that ends (kill -9, too).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import interruptible
from fedmuon.experiments.engines.processes import importable

if TYPE_CHECKING:  # imports torch; workers start before that
    from fedmuon.core.files import Record
    from fedmuon.experiments.suites.suite import Cell

PAUSE = 0.2  # seconds between two looks for signals
PATIENCE = 20.0  # seconds in which workers that were told to stop save what they have


@dataclass
class Workers:
    """A `Compute` with `count` worker processes, as a context: they start at its beginning.

    The cores of this machine are shared among them: each has cores / `count` threads.
    """

    count: int
    loads: str = "fedmuon.experiments.studies.sweep"  # the module of the cells, loaded beforehand
    _pipes: list[Connection] = field(default_factory=list, init=False)
    _nursery: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        there = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if there else os.cpu_count() or 1
        said, threads = os.environ.get("OMP_NUM_THREADS", ""), max(1, cores // self.count)
        threads = min(threads, int(said)) if said.isdigit() and int(said) else threads
        pairs = [Pipe() for _ in range(self.count)]
        theirs = [end.fileno() for _, end in pairs]
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", __name__, self.loads, *map(str, [threads, *theirs])],
            stdin=subprocess.PIPE,  # closed when we end
            stdout=subprocess.DEVNULL,
            pass_fds=theirs,
            env={**os.environ, "PYTHONPATH": importable(), "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # signals to our group do not reach it
        )
        for ours, end in pairs:
            end.close()
            self._pipes.append(ours)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers; after an error they first save the rounds that they have."""
        assert self._nursery is not None and self._nursery.stdin is not None
        for ours in self._pipes:
            ours.close()
        if error is not None:
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nursery.wait(PATIENCE)
        self._signal(signal.SIGKILL)
        self._nursery.wait()
        self._nursery.stdin.close()
        self._pipes.clear()

    def _signal(self, number: int) -> None:
        assert self._nursery is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._nursery.pid, number)

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        """Yield every cell with its record, in the order in which they finish.

        The longest begin first: none is left that others would have to wait for.
        """
        from fedmuon.experiments.suites.suite import cost  # loads torch

        waiting = sorted(cells, key=cost, reverse=True)[::-1]
        busy: dict[Connection, Cell] = {}
        for ours in self._pipes:
            self._hand(ours, waiting, busy)
        while busy:  # briefly each time: signals are heard between two waits
            for ours in wait(list(busy), PAUSE):
                assert isinstance(ours, Connection)
                cell = busy.pop(ours)
                answer = self._answer(ours, cell)
                self._hand(ours, waiting, busy)
                yield cell, answer

    def _hand(self, ours: Connection, waiting: list[Cell], busy: dict[Connection, Cell]) -> None:
        """Give a free worker the longest cell that waits."""
        if not waiting:
            return
        busy[ours] = cell = waiting.pop()
        try:
            content = pickle.dumps(cell)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"{cell.name} cannot be sent to another process ({error}): use one job"
            ) from error
        with contextlib.suppress(OSError):  # a worker that died says so in its answer
            ours.send_bytes(content)

    def _answer(self, ours: Connection, cell: Cell) -> Record:
        """The result of the worker, or its error, which is raised here."""
        try:
            record, error = pickle.loads(ours.recv_bytes())
        except (EOFError, OSError):
            raise InputError(
                f"the worker process of {cell.name} died, often because memory ran out: lower "
                "--jobs and continue with --resume"
            ) from None
        if error is not None:
            raise error
        return record


class WorkerError(RuntimeError):
    """An error of a cell in a worker, with the worker's traceback as its text."""


def main() -> None:
    """Load what cells need, fork a worker for each pipe, and wait until all have ended."""
    module, threads, *pipes = sys.argv[1:]
    import_module(module)
    ends = [Connection(int(one)) for one in pipes]
    warnings.simplefilter("ignore", DeprecationWarning)  # about forks while libraries have threads
    for theirs in ends:
        if os.fork() == 0:
            for other in ends:
                if other is not theirs:
                    other.close()  # so that the death of its worker is noticed
            _serve(theirs, float(threads))
            return
    for one in ends:
        one.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the signal is for the workers
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(theirs: Connection, cpus: float) -> None:
    """Answer cells until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with interruptible(), contextlib.suppress(Interrupted):  # the parent reports what was saved
        while True:
            try:
                content = theirs.recv_bytes()
            except EOFError:
                return
            theirs.send_bytes(pickle.dumps(_tried(content, cpus)))


def _tried(content: bytes, cpus: float) -> tuple[Record | None, Exception | None]:
    """The record of a pickled cell, or the error that ended it."""
    from fedmuon.experiments.suites.suite import compute_apart  # loads torch

    try:
        cell: Cell = pickle.loads(content)
    except Exception as error:
        why = f"an object cannot be loaded in another process ({error})"
        return None, InputError(
            f"{why}: define it in a module that can be imported, or use one job"
        )
    try:
        return compute_apart(cell, cpus), None
    except InputError as error:
        return None, InputError(str(error))
    except Exception:
        return None, WorkerError(f"in {cell.name}:\n{traceback.format_exc()}")


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing ever comes but the end
    os._exit(1)


if __name__ == "__main__":
    main()
