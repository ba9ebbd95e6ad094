"""Gradients of weighted losses, differentiable in the parameters and in the weights of samples.

    G(X, w) = (1 / n) sum_j (1 + w_j) grad loss_j(X) + (1 / n) sum_p w'_p grad loss'_p(X)

over the n samples of a batch and the candidates p that may replace a sample, evaluated at
w = w' = 0. For a direction D like X, the reverse derivative sends

    (1 / n) sum_j hess loss_j(X) D  to X,    <grad loss_z(X), D> / n  to the weight of sample z.

The matrix task has both in closed form. With s = X^T u, t = D^T u and p = softmax(s), the
directional derivative of 1 - p_y is -p_y (t_y - <p, t>), and that of its slope p_y (p - e_y) is
p_y [(t_y - <p, t>)(p - e_y) + p o (t - <p, t> 1)]. For a network, torch differentiates twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import one_hot

from fedmuon.tasks.base import Batch, Params, Task, blocks
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask


@dataclass(frozen=True, kw_only=True)
class Weighted(Batch):
    """A batch with candidates that may replace a sample, and the weights [n + P] of both."""

    others: Batch
    weights: Tensor


@dataclass(frozen=True)
class Differentiable:
    """A task whose gradient at weighted batches can be differentiated.

    `directions` is the number of reverse passes that run together.
    """

    task: Task
    directions: int
    thread_safe: bool = False  # autograd records the operations of one thread

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the task."""
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Weighted]) -> tuple[Tensor, Params]:
        """Return the mean loss [K] and gradient [K, ...] of K clients, one replica each."""
        weights = [batch.weights for batch in batches]
        given = (self, batches, tuple(params), *params.values(), *weights)
        loss, *slopes = _Gradient.apply(*given)  # type: ignore[misc]
        return loss, dict(zip(params, slopes, strict=True))


class _Gradient(torch.autograd.Function):
    """G(X, w) from the kernels of the task, with its reverse derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        what: Differentiable,
        batches: Sequence[Weighted],
        names: tuple[str, ...],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        values = [value.detach() for value in given[: len(names)]]
        ctx.what, ctx.batches, ctx.params = what, batches, dict(zip(names, values, strict=True))
        with torch.enable_grad():  # the kernels of networks need it
            loss, slope = what.task.gradient(ctx.params, batches)
        ctx.mark_non_differentiable(loss)
        return loss, *(slope[name] for name in names)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        towards = dict(zip(ctx.params, cotangents[1:], strict=True))
        clients = (blocks(tree, len(ctx.batches)) for tree in (ctx.params, towards))
        bent, weights = [], []
        for params, direction, batch in zip(*clients, ctx.batches, strict=True):
            if isinstance(ctx.what.task, MatrixTask):
                slope, weight = _of_matrix(params["weight"][0], direction["weight"][0], batch)
            else:
                slope, weight = _of_network(ctx.what, params, direction, batch)
            bent.append(slope)
            weights.append(weight)
        slopes = (torch.cat([one[name] for one in bent]) for name in ctx.params)
        return None, None, None, *slopes, *weights


def _of_matrix(weight: Tensor, towards: Tensor, batch: Weighted) -> tuple[Params, Tensor]:
    def moved(rows: Batch) -> tuple[Tensor, ...]:
        chance, turned = (weight.T @ rows.inputs.T).softmax(0), flat @ rows.inputs.T
        labels, mean = rows.labels[None], (chance * turned).sum(0)
        return chance, turned - mean, chance.gather(0, labels), turned.gather(0, labels) - mean

    flat = towards.mT.contiguous()  # so that all directions share one product
    chance, turned, right, excess = moved(batch)
    gone = one_hot(batch.labels, len(chance)).T
    slope = right * (excess * (chance - gone) + chance * turned)
    _, _, right_there, excess_there = moved(batch.others)
    sent = torch.cat([right * excess, right_there * excess_there], 1)[0]
    n = len(batch.labels)
    return {"weight": (slope.contiguous() @ batch.inputs).mT[None] / n}, -sent / n


def _of_network(
    what: Differentiable, params: Params, towards: Params, batch: Weighted
) -> tuple[Params, Tensor]:
    """The reverse derivative of one client in its parameters [1, ...] and weights [n + P]."""
    task = what.task
    assert isinstance(task, NetworkTask)
    point, direction = ({name: one[0] for name, one in tree.items()} for tree in (params, towards))
    n = len(batch.labels)

    def slope(rows: Batch, part: slice, at: Params, weights: Tensor) -> Params:
        given = {"inputs": rows.inputs[part], "labels": rows.labels[part], "weights": weights / n}
        total, back = vjp(partial(task.total, **given), at)  # like `grad`, which loads a compiler
        return back(torch.ones_like(total))[0]

    def own(part: slice) -> tuple[Params, Tensor]:
        ones = batch.inputs.new_ones(n)[part]
        return vjp(partial(slope, batch, part), point, ones)[1](direction)

    def other(part: slice) -> Tensor:
        zeros = batch.inputs.new_zeros(len(batch.others.labels))[part]
        return vjp(partial(slope, batch.others, part, point), zeros)[1](direction)[0]

    found = list(task.chunks.each(own, n, what.directions))
    sent = list(task.chunks.each(other, len(batch.others.labels), what.directions))
    bent = {name: torch.stack([one[name] for one, _ in found]).sum(0)[None] for name in point}
    return bent, torch.cat([*(weights for _, weights in found), *sent])
