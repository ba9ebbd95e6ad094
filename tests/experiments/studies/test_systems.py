"""Accuracy against bytes and simulated seconds: costs, ratios, claims that can fail, the report."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_rows import columns
from suite_files import command, suite_of, table

import fedmuon
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import systems
from fedmuon.runs.directory import positions


def tables(**costs: list[list[float]]) -> tuple[Any, Any]:
    """Rows and curves of one part, whose target is 0.5: for each method and seed, the MB after
    which its accuracy is 0.6. It has 0.1 before; with an infinite cost, also at the end."""
    rows, curves = [], []
    for method, (spent,) in costs.items():
        for seed, mb in enumerate(spent):
            head = {"model": "p", "alpha": 1.0, "method": method, "seed": seed}
            rows.append(head | {"target": 0.5, "note": "", "edge": "", "accuracy": 0.6})
            for at, up in enumerate((0.0, 0.5 * min(mb, 9.0), min(mb, 9.0), 10.0)):
                accuracy = 0.6 if up >= mb else 0.1
                curves.append(head | {"round": at, "bytes_up": 1e6 * up, "accuracy": accuracy,
                                      "simulated_seconds": math.nan})  # fmt: skip
    return columns(rows), columns(curves)


def test_costs_are_those_of_the_first_round_at_the_target() -> None:
    rows, curves = tables(A=[[2.0, 4.0, math.inf]])
    assert systems.costs_to_target(rows, curves, "p", "A") == {0: 2.0, 1: 4.0, 2: math.inf}
    assert systems.cost_of(curves, "p") == "bytes_up"
    curves["simulated_seconds"] = 3 * curves["round"]
    assert systems.cost_of(curves, "p") == "simulated_seconds"
    assert systems.costs_to_target(rows, curves, "p", "A") == {0: 6.0, 1: 6.0, 2: math.inf}


def test_ratios_are_paired_by_seed() -> None:
    """The geometric mean, and Student's interval of the logarithms, with t = 4.3026527 for 3."""
    mine, other = [1.0, 2.0, 4.0], [2.0, 5.0, 7.0]
    found = systems.ratio(dict(enumerate(mine)), dict(enumerate(other)))
    logs = np.log(np.array(mine) / np.array(other))
    half = 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3)
    assert found is not None
    assert found.value == pytest.approx(math.exp(logs.mean()), rel=1e-9)
    assert found.low == pytest.approx(math.exp(logs.mean() - half), rel=1e-9)
    assert found.high == pytest.approx(math.exp(logs.mean() + half), rel=1e-9)
    never = {0: math.inf, 1: math.inf, 2: math.inf}
    lost = systems.ratio(never, dict(enumerate(other)))
    assert lost is not None and lost.value == math.inf
    assert systems.ratio({**never, 0: 1.0}, dict(enumerate(other))) is None
    assert systems.ratio(never, never) is None


@pytest.mark.parametrize(
    ("mine", "other", "verdict"),
    [
        ([1.0, 1.1, 1.2], [8.0, 8.5, 8.0], "holds"),
        ([8.0, 8.5, 8.0], [1.0, 1.1, 1.2], "refuted"),
        ([1.0, 8.0, 2.0], [2.0, 1.0, 8.0], "inconclusive"),
        ([math.inf] * 3, [2.0, 1.0, 8.0], "refuted"),
        ([2.0, 1.0, 8.0], [math.inf] * 3, "holds"),
        ([math.inf, 1.0, 8.0], [2.0, 1.0, 8.0], "inconclusive"),
        ([1.0], [8.0], "not tested here"),
        ([1.0, 1.0], [8.0, 8.0], "inconclusive"),  # an interval of no width, of the same ratio
        ([0.5, 1.0, 2.0], [2.0, 4.0, 8.0], "inconclusive"),
        ([0.5, 1.0, 2.1], [2.0, 4.0, 8.0], "holds"),
    ],
)
def test_a_claim_can_fail(mine: list[float], other: list[float], verdict: str) -> None:
    rows, curves = tables(A=[mine], B=[other])
    claim = systems.cheaper(rows, curves, "p", "A", "B")
    assert claim.verdict == verdict, claim
    assert "A reaches a test accuracy of 0.5 with fewer uploaded megabytes" in claim.sentence
    assert claim.accepted == "< 1" and "accuracy at the end 0.6" in claim.detail


