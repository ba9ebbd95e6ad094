"""Claims that compare trained variants, and curves side by side along a sweep.

Columns are those of runs.csv and curves.csv: `variant`, `x` (nan without a sweep), `seed`, and the
measures. A run that diverged ends with nan, and counts as infinitely bad.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Rows, number

HIGHER = ("accuracy",)  # is better
NAMES = {"train_loss": "train loss", "test_loss": "test loss", "test_gap": "test minus train loss",
         "accuracy": "accuracy", "train_seconds": "seconds of training",
         "epsilon": "certified ε"}  # fmt: skip
TIMETABLE = (
    "Train loss after seconds of training, linear between evaluations; a dash is a moment before "
    "the first or after the last"
)


def judged(claim: Mapping[str, Any], runs: Columns, curves: Columns, label: str = "") -> Claim:
    """The verdict on one claim of a suite's file; `label` names what is swept."""
    if claim["kind"] in ("falling", "rising"):
        return trend(claim, runs, label)
    better, than = claim["better"], claim["than"]
    if claim["kind"] == "sooner":
        return sooner(better, than, runs, curves, claim["sentence"], label)
    if claim["kind"] == "near":
        given = claim["measure"], runs, claim["within"], claim["sentence"], label
        return near(better, than, *given)
    return terminal(better, than, claim["measure"], runs, claim["sentence"], label)


def name_of(measure: str) -> str:
    """A measure in words."""
    return NAMES.get(measure, measure.replace("_", " "))


def terminal(
    better: str, than: str, measure: str, runs: Columns, sentence: str = "", label: str = ""
) -> Claim:
    """The terminal mean over seeds is at or below the other's (above in accuracy) at every x."""
    up = measure in HIGHER
    word, at = name_of(measure), f" at every {label}" if label else ""
    article, side = "an" if word[0] in "aeiou" else "a", "above" if up else "below"
    sentence = sentence or (f"{better} ends with {article} {word} at or {side} that of {than}{at}.")
    if measure not in runs:
        return Claim(sentence, None, f"no run measured {word}")
    ends = [[ended(runs, name, x, measure) for name in (better, than)] for x in levels(runs)]
    pairs = np.array(ends)
    if not np.isfinite(pairs).any():
        return Claim(sentence, None, "both diverged")
    signed = -pairs if up else pairs
    held = np.isfinite(signed[:, 0]) & (signed[:, 0] <= signed[:, 1])
    margins = np.array([margin(runs, better, than, x, measure) for x in levels(runs)])
    return Claim(sentence, bool(held.all()), _by_how_much(pairs, margins, held, levels(runs)))


def near(
    better: str, than: str, measure: str, runs: Columns, within: float, sentence: str = "",
    label: str = "",
) -> Claim:  # fmt: skip
    """The terminal means over seeds differ by at most that share of the larger, at every x."""
    at = f" at every {label}" if label else ""
    word = name_of(measure)
    sentence = sentence or (
        f"{better} and {than} end with a {word} within {within:.0%} of each other{at}."
    )
    if measure not in runs:
        return Claim(sentence, None, f"no run measured {word}")
    pairs = np.array(
        [[ended(runs, name, x, measure) for name in (better, than)] for x in levels(runs)]
    )
    finite = np.isfinite(pairs).all(axis=1)
    with np.errstate(invalid="ignore"):
        held = finite & (np.abs(pairs[:, 0] - pairs[:, 1]) <= within * np.abs(pairs).max(axis=1))
    margins = np.array([margin(runs, better, than, x, measure) for x in levels(runs)])
    return Claim(sentence, bool(held.all()), _by_how_much(pairs, margins, held, levels(runs)))


