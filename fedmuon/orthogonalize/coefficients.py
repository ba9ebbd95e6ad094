"""Newton–Schulz: tables of coefficients with their sources, and the normalizations.

One step is the odd polynomial a x + b x^3 + c x^5 + ..., stored as `(a, b, c, ...)`.
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
    """The coefficients of each Newton–Schulz step, and their source. The last step repeats."""

    steps: Schedule
    source: str


def _taylor(degree: int) -> Step:
    """Return the coefficients of x p(x^2) for the Taylor polynomial p of l^(-1/2) at l = 1.

    p(l) = sum_s (2s)! / (4^s s!^2) (1 - l)^s (Newton–Schulz convergence). The coefficient of l^j
    follows from the binomial theorem. All coefficients are dyadic rationals, so doubles represent
    them exactly.
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

_POLAR_EXPRESS = (  # from Algorithm 1 of the paper, with x^k divided by 1.01^k
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_TURBO = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)
# Turbo-Muon tunes its steps to the singular values of random 512 x 512 matrices after its
# preconditioning (hp-opt-aol-poly.py in the authors' repository). It proves no bound on these
# values, and its first step is negative above 0.8837. Gaussian 10 x 784 matrices exceed 0.8837.
# With x replaced by 0.84 x in the first step, p_4 is within 0.013 of 1 on [0.072, 1].
_TURBO_TOP = 0.84
_TURBO_SCALED = (tuple(c * _TURBO_TOP ** (2 * k + 1) for k, c in enumerate(_TURBO[0])), *_TURBO[1:])
_CUBIC5 = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
_DEEPSEEK = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2

COEFFICIENTS: dict[str, Table] = {
    "cubic": Table(((3 / 2, -1 / 2, 0.0),), "Stability note, Lemma D.3: the classical cubic step"),
    "quintic": Table(
        ((15 / 8, -10 / 8, 3 / 8),), "Newton-Schulz convergence: Taylor polynomial of degree 2"
    ),
    "jordan": Table(
        ((3.4445, -4.7750, 2.0315),), "Jordan's Muon: steep at 0, singular values end near 1"
    ),
    "polar-express-e2": Table(_POLAR_EXPRESS_E2, "Nesterov Muon, Appendix E.2"),
    "polar-express-e3": Table(_POLAR_EXPRESS_E3, "Nesterov Muon, Appendix E.3"),
    "polar-express": Table(_POLAR_EXPRESS, "Polar Express (arXiv:2505.16932), with safety factors"),
    "you": Table(_YOU, "five quintic steps by J. You, as in modded-nanogpt"),
    "cans": Table(_CANS, "CANS (arXiv:2506.10935): Chebyshev steps on shrinking intervals"),
    "turbo": Table(
        _TURBO, "four steps of Turbo-Muon (arXiv:2512.04632), for singular values below 0.8837"
    ),
    "turbo-scaled": Table(
        _TURBO_SCALED, "`turbo` with x replaced by 0.84 x, so that p_T is positive on (0, 1]"
    ),
    "deepseek-v4": Table(
        _DEEPSEEK, "DeepSeek-V4: eight steps of Jordan's Muon, then two steps that converge to 1"
    ),
    "cubic5": Table(_CUBIC5, "five cubic steps, as in NVIDIA's optimizers"),
    **{
        f"taylor-{k}": Table(
            (_taylor(k),), f"Newton-Schulz convergence: Taylor polynomial of degree {k}"
        )
        for k in range(1, 7)
    },
}


