"""Partitioners of flwr-datasets deal as they say, as objects and by name, where it is installed."""

from typing import Any

import numpy as np
import pytest
from brought import PLAIN, X, refused, tables

import fedmuon

makers = pytest.importorskip("flwr_datasets.partitioner")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The specified min_partition_size"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pyarrow.*"),
]
CLASSES = np.arange(60) % 3
GIVEN = {**PLAIN, "data": (X, CLASSES), "task": "matrix"}
ANY = tables(federation={"rounds": 1}, data={"test": 12, "minimum": 1})
ANY["federation"].pop("clients")
SKEWED = {"partition_by": "label", "alpha": 0.5, "min_partition_size": 1}


def dealt(result: fedmuon.Result) -> tuple[np.ndarray, np.ndarray]:
    """Train samples, and the client of each."""
    with np.load(result.path / "partition.npz") as held:
        return held["train_index"], held["client"]


def test_it_deals_as_it_says_and_may_be_used_again() -> None:
    mine, other = (makers.DirichletPartitioner(3, **SKEWED, seed=7) for _ in range(2))
    first, again = (fedmuon.run(ANY, **GIVEN, partition=mine) for _ in range(2))
    train, client = dealt(first)
    other.dataset = datasets.Dataset.from_dict({"label": CLASSES[train], "place": range(48)})
    for number in range(3):
        places = np.array(other.load_partition(number)["place"])
        assert np.array_equal(np.sort(places), np.flatnonzero(client == number))
    assert np.array_equal(dealt(again), dealt(first)) and not mine.is_dataset_assigned()
    assert first.config.federation.clients == 3


def named(kind: str, clients: int = 4, **options: Any) -> dict[str, Any]:
    """A config that names it."""
    place = f"flwr_datasets.partitioner:{kind}"
    table = {**ANY["federation"], "clients": clients, "partition": place, "options": options}
    return {**ANY, "federation": table}


def test_by_name_it_is_told_of_clients_labels_alpha_and_seed() -> None:
    by_name = fedmuon.run(named("DirichletPartitioner", **{"min-partition-size": 1}), **GIVEN)
    by_hand = fedmuon.run(ANY, **GIVEN, partition=makers.DirichletPartitioner(4, **SKEWED, seed=0))
    assert np.array_equal(dealt(by_name), dealt(by_hand))


def holding() -> Any:
    """One with a data set of somebody's."""
    made = makers.IidPartitioner(3)
    made.dataset = datasets.Dataset.from_dict({"label": [0, 1, 2]})
    return made


@pytest.mark.parametrize(("config", "make", "mend"), [
    (ANY, holding, "Pass a new partitioner"),
    (ANY, lambda: makers.NaturalIdPartitioner("user"), "pass your own partition"),
    (named("IidPartitioner", 4), lambda: makers.IidPartitioner(3), "Remove the key clients"),
    (named("IidPartitioner", 4, **{"num-partitions": 3}), None, "Make the two numbers equal"),
    (named("PathologicalPartitioner"), None, "num_classes_per_partition.*federation.options"),
    (named("IidPartitioner", nonsense=3), None, "leave it out"),
])  # fmt: skip
def test_what_cannot_be_dealt_is_one_sentence(config: Any, make: Any, mend: str) -> None:
    partition = make() if make else None
    if make:
        config = {**config, "federation": {**config["federation"], "options": {}}}
    refused(mend, config, **GIVEN, partition=partition)
