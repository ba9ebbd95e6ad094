"""The privacy cost of publishing the best of several private runs (Papernot, Steinke 2022).

Each run draws its settings (step size, seed, optimizer) afresh and is private by itself. The run
with the best score is published. If the number of runs is fixed, composition counts them all. If it
is drawn at random and stays secret, much less is spent. Let K have the truncated negative binomial
law of shape eta and parameter gamma (eta = 1 is geometric, eta = 0 logarithmic), and let runs be
(a, e(a))-RDP for every order a. Then the publication is (a, e')-RDP with

    e' = e(a) + (1 + eta) ((1 - 1/b) e(b) + ln(1/gamma) / b) + ln(E K) / (a - 1)

for every a > 1 and b >= 1 (their Theorem 2). The score must be accounted for: it is a function of
the run's releases and of public data alone, or it is released privately and counted among the run's
releases. A loss on the private samples is neither, and voids this. Ties are broken at random or by
a fixed order of outcomes, and nothing else of the runs is published.
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
    "Holds only if runs are compared by what they released and by public data. Choosing by a "
    "loss or accuracy on the private samples spends more than the account counts."
)
Divergence = Callable[[float], float]  # of an order, (a, e(a))-RDP


def mean_runs(shape: str, gamma: float) -> float:
    """E K: 1 / gamma, or (1/gamma - 1) / ln(1/gamma)."""
    return 1 / gamma if shape == "geometric" else (1 / gamma - 1) / -math.log(gamma)


def gamma_for(shape: str, runs: float) -> float:
    """The parameter gamma at which so many runs are expected."""
    if shape not in SHAPES:
        raise InputError(
            f"the distribution '{shape}' of the number of runs is unknown: use "
            f"{' or '.join(SHAPES)}"
        )
    if not 1 < runs <= MOST_RUNS:
        raise InputError(
            f"runs = {runs:g} is out of range: give a number above 1 and at most {MOST_RUNS:g}"
        )
    low, high = 1e-9, 1 - 1e-12  # mean_runs falls with gamma
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_runs(shape, middle) > runs else (low, middle)
    return low  # the end with no fewer runs


def divergence(single: Divergence, order: float, shape: str, gamma: float) -> float:
    """e' of the best of K runs; the least over b = 1 and the orders of the accountant."""
    eta, lost = SHAPES[shape], math.log(mean_runs(shape, gamma)) / (order - 1)
    chosen = min(
        ((1 - 1 / b) * single(b) if b > 1 else 0.0) - math.log(gamma) / b
        for b in (1.0, *renyi.ORDERS)
    )
    return single(order) + (1 + eta) * chosen + lost


def epsilon(
    events: Sequence[Event], delta: float, runs: float, shape: str = "logarithmic"
) -> float:
    """Epsilon of the best of K runs that each make these releases, with E K = `runs`."""
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
    """The epsilon of the best of K runs, and for comparison that of one run and of E K published
    runs."""
    gamma_for(shape, runs)
    given = noise_multiplier, sampling_probability
    single = composition.epsilon(*given, steps, delta, blocks, adjacency=adjacency)
    every = composition.epsilon(*given, steps * math.ceil(runs), delta, blocks, adjacency=adjacency)
    spent = composition.event(*given, steps, blocks)
    spent = dataclasses.replace(spent, replaced=adjacency == "replace-one")
    return {
        "epsilon": epsilon([spent], delta, runs, shape),
        "of_one_run": single.upper,
        "of_all_published": every.upper,
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
    """Draw K. It must stay secret from everyone who sees the publication."""
    gamma, chance = gamma_for(shape, runs), secrets.randbits(53) / 2**53
    count, mass = 1, gamma if shape == "geometric" else (1 - gamma) / -math.log(gamma)
    while chance >= mass > 0:  # the inverse of the distribution function
        chance -= mass
        count += 1
        mass *= (1 - gamma) * (1 if shape == "geometric" else (count - 1) / count)
    return count
