"""Every sample has one client, every client its minimum, and alpha decides the skew."""

import math
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.federated import Dealt, federate
from fedmuon.data.partition import (
    by_partitioner,
    dirichlet,
    is_partitioner,
    partitioner_clients,
    weights,
)
from fedmuon.data.source import Source

ALPHAS = st.sampled_from([1e-300, 1e-6, 0.01, 0.1, 0.5, 1.0, 10.0, 1e9, 1e308, math.inf])


def dealt(
    labels: np.ndarray, clients: int, alpha: float, minimum: int, seed: int = 0
) -> np.ndarray:
    rng = generator(seed, Draw.PARTITION)
    return dirichlet(alpha, minimum)(labels, clients, rng)


def counts(labels: np.ndarray, client: np.ndarray, clients: int) -> np.ndarray:
    """Samples of each class at each client, [N, c]."""
    table = np.zeros((clients, labels.max() + 1), int)
    np.add.at(table, (client, labels), 1)
    return table


def levelled(sizes: np.ndarray, minimum: int) -> list[int]:
    """Water-filling one sample at a time: the largest client gives to the smallest."""
    sizes = sizes.copy()
    while sizes.min() < minimum:
        sizes[sizes.argmax()] -= 1
        sizes[sizes.argmin()] += 1
    return sorted(sizes.tolist())


