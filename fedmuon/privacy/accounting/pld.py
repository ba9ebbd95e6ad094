"""The privacy loss of composed Poisson-subsampled Gaussians, rounded up and down to a grid.

A release has a pair (P, Q) of distributions of an outcome x (`dominating_pairs.py`). The privacy
loss at x is ln(P/Q)(x), which increases with x. The distribution of the loss under P is stored as
an array of probabilities: entry k belongs to the loss (start + k) * grid (`Losses`).

The losses between two grid points are those of an interval of x, whose masses under P and Q are
known. To round up, the masses are split between both grid points without changing their sums
(connect the dots, Doroshenko et al. 2022). To round down, all mass is moved to the lower grid point
(privacy buckets). The array of the summed loss of several releases is the convolution of their
arrays. The library dp-accounting computes the same two estimates, but takes longer to start.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedmuon.privacy.accounting.dominating_pairs import Event, bottom, masses, outcome, top

ROUNDING = float(np.finfo(float).eps)
GRID = 1e-3
LARGE = 100.0  # from this epsilon on, the range of the composed loss may be wide
SINGLE, COMPOSED = 2**17, 2**20  # maximum number of points of one release, and of the sum


class Losses(NamedTuple):
    """A probability distribution of privacy losses on the grid.

    Attributes:
        start: Grid position of the first entry of `masses`.
        masses: Entry k is the probability of the loss (start + k) * grid.
        infinite: Probability of an infinite loss.
    """

    start: int
    masses: np.ndarray
    infinite: float = 0.0


Parts = Sequence[tuple[Losses, int]]  # kinds of releases, and the number of each


def estimates(event: Event, grid: float, up: bool = True) -> tuple[Losses, Losses]:
    """Return the distributions of the loss of P against Q and of Q against P, rounded up or down.

    The first distribution is for the removal of an example, and the second for an additional
    example.
    """
    first, last = math.floor(bottom(event) / grid), math.ceil(top(event) / grid)
    ends = outcome(event, np.arange(first, last + 1) * grid)  # the x of each grid point
    of_p, of_q = masses(event, ends)  # masses of the intervals and of both tails
    forth = _rounded(first, of_p[1:-1], of_q[1:-1], float(of_p[0]), float(of_p[-1]), grid, up)
    if event.replaced or event.sampling_probability == 1:  # exchanging P and Q gives the same pair
        return forth, forth
    of_q_back, of_p_back = of_q[1:-1][::-1], of_p[1:-1][::-1]  # no loss of P is below ln(1 - q)
    return forth, _rounded(-last, of_q_back, of_p_back, float(of_q[-1]), 0.0, grid, up)


def _rounded(
    start: int,
    masses: np.ndarray,
    others: np.ndarray,
    below: float,
    above: float,
    grid: float,
    up: bool,
) -> Losses:
    """Round a loss distribution to the grid points.

    Rounding up splits the mass of each interval between both ends of the interval. Rounding down
    moves all mass to the lower end.

    Args:
        start: Grid position of the lower end of the first interval.
        masses: Masses of the intervals [start + k, start + k + 1] under the first distribution.
        others: Masses of the same intervals under the other distribution.
        below: Mass of smaller losses.
        above: Mass of larger losses.
        grid: Distance between two grid points.
        up: Whether to round up.
    """
    if not up:
        return Losses(start, np.append(masses, above))
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.exp((start + np.arange(len(masses))) * grid)  # exp(loss) at the lower end
        part = (masses - ratio * others) / -math.expm1(-grid)
    high = np.where(np.isfinite(part), np.clip(part, 0, masses), masses)  # moved to the upper end
    dots = np.append(masses - high, 0.0) + np.append(0.0, high)
    dots[0] += below
    return Losses(start, dots, above)


def window(parts: Parts, grid: float, tail: float) -> tuple[int, int]:
    """Return a range of grid positions with all but a mass of `tail` of the summed loss."""
    low = sum(part.start * count for part, count in parts)
    high = sum((part.start + len(part.masses) - 1) * count for part, count in parts)
    logs = []  # for each part: positions of its losses, logarithms of their masses, and the count
    for part, count in parts:
        positive = part.masses > 0
        logs.append((part.start + np.flatnonzero(positive), np.log(part.masses[positive]), count))
    for order in np.geomspace(0.05, 300, 18) * grid:
        log_moments = []  # ln E exp(+-order * loss / grid) of the sum
        for sign in (1, -1):
            total = 0.0
            for places, log_masses, count in logs:
                exponents = sign * order * places + log_masses
                largest = exponents.max()
                total += count * float(largest + math.log(np.exp(exponents - largest).sum()))
            log_moments.append(total)
        high = min(high, math.ceil((log_moments[0] - math.log(tail / 2)) / order))
        low = max(low, math.floor((math.log(tail / 2) - log_moments[1]) / order))
    return low, max(high, low)


def compose(parts: Parts, grid: float, tail: float) -> Losses:
    """Return the distribution of the summed loss. Mass outside of the window wraps around."""
    low, high = window(parts, grid, tail)
    min_length = max(high - low + 1, *(len(part.masses) for part, _ in parts))
    # The next length 2^a, 3 * 2^a or 5 * 2^a, for which FFTs are fast.
    length = min(odd << max(0, (-(-min_length // odd) - 1).bit_length()) for odd in (1, 3, 5))
    spectrum = np.ones(length // 2 + 1, dtype=complex)
    for part, count in parts:
        spectrum *= np.fft.rfft(part.masses, length) ** count
    start = sum(part.start * count for part, count in parts)
    masses = np.roll(np.fft.irfft(spectrum, length), -((low - start) % length))
    finite = sum(count * math.log1p(-part.infinite) for part, count in parts)
    return Losses(low, masses[: high - low + 1], -math.expm1(finite))


def slack(parts: Parts, composed: Losses, tail: float) -> float:
    """Return a bound on the error of delta, due to wrap-around and to rounding in the FFT."""
    count = sum(count for _, count in parts)
    return tail + 4 * ROUNDING * count * math.sqrt(len(composed.masses))


def epsilon_at(composed: Losses, delta: float, grid: float) -> float:
    """Return the smallest epsilon >= 0 with E max(0, 1 - exp(epsilon - loss)) <= delta."""
    first = max(0, -composed.start)  # losses below 0 do not count
    losses = (composed.start + first + np.arange(len(composed.masses) - first)) * grid
    masses = composed.masses[first:]
    if composed.infinite > delta:
        return math.inf
    if not len(losses):
        return 0.0
    low, high = 0, len(losses) - 1  # between them is the first loss at which delta is not exceeded
    while low < high:
        middle = (low + high) // 2
        excess = -np.expm1(losses[middle] - losses[middle:]) @ masses[middle:]
        low, high = (middle + 1, high) if composed.infinite + excess > delta else (low, middle)
    mass = composed.infinite + masses[low:].sum() - delta
    other = np.exp(losses[low] - losses[low:]) @ masses[low:]
    return max(0.0, float(losses[low] + math.log(mass / other))) if min(mass, other) > 0 else 0.0


def bound(events: Sequence[Event], delta: float, grid: float, up: bool = True) -> float:
    """Return an upper bound on epsilon, or a lower bound.

    The upper bound is the larger one of the bounds for (P, Q) and (Q, P). The lower bound uses only
    (P, Q).
    """
    estimated = [(estimates(event, grid, up), event.count) for event in events]
    tail, epsilons = 1e-6 * delta, []
    for side in (0, 1) if up else (0,):
        parts = [(losses[side], count) for losses, count in estimated]
        composed = compose(parts, grid, tail)
        error = slack(parts, composed, tail)
        allowed = delta - error if up else delta + error
        epsilons.append(epsilon_at(composed, allowed, grid) if allowed > 0 else math.inf)
    return max(epsilons)


def grid_for(events: Sequence[Event], delta: float, about: float, coarsest: bool = False) -> float:
    """Return a grid distance for which both bounds on epsilon differ by about 1%, if possible.

    On a coarser grid, both bounds are still valid, but further apart. Rounding down lowers the loss
    by about half a grid distance per release.

    Args:
        events: The releases.
        delta: The delta of (epsilon, delta).
        about: An approximate epsilon.
        coarsest: Whether to use the grid distance `GRID`, or a larger one if this grid would have
            too many points.
    """
    finest = max((top(event) - bottom(event)) / SINGLE for event in events)  # for one release

    def width(grid: float) -> float:
        """Return the length of the window that contains the summed loss."""
        parts = [(estimates(event, grid)[0], event.count) for event in events]
        low, high = window(parts, grid, 1e-6 * delta)
        return (high - low) * grid

    coarse = max(GRID, finest)
    if about >= LARGE:
        coarse = max(coarse, width(coarse) / COMPOSED)
    target = 0.02 * max(min(about, 1e3), 0.05) / sum(event.count for event in events)
    if coarsest or target >= coarse:
        return coarse
    return min(coarse, max(target, finest, width(coarse) / COMPOSED))
