"""Lipschitz constants, output norms and approximation errors of orthogonalizers.

The functions raise `Uncertified` if no constant is proved. This module does not need torch.

**Lipschitz constants** (`lipschitz`): ||Orth(M) - Orth(M')||_F <= L ||M - M'||_F for all M, M'. The
kind `paper` is the constant published in the Stability note. The kind `sharp` is a constant that
this module derives, and that is at most the published one.

**Output norms** (`growth`): a function phi with ||Orth(M)||_op <= phi(s) for every ||M||_op <= s.

**Approximation errors** (`newton_schulz_error`, `residual` and others): the distance of a map from
the polar factor (Stability note, Lemma D.3 and Proposition D.4; Newton–Schulz convergence).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedmuon.core.errors import InputError, instead
from fedmuon.orthogonalize.coefficients import AOL, Coefficients, Schedule, divisor_floor, schedule

# All derivations of `sharp` use the following fact. For an odd f, consider the derivative of the
# map M = U S V^T -> U f(S) V^T in the bases U and V. This derivative multiplies the symmetric part
# of the entry pair (i, j) by the divided difference f[s_i, s_j], and the antisymmetric part by
# f[s_i, -s_j]. For a rectangular M, the derivative multiplies the entries that belong to the null
# space by f[s_i, 0] (theorem of Daleckii and Krein, applied to the dilation [[0, M], [M^T, 0]]). A
# divided difference is the slope of a chord of f. If f is L-Lipschitz on [-r, r], the map is
# therefore L-Lipschitz in Frobenius norm on the ball of operator norm r, because this ball is
# convex.
#
# Output norms. The maps apply a function f to the singular values, so phi(s) is the supremum of |f|
# over [0, s]. If f is increasing, the supremum is f(s). For sign maps, phi(s) is 1, even if noise
# was added to M before. Newton-Schulz divides by ||M||_F + eps, max(||M||_F, eps) or
# max(||M||_F, 1), and ||M||_F >= ||M||_op. The argument of its polynomial p_T is therefore at most
# s / (s + eps), min(s / eps, 1) or min(s, 1). For `aol`, the argument is at most min(s / eps, 1),
# because its divisors are at least eps. phi is the smaller of two bounds: the running maximum of
# |p_T|, computed with interval arithmetic, and the steepest slope of p_T times the argument.

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
    """Return the bound phi on an orthogonalizer's output norm, or None if no bound is known.

    Args:
        name: Name of the orthogonalizer, as in a config.
        lam: Smoothing of `smoothed-polar`.
        gamma: Clipping level of `clipped-sign`.
        steps: Number of steps of `newton-schulz`.
        coefficients: Coefficients of the `newton-schulz` steps.
        eps: Lower bound of the divisor in `newton-schulz`.
        normalization: Name of the divisor in `newton-schulz`.

    Returns:
        The function phi. If ||M||_op <= s, then ||Orth(M)||_op <= phi(s).
    """
    if name == "smoothed-polar":
        return lambda s: s / math.hypot(s, math.sqrt(lam)) if s else 0.0
    if name == "clipped-sign":
        return lambda s: min(s / gamma, 1.0)
    if name in ("exact-sign", "gaussian-smoothed-sign"):
        return lambda s: 1.0
    if name != "newton-schulz":
        return None
    polynomials = schedule(coefficients, steps)
    floor = divisor_floor(eps, normalization)
    table, slope = running_maxima(polynomials), max_slope(polynomials)

    def running_maximum(s: float) -> float:
        normalized = s / (s + floor) if normalization == "plus" else min(s / floor, 1.0)
        top = float(table[min(math.floor(normalized * BOXES), BOXES - 1)])
        return top if slope is None else min(top, slope * normalized)

    return running_maximum


# Lipschitz constants

Kind = Literal["paper", "sharp"]

_ANTI_CONCENTRATION = 2.35  # C_ac of Stability note, Lemma D.8


class Uncertified(InputError):
    """Error: no Lipschitz constant is known for an orthogonalizer and its parameters.

    Example:
        >>> from fedmuon.orthogonalize import Uncertified, lipschitz
        >>> try:
        ...     lipschitz("newton-schulz", "sharp", steps=5, normalization="aol")
        ... except Uncertified as error:
        ...     print("aol" in str(error))
        True
    """


def lipschitz(name: str, kind: Kind, **parameters: Any) -> float:
    """Return a proved Lipschitz constant L of an orthogonalizer, in the Frobenius norm.

    Args:
        name: Name of the orthogonalizer, as in a config.
        kind: `paper` selects the constant published in the Stability note. `sharp` selects a
            constant that this package derives, and that is at most the published one.
        **parameters: `lam` of `smoothed-polar`; `gamma` of `clipped-sign` and `exact-sign`;
            `steps`, `coefficients`, `eps` and `normalization` of `newton-schulz`; `sigma`, `alpha`,
            `calls` and `shape` of `gaussian-smoothed-sign`.

    Returns:
        A constant L for which ||Orth(M) - Orth(M')||_F <= L ||M - M'||_F for all M and M'.

    Raises:
        Uncertified: If no constant is known to hold.
        InputError: If a name is unknown or a parameter is out of range.

    Example:
        >>> from fedmuon.orthogonalize import lipschitz
        >>> round(lipschitz("newton-schulz", "sharp", steps=5, eps=0.1), 2)
        75.94
        >>> lipschitz("smoothed-polar", "sharp", lam=0.01)
        10.0
    """
    if kind not in ("paper", "sharp"):
        raise InputError(f"The certificate kind {kind!r} is unknown. Use 'paper' or 'sharp'.")
    if name not in _CERTIFICATES:
        raise InputError(f"The orthogonalizer {name!r} is unknown: {instead(name, _CERTIFICATES)}")
    return _CERTIFICATES[name](kind, **parameters)


def _newton_schulz(
    kind: Kind,
    *,
    steps: int,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> float:
    """Return the Lipschitz constant of Newton–Schulz after a normalization.

    *sharp.* The constant is the steepest slope of p_T on [0, 1], divided by the floor of the
    divisor. No smaller constant holds if |p_T'| has its maximum at 0.

    *paper.* The constant is Lambda_T of Lemma D.3, with Lambda_0 = 2/floor.
    """
    # The normalization maps into the unit ball and is 1/floor-Lipschitz. For `plus`, the derivative
    # of M/(|M| + e) at M is (1/(|M| + e)) (I - (|M|/(|M| + e)) m m^T) with m = M/|M|. This
    # derivative is a contraction times at most 1/e. For `max`, M/max(|M|, e) is the projection onto
    # the ball of radius e, divided by e. `unit` is the case e = 1. The iteration applies the odd
    # p_T to the singular values, which are in [0, 1]. The normalization is also steepest at M = 0.
    #
    # The recurrence of Lambda_T holds for every normalization that maps into the unit ball and is
    # Lambda_0-Lipschitz. The paper states Lambda_0 = 2/eps for `plus`. For `max` and `unit`,
    # 2/floor is also valid.
    polynomials = schedule(coefficients, steps)
    floor = divisor_floor(eps, normalization)
    if normalization == AOL:
        raise Uncertified(
            "Newton-Schulz with the normalization 'aol' has no Lipschitz constant, because a "
            "small change of the matrix can rescale a short row by any factor if another row is "
            "long. Set the normalization to 'plus', 'max' or 'unit'."
        )
    if kind == "paper":
        constant, radius = 2 / floor, 1.0
        for step in polynomials:
            try:
                powers = [abs(c) * radius ** (2 * k) for k, c in enumerate(step)]
            except OverflowError:
                return math.inf
            constant *= sum((2 * k + 1) * p for k, p in enumerate(powers))
            radius *= sum(powers)
        return constant if math.isfinite(constant) else math.inf
    slope = max_slope(polynomials)
    if slope is None:
        raise Uncertified(
            "The slope of these Newton-Schulz steps cannot be bounded in double precision. Use "
            "fewer steps."
        )
    return math.nextafter(slope / floor, math.inf) if slope else 0.0  # 0 for a constant map


def _gaussian_smoothed_sign(
    kind: Kind, *, sigma: float, alpha: float, calls: int, shape: tuple[int, int]
) -> float:
    """Return 1/gamma, where gamma is a probable lower bound of the smallest singular value.

    With probability 1 - alpha, the smallest singular value of M + sigma H is at least gamma in all
    calls. Then the sign equals the clipped sign at gamma (Corollary D.11).

    *paper* (Lemma D.10): gamma = sigma alpha / (2.35 sqrt(q) calls).

    *sharp*: gamma is the largest of three lower bounds. One is that of the paper, and a comment
    below derives the others.
    """
    # The other two bounds. Let M be d1 x q with d1 >= q (otherwise transpose it), and s_q the
    # smallest singular value of M + sigma H. Each bound fails at one call with probability at most
    # alpha / calls, for every M, because M is fixed before its call draws H.
    #
    # By columns. Given the other columns, column j of M + sigma H is Gaussian. Its distance to
    # their span is sigma times a noncentral chi with at least d1 - q + 1 degrees of freedom. For
    # every t, a noncentral chi exceeds t with at least the probability of a central chi. A unit
    # vector x has an entry with |x_j| >= 1/sqrt(q), and |(M + sigma H) x| >= |x_j| dist_j.
    # Therefore s_q >= min_j dist_j / sqrt(q), and
    # P(s_q <= t) <= q P(chi^2_{d1-q+1} <= q t^2 / sigma^2). The bound is the t for which the
    # right-hand side is alpha / calls.
    #
    # By rotation. For some orthogonal Q, Q M = (R, 0) with R of shape q x q, and Q H has the same
    # distribution as H. The last N = d1 - q rows of Q (M + sigma H) are therefore sigma H2, where
    # H2 is a standard normal N x q matrix. From |(M + sigma H) x| >= sigma |H2 x| follows
    # s_q >= sigma s_min(H2). By Gordon's inequality, E s_min(H2) >= sqrt(N) - sqrt(q). Because
    # s_min is 1-Lipschitz, s_min is below its mean by t or more with probability at most
    # exp(-t^2 / 2) (Davidson and Szarek 2001, Theorem II.13). With t = sqrt(2 ln(calls / alpha)),
    # the bound is sigma (sqrt(N) - sqrt(q) - t), if this number is positive.
    _require_positive("sigma", sigma)
    if not 0 < alpha < 1:
        raise InputError(f"alpha is {alpha}, but it must be above 0 and below 1. Use 0.01.")
    if calls < 1:
        raise InputError(f"calls is {calls}, but it must be an integer of 1 or more.")
    d1, q = max(shape), min(shape)
    if not 1 <= q <= d1 < math.inf:
        raise InputError(f"shape is {shape}, but it must be two integers of 1 or more.")
    gamma = sigma * alpha / (_ANTI_CONCENTRATION * math.sqrt(q) * calls)
    if kind == "sharp":
        # Imported here: scipy takes longer to load than any other certificate takes to compute.
        from scipy.special import gammaincinv

        # The quantile of chi-squared, reduced by more than scipy's error (at most 1e-13 was
        # observed).
        quantile = 2 * float(gammaincinv((d1 - q + 1) / 2, alpha / (q * calls))) * (1 - 1e-9)
        tail = math.sqrt(2 * math.log(calls / alpha))
        rotated = math.sqrt(d1 - q) - math.sqrt(q) - tail
        gamma = max(gamma, sigma * math.sqrt(quantile / q), sigma * rotated)
    return 1 / gamma


def _exact_sign(kind: Kind, *, gamma: float | None = None) -> float:
    """Return the Lipschitz constant for matrices whose smallest singular value is at least gamma.

    The constant is 2/gamma for *paper* (Lemma D.12) and 1/gamma for *sharp*. For these matrices,
    the sign equals the clipped sign at gamma, whose constant is 1/gamma (also Lemma D.7).
    """
    if gamma is None:
        raise Uncertified(
            "The exact sign jumps where a singular value crosses 0, so it has no Lipschitz "
            "constant. Set gamma to a lower bound of the smallest singular value, or choose a "
            "smoothed sign."
        )
    return (2 if kind == "paper" else 1) / _require_positive("gamma", gamma)


def _randomized_polar(kind: Kind, **parameters: Any) -> float:
    raise Uncertified(
        "The randomized polar factor has no Lipschitz constant, because a small change of the "
        "matrix can make its random sketch miss a direction. Choose another orthogonalizer for a "
        "bound."
    )


def _require_positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise InputError(
            f"{name} is {value}, but a Lipschitz constant exists only for positive and finite "
            f"values of {name}. Pass a positive number."
        )
    return float(value)


_CERTIFICATES: dict[str, Callable[..., float]] = {
    # The slope of s/sqrt(s^2 + lam) at 0 is 1/sqrt(lam) (Lemma D.1).
    "smoothed-polar": lambda kind, *, lam: 1 / math.sqrt(_require_positive("lam", lam)),
    "newton-schulz": _newton_schulz,
    # Below gamma, the map is M/gamma, whose slope is 1/gamma (Lemma D.9).
    "clipped-sign": lambda kind, *, gamma: 1 / _require_positive("gamma", gamma),
    "gaussian-smoothed-sign": _gaussian_smoothed_sign,
    "exact-sign": _exact_sign,
    "randomized-polar": _randomized_polar,
}


# Inexact polar maps (Newton–Schulz convergence). By Definition 3, delta_q is the distance of Z Z^T
# from a projector, and eps_q is the distance of Z from the polar factor.


def residual(initial: float, degree: int, steps: int) -> float:
    """Return the residual delta_q after q Taylor steps that start from the residual delta_0.

    One step maps d to phi(d) = 1 - (1 - d) p(1 - d)^2 (Newton–Schulz convergence, Lemma 2). The
    result is also accurate for small residuals, because the polynomial phi(d) has no negative
    coefficients and no powers below d^(k+1).

    Args:
        initial: The first residual delta_0, from 0 to 1.
        degree: The degree k of the Taylor polynomial, at least 1.
        steps: The number q of steps.
    """
    current = _require_share("delta_0", initial)
    powers = _residual_powers(degree)
    for _ in range(steps):
        current = min(1.0, sum(c * current**j for j, c in powers))
    return current


def polar_error_bound(residual: float) -> float:
    """Return 1 - sqrt(1 - delta), a bound on the polar error eps of a matrix with residual delta.

    For delta = delta_q, the polar error is equal to the bound. Source: Newton–Schulz convergence,
    Lemma 1.
    """
    share = _require_share("delta", residual)
    return share / (1 + math.sqrt(1 - share))


def slowdown(polar_error: float) -> float:
    """Return chi = 1 / (1 - eps), by which a polar error eps slows convergence, or infinity.

    Source: Newton–Schulz convergence, Theorem 1.
    """
    share = _require_share("eps", polar_error)
    return 1 / (1 - share) if share < 1 else math.inf


@lru_cache
def _residual_powers(degree: int) -> tuple[tuple[int, float], ...]:
    """Return the pairs (j, coefficient of d^j) of the polynomial phi(d).

    Each coefficient is a sum of exact fractions that is rounded once.
    """
    if degree < 1 or degree != int(degree):
        raise InputError(f"degree is {degree!r}, but it must be an integer of 1 or more.")
    series = [Fraction(math.comb(2 * s, s), 4**s) for s in range(degree + 1)]
    square = [Fraction(0)] * (2 * degree + 2)
    for i, a in enumerate(series):
        for j, b in enumerate(series):
            square[i + j] += a * b
    return tuple((j, float(square[j - 1] - square[j])) for j in range(degree + 1, 2 * degree + 2))


def _require_share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"{name} is {value}, but it must be at least 0 and at most 1.")
    return float(value)


# Distances from the polar factor (Stability note, Lemma D.3 and Proposition D.4).
#
# For M = U S V^T and X = S / divisor, Newton-Schulz returns U p_T(X) V^T. The square of its
# distance from U V^T is the sum of (p_T(x_j) - 1)^2 over the `rank` positive singular values, each
# with x_j >= tau. As ||X||_F <= 1, no x_j exceeds top, where top^2 = 1 - (rank - 1) tau^2.
# Therefore
#
#     ||NS(M) - msign(M)||_F <= sqrt(rank) e,   e = max over [tau, top] of |p_T(x) - 1|.
#
# The paper assumes full rank and uses the maximum over all of [tau, 1], but its proof needs
# neither. If p_T rises to 1, as for Taylor steps, then e = 1 - p_T(tau), and x = (tau, ..., tau)
# attains the bound. Jordan's p_T crosses 1 and returns, so `top` matters.
#
# *The cubic step.* A step maps 1 - p^2 to (1 - p^2)^2 (4 - p^2) / 4, so 1 - p_T^2 <=
# (1 - tau^2)^(2^T). The paper concludes e <= 1 - p_T^2. In fact,
# e = 1 - p_T = (1 - p_T^2) / (1 + p_T), which is smaller by a factor of up to 2. Each step also
# omits the factor (4 - p^2) / 4, which is between 3/4 and 1.
#
# *Without a floor (Remark D.1).* M / ||M||_F is not Lipschitz. But if ||M||_F >= nu, it equals
# M / max(||M||_F, nu), which is the projection onto a ball of radius nu, divided by nu. The
# constant is therefore that of the normalization `max` with eps = nu: 1/nu times the steepest slope
# of p_T. The recurrence of the paper starts from 2/nu instead.
#
# *Other ranks (Remark D.3).* If every positive singular value is at least gamma, the sign equals
# the clipped sign at gamma. It is therefore 1/gamma-Lipschitz on the set of all such matrices,
# whatever their ranks. It remains to show that a neighbour stays in this set. This needs a rank
# that no momentum can exceed (`fedmuon.analysis.theory.exact_polar`).


def newton_schulz_error(coefficients: Coefficients, steps: int, tau: float, rank: int) -> float:
    """Return a bound on the error ||NS(M) - msign(M)||_F for matrices M of rank `rank`.

    The bound is sqrt(rank) e, where e bounds the error of one singular value.

    Args:
        coefficients: Coefficients of the steps, as for `schedule`.
        steps: Number of steps T.
        tau: Lower bound of the positive singular values of the normalized M.
        rank: Rank of M.

    Raises:
        InputError: If `rank` singular values of size tau have a Frobenius norm above 1.
        Uncertified: If the error cannot be bounded in double precision.
    """
    if not rank >= 1:
        raise InputError(f"rank is {rank}, but it must be an integer of 1 or more.")
    if not (tau > 0 and rank * tau**2 <= 1 + 1e-12):
        raise InputError(
            f"tau is {tau}, but it must be above 0 and at most 1/sqrt(rank) = "
            f"{1 / math.sqrt(rank):.6g}, because the normalized matrix has a Frobenius norm of at "
            "most 1. Pass a tau in this range."
        )
    top = math.sqrt(max(1 - (rank - 1) * tau**2, tau**2))
    deviation = max_deviation(schedule(coefficients, steps), tau, min(math.nextafter(top, 2), 1.0))
    if deviation is None:
        raise Uncertified(
            "The error of these Newton-Schulz steps cannot be bounded in double precision. Use "
            "fewer steps."
        )
    return math.sqrt(rank) * deviation


def printed_cubic_error(steps: int, tau: float, rank: int = 1) -> float:
    """Return the Stability note's error bound for T cubic steps, sqrt(rank) (1 - tau^2)^(2^T)."""
    return math.sqrt(rank) * (1 - tau**2) ** (2**steps)


# Guaranteed maxima of a composition p_T of odd polynomials and of its slope, by interval
# arithmetic.
#
# An interval is a pair of arrays. Every operation rounds outward by one unit in the last place,
# which is more than the error of round-to-nearest.

Array = NDArray[np.float64]
Interval = tuple[Array, Array]  # (lower ends, upper ends)
Enclose = Callable[[Array, Array, Array], Interval]  # encloses a function on (low, middle, high)

_GAP = 1e-9
_NARROW = 32  # units in the last place
# Slopes below this value keep their own bounds. Near underflow, outward rounding is no longer small
# compared with a number, and the following steps multiply it.
_NOTHING = 1e-200
_START, _SPLIT, _MOST = 512, 8, 1 << 20  # first boxes, pieces of a box, maximum number of boxes
BOXES = 1 << 12  # number of boxes in `running_maxima`


@lru_cache(maxsize=256)
def max_slope(polynomials: Schedule) -> float | None:
    """Return an upper bound of max |p_T'| over [0, 1], or None if no bound is found.

    The relative error of the bound is at most 1e-9, unless rounding errors are larger.

    If |p_T'| has its maximum at 0 and the slopes of the steps decrease near 0, the result is the
    product of all a_t, up to the last digits. If a step is the zero polynomial, the result is 0.
    """
    if not all(any(step) for step in polynomials):
        return 0.0
    return _maximize(lambda *box: _enclose(polynomials, *box)[1], 0.0, 1.0, _NOTHING)


@lru_cache(maxsize=256)
def max_deviation(
    polynomials: Schedule, low: float, high: float, centre: float = 1.0
) -> float | None:
    """Return an upper bound of max |p_T - centre| over [low, high], a part of [0, 1].

    The result is None if no bound is found. Where p_T equals `centre`, only rounding errors remain.
    The search therefore ignores differences below four times the largest rounding error at a point.
    """

    def distance(*box: Array) -> Interval:
        at = _enclose(polynomials, *box)[0]
        return _outward(at[0] - centre, at[1] - centre)

    points = np.linspace(low, high, _START + 1)
    with np.errstate(all="ignore"):
        below, above = distance(points, points, points)
    return _maximize(distance, low, high, 4 * float((above - below).max()))


def _maximize(enclose: Enclose, first: float, last: float, least: float) -> float | None:
    """Return an upper bound of max |f| over [first, last], or None if no bound is found.

    `enclose` returns intervals that contain f on boxes (low, middle, high). The method is branch
    and bound. A box is split only if |f| on the box may exceed the best known value by more than
    the relative gap `_GAP` plus `least`. Rounding can widen an interval by more than the gap (6e-9
    was observed). A box that is too narrow to split keeps its looser bound.
    """
    edges = np.linspace(first, last, _START + 1)
    low, high = edges[:-1], edges[1:]
    best = _lower_bound(enclose, np.array([first, last]))
    settled = 0.0
    with np.errstate(all="ignore"):
        while len(low):
            middle = low + (high - low) / 2
            best = max(best, _lower_bound(enclose, middle))
            lower, upper = enclose(low, middle, high)
            bound = np.maximum(np.abs(lower), np.abs(upper))
            bound = np.where(np.isnan(bound), np.inf, bound)  # where the arithmetic overflows
            open_ = ~(bound <= best * (1 + _GAP / 2) + least)
            open_ &= high - low >= _NARROW * np.spacing(high)
            settled = max(settled, float(bound[~open_].max(initial=0.0)))
            # Neighbouring pieces share their edge, so that no point lies between them.
            low, high = low[open_], high[open_]
            cuts = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _SPLIT + 1)
            cuts[:, -1] = high
            low, high = cuts[:, :-1].ravel(), cuts[:, 1:].ravel()
            if len(low) > _MOST or settled == np.inf:
                return None
    return settled


