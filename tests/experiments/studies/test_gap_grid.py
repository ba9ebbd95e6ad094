"""`fedmuon gap`: rows against `fedmuon bound` and `fedmuon stability`, resuming, and the words."""

import csv
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import quick
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

import fedmuon
from fedmuon.analysis.report.tables import read_table
from fedmuon.experiments.cli import app
from fedmuon.experiments.studies import gap_grid

TINY = ["data.name=synthetic", "data.train=60", "data.test=40", "data.dimension=5",
        "federation.clients=3", "federation.per-round=2", "federation.rounds=2",
        "task.initial=zero", "local.steps=1", "orthogonalizer.lambda=0.1"]  # fmt: skip
RATES = (0.01, 0.1)
GRID = "--grid=local.lr=0.01,0.1"


def run(*words: str, changes: list[str] = TINY) -> Any:
    return CliRunner().invoke(app, [*words, *(f"--set={one}" for one in changes)])


def output(*words: str, changes: list[str] = TINY) -> str:
    done = run(*words, changes=changes)
    assert done.exit_code == 0, done.exception or done.output
    return done.output


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "gap.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gap") / "grid"
    output("gap", GRID, "--seeds=2", f"--out={out}")
    return out


def test_each_row_is_the_bound_of_its_run(grid: Path) -> None:
    rows = rows_of(grid)
    assert len(rows) == 2 * 2 * 3
    assert {(float(row["local.lr"]), int(row["seed"])) for row in rows} == {
        (rate, seed) for rate in RATES for seed in (0, 1)
    }
    for row in rows:
        words = ("bound", str(grid / "runs" / row["run"]), f"--c-hp={row['form']}", "--json")
        bound = json.loads(output(*words, changes=[]))
        assert float(row["bound"]) == bound["value"]
        assert (float(row["range"]), row["status"]) == (bound["range"], bound["status"])
        assert float(row["failure"]) == bound["failure"] == 0.05
    # negative control: the comparison tells the runs apart, and the form that uses their losses
    for form in gap_grid.PROVED:
        assert len({row["bound"] for row in rows if row["form"] == form}) == 4
    for first in range(0, len(rows), 3):
        assert len({row["bound"] for row in rows[first : first + 3]}) > 1


def test_each_gap_is_the_gap_of_the_same_run_with_neighbours(grid: Path, tmp_path: Path) -> None:
    for rate in RATES:
        out = tmp_path / str(rate)
        changes = [*TINY, f"local.lr={rate}", "federation.seed=1"]
        output("stability", "--trials=1", f"--out={out}", changes=changes)
        record = json.loads((out / "bound.json").read_text("utf-8"))
        mine = [r for r in rows_of(grid) if (float(r["local.lr"]), r["seed"]) == (rate, "1")]
        for row in mine:
            for name in ("gap", "gap_low", "gap_high"):
                assert float(row[name]) == pytest.approx(record[name], rel=1e-12)
    gaps = {row["gap"] for row in rows_of(grid)}
    assert len(gaps) == 4  # negative control: other runs have other gaps


