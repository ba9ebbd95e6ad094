"""The participation gap: its bound and its measurement, against naive loops in float64."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedmuon import analysis
from fedmuon.config.load import parse
from fedmuon.experiments.cli import app
from fedmuon.experiments.stability.neighbours import execute, verdict_table
from fedmuon.experiments.stability.neighbours_report import findings
from fedmuon.experiments.suites.contents import merged

CLIENTS, UNSEEN = 24, 8
TABLES: dict[str, dict[str, Any]] = {
    "federation": {"partition": "column", "per-round": 5, "rounds": 3, "seed": 3},
    "local": {"lr": 0.05, "steps": 1},
    "orthogonalizer": {"lambda": 0.1},
    "engine": {"dtype": "float64", "device": "cpu"},
    "stability": {"unit": "clients", "neighbours": "all", "constants": "global", "probes": 0},
}


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients of different sizes; each client has a rule of its own for its labels."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 25, CLIENTS)
    inputs = rng.standard_normal((sizes.sum(), 5))
    rules = rng.standard_normal((CLIENTS, 5, 3)).repeat(sizes, axis=0)
    names = np.repeat([f"client {i}" for i in range(CLIENTS)], sizes)
    file = tmp_path_factory.mktemp("population") / "clients.npz"
    labels = np.einsum("nd,ndc->nc", inputs, rules).argmax(1)
    np.savez(file, inputs=inputs, labels=labels, who=names)
    return file


def tables_of(population: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    data = {"name": "npz", "folder": str(population), "options": {"client": "who"},
            "minimum": 1, "test": 20, "unseen-clients": UNSEEN}  # fmt: skip
    return merged({**TABLES, "data": data}, changes)


@pytest.fixture(scope="module")
def run(population: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    execute(parse(tables_of(population)), folder)
    return folder


def naive_losses(population: Path, run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The mean loss 1 - p_y of each participant and of each unseen client, sample by sample."""
    arrays = np.load(population)
    rows = arrays["inputs"] / np.linalg.norm(arrays["inputs"], axis=1, keepdims=True)
    weight = load_file(run / "model.safetensors")["weight"]
    participants = json.loads((run / "client-names.json").read_text())
    # The train samples are numbered among the samples of the participants.
    of_participants = np.flatnonzero(np.isin(arrays["who"], participants))
    trained = of_participants[np.load(run / "partition.npz")["train_index"]]

    def mean(chosen: list[int]) -> float:
        losses = []
        for row in chosen:
            scores = [math.exp(rows[row] @ weight[:, k]) for k in range(weight.shape[1])]
            losses.append(1 - scores[arrays["labels"][row]] / sum(scores))
        return sum(losses) / len(losses)

    by_name = {name: [row for row in trained if arrays["who"][row] == name]
               for name in participants}  # fmt: skip
    others = {name: np.flatnonzero(arrays["who"] == name).tolist()
              for name in {*arrays["who"].tolist()} - {*participants}}  # fmt: skip
    assert len(others) == UNSEEN
    first, second = (
        {str(name): mean(part) for name, part in group.items()} for group in (by_name, others)
    )
    return first, second


def test_the_measured_gap_and_its_interval_are_those_of_naive_loops(
    population: Path, run: Path
) -> None:
    record = json.loads((run / "bound.json").read_text())
    participants, unseen = ([*group.values()] for group in naive_losses(population, run))
    gap = sum(unseen) / len(unseen) - sum(participants) / len(participants)
    assert record["participation_gap"] == pytest.approx(gap, rel=1e-9)
    assert record["unseen_clients"] == UNSEEN and abs(gap) > 1e-4
    hoeffding = math.sqrt(math.log(2 / 0.025) / (2 * UNSEEN))  # the loss lies in [0, 1]
    spread, log = np.var(unseen, ddof=1), math.log(3 / 0.025)
    bernstein = math.sqrt(2 * log * spread / UNSEEN)
    bernstein += log * (2 / math.sqrt(UNSEEN * (UNSEEN - 1)) + 1 / 3 / UNSEEN)
    half = min(hoeffding, bernstein)
    assert record["participation_gap_high"] == pytest.approx(gap + half, rel=1e-9)
    assert record["participation_gap_low"] == pytest.approx(gap - half, rel=1e-9)
    # Negative control: weights by size are another gap.
    sizes = np.bincount(np.load(run / "partition.npz")["client"])
    by_size = sum(unseen) / len(unseen) - sizes @ participants / sizes.sum()
    assert abs(by_size - record["participation_gap"]) > 1e-5


