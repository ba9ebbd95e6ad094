"""Claims that compare variants by their final results, their training times, or along a sweep.

The data are runs.csv and curves.csv. Both tables have the columns `variant`, `x` and `seed`, and
one column per measure. The column `x` contains the swept value, or nan if nothing is swept. A run
that diverged has nan as its last value and counts as infinitely bad.

The effect of a claim is a mean difference between two variants, with Student's interval. The
differences are paired by seed. A single seed gives no interval and cannot test a claim. If neither
of the two variants predicts better than random guesses, the claim is not tested either.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedmuon.analysis.report.numbers import number, written
from fedmuon.analysis.report.tables import Columns, Rows
from fedmuon.analysis.report.verdicts import (
    NEGATIVE,
    POINTS,
    POSITIVE,
    Claim,
    Effect,
    Rule,
    by_seed,
    free_of_seeds,
    paired,
    unknown,
)

HIGHER = ("accuracy", "validation_accuracy")  # measures for which a higher value is better
NAMES = {"test_gap": "test minus train loss", "train_seconds": "seconds of training",
         "epsilon": "certified ε"}  # fmt: skip
UNITS = {"train_loss": "loss", "test_loss": "loss", "test_gap": "loss", "accuracy": POINTS,
         "seconds": "s", "train_seconds": "s"}  # fmt: skip


def judge(
    claim: Mapping[str, Any], runs: Columns, curves: Columns, label: str = "", chance: float = 0.0
) -> Claim:
    """Compute one claim of a suite file from the results of the runs.

    Args:
        claim: The claim's table in the suite file.
        runs: Columns of runs.csv.
        curves: Columns of curves.csv.
        label: Name of the swept key, or "" if nothing is swept.
        chance: Accuracy of random guesses, from `luck`. Two variants are compared only if at least
            one of them is more accurate.
    """
    if claim["kind"] in ("falling", "rising"):
        return trend(claim, runs, label)
    better, than = claim["better"], claim["than"]
    if claim["kind"] == "sooner":
        return sooner(better, than, runs, curves, claim["sentence"], label)
    if claim["kind"] == "near":
        args = claim["measure"], runs, claim["within"], claim["sentence"], label
        return near(better, than, *args, chance)
    return terminal(better, than, claim["measure"], runs, claim["sentence"], label, chance)


def name_of(measure: str) -> str:
    """Return the name of a measure as it appears in the report."""
    return NAMES.get(measure, measure.replace("_", " "))


def terminal(
    better: str, than: str, measure: str, runs: Columns, sentence: str = "", label: str = "",
    chance: float = 0.0,
) -> Claim:  # fmt: skip
    """Return the claim that one variant ends at least as well as another variant.

    The claim holds if `better` is at least as good as `than` at every value of the sweep. `measure`
    names the quantity that is compared at the end of training.
    """
    up = measure in HIGHER
    word, at = name_of(measure), f" at every {label}" if label else ""
    article, side = "an" if word[0] in "aeiou" else "a", "above" if up else "below"
    sentence = sentence or (f"{better} ends with {article} {word} at or {side} that of {than}{at}.")
    if measure not in runs:
        return unknown(sentence, f"no run measured {word}")
    pairs, differences, reach, guesses = _apart(better, than, measure, runs, chance)
    if not np.isfinite(pairs).any():
        return unknown(sentence, "both diverged")
    holds = np.isfinite(pairs[:, 0]) & ((differences >= 0) if up else (differences <= 0))
    effect = Effect.around(
        f"{word}, {better} − {than}", differences, reach, _at(runs, label), free_of_seeds(runs),
        unit=UNITS.get(measure, ""),
    )  # fmt: skip
    effect = replace(effect, seeded=not (guesses & np.isfinite(differences)).any())
    detail = _by_how_much(pairs, np.stack([differences, reach], 1), holds, levels(runs))
    rule = Rule(low=0.0) if up else Rule(high=0.0)
    return Claim(sentence, effect, rule, detail + _guessing(guesses, chance))


def near(
    better: str, than: str, measure: str, runs: Columns, within: float, sentence: str = "",
    label: str = "", chance: float = 0.0,
) -> Claim:  # fmt: skip
    """Return the claim that two variants end with nearly the same mean of a measure.

    The claim holds if, at every value of the sweep, the two means differ by at most `within` times
    the larger mean.
    """
    at = f" at every {label}" if label else ""
    word = name_of(measure)
    sentence = sentence or (
        f"{better} and {than} end with a {word} within {within:.0%} of each other{at}."
    )
    if measure not in runs:
        return unknown(sentence, f"no run measured {word}")
    pairs, differences, reach, guesses = _apart(better, than, measure, runs, chance)
    larger = np.abs(pairs).max(axis=1)
    with np.errstate(invalid="ignore"):
        share = np.where(np.isfinite(pairs).all(axis=1), differences / larger, np.inf)
        holds = np.abs(share) <= within
        effect = Effect.around(
            f"difference in {word}, divided by the larger value", share, reach / larger,
            _at(runs, label), free_of_seeds(runs), unit="ratio",
        )  # fmt: skip
    effect = replace(effect, seeded=not (guesses & np.isfinite(share)).any())
    detail = _by_how_much(pairs, np.stack([differences, reach], 1), holds, levels(runs))
    return Claim(sentence, effect, Rule(-within, within), detail + _guessing(guesses, chance))


def _apart(
    better: str, than: str, measure: str, runs: Columns, chance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compare the final values of two variants at each value of the sweep.

    Returns:
        Four arrays, with one row per value of the sweep. The first contains the final values of the
        two variants, and the second contains their difference. The third contains half the length
        of the interval of this difference, paired by seed. This half length is nan for a single
        seed, and where the fourth array is True. The fourth array is True where neither variant is
        more accurate than random guesses.
    """
    pairs, reach, guesses = [], [], []
    for x in levels(runs):
        pairs.append([ended(runs, name, x, measure) for name in (better, than)])
        better_rows, than_rows = (rows_of(runs, name, x) for name in (better, than))
        best = max(ended(runs, name, x, "accuracy") for name in (better, than))
        guesses.append(best <= chance)  # then more seeds would not yield an interval
        reach.append(
            np.nan if best <= chance else by_seed(runs, measure, better_rows, than_rows)[1]
        )
    ends = np.array(pairs)
    with np.errstate(invalid="ignore"):  # a difference of two infinities is unknown
        return ends, np.round(ends[:, 0] - ends[:, 1], 12), np.array(reach), np.array(guesses)


