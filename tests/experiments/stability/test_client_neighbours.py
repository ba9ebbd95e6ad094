"""A client as the neighbour: against NumPy loops of both runs and of the certificate."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from safetensors.numpy import load_file
from typer.testing import CliRunner

import fedmuon
from fedmuon import analysis
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.data import load
from fedmuon.data.client_neighbours import (
    ClientNeighbours,
    draw_clients,
    require_known,
    stack_clients,
    without_samples,
)
from fedmuon.data.federated import FederatedData
from fedmuon.experiments.cli import app
from fedmuon.experiments.stability import certificates
from fedmuon.experiments.stability.client_neighbours import read_attacks
from fedmuon.experiments.stability.finished_run import from_directory
from fedmuon.experiments.stability.neighbours import execute
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.neighbour_runs import run_neighbours
from fedmuon.tasks.constants import constants


def table(folder: Path) -> np.ndarray:
    """The columns trial, client, index, replacement, perturbation, exposure and certificate."""
    return np.loadtxt(folder / "neighbours.csv", delimiter=",", skiprows=1, ndmin=2)


# The two runs


def softmax_gradient(X: np.ndarray, U: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mean gradient of 1 - p_y over the samples (U, y)."""
    P = np.exp(U @ X)
    P /= P.sum(1, keepdims=True)
    right = P[np.arange(len(y)), y][:, None]
    return U.T @ (right * (P - np.eye(X.shape[1])[y])) / len(y)


def loop(start: np.ndarray, schedule: np.ndarray, clients: list[tuple | None]) -> np.ndarray:
    """FedMuon on the clients' samples; a client that is None has gradient 0."""
    X, M = start, np.zeros_like(start)
    for row in schedule:
        Xs, Ms = [], []
        for i in row:
            slope = 0 if clients[i] is None else softmax_gradient(X, *clients[i])
            Ms.append(0.9 * M + 0.1 * slope)
            u, s, v = np.linalg.svd(Ms[-1], full_matrices=False)
            Xs.append(X - 0.05 * (u * (s / np.sqrt(s**2 + 0.1))) @ v)
        X, M = np.mean(Xs, 0), np.mean(Ms, 0)
    return X


HOW = [(how, unit) for how in ("own", "any", "all") for unit in ("clients", "removed-clients")]


@pytest.mark.parametrize("how, unit", [*HOW, ("worst", "clients")])
def test_a_trial_is_the_run_with_another_client_by_hand(
    how: str, unit: str, tmp_path: Path
) -> None:
    given = {"neighbours": how, "unit": unit} | ({} if how == "all" else {"trials": 3})
    execute(small(stability=given), tmp_path / "a")
    inputs, labels = load("synthetic", n=150, dimension=7, classes=3, seed=3)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        train, client = split["train_index"], split["client"]
    schedule = np.load(tmp_path / "a" / "schedule.npy")
    start = load_file(tmp_path / "a" / "initial.safetensors")["weight"]
    parts = [train[client == i] for i in range(6)]
    samples: list[Any] = [(inputs[rows], labels[rows]) for rows in parts]
    base, changed = loop(start, schedule, samples), 0
    attacks = read_attacks(tmp_path / "a" / "replaced.csv")
    for row, attack in zip(table(tmp_path / "a"), attacks, strict=True):
        i = int(row[1])
        assert (attack[:, 0] == i).all() and attack[:, 1].tolist() == [*range(len(parts[i]))]
        others = list(samples)
        if unit == "removed-clients":
            others[i] = None
        else:
            new, label = attack[:, 2], attack[:, 3]
            assert not np.isin(new, train).any() or how == "worst"
            others[i] = inputs[new], np.where(label < 0, labels[new], label)
        moved = np.linalg.norm(loop(start, schedule, others) - base)
        assert row[4] == pytest.approx(moved, rel=1e-9, abs=1e-14)
        changed += moved > 1e-6
    assert changed


