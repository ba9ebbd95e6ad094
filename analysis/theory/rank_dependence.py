"""Nuclear-norm stationarity of Muon, by Newton-Schulz or SVD, and of SGD with momentum (004).

Norms: f is L-smooth from ||.||_op to ||.||_*, D = f(X_0) - f*, r bounds the rank, samples have
E ||G - grad||_F^2 <= sigma^2, B of them make a batch, and the momentum is M <- beta M + (1 - beta)
G from 0. With C the same average of the true gradients, S = grad - M = (grad - C) + (C - M):

- (C - M) is (1 - beta) sum_s beta^(t-s) xi_s, so E ||C - M||_F^2 <= (1 - beta)/(1 + beta)
  sigma^2/B.
- A_t = grad f(X_t) - C_t obeys A_t = beta (A_{t-1} + grad f(X_t) - grad f(X_{t-1})) and
  A_0 = beta grad f(X_0), where ||grad f(X_0)||_* <= sqrt(2 L D) by smoothness.

Constants follow 004's proofs, in a form that keeps beta; each function says how.
"""

import math

from fedmuon.analysis.theory.checks import at_least, in_doubles, whole
from fedmuon.analysis.theory.schedules import Schedule
from fedmuon.analysis.theory.stationarity import Stationarity, slowdown_of
from fedmuon.core.errors import InputError

SMOOTH = "||grad f(X) - grad f(Y)||_* <= L ||X - Y||_op, f is bounded below (004, Assumption 1)."
VARIANCE = "Batches are independent and unbiased, E|G - grad|_F^2 <= sigma^2 each (Assumption 2)."
AVERAGE = "M <- beta M + (1 - beta) G from M = 0; only its direction reaches a polar factor."
POLAR = "Every step uses Z of ||Z||_op <= 1 within eps of the polar factor (Definition 3)."
TAYLOR = "Taylor steps from M / ||M||_F keep ||Z||_op <= 1; others may not (Proposition 1)."
MEASURE = "(1/T) sum_t E ||grad f(X_t)||_*"


def muon(
    schedule: Schedule,
    gap: float,
    smoothness: float,
    sigma: float,
    rank: int,
    batch: int = 1,
    polar_error: float = 0.0,
) -> Stationarity:
    """004, Theorem 1 for eps_q = `polar_error`; 0 is the SVD of Theorem 4. X <- X - eta Z.

    Descent: <grad, Z> = <M, Z> + <S, Z> >= (1 - eps)||M||_* - ||S||_*, ||M||_* >= ||grad||_* -
    ||S||_*, and ||X_{t+1} - X_t||_op <= eta. Sum, divide by eta T (1 - eps): chi times D/(eta T) +
    L eta/2 + (2 - eps) mean ||S||_*. There ||A_t||_* <= beta (||A_{t-1}||_* + L eta), and the
    nuclear norm of C - M is at most sqrt(r) times its Frobenius norm.
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
    stood_on = (SMOOTH, VARIANCE, AVERAGE, POLAR) + ((TAYLOR,) if polar_error else ())
    return Stationarity(MEASURE, sum(terms.values()), terms, schedule, 1 / chi, stood_on)


@in_doubles
def sgd_momentum(
    schedule: Schedule, gap: float, smoothness: float, sigma: float, rank: int, batch: int = 1
) -> Stationarity:
    """004, Theorem 3: X <- X - eta M, where the whole bound carries sqrt(r).

    Descent: f falls by (eta/2)(||grad||_F^2 - ||S||_F^2 + (1 - L eta)||M||_F^2) at least. Young's
    inequality gives ||A_t||^2 <= beta ||A_{t-1}||^2 + beta^2/(1 - beta) (L eta)^2 ||M_{t-1}||_F^2,
    and ||S||^2 <= 2 ||A||^2 + 2 ||C - M||^2. For L eta <= (1 - beta)/2 the sum of the ||M||^2 has
    2 beta^2 (L eta)^2/(1 - beta)^2 <= 1 - L eta against it and drops out. What is left bounds the
    mean of ||grad||_F^2; its root times sqrt(r) bounds the mean nuclear norm. The `terms` are
    shares of the value, in the proportion of the squares.
    """
    eta, beta, steps = _checked(schedule, gap, smoothness, sigma, rank, batch)
    if smoothness * eta > (1 - beta) / 2 * (1 + 1e-12):
        raise InputError(
            f"lr is {eta:g}: the theorem asks for lr <= (1 - beta)/(2 L) = "
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
    assumptions = (SMOOTH, VARIANCE, AVERAGE, "L eta <= (1 - beta)/2.")
    return Stationarity(MEASURE, value, terms, schedule, 1.0, assumptions)


def _checked(
    schedule: Schedule, gap: float, smoothness: float, sigma: float, rank: int, batch: int
) -> tuple[float, float, int]:
    """eta, beta and T, once every constant is a number that the theorems know."""
    for name, value in (("gap", gap), ("smoothness", smoothness), ("sigma", sigma)):
        at_least(name, value)
    whole("rank", rank)
    whole("batch", batch)
    return schedule.checked()
