"""The stability recursion: a bound on the distance between two runs, and client exposures.

FedMuon
-------
`step_amplification` is the two-state recursion of the Stability note, section 4.2. The recursion
bounds the change of the final model if one gradient changes.

Other optimizers
----------------
`method_amplification` is one recursion for all optimizers that the bounds cover, including FedMuon.

Consider two coupled runs that differ in one sample of client c. Let x, m, v, d >= 0 bound the
distances between the two models, the two momenta C, the two velocities of the server, and the two
global directions. Within a round, let y bound the difference between a client's updates (changes of
its model since the start of the round) in the two runs. The gradients differ by at most g = Lg x +
Delta 1{i = c}. One local step of client i is

    m' = beta m + f g,   t = m' or beta m' + f g        (t: the direction; f = 1 - beta, or 1)
    s  = eta (1 - alpha) L t + eta alpha d
    x' = |1 - eta decay| x + s,   y' = y + s + eta decay x                                    (1)

Proof. C' = beta C + f G. The direction is C', or beta C' + f G in Nesterov forms. The step is
X' = (1 - eta decay) X - eta ((1 - alpha) Orth(direction) + alpha D). Each line is the triangle
inequality, with ||Orth(M) - Orth(M')|| <= L ||M - M'||. Without an orthogonalizer L = 1, and
without momentum beta = 0 and f = 1. For y the triangle inequality is applied to X' - X.

On every client, a round starts with the x and d of the previous round and y = 0. The round also
starts with the previous m, or with m = 0 if both runs reset the momentum (Local Muon). The server
averages with weights w_i >= 0, which sum to 1 and are the same in both runs. The weights are 1/K,
or proportional to n_i. The round ends in

    x+ = sum w_i x_i + b v,  v+ = b v + sum w_i y_i,  m+ = sum w_i m_i,
    d+ = sum w_i y_i / (eta E)                                                                (2)

Proof. FedAvgM sets V+ = b V + (mean - X) and X+ = X + V+ = mean + b V. mean - X is the average of
the clients' updates. b = 0 is the plain mean. D+ = (X - mean) / (eta E) (Stability note, Remark
3.2).

(1) and (2) are linear with coefficients >= 0, so they remain bounds by induction. All clients other
than c satisfy (1) with Delta = 0. Set Delta = 1 at round s and step k, and Delta = 0 at all other
steps. Let a_{s,k} be the value of x after the last round for w_{s,c} = 1. Then

    ||X^R(S) - X^R(S')||_F <= Delta sum_s w_{s,c} 1{c in C_s} sum_k a_{s,k}.

The code computes a_{s,k} backwards from the end, as rows (1 + x, m, v, d) times the matrices of (1)
and (2). The code stores x, the difference of the first entry from 1, to preserve the digits of
small increments. With weight decay, the first entry shrinks, and the code stores the entry itself.

Alignment
---------
FedMuon with local-global alignment (Stability note, Remark 3.2) is a case of the recursion above.
The paper says that the perturbation of the global direction D needs "a separate recursion". The
proof above covers this perturbation. The config key `alignment` sets alpha. `fedmuon bound` and
`fedmuon stability` use this recursion for the recipe `fedmuon-aligned`. Without a config, call
`aligned_amplification`.

Participation
-------------
Given the schedule and the batches, the run is deterministic. For every neighbour in client i,
||X^R(S) - X^R(S')||_F <= Delta_i Y_i(C), with sensitivity Delta_i and exposure Y_i (Stability note,
Appendix F).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.checks import (
    at_least,
    entries,
    memory,
    positive,
    probability,
    rounds_of,
    sample_sizes,
    values,
    whole,
)
from fedmuon.core.errors import InputError

Steps = float | np.ndarray  # one number, or one number per local step: [R, E] or [R E]

OVERFLOW = (
    "the amplification exceeds 1e308. Use fewer steps, a smaller lr, or an orthogonalizer with a "
    "smaller Lipschitz constant."
)


def transition(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """Return one local step of the stability recursion (Stability note, eqs. (6) and (7)).

    The step acts on (||dX||, ||dM||), the distances between the models and the momenta of two runs.

    Args:
        lr: Step size η.
        beta: Momentum β.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss.

    Returns:
        The matrix A `[2, 2]`, and the vector b `[2]` that a unit change of one gradient adds.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import transition
        >>> matrix, vector = transition(lr=0.1, beta=0.5, l_orth=2.0, l_g=1.0)
        >>> matrix.tolist(), vector.tolist()
        ([[1.1, 0.1], [0.5, 0.5]], [0.1, 0.5])
    """
    matrix, kick = increment(lr, beta, l_orth, l_g)
    matrix[0, 0] += 1
    matrix[1, 1] = beta  # adding 1 back would lose a small beta
    return matrix, kick


def step_amplification(
    lr: float, beta: float, l_orth: float, l_g: Steps, rounds: int, local_steps: int = 1
) -> np.ndarray:
    """Return how far a unit change of one gradient at one step moves the final model.

    The result is a_{s,k} = e1^T A^{E(R-1-s)+E-1-k} b of the Stability note, Appendix J.

    Args:
        lr: Step size η.
        beta: Momentum β.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss, one number or one per step `[R, E]` or `[R E]`.
        rounds: Number of rounds R.
        local_steps: Number of local steps E in a round.

    Returns:
        a_{s,k} `[R, E]`; entries that overflow a double are infinite.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import step_amplification
        >>> step_amplification(0.1, 0.5, 2.0, 1.0, rounds=2).round(3).tolist()
        [[0.16], [0.1]]
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
    """Return `step_amplification` for a step size that changes between rounds.

    The step size in round r is lr factors[r], and the result has shape [R, E]. `l_g` may be one
    number or one number per step, because the proof of eq. (6) of the Stability note treats one
    step at a time. The proof requires only an l_g that is valid for the two models at this step.

    The loop computes a_t = e1^T A_{T-1} ... A_{t+1} b_t backwards from the last step t = T-1. The
    loop stores (x, m), the difference of the row e1^T A_{T-1} ... A_{t+1} from e1^T. Storing 1 + x
    instead would lose the digits of small increments.
    """
    rounds, local_steps = len(factors), whole("local_steps", local_steps)
    smooth = by_step(l_g, rounds, local_steps).tolist()
    with np.errstate(over="ignore", invalid="ignore"):
        push = at_least("lr", lr) * at_least("l_orth", l_orth) * np.repeat(factors, local_steps)
    effects, fresh, x, m = np.empty(len(smooth)), 1 - memory(beta), 0.0, 0.0
    for t, step in reversed(list(enumerate(push.tolist()))):
        kicked = fresh * (step * (1 + x) + m)
        x, m, effects[t] = x + smooth[t] * kicked, beta * (step * (1 + x) + m), kicked
    return saturated(effects).reshape(rounds, local_steps)