def test_a_deleted_cell_is_computed_again(grid: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(grid, copy)
    lost = "lr=0.1,seed=1"
    (copy / "cells" / f"{lost}.json").unlink()
    shutil.rmtree(copy / "runs" / lost)
    kept = (copy / "runs" / "lr=0.01,seed=0" / "model.safetensors").stat().st_mtime_ns
    output("gap", GRID, "--seeds=2", f"--out={copy}", "--resume")
    assert (copy / "gap.csv").read_bytes() == (grid / "gap.csv").read_bytes()
    assert (copy / "runs" / "lr=0.01,seed=0" / "model.safetensors").stat().st_mtime_ns == kept
    assert (copy / "runs" / lost / "model.safetensors").exists()
    assert (copy / gap_grid.PICTURE).exists()
    other = run("gap", GRID, "--seeds=2", f"--out={copy}", "--resume", "--set=local.momentum=0.5")
    assert other.exit_code != 0  # another config does not continue in this folder


def test_the_table_is_the_mean_over_seeds(grid: Path) -> None:
    table = json.loads((grid / "gap.json").read_text("utf-8"))["table"]
    for line, rate in zip(table, RATES, strict=True):
        mine = [
            r for r in rows_of(grid) if float(r["local.lr"]) == rate and r["form"] == "explicit"
        ]
        gaps = [float(row["gap"]) for row in mine]
        half = 12.706204736432095 * abs(gaps[0] - gaps[1]) / 2  # Student's t, one degree of freedom
        assert line["gap"] == pytest.approx(sum(gaps) / 2)
        assert line["gap_high"] - line["gap"] == pytest.approx(half)
        assert line["bound"] == pytest.approx(np.mean([float(row["bound"]) for row in mine]))
        assert (line["form"], line["status"]) == ("explicit", "certified")


def test_bounds_together_divide_delta_by_their_number(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "together"
    words = " ".join(output("gap", GRID, "--seeds=2", "--together", f"--out={out}").split())
    assert "All 12 bounds hold together with probability at least 0.95" in words
    apart, together = rows_of(grid), rows_of(out)
    for one, both in zip(apart, together, strict=True):
        assert float(both["failure"]) == pytest.approx(0.05 / 12)
        assert float(both["bound"]) > float(one["bound"])
        assert both["gap"] == one["gap"]
    again = json.loads(
        output("bound", str(out / "runs" / together[0]["run"]), "--json", changes=[])
    )
    assert again["value"] == float(together[0]["bound"])
    alone = json.loads((grid / "gap.json").read_text("utf-8"))["words"]
    assert alone == [
        gap_grid.ALONE.format(count=12), gap_grid.OVER_SEEDS, gap_grid.PREDICTIONS
    ]  # fmt: skip


def test_a_run_without_a_bound_has_its_reason_and_is_not_drawn(tmp_path: Path) -> None:
    out = tmp_path / "refused"
    changes = [*TINY[:-1], "orthogonalizer.name=exact-sign"]
    words = " ".join(output("gap", GRID, f"--out={out}", changes=changes).split())
    assert not (out / gap_grid.PICTURE).exists()
    assert gap_grid.NOT_DRAWN.format(2, 2) in words
    assert all(row["status"] == "refused" and row["bound"] == "inf" for row in rows_of(out))
    reasons = {row["note"] for row in rows_of(out)}
    assert all(words.count(reason) == 1 for reason in reasons)
    resumed = ("gap", GRID, f"--out={out}", "--resume")
    quiet = " ".join(output(*resumed, "--quiet", changes=changes).split())
    assert all(quiet.count(reason) == 1 for reason in reasons)
    assert gap_grid.NOT_DRAWN.format(2, 2) not in quiet
    record = json.loads(output(*resumed, "--json", changes=changes))
    assert reasons <= {*record["words"]}


def test_the_picture_shows_vacuous_bounds_and_gaps_below_0(grid: Path) -> None:
    rows = read_table(grid / "gap.csv", words=gap_grid.WORDS)
    for bound, gap in ((0.5, 0.1), (2.0, 0.1), (0.5, -0.1)):
        changed = {**rows, "bound": bound * rows["range"], "gap": gap * rows["range"]}
        axes = gap_grid.picture(changed).axes[0]
        marks = {line.get_marker(): np.asarray(line.get_xdata()) for line in axes.lines}
        np.testing.assert_allclose(marks["|"], [bound, bound])
        np.testing.assert_allclose(marks["o"], [gap, gap] if gap > 0 else [])
        below = [text for text in axes.get_legend_handles_labels()[1] if "at most 0" in text]
        assert ("<" in marks, len(below)) == ((False, 0) if gap > 0 else (True, 1))
        assert axes.get_xscale() == "log" and "(log scale)" in axes.get_xlabel()
        (zone,) = [one for one in axes.patches if isinstance(one, Rectangle)]
        assert zone.get_x() == 1 and zone.get_x() + zone.get_width() == axes.get_xlim()[1]
        assert axes.get_xlim()[1] > max(1, bound)
        assert [one.get_text() for one in axes.get_yticklabels()] == ["lr=0.01", "lr=0.1"]


def one_row_each(settings: int, seeds: int, **columns: list[float]) -> dict[str, np.ndarray]:
    """Return rows of gap.csv with one form, `seeds` rows for each setting."""
    count = settings * seeds
    words = {name: np.array(["explicit"] * count) for name in ("form", "status", "note", "run")}
    names = [f"local.lr={0.001 * place:g},orthogonalizer.lambda=0.1" for place in range(settings)]
    numbers = {"range": np.ones(count), "accuracy": np.ones(count)}
    made = {name: np.repeat(values, seeds) for name, values in columns.items()}
    return {"setting": np.repeat(names, seeds), **words, **numbers, **made}


PICTURES = [*itertools.product((1, 2, 5, 9, 25), (1.0, 1.01, 10.0))]


@pytest.mark.parametrize(("settings", "spread"), quick(PICTURES, PICTURES[::7]))
def test_no_words_of_the_picture_overlap_marks_or_words(settings: int, spread: float) -> None:
    steps = spread ** np.arange(settings)
    rows = one_row_each(settings, 1, gap=[*(1e-5 * steps)], gap_low=[*(-1e-5 * steps)],
                        gap_high=[*(1e-4 * steps)], bound=[*(0.02 * steps)])  # fmt: skip
    figure = gap_grid.picture(rows)
    figure.draw_without_rendering()
    axes, page = figure.axes[0], figure.bbox
    (legend,) = figure.legends
    words = [*axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label, legend]
    low, high = axes.get_xlim()
    ends = [float(axes.transData.transform((end, 0))[0]) for end in (low, high)]
    boxes = []
    for one in words:
        box = one.get_window_extent()
        if one in axes.get_xticklabels() and not ends[0] <= (box.x0 + box.x1) / 2 <= ends[1]:
            continue  # the tick is outside of the axis, so it is not drawn
        assert not box.overlaps(axes.get_window_extent()), one
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0, one
        boxes.append(box)
    heights = [one.get_window_extent() for one in axes.get_yticklabels()]
    assert not any(above.overlaps(below) for above, below in itertools.pairwise(heights))
    assert not legend.get_window_extent().overlaps(axes.xaxis.label.get_window_extent())
    assert not axes.texts  # negative control: the words of an older picture were in the axes


@pytest.mark.parametrize(
    ("low", "high", "cut"),
    [(1e-5, 2e-3, False), (-1e-5, 2e-3, True), (0.0, 2e-3, True), (-2e-3, -1e-4, False)],
)
def test_an_interval_is_cut_only_if_it_reaches_0(low: float, high: float, cut: bool) -> None:
    """Positive intervals are drawn whole, and negative intervals are not drawn at all."""
    gap = (low + high) / 2
    rows = one_row_each(2, 1, gap=[gap, 1e-3], gap_low=[low, 9e-4], gap_high=[high, 2e-3],
                        bound=[0.02, 0.02])  # fmt: skip
    axes = gap_grid.picture(rows).axes[0]
    left = axes.get_xlim()[0]
    (lines,) = [one for one in axes.collections if isinstance(one, LineCollection)]
    ends = [sorted(float(x) for x in line[:, 0]) for line in map(np.asarray, lines.get_segments())]
    assert ends[0] == pytest.approx([max(low, left), max(high, left)])
    assert ends[1] == pytest.approx([9e-4, 2e-3]) and left < 9e-4
    assert (ends[0][0] > left) == (low > 0)
    labels = axes.get_legend_handles_labels()[1]
    assert any(gap_grid.CUT in one for one in labels) == cut


def test_the_kind_of_each_interval_is_named(grid: Path) -> None:
    ends = {"gap_low": [-1.0, -1.0], "gap_high": [3.0, 3.0], "bound": [0.5, 0.5]}
    alone = one_row_each(2, 1, gap=[1.0, 2.0], **ends)
    several = one_row_each(2, 3, gap=[1.0, 2.0], **ends)
    kept = np.array([True] * 4 + [False] * 2)  # two runs of the last setting diverged
    mixed = {name: column[kept] for name, column in several.items()}
    assert gap_grid.on_intervals(alone) == gap_grid.OF_ONE_RUN
    assert gap_grid.on_intervals(several) == gap_grid.OVER_SEEDS
    last = str(several["setting"][-1])
    assert gap_grid.on_intervals(mixed) == gap_grid.OF_BOTH.format(last)
    for rows, name in ((alone, "held-out"), (several, "over seeds"), (mixed, "or of one run")):
        labels = gap_grid.picture(rows).axes[0].get_legend_handles_labels()[1]
        assert [name in one for one in labels if "interval" in one] == [True]
    assert gap_grid.numbers(alone)[0]["gap_low"] == -1.0 != gap_grid.numbers(several)[0]["gap_low"]
    words = json.loads((grid / "gap.json").read_text("utf-8"))["words"]
    assert gap_grid.OVER_SEEDS in words and gap_grid.OF_ONE_RUN not in words


def test_setting_and_config_exclude_each_other(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text("[local]\nsteps = 1\n")
    done = run("gap", str(config), "--setting=controlled", GRID, changes=[])
    assert done.exit_code != 0 and "both describe the run" in str(done.exception)


def test_python_returns_what_the_command_writes(grid: Path) -> None:
    tables: dict[str, Any] = {}
    for one in TINY:
        key, _, value = one.partition("=")
        table, _, name = key.partition(".")
        known = value if value.isalpha() else float(value) if "." in value else int(value)
        tables.setdefault(table, {})[name] = known
    found = fedmuon.gap(tables, grid={"local.lr": [*RATES]}, seeds=2)
    saved = json.loads((grid / "gap.json").read_text("utf-8"))
    assert (found.table, found.notes) == (saved["table"], saved["words"])
    assert [one["run"] for one in found.rows] == [row["run"] for row in rows_of(grid)]
    assert [one["bound"] for one in found.rows] == [float(row["bound"]) for row in rows_of(grid)]
    assert len(found.runs) == 4 and found.runs[0].config.engine.dtype == "float64"
    assert (found.path / gap_grid.PICTURE).exists()
    assert "range $B$ of the loss" in found.plot().get_xlabel()
    assert "lr=0.01" in str(found) and "certified" in found._repr_html_()
    together = fedmuon.gap(tables, grid={"local.lr": [*RATES]}, seeds=2, together=True)
    assert together.table[0]["bound"] > found.table[0]["bound"]
    assert "All 12 bounds hold together" in together.notes[0]


def test_python_rejects_what_has_no_effect() -> None:
    with pytest.raises(fedmuon.InputError, match="both describe the run"):
        fedmuon.gap({"local": {"lr": 0.1}}, setting="controlled")
    with pytest.raises(fedmuon.InputError, match="seeds is 0"):
        fedmuon.gap(seeds=0)


def test_show_ls_and_compare_read_the_folder(grid: Path) -> None:
    wide = {"COLUMNS": "200"}
    shown = CliRunner().invoke(app, ["show", str(grid)], env=wide).output
    assert "Bound and gap, 2 settings with 2 seeds each" in shown and "certified" in shown
    assert gap_grid.ALONE.format(count=12) in shown and str(grid / gap_grid.PICTURE) in shown
    record = json.loads(output("show", str(grid), "--json", changes=[]))
    assert [row["setting"] for row in record["table"]] == ["lr=0.01", "lr=0.1"]
    refusal = run("show", str(grid), "--clients", changes=[])
    assert "--clients works only for a single run" in str(refusal.exception)
    listed = CliRunner().invoke(app, ["ls", str(grid)], env=wide).output
    assert "These are the runs of `fedmuon gap`" in listed and "lr=0.1,seed=1" in listed
    below = CliRunner().invoke(app, ["ls", str(grid / "runs")], env=wide).output
    assert "fedmuon gap" not in below  # negative control: a folder of runs alone
    assert "seeds" in output("compare", str(grid), changes=[])
    assert "a result of `fedmuon gap`" in str(run("report", str(grid), changes=[]).exception)


def test_show_of_a_damaged_folder_is_an_error(grid: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(grid, copy)
    file = copy / "gap.json"
    file.write_text(file.read_text("utf-8").replace("explicit", "sharp"), "utf-8")
    done = run("show", str(copy), changes=[])
    assert done.exit_code != 0 and "gap.json" in str(done.exception)