def margin(runs: Columns, variant: str, other: str, x: float, measure: str) -> tuple[float, float]:
    """The mean difference of the two seed by seed, and half of its 95% interval (Student's t)."""
    mine, theirs = rows_of(runs, variant, x), rows_of(runs, other, x)
    seeds = np.intersect1d(runs["seed"][mine], runs["seed"][theirs])
    one, two = (np.array([runs[measure][rows & (runs["seed"] == seed)][0] for seed in seeds])
                for rows in (mine, theirs))  # fmt: skip
    away = one - two
    if len(away) < 2 or not np.isfinite(away).all():
        return np.nan, np.nan
    half = student.ppf(0.975, len(away) - 1) * away.std(ddof=1) / math.sqrt(len(away))
    return round(float(away.mean()), 12), float(half)


def ended(runs: Columns, variant: str, x: float, measure: str) -> float:
    """The terminal mean over seeds; infinitely bad where one diverged."""
    values = runs[measure][rows_of(runs, variant, x)]
    worst = -np.inf if measure in HIGHER else np.inf
    return float(worst if np.isnan(values).any() or not len(values) else values.mean())


def levels(columns: Columns) -> np.ndarray:
    """The values of the sweep in rising order; a single nan without one."""
    return np.unique(columns["x"])


def rows_of(columns: Columns, variant: str, x: float) -> np.ndarray:
    """The rows of a variant at a value, as a mask."""
    return (columns["variant"] == variant) & at_level(columns, x)


def at_level(columns: Columns, x: float) -> np.ndarray:
    """The rows at a value, as a mask; a nan is at itself."""
    return np.isnan(columns["x"]) if np.isnan(x) else columns["x"] == x


def _by_how_much(
    pairs: np.ndarray, margins: np.ndarray, held: np.ndarray, values: np.ndarray
) -> str:
    """The ends [x, 2] and their differences [x, (mean, half of its interval)] in words, and how
    many of these the seeds can tell from 0."""
    several, places = len(values) > 1, []
    for ends, (by, half), x in zip(pairs, margins, values, strict=True):
        one, other = (f"{end:.4g}" if np.isfinite(end) else "diverged" for end in ends)
        more = "" if np.isnan(by) else f" ({by:+.2g} ± {half:.2g})"
        places.append(f"{one} against {other}{more}" + (f" at {x:g}" if several else ""))
    count = f"{held.sum()} of {len(held)} values: " if several else ""
    known = margins[~np.isnan(margins).any(axis=1)]
    clear = int((np.abs(known[:, 0]) > known[:, 1]).sum())
    tail = f"; ± is 95%, paired by seed: {clear} of {len(known)} clear of 0" if len(known) else ""
    return count + "; ".join(places) + tail


def sooner(
    better: str, than: str, runs: Columns, curves: Columns, sentence: str = "", label: str = ""
) -> Claim:
    """Seed by seed, the time of training until the other's terminal train loss is reached.

    It holds if every run gets there, and in less time on average than the other's own runs took.
    """
    at = f" at every {label}" if label else ""
    sentence = sentence or (
        f"{better} reaches the terminal train loss of {than} in less training time{at}."
    )
    held, details = [], []
    for x in levels(runs):
        times = _times(better, than, runs, curves, float(x))
        reached = np.isfinite(times[:, 0])
        if not len(times):
            return Claim(sentence, None, f"{than} diverged")
        mine, theirs = times[reached].mean(axis=0) if reached.any() else (np.nan, np.nan)
        held.append(bool(reached.all() and mine < theirs))
        place = "" if np.isnan(x) else f" at {x:g}"
        after = f", after {mine:.3g} s against {theirs:.3g} s" if reached.any() else ""
        details.append(f"{reached.sum()} of {len(times)} runs get there{place}{after}")
    return Claim(sentence, all(held), "; ".join(details))


def _times(better: str, than: str, runs: Columns, curves: Columns, x: float) -> np.ndarray:
    """Seconds until each reaches the terminal train loss of `than`, [seeds, 2]; inf for never."""
    mine, theirs = rows_of(curves, better, x), rows_of(curves, than, x)
    times = []
    for seed in np.unique(curves["seed"][theirs]):
        goal = runs["train_loss"][rows_of(runs, than, x) & (runs["seed"] == seed)]
        if len(goal) == 1 and not np.isnan(goal[0]):
            low = (curves["seed"] == seed) & (curves["train_loss"] <= goal[0])
            moments = (curves["train_seconds"][low & part] for part in (mine, theirs))
            times.append([one.min(initial=np.inf) for one in moments])
    return np.array(times).reshape(-1, 2)