def by_step(l_g: Steps, rounds: int, local_steps: int) -> np.ndarray:
    """Return an array with one value per local step, such as l_g."""
    if isinstance(l_g, np.ndarray):
        return values("l_g", l_g.ravel(), rounds * local_steps)
    return np.full(rounds * local_steps, at_least("l_g", l_g))


def amplification(
    lr: float, beta: float, l_orth: float, l_g: float, rounds: int, local_steps: int = 1
) -> np.ndarray:
    """Return how far a unit change of a client's gradients in one round moves the final model.

    The result is a_s = e1^T A^{E(R-1-s)} (sum_k A^k) b of the Stability note, eq. (8).

    Args:
        lr: Step size η.
        beta: Momentum β.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss.
        rounds: Number of rounds R.
        local_steps: Number of local steps E in a round.

    Returns:
        a_s `[R]`; entries that overflow a double are infinite.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import amplification
        >>> amplification(0.1, 0.5, 2.0, 1.0, rounds=2).round(3).tolist()
        [0.16, 0.1]
    """
    return of_rounds(step_amplification(lr, beta, l_orth, l_g, rounds, local_steps))


def of_rounds(steps: np.ndarray) -> np.ndarray:
    """Sum a_{s,k} over the local steps k, and return the result a_s of each round."""
    with np.errstate(over="ignore"):
        return steps.sum(axis=1)