def as_data(data: FederatedData, neighbours: ClientNeighbours, s: int) -> FederatedData:
    """Neighbour s as an ordinary data set, in its own copy."""
    inputs, labels = data.inputs.copy(), data.labels.copy()
    for t in np.flatnonzero(neighbours.data_set == s):
        row = data.offsets[neighbours.client[t]] + neighbours.position[t]
        inputs[row], labels[row] = neighbours.inputs[t], neighbours.labels[t]
    return dataclasses.replace(data, inputs=inputs, labels=labels)


DIGITS = {"data": {"name": "digits", "train": 60, "test": 20}, "federation": {"rounds": 2}}
NOISE = {"insecure-reproducible-noise": True, "noise": 0.5, "lot": 8.0, "bound": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "full batches": {"local": {"steps": 2}},
    "mini-batches": {"local": {"steps": 2, "batch": 4}},
    "numpy": {"engine": {"kernel": "numpy"}},
    "fused": {"engine": {"kernel": "fused"}},
    "private matrix": {"local": {"recipe": "dp-sgd", "steps": 2}, "privacy": NOISE},
    "two points": {"local": {"recipe": "disk-muonbc", "steps": 2}, "privacy": NOISE},
    "network": DIGITS | {"task": {"name": "network", "model": "mlp"}},
    "private network": DIGITS | {"task": {"name": "network", "model": "mlp"},
                                 "local": {"recipe": "dp-muon", "route": "all-matrices"},
                                 "privacy": NOISE},
}  # fmt: skip


@pytest.mark.parametrize("name", list(KINDS))
def test_a_stack_of_clients_is_a_loop_over_data_sets(name: str) -> None:
    config = small(**KINDS[name])
    source = read_source(config)
    data = build_data(config, source)
    drawn = draw_clients(data, source, 3, 1)
    if config.task.name == "matrix":
        drawn.append(without_samples(data, 2))
    neighbours = stack_clients(source, drawn, config.data.normalize)
    ends = run_neighbours(build_experiment(config, data), neighbours, 3)
    for s in range(neighbours.count):
        alone = build_experiment(config, as_data(data, neighbours, s))
        nobody = ClientNeighbours.of(source, np.empty((0, 5), np.int64), 1)
        single = run_neighbours(alone, nobody, 3)
        for key, value in single.items():
            torch.testing.assert_close(ends[key][s], value[0], rtol=1e-11, atol=1e-12)
    first = next(iter(ends.values()))
    assert all(float((first[s] - first[0]).abs().max()) > 1e-9 for s in range(1, len(first)))


# The certificate


def by_hand(folder: Path, config: Config, removed: bool) -> np.ndarray:
    """The recursion of FedMuon with global constants: what client i moves if Delta_i is 2 G_max.

    x and m are the distances of model and momentum; only client i has the term Delta_i.
    """
    schedule = np.load(folder / "schedule.npy")
    local, G, Lg = config.local, np.sqrt(2) / 4, 1 / (3 * np.sqrt(3))
    L, beta = 1 / np.sqrt(config.orthogonalizer.lambda_), local.momentum
    certified = np.zeros(config.federation.clients)
    for i in range(len(certified)):
        x = m = 0.0
        for row in schedule:
            xs, ms = [], []
            for client in row:
                xi, mi = x, m
                for _ in range(local.steps):
                    mi = beta * mi + (1 - beta) * (Lg * xi + (client == i) * G * (2 - removed))
                    xi = xi + local.lr * L * mi
                xs.append(xi)
                ms.append(mi)
            x, m = np.mean(xs), np.mean(ms)
        certified[i] = x
    return certified


