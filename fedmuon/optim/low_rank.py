"""Codecs, which write the states of links in messages.

A `Codec` converts the tensors of a state to the tensors of a message, and back. `EncodedStates`
applies codecs to the states of a recipe. Messages within one process are also encoded, so that all
engines compute with the same values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.errors import InputError, shown
from fedmuon.core.threads import one_thread
from fedmuon.optim.chain import States
from fedmuon.optim.encoding_stage import EncodingStage
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Trees
from fedmuon.tasks.base import Params

LEFT, RIGHT = ":left", ":right"  # suffixes of a tensor's two factors


@dataclass(frozen=True)
class Codec:
    """The functions that write a state in a message and read it.

    Attributes:
        encode: Function that receives a state, and returns the tensors of the message. Each replica
            is encoded separately.
        decode: Function that receives the tensors of the message and a template state, and returns
            the state.
        template: Function that receives a state, and returns tensors with the shapes of the state's
            message.
    """

    encode: Callable[[Params], Params]
    decode: Callable[[Params, Params], Params]
    template: Callable[[Params], Params]


def factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors L and R of the nearest matrices of rank r.

    L has the shape [..., m, r], and R has the shape [..., r, n]. The product L R is the truncated
    singular value decomposition of the matrices, and L contains the singular values. With
    r = min(m, n), L R equals the matrices up to rounding.
    """
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    return left[..., :rank] * values[..., None, :rank], right[..., :rank, :]


def factors_fit(value: Tensor, rank: int) -> tuple[int, int] | None:
    """Return the shape (m, n) of the matrices in a tensor that is sent as factors.

    The result is None if the tensor has no more entries than its factors of this rank.
    """
    if value.ndim < 3:
        return None
    m, n = value.shape[1], value.shape[2:].numel()
    return (m, n) if rank * (m + n) < m * n else None


def low_rank(rank: int) -> Codec:
    """Return a codec that sends each matrix of a state as two factors of the given rank.

    A tensor [S, m, ...] is a stack of matrices [S, m, n]. Vectors are sent uncompressed. A matrix
    with m n <= r (m + n) is also sent uncompressed, because its factors have at least as many
    entries.
    """

    if not isinstance(rank, int) or rank < 1:
        raise InputError(
            f"the rank of low_rank is {rank}, but it must be an integer of 1 or more. Use "
            "low_rank(8), for example."
        )

    def encode(state: Params) -> Params:
        sent: Params = {}
        for name, value in state.items():
            if factors_fit(value, rank) is None:
                sent[name] = value
            else:
                sent[name + LEFT], sent[name + RIGHT] = factors(value.flatten(2), rank)
        return sent

    def decode(sent: Params, like: Params) -> Params:
        decoded: Params = {}
        for name, value in like.items():  # a state need not have all tensors of the model
            if name in sent:
                decoded[name] = sent[name]
            elif name + LEFT in sent:
                decoded[name] = (sent[name + LEFT] @ sent[name + RIGHT]).reshape(value.shape)
        return decoded

    def template(like: Params) -> Params:
        templates: Params = {}
        for name, value in like.items():
            if (size := factors_fit(value, rank)) is None:
                templates[name] = value
            else:
                templates[name + LEFT] = value.new_empty(len(value), size[0], rank)
                templates[name + RIGHT] = value.new_empty(len(value), rank, size[1])
        return templates

    return Codec(encode, decode, template)


@dataclass(frozen=True)
class EncodedStates(EncodingStage):
    """A stage that writes states with codecs.

    Attributes:
        codecs: Mapping from a state name to its codec. Other states are sent unchanged.
    """

    codecs: Mapping[str, Codec] = field(hash=False)

    def require(self, recipe: Any) -> None:
        """Raise an error if a codec is not a `Codec`, or belongs to no state in a message."""
        sound = (
            isinstance(self.codecs, Mapping)
            and all(isinstance(codec, Codec) for codec in self.codecs.values())
            and {*self.codecs} <= {*recipe.sent, *recipe.returned}
        )
        if not sound:
            raise InputError(
                f"codecs of a Recipe is {shown(self.codecs)}, but it must be a mapping of names in "
                "`sent` or `returned` to codecs, such as low_rank(8)."
            )
        super().require(recipe)

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Encode the states that the server sends."""
        return self._changed(message, lambda codec, state: codec.encode(state))

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Decode the states that the server has sent."""
        like = message[MODEL]
        return self._changed(message, lambda codec, tensors: codec.decode(tensors, like))

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Encode the states that a client returns, with one thread as in local steps."""
        with one_thread():
            return reply.with_trees(
                self._changed(reply.trees, lambda codec, state: codec.encode(state))
            )

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Decode the states that the clients have returned."""
        return [
            reply.with_trees(
                self._changed(
                    reply.trees, lambda codec, tensors: codec.decode(tensors, server.params)
                )
            )
            for reply in replies
        ], {}

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those of an encoded message."""
        return self._changed(message, lambda codec, state: codec.template(state))

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of an encoded reply."""
        return self.sent_like(message)

    def _changed(self, trees: Trees, change: Callable[[Codec, Params], Params]) -> Trees:
        """Return the trees, of which those with a codec are changed."""
        return {
            name: change(self.codecs[name], tree) if name in self.codecs else tree
            for name, tree in trees.items()
        }
