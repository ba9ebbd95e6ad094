"""SignMuon: clients vote on the sign of each entry of a step, with one bit per entry.

Client i votes s_i = sign(Orth(M_i)). The server takes the majority s = sign(s_1 + ... + s_K) and
moves each matrix by X <- X - lr s. Two cases need a random decision, because one bit has no zero:

- An entry of Orth(M_i) that is exactly 0, such as the row of a dead neuron, votes by a coin of the
  client. A fixed vote would let all clients move such entries in the same direction.
- An entry with as many votes for +1 as for -1 is decided by a coin of the server.

The coins depend on (seed, round, client, matrix) alone, so that all engines and resumed runs agree.

Source: arXiv:2605.16311.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmuon.core.device import to_device
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.chain import States
from fedmuon.optim.compression import pack, unpack
from fedmuon.optim.encoding_stage import EncodingStage
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Trees, require_finite
from fedmuon.tasks.base import Params, split_statistics

OF_CLIENT, OF_SERVER = 0, 1  # which coins are drawn: the key `step` of a draw
TIE = 2.0**-10  # the share of a coin in each vote of a tie, far above the rounding of a mean


@dataclass(frozen=True)
class Votes(EncodingStage):
    """A stage that sends the signs of the returned direction with one bit per entry.

    Tensors that Muon does not update, such as biases, are sent unchanged.

    Attributes:
        seed: The seed of the coins.
        routes: Mapping from a parameter name to its number of matrices. Parameters with 0 matrices
            are not voted on. By default, every parameter is one matrix.
    """

    seed: int = 0
    routes: Mapping[str, int] | None = None

    def is_voted(self, name: str) -> bool:
        """Return whether clients vote on the entries of this parameter."""
        return self.routes is None or self.routes.get(name, 0) > 0

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Replace the client's direction by packed votes.

        Raises:
            NonFinite: If the direction contains NaN or infinity, which a vote would hide.
        """
        require_finite(reply.params.values(), "direction", reply.client, received.round)

        def packed(value: Tensor, block: int) -> Tensor:
            undecided, votes = value == 0, value > 0
            if undecided.any():
                coin = self._coin(value, received.round, OF_CLIENT, block, reply.client)
                votes = torch.where(undecided, coin > 0, votes)
            return pack(votes.long(), 1)

        return reply.with_trees(self._changed(reply.trees, packed))

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Unpack the votes to +1 and -1, and let the coins of the server decide ties.

        In a tie, each vote gets a small share of the coin, so that the sign of the mean vote is
        the coin.
        """
        models: list[Params] = [dict(reply.params) for reply in replies]
        for block, name in enumerate(self._names(server.params)):
            like = server.params[name]
            votes = [_unpacked(model[name], like) for model in models]
            tied = torch.stack(votes).sum(0) == 0
            if tied.any():
                coin = self._coin(like, server.round, OF_SERVER, block)
                votes = [vote + TIE * coin * tied for vote in votes]
            for model, vote in zip(models, votes, strict=True):
                model[name] = vote
        return [
            reply.with_trees({**reply.trees, MODEL: model})
            for reply, model in zip(replies, models, strict=True)
        ], {}

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a reply with packed votes."""

        def template(value: Tensor, block: int) -> Tensor:
            length = -(-value[0].numel() // 8)
            return torch.empty((len(value), length), dtype=torch.uint8, device=value.device)

        return self._changed(message, template)

    def _names(self, model: Params) -> list[str]:
        return sorted(filter(self.is_voted, split_statistics(model)[0]))

    def _changed(self, trees: Trees, change: Callable[[Tensor, int], Tensor]) -> Trees:
        """Return the trees, of whose model the voted tensors are changed."""
        model = dict(trees[MODEL])
        for block, name in enumerate(self._names(model)):
            model[name] = change(model[name], block)
        return {**trees, MODEL: model}

    def _coin(self, like: Tensor, round: int, side: int, block: int, client: int = 0) -> Tensor:
        """Return +1 or -1 for each entry. All replicas have the same coins."""
        rng = generator(self.seed, Draw.VOTE, round=round, client=client, step=side, block=block)
        drawn = torch.from_numpy(2.0 * rng.integers(2, size=tuple(like.shape[1:])) - 1)
        return to_device(drawn, like.device, like.dtype).expand(like.shape)


def _unpacked(packed: Tensor, like: Tensor) -> Tensor:
    bits = unpack(packed.to(like.device), 1, like[0].numel())
    return (2.0 * bits - 1).to(like.dtype).view(like.shape)


def majority(votes: Votes, mean: Params) -> Params:
    """Return the elected signs of the mean vote, and the mean of all other parameters."""
    return {name: value.sign() if votes.is_voted(name) else value for name, value in mean.items()}


def require_matrix(routes: Mapping[str, int] | None) -> None:
    """Raise an error if there is no matrix to vote on."""
    if routes is not None and not any(routes.values()):
        raise InputError(
            "sign-muon lets clients vote on the entries of matrices, but `routes` contains no "
            "matrix. Use a model with matrices, or choose another optimizer, such as fedavg."
        )