@pytest.mark.parametrize("unit", ["clients", "removed-clients"])
@pytest.mark.parametrize("local", [{}, {"steps": 3, "batch": 4}])
def test_the_certificate_is_the_recursion_by_hand(local: dict, unit: str, tmp_path: Path) -> None:
    how = {"neighbours": "all", "unit": unit, "constants": "global"}
    config = small(local=local, stability=how)
    record = execute(config, tmp_path / "a")
    expected = by_hand(tmp_path / "a", config, unit == "removed-clients")
    rows = table(tmp_path / "a")
    np.testing.assert_allclose(rows[:, 6], expected[rows[:, 1].astype(int)], rtol=1e-9)
    assert record["status"] == "certified" and record["unit"] == unit
    weights = np.bincount(np.load(tmp_path / "a" / "partition.npz")["client"]) / 90
    assert record["n_eff"] == pytest.approx(1 / (weights**2).sum())


def test_the_ball_makes_the_certificate_smaller_and_removal_halves_it(tmp_path: Path) -> None:
    execute(small(stability={"neighbours": "all", "unit": "clients"}), tmp_path / "a")
    case = from_directory(tmp_path / "a")

    def largest(**changes: str) -> float:
        promised = certificates.certify(case.under(**changes)).certificates
        assert promised is not None
        return float(promised.max())

    assert largest() < largest(constants="global")
    assert largest(unit="removed-clients") >= largest() / 2 * (1 - 1e-9)
    both = {"constants": "global", "unit": "removed-clients"}
    assert largest(**both) == pytest.approx(largest(constants="global") / 2, rel=1e-9)
    assert largest(unit="samples") < largest() / 5
    # What replaced clients moved is no evidence against the certificates of samples.
    assert case.moved is not None and (case.moved > largest(unit="samples")).any()
    assert from_directory(tmp_path / "a", ["stability.unit='samples'"]).moved is None


