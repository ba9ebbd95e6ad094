"""Per-example gradients of one parameter tensor, held as little as their norms and sums need.

Each form of n gradients G_i has the `shape` in which a total is held while it grows, `squares`
||G_i||_F^2 [n], `add_to_`, which adds sum_i factors_i G_i to a total, and some `rows` of them.

What is measured is what is added: a norm that comes from inner products is right to `slack` (see
`clipping.py`), and gradients whose terms cancel so far that it would not be are formed
one by one, for the norm and for the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedmuon.core.device import holds
from fedmuon.tasks.accurate_norms import (
    certain,
    inner_error,
    inner_products,
    least,
    length,
    lengths,
    sum_error,
    sum_of_products,
)

Shape = tuple[int, ...]


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
        grams = [inner_products(values, values) for values in (self.reads, self.slopes)]
        squares = sum_of_products(*grams)
        return _mended(squares, self.terms(), self.error, self.reads.shape[2], self._alone)

    @property
    def error(self) -> float:
        """By how many eps of the squared terms the Gram matrices may miss a square."""
        _, groups, count, size = self.reads.shape
        products = inner_error(size) + inner_error(self.slopes.shape[3])
        return products + sum_error(self.reads.dtype, count, count, groups)

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

    def cheaper(self) -> "Outer | Explicit":
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
        one, head = _square(self.lookup.merged), self.head
        outer = isinstance(head, Outer)
        other = head.squares() if outer else _square(head.values)
        terms = head.terms() if outer else other.sqrt()
        count = 1 + (head.reads.shape[2] if outer else 1)
        error = 2 + max(head.error if outer else 0.0, self._inner_error)
        # Norms too short for squares with digits are raised.
        whole = one.sqrt() + terms + 2 * least(one.dtype)
        return _mended(one + other + 2 * self._inner(), whole, error, count, self._alone)

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
            rows = whole.gather(1, at[..., None].expand_as(slopes))
            return sum_of_products(rows[:, None], slopes[:, None])
        reads, falls = self.head.reads[:, 0], self.head.slopes[:, 0]
        picked = falls.gather(2, at[:, None].expand(-1, falls.shape[1], -1))
        return sum_of_products(picked[:, None], inner_products(reads, slopes)[:, None])

    @property
    def _inner_error(self) -> float:
        """By how many eps of ||E_i|| times the head's terms <E_i, H_i> may be missed, and in
        float64 ||E_i||^2 and ||H_i||^2, which are summed no wider."""
        _, count, size = self.lookup.slopes.shape
        dtype = self.lookup.slopes.dtype
        return inner_error(size) + sum_error(dtype, 2048, count, size)


PerExample = Explicit | Outer | Lookup | Tied


def forms(length: int, p: int, d: int) -> bool:
    """Whether a sum of `length` outer products p x d is formed for its norm: p d numbers from
    T p d products, against 2 T^2 numbers of Gram matrices from T^2 (p + d) (Bu et al. 2022)."""
    return length > 1 and length * (p + d) > p * d


def _square(values: Tensor) -> Tensor:
    """||G_i||_F^2 [n], summed in float64."""
    return length(values.flatten(1).double()).square_().to(values.dtype)


def _above(values: Tensor) -> Tensor:
    """Norms over the last axis, raised by what underflow can take from an inner product."""
    return length(values).add_(least(values.dtype) * values.shape[-1] ** 0.5)


def _mended(
    squares: Tensor, terms: Tensor, error: float, count: int, alone: Callable[[int], Tensor]
) -> tuple[Tensor, list[int]]:
    """Squares, those that lost their digits taken from the gradients; and the rows of these."""
    most = certain(squares.dtype, error, count)
    kept = terms.square() <= most**2 * squares  # not where either is NaN
    if holds(kept.all()):
        return squares, []
    lost = (~kept).nonzero().flatten().tolist()
    for row in lost:
        squares[row] = _square(alone(row)[None])[0]
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
