"""How far two runs drift apart: the recursions of the Stability note, and of other recipes.

FedMuon
-------
The two-state recursion of the Stability note, section 4.2: how a change of one gradient grows.

Other recipes
-------------
One stability recursion covers all other recipes, as far as the bounds need it.

Two coupled runs differ in one sample of client c. Let x, m, v, d >= 0 bound how far apart they are
in the model, the momentum C, the server's velocity and the global direction, and within a round y,
how differently a client has moved since it began. One local step of client i, where gradients are
g = Lg x + Delta 1{i = c} apart:

    m' = beta m + f g,   t = m' or beta m' + f g        (t: the direction; f = 1 - beta, or 1)
    s  = eta (1 - alpha) L t + eta alpha d
    x' = |1 - eta decay| x + s,   y' = y + s + eta decay x                                    (1)

Proof. C' = beta C + f G; the direction is C', in Nesterov's forms beta C' + f G; the step is
X' = (1 - eta decay) X - eta ((1 - alpha) Orth(direction) + alpha D). Each line is the triangle
inequality, with ||Orth(M) - Orth(M')|| <= L ||M - M'||; without a map L = 1, without momentum
beta = 0 and f = 1. For y it is applied to X' - X.

A round begins on every client from x, d, y = 0, and m, or 0 where momentum begins afresh on both
sides (Local Muon). With the weights w_i >= 0, sum 1, of the server's average (1/K, or by n_i: the
sizes do not change) it ends in

    x+ = sum w_i x_i + b v,  v+ = b v + sum w_i y_i,  m+ = sum w_i m_i,
    d+ = sum w_i y_i / (eta E)                                                                (2)

Proof. FedAvgM has V+ = b V + (mean - X), X+ = X + V+ = mean + b V, and mean - X is the average of
what clients moved; b = 0 is the plain mean. D+ = (X - mean) / (eta E) (001, Remark 3.2).

(1) and (2) are linear with coefficients >= 0, so they stay bounds by induction; clients that are
not c all obey them without Delta. So, with a_{s,k} = the first component of what a unit Delta at
round s, step k alone becomes after all later steps and rounds,

    ||X^R(S) - X^R(S')||_F <= Delta sum_s w_{s,c} 1{c in C_s} sum_k a_{s,k}.

They are had from the end backwards, as rows (1 + x, m, v, d) times the matrices of (1) and (2);
the difference x from 1 is what is held, as it keeps the digits of small increments, or with decay,
where the row shrinks, from 0. FedMuon is the case of `recursion`.

Alignment
---------
FedMuon with local-global alignment (Stability note, Remark 3.2) is a case of the recursion above.
The paper leaves the perturbation of the global direction D to "a separate recursion"; the proof
above covers it, with alpha the `alignment`. `fedmuon bound` and `fedmuon stability` use it for the
recipe `fedmuon-aligned`. `aligned_amplification` is for callers who have numbers and no config.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import at_least, entries, memory, positive, values, whole
from fedmuon.core.errors import InputError

Steps = float | np.ndarray  # a number, or one for each local step: [R, E] or [R E]

# What an overflow is, and its mend.
OVERFLOW = (
    "the amplification exceeds 1e308: shorten the horizon, lower lr, or use an orthogonalization "
    "with a smaller Lipschitz constant."
)


def transition(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """Return one local step of the stability recursion (Stability note, eq. (6) and (7)).

    The step acts on (||dX||, ||dM||), the distances between two runs in model and momentum.

    Args:
        lr: Step size eta.
        beta: Momentum.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness Lg of the loss.

    Returns:
        The matrix A [2, 2], and the vector b [2] that a unit change of one gradient adds.
    """
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
    """Return how far a unit change of a client's gradients in one round moves the final model.

    This is a_s = e1^T A^{E(R-1-s)} (sum_k A^k) b of the Stability note, eq. (8).

    Args:
        lr: Step size eta.
        beta: Momentum.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness Lg of the loss.
        rounds: Number of rounds R.
        local_steps: Number of local steps E in a round.

    Returns:
        a_s for each round s, [R]; infinite where it overflows a double.
    """
    return of_rounds(step_amplification(lr, beta, l_orth, l_g, rounds, local_steps))


def of_rounds(steps: np.ndarray) -> np.ndarray:
    """a_s = sum_k a_{s,k}, [R], from [R, E]."""
    with np.errstate(over="ignore"):
        return steps.sum(axis=1)


def spectral_radius(lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """Return rho(A) in closed form (Stability note, Proposition K.1), by det A = beta."""
    growth = _growth(lr, beta, l_orth, l_g)
    root = math.hypot(1 - beta + growth, 2 * math.sqrt(beta * growth))
    return (1 + beta + growth + root) / 2


def spectral_radius_bound(lr: float, l_orth: float, l_g: float) -> float:
    """Return 1 + eta L Lg >= rho(A), for every beta (Stability note, Proposition K.1)."""
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


FORMS = ("ema", "ema-nesterov", "polyak", "nesterov")
Row = tuple[float, float, float, float]  # of x (its difference from 1), m, v, d


@dataclass(frozen=True)
class Method:
    """A federated recipe, as the stability recursion sees it.

    Attributes:
        beta: Momentum.
        form: Form of the momentum, one of `FORMS`.
        decay: Weight decay.
        afresh: Whether the momentum is reset at the start of each round.
        server: Momentum b of the server.
        alignment: Share alpha of the global direction in a step.
    """

    beta: float
    form: str = "ema"
    decay: float = 0.0
    afresh: bool = False
    server: float = 0.0
    alignment: float = 0.0

    def __post_init__(self) -> None:
        memory(self.beta)
        at_least("decay", self.decay)
        at_least("server", self.server)
        if self.form not in FORMS:
            raise InputError(f"form is {self.form!r}: use one of {', '.join(FORMS)}.")
        if not 0 <= self.alignment <= 1:
            raise InputError(f"alignment = {self.alignment} is refused: it is a share in [0, 1].")

    @property
    def fresh(self) -> float:
        """f: what a gradient weighs in the momentum."""
        return 1 - self.beta if self.form.startswith("ema") else 1.0

    @property
    def looks_ahead(self) -> bool:
        """Whether the direction is Nesterov's."""
        return self.form.endswith("nesterov")


