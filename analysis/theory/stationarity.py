"""Bounds on the gradient norms that Muon reaches, from Nesterov Muon and Newton–Schulz convergence.

Step sizes
----------
Each schedule computes the step size and the momentum from the number of steps (the horizon). The
schedules of Nesterov Muon need neither the smoothness nor the noise level. The schedules of
Newton–Schulz convergence need the smoothness and the noise level.

Nesterov Muon
-------------
`nesterov_muon` bounds the gradient norm of Muon with Nesterov momentum. The sources are Theorems
3.4 and 3.5 and Corollary 3.6 of Nesterov Muon.

The theorems do not state constants that depend on alpha and d0. The proofs (Nesterov Muon,
Appendices C and D.3) contain all of these constants, and this module includes them.

Newton-Schulz
-------------
`muon` and `sgd_momentum` bound the nuclear norm of the gradient, for Muon with Newton-Schulz or SVD
and for SGD with momentum. The source is Newton–Schulz convergence.

Notation: f is L-smooth from ||.||_op to ||.||_*, D = f(X_0) - f*, and r bounds the rank. Samples
satisfy E ||G - grad||_F^2 <= sigma^2, and a batch contains B samples. The momentum M starts at 0,
and each step sets M <- beta M + (1 - beta) G. Let C be the corresponding average of the true
gradients. Then S = grad - M = (grad - C) + (C - M), and both parts are bounded:

- C - M is (1 - beta) sum_s beta^(t-s) xi_s, so E ||C - M||_F^2 <= (1 - beta)/(1 + beta)
  sigma^2/B.
- A_t = grad f(X_t) - C_t satisfies A_t = beta (A_{t-1} + grad f(X_t) - grad f(X_{t-1})) and
  A_0 = beta grad f(X_0), where ||grad f(X_0)||_* <= sqrt(2 L D) by smoothness.

The constants come from the proofs of Newton–Schulz convergence, in a form that includes beta. The
docstring of each function derives its constants.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.checks import at_least, in_doubles, positive, values, whole
from fedmuon.core.errors import InputError
from fedmuon.optim.schedules import heavy_tailed as powers
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.coefficients import schedule as schedule_of
from fedmuon.orthogonalize.lipschitz_constants import slowdown


@dataclass(frozen=True)
class Schedule:
    """A constant step size η and momentum β for a horizon.

    Attributes:
        lr: Step size η.
        beta: Momentum β.
        steps: Number of steps, the horizon.
        rule: Name of the rule that sets η and β.

    Example:
        >>> from fedmuon.analysis import Schedule
        >>> Schedule(lr=0.01, beta=0.9, steps=1000, rule="mine").lr
        0.01
    """

    lr: float
    beta: float
    steps: int
    rule: str

    def checked(self) -> tuple[float, float, int]:
        """Check the numbers and return them.

        Returns:
            The step size η > 0, the momentum β in [0, 1) and the number of steps.

        Raises:
            InputError: If a number is out of range.
        """
        if not 0 <= self.beta < 1:
            raise InputError(f"beta is {self.beta}, but it must be at least 0 and below 1.")
        return positive("lr", self.lr), self.beta, whole("steps", self.steps)


def heavy_tailed(steps: int, alpha: float) -> Schedule:
    """Return the schedule for heavy-tailed noise (Nesterov Muon, Theorems 3.4 and 3.5).

    The step size is η = K^(-(2a-1)/(3a-2)), and the momentum satisfies 1 - β = K^(-a/(3a-2)).

    Args:
        steps: Horizon K >= 2.
        alpha: Tail index a in (1, 2]. The noise has a finite moment of order a.

    Returns:
        The schedule.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import heavy_tailed
        >>> made = heavy_tailed(10_000, alpha=2.0)
        >>> round(made.lr, 6), round(made.beta, 6)
        (0.001, 0.99)
    """
    horizon = whole("steps", steps, 2)
    return Schedule(*powers(horizon, tail_index(alpha)), horizon, "heavy-tailed")


def alpha_free(steps: int) -> Schedule:
    """Return the schedule that does not need the tail index (Nesterov Muon, Corollary 3.6).

    The step size is η = K^(-3/4), and the momentum satisfies 1 - β = K^(-1/2). The schedule equals
    that of `heavy_tailed` for alpha = 2.

    Args:
        steps: Horizon K >= 2.

    Returns:
        The schedule.

    Raises:
        InputError: If `steps` is below 2.

    Example:
        >>> from fedmuon.analysis import alpha_free
        >>> round(alpha_free(10_000).beta, 6)
        0.99
    """
    horizon = whole("steps", steps, 2)
    return Schedule(*powers(horizon), horizon, "alpha-free")


def tuned_muon(
    steps: int, gap: float, smoothness: float, sigma: float, rank: int, batch: int = 1
) -> Schedule:
    """Return the schedule that Newton–Schulz convergence uses for Muon.

    The step size is eta = sqrt((1-beta) D / (L T)), and the momentum satisfies 1 - beta = min(1,
    sqrt(B L D / (r T)) / sigma). This choice balances the terms of `muon`, up to factors that do
    not depend on T, r and sigma.
    """
    forget = _forget(steps, gap, smoothness, sigma * math.sqrt(whole("rank", rank)), batch)
    lr = math.sqrt(forget * gap / (smoothness * steps))
    return Schedule(lr, 1 - forget, steps, "tuned for Muon")


def tuned_sgd(steps: int, gap: float, smoothness: float, sigma: float, batch: int = 1) -> Schedule:
    """Return the schedule that Newton–Schulz convergence uses for SGD with momentum.

    The step size is eta = (1-beta) / (2 L), and the momentum satisfies 1 - beta = min(1, 2 sqrt(B L
    D / T) / sigma).
    """
    forget = _forget(steps, gap, smoothness, sigma / 2, batch)
    return Schedule(forget / (2 * smoothness), 1 - forget, steps, "tuned for SGD with momentum")


def rate(alpha: float, rule: str = "heavy-tailed") -> float:
    """Return the exponent of 1/K in the slowest term of the bound.

    For the rule "heavy-tailed" the exponent is (a-1)/(3a-2) (Nesterov Muon, Theorem 3.5). For the
    rule "alpha-free" (Corollary 3.6) the noise term falls as K^(-(a-1)/(2a)), and all other terms
    fall as K^(-1/4) or faster.
    """
    a = tail_index(alpha)
    if rule == "alpha-free":
        return min(0.25, (a - 1) / (2 * a))
    if rule != "heavy-tailed":
        raise InputError(f"The schedule {rule!r} is unknown. Use 'heavy-tailed' or 'alpha-free'.")
    return (a - 1) / (3 * a - 2)


def tail_index(alpha: float) -> float:
    """Check that the tail index is in (1, 2] and return it (Nesterov Muon, Assumption 3.2)."""
    if not 1 < alpha <= 2:
        raise InputError(
            f"alpha is {alpha}, but the tail index of the noise must be above 1 and at most 2."
        )
    return float(alpha)


def _forget(steps: int, gap: float, smoothness: float, noise: float, batch: int) -> float:
    """Return 1 - beta = min(1, sqrt(B L D / T) / noise)."""
    if not (at_least("gap", gap) > 0 and at_least("smoothness", smoothness) > 0):
        raise InputError(
            f"gap is {gap:g} and smoothness is {smoothness:g}, but a tuned schedule needs both "
            "above 0. Use positive numbers, or set the step size yourself."
        )
    size = math.sqrt(whole("batch", batch) * smoothness * gap / whole("steps", steps))
    return min(1.0, size / noise) if at_least("sigma", noise) > 0 else 1.0


SMOOTH = "f is L-smooth in the Frobenius norm and bounded below (Nesterov Muon, Assumption 3.1)."
MOMENT = (
    "Samples of a batch are independent and unbiased, with E|G - grad|^a <= sigma0^a + sigma1^a "
    "|grad|^a (Nesterov Muon, Assumption 3.2)."
)
INEXACT = (
    "In every call, <M, T(M)> and ||T(M)|| satisfy the limits of gamma and nu (Nesterov Muon, "
    "Assumption 2.1)."
)
NESTEROV = "C <- beta C + G from C = 0, M = beta C + G, X <- X - eta T(M) (Nesterov Muon, eq. (1))."
MEASURE = "min_k E |grad f(X_k)|_F"
PREDICTABLE = (
    "The martingale inequality A.8 of Nesterov Muon holds with conditional moments, as the paper "
    "uses it."
)


@dataclass(frozen=True)
class Stationarity:
    """A bound on the gradient norm that an optimizer reaches.

    Attributes:
        measure: The quantity that the bound limits, as a formula.
        value: The bound, which is the sum of `terms`.
        terms: Mapping from the name of each term to its value.
        schedule: The step size and momentum.
        contraction: The number by which the terms were divided: ρ of Nesterov Muon, or 1/χ of
            Newton–Schulz convergence.
        assumptions: Sentences that state what the bound assumes.

    Example:
        >>> from fedmuon.analysis import Noise, alpha_free, nesterov_muon
        >>> found = nesterov_muon(alpha_free(10_000), Noise(sigma0=1.0), 1.0, 1.0, shape=(20, 4))
        >>> found.measure
        'min_k E |grad f(X_k)|_F'
    """

    measure: str
    value: float
    terms: dict[str, float]
    schedule: Schedule
    contraction: float
    assumptions: tuple[str, ...]


def slowdown_of(polar_error: float) -> float:
    """Return chi = 1 / (1 - eps), the factor by which a polar error eps increases the bound."""
    if not math.isfinite(chi := slowdown(polar_error)):
        raise InputError(
            "The polar error rounds to 1 in double precision. Use more Newton-Schulz steps or a "
            "higher degree."
        )
    return chi


@dataclass(frozen=True)
class Noise:
    """Gradient noise of a batch (Nesterov Muon, Assumption 3.2).

    The gradient G of one sample satisfies E ||G - grad||^a <= sigma0^a + sigma1^a ||grad||^a.

    Attributes:
        alpha: Tail index a in (1, 2].
        sigma0: Noise level that does not depend on the gradient.
        sigma1: Noise level per unit of the gradient's norm.
        batch: Batch size B.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import Noise
        >>> Noise(alpha=2.0, sigma0=1.0, batch=4).reduction
        0.5
    """

    alpha: float = 2.0
    sigma0: float = 0.0
    sigma1: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        tail_index(self.alpha)
        at_least("sigma0", self.sigma0)
        at_least("sigma1", self.sigma1)
        whole("batch", self.batch)

    @property
    def reduction(self) -> float:
        """Return C_a^(1/a) / B^((a-1)/a) (Nesterov Muon, Lemma A.10).

        C_a = 2 is valid for every a (von Bahr and Esseen). In two cases C_a = 1: for a = 2, because
        the variances of independent errors add up, and for B = 1, because nothing is averaged.
        """
        constant = 1.0 if self.alpha == 2 or self.batch == 1 else 2.0
        return constant ** (1 / self.alpha) / self.batch ** (1 - 1 / self.alpha)

    def size(self, gradient: float) -> float:
        """Return an upper bound of E ||G - grad|| for the mean of a batch.

        Args:
            gradient: The norm ||grad||.

        Returns:
            The bound.
        """
        moments = self.sigma0**self.alpha + (self.sigma1 * gradient) ** self.alpha
        return self.reduction * moments ** (1 / self.alpha)


@in_doubles
def nesterov_muon(
    schedule: Schedule,
    noise: Noise,
    gap: float,
    smoothness: float,
    shape: tuple[int, int],
    gamma: float = 0.0,
    nu: float = 0.0,
    gradient: float | None = None,
    start: float | None = None,
) -> Stationarity:
    """Return a bound on min_k E ||grad f(X_k)||_F for Muon with Nesterov momentum.

    The bound holds for any η and β. With gamma = nu = 0, the bound is Theorem 3.4 of Nesterov Muon
    with all constants of the proof (Appendix D.3).

    Args:
        schedule: Step size, momentum and horizon.
        noise: The gradient noise.
        gap: The initial loss minus the minimum, f(X_0) - f*.
        smoothness: L, the Lipschitz constant of the gradient in the Frobenius norm.
        shape: Shape (m, n) of the matrix.
        gamma: Loss of alignment of an inexact orthogonalizer (Assumption 2.1); 0 if exact.
        nu: Excess over 1 of the orthogonalizer's operator norm; 0 if exact.
        gradient: ||grad f(X_0)||_F; sqrt(2 L gap) by default.
        start: E ||S_0||_F, the first error of the momentum. By default, an upper bound of this
            error.

    Returns:
        The bound and its terms.

    Raises:
        InputError: If a number is out of range, or the noise grows too fast for the batch size.

    Example:
        >>> from fedmuon.analysis import Noise, alpha_free, nesterov_muon
        >>> found = nesterov_muon(alpha_free(10_000), Noise(sigma0=1.0), 1.0, 1.0, shape=(20, 4))
        >>> round(found.value, 3)
        3.11
    """
    (eta, beta, _), side = schedule.checked(), _side(shape)
    if not 0 < beta < 1:
        raise InputError(f"beta is {beta}, but the theorem requires a beta above 0 and below 1.")
    top = math.sqrt(2 * at_least("smoothness", smoothness) * at_least("gap", gap))
    slope = top if gradient is None else at_least("gradient", gradient)
    if start is None:
        start = beta**2 * slope + (1 - beta**2) * noise.size(slope)
    reach = math.sqrt(side) * (1 + at_least("nu", nu))  # upper bound of ||T(M)||_F
    pull = _pull(shape, gamma, nu)
    rho = contraction(noise, shape, gamma, nu)
    spread = 2 * math.sqrt(math.pi) * noise.reduction * pull
    growth = (2**noise.alpha + 1) ** (1 / noise.alpha)  # Gamma_a in Lemma C.3
    forget = 1 - beta
    terms = {
        "descent": gap / (eta * schedule.steps),
        "step": smoothness * eta * reach**2 / 2,
        "start": pull * at_least("start", start) / (forget * schedule.steps),
        "drift": beta**2 / forget * smoothness * eta * reach * pull,
        "noise": spread * growth * noise.sigma0 * forget ** (1 - 1 / noise.alpha),
        "growing noise": spread * noise.sigma1 * slope / schedule.steps,
    }
    terms = {name: term / rho for name, term in terms.items()}
    stood_on = (SMOOTH, MOMENT, INEXACT, NESTEROV) + ((PREDICTABLE,) if noise.sigma1 else ())
    return Stationarity(MEASURE, sum(terms.values()), terms, schedule, rho, stood_on)


# The quality (gamma, nu) of an inexact orthogonalizer T (Nesterov Muon, Assumption 2.1):
# <M, T(M)> >= (1 - gamma) ||M||_* and ||T(M)||_op <= 1 + nu.


def _falling(singular: ArrayLike) -> np.ndarray:
    """Return the positive singular values of a matrix in descending order."""
    ordered = np.sort(values("singular values", singular))[::-1]
    if not (len(ordered) and ordered[0] > 0):
        raise InputError(
            "no singular value is above 0. Pass the singular values of a matrix that is not 0."
        )
    return ordered[ordered > 0]


def polynomial_quality(
    singular: ArrayLike, coefficients: Coefficients, steps: int, divisor: float | None = None
) -> tuple[float, float]:
    """Return the exact (gamma, nu) of Newton-Schulz with input M / divisor.

    The source is Nesterov Muon, Prop. 2.2. Let p be the composition of all steps. Then gamma = 1 -
    sum_i s_i p(s_i / divisor) / sum_i s_i. The excess nu is max(0, max_i |p(s_i / divisor)| - 1),
    which is 0 for the two polynomials of Nesterov Muon.

    Args:
        singular: The singular values s_i of M.
        coefficients: A name in `fedmuon.orthogonalize.COEFFICIENTS`, or a list of steps.
        steps: The number of Newton-Schulz steps.
        divisor: The number by which M is divided; ||M||_F by default.
    """
    s = _falling(singular)
    image = s / _divisor(s, divisor)
    for step in schedule_of(coefficients, steps):
        image = sum(c * image ** (2 * k + 1) for k, c in enumerate(step))
    return float(s @ (1 - image) / s.sum()), max(0.0, float(np.abs(image).max()) - 1)


def sketched_quality(
    singular: ArrayLike, rank: int, oversample: int, power: int, divisor: float | None = None
) -> tuple[float, float]:
    """Return the mean (gamma, nu) over Gaussian sketches (Nesterov Muon, Prop. 2.3 and B.3).

    Here gamma = 1 - A / (divisor ||M||_*) with A = H - s / (p - 1) rho^(4h) T, and nu = 0. H is the
    sum of the s largest squared singular values, T is the sum of the other squared singular values,
    and rho is singular value s+1 divided by singular value s. The result is valid for any number of
    steps of the two polynomials of Nesterov Muon.

    Raises:
        InputError: If A <= 0, because no alignment is proved then. `least_power` returns the
            necessary number of power iterations.
    """
    s = _falling(singular)
    head, tail, ratio = _head_and_tail(s, rank, oversample)
    left = head - rank / (oversample - 1) * ratio ** (4 * whole("power", power, 0)) * tail
    if not left > 0:
        raise InputError(
            f"for these singular values, no alignment is proved for a sketch of rank {rank} + "
            f"{oversample} with h = {power} power iterations. Increase h, the rank or the "
            "oversampling."
        )
    return 1 - left / (_divisor(s, divisor) * float(s.sum())), 0.0


def least_power(singular: ArrayLike, rank: int, oversample: int) -> int:
    """Return the smallest number h of power iterations that `sketched_quality` accepts.

    The source is Nesterov Muon, eq. (18).

    Raises:
        InputError: If no number of iterations is enough, because singular values s and s+1 are
            equal.
    """
    head, tail, ratio = _head_and_tail(_falling(singular), rank, oversample)
    excess = rank * tail / ((oversample - 1) * head)  # rho^(4h) must be below 1 / excess
    if excess < 1:
        return 0
    if ratio == 1:
        raise InputError(
            f"the singular values number {rank} and {rank + 1} are equal, so power iterations do "
            "not improve the sketch. Choose another rank or a larger oversampling."
        )
    return 1 + math.floor(math.log(excess) / (4 * math.log(1 / ratio)))


def _head_and_tail(s: np.ndarray, rank: int, oversample: int) -> tuple[float, float, float]:
    """Return H, T and rho of `sketched_quality`. The target rank must be below the matrix rank."""
    if whole("rank", rank) >= len(s):
        raise InputError(
            f"rank is {rank}, but it must be below {len(s)}, the number of positive singular "
            "values."
        )
    whole("oversample", oversample, 2)
    return float((s[:rank] ** 2).sum()), float((s[rank:] ** 2).sum()), float(s[rank] / s[rank - 1])


def _divisor(s: np.ndarray, custom: float | None) -> float:
    divisor = float(np.linalg.norm(s)) if custom is None else at_least("divisor", custom)
    if divisor < s[0]:
        raise InputError(f"divisor is {divisor}, but it must be at least ||M||_op = {s[0]:g}.")
    return divisor


def contraction(noise: Noise, shape: tuple[int, int], gamma: float = 0.0, nu: float = 0.0) -> float:
    """Return rho, the number by which the terms of `nesterov_muon` are divided.

    rho = 1 - gamma - (1 + sqrt(d0) (1 + nu)) 2 sqrt(pi) C_a^(1/a) sigma1 / B^((a-1)/a), and rho
    must be > 0.
    """
    pull = _pull(shape, gamma, nu)
    rho = 1 - gamma - pull * 2 * math.sqrt(math.pi) * noise.reduction * noise.sigma1
    if not rho > 0:
        raise InputError(
            f"batch is {noise.batch}, but the noise grows so fast with the gradient that batch "
            f"must be above {least_batch(noise, shape, gamma, nu):.6g}."
        )
    return rho


@in_doubles
def least_batch(noise: Noise, shape: tuple[int, int], gamma: float = 0.0, nu: float = 0.0) -> float:
    """Return the number above which the batch size must be (Nesterov Muon, Theorem 3.5).

    The formula uses C_a = 2, or C_a = 1 for a = 2.
    """
    pull = _pull(shape, gamma, nu)
    constant = (1 if noise.alpha == 2 else 2) ** (1 / noise.alpha)
    ratio = 2 * math.sqrt(math.pi) * noise.sigma1 * constant * pull / (1 - gamma)
    return ratio ** (noise.alpha / (noise.alpha - 1))


def _pull(shape: tuple[int, int], gamma: float, nu: float) -> float:
    """Return 1 + sqrt(d0) (1 + nu), the factor of the momentum's error in the bound."""
    if not 0 <= gamma < 1:
        raise InputError(f"gamma is {gamma}, but the theorem requires a gamma in [0, 1).")
    return 1 + math.sqrt(_side(shape)) * (1 + at_least("nu", nu))


