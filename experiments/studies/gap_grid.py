"""`fedmuon gap` and `fedmuon.gap`: gaps and their bounds at every point of a grid.

Each point of the grid is trained with one or several seeds. Each run is a cell of a sweep, and has
its own folder. From this folder, the cell computes the gap of the run and its bound in each form.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.numbers import count, number
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.config.user_objects import NOTHING, UserObjects
from fedmuon.core.files import finite
from fedmuon.experiments.stability.certificates import certify, in_float64
from fedmuon.experiments.stability.finished_run import FinishedRun, from_directory
from fedmuon.experiments.stability.gap import measure_gap
from fedmuon.experiments.studies import gap_bound
from fedmuon.experiments.studies.study import distinct
from fedmuon.experiments.studies.sweep import GridSearch, SweptRun
from fedmuon.experiments.suites.suite import Compute, Rows, execute, here
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import OnRoundEnd, OnStart

PROVED = ("explicit", "sharp", "variance")  # values of stability.c-hp
PICTURE = "gap.png"
WORDS = ("setting", "run", "form", "status", "note")  # columns of gap.csv that are texts
ALONE = (
    "Each bound holds with probability 1 − δ for a setting that was fixed before anybody saw the "
    "samples. For {count} bounds that hold together, δ must be divided by {count}: use --together."
)
TOGETHER = (
    "All {count} bounds hold together with probability at least {chance}, if the grid was fixed "
    "before anybody saw the samples."
)
ESTIMATED = (
    "The status `estimated` means that constants of the bound are estimates. Such a bound is not "
    "proved."
)
NOT_DRAWN = "The picture leaves out {} of {} settings, which have no bound or no measured gap."


def measured(folder: Path, given: UserObjects = NOTHING) -> list[Record]:
    """Return a row for each form of the bound of a finished run.

    The first row has the form of the run's config. All rows have the same measured gap.
    """
    case = from_directory(folder, given=given)
    chosen = certify(case)
    gap = measure_gap(FinishedRun.open(folder, given), case, chosen)
    shared = {
        name: math.nan if gap[name] is None else gap[name]
        for name in ("gap", "gap_low", "gap_high")
    }
    own = case.config.stability.c_hp
    rows = []
    for form in dict.fromkeys([own, *PROVED]):
        certificate = chosen if form == own else certify(case.under(c_hp=form))
        bound = certificate.bound
        rows.append({
            "form": str(form),
            **shared,
            "bound": bound.value if bound else math.inf,
            "range": case.run.constants.loss_bound,
            "delta": case.config.stability.delta,
            "failure": bound.failure if bound else math.nan,
            "status": bound.status if bound else "refused",
            "note": certificate.refusal or str(gap.get("gap_refusal", "")),
        })  # fmt: skip
    return rows


@dataclass(frozen=True)
class GapRun(SweptRun):
    """One run at a point of the grid, with its gap and its bounds."""

    def compute(self) -> Record:
        """Train the run, and return its bounds. A run that diverged has no bounds."""
        found = super().compute()
        assert self.folder is not None
        diverged = bool(found["note"])
        return found | {"bounds": [] if diverged else measured(self.folder, self.config.given)}


@dataclass(frozen=True)
class GapGrid(GridSearch):
    """The gap and the bound of every run of a grid."""

    noun: ClassVar[str] = "gap"

    @property
    def called(self) -> str:
        """Return the word for these runs in messages."""
        return "grid"

    @property
    def mismatch(self) -> str:
        """The end of the error message for a folder whose lock does not match."""
        return super().mismatch + " With --together, the number of bounds must not change."

    def tables(self, records: list[Record]) -> Mapping[str, Rows]:
        """Return the rows of gap.csv, which has a row for each run and each form of the bound."""
        return {"gap": self.rows_of_bounds(records)}

    def rows_of_bounds(self, records: Sequence[Record]) -> list[Record]:
        """Return the rows of gap.csv. Runs that diverged have no row."""
        rows: list[Record] = []
        for cell, record in zip(self.cells, records, strict=True):
            head: Record = {"setting": cell.variant or "config", **self.values_at(cell)}
            head |= {"seed": cell.config.federation.seed, "run": cell.name}
            ends = {"accuracy": record["ends"].get("accuracy", math.nan)}
            rows += [head | one | ends for one in record["bounds"]]
        return rows

    def summary(self, records: list[Record]) -> Record:
        """Return the content of gap.json: the table of settings, and what the bounds claim."""
        rows = self.rows_of_bounds(records)
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
        drawn = len(settings_of(drawable(columns))) if rows else 0
        settings = len({cell.variant for cell in self.cells})
        failure = sum(row["failure"] for row in rows if row["status"] != "refused")
        holding = sum(row["status"] != "refused" for row in rows)
        words = []
        if holding and failure < 1 and self.request.scale == "together":
            words.append(TOGETHER.format(count=holding, chance=f"{1 - failure:.4g}"))
        elif holding:
            words.append(ALONE.format(count=holding))
        words += [ESTIMATED] * any(row["status"] == "estimated" for row in rows)
        words += [NOT_DRAWN.format(settings - drawn, settings)] * (drawn < settings)
        words += dict.fromkeys(row["note"] for row in rows if row["note"])
        words += [
            f"{cell.name} diverged, so it has no bound."
            for cell, record in zip(self.cells, records, strict=True) if record["note"]
        ]  # fmt: skip
        return {
            "runs": len(records),
            "grid": {key: [*held] for key, held in self.grid.items()},
            "table": numbers(columns) if rows else [],
            "words": words,
        }


def gap_grid(search: GridSearch, together: bool) -> GapGrid:
    """Return the runs of a sweep, each with its gap and its bounds. All runs have been checked.

    Args:
        search: The sweep. Its metric is not used.
        together: Whether to divide δ by the number of bounds.
    """
    cells = []
    for one in search.cells:
        chosen = in_float64(one.config)
        table = chosen.stability
        forms = len({table.c_hp, *PROVED}) * len(search.cells) if together else 1
        table = table.model_copy(update={"delta": table.delta / forms})
        chosen = chosen.model_copy(update={"stability": table})
        known = {field.name: getattr(one, field.name) for field in fields(one)}
        cells.append(GapRun(**known | {"config": chosen}))
    request = replace(search.request, name="gap", scale="together" if together else "full")
    return GapGrid(request, "gap", search.title, cells, search.grid)


def run_gaps(
    work: GapGrid,
    out: Path,
    resume: bool,
    by: Compute = here,
    on_round_end: OnRoundEnd = lambda record: None,
    on_start: OnStart = lambda done, total: None,
) -> tuple[Record, bool]:
    """Compute the runs that are missing in `out`, and write the table and the picture.

    Returns:
        The content of gap.json, and whether there is something to draw.
    """
    summary = execute(work, out, resume, by, on_round_end, on_start)
    rows = drawable(rows_in(out))
    if drawn := bool(len(rows["gap"])):
        style.saved_as(picture(rows), out / PICTURE)
    return summary, drawn


# Table and picture


def settings_of(rows: Columns) -> list[Columns]:
    """Return the columns of each setting, in the order of the rows."""
    return [where(rows, setting=one) for one in distinct(rows, "setting")]


def first_form(setting: Columns) -> Columns:
    """Return the rows of a setting with the form of the bound that its config has."""
    return where(setting, form=setting["form"][0])


def drawable(rows: Columns) -> Columns:
    """Return the rows with a bound and a gap."""
    known = np.isfinite(rows["bound"]) & np.isfinite(rows["gap"])
    return {name: column[known] for name, column in rows.items()}


def numbers(rows: Columns) -> list[Record]:
    """Return a record for each setting: means over seeds, for the form of its config.

    A number that does not exist, such as the bound of a refused setting, is None.
    """
    lines = []
    for setting in settings_of(rows):
        mine = first_form(setting)
        gap, low, high = gap_bound.ends_of(mine)
        means = {name: mine[name].mean() for name in ("bound", "range", "accuracy")}
        measures = {"gap": gap, "gap_low": low, "gap_high": high} | means
        texts = {name: str(mine[name][0]) for name in ("setting", "form")}
        statuses = {"status": ", ".join(map(str, distinct(mine, "status")))}
        lines.append(
            texts | {name: finite(float(one)) for name, one in measures.items()} | statuses
        )
    return lines


def shown(table: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the result of `numbers` as the heads and rows of a table for people."""
    heads = ["setting", "gap (95%)", "bound", "bound / B", "bound / gap", "form", "accuracy",
             "status"]  # fmt: skip
    return heads, [
        [
            row["setting"],
            f"{_shown(row['gap'])} ({_shown(row['gap_low'])} to {_shown(row['gap_high'])})",
            _shown(row["bound"]),
            _of_range(_ratio(row["bound"], row["range"])),
            _of_gap(row),
            row["form"],
            _shown(row["accuracy"]),
            row["status"],
        ]
        for row in table
    ]


