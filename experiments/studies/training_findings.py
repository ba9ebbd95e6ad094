"""Kind `training`: the text and figures of the report."""

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from fedmuon.analysis.report import style
from fedmuon.analysis.report.comparisons import (
    at_level,
    ended,
    judge,
    levels,
    luck,
    name_of,
    near_chance,
    rows_of,
    sweep_curves,
    timetable,
)
from fedmuon.analysis.report.findings import (
    Findings,
    Picture,
    Rows,
    Titled,
    card_of,
    number,
    spread,
)
from fedmuon.analysis.report.tables import RUN_AGAIN, Columns, read_table, require
from fedmuon.analysis.report.tuning import UNTUNED, Tuned, objection
from fedmuon.analysis.report.verdicts import Claim, counted, mean_with_interval, of_all_seeds
from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text
from fedmuon.privacy.accounting.dominating_pairs import ADJACENCIES
from fedmuon.privacy.mechanisms.client_level import EVERYONE

KEYS = ("variants", "sweep", "claims", "published", "source", "note")
HEAD = ("x", "seed", "round", "train_seconds")
MEASURES = ("train_loss", "test_loss", "accuracy")
COSTS = ("train_seconds", "epsilon")  # measures that do not depend on the step size
SAMPLINGS = {"poisson": "Poisson", "shuffle": "shuffled", "cyclic": "cyclic", "none": "public"}


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the findings of a suite folder of this kind. `about` is its suite.json."""
    require(about, KEYS, folder / "suite.json")
    curves = read_table(folder / "curves.csv", (*HEAD, *MEASURES), ("variant",))
    runs = read_table(folder / "runs.csv", (*HEAD, *MEASURES), ("variant", "note"))
    _require_matching(curves, runs, about, folder)
    label = str(about["sweep"]["label"]) if about["sweep"] else ""
    chance = luck(*about["guess"]) if "guess" in about else 0.0
    claims = [
        replace(
            judge(claim, runs, curves, label, chance),
            also=" ".join(filter(None, notes(claim, about, runs))),
            untuned=untuned(claim, about),
        )
        for claim in about["claims"]
    ]
    pictures = _pictures(curves, runs, about)
    stands_on = caution = ""
    if (folder / "clients.csv").exists():  # the privacy accounts of clients in private runs
        names = ("x", "seed", "client", "epsilon", "target")
        clients = read_table(folder / "clients.csv", names, ("variant",))
        adjacency = adjacency_of(clients)
        means = "; ".join(f"{name}: {ADJACENCIES.get(name, '')}" for name in adjacency.split(", "))
        drawn = sampling_in_words(clients)
        stands_on = f"Every ε assumes {adjacency} neighbours and {drawn} ({means})."
        claims += budget_claims(runs, clients)
        if len(np.unique(clients["client"])) > 1:
            arguments = clients, about["variants"], _drawn_at(about)
            pictures.append(Picture.known("clients", by_client, *arguments))
    if "guess" in about:  # count each run once, although an unswept run has a row at each value
        of_each = zip(runs.get("run", range(len(runs["x"]))), runs["accuracy"], strict=True)
        caution = near_chance(np.array([*dict(of_each).values()]), *about["guess"])
    ends = [ended(runs, name, x, "accuracy") for name in dict.fromkeys(runs["variant"].tolist())
             for x in levels(runs)]  # fmt: skip
    finite = [end for end in ends if np.isfinite(end)]
    reached = f"{min(finite):.3f} to {max(finite):.3f}" if finite else "–"
    head, numbers = _numbers(runs, about)
    return Findings.of_suite(
        folder,
        about,
        claims=claims,
        numbers_title="Final values: mean over seeds, with the standard deviation (SD)",
        head=head,
        numbers=numbers,
        pictures=pictures,
        stands_on=stands_on,
        facts=("suite", "data", "scale", "runs", "seconds"),
        more=[*([timetable(curves, about)] if about.get("times") else ()), *_tunings(about)],
        card=[*card_of(about), ("accuracy at the end", reached)],  # minimum and maximum of means
        runs=_every(runs, label),
        caution=caution,
        pending=_pending(folder, about),
    )


def _pending(folder: Path, suite: Mapping[str, Any]) -> str:
    """Return a note if more seeds were requested than the tables contain, otherwise "".

    The note contains the command that computes the missing runs.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # --resume reports them
        cells = json.loads(read_text(folder / "suite.lock"))[-1]
        if len(cells) > suite["runs"]:
            seeds = str(len({config["federation"]["seed"] for *_, config in cells}))
            words = of_all_seeds(shlex.split(str(suite["again"])))
            command = shlex.join([*words, "--seeds", seeds, "--out", str(folder), "--resume"])
            return (
                f"These are {suite['runs']} of the {len(cells)} requested runs, which have "
                f"{seeds} seeds. To compute the other runs, run {command}"
            )
    return ""


