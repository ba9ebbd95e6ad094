"""Study `gap-bound`: compare the measured generalization gap with its bound in many settings.

A cell is one setting: the base config, or the base config with another value of one key. For every
seed, the cell trains a run, measures its gap on held-out samples, and computes its bound in each
form.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import spearman
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import (
    POSITIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    correlation,
    mean_of,
)
from fedmuon.config.load import Config
from fedmuon.config.schema import Natural
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.stability.endings import endings
from fedmuon.experiments.studies.study import Call, Study, distinct, in_words
from fedmuon.experiments.suites.contents import SuiteRequest, cell, require_free, require_read, slug
from fedmuon.runs.directory import Record

# Form -> changes of [stability]. The first form has the smallest range of the loss.
FORMS: dict[str, Mapping[str, Any]] = {
    "explicit": {"c_hp": "explicit"},
    "sharp": {"c_hp": "sharp"},
    "variance": {"c_hp": "variance"},
    "all models": {"c_hp": "explicit", "constants": "global"},
}
BASE = "base"
SETTLED = {
    "data.name": "--data",
    "federation.seed": "seeds",
    "stability.c-hp": "the study, which uses every value of this key",
    "stability.constants": "the study, which uses both values of this key",
}
Values = Annotated[list[Scalar], Field(min_length=2)]


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `vary` maps a config key to a list of values.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    vary: Annotated[dict[str, Values], Field(min_length=1)]
    base: dict[str, dict[str, Scalar]]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for the base config, and one for each other value of a key."""
    require_free("[base]", settings.base, SETTLED)
    base_values: dict[str, Scalar] = {}
    for name in settings.vary:
        table, _, key = name.partition(".")
        require_free("[vary]", {table: {key: ""}}, SETTLED)
        if key not in settings.base.get(table, {}):
            raise InputError(f"[vary] {name} has no base value: set {key} in [base.{table}]")
        base_values[name] = settings.base[table][key]
    variants = [(BASE, base_values)]
    for name, values in settings.vary.items():
        variants += [
            (name, base_values | {name: value}) for value in values if value != base_values[name]
        ]
    calls, configs = [], []
    for name, values in variants:
        changes: dict[str, dict[str, Scalar]] = {"data": {"name": request.data}}
        for key, value in values.items():
            table, _, option = key.partition(".")
            changes.setdefault(table, {})[option] = value
        seeded = [
            cell(settings.base, changes, {"federation": {"seed": seed}}) for seed in settings.seeds
        ]
        title = BASE if name == BASE else f"{name}-{values[name]}"
        size = sum(config.federation.rounds for config in seeded)
        calls.append(Call(slug(title), partial(measure, {"key": name} | values, seeded), size))
        configs += seeded
    require_read("[base]", settings.base, configs)
    return calls


# Measurements


def measure(head: Record, configs: Sequence[Config]) -> Record:
    """Return a row for each run and each form of the bound."""
    rows = []
    for config in configs:
        _, end = endings(config, [config.federation.rounds], FORMS)
        # the smallest proved range of the loss
        top = min(certificate.loss_bound for certificate in end.certificates.values())
        for form, certificate in end.certificates.items():
            bound = certificate.bound
            row = {
                "seed": config.federation.seed,
                "form": form,
                "gap": end.loss.gap.gap,
                "gap_low": end.loss.gap.low,
                "gap_high": end.loss.gap.high,
                "bound": bound.value if bound else np.inf,
                "status": bound.status if bound else "refused",
                "range": top,
                "accuracy": end.accuracy,
            }
            rows.append(head | row)
    return {"rows": rows}


# Claims

NAMES = {
    "federation.rounds": "rounds R",
    "federation.clients": "clients N",
    "local.steps": "local steps E",
    "orthogonalizer.lambda": "λ",
    "data.alpha": "Dirichlet α",
    "data.train": "samples n",
    "local.lr": "step size η",
}
JUDGED = "explicit"  # the form that the claims about keys use, fixed in advance
STANDS_ON = (
    "Every bound is the bound of the Stability note, Theorem 4.1, with explicit constants, for "
    "the same run. `explicit`, `sharp` and `variance` are three proved forms of its branch H, "
    "with constants over the ball that the iterates cannot leave. `all models` is the explicit "
    "form with constants over all models, as in the paper. Each single bound holds with "
    "probability 1 − δ. From X⁰ = 0, all losses are equal at the start, so the whole gap comes "
    "from training. The gap of a run has an interval for its finite held-out set. The gap of a "
    "setting is the mean over seeds with Student's interval. Seeds draw different training "
    "samples, schedules and partitions. Their held-out samples partly overlap, and the intervals "
    "over seeds do not account for this overlap."
)


def settings_of(rows: Columns) -> list[Columns]:
    """Split the table into the rows of each setting, in the order of the table."""
    keys = [name for name in rows if "." in name]
    return [
        where(rows, **dict(zip(("key", *keys), values, strict=True)))
        for values in distinct(rows, "key", *keys)
    ]


