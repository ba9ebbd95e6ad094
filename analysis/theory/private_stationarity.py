"""Bounds on the gradient norms that private methods reach: DP-Muon, and DiSK on SGD.

Theorem 3.4
-----------
`dp_muon` is Theorem 3.4 of the DP-Muon paper for one matrix block, with all its constants.

Notation: f is L-smooth from ||.||_op to ||.||_*, D = f(W_0) - f*, r = min(m, n) and d = m n. A step
computes the private gradient G~ = (1/B) sum_lot clip(G, C) + Z with Z ~ N(0, (sigma C / B)^2). The
momentum M starts at 0. A step sets M <- beta M + G~ and W <- W - eta O with the orthogonalized
momentum O. Let b = E clip(G, C) - grad, and let xi = G~ - E G~ given the past. The normalized
momentum M / s_t has the weights w_tj = beta^(t-j) / s_t, with s_t = sum_{k<t} beta^k.

- E ||b||_* <= sqrt(r) E (||G||_F - C)_+, because clipping shortens a gradient by exactly the amount
  by which its length exceeds C.
- E ||xi||_F^2 <= v^2 = C^2/B + d (sigma C / B)^2. The DP-Muon paper proves this bound for B
  independent samples. The bound also holds for Poisson lots of B expected samples out of n, if f is
  the mean over these n samples. Each sample is then drawn independently with probability B/n, and
  the variance is (B/n)(1 - B/n) sum_i ||clip(G_i, C)||_F^2 / B^2.
- The xi are martingale differences. So the noise of the momentum is at most v (sum_j w_tj^2)^(1/2),
  with sum_j w_tj^2 = (1 - beta)/(1 + beta) (1 + beta^t)/(1 - beta^t). Gamma_T is the mean over t of
  (sum_j w_tj^2)^(1/2). The paper bounds Gamma_T with two constants that it does not specify. This
  module computes Gamma_T itself.
- Every step satisfies ||O||_op <= 1. So the drift is at most L eta sum_j w_tj (t - j), and this
  module computes its mean over t. The paper uses the limit L eta beta / (1 - beta) instead.

<grad, O> >= (1 - eps)||grad||_* - (2 - eps)||M/s - grad||_*, and the sum over t gives the bound.

Rates
-----
This section states Corollary B.6 of the DP-Muon paper with all constants. The section also derives
the constants that Lemma B.5 and Appendix C.6 do not specify.

*Lemma B.5: Gamma_T <= c1/(T sqrt(1 - beta)) + c2 sqrt(1 - beta), with c1 and c2 unspecified.* Let
k = -log beta. Gamma_T is sqrt((1-beta)/(1+beta)) times the mean over t <= T of sqrt(coth(t k/2)).
The excess of sqrt(coth(t k/2)) over 1 falls in t, so the sum of this excess is at most its integral
from 0,

    (2/k) int_0^inf (sqrt(coth y) - 1) dy = (4/k) int_1^inf u/((u+1)(u^2+1)) du = (pi/2 + log 2)/k,

by u^2 = coth y and partial fractions. Because k >= 1 - beta, the lemma holds for
c1 = pi/2 + log 2 = 2.264 and c2 = 1. If both constants are multiplied by 1/sqrt(1 + beta), the
bound is attained in the limit k -> 0 and k T -> infinity.

*Corollary B.6: E||G||_F^2 <= G2^2, so E(||G||_F - C)_+ <= G2^2/C.* The sharper bound G2^2/(4 C)
also holds: x - C <= x^2/(4 C) is equivalent to (x - 2 C)^2 >= 0, with equality for gradients of
length 2 C. With eta = eta_0 T^(-5/6), beta = 1 - T^(-2/3) and C = C_0 T^(1/6), Theorem 3.4 then
states that the value is at most K_T T^(-1/6), where

    K_T = chi [D/eta_0 + L eta_0 T^(-2/3)/2 + (2 - eps) sqrt(r) G2^2/(4 C_0)
               + (2 - eps) sqrt(r) C_0 v (1 + c1 T^(-1/3))/sqrt(1 + beta) + (2 - eps) L eta_0],

v = sqrt(1/B + d sigma^2/B^2). No term of K_T rises with T, so K_T is valid for every horizon >= T.

*C.6: E||zeta||_F^2 <= K_Q^2/J, with K_Q unspecified.* zeta is the error of the mean of J antithetic
probes Y(U) = (Q(M + rho U) + Q(M - rho U))/2. The input of Q satisfies sum_j x_j^2 <= 1, and
|p_T(x)| <= x max|p_T'|. So K_Q is at most the smaller of sqrt(q) max|p_T| and max|p_T'|.

The bound K_Q^2 does not depend on rho. A second bound depends on rho: Y is even in U, so its
Hermite expansion contains only the degrees 2, 4, ... Hence E||Y - EY||^2 = sum_{k>=2} ||Y_k||^2 <=
(1/2) sum_k k ||Y_k||^2 = E||DY||_HS^2 / 2. This is Poincare's inequality, and antithetic pairs add
the factor 1/2. DY = (rho/2)(DQ(M + rho U) - DQ(M - rho U)) has norm at most rho sqrt(d) Lip(Q). So

    E||zeta||_F^2 <= min(K_Q^2, rho^2 d Lip(Q)^2 / 2) / J.

DiSK
----
`disk` states Theorems 3 and 6 of the DiSK paper with every constant. `corollary_4` does the same
for Corollary 4.

The algorithm is Algorithm 2 of the paper (DiSK on SGD) without clipping. Here k = kappa is the
gain, gamma the reach, and d_t = x_{t+1} - x_t:

    g~_t = (1-k) g~_{t-1} + k grad f_B(x_t) + (1-k) Q_t + k w_t,     x_{t+1} = x_t - eta g~_t,
    Q_t = (grad f_B(x_t + gamma d_{t-1}) - grad f_B(x_t)) / gamma.

Every f(.; z) is L-smooth, and D = F(x_0) - F*. Each step uses B independent samples of variance
s^2, and w_t is noise with E||w||^2 = W. The bounds of the paper contain "some non-negative
constants". This module computes these constants.

*The error.* Let e_t = grad F(x_t) - g~_t. The error e_t is m_t plus noise whose mean given the past
is 0, where

    m_t = (1-k)(e_{t-1} + R_t),     R_t = grad F(x_t) - grad F(x_{t-1}) - E Q_t.

R_t = 0 for gamma = -1, because Q_t is then the gradient difference itself. R_t = 0 also if
gradients are linear. Otherwise ||R_t|| <= r L ||d||, with r = 2 for gamma > 0. For gamma < 0, the
segments of both gradient differences overlap, so r is 2 (1 - |gamma|) or 2 (1 - 1/|gamma|),
whichever is positive. Let b_t = E||m_t||^2, let N_t be the second moment of the noise, and let
v_t = E||g~_t||^2 = E||grad F - m_t||^2 + N_t. Then, for any s', a > 0,

    b_t <= q (b_{t-1} + N_{t-1}) + P v_{t-1},  q = (1-k)^2 (1+s'), P = (1-k)^2 (1+1/s') (r L eta)^2,
    N_t <= k^2 V + P' v_{t-1},  V = (1+a) s^2/B + W, P' = (1-k)^2 (1+1/a) (L eta)^2 / B.

*Descent.* E_t g~_t = grad F - m_t. By smoothness and 2 <grad F, m> <= y ||grad F||^2 + ||m||^2 / y,

    E F(x_{t+1}) - F(x_t) <= -eta h ||grad F||^2 + eta c ||m_t||^2 + (L eta^2/2) N_t
                             - eta u ||grad F - m_t||^2

with h = 1 - L eta/2 - (1 - L eta) y/2, c = (1 - L eta)/(2 y) + L eta/2 and u = 0. At y = 1 the
choice h = c = 1/2 and u = (1 - L eta)/2 is also valid. Every weighted mean of the two choices is
valid, too, and z is the weight of the second choice. Over T steps,

    mean E||grad F||^2 <= [D/(eta T) + c b_0/((1-q) T) + K (N_0/T + k^2 V)/(1-P')] / h,

K = c (q + P)/(1-q) + L eta/2, if c P/(1-q) + K P'/(1-P') <= u. Every choice of y, z, s' and a is
valid, so the smallest bound over a grid of choices is valid, too.

*Starts.* Algorithm 2 starts with g~_{-1} = g_0, so m_0 = 0 and N_0 = s^2/B + W. The proof in the
paper starts with g~_{-1} = 0, so m_0 = (1-k) grad F(x_0) and N_0 = k^2 (s^2/B + W). This module
supports both starts.

*Errors in the paper.* Theorem 3 states two different conditions on eta. The mean in Theorem 3
divides a sum of T + 1 terms by T. The proof requires C_1 > 0 and beta >= 0, as `printed_theorem_3`
does for gamma = -1. Theorem 6 requires kappa > 8 (eta L)^2, but this does not ensure beta >= 0: for
eta L = 0.1 and kappa = 0.09 the denominator of beta is negative. A condition near kappa > 3 eta L
would ensure beta >= 0. The brackets of C_2 in Theorem 6 do not match.

*Corollary 4.* C_k = kappa/(L eta) = ||grad F(x_0)||^2/(2 L D). Smoothness keeps C_k below 1, so the
published minimum with 1 has no effect. Let R = 0, use full batches, start from zero, and set
y = z = 1 and L eta <= 1/2. As (1-k)^2/(2-k) + k/2 <= 1/2,

    mean E||grad F||^2 <= 3 D/(eta T) + (1 + 1/T) C_k L eta W/2 = sqrt(6 (1 + 1/T) C_k L D W / T)

at eta = sqrt(6 D/(C_k L (1 + 1/T) W T)). This bound is below the published 4 sqrt(C_k L D W/T) if T
is so large that L eta <= 1/2.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmuon.analysis.theory.checks import at_least, in_doubles, positive, probability, whole
from fedmuon.analysis.theory.stationarity import Schedule, Stationarity, slowdown_of
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.coefficients import Coefficients, schedule
from fedmuon.orthogonalize.lipschitz_constants import max_deviation

SMOOTH = (
    "||grad f(X) - grad f(Y)||_* <= L ||X - Y||_op, and f is bounded below (DP-Muon, Assumption "
    "3.1)."
)
LOTS = (
    "A lot is either B independent unbiased samples (DP-Muon, Assumption 3.2), or a Poisson lot "
    "with B expected samples. With Poisson lots, f is the mean over all samples. The noise is "
    "independent of the lots."
)
QUALITY = "At every step of every path, O is within eps of the polar factor, and ||O||_op <= 1."
ALONE = "Only one matrix block is trained; other blocks stay constant (DP-Muon, Appendix B.1)."
GIVEN = "The excess E(|G|_F - C)_+ was passed by the caller and is not proved."
TAILED = "E exp(|G|_F^2 / K^2) <= e for the gradient G of every sample (DP-Muon, Corollary 3.5)."
MEASURE = "(1/T) sum_t E ||grad f(W_t)||_*"
SINGLE = 100_000  # number of steps that `averages` sums one by one


@dataclass(frozen=True)
class Release:
    """The noisy gradient that one step of DP-Muon publishes (releases).

    Attributes:
        clip: Clipping threshold C.
        noise: Noise multiplier sigma.
        lot: Expected lot size B.
        shape: Rows and columns of the block.
        excess: Upper bound of E(||G||_F - C)_+ over all steps.
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
        at_least("excess", self.excess)  # checked after `clip`, which may determine it
        whole("rows", self.shape[0])
        whole("columns", self.shape[1])

    @property
    def spread(self) -> float:
        """An upper bound v on the root mean square of the noise xi (DP-Muon paper, eq. (5))."""
        entries = self.shape[0] * self.shape[1]
        return self.clip * math.sqrt(1 / self.lot + entries * (self.noise / self.lot) ** 2)