def _side(shape: tuple[int, int]) -> int:
    """Return d0 = min(m, n)."""
    return min(whole("rows", shape[0]), whole("columns", shape[1]))


SPECTRALLY_SMOOTH = (
    "||grad f(X) - grad f(Y)||_* <= L ||X - Y||_op, and f is bounded below (Newton-Schulz "
    "convergence, Assumption 1)."
)
VARIANCE = (
    "Batches are independent and unbiased, and E|G - grad|_F^2 <= sigma^2 for each sample "
    "(Assumption 2)."
)
AVERAGE = (
    "M <- beta M + (1 - beta) G from M = 0. The orthogonalizer depends only on the direction of M."
)
POLAR = (
    "Every step uses a Z with ||Z||_op <= 1 that is within eps of the polar factor (Definition 3)."
)
TAYLOR = (
    "Taylor steps that start from M / ||M||_F keep ||Z||_op <= 1. Other steps may not "
    "(Proposition 1)."
)
MEAN_NUCLEAR_NORM = "(1/T) sum_t E ||grad f(X_t)||_*"


def muon(
    schedule: Schedule,
    gap: float,
    smoothness: float,
    sigma: float,
    rank: int,
    batch: int = 1,
    polar_error: float = 0.0,
) -> Stationarity:
    """Return the bound of Newton–Schulz convergence, Theorem 1, for Muon with X <- X - eta Z.

    `polar_error` is eps_q, the error of the orthogonalizer. With `polar_error` = 0 the result is
    Theorem 4, for Muon with an exact SVD.

    Proof. The descent step uses <grad, Z> = <M, Z> + <S, Z> >= (1 - eps)||M||_* - ||S||_*,
    ||M||_* >= ||grad||_* - ||S||_*, and ||X_{t+1} - X_t||_op <= eta. Sum over the steps and divide
    by eta T (1 - eps). The bound is then chi times D/(eta T) + L eta/2 + (2 - eps) mean ||S||_*.
    To bound ||S||_*, use ||A_t||_* <= beta (||A_{t-1}||_* + L eta). The nuclear norm of C - M is at
    most sqrt(r) times its Frobenius norm.
    """
    eta, beta, steps = _checked(schedule, gap, smoothness, sigma, rank, batch)
    chi, cost = slowdown_of(polar_error), 2 - polar_error
    start = beta * math.sqrt(2 * smoothness * gap) / (1 - beta)
    spread = sigma * math.sqrt(rank * (1 - beta) / ((1 + beta) * batch))
    terms = {
        "descent": chi * gap / (eta * steps),
        "step": chi * smoothness * eta / 2,
        "start": chi * cost * start / steps,
        "drift": chi * cost * beta * smoothness * eta / (1 - beta),
        "noise": chi * cost * spread,
    }
    stood_on = (SPECTRALLY_SMOOTH, VARIANCE, AVERAGE, POLAR) + ((TAYLOR,) if polar_error else ())
    return Stationarity(MEAN_NUCLEAR_NORM, sum(terms.values()), terms, schedule, 1 / chi, stood_on)


