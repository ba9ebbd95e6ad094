"""Neighbours, census and calculator: against runs by hand, and against `analysis` called alone."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import draw_neighbours, neighbour, quick, small
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedmuon import analysis
from fedmuon.config.load import Config, dump, parse
from fedmuon.config.load import load as load_config
from fedmuon.core.errors import InputError
from fedmuon.core.files import announce, sealed
from fedmuon.data import load
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import gap, neighbours
from fedmuon.experiments.stability.certificates import in_float64
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.neighbours import _within, census, execute, verdict_table
from fedmuon.experiments.stability.neighbours_report import findings
from fedmuon.federated.build import build_experiment, build_plan
from fedmuon.federated.rounds import begin, simulate
from fedmuon.orthogonalize import lipschitz
from fedmuon.runs.directory import RunDirectory
from fedmuon.tasks.constants import constants

COLUMNS = ["trial", "client", "index", "replacement", "perturbation", "exposure", "certificate"]


def lines(folder: Path) -> list[dict[str, float]]:
    """neighbours.csv, one dictionary a neighbour."""
    header, *rows = (folder / "neighbours.csv").read_text().splitlines()
    assert header.split(",") == COLUMNS
    return [dict(zip(COLUMNS, map(float, row.split(",")), strict=True)) for row in rows]


def column(folder: Path, name: str) -> np.ndarray:
    return np.array([row[name] for row in lines(folder)])


def the_run(config: Config, folder: Path, batch: int = 0) -> analysis.Run:
    """The run of a directory in the words of `analysis`, from its files alone."""
    with np.load(folder / "partition.npz") as split:
        sizes = np.bincount(split["client"])
    local = config.local
    return analysis.Run(
        local.lr, local.momentum, config.federation.rounds, local.steps, sizes,
        sizes / sizes.sum(), constants(), batch=batch,
    )  # fmt: skip


def test_a_trial_is_the_run_with_one_row_replaced_by_hand(tmp_path: Path) -> None:
    """Row `index` of the source's order becomes row `replacement`; numpy runs FedMuon on it."""
    config = small(stability={"trials": 3})
    execute(config, tmp_path / "a")
    inputs, labels = load("synthetic", n=150, dimension=7, classes=3, seed=3)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        train, client = split["train_index"], split["client"]
    schedule = np.load(tmp_path / "a" / "schedule.npy")
    start = load_file(tmp_path / "a" / "initial.safetensors")["weight"]

    def train_on(owned: np.ndarray) -> np.ndarray:
        X, M = start, np.zeros_like(start)
        for row in schedule:
            Xs, Ms = [], []
            for i in row:
                U, y = inputs[owned[client == i]], labels[owned[client == i]]
                P = np.exp(U @ X)
                P /= P.sum(1, keepdims=True)
                right = P[np.arange(len(y)), y][:, None]
                Ms.append(0.9 * M + 0.1 * U.T @ (right * (P - np.eye(3)[y])) / len(y))
                u, s, v = np.linalg.svd(Ms[-1], full_matrices=False)
                Xs.append(X - 0.05 * (u * (s / np.sqrt(s**2 + 0.1))) @ v)
            X, M = np.mean(Xs, 0), np.mean(Ms, 0)
        return X

    for row in lines(tmp_path / "a"):
        place, new = train == row["index"], int(row["replacement"])
        assert place.sum() == 1 and client[place] == row["client"] and new not in train
        moved = np.linalg.norm(train_on(np.where(place, new, train)) - train_on(train))
        assert row["perturbation"] == pytest.approx(moved, rel=1e-9)


