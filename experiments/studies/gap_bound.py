"""Study `gap-bound`: the measured generalization gap, the predicted gap and the bound.

A cell is one setting of a method: its base config, or the base config with another value of one
key. For every seed, the cell trains a run, measures its gap on held-out samples, predicts the gap
with derivatives through the run, and computes its bound in each form.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
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
from fedmuon.experiments.stability.endings import Trained, endings_of, train
from fedmuon.experiments.stability.finished_run import FinishedRun, measured_losses
from fedmuon.experiments.stability.predicted_gap import PROBES, predict
from fedmuon.experiments.studies.study import Call, Study, distinct, heading, in_words
from fedmuon.experiments.suites.contents import (
    Nested,
    SuiteRequest,
    cell,
    merged,
    require_free,
    require_read,
    slug,
)
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


class Method(Table):
    """A method: config tables that extend those in `base`, and further keys to vary."""

    base: Nested = Field(default_factory=dict)
    vary: dict[str, Values] = Field(default_factory=dict)


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `vary` maps a config key to a list of values. Without `methods`, the config in `base` is the
    only method.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    vary: Annotated[dict[str, Values], Field(min_length=1)]
    base: dict[str, dict[str, Scalar]]
    methods: dict[str, Method] = Field(default_factory=dict)


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for the base config of each method, and one for each other value of a key."""
    require_free("[base]", settings.base, SETTLED)
    calls: list[Call] = []
    configs: list[Config] = []
    alone = str(settings.base.get("local", {}).get("recipe", Config().local.recipe))
    methods = settings.methods or {alone: Method()}
    every_key = dict.fromkeys(key for method in methods.values() for key in method.vary)
    for title, method in methods.items():
        require_free(f"[methods.{title!r}.base]", method.base, SETTLED)
        base, vary = merged(settings.base, method.base), settings.vary | method.vary
        base_values = _values(base, vary)
        # A key that only other methods vary has the value 0 if this method does not have it.
        unvaried = {key: _value(base, key) or 0 for key in every_key if key not in vary}
        variants = [(BASE, base_values)]
        for name, values in vary.items():
            variants += [
                (name, base_values | {name: value}) for value in values
                if value != base_values[name]
            ]  # fmt: skip
        for name, values in variants:
            changes: dict[str, dict[str, Scalar]] = {"data": {"name": request.data}}
            for key, value in values.items():
                table, _, option = key.partition(".")
                changes.setdefault(table, {})[option] = value
            seeded = [
                cell(base, changes, {"federation": {"seed": seed}}) for seed in settings.seeds
            ]
            words = [title] if settings.methods else []
            words += [name] if name == BASE else [name, str(values[name])]
            size = sum(config.federation.rounds for config in seeded)
            head = {"method": title, "key": name} | values | unvaried
            head = {key: head[key] for key in ("method", "key", *settings.vary, *every_key)}
            calls.append(Call(slug("-".join(words)), partial(measure, head, seeded), size))
            configs += seeded
    require_read("[base]", settings.base, configs)
    return calls


def _values(base: Nested, vary: Mapping[str, Values]) -> dict[str, Scalar]:
    """Return the base value of every key that varies."""
    values: dict[str, Scalar] = {}
    for name in vary:
        table, _, key = name.partition(".")
        require_free("[vary]", {table: {key: ""}}, SETTLED)
        if (value := _value(base, name)) is None:
            raise InputError(f"[vary] {name} has no base value: set {key} in [base.{table}]")
        values[name] = value
    return values


def _value(base: Nested, name: str) -> Scalar | None:
    table, _, key = name.partition(".")
    return base.get(table, {}).get(key)


# Measurements


def measure(head: Record, configs: Sequence[Config]) -> Record:
    """Return a row for each run and each form of the bound."""
    runs, rows = [train(config, [config.federation.rounds]) for config in configs], []
    for config, run, control in zip(configs, runs, controls(runs), strict=True):
        _, end = endings_of(run, FORMS)
        finished = FinishedRun(run.config, run.source, run.data, run.experiment, Path())
        model = {"weight": run.models["weight"][1:]}
        predicted = predict(finished, PROBES, ends=True, model=model)
        outside = math.nan if predicted.outside is None else float(predicted.outside.mean())
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
                "gap_controlled": (end.loss.gap.gap - control.gap) / (1 - control.overlap),
                "predicted": predicted.value,
                "predicted_error": predicted.standard_error,
                "predicted_outside": outside,
                "bound": bound.value if bound else np.inf,
                "status": bound.status if bound else "refused",
                "range": top,
                "accuracy": end.accuracy,
            }
            rows.append(head | row)
    return {"rows": rows}


