"""Replace-one neighbours: data sets that differ from the base in one sample of one client.

A neighbour is three numbers and one row, so hundreds of them travel beside one copy of the data.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import FederatedData
from fedmuon.data.source import Source, flat_rows

Law = Literal["own", "any"]
Pool = list[np.ndarray]  # held-out samples of each label


@dataclass(frozen=True)
class Neighbours:
    """S data sets; number s has, as client[s]'s sample position[s], the source's replacement[s].

    `client`, `position` and `replacement` are [S] int64, `labels` are like the source's, `inputs`
    is [S, d]. An unchanged data set has client, position and replacement -1, and a row and a label
    of zeros.
    """

    client: np.ndarray
    position: np.ndarray
    replacement: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """(client, position, replacement) of every data set, [S, 3]: what `of` makes it from."""
        return np.stack([self.client, self.position, self.replacement], 1)

    @classmethod
    def of(cls, source: Source, rows: np.ndarray, normalize: str = "unit") -> "Neighbours":
        """The data sets that rows [S, 3] name; -1 in all three is the unchanged one."""
        client, position, replacement = rows.T.copy()
        changed = client >= 0
        inputs = np.zeros((len(rows), math.prod(source.inputs.shape[1:])))
        inputs[changed] = flat_rows(source.inputs, normalize, replacement[changed])
        labels = np.zeros((len(rows), *source.labels.shape[1:]), source.labels.dtype)
        labels[changed] = source.labels[replacement[changed]]
        return cls(client, position, replacement, inputs, labels)

    def repeated(self, times: int) -> "Neighbours":
        """The same S data sets `times` times over, [times S]."""
        return Neighbours(*(np.concatenate([values] * times) for values in vars(self).values()))


def draw(
    data: FederatedData, source: Source, trials: int, seed: int, law: Law = "own"
) -> np.ndarray:
    """(client, position, replacement) of random neighbours, [trials, 3] int64.

    Trial t draws the sample to replace uniformly from all n, a label from the same client's own
    labels (law `own`) or from everybody's (`any`), and a held-out sample of that label: one that is
    neither train nor test, or a test sample where no such sample has the label. It is a function of
    (seed, t), not of `trials`.
    """
    pool, drawn = _pool(data, source), np.empty((trials, 3), np.int64)
    for t in range(trials):
        rng = generator(seed, Draw.NEIGHBOUR, round=t)
        row = int(rng.integers(len(data.labels)))
        i = int(np.searchsorted(data.offsets, row, side="right")) - 1
        drawn[t] = i, row - data.offsets[i], _replacement(data, pool, i, rng, law)
    return drawn


def census(data: FederatedData, source: Source, seed: int) -> np.ndarray:
    """Each of the n samples replaced once, [n, 3]; neighbour t replaces row t of `data`.

    Replacements are drawn as in `draw`, a function of (seed, t); `block` tells them apart.
    """
    pool, client = _pool(data, source), np.repeat(np.arange(len(data.sizes)), data.sizes)
    drawn = np.empty((len(client), 3), np.int64)
    for t, i in enumerate(client.tolist()):
        rng = generator(seed, Draw.NEIGHBOUR, round=t, block=1)
        drawn[t] = i, t - data.offsets[i], _replacement(data, pool, i, rng)
    return drawn


def stack(source: Source, drawn: np.ndarray, normalize: str = "unit") -> Neighbours:
    """The unchanged data set, then the neighbours drawn [T, 3]: S = T + 1."""
    return Neighbours.of(source, np.concatenate([[[-1, -1, -1]], drawn]), normalize)


def replace(data: FederatedData, neighbours: Neighbours, s: int) -> FederatedData:
    """Neighbour s as an ordinary data set, a copy of its own."""
    inputs, labels, train_index = data.inputs.copy(), data.labels.copy(), data.train_index.copy()
    if neighbours.client[s] >= 0:
        row = data.offsets[neighbours.client[s]] + neighbours.position[s]
        inputs[row], labels[row] = neighbours.inputs[s], neighbours.labels[s]
        train_index[data.order[row]] = neighbours.replacement[s]
    return dataclasses.replace(data, inputs=inputs, labels=labels, train_index=train_index)


def held_out(data: FederatedData, source: Source, client: int) -> np.ndarray:
    """Every sample that may replace one of client i's: all that `draw` could draw for it."""
    pool = _pool(data, source)
    return np.concatenate([pool[y] for y in np.unique(classes_of(data.samples(client)[1]))])


def classes_of(labels: np.ndarray) -> np.ndarray:
    """The class of each sample [n]; samples with real targets are of one class."""
    return labels if labels.dtype.kind == "i" else np.zeros(len(labels), np.int64)


def _pool(data: FederatedData, source: Source) -> Pool:
    """Samples in neither part, or test samples of a label of which there is no other: no pool holds
    a train sample, so a replacement is never the sample that it replaces."""
    unused = np.ones(len(source.labels), bool)
    unused[data.train_index] = unused[data.test_index] = False
    parts = (
        _by_label(index, source) for index in (np.flatnonzero(unused), np.sort(data.test_index))
    )
    return [others if len(others) else test for others, test in zip(*parts, strict=True)]


def _by_label(index: np.ndarray, source: Source) -> Pool:
    labels = classes_of(source.labels[index])
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(1, max(1, source.classes)))
    return np.split(index[order], starts)


def _replacement(
    data: FederatedData, pool: Pool, client: int, rng: np.random.Generator, law: Law = "own"
) -> int:
    """A held-out sample with a label drawn from the client's own, or from everybody's."""
    labels = classes_of(data.samples(client)[1] if law == "own" else data.labels)
    label = int(labels[rng.integers(len(labels))])
    if not len(pool[label]):
        raise InputError(
            f"no held-out sample has label {label}, so none can replace a sample of client "
            f"{client}: lower [data] train so that samples of every label remain"
        )
    return int(pool[label][rng.integers(len(pool[label]))])
