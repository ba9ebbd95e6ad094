"""The training samples of all clients in one array, and the held-out samples.

The samples of one client are consecutive rows of the array. Memory contains the samples and one
number per client, so a million clients are possible.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import Source

NONE = np.empty(0, np.int64)  # an empty index array


@dataclass(frozen=True)
class FederatedData:
    """The normalized training samples of N clients, and the held-out samples.

    Attributes:
        inputs: Train samples [n, d], sorted by client. The samples of one client have the order of
            `train_index`.
        labels: Labels [n] of the train samples.
        offsets: Row numbers [N + 1]. The rows of client i are offsets[i] to offsets[i + 1] - 1.
        test_inputs: Test samples [m, d].
        test_labels: Labels [m] of the test samples.
        validation_inputs: Validation samples [v, d], which you use to choose settings.
        validation_labels: Labels [v] of the validation samples.
        order: Permutation [n]. Row r of `inputs` is sample `train_index[order[r]]` of the source.
        train_index: Indices [n] of the train samples in the source.
        test_index: Indices [m] of the test samples in the source.
        validation_index: Indices [v] of the validation samples in the source.
        client_names: The name of each client, if a column of the source names the clients.
        label_names: The name of each class, if the labels of the source were words.
        source_size: Number of samples in the source, without its public samples.
        public: Number of public samples, whose mean is subtracted from all samples. In the source,
            the public samples come after all other samples.
        client: The client [n] that owns each sample of `train_index`.
        client_test_inputs: The clients' own test samples [t, d], sorted by client.
        client_test_labels: Labels [t] of the clients' own test samples.
        client_test_index: Indices [t] of the clients' own test samples in the source.
        client_test_offsets: Row numbers [N + 1] in `client_test_inputs`, like `offsets`.
        shape: Shape of one sample in the source. In `inputs`, samples are flattened.
        vocabulary: Number of different tokens in the source. It is 0 if samples are not text.
        stored: The dtype of the inputs in the source.
        classes: Number of classes. Use 0 for real-valued targets.
    """

    inputs: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    validation_inputs: np.ndarray
    validation_labels: np.ndarray
    order: np.ndarray
    train_index: np.ndarray
    test_index: np.ndarray
    validation_index: np.ndarray
    client: np.ndarray
    client_test_inputs: np.ndarray
    client_test_labels: np.ndarray
    client_test_index: np.ndarray
    client_test_offsets: np.ndarray
    shape: tuple[int, ...] = ()
    vocabulary: int = 0
    stored: np.dtype | None = None
    classes: int = 0
    source_size: int = 0
    public: int = 0
    client_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples n_i of each client, [N]."""
        return np.diff(self.offsets)

    def named(self, client: int) -> dict[str, str]:
        """Return the entry `name` of a client's record. The result is empty without names."""
        return {"name": self.client_names[client]} if self.client_names else {}

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """Return the row numbers in `inputs` of train samples.

        The train samples are given as indices in the source.
        """
        index_of_row = self.train_index[self.order]
        sorted_by = np.argsort(index_of_row)
        return sorted_by[np.searchsorted(index_of_row, index, sorter=sorted_by)]

    def samples(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the labels of one client, without copying them."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[rows], self.labels[rows]

    def client_test(self, i: int) -> np.ndarray:
        """Return the test samples that belong to client i, as indices in the source."""
        first, end = self.client_test_offsets[i : i + 2]
        return self.client_test_index[first:end]


class Dealt(NamedTuple):
    """The samples chosen for training and for each held-out set, as indices in the source.

    Attributes:
        train: Train samples [n].
        client: The client [n] that owns each train sample.
        test: Test samples [m].
        validation: Validation samples [v].
        client_test: The clients' own test samples [t].
        tested: The client [t] that owns each sample of `client_test`.
        names: The name of each client, if a column names the clients.
    """

    train: np.ndarray
    client: np.ndarray
    test: np.ndarray
    validation: np.ndarray = NONE
    client_test: np.ndarray = NONE
    tested: np.ndarray = NONE
    names: tuple[str, ...] = ()

    def with_client_test(self, share: float, rng: np.random.Generator) -> "Dealt":
        """Move a share of each client's train samples to the client's own test samples.

        A client with two or more samples holds out at least one sample and trains on at least one.

        Raises:
            InputError: If every client has only one sample.
        """
        shuffled = rng.permutation(len(self.client))
        order = shuffled[np.argsort(self.client[shuffled], kind="stable")]
        sizes = np.bincount(self.client)
        counts = np.clip(np.rint(share * sizes), 1, np.maximum(sizes - 1, 0)).astype(np.int64)
        if not counts.any():
            raise InputError(
                f"[data] client-test = {share} holds out no samples, because every client has "
                "only one sample. Set client-test = 0, or lower [federation] clients."
            )
        place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        out = np.zeros(len(order), bool)
        out[order] = place < np.repeat(counts, sizes)
        parts = self.train[~out], self.client[~out], self.test, self.validation
        return Dealt(*parts, self.train[out], self.client[out], self.names)


def federate(
    source: Source,
    dealt: Dealt,
    normalize: str = "unit",
    clients: int | None = None,
    most: type[np.floating] = np.float64,
) -> FederatedData:
    """Build the data of all clients: collect and normalize the chosen samples of the source.

    Args:
        source: The source of the samples.
        dealt: The samples chosen for training, with their clients, and the held-out samples.
        normalize: Name of the normalization, see `flat_rows`.
        clients: The number of clients N. Set this number if the last clients may have no samples.
            The default is the largest client number plus 1.
        most: The highest precision in which samples are stored.
    """
    order, sizes = np.argsort(dealt.client, kind="stable"), np.bincount(dealt.client)
    clients = max(clients or 0, len(sizes))
    rows, tests = dealt.train[order], dealt.client_test[np.argsort(dealt.tested, kind="stable")]

    def offsets(client: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.bincount(client, minlength=clients))])

    def mapped(index: np.ndarray) -> np.ndarray:
        return source.rows(normalize, index, most)

    return FederatedData(
        inputs=mapped(rows),
        labels=source.labels[rows],
        offsets=offsets(dealt.client),
        test_inputs=mapped(dealt.test),
        test_labels=source.labels[dealt.test],
        validation_inputs=mapped(dealt.validation),
        validation_labels=source.labels[dealt.validation],
        order=order,
        train_index=dealt.train,
        test_index=dealt.test,
        validation_index=dealt.validation,
        client=dealt.client,
        client_test_inputs=mapped(tests),
        client_test_labels=source.labels[tests],
        client_test_index=tests,
        client_test_offsets=offsets(dealt.tested),
        shape=source.inputs.shape[1:],
        vocabulary=source.vocabulary,
        stored=source.inputs.dtype,
        classes=source.classes,
        source_size=len(source.labels),
        public=source.public,
        client_names=dealt.names,
        label_names=source.label_names,
    )


