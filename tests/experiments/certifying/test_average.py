"""Certificates of the average of the last models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from safetensors.numpy import load_file
from scipy import stats
from typer.testing import CliRunner

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.certify import certify
from fedmuon.experiments.certifying.latex import of_run
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute

PRIVATE = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 12.0, "lot": 10}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("private") / "run"
    execute(small(PRIVATE, output={"average": 0.5}), place)
    return place


def test_the_average_is_certified_in_place_of_the_final_model(folder: Path) -> None:
    last, average = certify(folder), certify(folder, average=True)
    assert average.average and not last.average
    assert average.divergence == last.divergence  # post-processing is free
    summary = json.loads((folder / "summary.json").read_text())
    assert average.train["loss"] == pytest.approx(summary["average_train_loss"], rel=1e-5)
    assert average.test["error"] == pytest.approx(1 - summary["average_accuracy"])
    assert average.train["loss"] != last.train["loss"]
    row, _ = average.rows[0], last.rows[0]
    errors = round(60 * average.test["error"])
    assert row.name == "held-out samples" and row.measure == "error"
    assert row.value == pytest.approx(stats.beta.ppf(0.95, errors + 1, 60 - errors))
    for of_average, of_last in zip(average.rows, last.rows, strict=True):
        assert of_average.name == of_last.name
        if of_average.name == "privacy of samples":
            assert of_average.status == of_last.status
            assert of_average.beside == average.train[of_average.measure]
    assert "risk of the average of the last models" in of_run(average)
    assert "risk of the final model" in of_run(last)
    (stability,) = [row for row in average.rows if row.name == "stability"]
    assert stability.status == "refused" and "without --average" in stability.refusal


def test_the_bound_of_the_final_model_is_not_that_of_the_average(tmp_path: Path) -> None:
    """A run whose final model has a certificate from stability."""
    tables: dict[str, Any] = {"local": {"lr": 1e-5}, "engine": {"dtype": "float64"}}
    execute(small(tables, output={"average": 1.0}), tmp_path / "run")
    statuses = [
        {row.name: row.status for row in certify(tmp_path / "run", average=average).rows}
        for average in (False, True)
    ]
    assert [status["stability"] for status in statuses] == ["certified", "refused"]


def test_a_run_without_an_average_is_refused(tmp_path: Path) -> None:
    execute(small(PRIVATE), tmp_path / "run")
    with pytest.raises(InputError, match=r"no average of models\. Set .output. average"):
        fedmuon.certify(tmp_path / "run", average=True)


@pytest.mark.parametrize("name", ["probes", "output_noise"])
def test_what_belongs_to_the_final_model_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(InputError, match="are for the final model"):
        fedmuon.certify(folder, average=True, **{name: 1})


def test_the_command_certifies_the_average(folder: Path) -> None:
    done = CliRunner().invoke(app, ["certify", str(folder), "--average"])
    assert done.exit_code == 0 and "Risk of the average of the last models" in done.output
    found = json.loads(
        CliRunner().invoke(app, ["certify", str(folder), "--average", "--json"]).output
    )
    assert found["train"] == fedmuon.certify(folder, average=True).train
    with_plan = ["certify", "--plan", str(folder / "config.toml"), "--average"]
    assert "--average belong to a run folder" in str(CliRunner().invoke(app, with_plan).exception)


def test_a_damaged_average_is_found(tmp_path: Path) -> None:
    execute(small(PRIVATE, output={"average": 0.5}), tmp_path / "run")
    file = tmp_path / "run" / "average.safetensors"
    assert np.isfinite(load_file(file)["weight"]).all()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"average\.safetensors"):
        certify(tmp_path / "run", average=True)