def _guessing(guesses: np.ndarray, chance: float) -> str:
    if not guesses.any():
        return ""
    places = f" at {int(guesses.sum())} of {len(guesses)} values" if len(guesses) > 1 else ""
    return (
        f"; neither variant is more accurate than a guess ({chance:.1%}){places}, so nothing is "
        "compared"
    )


def _at(runs: Columns, label: str) -> list[str]:
    return [f"{label} = {x:g}" for x in levels(runs)] if label else []


def ended(runs: Columns, variant: str, x: float, measure: str) -> float:
    """Return the mean over seeds of a measure at the end of training.

    If at least one run diverged, the result is the worst possible value, -inf or inf.
    """
    values = runs[measure][rows_of(runs, variant, x)]
    worst = -np.inf if measure in HIGHER else np.inf
    return float(worst if np.isnan(values).any() or not len(values) else values.mean())


def levels(columns: Columns) -> np.ndarray:
    """Return the swept values in increasing order, or a single nan if nothing is swept."""
    return np.unique(columns["x"])


def rows_of(columns: Columns, variant: str, x: float) -> np.ndarray:
    """Return a mask of the table rows that belong to a variant and a value of the sweep."""
    return (columns["variant"] == variant) & at_level(columns, x)


def at_level(columns: Columns, x: float) -> np.ndarray:
    """Return a mask of the table rows with the swept value x. If x is nan, rows with nan match."""
    return np.isnan(columns["x"]) if np.isnan(x) else columns["x"] == x


