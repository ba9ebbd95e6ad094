"""A map as one value: how it is applied, and the constant that certifies bounds with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedmuon.errors import InputError


@dataclass(frozen=True)
class Orthogonalizer:
    """`apply` maps stacks of matrices [..., m, n] to stacks of the same shape, each matrix alone.

    `lipschitz` is an L with ||apply(M) - apply(M')||_F <= L ||M - M'||_F for all M, M', which its
    author answers for; without one, perturbations are measured and bounds refused.
    """

    apply: Callable[[Tensor], Tensor]
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no constant."""
        if self.lipschitz is not None and not 0 <= self.lipschitz < float("inf"):
            raise InputError(f"lipschitz = {self.lipschitz} is refused: give a number of 0 or more")


def as_orthogonalizer(found: Any) -> Orthogonalizer:
    """What was given as a map: a value, or a function on stacks."""
    if isinstance(found, Orthogonalizer):
        return found
    if callable(found):
        return Orthogonalizer(found)
    raise InputError(
        f"a map of type {type(found).__name__} is none: give a function on stacks [..., m, n], or "
        "fedmuon.Orthogonalizer(apply, lipschitz)"
    )
