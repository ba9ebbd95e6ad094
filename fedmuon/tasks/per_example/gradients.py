"""Per-example gradients of one parameter tensor, stored compactly.

Each class stores n gradients G_i in one form. `shape` is the shape in which their sum is
accumulated, `squares` returns ||G_i||_F^2 [n], `add_to_` adds sum_i factors_i G_i to a total, and
`rows` selects some of the gradients.

A norm from inner products is correct up to `slack` (see `clipping.py`). If the terms of a gradient
cancel so much that it would not be correct, this gradient is formed explicitly, both for the norm
and for the sum. The vector whose norm is measured is therefore the vector that is added.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedmuon.core.device import holds
from fedmuon.tasks.per_example.clipping import (
    inner_error,
    inner_products,
    largest_ratio,
    norms,
    scaled_norms,
    smallest_norm,
    sum_error,
    sum_of_products,
)

Shape = tuple[int, ...]
FORMED = {"cuda": 1 << 26}  # numbers of gradients formed at once; elsewhere, one gradient at a time


@dataclass(frozen=True)
class Explicit:
    """Gradients stored explicitly, [n, ...]."""

    values: Tensor

    @property
    def shape(self) -> Shape:
        """The shape of a gradient."""
        return tuple(self.values.shape[1:])

    def squares(self) -> Tensor:
        """Return ||G_i||_F^2 [n]."""
        return norms(self.values.flatten(1)).square_()

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Add sum_i factors_i G_i to the total."""
        total.view(-1).addmv_(self.values.flatten(1).T, factors)

    def rows(self, chosen: Tensor) -> "Explicit":
        """Return some of the gradients."""
        return Explicit(self.values[chosen])