def _by_how_much(
    pairs: np.ndarray, margins: np.ndarray, holds: np.ndarray, values: np.ndarray
) -> str:
    """Describe the final values of two variants and their differences as text.

    `pairs` contains the two final values for each value of the sweep. `margins` contains the mean
    difference and half the length of its interval. The text also states how many intervals exclude
    0.
    """
    several, places = len(values) > 1, []
    for ends, (by, half), x in zip(pairs, margins, values, strict=True):
        first, second = (number(end) if np.isfinite(end) else "diverged" for end in ends)
        sure = "" if np.isnan(half) else f" ± {number(half, 2)}"
        difference = f" ({written(by, '+.2g')}{sure})" if np.isfinite(by) else ""
        places.append(f"{first} against {second}{difference}" + (f" at {x:g}" if several else ""))
    count = f"{holds.sum()} of {len(holds)} values: " if several else ""
    finite = margins[~np.isnan(margins).any(axis=1)]
    clear = int((np.abs(finite[:, 0]) > finite[:, 1]).sum())
    tail = (
        f"; ± is half of a 95% interval, paired by seed; {clear} of {len(finite)} intervals "
        "exclude 0"
        if len(finite)
        else ""
    )
    return count + "; ".join(places) + tail


def sooner(
    better: str, than: str, runs: Columns, curves: Columns, sentence: str = "", label: str = ""
) -> Claim:
    """Return the claim that `better` reaches the final train loss of `than` before `than` does.

    The claim holds if every run of `better` reaches this loss, and if the whole interval of the
    time difference is below 0. The time difference is a mean over seeds.
    """
    at = f" at every {label}" if label else ""
    sentence = sentence or (
        f"{better} reaches the terminal train loss of {than} in less training time{at}."
    )
    by, details = [], []
    for x in levels(runs):
        times = _times(better, than, runs, curves, float(x))
        reached = np.isfinite(times[:, 0])
        if not len(times):
            return unknown(sentence, f"{than} diverged")
        better_time, than_time = times[reached].mean(axis=0) if reached.any() else (np.nan, np.nan)
        difference = (
            (better_time - than_time, paired([*map(tuple, times)])[1])
            if reached.all()
            else (np.inf, 0.0)
        )
        by.append(difference)
        place = "" if np.isnan(x) else f" at {x:g}"
        after = (
            f", after {number(better_time, 3)} s against {number(than_time, 3)} s"
            if reached.any()
            else ""
        )
        details.append(f"{reached.sum()} of {len(times)} runs reach this loss{place}{after}")
    difference, reach = np.array(by).T
    effect = Effect.around(
        f"seconds, {better} − {than}",
        difference,
        reach,
        _at(runs, label),
        free_of_seeds(runs),
        unit="s",
    )
    return Claim(sentence, effect, NEGATIVE, "; ".join(details))


def _times(better: str, than: str, runs: Columns, curves: Columns, x: float) -> np.ndarray:
    """Return the seconds until each variant reaches the final train loss of `than`.

    The result has one row per seed and one column per variant. The time of a run that does not
    reach this loss is inf.
    """
    better_rows, than_rows = rows_of(curves, better, x), rows_of(curves, than, x)
    times = []
    for seed in np.unique(curves["seed"][than_rows]):
        goal = runs["train_loss"][rows_of(runs, than, x) & (runs["seed"] == seed)]
        if len(goal) == 1 and not np.isnan(goal[0]):
            low = (curves["seed"] == seed) & (curves["train_loss"] <= goal[0])
            moments = (curves["train_seconds"][low & part] for part in (better_rows, than_rows))
            times.append([seconds.min(initial=np.inf) for seconds in moments])
    return np.array(times).reshape(-1, 2)


def trend(claim: Mapping[str, Any], runs: Columns, label: str) -> Claim:
    """Return the claim that the final mean of a measure falls (or rises) along a sweep."""
    variant, measure, kind = claim["better"], claim["measure"], claim["kind"]
    word = name_of(measure)
    sentence = claim["sentence"] or (
        f"The {word} of {variant} is {'lower' if kind == 'falling' else 'higher'} "
        f"at every next {label}."
    )
    if measure not in runs:
        return unknown(sentence, f"no run measured {word}")
    values = levels(runs)
    ends = np.array([ended(runs, variant, x, measure) for x in values])
    along = ", ".join(f"{number(end)} at {x:g}" for end, x in zip(ends, values, strict=True))
    if len(ends) < 2 or not np.isfinite(ends).all():
        return unknown(sentence, along)
    reach = [by_seed(runs, measure, rows_of(runs, variant, after), rows_of(runs, variant, x))[1]
             for x, after in itertools.pairwise(values)]  # fmt: skip
    places = [f"from {x:g} to {after:g}" for x, after in itertools.pairwise(values)]
    effect = Effect.around(
        f"change of the {word}",
        np.diff(ends),
        reach,
        places,
        free_of_seeds(runs),
        unit=UNITS.get(measure, ""),
    )
    return Claim(sentence, effect, POSITIVE if kind == "rising" else NEGATIVE, along)