def trend(claim: Mapping[str, Any], runs: Columns, label: str) -> Claim:
    """The terminal mean over seeds falls, or rises, from each value of the sweep to the next."""
    variant, measure, kind = claim["better"], claim["measure"], claim["kind"]
    word = name_of(measure)
    sentence = claim["sentence"] or (
        f"The {word} of {variant} is {'lower' if kind == 'falling' else 'higher'} "
        f"at every next {label}."
    )
    if measure not in runs:
        return Claim(sentence, None, f"no run measured {word}")
    ends = np.array([ended(runs, variant, x, measure) for x in levels(runs)])
    steps = np.diff(ends) if kind == "rising" else -np.diff(ends)
    along = ", ".join(f"{end:.4g} at {x:g}" for end, x in zip(ends, levels(runs), strict=True))
    held = bool((steps > 0).all()) if len(steps) and np.isfinite(ends).all() else None
    return Claim(sentence, held, along)


def followed(curves: Columns, sweep: Mapping[str, Any]) -> tuple[Columns, Sequence[str]]:
    """The curves of one variant, each value of the sweep as a variant of its own, beside those
    that are not swept; and their names."""
    values, names = levels(curves), {}
    for x in values:
        names[f"{sweep['label']} = {x:g}"] = rows_of(curves, sweep["follow"], x)
    names |= {name: rows_of(curves, name, values[-1]) for name in sweep["fixed"]}
    rows = {name: np.concatenate([column[mask] for mask in names.values()])
            for name, column in curves.items()}  # fmt: skip
    rows["variant"] = np.repeat(list(names), [mask.sum() for mask in names.values()])
    rows["x"] = np.full(len(rows["variant"]), np.nan)
    return rows, list(names)


def timetable(curves: Columns, about: Mapping[str, Any]) -> tuple[str, tuple[str, ...], Rows]:
    """Title, head and lines: a line a variant, and its published line below it."""
    asked, held = about["times"], about["times"]["published"] or {"seconds": [], "losses": {}}
    moments = parts(curves, asked["of"], asked["parts"])
    head = ("variant", *(f"{moment:.3g} s" for moment in moments))
    rows: Rows = []
    if held["seconds"]:
        at = [f"at {second:g} s" for second in held["seconds"]]
        rows.append((about["source"], *_as_long(at, len(moments))))
    for variant in about["variants"]:
        losses = at_seconds(curves, variant, moments)
        rows.append((variant, *map(number, losses)))
        if found := held["losses"].get(variant):
            rows.append((f"  {about['source']}", *_as_long(list(map(number, found)), len(moments))))
    return TIMETABLE, head, rows


def _as_long(cells: list[str], count: int) -> list[str]:
    return (cells + ["–"] * count)[:count]


def parts(curves: Columns, variant: str, count: int) -> np.ndarray:
    """Even parts of the training seconds of the variant's shortest run, the last being all."""
    mine = curves["variant"] == variant
    ends = [curves["train_seconds"][mine & (curves["seed"] == seed)].max()
            for seed in np.unique(curves["seed"][mine])]  # fmt: skip
    return np.linspace(0, np.min(ends), count + 1)[1:]  # whose last is the end to the last bit


def at_seconds(curves: Columns, variant: str, moments: np.ndarray) -> np.ndarray:
    """The mean over seeds of the train loss, linear between evaluations; nan outside them."""
    mine, found = curves["variant"] == variant, []
    for seed in np.unique(curves["seed"][mine]):
        rows = mine & (curves["seed"] == seed)
        order = np.argsort(curves["train_seconds"][rows])
        seconds, losses = (curves[name][rows][order] for name in ("train_seconds", "train_loss"))
        found.append(np.interp(moments, seconds, losses, left=np.nan, right=np.nan))
    return np.mean(found, axis=0)
