"""Step size and momentum from the horizon alone: the rules of 002, and those that tune 004.

The rules of 002 need neither the smoothness nor the noise level; those of 004 need both.
"""

import math
from dataclasses import dataclass

from fedmuon.analysis.theory.checks import at_least, positive, whole
from fedmuon.core.errors import InputError
from fedmuon.optim.schedules import heavy_tailed as powers


@dataclass(frozen=True)
class Schedule:
    """Constant eta and beta for a horizon of `steps`, and the rule that they follow."""

    lr: float
    beta: float
    steps: int
    rule: str

    def checked(self) -> tuple[float, float, int]:
        """eta > 0, beta in [0, 1) and the steps."""
        if not 0 <= self.beta < 1:
            raise InputError(f"beta is {self.beta}: choose 0 <= beta < 1.")
        return positive("lr", self.lr), self.beta, whole("steps", self.steps)


def heavy_tailed(steps: int, alpha: float) -> Schedule:
    """eta = K^(-(2a-1)/(3a-2)), 1 - beta = K^(-a/(3a-2)) (002, Theorems 3.4 and 3.5)."""
    horizon = whole("steps", steps, 2)
    return Schedule(*powers(horizon, tail_index(alpha)), horizon, "heavy-tailed")


def alpha_free(steps: int) -> Schedule:
    """eta = K^(-3/4), 1 - beta = K^(-1/2) (002, Corollary 3.6): the rule above at alpha = 2."""
    horizon = whole("steps", steps, 2)
    return Schedule(*powers(horizon), horizon, "alpha-free")


def tuned_muon(
    steps: int, gap: float, smoothness: float, sigma: float, rank: int, batch: int = 1
) -> Schedule:
    """eta = sqrt((1-beta) D / (L T)), 1 - beta = min(1, sqrt(B L D / (r T)) / sigma), as in 004.

    It balances the terms of `rank_dependence.muon` up to factors that do not depend on T, r, sigma.
    """
    forget = _forget(steps, gap, smoothness, sigma * math.sqrt(whole("rank", rank)), batch)
    lr = math.sqrt(forget * gap / (smoothness * steps))
    return Schedule(lr, 1 - forget, steps, "tuned for Muon")


def tuned_sgd(steps: int, gap: float, smoothness: float, sigma: float, batch: int = 1) -> Schedule:
    """eta = (1-beta) / (2 L), 1 - beta = min(1, 2 sqrt(B L D / T) / sigma), as in 004."""
    forget = _forget(steps, gap, smoothness, sigma / 2, batch)
    return Schedule(forget / (2 * smoothness), 1 - forget, steps, "tuned for SGD with momentum")


def rate(alpha: float, rule: str = "heavy-tailed") -> float:
    """The power of 1/K of the slowest term: (a-1)/(3a-2) (002, Theorem 3.5), or of Corollary 3.6.

    Without alpha the noise falls as K^(-(a-1)/(2a)), all else as K^(-1/4) or faster.
    """
    a = tail_index(alpha)
    if rule == "alpha-free":
        return min(0.25, (a - 1) / (2 * a))
    if rule != "heavy-tailed":
        raise InputError(f"No rule is called {rule!r}: use heavy-tailed or alpha-free.")
    return (a - 1) / (3 * a - 2)


def tail_index(alpha: float) -> float:
    """The order of the moment that the noise has (002, Assumption 3.2)."""
    if not 1 < alpha <= 2:
        raise InputError(f"alpha is {alpha}: the tail index of the noise lies in (1, 2].")
    return float(alpha)


def _forget(steps: int, gap: float, smoothness: float, noise: float, batch: int) -> float:
    """min(1, sqrt(B L D / T) / noise)."""
    if not (at_least("gap", gap) > 0 and at_least("smoothness", smoothness) > 0):
        raise InputError("A tuned schedule needs gap > 0 and smoothness > 0: give both, or eta.")
    size = math.sqrt(whole("batch", batch) * smoothness * gap / whole("steps", steps))
    return min(1.0, size / noise) if at_least("sigma", noise) > 0 else 1.0
