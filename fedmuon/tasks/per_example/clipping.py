"""Clipping rules, their sensitivity, and norms with bounded rounding errors.

An example has a gradient G = (G_1, ..., G_m), with one block for each parameter tensor. The example
contributes to the sum (DP-Muon, section 2):

    rule             contribution                  norm of all blocks together
    block            min(1, C / ||G_i||_F) G_i     at most C sqrt(m)
    flat             min(1, C / ||G||) G           at most C
    automatic        C G_i / ||G_i||_F             at most C sqrt(m)
    automatic-flat   C G / ||G||                   at most C

An example with gradient 0 contributes 0. Automatic clipping (DiSK, C.2) has no threshold that needs
tuning.

Because of rounding, a clipped norm may exceed C, but at most by the factor 1 + `slack`. The noise
is therefore increased by this factor (`fedmuon.privacy.mechanisms.gaussian`). An example whose
gradient is not finite contributes 0, whatever the other examples are. Squared norms below the
smallest normal number divided by eps are inaccurate. For such small norms, automatic rules
contribute 0, and the other rules use the smallest norm that is accurate.

**Error of norms.** Consider a sum of n products in floating point, added in any order, with or
without fused multiply-add. The error is at most n/2 eps / (1 - n/2 eps) times sum |x_i y_i| <=
||x|| ||y|| (Higham 2002, section 3.1, with u = eps/2). The order of addition in a matrix product
depends on the processor and the shape: one processor adds running sums of 384 numbers, another of
8,192. For a single matrix product, no better bound is therefore known. This module splits a product
into pieces of about sqrt(n) numbers, so the bound is about sqrt(n) eps. Reduced precision of
products (TF32, bfloat16) must be off, which is torch's default.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmuon.core.device import at_hand
from fedmuon.core.errors import InputError
from fedmuon.tasks.per_example.variables import Variable

RULES = ("block", "flat", "automatic", "automatic-flat")


def slack(dtype: torch.dtype) -> float:
    """Return the relative amount by which a clipped norm may exceed C because of rounding.

    The amount is 4.9e-4 in float32 and 2.3e-10 in float64, for sums in any order. In float64, the
    amount is a larger multiple of eps, because the sums cannot use a wider type. The noise is
    increased by the same amount.
    """
    return (2**20 if dtype == torch.float64 else 4096) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Clipping:
    """A clipping rule and its bound C, the same for every block.

    Attributes:
        rule: One of `RULES`.
        bound: The clipping bound C > 0. With an infinite bound, nothing is clipped.
        joint_block: Names of tensors that together form one block. In DP-Muon, these are all
            parameters that Muon does not train.
        variables: The variables whose gradients are clipped and summed. With None, these are all
            parameters.
    """

    rule: str = "block"
    bound: float = 1.0
    joint_block: frozenset[str] = frozenset()
    variables: Mapping[str, Variable] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InputError(f"clipping rule '{self.rule}' is unknown. Use {', '.join(RULES)}.")
        if not self.bound > 0:
            raise InputError(
                f"the clipping bound is {self.bound}, but it must be positive. Set the clipping "
                "bound to a positive number such as 1.0."
            )
        if self.automatic and math.isinf(self.bound):
            raise InputError(
                f"the clipping bound is infinite, but clipping = '{self.rule}' needs a finite "
                "clipping bound. Set the clipping bound to a finite number such as 1.0."
            )

    @property
    def automatic(self) -> bool:
        """Whether every gradient is scaled to the norm C, even if it is shorter."""
        return self.rule.startswith("automatic")

    def blocks(self, params: Collection[str]) -> int:
        """Return m, the number of blocks of a gradient that are clipped separately."""
        return len(self._groups(params))

    def sensitivity(self, params: Collection[str]) -> float:
        """Return the maximum L2 norm of the contribution of one example to the sums.

        If m blocks are clipped separately to the bound C, the result is C sqrt(m).
        """
        return self.bound * math.sqrt(self.blocks(params))

    def factors(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the factor that clips each block of each example.

        The factors are computed from the squared norms [..., n] of the blocks. If a squared norm is
        not finite, the factor is 0.
        """
        factors: dict[str, Tensor] = {}
        for names in self._groups(squares):
            square = torch.stack([squares[name] for name in names]).sum(0)
            if math.isinf(self.bound):
                factor = torch.ones_like(square)
            else:
                info = torch.finfo(square.dtype)
                smallest = info.tiny / info.eps
                ratio = self.bound * square.clamp(min=smallest).rsqrt()
                if not self.automatic:
                    ratio = ratio.clamp(max=1.0)
                valid = square.isfinite() & (square >= smallest if self.automatic else True)
                factor = torch.where(valid, ratio, 0.0)
            factors |= dict.fromkeys(names, factor)
        return factors

    def _groups(self, names: Collection[str]) -> list[list[str]]:
        """Return the names of the tensors in each block."""
        if self.rule.endswith("flat"):  # one norm over all parameters
            return [list(names)]
        several = [name for name in names if name in self.joint_block]
        alone = [[name] for name in names if name not in self.joint_block]
        return [*alone, several] if several else alone


