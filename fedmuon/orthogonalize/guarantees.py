"""What is proved of inexact polar maps (004).

delta_q, eps_q of Definition 3: how far Z Z^T is from a projector, and Z from the polar factor.
"""

import math
from fractions import Fraction
from functools import lru_cache

from fedmuon.core.errors import InputError


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