def test_targets_that_are_reached_at_once_and_wide_intervals_say_nothing() -> None:
    """The second evaluation is the negative control: there the ratio decides."""
    rows, curves = tables(A=[[1.0, 1.1, 1.2]], B=[[8.0, 8.5, 8.0]])
    assert systems.cheaper(rows, curves, "p", "A", "B").verdict == "holds"
    curves["accuracy"] = np.where(curves["round"] > 0, 0.6, 0.1)
    claim = systems.cheaper(rows, curves, "p", "A", "B", "on slow links")
    assert claim.verdict == "inconclusive" and "at their first evaluation" in claim.in_words
    assert "than B on slow links, each" in claim.sentence
    wide = systems.cheaper(*tables(A=[[1.0, 8.0]], B=[[2.0, 3.0]]), "p", "A", "B")
    assert wide.verdict == "inconclusive" and "says nothing" in wide.in_words


def test_methods_with_unequal_grids_are_not_compared() -> None:
    rows, curves = tables(A=[[1.0, 1.1, 1.2]], B=[[8.0, 8.5, 8.0]])

    def verdict(**grids: list[float]) -> tuple[str, str]:
        methods = {
            name: {"base": {"local": {}}, "grid": {"local.lr": grid}, "then": {}}
            for name, grid in grids.items()
        }
        claims = [{"better": "A", "than": "B", "kind": "cheaper"}]
        parts = {"p": {"methods": methods, "claims": claims}}
        claim = systems.claims(parts, rows, {}, curves)[0]
        return claim.verdict, claim.untuned

    assert verdict(A=[0.1, 0.2, 0.4], B=[1.0, 2.0, 4.0]) == ("holds", "")
    why = "the numbers of tuned values differ: A 3, B 2"
    assert verdict(A=[0.1, 0.2, 0.4], B=[1.0, 2.0]) == ("inconclusive", why)


SUITE = """
kind = "systems"
title = "Costs"
data = "digits"
seeds = [0, 1]
tuning-seeds = [9]
extend = 0
every = 2
alpha = 0.5
base.data = { train = 200, test = 100, validation = 60 }
base.task.name = "matrix"
base.federation = { clients = 5, per-round = 2, rounds = 4 }
base.local = { steps = 2, batch = 16 }

[parts.bytes]
target = 0.3
baseline = "FedAvg, uncompressed"
claims = []

[parts.bytes.methods."FedAvg, uncompressed"]
base = { local = { recipe = "fedavg" } }
grid = { "local.lr" = [10.0, 100.0] }

[parts.seconds]
target = 0.3
baseline = "FedAvg, deadline"
claims = []

[parts.seconds.methods."FedAvg, deadline"]
base.local = { recipe = "fedavg" }
base.devices = { mode = "deadline", select = 3, speeds = "log-normal" }
grid = { "local.lr" = [10.0, 100.0] }
"""


def test_curves_have_the_costs_of_a_run_of_the_same_config(tmp_path: Path) -> None:
    """The run counts its own bytes and seconds, also of the client that was asked in vain."""
    cell = suite_of(tmp_path, SUITE).cells[1]
    record = cell.compute()
    lr = float(record["rows"][0]["step_sizes"].removeprefix("lr = "))
    data = {"name": "digits", "train": 200, "test": 100, "validation": 60, "alpha": 0.5}
    config = {
        "data": data, "task": {"name": "matrix"},
        "federation": {"clients": 5, "per-round": 2, "rounds": 4, "seed": 1},
        "local": {"recipe": "fedavg", "lr": lr, "steps": 2, "batch": 16},
        "devices": {"mode": "deadline", "select": 3, "speeds": "log-normal"},
    }  # fmt: skip
    run = fedmuon.run(config, out=tmp_path / "run")
    mine = [one for one in record["curves"] if one["seed"] == 1]
    up, both, seconds = (positions(run.rounds, x) for x in ("bytes-up", "bytes", "seconds"))
    assert [one["round"] for one in mine] == [0, 2, 4]
    assert [one["bytes_up"] / 1e6 for one in mine[1:]] == pytest.approx(up[1::2], rel=1e-12)
    down = [(one["bytes_up"] + one["bytes_down"]) / 1e6 for one in mine[1:]]
    assert down == pytest.approx(both[1::2], rel=1e-12)
    assert [one["simulated_seconds"] for one in mine[1:]] == pytest.approx(seconds[1::2], rel=1e-12)
    assert mine[0]["simulated_seconds"] == mine[0]["bytes_up"] == 0
    assert mine[-1]["accuracy"] == run.summary["accuracy"]


