"""The predicted gap: its trace against the full matrix, and what has no derivative."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import quick, small

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.data.partition import weights
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.predicted_gap import predict, weighted_slopes
from fedmuon.federated.adjoint import pulled_back
from fedmuon.federated.rounds import begin
from fedmuon.tasks.base import Batch

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"local": {"recipe": "fedavg", "lr": 3.0, "steps": 2}},
    "fedmuon": {"local": {"lr": 0.1, "steps": 2}},
    "mini-batches": {"local": {"recipe": "fedavg", "lr": 3.0, "steps": 2, "batch": 5}},
    "network": {
        "task": {"name": "network", "model": "mlp"},
        "data": {"train": 24},
        "federation": {"clients": 2, "per-round": 2, "rounds": 2},
        "local": {"recipe": "fedavg", "lr": 0.5, "steps": 2},
    },
}


def finished(folder: Path, name: str) -> FinishedRun:
    execute(small(RUNS[name], engine={"dtype": "float64"}), folder)
    return FinishedRun.open(folder)


def influence(run: FinishedRun) -> np.ndarray:
    """s_ab = <grad loss(A, z_a), dA / dw_b>, with one direction for each sample a."""
    experiment, sizes = run.experiment, run.data.sizes
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    samples = Batch(experiment.shards.inputs, experiment.shards.labels)
    towards = weighted_slopes(experiment, run.model(), samples, np.eye(int(sizes.sum())))
    none = Batch(experiment.shards.inputs[:0], experiment.shards.labels[:0])
    start = begin(experiment.recipe, experiment.task, run.config.federation.seed)
    matrix = np.zeros((sizes.sum(), sizes.sum()))
    for pulled in pulled_back(experiment, start, towards, lambda client: none):
        rows = np.arange(sizes[pulled.client]) if pulled.rows is None else pulled.rows
        matrix[:, offsets[pulled.client] + rows] += pulled.own.numpy()
    return matrix


def trace(run: FinishedRun) -> float:
    """The sum over samples a of w_a (mean of s_ab over others of its client and label - s_aa)."""
    sizes, labels, matrix = run.data.sizes, run.data.labels, influence(run)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    chances = weights(sizes, run.config.federation.risk_weights)
    total = 0.0
    for a in range(len(owner)):
        others = [
            b for b in range(len(owner))
            if b != a and owner[b] == owner[a] and labels[b] == labels[a]
        ]  # fmt: skip
        if not others:  # samples of other clients with this label stand in
            others = [b for b in range(len(owner)) if b != a and labels[b] == labels[a]]
        if others:
            total += chances[owner[a]] / sizes[owner[a]] * (matrix[a, others].mean() - matrix[a, a])
    return total


@pytest.mark.parametrize("name", quick(RUNS, ["fedavg", "mini-batches"]))
def test_probes_estimate_the_trace_of_the_influence_matrix(name: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", name)
    predicted, exact = predict(run, 60 if name == "network" else 600), trace(run)
    assert abs(predicted.value - exact) < 4 * predicted.standard_error
    assert abs(predicted.value + exact) > 4 * predicted.standard_error  # the wrong sign


def test_slopes_are_gradients_of_the_weighted_loss(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "fedmuon")
    shards, count = run.experiment.shards, len(run.data.labels)
    batch = Batch(shards.inputs, shards.labels)
    mean = weighted_slopes(run.experiment, run.model(), batch, np.full((1, count), 1 / count))
    _, gradient = run.experiment.task.gradient(run.model(), [batch])
    np.testing.assert_allclose(mean["weight"][0].numpy(), gradient["weight"].numpy(), atol=1e-14)


@pytest.mark.slow
def test_the_mean_gap_over_data_sets_is_predicted(tmp_path: Path) -> None:
    """Means over 40 data sets of the measured and the predicted gap agree; half of it does not."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((3, 8)) / 2
    measured, predicted = [], []
    for seed in range(40):
        labels = rng.integers(0, 3, 2060)
        inputs = centres[labels] + rng.standard_normal((2060, 8)) / 2
        tables = {
            "data": {"normalize": "ball"}, "federation": {"clients": 2, "rounds": 12, "seed": seed},
            "local": {"recipe": "fedavg", "lr": 6.0, "steps": 1}, "engine": {"dtype": "float64"},
        }  # fmt: skip
        run = fedmuon.run(
            tables, data=(inputs[:60], labels[:60]), test=(inputs[60:], labels[60:]),
            partition=[range(30), range(30, 60)], out=tmp_path / str(seed),
        )  # fmt: skip
        measured.append(run.summary["test_loss"] - run.summary["train_loss"])
        predicted.append(predict(FinishedRun.open(run.path, run.given), 16).value)
    difference = np.mean(measured) - np.mean(predicted)
    error = np.std(np.subtract(measured, predicted), ddof=1) / np.sqrt(40)
    assert abs(difference) < 3 * error + 0.15 * np.mean(measured)
    assert np.mean(measured) > 3 * np.std(measured, ddof=1) / np.sqrt(40)


def test_what_has_no_derivative_is_refused(tmp_path: Path) -> None:
    privacy = {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": {"noise": 2.0, "lot": 10}}
    execute(small(privacy), tmp_path / "run")
    with pytest.raises(InputError, match="noise"):
        predict(FinishedRun.open(tmp_path / "run"))


def test_one_probe_has_no_standard_error(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "fedavg")
    assert np.isnan(predict(run, 1).standard_error)
    assert predict(run, 5).probes[:1] == pytest.approx(predict(run, 1).probes)
    with pytest.raises(InputError, match="probes"):
        predict(run, 0)
