"""Estimates with their intervals, the verdict on a claim, and what would decide an open one.

Verdicts
--------
A claim is about K places (settings, sizes, runs). At place k the data leave a 95% interval I_k for
an effect, and a longer one, J_k: all J_k together are right 95 times in 100 (Bonferroni). The rule
accepts the effects of a set A, an interval of the line. The claim

    holds          if every I_k lies in A,
    refuted        if some J_k has no point of A,
    inconclusive   otherwise: the data allow both.

It is `not tested here` if an effect was seen without an interval (one seed), or if
nothing was learned that could be compared. What was counted, or computed without chance, is its own
interval. A false claim holds with a chance of at most 1/20: at a place where its effect is not in
A, I_k must miss it. A true claim is refuted with at most that chance, as some J_k must miss its
effect.

Next steps
----------
An open claim gets the command that would decide it, at full scale or with more seeds, or the reason
why nothing shipped decides it. The interval of n seeds is Student's: it shrinks like
t(n) / sqrt(n), where t(n) is the quantile at 97.5% with n - 1 degrees of freedom. An effect that is
known up to h, at distance d from the end of its rule, needs the n that makes it d / h as long.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from fedmuon.analysis.report import tables
from fedmuon.analysis.report.numbers import interval, number, quantity, written
from fedmuon.analysis.report.tables import Columns
from fedmuon.core.files import finite

NORMAL = 1.96  # of a 95% interval, where the error itself is known


@dataclass(frozen=True)
class Slope:
    """A fitted slope, or another estimate, and its 95% interval.

    `free` are the degrees of freedom of Student's interval; infinite if the error itself is known.
    """

    value: float
    low: float
    high: float
    free: float = math.inf

    def __str__(self) -> str:
        """`−0.244 (−0.251 to −0.237)`."""
        value, low, high = (written(one, "+.3f") for one in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def half_width(error: ArrayLike, free: ArrayLike, many: int = 1) -> Any:
    """Half of Student's 95% interval of an estimate with that standard error.

    Args:
        error: Standard error.
        free: Its degrees of freedom.
        many: Number of intervals that shall be right together, 95 times in 100 (Bonferroni).
    """
    return student.ppf(1 - 0.025 / many, free) * error


def log_slope(sizes: ArrayLike, runs: Sequence[np.ndarray]) -> Slope:
    """The least-squares slope of log mean(runs[k]) on log sizes[k].

    It is sum_k w_k log mean_k with w = (x - x_mean) / ||x - x_mean||^2, so its variance is
    sum_k w_k^2 s_k^2 / (n_k mean_k^2) to first order: the seeds of one size are independent of
    those of another.
    """
    x = np.log(np.asarray(sizes, dtype=float))
    centred = x - x.mean()
    weights = centred / (centred @ centred)
    means = np.array([values.mean() for values in runs])
    errors, counts = _errors(runs)
    return _within(weights @ np.log(means), weights * errors / means, counts)


def quotient(above: np.ndarray, below: np.ndarray) -> Slope:
    """mean(above) / mean(below) of independent runs and its 95% interval, to first order."""
    means = np.array([above.mean(), below.mean()])
    value = means[0] / means[1]
    errors, counts = _errors([above, below])
    return _within(value, value * errors / means, counts)


def _within(value: float, errors: np.ndarray, counts: np.ndarray) -> Slope:
    """A function of K means of independent runs, whose errors [K] add in squares, and its interval.

    It is Student's with 1 / (sum_k q_k^2 / (n_k - 1)) degrees of freedom, for n_k runs and the
    share q_k of mean k in the variance (Welch 1947).
    """
    error = np.linalg.norm(errors)
    shares = (errors / error) ** 2 if error else np.full(len(counts), 1 / len(counts))
    free = float(1 / (shares**2 / (counts - 1)).sum())
    half = half_width(error, free)
    return Slope(float(value), float(value - half), float(value + half), free)


def _errors(runs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Standard errors of the means, and how many runs each has; nan for a single run."""
    counts = np.array([len(values) if len(values) > 1 else np.nan for values in runs])
    spread = [values.std(ddof=1) if len(values) > 1 else np.nan for values in runs]
    return np.array(spread) / np.sqrt(counts), counts