def series(rows: Columns, key: str) -> list[Columns]:
    """Return the settings that differ only in one config key.

    The settings are sorted by the value of this key.
    """
    varied = [setting for setting in settings_of(rows) if setting["key"][0] in (key, BASE)]
    return sorted(varied, key=lambda setting: float(setting[key][0]))


def _ranks(settings: Sequence[Columns], form: str) -> Slope:
    """Return Spearman's rank correlation between the gaps and the bounds of the settings.

    The correlation is computed for each seed, and the result is the mean over seeds with its
    interval, both on Fisher's scale.
    """
    rhos = [
        spearman(
            *(
                np.array([where(setting, form=form, seed=seed)[name][0] for setting in settings])
                for name in ("gap", "bound")
            )
        )
        for seed in distinct(settings[0], "seed")
    ]
    ranks = np.nan_to_num(rhos)  # with constant values, rho counts as 0
    return correlation(ranks, len(settings))


def _rise(settings: Sequence[Columns]) -> tuple[Slope, str]:
    """Compare the gaps of the settings with the largest and the smallest bound.

    The first result is the gap at the largest bound minus the gap at the smallest bound. Runs with
    the same seed are compared. The second result is a text with the two values of the key.
    """
    matched = [where(setting, form=JUDGED) for setting in settings]
    order = sorted(matched, key=lambda setting: float(setting["bound"].mean()))
    (small, large), key = (order[0], order[-1]), str(next(setting["key"][0] for setting in matched
                                                         if setting["key"][0] != BASE))  # fmt: skip
    return mean_of(large["gap"] - small["gap"]), f"{large[key][0]:g} against {small[key][0]:g}"


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims that gaps are within their bounds, and that both grow together."""
    gap, bound, high = rows["gap"], rows["bound"], rows["gap_high"]
    details = []
    for form in distinct(rows, "form"):
        form_rows = where(rows, form=form)
        below = (form_rows["bound"] < form_rows["range"]).sum()
        details.append(
            f"{form}: {below} of {len(form_rows['gap'])} bounds are below the range of the loss"
        )
    within = Claim(
        "Every gap is at most its bound.",
        Effect.of_gaps(gap, rows["gap_low"], high, bound),
        Rule(high=0.0),
        f"{(gap <= bound).sum()} of {len(gap)} bounds, and {(high <= bound).sum()} for the upper "
        "end of the gap's interval; " + "; ".join(details),
    )
    settings = settings_of(rows)
    forms = {form: _ranks(settings, form) for form in distinct(rows, "form")}
    ends = {
        str(NAMES.get(key, key)): _rise(series(rows, key))
        for key in distinct(rows, "key")
        if key != BASE
    }
    return [
        within,
        Claim(
            "Over all settings, every form of the bound has a positive rank correlation "
            "(Spearman's ρ) with the measured gaps.",
            Effect.between("Spearman's ρ of gap and bound", forms),
            POSITIVE,
            in_words(forms),
        ),
        Claim(
            f"For every key that varies, the setting with the largest bound ({JUDGED}) has a "
            "larger gap than the setting with the smallest bound.",
            Effect.between(
                "difference of gaps", {key: rise for key, (rise, _) in ends.items()}, unit="loss"
            ),
            POSITIVE,
            "; ".join(
                f"{key} = {at}: {number(rise.value, 3)} "
                f"({number(rise.low, 3)} to {number(rise.high, 3)})"
                for key, (rise, at) in ends.items()
            ),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table, one for each setting.

    A row contains the mean gap, the mean bounds, and the smallest ratio of bound to gap.
    """
    forms = distinct(rows, "form")
    lines: Rows = [("setting", "gap (95%)", *forms, "range B", "smallest bound / gap", "accuracy")]
    for setting in settings_of(rows):
        key = str(setting["key"][0])
        gap = mean_of(where(setting, form=forms[0])["gap"])
        bounds = [float(where(setting, form=form)["bound"].mean()) for form in forms]
        reach = f"{number(gap.value, 3)} ({number(gap.low, 3)} to {number(gap.high, 3)})"
        times = number(min(bounds) / gap.value, 3) if gap.value > 0 else "–"
        name = BASE if key == BASE else f"{NAMES.get(key, key)} = {setting[key][0]:g}"
        ends = number(setting["range"].mean(), 3), times, f"{setting['accuracy'].mean():.3f}"
        lines.append((name, reach, *(number(value, 3) for value in bounds), *ends))
    return lines


# Figures

ROOM = 1.6  # factor between the plotted values and the ends of the axes
SIZES = dict(zip(FORMS, (6.5, 4.5, 3.0, 4.0), strict=True))  # coinciding marks stay visible


