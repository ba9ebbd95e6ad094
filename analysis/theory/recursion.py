"""The two-state stability recursion of 001, section 4.2: how perturbations grow."""

import math

import numpy as np

from fedmuon.analysis.theory.checks import at_least, entries, memory, values, whole

Steps = float | np.ndarray  # a number, or one for each local step: [R, E] or [R E]

# What an overflow is, and its mend.
OVERFLOW = (
    "the amplification exceeds 1e308: shorten the horizon, lower lr, or use an orthogonalization "
    "with a smaller Lipschitz constant."
)


def transition(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """A and b of 001 (6), (7): one local step on (||dX||, ||dM||), and a unit gradient's kick."""
    matrix, kick = increment(lr, beta, l_orth, l_g)
    matrix[0, 0] += 1
    matrix[1, 1] = beta  # adding 1 back would lose a small beta
    return matrix, kick


def step_amplification(
    lr: float, beta: float, l_orth: float, l_g: Steps, rounds: int, local_steps: int = 1
) -> np.ndarray:
    """a_{s,k} = e1^T A^{E(R-1-s)+E-1-k} b of 001, Appendix J: a [R, E] array.

    How far a unit perturbation of one gradient, in round s at local step k, moves X^R; infinite
    where that overflows a double. With one l_g for each step, [R, E] or [R E], it is that of
    `scheduled_amplification`.
    """
    rounds, local_steps = whole("rounds", rounds), whole("local_steps", local_steps)
    if isinstance(l_g, np.ndarray):
        return scheduled_amplification(lr, beta, l_orth, l_g, np.ones(rounds), local_steps)
    change, kick = increment(lr, beta, l_orth, l_g)
    entries("rounds times local_steps", rounds * local_steps)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = first_rows(change, rounds * local_steps)
        backwards = kick[0] + moved @ kick
    return saturated(backwards)[::-1].reshape(rounds, local_steps)


def scheduled_amplification(
    lr: float, beta: float, l_orth: float, l_g: Steps, factors: np.ndarray, local_steps: int = 1
) -> np.ndarray:
    """The same [R, E] with step size lr factors[r] in round r, and with l_g by step, if given so.

    a_t = e1^T A_{T-1} ... A_{t+1} b_t, from the last step backwards. Held is the difference (x, m)
    of the row e1^T A_{T-1} ... A_{t+1} from e1^T, which keeps the digits of small increments, as
    in `first_rows`. The proof of 001 (6) compares two runs at one step and asks for an l_g that
    holds where they then are, so each step may have its own.
    """
    rounds, local_steps = len(factors), whole("local_steps", local_steps)
    smooth = by_step(l_g, rounds, local_steps).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        push = at_least("lr", lr) * at_least("l_orth", l_orth) * np.repeat(factors, local_steps)
    found, fresh, x, m = np.empty(len(smooth)), 1 - memory(beta), 0.0, 0.0
    for t, step in reversed(list(enumerate(push.tolist()))):
        kicked = fresh * (step * (1 + x) + m)
        x, m, found[t] = x + smooth[t] * kicked, beta * (step * (1 + x) + m), kicked
    return saturated(found).reshape(rounds, local_steps)


def by_step(l_g: Steps, rounds: int, local_steps: int) -> np.ndarray:
    """A number, such as l_g, for each of the R E steps."""
    if isinstance(l_g, np.ndarray):
        return values("l_g", l_g.ravel(), rounds * local_steps)
    return np.full(rounds * local_steps, at_least("l_g", l_g))


def amplification(
    lr: float, beta: float, l_orth: float, l_g: float, rounds: int, local_steps: int = 1
) -> np.ndarray:
    """a_s of 001 (8), [R]: a unit perturbation of all of a client's gradients in round s.

    a_s = e1^T A^{E(R-1-s)} (sum_k A^k) b = sum_k a_{s,k}.
    """
    return of_rounds(step_amplification(lr, beta, l_orth, l_g, rounds, local_steps))


def of_rounds(steps: np.ndarray) -> np.ndarray:
    """a_s = sum_k a_{s,k}, [R], from [R, E]."""
    with np.errstate(over="ignore"):
        return steps.sum(axis=1)


def spectral_radius(lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """rho(A) in closed form (001, Proposition K.1); det A = beta gives the discriminant."""
    growth = _growth(lr, beta, l_orth, l_g)
    root = math.hypot(1 - beta + growth, 2 * math.sqrt(beta * growth))
    return (1 + beta + growth + root) / 2


def spectral_radius_bound(lr: float, l_orth: float, l_g: float) -> float:
    """1 + eta L Lg >= rho(A), for every beta (001, Proposition K.1)."""
    return 1 + at_least("lr", lr) * at_least("l_orth", l_orth) * at_least("l_g", l_g)


def first_rows(increment: np.ndarray, count: int) -> np.ndarray:
    """e1^T ((I + increment)^j - I) for j = 0 .. count-1, a [count, d] array, by doubling.

    With D_m = (I + increment)^m - I one has D_{m+j} = D_m + D_j + D_j D_m. Powers of A itself
    would lose the digits of a small increment when 1 is added, and lose them again at each of 10^6
    steps; D keeps them. Each doubling is one vectorized product.
    """
    rows, power, done = np.zeros((count, len(increment))), increment, 1
    while done < count:
        first = rows[: min(done, count - done)]
        rows[done : 2 * done] = power[0] + first + first @ power
        power, done = 2 * power + power @ power, 2 * done
    return rows


def saturated(amplified: np.ndarray) -> np.ndarray:
    """Infinity wherever something overflowed on the way: an upper bound, whatever the number is."""
    return np.where(np.isfinite(amplified), amplified, np.inf)


def increment(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """A - I and b."""
    push, fresh = lr * l_orth, 1 - memory(beta)
    growth = _growth(lr, beta, l_orth, l_g)
    return np.array([[growth, push * beta], [fresh * l_g, -fresh]]), np.array([push * fresh, fresh])


def _growth(lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """c = eta L (1 - beta) Lg of Proposition K.1."""
    push = at_least("lr", lr) * at_least("l_orth", l_orth)
    return push * (1 - memory(beta)) * at_least("l_g", l_g)
