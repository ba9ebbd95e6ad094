"""Adapters U X V^T with shared random bases, of which clients train and send only X (FedSubMuon).

A period is a number F of rounds. In period p, the change of a weight [m, n] is

    U_0 X_0 V_0^T + ... + U_p X_p V_p^T,

where U_p [m, r] and V_p [n, r] have orthonormal columns that everyone draws from the seed of the
run. Clients train X_p [r, r], which starts at 0. The mean of X_p is exact, because all clients have
the same bases. After the period, X_p never changes again: the product is merged into the weight.

The merged products stay in the adapter: with factors A [R, n] and B [m, R] and R >= r P for P
periods, block p of the columns of B is U_p X_p, and block p of the rows of A is V_p^T. So the
frozen weights need not change. A message contains X_0, ..., X_(P-1), from which a client computes A
and B, and a reply contains X_p.

Source: FedSubMuon (arXiv:2609.06073).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.adapters import Pair
from fedmuon.optim.chain import States
from fedmuon.optim.encoding_stage import EncodingStage
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Trees
from fedmuon.optim.trained_space import with_space
from fedmuon.tasks.base import Params
from fedmuon.tasks.per_example.variables import Variable

Form = tuple[int, int]  # m and n of a weight


@dataclass(frozen=True)
class Subspaces:
    """The bases of a run, and the conversion of factors A and B to matrices X and back.

    Attributes:
        pairs: The adapters, with the shape (m, n) of their products.
        rank: The rank r of each period.
        rounds: The number F of rounds of a period, or 0 if there is only one period.
        periods: The number P of periods.
        seed: The seed of the bases.
    """

    pairs: tuple[tuple[Pair, Form], ...]
    rank: int
    rounds: int
    periods: int
    seed: int

    def period(self, round: int) -> int:
        """Return the period to which a round belongs."""
        return min(round // self.rounds, self.periods - 1) if self.rounds else 0

    def begins(self, round: int) -> bool:
        """Return whether a round is the first one of a period."""
        return round == 0 or self.period(round) != self.period(round - 1)

    def bases(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return U [P, m, r] and V [P, n, r] of a layer, with the dtype and device of a tensor."""
        shape = self.pairs[layer][1]
        return _bases(self.seed, layer, shape, self.rank, self.periods, like.dtype, like.device)

    def stacked(self, params: Params) -> Params:
        """Return all X [S, P, r, r] of a model under the names of B, and its other parameters."""
        inner = self._others(params)
        for layer, (pair, _) in enumerate(self.pairs):
            b = params[pair.b].flatten(2)
            blocks = b[..., : self.periods * self.rank].unflatten(2, (self.periods, self.rank))
            inner[pair.b] = self.bases(layer, b)[0].mT @ blocks.permute(0, 2, 1, 3)
        return inner

    def model(self, inner: Params, like: Params) -> Params:
        """Return the model with these X [S, P, r, r]. `like` has the names and shapes."""
        params = {name: inner[name] for name in like if name in inner}
        for layer, (pair, _) in enumerate(self.pairs):
            x = inner[pair.b]
            left, right = self.bases(layer, x)
            columns = (left @ x).permute(0, 2, 1, 3).flatten(2)
            rows = right.mT.flatten(0, 1).expand(len(x), -1, -1)
            rest = like[pair.b].flatten(2).shape[2] - columns.shape[2]  # unused ranks stay 0
            columns = torch.nn.functional.pad(columns, (0, rest))
            rows = torch.nn.functional.pad(rows, (0, 0, 0, rest))
            params[pair.b] = columns.reshape(len(x), *like[pair.b].shape[1:])
            params[pair.a] = rows.reshape(len(x), *like[pair.a].shape[1:])
        return {name: params[name] for name in like if name in params}

    def active(self, params: Params, round: int) -> Params:
        """Return X [S, r, r] of the round's period, and the parameters that are no factors."""
        return self.slope(params, params, round)

    def with_active(self, params: Params, inner: Params, round: int) -> Params:
        """Return the model in which X [S, r, r] of the round's period has another value."""
        return self._written(params, params, inner, round)

    def slope(self, params: Params, slope: Params, round: int) -> Params:
        """Return the gradient with respect to X, U^T G of the period's columns of B."""
        inner = self._others(slope)
        for layer, (pair, _) in enumerate(self.pairs):
            columns = slope[pair.b].flatten(2)[..., self.block(self.period(round))]
            inner[pair.b] = self.left(layer, params, round).mT @ columns
        return inner

    def step(self, params: Params, direction: Params, round: int) -> Params:
        """Return the step of the factors for a step of X."""
        nothing = {name: torch.zeros_like(value) for name, value in params.items()}
        return self._written(params, nothing, direction, round)

    def _written(self, params: Params, target: Params, inner: Params, round: int) -> Params:
        """Return the tensors `target`, of which the period's columns of B are U X."""
        changed = {name: inner.get(name, value) for name, value in target.items()}
        for layer, (pair, _) in enumerate(self.pairs):
            b = target[pair.b].flatten(2).clone()
            b[..., self.block(self.period(round))] = self.left(layer, params, round) @ inner[pair.b]
            changed[pair.b] = b.reshape(target[pair.b].shape)
        return changed

    def variables(self, params: Params, round: int) -> dict[str, Variable]:
        """Return X of the round's period, and the parameters that are no factors."""
        columns = self.block(self.period(round))
        matrices = {
            pair.b: Variable(self.left(layer, params, round), columns)
            for layer, (pair, _) in enumerate(self.pairs)
        }
        return {**dict.fromkeys(self._others(params), Variable()), **matrices}

    def block(self, period: int) -> slice:
        """Return the columns of B, and the rows of A, that belong to a period."""
        return slice(period * self.rank, (period + 1) * self.rank)

    def left(self, layer: int, params: Params, round: int) -> Tensor:
        """Return U [m, r] of the round's period."""
        return self.bases(layer, params[self.pairs[layer][0].b])[0][self.period(round)]

    def _others(self, params: Params) -> Params:
        factors = {name for pair, _ in self.pairs for name in (pair.a, pair.b)}
        return {name: value for name, value in params.items() if name not in factors}