@dataclass(frozen=True)
class Outer:
    """Gradients G_i = sum_t slope_it read_it^T, which are not formed.

    The reads are [n, g, T, d], and the slopes are [n, g, T, p]. T covers positions and points, and
    g covers independent groups of channels. The norm is computed from two T x T Gram matrices
    ("ghost clipping", Li et al. 2022).
    """

    reads: Tensor
    slopes: Tensor

    @property
    def shape(self) -> Shape:
        """(g, p, d)."""
        return self.slopes.shape[1], self.slopes.shape[3], self.reads.shape[3]

    def squares(self) -> Tensor:
        """Return ||G_i||_F^2 [n]."""
        return self.squares_and_lost[0].clone()

    @cached_property
    def squares_and_lost(self) -> tuple[Tensor, list[int]]:
        """The sums sum_st (read_s . read_t)(slope_s . slope_t) [n], and the rows formed instead.

        For T = 1, a square is a product of squared norms.
        """
        if self.reads.shape[2] == 1:
            return (scaled_norms(self.reads) * scaled_norms(self.slopes)).square_().sum((1, 2)), []
        grams = [inner_products(values, values) for values in (self.reads, self.slopes)]
        squares = sum_of_products(*grams)
        return _recompute_lost(squares, self.terms(), self.error, self.reads.shape[2], self._form)

    @property
    def error(self) -> float:
        """The error of a square from Gram matrices, in eps of the squared terms."""
        _, groups, count, size = self.reads.shape
        products = inner_error(size) + inner_error(self.slopes.shape[3])
        return products + sum_error(self.reads.dtype, count, count, groups)

    def terms(self) -> Tensor:
        """Return sum_t |slope_t| |read_t| [n], as the root of the sum of squares over groups."""
        # Increase the norms by the maximum that underflow can remove from a product.
        reads, slopes = (
            norms(values).add_(smallest_norm(values.dtype) * values.shape[-1] ** 0.5)
            for values in (self.reads, self.slopes)
        )
        return norms((reads * slopes).sum(2))

    def _form(self, rows: list[int]) -> Tensor:
        """Return some of the gradients [k, g, p, d]."""
        return self.slopes[rows].mT @ self.reads[rows]

    def rows(self, chosen: Tensor) -> "Outer":
        """Return some of the gradients."""
        return Outer(self.reads[chosen], self.slopes[chosen])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Add sum_it factors_i slope_it read_it^T to the total [g, p, d], one product per group."""
        factors = _add_formed_(total, factors, self.squares_and_lost[1], self._form)
        groups, p, d = self.shape
        weighted = (self.slopes * factors[:, None, None, None]).transpose(0, 1)
        reads = self.reads.transpose(0, 1).reshape(groups, -1, d)
        for group in range(groups):
            total[group].addmm_(weighted[group].reshape(-1, p).T, reads[group])

    def explicit(self) -> Explicit:
        """Return the gradients in explicit form [n, g, p, d]."""
        return Explicit(self.slopes.mT @ self.reads)


@dataclass(frozen=True)
class Lookup:
    """Gradients of an embedding [size, p]: slopes [n, T, p] in the rows `indices` [n, T]."""

    indices: Tensor
    slopes: Tensor
    size: int

    @property
    def shape(self) -> Shape:
        """The shape of the embedding."""
        return self.size, self.slopes.shape[2]

    def squares(self) -> Tensor:
        """Return ||G_i||_F^2 [n]."""
        return norms(self.merged.flatten(1)).square_()

    @cached_property
    def merged(self) -> Tensor:
        """The rows of the gradients: slopes [n, T, p], summed at the first place of each index.

        The other places of an index are 0. Terms that cancel have thus cancelled before the norm.
        """
        same = self.indices[:, :, None] == self.indices[:, None, :]
        first = ~same.tril(-1).any(2)
        return (same.to(self.slopes.dtype) @ self.slopes).mul_(first[..., None])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Add factors_i slope_it to total[index_it]."""
        weighted = (self.merged * factors[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.indices.flatten(), weighted)

    def rows(self, chosen: Tensor) -> "Lookup":
        """Return some of the gradients."""
        return Lookup(self.indices[chosen], self.slopes[chosen], self.size)


@dataclass(frozen=True)
class Tied:
    """Gradients E_i + H_i of an embedding that is also the weight of the last layer."""

    lookup: Lookup
    head: Outer | Explicit

    @property
    def shape(self) -> Shape:
        """The shape of the embedding."""
        return self.lookup.shape

    def squares(self) -> Tensor:
        """Return ||G_i||_F^2 [n]."""
        return self.squares_and_lost[0].clone()

    @cached_property
    def squares_and_lost(self) -> tuple[Tensor, list[int]]:
        """The squares ||E_i||^2 + ||H_i||^2 + 2 <E_i, H_i> [n], and the rows formed instead."""
        one, head = _square(self.lookup.merged), self.head
        at, slopes = self.lookup.indices, self.lookup.merged
        # <E_i, H_i> = sum_s (slope_s . row index_s of H_i), so only these rows are computed.
        if isinstance(head, Outer):
            other, terms = head.squares(), head.terms()
            error, count = head.error, head.reads.shape[2]
            reads, falls = head.reads[:, 0], head.slopes[:, 0]
            picked = falls.gather(2, at[:, None].expand(-1, falls.shape[1], -1))
            inner = sum_of_products(picked[:, None], inner_products(reads, slopes)[:, None])
        else:
            other, error, count = _square(head.values), 0.0, 1
            terms = other.sqrt()
            rows = head.values.view(len(at), *self.shape)
            rows = rows.gather(1, at[..., None].expand_as(slopes))
            inner = sum_of_products(rows[:, None], slopes[:, None])
        # The error of <E_i, H_i>, in eps of ||E_i|| times the terms of the head. In float64, it
        # also covers ||E_i||^2 and ||H_i||^2, because there is no wider type for their sums.
        _, length, size = slopes.shape
        inner_part = inner_error(size) + sum_error(slopes.dtype, 2048, length, size)
        # Increase norms that are too short for accurate squares.
        whole = one.sqrt() + terms + 2 * smallest_norm(one.dtype)
        return _recompute_lost(
            one + other + 2 * inner, whole, 2 + max(error, inner_part), 1 + count, self._form
        )

    def _form(self, rows: list[int]) -> Tensor:
        """Return some of the gradients [k, rows of the embedding, p]."""
        head, slopes = self.head, self.lookup.merged[rows]
        values = head.values[rows] if isinstance(head, Explicit) else head._form(rows)
        at = self.lookup.indices[rows][..., None].expand_as(slopes)
        return values.reshape(len(rows), *self.shape).scatter_add(1, at, slopes)

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Add sum_i factors_i (E_i + H_i) to the total."""
        factors = _add_formed_(total, factors, self.squares_and_lost[1], self._form)
        self.lookup.add_to_(total, factors)
        self.head.add_to_(total.view(self.head.shape), factors)

    def rows(self, chosen: Tensor) -> "Tied":
        """Return some of the gradients."""
        return Tied(self.lookup.rows(chosen), self.head.rows(chosen))


PerExample = Explicit | Outer | Lookup | Tied


def forming_is_cheaper(length: int, p: int, d: int) -> bool:
    """Return whether to form a sum of T = `length` outer products p x d for its norm.

    Forming the sum takes T p d products and gives p d numbers. Gram matrices take T^2 (p + d)
    products and give 2 T^2 numbers (Bu et al. 2022).
    """
    return length > 1 and length * (p + d) > p * d


def _square(values: Tensor) -> Tensor:
    """Return ||G_i||_F^2 [n], summed in float64."""
    return norms(values.flatten(1).double()).square_().to(values.dtype)


def _recompute_lost(
    squares: Tensor, terms: Tensor, error: float, count: int, form: Callable[[list[int]], Tensor]
) -> tuple[Tensor, list[int]]:
    """Recompute squares that lost their digits, from formed gradients; also return their rows."""
    most = largest_ratio(squares.dtype, error, count)
    kept = terms.square() <= most**2 * squares  # false if either side is NaN
    if holds(kept.all()):
        return squares, []
    lost = (~kept).nonzero().flatten().tolist()
    for rows, values in _formed(lost, form):
        squares[rows] = _square(values)
    return squares, lost


def _add_formed_(
    total: Tensor, factors: Tensor, lost: list[int], form: Callable[[list[int]], Tensor]
) -> Tensor:
    """Add the gradients that are formed, and return the factors of the others."""
    if not lost:
        return factors
    left = factors.clone()
    left[lost] = 0.0
    for rows, values in _formed(lost, form):
        scales = factors[rows].view(-1, *[1] * (values.ndim - 1))
        total.add_((values * scales).sum(0).view(total.shape))
    return left


def _formed(
    lost: list[int], form: Callable[[list[int]], Tensor]
) -> Iterator[tuple[list[int], Tensor]]:
    """Form gradients one at a time or, on a GPU, as many as have `FORMED` numbers."""
    start, size = 0, 1
    while start < len(lost):
        rows = lost[start : start + size]
        values = form(rows)
        yield rows, values
        start += len(rows)
        size = max(1, FORMED.get(values.device.type, 0) * len(rows) // values.numel())
