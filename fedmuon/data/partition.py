"""Partitions of samples over clients, such as Dirichlet label skew with a minimum per client.

A partition is a function with the arguments `labels`, `clients` and `rng`. The function returns an
array with the client of each sample, or a list with one array of sample indices per client. A
partition needs only a few arrays of the lengths n and N, so any number of clients N is possible.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.registry import Registry

Partition = Callable[[np.ndarray, int, np.random.Generator], Any]
PARTITIONS: Registry[Partition] = Registry()
BY_CLASS = ("dirichlet", "shards")  # partitions that divide the samples of each class


@PARTITIONS.add("dirichlet")
def dirichlet(alpha: float, minimum: int) -> Partition:
    """Return a partition that splits each class in random proportions from Dir(alpha 1_N).

    After the split, clients with fewer than `minimum` samples receive samples from the largest
    clients. If alpha is small, each client has few classes. If alpha is inf, every class is split
    evenly.

    Raises:
        InputError: When the partition is applied, if an option is out of range or there are too few
            samples.
    """

    def deal(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        n = len(labels)
        if minimum < 0:
            raise InputError(f"minimum = {minimum} is negative. Set minimum to 0 or more.")
        if clients < 1:
            raise InputError(
                f"clients = {clients} is not a valid number of clients. Set clients to 1 or more."
            )
        if not alpha > 0:
            raise InputError(
                f"[data] alpha = {alpha} is not a valid concentration: set a number above 0, or inf"
            )
        if clients * minimum > n:
            raise InputError(
                f"{clients} clients with minimum = {minimum} samples each need "
                f"{clients * minimum} train samples, but there are only {n}. Raise train, or "
                "lower minimum or clients."
            )
        if math.isinf(alpha):
            return _deal_evenly(labels, clients, rng)
        client = np.empty(n, np.int64)
        for members in _by_class(labels):
            counts = _counts(len(members), clients, alpha, rng)
            client[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
        return _fill_up(client, clients, minimum, rng)

    return deal


@PARTITIONS.add("iid")
def iid() -> Partition:
    """Return a partition that shuffles the samples and assigns them to the clients in turn.

    The numbers of samples differ by at most one between clients.
    """
    return lambda labels, clients, rng: _deal_evenly(np.zeros(len(labels), np.int64), clients, rng)


@PARTITIONS.add("shards")
def shards(per_client: int = 2) -> Partition:
    """Return a partition that sorts the samples by label and cuts them into shards.

    Each client receives `per_client` random shards, and therefore has few labels (McMahan et al.
    2017).
    """
    if per_client < 1:
        raise InputError(
            f"[federation.options] per-client = {per_client} is too small, because each client "
            "needs at least one shard: set 1 or more"
        )

    def deal(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        order = np.lexsort((rng.permutation(len(labels)), labels))
        owner = rng.permutation(np.repeat(np.arange(clients), per_client))
        client = np.empty(len(labels), np.int64)
        client[order] = np.repeat(owner, [len(p) for p in np.array_split(order, len(owner))])
        return client

    return deal


@PARTITIONS.add("quantity")
def quantity(alpha: float, minimum: int) -> Partition:
    """Return a partition with random client sizes, Dir(alpha 1_N), of at least `minimum` samples.

    Labels have no effect.
    """
    deal = dirichlet(alpha, minimum)
    return lambda labels, clients, rng: deal(np.zeros(len(labels), np.int64), clients, rng)


def clients_of_samples(found: Any, n: int, clients: int) -> np.ndarray:
    """Check the result of a partition. Return an array with the client of each sample."""
    if isinstance(found, np.ndarray) and found.ndim == 1:
        client = found
        if client.shape != (n,) or client.dtype.kind not in "iu":
            raise InputError(
                f"your partition returned an array of shape {client.shape} and type "
                f"{client.dtype}, but {n} integers are needed: the client number of each sample. "
                "Return one integer per sample."
            )
    else:
        index, client = flatten_partition(found, n)
        if len(index) != n:
            raise InputError(
                f"your partition assigns only {len(index)} of {n} samples to clients. Assign each "
                "sample to exactly one client."
            )
        client = client[np.argsort(index)]
    if (bad := (client < 0) | (client >= clients)).any():
        wrong = client[bad][0]
        raise InputError(
            f"your partition contains the client number {wrong}, but with {clients} clients the "
            f"numbers range from 0 to {clients - 1}. Use only these numbers, or change the number "
            "of clients."
        )
    return client.astype(np.int64)


def flatten_partition(parts: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Convert one array of sample indices per client to two arrays.

    The first array contains all sample indices. The second array contains the client of each
    sample.

    Raises:
        InputError: If an index is invalid or is assigned twice.
    """
    try:
        arrays = [np.asarray(part) for part in parts]
    except (TypeError, ValueError):
        raise InputError(
            f"your partition has type {type(parts).__name__} and cannot be split into arrays. "
            "Return a list with one array of sample indices for each client."
        ) from None
    if any(part.ndim == 0 for part in arrays):
        raise InputError(
            "your partition is a list of single numbers, so it is unclear whether they are "
            "clients or sample indices. Return a list with one array of sample indices per "
            "client, or a numpy array (np.array) with the client of each sample."
        )
    for client, part in enumerate(arrays):
        if part.size and part.dtype.kind not in "iu":
            raise InputError(
                f"your partition gives client {client} sample indices of type {part.dtype}, but "
                "indices must be integers. Convert the indices to integers."
            )
    index = np.concatenate([*(part.reshape(-1) for part in arrays), np.empty(0, np.int64)]).astype(
        np.int64
    )
    if (bad := (index < 0) | (index >= n)).any():
        wrong = index[bad][0]
        raise InputError(
            f"your partition contains the sample index {wrong}, but the {n} samples are numbered "
            f"from 0 to {n - 1}. Use only these indices."
        )
    unique, counts = np.unique(index, return_counts=True)
    if len(unique) < len(index):
        twice = unique[counts.argmax()]
        raise InputError(
            f"your partition assigns sample {twice} more than once. Assign each sample to exactly "
            "one client."
        )
    return index, np.repeat(np.arange(len(arrays)), [part.size for part in arrays])


