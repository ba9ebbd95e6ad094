"""The least noise that spends at most a given epsilon, by the accountant's upper end."""

import math
from collections.abc import Callable
from functools import cache

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting import pld, renyi
from fedmuon.privacy.accounting.composition import Answer, account, event, merge, require_supported
from fedmuon.privacy.accounting.dominating_pairs import Event

Spent = Callable[[float], float]
Releases = Callable[[float], list[Event]]
Grid = Callable[[list[Event], float, float], float]


def noise_for(
    epsilon: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    blocks: int = 1,
    mode: str = "joint",
    adjacency: str = "zero-out",
    precision: float = 1e-4,
) -> tuple[float, Answer]:
    """The least noise multiplier of a block, to a relative precision, and its answer.

    The answer's upper end is at most epsilon, and above it a share `precision` below. A Renyi
    epsilon and a coarse grid are quick and never too small, so the search starts from the noise
    that meets them; only the grid on which the accountant answers says where it ends.
    """
    require_supported(adjacency)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} must be a positive number, say 8")

    def releases(noise: float) -> list[Event]:
        return merge([event(noise, sampling_probability, steps, blocks, mode)], adjacency)

    def answer(noise: float) -> Answer:
        return account(releases(noise), delta, mode, adjacency=adjacency)

    answer(math.sqrt(blocks))  # refuses what cannot be accounted for before the search begins
    by_renyi, coarsely, finely = (
        _spent(releases, delta, grid) for grid in (None, pld.coarsest, pld.grid_for)
    )
    printed = mode == "per-release"
    noise = least(by_renyi, epsilon, math.sqrt(blocks), 2.0, precision if printed else 0.01)
    if not printed:
        noise = least(coarsely, epsilon, noise, 1.15, 10 * precision)
        noise = least(finely, epsilon, noise, 1.01, precision)
    while (found := answer(noise)).upper > epsilon:  # a sum's last bits may differ
        noise *= 1 + precision
    return noise, found


def _spent(releases: Releases, delta: float, grid: Grid | None) -> Spent:
    """Noise -> the upper end of epsilon: Renyi's, or on a grid where that is less."""

    def spent(noise: float) -> float:
        events = releases(noise)
        about = renyi.epsilon(events, delta)
        if grid is None:
            return about
        return min(about, pld.upper(events, delta, grid(events, delta, about)))

    return spent


def least(spent: Spent, target: float, guess: float, ratio: float, precision: float) -> float:
    """Where a falling function first is at most `target`: steps by `ratio`, longer and
    longer ones, then a root."""
    spent = cache(spent)
    low = high = guess
    while spent(high) > target:
        low, high, ratio = high, ratio * high, min(ratio**3, 4.0)
        if high > 1e9:
            raise InputError(f"no noise reaches epsilon = {target}: ask for a larger one")
    while low == high or spent(low) <= target:
        low, high, ratio = low / ratio, low, min(ratio**3, 4.0)
        if high < 1e-3:
            return high
    return _narrow(spent, target, low, high, precision)


def _narrow(spent: Spent, target: float, low: float, high: float, precision: float) -> float:
    """Illinois regula falsi in logarithms; `high` always meets the target, `low` never."""

    def excess(noise: float) -> float:
        return math.log(max(spent(noise), 1e-300) / target)

    above, below, last = excess(low), excess(high), 0.0
    while high > low * (1 + precision):
        share = above / (above - below) if math.isfinite(above) else 0.5
        middle = low * (high / low) ** min(max(share, 0.05), 0.95)
        found = excess(middle)
        again = 0.5 if found * last > 0 else 1.0  # an end that stays twice counts half
        if found > 0:
            low, above, below = middle, found, below * again
        else:
            high, below, above = middle, found, above * again
        last = found
    return high