@lru_cache(maxsize=4096)
def _bases(
    seed: int, layer: int, shape: Form, rank: int, periods: int, dtype: Any, device: Any
) -> tuple[Tensor, Tensor]:
    bases = []
    for side, size in enumerate(shape):
        drawn = [
            generator(seed, Draw.SUBSPACE, round=period, client=side, block=layer)
            for period in range(periods)
        ]
        columns = [np.linalg.qr(rng.standard_normal((size, rank)))[0] for rng in drawn]
        bases.append(torch.from_numpy(np.stack(columns)).to(device, dtype))
    return bases[0], bases[1]


@dataclass(frozen=True)
class SubspaceAdapters(EncodingStage):
    """A stage that sends X instead of factors, and lets states start again in each period.

    Attributes:
        spaces: The bases.
    """

    spaces: Subspaces

    facts = (Trait.SENDS_VARIABLES,)

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Send all X. States of the last period become 0, because they belong to other bases."""
        sent = {**message, MODEL: self.spaces.stacked(message[MODEL])}
        return reset_states(sent, self.spaces) if self.spaces.begins(server.round) else sent

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Return the factors of all periods."""
        return {**message, MODEL: self.spaces.model(message[MODEL], model())}

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Return X of this period."""
        inner = self.spaces.active(reply.params, received.round)
        return reply.with_trees({**reply.trees, MODEL: inner})

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Return the replies with factors."""
        params = received().params
        return [
            reply.with_trees({
                **reply.trees,
                MODEL: self.spaces.with_active(params, reply.params, server.round),
            })
            for reply in replies
        ], {}  # fmt: skip

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those of a message."""
        return {**message, MODEL: self.spaces.stacked(message[MODEL])}

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply."""
        return {**message, MODEL: self.spaces.active(message[MODEL], 0)}


def reset_states(message: Trees, spaces: Subspaces) -> Trees:
    """Return a message whose states are 0 for X, because they belong to other bases."""
    after = dict(message)
    for tree in message.keys() - {MODEL}:
        zero = {pair.b: torch.zeros_like(message[tree][pair.b]) for pair, _ in spaces.pairs}
        after[tree] = {**message[tree], **zero}
    return after


def with_subspaces(recipe: Recipe, spaces: Subspaces) -> Recipe:
    """Return the recipe, whose links train X instead of the factors A and B."""
    recipe = with_space(recipe, spaces, "subspace")
    return replace(recipe, stages=(*recipe.stages, SubspaceAdapters(spaces)))


def require_states_of_0(recipe: Recipe, spaces: Subspaces) -> None:
    """Raise an error if the state of a link does not start at 0, as in each period."""
    ones = {pair.b: torch.ones(1, spaces.rank, spaces.rank) for pair, _ in spaces.pairs}
    for link in recipe.chain.links:
        if any(bool(value.any()) for value in link.init(ones).values()):
            raise InputError(
                f"[federation] adapters = 'subspace' starts the state of each link at 0, but the "
                f"state of {link.name} starts at other values. Choose another recipe, such as "
                "fedavg, local-muon, fedmuon or local-adamw."
            )
