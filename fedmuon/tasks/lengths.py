"""Euclidean norms whose last digits are all that rounding takes."""

import torch
from torch import Tensor

PIECE = 1024  # numbers in a running sum: over 600,000 equal ones torch's norm is off by 2.8e-4


def length(values: Tensor) -> Tensor:
    """||v|| over the last axis, in pieces; squares may underflow, or overflow to infinity."""
    size = values.shape[-1]
    if size <= PIECE:
        return torch.linalg.vector_norm(values, dim=-1)
    whole = size // PIECE * PIECE
    pieces = torch.linalg.vector_norm(values[..., :whole].unflatten(-1, (-1, PIECE)), dim=-1)
    rest = torch.linalg.vector_norm(values[..., whole:], dim=-1, keepdim=True)
    return length(torch.cat([pieces, rest], -1))


def lengths(values: Tensor) -> Tensor:
    """As `length`, of vectors of any scale: those whose squares leave the range are scaled first.

    A product of two such norms is right even where one is tiny and the other huge.
    """
    found, info = length(values), torch.finfo(values.dtype)
    odd = ~((found > (info.tiny / info.eps) ** 0.5) & (found < 0.5 * info.max**0.5))
    if bool(odd.any()):
        part = values[odd]
        peak = part.abs().amax(-1).clamp(min=info.tiny)
        found[odd] = peak * length(part / peak[:, None])
    return found