def _stated(suite: Mapping[str, Any]) -> str:
    """Return the reason why the suite's step sizes were not tuned, or "" if they were."""
    return str((suite.get("tuning") or {}).get("stated", ""))


def notes(claim: Mapping[str, Any], about: Mapping[str, Any], runs: Columns) -> tuple[str, ...]:
    """Return what a reader of the claim has to know besides its verdict. Texts may be empty."""
    return claim.get("also", ""), tuning_note(claim, about), unequal_rounds(claim, runs)


def tuning_note(claim: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return the note on the step sizes of a claim that the rule does not judge."""
    return "" if claim.get("untuned") or claim["measure"] in COSTS else _stated(about)


def unequal_rounds(claim: Mapping[str, Any], runs: Columns) -> str:
    """Return the note that the compared variants did not make the same number of rounds, or "".

    A measure of costs, such as the rounds to an accuracy, needs no note.
    """
    if claim["measure"] in COSTS:
        return ""
    last_rounds = {
        name: int(runs["round"][runs["variant"] == name].max(initial=0))
        for name in filter(None, (claim["better"], claim.get("than", "")))
    }
    if len(set(last_rounds.values())) == 1:
        return ""
    counts = " and ".join(f"{name} {rounds}" for name, rounds in last_rounds.items())
    return f"The numbers of rounds differ: {counts}."


def untuned(claim: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return why the variants of a claim were not tuned equally well, or "" if they were.

    A claim along the sweep compares the values of the sweep. Every value then needs its own tuning.

    Args:
        claim: The claim's table in the suite's file.
        about: The content of suite.json.
    """
    tuning = about.get("tuning") or {}
    if claim["measure"] in COSTS:
        return ""
    if _stated(about) or claim.get("untuned"):
        return str(claim.get("untuned", ""))
    along = claim["kind"] in ("falling", "rising")
    names = [claim["better"]] if along else [claim["better"], claim["than"]]
    methods = [method for method in tuning.get("methods", ()) if method["method"] in names]
    if absent := [name for name in names if name not in {method["method"] for method in methods}]:
        return UNTUNED.format(" and ".join(absent))
    at_each, sweep = tuning["at"] == "each", about["sweep"]
    if along and not at_each:
        return f"{names[0]} was tuned only at {sweep['label']} = {tuning['at']:g}"
    tunings: dict[str, list[Tuned]] = {}
    for method in methods:
        swept = (
            f" at {sweep['label']} = {method['x']:g}" if at_each and method["x"] is not None else ""
        )
        name = method["method"] + swept
        tunings.setdefault(name if along else method["method"], []).append(
            Tuned.of(method, tuning, name)
        )
    return objection(list(tunings), tunings)


def _tunings(suite: Mapping[str, Any]) -> list[Titled]:
    """Return a table with the score of every tuned value, and whether the best is inside."""
    tuning = suite.get("tuning") or {}
    if not tuning.get("methods"):
        return []
    key, measure, seeds = tuning["key"], name_of(tuning["measure"]), tuning["seeds"]
    at_each, rows = tuning["at"] == "each", []
    for method in tuning["methods"]:
        if not at_each and method["x"] not in (None, tuning["at"]):
            continue
        tuned = Tuned.of(method, tuning)
        pairs = zip(tuned.values, tuned.scores, strict=True)
        scores = ", ".join(f"{value:g}: {number(score)}" for value, score in pairs)
        x = [] if not suite["sweep"] else ["" if method["x"] is None else f"{method['x']:g}"]
        where = f"{tuned.end} of the grid" if tuned.end else "inside the grid"
        rows.append((method["method"], *x, scores, f"{tuned.best:g}", where))
    label = [suite["sweep"]["label"]] if suite["sweep"] else []
    seed_list = ", ".join(map(str, seeds))
    title = (
        f"Tuning of {key}: mean {measure} by value, with seed{'s' * (len(seeds) > 1)} {seed_list}"
    )
    return [(title, ("variant", *label, f"{key}: {measure}", "best", "place"), rows)]


def _every(runs: Columns, label: str) -> Titled:
    """Return a table of the final measures of all runs."""
    names = ("seed", "round", *MEASURES, "train_seconds")
    head = ("run", *([label] if label else []), *(name_of(name) for name in names))
    lines: Rows = []
    for at, variant in enumerate(runs["variant"].tolist()):
        swept = (f"{runs['x'][at]:g}",) if label else ()
        lines.append((variant, *swept, *(number(float(runs[name][at])) for name in names)))
    return "All runs", head, lines


def sampling_in_words(clients: Columns) -> str:
    """Return a text on how samples, or whole clients, are chosen at random in a round."""
    unit = "cohorts" if (clients["client"] == EVERYONE).all() else "lots"
    ways = dict.fromkeys(map(str, clients.get("sampling", ["poisson"])))
    return ", ".join(f"{SAMPLINGS.get(way, way)} {unit}" for way in ways if way)


def budget_claims(runs: Columns, clients: Columns) -> list[Claim]:
    """Return the claim that clients stay within their target epsilon.

    If there is no target, the result is [].
    """
    if not (clients["target"] > 0).all():
        return []
    sentence = (
        "Every run is certified, and the joint ε of every client is at most its target ε "
        f"({adjacency_of(clients)}, {sampling_in_words(clients)})."
    )
    certified = runs["certified"][~np.isnan(runs["epsilon"])] == "True"  # only finished runs
    over, share = clients["epsilon"] > clients["target"], clients["epsilon"] / clients["target"]
    detail = (
        f"{certified.sum()} of {len(certified)} runs are certified; {over.sum()} of {len(over)} "
        f"accounts are above their target ε, and the largest account is {share.max():.2%} of its "
        "target; each account covers one training, and choosing among several trainings spends "
        "more (`fedmuon privacy tuned`)"
    )
    outcomes = np.concatenate([certified, ~over])
    return [counted(sentence, outcomes, "runs and accounts", detail)]


def _require_matching(
    curves: Columns, runs: Columns, suite: Mapping[str, Any], folder: Path
) -> None:
    """Raise InputError if the tables do not match each other or the suite."""
    ends = [
        curves["round"][rows_of(curves, variant, x) & (curves["seed"] == seed)].max(initial=-1)
        for variant, x, seed in zip(runs["variant"], runs["x"], runs["seed"], strict=True)
    ]
    same = set(runs["variant"]) == set(curves["variant"]) == set(suite["variants"])
    count = len(suite["variants"]) * len(levels(runs)) * len(np.unique(runs["seed"]))
    if not same or len(ends) != count or not np.array_equal(ends, runs["round"]):
        raise InputError(
            f"{folder}: curves.csv and runs.csv do not match. One of the files is damaged or "
            f"belongs to another suite: {RUN_AGAIN}"
        )


def _numbers(runs: Columns, suite: Mapping[str, Any]) -> tuple[tuple[str, ...], Rows]:
    """Return a table row for each variant and value of the sweep, with published rows below."""
    swept = bool(suite["sweep"])
    names = (*MEASURES, "train_seconds", *(["epsilon"] if "epsilon" in runs else []))
    titles = {"epsilon": f"{name_of('epsilon')} ({adjacency_of(runs)})"}
    heads = (titles.get(name, name_of(name)) for name in names)
    head = ("variant", *([suite["sweep"]["label"]] if swept else []), *heads)
    rows: Rows = []
    for variant in suite["variants"]:
        for x in levels(runs):
            mask, cells = rows_of(runs, variant, x), []
            for values in (runs[name][mask] for name in names):
                diverged = int(np.isnan(values).sum())
                cells.append(
                    f"{diverged} of {len(values)} diverged" if diverged else spread(values)
                )
            rows.append((variant, *([f"{x:g}"] if swept else []), *cells))
        if (published := suite["published"].get(variant)) and not swept:
            rows.append((f"  {suite['source']}", *(number(published.get(name)) for name in names)))
    return head, rows


def _pictures(curves: Columns, runs: Columns, suite: Mapping[str, Any]) -> list[Picture]:
    """Return figures of final values along the sweep, and of curves by round and by seconds.

    In a suite with a sweep, the curves show a single value of the sweep. In addition, one figure
    may show every value of the sweep for one variant.
    """
    variants, sweep, at = suite["variants"], suite["sweep"], _drawn_at(suite)
    rows = {name: column[at_level(curves, at)] for name, column in curves.items()}
    where = f" at {sweep['label']} = {at:g}" if sweep else ""
    pictures, picture = [], partial(Picture.known, where=where, read=partial(in_words, rows))
    if sweep and sweep["key"] == "privacy.noise" and "epsilon" in runs:
        pictures.append(Picture.known("epsilon", by_epsilon, runs, variants, read=ends_in_words))
    if sweep:
        arguments = runs, variants, ("test_loss", "accuracy"), sweep["label"]
        pictures.append(Picture.known("terminal", terminal, *arguments, read=ends_in_words))
    pictures += [
        picture(name, draw_curves, curves, variants, by, at)
        for by, name in (("round", "curves"), ("train_seconds", "curves-seconds"))
    ]
    if sweep and sweep.get("follow"):
        lines, names = sweep_curves(curves, sweep)
        read = partial(in_words, lines)
        followed = Picture.known("followed", draw_curves, lines, names, "round", np.nan,
                             where=sweep["follow"], read=read)  # fmt: skip
        beside = " Variants that the sweep does not change are drawn for comparison." * bool(
            sweep["fixed"]
        )
        pictures.append(replace(followed, caption=followed.caption + beside))
    return pictures


def _drawn_at(suite: Mapping[str, Any]) -> float:
    """Return the value of the sweep that the figures of curves show.

    Without a sweep, the result is nan.
    """
    sweep = suite["sweep"]
    if not sweep:
        return np.nan
    return sweep["values"][-1] if sweep["curves"] is None else sweep["curves"]


# Figures

LINES = (*style.SERIES, (style.BLACK, "X"), (style.GREY, "*"))
AXES = {"round": "round", "train_seconds": "seconds of training"}
HUGE = 1e6  # a larger loss counts as a divergence
MOST = 4  # maximum number of variants with train losses, and of legend columns
BANDS = 6  # maximum number of variants with bands
APART = 2.5  # points between the bars of two variants at one value


@dataclass(frozen=True)
class Look:
    """Colour and style of a variant.

    `added` is True if the variant is drawn with hollow marks and dotted lines, because another
    variant has the same colour.
    """

    colour: str
    marker: str
    added: bool


def looks(variants: Sequence[str]) -> dict[str, Look]:
    """Return a colour and style for each variant.

    If there is exactly one variant "A + B" for a variant "A", both have the same colour. The marks
    of "A + B" are hollow and its lines are dotted. The same is true for the variants "A, S" and
    "A, T" if every variant has such a name with one of two settings S and T.
    """
    heads = [name.rpartition(" + ")[0] for name in variants]
    pairs = [name.rpartition(", ") for name in variants]
    settings = list(dict.fromkeys(setting for _, _, setting in pairs))
    if len(settings) == 2 and all(head for head, _, _ in pairs):
        algorithms = list(dict.fromkeys(head for head, _, _ in pairs))
        return {name: Look(*LINES[algorithms.index(head) % len(LINES)], setting == settings[1])
                for name, (head, _, setting) in zip(variants, pairs, strict=True)}  # fmt: skip
    base = {name: head if head in variants and heads.count(head) == 1 else name
            for name, head in zip(variants, heads, strict=True)}  # fmt: skip
    places = [name for name in variants if base[name] == name]
    return {name: Look(*LINES[places.index(base[name]) % len(LINES)], base[name] != name)
            for name in variants}  # fmt: skip


@style.styled
def draw_curves(
    rows: Columns, variants: Sequence[str], by: str, x: float = np.nan, narrow: bool = False
) -> Figure:
    """Draw held-out loss, train loss and accuracy against rounds or seconds of training.

    Held-out loss is a solid line and train loss is a dashed line. If two variants have the same
    colour, the lines of the second variant are dotted and dash-dotted. A line is the mean over
    seeds, and its band is the 95% interval of the mean. With more than four variants, the
    figure has no train losses. With more than six, it has no bands. The curves are those at the
    value `x` of the sweep.
    """
    figure, (loss, accuracy) = style.canvas(2, narrow, 2.9)
    few, bands = len(variants) <= MOST, len(variants) <= BANDS
    for name, look in looks(variants).items():
        for axes, measure in ((loss, "test_loss"), (accuracy, "accuracy")):
            _line(axes, _means(rows, name, x, by, measure), look, name, bands)
        if few:
            points = _means(rows, name, x, by, "train_loss")
            kind, mark = "-." if look.added else "--", "_" if len(points) == 1 else ""
            loss.plot(points[:, 0], points[:, 1], kind, color=look.colour, lw=1.4, marker=mark)
            _band(loss, points, look)
    loss_label = "loss (train dashed)" if few else "held-out loss"
    for axes, label in ((loss, loss_label), (accuracy, "accuracy")):
        axes.set_xlabel(AXES[by])
        axes.set_ylabel(label)
        last = float(axes.dataLim.x1)  # the axis starts at 0 and has space for the last mark
        axes.set_xlim(0, 1.05 * last if np.isfinite(last) and last > 0 else None)
        if by == "round":
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    style.log_y(loss)
    style.legend_below(figure, accuracy, 2 if narrow else MOST)
    return figure


def in_words(rows: Columns, figure: Figure) -> str:
    """Return a text that explains the lines of `draw_curves`."""
    loss, accuracy = figure.axes
    labels = {
        kind: [str(line.get_label()) for line in accuracy.lines if line.get_linestyle() == kind]
        for kind in ("-", ":")
    }
    kinds = {line.get_linestyle() for line in loss.lines}
    train, added = "--" in kinds, "-." in kinds
    single = "_" in {line.get_marker() for line in loss.lines}
    sentences = ["The loss axis is logarithmic"] * (loss.get_yscale() == "log")
    sentences.append("Solid lines are held-out values")
    sentences.append("Dashed lines are train losses" if train else "Train losses are not drawn")
    sentences += [
        "Dotted lines with hollow marks are variants that change the variant with the full mark of "
        f"the same colour ({', '.join(labels[':'])})"
    ] * bool(labels[":"])
    sentences += ["Dash-dotted lines are train losses of the dotted variants"] * (train and added)
    diverged = not (np.abs(rows["test_loss"]) < HUGE).all()
    sentences += ["Lines are means over seeds"] * (len(np.unique(rows["seed"])) > 1)
    sentences += ["A line ends where a run diverged"] * diverged
    sentences += ["A flat mark is the train loss of a single round"] * single
    spread = [isinstance(collection, LineCollection) for collection in loss.collections]
    extents = " and ".join(["bands"] * (not all(spread)) + ["bars"] * any(spread))
    sentences += [f"{extents.capitalize()} show the 95% interval of the mean"] * bool(extents)
    sentences.append("Accuracies are those on held-out samples")
    lasts = any(len(np.asarray(line.get_xdata())) > 1 for line in loss.lines)
    growing = "If a held-out loss rises above its train loss, the gap grows"
    sentences += [growing] * (train and lasts)
    return f"{'. '.join(sentences)}."


def ends_in_words(figure: Figure) -> str:
    """Return a text that explains the marks and bars of `terminal`."""
    axes = figure.axes[-1]
    several, bars = len(axes.lines) > 1, bool(axes.collections)
    sentences = [
        "A mark is the mean over seeds. Its bar is the 95% interval of the mean." * bars,
        "Bars of several variants are drawn next to each other. If the bars of two variants "
        "overlap widely, these seeds cannot distinguish the two variants." * (several and bars),
        "A variant with a hollow mark changes the variant with the full mark of the same "
        "colour." * any(line.get_linestyle() == ":" for line in axes.lines),
    ]
    return " ".join(filter(None, sentences))


def _means(rows: Columns, variant: str, x: float, by: str, measure: str) -> np.ndarray:
    """Return the points of a curve.

    The columns are x, the mean over seeds, and both ends of its 95% interval.

    The result ends before the first round that some run did not reach, or in which it diverged.
    """
    mask = rows_of(rows, variant, x)
    seeds, points = len(np.unique(rows["seed"][mask])), []
    for at in np.unique(rows["round"][mask]):
        in_round = mask & (rows["round"] == at)
        values = rows[measure][in_round]
        if len(values) < seeds or not (np.abs(values) < HUGE).all():
            break
        points.append((rows[by][in_round].mean(), *mean_with_interval(values)))
    return np.array(points).reshape(-1, 4)


def _line(axes: Axes, points: np.ndarray, look: Look, label: str, band: bool) -> Line2D:
    at, mean, _, _ = points.T
    (line,) = axes.plot(at, mean, ":" if look.added else "-", color=look.colour, lw=1.4, ms=3.5,
                        marker=look.marker, mfc="white" if look.added else look.colour,
                        markevery=max(1, len(at) // 6), label=label)  # fmt: skip
    if band:
        _band(axes, points, look)
    return line


def _band(axes: Axes, points: np.ndarray, look: Look) -> None:
    at, mean, low, high = points.T
    if len(at) == 1 and high > low:  # the band of a single point would have no width
        with style.limits_kept(axes):
            axes.vlines(at, low, high, color=look.colour, lw=0.9)
        axes.update_datalim([(at[0], 0.9 * mean[0]), (at[0], 1.1 * mean[0])])
    elif (high > low).any():
        style.shade(axes, at, low, high, look.colour, 0.15)


def _with_bars(axes: Axes, points: np.ndarray, shift: float, look: Look, label: str) -> None:
    """Draw means on a line, with bars of their 95% intervals.

    Marks and bars are shifted sideways, so that they do not cover those of other variants. A bar
    that is much longer than the range of the means is cut off at the edge of the axes.
    """
    figure, varies = axes.get_figure(root=True), points[:, 3] > points[:, 2]
    assert figure is not None
    aside = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
    _line(axes, points, look, label, band=False).set_transform(aside)
    if varies.any():
        axes.vlines(*points[varies][:, [0, 2, 3]].T, color=look.colour, lw=0.9, transform=aside)
    means = points[:, 1]
    span = max(np.ptp(means), 0.1 * np.abs(means).max()) if len(means) else 0.0
    lowest, highest = means.min(initial=np.inf) - span, means.max(initial=-np.inf) + span
    visible = points[:, 2:].clip(lowest, highest)
    ends = np.concatenate([np.stack([points[:, 0], end], axis=1) for end in visible.T])
    axes.update_datalim(ends[np.isfinite(ends).all(axis=1)])
    axes.autoscale_view()


@style.styled
def terminal(
    runs: Columns, variants: Sequence[str], measures: Sequence[str], label: str,
    narrow: bool = False,
) -> Figure:  # fmt: skip
    """Draw the final measures along the sweep.

    Marks are means over seeds, and bars are their 95% intervals.
    """
    figure, panels = style.canvas(len(measures), narrow, 2.9)
    values = levels(runs)
    for axes, measure in zip(panels, measures, strict=True):
        for place, (name, look) in enumerate(looks(variants).items()):
            points = _ends(runs, name, values, measure)
            _with_bars(axes, points, APART * (place - (len(variants) - 1) / 2), look, name)
        if (values > 0).all() and values.max() >= 5 * values.min():  # use a log axis
            if len(values) <= 6:
                style.levels_on_x(axes, values)
                axes.margins(x=max(0.1, 0.012 * len(variants)))  # room for marks aside
            else:
                style.log_x(axes)
        axes.set_xlabel(label)
        axes.set_ylabel(f"final {name_of(measure)}")
        if measure not in ("accuracy", "test_gap"):
            style.log_y(axes)
    style.legend_below(figure, panels[-1], 2 if narrow else MOST)
    return figure


@style.styled
def by_epsilon(runs: Columns, variants: Sequence[str], narrow: bool = False) -> Figure:
    """Draw final accuracy against the epsilon of each noise level of the sweep."""
    figure, (axes,) = style.canvas(1, narrow, 2.9)
    values = levels(runs)
    for place, (name, look) in enumerate(looks(variants).items()):
        points = _ends(runs, name, values, "accuracy")
        points[:, 0] = [runs["epsilon"][rows_of(runs, name, x)].mean() for x in points[:, 0]]
        points = points[np.argsort(points[:, 0])]
        _with_bars(axes, points, APART * (place - (len(variants) - 1) / 2), look, name)
    # One tick per level: an interrupted run has a slightly larger epsilon than the others.
    means = [runs["epsilon"][runs["x"] == x].mean() for x in values]
    style.levels_on_x(axes, np.unique(np.round(means, 2)))
    axes.margins(x=0.1)
    axes.set_xlabel(f"ε (upper end; {', '.join(np.unique(runs['adjacency']))})")
    axes.set_ylabel("final accuracy")
    style.legend_below(figure, axes, 2 if narrow else MOST)
    return figure


def _ends(runs: Columns, variant: str, values: np.ndarray, measure: str) -> np.ndarray:
    """Return the final measure for each value of the sweep.

    The columns are the value of the sweep, the mean of the measure over seeds, and both ends of its
    95% interval.
    """
    samples = [(x, runs[measure][rows_of(runs, variant, x)]) for x in values]
    rows = [(x, *mean_with_interval(of_seeds)) for x, of_seeds in samples if len(of_seeds)]
    return np.array(rows).reshape(-1, 4)


def adjacency_of(rows: Columns) -> str:
    """Return the adjacency of the epsilons in these rows.

    Tables of old versions do not name the adjacency, which is zero-out.
    """
    adjacencies = dict.fromkeys(map(str, rows.get("adjacency", ["zero-out"])))
    return ", ".join(name for name in adjacencies if name)


@style.styled
def by_client(
    rows: Columns, variants: Sequence[str], x: float = np.nan, narrow: bool = False
) -> Figure:
    """Draw the epsilons of all clients in increasing order, and their target.

    The figure has a line for each seed.

    Epsilon does not depend on the optimizer, so the lines of two variants coincide unless the
    variants clip differently.
    """
    figure, (axes,) = style.canvas(1, narrow, 2.9)
    for place, seed in enumerate(np.unique(rows["seed"])):
        colour, marker = LINES[place % len(LINES)]
        epsilons = [
            rows["epsilon"][rows_of(rows, name, x) & (rows["seed"] == seed)] for name in variants
        ]
        distinct = dict.fromkeys(tuple(np.sort(spent)) for spent in epsilons if len(spent))
        for place_of, spent in enumerate(distinct):
            axes.plot(np.arange(1, len(spent) + 1), spent, color=colour, marker=marker, ms=3.5,
                      lw=1, mfc="none", label="" if place_of else f"seed {seed:g}")  # fmt: skip
    targets = np.unique(rows["target"][at_level(rows, x)])
    for target in targets[targets > 0]:  # runs with a given noise have target 0
        axes.axhline(target, color=style.BLACK, lw=1, ls="--", label="target")
    axes.set_xlabel("clients that took part, in order of spent ε")
    axes.set_ylabel(f"ε of the client (joint, {adjacency_of(rows)}, upper end)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend_below(figure, axes, 2 if narrow else MOST)
    return figure