@in_doubles
def dp_muon(
    schedule: Schedule, release: Release, gap: float, smoothness: float, polar_error: float = 0.0
) -> Stationarity:
    """Return the bound of the DP-Muon paper, Theorem 3.4.

    The bound is chi [D/(eta T) + L eta/2 + (2 - eps)(clipping + noise + drift)], where chi = 1/(1 -
    eps) and eps is the polar error. The result contains each term.
    """
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
    """Return upper bounds of two means over the steps t: Gamma_T(beta), and the mean gradient age.

    Gamma_T is eq. (6) of the DP-Muon paper. The gradient age at step t is the weighted mean age of
    the gradients in the momentum, sum_j w_tj (t - j) = beta/(1 - beta) - t beta^t/(1 - beta^t). The
    summands of Gamma_T fall in t and the ages rise in t. The first `SINGLE` steps are summed one by
    one. Later steps form blocks, and each block counts with its largest value, so that both results
    are upper bounds.
    """
    if not 0 <= beta < 1:
        raise InputError(f"beta is {beta}, but it must be at least 0 and below 1.")
    first = np.arange(1, min(whole("steps", steps), SINGLE) + 1, dtype=float)
    if steps > SINGLE:  # a block that starts at t contains about t / 1000 steps
        count = math.ceil(1000 * math.log(steps / SINGLE))
        first = np.append(first, np.floor(np.geomspace(SINGLE + 1, steps, count + 1)))
    first = np.unique(first)
    last = np.append(first[1:] - 1, steps)
    counts, log = last - first + 1, math.log(beta) if beta else -math.inf
    power = np.exp(first * log)
    roots = np.sqrt((1 - beta) / (1 + beta) * (1 + power) / -np.expm1(first * log))
    ages = beta / (1 - beta) - last * np.exp(last * log) / -np.expm1(last * log)
    return float(counts @ roots / steps), float(counts @ np.maximum(ages, 0) / steps)


