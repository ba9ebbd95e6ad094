"""The pair of distributions that represents two data sets differing in one example.

A step M draws a Poisson lot at rate q, and releases the sum of the lot's clipped contributions plus
noise N(0, s^2 I). The unit of s is the sensitivity. The hockey-stick divergence H_a(P || Q) is the
supremum of P(A) - a Q(A) over all sets A. A pair (P, Q) dominates the step if
H_a(M(D) || M(D')) <= H_a(P || Q) for all neighbours D, D' and all a >= 0. Every epsilon of a
product of dominating pairs also holds for the adaptive composition of their steps (Zhu, Dong, Wang
2022, Definition 7 and Theorem 10). In the table, N(u) means N(u, s^2 I).

| adjacency | D and D' | P | Q |
|---|---|---|---|
| zero-out | one example contributes 0 in D' instead | (1 - q) N(0) + q N(1) | N(0) |
| add-remove | D' lacks the example, q is a public number | the same | the same |
| replace-one | one example is another in D' | (1 - q) N(0) + q N(1) | (1 - q) N(0) + q N(-1) |

A comment in this file contains the proof.

For replace-one, both directions (P, Q) and (Q, P) are equivalent. For zero-out and add-remove, each
direction is composed with itself, because an example is present in all steps or in none. The larger
of the two results counts, which may be either one (Lebeda, Regehr, Kamath, Steinke 2024).

With add-remove, the rate and the expected lot in the divisor must be public numbers. Otherwise, one
more example would change the rate lot/n of *all* examples.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# Proof of the table. The other examples are in the lot with the same probability q in D and in D',
# independently. H_a is a supremum of linear functions and therefore jointly convex. The lot of the
# other examples may thus be fixed, and its sum subtracted. It remains to compare
# P_u = (1 - q) N(0) + q N(u) with Q_v = (1 - q) N(0) + q N(v), where |u|, |v| <= 1. Take any set A,
# and t with N(0)(A) = Phi(-t/s). By Neyman and Pearson, among sets of this size, the half-space
# along the shift has the largest probability after the shift, and the half-space against it the
# smallest: N(u)(A) <= Phi((1 - t)/s) and N(v)(A) >= Phi((-1 - t)/s). Hence
# P_u(A) - a Q_v(A) <= P(x > t) - a Q(x > t) <= H_a(P || Q) with the pair in the last row (1). If
# v = 0 or u = 0, the second bound is an equality at N(0). The same argument then proves the pair in
# the first row, in both directions (2) (for add-remove: Theorem 11 of Zhu, Dong and Wang). All
# bounds are attained by contributions of full length, which are opposite in (1). QED.
#
# In (1), the map x -> -x exchanges P and Q. Doubling the sensitivity in (2) is not the same as (1),
# where N(0) is between the other two: 200 releases with q = 0.02 and s = 1 would spend 12.2, but
# they spend 2.59.

REACH = 10.0  # standard deviations of the noise on the grid; only 1e-23 lies beyond
ADJACENCIES = {
    "zero-out": "an example contributes, or 0 replaces its value; sizes and rates are public",
    "add-remove": "an example is present or absent; its rate and the expected lot size are public",
    "replace-one": "an example is replaced by any other example; sizes and rates are public",
}


@dataclass(frozen=True, order=True)
class Event:
    """`count` equal Gaussian releases of Poisson lots.

    `noise_multiplier` applies to all blocks together. If `replaced` is true, the account uses the
    pair for replace-one.
    """

    sampling_probability: float
    noise_multiplier: float
    count: int = 1
    replaced: bool = False


def hardest(spent: Iterable[Event]) -> list[Event]:
    """Return the events that may have the largest epsilon.

    An event is left out if another event has at least the same rate and count, and at most the same
    noise. Proof: a pair of rate p < q is a mixture, with weights p/q and 1 - p/q, of the pair of
    rate q and the pair (N(0), N(0)). H_a is jointly convex, and minimal for equal distributions.
    Additional noise is post-processing.
    """
    events, undominated = set(spent), []
    for event in events:
        exceeded = any(
            other.sampling_probability >= event.sampling_probability
            and other.noise_multiplier <= event.noise_multiplier
            and other.count >= event.count
            and other.replaced >= event.replaced
            for other in events - {event}
        )
        if not exceeded:
            undominated.append(event)
    return sorted(undominated)


def _log_mixed(q: float, exponent: float) -> float:
    """Return ln(1 - q + q exp(exponent))."""
    if exponent > 0:
        return exponent + math.log(q) + math.log1p((1 - q) / q * math.exp(-exponent))
    return math.log1p(q * math.expm1(exponent)) if q < 1 else exponent


def top(event: Event) -> float:
    """Return the largest privacy loss on the grid, ln(P/Q) at the outcome 1 + REACH s."""
    q, s = event.sampling_probability, event.noise_multiplier
    if event.replaced:
        low = -(3 + 2 * REACH * s) / (2 * s * s)
        return _log_mixed(q, (1 + 2 * REACH * s) / (2 * s * s)) - _log_mixed(q, low)
    return _log_mixed(q, (1 + 2 * REACH * s) / (2 * s * s))


def bottom(event: Event) -> float:
    """Return the smallest privacy loss on the grid, such as ln(1 - q)."""
    q, s = event.sampling_probability, event.noise_multiplier
    if event.replaced:
        return -top(event)
    return math.log1p(-q) if q < 1 else -(1 + 2 * REACH * s) / (2 * s * s)


def outcome(event: Event, loss: np.ndarray) -> np.ndarray:
    """Return the outcome x with the privacy loss `loss`, in standard deviations of the noise."""
    q, s = event.sampling_probability, event.noise_multiplier
    if event.replaced:
        half, bent = np.abs(loss) / 2, np.zeros_like(loss)
        if q < 1:
            # Compute bent = arsinh((1 - q)/q exp(1 / 2s^2) sinh(half)). With y = exp(x/s^2) and
            # k = q exp(-1 / 2s^2), the equation (1 - q + k y)/(1 - q + k/y) = exp(2 half) is
            # quadratic in y.
            with np.errstate(divide="ignore"):
                sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
            large = math.log((1 - q) / q) + 0.5 / s**2 + sinh
            small = np.arcsinh(np.exp(np.minimum(large, 20)))
            bent = np.where(large > 20, large + math.log(2), small)
        return s * (loss / 2 + np.copysign(bent, loss))
    if q == 1:
        return s * loss + 0.5 / s
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        exponent = loss + np.log(q * np.exp(-loss) - np.expm1(-loss)) - math.log(q)
    return np.where(loss > math.log1p(-q), s * exponent + 0.5 / s, -np.inf)


def masses(event: Event, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of intervals of outcomes under P and under Q.

    The array `ends` contains the ends of the intervals. The first interval starts at minus
    infinity, and the last interval ends at infinity.
    """
    q, s = event.sampling_probability, event.noise_multiplier
    ends = np.concatenate([[-np.inf], ends, [np.inf]])
    middle = _between(ends)
    other = (1 - q) * middle + q * _between(ends + 1 / s) if event.replaced else middle
    return (1 - q) * middle + q * _between(ends - 1 / s), other


def _between(ends: np.ndarray) -> np.ndarray:
    """Return the standard normal probabilities between consecutive ends, accurate in both tails."""
    from scipy.special import ndtr  # takes longer to load than everything else here

    low, high = ends[:-1], ends[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
