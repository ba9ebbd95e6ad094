"""Samples held out besides the test samples: a validation part, and each client's own test part."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedmuon
from fedmuon.config.load import parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.data.federated import Dealt, split
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.runs.observers.client_tests import distribution

TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "train": 300, "test": 100},
    "federation": {"clients": 6, "per-round": 3, "rounds": 2},
    "local": {"recipe": "fedavg"},
    "output": {"evaluate-every": 1},
}


UNLIKE = {"train_seconds", "seconds", "check"}  # of runs of one experiment


def tables(**changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    names = TABLES | changes
    return {name: TABLES.get(name, {}) | dict(changes.get(name, {})) for name in names}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# --- sizes of the user's own files ---


def sizes(data: dict[str, Any]) -> tuple[int, int, int]:
    config = resolve(parse({"data": data}))
    found = build_data(config)
    return len(found.labels), len(found.test_labels), len(found.validation_labels)


def test_a_file_is_used_whole_with_a_fifth_held_out(tmp_path: Path) -> None:
    """As for data passed in Python, unless train or test are set."""
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["x,label", *(f"{k / 100},{k % 2}" for k in range(500))]))
    csv = {"name": "csv", "folder": str(file)}
    assert sizes(csv) == (400, 100, 0)
    assert sizes({**csv, "validation": 0.25}) == (320, 100, 80)
    assert sizes({**csv, "train": 450}) == (450, 50, 0)
    assert sizes({**csv, "test": 60}) == (440, 60, 0)
    with pytest.raises(InputError, match="for example to train = 400 and test = 100"):
        sizes({**csv, "train": 500, "test": 100})


def test_a_file_with_a_test_part_is_split_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of a text. " * 2000)
    data = {"name": "text", "folder": str(tmp_path / "a.txt"), "context": 16}
    config = resolve(parse({"data": data, "task": {"name": "network", "model": "gpt"}}))
    source, found = read_source(config), config.data
    assert source.official_test is not None
    assert found.train == source.official_test
    assert found.test == len(source.labels) - source.official_test


# --- validation ---


@given(n=st.integers(5, 60), official=st.none() | st.integers(3, 50), held=st.integers(1, 20))
def test_validation_is_behind_train_and_test(n: int, official: int | None, held: int) -> None:
    """A naive copy of the draw: what the same permutation has after the train samples."""
    official = official if official is not None and official < n else None
    last = n if official is None else official
    train, test = max(1, last // 3), max(1, n // 10)
    without = split(np.zeros(n), official, train, test, 3)
    assert len(without[2]) == 0
    spare = last - train - (test if official is None else 0)
    if official is not None and test > n - official:
        return
    if held > spare:
        with pytest.raises(InputError, match=rf"requires {held} samples, .* only {spare}. Lower"):
            split(np.zeros(n), official, train, test, 3, held)
        return
    found = split(np.zeros(n), official, train, test, 3, held)
    assert (found[0] == without[0]).all() and (found[1] == without[1]).all()
    together = np.concatenate(found)
    assert len(found[2]) == held and len(np.unique(together)) == len(together)
    assert found[2].max() < last
    longer = split(np.zeros(n), official, train + held, test, 3)[0]
    assert longer[train:].tolist() == found[2].tolist()


def test_validation_is_measured_and_changes_nothing_else(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    engine = {"dtype": "float64"}
    config = tables(data={"validation": 0.25}, engine=engine)
    result = fedmuon.run(config, task=module, out=tmp_path / "with")
    without = fedmuon.run(tables(engine=engine), task=module, out=tmp_path / "without")
    for name, value in result.model.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(without.model[name]))
    new = ("validation_loss", "validation_accuracy")
    for one, other in zip(records(tmp_path / "with"), records(tmp_path / "without"), strict=True):
        assert set(one) == {*other, *new}
        assert all(one[name] == other[name] for name in {*other} - UNLIKE)
    parts = [np.load(tmp_path / name / "partition.npz") for name in ("with", "without")]
    assert set(parts[0]) == {*parts[1], "validation_index"}
    index = parts[0]["validation_index"]
    assert len(index) == 75
    assert not {*index.tolist()} & {*parts[0]["train_index"], *parts[0]["test_index"]}
    # The oracle: one sample after the other, from what is stored.
    source = read_source(parse(tables()))
    weight, bias = (np.asarray(result.model[name]) for name in ("1.weight", "1.bias"))
    losses, hits = [], 0
    for i in index:
        scores = weight.reshape(10, 64) @ (source.inputs[i].reshape(-1).astype(float))
        scores = scores + bias.reshape(10)
        top = scores.max()
        losses.append(top + np.log(np.exp(scores - top).sum()) - scores[source.labels[i]])
        hits += int(scores.argmax() == source.labels[i])
    last = result.summary
    assert last["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-12, abs=0)
    assert last["validation_accuracy"] == hits / 75
    assert last["validation_loss"] != last["test_loss"]


def test_early_stopping_and_resuming_see_validation(tmp_path: Path) -> None:
    stop = {"callback": "early-stopping", "evaluate-every": 1}
    stop["options"] = {"measure": "validation_loss", "patience": 1, "least": 100.0}
    config = tables(data={"validation": 20}, federation={"rounds": 9}, output=stop)
    result = fedmuon.run(config, out=tmp_path / "run")
    assert result.summary["rounds"] == 2 and "validation_loss" in result.summary["stopped"]
    again = fedmuon.run(out=tmp_path / "run", resume=True)
    assert again.summary == result.summary
    del config["data"]["validation"]
    with pytest.raises(InputError, match="validation_loss, but the rounds do not record"):
        fedmuon.run(config, out=tmp_path / "other")


def test_samples_of_a_user_leave_room_for_validation() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    for validation, train in ((0, 48), (8, 40), (0.5, 32)):
        data = {"name": "given", "validation": validation}
        config = parse({**TABLES, "data": data}).with_objects(UserObjects(data=(x, y)))
        found = build_data(resolve(config))
        assert (len(found.labels), len(found.test_labels)) == (train, 12)
        assert len(found.validation_labels) == (validation if validation != 0.5 else 16)
    parts = [range(0, 20), range(20, 30)]
    config = {"data": {"test": 25, "validation": 5}, "federation": {"rounds": 1}}
    result = fedmuon.run(config, data=(x, y), partition=parts)
    held = np.load(result.path / "partition.npz")
    assert len(held["test_index"]) == 25
    assert sorted([*held["test_index"], *held["validation_index"]]) == [*range(30, 60)]
    config["data"]["validation"] = 6
    with pytest.raises(InputError, match=r"requires 6 samples, but train and test leave only 5"):
        fedmuon.run(config, data=(x, y), partition=parts)


@pytest.mark.parametrize(("value", "words"), [
    (2.5, "set a share below 1, or an integer number of samples"),
    (-1, "set a number of at least 0"),
    (1398, "requires 1398 samples, but train and test leave only 1397. Lower"),
])  # fmt: skip
def test_impossible_validation_is_refused(value: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fedmuon.run(tables(data={"validation": value}))


# --- each client's own test samples ---


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8), share=st.floats(0.01, 0.99),
    seed=st.integers(0, 20),
)  # fmt: skip
def test_each_client_holds_out_its_share(sizes: list[int], share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    client = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    train = rng.permutation(100 + np.arange(len(client)))
    dealt = Dealt(train, client, np.array([1]), np.array([2]))
    if max(sizes) < 2:
        with pytest.raises(InputError, match="every client has only one"):
            dealt.with_client_test(share, np.random.default_rng(1))
        return
    found = dealt.with_client_test(share, np.random.default_rng(1))
    owner = dict(zip(train.tolist(), client.tolist(), strict=True))
    left = [one for one in train.tolist() if one not in found.client_test]
    assert found.train.tolist() == left  # in the order in which they were dealt
    assert found.client.tolist() == [owner[one] for one in left]
    assert found.tested.tolist() == [owner[one] for one in found.client_test.tolist()]
    assert sorted([*left, *found.client_test.tolist()]) == sorted(train.tolist())
    assert (found.test, found.validation) == (dealt.test, dealt.validation)
    for i, size in enumerate(sizes):
        asked = max(1, round(share * size)) if size > 1 else 0
        assert int((found.tested == i).sum()) == min(asked, max(size - 1, 0))


def test_held_out_samples_are_uniform_within_a_client() -> None:
    """Each of 5 samples is held out with probability 2/5; within 5 deviations of 2000 draws."""
    dealt, counts = Dealt(np.arange(10), np.repeat([0, 1], 5), np.array([])), np.zeros(10)
    for seed in range(2000):
        counts[dealt.with_client_test(0.4, np.random.default_rng(seed)).client_test] += 1
    assert (abs(counts - 800) < 5 * np.sqrt(2000 * 0.4 * 0.6)).all()
    assert counts[:5].sum() == counts[5:].sum() == 4000


CLIENT_TEST = tables(
    data={"client-test": 0.25, "validation": 20}, engine={"dtype": "float64"},
    federation={"clients": 11, "per-round": 4}, output={"evaluate-every": 9},
)  # fmt: skip


def test_the_final_model_is_measured_per_client(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    result = fedmuon.run(CLIENT_TEST, task=module, out=tmp_path / "run")
    config = result.config.with_objects(result.given)
    source, data = read_source(config), build_data(config)
    held = np.load(tmp_path / "run" / "partition.npz")
    weight, bias = (np.asarray(result.model[name]) for name in ("1.weight", "1.bias"))
    accuracies, before = [], build_data(parse(tables(federation={"clients": 11, "per-round": 4})))
    for client in range(11):  # one sample after the other, from what is stored
        own, hits = data.client_test(client), 0
        assert sorted(own) == sorted(
            held["client_test_index"][held["client_test_client"] == client]
        )
        dealt = set(before.train_index[before.client == client])
        trained = set(held["train_index"][held["client"] == client])
        assert set(own) | trained == dealt and not set(own) & trained
        assert len(own) == max(1, round(0.25 * len(dealt)))
        assert data.sizes[client] == len(dealt) - len(own)
        for i in own:
            scores = weight.reshape(10, 64) @ (source.inputs[i].reshape(-1).astype(float))
            hits += int((scores + bias.reshape(10)).argmax() == source.labels[i])
        accuracies.append(hits / len(own))
    found, mean = result.summary, sum(accuracies) / 11
    assert found["client_test_accuracy"] == pytest.approx(mean, rel=1e-12, abs=0)
    spread = (sum((one - mean) ** 2 for one in accuracies) / 11) ** 0.5
    assert found["client_test_accuracy_std"] == pytest.approx(spread, rel=1e-12, abs=0)
    worst = sum(sorted(accuracies)[:2]) / 2  # a tenth of 11 clients, rounded up
    assert found["client_test_accuracy_worst_decile"] == pytest.approx(worst, rel=1e-12, abs=0)
    assert worst < mean and found["accuracy"] != mean
    assert found["validation_accuracy"] != found["accuracy"]
    again = fedmuon.run(out=tmp_path / "run", resume=True, task=module)
    assert again.summary == found


def test_of_losses_and_errors_the_worst_are_the_largest() -> None:
    values = np.array([3.0, 1.0, 2.0, 5.0])
    always = {"": 2.75, "_std": np.std(values)}
    assert distribution(values, "accuracy") == always | {"_worst_decile": 1}
    assert distribution(values, "loss") == always | {"_worst_decile": 5}
    assert distribution(np.arange(30.0), "loss")["_worst_decile"] == 28
    both = {"_lowest_decile": 1, "_highest_decile": 5}
    assert distribution(values, "of my own") == always | both  # nobody says which is better


def test_clients_without_test_samples_are_left_out() -> None:
    """Of three clients with 1, 4 and 7 samples, and real targets, of which the loss is measured."""
    x = np.random.default_rng(0).normal(size=(17, 2))
    parts = [[0], range(1, 5), range(5, 12)]
    config = {"data": {"client-test": 0.5}, "federation": {"rounds": 1, "per-round": 3},
              "local": {"recipe": "fedavg"}, "engine": {"dtype": "float64"}}  # fmt: skip
    module = nn.Linear(2, 1).double()
    result = fedmuon.run(config, data=(x, x.sum(1)), partition=parts, task=module)
    data = build_data(result.config.with_objects(result.given))
    assert [len(data.client_test(i)) for i in range(3)] == [0, 2, 4]
    assert data.sizes.tolist() == [1, 2, 3]
    weight, bias = (np.asarray(result.model[name]) for name in ("weight", "bias"))
    losses = []
    for client in (1, 2):
        errors = [
            x[i] @ weight.ravel() + bias.item() - x[i].sum() for i in data.client_test(client)
        ]
        losses.append(sum(one**2 for one in errors) / len(errors))
    assert result.summary["client_test_loss"] == pytest.approx(np.mean(losses), rel=1e-12, abs=0)
    worst = result.summary["client_test_loss_worst_decile"]
    assert worst == pytest.approx(max(losses), rel=1e-12, abs=0)
    parts = [[0], [1], [2]]
    with pytest.raises(InputError, match=r"client-test = 0.5 holds out no samples, because every"):
        fedmuon.run(config, data=(x, x.sum(1)), partition=parts, task=module)


def test_certificates_neighbours_and_ledgers_use_training_sizes(tmp_path: Path) -> None:
    matrix = tables(
        data={"client-test": 0.5, "minimum": 10}, local={"recipe": "fedmuon", "lr": 1e-4}
    )
    matrix["orthogonalizer"] = {"lambda": 0.1}
    matrix["federation"] |= {"partition": "iid", "clients": 3}
    matrix["stability"] = {"trials": 8}
    result = fedmuon.stability(matrix, out=tmp_path / "run")
    data = build_data(result.config)
    assert data.sizes.tolist() == [50, 50, 50]
    rows = np.genfromtxt(tmp_path / "run" / "neighbours.csv", delimiter=",", names=True)
    assert set(rows["index"].astype(int)) <= set(data.train_index)
    used = {*data.train_index, *data.client_test_index, *data.test_index}
    assert not set(rows["replacement"].astype(int)) & used
    bound = fedmuon.bound(tmp_path / "run")
    matrix["data"] |= {"train": 150, "client-test": 0.0}
    half = fedmuon.bound(fedmuon.run(matrix, out=tmp_path / "half"))
    matrix["data"]["train"] = 300
    whole = fedmuon.bound(fedmuon.run(matrix, out=tmp_path / "whole"))
    assert bound["value"] == pytest.approx(half["value"], rel=1e-3)
    assert whole["value"] < 0.9 * bound["value"]

    private = tables(data={"client-test": 0.5}, local={"recipe": "dp-sgd"})
    private["federation"] |= {"partition": "iid", "clients": 3}
    private["privacy"] = {"noise": 1.0, "lot": 10.0, "insecure-reproducible-noise": True}
    spent = {}
    for train, share in ((300, 0.5), (150, 0.0), (300, 0.0)):
        private["data"] |= {"train": train, "client-test": share}
        spent[train, share] = fedmuon.run(private).summary["privacy"]["epsilon"]
    assert spent[300, 0.5] == spent[150, 0.0] > spent[300, 0.0]


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_is_below_one(share: float) -> None:
    with pytest.raises(InputError, match=r"\[data\] client-test = "):
        fedmuon.run(tables(data={"client-test": share}))
