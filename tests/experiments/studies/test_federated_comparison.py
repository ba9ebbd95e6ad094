"""The comparison of federated methods: its search, its choice, its claims, which can fail."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from study_rows import columns, one_seed
from suite_files import command, suite_of, table

from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import federated_comparison as comparison
from fedmuon.experiments.studies import find as kinds

SUITE = """
kind = "federated-comparison"
title = "Two methods"
data = "digits"
seeds = [0, 1, 2]
tuning-seeds = [9]
extend = 2
every = 2
alphas = [0.5]
base.data = { train = 200, test = 100, validation = 60 }
base.federation = { clients = 5, per-round = 3, rounds = 4 }
base.local = { steps = 2, batch = 16 }
base.engine = { dtype = "float64", device = "cpu" }
models.matrix = { target = 0.3, base = { task = { name = "matrix" } } }
claims = [{ better = "FedMuon", than = "FedAvg" }]

[methods.FedAvg]
base = { local = { recipe = "fedavg" } }
grid = { "local.lr" = [10.0, 100.0] }

[methods."FedMuon"]
base = { local = { recipe = "fedmuon" } }
grid = { "local.lr" = [0.01, 0.1] }
"""
CONFIG = """
data = { name = "digits", train = 200, test = 100, validation = 60 }
task.name = "matrix"
federation = { clients = 5, per-round = 3, rounds = 4, seed = 2 }
local = { recipe = "fedavg", lr = LR, steps = 2, batch = 16 }
engine = { dtype = "float64", device = "cpu" }
"""


def test_the_search_ends_inside_its_grid_or_says_so() -> None:
    """Against a loss whose minimum is known; the value at an end asks for one more beyond it."""

    def loss(point: comparison.Point) -> float:
        return abs(math.log10(dict(point)["local.lr"] / 100))

    def tried(losses: dict[comparison.Point, float]) -> list[float]:
        return sorted(value for point in losses for _, value in point)

    losses, edge = comparison.search({"local.lr": [0.1, 1.0]}, loss, 5)
    assert not edge and tried(losses) == [0.1, 1.0, 10.0, 100.0, 1000.0]
    assert min(losses, key=lambda one: losses[one]) == (("local.lr", 100.0),)
    losses, edge = comparison.search({"local.lr": [0.1, 1.0]}, loss, 1)
    assert edge == "local.lr" and tried(losses) == [0.1, 1.0, 10.0]
    losses, edge = comparison.search({"local.lr": [1.0, 10.0]}, lambda point: math.inf, 5)
    assert edge and len(losses) == 2  # all diverged: a larger grid is no answer
    two = {"local.lr": [1.0, 10.0, 100.0], "local.server-lr": [0.1, 1.0, 10.0]}
    losses, edge = comparison.search(two, lambda p: abs(p[0][1] - 10) + abs(p[1][1] - 1), 0)
    assert not edge and len(losses) == 9


def test_keys_of_then_are_searched_after_the_grid(tmp_path: Path) -> None:
    """With the best values of those before; the comparison runs with all of them."""
    grid = '[methods.FedAvg]\nbase = { local = { recipe = "fedavg" } }\n'
    then = 'then = { "local.weight-decay" = [0.001, 0.1, 1.0] }\n'
    cell = suite_of(tmp_path, SUITE, (grid, grid + then))
    record = cell.cells[0].compute()
    (chosen,) = (one for one in record["tuning"] if one["chosen"])
    first = [one for one in record["tuning"] if "weight-decay" not in one["step_sizes"]]
    then = [one for one in record["tuning"] if "weight-decay" in one["step_sizes"]]
    best = min(first, key=lambda one: one["validation_loss"])["step_sizes"]
    assert len(then) >= 3 and all(one["step_sizes"].startswith(f"{best}, ") for one in then)
    assert chosen["validation_loss"] == min(one["validation_loss"] for one in then)
    assert {one["step_sizes"] for one in record["rows"]} == {chosen["step_sizes"]}


def test_what_is_chosen_has_the_least_validation_loss(tmp_path: Path) -> None:
    """And what it is judged by is what a run of that step size and seed gives."""
    cell = suite_of(tmp_path, SUITE).cells[0]
    record = cell.compute()
    (chosen,) = (one for one in record["tuning"] if one["chosen"])
    assert chosen["validation_loss"] == min(one["validation_loss"] for one in record["tuning"])
    assert {one["step_sizes"] for one in record["rows"]} == {chosen["step_sizes"]}
    (tmp_path / "config.toml").write_text(
        CONFIG.replace("LR", chosen["step_sizes"].removeprefix("lr = "))
    )
    command("run", tmp_path / "config.toml", "--out", (out := tmp_path / "run"))
    summary = json.loads((out / "summary.json").read_text())
    row = record["rows"][2]
    assert row["seed"] == 2 and row["accuracy"] == summary["accuracy"]
    assert row["validation_loss"] == summary["validation_loss"] and not row["note"]
    assert row["rounds_to_target"] in (0, 2, 4, math.inf)
    assert [one["round"] for one in record["curves"]] == 3 * [0, 2, 4]


def test_a_claim_can_fail() -> None:
    """Accuracies of two methods at two alphas, seed by seed."""
    rows = [
        {"model": "m", "alpha": alpha, "method": method, "seed": seed, "accuracy": accuracy,
         "edge": ""}
        for alpha in (0.1, 1.0)
        for method, base in (("A", 0.8), ("B", 0.7))
        for seed, accuracy in enumerate(base + 0.01 * np.arange(4) * (1 + alpha * (base > 0.75)))
    ]  # fmt: skip
    found = columns(rows)
    assert comparison.ordered(found, "A", "B").verdict == "holds"
    assert comparison.ordered(found, "B", "A").verdict == "refuted"
    assert comparison.ordered(found, "A", "C").effect.name == ""
    alone = comparison.ordered(one_seed(found), "A", "B")
    assert alone.verdict == "not tested here"
    found["accuracy"][found["method"] == "A"] = np.nan  # diverged
    assert comparison.ordered(found, "A", "B").verdict == "refuted"


def test_methods_that_were_not_tuned_equally_well_are_not_compared() -> None:
    """With a best value at an end, or with fewer values; equal grids are the control."""
    rows = columns([
        {"model": "m", "alpha": 1.0, "method": method, "seed": seed, "edge": "",
         "accuracy": base + 0.001 * seed}
        for method, base in (("A", 0.8), ("B", 0.7)) for seed in range(4)
    ])  # fmt: skip
    given = [("A", "B")]
    first = comparison.claims(given, {"A": 4, "B": 4}, rows, {}, {})[0]
    assert first.verdict == "holds"
    fewer = comparison.claims(given, {"A": 4, "B": 3}, rows, {}, {})[0]
    assert fewer.verdict == "inconclusive" and "values differ: A 4, B 3" in fewer.why
    at_end = {**rows, "edge": np.where(rows["method"] == "B", "local.lr", "")}
    end = comparison.claims(given, {"A": 4, "B": 4}, at_end, {}, {})[0]
    assert end.verdict == "inconclusive" and end.why.startswith("B's best step size is at an end")


@pytest.mark.parametrize(("change", "said"), [
    (("tuning-seeds = [9]", "tuning-seeds = [1]"), "seed 1 is in seeds and in tuning-seeds"),
    ((", validation = 60", ""), "validation = 0, but validation samples choose"),
    (('than = "FedAvg"', 'than = "FedAvq"'), "no such method. Use one of FedAvg, FedMuon"),
    (("[0.01, 0.1]", "[0.01]"), "grid"),
    (('{ "local.lr" = [0.01', '{ "local.proximal" = [0.01'), "proximal = 0.1 has no effect"),
    (('{ "local.lr" = [0.01', '{ "local.rate" = [0.01'), "unknown key .local. rate"),
    (('"fedmuon" }', '"fedmuon", lr = 0.1 }'), "local.lr has no effect"),
    (('"fedmuon"', '"fedmoon"'), "fedmuon"),
])  # fmt: skip
def test_a_comparison_that_cannot_be_made_is_rejected(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        suite_of(tmp_path, SUITE, change)


@pytest.mark.parametrize("names", [("fashion-mnist", "digits"), ("digits", "fashion-mnist")])
def test_the_first_data_of_this_machine_are_taken(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(name, name == "digits", "") for name in names]
    monkeypatch.setattr(kinds, "available", lambda: there)
    assert suite_of(tmp_path, SUITE, ('"digits"', json.dumps(names))).request.data == "digits"


@pytest.mark.usefixtures("undrawn")
def test_from_the_command_to_the_report(tmp_path: Path) -> None:
    suite_of(tmp_path, SUITE)
    command("suite", tmp_path / "suite.toml", "--out", (out := tmp_path / "out"))
    assert all(table(out, name) for name in ("rows", "tuning", "curves"))
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "FedMuon ends at least as accurate as FedAvg" in page and "target 0.3" in page


def test_a_combination_that_is_tried_twice_counts_once() -> None:
    grid, then = {"local.lr": [0.1, 0.2, 0.4]}, {"local.aux-lr": [0.01, 0.02]}
    method = comparison.Method.model_validate({"base": {}, "grid": grid, "then": then})
    assert comparison.points_of(method, {}) == comparison.trials_of(method) == 5
    assert comparison.points_of(method, {"local": {"aux-lr": 0.02}}) == 4
    own = comparison.Method.model_validate(
        {"grid": grid, "then": then, "base": {"local": {"aux-lr": 0.03}}}
    )
    assert comparison.points_of(own, {"local": {"aux-lr": 0.02}}) == 5