@lru_cache(maxsize=256)
def sign_change(polynomials: Schedule) -> float | None:
    """Return a point of (0, 1] near which p_T may not be positive, or None if p_T > 0 is proved.

    The steps are checked one after the other. If a step f is positive on (0, u], it maps (0, u]
    into (0, u'], where u' is the maximum of f on [0, u], and the next step is checked on (0, u'].
    As f(x) = x g(x^2), interval arithmetic bounds g from below on boxes of [0, u^2]. A box is split
    until the bound is positive, g is not positive at the middle of the box, or the box is narrow.

    The point is the input of the step that fails. For the first step, it is the smallest such point
    up to the width of a box.
    """
    top = 1.0
    for step in polynomials:
        edges = np.linspace(0.0, np.nextafter(top * top, np.inf), _START + 1)
        low, high = edges[:-1], edges[1:]
        while len(low):
            lower, _ = _horner(list(step), (low, high))
            open_ = ~(lower > 0)
            low, high = low[open_], high[open_]
            middle = low + (high - low) / 2
            _, upper = _horner(list(step), (middle, middle))
            failed = ~(upper > 0) | (high - low < _NARROW * np.spacing(high))
            if failed.any():
                return float(np.sqrt(low[failed].min()))
            cuts = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _SPLIT + 1)
            cuts[:, -1] = high
            low, high = cuts[:, :-1].ravel(), cuts[:, 1:].ravel()
        scaled = tuple(float(c * top ** (2 * k + 1)) for k, c in enumerate(step))
        top = float(_enclosed_maxima((scaled,)).max()) * (1 + 1e-12)
    return None