# Norms and inner products with an error bound for any order of addition

PIECE = 64  # minimum number of terms in a piece, because shorter products are slow
MOST = 8.0  # maximum ratio of the terms of a gradient to their sum
RUN = 1024  # terms in a running sum; with 600,000 equal terms, torch's error would be 2.8e-4
REST = 64  # eps for the rounding of a norm and of a factor, and for second-order terms


def norms(values: Tensor) -> Tensor:
    """Return the norms over the last axis, added up in pieces.

    Squares may underflow or overflow.
    """
    size = values.shape[-1]
    if size <= RUN:
        return torch.linalg.vector_norm(values, dim=-1)
    cut = size // RUN * RUN
    pieces = torch.linalg.vector_norm(values[..., :cut].unflatten(-1, (-1, RUN)), dim=-1)
    tail = torch.linalg.vector_norm(values[..., cut:], dim=-1, keepdim=True)
    return norms(torch.cat([pieces, tail], -1))


def scaled_norms(values: Tensor) -> Tensor:
    """Return the norms over the last axis, also if the squares would underflow or overflow.

    A product of two of these norms is therefore correct even if one norm is tiny and the other is
    huge.
    """
    out, info = norms(values), torch.finfo(values.dtype)
    odd = ~((out > (info.tiny / info.eps) ** 0.5) & (out < 0.5 * info.max**0.5))
    if not at_hand(values.device):
        peak = values.abs().amax(-1).clamp(min=info.tiny)
        return torch.where(odd, peak * norms(values / peak[..., None]), out)
    if bool(odd.any()):
        part = values[odd]
        peak = part.abs().amax(-1).clamp(min=info.tiny)
        out[odd] = peak * norms(part / peak[:, None])
    return out


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.mT, added up in pieces along the last axis.

    The error of an entry is at most `inner_error` times eps times the norms of its two vectors.
    """
    size, piece = a.shape[-1], _piece(a.shape[-1])
    total = a[..., :piece] @ b[..., :piece].mT
    for start in range(piece, size, piece):
        part = slice(start, start + piece)
        total += a[..., part] @ b[..., part].mT
    return total


def inner_error(size: int) -> float:
    """Return the error bound of `inner_products` in units of eps.

    The bound is half the number of terms in a piece, plus half the number of pieces.
    """
    piece = min(_piece(size), size)
    return (piece + math.ceil(size / max(piece, 1))) / 2


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of a and b for each example.

    Both arrays have the shape [n, g, s, t], and the result has the shape [n]. The products are
    added in float64, one axis after the other.
    """
    return (a * b).sum(3, dtype=torch.float64).sum(2).sum(1).to(a.dtype)


def sum_error(dtype: torch.dtype, *axes: int) -> float:
    """Return the error bound of `sum_of_products` for axes of these lengths, in units of eps.

    In float64, the bound is larger, because there is no wider type for the sum.
    """
    return 2.0 + (sum(axes) / 2 if dtype == torch.float64 else 0.0)


def largest_ratio(dtype: torch.dtype, error: float, count: int) -> float:
    """Return the largest ratio of a gradient's terms to its norm for which the norm is accurate.

    The norm must be accurate up to `slack`. If the terms of a gradient cancel, the norm of their
    sum loses accuracy. Here, `count` terms are added, and the error of the squared norm is at most
    `error` times eps times the square of the terms. The result is the largest x <= 8 that satisfies
    error x^2 / 2 + (count / 2 + 1) x <= slack / eps - 64.
    """
    budget, linear = slack(dtype) / torch.finfo(dtype).eps - REST, count / 2 + 1
    # The root of the quadratic equation, in a form without cancellation
    return min(MOST, 2 * budget / (linear + math.sqrt(linear**2 + 2 * error * budget)))


def smallest_norm(dtype: torch.dtype) -> float:
    """Return the norm below which squared norms may be inaccurate because of underflow."""
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5


def _piece(size: int) -> int:
    return max(PIECE, math.isqrt(size))