def naive_bound(run: Path, sensitivity: np.ndarray) -> tuple[float, float]:
    """The bounds on the participation gap and on the gap of clients of different weights.

    The recursion of FedMuon with global constants; client i changes its gradients by sensitivity_i.
    """
    schedule, sizes = np.load(run / "schedule.npy"), np.load(run / "partition.npz")["client"]
    sizes, slope, smooth, delta = np.bincount(sizes), math.sqrt(2) / 4, 1 / (3 * math.sqrt(3)), 0.05
    count = len(sizes)
    eps = []
    for i in range(count):
        x = m = 0.0
        for cohort in schedule:
            ends = []
            for client in cohort:
                slip = sensitivity[i] if client == i else 0.0
                mi = 0.9 * m + 0.1 * (smooth * x + slip)
                ends.append((x + 0.05 / math.sqrt(0.1) * mi, mi))
            x, m = (sum(values) / len(ends) for values in zip(*ends, strict=True))
        eps.append(min(1.0, slope * x))
    values = []
    for weights in ([1 / count] * count, (sizes / sizes.sum()).tolist()):
        squares = sum(((2 - p) * e + p) ** 2 for p, e in zip(weights, eps, strict=True))
        mean = sum(p * e for p, e in zip(weights, eps, strict=True))
        mcdiarmid = mean + math.sqrt(math.log(1 / delta) / 2 * squares)
        n_eff, r = 1 / sum(p * p for p in weights), max(2.0, math.log(1 / delta))
        tree = (
            math.sqrt(2)
            * r
            * math.ceil(math.log2(count))
            * math.sqrt(sum(e * e for e in eps) / n_eff)
        )
        values.append(min(mcdiarmid, 2 * mean + math.e * (math.sqrt(r / n_eff) + tree)))
    return values[0], values[1]


def test_the_bound_is_that_of_n_clients_with_equal_weights(run: Path) -> None:
    record = json.loads((run / "bound.json").read_text())
    sizes = np.bincount(np.load(run / "partition.npz")["client"])
    equal, by_size = naive_bound(run, np.full(len(sizes), math.sqrt(2) / 2))
    assert record["participation_bound"] == pytest.approx(equal, rel=1e-9)
    assert record["value"] == pytest.approx(by_size, rel=1e-9) and by_size > equal * 1.001
    assert record["participation_gap_high"] > record["participation_gap"]
    assert record["participation_gap"] <= record["participation_bound"]
    # Negative control: one sample moves a client less, so its bound is smaller.
    assert naive_bound(run, math.sqrt(2) / 2 / sizes)[0] < equal * 0.999


def test_the_bound_of_samples_is_exceeded_by_the_gap_of_clients() -> None:
    """Negative control. All samples of a client have one label, and the model is constant."""
    rng, participants, samples = np.random.default_rng(0), 20, 50
    losses = rng.choice([0.2, 0.8], size=(1000, participants))  # the mean is 0.5
    gaps, eps = 0.5 - losses.mean(1), np.zeros(participants)
    weights = np.full(participants, 1 / participants)

    def limit(count: int) -> float:
        sizes = np.full(participants, count)
        return analysis.bound(eps, sizes, weights, 0.05, shares=(1.0, 1.0)).value

    assert (gaps > limit(1)).mean() <= 0.05 < (gaps > limit(samples)).mean()


def test_the_output_shows_the_bound_beside_the_measured_gap(run: Path) -> None:
    record = json.loads((run / "bound.json").read_text())
    (cells,) = [[*column.cells] for column in verdict_table(run, record).columns[:1]]
    assert "bound on the participation gap" in cells
    assert f"participation gap ({UNSEEN} unseen clients)" in cells
    assert "participation gap within its bound" in cells
    section = findings(run)
    assert "each of 16 clients" in section.title
    assert "The participation gap is at most its bound." in [
        claim.sentence for claim in section.claims
    ]
    shown = CliRunner().invoke(app, ["bound", str(run)])
    text = " ".join(shown.stdout.replace("│", " ").split())
    assert "bound on the participation gap" in text and "draws from one population" in text
    of_samples = CliRunner().invoke(app, ["bound", "--json", str(run), "--neighbours", "samples"])
    assert "participation_bound" not in json.loads(of_samples.stdout)


def test_divided_data_are_no_population(tmp_path: Path) -> None:
    stability = {"unit": "clients", "trials": 1, "probes": 0}
    dealt = execute(small(stability=stability, federation={"rounds": 2}), tmp_path / "a")
    assert dealt["participation_bound"] is None and dealt["value"] is not None
    assert "partition = 'dirichlet'" in dealt["participation_refusal"]
    federation = {"rounds": 2, "partition": "iid"}
    even = execute(small(stability=stability, federation=federation), tmp_path / "b")
    assert even["participation_bound"] == pytest.approx(even["value"], rel=1e-9)
    assert "set [data] unseen-clients" in even["participation_gap_refusal"]
    words = ["bound", "--json", "--clients", "50", "--lr", "1e-5", "--neighbours", "clients"]
    of_parameters = json.loads(CliRunner().invoke(app, words).stdout)
    assert of_parameters["participation_bound"] == pytest.approx(of_parameters["value"])
    words += ["--set", "federation.partition=shards"]
    assert json.loads(CliRunner().invoke(app, words).stdout)["participation_bound"] is None


def test_the_gap_of_a_network_has_an_approximate_interval(population: Path, tmp_path: Path) -> None:
    changes = {
        "task": {"name": "network", "model": "mlp"},
        "stability": {"neighbours": "own", "trials": 1, "constants": "ball"},
    }
    record = execute(parse(tables_of(population, **changes)), tmp_path / "a")
    low, high = record["participation_gap_low"], record["participation_gap_high"]
    assert low < record["participation_gap"] < high and record["status"] == "estimated"