def light_tailed(steps: int, tail: float, scale: float = 1.0) -> tuple[Schedule, float]:
    """Return the schedule and the clipping threshold of the DP-Muon paper, Corollary 3.5.

    The step size is eta = eta_0 T^(-3/4), the momentum satisfies 1 - beta = T^(-1/2), and the
    threshold is C = K sqrt(2 log T). Here T is `steps`, K is `tail` and eta_0 is `scale`.
    """
    horizon = whole("steps", steps, 2)
    plan = Schedule(
        positive("scale", scale) * horizon**-0.75, 1 - horizon**-0.5, horizon, "light-tailed"
    )
    return plan, positive("tail", tail) * math.sqrt(2 * math.log(horizon))


def tail_excess(tail: float, clip: float) -> float:
    """Return an upper bound of E(||G||_F - C)_+ for light-tailed gradients.

    K is `tail`, and the clipping threshold C is `clip`. The bound is the integral of e
    exp(-u^2/K^2) from C to infinity, which equals e K sqrt(pi)/2 erfc(C/K). The DP-Muon paper uses
    the larger bound e K^2/(2 C) exp(-C^2/K^2).
    """
    tail, clip = positive("tail", tail), at_least("clip", clip)
    return math.e * tail * math.sqrt(math.pi) / 2 * math.erfc(clip / tail)


