"""Cells of a suite as Ray tasks: on this machine's cores, or spread over a running cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedmuon.experiments.engines.ray_engine import connected
from fedmuon.experiments.suites.suite import Cell, timed
from fedmuon.federated.client_data import one_copy
from fedmuon.runs.directory import Record

PAUSE = 0.2  # seconds


@dataclass(frozen=True)
class Spread:
    """How `fedmuon suite --ray-address` computes: each task gets `cpus` cores and `gpus`."""

    address: str
    cpus: float = 1.0
    gpus: float = 0.0

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        """Yield every cell with its record, in the order in which they finish.

        The longest begin first: none is left that others would have to wait for.
        """
        if not cells:
            return
        with connected(self.address):
            import ray  # which reads, when it is imported, what `connected` has set

            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus)(_compute)
            longest = sorted(cells, key=cost, reverse=True)
            waiting = {task.remote(one, self.cpus): one for one in longest}
            while waiting:  # briefly each time: signals are heard between two waits
                for done in ray.wait(list(waiting), num_returns=1, timeout=PAUSE)[0]:
                    yield waiting.pop(done), ray.get(done)


def cost(cell: Cell) -> float:
    """The relative cost of a cell within its suite: its size, unless its kind states a cost."""
    return getattr(cell, "cost", cell.size)


def _compute(cell: Cell, cpus: float) -> Record:
    """Compute one cell in a Ray task, with one thread per core and the machine's shared samples."""
    import torch

    torch.set_num_threads(max(1, int(cpus)))
    with one_copy():
        return timed(cell)
