"""How stationary DP-Muon (000) becomes, and its rates.

Theorem 3.4
-----------
How stationary DP-Muon becomes, for one matrix block: 000, Theorem 3.4 with all its constants.

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

Rates
-----
000's Corollary B.6, and what its Lemma B.5 and Appendix C.6 leave open, with their constants.

*Lemma B.5: Gamma_T <= c1/(T sqrt(1 - beta)) + c2 sqrt(1 - beta), with c1 and c2 unnamed.* Gamma_T
is sqrt((1-beta)/(1+beta)) times the mean over t <= T of sqrt(coth(t k/2)), k = -log beta. What that
mean has above 1 falls in t, so its sum is at most the integral from 0,

    (2/k) int_0^inf (sqrt(coth y) - 1) dy = (4/k) int_1^inf u/((u+1)(u^2+1)) du = (pi/2 + log 2)/k,

by u^2 = coth y and partial fractions. As k >= 1 - beta, c1 = pi/2 + log 2 = 2.264 and c2 = 1 do;
with 1/sqrt(1 + beta) times both it is met as k -> 0 and k T -> infinity.

*Corollary B.6: E||G||_F^2 <= G2^2, so E(||G||_F - C)_+ <= G2^2/C.* It is G2^2/(4 C): x - C <=
x^2/(4 C) is (x - 2 C)^2 >= 0, met by gradients of length 2 C. With eta = eta_0 T^(-5/6), beta = 1 -
T^(-2/3), C = C_0 T^(1/6) Theorem 3.4 then reads value <= K_T T^(-1/6), where

    K_T = chi [D/eta_0 + L eta_0 T^(-2/3)/2 + (2 - eps) sqrt(r) G2^2/(4 C_0)
               + (2 - eps) sqrt(r) C_0 v (1 + c1 T^(-1/3))/sqrt(1 + beta) + (2 - eps) L eta_0],

v = sqrt(1/B + d sigma^2/B^2). No term of K_T rises with T, so K_T holds from T on.

*C.6: E||zeta||_F^2 <= K_Q^2/J, with K_Q unnamed,* of the mean of J antithetic probes Y(U) = (Q(M +
rho U) + Q(M - rho U))/2. As sum_j x_j^2 <= 1 for Q's input, and |p_T(x)| <= x max|p_T'|, K_Q is at
most the lesser of sqrt(q) max|p_T| and max|p_T'|. K_Q^2 forgets rho. Y is even in U, so its Hermite
expansion has degrees 2, 4, ... only, and E||Y - EY||^2 = sum_{k>=2} ||Y_k||^2 <= (1/2) sum_k k
||Y_k||^2 = E||DY||_HS^2 / 2: Poincare's inequality, with the 1/2 that antithetic pairs earn. DY =
(rho/2)(DQ(M + rho U) - DQ(M - rho U)) has norm at most rho sqrt(d) Lip(Q). So

    E||zeta||_F^2 <= min(K_Q^2, rho^2 d Lip(Q)^2 / 2) / J.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import at_least, in_doubles, positive, whole
from fedmuon.analysis.theory.stationarity import Schedule, Stationarity, slowdown_of
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.coefficients import Coefficients, schedule
from fedmuon.orthogonalize.slope import furthest

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


C1 = math.pi / 2 + math.log(2)
MOMENT = "E |G|_F^2 <= G_2^2 for every sample's gradient, at every step (000, Corollary B.6)."


def memory_ceiling(beta: float, steps: int) -> float:
    """Gamma_T(beta) <= sqrt((1-beta)/(1+beta)) (1 + c1/(T log(1/beta))) (000, Lemma B.5)."""
    if not 0 <= beta < 1:
        raise InputError(f"beta is {beta}: choose 0 <= beta < 1.")
    start = C1 / (whole("steps", steps) * -math.log(beta)) if beta else 0.0
    return math.sqrt((1 - beta) / (1 + beta)) * (1 + start)


@in_doubles
def moment_excess(moment: float, clip: float) -> float:
    """E(||G||_F - C)_+ <= G_2^2 / (4 C), a quarter of what 000 has."""
    return at_least("moment", moment) ** 2 / (4 * positive("clip", clip))


def second_moment(
    steps: int, scale: float = 1.0, clip_scale: float = 1.0
) -> tuple[Schedule, float]:
    """eta = eta_0 T^(-5/6), 1 - beta = T^(-2/3) and C = C_0 T^(1/6) (000 (10))."""
    horizon = whole("steps", steps, 2)
    lr = positive("scale", scale) * horizon ** (-5 / 6)
    plan = Schedule(lr, 1 - horizon ** (-2 / 3), horizon, "second-moment")
    return plan, positive("clip_scale", clip_scale) * horizon ** (1 / 6)


@in_doubles
def clip_scale(moment: float, release: Release) -> float:
    """The C_0 for which clipping and noise cost K_T alike for large T: G_2 / (2 sqrt(v/sqrt 2)).

    Of the release only v counts: the noise of a sum over C, the lot and the shape.
    """
    spread = release.spread / release.clip / math.sqrt(2)
    return positive("moment", moment) / (2 * math.sqrt(spread))


@in_doubles
def second_moment_rate(
    steps: int,
    release: Release,
    moment: float,
    gap: float,
    smoothness: float,
    scale: float = 1.0,
    polar_error: float = 0.0,
) -> float:
    """K_T: from T on, Theorem 3.4's bound with B.6's rule is at most K_T T'^(-1/6) at every T'.

    `release` has the clip C_0 T^(1/6) of T = `steps`.
    """
    plan, _ = second_moment(steps, scale)
    first, cost = release.clip / steps ** (1 / 6), 2 - polar_error
    root, spread = math.sqrt(min(release.shape)), release.spread / release.clip
    start = (1 + C1 * steps ** (-1 / 3)) / math.sqrt(1 + plan.beta)
    terms = (
        at_least("gap", gap) / scale,
        at_least("smoothness", smoothness) * scale * steps ** (-2 / 3) / 2,
        cost * root * moment_excess(moment, first),
        cost * root * first * spread * start,
        cost * smoothness * scale,
    )
    return slowdown_of(polar_error) * sum(terms)


def largest_output(coefficients: Coefficients, steps: int, side: int) -> float:
    """K_Q, a ceiling of ||Q(M)||_F for Newton-Schulz from within the unit ball; q = `side`."""
    size = furthest(schedule(coefficients, steps), 0.0, 1.0, 0.0)
    if size is None:
        raise Uncertified("This schedule cannot be bounded in doubles: use fewer steps.")
    return min(math.sqrt(whole("side", side)) * size, _steep(coefficients, steps))


def probe_error(
    coefficients: Coefficients, steps: int, shape: tuple[int, int], rho: float, pairs: int = 1
) -> float:
    """(E||zeta||_F^2)^(1/2) of J = `pairs` antithetic probes, for Q of 000 on an m x n block."""
    entries = whole("rows", shape[0]) * whole("columns", shape[1])
    rough = at_least("rho", rho) * math.sqrt(entries / 2) * _steep(coefficients, steps)
    size = largest_output(coefficients, steps, min(shape))
    return min(size, rough) / math.sqrt(whole("pairs", pairs))


def _steep(coefficients: Coefficients, steps: int) -> float:
    """Lip(Q) = max |p_T'|, as M / max(1, ||M||_F) is a projection."""
    given = {"steps": steps, "coefficients": coefficients, "normalization": "unit"}
    return lipschitz("newton-schulz", "sharp", **given)
