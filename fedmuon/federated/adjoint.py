"""Derivatives of a run's final model with respect to sample weights, by reverse differentiation.

Algorithm 1 of the Stability note is a deterministic program once every random draw is fixed. The
final model X^R is then a function of w, the weights of the samples in the gradients of their
clients. The function is smooth where the orthogonalizer is smooth. For several directions V at
once, one pass from the last round to the first round computes

    <V, dX^R / dw_z>

for all V and all samples z. The pass also includes candidates, which are possible additional
samples with weight 0.

Each round is computed again from the server's state at the start of the round. Autograd then
propagates the adjoints of the server's model X and momentum M (if there is one) backwards through
the round. The required memory is that of 2 sqrt(R) server states and one round.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import one_hot

from fedmuon.core.errors import InputError
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import run_round, run_rounds
from fedmuon.federated.shards import Shard
from fedmuon.optim.stage import ServerState
from fedmuon.tasks.base import Batch, Params, Task, blocks
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

# Gradients of weighted losses, differentiable in the parameters and in the weights of samples:
#
#     G(X, w) = (1 / n) sum_j (1 + w_j) grad loss_j(X) + (1 / n) sum_p w'_p grad loss'_p(X)
#
# The first sum is over the n samples of a batch, and the second over the candidates p that may
# replace a sample. It is evaluated at w = w' = 0. For a direction D with the shape of X, the
# reverse derivative sends
#
#     (1 / n) sum_j hess loss_j(X) D  to X,    <grad loss_z(X), D> / n  to the weight of sample z.
#
# For the matrix task, both have a closed form. With s = X^T u, t = D^T u and p = softmax(s), the
# directional derivative of 1 - p_y is -p_y (t_y - <p, t>). The directional derivative of the slope
# p_y (p - e_y) is p_y [(t_y - <p, t>)(p - e_y) + p o (t - <p, t> 1)]. For a network, torch
# differentiates twice.


@dataclass(frozen=True, kw_only=True)
class Weighted(Batch):
    """A batch of samples with candidates that may replace a sample.

    For n samples and P candidates, there are n + P weights.
    """

    others: Batch
    weights: Tensor


@dataclass(frozen=True)
class Differentiable:
    """A task whose gradient can be differentiated with respect to the sample weights.

    The object wraps another task. `directions` is the number of reverse passes that run together.
    """

    task: Task
    directions: int
    thread_safe: bool = False  # autograd records the operations of only one thread

    def __post_init__(self) -> None:
        if self.task.keyed:
            raise InputError(
                "the model has dropout, but derivatives with respect to sample weights need a "
                "model without dropout, because a replacement sample has no dropout mask. Set "
                "dropout to 0."
            )
        if getattr(self.task, "statistics", ()):
            raise InputError(
                "the model has BatchNorm, which makes the gradient of a sample depend on other "
                "samples, but derivatives with respect to sample weights need independent "
                "gradients. Use GroupNorm instead of BatchNorm."
            )

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the task."""
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Weighted]) -> tuple[Tensor, Params]:
        """Return the mean loss and the gradient of each client, for one replica."""
        weights = [batch.weights for batch in batches]
        arguments = (self, batches, tuple(params), *params.values(), *weights)
        loss, *slopes = _Gradient.apply(*arguments)  # type: ignore[misc]
        return loss, dict(zip(params, slopes, strict=True))


