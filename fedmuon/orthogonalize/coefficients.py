"""Newton–Schulz as data: tables of coefficients with their sources, and the normalizations.

A step is the odd polynomial a x + b x^3 + c x^5 + ..., stored as `(a, b, c, ...)`.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from typing import TYPE_CHECKING, cast

from fedmuon.core.errors import InputError, instead

if TYPE_CHECKING:  # configs and certificates read these tables without importing torch
    from torch import Tensor

Step = tuple[float, ...]  # (a, b, c, ...): a x + b x^3 + c x^5 + ...
Schedule = tuple[Step, ...]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Table:
    """Steps in order, of which the last one repeats, and their source."""

    steps: Schedule
    source: str


def _taylor(degree: int) -> Step:
    """Return x p(x^2), where p is the Taylor polynomial of l^(-1/2) at l = 1 of that degree.

    p(l) = sum_s (2s)! / (4^s s!^2) (1 - l)^s (Newton-Schulz convergence). The coefficient of l^j
    follows from the binomial theorem. All are dyadic rationals, hence exact doubles.
    """
    series = [comb(2 * s, s) / 4**s for s in range(degree + 1)]
    powers = range(degree + 1)
    step = [(-1.0) ** j * sum(series[s] * comb(s, j) for s in powers if s >= j) for j in powers]
    return tuple(step + [0.0] * (3 - len(step)))


_POLAR_EXPRESS_E2 = (
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3005, -1.6112, 0.3833),
    (1.8631, -1.2042, 0.3422),
    (1.8383, -1.1779, 0.3397),
    (1.8382, -1.1779, 0.3396),
    (1.8750, -1.2500, 0.3750),
)
_POLAR_EXPRESS_E3 = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
    (1.8913, -1.2680, 0.3768),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)

COEFFICIENTS: dict[str, Table] = {
    "cubic": Table(((3 / 2, -1 / 2, 0.0),), "Stability note, Lemma D.3: the classical step"),
    "quintic": Table(((15 / 8, -10 / 8, 3 / 8),), "Newton-Schulz convergence: Taylor degree 2"),
    "jordan": Table(((3.4445, -4.7750, 2.0315),), "Jordan's Muon: steep at 0, settles near 1"),
    "polar-express-e2": Table(_POLAR_EXPRESS_E2, "Nesterov Muon, Appendix E.2"),
    "polar-express-e3": Table(_POLAR_EXPRESS_E3, "Nesterov Muon, Appendix E.3"),
    **{
        f"taylor-{k}": Table((_taylor(k),), f"Newton-Schulz convergence: Taylor degree {k}")
        for k in range(1, 7)
    },
}


def schedule(coefficients: Coefficients, steps: int) -> Schedule:
    """Return the `steps` polynomials of a schedule, each with at least (a, b, c).

    Args:
        coefficients: A name in `COEFFICIENTS`, one (a, b, c, ...), or one per step. A schedule that
            is too short repeats its last step; one that is too long is cut.
        steps: Number of steps, 0 or more.

    Returns:
        A tuple of `steps` tuples.

    Raises:
        InputError: If the name is unknown, the list is empty, or a number is not finite.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}: give a whole number of steps, 0 or more.")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            mend = instead(coefficients, COEFFICIENTS)
            raise InputError(f"No coefficients are called {coefficients!r}: {mend}")
        given = COEFFICIENTS[coefficients].steps
    else:
        single = bool(coefficients) and not isinstance(coefficients[0], Sequence)
        rows = cast("Sequence[Sequence[float]]", [coefficients] if single else coefficients)
        if not rows or not all(rows):
            raise InputError("The coefficient list is empty: give at least one (a, b, c).")
        if not all(isfinite(c) for row in rows for c in row):
            raise InputError(f"The coefficients {coefficients!r} are not all finite: give numbers.")
        given = tuple(tuple(float(c) for c in row) + (0.0,) * (3 - len(row)) for row in rows)
    return tuple(given[min(t, len(given) - 1)] for t in range(steps))


def _larger(size: "Tensor", floor: "Tensor | float") -> "Tensor":
    return size.clamp_min(floor)


# (||M||_F, floor) -> divisor of M. The floor is 1 for `unit`, and eps otherwise.
NORMALIZATIONS: "dict[str, Callable[[Tensor, Tensor | float], Tensor]]" = {
    "plus": operator.add,  # ||M||_F + eps (Stability note, Lemma D.3)
    "max": _larger,  # max(||M||_F, eps), as in torch.optim.Muon
    "unit": _larger,  # max(||M||_F, 1) (DP-Muon)
}


def divisor_floor(eps: float, normalization: str) -> float:
    """Return the floor of a normalization: 1 for `unit`, else eps.

    Dividing by the normalization is 1/floor-Lipschitz.
    """
    if normalization not in NORMALIZATIONS:
        names = ", ".join(NORMALIZATIONS)
        raise InputError(f"No normalization is called {normalization!r}: use one of {names}.")
    if not 0 < eps < float("inf"):
        raise InputError(f"eps is {eps}: choose eps > 0, or no Lipschitz constant exists.")
    return 1.0 if normalization == "unit" else float(eps)
