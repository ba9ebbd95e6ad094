"""What a task is: loss and gradients as pure functions of a stack of parameters.

Parameters are `dict[str, Tensor]` whose first axis is the replica: S coupled runs held as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedmuon.tasks.per_example.clipping import Clipping

Params = dict[str, Tensor]
Points = Sequence[tuple[float, Params]]  # sum_k c_k (gradient at X_k), as the pairs (c_k, X_k)


@dataclass(frozen=True)
class Replaced:
    """Samples that differ in some replicas: replica `replica[t]` has, at row `position[t]` of the
    batch, the sample (`inputs[t]`, `labels[t]`) instead of the shared one. All have length T, and
    no replica appears twice."""

    replica: Tensor
    position: Tensor
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows that all replicas share, inputs [n, d] and labels [n], and those that differ.

    Images are laid out as rows too; a network knows their shape.
    """

    inputs: Tensor
    labels: Tensor
    replaced: Replaced | None = None


def joined(found: Sequence[Any], axis: int = 0) -> Any:
    """Tensors, or tuples and dictionaries of them -> the same, one after the other along an axis;
    one alone is not copied."""
    return found[0] if len(found) == 1 else _combined(found, partial(torch.cat, dim=axis))


def stacked(found: Sequence[Any]) -> Any:
    """The same with a new first axis."""
    return _combined(found, lambda each: each[0][None] if len(each) == 1 else torch.stack(each))


def _combined(found: Sequence[Any], combine: Callable[[list[Tensor]], Tensor]) -> Any:
    first = found[0]
    if isinstance(first, Tensor):
        return combine(list(found))
    if isinstance(first, dict):
        return {name: _combined([one[name] for one in found], combine) for name in first}
    return tuple(_combined(each, combine) for each in zip(*found, strict=True))


def blocks(tree: Params, count: int) -> list[Params]:
    """A stack of `count` clients' replicas as a stack for each client."""
    chunks = {name: value.chunk(count) for name, value in tree.items()}
    return [{name: chunks[name][k] for name in tree} for k in range(count)]


class Task(Protocol):
    """Loss and gradients; every method maps over the replica axis."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the parameters."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def stack_limit(self) -> int:
        """How many parameters of a cohort's stack are worth stepping together."""

    @property
    def apart(self) -> bool:
        """Whether several threads may work at once, each on its piece."""

    def initial(self, rng: np.random.Generator, stack: int = 1) -> Params:
        """The first parameters, the same for all S replicas."""

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """The mean loss [K S] and its gradient at the parameters of each replica.

        The stack is K blocks of S replicas, one block for each of the K batches.
        """

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """The mean loss [K S] at the last point, and the *sum* over the batch of each example's
        sum_k c_k (gradient at X_k), clipped once. Zero for an empty batch.

        Neither may be shown to anyone: see `fedmuon.privacy.mechanisms.gaussian`.
        """

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Per-sample losses [S, n], and by name what else is measured of each sample [S, n]:
        `accuracy`, whether its prediction is right or which share of it is."""
