"""How stationary Muon with Nesterov momentum becomes: 002, Theorems 3.4, 3.5 and Corollary 3.6.

The theorems hide constants of alpha and d0; their proof (002, Appendices C and D.3) has them all,
and so does the number here.
"""

import math
from dataclasses import dataclass

from fedmuon.analysis.theory.checks import at_least, in_doubles, whole
from fedmuon.analysis.theory.schedules import Schedule, tail_index
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.guarantees import slowdown

SMOOTH = "f is L-smooth in Frobenius norm and bounded below (002, Assumption 3.1)."
MOMENT = (
    "Samples of a batch are independent, unbiased, with E|G - grad|^a <= sigma0^a + sigma1^a "
    "|grad|^a (002, Assumption 3.2)."
)
INEXACT = "Every call keeps <M, T(M)> and ||T(M)|| within gamma and nu (002, Assumption 2.1)."
NESTEROV = "C <- beta C + G from C = 0, M = beta C + G, X <- X - eta T(M) (002 (1))."
MEASURE = "min_k E |grad f(X_k)|_F"
PREDICTABLE = "The martingale inequality A.8 holds with conditional moments, as 002 uses it."


@dataclass(frozen=True)
class Stationarity:
    """`measure` <= value after `steps`: the sum of `terms`, which holds under `assumptions`.

    `contraction` is what the terms were divided by (rho of 002, 1/chi of 004).
    """

    measure: str
    value: float
    terms: dict[str, float]
    schedule: Schedule
    contraction: float
    assumptions: tuple[str, ...]


def slowdown_of(polar_error: float) -> float:
    """chi = 1 / (1 - eps), by which an error of the polar factor slows descent."""
    if not math.isfinite(chi := slowdown(polar_error)):
        raise InputError("The polar error is 1 in doubles: take more steps, or a degree more.")
    return chi


@dataclass(frozen=True)
class Noise:
    """Assumption 3.2 of 002 for the mean of a batch of B: E|xi|^a <= C_a / B^(a-1) (...)."""

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
        """C_a^(1/a) / B^((a-1)/a) (002, Lemma A.10).

        C_a = 2 serves every a (von Bahr and Esseen); for a = 2 squares of independent errors add
        up, and with B = 1 there is nothing to add: then C_a = 1.
        """
        constant = 1.0 if self.alpha == 2 or self.batch == 1 else 2.0
        return constant ** (1 / self.alpha) / self.batch ** (1 - 1 / self.alpha)

    def size(self, gradient: float) -> float:
        """A ceiling of E|G - grad| where |grad| = `gradient`, for the mean of the batch."""
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
    """min_k E |grad f(X_k)|_F of 002, D.3, for any eta and beta; gamma = nu = 0 is Theorem 3.4.

    `gap` is f(X_0) - f*, `gradient` |grad f(X_0)|_F, at most sqrt(2 L gap) by smoothness. `start`
    is E |S_0|_F: M_0 (1 - beta) = (1 - beta^2) G_0, so S_0 = -beta^2 grad + (1 - beta^2) xi_0.
    """
    (eta, beta, _), side = schedule.checked(), _side(shape)
    if not 0 < beta < 1:
        raise InputError(f"beta is {beta}: the theorem asks for beta strictly in (0, 1).")
    top = math.sqrt(2 * at_least("smoothness", smoothness) * at_least("gap", gap))
    slope = top if gradient is None else at_least("gradient", gradient)
    if start is None:
        start = beta**2 * slope + (1 - beta**2) * noise.size(slope)
    reach = math.sqrt(side) * (1 + at_least("nu", nu))  # of |T(M)|_F
    pull = 1 + reach  # what an error in the momentum costs
    rho = contraction(noise, shape, gamma, nu)
    spread = 2 * math.sqrt(math.pi) * noise.reduction * pull
    growth = (2**noise.alpha + 1) ** (1 / noise.alpha)  # Gamma_a of Lemma C.3
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


def contraction(noise: Noise, shape: tuple[int, int], gamma: float = 0.0, nu: float = 0.0) -> float:
    """rho = 1 - gamma - (1 + sqrt(d0) (1 + nu)) 2 sqrt(pi) C_a^(1/a) sigma1 / B^((a-1)/a) > 0."""
    if not 0 <= gamma < 1:
        raise InputError(f"gamma is {gamma}: a map with gamma outside [0, 1) has no guarantee.")
    pull = 1 + math.sqrt(_side(shape)) * (1 + at_least("nu", nu))
    rho = 1 - gamma - pull * 2 * math.sqrt(math.pi) * noise.reduction * noise.sigma1
    if not rho > 0:
        raise InputError(
            f"The noise grows too fast with the gradient for batches of {noise.batch}: choose a "
            f"batch above {least_batch(noise, shape, gamma, nu):.6g}."
        )
    return rho


@in_doubles
def least_batch(noise: Noise, shape: tuple[int, int], gamma: float = 0.0, nu: float = 0.0) -> float:
    """The size that a batch must exceed (002, Theorem 3.5), from C_a = 2, or 1 for a = 2."""
    if not 0 <= gamma < 1:
        raise InputError(f"gamma is {gamma}: a map with gamma outside [0, 1) has no guarantee.")
    pull = 1 + math.sqrt(_side(shape)) * (1 + at_least("nu", nu))
    constant = (1 if noise.alpha == 2 else 2) ** (1 / noise.alpha)
    ratio = 2 * math.sqrt(math.pi) * noise.sigma1 * constant * pull / (1 - gamma)
    return ratio ** (noise.alpha / (noise.alpha - 1))


def _side(shape: tuple[int, int]) -> int:
    """d0 = min(m, n)."""
    return min(whole("rows", shape[0]), whole("columns", shape[1]))
