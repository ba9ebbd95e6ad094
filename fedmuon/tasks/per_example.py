"""Per-example gradients of one parameter tensor, held as little as their norms and sums need.

Each form knows the squared norms [n] of n gradients and adds their weighted sum to a total. What is
measured is what is added: a norm that comes from inner products is right to `slack` (see
`fedmuon.privacy.clipping`), and gradients whose terms cancel so far that it would not be are formed
one by one, for the norm and for the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedmuon.tasks.lengths import length, lengths

# How many times longer the terms of a gradient may be, together, than their sum. Inner products of
# two vectors are taken to be within 24 eps of the product of their norms (blocked summation: 20 is
# the most seen, of equal numbers), so a square is within 24 * 8^2 eps, its root within 768 eps, and
# the sum's own rounding, 24 * 8 eps, adds up to less than the slack's 1024 eps.
LOST = 8.0
Shape = tuple[int, ...]


class PerExample(Protocol):
    """n gradients of one tensor."""

    @property
    def shape(self) -> Shape:
        """The shape in which a total is held while it grows."""
        ...

    def squares(self) -> Tensor:
        """||G_i||_F^2 [n]."""
        ...

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total += sum_i factors_i G_i."""
        ...

    def rows(self, chosen: Tensor) -> "PerExample":
        """Some of the gradients."""
        ...