RUNS: list[dict[str, Any]] = [
    {},
    {"local": {"batch": 4, "steps": 2}},
    {"local": {"recipe": "fedmuon-aligned", "alignment": 0.3, "steps": 2}},
    {"orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
    {"federation": {"rounds": 1, "per-round": 1}},  # five clients never take part
    {"local": {"recipe": "fedavg", "steps": 2, "lr": 1.0}},
    {"local": {"recipe": "fedavgm", "lr": 0.02, "weight-decay": 0.1}},
    {"local": {"recipe": "local-muon", "steps": 3}},
    {"local": {"recipe": "sgd", "momentum-form": "polyak", "lr": 0.02}},
    {"federation": {"aggregate": "by-samples"}, "local": {"steps": 2}},
]


@pytest.mark.parametrize("unit", ["clients", "removed-clients"])
@pytest.mark.parametrize("tables", quick(RUNS, RUNS[:6]), ids=lambda tables: str(tables)[:60])
def test_every_perturbation_is_within_its_certificate(
    tables: dict, unit: str, tmp_path: Path
) -> None:
    config = small(**tables, stability={"neighbours": "all", "unit": unit})
    record = execute(config, tmp_path / "a")
    rows = table(tmp_path / "a")
    assert record["status"] == "certified" and (rows[:, 4] <= rows[:, 6]).all()
    assert rows[:, 4].max() > 0 and sorted(rows[:, 1]) == [*range(6)]
    assert record["gap"] <= record["value"]


def test_half_of_the_certificate_is_exceeded_by_the_worst_client(tmp_path: Path) -> None:
    """Negative control, and the worst search finds more than the random samples."""
    given = {"unit": "clients", "trials": 4}
    execute(small(stability={**given, "neighbours": "worst"}), tmp_path / "worst")
    execute(small(stability={**given, "neighbours": "any"}), tmp_path / "any")
    worst, drawn = (table(tmp_path / name) for name in ("worst", "any"))
    assert (worst[:, 4] <= worst[:, 6]).all()
    assert (worst[:, 4] > worst[:, 6] / 2).any()
    assert worst[:, 4].max() > 2 * drawn[:, 4].max()


def test_the_certificate_of_a_sample_is_exceeded_by_a_client(tmp_path: Path) -> None:
    """Negative control: Delta_i = 2 G_max / n_i is false for a whole client."""
    execute(small(stability={"neighbours": "all", "unit": "clients"}), tmp_path / "a")
    of_sample = certificates.certify(from_directory(tmp_path / "a").under(unit="samples"))
    rows = table(tmp_path / "a")
    assert of_sample.certificates is not None
    assert (rows[:, 4] > of_sample.certificates[rows[:, 1].astype(int)]).any()


def test_a_client_whose_gradients_are_larger_breaks_the_certificate() -> None:
    """Negative control: samples of norm 30, which the loader rejects, move the model further."""
    config = small(stability={"unit": "clients"}, local={"recipe": "fedavg", "lr": 0.05})
    source = read_source(config)
    data = build_data(config, source)
    drawn = [draw_clients(data, source, 1, seed)[0] for seed in range(8)]
    neighbours = stack_clients(source, drawn, config.data.normalize)
    large = dataclasses.replace(neighbours, inputs=30 * neighbours.inputs)
    experiment = build_experiment(config, data)
    run = analysis.Run(
        0.05, 0.0, 8, 1, data.sizes, data.sizes / data.sizes.sum(), constants(),
        method=analysis.Method(0.0),
    )  # fmt: skip
    part = analysis.Realized(experiment.plan.schedule())
    promised = analysis.client_certificate(run, 1.0, part)[[rows[0, 0] for rows in drawn]]

    def shares(data_sets: ClientNeighbours) -> np.ndarray:
        ends = run_neighbours(experiment, data_sets, 3)["weight"]
        return (ends[1:] - ends[:1]).norm(dim=(1, 2)).numpy() / promised

    assert shares(neighbours).max() <= 1 < shares(large).max()


# By round


def test_shifts_by_round_are_those_of_shorter_runs_by_hand(tmp_path: Path) -> None:
    execute(small(stability={"unit": "clients", "trials": 3}), tmp_path / "a")
    rounds, trial, client, shifts, certified = np.loadtxt(
        tmp_path / "a" / "shifts.csv", delimiter=",", skiprows=1
    ).T
    worst = table(tmp_path / "a")[int(trial[0])]
    assert rounds.tolist() == [*range(1, 9)] and (client == worst[1]).all()
    assert shifts[-1] == pytest.approx(table(tmp_path / "a")[:, 4].max(), rel=1e-9)
    assert certified[-1] == worst[6] and (shifts <= certified).all()
    inputs, labels = load("synthetic", n=150, dimension=7, classes=3, seed=3)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        parts = [split["train_index"][split["client"] == i] for i in range(6)]
    schedule = np.load(tmp_path / "a" / "schedule.npy")
    start = load_file(tmp_path / "a" / "initial.safetensors")["weight"]
    samples: list[Any] = [(inputs[rows], labels[rows]) for rows in parts]
    others, new = list(samples), read_attacks(tmp_path / "a" / "replaced.csv")[int(trial[0])][:, 2]
    others[int(client[0])] = inputs[new], labels[new]
    for end in (3, 6):
        moved = np.linalg.norm(
            loop(start, schedule[:end], others) - loop(start, schedule[:end], samples)
        )
        assert shifts[end - 1] == pytest.approx(moved, rel=1e-9, abs=1e-14)
        shorter = small(federation={"rounds": end}, stability={"unit": "clients", "trials": 3})
        execute(shorter, tmp_path / f"{end}")
        promised = table(tmp_path / f"{end}")[int(trial[0]), 6]
        assert certified[end - 1] == pytest.approx(promised, rel=1e-12)
    assert certified[2] < certified[5] / 1.5  # negative control: the rounds differ


# The commands


def test_a_finished_folder_is_read_and_an_interrupted_one_resumes(tmp_path: Path) -> None:
    given = {"neighbours": "worst", "unit": "clients", "trials": 3}
    record = execute(small(stability=given), tmp_path / "a")
    before = (tmp_path / "a" / "neighbours.csv").read_bytes()
    assert execute(None, tmp_path / "a", resume=True) == record
    assert (tmp_path / "a" / "neighbours.csv").read_bytes() == before
    (tmp_path / "a" / "replaced.csv").write_text("trial,client\n")
    with pytest.raises(InputError, match=r"damaged|changed|checksum"):
        execute(None, tmp_path / "a", resume=True)


def test_the_commands_take_clients(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[data]\nname = "synthetic"\ntrain = 60\ntest = 40\ndimension = 5\n[federation]\n'
        "clients = 3\nrounds = 2\n[local]\nlr = 0.01\nsteps = 1\n[orthogonalizer]\nlambda = 0.1\n"
    )
    command = ["stability", str(config), "--json", "--neighbours", "clients", "--all"]
    shown = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "a")])
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)["bound"]
    assert record["unit"] == "clients" and record["status"] == "certified"
    again = CliRunner().invoke(app, ["bound", "--json", str(tmp_path / "a")])
    assert json.loads(again.stdout)["max_certificate"] == record["max_certificate"]
    of_samples = ["bound", "--json", str(tmp_path / "a"), "--neighbours", "samples"]
    other = json.loads(CliRunner().invoke(app, of_samples).stdout)
    assert other["max_certificate"] < record["max_certificate"] and other["n_eff"] > 50
    result = fedmuon.stability(str(config), unit="removed-clients", trials=2)
    assert all(row["perturbation"] <= row["certificate"] for row in result.neighbours)
    assert all(row["index"] == -1 for row in result.neighbours)


