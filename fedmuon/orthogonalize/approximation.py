"""How far maps are from the polar factor that they stand for: 001, Lemma D.3 and Proposition D.4.

Newton-Schulz makes U p_T(X) V^T of M = U S V^T, X = S / divisor, so its distance from U V^T is the
root of sum_j (p_T(x_j) - 1)^2 over the positive singular values. Of them there are `rank`, each has
x_j >= tau, and as ||X||_F <= 1 none exceeds top, top^2 = 1 - (rank - 1) tau^2. Hence

    ||NS(M) - msign(M)||_F <= sqrt(rank) e,   e = max over [tau, top] of |p_T(x) - 1|.

001 asks for full rank and takes e over all of [tau, 1]; nothing in its proof needs either. Where
p_T rises to 1, as for Taylor steps, e = 1 - p_T(tau), and x = (tau, ..., tau) attains the bound.
Jordan's p_T crosses 1 and comes back: there `top` counts.

*The cubic step.* 1 - p^2 goes to (1 - p^2)^2 (4 - p^2) / 4 in a step, so 1 - p_T^2 <= (1 -
tau^2)^(2^T), and 001 concludes e <= 1 - p_T^2. It is 1 - p_T = (1 - p_T^2) / (1 + p_T), which is up
to twice smaller; and the factor (4 - p^2) / 4, between 3/4 and 1, is lost in each step besides.

*Without a floor (Remark D.1).* M / ||M||_F is not Lipschitz, but where ||M||_F >= nu it equals
M / max(||M||_F, nu), the projection onto a ball of radius nu, over nu. So the constant is that of
the normalization `max` with eps = nu: 1/nu times the steepest slope of p_T, in place of the 2/nu
with which 001 begins its recurrence.

*Other ranks (Remark D.3).* Where every positive singular value is at least gamma, the sign equals
the clipped sign at gamma. So it is 1/gamma-Lipschitz on the set of all such matrices, whatever
their ranks; that a neighbour stays in this set is what has to be shown, and is where a rank that no
momentum can exceed is needed (`fedmuon.analysis.theory.exact_polar`).
"""

import math

from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.coefficients import Coefficients, schedule
from fedmuon.orthogonalize.lipschitz_constants import Uncertified, lipschitz
from fedmuon.orthogonalize.slope import furthest


def newton_schulz_error(coefficients: Coefficients, steps: int, tau: float, rank: int) -> float:
    """sqrt(rank) e: how far NS(M) is from msign(M) where M's positive s_j / divisor are >= tau."""
    if not (rank >= 1 and tau > 0 and rank * tau**2 <= 1 + 1e-12):
        raise InputError(
            f"tau = {tau}, rank = {rank}: {rank} singular values of a matrix in the unit ball have "
            f"tau in (0, {1 / math.sqrt(max(rank, 1)):.6g}]."
        )
    top = math.sqrt(max(1 - (rank - 1) * tau**2, tau**2))
    found = furthest(schedule(coefficients, steps), tau, min(math.nextafter(top, 2), 1.0))
    if found is None:
        raise Uncertified("This schedule cannot be bounded in doubles: use fewer steps.")
    return math.sqrt(rank) * found


def printed_cubic_error(steps: int, tau: float, rank: int = 1) -> float:
    """sqrt(rank) (1 - tau^2)^(2^T), as 001 prints it for the cubic step."""
    return math.sqrt(rank) * (1 - tau**2) ** (2**steps)


def smoothed_polar_error(lam: float, smallest: float, rank: int = 1) -> float:
    """sqrt(rank) (1 - s / sqrt(s^2 + lam)) for M whose positive singular values are >= s.

    As 1 - s/h = lam / (h (h + s)) with h = sqrt(s^2 + lam), which falls in s and loses no digits.
    """
    hypotenuse = math.hypot(smallest, math.sqrt(lam))
    return math.sqrt(rank) * lam / (hypotenuse * (hypotenuse + smallest))


def on_norm_floor(coefficients: Coefficients, steps: int, floor: float) -> float:
    """L of Newton-Schulz without eps between matrices of ||M||_F >= floor (Remark D.1)."""
    given = {"steps": steps, "coefficients": coefficients, "eps": floor, "normalization": "max"}
    return lipschitz("newton-schulz", "sharp", **given)
