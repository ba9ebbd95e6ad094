"""Who holds which sample: Dirichlet label skew with a guaranteed minimum, at any scale.

Memory is a few arrays of length n and N: no client is ever a Python object.
"""

import math

import numpy as np

from fedmuon.errors import InputError


def dirichlet_partition(
    labels: np.ndarray, clients: int, alpha: float, minimum: int, rng: np.random.Generator
) -> np.ndarray:
    """The client [n] int64 of each sample, given labels [n].

    The samples of each class are dealt by proportions drawn from Dir(alpha 1_N); small alpha gives
    a client few classes, alpha = inf splits every class evenly. Clients left with fewer than
    `minimum` samples are then filled up from the largest.
    """
    _require_possible(len(labels), clients, alpha, minimum)
    if math.isinf(alpha):
        return _evenly(labels, clients, rng)
    client = np.empty(len(labels), np.int64)
    for members in _by_class(labels):
        counts = _rounded(_shares(alpha, clients, rng), len(members), rng)
        client[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
    return _filled(client, clients, minimum, rng)


def weights(sizes: np.ndarray, kind: str) -> np.ndarray:
    """p [N], which sum to 1: n_i / n for `size`, 1 / N for `uniform` (001, section 3)."""
    if kind == "size":
        return sizes / sizes.sum()
    if kind == "uniform":
        return np.full(len(sizes), 1 / len(sizes))
    raise InputError(f"[federation] weights = '{kind}' is unknown: use size or uniform")


def _require_possible(n: int, clients: int, alpha: float, minimum: int) -> None:
    if clients < 1 or minimum < 0:
        raise InputError(
            f"clients = {clients} with minimum = {minimum} samples each cannot be: "
            "use at least one client and a minimum of 0 or more"
        )
    if not alpha > 0:
        raise InputError(
            f"[data] alpha = {alpha} is no concentration: use a number above 0, or inf"
        )
    if clients * minimum > n:
        raise InputError(
            f"{clients} clients with minimum = {minimum} samples need {clients * minimum} train "
            f"samples and there are {n}: raise train, or lower minimum or clients"
        )


def _by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Indices of each class that occurs, in order of the label."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _evenly(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deal the shuffled classes one after the other like cards: sizes, and the counts of each
    class, differ by at most one between clients."""
    order = np.concatenate([rng.permutation(members) for members in _by_class(labels)])
    client = np.empty(len(labels), np.int64)
    client[order] = rng.permutation(clients)[np.arange(len(labels)) % clients]
    return client


def _shares(alpha: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """A draw of Dir(alpha 1_N) up to scale, [N], its largest entry 1.

    Gamma variables of small alpha underflow, all of them at once if N is small; in logs,
    log Gamma(alpha) = log Gamma(alpha + 1) - Exponential / alpha, nothing is lost. The sum is kept
    times alpha, so that even alpha = 1e-300 does not overflow.
    """
    if alpha >= 1:
        gamma = rng.standard_gamma(alpha, clients)
        return gamma / gamma.max()
    scaled = alpha * np.log(rng.standard_gamma(alpha + 1, clients))
    scaled -= rng.standard_exponential(clients)
    with np.errstate(over="ignore"):
        return np.exp((scaled - scaled.max()) / alpha)


def _rounded(shares: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Counts [N] that sum to `total`, each within one of its share and right in expectation.

    One uniform offset for all cumulated ends (systematic sampling): plain rounding would give the
    few samples of a class to the same clients in every class when shares are nearly equal.
    """
    cumulated = np.cumsum(shares)
    ends = np.floor(cumulated / cumulated[-1] * total + rng.random()).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def _filled(client: np.ndarray, clients: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
    """Move random samples of the largest clients to those below the minimum, in place."""
    sizes = np.bincount(client, minlength=clients)
    need = np.maximum(minimum - sizes, 0)
    deficit = int(need.sum())
    if not deficit:
        return client
    take = _surplus(sizes, minimum, deficit)
    moved = rng.permutation(_chosen(client, take, rng))
    client[moved] = np.repeat(np.arange(clients), need)
    return client


def _surplus(sizes: np.ndarray, minimum: int, deficit: int) -> np.ndarray:
    """How many samples [N] each client gives so that they sum to the deficit.

    Water-filling: what lies above the highest level tau >= minimum that covers the deficit; no
    donor falls below tau, and those above it end at tau or tau + 1.
    """
    low, high = (
        minimum,
        int(sizes.max()),
    )  # the surplus above low covers the deficit; above high not
    while high - low > 1:
        middle = (low + high) // 2
        covers = np.maximum(sizes - middle, 0).sum() >= deficit
        low, high = (middle, high) if covers else (low, middle)
    take = np.maximum(sizes - low, 0)
    spared = np.flatnonzero(take)[: int(take.sum()) - deficit]
    take[spared] -= 1
    return take


def _chosen(client: np.ndarray, take: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Indices of `take` [N] samples of each client, chosen at random."""
    held = rng.permutation(np.flatnonzero(take[client] > 0))
    held = held[np.argsort(client[held], kind="stable")]
    starts = np.searchsorted(client[held], client[held])
    return held[np.arange(len(held)) - starts < take[client[held]]]