class Control(NamedTuple):
    """A control variate of a measured gap, and how much of the gap it contains.

    Attributes:
        gap: The gap of the mean model of all other seeds, on the samples of this run.
        overlap: The mean fraction of this run's training samples that another seed trains on,
            minus the same for the held-out samples.
    """

    gap: float
    overlap: float


def controls(runs: Sequence[Trained]) -> list[Control]:
    """Return the control variate of each run.

    The mean model of other seeds does not depend on the samples of this run, so its gap has the
    mean 0, and nearly the same sampling error. Other seeds train on some samples of this run. To
    first order, the gap contains this fraction of the measured gap. A single run has the control
    variate 0, and so have runs on synthetic data, whose distribution depends on the seed.
    """
    labels = runs[0].source.labels
    alike = all(np.array_equal(run.source.labels, labels) for run in runs)
    if len(runs) == 1 or not alike:
        return [Control(0.0, 0.0)] * len(runs)
    total = torch.stack([run.models["weight"][1] for run in runs]).sum(0)
    variates = []
    for run in runs:
        others = [other.data.train_index for other in runs if other is not run]
        mean_model = {"weight": ((total - run.models["weight"][1]) / len(others))[None]}
        facts = run.config, run.data, run.source.classes, run.experiment
        (loss,) = measured_losses(*facts, mean_model, [1.0])
        shares = [
            np.isin(run.data.train_index, index).mean() - np.isin(run.data.test_index, index).mean()
            for index in others
        ]
        variates.append(Control(loss.gap.gap, float(np.mean(shares))))
    return variates


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
WITHIN = 0.15  # largest relative error of a prediction, fixed in advance
RANKED = 0.9  # smallest rank correlation of predictions, fixed in advance
STANDS_ON = (
    "Every bound is the bound of the Stability note, Theorem 4.1, with explicit constants, for "
    "the same run. `explicit`, `sharp` and `variance` are three proved forms of its branch H, "
    "with constants over the ball that the iterates cannot leave. `all models` is the explicit "
    "form with constants over all models, as in the paper. Each single bound holds with "
    "probability 1 − δ. From X⁰ = 0, all losses are equal at the start, so the whole gap comes "
    "from training. The gap of a run has an interval for its finite held-out set. The predicted "
    "gap follows from derivatives through the run at its training samples. It is an estimate to "
    "first order and no bound. At held-out samples, the same derivatives give the prediction "
    "`outside`. To second order, the gap is the mean of both. The claims about predictions, the "
    "table and the figure subtract from each measured gap a control variate with mean 0: the gap "
    "of the mean model of the other seeds, on the same samples. This makes the intervals shorter. "
    "The few samples that several seeds share are corrected for to first order. The gap of a "
    "setting is the mean over seeds with Student's interval. Seeds draw different training "
    "samples, schedules and partitions. Their held-out samples partly overlap, and the intervals "
    "over seeds do not account for this overlap."
)


def settings_of(rows: Columns) -> list[Columns]:
    """Split the table into the rows of each setting, in the order of the table."""
    keys = [name for name in rows if "." in name]
    return [
        where(rows, **dict(zip(("method", "key", *keys), values, strict=True)))
        for values in distinct(rows, "method", "key", *keys)
    ]


def methods_of(rows: Columns) -> dict[str, Columns]:
    """Return the rows of each method."""
    return {name: where(rows, method=name) for name in distinct(rows, "method")}


def of_one_form(settings: Sequence[Columns]) -> list[Columns]:
    """Return one row per seed of each setting. Measured and predicted gaps are in every form."""
    return [where(setting, form=setting["form"][0]) for setting in settings]


def series(rows: Columns, key: str) -> list[Columns]:
    """Return the settings that differ only in one config key.

    The settings are sorted by the value of this key.
    """
    varied = [setting for setting in settings_of(rows) if setting["key"][0] in (key, BASE)]
    return sorted(varied, key=lambda setting: float(setting[key][0]))