def positive_schedule(coefficients: Coefficients, steps: int) -> Schedule:
    """Return the coefficients of every step, and reject a named set that reverses directions.

    Numbers are not checked, because they may be meant for another normalization.
    """
    if isinstance(coefficients, str):
        require_positive(coefficients, steps)
    return schedule(coefficients, steps)


def require_positive(coefficients: Coefficients, steps: int) -> None:
    """Raise InputError if p_T of a set of coefficients reverses singular values in (0, 1].

    Every normalization yields singular values up to 1, for example for a matrix of rank 1.
    """
    at = sign_change(schedule(coefficients, steps))
    if at is not None:
        name = f"{coefficients!r} " if isinstance(coefficients, str) else ""
        raise InputError(
            f"The coefficients {name}with {steps} steps reverse singular values above {at:.4g}, "
            "because their polynomial is negative there, but a normalized matrix has singular "
            "values up to 1. Use 'turbo-scaled', 'you' or another set whose polynomial is "
            "positive on (0, 1]."
        )


@lru_cache(maxsize=256)
def running_maxima(polynomials: Schedule) -> Array:
    """Return upper bounds of max |p_T| on the intervals [0, k / BOXES] for k = 1 .. BOXES.

    The value is infinity if no bound is found. For long schedules, interval arithmetic
    overestimates |p_T|. The function therefore computes a second bound step by step, from the range
    of the previous step, and returns the smaller bound.
    """
    top = np.float64(1.0)
    for step in polynomials:
        with np.errstate(all="ignore"):
            scaled = tuple(float(c * top ** (2 * k + 1)) for k, c in enumerate(step))
        top = _enclosed_maxima((scaled,)).max() * (1 + 1e-12)
    return np.minimum(_enclosed_maxima(polynomials), top)


