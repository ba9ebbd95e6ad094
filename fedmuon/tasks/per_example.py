"""Per-example gradients of one parameter tensor, held as little as their norms and sums need.

Each form knows the squared norms [n] of n gradients and adds their weighted sum to a total.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
        return torch.linalg.vector_norm(self.values.flatten(1), dim=1).square_()

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total += sum_i factors_i G_i."""
        total.view(-1).addmv_(self.values.flatten(1).T, factors)


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
        """sum_st (read_s . read_t)(slope_s . slope_t) [n]; for T = 1 a product of norms."""
        if self.reads.shape[2] == 1:
            norms = [torch.linalg.vector_norm(v, dim=-1) for v in (self.reads, self.slopes)]
            return (norms[0] * norms[1]).square_().sum((1, 2))
        grams = [values @ values.mT for values in (self.reads, self.slopes)]
        return (grams[0] * grams[1]).sum((1, 2, 3))

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total [g, p, d] += sum_it factors_i slope_it read_it^T, one product for each group."""
        groups, p, d = self.shape
        weighted = (self.slopes * factors[:, None, None, None]).transpose(0, 1)
        reads = self.reads.transpose(0, 1).reshape(groups, -1, d)
        for group in range(groups):
            total[group].addmm_(weighted[group].reshape(-1, p).T, reads[group])

    def formed(self) -> Explicit:
        """The gradients themselves [n, g, p, d]."""
        return Explicit(self.slopes.mT @ self.reads)

    def cheaper(self) -> PerExample:
        """In the form that holds fewer numbers: 2 T^2 in Gram matrices, or p d (Bu et al. 2022)."""
        length, (_, p, d) = self.reads.shape[2], self.shape
        return self if length == 1 or 2 * length**2 <= p * d else self.formed()


@dataclass(frozen=True)
class Lookup:
    """Gradients of an embedding [rows, p]: slopes [n, T, p] of the rows indices [n, T]."""

    indices: Tensor
    slopes: Tensor
    rows: int

    @property
    def shape(self) -> Shape:
        """The embedding's."""
        return self.rows, self.slopes.shape[2]

    def squares(self) -> Tensor:
        """sum_st [index_s = index_t](slope_s . slope_t) [n]."""
        same = self.indices[:, :, None] == self.indices[:, None, :]
        return (same * (self.slopes @ self.slopes.mT)).sum((1, 2))

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total[index_it] += factors_i slope_it."""
        weighted = (self.slopes * factors[:, None, None]).flatten(0, 1)
        total.index_add_(0, self.indices.flatten(), weighted)


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
        """||E_i||^2 + ||H_i||^2 + 2 <E_i, H_i> [n]."""
        return self.lookup.squares() + self.head.squares() + 2 * self._inner()

    def add_to_(self, total: Tensor, factors: Tensor) -> None:
        """total += sum_i factors_i (E_i + H_i)."""
        self.lookup.add_to_(total, factors)
        self.head.add_to_(total.view(self.head.shape), factors)

    def _inner(self) -> Tensor:
        """<E_i, H_i> = sum_s (slope_s . row index_s of H_i) [n]; rows are looked up, not formed."""
        at, slopes = self.lookup.indices, self.lookup.slopes
        if isinstance(self.head, Explicit):
            whole = self.head.values.view(len(at), *self.shape)
            return (whole.gather(1, at[..., None].expand_as(slopes)) * slopes).sum((1, 2))
        reads, falls = self.head.reads[:, 0], self.head.slopes[:, 0]
        picked = falls.gather(2, at[:, None].expand(-1, falls.shape[1], -1))
        return (picked * (reads @ slopes.mT)).sum((1, 2))
