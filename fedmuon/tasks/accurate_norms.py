"""Norms and inner products whose error is bounded, whatever order a processor adds in.

A sum of n products in floating point, added in any order, fused or not, is within
n/2 eps / (1 - n/2 eps) of sum |x_i y_i| <= ||x|| ||y|| (Higham 2002, section 3.1; u = eps/2). Which
order a matrix product takes hangs on the processor and the shape (running sums of 384 numbers on
one, of 8,192 on another), so nothing better holds for a call of one. Here a product is cut in
pieces of about sqrt(n) numbers, which makes the bound about sqrt(n) eps instead. Reduced precision
of products (TF32, bfloat16) must be off, as it is unless a program asks torch for it.
"""

import math

import torch
from torch import Tensor

from fedmuon.core.device import at_hand
from fedmuon.tasks.per_example.clipping import slack

PIECE = 64  # numbers in a piece, at least: shorter ones keep a processor waiting
MOST = 8.0  # how many times longer the terms of a gradient may be than their sum, at most
RUN = 1024  # numbers in a norm's running sum: over 600,000 equal ones torch's is off by 2.8e-4
REST = 64  # eps for the roundings of a norm, of a factor and of what is second order below


def length(values: Tensor) -> Tensor:
    """||v|| over the last axis, in pieces; squares may underflow, or overflow to infinity."""
    size = values.shape[-1]
    if size <= RUN:
        return torch.linalg.vector_norm(values, dim=-1)
    whole = size // RUN * RUN
    pieces = torch.linalg.vector_norm(values[..., :whole].unflatten(-1, (-1, RUN)), dim=-1)
    rest = torch.linalg.vector_norm(values[..., whole:], dim=-1, keepdim=True)
    return length(torch.cat([pieces, rest], -1))


def lengths(values: Tensor) -> Tensor:
    """As `length`, of vectors of any scale: those whose squares leave the range are scaled first.

    A product of two such norms is right even where one is tiny and the other huge.
    """
    found, info = length(values), torch.finfo(values.dtype)
    odd = ~((found > (info.tiny / info.eps) ** 0.5) & (found < 0.5 * info.max**0.5))
    if not at_hand(values.device):
        peak = values.abs().amax(-1).clamp(min=info.tiny)
        return torch.where(odd, peak * length(values / peak[..., None]), found)
    if bool(odd.any()):
        part = values[odd]
        peak = part.abs().amax(-1).clamp(min=info.tiny)
        found[odd] = peak * length(part / peak[:, None])
    return found


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.mT over the last axis, each within `inner_error` eps of the product of norms."""
    size, piece = a.shape[-1], _piece(a.shape[-1])
    total = a[..., :piece] @ b[..., :piece].mT
    for start in range(piece, size, piece):
        here = slice(start, start + piece)
        total += a[..., here] @ b[..., here].mT
    return total


def inner_error(size: int) -> float:
    """The bound in eps: half of the numbers in a piece and of the pieces."""
    piece = min(_piece(size), size)
    return (piece + math.ceil(size / max(piece, 1))) / 2


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """sum_gst a_gst b_gst [n] of stacks [n, g, s, t], axis by axis and in float64."""
    return (a * b).sum(3, dtype=torch.float64).sum(2).sum(1).to(a.dtype)


def sum_error(dtype: torch.dtype, *axes: int) -> float:
    """The bound in eps of a sum over axes of these lengths: float64 has nothing wider."""
    return 2.0 + (sum(axes) / 2 if dtype == torch.float64 else 0.0)


def certain(dtype: torch.dtype, error: float, count: int) -> float:
    """How many times longer than its sum the terms of a gradient may be, so that its norm, from a
    square within `error` eps of the squared terms, and what `count` terms add up to stay within
    the slack: the largest x <= 8 with error x^2 / 2 + (count / 2 + 1) x <= slack / eps - 64."""
    budget, linear = slack(dtype) / torch.finfo(dtype).eps - REST, count / 2 + 1
    # The root of the quadratic in a form that does not cancel.
    return min(MOST, 2 * budget / (linear + math.sqrt(linear**2 + 2 * error * budget)))


def least(dtype: torch.dtype) -> float:
    """Norms below it may have squares without digits."""
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5


def _piece(size: int) -> int:
    return max(PIECE, math.isqrt(size))
