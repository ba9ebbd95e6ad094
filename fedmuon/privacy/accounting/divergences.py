"""Divergences between the releases of a run on two neighbouring data sets, with limits.

The pair (P, Q) of a release is that of `dominating_pairs.py`. Both divergences of this module are
f-divergences, that is mixtures of hockey-stick divergences. The dominating pair therefore bounds
them for all neighbours, too.

**Relative entropy.** KL(P || Q) of several releases is the sum of their relative entropies (chain
rule), also if later releases depend on earlier ones. For q = 1 it is 1 / (2 s^2). Otherwise, the
outcomes x are divided into intervals with the masses P_k and Q_k. With phi(r) = r ln r, the
relative entropy is the sum over k of the integral of phi(dP/dQ) dQ.

- Jensen's inequality gives the lower limit: sum_k P_k ln(P_k / Q_k).
- dP/dQ increases with x. On an interval, the chord of the convex phi is above phi, which gives the
  upper limit. This limit depends only on P_k, Q_k and the losses at both ends (connect the dots).
- Above the last end t, the loss is at most (2x - 1) / (2 s^2), whose integral has a closed form.

Both limits converge at the second order of the length of the intervals.

**Hockey-stick curve.** H_a(P || Q) for a = exp(epsilon), also for epsilon < 0, is computed from the
distributions of the privacy loss in `pld.py`, rounded down and up. H_1 is the total variation. If
every release contains every sample, the pair is equivalent to two Gaussians (closed form).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedmuon.core.gaussian_pair import gaussian_hockey_stick
from fedmuon.privacy.accounting import pld
from fedmuon.privacy.accounting.dominating_pairs import REACH, Event, bottom, masses, top

MOST_INTERVALS, ACCURACY = 2**19, 1e-8
ROUNDING = 4e-15  # exceeds the rounding error of the sum over all intervals
COMPOSED = 2**19  # number of points of the summed loss, and of one release
LARGEST = 700.0  # exp of a larger epsilon exceeds the range of doubles
GAUSSIAN_ROUNDING = 1e-13
TAIL = 1e-12  # mass of the losses that may wrap around in the FFT


class Limits(NamedTuple):
    """A lower and an upper limit of a number."""

    lower: float
    upper: float


def relative_entropy(events: Sequence[Event]) -> Limits:
    """Return limits of KL(P || Q) for all releases together.

    P contains the example, and in Q its contribution is 0. The adjacency of the events does not
    matter.
    """
    parts = [(_of_one(event), event.count) for event in events]
    return Limits(*(sum(part[side] * count for part, count in parts) for side in (0, 1)))


def _of_one(event: Event) -> Limits:
    """Return limits of the relative entropy of one release."""
    q, s = event.sampling_probability, event.noise_multiplier
    if s == 0:
        return Limits(math.inf, math.inf)
    if q == 1:
        return _of_gaussians(float(s))
    single, count = dataclasses.replace(event, replaced=False, count=1), 2**12
    while True:
        limits = _on_intervals(single, count)
        if count >= MOST_INTERVALS or limits.upper - limits.lower <= ACCURACY * limits.upper:
            return limits
        count *= 4


def _of_gaussians(s: float) -> Limits:
    """Return limits of 0.5 / s^2, which is out of the range of doubles for some s."""
    least, most = 1e-150, 1e150
    upper = 0.5 / min(s, most) ** 2 if s >= least else math.inf
    return Limits(0.5 / max(s, least) ** 2 if s <= most else 0.0, upper)


def _on_intervals(event: Event, count: int) -> Limits:
    q, s = event.sampling_probability, event.noise_multiplier
    ends = np.linspace(-REACH, 1 / s + REACH, count)  # in standard deviations of the noise
    of_p, of_q = masses(event, ends)
    exponents = ends / s - 0.5 / s**2
    loss = np.logaddexp(math.log1p(-q), math.log(q) + exponents)
    low, high = np.append(math.log1p(-q), loss[:-1]), loss  # at both ends of each interval
    width = high - low
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        part = (of_p[:-1] - np.exp(low) * of_q[:-1]) / -np.expm1(-width)
        mean = np.log(of_p[:-1]) - np.log(of_q[:-1])
    # The share of the interval's mass that moves to its upper end
    moved = np.where(np.isfinite(part), np.clip(part, 0, of_p[:-1]), of_p[:-1])
    upper = float(of_p[:-1] @ low + moved @ width) + _tail(q, s, float(ends[-1]))
    mean = np.where(np.isfinite(mean), np.clip(mean, low, high), low)
    lower = float(of_p[:-1] @ mean + of_p[-1] * loss[-1])
    slack = ROUNDING * (1 + 0.5 / s**2)
    return Limits(max(0.0, lower - slack), upper + slack)


def _tail(q: float, s: float, end: float) -> float:
    """Return an upper limit of the integral of the loss under P, above `end` deviations."""

    def above(mean: float) -> float:
        """Return the integral of (2x - 1) / (2 s^2) over x > end s, for x ~ N(mean, s^2)."""
        distance = end - mean / s
        density = math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
        mass = math.erfc(distance / math.sqrt(2)) / 2
        return ((mean - 0.5) * mass + s * density) / s**2

    return max(0.0, (1 - q) * above(0.0)) + q * above(1.0)


def hockey_stick(
    events: Sequence[Event], epsilons: np.ndarray, points: int = COMPOSED
) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper limits of H_a(P || Q) at a = exp(epsilon), for all releases together.

    The upper limit is the larger one of the limits for (P, Q) and (Q, P), and at most 1. Above an
    epsilon of 700, the lower limit is 0, and the upper limit is that of 700, because H_a falls.

    Args:
        events: The releases, with the adjacency for which the curve is requested.
        epsilons: The epsilons, which may be negative.
        points: Number of grid points. With fewer points, the limits are further apart.
    """
    lower, upper = _curves(events, epsilons, points, (False, True))
    return lower, upper