def require_samples(
    client: np.ndarray, clients: int, minimum: int, names: tuple[str, ...] = ()
) -> None:
    """Raise an error if a client has no samples, or fewer samples than `minimum`.

    `names` are the names of the clients, if a column names them.
    """
    sizes = np.bincount(client, minlength=clients)
    required = max(1, minimum)
    if few := np.flatnonzero(sizes < required).tolist():
        if names:
            raise InputError(
                f"the client '{names[few[0]]}' has {sizes[few[0]]} train samples, because "
                "the other samples of this client are held out or there are none, but [data] "
                f"minimum = {minimum} requires at least {required} per client. Lower [data] test"
                + (f", set minimum to {sizes.min()}" if sizes.min() else "")
                + ", or leave out the samples of this client."
            )
        lower = f"Lower minimum to {sizes.min()}, or assign" if sizes.min() else "Assign"
        others = f" (and {len(few) - 1} others also have too few)" if few[1:] else ""
        raise InputError(
            f"client {few[0]} has {sizes[few[0]]} samples{others}, but [data] minimum = {minimum} "
            f"requires at least {required} per client. {lower} more samples to these clients."
        )


def weights(sizes: np.ndarray, kind: str) -> np.ndarray:
    """Return the weight of each client, as an array [N] with sum 1.

    With the kind `size`, the weight of client i is n_i / n, where n_i is the number of its samples
    and n is the number of all samples. With the kind `uniform`, each weight is 1 / N. In the
    Stability note, the weights are called p.
    """
    if kind == "size":
        return sizes / sizes.sum()
    if kind == "uniform":
        return np.full(len(sizes), 1 / len(sizes))
    raise InputError(
        f"[federation] risk-weights = '{kind}' does not exist: use 'size' or 'uniform'"
    )


def are_uneven(sizes: np.ndarray) -> bool:
    """Return whether the numbers of samples differ by more than a factor of 2."""
    return int(sizes.max()) > 2 * int(sizes.min())