@in_doubles
def sgd_momentum(
    schedule: Schedule, gap: float, smoothness: float, sigma: float, rank: int, batch: int = 1
) -> Stationarity:
    """Return the bound of Newton–Schulz convergence, Theorem 3, for SGD with X <- X - eta M.

    The bound is sqrt(r) times the square root of a sum. `terms` divides the value of the bound in
    proportion to the terms of this sum.

    Proof. f falls by at least (eta/2)(||grad||_F^2 - ||S||_F^2 + (1 - L eta)||M||_F^2). Young's
    inequality gives ||A_t||^2 <= beta ||A_{t-1}||^2 + beta^2/(1 - beta) (L eta)^2 ||M_{t-1}||_F^2,
    and ||S||^2 <= 2 ||A||^2 + 2 ||C - M||^2. For L eta <= (1 - beta)/2, the errors contribute the
    sum of ||M||^2 with a factor 2 beta^2 (L eta)^2/(1 - beta)^2. This factor is at most the factor
    1 - L eta of the descent, so the sum drops out. The remaining terms bound the mean of
    ||grad||_F^2. The square root of that mean, times sqrt(r), bounds the mean nuclear norm.
    """
    eta, beta, steps = _checked(schedule, gap, smoothness, sigma, rank, batch)
    if smoothness * eta > (1 - beta) / 2 * (1 + 1e-12):
        raise InputError(
            f"lr is {eta:g}, but the theorem requires lr <= (1 - beta)/(2 L) = "
            f"{(1 - beta) / (2 * smoothness):g}."
        )
    squares = {
        "descent": 2 * gap / (eta * steps),
        "start": 4 * beta**2 * smoothness * gap / ((1 - beta) * steps),
        "noise": 2 * sigma**2 * (1 - beta) / ((1 + beta) * batch),
    }
    if math.isinf(total := sum(squares.values())):
        raise OverflowError
    value = math.sqrt(rank * total)
    terms = {name: value * square / total if total else 0.0 for name, square in squares.items()}
    assumptions = (SPECTRALLY_SMOOTH, VARIANCE, AVERAGE, "L eta <= (1 - beta)/2.")
    return Stationarity(MEAN_NUCLEAR_NORM, value, terms, schedule, 1.0, assumptions)


def _checked(
    schedule: Schedule, gap: float, smoothness: float, sigma: float, rank: int, batch: int
) -> tuple[float, float, int]:
    """Check every constant and return eta, beta and T."""
    for name, value in (("gap", gap), ("smoothness", smoothness), ("sigma", sigma)):
        at_least(name, value)
    whole("rank", rank)
    whole("batch", batch)
    return schedule.checked()
