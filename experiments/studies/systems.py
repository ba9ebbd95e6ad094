"""Study `systems`: the cost of accuracy in bytes, with compression, and in simulated seconds.

The study has parts, such as compressors, clock modes, and compressors on slow networks. If a part
has a table `[devices]`, its methods are compared by simulated seconds. Methods of other parts are
compared by the bytes that clients send. The cells are those of `federated-comparison`: each method
chooses its step sizes with tuning seeds, and then runs the comparison seeds. The cost of a run is
the number of bytes or seconds until its accuracy first reaches a target.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import (
    Findings,
    Picture,
    Rows,
    Titled,
    number,
    spread,
    text,
)
from fedmuon.analysis.report.tables import Columns, read_table, where
from fedmuon.analysis.report.verdicts import (
    Claim,
    Effect,
    Rule,
    Slope,
    free_of_seeds,
    mean_with_interval,
    paired,
)
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table, validate
from fedmuon.experiments.studies import federated_comparison as comparison
from fedmuon.experiments.studies.federated_comparison import (
    Compared,
    Method,
    Model,
    Ordered,
    inside_grid,
    mean_to_target,
)
from fedmuon.experiments.studies.study import Study, distinct, heading
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import Nested, SuiteRequest

SECONDS, BYTES = "simulated_seconds", "bytes_up"
WIDE = 100.0  # if the ends of a ratio's interval differ by a larger factor, it says nothing
UNITS = {BYTES: (1e6, "MB sent up"), SECONDS: (1.0, "simulated seconds")}


class Wanted(Ordered):
    """A claim that compares the methods `better` and `than`.

    The claim is that `better` has a lower cost to the target than `than`, or is at least as
    accurate.
    """

    kind: Literal["cheaper", "accurate"] = "cheaper"


class Part(Model):
    """A part of the study: methods that are compared, and claims about them.

    Cost ratios are relative to the method `baseline`.

    The text `words`, such as "on slow links", is added to the claims.
    """

    words: str = ""
    base: Nested = Field(default_factory=dict)
    baseline: str
    methods: Annotated[dict[str, Method], Field(min_length=1)]
    claims: list[Wanted]


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    The step sizes are searched as in the study `federated-comparison`.
    """

    seeds: Annotated[list[Natural], Field(min_length=1)]
    tuning_seeds: Annotated[list[Natural], Field(min_length=1)]
    extend: Annotated[int, Field(ge=0, le=20)]
    every: Count  # number of rounds between two evaluations
    alpha: Positive
    base: Nested
    parts: Annotated[dict[str, Part], Field(min_length=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Compared]:
    """Return the cells of all parts, with one cell for each method of a part."""
    shared = settings.model_dump(by_alias=True, exclude={"alpha", "parts", "base"})
    compared = []
    for name, part in settings.parts.items():
        for method_name in (
            part.baseline,
            *(x for claim in part.claims for x in (claim.better, claim.than)),
        ):
            if method_name not in part.methods:
                options = ", ".join(part.methods)
                raise InputError(
                    f"[parts.{name}] contains the name {method_name!r}, but this part has no such "
                    f"method. Use one of {options}."
                )
        if part.alphas:
            raise InputError(
                f"[parts.{name}] alphas has no effect, because all parts share one value. Set "
                "alpha at the top of the suite's file."
            )
        contents.require_free("--set", request.changes, comparison.set_by(f"[parts.{name}]", part))
        # Algorithms use different keys, so a cell leaves out keys that have no effect on it.
        model = {"target": part.target, "base": part.base}
        methods = {
            label: method.model_dump(by_alias=True) for label, method in part.methods.items()
        }
        tables = {"alphas": [settings.alpha], "base": settings.base, "models": {name: model}}
        content = {**shared, **tables, "methods": methods, "claims": []}
        compared += comparison.cells(_compared(content), request)
    return [replace(cell, costs=True) for cell in compared]


def _compared(content: Mapping[str, Any]) -> comparison.Settings:
    """Return the settings of one part as settings of `federated-comparison` with one model.

    The part may contain a single method.
    """
    alone = len(content["methods"]) == 1
    methods = content["methods"] | ({"": next(iter(content["methods"].values()))} if alone else {})
    settings = validate(comparison.Settings, {**content, "methods": methods})
    return settings.model_copy(update={"methods": {k: v for k, v in settings.methods.items() if k}})


# Claims

STANDS_ON = "\n".join((
    comparison.STANDS_ON,
    "The suite tests only the compressors, settings and devices in its file.",
    "Bytes are the sizes of the arrays in messages, including positions and scales. With "
    "over-selection or a deadline, the server cancels replies that it does not use. The bytes of "
    "these replies are not counted.",
    "Simulated seconds follow from the sizes of messages, local steps, and drawn speeds and "
    "bandwidths. No real device was timed.",
    "The cost of a target is the cost until the first evaluated round in which the accuracy on "
    "test samples reaches the target. Runs with more rounds can reach it by chance more often.",
    "Step sizes were chosen for the final loss, not for the cost.",
    "A ratio is the exponential of the mean difference of logarithms, paired by seed, with "
    "Student's interval.",
))  # fmt: skip
CHOSEN = (
    "Runs reach the target early. We lowered it from 0.75 after a first computation, in which "
    "single runs did not reach 0.75."
)


def cost_of(curves: Columns, part: str) -> str:
    """Return the name of the column with a part's cost.

    The cost is simulated seconds if the part simulates devices, and bytes otherwise.
    """
    return SECONDS if np.isfinite(where(curves, model=part)[SECONDS]).any() else BYTES


def costs_to_target(rows: Columns, curves: Columns, part: str, method: str) -> dict[int, float]:
    """Return, for each seed, the cost at which the run first reached the target.

    If a run never reached the target, its cost is infinite.
    """
    cost, costs = cost_of(curves, part), {}
    runs, drawn = (where(table, model=part, method=method) for table in (rows, curves))
    for seed, goal in zip(runs["seed"], runs["target"], strict=True):
        at = (drawn["seed"] == seed) & (drawn["accuracy"] >= goal) & (drawn["round"] > 0)
        spent = drawn[cost][at] / UNITS[cost][0]
        costs[int(seed)] = float(spent.min()) if len(spent) else math.inf
    return costs


def ratio(spent: Mapping[int, float], other: Mapping[int, float]) -> Slope | None:
    """Return the ratio of two methods' costs: the geometric mean over seeds, and its interval.

    If only one of the two methods reached the target, in all of its runs, the ratio is 0 or
    infinite. In all other cases with a run that did not reach the target, the result is None. With
    a single seed, there is no interval.
    """
    pairs = [(spent[seed], other[seed]) for seed in spent if seed in other]
    reached = np.isfinite(np.array(pairs, dtype=float).reshape(-1, 2))
    if not len(pairs) or not reached.all():
        first, second = reached.T
        if len(pairs) and first.all() and not second.any():
            return Slope(0.0, 0.0, 0.0)
        infinite = len(pairs) and second.all() and not first.any()
        return Slope(math.inf, math.inf, math.inf) if infinite else None
    logs = np.log(pairs)
    _, half = paired([(float(log_spent), float(log_other)) for log_spent, log_other in logs])
    mean = float((logs[:, 0] - logs[:, 1]).mean())
    ends = (mean, mean - half, mean + half)
    return Slope(*(math.exp(end) for end in ends), free=len(pairs) - 1.0)


def at_once(rows: Columns, curves: Columns, part: str, method: str) -> bool:
    """Return whether every run of a method had reached the target at its first evaluation."""
    drawn = where(curves, model=part, method=method)
    rounds = drawn["round"].astype(float)
    first = rounds == rounds[rounds > 0].min(initial=math.inf)
    return bool((drawn["accuracy"][first] >= where(rows, model=part)["target"][0]).all())


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the section of the report, with the parts and claims of the suite's file."""
    parts, shipped = about["settings"]["parts"], about["suite"] == study.kind
    notes = [CHOSEN] if shipped and about["scale"] == "full" else []
    with_parts = replace(
        study,
        claims=partial(claims, parts),
        numbers=partial(numbers, parts),
        stands_on="\n".join([study.stands_on, *notes]),
    )
    section = comparison.described(with_parts, folder, about)
    rows, *others, curves = (read_table(folder / f"{name}.csv") for name in study.tables)
    drawn: dict[str, list[str]] = {}
    for part in distinct(rows, "model"):
        default = "systems-bytes" if cost_of(curves, part) == BYTES else "systems-seconds"
        name = f"systems-{part}" if f"systems-{part}" in study.figures else default
        drawn.setdefault(name, []).append(part)
    pictures = [
        Picture.known(name, study.figures[name], rows, *others, _of_parts(curves, own_parts))
        for name, own_parts in drawn.items()
    ]  # fmt: skip
    return replace(section, pictures=pictures, more=[methods_table(parts)])


def _of_parts(columns: Columns, parts: Sequence[str]) -> Columns:
    mask = np.isin(columns["model"], parts)
    return {name: values[mask] for name, values in columns.items()}


def methods_table(parts: Mapping[str, Any]) -> Titled:
    """Return a table of all methods and of their settings in the suite's file."""
    head, lines = ("method", "settings", "step sizes tried first"), []
    for name, part in parts.items():
        lines.append((f"{name}: {_settings(part['base'])}".removesuffix(": "), "", ""))
        for method, table in part["methods"].items():
            tried = table["grid"] | table["then"]
            grids = (f"{key} = {', '.join(map(text, values))}" for key, values in tried.items())
            lines.append((f"  {method}", _settings(table["base"]), "; ".join(grids)))
    return "Settings of the methods", head, lines


def _settings(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return settings as one line of text.

    For example, the text is `compression.uplink = top-k, compression.share = 0.05`.
    """
    entries = ((table, key, value) for table, keys in tables.items() for key, value in keys.items())
    return ", ".join(f"{table}.{key} = {text(value)}" for table, key, value in entries)


def claims(
    parts: Mapping[str, Any], rows: Columns, tuning: Columns, curves: Columns
) -> Sequence[Claim]:
    """Return the claims of the suite's file, and the claim that step-size grids are wide enough."""
    part_claims = []
    for name, part in parts.items():
        points = {
            method: comparison.points_of(comparison.Method.model_validate(table), {})
            for method, table in part["methods"].items()
        }
        for entry in part["claims"]:
            pair = entry["better"], entry["than"]
            if entry["kind"] == "accurate":
                claim = comparison.ordered(where(rows, model=name), *pair)
            else:
                claim = cheaper(rows, curves, name, *pair, part.get("words", ""))
            part_claims.append(comparison.with_counts(claim, points, *pair))
    return [*part_claims, inside_grid(rows)]


def cheaper(
    rows: Columns, curves: Columns, part: str, better: str, than: str, words: str = ""
) -> Claim:
    """Return the claim that `better` reaches the target at a lower cost than `than`.

    The verdict is inconclusive if the cost ratio may only be the ratio of two message sizes. Only
    message sizes may matter if both methods reach the target at their first evaluation, or if the
    ratio is the same for every seed.
    """
    _, unit = UNITS[cost_of(curves, part)]
    goal = float(where(rows, model=part)["target"][0])
    less = "fewer simulated seconds" if unit.startswith("sim") else "fewer uploaded megabytes"
    place = f" {words}" if words else ""
    sentence = (
        f"{better} reaches a test accuracy of {goal:g} with {less} than {than}{place}, each at its "
        "own best step size."
    )
    spent, other = (costs_to_target(rows, curves, part, name) for name in (better, than))
    counts = [sum(map(math.isfinite, costs.values())) for costs in (spent, other)]
    ends = [spread(where(rows, model=part, method=name)["accuracy"]) for name in (better, than)]
    detail = (
        f"reached by {counts[0]} and {counts[1]} of {len(spent)} runs; "
        f"accuracy at the end {ends[0]} and {ends[1]}"
    )
    estimate, also = ratio(spent, other) or Slope(math.nan, math.nan, math.nan), ""
    if all(at_once(rows, curves, part, name) for name in (better, than)):
        estimate = Slope(math.nan, math.nan, math.nan)
        also = "both reach the target at their first evaluation, so their costs cannot be compared"
    elif alike(estimate):
        also = f"the ratio is {number(estimate.value, 3)} in every run, so no interval is known"
        estimate = Slope(math.nan, math.nan, math.nan)
    elif too_wide(estimate):
        also = f"with {len(spent)} seeds the interval is so wide that it says nothing"
    effect = Effect(
        f"ratio of {unit}, {better} / {than}", np.array([estimate.value]), np.array([estimate.low]),
        np.array([estimate.high]), [part], free=free_of_seeds(rows), unit="ratio",
    )  # fmt: skip
    untuned = comparison.at_an_end(where(rows, model=part), better, than)
    return Claim(sentence, effect, Rule(high=1.0, strict=True), detail, also, untuned=untuned)


def too_wide(found: Slope) -> bool:
    """Return whether the interval is too wide to be useful.

    A useless interval contains 1, and its upper end is more than `WIDE` times its lower end.
    """
    return 0 < found.low < 1 < found.high < math.inf and found.high > WIDE * found.low


def alike(found: Slope) -> bool:
    """Return whether the ratio is finite and, up to rounding, the same for every seed."""
    return 0 < found.value < math.inf and found.high <= found.low * (1 + 1e-9)


def numbers(parts: Mapping[str, Any], rows: Columns, tuning: Columns, curves: Columns) -> Rows:
    """Return the rows of the report's table, one for each method of each part.

    A row contains the method's cost, and the ratio of this cost to the baseline's cost.
    """
    head = (
        "method", "step sizes", "final accuracy", "rounds to target", "cost to target", "ratio"
    )  # fmt: skip
    lines: Rows = [head]
    for name in distinct(rows, "model"):
        model_rows, (_, unit) = where(rows, model=name), UNITS[cost_of(curves, name)]
        methods = distinct(model_rows, "method")
        base = parts.get(name, {}).get("baseline", methods[0])
        title = f"{name}: target {model_rows['target'][0]:g}; cost in {unit}; ratio to {base}"
        lines.append(heading(title, head))
        spent = {method: costs_to_target(rows, curves, name, method) for method in methods}
        for method in methods:
            part = where(model_rows, method=method)
            diverged = int(np.isnan(part["accuracy"]).sum())
            count = len(part["seed"])
            accuracy = f"{diverged} of {count} diverged" if diverged else spread(part["accuracy"])
            steps = f"{part['step_sizes'][0]}{' (end of grid)' * bool(part['edge'][0])}"
            cost = mean_to_target(np.array([*spent[method].values()]))
            ratio_text = "1" if method == base else _in_words(ratio(spent[method], spent[base]))
            to_target = mean_to_target(part["rounds_to_target"])
            lines.append((f"  {method}", steps, accuracy, to_target, cost, ratio_text))
    return lines


def _in_words(estimate: Slope | None) -> str:
    """Return a ratio with its interval as text, such as `0.12 (0.1 to 0.15)`.

    The text is a dash if some runs did not reach the target. The interval is left out if it is too
    wide to be useful.
    """
    if estimate is None or not 0 < estimate.value < math.inf:
        return "–"
    if math.isnan(estimate.low) or too_wide(estimate) or alike(estimate):
        note = " (too few seeds for an interval)" * too_wide(estimate)
        return number(estimate.value, 3) + (" (the same in every run)" if alike(estimate) else note)
    return f"{number(estimate.value, 3)} ({number(estimate.low, 3)} to {number(estimate.high, 3)})"


# Figures

LOOKS = ((style.BLACK, "X"), *style.SERIES, (style.GREY, "*"))
MARKS, FEW = 6, 4  # number of marks on a line; maximum number of lines of a panel with bands
CROWDED = 7  # maximum number of lines of a panel


@style.styled
def accuracy_against(
    cost: str, rows: Columns, tuning: Columns, curves: Columns, narrow: bool = False
) -> Figure:
    """Draw mean accuracy against mean cost, with one or two panels for each algorithm.

    A panel with few lines also has bands of 95% intervals. The name of a
    method is `ALGORITHM, HOW`, and HOW determines the colour of its line. If the name has a second
    comma, the line is dotted. Parts of `rows` that are not drawn have colours, too. Methods with
    the same HOW therefore have the same colour in all figures.
    """
    parts = [name for name in distinct(curves, "model") if cost_of(curves, name) == cost]
    methods = [
        (part, name) for part in parts for name in distinct(where(rows, model=part), "method")
    ]
    titles = panels_of([name for _, name in methods])
    hows = _hows(rows, parts)
    figure, panels = style.canvas(max(1, len(titles)), narrow, 3.0)
    labelled = set()
    for axes, (title, names) in zip(panels, titles.items(), strict=False):
        for part, name in (pair for pair in methods if pair[1] in names):
            _, _, how = name.partition(", ")
            first = how.partition(", ")[0]
            colour, marker = LOOKS[hows.index(first) % len(LOOKS)] if how else LOOKS[0]
            at, mean, low, high = _points(where(curves, model=part, method=name), cost).T
            dotted = how != first
            look: dict[str, Any] = {
                "ls": ":" if dotted else "-", "color": colour, "marker": marker, "lw": 1.2,
                "ms": 3.5, "mfc": "white" if dotted else colour,
            }  # fmt: skip
            axes.plot(at, mean, markevery=max(1, len(at) // MARKS), **look)
            if len(names) <= FEW:
                style.shade(axes, at, low, high, colour, 0.12)
            if how not in labelled:  # one legend entry for all panels
                labelled.add(how)
                panels[0].plot([], [], label=how or title, **look)
        for part in parts:
            target = float(where(rows, model=part)["target"][0])
            axes.axhline(target, color=style.GREY, lw=0.8, ls="--", zorder=0)
        axes.set_title(title, loc="left")
        axes.set_xlabel(UNITS[cost][1])
        axes.set_ylabel("test accuracy" if narrow or axes is panels[0] else "")
    _share_axes(panels)
    if labelled:
        panels[0].plot([], [], "--", color=style.GREY, lw=0.8, label="target accuracy")
        style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


def panels_of(methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the methods of each panel, by the panel's title.

    A panel shows an algorithm. An algorithm with more than `CROWDED` methods gets two panels, and
    both show its first method for comparison.
    """
    panels: dict[str, list[str]] = {}
    for family in dict.fromkeys(name.partition(", ")[0] for name in methods):
        first, *others = (name for name in methods if name.partition(", ")[0] == family)
        if len(others) < CROWDED:
            panels[family] = [first, *others]
            continue
        half = -(-len(others) // 2)
        panels |= {f"{family} (1 of 2)": [first, *others[:half]],
                   f"{family} (2 of 2)": [first, *others[half:]]}  # fmt: skip
    return panels


def _hows(rows: Columns, drawn: Sequence[str]) -> list[str]:
    """Return the second part of the method names, HOW, for all methods that need a colour.

    These are the methods of the drawn parts, and of other parts that share a HOW with them.
    """
    by_part = {
        part: [name.split(", ")[1] for name in distinct(where(rows, model=part), "method")
               if ", " in name]
        for part in distinct(rows, "model")
    }  # fmt: skip
    drawn_hows = {how for part in drawn for how in by_part[part]}
    return list(
        dict.fromkeys(how for hows in by_part.values() if drawn_hows & {*hows} for how in hows)
    )


def _share_axes(panels: Sequence[Any]) -> None:
    """Set the same limits and ticks for all panels."""
    positive = [
        float(x) for panel in panels for line in panel.lines if line.get_linestyle() != "--"
        for x in np.asarray(line.get_xdata(), dtype=float) if x > 0
    ]  # fmt: skip
    if positive:
        for axes in panels:
            axes.set_xlim(0.8 * min(positive), 1.25 * max(positive))
            style.log_x(axes)
    style.alike(panels)


def _points(curves: Columns, cost: str) -> np.ndarray:
    """Return the points of a curve, one for each round.

    A point contains the mean cost, the mean accuracy over runs, and both ends of its 95% interval,
    so the result has the shape [rounds, 4]. The result ends before the first round that some run
    did not reach. Round 0 is left out, because a log axis cannot show its cost 0.
    """
    points, seeds = [], len(np.unique(curves["seed"]))
    for at in np.unique(curves["round"]):
        round_rows = where(curves, round=at)
        if len(round_rows["seed"]) < seeds or not np.isfinite(round_rows["accuracy"]).all():
            break
        if not at:
            continue
        values = round_rows["accuracy"]
        mean_cost = round_rows[cost].mean() / UNITS[cost][0]
        points.append((mean_cost, *mean_with_interval(values)))
    return np.array(points).reshape(-1, 4)


STUDY = Study(
    "systems", Settings, cells, partial(claims, {}), partial(numbers, {}), STANDS_ON,
    {"systems-bytes": partial(accuracy_against, BYTES),
     "systems-seconds": partial(accuracy_against, SECONDS),
     "systems-slow-links": partial(accuracy_against, SECONDS)},
    tables=("rows", "tuning", "curves"), report=report,
)  # fmt: skip
