"""The maps as values: `fedmuon.orthogonalizers.smoothed_polar(lam=0.1)`, with their constants."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import FunctionType
from typing import Any

from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config.schema import OrthogonalizerTable
from fedmuon.core.errors import InputError
from fedmuon.core.guard import Guard
from fedmuon.core.registry import function
from fedmuon.orthogonalize import lipschitz
from fedmuon.orthogonalize.coefficients import Coefficients

__all__ = ["Orthogonalizer", "clipped_sign", "newton_schulz", "smoothed_polar"]


@dataclass(frozen=True)
class Orthogonalizer:
    """`apply` maps stacks of matrices [..., m, n] to stacks of the same shape, each matrix alone.

    `lipschitz` is an L with ||apply(M) - apply(M')||_F <= L ||M - M'||_F for all M, M', which its
    author answers for; without one, perturbations are measured and bounds refused. What a run's
    first step finds of a map is refused: draws of its own, matrices that are mixed, pairs that it
    moves apart by more than L.
    """

    apply: Callable[[Tensor], Tensor]
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.apply):
            raise InputError(
                f"apply of an Orthogonalizer has type {type(self.apply).__name__}: give a function "
                "on stacks [..., m, n]"
            )
        if self.lipschitz is not None:
            object.__setattr__(self, "lipschitz", _constant(self.lipschitz))


def _constant(found: Any) -> float:
    """A real number, perhaps one entry of numpy's or torch's, as a float."""
    try:
        one = found.item() if hasattr(found, "item") else found
        number = float(one) if isinstance(one, Real) and not isinstance(one, bool) else math.nan
    except (
        ValueError,
        RuntimeError,
        OverflowError,
        NotImplementedError,
    ):  # of several entries, or beyond all floats
        number = math.nan
    if not 0 <= number < math.inf:
        shown = " ".join(repr(found).split())[:60]
        raise InputError(f"lipschitz = {shown} is refused: give a number of 0 or more")
    return number


def as_orthogonalizer(found: Any, guard: Guard | None = None) -> Orthogonalizer:
    """What was given as a map: a value, or a function on stacks; called within its guard."""
    of = guard or Guard("orthogonalizer", found)
    with of:
        made = as_map(found)
    return made if _is_ours(made.apply) else replace(made, apply=of.calling(made.apply))


def as_map(found: Any) -> Orthogonalizer:
    """The same without a guard, for a recipe of the user's that makes something of it."""
    mend = "a function on stacks [..., m, n], or fedmuon.Orthogonalizer(apply, lipschitz)"
    return (
        found if isinstance(found, Orthogonalizer) else Orthogonalizer(function(found, "map", mend))
    )


def _is_ours(apply: Any) -> bool:
    """Whether it is one of the maps of this package, or is within its guard already."""
    held = apply.func if isinstance(apply, partial) else apply
    return type(held).__module__ == "fedmuon.core.guard" or (
        isinstance(held, FunctionType)
        and (held.__module__ or "").startswith("fedmuon.orthogonalize")
    )


def of_table(table: OrthogonalizerTable) -> Orthogonalizer:
    """The map that the table names as a value, for recipes that ask for one; those that draw are
    refused, as a value draws nothing."""
    made: dict[str, Callable[[], Orthogonalizer]] = {
        "smoothed-polar": lambda: smoothed_polar(table.lambda_),
        "newton-schulz": lambda: newton_schulz(
            table.steps, table.coefficients, table.eps, table.normalization
        ),
        "clipped-sign": lambda: clipped_sign(table.clip_level),
        "exact-sign": lambda: Orthogonalizer(maps.exact_sign),
    }
    if table.name not in made:
        raise InputError(
            f"[orthogonalizer] name = '{table.name}' draws at every step, which no map that your "
            f"recipe is handed can: choose one of {', '.join(made)}"
        )
    return made[table.name]()


def smoothed_polar(lam: float = 1e-4) -> Orthogonalizer:
    """sigma -> sigma / sqrt(sigma^2 + lam) (001, D.1)."""
    return Orthogonalizer(
        partial(maps.smoothed_polar, lam=lam), lipschitz("smoothed-polar", "sharp", lam=lam)
    )


def newton_schulz(
    steps: int = 5,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> Orthogonalizer:
    """Newton-Schulz steps behind a normalization with a floor (001, D.3)."""
    given: dict[str, Any] = {
        "steps": steps,
        "coefficients": coefficients,
        "eps": eps,
        "normalization": normalization,
    }
    return Orthogonalizer(
        partial(maps.newton_schulz, **given), lipschitz("newton-schulz", "sharp", **given)
    )


def clipped_sign(gamma: float = 0.1) -> Orthogonalizer:
    """sigma -> min(sigma / gamma, 1) (001, D.9)."""
    return Orthogonalizer(
        partial(maps.clipped_sign, gamma=gamma), lipschitz("clipped-sign", "sharp", gamma=gamma)
    )
