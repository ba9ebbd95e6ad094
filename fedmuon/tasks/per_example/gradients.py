"""Per-example gradients of one parameter tensor, stored compactly.

Each class stores the gradients G_i of n examples in its own form. The method `squares` returns the
squared norm of each gradient. The method `add_to_` multiplies each gradient by a factor, and adds
the results to a total. The method `rows` returns the gradients of some examples. The attribute
`shape` is the shape of the total.

A norm that is computed from inner products must be accurate up to `slack` (see `clipping.py`). If
cancellation makes a norm less accurate, the full gradient is computed. Both the norm and the sum
then use the full gradient. The clipped norm is therefore always the norm of the gradient that is
added.
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
from fedmuon.tasks.per_example.variables import Variable

Shape = tuple[int, ...]
FORMED = {"cuda": 1 << 26}  # numbers of gradients formed at once; elsewhere, one gradient at a time


@dataclass(frozen=True)
class Explicit:
    """Per-example gradients that are stored in full, [n, ...]."""

    values: Tensor

    @property
    def shape(self) -> Shape:
        """The shape of one gradient."""
        return tuple(self.values.shape[1:])

    def squares(self) -> Tensor:
        """Return the squared norm of each gradient."""
        return norms(self.values.flatten(1)).square_()

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Multiply each gradient by its factor, and add the results to the total."""
        total.view(-1).addmv_(self.values.flatten(1).T, factors)

    def rows(self, chosen: Tensor) -> "Explicit":
        """Return the gradients of some examples."""
        return Explicit(self.values[chosen])


