"""What is proved of inexact polar maps, as numbers from a spectrum: 002, section 2, and 004.

(gamma, nu) of 002, Assumption 2.1: <M, T(M)> >= (1 - gamma) ||M||_* and ||T(M)||_op <= 1 + nu.
delta_q, eps_q of 004, Definition 3: how far Z Z^T is from a projector, and Z from the polar factor.
"""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.errors import InputError
from fedmuon.orthogonalize.coefficients import Coefficients, schedule


def newton_schulz_quality(
    singular: ArrayLike, delta: float, steps: int, coefficients: Coefficients = "quintic"
) -> tuple[float, float]:
    """(gamma, nu) of p_q(M / delta), delta >= ||M||_op, from the singular values (002, Prop. 2.2).

    gamma = sum s_i (1 - p_q(s_i / delta)) / sum s_i for any odd polynomials. The cubic and the
    quintic keep [0, 1], so their nu is 0; of other schedules it is what p_q overshoots 1 by.
    """
    s = _spectrum(singular)
    if not delta >= s[0]:
        raise InputError(f"delta is {delta}: choose delta >= ||M||_op = {s[0]:g}.")
    image = s / delta
    for step in schedule(coefficients, steps):
        image = sum(c * image ** (2 * k + 1) for k, c in enumerate(step))
    lost = float(np.dot(s, 1 - image) / s.sum())
    return lost, max(0.0, float(np.abs(image).max()) - 1)


def randomized_alignment(
    singular: ArrayLike, rank: int, oversample: int, power: int, delta: float
) -> float:
    """A floor of E <M, T(M)> over Gaussian sketches, delta >= ||M||_op (002, Prop. 2.3 (2)).

    It holds for any number of cubic or quintic steps, as both keep [0, 1] and exceed the identity.
    """
    s = _spectrum(singular)
    if not delta >= s[0]:
        raise InputError(f"delta is {delta}: choose delta >= ||M||_op = {s[0]:g}.")
    head, tail, ratio = _split(s, rank, oversample)
    return max(0.0, head - rank / (oversample - 1) * ratio ** (4 * power) * tail) / delta


def randomized_quality(
    singular: ArrayLike, rank: int, oversample: int, power: int, delta: float
) -> tuple[float, float]:
    """(gamma, nu) that Prop. 2.3 proves of the randomized map; gamma = 1 proves nothing (B.3)."""
    floor = randomized_alignment(singular, rank, oversample, power, delta)
    return 1 - floor / float(_spectrum(singular).sum()), 0.0


def power_count(singular: ArrayLike, rank: int, oversample: int) -> int:
    """The fewest power iterations h for which Prop. 2.3 proves a positive alignment, 002 (18)."""
    head, tail, ratio = _split(_spectrum(singular), rank, oversample)
    penalty = rank * tail / ((oversample - 1) * head)
    if penalty < 1:
        return 0
    if ratio >= 1:
        raise InputError(
            f"s_{rank} = s_{rank + 1}, and power iterations need a gap there: choose a rank at a "
            f"gap, or oversample > {1 + rank * tail / head:.4g}."
        )
    return 1 + math.floor(math.log(penalty) / (-4 * math.log(ratio)))


def _spectrum(singular: ArrayLike) -> np.ndarray:
    """The positive singular values, falling."""
    s = np.sort(np.asarray(singular, dtype=float).ravel())[::-1]
    if not (np.isfinite(s).all() and s.size and s[0] > 0 and s[-1] >= 0):
        raise InputError("singular values must be finite and at least 0, one of them positive.")
    return s[s > 0]


def _split(s: np.ndarray, rank: int, oversample: int) -> tuple[float, float, float]:
    """H_s, T_s and s_{s+1} / s_s of 002, B.3, of a falling spectrum."""
    if not 1 <= rank <= len(s) or oversample < 2:
        raise InputError(
            f"rank is {rank}, oversample {oversample}: choose 1 <= rank <= {len(s)}, the rank of "
            "M, and oversample >= 2."
        )
    ratio = float(s[rank] / s[rank - 1]) if rank < len(s) else 0.0
    squares = s**2
    return float(squares[:rank].sum()), float(squares[rank:].sum()), ratio


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


def residual_bound(initial: float, degree: int, steps: int) -> float:
    """delta_0^((k+1)^q) >= delta_q (004, Theorem 2), on all of [0, 1].

    With a_s = (2s)!/(4^s s!^2) and p = sum_{s<=k} a_s d^s one has phi' = (2k+1) a_k d^k p (004,
    Lemma 3), a series with positive coefficients from d^k on. Hence phi(d) / d^(k+1) rises, to
    phi(1) = 1 at d = 1, and phi(d) <= d^(k+1): there is no need for d to be small.
    """
    base = _share("delta_0", initial)
    with np.errstate(over="ignore"):
        return float(np.float64(base) ** np.power(float(_degree(degree) + 1), steps))


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
    series = [Fraction(math.comb(2 * s, s), 4**s) for s in range(_degree(degree) + 1)]
    square = [Fraction(0)] * (2 * degree + 2)
    for i, a in enumerate(series):
        for j, b in enumerate(series):
            square[i + j] += a * b
    return tuple((j, float(square[j - 1] - square[j])) for j in range(degree + 1, 2 * degree + 2))


def _degree(degree: int) -> int:
    if degree < 1 or degree != int(degree):
        raise InputError(f"degree is {degree!r}: give a whole number from 1 on.")
    return int(degree)


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"{name} is {value}: it lies in [0, 1].")
    return float(value)