@dataclass(frozen=True)
class Explicit:
    """The gradients themselves [n, ...]."""

    values: Tensor

    @property
    def shape(self) -> Shape:
        """That of a gradient."""
        return tuple(self.values.shape[1:])

    def squares(self) -> Tensor:
        """||G_i||_F^2 [n]."""
        return length(self.values.flatten(1)).square_()

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total += sum_i factors_i G_i."""
        total.view(-1).addmv_(self.values.flatten(1).T, factors)

    def rows(self, chosen: Tensor) -> "Explicit":
        """Some of the gradients."""
        return Explicit(self.values[chosen])


@dataclass(frozen=True)
class Outer:
    """G_i = sum_t slope_it read_it^T, never formed: reads [n, g, T, d], slopes [n, g, T, p].

    T runs over positions and points, g over groups of channels, which do not mix. The norm comes
    from two T x T Gram matrices (Li et al. 2022, "ghost clipping").
    """

    reads: Tensor
    slopes: Tensor

    @property
    def shape(self) -> Shape:
        """g, p, d."""
        return self.slopes.shape[1], self.slopes.shape[3], self.reads.shape[3]

    def squares(self) -> Tensor:
        """||G_i||_F^2 [n]."""
        return self.measured[0].clone()

    @cached_property
    def measured(self) -> tuple[Tensor, list[int]]:
        """sum_st (read_s . read_t)(slope_s . slope_t) [n], for T = 1 a product of norms; and the
        rows that are formed instead."""
        if self.reads.shape[2] == 1:
            return (lengths(self.reads) * lengths(self.slopes)).square_().sum((1, 2)), []
        grams = [values @ values.mT for values in (self.reads, self.slopes)]
        return _mended((grams[0] * grams[1]).sum((1, 2, 3)), self.terms(), self._alone)

    def terms(self) -> Tensor:
        """sum_t |slope_t| |read_t|, the root of its squares' sum over groups [n]."""
        reads, slopes = _above(self.reads), _above(self.slopes)
        return length((reads * slopes).sum(2))

    def _alone(self, row: int) -> Tensor:
        """One gradient [g, p, d]."""
        return self.slopes[row].mT @ self.reads[row]

    def rows(self, chosen: Tensor) -> "Outer":
        """Some of the gradients."""
        return Outer(self.reads[chosen], self.slopes[chosen])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total [g, p, d] += sum_it factors_i slope_it read_it^T, one product for each group."""
        factors = _formed_to_(total, factors, self.measured[1], self._alone)
        groups, p, d = self.shape
        weighted = (self.slopes * factors[:, None, None, None]).transpose(0, 1)
        reads = self.reads.transpose(0, 1).reshape(groups, -1, d)
        for group in range(groups):
            total[group].addmm_(weighted[group].reshape(-1, p).T, reads[group])

    def formed(self) -> Explicit:
        """The gradients themselves [n, g, p, d]."""
        return Explicit(self.slopes.mT @ self.reads)

    def cheaper(self) -> PerExample:
        """In the form that takes less work (see `forms`)."""
        return self.formed() if forms(self.reads.shape[2], *self.shape[1:]) else self


@dataclass(frozen=True)
class Lookup:
    """Gradients of an embedding [size, p]: slopes [n, T, p] of the rows indices [n, T]."""

    indices: Tensor
    slopes: Tensor
    size: int

    @property
    def shape(self) -> Shape:
        """The embedding's."""
        return self.size, self.slopes.shape[2]

    def squares(self) -> Tensor:
        """||G_i||_F^2 [n]."""
        return length(self.merged.flatten(1)).square_()

    @cached_property
    def merged(self) -> Tensor:
        """The slopes [n, T, p] added up at the first place of each index, 0 at its others: the
        rows of the gradient, so that what cancels has cancelled before a norm is taken."""
        same = self.indices[:, :, None] == self.indices[:, None, :]
        first = ~same.tril(-1).any(2)
        return (same.to(self.slopes.dtype) @ self.slopes).mul_(first[..., None])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total[index_it] += factors_i slope_it."""
        weighted = (self.merged * factors[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.indices.flatten(), weighted)

    def rows(self, chosen: Tensor) -> "Lookup":
        """Some of the gradients."""
        return Lookup(self.indices[chosen], self.slopes[chosen], self.size)


@dataclass(frozen=True)
class Tied:
    """Gradients of an embedding that is the last layer's weight too: E_i + H_i, of both uses."""

    lookup: Lookup
    head: Outer | Explicit

    @property
    def shape(self) -> Shape:
        """The embedding's."""
        return self.lookup.shape

    def squares(self) -> Tensor:
        """||G_i||_F^2 [n]."""
        return self.measured[0].clone()

    @cached_property
    def measured(self) -> tuple[Tensor, list[int]]:
        """||E_i||^2 + ||H_i||^2 + 2 <E_i, H_i> [n]; and the rows that are formed instead."""
        one, other = self.lookup.squares(), self.head.squares()
        terms = self.head.terms() if isinstance(self.head, Outer) else other.sqrt()
        least = _least(one.dtype)  # of norms, below which a square has lost its digits
        whole = one.sqrt() + terms + 2 * least
        return _mended(one + other + 2 * self._inner(), whole, self._alone)

    def _alone(self, row: int) -> Tensor:
        """One gradient [rows of the embedding, p]."""
        at, head = self.lookup.indices[row], self.head
        values = head.values[row] if isinstance(head, Explicit) else head._alone(row)
        return values.reshape(self.shape).index_add(0, at, self.lookup.merged[row])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total += sum_i factors_i (E_i + H_i)."""
        factors = _formed_to_(total, factors, self.measured[1], self._alone)
        self.lookup.add_to_(total, factors)
        self.head.add_to_(total.view(self.head.shape), factors)

    def rows(self, chosen: Tensor) -> "Tied":
        """Some of the gradients."""
        return Tied(self.lookup.rows(chosen), self.head.rows(chosen))

    def _inner(self) -> Tensor:
        """<E_i, H_i> = sum_s (slope_s . row index_s of H_i) [n]; rows are looked up, not formed."""
        at, slopes = self.lookup.indices, self.lookup.merged
        if isinstance(self.head, Explicit):
            whole = self.head.values.view(len(at), *self.shape)
            return (whole.gather(1, at[..., None].expand_as(slopes)) * slopes).sum((1, 2))
        reads, falls = self.head.reads[:, 0], self.head.slopes[:, 0]
        picked = falls.gather(2, at[:, None].expand(-1, falls.shape[1], -1))
        return (picked * (reads @ slopes.mT)).sum((1, 2))


def forms(length: int, p: int, d: int) -> bool:
    """Whether a sum of `length` outer products p x d is formed for its norm: p d numbers from
    T p d products, against 2 T^2 numbers of Gram matrices from T^2 (p + d) (Bu et al. 2022)."""
    return length > 1 and length * (p + d) > p * d


def _least(dtype: torch.dtype) -> float:
    """Norms below it may have squares without digits."""
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5


def _above(values: Tensor) -> Tensor:
    """Norms over the last axis, raised by what underflow can take from an inner product."""
    return length(values).add_(_least(values.dtype) * values.shape[-1] ** 0.5)


def _mended(
    squares: Tensor, terms: Tensor, alone: Callable[[int], Tensor]
) -> tuple[Tensor, list[int]]:
    """Squares, those that lost their digits taken from the gradients; and the rows of these."""
    kept = terms.square() <= LOST**2 * squares  # not where either is NaN
    lost = (~kept).nonzero().flatten().tolist()
    for row in lost:
        squares[row] = length(alone(row).flatten()).square()
    return squares, lost


def _formed_to_(
    total: Tensor, factors: Tensor, formed: list[int], alone: Callable[[int], Tensor]
) -> Tensor:
    """Add the gradients that are formed; the factors that are left for the others."""
    if not formed:
        return factors
    left = factors.clone()
    left[formed] = 0.0
    for row in formed:
        total.add_(alone(row) * factors[row])
    return left