RUNS: list[dict[str, Any]] = [
    {},
    {"local": {"batch": 4, "steps": 2}},
    {"local": {"recipe": "fedmuon-aligned", "alignment": 0.3, "steps": 2}},
    {"orthogonalizer": {"name": "clipped-sign", "clip-level": 0.2}},
    {"orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
    {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.3}},
    {"federation": {"rounds": 1, "per-round": 1}},  # five clients never take part
    {"local": {"recipe": "fedavg", "steps": 2}},
    {"local": {"recipe": "fedavg", "batch": 4, "schedule": "cosine"}},
    {"local": {"recipe": "fedavgm", "lr": 0.02, "weight-decay": 0.1}},
    {"local": {"recipe": "local-muon", "steps": 3}},
    {"local": {"recipe": "local-muon"}, "orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
    {"local": {"recipe": "muon", "momentum-form": "nesterov", "lr": 0.005}},
    {"local": {"recipe": "sgd", "momentum-form": "polyak", "lr": 0.02}},
    {"local": {"momentum-form": "ema-nesterov", "weight-decay": 0.3}},
    {"local": {"recipe": "fedmuon-aligned", "batch": 4, "steps": 2, "schedule": "step"}},
    {"federation": {"aggregate": "by-samples"}, "local": {"steps": 2}},
    {"federation": {"aggregate": "by-samples"}, "local": {"batch": 4}},
    {"local": {"recipe": "local-muon", "momentum-form": "polyak", "lr": 0.01},
     "orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.3}},]  # fmt: skip


# One with each recipe, map, form of the momentum, weighting, batch and schedule.
FEW = [RUNS[place] for place in (1, 2, 3, 5, 8, 9, 11, 12, 13, 16)]


@pytest.mark.parametrize("tables", quick(RUNS, FEW), ids=lambda tables: str(tables)[:70])
def test_every_perturbation_is_within_its_certificate(tables: dict, tmp_path: Path) -> None:
    config = small(**tables, stability={"neighbours": "all"})
    record = execute(config, tmp_path / "a")
    moved, promised = (column(tmp_path / "a", name) for name in ("perturbation", "certificate"))
    assert record["status"] == "certified" and not record["refusal"]
    assert (moved <= promised).all() and moved.max() > 0
    assert record["gap_low"] < record["gap"] < record["gap_high"]
    assert record["gap_high"] - record["gap"] <= record["range"] / 2  # of 60 samples
    assert record["gap"] <= record["value"] == min(record["h"], record["g"])
    assert record["max_certificate"] == promised.max()
    local = config.local
    without = local.recipe == "fedmuon-aligned" or local.weight_decay > 0  # a radius
    assert (record["radius"] is None) == without
    first, last = (load_file(tmp_path / "a" / f"{name}.safetensors")["weight"]
                   for name in ("initial", "model"))  # fmt: skip
    assert without or 0 < np.linalg.norm(last - first, 2) <= record["radius"]
    assert (record["l_orth"] == 1.0) == (local.recipe in ("fedavg", "fedavgm", "sgd"))


def test_a_smaller_constant_would_be_exceeded(tmp_path: Path) -> None:
    """Negative control: with a third of L_orth the certificate is false."""
    config = small(stability={"neighbours": "all"})
    record = execute(config, tmp_path / "a")
    part = analysis.Realized(build_plan(config).schedule())
    what = the_run(config, tmp_path / "a")
    client, moved = column(tmp_path / "a", "client").astype(int), column(tmp_path / "a", COLUMNS[4])
    assert (moved <= analysis.certificate(what, record["l_orth"], part)[client]).all()
    assert (moved > analysis.certificate(what, record["l_orth"] / 3, part)[client]).any()


def test_neighbours_of_an_idle_client_do_not_move_the_model(tmp_path: Path) -> None:
    """In a stack of this shape the last bits of some idle replicas differ from those of the run."""
    config = small(
        data={"name": "digits", "train": 900, "test": 500}, local={"steps": 2},
        federation={"clients": 12, "per-round": 2, "rounds": 2}, stability={"neighbours": "all"},
    )  # fmt: skip
    execute(config, tmp_path / "a")
    idle = ~np.isin(column(tmp_path / "a", "client"), np.load(tmp_path / "a" / "schedule.npy"))
    moved, promised = (column(tmp_path / "a", name) for name in ("perturbation", "certificate"))
    assert idle.any() and not moved[idle].any() and not promised[idle].any()
    assert (moved <= promised).all() and moved[~idle].all()


def test_materialised_neighbours_move_the_model_as_far(tmp_path: Path) -> None:
    config = small(local={"batch": 4, "steps": 2}, stability={"trials": 4})
    execute(config, tmp_path / "a")
    there = FinishedRun.open(tmp_path / "a")
    drawn = draw_neighbours(there.data, there.source, 4, config.federation.seed)
    ends = []
    for s in range(5):
        alone = build_experiment(config, neighbour(there.data, drawn, s))
        ends.append(simulate(alone, begin(alone.recipe, alone.task, 3)).params["weight"][0])
    moved = [float((end - ends[0]).norm()) for end in ends[1:]]
    np.testing.assert_allclose(column(tmp_path / "a", "perturbation"), moved, rtol=1e-9)


def test_neighbours_stop_where_their_run_did(tmp_path: Path) -> None:
    """They are those of a run that was to be as long."""
    stop = {"evaluate-every": 3, "callback": "early-stopping",
            "options": {"patience": 1, "least": 10.0}}  # fmt: skip
    table = {"trials": 4}
    execute(small(output=stop, stability=table), tmp_path / "stopped")
    execute(small(federation={"rounds": 6}, stability=table), tmp_path / "short")
    execute(small(stability=table), tmp_path / "whole")
    moved = {end: column(tmp_path / end, COLUMNS[4]) for end in ("stopped", "short", "whole")}
    assert np.array_equal(moved["stopped"], moved["short"])
    assert not np.array_equal(moved["stopped"], moved["whole"])


def test_the_run_is_that_of_fedmuon_run(tmp_path: Path) -> None:
    execute(small(), tmp_path / "a")
    run(small(), tmp_path / "b")
    more, names = ({file.name for file in (tmp_path / one).iterdir()} for one in "ab")
    assert more == names | {"neighbours.csv", "bound.json"}
    for name in names - {"rounds.jsonl", "summary.json", "SHA256SUMS"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_census_replaces_every_sample_once_by_the_law_of_trials(tmp_path: Path) -> None:
    """The trials are random, so the means agree up to noise."""
    execute(small(stability={"neighbours": "all"}), tmp_path / "all")
    rows = lines(tmp_path / "all")
    with np.load(tmp_path / "all" / "partition.npz") as split:
        owner = dict(zip(split["train_index"].tolist(), split["client"].tolist(), strict=True))
    assert [row["trial"] for row in rows] == list(range(90))
    assert {row["index"]: row["client"] for row in rows} == owner
    execute(small(stability={"trials": 300}), tmp_path / "own")
    every, some = (column(tmp_path / name, "perturbation") for name in ("all", "own"))
    error = np.sqrt(every.var() / len(every) + some.var() / len(some))
    assert abs(every.mean() - some.mean()) < 4 * error
    assert abs(every.mean() - 1.5 * some.mean()) > 4 * error  # the test would see a wrong law


def test_census_draws_do_not_depend_on_each_other_and_keep_the_rule(tmp_path: Path) -> None:
    run(small(), tmp_path / "a")
    there = FinishedRun.open(tmp_path / "a")
    drawn = census(there.data, there.source, 3)
    for i, position, new in drawn:
        held = there.data.samples(i)[1]
        assert there.source.labels[new] in held and position < len(held)
        assert new not in there.data.train_index
    assert (census(there.data, there.source, 4)[:, 2] != drawn[:, 2]).any()


class Stop(Exception):
    """What a test raises to end a census in the middle."""


TORN = ["", "77,1,", "40,0,1,2,0.5,0.1,0.1\n"]


@pytest.mark.parametrize("torn", quick(TORN, TORN[2:]))
def test_a_census_killed_and_resumed_gives_the_same_bytes(
    torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "MOST", 20)
    config = small(stability={"neighbours": "all"})
    execute(config, tmp_path / "whole")
    seen = []

    def stop(record: dict) -> None:
        seen.append(record["done"])
        if record["done"] == 40:
            raise Stop

    with pytest.raises(Stop):
        execute(config, tmp_path / "cut", on_round_end=stop)
    file = tmp_path / "cut" / "neighbours.csv"
    assert len(file.read_text().splitlines()) == 41
    if torn.endswith("\n"):  # a whole line of an unfinished stack
        head = (tmp_path / "whole" / "neighbours.csv").read_text().splitlines()[41]
        torn = ",".join(head.split(",")[:4]) + ",0.5,0.1,0.1\n"
    file.write_text(file.read_text() + torn)
    execute(None, tmp_path / "cut", True, lambda record: seen.append(record["done"]))
    assert seen == [20, 40, 60, 80, 90]
    for name in ("neighbours.csv", "bound.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    execute(None, tmp_path / "cut", resume=True, on_round_end=stop)
    assert len(seen) == 5  # nothing was left to do


def test_stacks_of_any_size_measure_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(stability={"neighbours": "all"})
    execute(config, tmp_path / "a")
    monkeypatch.setattr(neighbours, "MOST", 7)
    execute(config, tmp_path / "b")
    one, other = (column(tmp_path / name, "perturbation") for name in "ab")
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


def test_bound_json_holds_what_analysis_says(tmp_path: Path) -> None:
    table = {"delta": 0.1, "c-hp": 1.0, "constants": "global"}
    config = small(local={"batch": 4}, stability=table)
    record = execute(config, tmp_path / "a")
    assert record == json.loads((tmp_path / "a" / "bound.json").read_text())
    what, plan = the_run(config, tmp_path / "a", batch=4), build_plan(config)
    part = analysis.Realized(plan.schedule(), plan.rows)
    found = analysis.smoothed_polar(what, 0.1, part, 0.1, c_hp=1.0)
    for name in ("value", "h", "g", "delta", "c_hp", "n_eff", "failure", "status"):
        assert record[name] == getattr(found, name), name
    assert record["assumptions"] == list(found.assumptions)
    assert record["l_orth"] == lipschitz("smoothed-polar", "sharp", lam=0.1)
    steps = analysis.step_amplification(0.05, 0.9, record["l_orth"], constants().smoothness, 8, 1)
    drawn = analysis.batch_exposure(steps, part.schedule, what.sizes, plan.rows)
    clients = column(tmp_path / "a", "client").astype(int)
    np.testing.assert_allclose(column(tmp_path / "a", "exposure"), drawn[clients], rtol=1e-14)


def test_smoothed_bounds_are_those_of_analysis(tmp_path: Path) -> None:
    smoothed = {"name": "gaussian-smoothed-sign", "sigma": 0.3}
    config = small(orthogonalizer=smoothed, stability={"constants": "global"})
    record = execute(config, tmp_path / "a")
    part = analysis.Realized(build_plan(config).schedule())
    given = the_run(config, tmp_path / "a"), part, 0.05
    how = {"sigma": 0.3, "alpha": 0.05, "shape": (7, 3)}
    found = analysis.gaussian_smoothed_sign(*given, **how, shares=(1, 1))
    assert record["value"] == found.value and record["failure"] == found.failure == 0.1
    halves = analysis.gaussian_smoothed_sign(*given, **how)
    assert record["value"] < 0.95 * halves.value  # what (12) has as printed


@pytest.mark.parametrize(("tables", "why"), [
    ({"local": {"recipe": "adamw"}}, "adamw has no certificate: AdamW divides by the root"),
    ({"local": {"recipe": "normalized-sgd"}}, "jumps where the momentum D is 0"),
    ({"federation": {"aggregate": "median"}}, "weighted means"),
    ({"orthogonalizer": {"name": "exact-sign"}}, "a momentum without full rank"),
    ({"orthogonalizer": {"name": "exact-sign"}, "engine": {"dtype": "float32"}}, "jumps"),
    ({"orthogonalizer": {"name": "randomized-polar", "rank": 2, "oversample": 1}}, "Lipschitz"),
])  # fmt: skip
def test_a_refusal_says_why_and_measures_on(tables: dict, why: str, tmp_path: Path) -> None:
    record = execute(small(**tables, stability={"trials": 2}), tmp_path / "a")
    assert record["status"] == "refused" and why in record["refusal"]
    assert record["value"] is None and record["gap"] is not None
    assert np.isnan(column(tmp_path / "a", "certificate")).all()
    assert np.isfinite(column(tmp_path / "a", "perturbation")).all()
    assert verdict_table(tmp_path / "a", record).row_count


def test_float64_unless_a_precision_is_named() -> None:
    assert in_float64(parse({})).engine.dtype == "float64"
    single = parse({"engine": {"dtype": "float32"}})
    assert in_float64(single) == single


def command(*arguments: str) -> str:
    shown = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    return shown.output


def test_the_stability_command(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    held = small().model_dump(by_alias=True)
    del held["engine"]["dtype"]
    file.write_text(dump(parse(held)).replace('dtype = "float32"\n', ""))
    output = command("stability", str(file), "--trials", "2", "--out", str(tmp_path / "a"))
    assert "2 neighbours" in output and "C_hp = explicit" in output and "yes" in output
    assert "accuracy" in output and "test loss" in output
    assert re.search(r"its 95% interval +│ [+−][\d.e−]+ to [+−][\d.e−]+", output)  # beside the gap
    assert load_config(tmp_path / "a" / "config.toml").engine.dtype == "float64"
    record = json.loads(command("bound", str(tmp_path / "a"), "--json"))
    held = json.loads((tmp_path / "a" / "bound.json").read_text())
    assert record == {name: held[name] for name in record}
    other = json.loads(command("bound", str(tmp_path / "a"), "--json", "--c-hp", "sharp"))
    assert other["c_hp"] == "sharp" and other["h"] < record["h"] and other["g"] == record["g"]


def test_a_vacuous_bound_says_so(tmp_path: Path) -> None:
    record = execute(small(local={"lr": 1.0}, stability={"trials": 1}), tmp_path / "a")
    assert "vacuous" in record["note"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(verdict_table(tmp_path / "a", record))
    assert record["note"] in console.export_text()
    assert findings(tmp_path / "a").note == record["note"]


def test_the_calculator_is_analysis() -> None:
    output = command("bound", "--json", "--lr", "0.01", "--beta", "0.8", "--l-orth", "3",
                     "--l-g", "0.5", "--rounds", "40", "--local-steps", "2", "--clients", "12",
                     "--per-round", "4", "--size", "50", "--delta", "0.1", "--c-hp", "1",
                     "--rho", "0.02")  # fmt: skip
    record = json.loads(output)
    given = dataclasses.replace(constants(), smoothness=0.5)
    what = analysis.Run(0.01, 0.8, 40, 2, np.full(12, 50), np.full(12, 1 / 12), given)
    found = analysis.theorem(what, 3.0, analysis.Uniform(4, 0.02), 0.1, 1.0)
    for name in ("value", "h", "g", "n_eff", "failure", "c_hp"):
        assert record[name] == pytest.approx(getattr(found, name), rel=1e-14), name
    assert record["status"] == "estimated" and record["kind"] == "given"
    assert any("L_orth = 3" in sentence for sentence in record["assumptions"])
    most = analysis.psi(analysis.amplification(0.01, 0.8, 3.0, 0.5, 40, 2), 12, 4, 0.02)
    assert record["max_exposure"] == pytest.approx(most, rel=1e-14)
    proved = command("bound", "--lr", "0.01", "--lambda", "0.1", "--size", "1000")
    assert "certified" in proved and "C_hp = explicit" in proved
    assert "refused" in command("bound", "--set", "local.recipe=adamw")


@pytest.mark.parametrize(("arguments", "why"), [
    (["nowhere"], "not a run folder"), (["--c-hp", "large"], "c-hp = 'large'"),
    (["--delta", "2"], "delta"), (["--size", "0"], "size"), (["--l-orth", "inf"], "--l-orth"),
])  # fmt: skip
def test_the_calculator_refuses(arguments: list[str], why: str) -> None:
    shown = CliRunner().invoke(app, ["bound", *arguments])
    assert isinstance(shown.exception, InputError) and why in str(shown.exception)


def test_a_run_directory_keeps_its_parameters(tmp_path: Path) -> None:
    run(small(), tmp_path / "a")
    shown = CliRunner().invoke(app, ["bound", str(tmp_path / "a"), "--lr", "2"])
    assert isinstance(shown.exception, InputError) and "its own" in str(shown.exception)
    log = tmp_path / "a" / "rounds.jsonl"
    more = sealed({"round": 9, "dropped": [1]}, RunDirectory(log.parent).mark)
    log.write_text(log.read_text() + more)
    announce(tmp_path / "a", {log.name: log.read_bytes()})
    assert "dropped out" in command("bound", str(tmp_path / "a"))


def test_the_engine_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `fedmuon run`; what cannot run neighbours is refused before anything is written."""
    asked = []

    def stop(config: Config, *others: object) -> None:
        asked.append(config.engine)
        raise InputError("enough")

    with monkeypatch.context() as patched:
        patched.setattr(neighbours, "execute", stop)
        for given in ("--engine=ray --ray-address=10.0.0.1:6379", "--engine=inline", ""):
            CliRunner().invoke(app, ["stability", *given.split(), "--out", str(tmp_path / "s")])
    assert [one.name for one in asked] == ["ray", "inline", "inline"]
    assert [one.ray_address for one in asked] == ["10.0.0.1:6379", "", ""]
    arguments = ["stability", "--engine=deployment", "--out", str(tmp_path / "s")]
    refusal = CliRunner().invoke(app, arguments).exception
    assert isinstance(refusal, InputError) and "a deployment runs only one model" in str(refusal)
    assert not list(tmp_path.iterdir())


def test_a_gap_is_within_its_bound_if_its_interval_is() -> None:
    for low, high, said in ((0.0, 0.3, "yes"), (0.1, 0.31, "inconclusive"), (0.31, 0.5, "no")):
        assert _within(low, high, 0.3).plain.startswith(said)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_bound_is_shown_beside_not_training(tmp_path: Path, weighting: str) -> None:
    """Train losses by hand, weighted as the risk is; the words say which one is smaller."""
    config = small(stability={"trials": 2}, federation={"risk-weights": weighting})
    record = execute(config, tmp_path / "a")
    inputs, labels = load("synthetic", n=150, dimension=7, classes=3, seed=3)
    with np.load(tmp_path / "a" / "partition.npz") as split:
        train, client = split["train_index"], split["client"]
    sizes = np.bincount(client)
    shares = np.full(len(sizes), 1 / len(sizes)) if weighting == "uniform" else sizes / sizes.sum()
    losses, models = [], []
    for name in ("initial", "model"):
        models.append(load_file(tmp_path / "a" / f"{name}.safetensors")["weight"])
        scores = np.exp(inputs[train] @ models[-1])
        each = 1 - scores[np.arange(len(train)), labels[train]] / scores.sum(1)
        losses.append(float(shares @ (np.bincount(client, each) / sizes)))
    assert record["start_loss"] == pytest.approx(losses[0], rel=1e-12)
    assert record["certified_loss"] == pytest.approx(losses[1] + record["value"], rel=1e-12)
    assert record["model_moved"] == pytest.approx(np.linalg.norm(models[1] - models[0]), rel=1e-12)
    assert losses[0] < losses[1] + record["value"]
    times = record["value"] / (losses[0] - losses[1])
    said = gap.start_words(record)[-1][1]
    before, _, after = said.partition(", because the bound is ")
    assert before == "no: the loss of X⁰ is smaller" and times > 1
    assert float(after.removesuffix(" times the decrease")) == pytest.approx(times, rel=5e-3)
    final = dict(gap.start_words(record))["train loss of the final model"]
    assert float(final.split()[0]) == pytest.approx(losses[1], abs=5e-4)
    quotient = float(dict(gap.start_words(record))["decrease of the train loss / bound"]
                     .rpartition("= ")[2])  # fmt: skip
    assert quotient == pytest.approx((losses[0] - losses[1]) / record["value"], rel=5e-3)
    better = gap.start_words(record | {"certified_loss": losses[0] - 0.125})
    assert better[-1][1] == "yes, by 0.125" and not gap.start_words({})
    assert not gap.start_words(record | {"certified_loss": None})