def purity(labels: np.ndarray, client: np.ndarray, clients: int) -> float:
    """Mean share of a client's commonest class: 1 / c if even, 1 if every client has one class."""
    table = counts(labels, client, clients)
    held = table.sum(axis=1) > 0
    return float(np.mean(table.max(axis=1)[held] / table.sum(axis=1)[held]))


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 400),
    classes=st.integers(1, 7),
    clients=st.integers(1, 60),
    share=st.floats(0, 1),
    alpha=ALPHAS,
    seed=st.integers(0, 99),
)
@example(n=40, classes=3, clients=8, share=1.0, alpha=1e-300, seed=0)  # nothing to spare
def test_everyone_gets_the_minimum(
    n: int, classes: int, clients: int, share: float, alpha: float, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(classes, size=n)
    minimum = int(share * (n // clients))
    client = dealt(labels, clients, alpha, minimum, seed)
    sizes = np.bincount(client, minlength=clients)
    assert client.shape == (n,) and client.dtype == np.int64 and client.min() >= 0
    assert len(sizes) == clients and sizes.min() >= minimum
    unfilled = np.bincount(dealt(labels, clients, alpha, 0, seed), minlength=clients)
    assert sorted(sizes.tolist()) == levelled(unfilled, minimum)


def test_filling_moves_no_more_than_it_must() -> None:
    """Negative control: it is the filling that keeps the promise of a minimum, not the draw."""
    labels = np.arange(2000) % 10
    before, after = dealt(labels, 20, 0.1, 0), dealt(labels, 20, 0.1, 10)
    short = np.maximum(10 - np.bincount(before, minlength=20), 0)
    assert short.any() and np.bincount(after, minlength=20).min() == 10
    moved = before != after
    assert moved.sum() == short.sum()
    assert (np.bincount(after[moved], minlength=20) == short).all()


def test_which_samples_a_client_gets_is_random() -> None:
    """Neither a run of neighbours in the source's order, nor always the first when some move."""
    labels = np.zeros(1000, int)
    client = dealt(labels, 2, 10.0, 0)
    assert 300 < np.count_nonzero(np.diff(client)) < 700
    moved = np.flatnonzero(dealt(labels, 50, 0.05, 10) != dealt(labels, 50, 0.05, 0))
    # The mean of m uniform indices deviates by about 289 / sqrt(m): 100 is more than 5 of them.
    assert len(moved) > 225 and abs(moved.mean() - 500) < 100


def test_scarce_samples_of_even_shares_reach_most_clients() -> None:
    """Ten classes of 200 among 1000 clients: rounding every class alike would reach 200 clients."""
    labels = np.arange(2000) % 10
    assert (np.bincount(dealt(labels, 1000, 1e9, 0), minlength=1000) > 0).sum() > 600


def test_alpha_decides_the_skew() -> None:
    labels = np.arange(10_000) % 10

    def found(alpha: float) -> float:
        each = [purity(labels, dealt(labels, 20, alpha, 0, s), 20) for s in range(9)]
        return float(np.mean(each))

    at = [found(alpha) for alpha in (0.01, 0.5, 10, 1e6)]
    assert at == sorted(at, reverse=True)
    assert at[0] > 0.7 and at[1] > 0.2
    assert at[3] == pytest.approx(0.1, abs=0.005)
    assert purity(labels, dealt(labels, 20, math.inf, 0), 20) == pytest.approx(0.1)


@pytest.mark.parametrize(("n", "clients"), [(1000, 20), (1003, 20), (97, 50), (300, 300)])
def test_an_infinite_alpha_is_even(n: int, clients: int) -> None:
    labels = np.random.default_rng(1).integers(7, size=n)
    table = counts(labels, dealt(labels, clients, math.inf, n // clients), clients)
    assert np.ptp(table, axis=0).max() <= 1
    assert np.ptp(table.sum(axis=1)) <= 1
    assert np.ptp(counts(labels, dealt(labels, clients, 0.1, 0), clients).sum(axis=1)) > 1


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_shares_are_dirichlet(alpha: float) -> None:
    """E share_i = 1/N and E sum_i share_i^2 = (alpha + 1) / (N alpha + 1), to 5 deviations."""
    clients, draws, labels = 5, 4000, np.zeros(1000, int)
    rng = generator(0, Draw.PARTITION)
    dealings = (dirichlet(alpha, 0)(labels, clients, rng) for _ in range(draws))
    shares = np.array([np.bincount(dealing, minlength=clients) for dealing in dealings]) / 1000
    means, squares = shares.mean(axis=0), (shares**2).sum(axis=1)
    deviation = 5 / math.sqrt(draws)
    assert (np.abs(means - 1 / clients) < deviation * shares.std(axis=0)).all()
    expected = (alpha + 1) / (clients * alpha + 1)
    assert abs(squares.mean() - expected) < deviation * squares.std()
    other = (1.1 * alpha + 1) / (clients * 1.1 * alpha + 1)
    assert abs(squares.mean() - other) > deviation * squares.std()


def test_the_draw_is_a_function_of_the_generator_and_not_of_the_names_of_classes() -> None:
    labels = np.random.default_rng(0).integers(5, size=300)
    assert (dealt(labels, 9, 0.5, 3, seed=4) == dealt(labels, 9, 0.5, 3, seed=4)).all()
    assert (dealt(labels, 9, 0.5, 3, seed=4) != dealt(labels, 9, 0.5, 3, seed=5)).any()
    assert (dealt(labels, 7, 0.5, 2) == dealt(100 + 3 * labels, 7, 0.5, 2)).all()


@pytest.mark.parametrize(("clients", "alpha", "minimum", "words"), [
    (11, 0.5, 10, "need 110 train samples, but there are only 100"),
    (0, 0.5, 1, "clients = 0 is not a valid number"),
    (5, 0.5, -1, "Set minimum to 0 or more"),
    (5, 0.0, 1, "alpha = 0.0"),
    (5, math.nan, 1, "alpha = nan"),
])  # fmt: skip
def test_the_impossible_is_refused(clients: int, alpha: float, minimum: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dealt(np.arange(100) % 10, clients, alpha, minimum)
    assert len(dealt(np.arange(110) % 10, 11, 0.5, 10)) == 110


def test_many_clients_take_little_memory() -> None:
    """200,000 clients of 400,000 samples: a few arrays of either length, no object per client."""
    clients, n = 200_000, 400_000
    labels = np.random.default_rng(0).integers(10, size=n)
    source = Source("test", np.ones((n, 1)), labels, 10, None, "made here")
    tracemalloc.start()
    try:
        client = dealt(labels, clients, 0.5, 1)
        data = federate(source, Dealt(np.arange(n), client, np.arange(3)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.offsets.shape == (clients + 1,) and data.sizes.min() >= 1
    assert data.sizes.sum() == n
    assert peak < 12 * 8 * n, "more than twelve arrays of length n"


def test_weights() -> None:
    sizes = np.array([1, 2, 5])
    np.testing.assert_allclose(weights(sizes, "size"), [0.125, 0.25, 0.625])
    np.testing.assert_allclose(weights(sizes, "uniform"), [1 / 3] * 3)
    with pytest.raises(InputError, match="'size' or 'uniform'"):
        weights(sizes, "sise")


# Objects with the methods of a flwr-datasets partitioner, where that package is not installed.

LABELS = np.array([2, 0, 1, 0, 2, 1, 1])


class Rows:
    """As much of `datasets.Dataset` as is asked for."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> "Rows":
        return cls(columns)

    def with_format(self, name: str) -> dict[str, Any]:
        assert name == "numpy"
        return self.columns


class Striped:
    """Client i of n has the samples i, i + n, ..."""

    def __init__(self, clients: int) -> None:
        self._num_partitions, self.fails = clients, False
        self.dataset: Any = None

    @property
    def num_partitions(self) -> int:
        assert self.dataset is not None
        return self._num_partitions

    def is_dataset_assigned(self) -> bool:
        return self.dataset is not None

    def load_partition(self, number: int) -> Rows:
        if self.fails:
            raise ValueError("too few samples\nof a class")
        step = self._num_partitions
        return Rows({name: one[number::step] for name, one in self.dataset.columns.items()})


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("datasets")
    module.Dataset = Rows
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("datasets")
def test_it_deals_a_copy_of_the_samples() -> None:
    mine = Striped(3)
    found = by_partitioner(mine, LABELS, 3)
    assert [one.tolist() for one in found] == [[0, 3, 6], [1, 4], [2, 5]]
    assert all(one.dtype == np.int64 for one in found) and not mine.is_dataset_assigned()


@pytest.mark.usefixtures("datasets")
def test_what_cannot_be_dealt_is_an_error_with_its_fix() -> None:
    with pytest.raises(InputError, match="clients = 4, but the partitioner makes 3 parts"):
        by_partitioner(Striped(3), LABELS, 4)
    broken, taken = Striped(3), Striped(3)
    broken.fails, taken.dataset = True, Rows({})
    with pytest.raises(InputError, match=r"Striped cannot split .*\(too few samples of a class\)"):
        by_partitioner(broken, LABELS, 3)
    with pytest.raises(InputError, match="already has a data set"):
        by_partitioner(taken, LABELS, 3)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install flwr-datasets"):
        by_partitioner(Striped(3), LABELS, 3)


def test_a_partitioner_is_known_by_its_methods() -> None:
    assert is_partitioner(Striped(3)) and not is_partitioner(lambda labels: labels)
    assert [partitioner_clients(one) for one in (Striped(3), Striped, None)] == [3, None, None]