C1 = math.pi / 2 + math.log(2)
MOMENT = (
    "E |G|_F^2 <= G_2^2 for the gradient G of every sample at every step (DP-Muon, Corollary B.6)."
)


@in_doubles
def moment_excess(moment: float, clip: float) -> float:
    """Return G_2^2 / (4 C), an upper bound on E(||G||_F - C)_+.

    The bound in the DP-Muon paper is four times as large.
    """
    return at_least("moment", moment) ** 2 / (4 * positive("clip", clip))


def second_moment(
    steps: int, scale: float = 1.0, clip_scale: float = 1.0
) -> tuple[Schedule, float]:
    """Return the schedule and the clipping threshold of the DP-Muon paper, eq. (10).

    The step size is eta = eta_0 T^(-5/6), the momentum satisfies 1 - beta = T^(-2/3), and the
    threshold is C = C_0 T^(1/6).
    """
    horizon = whole("steps", steps, 2)
    lr = positive("scale", scale) * horizon ** (-5 / 6)
    plan = Schedule(lr, 1 - horizon ** (-2 / 3), horizon, "second-moment")
    return plan, positive("clip_scale", clip_scale) * horizon ** (1 / 6)


@in_doubles
def clip_scale(moment: float, release: Release) -> float:
    """Return the C_0 that minimizes the sum of the clipping and noise terms of K_T for large T.

    The result is C_0 = G_2 / (2 sqrt(v/sqrt 2)), which makes the two terms equal. Here v =
    `release.spread / C` depends on the noise multiplier, the lot size and the shape, and not on the
    clipping threshold.
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
    """Return K_T, the constant of the rate in Corollary B.6.

    With the schedule of Corollary B.6, the bound of Theorem 3.4 is at most K_T T'^(-1/6) for every
    T' >= T. T is `steps`, and the clipping threshold of `release` must be C_0 T^(1/6).
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
    """Return K_Q, an upper bound of ||Q(M)||_F for Newton-Schulz.

    The input of Newton-Schulz lies in the unit ball of the Frobenius norm. `side` is q, the smaller
    side of the matrix.
    """
    size = max_deviation(schedule(coefficients, steps), 0.0, 1.0, 0.0)
    if size is None:
        raise Uncertified(
            "The bound for these Newton-Schulz coefficients exceeds double precision. Use fewer "
            "steps."
        )
    return min(math.sqrt(whole("side", side)) * size, _steep(coefficients, steps))


