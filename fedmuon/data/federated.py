"""Train samples of all clients in one array, of which each client is a slice, and test samples.

Memory is proportional to n plus one offset per client, so a million clients are possible.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import Source

NONE = np.empty(0, np.int64)  # indices of no samples


@dataclass(frozen=True)
class FederatedData:
    """Mapped samples of N clients and the held-out test samples.

    Attributes:
        inputs: Train samples [n, d], sorted by client, and within a client in the order of
            `train_index`.
        labels: Their labels [n].
        offsets: [N + 1]; client i has the rows offsets[i] to offsets[i + 1].
        test_inputs: Test samples [m, d].
        test_labels: Their labels [m].
        validation_inputs: Validation samples [v, d], by which settings are chosen.
        validation_labels: Their labels [v].
        order: [n], the entry of `train_index` for each row.
        train_index: [n], the train samples as indices into the source.
        test_index: [m], the test samples as indices into the source.
        validation_index: [v], the validation samples as indices into the source.
        source_size: The number of samples of the source, without those of its public center.
        public: The number of these, which come after them.
        client: [n], the client of each entry of `train_index`.
        client_test_inputs: The clients' own test samples [t, d], sorted by client.
        client_test_labels: Their labels [t].
        client_test_index: [t], the same samples as indices into the source.
        client_test_offsets: [N + 1]; client i has those from offset i to offset i + 1.
        shape: Shape of a stored sample, before it was flattened.
        vocabulary: That of the source.
        stored: The dtype in which inputs were stored.
        classes: How many classes the labels have; 0 for real targets.
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

    @property
    def sizes(self) -> np.ndarray:
        """n_i, the number of samples of each client [N]."""
        return np.diff(self.offsets)

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """The rows of train samples [T] that are given as indices into the source."""
        there = self.train_index[self.order]
        sorted_by = np.argsort(there)
        return sorted_by[np.searchsorted(there, index, sorter=sorted_by)]

    def samples(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The inputs [n_i, d] and labels [n_i] of client i, as views."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[rows], self.labels[rows]

    def client_test(self, i: int) -> np.ndarray:
        """Client i's own test samples as indices into the source."""
        first, end = self.client_test_offsets[i : i + 2]
        return self.client_test_index[first:end]


class Dealt(NamedTuple):
    """Which samples train and which are held out, as indices into the source.

    Attributes:
        train: Train samples [n].
        client: The client [n] of each.
        test: Test samples [m].
        validation: Validation samples [v].
        client_test: The clients' own test samples [t].
        tested: The client [t] of each of these.
    """

    train: np.ndarray
    client: np.ndarray
    test: np.ndarray
    validation: np.ndarray = NONE
    client_test: np.ndarray = NONE
    tested: np.ndarray = NONE

    def with_client_test(self, share: float, rng: np.random.Generator) -> "Dealt":
        """Hold out a share of each client's samples: at least one, and not the last.

        Raises:
            InputError: If no client has two samples.
        """
        shuffled = rng.permutation(len(self.client))
        order = shuffled[np.argsort(self.client[shuffled], kind="stable")]
        sizes = np.bincount(self.client)
        counts = np.clip(np.rint(share * sizes), 1, np.maximum(sizes - 1, 0)).astype(np.int64)
        if not counts.any():
            raise InputError(
                f"[data] client-test = {share} holds out no sample, because every client has "
                "only one: set it to 0, or lower [federation] clients"
            )
        place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        out = np.zeros(len(order), bool)
        out[order] = place < np.repeat(counts, sizes)
        parts = self.train[~out], self.client[~out], self.test, self.validation
        return Dealt(*parts, self.train[out], self.client[out])


def federate(
    source: Source, dealt: Dealt, normalize: str = "unit", clients: int | None = None
) -> FederatedData:
    """Give each client its samples, and map the chosen samples only.

    Args:
        source: The samples.
        dealt: Which of them train, on which client, and which are held out.
        normalize: How a sample is mapped, see `flat_rows`.
        clients: N, needed if the last clients have no samples; otherwise N is max(client) + 1.
    """
    order, sizes = np.argsort(dealt.client, kind="stable"), np.bincount(dealt.client)
    clients = max(clients or 0, len(sizes))
    rows, tests = dealt.train[order], dealt.client_test[np.argsort(dealt.tested, kind="stable")]

    def offsets(client: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.bincount(client, minlength=clients))])

    def mapped(index: np.ndarray) -> np.ndarray:
        return source.rows(normalize, index)

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
    )


def split(
    source_labels: np.ndarray,
    official_test: int | None,
    train: int,
    test: int,
    seed: int,
    validation: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw disjoint indices [train], [test] and [validation] into the source, in random order.

    If the source has an official test part and the numbers of train and test samples fit, test
    samples come from it, and train samples from the part before it. Otherwise both come from all
    samples together. With the same seed and kind of split, a larger number extends the smaller draw
    and does not change the other part. Validation samples are those drawn after the train samples,
    so their number changes neither part.

    Args:
        source_labels: Labels of all samples.
        official_test: Index of the first official test sample, if any.
        train: Number of train samples; 0 means all that remain.
        test: Number of test samples; 0 means all that remain. Both may be 0 only if the source has
            an official test part.
        seed: Seed of the draw.
        validation: Number of validation samples.

    Raises:
        InputError: If the numbers do not fit.
    """
    n = len(source_labels)
    if min(train, test) < 0:
        raise InputError(f"[data] train = {train} or test = {test} is negative: use 0 or more")
    everything = np.arange(n)
    if official_test is not None and train <= official_test and test <= n - official_test:
        before, after = everything[:official_test], everything[official_test:]
    elif train or test:
        before = after = everything  # to draw both from
    else:
        raise InputError(
            "[data] train and test are both 0, and the source has no split of its own: set at "
            "least one of them"
        )
    shared = before is after
    taken = train or len(before) - (test if shared else 0) - validation
    held = test or len(after) - (train + validation if shared else 0)
    if min(taken, held) < 1 or (shared and taken + held > n):
        raise InputError(
            f"[data] train = {train} and test = {test} need more than the {n} samples of the "
            "source: lower one of them or both, or set one to 0 for all that remain"
        )
    first = generator(seed, Draw.SPLIT).permutation(before)
    last = first[::-1] if shared else generator(seed, Draw.SPLIT, block=1).permutation(after)
    rest = first[taken : n - held if shared else None]
    return first[:taken].copy(), last[:held].copy(), first_of(rest, validation, taken)


def first_of(rest: np.ndarray, validation: int, train: int = 0) -> np.ndarray:
    """The validation samples: the first of those that are neither train nor test samples.

    Args:
        rest: The samples left.
        validation: How many are asked for.
        train: How many train, where that can be lowered.
    """
    if validation > len(rest):
        fits = train + len(rest) - validation
        raise InputError(
            f"[data] validation asks for {validation} samples, but train and test leave only "
            f"{len(rest)}: lower one of the three" + f", for example train to {fits}" * (fits > 0)
        )
    return rest[:validation].copy()
