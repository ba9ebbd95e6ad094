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
from fedmuon.data.federated import split
from fedmuon.federated.build import resolve
from fedmuon.federated.client_data import build_data, read_source

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
        with pytest.raises(InputError, match=rf"asks for {held} samples, .* leave {spare}: lower"):
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
    with pytest.raises(InputError, match="validation_loss, which no round has"):
        fedmuon.run(config)


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
    with pytest.raises(InputError, match=r"asks for 6 samples, and train and test leave 5"):
        fedmuon.run(config, data=(x, y), partition=parts)


@pytest.mark.parametrize(("value", "words"), [
    (2.5, "give a share below 1, or a whole number of samples"),
    (-1, "give a number of at least 0"),
    (1398, "asks for 1398 samples, and train and test leave 1397: lower"),
])  # fmt: skip
def test_impossible_validation_is_refused(value: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fedmuon.run(tables(data={"validation": value}))
