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
    found = []
    for name, part in settings.parts.items():
        for wanted in (part.baseline, *(x for one in part.claims for x in (one.better, one.than))):
            if wanted not in part.methods:
                known = ", ".join(part.methods)
                raise InputError(
                    f"[parts.{name}] contains the name {wanted!r}, but this part has no such "
                    f"method. Use one of {known}."
                )
        if part.alphas:
            raise InputError(
                f"[parts.{name}] alphas has no effect, because all parts share one value. Set "
                "alpha at the top of the suite's file."
            )
        contents.require_free("--set", request.changes, comparison.set_by(f"[parts.{name}]", part))
        # Algorithms use different keys, so a cell leaves out keys that have no effect on it.
        model = {"target": part.target, "base": part.base}
        methods = {label: one.model_dump(by_alias=True) for label, one in part.methods.items()}
        one = {"alphas": [settings.alpha], "base": settings.base, "models": {name: model}}
        given = {**shared, **one, "methods": methods, "claims": []}
        found += comparison.cells(_compared(given), request)
    return [replace(one, costs=True) for one in found]


def _compared(given: Mapping[str, Any]) -> comparison.Settings:
    """Return the settings of one part as settings of `federated-comparison` with one model.

    The part may contain a single method.
    """
    alone = len(given["methods"]) == 1
    methods = given["methods"] | ({"": next(iter(given["methods"].values()))} if alone else {})
    found = validate(comparison.Settings, {**given, "methods": methods})
    return found.model_copy(update={"methods": {k: v for k, v in found.methods.items() if k}})


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
    cost, found = cost_of(curves, part), {}
    mine, drawn = (where(one, model=part, method=method) for one in (rows, curves))
    for seed, goal in zip(mine["seed"], mine["target"], strict=True):
        at = (drawn["seed"] == seed) & (drawn["accuracy"] >= goal) & (drawn["round"] > 0)
        spent = drawn[cost][at] / UNITS[cost][0]
        found[int(seed)] = float(spent.min()) if len(spent) else math.inf
    return found


def ratio(spent: Mapping[int, float], other: Mapping[int, float]) -> Slope | None:
    """Return the ratio of two methods' costs: the geometric mean over seeds, and its interval.

    If only one of the two methods reached the target, in all of its runs, the ratio is 0 or
    infinite. In all other cases with a run that did not reach the target, the result is None. With
    a single seed, there is no interval.
    """
    pairs = [(spent[seed], other[seed]) for seed in spent if seed in other]
    reached = np.isfinite(np.array(pairs, dtype=float).reshape(-1, 2))
    if not len(pairs) or not reached.all():
        mine, theirs = reached.T
        if len(pairs) and mine.all() and not theirs.any():
            return Slope(0.0, 0.0, 0.0)
        lost = len(pairs) and theirs.all() and not mine.any()
        return Slope(math.inf, math.inf, math.inf) if lost else None
    logs = np.log(pairs)
    _, half = paired([(float(one), float(two)) for one, two in logs])
    mean = float((logs[:, 0] - logs[:, 1]).mean())
    ends = (mean, mean - half, mean + half)
    return Slope(*(math.exp(one) for one in ends), free=len(pairs) - 1.0)


def at_once(rows: Columns, curves: Columns, part: str, method: str) -> bool:
    """Return whether every run of a method had reached the target at its first evaluation."""
    drawn = where(curves, model=part, method=method)
    rounds = drawn["round"].astype(float)
    first = rounds == rounds[rounds > 0].min(initial=math.inf)
    return bool((drawn["accuracy"][first] >= where(rows, model=part)["target"][0]).all())