def upper_hockey_stick(
    events: Sequence[Event], epsilons: np.ndarray, points: int = COMPOSED
) -> np.ndarray:
    """Return the upper limits of `hockey_stick`, and compute no others."""
    (upper,) = _curves(events, epsilons, points, (True,))
    return upper


def _curves(
    events: Sequence[Event], epsilons: np.ndarray, points: int, sides: Sequence[bool]
) -> list[np.ndarray]:
    """Return a limit for each side: the upper one for True, the lower one for False."""
    if any(event.noise_multiplier == 0 for event in events):
        return [np.ones(len(epsilons)) for _ in sides]
    near = np.clip(epsilons, -LARGEST, LARGEST)
    if not events:
        return [np.maximum(0.0, -np.expm1(near)) for _ in sides]
    if all(event.sampling_probability == 1 for event in events):
        curve, slack = gaussian_hockey_stick(_distance(events), near), GAUSSIAN_ROUNDING
        curves = [curve + slack if up else curve - slack for up in sides]
    else:
        grid = _grid(events, points)
        curves = [_composed(events, grid, near, up) for up in sides]
    return [
        np.where(epsilons < -LARGEST, 1.0, np.clip(curve, 0.0, 1.0))
        if up
        else np.where(epsilons > LARGEST, 0.0, np.clip(curve, 0.0, 1.0))
        for curve, up in zip(curves, sides, strict=True)
    ]


def _composed(events: Sequence[Event], grid: float, epsilons: np.ndarray, up: bool) -> np.ndarray:
    """Return a limit of the larger curve of (P, Q) and (Q, P)."""
    # Exchanging P and Q gives the same pair if a sample is replaced, or if every lot contains it.
    alike = all(event.replaced or event.sampling_probability == 1 for event in events)
    estimated = [(pld.estimates(event, grid, up), event.count) for event in events]
    curves = []
    for direction in (0,) if alike else (0, 1):
        parts = [(losses[direction], count) for losses, count in estimated]
        composed = pld.compose(parts, grid, TAIL)
        error = pld.slack(parts, composed, TAIL)
        curve = _curve(composed, grid, epsilons)
        curves.append(curve + error if up else curve - error)
    return np.max(curves, axis=0)


def _distance(events: Sequence[Event]) -> float:
    """Return the distance of the two Gaussians that equal these releases of all samples."""
    squares = (e.count * ((1 + e.replaced) / e.noise_multiplier) ** 2 for e in events)
    return math.sqrt(sum(squares))


def _grid(events: Sequence[Event], points: int) -> float:
    """Return the smallest grid distance for which the arrays have a practical length."""
    coarse = max(pld.GRID, *((top(event) - bottom(event)) / pld.SINGLE for event in events))
    parts = [(pld.estimates(event, coarse)[0], event.count) for event in events]
    low, high = pld.window(parts, coarse, TAIL)
    longest = max(top(event) - bottom(event) for event in events)
    return min(coarse, max((high - low) * coarse / points, longest / points))


def _curve(losses: pld.Losses, grid: float, epsilons: np.ndarray) -> np.ndarray:
    """Return E max(0, 1 - exp(epsilon - loss)) at each epsilon."""
    values = (losses.start + np.arange(len(losses.masses))) * grid
    above = np.append(np.cumsum(losses.masses[::-1])[::-1], 0.0)  # mass of the losses from k on
    with np.errstate(over="ignore"):
        tilted = losses.masses * np.exp(-values)
    other = np.append(np.cumsum(tilted[::-1])[::-1], 0.0)
    first = np.searchsorted(values, epsilons, side="right")
    return losses.infinite + above[first] - np.exp(epsilons) * other[first]


def total_variation(events: Sequence[Event], points: int = COMPOSED) -> Limits:
    """Return limits of the total variation distance H_1(P || Q) of all releases together."""
    lower, upper = hockey_stick(events, np.zeros(1), points)
    return Limits(float(lower[0]), float(upper[0]))
