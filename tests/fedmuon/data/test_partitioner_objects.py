"""Objects with the methods of a flwr-datasets partitioner, where that package is not installed."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedmuon.core.errors import InputError
from fedmuon.data.partition import by_partitioner, deals_to, is_partitioner

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
        return Rows(
            {
                name: one[number :: self._num_partitions]
                for name, one in self.dataset.columns.items()
            }
        )


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
    with pytest.raises(InputError, match="clients = 4, and the partitioner deals to 3"):
        by_partitioner(Striped(3), LABELS, 4)
    broken, taken = Striped(3), Striped(3)
    broken.fails, taken.dataset = True, Rows({})
    with pytest.raises(InputError, match=r"Striped cannot deal .*\(too few samples of a class\)"):
        by_partitioner(broken, LABELS, 3)
    with pytest.raises(InputError, match="has a data set already"):
        by_partitioner(taken, LABELS, 3)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install flwr-datasets"):
        by_partitioner(Striped(3), LABELS, 3)


def test_a_partitioner_is_known_by_its_methods() -> None:
    assert is_partitioner(Striped(3)) and not is_partitioner(lambda labels: labels)
    assert [deals_to(one) for one in (Striped(3), Striped, None)] == [3, None, None]