def report(study: Study, folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the section of the report, with the parts and claims of the suite's file."""
    parts, shipped = about["settings"]["parts"], about["suite"] == study.kind
    chosen = [CHOSEN] if shipped and about["scale"] == "full" else []
    given = replace(
        study,
        claims=partial(claims, parts),
        numbers=partial(numbers, parts),
        stands_on="\n".join([study.stands_on, *chosen]),
    )
    found = comparison.described(given, folder, about)
    rows, *others, curves = (read_table(folder / f"{name}.csv") for name in study.tables)
    drawn: dict[str, list[str]] = {}
    for part in distinct(rows, "model"):
        default = "systems-bytes" if cost_of(curves, part) == BYTES else "systems-seconds"
        name = f"systems-{part}" if f"systems-{part}" in study.figures else default
        drawn.setdefault(name, []).append(part)
    pictures = [
        Picture.known(name, study.figures[name], rows, *others, _of_parts(curves, own))
        for name, own in drawn.items()
    ]  # fmt: skip
    return replace(found, pictures=pictures, more=[methods_table(parts)])


def _of_parts(columns: Columns, parts: Sequence[str]) -> Columns:
    mine = np.isin(columns["model"], parts)
    return {name: values[mine] for name, values in columns.items()}


def methods_table(parts: Mapping[str, Any]) -> Titled:
    """Return a table of all methods and of their settings in the suite's file."""
    head, lines = ("method", "settings", "step sizes tried first"), []
    for name, part in parts.items():
        lines.append((f"{name}: {_settings(part['base'])}".removesuffix(": "), "", ""))
        for method, own in part["methods"].items():
            tried = own["grid"] | own["then"]
            grids = (f"{key} = {', '.join(map(text, values))}" for key, values in tried.items())
            lines.append((f"  {method}", _settings(own["base"]), "; ".join(grids)))
    return "Settings of the methods", head, lines


def _settings(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return settings as one line of text.

    For example, the text is `compression.uplink = top-k, compression.share = 0.05`.
    """
    every = ((table, key, value) for table, keys in tables.items() for key, value in keys.items())
    return ", ".join(f"{table}.{key} = {text(value)}" for table, key, value in every)


def claims(
    parts: Mapping[str, Any], rows: Columns, tuning: Columns, curves: Columns
) -> Sequence[Claim]:
    """Return the claims of the suite's file, and the claim that step-size grids are wide enough."""
    found = []
    for name, part in parts.items():
        points = {
            method: comparison.points_of(comparison.Method.model_validate(own), {})
            for method, own in part["methods"].items()
        }
        for one in part["claims"]:
            pair = one["better"], one["than"]
            if one["kind"] == "accurate":
                claim = comparison.ordered(where(rows, model=name), *pair)
            else:
                claim = cheaper(rows, curves, name, *pair, part.get("words", ""))
            found.append(comparison.with_counts(claim, points, *pair))
    return [*found, inside_grid(rows)]


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
    many = [sum(map(math.isfinite, one.values())) for one in (spent, other)]
    ends = [spread(where(rows, model=part, method=name)["accuracy"]) for name in (better, than)]
    detail = (
        f"reached by {many[0]} and {many[1]} of {len(spent)} runs; "
        f"accuracy at the end {ends[0]} and {ends[1]}"
    )
    found, also = ratio(spent, other) or Slope(math.nan, math.nan, math.nan), ""
    if all(at_once(rows, curves, part, name) for name in (better, than)):
        found = Slope(math.nan, math.nan, math.nan)
        also = "both reach the target at their first evaluation, so their costs cannot be compared"
    elif alike(found):
        also = f"the ratio is {number(found.value, 3)} in every run, so no interval is known"
        found = Slope(math.nan, math.nan, math.nan)
    elif too_wide(found):
        also = f"with {len(spent)} seeds the interval is so wide that it says nothing"
    effect = Effect(
        f"ratio of {unit}, {better} / {than}", np.array([found.value]), np.array([found.low]),
        np.array([found.high]), [part], free=free_of_seeds(rows), unit="ratio",
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
        mine, (_, unit) = where(rows, model=name), UNITS[cost_of(curves, name)]
        methods = distinct(mine, "method")
        base = parts.get(name, {}).get("baseline", methods[0])
        title = f"{name}: target {mine['target'][0]:g}; cost in {unit}; ratio to {base}"
        lines.append(heading(title, head))
        spent = {one: costs_to_target(rows, curves, name, one) for one in methods}
        for method in methods:
            part = where(mine, method=method)
            lost = int(np.isnan(part["accuracy"]).sum())
            many = len(part["seed"])
            accuracy = f"{lost} of {many} diverged" if lost else spread(part["accuracy"])
            steps = f"{part['step_sizes'][0]}{' (end of grid)' * bool(part['edge'][0])}"
            cost = mean_to_target(np.array([*spent[method].values()]))
            found = "1" if method == base else _in_words(ratio(spent[method], spent[base]))
            to_target = mean_to_target(part["rounds_to_target"])
            lines.append((f"  {method}", steps, accuracy, to_target, cost, found))
    return lines


def _in_words(found: Slope | None) -> str:
    """Return a ratio with its interval as text, such as `0.12 (0.1 to 0.15)`.

    The text is a dash if some runs did not reach the target. The interval is left out if it is too
    wide to be useful.
    """
    if found is None or not 0 < found.value < math.inf:
        return "–"
    if math.isnan(found.low) or too_wide(found) or alike(found):
        why = " (too few seeds for an interval)" * too_wide(found)
        return number(found.value, 3) + (" (the same in every run)" if alike(found) else why)
    return f"{number(found.value, 3)} ({number(found.low, 3)} to {number(found.high, 3)})"


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
    named = set()
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
            if how not in named:  # one legend entry for all panels
                named.add(how)
                panels[0].plot([], [], label=how or title, **look)
        for part in parts:
            target = float(where(rows, model=part)["target"][0])
            axes.axhline(target, color=style.GREY, lw=0.8, ls="--", zorder=0)
        axes.set_title(title, loc="left")
        axes.set_xlabel(UNITS[cost][1])
        axes.set_ylabel("test accuracy" if narrow or axes is panels[0] else "")
    _share_axes(panels)
    if named:
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
    of = {
        part: [one.split(", ")[1] for one in distinct(where(rows, model=part), "method")
               if ", " in one]
        for part in distinct(rows, "model")
    }  # fmt: skip
    own = {how for part in drawn for how in of[part]}
    return list(dict.fromkeys(how for hows in of.values() if own & {*hows} for how in hows))


def _share_axes(panels: Sequence[Any]) -> None:
    """Set the same limits and ticks for all panels."""
    positive = [
        float(x) for one in panels for line in one.lines if line.get_linestyle() != "--"
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
    found, seeds = [], len(np.unique(curves["seed"]))
    for at in np.unique(curves["round"]):
        now = where(curves, round=at)
        if len(now["seed"]) < seeds or not np.isfinite(now["accuracy"]).all():
            break
        if not at:
            continue
        values = now["accuracy"]
        place = now[cost].mean() / UNITS[cost][0]
        found.append((place, *mean_with_interval(values)))
    return np.array(found).reshape(-1, 4)


STUDY = Study(
    "systems", Settings, cells, partial(claims, {}), partial(numbers, {}), STANDS_ON,
    {"systems-bytes": partial(accuracy_against, BYTES),
     "systems-seconds": partial(accuracy_against, SECONDS),
     "systems-slow-links": partial(accuracy_against, SECONDS)},
    tables=("rows", "tuning", "curves"), report=report,
)  # fmt: skip