def probe_error(
    coefficients: Coefficients, steps: int, shape: tuple[int, int], rho: float, pairs: int = 1
) -> float:
    """Return an upper bound of (E||zeta||_F^2)^(1/2), the error of J = `pairs` antithetic probes.

    Q is the Newton-Schulz map of the DP-Muon paper on a block of shape (m, n).
    """
    entries = whole("rows", shape[0]) * whole("columns", shape[1])
    rough = at_least("rho", rho) * math.sqrt(entries / 2) * _steep(coefficients, steps)
    size = largest_output(coefficients, steps, min(shape))
    return min(size, rough) / math.sqrt(whole("pairs", pairs))


def _steep(coefficients: Coefficients, steps: int) -> float:
    """Return the Lipschitz constant of Q, max |p_T'|.

    The normalization by max(1, ||M||_F) is a projection, so its Lipschitz constant is 1.
    """
    options = {"steps": steps, "coefficients": coefficients, "normalization": "unit"}
    return lipschitz("newton-schulz", "sharp", **options)


Start = Literal["first", "zero"]
MEAN_SQUARE = "(1/T) sum_t E |grad F(x_t)|^2"
SAMPLES_SMOOTH = "Every f(.; z) is L-smooth, and F is bounded below (DiSK, A1)."
SAMPLES = (
    "Each step uses B independent samples (B = inf: all samples), with gradient variance at most "
    "s^2 (DiSK, A2)."
)
UNCLIPPED = "No gradient is clipped. The noise w is independent of the samples, and E|w|^2 = W."
EXACT = (
    "The filter predicts differences of gradients exactly, because gamma = -1 or gradients are "
    "linear."
)
_POWERS = 2.0 ** np.arange(-12, 5)  # grid for s' and a; values <= 1 are the grid for y and z


@dataclass(frozen=True)
class Disk:
    """A run of DiSK on SGD.

    Attributes:
        lr: Step size.
        steps: Number of steps T.
        gain: Gain kappa of the filter.
        reach: The number gamma. DiSK computes a second gradient at x_t + gamma (x_t - x_{t-1}).
        sigma: Standard deviation s of a sample's gradient.
        batch: Number of samples B in a step.
        noise: The second moment W of the noise that a step adds.
        linear: Whether the gradient is a linear function of x.
    """

    lr: float
    steps: int
    gain: float
    reach: float = -1.0
    sigma: float = 0.0
    batch: float = math.inf
    noise: float = 0.0
    linear: bool = False

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        whole("steps", self.steps)
        if not 0 < self.gain <= 1:
            raise InputError(
                f"gain is {self.gain}, but the gain of DiSK must be above 0 and at most 1."
            )
        if self.reach == 0:
            raise InputError(
                "reach is 0, but DiSK needs a reach that is not 0. Use, for example, -1."
            )
        at_least("sigma", self.sigma)
        at_least("batch", min(self.batch, 1e300), 1)
        at_least("noise", self.noise)

    @property
    def sampling(self) -> float:
        """Sampling variance s^2 / B of a step."""
        return self.sigma**2 / self.batch

    @property
    def missed(self) -> float:
        """The maximum prediction error r of the filter, in units of L ||d||."""
        size = abs(self.reach)
        if self.linear or self.reach == -1:
            return 0.0
        return 2.0 if self.reach > 0 else 2 * (1 - min(size, 1 / size))


@in_doubles
def disk(
    one: Disk, gap: float, smoothness: float, slope: float | None = None, start: Start = "first"
) -> Stationarity:
    """Return the bound on the mean squared gradient norm of DiSK on SGD.

    `slope` is ||grad F(x_0)||, which is at most sqrt(2 L D). `slope` has an effect only
    with `start="zero"`.
    """
    checked = at_least("smoothness", smoothness), at_least("gap", gap)
    top = math.sqrt(2 * checked[0] * checked[1])
    first = top if slope is None else at_least("slope", slope)
    if (rate := checked[0] * one.lr) > 1:
        raise InputError(
            f"lr is {one.lr:g}, but the bound requires lr <= 1/L = {1 / checked[0]:g}."
        )
    terms = _least(one, rate, checked[1], first if start == "zero" else None)
    if terms is None:
        raise InputError(
            f"With gain {one.gain:g}, the filter is too slow for lr = {one.lr:g}. Choose a "
            "larger gain or a smaller lr."
        )
    stood_on = (SAMPLES_SMOOTH, SAMPLES, UNCLIPPED) + ((EXACT,) if not one.missed else ())
    plan = Schedule(one.lr, 1 - one.gain, one.steps, "given")
    return Stationarity(MEAN_SQUARE, sum(terms.values()), terms, plan, 1.0, stood_on)