def schedule(coefficients: Coefficients, steps: int) -> Schedule:
    """Return the coefficients of every Newton–Schulz step, at least (a, b, c) for each step.

    Args:
        coefficients: A name in `COEFFICIENTS`, one step (a, b, c, ...), or a list of steps. The
            last step of a shorter list repeats. Further steps of a longer list are ignored.
        steps: Number of steps, at least 0.

    Returns:
        A tuple with one tuple of coefficients per step.

    Raises:
        InputError: If `steps` is not an integer >= 0, the name is unknown, the list is empty, or a
            number is not finite.

    Example:
        >>> from fedmuon.orthogonalize import schedule
        >>> schedule("cubic", 2)
        ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}, but it must be an integer of 0 or more.")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            mend = instead(coefficients, COEFFICIENTS)
            raise InputError(f"The coefficient set {coefficients!r} is unknown: {mend}")
        polynomials = COEFFICIENTS[coefficients].steps
    else:
        single = bool(coefficients) and not isinstance(coefficients[0], Sequence)
        rows = cast("Sequence[Sequence[float]]", [coefficients] if single else coefficients)
        if not rows:
            raise InputError(
                "The coefficients contain no step. Pass at least one step (a, b, c), such as "
                "[(1.5, -0.5, 0.0)]."
            )
        if not all(rows):
            raise InputError(
                f"The coefficients {coefficients!r} contain an empty step. Pass numbers (a, b, c) "
                "for each step."
            )
        if not all(isfinite(c) for row in rows for c in row):
            raise InputError(
                f"The coefficients {coefficients!r} contain NaN or infinity. Pass finite numbers."
            )
        polynomials = tuple(tuple(float(c) for c in row) + (0.0,) * (3 - len(row)) for row in rows)
    return tuple(polynomials[min(t, len(polynomials) - 1)] for t in range(steps))


def with_safety(coefficients: Coefficients, factor: float = 1.01) -> Coefficients:
    """Return coefficients whose steps, except the last one, use x / factor instead of x.

    Rounding can produce singular values just above u, where a step that is optimal on [l, u] may
    fail. Singular values are therefore divided by `factor` before each step, except before the last
    step. Each coefficient of x^(2k+1) is divided by factor^(2k+1). With the factor 1.01, the first
    seven steps of `polar-express-e3` become those of `polar-express`, to four decimals.

    Source: Polar Express (arXiv:2505.16932), Implementation 1, which uses 1.01.

    Args:
        coefficients: A name in `COEFFICIENTS`, or a list of steps.
        factor: The divisor of the singular values, at least 1.

    Returns:
        The steps, each a tuple of coefficients.

    Raises:
        InputError: If the factor is below 1, or if there is only one step.

    Example:
        >>> from fedmuon.orthogonalize import with_safety
        >>> with_safety([(2.0, 0.0, 0.0), (1.5, -0.5, 0.0)], factor=2.0)
        ((1.0, 0.0, 0.0), (1.5, -0.5, 0.0))
    """
    if not 1 <= factor < float("inf"):
        raise InputError(
            f"The safety factor is {factor}, but it must be a finite number of 1 or more."
        )
    if factor == 1:
        return coefficients
    preset = COEFFICIENTS.get(coefficients) if isinstance(coefficients, str) else None
    single = preset is None and not isinstance(coefficients, str) and bool(coefficients)
    single = single and not isinstance(coefficients[0], Sequence)
    count = len(preset.steps) if preset else 1 if single else len(coefficients)
    *first, last = schedule(coefficients, count)
    if not first:
        raise InputError(
            f"A safety factor of {factor} has no effect, because these coefficients have only "
            "one step and the factor does not change the last step. Choose coefficients with "
            "several steps."
        )
    safer = (tuple(c / factor ** (2 * k + 1) for k, c in enumerate(step)) for step in first)
    return (*safer, last)


def _larger(size: "Tensor", floor: "Tensor | float") -> "Tensor":
    return size.clamp_min(floor)


AOL = "aol"  # has no single divisor, but one for each row or column (`precondition`)
# Function from (||M||_F, floor) to the divisor of M. The floor is 1 for `unit`, and eps otherwise.
NORMALIZATIONS: "dict[str, Callable[[Tensor, Tensor | float], Tensor]]" = {
    "plus": operator.add,  # ||M||_F + eps (Stability note, Lemma D.3)
    "max": _larger,  # max(||M||_F, eps), as in torch.optim.Muon
    "unit": _larger,  # max(||M||_F, 1) (DP-Muon)
}


def divisor_floor(eps: float, normalization: str) -> float:
    """Return the smallest divisor (floor) of a normalization: 1 for `unit`, otherwise eps.

    All normalizations except `aol` have the Lipschitz constant 1/floor.
    """
    names = ", ".join([*NORMALIZATIONS, AOL])
    if normalization not in names.split(", "):
        raise InputError(f"The normalization {normalization!r} is unknown. Use one of {names}.")
    if not 0 < eps < float("inf"):
        raise InputError(
            f"eps is {eps}, but it must be positive and finite. Use a small number such as 1e-7."
        )
    return 1.0 if normalization == "unit" else float(eps)
