"""Train and test samples, and those dealt to clients: one array, of which each client is a slice.

Memory grows with n and one offset per client, so a million clients are no different from twenty.
"""

from dataclasses import dataclass

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import Source, flat_rows


@dataclass(frozen=True)
class FederatedData:
    """Mapped samples of N clients and the held-out test samples.

    `inputs` [n, d] and `labels` [n] are sorted by client, in the order of `train_index` within a
    client; client i has the rows offsets[i] to offsets[i + 1]. `order` [n] says which entry of
    `train_index` [n] each row is, and `client` [n] to whom each entry of `train_index` belongs.
    `train_index` and `test_index` count in the source's order. `shape` is that of a sample as it
    was stored, before it was laid out as a row of length d; `vocabulary` is the source's.
    """

    inputs: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    order: np.ndarray
    train_index: np.ndarray
    test_index: np.ndarray
    client: np.ndarray
    shape: tuple[int, ...] = ()
    vocabulary: int = 0
    stored: np.dtype | None = None  # the type in which inputs were stored

    @property
    def sizes(self) -> np.ndarray:
        """n_i, shape [N]."""
        return np.diff(self.offsets)

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """The rows of train samples [T] that are named by their places in the source."""
        there = self.train_index[self.order]
        sorted_by = np.argsort(there)
        return sorted_by[np.searchsorted(there, index, sorter=sorted_by)]

    def samples(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Client i's inputs [n_i, d] and labels [n_i], as views."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[rows], self.labels[rows]


def federate(
    source: Source,
    train_index: np.ndarray,
    client: np.ndarray,
    test_index: np.ndarray,
    normalize: str = "unit",
    clients: int | None = None,
) -> FederatedData:
    """Give sample train_index[t] to client[t]; only the chosen samples are mapped.

    `clients` is N where the last clients hold nothing; otherwise N is max(client) + 1.
    """
    order = np.argsort(client, kind="stable")
    sizes = np.bincount(client, minlength=clients or 0)
    rows = train_index[order]
    return FederatedData(
        inputs=flat_rows(source.inputs, normalize, rows),
        labels=source.labels[rows],
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        test_inputs=flat_rows(source.inputs, normalize, test_index),
        test_labels=source.labels[test_index],
        order=order,
        train_index=train_index,
        test_index=test_index,
        client=client,
        shape=source.inputs.shape[1:],
        vocabulary=source.vocabulary,
        stored=source.inputs.dtype,
    )


def split(
    source_labels: np.ndarray, official_test: int | None, train: int, test: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint indices [train] and [test] into the source's order, in random order.

    If the source has an official test part and both numbers fit, train samples come from before it
    and test samples from it; otherwise both come from all samples together. A number of 0 means
    all that remain (both 0 need an official test part). With the same seed and the same kind of
    split, a larger number extends the smaller draw and leaves the other part alone.
    """
    n = len(source_labels)
    before, after = _parts(n, official_test, train, test)
    shared = before is after
    taken = train or len(before) - (test if shared else 0)
    held = test or len(after) - (train if shared else 0)
    if min(taken, held) < 1 or (shared and taken + held > n):
        raise InputError(
            f"[data] train = {train} and test = {test} do not fit in {n} samples: lower "
            "one of them or both, or give one as 0 for all that remain"
        )
    first = generator(seed, Draw.SPLIT).permutation(before)
    last = first[::-1] if shared else generator(seed, Draw.SPLIT, block=1).permutation(after)
    return first[:taken].copy(), last[:held].copy()


def _parts(
    n: int, official_test: int | None, train: int, test: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices to draw the train and the test samples from; one array if they share it."""
    if min(train, test) < 0:
        raise InputError(f"[data] train = {train} or test = {test} is negative: use 0 or more")
    everything = np.arange(n)
    if official_test is not None and train <= official_test and test <= n - official_test:
        return everything[:official_test], everything[official_test:]
    if not (train or test):
        raise InputError("[data] train and test are both 0 and the source has no split: give one")
    return everything, everything
