"""Neighbouring data sets, which differ from the original data set in one replaced sample.

A neighbouring data set is stored as three numbers and one replacement sample. Hundreds of
neighbouring data sets therefore share one copy of the data.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import FederatedData
from fedmuon.data.source import Source

ROWS = "rows"  # the name of `Neighbours.rows` in a message to a client
Law = Literal["own", "any"]
Pool = list[np.ndarray]  # the held-out samples of each label


@dataclass(frozen=True)
class Neighbours:
    """S data sets. In each data set, one sample of the source replaces one sample of a client.

    For the original data set, `client`, `position` and `replacement` are -1, and `inputs` and
    `labels` are zero.

    Attributes:
        client: The client [S] whose sample is replaced, int64.
        position: The position [S] of the replaced sample among the client's samples, int64.
        replacement: The index [S] of the replacement in the source, int64.
        inputs: Normalized replacements [S, d].
        labels: Labels [S, ...] of the replacements.
    """

    client: np.ndarray
    position: np.ndarray
    replacement: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    message: ClassVar[str] = ROWS
    several: ClassVar[bool] = False  # whether a data set may replace more than one sample

    @property
    def rows(self) -> np.ndarray:
        """The data sets as an array [S, 3] with the rows (client, position, replacement).

        The method `of` accepts this array.
        """
        return np.stack([self.client, self.position, self.replacement], 1)

    @property
    def count(self) -> int:
        """The number of data sets S."""
        return len(self.client)

    def of_client(self, client: int) -> tuple[np.ndarray, ...]:
        """Return the replacements in the data of one client.

        The result contains the numbers of the data sets [T], the positions [T], the inputs [T, d]
        and the labels [T, ...].
        """
        rows = np.flatnonzero(self.client == client)
        return rows, self.position[rows], self.inputs[rows], self.labels[rows]

    @classmethod
    def of(cls, source: Source, rows: np.ndarray, normalize: str = "unit") -> "Neighbours":
        """Create the data sets from an array [S, 3] with the rows (client, position, replacement).

        The row (-1, -1, -1) stands for the original data set.
        """
        client, position, replacement = rows.T.copy()
        changed = client >= 0
        inputs = np.zeros((len(rows), math.prod(source.inputs.shape[1:])))
        inputs[changed] = source.rows(normalize, replacement[changed])
        labels = np.zeros((len(rows), *source.labels.shape[1:]), source.labels.dtype)
        labels[changed] = source.labels[replacement[changed]]
        return cls(client, position, replacement, inputs, labels)

    def repeated(self, times: int) -> "Neighbours":
        """Repeat the whole sequence of S data sets `times` times."""
        return Neighbours(*(np.concatenate([values] * times) for values in vars(self).values()))


def draw(
    data: FederatedData, source: Source, trials: int, seed: int, law: Law = "own"
) -> np.ndarray:
    """Draw random neighbours. Each neighbour replaces one train sample by a held-out sample.

    The result is an int64 array [trials, 3] with the rows (client, position, replacement).

    Trial t first draws the sample to replace, uniformly from all n train samples. Next, trial t
    draws a label, and then a held-out sample with this label. The held-out sample is an unused
    sample of the source. If there is no unused sample with this label, a test sample is drawn
    instead. Trial t depends only on (seed, t), not on `trials`.

    Args:
        data: The original data set.
        source: The source of the original data set.
        trials: Number of neighbours.
        seed: Seed of the draws.
        law: `own` draws the label from the labels of the same client, and `any` draws the label
            from the labels of all clients.

    Raises:
        InputError: If no held-out sample has a drawn label.
    """
    pool, drawn = replacement_pool(data, source), np.empty((trials, 3), np.int64)
    for t in range(trials):
        rng = generator(seed, Draw.NEIGHBOUR, round=t)
        row = int(rng.integers(len(data.labels)))
        i = int(np.searchsorted(data.offsets, row, side="right")) - 1
        drawn[t] = i, row - data.offsets[i], drawn_replacement(data, pool, i, rng, law)
    return drawn


def census(data: FederatedData, source: Source, seed: int) -> np.ndarray:
    """Return one neighbour for each of the n samples: neighbour t replaces row t of `data`.

    The result is an array [n, 3] with rows (client, position, replacement). Replacements are drawn
    as in `draw` and depend only on (seed, t). The random stream differs from that of `draw`, so
    both draws are independent.
    """
    pool, client = replacement_pool(data, source), np.repeat(np.arange(len(data.sizes)), data.sizes)
    drawn = np.empty((len(client), 3), np.int64)
    for t, i in enumerate(client.tolist()):
        rng = generator(seed, Draw.NEIGHBOUR, round=t, block=1)
        drawn[t] = i, t - data.offsets[i], drawn_replacement(data, pool, i, rng)
    return drawn


def stack(source: Source, drawn: np.ndarray, normalize: str = "unit") -> Neighbours:
    """Return T + 1 data sets: the original data set, then the T neighbours in `drawn` [T, 3]."""
    return Neighbours.of(source, np.concatenate([[[-1, -1, -1]], drawn]), normalize)


def held_out(data: FederatedData, source: Source, client: int) -> np.ndarray:
    """Return all samples that could replace a sample of this client, as indices in the source."""
    pool = replacement_pool(data, source)
    return np.concatenate([pool[y] for y in np.unique(classes_of(data.samples(client)[1]))])


def classes_of(labels: np.ndarray) -> np.ndarray:
    """Return the class of each sample. If the labels are real numbers, all samples have class 0."""
    return labels if labels.dtype.kind == "i" else np.zeros(len(labels), np.int64)


def replacement_pool(data: FederatedData, source: Source) -> Pool:
    """Return the possible replacements of each label: unused samples, or else test samples.

    No replacement is a train sample, so a replacement always differs from the replaced sample.
    """
    unused = np.ones(len(source.labels), bool)
    for used in (data.train_index, data.test_index, data.validation_index, data.client_test_index):
        unused[used] = False
    parts = []
    for index in (np.flatnonzero(unused), np.sort(data.test_index)):
        labels = classes_of(source.labels[index])
        order = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[order], np.arange(1, max(1, source.classes)))
        parts.append(np.split(index[order], starts))
    return [others if len(others) else test for others, test in zip(*parts, strict=True)]


def drawn_replacement(
    data: FederatedData, pool: Pool, client: int, rng: np.random.Generator, law: Law = "own"
) -> int:
    """Draw a label, and then a held-out sample with this label.

    `law` selects the possible labels.
    """
    labels = classes_of(data.samples(client)[1] if law == "own" else data.labels)
    label = int(labels[rng.integers(len(labels))])
    if not len(pool[label]):
        raise InputError(
            f"no held-out sample has the label {label}, so there is no replacement for a sample "
            f"of client {client}. Lower [data] train, so that held-out samples of every label "
            "remain."
        )
    return int(pool[label][rng.integers(len(pool[label]))])
