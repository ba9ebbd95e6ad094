"""The privacy cost of publishing the best of several private runs (Papernot, Steinke 2022).

Each run draws its settings, such as the step size, and only the run with the best score is
published. Each run is private. If the number of runs is fixed, the total epsilon counts all runs.
If the number is random and stays secret, epsilon is much smaller. Let the number K have the
truncated negative binomial distribution with shape eta and parameter gamma (eta = 1 is geometric,
eta = 0 logarithmic). Let e(a) be the Rényi divergence of one run at order a. The Rényi divergence
of the publication at order a is at most

    e' = e(a) + (1 + eta) ((1 - 1/b) e(b) + ln(1/gamma) / b) + ln(E K) / (a - 1)

for every a > 1 and b >= 1 (Theorem 2 of the paper). The score may depend only on the run's releases
and on public data. Any other score must itself be a private release of the run. If the score is an
exact loss on the private samples, there is no guarantee. Equal scores are ordered at random, or by
a fixed order of outcomes. Nothing else about the runs is published.
"""

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting import composition, renyi
from fedmuon.privacy.accounting.dominating_pairs import Event

SHAPES = {"logarithmic": 0.0, "geometric": 1.0}
MOST_RUNS = 1e6
SCORE = (
    "This epsilon holds only if you compare runs by their released models and by public data. If "
    "you choose a run by its loss or accuracy on the private samples, you spend more privacy "
    "than the account counts."
)
Divergence = Callable[[float], float]  # maps an order a to e(a), for (a, e(a))-RDP


def mean_runs(shape: str, gamma: float) -> float:
    """Return the expected number E K of runs.

    E K is 1 / gamma, or (1 / gamma - 1) / ln(1 / gamma) for the logarithmic distribution.
    """
    return 1 / gamma if shape == "geometric" else (1 / gamma - 1) / -math.log(gamma)


def gamma_for(shape: str, runs: float) -> float:
    """Return the parameter gamma for which the expected number of runs is `runs`."""
    if shape not in SHAPES:
        raise InputError(
            f"the distribution of the number of runs is '{shape}', but it must be "
            f"{' or '.join(SHAPES)}."
        )
    if not 1 < runs <= MOST_RUNS:
        raise InputError(
            f"runs = {runs:g} is out of range. Use a number above 1 and at most {MOST_RUNS:g}."
        )
    low, high = 1e-9, 1 - 1e-12  # mean_runs decreases with gamma
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_runs(shape, middle) > runs else (low, middle)
    return low  # the end with at least the requested number of runs


def divergence(single: Divergence, order: float, shape: str, gamma: float) -> float:
    """Return the bound e' on the Rényi divergence of the best of K runs, minimized over b."""
    eta, penalty = SHAPES[shape], math.log(mean_runs(shape, gamma)) / (order - 1)
    minimum = min(
        ((1 - 1 / b) * single(b) if b > 1 else 0.0) - math.log(gamma) / b
        for b in (1.0, *renyi.ORDERS)
    )
    return single(order) + (1 + eta) * minimum + penalty


def epsilon(
    events: Sequence[Event], delta: float, runs: float, shape: str = "logarithmic"
) -> float:
    """Return the epsilon of publishing the best of K runs, each with the releases `events`."""
    gamma = gamma_for(shape, runs)

    @cache
    def single(order: float) -> float:
        return sum(event.count * renyi.divergence(event, order) for event in events)

    return max(
        0.0,
        min(
            renyi.converted(divergence(single, order, shape, gamma), order, delta)
            for order in renyi.ORDERS
        ),
    )


def answer(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    blocks: int,
    runs: float,
    shape: str,
    adjacency: str,
) -> dict[str, Any]:
    """Return the epsilon of publishing the best of K runs, and two epsilons for comparison.

    The epsilons for comparison are those of publishing one run, and of publishing the expected
    number of runs.
    """
    gamma_for(shape, runs)
    setting = noise_multiplier, sampling_probability
    single = composition.epsilon(*setting, steps, delta, blocks, adjacency=adjacency)
    all_runs = composition.epsilon(
        *setting, steps * math.ceil(runs), delta, blocks, adjacency=adjacency
    )
    spent = composition.event(*setting, steps, blocks)
    spent = dataclasses.replace(spent, replaced=adjacency == "replace-one")
    return {
        "epsilon": epsilon([spent], delta, runs, shape),
        "of_one_run": single.upper,
        "of_all_published": all_runs.upper,
        "runs_expected": runs,
        "runs": shape,
        "adjacency": single.adjacency,
        "sampling": single.sampling,
        "delta": delta,
        "accountant": "RDP (Papernot, Steinke 2022, Theorem 2); PLD for the others",
        "certified": True,
        "note": SCORE,
    }


def draw(runs: float, shape: str = "logarithmic") -> int:
    """Draw the number K of runs. Keep K secret from everyone who sees the published result."""
    gamma, chance = gamma_for(shape, runs), secrets.randbits(53) / 2**53
    count, mass = 1, gamma if shape == "geometric" else (1 - gamma) / -math.log(gamma)
    while chance >= mass > 0:  # invert the distribution function
        chance -= mass
        count += 1
        mass *= (1 - gamma) * (1 if shape == "geometric" else (count - 1) / count)
    return count
