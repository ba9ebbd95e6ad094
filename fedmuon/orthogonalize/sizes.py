"""How large a map's output gets: phi with ||Orth(M)||_op <= phi(s) for every ||M||_op <= s.

Spectral maps act on singular values alone, so phi(s) is the supremum over [0, s] of what they make
of one: of rising functions the value at s, of signs 1, whatever noise is added first. Newton-Schulz
divides by ||M||_F + eps, max(||M||_F, eps) or max(||M||_F, 1), and ||M||_F >= ||M||_op: what its
polynomial p_T sees is at most s / (s + eps), min(s / eps, 1) or min(s, 1), so phi is the running
maximum of |p_T|, which is enclosed by intervals, and below its steepest slope times that.
"""

import math
from collections.abc import Callable

from fedmuon.orthogonalize.coefficients import Coefficients, divisor_floor, schedule
from fedmuon.orthogonalize.slope import BOXES, heights, steepest

Growth = Callable[[float], float]


def growth(
    name: str,
    *,
    lam: float = 0.0,
    gamma: float = 1.0,
    steps: int = 5,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> Growth | None:
    """phi of the named map, from the parameters that it reads; None of a map without one here."""
    if name == "smoothed-polar":
        return lambda s: s / math.hypot(s, math.sqrt(lam)) if s else 0.0
    if name == "clipped-sign":
        return lambda s: min(s / gamma, 1.0)
    if name in ("exact-sign", "gaussian-smoothed-sign"):
        return lambda s: 1.0
    if name != "newton-schulz":
        return None
    polynomials = schedule(coefficients, steps)
    floor, table, slope = (
        divisor_floor(eps, normalization),
        heights(polynomials),
        steepest(polynomials),
    )

    def running_maximum(s: float) -> float:
        seen = s / (s + floor) if normalization == "plus" else min(s / floor, 1.0)
        top = float(table[min(math.floor(seen * BOXES), BOXES - 1)])
        return top if slope is None else min(top, slope * seen)

    return running_maximum
