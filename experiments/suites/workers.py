"""Worker processes on this machine.

The parent starts this module as a program, which imports torch while the parent checks the input.
Then the program forks the workers, so that libraries are loaded only once. Each worker computes its
cells one after the other. Only the parent receives signals, and forwards them to the workers, so
that a run can save a checkpoint. The workers end when their parent ends, even with kill -9.
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

from fedmuon.core.cores import usable_cores
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.signals import interruptible
from fedmuon.experiments.engines.processes import importable

if TYPE_CHECKING:  # this module imports torch, but the workers must start before that
    from fedmuon.core.files import Record
    from fedmuon.experiments.suites.suite import Cell

PAUSE = 0.2  # seconds between two checks for signals
PATIENCE = 20.0  # seconds in which stopping workers can save their state


@dataclass
class Workers:
    """A context manager that starts `count` worker processes and computes cells with them.

    The workers share the cores of this machine: each worker uses (number of cores) / `count`
    threads.
    """

    count: int
    loads: str = "fedmuon.experiments.studies.sweep"  # the cells' module, imported in advance
    _pipes: list[Connection] = field(default_factory=list, init=False)
    _nursery: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        limit = os.environ.get("OMP_NUM_THREADS", "")
        threads = max(1, usable_cores() // self.count)
        threads = min(threads, int(limit)) if limit.isdigit() and int(limit) else threads
        pairs = [Pipe() for _ in range(self.count)]
        child_fds = [end.fileno() for _, end in pairs]
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", __name__, self.loads, *map(str, [threads, *child_fds])],
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=subprocess.DEVNULL,
            pass_fds=child_fds,
            env={**os.environ, "PYTHONPATH": importable(), "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # so that signals to this process group do not reach it
        )
        for pipe, end in pairs:
            end.close()
            self._pipes.append(pipe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers.

        After an error, wait until the workers have saved their finished rounds.
        """
        assert self._nursery is not None and self._nursery.stdin is not None
        for pipe in self._pipes:
            pipe.close()
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
        """Yield every cell with its record, in the order in which the cells finish.

        The longest cells start first, so that all workers finish at about the same time.
        """
        from fedmuon.experiments.suites.suite import cost  # imports torch

        waiting = sorted(cells, key=cost, reverse=True)[::-1]
        busy: dict[Connection, Cell] = {}
        for pipe in self._pipes:
            self._hand(pipe, waiting, busy)
        while busy:  # wait only briefly each time, so that signals are handled
            for pipe in wait(list(busy), PAUSE):
                assert isinstance(pipe, Connection)
                cell = busy.pop(pipe)
                answer = self._answer(pipe, cell)
                self._hand(pipe, waiting, busy)
                yield cell, answer

    def _hand(self, pipe: Connection, waiting: list[Cell], busy: dict[Connection, Cell]) -> None:
        """Send the waiting cell with the highest cost to a free worker."""
        if not waiting:
            return
        busy[pipe] = cell = waiting.pop()
        try:
            content = pickle.dumps(cell)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"The run {cell.name} cannot be sent to another process ({error}). Use --jobs 1, "
                "or jobs=1 in Python."
            ) from error
        with contextlib.suppress(OSError):  # `_answer` reports a worker that died
            pipe.send_bytes(content)

    def _answer(self, pipe: Connection, cell: Cell) -> Record:
        """Return the record that a worker computed, or raise the worker's error."""
        try:
            record, error = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise InputError(
                f"The worker process that computed {cell.name} died, often because memory ran "
                "out. Lower --jobs and continue with --resume."
            ) from None
        if error is not None:
            raise error
        return record


class WorkerError(RuntimeError):
    """An error of a cell in a worker, with the worker's traceback as text."""


def main() -> None:
    """Import the libraries, fork a worker for each pipe, and wait until all workers have ended."""
    module, threads, *pipes = sys.argv[1:]
    import_module(module)
    ends = [Connection(int(descriptor)) for descriptor in pipes]
    warnings.simplefilter("ignore", DeprecationWarning)  # forking while libraries have threads
    for own_end in ends:
        if os.fork() == 0:
            for other in ends:
                if other is not own_end:
                    other.close()  # otherwise the parent would not notice the end of its worker
            _serve(own_end, float(threads))
            return
    for end in ends:
        end.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the signal is meant for the workers
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(pipe: Connection, cpus: float) -> None:
    """Compute cells until the parent closes the pipe, which may happen at any moment."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The parent reports what was saved. A signal can come at any moment, even at the end of
    # `interruptible`, so its exception is caught outside.
    with contextlib.suppress(Interrupted), interruptible():
        while True:
            try:
                content = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            answer = pickle.dumps(_tried(content, cpus))
            try:
                pipe.send_bytes(answer)
            except OSError:  # another cell failed, so the parent has ended
                return


def _tried(content: bytes, cpus: float) -> tuple[Record | None, Exception | None]:
    """Return the record of a pickled cell, or the error that ended it."""
    from fedmuon.experiments.suites.suite import compute_apart  # imports torch

    try:
        cell: Cell = pickle.loads(content)
    except Exception as error:
        reason = f"an object cannot be loaded in another process ({error})"
        return None, InputError(
            f"{reason}: define the object in a module that can be imported, or use --jobs 1 "
            "(jobs=1 in Python)"
        )
    try:
        return compute_apart(cell, cpus), None
    except InputError as error:
        return None, InputError(str(error))
    except Exception:
        return None, WorkerError(f"in {cell.name}:\n{traceback.format_exc()}")


def _end_with_parent() -> None:
    os.read(0, 1)  # returns only when the parent has ended
    os._exit(1)


if __name__ == "__main__":
    main()
