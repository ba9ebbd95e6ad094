"""The privacy loss of composed Poisson-subsampled Gaussians, rounded up and down to a grid.

The pairs (P, Q) of `dominating_pairs.py` have a loss ln(P/Q)(x) that grows with x. So the interval
between two points of the grid is an interval of x, and its masses under P and Q are known. To round
up, an interval's mass goes to both of its ends such that both masses stay (connect the dots,
Doroshenko et al. 2022). To round down, it goes to the lower end (privacy buckets). Sums of losses
are convolutions. These are the two estimates of dp-accounting's PLD, without its start-up time.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedmuon.privacy.accounting.dominating_pairs import Event, bottom, masses, outcome, top

ROUNDING = float(np.finfo(float).eps)
GRID = 1e-3
LARGE = 100.0  # from this epsilon on, the composed loss may be wide
SINGLE, COMPOSED = 2**17, 2**20  # the maximum points of one release, and of the sum


class Losses(NamedTuple):
    """Masses of the losses (start + 0, 1, ...) * grid, and of an infinite loss."""

    start: int
    masses: np.ndarray
    infinite: float = 0.0


def estimates(event: Event, grid: float, up: bool = True) -> tuple[Losses, Losses]:
    """The losses of P from Q and of Q from P, rounded up or down.

    They stand for the example being removed, and added.
    """
    first, last = math.floor(bottom(event) / grid), math.ceil(top(event) / grid)
    ends = outcome(event, np.arange(first, last + 1) * grid)
    one, other = masses(event, ends)
    forth = _rounded(first, one[1:-1], other[1:-1], float(one[0]), float(one[-1]), grid, up)
    if event.replaced or event.sampling_probability == 1:  # turned round, they are the same pair
        return forth, forth
    least, most = other[1:-1][::-1], one[1:-1][::-1]  # no loss of P is below ln(1 - q)
    return forth, _rounded(-last, least, most, float(other[-1]), 0.0, grid, up)


def _rounded(
    start: int,
    masses: np.ndarray,
    others: np.ndarray,
    below: float,
    above: float,
    grid: float,
    up: bool,
) -> Losses:
    """Put masses of intervals [start + k, start + k + 1] on both ends, or on the lower ones.

    `below` and `above` are the masses of the losses outside.
    """
    if not up:
        return Losses(start, np.append(masses, above))
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.exp((start + np.arange(len(masses))) * grid)  # exp(loss) at the lower end
        part = (masses - ratio * others) / -math.expm1(-grid)
    high = np.where(np.isfinite(part), np.clip(part, 0, masses), masses)
    dots = np.append(masses - high, 0.0) + np.append(0.0, high)
    dots[0] += below
    return Losses(start, dots, above)


def window(parts: Sequence[tuple[Losses, int]], grid: float, tail: float) -> tuple[int, int]:
    """The window of losses of the sum. By Chernoff's bound at most `tail` is outside."""
    low = sum(part.start * count for part, count in parts)
    high = sum((part.start + len(part.masses) - 1) * count for part, count in parts)
    logs = []
    for part, count in parts:
        some = part.masses > 0
        logs.append((part.start + np.flatnonzero(some), np.log(part.masses[some]), count))
    for order in np.geomspace(0.05, 300, 18) * grid:
        up, down = (
            sum(count * _log_moment(at, log, sign * order) for at, log, count in logs)
            for sign in (1, -1)
        )
        high = min(high, math.ceil((up - math.log(tail / 2)) / order))
        low = max(low, math.floor((math.log(tail / 2) - down) / order))
    return low, max(high, low)


def _log_moment(losses: np.ndarray, log_masses: np.ndarray, order: float) -> float:
    """ln E exp(order * loss / grid)."""
    exponents = order * losses + log_masses
    largest = exponents.max()
    return float(largest + math.log(np.exp(exponents - largest).sum()))


