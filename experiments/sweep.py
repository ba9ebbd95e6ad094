"""Cells of a suite as Ray tasks: on this machine's cores, or spread over a running cluster."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from experiments.ray_engine import QUIET, ray_arguments
from experiments.suite import Cell, timed
from fedmuon.errors import InputError
from fedmuon.storage import Record

LOCAL = "local"  # the address that starts a Ray of our own


@dataclass(frozen=True)
class Spread:
    """How `fedmuon suite --ray-address` computes: each task gets `cpus` cores and `gpus`."""

    address: str
    cpus: float = 1.0
    gpus: float = 0.0

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        """Yield every cell with its record, in the order in which they finish."""
        if not cells:
            return
        os.environ.update(QUIET)  # read when ray is imported
        import ray

        with ExitStack() as until:
            address = "" if self.address == LOCAL else self.address
            started = until.enter_context(ray_arguments(address, False))
            try:
                ray.init(**started)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"no Ray cluster answers at {self.address} ({str(error).splitlines()[0]}): "
                    "start one with `ray start --head`, or use --ray-address local"
                ) from None
            until.callback(ray.shutdown)
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus)(_compute)
            waiting = {task.remote(one, self.cpus): one for one in cells}
            while waiting:
                (finished,), _ = ray.wait(list(waiting), num_returns=1)
                yield waiting.pop(finished), ray.get(finished)


def _compute(cell: Cell, cpus: float) -> Record:
    """A task: one cell, on as many threads as it was given cores."""
    import torch

    torch.set_num_threads(max(1, int(cpus)))
    return timed(cell)