def _least(run: Disk, rate: float, gap: float, slope: float | None) -> dict[str, float] | None:
    """Compute the bound for all y, z, s' and a on a grid, and return the smallest bound's terms.

    The result is None if no point of the grid is valid.
    """
    k, share = run.gain, _POWERS[_POWERS <= 1]
    s, a = (_POWERS if run.missed else np.zeros(1)), (_POWERS if run.sampling else np.zeros(1))
    ways = (np.append(share, 1 - k) if k < 1 else share, np.append(0.0, share), s, a)
    y, z, s, a = np.meshgrid(*ways, indexing="ij")
    with np.errstate(divide="ignore"):
        q = (1 - k) ** 2 * (1 + s)
        missed = (1 - k) ** 2 * (1 + 1 / s) * (run.missed * rate) ** 2 if run.missed else 0 * q
        drawn = (1 - k) ** 2 * (1 + 1 / a) * rate**2 / run.batch if run.sampling else 0 * q
    fresh = (1 + a) * run.sampling + run.noise  # V
    h = (1 - z) * (1 - rate / 2 - (1 - rate) * y / 2) + z / 2
    c = (1 - z) * ((1 - rate) / (2 * y) + rate / 2) + z / 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        cost = c * (q + missed) / (1 - q) + rate / 2
        spent = c * missed / (1 - q) + cost * drawn / (1 - drawn)
        valid = (q < 1) & (drawn < 1) & (spent <= z * (1 - rate) / 2) & (h > 0)
        scale = cost / ((1 - drawn) * h)
    whole_start = run.sampling + run.noise
    first = whole_start if slope is None else k**2 * whole_start
    begun = 0.0 if slope is None else (1 - k) ** 2 * slope**2
    parts = {
        "descent": gap / (run.lr * run.steps) / h,
        "start": (c * begun / ((1 - q) * h) + scale * first) / run.steps,
        "noise": scale * k**2 * fresh,
    }
    total = np.where(valid, sum(parts.values()), np.inf)
    at = np.unravel_index(int(np.argmin(total)), total.shape)
    if not np.isfinite(total[at]):
        return None
    return {name: float(np.broadcast_to(part, total.shape)[at]) for name, part in parts.items()}


@in_doubles
def printed_theorem_3(one: Disk, gap: float, smoothness: float, slope: float) -> float:
    """Return the published bound of DiSK, eq. (6), for gamma = -1 and a filter that starts at zero.

    The bound is 2 (D + beta ||grad F(x_0)||^2)/(C_1 eta T) + 2 (beta + eta^2 L) k^2/(C_1 eta) (2
    s^2/B + W), as in eq. (30) of the paper. Here beta is the smallest value that the proof in the
    paper allows. The result is infinite if C_1 <= 0.
    """
    eta, k, rate = one.lr, one.gain, at_least("smoothness", smoothness) * one.lr
    gap, slope = at_least("gap", gap), at_least("slope", slope)
    contraction = (1 - k) ** 2 * (1 + 4 * rate**2)
    if contraction >= 1:
        return math.inf
    beta = (eta * (1 - k) / 2 + eta * rate * contraction) / (1 - contraction)
    weight = beta + eta * rate
    divisor = (1 + k - 2 * rate) - 8 * weight * (1 - k) ** 2 * smoothness * rate
    if divisor <= 0:
        return math.inf
    noise = 2 * weight * k**2 / eta * (2 * one.sampling + one.noise)
    return (2 * (gap + beta * slope**2) / (eta * one.steps) + noise) / divisor


@dataclass(frozen=True)
class Tuned:
    """The run and the bounds of Corollary 4 of the DiSK paper.

    Attributes:
        run: The run with the step size and the gain of the corollary.
        reduction: The factor C_k of the bound.
        value: The bound for this run that this module proves.
        printed: The published bound.
    """

    run: Disk
    reduction: float
    value: float
    printed: float


