"""Study `table-2`: compare all suites of the Stability note, Table 2, with published means.

A cell computes a batch of runs of one suite, such as A1. The command `fedmuon suite A1` computes
the same cells.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import (
    POSITIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    mean_of,
    quotient,
    unknown,
)
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.experiments.studies import stability
from fedmuon.experiments.studies.study import Call, Study, distinct, in_words
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.runs.directory import Record

# Column of runs.csv -> its name in a suite's file.
COLUMNS = {"table_gap": "gap", "bound": "bound", "mean_perturbation": "perturbation"}
KEPT = ("n", "lr", "lambda", "alpha", "per_round", "seed", "gap", "gap_low", "gap_high",
        "range", *COLUMNS)  # fmt: skip


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `suites` lists names or paths of suites of kind `stability`.
    """

    suites: Annotated[list[str], Field(min_length=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each batch of runs of each suite."""
    calls = []
    for name in settings.suites:
        content = contents.at(contents.read(name), request.data, request.scale)
        if (kind := content.pop("kind", "stability")) != "stability":
            raise InputError(
                f"the suite {name} is of kind {kind}, but `suites` must list only suites of "
                f"kind stability: replace {name}"
            )
        content.pop("data", None)
        work = stability.work(content, replace(request, name=name))
        printed = work.published
        published = {
            f"published_{column}": getattr(printed, f"mean_{column}") if printed else np.nan
            for column in COLUMNS.values()
        }
        head = {"suite": work.request.stem} | published
        calls += [
            Call(f"{work.request.stem}-{stack.name}", partial(measure, head, stack), stack.size)
            for stack in work.cells
        ]
    return calls


def measure(head: Record, stack: stability.Stack) -> Record:
    """Return a row for each run of the batch."""
    runs = stack.compute()["runs"]
    return {"rows": [head | {name: run[name] for name in KEPT} for run in runs]}


# Claims

STANDS_ON = (
    "Runs, gaps and bounds are those of the listed suites. Means are over all runs of a suite, "
    "as in the paper's table, with Student's intervals over seeds. The gap in the table is the "
    "test loss minus the weighted training loss. Bounds are compared with the gap at the "
    "clients' label shares, because the theorem is about this gap. We compare orders and signs, "
    "not values, because the paper states neither its loss, its initial model, its δ nor its "
    "C_hp."
)
WORDS = {"gap": "mean gap", "bound": "mean bound", "perturbation": "mean perturbation"}


def by_seed(rows: Columns, suite: str, column: str) -> np.ndarray:
    """Return the mean over a suite's runs, for each seed."""
    suite_rows = where(rows, suite=suite)
    return np.array(
        [where(suite_rows, seed=seed)[column].mean() for seed in np.unique(suite_rows["seed"])]
    )


def printed(rows: Columns, suite: str, column: str) -> float:
    """Return the published value in the Stability note, Table 2.

    If there is no such value, the result is nan.
    """
    return float(where(rows, suite=suite)[f"published_{column}"][0])


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims are about gaps, bounds, the published order of the suites, and the published signs.
    """
    return [*(_within(rows, suite) for suite in distinct(rows, "suite")),
            *(_ordered(rows, column) for column in ("bound", "mean_perturbation")),
            _signed(rows)]  # fmt: skip


def _within(rows: Columns, suite: str) -> Claim:
    suite_rows = where(rows, suite=suite)
    gap, bound, high = suite_rows["gap"], suite_rows["bound"], suite_rows["gap_high"]
    return Claim(
        f"{suite}: every gap is at most its bound.",
        Effect.of_gaps(gap, suite_rows["gap_low"], high, bound),
        Rule(high=0.0),
        f"{(gap <= bound).sum()} of {len(gap)} runs, and {(high <= bound).sum()} for the upper "
        f"end of the gap's interval; {(bound >= suite_rows['range']).sum()} bounds are vacuous",
    )


def _ordered(rows: Columns, column: str) -> Claim:
    """Return the claim that the suites, sorted by this mean, have the published order."""
    word = WORDS[COLUMNS[column]]
    suites = distinct(rows, "suite")
    order = sorted(suites, key=lambda suite: -printed(rows, suite, COLUMNS[column]))
    sentence = f"The {word} falls from {' to '.join(order)}, as published."
    if np.isnan([printed(rows, suite, COLUMNS[column]) for suite in suites]).any():
        return unknown(
            f"The {word} has the published order.", "the paper publishes no values for these data"
        )
    quotients = {
        f"{first} over {second}": quotient(
            by_seed(rows, first, column), by_seed(rows, second, column)
        )
        for first, second in itertools.pairwise(order)
    }
    effect = Effect.between("quotient of means", quotients, unit="ratio")
    return Claim(sentence, effect, Rule(low=1.0, strict=True), in_words(quotients))


def _signed(rows: Columns) -> Claim:
    """Return the claim that the mean gap of each suite has the published sign."""
    suites = distinct(rows, "suite")
    signs = {suite: np.sign(printed(rows, suite, "gap")) for suite in suites}
    if np.isnan(list(signs.values())).any():
        return unknown(
            "Mean gaps have the published signs.", "the paper publishes no values for these data"
        )
    gaps = {suite: mean_of(by_seed(rows, suite, "table_gap")) for suite in suites}
    signed_gaps = {
        suite: mean_of(signs[suite] * by_seed(rows, suite, "table_gap")) for suite in suites
    }
    listed = ", ".join(f"{suite} {'+' if signs[suite] > 0 else '−'}" for suite in suites)
    effect = Effect.between("mean gap times its published sign", signed_gaps, unit="loss")
    return Claim(f"Mean gaps have the published signs: {listed}.", effect, POSITIVE,
                 "; ".join(f"{suite}: {_reach(gaps[suite])}" for suite in suites))  # fmt: skip


def _reach(mean: Slope) -> str:
    return f"{number(mean.value, 3)} ({number(mean.low, 3)} to {number(mean.high, 3)})"


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain measured means with intervals over seeds, and the published means.
    """
    lines: Rows = [("", "runs", *WORDS.values())]
    for suite in distinct(rows, "suite"):
        count = str(len(where(rows, suite=suite)["gap"]))
        means = (_reach(mean_of(by_seed(rows, suite, column))) for column in COLUMNS)
        lines.append((suite, count, *means))
        published = (printed(rows, suite, column) for column in COLUMNS.values())
        lines.append((f"{suite}, as printed", "", *(number(value, 3) for value in published)))
    return lines


# Figures


@style.styled
def beside_published(rows: Columns, narrow: bool = False) -> Figure:
    """Draw measured and published means for each suite.

    The figure has a panel for each column of the table.
    """
    figure, panels = style.canvas(len(COLUMNS), narrow, 2.6)
    suites = distinct(rows, "suite")
    place = np.arange(len(suites))
    for axes, (column, name) in zip(panels, COLUMNS.items(), strict=True):
        means = [mean_of(by_seed(rows, suite, column)) for suite in suites]
        values = np.array([mean.value for mean in means])
        reach = np.array([(mean.value - mean.low, mean.high - mean.value) for mean in means]).T
        axes.errorbar(place - 0.1, values, reach, fmt="o", color=style.BLUE, ms=5, label="ours")
        published = [printed(rows, suite, name) for suite in suites]
        label = "Stability note, Table 2"
        axes.plot(place + 0.1, published, "D", color=style.RED, ms=5, mfc="none", label=label)
        if name == "gap":
            axes.axhline(0, color=style.GREY, lw=0.8)
        else:
            style.log_y(axes)
        axes.set_xticks(place, suites)
        axes.set_xlim(-0.5, len(suites) - 0.5)
        axes.set_title(WORDS[name], loc="left")
    style.legend_below(figure, panels[0], 2)
    return figure


STUDY = Study("table-2", Settings, cells, claims, numbers, STANDS_ON, {"table-2": beside_published})