@lru_cache(maxsize=256)
def _enclosed_maxima(polynomials: Schedule) -> Array:
    """Return upper bounds of max |p_T| on [0, k / BOXES] from interval arithmetic alone."""
    edges = np.linspace(0.0, 1.0, BOXES + 1)
    low, high = edges[:-1], edges[1:]
    with np.errstate(all="ignore"):
        value, _ = _enclose(polynomials, low, low + (high - low) / 2, high)
    size = np.maximum(np.abs(value[0]), np.abs(value[1]))
    return np.maximum.accumulate(np.where(np.isnan(size), np.inf, size))


def _lower_bound(enclose: Enclose, points: Array) -> float:
    """Return a lower bound of max |f|, from intervals that contain f at `points`."""
    with np.errstate(all="ignore"):
        low, high = enclose(points, points, points)
    reached = np.maximum(np.maximum(low, -high), 0.0)
    return float(reached[np.isfinite(reached)].max(initial=0.0))


def _enclose(
    polynomials: Schedule, low: Array, middle: Array, high: Array
) -> tuple[Interval, Interval]:
    """Return intervals that contain p_T and p_T' on the boxes [low, high].

    The function computes intervals for p_t, p_t' and p_t'' after each step t. In every step, the
    chain rule on intervals adds an error proportional to the width of a box. Each interval is
    therefore intersected with its mean value form: p_t(box) is in p_t(middle) + p_t'(box) (box -
    middle). The error of this form is proportional to the square of the width, so that few boxes
    are needed near extrema.
    """
    ones = np.ones_like(low)
    around = _outward(low - middle, high - middle)
    at, at_slope = (middle, middle), (ones, ones)
    x, slope, bend = (low, high), (ones, ones), (0 * ones, 0 * ones)
    for step in polynomials:
        # f(x)/x, f'(x) and f''(x)/x of the step f = a x + b x^3 + ..., as polynomials in x^2
        powers = [2 * k + 1 for k in range(len(step))]
        value, first = list(step), [n * c for n, c in zip(powers, step, strict=True)]
        second = [(n - 1) * c for n, c in zip(powers, first, strict=True)][1:]
        u, at_u = _square(x), _square(at)
        bend = _add(
            _times(_times(x, _horner(second, u)), _square(slope)), _times(_horner(first, u), bend)
        )
        at_slope = _times(_horner(first, at_u), at_slope)
        slope = _times(_horner(first, u), slope)
        slope = _intersect(slope, _add(at_slope, _times(bend, around)))
        at = _times(at, _horner(value, at_u))
        x = _intersect(_times(x, _horner(value, u)), _add(at, _times(slope, around)))
    return x, slope