@dataclass(frozen=True)
class Outer:
    """Per-example gradients of a layer, stored as the layer's inputs and output gradients.

    The gradient of example i is G_i = sum_t slope_it read_it^T. Here, `reads` [n, g, T, d] contains
    the layer's inputs, and `slopes` [n, g, T, p] contains the gradients with respect to its
    outputs. The axis T runs over positions and points, and the axis g runs over independent groups
    of channels. The norm is computed from two T x T Gram matrices ("ghost clipping", Li et al.
    2022).
    """

    reads: Tensor
    slopes: Tensor

    @property
    def shape(self) -> Shape:
        """The shape (g, p, d) of one gradient."""
        return self.slopes.shape[1], self.slopes.shape[3], self.reads.shape[3]

    def squares(self) -> Tensor:
        """Return the squared norm of each gradient."""
        return self.squares_and_lost[0].clone()

    @cached_property
    def squares_and_lost(self) -> tuple[Tensor, list[int]]:
        """The squared norm of each gradient, and the examples whose full gradients were computed.

        A squared norm is the sum of (read_s . read_t) (slope_s . slope_t) over all s and t. For T =
        1, the squared norm is |read|^2 |slope|^2. If the sum is not accurate enough, the full
        gradient of the example is computed.
        """
        if self.reads.shape[2] == 1:
            return (scaled_norms(self.reads) * scaled_norms(self.slopes)).square_().sum((1, 2)), []
        grams = [inner_products(values, values) for values in (self.reads, self.slopes)]
        squares = sum_of_products(*grams)
        return _recompute_lost(squares, self.terms(), self.error, self.reads.shape[2], self._form)

    @property
    def error(self) -> float:
        """The error bound of a squared norm that is computed from Gram matrices.

        The unit of the bound is eps times the square of `terms`.
        """
        _, groups, count, size = self.reads.shape
        products = inner_error(size) + inner_error(self.slopes.shape[3])
        return products + sum_error(self.reads.dtype, count, count, groups)

    def terms(self) -> Tensor:
        """Return an upper bound of the norm of each gradient: the sum of the norms of its terms.

        For one group, the bound is the sum of |slope_t| |read_t| over t. For several groups, the
        bound is the root of the sum of the squared bounds of all groups.
        """
        # Increase the norms by the maximum that underflow can remove from a product.
        reads, slopes = (
            norms(values).add_(smallest_norm(values.dtype) * values.shape[-1] ** 0.5)
            for values in (self.reads, self.slopes)
        )
        return norms((reads * slopes).sum(2))

    def _form(self, rows: list[int]) -> Tensor:
        """Return the full gradients of some examples, as a tensor [k, g, p, d]."""
        return self.slopes[rows].mT @ self.reads[rows]

    def rows(self, chosen: Tensor) -> "Outer":
        """Return the gradients of some examples."""
        return Outer(self.reads[chosen], self.slopes[chosen])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Multiply each gradient by its factor, and add the results to the total [g, p, d]."""
        factors = _add_formed_(total, factors, self.squares_and_lost[1], self._form)
        groups, p, d = self.shape
        weighted = (self.slopes * factors[:, None, None, None]).transpose(0, 1)
        reads = self.reads.transpose(0, 1).reshape(groups, -1, d)
        for group in range(groups):
            total[group].addmm_(weighted[group].reshape(-1, p).T, reads[group])

    def explicit(self) -> Explicit:
        """Return the same gradients, stored in full as a tensor [n, g, p, d]."""
        return Explicit(self.slopes.mT @ self.reads)


@dataclass(frozen=True)
class Lookup:
    """Per-example gradients of an embedding, stored as gradients with respect to its outputs.

    The embedding has the shape [size, p]. `slopes` [n, T, p] contains the output gradients. The
    output gradient of example i at position t belongs to row `indices[i, t]` of the embedding.
    """

    indices: Tensor
    slopes: Tensor
    size: int

    @property
    def shape(self) -> Shape:
        """The shape of the embedding."""
        return self.size, self.slopes.shape[2]

    def squares(self) -> Tensor:
        """Return the squared norm of each gradient."""
        return norms(self.merged.flatten(1)).square_()

    @cached_property
    def merged(self) -> Tensor:
        """The slopes, after adding up the slopes of each example that have the same index.

        The result has the shape [n, T, p]. The sum is at the first position of its index, and the
        entries at the other positions of this index are 0. Opposite slopes therefore cancel before
        the norm is computed.
        """
        same = self.indices[:, :, None] == self.indices[:, None, :]
        first = ~same.tril(-1).any(2)
        return (same.to(self.slopes.dtype) @ self.slopes).mul_(first[..., None])

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Multiply each gradient by its factor, and add the results to the total [size, p]."""
        weighted = (self.merged * factors[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.indices.flatten(), weighted)

    def rows(self, chosen: Tensor) -> "Lookup":
        """Return the gradients of some examples."""
        return Lookup(self.indices[chosen], self.slopes[chosen], self.size)


@dataclass(frozen=True)
class Tied:
    """Per-example gradients of an embedding that is also the weight of the last layer.

    A gradient is the sum E_i + H_i: E_i comes from the embedding, and H_i from the last layer.
    """

    lookup: Lookup
    head: Outer | Explicit

    @property
    def shape(self) -> Shape:
        """The shape of the embedding."""
        return self.lookup.shape

    def squares(self) -> Tensor:
        """Return the squared norm of each gradient."""
        return self.squares_and_lost[0].clone()

    @cached_property
    def squares_and_lost(self) -> tuple[Tensor, list[int]]:
        """The squared norm of each gradient, and the examples whose full gradients were computed.

        The squared norm of the gradient E_i + H_i is ||E_i||^2 + ||H_i||^2 + 2 <E_i, H_i>. If this
        sum is not accurate enough, the full gradient is computed.
        """
        e_squares, head = _square(self.lookup.merged), self.head
        at, slopes = self.lookup.indices, self.lookup.merged
        # <E_i, H_i> = sum_s (slope_s . row index_s of H_i), so only these rows are computed.
        if isinstance(head, Outer):
            h_squares, terms = head.squares(), head.terms()
            error, count = head.error, head.reads.shape[2]
            reads, falls = head.reads[:, 0], head.slopes[:, 0]
            picked = falls.gather(2, at[:, None].expand(-1, falls.shape[1], -1))
            inner = sum_of_products(picked[:, None], inner_products(reads, slopes)[:, None])
        else:
            h_squares, error, count = _square(head.values), 0.0, 1
            terms = h_squares.sqrt()
            rows = head.values.view(len(at), *self.shape)
            rows = rows.gather(1, at[..., None].expand_as(slopes))
            inner = sum_of_products(rows[:, None], slopes[:, None])
        # The error of <E_i, H_i>, in eps of ||E_i|| times the terms of the head. In float64, it
        # also covers ||E_i||^2 and ||H_i||^2, because there is no wider type for their sums.
        _, length, size = slopes.shape
        inner_part = inner_error(size) + sum_error(slopes.dtype, 2048, length, size)
        # Increase norms that are too short for accurate squares.
        total_terms = e_squares.sqrt() + terms + 2 * smallest_norm(e_squares.dtype)
        return _recompute_lost(
            e_squares + h_squares + 2 * inner,
            total_terms,
            2 + max(error, inner_part),
            1 + count,
            self._form,
        )

    def _form(self, rows: list[int]) -> Tensor:
        """Return the full gradients of some examples, each as large as the embedding."""
        head, slopes = self.head, self.lookup.merged[rows]
        values = head.values[rows] if isinstance(head, Explicit) else head._form(rows)
        at = self.lookup.indices[rows][..., None].expand_as(slopes)
        return values.reshape(len(rows), *self.shape).scatter_add(1, at, slopes)

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """Multiply each gradient by its factor, and add the results to the total."""
        factors = _add_formed_(total, factors, self.squares_and_lost[1], self._form)
        self.lookup.add_to_(total, factors)
        self.head.add_to_(total.view(self.head.shape), factors)

    def rows(self, chosen: Tensor) -> "Tied":
        """Return the gradients of some examples."""
        return Tied(self.lookup.rows(chosen), self.head.rows(chosen))


PerExample = Explicit | Outer | Lookup | Tied


def of_variable(gradients: PerExample, variable: Variable) -> PerExample:
    """Return the per-example gradients of a variable, from those of its parameter."""
    if variable.left is None:
        return gradients
    m, r = variable.left.shape
    if isinstance(gradients, Outer):
        # A copy of these columns, so that the memory of the others is freed.
        reads = gradients.reads[..., variable.columns].contiguous()
        outer = Outer(reads, gradients.slopes @ variable.left)
        return outer.explicit() if forming_is_cheaper(*reads.shape[2:], r) else outer
    assert isinstance(gradients, Explicit)  # a factor of an adapter is no embedding
    matrices = gradients.values.reshape(len(gradients.values), m, -1)
    return Explicit(variable.left.mT @ matrices[..., variable.columns])


def forming_is_cheaper(length: int, p: int, d: int) -> bool:
    """Return whether a full gradient costs less than the Gram matrices for its norm.

    The gradient is a sum of T = `length` outer products p x d. Computing the gradient takes T p d
    products, and the gradient has p d numbers. Gram matrices take T^2 (p + d) products and have 2
    T^2 numbers (Bu et al. 2022).
    """
    return length > 1 and length * (p + d) > p * d


def _square(values: Tensor) -> Tensor:
    """Return the squared norm of each gradient, added up in float64."""
    return norms(values.flatten(1).double()).square_().to(values.dtype)


def _recompute_lost(
    squares: Tensor, terms: Tensor, error: float, count: int, form: Callable[[list[int]], Tensor]
) -> tuple[Tensor, list[int]]:
    """Recompute inaccurate squared norms from full gradients.

    Return the squared norms, and the examples that were recomputed.
    """
    limit = largest_ratio(squares.dtype, error, count)
    accurate = terms.square() <= limit**2 * squares  # false if either side is NaN
    if holds(accurate.all()):
        return squares, []
    inaccurate = (~accurate).nonzero().flatten().tolist()
    for rows, values in _formed(inaccurate, form):
        squares[rows] = _square(values)
    return squares, inaccurate


def _add_formed_(
    total: Tensor, factors: Tensor, examples: list[int], form: Callable[[list[int]], Tensor]
) -> Tensor:
    """Compute the full gradients of these examples, and add them to the total.

    Return a copy of the factors in which the factors of these examples are 0, so that their
    gradients are not added again. If `examples` is empty, return `factors`.
    """
    if not examples:
        return factors
    left = factors.clone()
    left[examples] = 0.0
    for rows, values in _formed(examples, form):
        scales = factors[rows].view(-1, *[1] * (values.ndim - 1))
        total.add_((values * scales).sum(0).view(total.shape))
    return left


def _formed(
    examples: list[int], form: Callable[[list[int]], Tensor]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the full gradients of these examples, in groups.

    On a CPU, a group is one gradient. On a GPU, a group has about `FORMED` numbers.
    """
    start, size = 0, 1
    while start < len(examples):
        rows = examples[start : start + size]
        values = form(rows)
        yield rows, values
        start += len(rows)
        size = max(1, FORMED.get(values.device.type, 0) * len(rows) // values.numel())
