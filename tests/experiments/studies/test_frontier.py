"""Accuracy against a proved bound: each point is a run of its own; claims that can fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small
from suite_files import command, table

from fedmuon.analysis.report.findings import CAPTIONS
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies import frontier
from fedmuon.experiments.studies.frontier import by_share

SUITE = """
kind = "frontier"
title = "A frontier"
data = "digits"
seeds = [3]
starts = ["zero", "gaussian"]
lrs = [0.02]
lambdas = [0.1]
horizons = [4, 2]
base.data = { train = 90, test = 60, minimum = 5 }
base.federation = { clients = 6, per-round = 3 }
base.local = { steps = 2, schedule = "warm-up" }
base.engine = { dtype = "float64", device = "cpu" }
"""
ENDS = (("zero", "2"), ("gaussian", "4"))  # of the points, those that are run again


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "frontier.toml"
    file.write_text(SUITE)
    return file


@pytest.mark.slow
def test_every_point_is_a_run_that_ends_there(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command("suite", suite, "--out", out)
    rows = table(out, "rows")
    assert len(rows) == 8 and "bound / B" in (out / "report.html").read_text()
    for row in (one for one in rows if (one["start"], one["rounds"]) in ENDS):
        folder = tmp_path / f"{row['start']}-{row['rounds']}"
        if not folder.exists():
            run(
                small(
                    data={"name": "digits"}, task={"initial": row["start"]},
                    local={"lr": 0.02, "steps": 2, "schedule": "warm-up"},
                    federation={"rounds": int(row["rounds"])},
                ),
                folder,
            )  # fmt: skip
        case = finished_run.from_directory(folder, [f"stability.constants={row['constants']}"])
        record = certificates.report(case, certificates.certify(case))
        assert float(row["bound"]) == pytest.approx(record["value"], rel=1e-12)
        assert float(row["share"]) == float(row["bound"]) / float(row["range"])
        if row["constants"] == "ball":
            assert float(row["range"]) == pytest.approx(record["range"], rel=1e-12)
        summary = json.loads((folder / "summary.json").read_text())
        for name in ("accuracy", "train_loss", "test_loss"):
            assert float(row[name]) == pytest.approx(summary[name]), name
    first = {row["start"]: float(row["untrained"]) for row in rows}
    assert first["zero"] == pytest.approx(0.1, abs=0.05) and first["gaussian"] != first["zero"]


def test_a_cell_has_both_bounds_of_every_horizon(suite: Path) -> None:
    """A shorter run is the first part of a longer one, and so is its bound."""

    def rows(horizons: str) -> list[dict[str, Any]]:
        text = SUITE.replace('["zero", "gaussian"]', '["zero"]').replace("[4, 2]", horizons)
        suite.write_text(text)
        (cell,) = kinds.find(str(suite), None, "full", {}).cells
        return cell.compute()["rows"]

    found = rows("[2, 1]")
    assert [(row["rounds"], row["constants"]) for row in found] == [
        (1, "ball"), (1, "global"), (2, "ball"), (2, "global")
    ]  # fmt: skip
    for ball, wide in (found[:2], found[2:]):
        assert ball["bound"] <= wide["bound"] and ball["accuracy"] == wide["accuracy"]
        assert ball["gap_low"] <= ball["gap"] <= ball["gap_high"] and ball["gap"] < ball["bound"]
    assert found[2]["bound"] > found[0]["bound"]
    for short, whole in zip(rows("[1]"), found, strict=False):
        assert short.keys() == whole.keys()
        for name, value in short.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=1e-12)
            assert whole[name] == same, name


def test_what_the_suite_settles_is_refused_below_it(suite: Path) -> None:
    with pytest.raises(InputError, match="set by horizons"):
        kinds.find(str(suite), None, "full", {"federation": {"rounds": 7}})


def made(ball: float, wide: float) -> dict[str, np.ndarray]:
    """Two runs of each of two seeds with each kind of constants: 0.3 accurate with a twentieth of
    that bound / B, and 0.7 accurate with all of it; X0 is 0.1 accurate."""
    shares = np.tile([ball / 20, ball, wide / 20, wide], 2)
    same = {"lr": 0.1, "lambda": 0.1, "untrained": 0.1, "train_loss": 0.8, "test_loss": 0.81,
            "gap": 1e-4, "range": 0.5}  # fmt: skip
    return {name: np.full(8, value) for name, value in same.items()} | {
        "start": np.array(["zero"] * 8),
        "constants": np.array(["ball", "ball", "global", "global"] * 2),
        "seed": np.repeat([0.0, 1.0], 4),
        "rounds": np.array([1.0, 5.0] * 4),
        "accuracy": np.array([0.3, 0.7] * 4),
        "bound": shares * 0.5,
        "share": shares,
    }


def verdicts(rows: dict[str, np.ndarray]) -> list[bool | None]:
    return [one.holds for one in frontier.claims(rows)]


def test_claims_of_a_frontier_can_fail() -> None:
    """The bounds hold; half of what training gains is covered; the ball is ahead."""
    for rows, wanted in (
        (made(0.05, 0.5), [True, True, True]),
        (made(0.5, 5.0), [True, False, True]),  # 0.3 of 0.7 from 0.1: a third
        (made(0.05, 0.05), [True, True, False]),  # the ball is worth nothing
        (made(5.0, 5.0), [True, False, None]),  # no bound is small
    ):
        assert verdicts(rows) == wanted
    above = made(0.05, 0.5)
    assert verdicts({**above, "gap": np.full(8, 0.02)})[0] is False
    wide = {"gap_low": np.full(8, -0.1), "gap_high": np.full(8, 0.1)}
    assert frontier.claims({**above, **wide})[0].verdict == "inconclusive"  # its interval is wider
    one = {name: column[:4] for name, column in above.items()}
    assert frontier.claims(one)[1].verdict == "not tested here"  # of one seed
    assert verdicts({**above, "accuracy": np.full(8, 0.1)})[1] is False  # nothing is learned
    # The ball's bounds are never above the others, and yet it may be worth less than an untrained
    # model: where those cover nothing X0 counts, and one seed is enough.
    rows = made(0.05, 5.0)
    assert verdicts(rows)[2] is True
    assert verdicts({**rows, "untrained": np.full(8, 0.8)})[2] is False
    one = {**rows, "accuracy": np.where(rows["seed"] == 1, 0.1, rows["accuracy"])}
    assert verdicts(one)[2] is False and "1 of 2 seeds" in frontier.claims(one)[2].detail


def test_the_frontier_is_the_best_so_far_and_the_table_has_both_kinds() -> None:
    rows = made(0.05, np.inf)
    place = frontier.frontier(rows, frontier.of(rows, "zero", "ball"))
    assert rows["share"][place].tolist() == [0.0025, 0.05]
    assert rows["accuracy"][place].tolist() == [0.3, 0.7]
    assert not len(frontier.frontier(rows, frontier.of(rows, "zero", "global")))
    head, *lines = frontier.numbers(made(0.05, 5.0))
    assert head[1:] == ("accuracy", "train loss", "test loss", "bound", "bound / B")
    shown = ("  0.1, 0.1, 5", "0.700", "0.80000", "0.81000", "0.025", "0.05")
    none = ("  none", *("–" for _ in range(5)))
    titles = [(f"zero, {name}:", *("" for _ in range(5))) for name in ("ball", "global", "any")]
    assert lines == [titles[0], shown, titles[1], none, titles[2], shown]


def test_the_figure_has_the_losses_of_every_best_point() -> None:
    rows = made(0.05, 0.5)
    above, below = by_share(rows).axes
    (step,) = [one for one in above.lines
               if str(one.get_label()) == "best model, constants of the ball"]  # fmt: skip
    assert list(np.asarray(step.get_ydata())) == [0.3, 0.7, 0.7]
    drawn = [sorted(set(np.asarray(one.get_ydata(), float))) for one in below.lines[:4]]
    assert drawn == [[0.81], [0.8]] * 2
    marks = [one.get_markerfacecolor() != "none" for one in below.lines[:4]]
    assert marks == [True, False] * 2 and "realized" in CAPTIONS["frontier"]
