"""Mean gradients of the matrix task's thin members, each in one pass over its samples, compiled.

A round of few replicas is so short that every call of Python shows: what the parts of a member
share is looked up once, and their first sum lies where the gradient is to be.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.threads import spread
from fedmuon.tasks.base import Batch, Replaced
from fedmuon.tasks.pieces import Member, thin_parts, together, within

INDICES = torch.int64, torch.int32
Own = Callable[[Member, Replaced], tuple[Tensor, Tensor]]  # p_y [T, 1] and slopes [T, c, 1]


class _Part(NamedTuple):
    """Some rows of a member: samples, labels and weights, and the sums over the rows, of gradients
    [S, c, d] and of p_y [S]."""

    member: Member
    rows: slice
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    total: np.ndarray
    right: np.ndarray

    @property
    def loss(self) -> np.ndarray:
        """Its share of the mean loss [S]."""
        return (self.rows.stop - self.rows.start - self.right) / self.member.samples


def mean_gradients(members: Sequence[Member], own: Own) -> tuple[Tensor, Tensor]:
    """Mean losses [K S] and gradients [K S, c, d], in pieces that several threads take; `own` tells
    of the samples that stand for others."""
    weight = members[0].weight
    gradients = np.zeros((len(members), *weight.shape), weight.numpy().dtype)
    sums = iter(gradients)
    groups = [
        [_parts(one, next(sums), len(some) == 1) for one in some] for some in together(members)
    ]
    # One member's parts are a piece each, and several members, of one part each, are a piece.
    spread([partial(_add, piece, own) for group in groups for piece in zip(*group, strict=True)])
    losses = [_loss(parts) for group in groups for parts in group]
    return torch.from_numpy(np.concatenate(losses)), torch.from_numpy(gradients).flatten(0, 1)


def _parts(member: Member, first: np.ndarray, cut: bool) -> list[_Part]:
    """The member in parts, of which the first has its sum there; or as one."""
    batch, weight = member.batch, member.weight
    _require_types(batch, weight)
    each = (one.contiguous().numpy() for one in (batch.inputs, batch.labels.long(), weight))
    inputs, labels, weights = each
    slices = thin_parts(member) if cut else [slice(0, len(labels))]
    totals = [first, *np.zeros((len(slices) - 1, *first.shape), first.dtype)]
    rights = np.zeros((len(slices), len(weights)), first.dtype)
    return [
        _Part(member, rows, (inputs[rows], labels[rows], weights), total, right)
        for rows, total, right in zip(slices, totals, rights, strict=True)
    ]


def _add(piece: Sequence[_Part], own: Own) -> None:
    """The kernel's sums, and in the replicas that replace a sample those of their own."""
    from fedmuon.tasks.fused import slope_sums

    for member, rows, arrays, total, right in piece:
        replicas, classes = total.shape[:2]
        there = member.batch.replaced
        there = there and within(there, slice(0, replicas), rows)
        skip = np.full(replicas, -1)
        if there is not None:
            skip[there.replica.numpy()] = there.position.numpy()
        if not slope_sums(*arrays, skip, total.dtype.type(1 / member.samples), total, right):
            raise InputError(f"a label is none of 0 to {classes - 1}: number the classes from 0")
        if there is not None:
            after, more = own(member, there)
            replica = there.replica.numpy()
            total[replica] += (more * there.inputs[:, None]).numpy()
            right[replica] += after[:, 0].numpy()


def _loss(parts: Sequence[_Part]) -> np.ndarray:
    """The mean loss [S]; the first part gets the sums of the others, in their order."""
    for part in parts[1:]:
        parts[0].total[:] += part.total
    return sum((part.loss for part in parts[1:]), start=parts[0].loss)


def _require_types(batch: Batch, weight: Tensor) -> None:
    """Refuse what torch's products and gathers refuse too."""
    if batch.inputs.dtype != weight.dtype or batch.labels.dtype not in INDICES:
        raise InputError(
            f"the samples are {batch.inputs.dtype}, their labels {batch.labels.dtype} and the "
            f"parameters {weight.dtype}: let samples be as parameters are, and labels whole"
        )
