"""Derivatives of a run's last model in the weights of its samples, by reverse passes.

Algorithm 1 of the Stability note is a keyed program: with every draw fixed, the last model X^R is a
function of the weights w of the samples in their clients' gradients (`fedmuon.tasks.curvature`). It
is smooth where the map is. For a stack of directions V, one pass from the last round to the first
computes

    <V, dX^R / dw_z>    for all V and all samples z at once, and for candidates of weight 0.

The code of a round runs once more at the state that it began with, and autograd pulls the adjoints
of the server's states (X, and M if it is kept) back through it. Memory holds 2 sqrt(R) states of
the server, and one round.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedmuon.federated.client_data import Shard
from fedmuon.federated.rounds import Experiment, ServerState, run_round, run_rounds
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.curvature import Differentiable, Weighted

Tree = dict[tuple[str, ...], Tensor]  # a server's tensors, by their places


class Pulled(NamedTuple):
    """<V, dX^R / dw> through one client's part of a round: of its `rows`, None if they are all, and
    of the candidates in the place of any of them, `own` [k, b] and `others` [k, P]."""

    client: int
    rows: np.ndarray | None
    own: Tensor
    others: Tensor


@dataclass(frozen=True)
class Weighed(Shard):
    """A client's rows with candidates; each batch that is taken has weights of its own, but that
    full batches share theirs."""

    others: Batch = field(kw_only=True)
    taken: list[tuple[np.ndarray | None, Tensor]] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """P."""
        return len(self.others.labels)

    def batch(self, rows: np.ndarray | None) -> Weighted:
        """The given rows in the given order, and the candidates."""
        found = super().batch(rows)
        if rows is not None or not self.taken:
            entries = len(found.labels) + self.candidates
            self.taken.append((rows, found.inputs.new_zeros(entries).requires_grad_()))
        weights = self.taken[-1][1]
        return Weighted(found.inputs, found.labels, weights=weights, others=self.others)


def pulled_back(
    experiment: Experiment,
    start: ServerState,
    towards: Params,
    others: Callable[[int], Batch],
    heard: Callable[[], None] = lambda: None,
) -> Iterator[Pulled]:
    """The reverse pass from directions [k, 1, ...] in the last model, round by round; `others` are
    the candidates for a client's samples, and `heard` is called after each round."""
    adjoint: Tree = {("params", name): value for name, value in towards.items()}
    count = len(next(iter(towards.values())))
    taped = dataclasses.replace(experiment, task=Differentiable(experiment.task, count))
    for state in backwards(experiment, start):
        shards = {
            int(i): Weighed(experiment.shards[int(i)].data, others=others(int(i)))
            for i in experiment.plan.participants(state.round)
        }
        adjoint, found = _through(taped, state, shards, adjoint)
        yield from found
        heard()


def _through(
    taped: Experiment, state: ServerState, shards: Mapping[int, Weighed], adjoint: Tree
) -> tuple[Tree, list[Pulled]]:
    """The adjoint [k, ...] of the state before a round from that of the state after it, and what
    the round sends to weights."""
    leaves = {place: value.detach().requires_grad_() for place, value in _tree(state).items()}
    params = {place[1]: value for place, value in leaves.items() if place[0] == "params"}
    states: dict[str, Params] = {}
    for place, value in leaves.items():
        if place[0] == "states":
            states.setdefault(place[1], {})[place[2]] = value
    again = ServerState(state.round, params, states)
    after, _ = run_round(taped, again, list(shards.items()))
    ends = {
        place: value
        for place, value in _tree(after).items()
        if place in adjoint and value.requires_grad
    }
    taken = [(client, *one) for client, shard in shards.items() for one in shard.taken]
    inputs = [*leaves.values(), *(weights for *_, weights in taken)]

    def pulled(*cotangents: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(list(ends.values()), inputs, cotangents, materialize_grads=True)

    found = vmap(pulled)(*(adjoint[place] for place in ends))
    before = dict(zip(leaves, found, strict=False))
    sent = zip(taken, found[len(leaves) :], strict=True)
    return before, [
        Pulled(client, rows, *pulled.tensor_split([len(pulled[0]) - shards[client].candidates], 1))
        for (client, rows, _), pulled in sent
    ]


def _tree(state: ServerState) -> Tree:
    """The real tensors of a server's state."""
    params: Tree = {("params", name): value for name, value in state.params.items()}
    for link, held in state.states.items():
        params |= {("states", link, name): value for name, value in held.items()}
    return params


def backwards(experiment: Experiment, start: ServerState) -> Iterator[ServerState]:
    """The states before each round, the last round's first: every sqrt(R)-th is kept, and those
    between are made again."""
    stride = math.isqrt(max(0, experiment.plan.rounds - 1)) + 1
    every = itertools.chain([start], (done.state for done in run_rounds(experiment, start)))
    kept = [s for s in every if s.round % stride == 0 and s.round < experiment.plan.rounds]
    for first in reversed(kept):
        some = (done.state for done in run_rounds(experiment, first))
        few = itertools.islice(some, min(stride, experiment.plan.rounds - first.round) - 1)
        yield from reversed([first, *few])
