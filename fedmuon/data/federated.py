"""Samples dealt to clients: one array sorted by client, of which each client is a slice.

Memory grows with n and one offset per client, so a million clients are no different from twenty.
"""

from dataclasses import dataclass

import numpy as np

from fedmuon.data.source import Source, flat_rows
from fedmuon.errors import InputError


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

    def samples(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Client i's inputs [n_i, d] and labels [n_i], as views."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[rows], self.labels[rows]

    def source_index(self, i: int, j: int) -> int:
        """Index in the source's order of client i's sample j."""
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        if not 0 <= j < stop - start:
            raise InputError(f"client {i} has samples 0 to {stop - start - 1}, not {j}")
        return int(self.train_index[self.order[start + j]])


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
        inputs=flat_rows(source.inputs[rows], normalize),
        labels=source.labels[rows],
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        test_inputs=flat_rows(source.inputs[test_index], normalize),
        test_labels=source.labels[test_index],
        order=order,
        train_index=train_index,
        test_index=test_index,
        client=client,
        shape=source.inputs.shape[1:],
        vocabulary=source.vocabulary,
        stored=source.inputs.dtype,
    )