def spectral_radius(lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """Return the spectral radius ρ(A) in closed form (Stability note, Proposition K.1).

    Args:
        lr: Step size η.
        beta: Momentum β.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss.

    Returns:
        ρ(A). The proof uses det A = β.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import spectral_radius
        >>> round(spectral_radius(0.1, 0.5, 2.0, 1.0), 4)
        1.1742
    """
    growth = float(increment(lr, beta, l_orth, l_g)[0][0, 0])
    root = math.hypot(1 - beta + growth, 2 * math.sqrt(beta * growth))
    return (1 + beta + growth + root) / 2


def spectral_radius_bound(lr: float, l_orth: float, l_g: float) -> float:
    """Return 1 + η L L_g, which is at least ρ(A) for every β (Stability note, Proposition K.1).

    Args:
        lr: Step size η.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss.

    Returns:
        The bound on ρ(A).

    Raises:
        InputError: If a number is negative.

    Example:
        >>> from fedmuon.analysis import spectral_radius_bound
        >>> spectral_radius_bound(0.1, 2.0, 1.0)
        1.2
    """
    return 1 + at_least("lr", lr) * at_least("l_orth", l_orth) * at_least("l_g", l_g)


def first_rows(increment: np.ndarray, count: int) -> np.ndarray:
    """Return e1^T ((I + increment)^j - I) for j = 0 .. count-1 as an array [count, d].

    The method is doubling: D_m = (I + increment)^m - I satisfies D_{m+j} = D_m + D_j + D_j D_m, and
    each doubling is one vectorized product. Powers of A = I + increment would lose the digits of a
    small increment each time that 1 is added.
    """
    rows, power, filled = np.zeros((count, len(increment))), increment, 1
    while filled < count:
        first = rows[: min(filled, count - filled)]
        rows[filled : 2 * filled] = power[0] + first + first @ power
        power, filled = 2 * power + power @ power, 2 * filled
    return rows


def saturated(amplified: np.ndarray) -> np.ndarray:
    """Replace entries that overflowed by infinity, so that they are still upper bounds."""
    return np.where(np.isfinite(amplified), amplified, np.inf)


def increment(lr: float, beta: float, l_orth: float, l_g: float) -> tuple[np.ndarray, np.ndarray]:
    """Return A - I and b for one local step. `transition` defines A and b."""
    fresh = 1 - memory(beta)
    push = at_least("lr", lr) * at_least("l_orth", l_orth)
    growth = push * fresh * at_least("l_g", l_g)  # c of Proposition K.1
    return np.array([[growth, push * beta], [fresh * l_g, -fresh]]), np.array([push * fresh, fresh])


FORMS = ("ema", "ema-nesterov", "polyak", "nesterov")
Row = tuple[float, float, float, float]  # x (the first entry minus 1), m, v, d


@dataclass(frozen=True)
class Method:
    """The properties of a federated optimizer that the stability recursion needs.

    Attributes:
        beta: Momentum β.
        form: Form of the momentum: "ema", "ema-nesterov", "polyak" or "nesterov".
        decay: Weight decay.
        afresh: Whether the momentum is reset at the start of each round.
        server: Momentum b of the server.
        alignment: Weight α of the global direction in a step.

    Raises:
        InputError: If a number is out of range or the form is unknown.

    Example:
        >>> from fedmuon.analysis import Method
        >>> Method(beta=0.5, form="nesterov").looks_ahead
        True
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
            raise InputError(f"form is {self.form!r}, but it must be one of {', '.join(FORMS)}.")
        if not 0 <= self.alignment <= 1:
            raise InputError(f"alignment is {self.alignment}, but it must be a share in [0, 1].")

    @property
    def fresh(self) -> float:
        """The weight f of a new gradient in the momentum (module docstring, eq. (1))."""
        return 1 - self.beta if self.form.startswith("ema") else 1.0

    @property
    def looks_ahead(self) -> bool:
        """Whether the direction has a Nesterov form."""
        return self.form.endswith("nesterov")


def method_amplification(
    method: Method, rates: np.ndarray, l_orth: float, l_g: Steps, local_steps: int = 1
) -> np.ndarray:
    """Return a_{s,k} [R, E] for step sizes `rates` [R]; entries that overflow are infinite."""
    rounds, slope = len(rates), at_least("l_orth", l_orth)
    smooth = by_step(l_g, rounds, local_steps).reshape(rounds, -1)
    step_sizes = [at_least("lr", rate) for rate in rates.tolist()]
    if not method.decay and (rates == rates[0]).all() and (smooth == smooth[0, 0]).all():
        # All rounds are equal: apply one round to each unit row, then use doubling.
        starts = [(0.0, 0.0, 0.0, 0.0), *map(tuple, np.eye(4)[1:].tolist())]
        curved = smooth[0].tolist()
        with np.errstate(over="ignore", invalid="ignore"):
            results = [_before_round(method, step_sizes[0], slope, curved, row, float(j == 0))
                       for j, row in enumerate(starts)]  # fmt: skip
            change = np.array([row for _, row in results]) - np.diag([0.0, 1.0, 1.0, 1.0])
            kicks = np.array([effects for effects, _ in results])
            return saturated((kicks[0] + first_rows(change, rounds) @ kicks)[::-1])
    unit = 0.0 if method.decay else 1.0
    effects, row = np.empty((rounds, local_steps)), (1 - unit, 0.0, 0.0, 0.0)
    for r, curved in reversed(list(enumerate(smooth.tolist()))):
        effects[r], row = _before_round(method, step_sizes[r], slope, curved, row, unit)
    return saturated(effects)


def _before_round(
    method: Method, rate: float, l_orth: float, smooth: list[float], after: Row, base: float
) -> tuple[list[float], Row]:
    """Apply one round backwards: first (2) of the module docstring, then (1) for each local step.

    A row (base + x, m, v, d) states how far a unit distance in the model, the momentum, the
    velocity or the global direction moves the last model. A backward step is the transpose of the
    forward step: the effect of a quantity is the sum of the effects of all quantities that use it.
    The caller computes the average over clients.

    Args:
        method: The recursion of the optimizer.
        rate: Step size eta of the round.
        l_orth: Lipschitz constant L of the orthogonalizer.
        smooth: Lg of each local step.
        after: The row after the round.
        base: 1 if x is the difference of the first entry from 1, and 0 if x is the entry itself.

    Returns:
        a_k of each local step, which is the effect of a unit Delta at this step; and the row before
        the round.
    """
    x, m, v, d = after
    # By (2), the old velocity enters both the model and the new velocity with the factor b.
    before_v = method.server * (base + x + v)
    # y is the effect of a client's move in this round, through the velocity and the direction d+.
    y = v + (d / (rate * len(smooth)) if rate else 0.0)
    push, decay = rate * (1 - method.alignment) * l_orth, rate * method.decay
    # In Nesterov forms t = beta m' + f g: the momentum has the factor beta, and g enters twice.
    share, twice = (method.beta, 1.0) if method.looks_ahead else (1.0, 0.0)
    shrink = min(decay, 2 - decay)  # 1 - |1 - decay|
    effects, before_d = [], 0.0
    for slope in reversed(smooth):
        moved = base + x + y  # effect of the step s, which enters the model and the move
        t = push * moved  # effect of the direction, as s = eta (1 - alpha) L t + eta alpha d
        m += share * t  # effect of the new momentum m'
        g = method.fresh * (m + twice * t)  # effect of the gradient, and so of Delta
        effects.append(g)
        before_d += rate * method.alignment * moved
        x, m = x - shrink * (base + x) + decay * y + slope * g, method.beta * m
    return effects[::-1], (x, 0.0 if method.afresh else m, before_v, before_d)


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

    With `alignment` = 0, the result equals that of `amplification`.

    Args:
        lr: Step size η > 0. η cannot be 0, because the global direction is divided by η.
        beta: Momentum β.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss.
        rounds: Number of rounds R.
        local_steps: Number of local steps E in a round.
        alignment: Weight α of the global direction, from 0 to 1.

    Returns:
        a_s `[R]`; entries that overflow a double are infinite.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import aligned_amplification
        >>> aligned_amplification(0.1, 0.5, 2.0, 1.0, rounds=2, alignment=0.5).round(3).tolist()
        [0.103, 0.05]
    """
    if lr == 0:
        raise InputError(
            "lr is 0, but it must be positive, because the formula of the global direction "
            "divides by lr."
        )
    rounds, local_steps = whole("rounds", rounds), whole("local_steps", local_steps)
    entries("rounds times local_steps", rounds * local_steps)
    rates = np.full(rounds, positive("lr", lr))
    method = Method(beta, alignment=alignment)
    return of_rounds(method_amplification(method, rates, l_orth, l_g, local_steps))


# A function (round, client, local step, n_i) that returns the rows in the batch, or None for all
# rows. `fedmuon.federated.plan.RandomnessPlan.rows` is an example.
Rows = Callable[[int, int, int, int], np.ndarray | None]


def exposure(
    a: ArrayLike, schedule: ArrayLike, clients: int, shares: np.ndarray | None = None
) -> np.ndarray:
    """Return the exposure Y_i(C) = (1/K) sum_s a_s 1{i in C_s} of each client.

    The equation is eq. (9) of the Stability note.

    Args:
        a: Amplification a_s `[R]`.
        schedule: Participants of each round `[R, K]`, as integers.
        clients: Number of clients N.
        shares: Weights of the server's average `[R, K]`. The default is 1/K.

    Returns:
        Y_i `[N]`.

    Raises:
        InputError: If the shapes do not match.

    Example:
        >>> from fedmuon.analysis import exposure
        >>> exposure([0.2, 0.1], schedule=[[0, 1], [0, 2]], clients=4).round(3).tolist()
        [0.15, 0.1, 0.05, 0.0]
    """
    cohorts = rounds_of(schedule, clients)
    averaged = np.full(cohorts.shape, 1 / cohorts.shape[1]) if shares is None else shares
    weights = values("a", a, len(cohorts))[:, None] * averaged
    return np.bincount(cohorts.reshape(-1), weights=weights.reshape(-1), minlength=clients)


@np.errstate(over="ignore")
def batch_exposure(
    steps: np.ndarray,
    schedule: ArrayLike,
    sizes: ArrayLike,
    rows: Rows,
    shares: np.ndarray | None = None,
) -> np.ndarray:
    """Return the exposure Y_i^mb for the mini-batches that were drawn (Stability note, Appendix J).

    Y_i^mb = max_j (1/K) sum_s 1{i in C_s} sum_k a_{s,k} (1/b) 1{j in B_i^{s,k}}. A row that appears
    twice in a batch counts twice. To get a certificate, multiply the result by 2 G_max. The factor
    1/b is already included.

    Args:
        steps: Amplification a_{s,k} `[R, E]`.
        schedule: Participants of each round `[R, K]`, integers.
        sizes: Number of samples n_i of each client `[N]`.
        rows: Function `(round, client, local step, n_i)` that returns the rows in the batch, or
            None if every batch contains all rows.
        shares: Weights of the server's average `[R, K]`; 1/K by default.

    Returns:
        Y_i^mb `[N]`.

    Raises:
        InputError: If the shapes do not match.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import batch_exposure
        >>> first = lambda round, client, step, size: np.array([0, 1])
        >>> batch_exposure(np.array([[0.2]]), [[0, 1]], sizes=[4, 4], rows=first).tolist()
        [0.05, 0.05]
    """
    counts = sample_sizes(sizes).astype(int)
    cohorts = rounds_of(schedule, len(counts))
    if steps.ndim != 2 or len(steps) != len(cohorts):
        raise InputError(
            f"steps has shape {steps.shape}, but the amplification must have one row for each of "
            f"the {len(cohorts)} rounds of the schedule, and one column for each local step."
        )
    values("a", steps.ravel())
    loads: dict[int, np.ndarray] = {}
    averaged = np.full(cohorts.shape, 1 / cohorts.shape[1]) if shares is None else shares
    for (s, k), step in np.ndenumerate(steps):
        for i, share in zip(cohorts[s].tolist(), averaged[s].tolist(), strict=True):
            size = int(counts[i])
            load, weight = loads.setdefault(i, np.zeros(size)), step * share
            drawn = rows(s, i, k, size)
            fractions = (
                np.full(size, 1 / size)
                if drawn is None
                else np.bincount(drawn, minlength=size) / len(drawn)
            )
            load += weight * fractions if math.isfinite(weight) else product(fractions, weight)
    result = np.zeros(len(counts))
    for i, load in loads.items():
        result[i] = load.max()
    return result


def by_samples(schedule: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the server's weights for an average in proportion to n_i, as an array [R, K]."""
    counts = sizes[schedule]
    return counts / counts.sum(axis=1, keepdims=True)


def psi(a: ArrayLike, clients: int, per_round: int, rho: float) -> float:
    """Return Ψ(ρ): with probability 1 - ρ, Y_i(C) <= Ψ for every client (Stability note, eq. (15)).

    For K < N, Ψ combines Bernstein's inequality for each client with a union bound over the N
    clients.

    Args:
        a: Amplification a_s `[R]`.
        clients: Number of clients N.
        per_round: Number of participants K, drawn uniformly in each round.
        rho: Failure probability ρ.

    Returns:
        Ψ.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import psi
        >>> round(psi([0.1] * 100, clients=100, per_round=10, rho=0.01), 3)
        0.267
    """
    weights, rho = values("a", a), probability("rho", rho)
    clients, per_round = whole("clients", clients), whole("per_round", per_round)
    if per_round > clients:
        raise InputError(f"per_round is {per_round}, but it must be at most clients = {clients}.")
    with np.errstate(over="ignore"):
        total, top = float(weights.sum()), float(weights.max())
    if per_round == clients or math.isinf(total):
        return total / clients
    share, log = per_round / clients, math.log(2 * clients) - math.log(rho)
    # Scale by the largest weight, because the squares of a_s overflow long before a_s does.
    norm = top * math.sqrt(np.square(weights / top).sum()) if top > 0 else 0.0
    deviation = math.sqrt(2 * share * (1 - share) * log) * norm
    return (share * total + deviation + top / 3 * log) / per_round


def full_batch_sensitivity(gradient_bound: float, sizes: ArrayLike) -> np.ndarray:
    """Return Δ_i = 2 G_max / n_i, the sensitivity of full batches (Stability note, Lemma E.1).

    Args:
        gradient_bound: G_max, the bound on every sample's gradient.
        sizes: Number of samples n_i of each client `[N]`.

    Returns:
        Δ_i `[N]`.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import full_batch_sensitivity
        >>> full_batch_sensitivity(1.0, [100, 200]).tolist()
        [0.02, 0.01]
    """
    return 2 * at_least("gradient_bound", gradient_bound) / sample_sizes(sizes)


def mini_batch_sensitivity(gradient_bound: float, batch: int, sizes: ArrayLike) -> np.ndarray:
    """Return Δ_i = 2 G_max / min(b, n_i), the sensitivity of mini-batches.

    The source is the Stability note, Remark 4.1. The sensitivity holds for every sequence of
    batches. The average sensitivity over random batches is 2 G_max / n_i, but a single sequence of
    batches can exceed this average. A client with at most b samples uses all its samples.

    Args:
        gradient_bound: G_max, the bound on every sample's gradient.
        batch: Batch size b.
        sizes: Number of samples n_i of each client `[N]`.

    Returns:
        Δ_i `[N]`.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from fedmuon.analysis import mini_batch_sensitivity
        >>> mini_batch_sensitivity(1.0, 10, [5, 200]).tolist()
        [0.4, 0.2]
    """
    used = np.minimum(whole("batch", batch), sample_sizes(sizes))
    return 2 * at_least("gradient_bound", gradient_bound) / used


def perturbation(sensitivity: ArrayLike, exposures: ArrayLike) -> np.ndarray:
    """Return Δ_i Y_i, the certificate of each client (Stability note, Appendix F).

    If one sample of client i is replaced, the final model moves by at most Δ_i Y_i in the Frobenius
    norm.

    Args:
        sensitivity: Sensitivity Δ_i of each client `[N]`.
        exposures: Exposure Y_i of each client `[N]`.

    Returns:
        The certificates `[N]`.

    Raises:
        InputError: If the shapes do not match.

    Example:
        >>> from fedmuon.analysis import perturbation
        >>> perturbation([0.02, 0.01], [1.5, 1.0]).tolist()
        [0.03, 0.01]
    """
    moved = values("sensitivity", sensitivity)
    return product(moved, values("exposures", exposures, len(moved)))


def loss_stability(
    perturbations: ArrayLike, lipschitz: float, loss_bound: float = 1.0
) -> np.ndarray:
    """Return ε_i = min(B, L_loss Δ_i Y_i), the maximum change of a loss by a replaced sample.

    The equation is eq. (13) of the Stability note.

    Args:
        perturbations: Certificates Δ_i Y_i `[N]`.
        lipschitz: Lipschitz constant L_loss of the loss.
        loss_bound: Length B of the interval that contains all losses.

    Returns:
        ε_i `[N]`; B where the certificate is infinite.

    Raises:
        InputError: If a number is negative.

    Example:
        >>> from fedmuon.analysis import loss_stability
        >>> loss_stability([0.5, 4.0], lipschitz=0.5).tolist()
        [0.25, 1.0]
    """
    moved = product(at_least("lipschitz", lipschitz), values("perturbations", perturbations))
    return np.minimum(at_least("loss_bound", loss_bound), moved)


def product(factor: ArrayLike, size: ArrayLike) -> np.ndarray:
    """Return factor times size. The product of 0 and infinity is 0.

    An infinite `size` stands for a finite number that overflowed.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.equal(factor, 0), 0.0, np.multiply(factor, size))
