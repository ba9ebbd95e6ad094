"""The average of the models after the last rounds: against the models themselves, and resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from safetensors.numpy import load_file

from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.runs.callbacks import Callback
from fedmuon.runs.observers.average_model import averaged_rounds

ROUNDS = 7
PRIVATE = {"local": {"recipe": "dp-muon", "steps": 1}, "privacy": {"noise": 1.0, "lot": 4.0}}
NETWORK = {"task": {"name": "network", "model": "mlp"}}


class Models(Callback):
    """A callback that stores the model after each round, and can stop or fail after a round."""

    def __init__(self, stop: int = 0, fail: int = 0) -> None:
        self.models: dict[int, dict[str, np.ndarray]] = {}
        self.stop, self.fail = stop, fail

    def on_round(self, record: Mapping[str, Any], state: Any) -> str | None:
        params = {name: value[0].cpu().double().numpy() for name, value in state.params.items()}
        self.models[record["round"]] = params
        if record["round"] == self.fail:
            raise RuntimeError("killed")
        return "enough" if record["round"] == self.stop else None


def run(folder: Path, share: float = 0.5, callback: Callback | None = None, **tables: Any) -> Any:
    config = small({"federation": {"rounds": ROUNDS}, "output": {"average": share}}, **tables)
    return execute(config, folder, callbacks=[callback] if callback else [], resume=folder.exists())


@pytest.mark.parametrize("tables", [{}, PRIVATE, NETWORK], ids=["matrix", "private", "network"])
def test_the_average_is_the_mean_of_the_last_models(tables: Any, tmp_path: Path) -> None:
    watched = Models()
    summary = run(tmp_path / "a", 0.5, watched, **tables)
    average = load_file(tmp_path / "a" / "average.safetensors")
    last = [watched.models[number] for number in (4, 5, 6, 7)]  # round(0.5 * 7) = 4 models
    for name, value in average.items():
        mean = sum(model[name] for model in last) / 4
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-7)  # float32
        fewer = sum(model[name] for model in last[1:]) / 3
        assert not np.allclose(mean, fewer, rtol=1e-5, atol=1e-6)  # a wrong number is seen
    assert {"average_train_loss", "average_test_loss", "average_accuracy"} <= summary.keys()
    assert summary["average_train_loss"] != summary["train_loss"]
    if "privacy" in summary:
        assert "average.safetensors" in summary["privacy"]["released"]


def test_the_average_changes_nothing_else(tmp_path: Path) -> None:
    with_it, without = run(tmp_path / "a", 0.5), run(tmp_path / "b", 0.0)
    for name in ("model.safetensors", "momentum.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not (tmp_path / "b" / "average.safetensors").exists()
    measures = {name for name in with_it if name.startswith("average_")}
    assert {name: with_it[name] for name in without if "loss" in name} == {
        name: without[name] for name in without if "loss" in name
    }
    assert set(with_it) - set(without) == measures


def test_the_average_of_one_model_is_this_model(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", 0.01)
    average, model = (load_file(tmp_path / "a" / f"{n}.safetensors") for n in ("average", "model"))
    assert all(np.array_equal(average[name], model[name]) for name in model)
    assert summary["average_train_loss"] == summary["train_loss"]


@pytest.mark.parametrize("fail", [1, 3, 4, 6])
@pytest.mark.parametrize("tables", [{}, PRIVATE], ids=["matrix", "private"])
def test_a_resumed_run_has_the_same_average(fail: int, tables: Any, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 0.6, **tables)
    with pytest.raises(InputError, match="killed"):
        run(tmp_path / "parts", 0.6, Models(fail=fail), **tables)
    resumed = run(tmp_path / "parts", 0.6, Models(), **tables)
    if not tables:  # secret noise differs
        files = [
            (tmp_path / part / "average.safetensors").read_bytes() for part in ("whole", "parts")
        ]
        assert files[0] == files[1]
        assert resumed["average_test_loss"] == whole["average_test_loss"]


def test_an_interrupted_round_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after the observers saw a round, and before its record is written."""
    from fedmuon.runs.directory import RunDirectory

    run(tmp_path / "whole", 1.0)
    append = RunDirectory.append

    def killed(directory: RunDirectory, record: Any) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt
        append(directory, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", killed)
        with pytest.raises(BaseException):  # noqa: B017
            run(tmp_path / "parts", 1.0)
    run(tmp_path / "parts", 1.0)
    files = [(tmp_path / part / "average.safetensors").read_bytes() for part in ("whole", "parts")]
    assert files[0] == files[1]


def test_a_run_that_stops_early_averages_the_rounds_it_had(tmp_path: Path) -> None:
    watched = Models(stop=5)
    run(tmp_path / "a", 0.5, watched)
    average = load_file(tmp_path / "a" / "average.safetensors")["weight"]
    mean = (watched.models[4]["weight"] + watched.models[5]["weight"]) / 2
    np.testing.assert_allclose(average, mean, rtol=1e-6)
    summary = run(tmp_path / "b", 0.5, Models(stop=3))
    assert not (tmp_path / "b" / "average.safetensors").exists()
    assert not any(name.startswith("average_") for name in summary)


@pytest.mark.parametrize(("share", "rounds", "count"), [(0.5, 10, 5), (1.0, 3, 3), (0.01, 3, 1)])
def test_the_number_of_averaged_rounds(share: float, rounds: int, count: int) -> None:
    assert averaged_rounds(share, rounds) == count
