"""Poisson lots with a maximum size: delta increases, because larger lots are cut.

A lot is drawn as usual: it contains each of n examples with probability q. If the lot has more than
B examples, B of them stay, and the others are left out of the step. A step therefore needs memory
for at most B examples.

Let p = T P(Bin(n, q) > B) for T steps. A run that has (epsilon, delta_0) without a maximum size has
(epsilon, delta) with the maximum size B, where

    delta = delta_0 + (1 + e^epsilon) p        (compare Chua et al. 2024, "Scalable DP-SGD").

`account_cut` finds an epsilon for a given delta. Any rule may select the examples that stay. Both
data sets must have the same public n, as under zero-out and replace-one. A comment in this file
contains the proof. For the examples of one client, the lots of other clients do not matter.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache

from fedmuon.config.incompatible import LEAST_DELTA
from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting.composition import Answer

# Proof. Let M be the run whose lots are not cut, and M_B the same run with lots that are cut. Lots
# do not depend on earlier releases. With the same draws of lots and noise, both runs therefore
# release the same, as long as none of the lots in T steps exceeds B. The probability that some lot
# exceeds B is at most p. Therefore, |P(M_B in A) - P(M in A)| <= p for every set A of outcomes. If
# M has (epsilon, delta_0) for two neighbouring data sets D and D', then
#
#     P(M_B(D) in A) <= P(M(D) in A) + p <= e^epsilon P(M(D') in A) + delta_0 + p
#                    <= e^epsilon P(M_B(D') in A) + delta_0 + (1 + e^epsilon) p.
#
# Ignoring the maximum would be wrong. Given that the other B - 1 examples of a lot stayed, an
# example is in the lot with a probability above q, because larger lots were cut. The loss of a
# release without the example may then exceed -ln(1 - q), which is the maximum for Poisson lots.

OUTWARDS = 1 + 1e-6  # exceeds the rounding error of a tail probability
TOO_OFTEN = (
    "Lots are larger than max-lot too often. The cuts of these lots use up all of delta, so "
    "epsilon is infinite. Raise max-lot."
)


@lru_cache(maxsize=4096)
def cut_probability(size: int, rate: float, most: int) -> float:
    """Return an upper bound on the probability that a Poisson lot has more than `most` examples."""
    from scipy.special import bdtrc  # takes longer to load than everything else here

    if most < 1:
        raise InputError(f"max-lot is {most}, but it must be at least 1. Set max-lot = 1 or more.")
    return min(1.0, OUTWARDS * float(bdtrc(most, size, rate))) if most < size else 0.0


def delta_left(delta: float, cut: float, epsilon: float) -> float:
    """Return delta_0 = delta - (1 + e^epsilon) p, the delta of the run without a maximum size.

    Args:
        delta: The delta of (epsilon, delta).
        cut: p, the probability that a lot of the run is cut.
        epsilon: The epsilon of (epsilon, delta).
    """
    return delta - cut * (1 + math.exp(min(epsilon, 700.0))) if cut else delta


def account_cut(answer_at: Callable[[float], Answer], delta: float, cut: float) -> Answer:
    """Return the epsilon and its assumptions for lots with a maximum size.

    Args:
        answer_at: Function that receives a delta, and returns the result without a maximum size.
        delta: The delta of (epsilon, delta).
        cut: p, the probability that a lot of the run is cut.
    """
    answer = answer_at(delta)
    if not cut:
        return answer
    claimed = answer.upper
    for _ in range(100):
        left = delta_left(delta, cut, claimed)
        if left < LEAST_DELTA or math.isinf(claimed):
            break
        answer = answer_at(left)
        if answer.upper <= claimed:
            # Cutting lowers delta by at most the amount by which it raises delta.
            raised_delta = min(delta + cut * (1 + math.exp(min(claimed, 700.0))), 1 - 1e-9)
            lower = min(answer_at(raised_delta).lower, claimed)
            ends = {"epsilon": claimed, "upper": claimed, "lower": lower}
            return dataclasses.replace(answer, **ends, rdp=max(answer.rdp, claimed))
        claimed = answer.upper * (1 + 1e-9)
    ends = dict.fromkeys(("epsilon", "upper", "rdp"), math.inf)
    note = f"{TOO_OFTEN} {answer.note}".strip()
    return dataclasses.replace(answer, **ends, lower=0.0, certified=False, note=note)