def _ratio(above: float | None, below: float | None) -> float | None:
    """Return the quotient if both numbers exist and the second is positive."""
    return None if above is None or below is None or below <= 0 else above / below


def _of_range(share: float | None) -> str:
    """Return bound / B as text. A bound of B or more is vacuous."""
    return _shown(share) + (" (vacuous)" if share is not None and share >= 1 else "")


def _of_gap(row: Record) -> str:
    """Return bound / gap as text, or a dash if the gap's interval contains 0."""
    low, high = row["gap_low"], row["gap_high"]
    if low is not None and high is not None and low <= 0 <= high:
        return "– (gap may be 0)"
    return _shown(_ratio(row["bound"], row["gap"]))


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value, 3)


def rows_in(out: Path) -> Columns:
    """Return the columns of gap.csv in the folder `out`."""
    return read_table(out / "gap.csv", words=WORDS)


def title_of(summary: Record) -> str:
    """Return the title of the table of gap.json."""
    settings, seeds = len(summary["table"]), len(summary["seeds"])
    return f"Bound and gap, {count(settings, 'setting')} with {count(seeds, 'seed')} each"


@style.styled
def picture(rows: Columns) -> Figure:
    """Draw the bound against the gap of each setting, both divided by the range B of the loss.

    A bound in the grey zone above 1 is vacuous.
    """
    settings = [_over_range(first_form(one)) for one in settings_of(rows)]
    figure, (axes,) = style.canvas(1, True, 3.8)
    forms = [str(one["form"][0]) for one in settings]
    each = [gap_bound.points([one], form) for one, form in zip(settings, forms, strict=True)]
    gaps = np.concatenate([gap for gap, _ in each], axis=1)
    bounds = np.concatenate([bound[0] for _, bound in each])
    least = gap_bound.least_of(gaps)
    for place, (setting, form) in enumerate(zip(settings, forms, strict=True)):
        colour = style.SERIES[place % len(style.SERIES)][0]
        marker = style.SERIES[(place + place // len(style.SERIES)) % len(style.SERIES)][1]
        gap_bound.scatter(axes, [setting], form, least, (colour, marker, ""), True)
        shown = str(setting["setting"][0]) + ("" if len({*forms}) == 1 else f" ({form})")
        shown += "" if each[place][0][0][0] > 0 else " (gap ≤ 0: at the end of its interval)"
        axes.plot([], [], marker, color=colour, ms=4, label=shown)
    top = max(float(bounds.max()), 1.0) * gap_bound.ROOM**2
    gap_bound.finish(axes, least, gaps[2].max() * gap_bound.ROOM, top)
    axes.axhspan(1.0, axes.get_ylim()[1], color=style.GREY, alpha=0.25, lw=0)
    axes.text(0.03, 0.97, "vacuous: the bound is at least B", fontsize=7.5, va="top",
              transform=axes.transAxes)  # fmt: skip
    seeds = "" if len(settings[0]["gap"]) == 1 else "\nmean over seeds"
    axes.set_xlabel(rf"measured gap $(F-\hat F)\,/\,B$, B: range of the loss{seeds}")
    axes.set_ylabel("bound / B")
    style.legend_below(figure, axes, 3)
    return figure


def _over_range(rows: Columns) -> Columns:
    """Return the rows of a setting with gap and bound divided by the range B of the loss."""
    top = rows["range"]
    names = ("gap", "gap_low", "gap_high", "bound", "range")
    return rows | {name: rows[name] / top for name in names}
