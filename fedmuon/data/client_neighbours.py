"""Neighbouring data sets that differ in a whole client.

A neighbouring data set replaces all samples of one client, or leaves the client without samples.
The client keeps its number of samples, its place in the schedule and its weight, so all draws of a
run stay the same.

A client without samples takes part in the same rounds, and its gradient is 0 at every local step.
A sample of zeros has this property in the matrix task, because the gradient of the sample u is
u s^T. The other meanings of "removed" change more than the samples: if the client returns the
model that it received, or if the server averages fewer replies, the momentum of the client or the
weights of the others change too. No certificate covers these changes.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Law, drawn_replacement, replacement_pool
from fedmuon.data.source import Source

CLIENT_ROWS = "client-rows"  # the name of `ClientNeighbours.rows` in a message to a client
COLUMNS = 5  # data set, client, position, replacement, label
SAME = -1  # in the column `label`: the label that the source has for the replacement
NOTHING = -1  # in the column `replacement`: a sample of zeros


@dataclass(frozen=True)
class ClientNeighbours:
    """S data sets. Data set 0 is the original, and each other one replaces samples of one client.

    The T replaced samples of all data sets stand one after the other.

    Attributes:
        data_set: The number of the data set [T], int64.
        client: The client [T] whose sample is replaced, int64.
        position: The position [T] of the replaced sample among the client's samples, int64.
        replacement: The index [T] of the replacement in the source, or `NOTHING`, int64.
        label: The label [T] of the replacement, or `SAME`, int64.
        inputs: Normalized replacements [T, d].
        labels: Labels [T, ...] of the replacements.
        count: The number of data sets S.
    """

    data_set: np.ndarray
    client: np.ndarray
    position: np.ndarray
    replacement: np.ndarray
    label: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    count: int
    message: ClassVar[str] = CLIENT_ROWS
    several: ClassVar[bool] = True  # a data set may replace more than one sample

    @property
    def rows(self) -> np.ndarray:
        """The data sets as an array [T, 5], which the method `of` accepts."""
        columns = self.data_set, self.client, self.position, self.replacement, self.label
        return np.stack(columns, 1)

    @classmethod
    def of(
        cls, source: Source, rows: np.ndarray, count: int, normalize: str = "unit"
    ) -> "ClientNeighbours":
        """Create the data sets from an array [T, 5] with the columns of `rows`."""
        data_set, client, position, replacement, label = rows.T.copy()
        stored = replacement != NOTHING
        inputs = np.zeros((len(rows), int(np.prod(source.inputs.shape[1:]))))
        inputs[stored] = source.rows(normalize, replacement[stored])
        labels = np.zeros((len(rows), *source.labels.shape[1:]), source.labels.dtype)
        labels[stored] = source.labels[replacement[stored]]
        labels[label != SAME] = label[label != SAME]
        return cls(data_set, client, position, replacement, label, inputs, labels, count)

    def of_client(self, client: int) -> tuple[np.ndarray, ...]:
        """Return the replacements in the data of one client, as `Neighbours.of_client` does."""
        rows = np.flatnonzero(self.client == client)
        return self.data_set[rows], self.position[rows], self.inputs[rows], self.labels[rows]


def draw_clients(
    data: FederatedData, source: Source, trials: int, seed: int, law: Law = "own"
) -> list[np.ndarray]:
    """Draw random neighbours. Each neighbour replaces all samples of a random client.

    Each entry of the result is an array [n_i, 4] with the columns client, position, replacement and
    label. A held-out sample may replace several samples. Trial t depends only on (seed, t).

    Args:
        data: The original data set.
        source: The source of the original data set.
        trials: Number of neighbours.
        seed: Seed of the draws.
        law: `own` draws each label from the labels of the client, and `any` draws it from the
            labels of all clients.

    Raises:
        InputError: If no held-out sample has a drawn label.
    """
    pool, clients, drawn = replacement_pool(data, source), np.flatnonzero(data.sizes), []
    for t in range(trials):
        rng = generator(seed, Draw.NEIGHBOUR, round=t, block=5)
        drawn.append(_replaced(data, pool, int(rng.choice(clients)), rng, law))
    return drawn


def every_client(data: FederatedData, source: Source, seed: int) -> list[np.ndarray]:
    """Return one neighbour for each client that has samples, with entries as in `draw_clients`."""
    pool, drawn = replacement_pool(data, source), []
    for client in np.flatnonzero(data.sizes).tolist():
        rng = generator(seed, Draw.NEIGHBOUR, round=client, block=6)
        drawn.append(_replaced(data, pool, client, rng, "own"))
    return drawn


def without_samples(data: FederatedData, client: int) -> np.ndarray:
    """Return the neighbour in which this client has no samples, as an array [n_i, 4]."""
    return same_for_all(data, client, NOTHING, SAME)


def same_for_all(data: FederatedData, client: int, replacement: int, label: int) -> np.ndarray:
    """Return the neighbour in which one sample replaces all samples of a client."""
    position = np.arange(data.sizes[client])
    columns = (np.full_like(position, value) for value in (client, replacement, label))
    first, *others = columns
    return np.stack([first, position, *others], 1)


def relabelled(data: FederatedData, client: int, label: int) -> np.ndarray:
    """Return the neighbour in which all samples of a client get this label."""
    rows = same_for_all(data, client, NOTHING, label)
    start = data.offsets[client]
    rows[:, 2] = data.train_index[data.order[start : start + len(rows)]]
    return rows


def stack_clients(
    source: Source, drawn: list[np.ndarray], normalize: str = "unit"
) -> ClientNeighbours:
    """Return T + 1 data sets: the original data set, then the T neighbours in `drawn`."""
    data_set = np.repeat(np.arange(1, len(drawn) + 1), [len(rows) for rows in drawn])
    rows = np.concatenate([data_set[:, None], np.concatenate(drawn)], 1)
    return ClientNeighbours.of(source, rows, len(drawn) + 1, normalize)


def require_known(rows: np.ndarray, client: int, samples: int, source: Source, count: int) -> None:
    """Raise InputError if rows from a message do not fit the data of this node."""
    own = rows[rows[:, 1] == client]
    classes = max(1, source.classes)
    limits = np.array([count, client + 1, samples, len(source.labels), classes])
    lowest = np.array([1, client, 0, NOTHING, SAME])
    if not ((own >= lowest) & (own < limits)).all():
        raise InputError(
            f"a message from the server replaces samples of client {client} by samples or labels "
            f"that this node does not have. The client has {samples} samples, and the data source "
            f"has {len(source.labels)} samples of {classes} classes, all numbered from 0. Use the "
            "same data on the server and on every node."
        )


def _replaced(
    data: FederatedData,
    pool: list[np.ndarray],
    client: int,
    rng: np.random.Generator,
    law: Law,
) -> np.ndarray:
    """Return a neighbour with new samples for each sample of this client."""
    rows = same_for_all(data, client, NOTHING, SAME)
    rows[:, 2] = [drawn_replacement(data, pool, client, rng, law) for _ in rows]
    return rows
