"""Write docs/reference/coefficients.md, a table of proved bounds for every set of coefficients.

python -m docs.making.coefficients docs/reference/coefficients.md
"""

import sys
from decimal import ROUND_CEILING, Context
from math import prod
from pathlib import Path

from fedmuon.orthogonalize.coefficients import COEFFICIENTS, Schedule, schedule
from fedmuon.orthogonalize.lipschitz_constants import max_deviation, max_slope

STEPS = 5  # number of steps for a set that repeats one step
FLOORS = (0.1, 0.01, 0.001)
DIGITS = 6

HEAD = """# Newton–Schulz coefficients

`[orthogonalizer] coefficients` names a set of polynomials. Each step uses one polynomial. Step t
maps each singular value x of the normalized matrix to a x + b x³ + c x⁵ + …. The map p_T is the
composition of the first T steps. If a set has fewer than T steps, its last step is repeated. If a
set has more than T steps, only the first T steps are used.

`[orthogonalizer] safety` is a factor. The factor divides the input of every step except the last
step of a set, as in Polar Express (`fedmuon.orthogonalize.with_safety`). The first steps of
`polar-express` are rounded steps of `polar-express-e3` with the factor 1.01. The numbers of this
page are for sets without an additional factor. For other factors, use `fedmuon bound` and
`fedmuon.orthogonalize.lipschitz`.

Each number in the table is an upper bound, rounded up. Interval arithmetic proves each bound for
the coefficients in float64. If interval arithmetic finds no bound, the table says "unknown".

- **T** is the number of steps in the set, or 5 if the set repeats one step.
- **p_T′(0)** is the product of the coefficients a of all steps. This product says how fast small
  singular values grow.
- **L** is the maximum of |p_T′| on [0, 1], so L is the Lipschitz constant of p_T there. On matrices
  of operator norm at most 1, L is also the Lipschitz constant of the matrix map X ↦ U p_T(S) Vᵀ in
  the Frobenius norm. An orthogonalizer first normalizes its input. The constant of the
  orthogonalizer is therefore L / ε with `plus` and `max`, and L with `unit`.
- **max |p_T|** is the maximum on [0, 1], which bounds the operator norm of the output.
- **Error** is the maximum of |p_T(x) − 1| on [ε, 1]. An error below 1 proves that p_T is positive
  on this interval, so the step does not reverse a direction.

"""
PROOF = """
## How it is proved

`max_slope` and `max_deviation` in `fedmuon.orthogonalize.lipschitz_constants` split [0, 1] into
boxes and enclose p_T, or p_T′, on each box. Every operation rounds outward by one unit in the last
place. If an enclosure exceeds the largest value found at a point by more than a relative 10⁻⁹, the
box is split. The result is the largest enclosure of the other boxes, so the result is never below
the maximum. The result exceeds the maximum by at most a relative 10⁻⁹ or by the effect of rounding.
In this table, the effect of rounding is below 10⁻⁵.

A theorem extends the bound from scalars to matrices. If an odd function has the Lipschitz constant
L on [−1, 1], the matrix map has the same constant in the Frobenius norm, on matrices of operator
norm at most 1. The reason is that the derivative of the matrix map multiplies entries by slopes of
chords of the function (Daleckii and Krein). No smaller constant is valid for the matrix map.

The proofs assume exact arithmetic. The proofs do not cover rounding in float32 or bfloat16.

The tests recompute this page, and compare each number with a dense sample of p_T and p_T′.
"""
SIGN = """
`turbo` has an error above 1: p_T is negative from 0.884 on, so a step would reverse the largest
singular values. Turbo-Muon tunes this set to the singular values of random matrices after its
preconditioning, `normalization = "aol"`, which stay below 0.884 for large square matrices. They
reach 1 for matrices with few rows. fedmuon rejects `turbo` with every normalization, because
every normalization yields singular values up to 1. Use `turbo-scaled`: its first step replaces x
by 0.84 x, so p_T is positive on (0, 1]. The tests prove this sign for every other set, for 1 to 12
steps.
"""


def page() -> str:
    """Return the whole page."""
    head = ("set", "T", "p_T′(0)", "L", "max \\|p_T\\|", *(f"error, ε = {e:g}" for e in FLOORS))
    rows = [head, ("---",) * len(head), *(row(name) for name in COEFFICIENTS)]
    table = "".join(f"| {' | '.join(one)} |\n" for one in rows)
    sources = "".join(f"- `{name}`: {one.source}\n" for name, one in COEFFICIENTS.items())
    return f"{HEAD}{table}{SIGN}{PROOF}\n## Sources\n\n{sources}"


def row(name: str) -> tuple[str, ...]:
    """Return the table row with the proved numbers of a set of coefficients."""
    steps = steps_of(name)
    slope, size, errors = proved(schedule(name, steps))
    at_zero = prod(one[0] for one in schedule(name, steps))
    return (f"`{name}`", str(steps), *map(rounded_up, (at_zero, slope, size, *errors)))


def steps_of(name: str) -> int:
    """Return the number of steps in the row of a set."""
    given = len(COEFFICIENTS[name].steps)
    return given if given > 1 else STEPS


def proved(polynomials: Schedule) -> tuple[float | None, float | None, list[float | None]]:
    """Return proved bounds for the map p_T.

    They are bounds on |p_T'| and |p_T| over [0, 1], and on |p_T - 1| over the interval [floor, 1]
    for each floor.
    """
    errors = [max_deviation(polynomials, floor, 1.0) for floor in FLOORS]
    for place in range(len(FLOORS) - 2, -1, -1):  # a bound on an interval also holds inside it
        errors[place] = min((e for e in errors[place:] if e is not None), default=None)
    return max_slope(polynomials), max_deviation(polynomials, 0.0, 1.0, centre=0.0), errors


def rounded_up(value: float | None) -> str:
    """Round a number up to `DIGITS` significant digits."""
    if value is None:
        return "unknown"
    return (
        f"{float(Context(prec=DIGITS, rounding=ROUND_CEILING).create_decimal_from_float(value)):g}"
    )


if __name__ == "__main__":
    for place in sys.argv[1:]:
        Path(place).write_text(page(), encoding="utf-8")
