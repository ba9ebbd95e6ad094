"""What the replicas of a network see, and how their work is cut: by size alone, into pieces for one
thread each; replicas first, whose gradients need no adding, then samples, in their order."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedmuon.core.threads import parts
from fedmuon.tasks.base import Batch, Params

WORK = 1 << 24  # products of a piece, at least: a millisecond or two
FEW = 32  # samples of a piece, at least: fewer lose more in convolutions than a thread gains


class Samples(NamedTuple):
    """What B replicas see: inputs [B, n, ...], labels [B, n] and, where the loss is summed, the
    samples' weights [B, n]; an axis of length 1 in place of B is shared by all."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor

    def rows(self, part: slice) -> "Samples":
        """Some of the samples."""
        return Samples(*(values[:, part] for values in self))

    def some(self, replicas: slice) -> "Samples":
        """What some of the replicas see."""
        return Samples(*(values if len(values) == 1 else values[replicas] for values in self))


def pieces(params: Params, samples: Samples, products: int) -> list[list[tuple[Params, Samples]]]:
    """Rows of pieces: a row's results are to be added, the rows' to be joined; a sample costs so
    many products."""
    rows, replicas = samples.labels.shape[1], size_of(params)
    each = rows * products / WORK
    cut = parts(rows, min(each, rows / FEW))
    return [
        [(_some(params, block), samples.some(block).rows(part)) for part in cut]
        for block in parts(replicas, replicas * min(1.0, each))
    ]


def size_of(params: Params) -> int:
    return len(next(iter(params.values())))


def _some(params: Params, replicas: slice) -> Params:
    return {name: value[replicas] for name, value in params.items()}


def side_by_side(batches: Sequence[Batch]) -> Samples:
    """Batches of one size as the samples of as many replicas."""
    inputs = torch.stack([batch.inputs for batch in batches])
    labels = torch.stack([batch.labels for batch in batches])
    return Samples(inputs, labels, inputs.new_full((1, labels.shape[1]), 1 / labels.shape[1]))
