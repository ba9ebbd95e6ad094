"""Accuracy against a proved bound: each point is a run of its own; claims that can fail."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import small

from fedmuon.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.laboratory import bound
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.frontier import findings

SUITE = """
kind = "frontier"
title = "A frontier"
data = "digits"
seeds = [3]
starts = ["zero", "gaussian"]
lrs = [0.02]
lambdas = [0.1]
horizons = [4, 2]

[base.data]
train = 90
test = 60
minimum = 5

[base.federation]
clients = 6
per-round = 3

[base.local]
steps = 2

[base.engine]
dtype = "float64"
device = "cpu"
"""


ENDS = (("zero", "2"), ("gaussian", "4"))  # of the points, those that are run again


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    file = tmp_path / "frontier.toml"
    file.write_text(SUITE)
    return file


def test_every_point_is_a_run_that_ends_there(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["suite", str(suite), "--out", str(out)])
    rows = list(csv.DictReader((out / "rows.csv").read_text().splitlines()))
    assert len(rows) == 8 and "bound / B" in (out / "report.html").read_text()
    for row in (one for one in rows if (one["start"], one["rounds"]) in ENDS):
        folder = tmp_path / f"{row['start']}-{row['rounds']}"
        if not folder.exists():
            run(
                small(
                    data={"name": "digits"}, task={"initial": row["start"]},
                    local={"lr": 0.02, "steps": 2}, federation={"rounds": int(row["rounds"])},
                ),
                folder,
            )  # fmt: skip
        case = bound.from_directory(folder, [f"stability.constants={row['constants']}"])
        record = bound.report(case, bound.judge(case))
        assert float(row["bound"]) == pytest.approx(record["value"], rel=1e-12)
        assert float(row["share"]) == float(row["bound"]) / float(row["range"])
        if row["constants"] == "ball":
            assert float(row["range"]) == pytest.approx(record["range"], rel=1e-12)
        summary = json.loads((folder / "summary.json").read_text())
        assert float(row["accuracy"]) == pytest.approx(summary["accuracy"])


def test_what_the_suite_settles_is_refused_below_it(suite: Path) -> None:
    with pytest.raises(InputError, match="horizons settles it"):
        kinds.find(str(suite), None, "full", {"federation": {"rounds": 7}})
    for scale, count in (("small", 4), ("full", 90)):
        assert len(kinds.find("A4", None, scale, {}).cells) == count


def made(ball: float, wide: float) -> dict[str, np.ndarray]:
    """Two runs with each kind of constants: 0.3 accurate with a twentieth of that bound / B, and
    0.7 accurate with all of it."""
    shares = np.array([ball / 20, ball, wide / 20, wide])
    return {
        "start": np.array(["zero"] * 4),
        "constants": np.array(["ball", "ball", "global", "global"]),
        "rounds": np.array([1.0, 5.0] * 2),
        "lr": np.full(4, 0.1),
        "lambda": np.full(4, 0.1),
        "accuracy": np.array([0.3, 0.7] * 2),
        "gap": np.full(4, 1e-4),
        "bound": shares * 0.5,
        "range": np.full(4, 0.5),
        "share": shares,
    }


def test_claims_of_a_frontier_can_fail() -> None:
    assert [one.holds for one in findings.claims(made(0.05, 0.5))] == [True, True]
    assert [one.holds for one in findings.claims(made(0.5, 0.05))] == [True, False]
    assert findings.claims(made(0.05, 0.05))[1].holds is False
    assert findings.claims(made(5.0, 5.0))[1].holds is None  # no bound is small: nothing to compare
    above = made(0.05, 0.5)
    above["gap"] = np.full(4, 0.02)
    assert findings.claims(above)[0].holds is False


def test_the_frontier_is_the_best_so_far() -> None:
    rows = made(0.05, np.inf)
    share, best = findings.frontier(rows, findings.of(rows, "zero", "ball"))
    assert share.tolist() == [0.0025, 0.05] and best.tolist() == [0.3, 0.7]
    assert not len(findings.frontier(rows, findings.of(rows, "zero", "global"))[0])
    (_, first, longest, none) = findings.numbers(rows)
    assert first[2:6] == ("most accurate", "0.1", "0.1", "5") and longest[2] == "longest"
    assert none[1] == "all models" and set(none[3:]) == {"–"}
