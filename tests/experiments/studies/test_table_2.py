"""001, Table 2: rows are those of its suites, means are naive ones, and orders can fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_suites import STABILITY, STUDY
from study_rows import overprinted, rows_of, verdicts

from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import find, table_2

PRINTED = """
[published.{data}]
runs = 4
gap-within-bound = 1.0
mean-gap = {gap}
mean-bound = {bound}
mean-perturbation = 1e-5
"""


def files(folder: Path) -> Path:
    """Two suites of digits with one seed, and the study that has both."""
    text = STABILITY.replace('data = "synthetic"', 'data = "digits"').replace("dimension = 5\n", "")
    text = text.replace("classes = 3\n", "").replace("test = 30", "test = 200")
    for name, lam in (("B1", "0.1"), ("B2", "1.0")):
        (folder / f"{name}.toml").write_text(text.replace("lambda = [0.1]", f"lambda = [{lam}]"))
    suites = json.dumps([str(folder / f"{name}.toml") for name in ("B1", "B2")])
    file = folder / "both.toml"
    file.write_text(f'kind = "table-2"\ntitle = "Both"\ndata = "digits"\nsuites = {suites}\n')
    return file


def test_rows_are_those_of_the_suites(tmp_path: Path) -> None:
    both: Any = find.find(str(files(tmp_path)), None, "full", {})
    rows = [row for one in both.cells for row in one.compute()["rows"]]
    alone = {
        name: [
            run
            for stack in find.find(str(tmp_path / f"{name}.toml"), "digits", "full", {}).cells
            for run in stack.compute()["runs"]
        ]
        for name in ("B1", "B2")
    }
    assert len(rows) == sum(map(len, alone.values())) == 8
    for name, runs in alone.items():
        mine = [row for row in rows if row["suite"] == name]
        assert [{key: one[key] for key in table_2.KEPT} for one in mine] == [
            {key: one[key] for key in table_2.KEPT} for one in runs
        ]
    said = table_2.claims({key: np.array([row[key] for row in rows]) for key in rows[0]})
    # nothing is printed of digits
    assert verdicts(said) == [True, True, None, None, None]


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    file = files(tmp_path)
    (tmp_path / "B2.toml").write_text(STUDY)
    with pytest.raises(InputError, match="is of kind rank-dependence, but `suites` must"):
        find.find(str(file), None, "full", {})


def test_the_shipped_one_has_the_published_runs() -> None:
    """60, 30 and 36 where a source has all samples; 20 of A2's on mnist5k, which has four sizes."""
    work: Any = find.find("table-2", None, "full", {})
    count: dict[str, int] = {}
    for one in work.cells:
        head, stack = one.compute.args
        count[head["suite"]] = count.get(head["suite"], 0) + len(stack.pairs)
    assert count == {"A1": 60, "A2": 20, "A3": 36}
    heads = {one.compute.args[0]["suite"]: one.compute.args[0] for one in work.cells}
    assert heads["A2"]["published_gap"] == 0.00457 and heads["A3"]["published_bound"] == 0.02063


def made(bounds: tuple[float, float], gap: float = -1e-3, noise: float = 1e-5) -> Any:
    """Two suites of three seeds and two runs each; a bound of 0.2 and 0.1, and gaps of −0.001, are
    published."""
    return rows_of(
        lambda suite, seed, run: {
            "table_gap": gap + noise * (seed - 1) + 1e-4 * run,
            "gap": gap, "gap_low": gap - 1e-4, "gap_high": gap + 1e-4, "range": 0.5,
            "bound": bounds[suite == "B"] * (1 + 0.001 * (seed - 1)) + 0.01 * run,
            "mean_perturbation": (2e-5 if suite == "A" else 1e-5) * (1 + 0.01 * seed),
            "published_gap": -0.001, "published_bound": 0.2 if suite == "A" else 0.1,
            "published_perturbation": 2e-5 if suite == "A" else 1e-5,
        },
        suite=("A", "B"), seed=(0, 1, 2), run=(0, 1),
    )  # fmt: skip


def test_orders_and_signs_that_are_published_can_fail() -> None:
    rows = made((0.2, 0.1))
    said = table_2.claims(rows)
    assert verdicts(said) == [True] * 5 and "falls from A to B" in said[2].sentence
    assert said[2].effect.value[0] == pytest.approx(0.205 / 0.105, rel=1e-6)
    assert verdicts(table_2.claims(made((0.1, 0.2))))[2:] == [False, True, True]
    assert verdicts(table_2.claims(made((0.2, 0.1), gap=2e-3)))[4] is False
    assert verdicts(table_2.claims(made((0.2, 0.1), gap=1e-4, noise=1e-2)))[4] is None
    assert verdicts(table_2.claims(made((1e-5, 1e-6), gap=4e-2)))[:2] == [False, False]
    lines = table_2.numbers(rows)
    assert lines[1][2].startswith("−0.00095 (") and lines[2][2:] == ("−0.001", "0.2", "2e−05")


@pytest.mark.slow
def test_the_figure_shows_both(tmp_path: Path) -> None:
    rows = made((0.2, 0.1))
    for narrow in (False, True):
        assert not overprinted(table_2.beside_published(rows, narrow))
    gap, bound, _ = table_2.beside_published(rows).axes
    seen = [float(y) for line in bound.lines for y in np.asarray(line.get_ydata(), float)]
    assert 0.2 in seen and any(one == pytest.approx(0.205) for one in seen)
    assert gap.get_yscale() == "linear" and bound.get_yscale() == "log"