class _Gradient(torch.autograd.Function):
    """The gradient of the loss as an autograd function of the model X and the sample weights w.

    The kernels of the task compute the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        what: Differentiable,
        batches: Sequence[Weighted],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        values = [value.detach() for value in tensors[: len(names)]]
        ctx.what, ctx.batches, ctx.params = what, batches, dict(zip(names, values, strict=True))
        with torch.enable_grad():  # the kernels of networks need it
            loss, slope = what.task.gradient(ctx.params, batches)
        ctx.mark_non_differentiable(loss)
        return loss, *(slope[name] for name in names)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        towards = dict(zip(ctx.params, cotangents[1:], strict=True))
        clients = (blocks(tree, len(ctx.batches)) for tree in (ctx.params, towards))
        trees, weights = [], []
        for params, direction, batch in zip(*clients, ctx.batches, strict=True):
            if isinstance(ctx.what.task, MatrixTask):
                slope, weight = _of_matrix(params["weight"][0], direction["weight"][0], batch)
            else:
                slope, weight = _of_network(ctx.what, params, direction, batch)
            trees.append(slope)
            weights.append(weight)
        slopes = (torch.cat([tree[name] for tree in trees]) for name in ctx.params)
        return None, None, None, *slopes, *weights


def _of_matrix(weight: Tensor, towards: Tensor, batch: Weighted) -> tuple[Params, Tensor]:
    def moved(rows: Batch) -> tuple[Tensor, ...]:
        chance, turned = (weight.T @ rows.inputs.T).softmax(0), flat @ rows.inputs.T
        labels, mean = rows.labels[None], (chance * turned).sum(0)
        return chance, turned - mean, chance.gather(0, labels), turned.gather(0, labels) - mean

    flat = towards.mT.contiguous()  # all directions share one product
    chance, turned, right, excess = moved(batch)
    gone = one_hot(batch.labels, len(chance)).T
    slope = right * (excess * (chance - gone) + chance * turned)
    _, _, right_there, excess_there = moved(batch.others)
    sent = torch.cat([right * excess, right_there * excess_there], 1)[0]
    n = len(batch.labels)
    return {"weight": (slope.contiguous() @ batch.inputs).mT[None] / n}, -sent / n


def _of_network(
    differentiable: Differentiable, params: Params, towards: Params, batch: Weighted
) -> tuple[Params, Tensor]:
    """Return the derivatives of the scalar product of a client's gradient and `towards`.

    The derivatives are with respect to the parameters, and to the n + P weights of samples and
    candidates.
    """
    task = differentiable.task
    assert isinstance(task, NetworkTask)
    point, direction = (
        {name: value[0] for name, value in tree.items()} for tree in (params, towards)
    )
    n = len(batch.labels)

    def slope(rows: Batch, part: slice, at: Params, weights: Tensor) -> Params:
        labels = rows.labels[part]
        arguments = {"inputs": rows.inputs[part], "labels": labels, "weights": weights / n}
        arguments["keys"] = labels  # no dropout
        total, back = vjp(partial(task.total, **arguments), at)  # unlike `grad`, loads no compiler
        return back(torch.ones_like(total))[0]

    def of_samples(part: slice) -> tuple[Params, Tensor]:
        ones = batch.inputs.new_ones(n)[part]
        return vjp(partial(slope, batch, part), point, ones)[1](direction)

    def of_candidates(part: slice) -> Tensor:
        zeros = batch.inputs.new_zeros(len(batch.others.labels))[part]
        return vjp(partial(slope, batch.others, part, point), zeros)[1](direction)[0]

    pulled = list(task.chunks.each(of_samples, n, differentiable.directions))
    candidate_weights = list(
        task.chunks.each(of_candidates, len(batch.others.labels), differentiable.directions)
    )
    slopes = {name: torch.stack([tree[name] for tree, _ in pulled]).sum(0)[None] for name in point}
    return slopes, torch.cat([*(weights for _, weights in pulled), *candidate_weights])


# The reverse pass over all rounds


Tree = dict[tuple[str, ...], Tensor]  # the tensors of a server state, by their path


class Pulled(NamedTuple):
    """The derivatives of the final model with respect to a client's sample weights in one round.

    Each derivative is <V, dX^R / dw>, where V is one of k directions, X^R is the final model and w
    is the weight of a sample. `own` [k, b] contains the derivatives for the b samples in `rows`. If
    `rows` is None, `own` contains all samples of the client. `others` [k, P] contains the
    derivatives for the P candidates that may replace a sample.
    """

    client: int
    rows: np.ndarray | None
    own: Tensor
    others: Tensor


@dataclass(frozen=True)
class Weighed(Shard):
    """A client's samples, together with candidates that may replace a sample.

    Each mini-batch has its own sample weights. All full batches share the same weights.
    """

    others: Batch = field(kw_only=True)
    taken: list[tuple[np.ndarray | None, Tensor]] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """The number of candidates that may replace a sample of the client."""
        return len(self.others.labels)

    def batch(self, rows: np.ndarray | None) -> Weighted:
        """Return the samples with these row numbers, together with the candidates."""
        batch = super().batch(rows)
        if rows is not None or not self.taken:
            entries = len(batch.labels) + self.candidates
            self.taken.append((rows, batch.inputs.new_zeros(entries).requires_grad_()))
        weights = self.taken[-1][1]
        return Weighted(batch.inputs, batch.labels, weights=weights, others=self.others)


def pulled_back(
    experiment: Experiment,
    start: ServerState,
    towards: Params,
    others: Callable[[int], Batch],
    heard: Callable[[], None] = lambda: None,
) -> Iterator[Pulled]:
    """Yield the derivatives of the final model, in k directions, from the last round to the first.

    The derivatives are with respect to the weights of the samples. `towards` contains the k
    directions. The function `others` returns the candidates of a client, which may replace one of
    the client's samples. The function `heard` is called after each round has been processed.
    """
    adjoint: Tree = {("params", name): value for name, value in towards.items()}
    count = len(next(iter(towards.values())))
    taped = dataclasses.replace(experiment, task=Differentiable(experiment.task, count))
    for state in backwards(experiment, start):
        shards = {
            int(i): Weighed(experiment.shards[int(i)].data, others=others(int(i)))
            for i in experiment.plan.participants(state.round)
        }
        adjoint, derivatives = _through(taped, state, shards, adjoint)
        yield from derivatives
        heard()


def _through(
    taped: Experiment, state: ServerState, shards: Mapping[int, Weighed], adjoint: Tree
) -> tuple[Tree, list[Pulled]]:
    """Propagate the adjoint from the end of a round to the start of the round.

    The adjoint contains the derivatives with respect to the server's model and states, for k
    directions. Return the adjoint at the start of the round, and the derivatives with respect to
    the sample weights in this round.
    """
    leaves = {place: value.detach().requires_grad_() for place, value in _tree(state).items()}
    params = {place[1]: value for place, value in leaves.items() if place[0] == "params"}
    states: dict[str, Params] = {}
    for place, value in leaves.items():
        if place[0] == "states":
            states.setdefault(place[1], {})[place[2]] = value
    start = ServerState(state.round, params, states)
    after, *_ = run_round(taped, start, list(shards.items()))
    ends = {
        place: value
        for place, value in _tree(after).items()
        if place in adjoint and value.requires_grad
    }
    batches = [(client, *batch) for client, shard in shards.items() for batch in shard.taken]
    inputs = [*leaves.values(), *(weights for *_, weights in batches)]

    def pulled(*cotangents: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(list(ends.values()), inputs, cotangents, materialize_grads=True)

    derivatives = vmap(pulled)(*(adjoint[place] for place in ends))
    before = dict(zip(leaves, derivatives, strict=False))
    sent = zip(batches, derivatives[len(leaves) :], strict=True)
    return before, [
        Pulled(client, rows, *pulled.tensor_split([len(pulled[0]) - shards[client].candidates], 1))
        for (client, rows, _), pulled in sent
    ]


def _tree(state: ServerState) -> Tree:
    """Return all tensors of a server state in one dictionary."""
    params: Tree = {("params", name): value for name, value in state.params.items()}
    for link, tensors in state.states.items():
        params |= {("states", link, name): value for name, value in tensors.items()}
    return params


def backwards(experiment: Experiment, start: ServerState) -> Iterator[ServerState]:
    """Yield the state before each round, from the last round to the first.

    Only every sqrt(R)-th state is stored. The other states are computed again.
    """
    stride = math.isqrt(max(0, experiment.plan.rounds - 1)) + 1
    states = itertools.chain([start], (outcome.state for outcome in run_rounds(experiment, start)))
    stored = [s for s in states if s.round % stride == 0 and s.round < experiment.plan.rounds]
    for first in reversed(stored):
        replayed = (outcome.state for outcome in run_rounds(experiment, first))
        between = itertools.islice(replayed, min(stride, experiment.plan.rounds - first.round) - 1)
        yield from reversed([first, *between])
