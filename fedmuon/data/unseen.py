"""Clients that never train: unseen clients, and validation clients, which choose settings.

Both groups are drawn without the seed of the run. So runs with different seeds leave out the same
clients, and a client that chose a setting never measures the result.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.corpora import spread_evenly
from fedmuon.data.source import Source

TRAINING, UNSEEN, VALIDATION = "training", "unseen", "validation"


def groups(clients: int, unseen: int, validation: int) -> dict[str, np.ndarray]:
    """Return the client numbers of each group in increasing order.

    More validation clients change the training clients only, and not the unseen clients.

    Args:
        clients: Number of all clients.
        unseen: Number of unseen clients.
        validation: Number of validation clients.

    Raises:
        InputError: If no client remains for training.
    """
    if unseen + validation >= clients:
        raise InputError(
            f"[data] unseen-clients = {unseen} and validation-clients = {validation} leave no "
            f"client for training, because the data has {clients} clients. Lower them to "
            f"{clients - 1} in all, or less."
        )
    order = generator(0, Draw.UNSEEN).permutation(clients)
    ends = np.split(order, [unseen, unseen + validation])
    return dict(zip((UNSEEN, VALIDATION, TRAINING), map(np.sort, ends), strict=True))


@lru_cache(maxsize=1)
def parted(source: Source, unseen: int, validation: int) -> dict[str, Source]:
    """Divide a source into the samples of training, unseen and validation clients.

    A group without clients is left out of the result.
    Within each part, clients are numbered from 0 in the order of the source. Labels stay the same,
    except labels that are the clients, as those of text.

    Raises:
        InputError: If the clients of the samples are unknown, or no client remains for training.
    """
    if source.owner is None:
        raise InputError(
            "[data] unseen-clients and validation-clients need data with a column of clients, but "
            "[data] names no such column. Remove both keys, or use data with a column of clients."
        )
    members = groups(int(source.owner.max()) + 1, unseen, validation)
    return {name: of_clients(source, part) for name, part in members.items() if len(part)}


def of_clients(source: Source, clients: np.ndarray) -> Source:
    """Return the samples of some clients, given by their numbers in increasing order."""
    assert source.owner is not None
    rows = np.flatnonzero(np.isin(source.owner, clients))
    official = source.official_test
    if official is not None:
        official = int(np.searchsorted(rows, official))
        official = official if official < len(rows) else None
    owner = np.searchsorted(clients, source.owner[rows])
    labels = owner if np.array_equal(source.labels, source.owner) else source.labels[rows]
    return replace(
        source, inputs=source.inputs[rows], labels=labels, official_test=official, owner=owner,
        owner_names=tuple(source.owner_names[client] for client in clients if source.owner_names),
        images=None if source.images is None else source.images[rows],
    )  # fmt: skip


def some_of_each(source: Source, count: int) -> np.ndarray:
    """Return at most `count` samples in all, with about the same number of each client.

    The samples of a client are spread evenly over all of its samples. Each client has at least one.
    """
    assert source.owner is not None
    clients = np.unique(source.owner)
    each = max(1, count // len(clients))
    chosen = []
    for client in clients:
        rows = np.flatnonzero(source.owner == client)
        chosen.append(rows[spread_evenly(len(rows), each)])
    return np.concatenate(chosen)
