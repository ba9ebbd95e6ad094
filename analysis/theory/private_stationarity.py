"""How stationary DP-Muon becomes, for one matrix block: 000, Theorem 3.4 with all its constants.

Norms: f is L-smooth from ||.||_op to ||.||_*, D = f(W_0) - f*, r = min(m, n), d = m n. A step
releases G~ = (1/B) sum_lot clip(G, C) + Z, Z ~ N(0, (sigma C / B)^2), then M <- beta M + G~ from 0,
W <- W - eta O. With b = E clip(G, C) - grad and xi = G~ - E G~ given the past, and the weights
w_tj = beta^(t-j) / s_t, s_t = sum_{k<t} beta^k, of the normalized momentum M / s_t:

- E ||b||_* <= sqrt(r) E (||G||_F - C)_+, since clipping takes just that from a gradient's length.
- E ||xi||_F^2 <= v^2 = C^2/B + d (sigma C / B)^2. 000 shows it for B independent samples. It holds
  for Poisson lots of B expected samples of n, too, where f is the mean over these n: an
  independent coin of chance B/n each makes (B/n)(1 - B/n) sum_i ||clip(G_i, C)||_F^2 / B^2.
- the xi are martingale differences, so the momentum's noise is at most v (sum_j w_tj^2)^(1/2), and
  sum_j w_tj^2 = (1 - beta)/(1 + beta) (1 + beta^t)/(1 - beta^t). Gamma_T is its root's mean over t.
  000 bounds Gamma_T with two constants that it leaves open; here it is summed.
- the steps between are short, ||O||_op <= 1: the drift is L eta sum_j w_tj (t - j), which is
  summed too; 000 has its limit L eta beta / (1 - beta).

<grad, O> >= (1 - eps)||grad||_* - (2 - eps)||M/s - grad||_*, and the sum over t gives the bound.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import at_least, in_doubles, positive, whole
from fedmuon.analysis.theory.schedules import Schedule
from fedmuon.analysis.theory.stationarity import Stationarity, slowdown_of
from fedmuon.core.errors import InputError

SMOOTH = "||grad f(X) - grad f(Y)||_* <= L ||X - Y||_op, f is bounded below (000, Assumption 3.1)."
LOTS = (
    "Lots are B independent unbiased samples (000, Assumption 3.2), or Poisson lots of B expected "
    "samples where f is the mean over all; noise is independent of them."
)
QUALITY = "At every step O is within eps of the polar factor and ||O||_op <= 1, on every path."
ALONE = "One matrix block moves; the others, if any, stand still (000, Appendix B.1)."
GIVEN = "The caller gave the excess E(|G|_F - C)_+: nothing here proves it."
TAILED = "E exp(|G|_F^2 / K^2) <= e for every sample's gradient (000, Corollary 3.5)."
MEASURE = "(1/T) sum_t E ||grad f(W_t)||_*"
SINGLE = 100_000  # steps that are summed one by one


@dataclass(frozen=True)
class Release:
    """What a step releases: clipped to C, multiplier sigma, expected lot B, of an m x n block.

    `excess` is a ceiling of E(||G||_F - C)_+ over all steps.
    """

    clip: float
    noise: float
    lot: float
    shape: tuple[int, int]
    excess: float = 0.0

    def __post_init__(self) -> None:
        at_least("noise", self.noise)
        positive("clip", self.clip)
        positive("lot", self.lot)
        at_least("excess", self.excess)  # after the clip, from which it may be computed
        whole("rows", self.shape[0])
        whole("columns", self.shape[1])

    @property
    def spread(self) -> float:
        """v, a ceiling of the root mean square of xi (000 (5))."""
        entries = self.shape[0] * self.shape[1]
        return self.clip * math.sqrt(1 / self.lot + entries * (self.noise / self.lot) ** 2)


@in_doubles
def dp_muon(
    schedule: Schedule, release: Release, gap: float, smoothness: float, polar_error: float = 0.0
) -> Stationarity:
    """000, Theorem 3.4: chi [D/(eta T) + L eta/2 + (2 - eps)(clipping + noise + drift)]."""
    eta, beta, steps = schedule.checked()
    chi, cost, root = slowdown_of(polar_error), 2 - polar_error, math.sqrt(min(release.shape))
    memory, age = averages(beta, steps)
    terms = {
        "descent": chi * at_least("gap", gap) / (eta * steps),
        "step": chi * at_least("smoothness", smoothness) * eta / 2,
        "clipping": chi * cost * root * release.excess,
        "noise": chi * cost * root * release.spread * memory,
        "drift": chi * cost * smoothness * eta * age,
    }
    stood_on = (SMOOTH, LOTS, QUALITY, ALONE)
    return Stationarity(MEASURE, sum(terms.values()), terms, schedule, 1 / chi, stood_on)


def averages(beta: float, steps: int) -> tuple[float, float]:
    """Gamma_T(beta) (000 (6)) and the mean over t of sum_j w_tj (t - j) = beta/(1 - beta) - t
    beta^t/(1 - beta^t).

    The first falls in t and the second rises: steps beyond those summed one by one go in blocks,
    whose largest value stands for all, so that both are ceilings.
    """
    if not 0 <= beta < 1:
        raise InputError(f"beta is {beta}: choose 0 <= beta < 1.")
    first, last = _blocks(whole("steps", steps))
    counts, log = last - first + 1, math.log(beta) if beta else -math.inf
    power = np.exp(first * log)
    roots = np.sqrt((1 - beta) / (1 + beta) * (1 + power) / -np.expm1(first * log))
    ages = beta / (1 - beta) - last * np.exp(last * log) / -np.expm1(last * log)
    return float(counts @ roots / steps), float(counts @ np.maximum(ages, 0) / steps)


def _blocks(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last step of each block: single steps, then blocks of a thousandth of their t."""
    first = np.arange(1, min(steps, SINGLE) + 1, dtype=float)
    if steps > SINGLE:
        count = math.ceil(1000 * math.log(steps / SINGLE))
        first = np.append(first, np.floor(np.geomspace(SINGLE + 1, steps, count + 1)))
    first = np.unique(first)
    return first, np.append(first[1:] - 1, steps)


def light_tailed(steps: int, tail: float, scale: float = 1.0) -> tuple[Schedule, float]:
    """eta = eta_0 T^(-3/4), 1 - beta = T^(-1/2) and C = K sqrt(2 log T) (000, Corollary 3.5)."""
    horizon = whole("steps", steps, 2)
    plan = Schedule(
        positive("scale", scale) * horizon**-0.75, 1 - horizon**-0.5, horizon, "light-tailed"
    )
    return plan, positive("tail", tail) * math.sqrt(2 * math.log(horizon))


def tail_excess(tail: float, clip: float) -> float:
    """E(||G||_F - C)_+ <= integral from C of e exp(-u^2/K^2) = e K sqrt(pi)/2 erfc(C/K).

    000 goes on to e K^2/(2 C) exp(-C^2/K^2), which is larger.
    """
    tail, clip = positive("tail", tail), at_least("clip", clip)
    return math.e * tail * math.sqrt(math.pi) / 2 * math.erfc(clip / tail)
