"""Adapters U X V^T whose bases follow the gradient (FedSubMuon's variant of `subspaces.py`).

Let G_i be the gradient of client i with respect to a weight W [m, n], on one mini-batch, at the
model that the server sends in the last round of a period. In this round, client i also sends the
sketches G_i V' [m, r] and G_i^T U' [n, r], where U' and V' are the random bases of the next period.
The server averages them like models. The bases of the next period are

    U = Q(mean_i G_i V'),   V = Q(mean_i G_i^T U'),

where Q(M) is the orthonormal factor of the QR decomposition. This is one step of the randomized
range finder (Halko, Martinsson and Tropp 2011) for the mean gradient, without an exchange of its
own. The sketches use random bases, because the gradient along the last bases is small after they
were trained. The first period has no earlier round, so its bases are random.

**The gradient of W is never computed.** An adapter W + s B A has the gradients dL/dB = s G A^T and
dL/dA = s B^T G. In columns of B and rows of A whose product is 0, A = V'^T and B = 0 give s G V',
and A = 0 and B = U' give s U'^T G. The scale s does not change Q.

**The bases are part of the model**, because clients cannot draw them. With P periods, the adapters
have P + 1 blocks of r columns of B and rows of A. In period p, block p contains U X and V^T, and
block p + 1 contains U and 0, whose product is 0. So the server sends all factors, and a reply
contains X, and in the last round of a period the sketches. Checkpoints and engines need no change.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.optim.chain import Chain, Context, Link, State, States
from fedmuon.optim.encoding_stage import EncodingStage
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Trees
from fedmuon.optim.subspaces import Subspaces, reset_states
from fedmuon.optim.trained_space import with_space
from fedmuon.tasks.base import Params

SKETCH = "sketch"  # name of the link, and of the state that clients return
DUE = "due"  # entry of the server's state: 1 if clients return sketches in the next round, else 0


@dataclass(frozen=True)
class FollowingSubspaces(Subspaces):
    """Subspaces whose left basis U is read from the model: from the columns after U X."""

    def left(self, layer: int, params: Params, round: int) -> Tensor:
        """Return U [S, m, r] of the round's period."""
        b = params[self.pairs[layer][0].b].flatten(2)
        return b[..., self.block(self.period(round) + 1)]

    def due(self, round: int) -> bool:
        """Return whether clients return sketches: another period begins in the next round."""
        return self.begins(round + 1)

    def with_new_bases(self, params: Params, sketch: Params, round: int) -> Params:
        """Return the model at the start of a period: with its bases, and with X = 0.

        Args:
            params: The model at the end of the last period.
            sketch: The mean sketches. They are not read in the first round.
            round: The first round of the period.
        """
        after, period = dict(params), self.period(round)
        here, ahead = self.block(period), self.block(period + 1)
        for layer, (pair, _) in enumerate(self.pairs):
            a, b = params[pair.a].flatten(2).clone(), params[pair.b].flatten(2).clone()
            if round == 0:
                left, right = (basis[0] for basis in self.bases(layer, b))
                a.zero_()
            else:
                left, right = (torch.linalg.qr(sketch[name]).Q for name in (pair.b, pair.a))
            b[..., here], a[..., here, :] = 0.0, right.mT
            b[..., ahead], a[..., ahead, :] = left, 0.0
            after[pair.a], after[pair.b] = (
                value.reshape(params[name].shape) for name, value in ((pair.a, a), (pair.b, b))
            )
        return after

    def probes(self, params: Params, round: int) -> tuple[Params, Params]:
        """Return models whose gradients contain the sketches, and which compute the same function.

        The first model gives G V' in B, and the second gives U'^T G in A.
        """
        of_left, of_right = dict(params), dict(params)
        period = self.period(round) + 1
        for layer, (pair, _) in enumerate(self.pairs):
            left, right = (basis[period] for basis in self.bases(layer, params[pair.b]))
            for model, columns, rows in ((of_left, 0.0, right.mT), (of_right, left, 0.0)):
                a, b = params[pair.a].flatten(2).clone(), params[pair.b].flatten(2).clone()
                b[..., self.block(period)], a[..., self.block(period), :] = columns, rows
                model[pair.a] = a.reshape(params[pair.a].shape)
                model[pair.b] = b.reshape(params[pair.b].shape)
        return of_left, of_right

    def sketches(self, slopes: tuple[Params, Params], round: int) -> Params:
        """Return G V' [S, m, r] under the names of B, and G^T U' [S, n, r] under those of A."""
        block, sketch = self.block(self.period(round) + 1), Params()
        for pair, _ in self.pairs:
            sketch[pair.b] = slopes[0][pair.b].flatten(2)[..., block]
            sketch[pair.a] = slopes[1][pair.a].flatten(2)[..., block, :].mT
        return sketch

    def no_sketch(self, params: Params) -> Params:
        """Return sketches of 0, with the shapes for this model."""
        sketch = Params()
        for pair, (m, n) in self.pairs:
            stack = params[pair.b]
            sketch[pair.b] = stack.new_zeros(len(stack), m, self.rank)
            sketch[pair.a] = stack.new_zeros(len(stack), n, self.rank)
        return sketch