ABOVE = 0.05  # margin of `near_chance` above a guess's accuracy, or half that accuracy if smaller


def luck(classes: int, held_out: int) -> float:
    """Return an accuracy that random guesses rarely exceed.

    The result is the expected accuracy 1/classes plus three standard deviations of the accuracy on
    `held_out` samples. In the normal approximation, random guesses exceed this accuracy with a
    probability of about 0.1%.
    """
    guess = 1 / classes
    return float(guess + 3 * np.sqrt(guess * (1 - guess) / held_out))


def near_chance(accuracies: np.ndarray, classes: int, held_out: int) -> str:
    """Return a sentence that states how many runs are hardly more accurate than random guesses.

    The text is empty if there is no such run. A nan in `accuracies` stands for a run that diverged.
    """
    guess, finite = 1 / classes, accuracies[np.isfinite(accuracies)]
    near = finite[finite <= max(luck(classes, held_out), guess + min(ABOVE, guess / 2))]
    if classes < 2 or not len(near):
        return ""
    subject = "Every run" if len(near) == len(finite) else f"{len(near)} of {len(finite)} runs"
    subject += " that did not diverge" * (len(finite) < len(accuracies))
    ends = dict.fromkeys(number(end, 3) for end in (near.min(), near.max()))
    return (
        f"{subject} ended near chance, with an accuracy of {' to '.join(ends)}. A guess among "
        f"{classes} classes has an accuracy of {number(guess, 3)}."
    )


TIMETABLE = (
    "Train loss after seconds of training, interpolated between evaluations. A dash marks a time "
    "before the first or after the last evaluation"
)


def sweep_curves(curves: Columns, sweep: Mapping[str, Any]) -> tuple[Columns, Sequence[str]]:
    """Return the curves of a sweep, with each value of the sweep as a separate variant.

    Variants that are not part of the sweep keep their curves.

    Returns:
        The columns of the curves, and the names of their variants.
    """
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
    """Return a table of train losses at several times: its title, column names and rows.

    Each variant has one row. If the paper published losses of a variant, a second row contains the
    published losses.
    """
    times, published = about["times"], about["times"]["published"] or {"seconds": [], "losses": {}}
    moments = parts(curves, times["of"], times["parts"])
    blank = ["–"] * len(moments)
    head = ("variant", *(f"{number(moment, 3)} s" for moment in moments))
    rows: Rows = []
    if published["seconds"]:
        at = [f"at {second:g} s" for second in published["seconds"]]
        rows.append((about["source"], *(at + blank)[: len(moments)]))
    for variant in about["variants"]:
        losses = at_seconds(curves, variant, moments)
        rows.append((variant, *map(number, losses)))
        if reported := published["losses"].get(variant):
            losses = [*map(number, reported), *blank]
            rows.append((f"  {about['source']}", *losses[: len(moments)]))
    return TIMETABLE, head, rows


def parts(curves: Columns, variant: str, count: int) -> np.ndarray:
    """Divide the training time of the variant's shortest run into `count` equal parts.

    Returns:
        The end of each part in seconds. The last number is the end of the run.
    """
    of_variant = curves["variant"] == variant
    ends = [curves["train_seconds"][of_variant & (curves["seed"] == seed)].max()
            for seed in np.unique(curves["seed"][of_variant])]  # fmt: skip
    return np.linspace(0, np.min(ends), count + 1)[1:]  # the last entry is exactly the end


def at_seconds(curves: Columns, variant: str, moments: np.ndarray) -> np.ndarray:
    """Return the train loss at the given times in seconds, as a mean over seeds.

    The loss is interpolated linearly between evaluations. The loss is nan before the first and
    after the last evaluation.
    """
    of_variant, interpolated = curves["variant"] == variant, []
    for seed in np.unique(curves["seed"][of_variant]):
        rows = of_variant & (curves["seed"] == seed)
        order = np.argsort(curves["train_seconds"][rows])
        seconds, losses = (curves[name][rows][order] for name in ("train_seconds", "train_loss"))
        interpolated.append(np.interp(moments, seconds, losses, left=np.nan, right=np.nan))
    return np.mean(interpolated, axis=0)
