"""clients.jsonl: what a run tells of each client, against loops over single samples in float64."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from safetensors.numpy import load_file
from torch import nn

import fedmuon
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.federated import client_metrics
from fedmuon.federated.client_data import build_data
from fedmuon.federated.client_metrics import cosines_to_mean
from fedmuon.runs.directory import RunDirectory

ON = {"clients": True, "evaluate-every": 4, "checkpoint-every": 3}
FEDAVG = {"recipe": "fedavg", "lr": 0.7, "steps": 3}


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]


def loss_and_gradient(
    x: np.ndarray, inputs: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray]:
    """The mean of 1 - p_y over samples, one after the other, and its gradient in X [d, c]."""
    loss, slope = 0.0, np.zeros_like(x)
    for sample, label in zip(inputs, labels, strict=True):
        logits = [float(sum(sample[i] * x[i, c] for i in range(len(x)))) for c in range(x.shape[1])]
        powers = [math.exp(one) for one in logits]
        p = np.array(powers) / sum(powers)
        loss += 1 - float(p[label])
        # d(-p_y)/dz_c = p_y p_c - [c = y] p_y
        slope += np.outer(sample, p[label] * p - p[label] * np.eye(len(p))[label])
    return loss / len(labels), slope / len(labels)


def right(x: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> float:
    hits = [int(np.argmax(one @ x)) == label for one, label in zip(inputs, labels, strict=True)]
    return sum(hits) / len(hits)


def matrix(run: Path, name: str) -> np.ndarray:
    return np.asarray(load_file(run / f"{name}.safetensors")["weight"], float).reshape(7, 3)


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-11, abs=1e-13)


def same_client_records(inline: Path, other: Path) -> None:
    """Whole numbers alike, floats to 1e-12, and some of them away from 0."""
    found = [
        [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
        for run in (inline, other)
    ]
    assert len(found[0]) == len(found[1]) > 0
    for one, two in zip(*found, strict=True):
        assert list(one) == list(two)
        for name in one.keys() - {"check"}:
            near = pytest.approx(one[name], rel=1e-12, abs=1e-12)
            assert two[name] == (near if isinstance(one[name], float) else one[name]), name
    assert max(one["drift"] for one in found[1]) > 1e-3


def test_every_number_of_fedavg_is_that_of_a_naive_loop(tmp_path: Path) -> None:
    average = {"aggregate": "auto"}  # by samples, as FedAvg's paper has it
    config = small(federation=average, data={"client-test": 0.4}, local=FEDAVG, output=ON)
    execute(config, tmp_path / "run")
    data, found = build_data(config), lines(tmp_path / "run")
    x, count, place = matrix(tmp_path / "run", "initial"), [0] * 6, 0
    seen, first = [], data.client_test_offsets
    for number, chosen in enumerate(np.load(tmp_path / "run" / "schedule.npy"), 1):
        moved, before = [], place
        for client in sorted(chosen.tolist()):
            rows = slice(data.offsets[client], data.offsets[client + 1])
            own = data.inputs[rows], data.labels[rows]
            tests = slice(first[client], first[client + 1])
            test = data.client_test_inputs[tests], data.client_test_labels[tests]
            local = x.copy()
            for _ in range(3):
                local -= 0.7 * loss_and_gradient(local, *own)[1]
            count[client] += 1
            moved.append((local - x).ravel())
            one, place = found[place], place + 1
            assert (one["round"], one["client"]) == (number, client)
            assert one["samples"] == len(own[1]) and one["participations"] == count[client]
            assert one["loss_before"] == close(loss_and_gradient(x, *own)[0])
            assert one["loss_after"] == close(loss_and_gradient(local, *own)[0])
            assert one["drift"] == close(math.sqrt(sum(v * v for v in moved[-1])))
            assert one["client_test_loss"] == close(loss_and_gradient(local, *test)[0])
            assert one["client_test_accuracy"] == right(local, *test)
            assert "momentum_norm" not in one  # FedAvg has none
            seen.append(one["drift"])
        mean = np.mean(moved, 0)
        for one, update in zip(found[before:place], moved, strict=True):
            lengths = np.linalg.norm(update) * np.linalg.norm(mean)
            assert one["cosine"] == close(float(update @ mean) / lengths)
        sizes = [one["samples"] for one in found[before:place]]
        x = x + np.average(moved, 0, weights=sizes).reshape(x.shape)
    assert place == len(found) == 8 * 3 and max(count) > 1
    assert len({round(one, 9) for one in seen}) > 20  # no number stands for several
    assert fedmuon.Result(tmp_path / "run").clients()[-1]["round"] == 8


def test_momentum_is_that_of_the_last_step(tmp_path: Path) -> None:
    """One step of round r makes M <- 0.9 M + 0.1 G; M and X are those that r - 1 rounds leave."""
    for rounds in (1, 2):
        tables = {"federation": {"rounds": rounds}, "local": {"recipe": "fedmuon"}}
        execute(small(**tables, output=ON), tmp_path / str(rounds))
    config = small(federation={"rounds": 2}, local={"recipe": "fedmuon"}, output=ON)
    assert config.local.momentum == 0.9 and config.local.momentum_form == "ema"
    data, found = build_data(config), lines(tmp_path / "2")
    assert len(found) == 6
    x, m = (matrix(tmp_path / "1", name) for name in ("model", "momentum"))
    for one in found[3:]:
        rows = slice(data.offsets[one["client"]], data.offsets[one["client"] + 1])
        slope = loss_and_gradient(x, data.inputs[rows], data.labels[rows])[1]
        assert one["momentum_norm"] == close(float(np.linalg.norm(0.9 * m + 0.1 * slope)))
        assert one["momentum_norm"] != close(float(np.linalg.norm(0.1 * m + 0.9 * slope)))


@pytest.mark.parametrize(
    ("recipe", "has"),
    [("scaffold", False), ("fedmuon-corrected", True), ("muloco", True), ("fedavgm", False),
     ("local-muon", True), ("fednova", False)],
)  # fmt: skip
def test_momentum_is_told_where_clients_have_one(recipe: str, has: bool, tmp_path: Path) -> None:
    execute(small(federation={"rounds": 2}, local={"recipe": recipe}, output=ON), tmp_path / "run")
    found = lines(tmp_path / "run")
    assert {"momentum_norm" in one for one in found} == {has}
    assert not has or min(one["momentum_norm"] for one in found) > 0


def test_drift_is_of_the_local_model_and_not_of_what_a_rule_returns(tmp_path: Path) -> None:
    """FedNova divides what it returns by the steps, and drifts in round 1 as FedAvg does."""
    tables = {"federation": {"rounds": 1}, "output": ON}
    for recipe in ("fedavg", "fednova"):
        execute(small(**tables, local={**FEDAVG, "recipe": recipe}), tmp_path / recipe)
    one, other = lines(tmp_path / "fedavg"), lines(tmp_path / "fednova")
    for name in ("drift", "loss_after", "loss_before", "cosine"):
        assert [a[name] for a in one] == pytest.approx([b[name] for b in other], rel=1e-12)


def test_cosines() -> None:
    before = {"a": torch.ones(1, 2, 2), "b": torch.zeros(1, 1)}
    models = [{"a": before["a"] + one * torch.eye(2), "b": before["b"] + two}
              for one, two in ((1.0, 0.0), (0.0, 2.0), (0.0, 0.0))]  # fmt: skip
    found = cosines_to_mean(before, models)
    mean = math.sqrt(2 / 9 + 4 / 9)
    assert found[:2] == [close(2 / 3 / math.sqrt(2) / mean), close(4 / 3 / 2 / mean)]
    assert math.isnan(found[2]) and cosines_to_mean(before, []) == []


def test_a_client_that_did_not_move_has_no_cosine(tmp_path: Path) -> None:
    result = fedmuon.run(
        small(federation={"rounds": 2}, local={"recipe": "fedavg"}, output=ON),
        schedule=lambda round: float(round), out=tmp_path / "run",
    )  # fmt: skip
    still, moved = result.clients()[:3], result.clients()[3:]
    assert all(one["drift"] == 0 and "cosine" not in one for one in still)
    assert all(one["loss_before"] == one["loss_after"] for one in still)
    assert all(one["drift"] > 0 and "cosine" in one for one in moved)


def test_an_interrupted_run_has_the_same_bytes(tmp_path: Path) -> None:
    """Stopped after any round, with records beyond the checkpoint, and once with half a line."""
    config = small(data={"client-test": 0.4}, local=FEDAVG, output=ON)
    execute(config, tmp_path / "whole")
    wanted = (tmp_path / "whole" / "clients.jsonl").read_bytes()
    for stop in (1, 2, 5):
        run = tmp_path / str(stop)

        def halt(record: dict, stop: int = stop) -> None:
            if record["round"] == stop:
                raise SystemError

        with pytest.raises(SystemError):
            execute(config, run, on_round_end=halt)
        if stop == 5:  # a checkpoint of round 3, as after a kill
            (run / "checkpoint.safetensors").unlink()
            with (run / "clients.jsonl").open("a") as file:
                file.write('{"round": 6, "cli')
            assert len(RunDirectory(run).client_records()) == 15
        execute(None, run, resume=True)
        assert (run / "clients.jsonl").read_bytes() == wanted
    assert not (tmp_path / "whole" / "checkpoint.safetensors").exists()


def test_a_damaged_line_is_rejected(tmp_path: Path) -> None:
    config, run = small(local=FEDAVG, output=ON), tmp_path / "run"

    def halt(record: dict) -> None:
        if record["round"] == 5:
            raise SystemError

    with pytest.raises(SystemError):
        execute(config, run, on_round_end=halt)
    file = run / "clients.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"client"', '"klient"', 1))
    with pytest.raises(
        InputError, match=r"line 1 of .*clients.jsonl is damaged, is missing or belongs to an"
    ):
        execute(None, run, resume=True)
    file.unlink()
    with pytest.raises(
        InputError, match=r"line 1 of .*clients.jsonl is damaged, is missing or belongs to an"
    ):
        execute(None, run, resume=True)
    file.write_text(whole)
    execute(None, run, resume=True)
    file.write_text(whole)
    with pytest.raises(InputError, match=r"clients\.jsonl does not match"):
        fedmuon.Result(run).clients()


def test_nothing_is_measured_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*given: object) -> None:
        raise AssertionError

    monkeypatch.setattr(client_metrics, "_means", measured)
    execute(small(), tmp_path / "off")
    assert not (tmp_path / "off" / "clients.jsonl").exists()
    with pytest.raises(InputError, match=r"no records of clients.* \[output\] clients = true"):
        fedmuon.Result(tmp_path / "off").clients()
    with pytest.raises(AssertionError):
        execute(small(output=ON), tmp_path / "on")


def test_records_change_no_result(tmp_path: Path) -> None:
    for name, output in (("off", {}), ("on", ON)):
        execute(small(local={"recipe": "fedmuon", "batch": 4}, output=output), tmp_path / name)
    for file in ("model.safetensors", "momentum.safetensors"):
        assert (tmp_path / "on" / file).read_bytes() == (tmp_path / "off" / file).read_bytes()


def test_a_network_measures_what_its_task_does(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(17, 2))
    parts = [[0], range(1, 5), range(5, 12)]
    config = {"data": {"client-test": 0.5}, "federation": {"rounds": 1, "per-round": 3},
              "local": {"recipe": "fedavg", "lr": 0.1, "steps": 1}, "output": {"clients": True},
              "engine": {"dtype": "float64"}}  # fmt: skip
    module = nn.Linear(2, 1).double()
    result = fedmuon.run(config, data=(x, x.sum(1)), partition=parts, task=module,
                         out=tmp_path / "run")  # fmt: skip
    found = result.clients()
    assert ["client_test_loss" in one for one in found] == [False, True, True]
    first = load_file(tmp_path / "run" / "initial.safetensors")
    weight, bias = first["weight"].reshape(2), float(first["bias"].reshape(()))
    i = int(build_data(result.config.with_objects(result.given)).train_index[0])
    error = float(x[i] @ weight) + bias - x[i].sum()
    assert found[0]["loss_before"] == close(error**2)
    slope = 2 * error * np.array([*x[i], 1.0])
    assert found[0]["drift"] == close(0.1 * float(np.linalg.norm(slope)))


@pytest.mark.parametrize("tables", [
    {"local": {"recipe": "dp-sgd"}, "privacy": {"noise": 1.0, "lot": 5.0, "bound": 0.2}},
    {"privacy": {"level": "client", "noise": 1.0, "bound": 0.2}},
])  # fmt: skip
def test_private_runs_release_nothing_of_single_clients(tables: dict) -> None:
    small(**tables)
    with pytest.raises(InputError, match=r"\[output\] clients = true .* contain no noise. Set cli"):
        small(**tables, output=ON)


def test_an_aggregate_that_writes_into_replies_changes_no_record_of_clients(tmp_path: Path) -> None:
    """Records tell what clients returned, before the server combines it."""

    def writing(replies: Any) -> dict[str, torch.Tensor]:
        for one in replies[1:]:
            for name, value in one.params.items():
                replies[0].params[name].add_(value)
        return {name: value.div_(len(replies)) for name, value in replies[0].params.items()}

    config = small(output=ON)
    execute(config, tmp_path / "mean")
    given = small(federation={"aggregate": "given"}, output=ON)
    execute(given.with_objects(UserObjects(aggregate=writing)), tmp_path / "written")
    same_client_records(tmp_path / "mean", tmp_path / "written")