@style.styled
def against_bound(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the bound against the mean gap.

    There is a panel for each form of the bound, and a line for each key.
    """
    figure, (left, right) = style.canvas(2, narrow, 3.5)
    settings, forms = settings_of(rows), distinct(rows, "form")
    gaps, _ = points(settings, forms[0])
    lower = least_of(gaps)
    for form, (colour, marker) in zip(forms, style.SERIES, strict=False):
        reach = form in (forms[0], forms[-1])  # the other forms have the same gap intervals
        scatter(left, settings, form, lower, (colour, marker, ""), reach)
        left.plot([], [], marker, color=colour, ms=SIZES.get(form, 4.0), label=form)
    keys = [key for key in distinct(rows, "key") if key != BASE]
    for key, (colour, marker) in zip(keys, style.SERIES, strict=False):
        scatter(right, series(rows, key), JUDGED, lower, (colour, marker, "-"), True)
        right.plot([], [], f"{marker}-", color=colour, ms=4, lw=1.1, label=NAMES.get(key, key))
    drawn = np.concatenate([points(settings, form)[1][0] for form in forms])
    top = drawn[np.isfinite(drawn)].max(initial=lower) * ROOM
    for axes in (left, right):
        finish(axes, lower, gaps[2].max(initial=lower) * ROOM, top)
        axes.set_xlabel(r"measured gap $F-\hat F$, mean over seeds")
    for axes in (left, right) if narrow else (left,):
        axes.set_ylabel(style.NAMES["bound"])
    left.set_title("all settings, by form of the bound", loc="left")
    right.set_title(f"one key at a time, {JUDGED}", loc="left")
    left.plot([], [], "o", color=style.GREY, mfc="none", ms=4, label="bound above B: says nothing")
    for axes in (left, right):
        style.legend(axes, 2)
    return figure


def finish(axes: Axes, least: float, widest: float, top: float) -> None:
    """Draw the line where bound and gap are equal, and set log axes from `least`.

    The x axis ends at `widest`. The y axis ends at `top`, or at `widest` if this number is larger.
    """
    ends = np.array([least, widest])
    axes.plot(ends, ends, color=style.BLACK, lw=1)
    axes.fill_between(ends, least, ends, color=style.GREY, alpha=0.15, lw=0)
    axes.set_xlim(*ends)
    axes.set_ylim(least, max(top, widest))
    style.log_x(axes)
    style.log_y(axes)
    axes.text(0.97, 0.03, "gap above bound:\nthe bound would be wrong", fontsize=7.5,
              ha="right", transform=axes.transAxes)  # fmt: skip


def least_of(gaps: np.ndarray) -> float:
    """Return where the axes begin, from the first result of `points`."""
    return gaps[0][gaps[0] > 0].min(initial=gaps[2].max()) / ROOM**2


def points(settings: Sequence[Columns], form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of the figure as two arrays.

    The first array contains the gaps with the ends of their intervals, in the shape [3, settings].
    The second array contains the bounds and the ranges of the loss, in the shape [2, settings].
    """
    gaps = [ends_of(where(setting, form=form)) for setting in settings]
    bounds = [[where(setting, form=form)[name].mean() for name in ("bound", "range")]
              for setting in settings]  # fmt: skip
    return np.array(gaps).T, np.array(bounds).T


def ends_of(rows: Columns) -> tuple[float, float, float]:
    """Return the mean gap of a setting over seeds, and the ends of Student's 95% interval.

    For one seed, the interval is that of the finite held-out set. It is empty if the rows lack it.
    """
    mean_gap = mean_of(rows["gap"])
    if len(rows["gap"]) > 1:
        return mean_gap.value, mean_gap.low, mean_gap.high
    low, high = (float(rows[name][0]) for name in ("gap_low", "gap_high"))
    return mean_gap.value, *np.nan_to_num((low, high), nan=mean_gap.value).tolist()


def scatter(
    axes: Axes, settings: Sequence[Columns], form: str, least: float, look: tuple[str, str, str],
    reach: bool,
) -> None:  # fmt: skip
    """Draw a mark for each setting. The mark is hollow if the bound exceeds the range of the loss.

    If `reach` is True, the intervals are drawn, too. A log axis cannot show a gap that is not
    positive, so the mark of such a gap is drawn at the upper end of its interval.
    """
    (value, low, high), (bound, top) = points(settings, form)
    at = np.where(value > least, value, np.maximum(high, least))
    colour, marker, line = look
    if reach:
        axes.hlines(bound, np.maximum(low, least), np.maximum(high, least), color=colour,
                    lw=0.7)  # fmt: skip
    if line:
        axes.plot(at, bound, line, color=colour, lw=1.1)
    size = 4.0 if line else SIZES.get(form, 4.0)
    for hollow in (True, False):
        mask = (bound >= top) == hollow
        axes.plot(at[mask], bound[mask], marker, color=colour, ms=size, mew=0.9,
                  mfc="none" if hollow else colour)  # fmt: skip


STUDY = Study(
    "gap-bound", Settings, cells, claims, numbers, STANDS_ON, {"gap-bound": against_bound}
)