def compose(parts: Sequence[tuple[Losses, int]], grid: float, tail: float) -> Losses:
    """The sum of all losses in a window. Mass outside wraps around into it."""
    low, high = window(parts, grid, tail)
    least = max(high - low + 1, *(len(part.masses) for part, _ in parts))
    # The next length 2^a, 3 * 2^a or 5 * 2^a, at which FFTs are quick.
    length = min(odd << max(0, (-(-least // odd) - 1).bit_length()) for odd in (1, 3, 5))
    spectrum = np.ones(length // 2 + 1, dtype=complex)
    for part, count in parts:
        spectrum *= np.fft.rfft(part.masses, length) ** count
    start = sum(part.start * count for part, count in parts)
    masses = np.roll(np.fft.irfft(spectrum, length), -((low - start) % length))
    finite = sum(count * math.log1p(-part.infinite) for part, count in parts)
    return Losses(low, masses[: high - low + 1], -math.expm1(finite))


def slack(parts: Sequence[tuple[Losses, int]], composed: Losses, tail: float) -> float:
    """The largest error of delta by wrapping and by the rounding of the transform."""
    count = sum(count for _, count in parts)
    return tail + 4 * ROUNDING * count * math.sqrt(len(composed.masses))


def epsilon_at(composed: Losses, delta: float, grid: float) -> float:
    """The smallest epsilon >= 0 with E max(0, 1 - exp(epsilon - loss)) <= delta."""
    first = max(0, -composed.start)
    losses = (composed.start + first + np.arange(len(composed.masses) - first)) * grid
    masses = composed.masses[first:]
    if composed.infinite > delta:
        return math.inf
    if not len(losses):
        return 0.0
    low, high = 0, len(losses) - 1  # the first loss at which delta is not exceeded lies between
    while low < high:
        middle = (low + high) // 2
        excess = -np.expm1(losses[middle] - losses[middle:]) @ masses[middle:]
        low, high = (middle + 1, high) if composed.infinite + excess > delta else (low, middle)
    mass = composed.infinite + masses[low:].sum() - delta
    other = np.exp(losses[low] - losses[low:]) @ masses[low:]
    return max(0.0, float(losses[low] + math.log(mass / other))) if min(mass, other) > 0 else 0.0


def upper(events: Sequence[Event], delta: float, grid: float) -> float:
    """An upper bound on epsilon, whether P or Q is with the example."""
    pairs = [(estimates(event, grid), event.count) for event in events]
    sides = ([(found[side], count) for found, count in pairs] for side in (0, 1))
    return max(_end(parts, delta, grid, -1) for parts in sides)


def lower(events: Sequence[Event], delta: float, grid: float) -> float:
    """A lower bound on epsilon, of P from Q, the worse direction."""
    parts = [(estimates(event, grid, up=False)[0], event.count) for event in events]
    return _end(parts, delta, grid, 1)


def _end(parts: Sequence[tuple[Losses, int]], delta: float, grid: float, sign: int) -> float:
    tail = 1e-6 * delta
    composed = compose(parts, grid, tail)
    allowed = delta + sign * slack(parts, composed, tail)
    return epsilon_at(composed, allowed, grid) if allowed > 0 else math.inf


def finest(events: Sequence[Event]) -> float:
    """The finest grid on which one release still takes a moderate number of points."""
    return max((top(event) - bottom(event)) / SINGLE for event in events)


def width(events: Sequence[Event], delta: float, grid: float) -> float:
    """The length of the window of the composed losses."""
    parts = [(estimates(event, grid)[0], event.count) for event in events]
    low, high = window(parts, grid, 1e-6 * delta)
    return (high - low) * grid


def coarsest(events: Sequence[Event], delta: float, about: float) -> float:
    """`GRID`, or a coarser grid if one release or the sum would take too many points.

    Both ends hold on every grid. Ends that are far apart show that the grid is coarse.
    """
    coarse = max(GRID, finest(events))
    if about < LARGE:
        return coarse
    return max(coarse, width(events, delta, coarse) / COMPOSED)


def grid_for(events: Sequence[Event], delta: float, about: float) -> float:
    """A grid on which the ends are about 1% apart, if a moderate number of points allows it.

    Rounding down costs about half a point per release. `about` is a rough epsilon.
    """
    coarse = coarsest(events, delta, about)
    wanted = 0.02 * max(min(about, 1e3), 0.05) / sum(event.count for event in events)
    if wanted >= coarse:
        return coarse
    return min(coarse, max(wanted, finest(events), width(events, delta, coarse) / COMPOSED))
