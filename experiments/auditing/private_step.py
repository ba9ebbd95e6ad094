"""A private step under audit: lots, clipped sums and noise, with and without a canary.

The parameters are fixed, and the precision is the same as in training. As in a run, `Mechanism` and
`Task` draw lots, clip and add noise. The adversary knows the parameters and the canary's gradient,
sees all releases, and adds up the components of the releases along this gradient.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.federated.shards import Shard
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Batch, Params, Task
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping

FEATURES, CLASSES = 4, 3
BOUND = 0.01  # C; no number of an audit depends on it
SHORT = 0.01  # length of the other examples' vectors; the canary's length is 1


class Parallel(nn.Module):
    """A linear classifier whose logits are sum_w W_w x_w, with one matrix W_w per block.

    The inputs are an array [n, m, d] with one vector x_w per sample and block.
    """

    def __init__(self, blocks: int) -> None:
        """Create linear layers without biases."""
        super().__init__()
        layers = (nn.Linear(FEATURES, CLASSES, bias=False) for _ in range(blocks))
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply each layer to its own part of a sample."""
        read = zip(self.layers, inputs.unbind(1), strict=True)
        return torch.stack([layer(part) for layer, part in read]).sum(0)


def examples(population: int, blocks: int) -> Batch:
    """Return samples. The last sample is the canary.

    The canary's gradient is long in every block. The other gradients are short and orthogonal to
    the canary's gradient. In block w, a gradient is slope x_w^T, and only the canary's x_w has a
    component along e_1.
    """
    inputs = torch.zeros(population, blocks, FEATURES)
    other = torch.arange(population - 1)
    inputs[other, :, 1 + other % (FEATURES - 1)] = SHORT
    inputs[-1, :, 0] = 1
    return Batch(inputs / math.sqrt(blocks), torch.arange(population) % CLASSES)


@dataclass(frozen=True, eq=False)
class Step:
    """Private steps of a client whose last sample is the canary, at the parameters `at` [1, ...].

    All random numbers come from `rng` if the mechanism is repeatable. Otherwise the random numbers
    are secret, as in a run.
    """

    task: Task
    shard: Shard
    mechanism: Mechanism
    at: Params
    rng: np.random.Generator

    def observe(self, shape: tuple[int, int], present: bool) -> np.ndarray:
        """Return components of noisy clipped sums along the canary's gradient, divided by C.

        The result has one row per trial and one column per step. If `present` is false, lots are
        drawn in the same way, and the canary is then removed from them.
        """
        (trials, steps), size, components = shape, self.shard.size, []
        draws = [lambda purpose, block=0: self.rng] * trials
        params = {name: value.repeat_interleave(trials, 0) for name, value in self.at.items()}
        for _ in range(steps):  # each trial is one client of a cohort
            lots = [self.mechanism.rows(draw, size) for draw in draws]
            drawn = lots if present else [rows[rows < size - 1] for rows in lots]
            batches = [self.shard.batch(rows) for rows in drawn]
            released = self.mechanism.releases(self.task, batches, draws)
            gradient = released([(1.0, params)]).gradient
            along = torch.stack([
                (gradient[name] * unit).flatten(1).sum(1) for name, unit in self.directions.items()
            ])  # fmt: skip
            sums = along.double().sum(0) / math.sqrt(len(along))
            components.append(sums.numpy() * self.mechanism.lot / self.mechanism.clipping.bound)
        return np.stack(components, 1)

    @cached_property
    def canary(self) -> Params:
        """Return the gradient of the canary in each block, before clipping."""
        last = self.shard.batch(np.array([self.shard.size - 1]))
        return self.task.gradient(self.at, [last])[1]

    @cached_property
    def directions(self) -> Params:
        """Return the canary's gradient, scaled to norm 1 in each block."""
        return {name: value / float(value.norm()) for name, value in self.canary.items()}


def step(noise: float, lot: float, population: int, blocks: int, rng: np.random.Generator) -> Step:
    """Return a private step of a float32 classifier with the given number of matrix blocks."""
    with torch.device("meta"):
        task = NetworkTask(Parallel(blocks), (blocks, FEATURES))
    mechanism = Mechanism(Clipping("block", BOUND), noise, lot)
    return Step(task, Shard(examples(population, blocks)), mechanism, task.initial(rng), rng)