def _by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return one array of sample indices for each class that occurs, ordered by class."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _deal_evenly(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Assign the samples to the clients in turn, class after class, in random order within a class.

    Clients differ by at most one in their number of samples, and in their number of samples of each
    class.
    """
    order = np.concatenate([rng.permutation(members) for members in _by_class(labels)])
    client = np.empty(len(labels), np.int64)
    client[order] = rng.permutation(clients)[np.arange(len(labels)) % clients]
    return client


def _counts(total: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw one count per client, in random proportions from Dir(alpha 1_N). The sum is `total`.

    A Dirichlet draw needs Gamma(alpha) variables. For small alpha, these variables underflow, and
    all of them may be 0. The code therefore uses logarithms: log Gamma(alpha) = log Gamma(alpha +
    1) - Exponential / alpha. The code computes alpha times this logarithm, which does not overflow
    even for alpha = 1e-300.

    The counts are rounded with one shared uniform offset (systematic sampling). Each count is
    therefore unbiased, and differs from its exact share by less than one. With ordinary rounding of
    nearly equal shares, the same clients would always get the remaining samples of a class.
    """
    if alpha >= 1:
        gamma = rng.standard_gamma(alpha, clients)
        shares = gamma / gamma.max()
    else:
        scaled = alpha * np.log(rng.standard_gamma(alpha + 1, clients))
        scaled -= rng.standard_exponential(clients)
        with np.errstate(over="ignore"):
            shares = np.exp((scaled - scaled.max()) / alpha)
    cumulated = np.cumsum(shares)
    ends = np.floor(cumulated / cumulated[-1] * total + rng.random()).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def _fill_up(
    client: np.ndarray, clients: int, minimum: int, rng: np.random.Generator
) -> np.ndarray:
    """Move random samples, in place, from the largest clients to clients below the minimum.

    The level tau >= minimum is the highest level with enough samples above tau to fill up all
    clients. The largest clients give their samples above tau to clients below the minimum, and end
    with tau or tau + 1 samples.
    """
    sizes = np.bincount(client, minlength=clients)
    need = np.maximum(minimum - sizes, 0)
    deficit = int(need.sum())
    if not deficit:
        return client
    # The samples above the level `low` cover the deficit; the samples above `high` do not.
    low, high = minimum, int(sizes.max())
    while high - low > 1:
        middle = (low + high) // 2
        covers = np.maximum(sizes - middle, 0).sum() >= deficit
        low, high = (middle, high) if covers else (low, middle)
    take = np.maximum(sizes - low, 0)  # from each client; then reduced until the sum is the deficit
    spared = np.flatnonzero(take)[: int(take.sum()) - deficit]
    take[spared] -= 1
    candidates = rng.permutation(np.flatnonzero(take[client] > 0))
    candidates = candidates[np.argsort(client[candidates], kind="stable")]
    starts = np.searchsorted(client[candidates], client[candidates])
    moved = candidates[np.arange(len(candidates)) - starts < take[client[candidates]]]
    client[rng.permutation(moved)] = np.repeat(np.arange(clients), need)
    return client


def require_class_labels(labels: np.ndarray, partition: str) -> None:
    """Raise an error if a partition divides samples by class, but their labels are vectors."""
    if labels.ndim != 1:
        raise InputError(
            f"[federation] partition = '{partition}' divides samples by class, but the labels have "
            f"the shape {labels.shape}. Set partition = 'iid', or save one class for each sample."
        )


# Partitioners of flwr-datasets are objects with `dataset`, `num_partitions` and `load_partition`.

COLUMN = {"partition_by": "label"}  # a partitioner option that names a column, and its value


def is_partitioner(found: Any) -> bool:
    """Return whether an object is a partitioner of flwr-datasets, or a partitioner class."""
    return hasattr(found, "load_partition")


def partitioner_clients(found: Any) -> int | None:
    """Return the number of clients for which a flwr-datasets partitioner splits samples.

    Return None if the object is not a partitioner, or if the number is known only after splitting.
    """
    if not is_partitioner(found) or isinstance(found, type):
        return None
    count = getattr(found, "_num_partitions", None)  # the public property needs a data set
    return count if isinstance(count, int) else None


def by_partitioner(partitioner: Any, labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """Split samples with a partitioner of flwr-datasets. Return the sample indices of each client.

    A copy of the partitioner splits the samples, so you can use the partitioner again. The copy
    receives a data set with the columns `label` and `index`.

    Raises:
        InputError: If the partitioner cannot split these samples over this number of clients.
    """
    try:
        # Imported here: datasets is optional.
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            "a Flower partitioner needs the package flwr-datasets, which is not installed: pip "
            "install flwr-datasets"
        ) from None
    if partitioner.is_dataset_assigned():
        raise InputError(
            "the Flower partitioner already has a data set, but it must split the samples of "
            "this run. Pass a new partitioner and do not set its attribute `dataset`."
        )
    clone = copy.deepcopy(partitioner)
    try:
        clone.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
        count = int(clone.num_partitions)
        parts = [clone.load_partition(i).with_format("numpy")["index"] for i in range(count)]
    except Exception as error:  # a partitioner may raise anything
        raise InputError(
            f"the partitioner {type(partitioner).__name__} cannot split the samples of this run "
            f"({one_line(error)}). Change the arguments of the partitioner, or pass your own "
            "partition."
        ) from error
    if len(parts) != clients:
        raise InputError(
            f"[federation] clients = {clients}, but the partitioner makes {len(parts)} parts, "
            "and each client needs one part. Make the two numbers equal."
        )
    return [np.asarray(part, np.int64) for part in parts]


def one_line(error: Exception) -> str:
    """Return the message of an error on one line.

    If the message is empty, return the error's type.
    """
    return " ".join(str(error).split())[:200] or type(error).__name__
