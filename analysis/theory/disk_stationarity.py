"""How stationary DiSK becomes on SGD: 003, Theorems 3 and 6 and Corollary 4 with every constant.

Algorithm 2 of 003 without clipping, k = kappa the gain, gamma the reach, d_t = x_{t+1} - x_t:

    g~_t = (1-k) g~_{t-1} + k grad f_B(x_t) + (1-k) Q_t + k w_t,     x_{t+1} = x_t - eta g~_t,
    Q_t = (grad f_B(x_t + gamma d_{t-1}) - grad f_B(x_t)) / gamma.

Every f(.; z) is L-smooth, D = F(x_0) - F*, B independent samples of variance s^2 make a step, and
w_t is noise with E||w||^2 = W. What 003 calls "some non-negative constants" is summed here.

*The error.* grad F(x_t) - g~_t = m_t + (noise of mean 0 given the past). Call it e_t; then

    m_t = (1-k)(e_{t-1} + R_t),     R_t = grad F(x_t) - grad F(x_{t-1}) - E Q_t.

R_t = 0 for gamma = -1, as Q_t then is the difference itself, and where gradients are linear. Else
||R_t|| <= r L ||d||: r = 2 for gamma > 0; for gamma < 0 both differences share a stretch, and r =
2 (1 - |gamma|) or 2 (1 - 1/|gamma|), whichever is positive. With b_t = E||m_t||^2, N_t the noise's
second moment, v_t = E||g~_t||^2 = E||grad F - m_t||^2 + N_t, and any s', a > 0,

    b_t <= q (b_{t-1} + N_{t-1}) + P v_{t-1},  q = (1-k)^2 (1+s'), P = (1-k)^2 (1+1/s') (r L eta)^2,
    N_t <= k^2 V + P' v_{t-1},  V = (1+a) s^2/B + W, P' = (1-k)^2 (1+1/a) (L eta)^2 / B.

*Descent.* E_t g~_t = grad F - m_t. By smoothness and 2 <grad F, m> <= y ||grad F||^2 + ||m||^2 / y,

    E F(x_{t+1}) - F(x_t) <= -eta h ||grad F||^2 + eta c ||m_t||^2 + (L eta^2/2) N_t
                             - eta u ||grad F - m_t||^2

with h = 1 - L eta/2 - (1 - L eta) y/2, c = (1 - L eta)/(2 y) + L eta/2 and u = 0. At y = 1 one may
take h = c = 1/2 and u = (1 - L eta)/2; and a mean of both with weight z for that. Over T steps,

    mean E||grad F||^2 <= [D/(eta T) + c b_0/((1-q) T) + K (N_0/T + k^2 V)/(1-P')] / h,

K = c (q + P)/(1-q) + L eta/2, if c P/(1-q) + K P'/(1-P') <= u. Every choice of y, z, s' and a is
valid, so the least over a grid of them is.

*Starts.* Algorithm 2 begins with g~_{-1} = g_0: m_0 = 0, N_0 = s^2/B + W. 003's proof begins with
g~_{-1} = 0: m_0 = (1-k) grad F(x_0) and N_0 = k^2 (s^2/B + W). Both are here.

*What 003 prints.* Theorem 3's two conditions on eta differ, its mean has T + 1 terms over T; its
proof needs C_1 > 0 and beta >= 0, as in `printed_theorem_3`, for gamma = -1. Theorem 6's condition
kappa > 8 (eta L)^2 does not make its beta >= 0: for eta L = 0.1 and kappa = 0.09 the denominator is
negative; about kappa > 3 eta L would do. The brackets of its C_2 do not match.

*Corollary 4.* C_k = kappa/(L eta) = ||grad F(x_0)||^2/(2 L D), which smoothness keeps below 1: the
printed minimum with 1 never acts. Where R = 0 and batches are full, from the zero start with y = z
= 1 and L eta <= 1/2, as (1-k)^2/(2-k) + k/2 <= 1/2,

    mean E||grad F||^2 <= 3 D/(eta T) + (1 + 1/T) C_k L eta W/2 = sqrt(6 (1 + 1/T) C_k L D W / T)

at eta = sqrt(6 D/(C_k L (1 + 1/T) W T)): below 003's 4 sqrt(C_k L D W/T) once T makes L eta <= 1/2.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmuon.analysis.theory.checks import at_least, in_doubles, positive, probability, whole
from fedmuon.analysis.theory.stationarity import Schedule, Stationarity
from fedmuon.core.errors import InputError

Start = Literal["first", "zero"]
MEASURE = "(1/T) sum_t E |grad F(x_t)|^2"
SMOOTH = "Every f(.; z) is L-smooth, F is bounded below (003, A1)."
SAMPLES = "B samples a step, independent, of gradient variance at most s^2 (003, A2); inf is all."
UNCLIPPED = "Nothing is clipped, and the noise is independent of the samples, E|w|^2 = W."
EXACT = "Differences of gradients are predicted exactly: gamma = -1, or gradients are linear."
_POWERS = 2.0 ** np.arange(-12, 5)  # of s, a and, up to 1, of t and l


@dataclass(frozen=True)
class Disk:
    """DiSK on SGD: step size, steps, gain kappa, reach gamma; and what a step's gradient has of
    noise: variance `sigma`^2 of a sample, B = `batch` of them, and W = `noise`."""

    lr: float
    steps: int
    gain: float
    reach: float = -1.0
    sigma: float = 0.0
    batch: float = math.inf
    noise: float = 0.0
    linear: bool = False  # gradients are linear

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        whole("steps", self.steps)
        if not 0 < self.gain <= 1 or self.reach == 0:
            raise InputError("DiSK has a gain in (0, 1] and a reach that is not 0.")
        at_least("sigma", self.sigma)
        at_least("batch", min(self.batch, 1e300), 1)
        at_least("noise", self.noise)

    @property
    def sampling(self) -> float:
        """s^2 / B."""
        return self.sigma**2 / self.batch

    @property
    def missed(self) -> float:
        """r, what a prediction may miss by, in L ||d||."""
        size = abs(self.reach)
        if self.linear or self.reach == -1:
            return 0.0
        return 2.0 if self.reach > 0 else 2 * (1 - min(size, 1 / size))


@in_doubles
def disk(
    one: Disk, gap: float, smoothness: float, slope: float | None = None, start: Start = "first"
) -> Stationarity:
    """The bound; only the zero start asks for `slope` = ||grad F(x_0)||, at most sqrt(2 L D)."""
    known = at_least("smoothness", smoothness), at_least("gap", gap)
    top = math.sqrt(2 * known[0] * known[1])
    first = top if slope is None else at_least("slope", slope)
    if (rate := known[0] * one.lr) > 1:
        raise InputError(f"lr is {one.lr:g}: the bound asks for lr <= 1/L = {1 / known[0]:g}.")
    terms = _least(one, rate, known[1], first if start == "zero" else None)
    if terms is None:
        raise InputError(
            f"With gain {one.gain:g} the filter follows too slowly at lr = {one.lr:g}: choose a "
            "larger gain or a smaller lr."
        )
    stood_on = (SMOOTH, SAMPLES, UNCLIPPED) + ((EXACT,) if not one.missed else ())
    plan = Schedule(one.lr, 1 - one.gain, one.steps, "given")
    return Stationarity(MEASURE, sum(terms.values()), terms, plan, 1.0, stood_on)


def _least(one: Disk, rate: float, gap: float, slope: float | None) -> dict[str, float] | None:
    """The terms at the best choice of a grid, y and z with s' and a; None if none is valid."""
    k, share = one.gain, _POWERS[_POWERS <= 1]
    s, a = (_POWERS if one.missed else np.zeros(1)), (_POWERS if one.sampling else np.zeros(1))
    ways = (np.append(share, 1 - k) if k < 1 else share, np.append(0.0, share), s, a)
    y, z, s, a = np.meshgrid(*ways, indexing="ij")
    with np.errstate(divide="ignore"):
        q = (1 - k) ** 2 * (1 + s)
        missed = (1 - k) ** 2 * (1 + 1 / s) * (one.missed * rate) ** 2 if one.missed else 0 * q
        drawn = (1 - k) ** 2 * (1 + 1 / a) * rate**2 / one.batch if one.sampling else 0 * q
    fresh = (1 + a) * one.sampling + one.noise  # V
    h = (1 - z) * (1 - rate / 2 - (1 - rate) * y / 2) + z / 2
    c = (1 - z) * ((1 - rate) / (2 * y) + rate / 2) + z / 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        cost = c * (q + missed) / (1 - q) + rate / 2
        spent = c * missed / (1 - q) + cost * drawn / (1 - drawn)
        valid = (q < 1) & (drawn < 1) & (spent <= z * (1 - rate) / 2) & (h > 0)
        scale = cost / ((1 - drawn) * h)
    whole_start = one.sampling + one.noise
    first = whole_start if slope is None else k**2 * whole_start
    begun = 0.0 if slope is None else (1 - k) ** 2 * slope**2
    parts = {
        "descent": gap / (one.lr * one.steps) / h,
        "start": (c * begun / ((1 - q) * h) + scale * first) / one.steps,
        "noise": scale * k**2 * fresh,
    }
    total = np.where(valid, sum(parts.values()), np.inf)
    at = np.unravel_index(int(np.argmin(total)), total.shape)
    if not np.isfinite(total[at]):
        return None
    return {name: float(np.broadcast_to(part, total.shape)[at]) for name, part in parts.items()}


