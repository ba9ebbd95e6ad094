"""The limit of the change of the loss from held-out samples, the rival of the certified loss."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedmuon.analysis.report.numbers import number
from fedmuon.experiments.cli import app
from fedmuon.experiments.inspect.status import run_status
from fedmuon.experiments.report import write_report
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.held_out_change import NAME, held_out_words
from fedmuon.experiments.stability.neighbours import execute, verdict_table


def bernstein(values: np.ndarray, width: float, failure: float) -> float:
    """Maurer and Pontil 2009, Theorem 4, with the variance as a double sum over pairs."""
    count, log = len(values), math.log(2 / failure)
    variance = ((values[:, None] - values[None]) ** 2).sum() / (2 * count * (count - 1))
    return float(values.mean() + math.sqrt(2 * variance * log / count)
                 + 7 * width * log / (3 * (count - 1)))  # fmt: skip


def losses(run: Path, stem: str, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    scores = np.exp(inputs @ load_file(run / f"{stem}.safetensors")["weight"])
    return 1 - scores[np.arange(len(labels)), labels] / scores.sum(1)


ZERO = {"task": {"initial": "zero"}, "local": {"lr": 1e-3}}
GAUSSIAN = {"local": {"lr": 1e-3}, "stability": {"constants": "ball"}}


@pytest.mark.parametrize(("tables", "ranges"), [(ZERO, 1), (GAUSSIAN, 2), ({}, 2)])
def test_the_limit_is_that_of_paired_losses(
    tmp_path: Path, tables: dict[str, Any], ranges: int
) -> None:
    """With the range of the loss on the ball for X⁰ and the final model, and the failure of the
    bound. The loss of X⁰ = 0 has no range."""
    config = small({**tables, "engine": {"dtype": "float64"}})
    record = execute(config, tmp_path / "a")
    source = FinishedRun.open(tmp_path / "a").data
    inputs, labels = source.test_inputs, source.test_labels
    before, after = (losses(tmp_path / "a", stem, inputs, labels) for stem in ("initial", "model"))
    assert record["held_out_samples"] == len(labels)
    assert record["held_out_failure"] == record["failure"] > 0
    assert record["held_out_change"] == pytest.approx((after - before).mean(), rel=1e-10)
    width = min(2.0, ranges * record["range"])
    limit = min(1.0, bernstein(after - before, width, record["failure"]))
    assert record["held_out_change_limit"] == pytest.approx(limit, rel=1e-8)
    assert np.ptp(after - before) <= width
    unpaired = bernstein(after, 1.0, record["failure"]) - before.mean()
    assert abs(limit - unpaired) > 1e-6 * abs(limit)  # so the comparison above would fail


@pytest.mark.usefixtures("undrawn")
def test_the_words_are_shown_wherever_the_certified_loss_is(tmp_path: Path) -> None:
    record = execute(small(stability={"trials": 2}), tmp_path / "a")
    ((name, words),) = held_out_words(record)
    assert name == NAME and words.startswith("no: the limit of the change is +")
    assert f"{record['held_out_samples']} samples that train nothing" in words
    cells = [str(cell) for cell in verdict_table(tmp_path / "a", record).columns[0].cells]
    assert NAME in cells and "certified population loss: train loss + bound" in cells
    page = write_report(tmp_path / "a").read_text(encoding="utf-8")
    assert NAME in page and "(measured)" in page
    assert run_status(tmp_path / "a").bound == record
    done = CliRunner().invoke(app, ["bound", str(tmp_path / "a")])
    assert f"use: fedmuon certify {tmp_path / 'a'}" in done.output


def test_a_negative_limit_is_a_certified_decrease() -> None:
    record = {"held_out_samples": 5000, "held_out_change_limit": -0.25, "held_out_failure": 0.01}
    ((_, words),) = held_out_words(record)
    assert (
        words == f"yes, by {number(0.25, 3)} (5,000 samples that train nothing, probability 0.99)"
    )
    assert not held_out_words({})  # of an older version


def test_networks_have_no_limit(tmp_path: Path) -> None:
    tables = {"task": {"name": "network", "model": "mlp"}}
    record = execute(small(tables, stability={"trials": 2}), tmp_path / "a")
    assert "held_out_change" not in record and not held_out_words(record)
