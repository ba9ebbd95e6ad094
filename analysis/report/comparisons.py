"""Claims that compare trained variants: who ends lower, and who gets there sooner.

Columns are those of runs.csv and curves.csv: `variant`, `x` (nan without a sweep), `seed`, and the
measures. A run that diverged ends with nan, and counts as infinitely bad.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from fedmuon.analysis.report.claims import Claim, Columns

HIGHER = ("accuracy",)  # is better
NAMES = {"train_loss": "train loss", "test_loss": "test loss", "test_gap": "test minus train loss",
         "accuracy": "accuracy", "train_seconds": "seconds of training",
         "epsilon": "certified ε"}  # fmt: skip


def judged(claim: Mapping[str, Any], runs: Columns, curves: Columns, label: str = "") -> Claim:
    """The verdict on one claim of a suite's file; `label` names what is swept."""
    if claim["kind"] == "sooner":
        return sooner(claim["better"], claim["than"], runs, curves, claim["sentence"], label)
    return terminal(
        claim["better"], claim["than"], claim["measure"], runs, claim["sentence"], label
    )


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
    pairs = np.array([(ended(runs, better, x, measure), ended(runs, than, x, measure))
                      for x in levels(runs)])  # fmt: skip
    if not np.isfinite(pairs).any():
        return Claim(sentence, None, "both diverged")
    signed = -pairs if up else pairs
    held = np.isfinite(signed[:, 0]) & (signed[:, 0] <= signed[:, 1])
    margins = [margin(runs, better, than, x, measure) for x in levels(runs)]
    return Claim(sentence, bool(held.all()), _by_how_much(pairs, margins, held, levels(runs)))


def margin(runs: Columns, variant: str, other: str, x: float, measure: str) -> tuple[float, float]:
    """The mean difference of the two seed by seed, and half of its 95% interval (Student's t)."""
    mine, theirs = here(runs, variant, x), here(runs, other, x)
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
    values = runs[measure][here(runs, variant, x)]
    worst = -np.inf if measure in HIGHER else np.inf
    return float(worst if np.isnan(values).any() or not len(values) else values.mean())


def levels(columns: Columns) -> np.ndarray:
    """The values of the sweep in rising order; a single nan without one."""
    return np.unique(columns["x"])


def here(columns: Columns, variant: str, x: float) -> np.ndarray:
    """The rows of a variant at a value, as a mask."""
    same = np.isnan(columns["x"]) if np.isnan(x) else columns["x"] == x
    return (columns["variant"] == variant) & same


def _by_how_much(
    pairs: np.ndarray, margins: Sequence[tuple[float, float]], held: np.ndarray, values: np.ndarray
) -> str:
    told = [
        f"{_said(a)} against {_said(b)}" + ("" if np.isnan(by) else f" ({by:+.2g} ± {half:.2g})")
        for (a, b), (by, half) in zip(pairs, margins, strict=True)
    ]
    several = len(told) > 1
    places = [f"{text} at {x:g}" if several else text for text, x in zip(told, values, strict=True)]
    count = f"{held.sum()} of {len(held)} values: " if several else ""
    return count + "; ".join(places) + _clear(np.array(margins))


def _clear(margins: np.ndarray) -> str:
    """How many of the differences [x, (mean, half of its interval)] the seeds can tell from 0."""
    known = margins[~np.isnan(margins).any(axis=1)]
    if not len(known):
        return ""
    clear = int((np.abs(known[:, 0]) > known[:, 1]).sum())
    return f"; ± is 95%, paired by seed: {clear} of {len(known)} clear of 0"


def _said(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "diverged"


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
    found, told = [], []
    for x in levels(runs):
        times = _times(better, than, runs, curves, float(x))
        reached = np.isfinite(times[:, 0])
        if not len(times):
            return Claim(sentence, None, f"{than} diverged")
        mine, theirs = times[reached].mean(axis=0) if reached.any() else (np.nan, np.nan)
        found.append(bool(reached.all() and mine < theirs))
        place = "" if np.isnan(x) else f" at {x:g}"
        told.append(f"{reached.sum()} of {len(times)} runs get there{place}" + (
            f", after {mine:.3g} s against {theirs:.3g} s" if reached.any() else ""))  # fmt: skip
    return Claim(sentence, all(found), "; ".join(told))


def _times(better: str, than: str, runs: Columns, curves: Columns, x: float) -> np.ndarray:
    """Seconds until each reaches the terminal train loss of `than`, [seeds, 2]; inf for never."""
    mine, theirs = here(curves, better, x), here(curves, than, x)
    found = []
    for seed in np.unique(curves["seed"][theirs]):
        goal = runs["train_loss"][here(runs, than, x) & (runs["seed"] == seed)]
        if len(goal) == 1 and not np.isnan(goal[0]):
            found.append([
                _first(curves, part & (curves["seed"] == seed), goal[0]) for part in (mine, theirs)
            ])  # fmt: skip
    return np.array(found).reshape(-1, 2)


def _first(curves: Columns, rows: np.ndarray, goal: float) -> float:
    """The first moment at which the train loss is at or below the goal."""
    reached = rows & (curves["train_loss"] <= goal)
    return float(curves["train_seconds"][reached].min(initial=np.inf))
