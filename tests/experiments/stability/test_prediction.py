"""The predicted gap in `fedmuon stability` and `fedmuon gap`: entries, rows, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from typer.testing import CliRunner

import fedmuon
from fedmuon.config.load import nested
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.predicted_gap import PROBES, predict
from fedmuon.experiments.stability.prediction import prediction, probes_of, rows_of
from fedmuon.experiments.stability.replaced_gap import replace_samples
from fedmuon.experiments.studies.gap_grid import shown

TINY = ["data.name=synthetic", "data.train=60", "data.test=40", "data.dimension=5",
        "federation.clients=3", "federation.per-round=2", "federation.rounds=2",
        "local.steps=1", "orthogonalizer.lambda=0.1"]  # fmt: skip
PRIVATE = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 2.0, "lot": 10}}


def output(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, *(f"--set={one}" for one in TINY)])
    assert done.exit_code == 0, done.exception or done.output
    return done.output


def finished(folder: Path, **tables: dict[str, Any]) -> FinishedRun:
    execute(small(tables, engine={"dtype": "float64"}), folder)
    return FinishedRun.open(folder)


def test_stability_shows_the_prediction_of_its_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = output("stability", "--trials=1", "--probes=5", "--replacements=3", f"--out={out}")
    record, run = json.loads((out / "bound.json").read_text("utf-8")), FinishedRun.open(out)
    gap, exact = predict(run, 5, ends=True), replace_samples(run, 3)
    assert gap.outside is not None
    assert record["predicted_gap"] == gap.value
    assert record["predicted_gap_error"] == gap.standard_error
    assert record["predicted_gap_outside"] == gap.outside.mean()
    ends = (gap.value + gap.outside.mean()) / 2
    assert record["predicted_gap_both_ends"] == pytest.approx(ends, rel=1e-12)
    assert record["replaced_gap"] == exact.value
    assert record["replaced_gap_error"] == exact.standard_error
    for name in ("predicted gap (5 probes)", "gap by 3 exact", "mean of both"):
        assert name in words
        assert name in output_of_show(out)


def output_of_show(folder: Path) -> str:
    return CliRunner().invoke(app, ["show", str(folder)]).output


def test_gap_shows_the_prediction_of_each_run(tmp_path: Path) -> None:
    tables = nested(small(federation={"rounds": 2}))
    found = fedmuon.gap(tables, seeds=2, probes=4, replacements=2, out=tmp_path / "gap")
    runs = [FinishedRun.open(folder.path) for folder in found.runs]
    rows = [row for row in found.rows if row["form"] == "explicit"]
    gaps = [predict(run, 4) for run in runs]
    assert [row["predicted"] for row in rows] == pytest.approx([gap.value for gap in gaps])
    (line,) = found.table
    assert line["predicted"] == pytest.approx(np.mean([gap.value for gap in gaps]))
    ends = [predict(run, 4, ends=True).both_ends for run in runs]
    means = [end.mean() for end in ends if end is not None]
    assert line["predicted_both_ends"] == pytest.approx(np.mean(means)) and len(means) == 2
    assert line["predicted_both_ends"] != pytest.approx(line["predicted"])  # negative control
    assert "both ends (SE)" in shown(found.table)[0]
    errors = np.array([gap.standard_error for gap in gaps])
    assert line["predicted_error"] == pytest.approx(np.sqrt((errors**2).sum()) / 2)
    assert line["replaced"] == pytest.approx(np.mean([row["replaced"] for row in rows]))
    assert "predicted" in str(found)
    labels = found.plot().get_legend_handles_labels()[1]
    assert "predicted gap, mean over seeds" in labels
    without = fedmuon.gap(tables, probes=0)
    assert without.table[0]["predicted"] is None
    labels = without.plot().get_legend_handles_labels()[1]
    assert not any("predicted" in label for label in labels)  # negative control


def test_a_run_without_derivative_shows_the_reason(tmp_path: Path) -> None:
    record = prediction(finished(tmp_path / "private", **PRIVATE))
    assert record["predicted_gap"] is None and "noise" in record["predicted_gap_refusal"]
    assert rows_of(record) == [("predicted gap", record["predicted_gap_refusal"])]
    with pytest.raises(InputError, match="predicted gap does not allow this"):
        fedmuon.stability(nested(small(PRIVATE)), trials=1, probes=4)
    with pytest.raises(InputError, match="predicted gap does not allow this"):
        fedmuon.gap(nested(small(PRIVATE)), probes=4)
    jumping: dict[str, Any] = {
        "orthogonalizer": {"name": "exact-sign"}, "stability": {"replacements": 4},
    }  # fmt: skip
    record = prediction(finished(tmp_path / "jumping", **jumping))
    assert record["predicted_gap"] is None and record["replaced_gap"] is not None


def test_networks_are_predicted_on_request() -> None:
    network = {"task": {"name": "network", "model": "mlp"}, "local": {"recipe": "fedavg"}}
    assert probes_of(small()) == PROBES and probes_of(small(network)) == 0
    assert probes_of(small(network, stability={"probes": 3})) == 3


def test_samples_with_a_label_of_their_own_are_counted(tmp_path: Path) -> None:
    """A lone sample has stand-ins in other clients, unless no other sample has its label."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((31, 6))
    labels = np.arange(30) % 3
    partition = [range(10), range(10, 20), range(20, 31)]
    for label, alone in ((3, 1), (0, 0)):
        lone = np.append(labels, label)
        if not alone:  # label 0 is in client 2 only once, but also in other clients
            lone[20:30] = np.where(lone[20:30] == 0, 1, lone[20:30])
        run = fedmuon.run(
            {"data": {"normalize": "ball"}, "federation": {"clients": 3, "rounds": 2},
             "local": {"recipe": "fedavg", "lr": 1.0, "steps": 1}},
            data=(inputs, lone), test=(inputs[:4] + 1, lone[:4]), partition=partition,
        )  # fmt: skip
        assert predict(FinishedRun.open(run.path, run.given), 2).alone == alone
