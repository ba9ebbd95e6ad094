"""`fedmuon gap` and `fedmuon.gap`: gaps and their bounds at every point of a grid.

Each point of the grid is trained with one or several seeds. Each run is a cell of a sweep, and has
its own folder. From this folder, the cell computes the gap of the run and its bound in each form.
"""

import math
import textwrap
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
from fedmuon.experiments.stability import prediction
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
WORDS = (
    "setting",
    "run",
    "form",
    "status",
    "note",
    "prediction_note",
)  # columns of gap.csv that are texts
# Column of gap.csv -> entry of `prediction`. Results of old versions lack these columns.
PREDICTED = {
    "predicted": "predicted_gap", "predicted_error": "predicted_gap_error",
    "predicted_outside": "predicted_gap_outside",
    "predicted_both_ends": "predicted_gap_both_ends",
    "predicted_both_ends_error": "predicted_gap_both_ends_error",
    "replaced": "replaced_gap", "replaced_error": "replaced_gap_error",
}  # fmt: skip
ALONE = (
    "Each bound holds with probability 1 − δ for a setting that was fixed before anybody saw the "
    "samples. To let all {count} bounds of gap.csv (settings × seeds × forms) hold together, use "
    "--together, which divides δ by {count}."
)
TOGETHER = (
    "All {count} bounds hold together with probability at least {chance}, if the grid was fixed "
    "before anybody saw the samples."
)
ESTIMATED = (
    "The status `estimated` means that constants of the bound are estimates. Such a bound is not "
    "proved."
)
PREDICTIONS = (
    "The predicted gap follows from derivatives through the run. It is an estimate and no bound. "
    "SE is its standard error over random probes. `both ends` is the mean of this prediction and "
    "of a second one at held-out samples. This mean is accurate to second order."
)
ACROSS = 5.2  # inches
# Sentences on the 95% interval of a gap, and its names in the picture. A setting has one run, or
# several runs with different seeds.
OVER_SEEDS = (
    "The 95% interval of a gap is Student's interval of its mean over seeds. In gap.csv, it is "
    "that of one run, from its held-out samples."
)
OF_ONE_RUN = "The 95% interval of a gap is that of one run, from its held-out samples."
OF_BOTH = (
    "The 95% interval of a gap is Student's interval of its mean over seeds. For settings with "
    "only one run ({}), it is that of this run, from its held-out samples."
)
INTERVAL_NAMES = {
    OVER_SEEDS: "95% interval over seeds",
    OF_ONE_RUN: "95% interval from held-out samples",
    OF_BOTH: "95% interval over seeds, or of one run",
}
CUT = "an interval cut at the left edge reaches 0 or below"
NOT_DRAWN = "The picture leaves out {} of {} settings, which have no bound or no measured gap."


def bounds_of(folder: Path, user_objects: UserObjects = NOTHING) -> list[Record]:
    """Return a row for each form of the bound of a finished run.

    The first row has the form of the run's config. All rows have the same measured gap.
    """
    case = from_directory(folder, given=user_objects)
    config_certificate = certify(case)
    finished = FinishedRun.open(folder, user_objects)
    gap = measure_gap(finished, case, config_certificate)
    predicted = prediction.prediction(finished)
    numbers = {**gap, **{column: predicted.get(name) for column, name in PREDICTED.items()}}
    shared = {
        name: math.nan if numbers[name] is None else numbers[name]
        for name in ("gap", "gap_low", "gap_high", *PREDICTED)
    }
    reasons = (str(predicted.get(f"{name}_refusal", "")) for name in PREDICTED.values())
    config_form = case.config.stability.c_hp
    rows = []
    for form in dict.fromkeys([config_form, *PROVED]):
        certificate = config_certificate if form == config_form else certify(case.under(c_hp=form))
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
            "prediction_note": " ".join(filter(None, reasons)),
        })  # fmt: skip
    return rows