@dataclass
class Curve:
    """Runs by size: K sizes in rising order, and the values of the seeds at each.

    Attributes:
        means: Mean at each size, [K].
        reach: Half of the width of the mean's 95% interval, [K].
    """

    sizes: np.ndarray
    runs: Sequence[np.ndarray]
    means: np.ndarray = field(init=False)
    reach: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        errors, counts = _errors(self.runs)
        self.means = np.array([values.mean() for values in self.runs])
        self.reach = half_width(errors, counts - 1)

    @property
    def slope(self) -> Slope:
        """The slope over all sizes."""
        return log_slope(self.sizes, self.runs)

    @property
    def late(self) -> Slope:
        """The slope over the larger half of the sizes, where lower orders matter less."""
        first = (len(self.sizes) - 1) // 2
        return log_slope(self.sizes[first:], self.runs[first:])


def curve(rows: Columns, size: str, value: str, **where: str | float) -> Curve:
    """Collect a column of the rows that have these entries, by size."""
    chosen = tables.where(rows, **where)
    sizes = np.unique(chosen[size])
    return Curve(sizes, [chosen[value][chosen[size] == one] for one in sizes])


def paired(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean of a - b over pairs, and half of its 95% interval (Student's t); nan for one pair."""
    away = np.array([one - other for one, other in pairs])
    if len(away) < 2 or not np.isfinite(away).all():
        return np.nan, np.nan
    half = half_width(away.std(ddof=1) / np.sqrt(len(away)), len(away) - 1)
    return round(float(away.mean()), 12), float(half)


def by_seed(
    runs: Columns, measure: str, rows: np.ndarray, others: np.ndarray
) -> tuple[float, float]:
    """Mean difference between two sets of rows, paired by seed, and half of its interval."""
    one, other = (dict(zip(runs["seed"][part].tolist(), runs[measure][part].tolist(), strict=True))
                  for part in (rows, others))  # fmt: skip
    return paired([(one[seed], other[seed]) for seed in one if seed in other])


def free_of_seeds(runs: Columns) -> float:
    """Degrees of freedom of a mean difference that is paired by seed."""
    return max(1.0, len(np.unique(runs["seed"])) - 1.0)


def mean_of(values: np.ndarray) -> Slope:
    """Mean of independent runs and its 95% interval (Student's t); nan for a single run."""
    value, half = float(values.mean()), paired([(float(one), 0.0) for one in values])[1]
    return Slope(value, value - half, value + half, len(values) - 1.0)


POINTS = "accuracy points"  # hundredths; an accuracy is computed as a share
Verdict = Literal["holds", "refuted", "inconclusive", "not tested here"]
HOLDS, REFUTED, INCONCLUSIVE, UNTESTED = VERDICTS = get_args(Verdict)
MEANINGS: dict[str, str] = {  # the one definition; pages and reports print it
    HOLDS: "Every 95% interval lies inside the range of effects that the claim allows.",
    REFUTED: "At least one interval lies outside that range, also after a correction for the "
    "number of comparisons (Bonferroni).",
    INCONCLUSIVE: "The data allow both: an interval reaches into the range and out of it.",
    UNTESTED: "Nothing here can decide it. For example, there is only one seed, the models learned "
    "nothing that could be compared, or no outcome could exceed the bound.",
}
FORMER = {"fails": REFUTED, "undecided": INCONCLUSIVE, "not testable at this scale": UNTESTED}
SCOPE = (
    "Each verdict is about the sentence beside it, with the data, model and scale that the suite "
    "used. It is not a verdict on a paper. The page of each paper compares the two settings."
)
ONE_OF_MANY = (
    "an interval lies outside the allowed range, but one of many may do so by chance: intervals "
    "that are right together in 95% of cases are {} times as long"
)


@dataclass(frozen=True)
class Rule:
    """The effects that support a claim: from `low` to `high`, without the ends if `strict`."""

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def accepts(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Whether each interval lies inside the rule."""
        above, below = (low > self.low, high < self.high) if self.strict else (
            low >= self.low, high <= self.high)  # fmt: skip
        return (above | math.isinf(self.low)) & (below | math.isinf(self.high)) & (low <= high)

    def refuses(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Whether each interval lies outside the rule."""
        below, above = (high <= self.low, low >= self.high) if self.strict else (
            high < self.low, low > self.high)  # fmt: skip
        return (below & math.isfinite(self.low)) | (above & math.isfinite(self.high))

    def __str__(self) -> str:
        """`≤ 1`, `> 0`, `−0.1 to 0.1`."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return interval(self.low, self.high)
        if math.isfinite(self.low):
            return f"{'>' if self.strict else '≥'} {number(self.low)}"
        return f"{'<' if self.strict else '≤'} {number(self.high)}"


AT_MOST_ONE, ALL = Rule(high=1.0), Rule(low=1.0)
POSITIVE, NEGATIVE = Rule(low=0.0, strict=True), Rule(high=0.0, strict=True)


@dataclass(frozen=True)
class Effect:
    """Effects at K places, each with its interval.

    Attributes:
        name: What it is, in words.
        value: The effect at each place, [K]; nan where it is unknown.
        low: Lower ends of the intervals, [K].
        high: Upper ends of the intervals, [K].
        places: Names of the places.
        seeded: Whether more seeds would shorten the intervals.
        free: Degrees of freedom of the intervals, one number or [K]; infinite where the error
            itself is known.
        exponential: Whether an interval that fails with chance d is a sqrt(l) + b l long, where
            l = ln(3 / d), as that of a gap is (`fedmuon.analysis.theory.generalization`).
        unit: What it is counted in: `POINTS`, "loss", "ratio", "slope", "s"; "" for a pure number.
    """

    name: str
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    places: Sequence[str] = ()
    seeded: bool = True
    free: float | np.ndarray = math.inf
    unit: str = ""
    exponential: bool = False

    @cached_property
    def longer(self) -> np.ndarray:
        """Factors by which intervals that are right together (Bonferroni) are longer, [K]."""
        many = max(1, int((self.low < self.high).sum()))
        if self.exponential:  # no a sqrt(l) + b l grows faster than l
            factor = math.log(3 * many / 0.05) / math.log(3 / 0.05)
        else:
            factor = half_width(1.0, self.free, many) / half_width(1.0, self.free)
        return np.broadcast_to(factor, self.value.shape)

    @property
    def together(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of these longer intervals, [K] each."""
        with np.errstate(invalid="ignore"):  # what is infinite is its own interval
            ends = [self.value + self.longer * (end - self.value) for end in (self.low, self.high)]
        low, high = (np.where(self.low == self.high, self.low, end) for end in ends)
        return low, high

    def in_unit(self, at: int) -> list[float]:
        """The effect at a place and the ends of its interval, in its unit."""
        times = 100.0 if self.unit == POINTS else 1.0
        return [times * float(one[at]) for one in (self.value, self.low, self.high)]

    @classmethod
    def exact(
        cls, name: str, values: ArrayLike, places: Sequence[str] = (), unit: str = ""
    ) -> "Effect":
        """Make an effect that was counted, or computed without chance."""
        found = np.atleast_1d(np.asarray(values, dtype=float))
        return cls(name, found, found, found, places, seeded=False, unit=unit)

    @classmethod
    def around(
        cls, name: str, values: ArrayLike, reach: ArrayLike, places: Sequence[str] = (),
        free: float | np.ndarray = math.inf, unit: str = "",
    ) -> "Effect":  # fmt: skip
        """Make an effect from values ± reach; an infinite value (divergence) has no interval."""
        found = np.atleast_1d(np.asarray(values, dtype=float))
        half = np.where(np.isinf(found), 0.0, np.asarray(reach, dtype=float))
        with np.errstate(invalid="ignore"):
            return cls(name, found, found - half, found + half, places, free=free, unit=unit)

    @classmethod
    def between(cls, name: str, found: Mapping[str, Any], unit: str = "") -> "Effect":
        """Make an effect from estimates with `value`, `low` and `high`, by place."""
        ends = np.array([(one.value, one.low, one.high) for one in found.values()]).reshape(-1, 3)
        free = np.array([one.free for one in found.values()])
        return cls(name, *ends.T, places=list(found), free=free, unit=unit)

    @classmethod
    def of_gaps(
        cls, gap: np.ndarray, low: np.ndarray, high: np.ndarray, bound: np.ndarray
    ) -> "Effect":
        """Make an effect from measured gaps with the ends of their intervals, and their bounds."""
        ends = gap - bound, low - bound, high - bound
        return cls("gap − bound", *ends, seeded=False, unit="loss", exponential=True)


@dataclass(frozen=True)
class Claim:
    """One sentence with its verdict.

    Attributes:
        sentence: What is claimed.
        effect: What was measured.
        rule: The effects that support the claim.
        detail: The effect at every place, in words.
        also: What a reader must know besides the verdict.
        limit: Why these runs cannot test the claim, if so.
        changes: Values for `--set` that shorten its intervals.
        command: The command that would decide it.
    """

    sentence: str
    effect: Effect
    rule: Rule
    detail: str = ""
    also: str = ""
    limit: str = ""
    changes: Sequence[str] = field(default=(), kw_only=True)
    command: str = field(default="", kw_only=True)

    @cached_property
    def verdict(self) -> Verdict:
        """See the top of this file; a claim with an unknown effect is `inconclusive`."""
        effect, known = self.effect, ~np.isnan(self.effect.value)
        if self.limit:
            return UNTESTED
        if self.rule.refuses(*effect.together).any():
            return REFUTED
        if len(known) and self.rule.accepts(effect.low, effect.high).all():
            return HOLDS
        without = known & np.isnan(effect.low + effect.high)
        return UNTESTED if without.any() else INCONCLUSIVE

    @property
    def why(self) -> str:
        """Why these runs cannot test the claim, or an interval does not decide it, if so."""
        if (
            self.verdict == INCONCLUSIVE
            and self.rule.refuses(self.effect.low, self.effect.high).any()
        ):
            return ONE_OF_MANY.format(number(float(self.effect.longer.max()), 3))
        return self.limit or "there is no interval" * (self.verdict == UNTESTED)

    @property
    def holds(self) -> bool | None:
        """True or False if it is decided, else None."""
        return {HOLDS: True, REFUTED: False}.get(self.verdict)

    @cached_property
    def worst(self) -> int | None:
        """Index of the place that reaches furthest out of the rule.

        If some places refute the claim, it is one of them. An open claim names the first place
        without an interval.
        """
        effect = self.effect
        against = self.rule.refuses(*effect.together) | (self.verdict != REFUTED)
        known = np.flatnonzero(~np.isnan(effect.value) & against)
        if not len(known):
            return None
        low, high = effect.low[known], effect.high[known]
        with np.errstate(invalid="ignore"):  # how far inside the rule; negative if outside
            ends = [self.rule.high - high] * math.isfinite(self.rule.high)
            ends += [low - self.rule.low] * math.isfinite(self.rule.low)
        room = np.min(ends, axis=0)
        if (open_ := np.isnan(room)).any() and self.holds is None:
            return int(known[open_.argmax()])
        beyond = -high if math.isfinite(self.rule.high) else low  # where room rounds to the same
        return int(known[np.lexsort((beyond, room))[0]])

    @property
    def shown(self) -> tuple[str, str]:
        """The effect at the worst place in words, and its interval if it has one."""
        effect, at = self.effect, self.worst
        if at is None:
            return "", ""
        where = f", {effect.places[at]}" if len(effect.places) > 1 else ""
        value, low, high = effect.in_unit(at)
        ends = "" if low == high else interval(low, high)
        return f"{effect.name}{where}: {quantity(value, effect.unit)}", ends

    @property
    def accepted(self) -> str:
        """The rule, in the effect's unit."""
        times = 100.0 if self.effect.unit == POINTS else 1.0
        return str(replace(self.rule, low=times * self.rule.low, high=times * self.rule.high))

    @property
    def in_words(self) -> str:
        """Reason, details and notes in one line."""
        return "; ".join(one for one in (self.why, self.detail, self.also) if one)

    def record(self) -> dict[str, Any]:
        """The claim's entry in claims.json, with the effect at the worst place."""
        effect, at = self.effect, self.worst
        held = self.rule.accepts(effect.low, effect.high)
        ends = [None] * 3 if at is None else map(finite, effect.in_unit(at))
        numbers = dict(zip(("value", "low", "high"), ends, strict=True))
        place = effect.places[at] if at is not None and effect.places else ""
        return {
            "claim": self.sentence, "verdict": self.verdict,
            "effect": {"name": effect.name, "unit": effect.unit, **numbers, "at": place},
            "places": len(held), "held": int(held.sum()), "rule": self.accepted,
            "command": self.command, "detail": self.detail, "also": self.also, "why": self.why,
        }  # fmt: skip


def current(word: str) -> str:
    """The verdict by its present name: results of earlier versions have other words."""
    return FORMER.get(word, word)


def counted(sentence: str, held: ArrayLike, what: str, detail: str = "") -> Claim:
    """Make a claim that holds if it is true in every one of these cases."""
    cases = np.atleast_1d(np.asarray(held, dtype=float))
    share = cases.mean() if len(cases) else np.nan
    effect = Effect.exact(f"share of the {what} in which it holds", share, unit="ratio")
    return Claim(sentence, effect, ALL, detail)


def unknown(sentence: str, why: str) -> Claim:
    """Make a claim about which nothing was measured, with the reason."""
    return Claim(sentence, Effect.exact("", np.nan), ALL, why)


def counts(claims: Iterable[Claim]) -> dict[Verdict, int]:
    """Number of claims by verdict, in the order of `VERDICTS`."""
    found = Counter(claim.verdict for claim in claims)
    return {one: found[one] for one in VERDICTS}


def tally(claims: Sequence[Claim], data: str = "") -> str:
    """`5 of 8 claims hold on digits; 1 is refuted, 2 are inconclusive`."""
    if not claims:
        return f"Measured on {data}; nothing is claimed" if data else "nothing is claimed"
    found = counts(claims)
    held, where = found[HOLDS], f" on {data}" if data else ""
    rest = [f"{found[one]} {'are' if found[one] > 1 else 'is'} {one}"
            for one in VERDICTS if one != HOLDS and found[one]]  # fmt: skip
    head = f"{held} of {len(claims)} claims {'holds' if held == 1 else 'hold'}{where}"
    return "; ".join([head, ", ".join(rest)] if rest else [head])


NOTHING = "no shipped suite can decide it: {}"
SHORT = "This change shortens the interval, but may not decide."
FEW = 5  # seeds, of which an interval can be seen
MARGIN, MOST = 1.5, 100  # of the variance, as effects are guesses; times as many as one would run


def with_range(claim: Claim, about: Mapping[str, Any]) -> Claim:
    """Return the claim about a gap with what a record says about the length of its interval.

    Changes that shorten the interval are named if these runs would decide with them, or if there is
    a larger scale.
    """
    notes, changes = about.get("gap_notes", []), tuple(about.get("gap_changes", ()))
    useful = bool(changes) and claim.holds is None and not claim.limit
    then = {current(one) for one in about.get("gap_then", ())}
    # One of many may be refuted by chance, so all must hold or all must be refuted.
    decides = then - {UNTESTED} == {HOLDS} or then == {REFUTED}
    why = " ".join([*notes, *[SHORT] * (useful and not decides)])
    also = "; ".join(filter(None, (claim.also, why)))
    named = useful and (decides or about.get("scale") == "small")
    return replace(claim, also=also, changes=changes if named else ())


def with_command(claim: Claim, about: Mapping[str, Any], folder: Path | None = None) -> Claim:
    """Return the claim of a suite with the command that would decide it, or the reason for none.

    Args:
        claim: The claim.
        about: The suite's suite.json.
        folder: The suite's folder; it is resumed with more seeds where that is possible. Otherwise
            the command writes a new folder.
    """
    if claim.verdict in (HOLDS, REFUTED) or not str(about["again"]).startswith("fedmuon suite "):
        return claim
    words = of_all_seeds(shlex.split(about["again"]))
    words += [word for change in claim.changes for word in ("--set", change)]
    if about["scale"] == "small" or claim.changes:
        end = "full" if about["scale"] == "small" else "shorter"
    else:
        seeds, effect, end = about.get("seeds"), claim.effect, "more"
        many = len(seeds) if isinstance(seeds, list) else int(seeds or 0)
        known, times, why = np.isfinite(effect.value), times_as_many(claim, many), ""
        if np.isnan(effect.value).any():
            why = "an effect of it could not be measured"
        elif not (seeds and effect.seeded):
            why = "more seeds would not shorten its interval"
        elif math.isinf(times) and np.isnan(effect.high[known] - effect.low[known]).any():
            why = "its interval is not known"
        elif times > MOST:
            why = f"it takes more than {MOST:g} times as many seeds"
        if why:
            return replace(claim, also="; ".join(filter(None, (claim.also, NOTHING.format(why)))))
        words += ["--seeds", str(math.ceil(many * times))]
        if folder is not None and about.get("kind") == "training" and seeds == [*range(many)]:
            return replace(claim, command=shlex.join([*words, "--out", str(folder), "--resume"]))
    words[words.index("--scale") + 1] = "full"
    words += ["--out", f"runs/{about['suite']}-{end}"]
    return replace(claim, command=shlex.join(words))


def times_as_many(claim: Claim, seeds: int) -> float:
    """Factor of seeds that would leave every interval on one side of its rule's ends."""
    effect, rule = claim.effect, claim.rule
    if np.isnan(effect.value).any() or not seeds:
        return math.inf
    with np.errstate(invalid="ignore"):  # an infinite effect is beyond doubt
        beyond = claim.rule.refuses(effect.low, effect.high)  # decides where longer ones do
        longer = np.where(beyond, effect.longer, 1.0)
        half = np.where(np.isinf(effect.value), 0.0, longer * (effect.high - effect.low) / 2)
    if np.isnan(half).any():
        return FEW / seeds if effect.seeded and seeds < FEW else math.inf
    ends = [end for end in (rule.low, rule.high) if math.isfinite(end)]
    near = np.min([np.abs(effect.value - end) for end in ends], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shorter = np.where(half > near, half / near, 0.0).max()
    many = np.arange(seeds, MOST * seeds + 1)
    free = np.where(many > 1, many - 1.0, np.inf)  # a single seed's interval is not over seeds
    width = half_width(1 / np.sqrt(many), free)  # t(n) / sqrt(n)
    enough = width * math.sqrt(MARGIN) * shorter <= width[0]
    return float(many[enough.argmax()] / seeds) if enough.any() else math.inf


def of_all_seeds(words: list[str]) -> list[str]:
    """The words without `--seed N` or `--seeds N`, which override the file's seeds."""
    for option in {"--seed", "--seeds"}.intersection(words):
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    return words
