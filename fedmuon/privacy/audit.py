"""An empirical lower bound on epsilon: a canary, there or not, is looked for in what is released.

White box, worst case: one example's clipped gradient is known, has norm C in all m blocks at once,
and all other examples contribute nothing. With or without it, step t releases in block w the noise
sigma xi plus b_t (in units of C, along the canary), where b_t says whether the Poisson lot drew it.
The sum over blocks over sqrt(m) is sufficient: s_t = sqrt(m) b_t + sigma N(0, 1), and the strongest
statistic is the log-likelihood ratio, sum_t ln(1 - q + q exp((sqrt(m) s_t - m / 2) / sigma^2)).

Two bounds. `counted` trusts nothing about the release: it counts how often the statistic passes a
threshold with and without the canary, the threshold chosen on half of the trials, Clopper-Pearson
on the others; N trials can show no epsilon above about ln N. `tilted` uses that, where the noise
is the declared Gaussian, delta(epsilon) = E_with max(0, 1 - exp(epsilon - statistic)) is the very
definition of the hockey-stick divergence: a coin with that bias is thrown in each trial, and
Clopper-Pearson on its heads bounds delta(epsilon) from below, so it reaches any epsilon. It asks
whether the accountant is right about that noise, not whether a release draws it.

The larger of two bounds of confidence 1 - f / 2 each is one of confidence 1 - f: see `both_bounds`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import betaincinv

from fedmuon.core.errors import InputError

FEWEST = 100
CONFIDENCE = 0.95
LEVEL = 0.01  # between the epsilons that are tested
CHUNK = 2**22  # normal numbers held at a time


class Setting(NamedTuple):
    """What is audited: the noise is that of one block, the blocks share their lots."""

    noise_multiplier: float
    sampling_probability: float
    steps: int
    blocks: int


class Statistics(NamedTuple):
    """The log-likelihood ratio in trials with and without the canary."""

    present: np.ndarray
    absent: np.ndarray


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon at delta that holds with this confidence."""

    epsilon: float
    method: str
    delta: float
    confidence: float
    trials: int


# How many (trials, steps), and whether the canary is there -> the aligned sums s, so many.
Observe = Callable[[tuple[int, int], bool], np.ndarray]


def projected(setting: Setting, rng: np.random.Generator) -> Observe:
    """The aligned sums without the tensors around them."""

    def observe(shape: tuple[int, int], present: bool) -> np.ndarray:
        held = present * (rng.random(shape) < setting.sampling_probability)
        noise = setting.noise_multiplier * rng.standard_normal(shape)
        return math.sqrt(setting.blocks) * held + noise

    return observe


def likelihood_ratio(setting: Setting, sums: np.ndarray) -> np.ndarray:
    """ln P(s_1, ..., s_T | with) / P(s_1, ..., s_T | without), from sums [trials, steps]."""
    q, noise = setting.sampling_probability, setting.noise_multiplier
    exponent = (math.sqrt(setting.blocks) * sums - setting.blocks / 2) / noise**2
    if q == 1:
        return exponent.sum(1)
    return np.logaddexp(math.log1p(-q), math.log(q) + exponent).sum(1)


def require_enough(count: int) -> None:
    """Refuse trials that can show nothing."""
    if count < FEWEST:
        raise InputError(f"trials = {count} can show nothing: use at least {FEWEST}")


def trials(setting: Setting, observe: Observe, count: int) -> Statistics:
    """`count` trials with the canary, and as many without it."""
    require_enough(count)
    if not setting.noise_multiplier > 0:
        raise InputError("noise = 0 hides nothing, epsilon is infinite: give noise")
    size = max(1, CHUNK // setting.steps)
    ratios = [
        [
            likelihood_ratio(setting, observe((rows, setting.steps), there))
            for there in (True, False)
        ]
        for rows in (min(size, count - start) for start in range(0, count, size))
    ]
    return Statistics(*map(np.concatenate, zip(*ratios, strict=True)))


def at_least(hits: int, of: int, failure: float) -> float:
    """Clopper-Pearson: the true probability is smaller with a chance of `failure` at most."""
    return float(betaincinv(hits, of - hits + 1, failure)) if hits else 0.0


def at_most(hits: int, of: int, failure: float) -> float:
    """Clopper-Pearson from the other side."""
    return float(betaincinv(hits + 1, of - hits, 1 - failure)) if hits < of else 1.0


def counted(found: Statistics, delta: float, confidence: float = CONFIDENCE) -> LowerBound:
    """From counts alone: P_with(A) <= e^epsilon P_without(A) + delta, and the other way round.

    The event A is a half-line of the statistic, chosen on the first half of the trials together
    with its direction; the failure is shared by the two probabilities.
    """
    half, failure = len(found.present) // 2, (1 - confidence) / 2
    first = Statistics(*(part[:half] for part in found))
    second = Statistics(*(part[half:] for part in found))
    choices = [
        (_bound(first, threshold, up, delta, failure), float(threshold), up)
        for threshold in np.quantile(np.concatenate(first), np.linspace(0, 1, 401))
        for up in (True, False)
    ]
    _, threshold, up = max(choices)
    value = max(0.0, _bound(second, threshold, up, delta, failure))
    return LowerBound(value, "counted", delta, confidence, len(second.present))


def most_counted(count: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """What `counted` shows of so many trials where all with the canary are told from all without:
    the largest epsilon that it ever can."""
    of, failure = count - count // 2, (1 - confidence) / 2
    least = at_least(of, of, failure) - delta
    return max(0.0, math.log(least / at_most(0, of, failure))) if least > 0 else 0.0


def _bound(found: Statistics, threshold: float, up: bool, delta: float, failure: float) -> float:
    """ln((P(A) - delta) / P'(A)), P(A) bounded from below and P'(A) from above.

    A is what lies above the threshold and P is with the canary, or both are turned around.
    """
    if up:
        hits, false = (int((part > threshold).sum()) for part in found)
    else:
        false, hits = (int((part <= threshold).sum()) for part in found)
    of = len(found.present)
    least = at_least(hits, of, failure) - delta
    return math.log(least / at_most(false, of, failure)) if least > 0 else -math.inf


def tilted(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> LowerBound:
    """From the declared noise: the largest epsilon at which delta is surely exceeded.

    Heads of coins with mean delta(epsilon) are counted at epsilon = 0, LEVEL, 2 LEVEL, ... until
    delta is no longer surely exceeded. A claim that is false needs a first false one, at a level
    fixed beforehand, so the confidence of that one test is the confidence of all.
    """
    coins, of = rng.random(len(found.present)), len(found.present)

    def exceeded(level: int) -> bool:
        bias = -np.expm1(np.minimum(0.0, level * LEVEL - found.present))
        return at_least(int((coins < bias).sum()), of, 1 - confidence) > delta

    low, high = 0, max(1, math.ceil(found.present.max() / LEVEL))  # heads get fewer with the level
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if exceeded(middle) else (low, middle - 1)
    return LowerBound(low * LEVEL, "tilted", delta, confidence, of)


def both_bounds(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> tuple[LowerBound, LowerBound]:
    """Both bounds, each with half of the failure: with this confidence both hold, and so does the
    larger one."""
    each = (1 + confidence) / 2
    return counted(found, delta, each), tilted(found, delta, rng, each)