@dataclass(frozen=True)
class FollowingAdapters(EncodingStage):
    """A stage that starts each period with new bases, and sends X and sketches in replies.

    Attributes:
        spaces: The bases.
    """

    spaces: FollowingSubspaces

    facts = (Trait.SENDS_VARIABLES, Trait.SKETCHES_GRADIENTS)

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Send the factors, at the start of a period with new bases, and states that are 0."""
        if not self.spaces.begins(server.round):
            return message
        sketch = server.states[SKETCH]
        model = self.spaces.with_new_bases(message[MODEL], sketch, server.round)
        return {**reset_states(message, self.spaces), MODEL: model}

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Return X, and the sketches if they are due."""
        inner = self.spaces.active(reply.params, received.round)
        sketch = dict(reply.states[SKETCH]) if self.spaces.due(received.round) else {}
        sketch.pop(DUE, None)
        return reply.with_trees({**reply.trees, MODEL: inner, SKETCH: sketch})

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Return the replies with factors, and say whether the next round has sketches."""
        params, spaces = received().params, self.spaces
        flag = _flag(params, spaces.due(server.round + 1))
        return [
            reply.with_trees({
                **reply.trees,
                MODEL: spaces.with_active(params, reply.params, server.round),
                SKETCH: {**(reply.states[SKETCH] or spaces.no_sketch(params)), DUE: flag},
            })
            for reply in replies
        ], {}  # fmt: skip

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply, with sketches only if they are due."""
        sketch = dict(message[SKETCH])
        due = sketch.pop(DUE)  # the server's value for the next round
        inner = self.spaces.active(message[MODEL], 0)
        return {**message, MODEL: inner, SKETCH: sketch if bool((due > 0.5).any()) else {}}


def with_following_subspaces(recipe: Recipe, spaces: FollowingSubspaces) -> Recipe:
    """Return the recipe, whose links train X between bases that follow the gradient."""

    def init(params: Params) -> State:
        return {**spaces.no_sketch(params), DUE: _flag(params, spaces.due(0))}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        # Before the first step, the model is the one that the client received.
        if not spaces.due(context.round) or context.params is not context.received:
            return direction, state
        left, right = (
            context.gradient(model)[1] for model in spaces.probes(context.params, context.round)
        )
        return direction, {**state, **spaces.sketches((left, right), context.round)}

    recipe = with_space(recipe, spaces, "subspace")
    return replace(
        recipe,
        chain=Chain((Link(SKETCH, init, update), *recipe.chain.links)),
        returned=(*recipe.returned, SKETCH),
        kept=(*recipe.kept, SKETCH),
        stages=(*recipe.stages, FollowingAdapters(spaces)),
    )


def _flag(params: Params, due: bool) -> Tensor:
    tensor = next(iter(params.values()))
    return tensor.new_full((len(tensor),), float(due))