@in_doubles
def printed_theorem_3(one: Disk, gap: float, smoothness: float, slope: float) -> float:
    """003 (6) for gamma = -1 and the smallest beta that its proof allows; infinite where C_1 <= 0.

    2 (D + beta ||grad F(x_0)||^2)/(C_1 eta T) + 2 (beta + eta^2 L) k^2/(C_1 eta) (2 s^2/B + W), as
    in (30), from the zero start.
    """
    eta, k, rate = one.lr, one.gain, at_least("smoothness", smoothness) * one.lr
    gap, slope = at_least("gap", gap), at_least("slope", slope)
    kept = (1 - k) ** 2 * (1 + 4 * rate**2)
    if kept >= 1:
        return math.inf
    beta = (eta * (1 - k) / 2 + eta * rate * kept) / (1 - kept)
    weight = beta + eta * rate
    divisor = (1 + k - 2 * rate) - 8 * weight * (1 - k) ** 2 * smoothness * rate
    if divisor <= 0:
        return math.inf
    noise = 2 * weight * k**2 / eta * (2 * one.sampling + one.noise)
    return (2 * (gap + beta * slope**2) / (eta * one.steps) + noise) / divisor


@dataclass(frozen=True)
class Tuned:
    """Corollary 4: the run that it names, C_k, the bound proved here, and 003's."""

    run: Disk
    reduction: float
    value: float
    printed: float