@dataclass(frozen=True)
class GapRun(SweptRun):
    """One run at a point of the grid, with its gap and its bounds."""

    def compute(self) -> Record:
        """Train the run, and return its bounds. A run that diverged has no bounds."""
        record = super().compute()
        assert self.folder is not None
        diverged = bool(record["note"])
        return record | {"bounds": [] if diverged else bounds_of(self.folder, self.config.given)}


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
            rows += [head | bound | ends for bound in record["bounds"]]
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
        words += [on_intervals(columns)] if rows else []
        predictions = [row for row in rows if math.isfinite(row["predicted"])]
        words += [PREDICTIONS] * bool(predictions)
        words += dict.fromkeys(row["prediction_note"] for row in rows if row["prediction_note"])
        words += [ESTIMATED] * any(row["status"] == "estimated" for row in rows)
        words += [NOT_DRAWN.format(settings - drawn, settings)] * (drawn < settings)
        words += dict.fromkeys(row["note"] for row in rows if row["note"])
        words += [
            f"{cell.name} diverged, so it has no bound."
            for cell, record in zip(self.cells, records, strict=True) if record["note"]
        ]  # fmt: skip
        return {
            "runs": len(records),
            "grid": {key: [*values] for key, values in self.grid.items()},
            "table": numbers(columns) if rows else [],
            "words": words,
        }


def require_predictions(search: GridSearch) -> None:
    """Raise InputError if the config of a run excludes a predicted gap."""
    for cell in search.cells:
        prediction.require_prediction(cell.config)


def gap_grid(search: GridSearch, together: bool) -> GapGrid:
    """Return the runs of a sweep, each with its gap and its bounds. All runs have been checked.

    Args:
        search: The sweep. Its metric is not used.
        together: Whether to divide δ by the number of bounds.
    """
    cells = []
    for cell in search.cells:
        config = in_float64(cell.config)
        table = config.stability
        forms = len({table.c_hp, *PROVED}) * len(search.cells) if together else 1
        table = table.model_copy(update={"delta": table.delta / forms})
        config = config.model_copy(update={"stability": table})
        attributes = {field.name: getattr(cell, field.name) for field in fields(cell)}
        cells.append(GapRun(**attributes | {"config": config}))
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
    return [where(rows, setting=name) for name in distinct(rows, "setting")]


def first_form(setting: Columns) -> Columns:
    """Return the rows of a setting with the form of the bound that its config has."""
    return where(setting, form=setting["form"][0])


def kinds_of(settings: Sequence[Columns]) -> str:
    """Return the sentence on the intervals of these settings, each with the rows of one form."""
    several = {len(setting["gap"]) > 1 for setting in settings}
    return OF_BOTH if len(several) == 2 else OVER_SEEDS if several == {True} else OF_ONE_RUN


def drawable(rows: Columns) -> Columns:
    """Return the rows with a bound and a gap."""
    mask = np.isfinite(rows["bound"]) & np.isfinite(rows["gap"])
    return {name: column[mask] for name, column in rows.items()}


def numbers(rows: Columns) -> list[Record]:
    """Return a record for each setting: means over seeds, for the form of its config.

    A number that does not exist, such as the bound of a refused setting, is None.
    """
    lines = []
    for setting in settings_of(rows):
        form_rows = first_form(setting)
        gap, low, high = gap_bound.ends_of(form_rows)
        means = {name: form_rows[name].mean() for name in ("bound", "range", "accuracy")}
        measures = {"gap": gap, "gap_low": low, "gap_high": high} | means
        measures |= mean_predictions(form_rows)
        texts = {name: str(form_rows[name][0]) for name in ("setting", "form")}
        statuses = {"status": ", ".join(map(str, distinct(form_rows, "status")))}
        lines.append(
            texts | {name: finite(float(value)) for name, value in measures.items()} | statuses
        )
    return lines


def mean_predictions(rows: Columns) -> dict[str, float]:
    """Return the means of the predicted gaps over the runs of a setting, with standard errors.

    The standard errors are those over probes and over replaced samples, and not those over seeds.
    """
    means = {name: float(rows[name].mean()) for name in PREDICTED if name in rows}
    for name in ("predicted_error", "predicted_both_ends_error", "replaced_error"):
        if name in rows:
            means[name] = float(np.sqrt((rows[name] ** 2).sum())) / len(rows[name])
    return means


def on_intervals(rows: Columns) -> str:
    """Return a sentence on the intervals in the result of `numbers`."""
    settings = [first_form(setting) for setting in settings_of(rows)]
    alone = [str(setting["setting"][0]) for setting in settings if len(setting["gap"]) == 1]
    return kinds_of(settings).format("; ".join(alone))