def test_the_bound_of_parameters_counts_clients() -> None:
    words = ["bound", "--json", "--clients", "50", "--size", "10", "--lr", "1e-5", "--local-steps"]
    words += ["1", "--lambda", "0.1", "--rounds", "3"]
    of_clients = json.loads(CliRunner().invoke(app, [*words, "--neighbours", "clients"]).stdout)
    of_samples = json.loads(CliRunner().invoke(app, words).stdout)
    assert of_clients["n_eff"] == pytest.approx(50) and of_samples["n_eff"] == pytest.approx(500)
    ratio = of_clients["max_certificate"] / of_samples["max_certificate"]
    assert ratio == pytest.approx(10, rel=1e-6) and of_clients["value"] > of_samples["value"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "worst removal": (
        {"stability": {"unit": "removed-clients", "neighbours": "worst"}}, "Set neighbours = 'all'"
    ),
    "removal in a network": (
        {**DIGITS, "task": {"name": "network", "model": "mlp"},
         "stability": {"unit": "removed-clients"}}, "Set unit = 'clients'"
    ),
    "realized": (
        {"stability": {"unit": "clients", "realized": True}}, "Set unit = 'samples'"
    ),
    "worst without a derivative": (
        {"stability": {"unit": "clients", "neighbours": "worst"},
         "compression": {"uplink": "top-k"}}, "neighbours to 'own', 'any' or 'all'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_is_one_sentence_with_the_fix(name: str, tmp_path: Path) -> None:
    tables, fix = REFUSED[name]
    with pytest.raises(InputError, match=fix):
        execute(small(**tables), tmp_path / "a")
    assert not (tmp_path / "a" / "model.safetensors").exists()


def test_the_variance_of_samples_bounds_no_clients(tmp_path: Path) -> None:
    given = {"unit": "clients", "c-hp": "variance", "neighbours": "all"}
    record = execute(small(stability=given), tmp_path / "a")
    assert "Set c-hp to explicit or sharp" in record["refusal"]


@pytest.mark.parametrize("column, value", [(0, 0), (0, 9), (2, -1), (2, 99), (3, -2), (4, 3)])
def test_a_message_with_odd_rows_is_rejected(column: int, value: int) -> None:
    config = small()
    source = read_source(config)
    rows = np.array([[1, 2, 0, 5, -1], [1, 2, 1, 6, 2]])
    require_known(rows, 2, 4, source, 3)
    rows[1, column] = value
    with pytest.raises(InputError, match="Use the same data"):
        require_known(rows, 2, 4, source, 3)