def method_amplification(
    method: Method, rates: np.ndarray, l_orth: float, l_g: Steps, local_steps: int = 1
) -> np.ndarray:
    """a_{s,k} [R, E] for step sizes `rates` [R]; infinite where it overflows."""
    rounds, slope = len(rates), at_least("l_orth", l_orth)
    smooth = by_step(l_g, rounds, local_steps).reshape(rounds, -1)
    each = [at_least("lr", rate) for rate in rates.tolist()]
    if not method.decay and (rates == rates[0]).all() and (smooth == smooth[0, 0]).all():
        return saturated(_alike(method, each[0], slope, smooth[0].tolist(), rounds))
    one = 0.0 if method.decay else 1.0
    found, row = np.empty((rounds, local_steps)), (1 - one, 0.0, 0.0, 0.0)
    for r, curved in reversed(list(enumerate(smooth.tolist()))):
        found[r], row = _round(method, each[r], slope, curved, row, one)
    return saturated(found)


@np.errstate(over="ignore", invalid="ignore")
def _alike(
    method: Method, rate: float, l_orth: float, smooth: list[float], rounds: int
) -> np.ndarray:
    """The same where all rounds are alike, by doubling: what a round makes of each unit row."""
    unit = np.eye(4)
    starts = [(0.0, 0.0, 0.0, 0.0), *map(tuple, unit[1:].tolist())]
    made = [
        _round(method, rate, l_orth, smooth, row, float(j == 0)) for j, row in enumerate(starts)
    ]
    change = np.array([row for _, row in made]) - np.diag([0.0, 1.0, 1.0, 1.0])
    kicks = np.array([found for found, _ in made])
    return (kicks[0] + first_rows(change, rounds) @ kicks)[::-1]


def _round(
    method: Method, rate: float, l_orth: float, smooth: list[float], after: Row, one: float
) -> tuple[list[float], Row]:
    """a_k of a round, and the row before it, from the row after it, whose first entry is one + x,
    as is that of the row before it."""
    x, m, v, d = after
    before_v = method.server * (one + x + v)
    y = v + (d / (rate * len(smooth)) if rate else 0.0)
    push, decay = rate * (1 - method.alignment) * l_orth, rate * method.decay
    share, twice = (method.beta, 1.0) if method.looks_ahead else (1.0, 0.0)
    shrink, found, before_d = min(decay, 2 - decay), [], 0.0
    for slope in reversed(smooth):
        moved = one + x + y
        t = push * moved
        m += share * t
        g = method.fresh * (m + twice * t)
        found.append(g)
        before_d += rate * method.alignment * moved
        x, m = x - shrink * (one + x) + decay * y + slope * g, method.beta * m
    return found[::-1], (x, 0.0 if method.afresh else m, before_v, before_d)


def aligned_amplification(
    lr: float,
    beta: float,
    l_orth: float,
    l_g: float,
    rounds: int,
    local_steps: int = 1,
    alignment: float = 0.0,
) -> np.ndarray:
    """Return a_s of a run with local-global alignment (Stability note, Remark 3.2).

    With `alignment` 0 it equals `amplification`.

    Returns:
        a_s for each round s, [R]; infinite where it overflows a double.

    Raises:
        InputError: If `lr` is 0, because the global direction divides by it.
    """
    if lr == 0:
        raise InputError("lr = 0 is refused: the global direction divides by it.")
    horizon = whole("rounds", rounds), whole("local_steps", local_steps)
    entries("rounds times local_steps", horizon[0] * horizon[1])
    rates = np.full(horizon[0], positive("lr", lr))
    how = Method(beta, alignment=alignment)
    return of_rounds(method_amplification(how, rates, l_orth, l_g, horizon[1]))
