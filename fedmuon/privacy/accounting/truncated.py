"""Poisson lots with a maximum size: what cutting the larger ones adds to delta.

A lot is drawn as ever, each of n examples with probability q. If it has more than B examples, B of
them are kept, and all others are left out of the step. Then no step needs memory for more than B.

**Account.** Let M be the run whose lots are not cut, and M_B the same run with lots that are. With
the same draws of lots and noise, both release the same as long as no lot of the T steps exceeds B:
lots do not depend on what was released before. Let

    p = T P(Bin(n, q) > B),

which is at least the probability that one of them does. So for every set A of outcomes,
|P(M_B in A) - P(M in A)| <= p. If M has (epsilon, delta_0) for two neighbouring data sets D and D',
then

    P(M_B(D) in A) <= P(M(D) in A) + p <= e^epsilon P(M(D') in A) + delta_0 + p
                   <= e^epsilon P(M_B(D') in A) + delta_0 + (1 + e^epsilon) p.

So M_B has (epsilon, delta) with delta = delta_0 + (1 + e^epsilon) p (cf. Chua et al. 2024,
"Scalable DP-SGD"). `account_cut` finds an epsilon for which this is met. It holds for any rule by
which examples are kept. n must be that of both data sets, and public, as under zero-out and
replace-one; lots of other clients may be anything, as far as a client's own examples are concerned.

Ignoring the maximum would be wrong: given that the other B - 1 examples of a lot were kept, an
example is in it with more than probability q, as larger lots were cut. Then the loss of a release
without it may exceed -ln(1 - q), the largest of Poisson lots.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache

from fedmuon.config.incompatible import LEAST_DELTA
from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting.composition import Answer

OUTWARDS = 1 + 1e-6  # for what a tail may be rounded by
TOO_OFTEN = (
    "Lots exceed their maximum so often that they use up delta, so epsilon is infinite: raise "
    "the maximum."
)


@lru_cache(maxsize=4096)
def cut_probability(size: int, rate: float, most: int) -> float:
    """The probability that a Poisson lot has more than `most` examples, rounded up."""
    from scipy.special import bdtrc  # takes longer to load than everything else here

    if most < 1:
        raise InputError(f"the maximum lot is {most}: give at least 1")
    return min(1.0, OUTWARDS * float(bdtrc(most, size, rate))) if most < size else 0.0


def delta_left(delta: float, cut: float, epsilon: float) -> float:
    """The delta_0 that lots which are not cut must meet at this epsilon; it may be negative.

    Args:
        delta: That of the account.
        cut: p, the probability that one of the run's lots is cut.
        epsilon: That of the account.
    """
    return delta - cut * (1 + math.exp(min(epsilon, 700.0))) if cut else delta


def account_cut(answer_at: Callable[[float], Answer], delta: float, cut: float) -> Answer:
    """The account of lots with a maximum, from that of the same lots without.

    Args:
        answer_at: The account without a maximum at a given delta.
        delta: That of the account.
        cut: p, the probability that one of the run's lots is cut.
    """
    found = answer_at(delta)
    if not cut:
        return found
    claimed = found.upper
    for _ in range(100):
        left = delta_left(delta, cut, claimed)
        if left < LEAST_DELTA or math.isinf(claimed):
            break
        found = answer_at(left)
        if found.upper <= claimed:
            # Cutting lowers delta by no more than it raises it.
            most = min(delta + cut * (1 + math.exp(min(claimed, 700.0))), 1 - 1e-9)
            lower = min(answer_at(most).lower, claimed)
            ends = {"epsilon": claimed, "upper": claimed, "lower": lower}
            return dataclasses.replace(found, **ends, rdp=max(found.rdp, claimed))
        claimed = found.upper * (1 + 1e-9)
    ends = dict.fromkeys(("epsilon", "upper", "rdp"), math.inf)
    note = f"{TOO_OFTEN} {found.note}".strip()
    return dataclasses.replace(found, **ends, lower=0.0, certified=False, note=note)