def split(
    source_labels: np.ndarray,
    official_test: int | None,
    train: int,
    test: int,
    seed: int,
    validation: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw train, test and validation samples without overlap, as indices in the source.

    If the official test part of the source is large enough, test samples come from this part, and
    train samples come from the samples before it. Otherwise, test and train samples are drawn from
    the whole source. Suppose that `train` and `test` are not 0, and that the seed stays the same.
    Then a larger `train` only adds train samples, and a larger `test` only adds test samples.
    Validation samples are drawn after the train samples, so `validation` changes neither train nor
    test samples.

    Args:
        source_labels: Labels of all samples.
        official_test: Index of the first official test sample, if any.
        train: Number of train samples. 0 means all remaining samples.
        test: Number of test samples. 0 means all remaining samples. `train` and `test` may both be
            0 only if the source has an official test part.
        seed: Random seed.
        validation: Number of validation samples.

    Raises:
        InputError: If the source has too few samples, or a number is invalid.
    """
    n = len(source_labels)
    if min(train, test) < 0:
        raise InputError(
            f"[data] train = {train} and test = {test} must not be negative: set both to 0 or more"
        )
    indices = np.arange(n)
    if official_test is not None and train <= official_test and test <= n - official_test:
        before, after = indices[:official_test], indices[official_test:]
    elif train or test:
        before = after = indices  # train and test samples both come from the whole source
    else:
        raise InputError(
            "[data] train and test are both 0, so both would use all samples, because the source "
            "has no official test part. Set train or test to a number above 0."
        )
    shared = before is after
    n_train = train or len(before) - (test if shared else 0) - validation
    n_test = test or len(after) - (train + validation if shared else 0)
    if min(n_train, n_test) < 1 or (shared and n_train + n_test > n):
        less = min(test, n // 5)
        fits = n - less - validation
        raise InputError(
            f"[data] train = {train} and test = {test} do not fit, because the source has only "
            f"{n} samples. Lower train or test"
            + (
                f", for example to train = {fits} and test = {less}."
                if min(fits, less) > 0
                else "."
            )
        )
    first = generator(seed, Draw.SPLIT).permutation(before)
    last = first[::-1] if shared else generator(seed, Draw.SPLIT, block=1).permutation(after)
    remaining = first[n_train : n - n_test if shared else None]
    return first[:n_train].copy(), last[:n_test].copy(), first_of(remaining, validation, n_train)


def first_of(rest: np.ndarray, validation: int, train: int = 0) -> np.ndarray:
    """Return the first `validation` samples of `rest` as validation samples.

    Args:
        rest: The samples outside the train and test samples.
        validation: Number of validation samples.
        train: Number of train samples. If there are too few validation samples, the error message
            suggests a smaller number.
    """
    if validation > len(rest):
        fits = train + len(rest) - validation
        raise InputError(
            f"[data] validation requires {validation} samples, but train and test leave only "
            f"{len(rest)}. Lower validation, train or test"
            + (f", for example train to {fits}." if fits > 0 else ".")
        )
    return rest[:validation].copy()
