"""Adapters whose rank depends on the client, as in HetLoRA (arXiv:2401.06432).

The server has factors A [R, n] and B [m, R]. Client i has rank r_i <= R: it starts from the first
r_i rows of A and columns of B, and returns them. The other rows and columns are 0 on the client.
Their gradients are 0, too: dL/dB = G A^T and dL/dA = B^T G. An orthogonalizer could still fill
them, as U V^T of a singular value decomposition does, so a last link sets their steps to 0. The
server fills replies with zeros. So the mean of the products is that of the clients' models.

With the mean of the products (`adapter_means.exact_mean`), the server's factors are those of a
singular value decomposition, in descending order. What client i uses is then the best
approximation of rank r_i. A direction that clients of a share q use is multiplied by q in each
round, before the effect of training. With the mean of factors, it is multiplied by q^2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.optim.adapters import Pair
from fedmuon.optim.chain import Chain, Context, Link, State, States
from fedmuon.optim.encoding_stage import EncodingStage
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Trees
from fedmuon.tasks.base import Params

Change = Callable[[Tensor, int], Tensor]  # (a factor, the axis of its rank) -> the changed factor


@dataclass(frozen=True)
class AdapterRanks(EncodingStage):
    """A stage that gives clients a part of each adapter, and returns only this part.

    The server sends the same message to all clients.

    Attributes:
        pairs: The adapters.
        ranks: The ranks, which client i takes in turn: `ranks[i % len(ranks)]`.
    """

    pairs: tuple[Pair, ...]
    ranks: tuple[int, ...]

    facts = (Trait.VARIES_RANKS,)
    exact = True

    def rank(self, client: int) -> int:
        """Return the rank of a client."""
        return self.ranks[client % len(self.ranks)]

    def assign(self, trees: Trees, clients: Sequence[int]) -> Trees:
        """Set the rows of A and columns of B to 0 that a client does not use, also in states."""

        def masked(value: Tensor, axis: int) -> Tensor:
            size = value.shape[axis]
            masks = [torch.arange(size, device=value.device) < self.rank(i) for i in clients]
            mask = torch.stack(masks).repeat_interleave(len(value) // len(clients), 0)
            shape = [len(value), *[1] * (value.ndim - 1)]
            shape[axis] = size
            return torch.where(mask.view(shape), value, 0)

        return self._changed(trees, masked)

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Return the rows of A and columns of B that the client uses."""
        return reply.with_trees(self._cut(reply.trees, self.rank(reply.client)))

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Fill the replies with zeros."""
        ranks = {name: server.params[name].shape[axis] for name, axis in self._axes.items()}

        def filled(tree: Params) -> Params:
            return {
                name: _with_zeros(value, self._axes[name], ranks[name]) if name in ranks else value
                for name, value in tree.items()
            }

        return [
            reply.with_trees({name: filled(tree) for name, tree in reply.trees.items()})
            for reply in replies
        ], {}

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply with the largest rank."""
        return self._cut(message, max(self.ranks))

    def returned_by(self, message: Trees, client: int) -> Trees:
        """Return tensors like those of a client's reply."""
        return self._cut(message, self.rank(client))

    @property
    def _axes(self) -> dict[str, int]:
        """The axis of the rank in each factor [S, ...]."""
        return {pair.a: 1 for pair in self.pairs} | {pair.b: 2 for pair in self.pairs}

    def _cut(self, trees: Trees, rank: int) -> Trees:
        def cut(value: Tensor, axis: int) -> Tensor:
            return value.narrow(axis, 0, min(rank, value.shape[axis])).contiguous()

        return self._changed(trees, cut)

    def _changed(self, trees: Trees, change: Change) -> Trees:
        axes = self._axes

        def changed(tree: Params) -> Params:
            return {name: change(x, axes[name]) if name in axes else x for name, x in tree.items()}

        return {name: changed(tree) for name, tree in trees.items()}


def with_ranks(recipe: Recipe, ranks: AdapterRanks) -> Recipe:
    """Return the recipe, whose clients train only the rows and columns of their rank."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return ranks.assign({MODEL: direction}, context.clients)[MODEL], state

    cut = Link("ranks", lambda params: {}, update, knows_client=True)
    chain = Chain((*recipe.chain.links, cut))
    return replace(recipe, chain=chain, stages=(*recipe.stages, ranks))


def _with_zeros(value: Tensor, axis: int, size: int) -> Tensor:
    """Return the tensor, filled with zeros to this size of an axis."""
    shape = list(value.shape)
    shape[axis] = size - value.shape[axis]
    return torch.cat([value, value.new_zeros(shape)], axis)
