"""How large a map's output gets: phi with ||Orth(M)||_op <= phi(s) for every ||M||_op <= s.

Spectral maps act on singular values alone, so phi(s) is the supremum over [0, s] of what they make
of one: of rising functions the value at s, of signs 1, whatever noise is added first. Newton-Schulz
divides by ||M||_F + eps, max(||M||_F, eps) or max(||M||_F, 1), and ||M||_F >= ||M||_op: what its
polynomial p_T sees is at most s / (s + eps), min(s / eps, 1) or min(s, 1), so phi is the running
maximum of |p_T|, which is enclosed by intervals, and below its steepest slope times that.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from fedmuon.core.errors import InputError, instead
from fedmuon.orthogonalize.coefficients import Coefficients, Schedule, divisor_floor, schedule
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


# Lipschitz constants of the maps: for all M, M', ||Orth(M) - Orth(M')||_F <= L ||M - M'||_F.
#
# `paper` is the constant as printed in 001, `sharp` one that is proved here and never larger. Both
# are certificates: a map for which no constant holds is refused with `Uncertified`, never guessed.
#
# The proofs share one tool. For an odd f, the map M = U S V^T -> U f(S) V^T has in the bases U, V a
# derivative that multiplies the symmetric part of entry pair (i, j) by the divided difference
# f[s_i, s_j] and the antisymmetric part by f[s_i, -s_j], and entries against the null space of a
# rectangular M by f[s_i, 0] (Daleckii-Krein, on the dilation [[0, M], [M^T, 0]]). Divided
# differences are slopes of chords of f, hence if f is L-Lipschitz on [-r, r], the map is
# L-Lipschitz in Frobenius norm on the ball of operator norm r, which is convex.

Kind = Literal["paper", "sharp"]

_ANTI_CONCENTRATION = 2.35  # C_ac of 001 Lemma D.8


class Uncertified(InputError):
    """No Lipschitz constant is known to hold for this map with these parameters."""


def lipschitz(name: str, kind: Kind, **parameters: Any) -> float:
    """The constant L of the named map; `parameters` are the ones that its function below takes."""
    if kind not in ("paper", "sharp"):
        raise InputError(f"No certificate is called {kind!r}: use 'paper' or 'sharp'.")
    if name not in _CERTIFICATES:
        raise InputError(f"No map is called {name!r}: {instead(name, _CERTIFICATES)}")
    return _CERTIFICATES[name](kind, **parameters)


def _smoothed_polar(kind: Kind, *, lam: float) -> float:
    """1/sqrt(lam) (001 Lemma D.1), for both: the slope of s/sqrt(s^2 + lam) at 0 attains it."""
    return 1 / math.sqrt(_positive("lam", lam))


def _clipped_sign(kind: Kind, *, gamma: float) -> float:
    """1/gamma (001 Lemma D.9), for both: below gamma the map is M/gamma, which attains it."""
    return 1 / _positive("gamma", gamma)


def _newton_schulz(
    kind: Kind,
    *,
    steps: int,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> float:
    """Lambda_T of 001 Lemma D.3, or the steepest slope of p_T on [0, 1] over the floor.

    *sharp.* The normalization is 1/floor-Lipschitz into the unit ball. `plus`: the derivative of
    M/(|M| + e) at M is (1/(|M| + e)) (I - (|M|/(|M| + e)) m m^T), m = M/|M|: a contraction times at
    most 1/e. `max`: M/max(|M|, e) is the projection onto the ball of radius e, over e. `unit`: the
    same with e = 1. The iteration acts on the singular values, all in [0, 1], by the odd p_T.
    At 0 both factors can be met together, so a maximum of |p_T'| there makes the constant exact.

    *paper.* The recurrence needs of the normalization only that it is Lambda_0-Lipschitz into the
    unit ball; 001 prints Lambda_0 = 2/eps for `plus`, and 2/floor holds a fortiori for the others.
    """
    polynomials = schedule(coefficients, steps)
    floor = divisor_floor(eps, normalization)
    if kind == "paper":
        return _recurrence(polynomials, 2 / floor)
    slope = steepest(polynomials)
    if slope is None:
        raise Uncertified(
            "The slope of this schedule cannot be bounded in doubles: use fewer steps."
        )
    return math.nextafter(slope / floor, math.inf) if slope else 0.0  # of a constant map


def _recurrence(polynomials: Schedule, constant: float) -> float:
    """Lambda_T of 001 Lemma D.3 for odd polynomials of any degree; infinite where it overflows."""
    radius = 1.0
    for step in polynomials:
        try:
            powers = [abs(c) * radius ** (2 * k) for k, c in enumerate(step)]
        except OverflowError:
            return math.inf
        constant *= sum((2 * k + 1) * p for k, p in enumerate(powers))
        radius *= sum(powers)
    return constant if math.isfinite(constant) else math.inf


def _gaussian_smoothed_sign(
    kind: Kind, *, sigma: float, alpha: float, calls: int, shape: tuple[int, int]
) -> float:
    """1/gamma, gamma a floor of s_q(M + sigma H) in all `calls` with probability 1 - alpha.

    On that event the sign equals the clipped sign at gamma (001 Corollary D.11).

    *paper* (001 Lemma D.10): gamma = sigma alpha / (2.35 sqrt(q) calls).

    *sharp*: the largest of that and two more floors, as each holds on its own. Let M be d1 x q,
    d1 >= q (else transpose); each floor fails at one call with probability alpha / calls at most,
    whatever M is, and M is settled before its call draws H.

    *By columns.* Given the others, column j of M + sigma H is Gaussian, and its distance to their
    span is sigma times a noncentral chi with at least d1 - q + 1 degrees of freedom, which exceeds
    any t at least as often as the central one. A unit x has an entry with |x_j| >= 1/sqrt(q), and
    |(M + sigma H) x| >= |x_j| dist_j, so s_q >= min_j dist_j / sqrt(q), and
    P(s_q <= t) <= q P(chi^2_{d1-q+1} <= q t^2 / sigma^2). Take the t that makes this alpha / calls.

    *By rotation.* Q M = (R, 0) with R q x q for some orthogonal Q, and Q H is distributed as H. So
    the last N = d1 - q rows of Q (M + sigma H) are sigma H2 with H2 a standard normal N x q, and
    |(M + sigma H) x| >= sigma |H2 x| gives s_q >= sigma s_min(H2). Gordon's inequality says
    E s_min(H2) >= sqrt(N) - sqrt(q); as s_min is 1-Lipschitz, it is less than its mean by t or more
    with probability exp(-t^2 / 2) at most (Davidson and Szarek 2001, Theorem II.13). Take
    t = sqrt(2 ln(calls / alpha)): gamma = sigma (sqrt(N) - sqrt(q) - t), of use where positive.
    """
    _positive("sigma", sigma)
    if not 0 < alpha < 1 or calls < 1:
        raise InputError(f"alpha is {alpha}, calls {calls}: choose 0 < alpha < 1 and calls >= 1.")
    d1, q = max(shape), min(shape)
    if not 1 <= q <= d1 < math.inf:
        raise InputError(f"shape is {shape}: give two whole numbers of at least 1.")
    gamma = sigma * alpha / (_ANTI_CONCENTRATION * math.sqrt(q) * calls)
    if kind == "sharp":
        # Imported here: scipy takes longer to load than any other certificate to compute.
        from scipy.special import gammaincinv

        # Of chi-squared, less what scipy may be wrong by (seen: 1e-13).
        quantile = 2 * float(gammaincinv((d1 - q + 1) / 2, alpha / (q * calls))) * (1 - 1e-9)
        tail = math.sqrt(2 * math.log(calls / alpha))
        rotated = math.sqrt(d1 - q) - math.sqrt(q) - tail
        gamma = max(gamma, sigma * math.sqrt(quantile / q), sigma * rotated)
    return 1 / gamma


def _exact_sign(kind: Kind, *, gamma: float | None = None) -> float:
    """2/gamma (001 Lemma D.12) or 1/gamma for pairs in the tube s_q >= gamma.

    *sharp*: in the tube the sign equals the clipped sign at gamma, which is 1/gamma-Lipschitz
    (also 001 Lemma D.7).
    """
    if gamma is None:
        raise Uncertified(
            "The exact sign jumps wherever a singular value crosses 0, so it has no Lipschitz "
            "constant: name a gamma that the smallest singular value keeps, or smooth the sign."
        )
    return (2 if kind == "paper" else 1) / _positive("gamma", gamma)


def _randomized_polar(kind: Kind, **parameters: Any) -> float:
    raise Uncertified(
        "The randomized polar factor is not Lipschitz, a sketch may miss a direction by any small "
        "change: it has a quality (gamma, nu) instead, so choose another map for a bound."
    )


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}: choose {name} > 0, or no Lipschitz constant exists.")
    return float(value)


_CERTIFICATES: dict[str, Callable[..., float]] = {
    "smoothed-polar": _smoothed_polar,
    "newton-schulz": _newton_schulz,
    "clipped-sign": _clipped_sign,
    "gaussian-smoothed-sign": _gaussian_smoothed_sign,
    "exact-sign": _exact_sign,
    "randomized-polar": _randomized_polar,
}


# What is proved of inexact polar maps (004).
#
# delta_q, eps_q of Definition 3: how far Z Z^T is from a projector, and Z from the polar factor.


def residual(initial: float, degree: int, steps: int) -> float:
    """delta_q from delta_0 for Taylor steps of that degree: exactly, by 004, Lemma 2.

    One step maps d to phi(d) = 1 - (1 - d) p(1 - d)^2. Its power series in d starts at d^(k+1) and
    has positive coefficients, so small residuals keep all their digits.
    """
    current = _share("delta_0", initial)
    powers = _residual_powers(degree)
    for _ in range(steps):
        current = min(1.0, sum(c * current**j for j, c in powers))
    return current


def polar_error_bound(residual: float) -> float:
    """eps = 1 - sqrt(1 - delta) (004, Lemma 1); with delta_q itself this is an equality."""
    share = _share("delta", residual)
    return share / (1 + math.sqrt(1 - share))


def slowdown(polar_error: float) -> float:
    """chi = 1 / (1 - eps) (004, Theorem 1); infinite where nothing is left of the alignment."""
    share = _share("eps", polar_error)
    return 1 / (1 - share) if share < 1 else math.inf


@lru_cache
def _residual_powers(degree: int) -> tuple[tuple[int, float], ...]:
    """The powers and coefficients of phi; sums of exact fractions, rounded once."""
    if degree < 1 or degree != int(degree):
        raise InputError(f"degree is {degree!r}: give a whole number from 1 on.")
    series = [Fraction(math.comb(2 * s, s), 4**s) for s in range(degree + 1)]
    square = [Fraction(0)] * (2 * degree + 2)
    for i, a in enumerate(series):
        for j, b in enumerate(series):
            square[i + j] += a * b
    return tuple((j, float(square[j - 1] - square[j])) for j in range(degree + 1, 2 * degree + 2))


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"{name} is {value}: it lies in [0, 1].")
    return float(value)
