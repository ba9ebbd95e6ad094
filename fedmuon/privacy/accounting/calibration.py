"""Calibration: the least noise whose upper end of epsilon meets a target."""

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
    """Find the least noise multiplier of a block.

    A Renyi epsilon and an epsilon on a coarse grid are quick and never too small, so the search
    starts from the noise that meets them. It ends on the grid on which the accountant answers.

    Args:
        epsilon: The target.
        sampling_probability: The chance of an example to be in a lot.
        steps: T.
        delta: The delta of (epsilon, delta).
        blocks: m, how many blocks are clipped each.
        mode: `joint`, or `per-release`, which certifies nothing.
        adjacency: What two data sets differ in.
        precision: The relative precision of the noise.

    Returns:
        The noise and its answer, whose upper end is at most `epsilon`. With a share `precision`
        less noise, it would exceed `epsilon`.
    """
    require_supported(adjacency)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} must be a positive number, say 8")

    def releases(noise: float) -> list[Event]:
        return merge([event(noise, sampling_probability, steps, blocks, mode)], adjacency)

    def answer(noise: float) -> Answer:
        return account(releases(noise), delta, mode, adjacency=adjacency)

    answer(math.sqrt(blocks))  # rejects what cannot be accounted for before the search begins
    by_renyi, coarsely, finely = (
        _spent(releases, delta, grid) for grid in (None, pld.coarsest, pld.grid_for)
    )
    printed = mode == "per-release"
    noise = least(by_renyi, epsilon, math.sqrt(blocks), 2.0, precision if printed else 0.01)
    if not printed:
        noise = least(coarsely, epsilon, noise, 1.15, 10 * precision)
        noise = least(finely, epsilon, noise, 1.01, precision)
    while (found := answer(noise)).upper > epsilon:  # the last bits of a sum may differ
        noise *= 1 + precision
    return noise, found


def _spent(releases: Releases, delta: float, grid: Grid | None) -> Spent:
    """A function of the noise: the upper end of epsilon, by Renyi or on a grid, if that is less."""

    def spent(noise: float) -> float:
        events = releases(noise)
        about = renyi.epsilon(events, delta)
        if grid is None:
            return about
        return min(about, pld.upper(events, delta, grid(events, delta, about)))

    return spent


def least(spent: Spent, target: float, guess: float, ratio: float, precision: float) -> float:
    """The least noise at which a falling function is at most `target`.

    The search begins at `guess`. Steps by `ratio`, which get longer, enclose the root; Illinois
    regula falsi narrows it.
    """
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
