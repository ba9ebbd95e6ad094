"""Codecs, which write the states of links in messages.

A `Codec` converts the tensors of a state to the tensors of a message, and back. Messages within one
process are also encoded, so that all engines compute with the same values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmuon.core.errors import InputError
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
        found: Params = {}
        for name, value in like.items():  # a state need not have all tensors of the model
            if name in sent:
                found[name] = sent[name]
            elif name + LEFT in sent:
                found[name] = (sent[name + LEFT] @ sent[name + RIGHT]).reshape(value.shape)
        return found

    def template(like: Params) -> Params:
        found: Params = {}
        for name, value in like.items():
            if (size := factors_fit(value, rank)) is None:
                found[name] = value
            else:
                found[name + LEFT] = value.new_empty(len(value), size[0], rank)
                found[name + RIGHT] = value.new_empty(len(value), rank, size[1])
        return found

    return Codec(encode, decode, template)
