"""The least noise that spends at most a given epsilon, by the accountant's upper end."""

import math
from collections.abc import Callable
from functools import cache

from fedmuon.errors import InputError
from fedmuon.privacy import loss, renyi
from fedmuon.privacy.accounting import Answer, account, event, merge, require_supported
from fedmuon.privacy.pairs import Event

Spent = Callable[[float], float]


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

    The answer's upper end is at most epsilon. A Renyi epsilon is quick and never too small, so the
    search starts from the noise that meets it.
    """
    require_supported(adjacency)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} must be a positive number, say 8")

    def releases(noise: float) -> list[Event]:
        return merge([event(noise, sampling_probability, steps, blocks, mode)], adjacency)

    def answer(noise: float) -> Answer:
        return account(releases(noise), delta, mode, adjacency=adjacency)

    def renyi_spent(noise: float) -> float:
        return renyi.epsilon(releases(noise), delta)

    def spent(noise: float) -> float:
        events, about = releases(noise), renyi_spent(noise)
        return min(about, loss.upper(events, delta, loss.coarsest(events, delta, about)))

    answer(math.sqrt(blocks))  # refuses what cannot be accounted for before the search begins
    by_renyi = mode == "per-release"
    noise = least(renyi_spent, epsilon, math.sqrt(blocks), 2.0, precision if by_renyi else 0.01)
    noise = noise if by_renyi else least(spent, epsilon, noise, 1.15, precision)
    while (found := answer(noise)).upper > epsilon:  # another grid, other roundings
        noise *= 1 + precision
    return noise, found


def least(spent: Spent, target: float, guess: float, ratio: float, precision: float) -> float:
    """Where a falling function first is at most `target`: steps by `ratio`, then a root."""
    spent = cache(spent)
    low = high = guess
    while spent(high) > target:
        low, high = high, ratio * high
        if high > 1e9:
            raise InputError(f"no noise reaches epsilon = {target}: ask for a larger one")
    while low == high or spent(low) <= target:
        low, high = low / ratio, low
        if high < 1e-3:
            return high
    return _narrow(spent, target, low, high, precision)


def _narrow(spent: Spent, target: float, low: float, high: float, precision: float) -> float:
    """Illinois regula falsi in logarithms; `high` always meets the target, `low` never."""

    def excess(noise: float) -> float:
        return math.log(max(spent(noise), 1e-300) / target)

    above, below = excess(low), excess(high)
    while high > low * (1 + precision):
        share = above / (above - below) if math.isfinite(above) else 0.5
        middle = low * (high / low) ** min(max(share, 0.05), 0.95)
        found = excess(middle)
        if found > 0:
            low, above, below = middle, found, below / 2
        else:
            high, below, above = middle, found, above / 2
    return high