@pytest.mark.parametrize(("change", "said"), [
    (('baseline = "FedAvg, deadline"', 'baseline = "FedAvg"'), "but this part has no such"),
    (("extend = 0", "extend = 0\nalphas = [1.0]"), "alphas"),
    (("[parts.seconds]", "[parts.seconds]\nalphas = [1.0]"), "alphas has no effect"),
])  # fmt: skip
def test_a_suite_of_costs_that_cannot_be_made_is_rejected(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        suite_of(tmp_path, SUITE, change)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("local.recipe", "fedmuon", "methods.'FedAvg, uncompressed'"),
    ("local.lr", 3.0, "methods.'FedAvg, uncompressed'"),
    ("devices.select", 4, "methods.'FedAvg, deadline'"), ("devices.latency", 1.0, "parts.seconds"),
])  # fmt: skip
def test_set_cannot_change_what_methods_differ_in(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    table, _, name = key.partition(".")
    (tmp_path / "suite.toml").write_text(
        SUITE.replace("[parts.seconds]", "[parts.seconds]\nbase.devices.latency = 0.2")
    )
    for changed in (True, False):  # the negative control: a key that no method sets
        tables = {table: {name: value}} if changed else {"local": {"steps": 3}}
        request = partial(kinds.find, str(tmp_path / "suite.toml"), None, "small", tables)
        if not changed:
            cells: Sequence[Any] = request().cells
            assert {one.config.local.steps for one in cells} == {3}
            continue
        with pytest.raises(InputError, match=f"--set {key} has no effect.*{said}"):
            request()


def test_a_compressor_has_one_colour_in_all_figures() -> None:
    """Parts that share none keep colours of their own: the mode is black, as the compressor is."""
    rows, curves = tables(**{"X, none": [[1.0]], "X, top-k": [[2.0]], "X, sign": [[3.0]]})
    other, drawn = tables(**{"X, none": [[1.0]], "X, sign": [[3.0]]})
    third, clock = tables(**{"X, waits": [[1.0]], "X, late": [[3.0]]})
    for held, name in ((other, "q"), (drawn, "q"), (third, "r"), (clock, "r")):
        held["model"] = np.full(len(held["model"]), name)
    every = {name: np.concatenate([rows[name], other[name], third[name]]) for name in rows}
    found = [
        {str(line.get_label()): line.get_color() for line in axes.lines
         if not str(line.get_label()).startswith(("_", "target"))}
        for axes in (systems.accuracy_against(systems.BYTES, every, {}, one).axes[0]
                     for one in (curves, drawn, clock))
    ]  # fmt: skip
    assert found[0].keys() == {"none", "top-k", "sign"} and found[1].keys() == {"none", "sign"}
    assert len({*found[0].values()}) == 3 and found[1].items() <= found[0].items()
    assert found[2] == {"waits": found[0]["none"], "late": found[0]["top-k"]}


def test_a_crowded_panel_is_split_and_repeats_its_first_method() -> None:
    methods = [f"A, {how}" for how in "abcdefghij"] + ["B, a", "B, b"]
    panels = systems.panels_of(methods)
    assert [len(names) for names in panels.values()] == [6, 5, 2]
    assert all(names[0] == "A, a" for title, names in panels.items() if title.startswith("A"))
    assert {name for names in panels.values() for name in names} == set(methods)
    assert list(systems.panels_of(methods[:3])) == ["A"]


def test_the_shipped_suite_encloses_its_choices_and_has_a_real_deadline() -> None:
    """Most clients are in time for the deadline, and some are late."""
    full, small = (kinds.find("systems", "mnist5k", scale, {}) for scale in ("full", "small"))
    cells: Sequence[Any] = full.cells
    assert [one.name for one in cells if "deadline" in one.name and not
            one.config.devices.deadline] == []  # fmt: skip
    late = [one for one in cells if one.head["method"] == "FedMuon, deadline"]
    table = late[0].config.devices
    chance = 0.1 + 2 * 62_720 / 1e6
    drawn = np.exp(np.random.default_rng(0).standard_normal(100_000) * table.speed_spread)
    took = chance + 5 * 32 * table.cost / (table.speed * drawn)
    assert 0.75 < (took <= table.deadline).mean() < 0.85
    assert late[0].config.federation.rounds * 4 == 200
    again: Sequence[Any] = small.cells
    assert len(again) == len(cells) == 36 and all(one.settings.extend for one in again)


@pytest.mark.usefixtures("undrawn")
def test_from_the_command_to_the_report(tmp_path: Path) -> None:
    suite_of(tmp_path, SUITE)
    command("suite", tmp_path / "suite.toml", "--out", (out := tmp_path / "out"))
    held = {(row["model"], bool(row["simulated_seconds"])) for row in table(out, "curves")}
    assert {part for part, _ in held} == {"bytes", "seconds"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "cost in MB sent up; ratio to FedAvg, uncompressed" in page
    assert "cost in simulated seconds; ratio to FedAvg, deadline" in page
    assert "local.recipe = fedavg, devices.mode = deadline, devices.select = 3" in page
    assert "<li>Step sizes were chosen for the final loss" in page
    chosen = {row["step_sizes"] for row in table(out, "rows")}
    assert "as chosen" in page and chosen == {"lr = 100"}
    assert "For 2 of 2 methods, the best step size lies at an end" in page