@in_doubles
def corollary_4(steps: int, gap: float, smoothness: float, slope: float, noise: float) -> Tuned:
    """Return the run and the bounds of Corollary 4 of the DiSK paper.

    The bound is sqrt(6 (1 + 1/T) C_k L D W/T), with W = `noise`. The bound holds for full batches,
    gamma = -1 and a filter that starts at zero.
    """
    horizon, spread = whole("steps", steps), positive("noise", noise)
    room = 2 * positive("smoothness", smoothness) * positive("gap", gap)
    reduction = positive("slope", slope) ** 2 / room
    if reduction > 1 + 1e-12:
        raise InputError(
            f"slope is {slope:g}, but it must be at most sqrt(2 * smoothness * gap) = "
            f"{math.sqrt(room):g}. Use a smaller slope, or a larger smoothness or gap."
        )
    start = (1 + 1 / horizon) * spread
    eta = math.sqrt(6 * gap / (reduction * smoothness * start * horizon))
    if smoothness * eta > 0.5:
        minimum = math.ceil(24 * smoothness * gap / (reduction * spread))
        raise InputError(
            f"steps is {steps}, but Corollary 4 of DiSK requires about {minimum} or more steps for "
            "these values."
        )
    size = math.sqrt(reduction * smoothness * gap / horizon)
    run = Disk(eta, horizon, reduction * smoothness * eta, -1.0, noise=spread)
    return Tuned(run, reduction, math.sqrt(6 * start) * size, 4 * math.sqrt(spread) * size)


@in_doubles
def noise_of_privacy(
    clip: float, samples: int, entries: int, steps: int, epsilon: float, delta: float
) -> float:
    """Return the noise W that makes T steps on N clipped gradients (epsilon, delta)-private.

    All steps use full batches. Theorem 2 of the DiSK paper contains a constant v that is not
    specified. This function does not need v. T Gaussian releases of multiplier z are
    T/(2 z^2)-zCDP, and rho-zCDP implies (rho + 2 sqrt(rho log(1/delta)), delta)-DP (Bun and
    Steinke). So z^2 = T/(2 rho), sqrt(rho) = sqrt(log(1/delta) + epsilon) - sqrt(log(1/delta)), and
    W = d (z C/N)^2. Two data sets are neighbours if they differ in one sample, whose gradient is 0
    in one of them.
    """
    log = -math.log(probability("delta", delta))
    rho = (positive("epsilon", epsilon) / (math.sqrt(log + epsilon) + math.sqrt(log))) ** 2
    size = positive("clip", clip) / whole("samples", samples)
    return whole("entries", entries) * size**2 * whole("steps", steps) / (2 * rho)


@in_doubles
def theorem_5(
    clip: float,
    samples: int,
    entries: int,
    steps: int,
    epsilon: float,
    delta: float,
    gap: float,
    smoothness: float,
    slope: float,
) -> Tuned:
    """Return the run and the bounds of Corollary 4 with the noise that privacy requires.

    The noise is `noise_of_privacy`, and the bound is sqrt(3 (1 + 1/T) C_k L D d/rho) C/N. W is
    proportional to T, so apart from the factor 1 + 1/T the bound is the same for every T that the
    corollary allows.

    Theorem 5 of the DiSK paper sets T = sqrt(2) N epsilon s/(C sqrt(B d log(1/delta))). For this T,
    eq. (7) of the paper gives O(1/sqrt(N epsilon)) and not the published O(1/(N epsilon)). T must
    be the square of the published value, and then s/sqrt(B) no longer appears in the bound.

    The clipping threshold C cannot stay constant while kappa falls. Theorem 3 requires C >= (1 + 2
    (1-k)/k) G. If C is smaller, gradients are clipped, and no theorem of the paper covers clipped
    gradients. This function does not check C, so the caller must ensure that C is large enough.
    """
    spread = noise_of_privacy(clip, samples, entries, steps, epsilon, delta)
    room = positive("smoothness", smoothness) * positive("gap", gap)
    minimum = math.sqrt(48 * steps / spread) * room / positive("slope", slope)
    if steps < minimum * (1 - 1e-9):
        raise InputError(
            f"steps is {steps}, but Theorem 5 of DiSK requires at least {math.ceil(minimum)} steps "
            "for these values."
        )
    return corollary_4(steps, gap, smoothness, slope, spread)