@in_doubles
def corollary_4(steps: int, gap: float, smoothness: float, slope: float, noise: float) -> Tuned:
    """sqrt(6 (1 + 1/T) C_k L D W/T) for full batches and gamma = -1, from the zero start; W is
    `noise`."""
    horizon, spread = whole("steps", steps), positive("noise", noise)
    room = 2 * positive("smoothness", smoothness) * positive("gap", gap)
    reduction = positive("slope", slope) ** 2 / room
    if reduction > 1 + 1e-12:
        raise InputError(f"slope is {slope:g}: smoothness keeps it below sqrt(2 L D).")
    start = (1 + 1 / horizon) * spread
    eta = math.sqrt(6 * gap / (reduction * smoothness * start * horizon))
    if smoothness * eta > 0.5:
        least = math.ceil(24 * smoothness * gap / (reduction * spread))
        raise InputError(f"steps is {steps}: Corollary 4 asks for about {least} or more here.")
    size = math.sqrt(reduction * smoothness * gap / horizon)
    run = Disk(eta, horizon, reduction * smoothness * eta, -1.0, noise=spread)
    return Tuned(run, reduction, math.sqrt(6 * start) * size, 4 * math.sqrt(spread) * size)


@in_doubles
def noise_of_privacy(
    clip: float, samples: int, entries: int, steps: int, epsilon: float, delta: float
) -> float:
    """W that makes T full batches of N clipped gradients (epsilon, delta)-private: Theorem 2's v.

    T Gaussian releases of multiplier z are T/(2 z^2)-zCDP, and rho-zCDP is (rho + 2 sqrt(rho
    log(1/delta)), delta)-DP (Bun and Steinke). So z^2 = T/(2 rho), sqrt(rho) = sqrt(log(1/delta) +
    epsilon) - sqrt(log(1/delta)), and W = d (z C/N)^2. Neighbours have a gradient set to 0.
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
    """Corollary 4 at that noise: sqrt(3 (1 + 1/T) C_k L D d/rho) C/N, the same for every T beyond
    the least, as W grows like T.

    003's Theorem 5 asks for T = sqrt(2) N epsilon s/(C sqrt(B d log(1/delta))). There its own (7)
    is O(1/sqrt(N epsilon)) and not the printed O(1/(N epsilon)): T must be the square of that, and
    s/sqrt(B) then leaves the bound. Theorem 2's v, unnamed there, is a number here. And C cannot
    stay as kappa falls: Theorem 3 asks for C >= (1 + 2 (1-k)/k) G, or else gradients are clipped,
    which no theorem of 003 covers. The clip here is the caller's, who answers for that.
    """
    spread = noise_of_privacy(clip, samples, entries, steps, epsilon, delta)
    room = positive("smoothness", smoothness) * positive("gap", gap)
    least = math.sqrt(48 * steps / spread) * room / positive("slope", slope)
    if steps < least * (1 - 1e-9):
        raise InputError(f"steps is {steps}: Theorem 5 asks for {math.ceil(least)} or more here.")
    return corollary_4(steps, gap, smoothness, slope, spread)
