"""From amplification to stability: who took part, with which samples, and how much that moves.

Everything here is deterministic given the schedule and the batches. For every neighbour in client
i, ||X^R(S) - X^R(S')||_F <= Delta_i Y_i(C) (001, Appendix F).
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory import checks
from fedmuon.core.errors import InputError

# (round, client, local step, samples of the client) -> the rows in the batch; None is all of them.
# `fedmuon.federated.plan.Plan.rows` is one.
Rows = Callable[[int, int, int, int], np.ndarray | None]


def exposure(
    a: ArrayLike, schedule: ArrayLike, clients: int, shares: np.ndarray | None = None
) -> np.ndarray:
    """Y_i(C) = (1/K) sum_s a_s 1{i in C_s} (001 (9)), [N], from a [R] and a schedule [R, K]; with
    the weights `shares` [R, K] of the server's average for 1/K."""
    chosen = checks.rounds_of(schedule, clients)
    weights = checks.values("a", a, len(chosen))[:, None] * _averaged(chosen, shares)
    return np.bincount(chosen.reshape(-1), weights=weights.reshape(-1), minlength=clients)


@np.errstate(over="ignore")
def batch_exposure(
    steps: np.ndarray,
    schedule: ArrayLike,
    sizes: ArrayLike,
    rows: Rows,
    shares: np.ndarray | None = None,
) -> np.ndarray:
    """Y_i^mb(C, B) of 001, Appendix J, [N], from a_{s,k} [R, E] and the batches really drawn.

    Y_i^mb = max_j (1/K) sum_s 1{i in C_s} sum_k a_{s,k} (1/b) 1{j in B_i^{s,k}}. A row that stands
    twice in a batch counts twice. Multiply by 2 G_max: the 1/b is already inside. `shares` are as
    for `exposure`.
    """
    counts = checks.sample_sizes(sizes).astype(int)
    chosen = checks.rounds_of(schedule, len(counts))
    if steps.ndim != 2 or len(steps) != len(chosen):
        raise InputError("a_{s,k} must have shape [rounds, local steps], like the schedule.")
    checks.values("a", steps.ravel())
    loads: dict[int, np.ndarray] = {}
    averaged = _averaged(chosen, shares)
    for (s, k), step in np.ndenumerate(steps):
        for i, share in zip(chosen[s].tolist(), averaged[s].tolist(), strict=True):
            load, weight = loads.setdefault(i, np.zeros(counts[i])), step * share
            held = batch_shares(rows(s, i, k, int(counts[i])), int(counts[i]))
            load += weight * held if math.isfinite(weight) else product(held, weight)
    result = np.zeros(len(counts))
    for i, load in loads.items():
        result[i] = load.max()
    return result


def _averaged(chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    """The weights of the participants [R, K]: 1/K unless others are given."""
    return np.full(chosen.shape, 1 / chosen.shape[1]) if shares is None else shares


def by_samples(schedule: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """n_i over the sum of the cohort's n_j, [R, K]."""
    held = sizes[schedule]
    return held / held.sum(axis=1, keepdims=True)


def batch_shares(rows: np.ndarray | None, size: int) -> np.ndarray:
    """The weight of each of the client's samples in the batch mean, [n_i]."""
    if rows is None:
        return np.full(size, 1 / size)
    return np.bincount(rows, minlength=size) / len(rows)


def psi(a: ArrayLike, clients: int, per_round: int, rho: float) -> float:
    """Bound the exposure of all clients at once (Stability note, eq. (15)).

    For K < N this is Bernstein's inequality for each client and a union bound over the N clients.
    One-sided tails need log N only; the paper has log 2N, and so have we.

    Args:
        a: Amplification a_s of each round, [R].
        clients: Number of clients N.
        per_round: Number of clients K in a round.
        rho: Probability that the bound fails.

    Returns:
        Psi(rho). With probability 1 - rho, Y_i(C) <= Psi for every client i.
    """
    weights, rho = checks.values("a", a), checks.probability("rho", rho)
    clients, per_round = checks.whole("clients", clients), checks.whole("per_round", per_round)
    if per_round > clients:
        raise InputError(f"per_round = {per_round} exceeds the {clients} clients.")
    with np.errstate(over="ignore"):
        total, top = float(weights.sum()), float(weights.max())
    if per_round == clients or math.isinf(total):
        return total / clients
    share, log = per_round / clients, math.log(2 * clients) - math.log(rho)
    # Scaled by the largest weight, as the squares of a_s overflow long before a_s does.
    norm = top * math.sqrt(np.square(weights / top).sum()) if top > 0 else 0.0
    deviation = math.sqrt(2 * share * (1 - share) * log) * norm
    return (share * total + deviation + top / 3 * log) / per_round


def full_batch_sensitivity(gradient_bound: float, sizes: ArrayLike) -> np.ndarray:
    """Return the replacement sensitivity of full batches (Stability note, Lemma E.1).

    Args:
        gradient_bound: Bound G_max on the norm of every sample's gradient.
        sizes: Number of samples n_i of each client, [N].

    Returns:
        Delta_i = 2 G_max / n_i, [N].
    """
    return 2 * checks.at_least("gradient_bound", gradient_bound) / checks.sample_sizes(sizes)


def mini_batch_sensitivity(gradient_bound: float, batch: int, sizes: ArrayLike) -> np.ndarray:
    """Return the replacement sensitivity of mini-batches (Stability note, Remark 4.1).

    It holds on every path of batches. The average over batches is 2 G_max / n_i, but a single path
    can reach more. A client with at most b samples uses all of them.

    Returns:
        Delta_i = 2 G_max / min(b, n_i), [N].
    """
    used = np.minimum(checks.whole("batch", batch), checks.sample_sizes(sizes))
    return 2 * checks.at_least("gradient_bound", gradient_bound) / used


def perturbation(sensitivity: ArrayLike, exposures: ArrayLike) -> np.ndarray:
    """Return Delta_i Y_i, [N] (Stability note, Appendix F).

    No run that differs in one sample of client i ends further away than this.
    """
    moved = checks.values("sensitivity", sensitivity)
    return product(moved, checks.values("exposures", exposures, len(moved)))


def loss_stability(
    perturbations: ArrayLike, lipschitz: float, loss_bound: float = 1.0
) -> np.ndarray:
    """Return the stability of the loss (Stability note, eq. (13)).

    Returns:
        eps_i = min(B, L_loss Delta_i Y_i), [N]; B where Y_i is infinite.
    """
    moved = product(
        checks.at_least("lipschitz", lipschitz), checks.values("perturbations", perturbations)
    )
    return np.minimum(checks.at_least("loss_bound", loss_bound), moved)


def product(factor: ArrayLike, size: ArrayLike) -> np.ndarray:
    """factor times size, where infinity is a size that overflowed: 0 times it is 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.equal(factor, 0), 0.0, np.multiply(factor, size))