def _ranks(settings: Sequence[Columns], form: str, gap: str, other: str) -> Slope:
    """Return Spearman's rank correlation of two columns, such as gap and bound, over settings.

    The correlation is computed for each seed, and the result is the mean over seeds with its
    interval, both on Fisher's scale.
    """
    rhos = [
        spearman(
            *(
                np.array([where(setting, form=form, seed=seed)[name][0] for setting in settings])
                for name in (gap, other)
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


def ratio(above: np.ndarray, below: np.ndarray) -> Slope:
    """Return mean(above) / mean(below) of pairs with its 95% interval, to first order.

    Both arrays have one entry per seed. The interval is Student's interval of the mean of
    above - ratio * below, divided by mean(below). If mean(below) is not positive, the ratio is
    unknown.
    """
    mean = float(below.mean())
    if mean <= 0:
        return Slope(math.nan, math.nan, math.nan, len(below) - 1.0)
    value = float(above.mean()) / mean
    error = mean_of(above - value * below)
    half = (error.high - error.low) / 2 / mean
    return Slope(value, value - half, value + half, len(below) - 1.0)


def overall(settings: Sequence[Columns], name: str = "predicted") -> Slope:
    """Return predicted / measured over all settings, each with the same weight.

    For each seed, the gaps of a setting are divided by the mean prediction of the setting, and
    averaged over settings. The result is the ratio of both means over seeds.
    """
    pairs = [
        (setting[name] / setting[name].mean(), setting["gap_controlled"] / setting[name].mean())
        for setting in of_one_form(settings)
    ]
    above, below = (np.mean(part, axis=0) for part in zip(*pairs, strict=True))
    return ratio(above, below)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about bounds, and then those about predictions."""
    gap, bound, high = rows["gap"], rows["bound"], rows["gap_high"]
    methods = methods_of(rows)
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
    forms = {
        _titled(methods, method, form): _ranks(settings_of(part), form, "gap", "bound")
        for method, part in methods.items()
        for form in distinct(part, "form")
    }
    ends = {
        _titled(methods, method, str(NAMES.get(key, key))): _rise(series(part, key))
        for method, part in methods.items()
        for key in distinct(part, "key")
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
        *_predictions(methods),
    ]


def _titled(methods: Mapping[str, Columns], method: str, name: str) -> str:
    """Return the name of a place, with the method if there are several."""
    return f"{method}, {name}" if len(methods) > 1 else name


def _predictions(methods: Mapping[str, Columns]) -> Sequence[Claim]:
    """Return the claims about predicted gaps, which no paper makes."""
    settings = {method: settings_of(part) for method, part in methods.items()}
    ratios = {method: overall(part) for method, part in settings.items()}
    ranks = {
        method: _ranks(part, str(part[0]["form"][0]), "gap_controlled", "predicted")
        for method, part in settings.items()
    }
    outside = {method: overall(part, "predicted_outside") for method, part in settings.items()}
    return [
        Claim(
            f"The predicted gap is within {WITHIN:.0%} of the measured gap, as a mean over all "
            "settings.",
            Effect.between("predicted gap / measured gap", ratios, unit="ratio"),
            Rule(1 - WITHIN, 1 + WITHIN),
            in_words(ratios) + "; predicted at held-out samples: " + in_words(outside),
        ),
        Claim(
            "Over all settings, the predicted gaps have a rank correlation (Spearman's ρ) of at "
            f"least {RANKED} with the measured gaps.",
            Effect.between("Spearman's ρ of predicted and measured gap", ranks),
            Rule(low=RANKED),
            in_words(ranks),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table, one for each setting.

    A row contains the mean gap, the mean prediction and their ratio, the mean bounds, and the
    smallest ratio of bound to gap.
    """
    forms, methods = distinct(rows, "form"), methods_of(rows)
    head = ("setting", "gap (95%)", "predicted", "predicted / gap (95%)", "outside / gap", *forms,
            "range B", "smallest bound / gap", "accuracy")  # fmt: skip
    lines: Rows = [head]
    for method, part in methods.items():
        lines += [heading(method, head)] * (len(methods) > 1)
        lines += [_line(setting, forms) for setting in settings_of(part)]
    return lines


def _line(setting: Columns, forms: Sequence[str]) -> tuple[str, ...]:
    key = str(setting["key"][0])
    (one_form,) = of_one_form([setting])
    gap = mean_of(one_form["gap_controlled"])
    quotient = ratio(one_form["predicted"], one_form["gap_controlled"])
    outside = ratio(one_form["predicted_outside"], one_form["gap_controlled"])
    bounds = [float(where(setting, form=form)["bound"].mean()) for form in forms]
    times = number(min(bounds) / gap.value, 3) if gap.value > 0 else "–"
    name = BASE if key == BASE else f"{NAMES.get(key, key)} = {setting[key][0]:g}"
    return (
        name, _with_interval(gap), number(float(one_form["predicted"].mean()), 3),
        _with_interval(quotient), number(outside.value, 3),
        *(number(value, 3) for value in bounds), number(setting["range"].mean(), 3), times,
        f"{setting['accuracy'].mean():.3f}",
    )  # fmt: skip


def _with_interval(estimate: Slope) -> str:
    low, high = number(estimate.low, 3), number(estimate.high, 3)
    return f"{number(estimate.value, 3)} ({low} to {high})"


# Figures

VACUOUS = "x"  # mark of a bound that says nothing
ROOM = 1.6  # factor between the plotted values and the ends of the axes
SIZES = dict(zip(FORMS, (6.5, 4.5, 3.0, 4.0), strict=True))  # coinciding marks stay visible


@style.styled
def three_curves(rows: Columns, narrow: bool = False) -> Figure:
    """Draw measured gap, predicted gap and bound of each setting in a row.

    There is a panel for each method. Settings that differ in one key are connected by lines, and
    the base is one of them for every key.
    """
    methods = methods_of(rows)
    groups = {
        method: [series(part, key) for key in distinct(part, "key") if key != BASE]
        for method, part in methods.items()
    }
    tall = max(sum(len(group) + 0.5 for group in panel) for panel in groups.values())
    figure, panels = style.canvas(len(methods), narrow, 1.5 + 0.125 * tall)
    values = [_three(setting) for panel in groups.values() for group in panel for setting in group]
    positive = np.concatenate([numbers[np.isfinite(numbers) & (numbers > 0)] for numbers in values])
    vacuous = any(bound >= top for *_, bound, top in values)
    least, widest = positive.min(initial=1.0) / ROOM, positive.max(initial=1e-9) * ROOM
    for axes, (method, panel) in zip(panels, groups.items(), strict=True):
        labels, first = {}, 0.0
        for group in panel:
            key = next(str(setting["key"][0]) for setting in group if setting["key"][0] != BASE)
            places = first + np.arange(len(group))
            _draw_group(axes, group, places, least)
            names = [f"{setting[key][0]:g}" for setting in group]
            names[0] = f"{NAMES.get(key, key)} = {names[0]}"
            labels |= dict(zip(places.tolist(), names, strict=True))
            first = places[-1] + 1.5
        axes.set_xlim(least, widest)
        axes.set_ylim(first - 0.9, -0.6)  # the first setting is at the top
        axes.set_yticks([*labels], labels.values())
        axes.tick_params(axis="y", length=0)
        style.log_x(axes)
        axes.set_title(method, loc="left")
        axes.set_xlabel("loss" + style.scale_of(axes.xaxis))
        if vacuous:
            axes.plot([], [], VACUOUS, color=style.GREY, ms=5, mew=1.5, label="bound ≥ B: vacuous")
    style.legend_below(figure, panels[0], 2)
    return figure


def _three(setting: Columns) -> np.ndarray:
    """Return gap, its interval, prediction, bound and range of a setting, as means over seeds."""
    matched = where(setting, form=JUDGED)
    ends = ends_of(matched | {"gap": matched["gap_controlled"]})
    return np.array([*ends, *(matched[name].mean() for name in ("predicted", "bound", "range"))])


def _draw_group(axes: Axes, group: Sequence[Columns], places: np.ndarray, least: float) -> None:
    """Draw the three curves of the settings that differ in one key."""
    gap, low, high, predicted, bound, top = np.array([_three(setting) for setting in group]).T
    named = not axes.lines  # the legend needs each label once
    ends = np.maximum(low, least), np.maximum(high, least)
    axes.hlines(places, *ends, color=style.BLUE, lw=1.2)
    axes.plot(np.where(gap > 0, gap, np.nan), places, "o-", color=style.BLUE, ms=4, lw=0.8,
              label="measured gap (95%)" if named else None)  # fmt: skip
    axes.plot(predicted, places, "D-", color=style.ORANGE, ms=5.5, mfc="none", mew=1.1, lw=0.8,
              label="predicted gap" if named else None)  # fmt: skip
    finite = np.where(np.isfinite(bound), bound, np.nan)
    axes.plot(finite, places, "-", color=style.BLACK, lw=0.8)
    useful = bound < top
    axes.plot(finite[useful], places[useful], "|", color=style.BLACK, ms=7, mew=2,
              label=f"bound ({JUDGED})" if named else None)  # fmt: skip
    axes.plot(finite[~useful], places[~useful], VACUOUS, color=style.GREY, ms=5, mew=1.5)


@style.styled
def against_bound(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the bound against the mean gap, for the first method.

    There is a panel for each form of the bound, and a line for each key.
    """
    method, rows = next(iter(methods_of(rows).items()))
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
    left.set_title(f"{method}, by form of the bound", loc="left")
    right.set_title(f"{method}, one key at a time, {JUDGED}", loc="left")
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
    "gap-bound",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    {"gap-bound": three_curves, "gap-bound-forms": against_bound},
)