def shown(table: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the result of `numbers` as the heads and rows of a table for people."""
    estimates = {
        "predicted": "predicted (SE)",
        "predicted_both_ends": "both ends (SE)",
        "replaced": "replaced (SE)",
    }
    estimates = {
        name: head for name, head in estimates.items()
        if any(row.get(name) is not None for row in table)
    }  # fmt: skip
    heads = ["setting", "gap (95% interval)", *estimates.values(), "bound", "bound / B",
             "bound / gap", "form", "accuracy", "status"]  # fmt: skip
    return heads, [
        [
            row["setting"],
            f"{_shown(row['gap'])} ({_shown(row['gap_low'])} to {_shown(row['gap_high'])})",
            *(_with_error(row, name) for name in estimates),
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


def _with_error(row: Record, name: str) -> str:
    """Return a prediction with its standard error as text."""
    value, error = row.get(name), row.get(f"{name}_error")
    return _shown(value) + ("" if error is None else f" ({number(error, 2)})")


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value, 3)


def rows_in(out: Path) -> Columns:
    """Return the columns of gap.csv in the folder `out`."""
    names = read_table(out / "gap.csv")
    return read_table(out / "gap.csv", words=[name for name in WORDS if name in names])


def refusals_in(out: Path) -> list[str]:
    """Return each reason why a run in gap.csv has no bound."""
    refused = where(rows_in(out), status="refused")
    return [str(reason) for reason in distinct(refused, "note") if reason]


def title_of(summary: Record) -> str:
    """Return the title of the table of gap.json."""
    settings, seeds = len(summary["table"]), len(summary["seeds"])
    return f"Bound and gap, {count(settings, 'setting')} with {count(seeds, 'seed')} each"


@style.styled
def picture(rows: Columns) -> Figure:
    """Draw gap and bound of each setting in a row, both divided by the range B of the loss.

    A bound in the grey zone above 1 is vacuous. A log axis has no place for a gap that is not
    positive, so its mark is a triangle at the left edge.
    """
    settings = [_over_range(first_form(setting)) for setting in settings_of(rows)]
    names = [
        textwrap.fill(str(setting["setting"][0]).replace(",", ", "), 26) for setting in settings
    ]
    inches = 0.22 * sum(name.count("\n") + 1 for name in names)
    figure, (axes,) = style.canvas(1, True, 1.7 + inches, width=ACROSS)
    gaps, lows, highs = np.array([gap_bound.ends_of(setting) for setting in settings]).T
    nothing = np.full(1, np.nan)
    predictions = np.array([setting.get("predicted", nothing).mean() for setting in settings])
    bounds = np.array([setting["bound"].mean() for setting in settings])
    places = np.arange(len(settings))
    positive = np.concatenate(
        [values[values > 0] for values in (gaps, lows, highs, predictions, bounds)]
    )
    left = positive.min() / gap_bound.ROOM**2
    right = max(1.0, positive.max()) * gap_bound.ROOM**2

    up = gaps > 0
    seeds = "" if all(len(setting["gap"]) == 1 for setting in settings) else ", mean over seeds"
    cut = f"\n({CUT})" if ((lows <= 0) & (highs > 0)).any() else ""
    axes.hlines(places, np.maximum(lows, left), np.maximum(highs, left), color=style.BLUE, lw=1.2,
                label=INTERVAL_NAMES[kinds_of(settings)] + cut)  # fmt: skip
    axes.plot(gaps[up], places[up], "o", color=style.BLUE, ms=5, label=f"measured gap{seeds}")
    if not up.all():
        axes.plot(np.full((~up).sum(), left), places[~up], "<", color=style.BLUE, ms=6,
                  clip_on=False, label="gap of at most 0, left of the axis")  # fmt: skip
    if (shown_ones := predictions > 0).any():
        axes.plot(predictions[shown_ones], places[shown_ones], "D", color=style.ORANGE, ms=5,
                  mfc="none", mew=1.4, label=f"predicted gap{seeds}")  # fmt: skip
    forms = {str(setting["form"][0]) for setting in settings}
    form = f" (form {forms.pop()})" if len(forms) == 1 else ""
    axes.plot(bounds, places, "|", color=style.BLACK, ms=12, mew=2, label=f"bound{form}")
    axes.axvspan(1.0, right, color=style.GREY, alpha=0.25, lw=0, label="vacuous: at least B")
    axes.set_xlim(left, right)
    axes.set_ylim(len(settings) - 0.4, -0.6)  # the first setting is at the top
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    style.log_x(axes)
    scale = style.scale_of(axes.xaxis)
    axes.set_xlabel("gap $F-\\hat F$ and bound,\ndivided by the range $B$ of the loss" + scale)
    style.legend_below(figure, axes, 2)
    return figure


def _over_range(rows: Columns) -> Columns:
    """Return the rows of a setting with gap and bound divided by the range B of the loss."""
    top = rows["range"]
    names = ("gap", "gap_low", "gap_high", "bound", "range", "predicted")
    return {**rows, **{name: rows[name] / top for name in names if name in rows}}