def _horner(coefficients: list[float], u: Interval) -> Interval:
    """Return intervals that contain sum_k c_k u^k for intervals u >= 0.

    In the nested form c_0 + u (c_1 + ...), the upper end is c_0 if the bracket is negative. The
    coefficients were rounded once, so each coefficient is an interval of one unit in the last place
    in both directions.
    """
    ends = [
        (np.nextafter(c, -np.inf), np.nextafter(c, np.inf)) if c else (c, c) for c in coefficients
    ]
    exact = np.zeros_like(u[0])
    out: Interval = (exact, exact)
    for lower, upper in reversed(ends):
        out = _add(_times(u, out), (exact + lower, exact + upper))
    return out


def _outward(low: Array, high: Array) -> Interval:
    return np.nextafter(low, -np.inf), np.nextafter(high, np.inf)


def _add(a: Interval, b: Interval) -> Interval:
    return _outward(a[0] + b[0], a[1] + b[1])


def _times(a: Interval, b: Interval) -> Interval:
    products = np.stack([a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]])
    return _outward(products.min(0), products.max(0))


def _square(a: Interval) -> Interval:
    size = np.maximum(np.abs(a[0]), np.abs(a[1]))
    smallest = np.maximum(np.maximum(a[0], -a[1]), 0.0)
    low, high = _outward(smallest * smallest, size * size)
    return np.maximum(low, 0.0), high


def _intersect(a: Interval, b: Interval) -> Interval:
    """Return the intersection of two intervals. Ends that are NaN after an overflow are ignored."""
    return np.fmax(a[0], b[0]), np.fmin(a[1], b[1])
