"""Aggregates and partitions against naive loops, numpy, scipy and Flower."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from brought import CLASSES, RNG, X, Y, linear, tables
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import fedmuon
from fedmuon import aggregators
from fedmuon.core.registry import make
from fedmuon.data.partition import PARTITIONS, clients_of_samples
from fedmuon.optim.stage import Reply

pytestmark = pytest.mark.usefixtures("runs_apart")


def replies(count: int, stack: int = 2) -> list[Reply]:
    """Random models of two parameters, from clients of unlike size."""
    drawn = torch.Generator().manual_seed(count)

    def params() -> dict[str, Tensor]:
        return {
            name: torch.randn(stack, *shape, generator=drawn, dtype=torch.float64)
            for name, shape in (("weight", (4, 3)), ("bias", (4,)))
        }

    return [Reply(k, params(), {}, torch.zeros(stack), samples=5 + 7 * k * k) for k in range(count)]


def stacked(given: list[Reply], name: str) -> np.ndarray:
    return np.stack([one.params[name].numpy() for one in given])


def close(found: Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-14)


def test_by_samples_is_that_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as if Flower ran us
    given = replies(4, stack=1)
    messages = []
    for one in given:
        arrays = ArrayRecord({name: Array(value.numpy()) for name, value in one.params.items()})
        metrics = MetricRecord({"num-examples": one.samples})
        asked = Message(RecordDict(), dst_node_id=one.client + 1, message_type="train")
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        messages.append(Message(content, reply_to=asked))
    theirs, _ = FedAvg().aggregate_train(1, messages)
    assert theirs is not None
    mine = aggregators.by_samples().combine(given)[0]
    for name, value in mine.items():
        close(value, theirs[name].numpy())


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_entrywise_aggregates_are_those_of_numpy_and_scipy(count: int) -> None:
    given = replies(count)
    middle = aggregators.median().combine(given)[0]
    for trim in (0.0, 0.2, 0.4):
        cut = aggregators.trimmed_mean(trim).combine(given)[0]
        for name, value in cut.items():
            close(value, scipy.stats.trim_mean(stacked(given, name), trim, axis=0))
    for name, value in middle.items():
        close(value, np.median(stacked(given, name), axis=0))
    assert (middle["weight"] - aggregators.mean().combine(given)[0]["weight"]).norm() > 1e-3


@pytest.mark.parametrize(("count", "faulty"), [(4, 1), (5, 1), (7, 2), (5, 0)])
def test_krum_is_that_by_hand(count: int, faulty: int) -> None:
    """One model after the other, with plain loops."""
    given = replies(count, stack=3)
    found = aggregators.krum(faulty).combine(given)[0]
    for s in range(3):
        rows = [[v[s].numpy().ravel() for v in one.params.values()] for one in given]
        flat = [np.concatenate(row) for row in rows]
        scores = []
        for k in range(count):
            others = sorted(float(((flat[k] - flat[j]) ** 2).sum()) for j in range(count) if j != k)
            scores.append(sum(others[: count - faulty - 2]))
        best = given[int(np.argmin(scores))]
        for name, value in found.items():
            assert torch.equal(value[s], best.params[name][s])


def test_a_function_sees_one_model_at_a_time() -> None:
    """The mean written for single models is the mean of every replica."""
    given = replies(3)

    def own(seen: list[Reply]) -> dict[str, Tensor]:
        assert seen[0].params["weight"].shape == (4, 3)
        names = ("weight", "bias")
        return {name: torch.stack([o.params[name] for o in seen]).mean(0) for name in names}

    found = aggregators.as_aggregator(own).combine(given)[0]
    for name, value in aggregators.mean().combine(given)[0].items():
        close(found[name], value.numpy())


@pytest.mark.parametrize("name", list(PARTITIONS))
@pytest.mark.parametrize(("n", "clients"), [(40, 7), (200, 3), (31, 1)])
def test_a_partition_deals_every_sample_once(name: str, n: int, clients: int) -> None:
    labels = RNG.integers(0, 5, n)
    deal = make(PARTITIONS[name], {"alpha": 0.5, "minimum": 2})
    client = clients_of_samples(deal(labels, clients, np.random.default_rng(1)), n, clients)
    assert client.shape == (n,) and set(client.tolist()) <= set(range(clients))
    again = clients_of_samples(deal(labels, clients, np.random.default_rng(1)), n, clients)
    assert np.array_equal(client, again)


def test_partitions_are_what_their_names_say() -> None:
    labels, rng = np.repeat(np.arange(10), 20), np.random.default_rng(0)
    even = np.bincount(PARTITIONS["iid"]()(labels, 7, rng))
    assert even.max() - even.min() <= 1
    client = PARTITIONS["shards"](per_client=2)(labels, 10, rng)
    assert max(len(np.unique(labels[client == k])) for k in range(10)) <= 2
    sizes = np.bincount(PARTITIONS["quantity"](alpha=0.3, minimum=3)(labels, 10, rng))
    assert sizes.min() >= 3 and sizes.max() > 2 * sizes.mean()


def dealt(partition: Any, **given: Any) -> dict[int, list[int]]:
    """Who holds which sample of a run of `X`."""
    run = fedmuon.run(tables(federation=given), data=(X, Y), task=linear, partition=partition)
    with np.load(run.path / "partition.npz") as held:
        train, client, test = held["train_index"], held["client"], held["test_index"]
    assert len(np.unique(np.concatenate([train, test]))) == len(train) + len(test)
    return {k: sorted(train[client == k].tolist()) for k in range(client.max() + 1)}


def test_index_arrays_and_functions_deal_as_they_say() -> None:
    parts = [[5, 3, 1], range(10, 20), torch.arange(30, 40)]
    assert dealt(parts) == {0: [1, 3, 5], 1: [*range(10, 20)], 2: [*range(30, 40)]}
    by_hand = dealt(lambda labels, clients, rng: np.arange(len(labels)) % clients)
    assert [len(rows) for rows in by_hand.values()] == [16, 16, 16]
    arrays = dealt(lambda labels, clients, rng: np.array_split(np.arange(len(labels)), clients))
    assert sorted(chain(*arrays.values())) == sorted(chain(*by_hand.values()))


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_column_says_whose_each_sample_is(tmp_path: Path, kind: str) -> None:
    owner = RNG.integers(0, 3, 60)
    file = tmp_path / f"held.{kind}"
    if kind == "csv":
        rows = zip(*X.T, CLASSES, owner, strict=True)
        lines = ["a,b,c,y,who", *(",".join(map(str, row)) for row in rows)]
        file.write_text("\n".join(lines), encoding="utf-8")
    else:
        np.savez(file, inputs=X, y=CLASSES, who=owner)
    data = {"name": kind, "folder": str(file), "train": 50, "test": 10, "minimum": 1}
    data["options"] = {"label": "y", "client": "who"}
    run = fedmuon.run(tables(data=data, federation={"partition": "column"}))
    with np.load(run.path / "partition.npz") as held:
        assert np.array_equal(owner[held["train_index"]], held["client"])
    assert run.config.data.folder == str(file)
