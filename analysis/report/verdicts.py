"""Estimates with intervals, verdicts on claims, and commands that would decide open claims.

Verdicts
--------
A claim is about K places. Each place is a setting, a size or a run. At place k the data determine a
95% interval I_k for an effect and a longer interval J_k. In 95% of cases, every J_k contains its
effect (Bonferroni). The rule of the claim accepts all effects in an interval A. The claim

    holds          if every I_k lies in A,
    refuted        if some J_k has no point in A,
    inconclusive otherwise.

A comparison of methods that were not tuned equally well is inconclusive instead of `holds` or
`refuted`. See `fedmuon.analysis.report.tuning`.

A claim is `not tested here` if an effect was measured without an interval (one seed), or if the
models learned nothing that could be compared. A value that was counted, or computed without
randomness, has an interval of length 0. A false claim gets the verdict `holds` with probability at
most 1/20. Some effect then lies outside A, and its interval I_k would have to miss it. A true claim
is refuted with probability at most 1/20, because some J_k would have to miss its effect.

A slope that was fitted to fewer than four runs at some size decides nothing, and its claim is
`inconclusive`. If the spread of the runs differs between sizes, intervals from two or three runs
are too short: they refute about 10% of true claims.

The interval of a rank correlation is Student's interval on Fisher's scale z = artanh(rho), so it
stays between -1 and 1. The longer intervals are computed on the same scale.

Each stored claim contains two p-values. `refuted` is the smallest error probability at which the
data refute the claim, for all its places together. `holds` is the smallest error probability at
which the claim holds. A verdict on k claims together compares k times the p-value with 0.05.

Next steps
----------
The report shows a command that would decide an open claim, at full scale or with more seeds. If no
built-in suite can decide the claim, the report shows the reason instead.

The required number of seeds n follows from the length of Student's interval, which is proportional
to t(n) / sqrt(n). Here t(n) is the 97.5% quantile of Student's distribution with n - 1 degrees of
freedom. Let the interval of an effect be its value ± h, and let d be the distance from the effect
to an end of the interval A. The claim needs an n for which the interval is d / h times as long.
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

FEWEST = 4  # runs of each size that a fitted slope needs to decide a claim
NORMAL = 1.96  # half-width of a 95% interval, in units of a known standard error


@dataclass(frozen=True)
class Slope:
    """An estimate, such as a fitted slope, with its 95% interval.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        free: Degrees of freedom of Student's interval, infinite if the standard error is known
            exactly.
        few: Whether there are too few runs for an interval that decides a claim.
        correlation: Whether the estimate is a correlation. Its interval is then symmetric on
            Fisher's scale.
    """

    value: float
    low: float
    high: float
    free: float = math.inf
    few: bool = False
    correlation: bool = False

    def __str__(self) -> str:
        """Return the estimate with its interval as text, such as `−0.244 (−0.251 to −0.237)`."""
        value, low, high = (written(x, "+.3f") for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def mean_with_interval(values: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean over the first axis, and both ends of Student's 95% interval of the mean.

    With one value, the mean has no interval, and all three results are equal.
    """
    runs = np.asarray(values, float)
    mean, count = runs.mean(0), len(runs)
    if count == 1:
        return mean, mean, mean
    half = half_width(runs.std(0, ddof=1) / np.sqrt(count), count - 1)
    return mean, mean - half, mean + half


def half_width(error: ArrayLike, free: ArrayLike, many: int = 1) -> Any:
    """Return half the length of Student's 95% interval of an estimate.

    Args:
        error: Standard error of the estimate.
        free: Degrees of freedom of the standard error.
        many: Number of intervals that must all be correct in 95% of cases (Bonferroni).
    """
    return student.ppf(1 - 0.025 / many, free) * error


def log_slope(sizes: ArrayLike, runs: Sequence[np.ndarray]) -> Slope:
    """Fit a line to log mean(runs[k]) as a function of log sizes[k], and return its slope.

    The fit uses least squares. The slope is sum_k w_k log mean_k with w = (x - x_mean) / ||x -
    x_mean||^2, where x are the logarithms of the sizes. Runs of different sizes are independent, so
    the variance of the slope is sum_k w_k^2 s_k^2 / (n_k mean_k^2) to first order. Here n_k runs
    have size k, and s_k is the standard deviation of their values. If a size has fewer than
    `FEWEST` runs, the slope decides no claim.
    """
    x = np.log(np.asarray(sizes, dtype=float))
    centred = x - x.mean()
    weights = centred / (centred @ centred)
    means = np.array([values.mean() for values in runs])
    errors, counts = _errors(runs)
    fitted = _within(weights @ np.log(means), weights * errors / means, counts)
    return replace(fitted, few=min(map(len, runs)) < FEWEST)


def quotient(above: np.ndarray, below: np.ndarray) -> Slope:
    """Return mean(above) / mean(below) with its 95% interval.

    The runs are independent. The interval is a first-order approximation.
    """
    means = np.array([above.mean(), below.mean()])
    value = means[0] / means[1]
    errors, counts = _errors([above, below])
    return _within(value, value * errors / means, counts)


def _within(value: float, errors: np.ndarray, counts: np.ndarray) -> Slope:
    """Return an estimate with its 95% interval. The estimate depends on K independent means.

    `errors` contains the contribution of each mean to the standard error. The variance of the
    estimate is the sum of the squares of these contributions. The interval is Student's interval
    with 1 / (sum_k q_k^2 / (n_k - 1)) degrees of freedom (Welch 1947). Here n_k is the number of
    runs of mean k, and q_k is the fraction of the variance that comes from mean k.
    """
    error = np.linalg.norm(errors)
    shares = (errors / error) ** 2 if error else np.full(len(counts), 1 / len(counts))
    free = float(1 / (shares**2 / (counts - 1)).sum())
    half = half_width(error, free)
    return Slope(float(value), float(value - half), float(value + half), free)


def _errors(runs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard error of the mean and the number of runs, for each group of runs.

    Both numbers are nan for a group of one run. The error is nan if a run of the group diverged.
    """
    counts = np.array([len(values) if len(values) > 1 else np.nan for values in runs])
    usable = [len(values) > 1 and np.isfinite(values).all() for values in runs]
    spread = [
        values.std(ddof=1) if is_usable else np.nan
        for values, is_usable in zip(runs, usable, strict=True)
    ]
    return np.array(spread) / np.sqrt(counts), counts


@dataclass
class Curve:
    """A measure at K sizes.

    Attributes:
        sizes: Array [K] of the sizes, in increasing order.
        runs: For each size, the values of all seeds.
        means: Array [K] of the means.
        reach: Array [K]. Each entry is half the length of the 95% interval of a mean.
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
        """The log-log slope of the measure over all sizes."""
        return log_slope(self.sizes, self.runs)

    @property
    def late(self) -> Slope:
        """The log-log slope over the larger half of the sizes.

        Lower-order terms matter less at large sizes.
        """
        first = (len(self.sizes) - 1) // 2
        return log_slope(self.sizes[first:], self.runs[first:])


def curve(rows: Columns, size: str, value: str, **where: str | float) -> Curve:
    """Group the values of the column `value` by the column `size`, and return them as a curve.

    Only rows that match `where` are used.
    """
    matches = tables.where(rows, **where)
    sizes = np.unique(matches[size])
    return Curve(sizes, [matches[value][matches[size] == x] for x in sizes])


def paired(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of a - b over pairs (a, b), and half the length of its 95% interval.

    The interval is Student's interval. Both results are nan if there are fewer than two pairs.
    """
    differences = np.array([a - b for a, b in pairs])
    if len(differences) < 2 or not np.isfinite(differences).all():
        return np.nan, np.nan
    half = half_width(differences.std(ddof=1) / np.sqrt(len(differences)), len(differences) - 1)
    return round(float(differences.mean()), 12), float(half)


def by_seed(
    runs: Columns, measure: str, rows: np.ndarray, others: np.ndarray
) -> tuple[float, float]:
    """Return the mean difference between two sets of runs, and half the length of its interval.

    The differences are paired by seed. The interval is a 95% interval.
    """
    left, right = (dict(zip(runs["seed"][part].tolist(), runs[measure][part].tolist(), strict=True))
                   for part in (rows, others))  # fmt: skip
    return paired([(left[seed], right[seed]) for seed in left if seed in right])


def free_of_seeds(runs: Columns) -> float:
    """Return the degrees of freedom of a mean difference that is paired by seed."""
    return max(1.0, len(np.unique(runs["seed"])) - 1.0)


def mean_of(values: np.ndarray) -> Slope:
    """Return the mean of the values of independent runs, with its 95% interval (Student's t).

    The ends of the interval are nan for a single run.
    """
    value, half = float(values.mean()), paired([(float(x), 0.0) for x in values])[1]
    return Slope(value, value - half, value + half, len(values) - 1.0)


def correlation(values: np.ndarray, items: int) -> Slope:
    """Return the mean of rank correlations of independent runs, with its 95% interval.

    Mean and interval are computed on Fisher's scale z = artanh(rho), so the interval stays between
    -1 and 1. Each correlation ranks `items` items.
    """
    z = on_fishers_scale(values, items)
    half = paired([(float(z_run), 0.0) for z_run in z])[1]
    return correlation_at(float(z.mean()), half, len(z) - 1.0)


def correlation_at(z: float, half: float, free: float) -> Slope:
    """Return the correlation tanh(z) with the interval from tanh(z - half) to tanh(z + half)."""
    value, low, high = (math.tanh(x) for x in (z, z - half, z + half))
    return Slope(value, low, high, free, correlation=True)


def on_fishers_scale(values: ArrayLike, items: int) -> np.ndarray:
    """Return z = artanh(rho) of rank correlations of `items` items.

    Without ties among n items, the next value below rho = 1 is 1 - 12/(n^3 - n). For a finite z,
    1 is replaced by the middle between this value and 1, and likewise for -1.
    """
    limit = 1 - 6 / (max(items, 3) ** 3 - max(items, 3))
    return np.arctanh(np.clip(np.asarray(values, dtype=float), -limit, limit))


POINTS = "accuracy points"  # hundredths; the code computes accuracies from 0 to 1
Verdict = Literal["holds", "refuted", "inconclusive", "not tested here"]
HOLDS, REFUTED, INCONCLUSIVE, UNTESTED = VERDICTS = get_args(Verdict)
MEANINGS: dict[str, str] = {  # the definition that all pages and reports show
    HOLDS: "Every 95% interval lies inside the range of effects that the claim allows.",
    REFUTED: (
        "At least one interval lies outside the range of effects that the claim allows, also "
        "after a correction for the number of comparisons (Bonferroni)."
    ),
    INCONCLUSIVE: (
        "At least one interval reaches outside the range of effects that the claim allows, but "
        "not clearly enough to refute the claim. Or the compared methods were not tuned equally "
        "well, for example because a best step size is at an end of its grid."
    ),
    UNTESTED: (
        "This suite cannot decide the claim. For example, there is only one seed, the models "
        "learned nothing that could be compared, or no outcome could exceed the bound."
    ),
}
FORMER = {"fails": REFUTED, "undecided": INCONCLUSIVE, "not testable at this scale": UNTESTED}
SCOPE = (
    "Each verdict is about the sentence next to it, with the data, model and scale that the "
    "suite used. It is not a verdict on a paper. The page of each paper compares the two "
    "settings."
)
TOO_FEW = f"fewer than {FEWEST} runs of a size: intervals of slopes would be too short"
ONE_OF_MANY = (
    "an interval lies outside the allowed range, but one interval of many may do so by chance: "
    "intervals that are all correct in 95% of cases are {} times as long"
)


@dataclass(frozen=True)
class Rule:
    """The range of effects that support a claim, from `low` to `high`.

    If `strict` is True, the ends `low` and `high` do not belong to the range.
    """

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def accepts(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """State, for each interval, whether this interval lies inside the range of the rule."""
        above, below = (low > self.low, high < self.high) if self.strict else (
            low >= self.low, high <= self.high)  # fmt: skip
        return (above | math.isinf(self.low)) & (below | math.isinf(self.high)) & (low <= high)

    def refuses(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """State, for each interval, whether it lies completely outside the rule's range."""
        below, above = (high <= self.low, low >= self.high) if self.strict else (
            high < self.low, low > self.high)  # fmt: skip
        return (below & math.isfinite(self.low)) | (above & math.isfinite(self.high))

    def __str__(self) -> str:
        """Return the rule as text, such as `≤ 1`, `> 0` or `−0.1 to 0.1`."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return interval(self.low, self.high)
        if math.isfinite(self.low):
            return f"{'>' if self.strict else '≥'} {number(self.low)}"
        return f"{'<' if self.strict else '≤'} {number(self.high)}"


AT_MOST_ONE, ALL = Rule(high=1.0), Rule(low=1.0)
POSITIVE, NEGATIVE = Rule(low=0.0, strict=True), Rule(high=0.0, strict=True)


@dataclass(frozen=True)
class Effect:
    """The measured effect that decides a claim, at K places, with an interval at each place.

    Attributes:
        name: Name of the effect, in words.
        value: Array [K] of the effects. An unknown effect is nan.
        low: Array [K] of the lower ends of the intervals.
        high: Array [K] of the upper ends of the intervals.
        places: Names of the places.
        seeded: Whether more seeds make the intervals shorter.
        free: Degrees of freedom of the intervals, one number or an array [K]. Use infinity if the
            standard error is known exactly.
        exponential: Whether the length of an interval is `a sqrt(l) + b l`. Here l is ln(3 / d),
            and d is the failure probability. The interval of a gap has this form
            (`fedmuon.analysis.theory.generalization`).
        unit: Unit of the effect: `POINTS`, "loss", "ratio", "slope" or "s". Use "" for a pure
            number.
        few: Whether there are too few runs for intervals that decide a claim.
        correlation: Whether the effects are correlations, with intervals on Fisher's scale.
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
    few: bool = False
    correlation: bool = False

    @cached_property
    def longer(self) -> np.ndarray:
        """Factors for the lengths of the intervals, as an array with one entry per place.

        Intervals that are longer by these factors are all correct in 95% of cases (Bonferroni).
        """
        count = max(1, int((self.low < self.high).sum()))
        if self.exponential:  # a sqrt(l) + b l grows at most in proportion to l
            factor = math.log(3 * count / 0.05) / math.log(3 / 0.05)
        else:
            factor = half_width(1.0, self.free, count) / half_width(1.0, self.free)
        return np.broadcast_to(factor, self.value.shape)

    @property
    def together(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the intervals after their lengths are multiplied by `longer`."""
        value, *ends = (self.scaled(values) for values in (self.value, self.low, self.high))
        with np.errstate(invalid="ignore"):  # an infinite effect is its own interval
            ends = [value + self.longer * (end - value) for end in ends]
        if self.correlation:
            ends = [np.tanh(end) for end in ends]
        low, high = (np.where(self.low == self.high, self.low, end) for end in ends)
        return low, high

    def scaled(self, effects: ArrayLike) -> np.ndarray:
        """Return effects on the scale on which the lengths of the intervals are multiplied."""
        with np.errstate(divide="ignore", invalid="ignore"):  # the ends of a rule are any numbers
            return np.arctanh(effects) if self.correlation else np.asarray(effects, dtype=float)

    def chance(self, ratio: np.ndarray) -> np.ndarray:
        """Return the error probability of intervals that are `ratio` times as long.

        The result is 1 where the ratio is not positive.
        """
        with np.errstate(over="ignore"):
            if self.exponential:  # as in `longer`
                chance = 3 * (0.05 / 3) ** ratio
            else:
                chance = 2 * student.sf(ratio * half_width(1.0, self.free), self.free)
        return np.where(ratio > 0, np.minimum(chance, 1.0), 1.0)

    def in_unit(self, at: int) -> list[float]:
        """Return the effect at a place and the ends of its interval, in the unit of the effect."""
        times = 100.0 if self.unit == POINTS else 1.0
        return [times * float(values[at]) for values in (self.value, self.low, self.high)]

    @classmethod
    def exact(
        cls, name: str, values: ArrayLike, places: Sequence[str] = (), unit: str = ""
    ) -> "Effect":
        """Make an effect that was counted, or computed without randomness."""
        array = np.atleast_1d(np.asarray(values, dtype=float))
        return cls(name, array, array, array, places, seeded=False, unit=unit)

    @classmethod
    def around(
        cls, name: str, values: ArrayLike, reach: ArrayLike, places: Sequence[str] = (),
        free: float | np.ndarray = math.inf, unit: str = "",
    ) -> "Effect":  # fmt: skip
        """Make an effect whose intervals are `values` plus or minus `reach`.

        An infinite value stands for a run that diverged, and has an interval of length 0.
        """
        middle = np.atleast_1d(np.asarray(values, dtype=float))
        half = np.where(np.isinf(middle), 0.0, np.asarray(reach, dtype=float))
        with np.errstate(invalid="ignore"):
            return cls(name, middle, middle - half, middle + half, places, free=free, unit=unit)

    @classmethod
    def between(cls, name: str, found: Mapping[str, Any], unit: str = "") -> "Effect":
        """Make an effect from estimates. `found` maps the name of each place to its estimate."""
        ends = np.array(
            [(estimate.value, estimate.low, estimate.high) for estimate in found.values()]
        ).reshape(-1, 3)
        free = np.array([estimate.free for estimate in found.values()])
        few = any(estimate.few for estimate in found.values())
        ranks = bool(found) and all(estimate.correlation for estimate in found.values())
        return cls(name, *ends.T, places=list(found), free=free, unit=unit, few=few,
                   correlation=ranks)  # fmt: skip

    @classmethod
    def of_gaps(
        cls, gap: np.ndarray, low: np.ndarray, high: np.ndarray, bound: np.ndarray
    ) -> "Effect":
        """Make the effect "gap - bound" from measured gaps, their intervals and their bounds."""
        ends = gap - bound, low - bound, high - bound
        return cls("gap − bound", *ends, seeded=False, unit="loss", exponential=True)


@dataclass(frozen=True)
class Claim:
    """A sentence with its verdict.

    Attributes:
        sentence: The claim.
        effect: The measured effect.
        rule: The range of effects that support the claim.
        detail: The effect at every place, in words.
        also: Further notes for the reader.
        limit: The reason why these runs cannot test the claim, or "" if they can.
        untuned: The reason why the methods were not tuned equally well, or "" if they were. Then
            the claim is neither `holds` nor `refuted` (see `fedmuon.analysis.report.tuning`).
        changes: Config changes that shorten the intervals, as arguments of `--set`.
        command: The command that would decide the claim.
    """

    sentence: str
    effect: Effect
    rule: Rule
    detail: str = ""
    also: str = ""
    limit: str = ""
    untuned: str = field(default="", kw_only=True)
    changes: Sequence[str] = field(default=(), kw_only=True)
    command: str = field(default="", kw_only=True)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the claim. The module docstring explains the rules.

        A claim whose effect is unknown is `inconclusive`.
        """
        decided = self._decided
        return INCONCLUSIVE if self.untuned and decided in (HOLDS, REFUTED) else decided

    @property
    def _decided(self) -> Verdict:
        """The verdict that the intervals give."""
        effect, measured = self.effect, ~np.isnan(self.effect.value)
        if self.limit:
            return UNTESTED
        if self.rule.refuses(*effect.together).any():
            return INCONCLUSIVE if effect.few else REFUTED
        if len(measured) and self.rule.accepts(effect.low, effect.high).all():
            return INCONCLUSIVE if effect.few else HOLDS
        without = measured & np.isnan(effect.low + effect.high)
        return UNTESTED if without.any() else INCONCLUSIVE

    @property
    def why(self) -> str:
        """The reason why these runs cannot test or decide the claim, or "" if none is known."""
        if self.verdict == INCONCLUSIVE and self.untuned:
            return self.untuned
        if self.verdict == INCONCLUSIVE and self.effect.few:
            return TOO_FEW
        if (
            self.verdict == INCONCLUSIVE
            and self.rule.refuses(self.effect.low, self.effect.high).any()
        ):
            return ONE_OF_MANY.format(number(float(self.effect.longer.max()), 3))
        return self.limit or "there is no interval" * (self.verdict == UNTESTED)

    @property
    def chances(self) -> dict[str, float]:
        """The p-values of the verdicts `refuted` and `holds`, as in the module docstring.

        They are 1 for a comparison of methods that were not tuned equally well.
        """
        if self.untuned:
            return {REFUTED: 1.0, HOLDS: 1.0}
        effect, (low, high) = self.effect, (self.rule.low, self.rule.high)
        exact = effect.low == effect.high
        below, value, above = (
            effect.scaled(values) for values in (effect.low, effect.value, effect.high)
        )
        out, within = np.ones_like(value), np.zeros_like(value)
        ends = [(effect.scaled(low), 1.0)] * math.isfinite(low)
        ends += [(effect.scaled(high), -1.0)] * math.isfinite(high)
        for end, sign in ends:
            with np.errstate(divide="ignore", invalid="ignore"):
                room = sign * (value - end)  # negative outside the range of the rule
                towards, opposite = (above - value, value - below)[:: int(sign)]
                out = np.fmin(out, effect.chance(-room / towards))
                within = np.maximum(within, effect.chance(room / opposite))
        out = np.where(exact, 1.0 - self.rule.refuses(effect.low, effect.high), out)
        within = np.where(exact, 1.0 - self.rule.accepts(effect.low, effect.high), within)
        factor = np.where(exact, 1, max(1, int((effect.low < effect.high).sum())))
        return {
            REFUTED: float(min(1.0, np.nan_to_num(factor * out, nan=1.0).min(initial=1.0))),
            HOLDS: float(np.nan_to_num(within, nan=1.0).max(initial=0.0 if len(within) else 1.0)),
        }

    @property
    def holds(self) -> bool | None:
        """True if the claim holds, False if the claim is refuted, and None otherwise."""
        return {HOLDS: True, REFUTED: False}.get(self.verdict)

    @cached_property
    def worst(self) -> int | None:
        """Index of the place whose interval lies furthest outside the range of the rule.

        If some places refute the claim, only these places are considered. If the claim is open and
        some places have no interval, the index is that of the first place without an interval.
        """
        effect = self.effect
        against = self.rule.refuses(*effect.together) | (self.verdict != REFUTED)
        places = np.flatnonzero(~np.isnan(effect.value) & against)
        if not len(places):
            return None
        low, high = effect.low[places], effect.high[places]
        with np.errstate(invalid="ignore"):  # distance inside the range; negative if outside
            ends = [self.rule.high - high] * math.isfinite(self.rule.high)
            ends += [low - self.rule.low] * math.isfinite(self.rule.low)
        room = np.min(ends, axis=0)
        if (open_ := np.isnan(room)).any() and self.holds is None:
            return int(places[open_.argmax()])
        beyond = -high if math.isfinite(self.rule.high) else low  # decides between equal rooms
        return int(places[np.lexsort((beyond, room))[0]])

    @property
    def shown(self) -> tuple[str, str]:
        """The effect at the worst place and its interval, as two texts.

        The second text is empty if the effect has no interval.
        """
        effect, at = self.effect, self.worst
        if at is None:
            return "", ""
        where = f", {effect.places[at]}" if len(effect.places) > 1 else ""
        value, low, high = effect.in_unit(at)
        ends = "" if low == high else interval(low, high)
        return f"{effect.name}{where}: {quantity(value, effect.unit)}", ends

    @property
    def accepted(self) -> str:
        """The range of effects that support the claim, as text in the unit of the effect."""
        times = 100.0 if self.effect.unit == POINTS else 1.0
        return str(replace(self.rule, low=times * self.rule.low, high=times * self.rule.high))

    @property
    def in_words(self) -> str:
        """The reason, details and notes of the claim, in one line."""
        return "; ".join(part for part in (self.why, self.detail, self.also) if part)

    def record(self) -> dict[str, Any]:
        """Return the entry of the claim for claims.json, with the effect at the worst place."""
        effect, at = self.effect, self.worst
        accepted = self.rule.accepts(effect.low, effect.high)
        ends = [None] * 3 if at is None else map(finite, effect.in_unit(at))
        numbers = dict(zip(("value", "low", "high"), ends, strict=True))
        place = effect.places[at] if at is not None and effect.places else ""
        return {
            "claim": self.sentence, "verdict": self.verdict,
            "effect": {"name": effect.name, "unit": effect.unit, **numbers, "at": place},
            "p": self.chances, "places": len(accepted), "held": int(accepted.sum()),
            "rule": self.accepted, "command": self.command, "detail": self.detail,
            "also": self.also, "why": self.why,
        }  # fmt: skip


def current(word: str) -> str:
    """Return the current name of a verdict. Results of earlier versions use other names."""
    return FORMER.get(word, word)


def counted(sentence: str, held: ArrayLike, what: str, detail: str = "") -> Claim:
    """Make a claim about counted cases, which holds if all entries of `held` are True."""
    cases = np.atleast_1d(np.asarray(held, dtype=float))
    share = cases.mean() if len(cases) else np.nan
    effect = Effect.exact(f"share of the {what} for which the claim holds", share, unit="ratio")
    return Claim(sentence, effect, ALL, detail)


def unknown(sentence: str, why: str) -> Claim:
    """Make a claim whose effect could not be measured. `why` is the reason."""
    return Claim(sentence, Effect.exact("", np.nan), ALL, why)


def counts(claims: Iterable[Claim]) -> dict[Verdict, int]:
    """Count the claims with each verdict, in the order of `VERDICTS`."""
    by_verdict = Counter(claim.verdict for claim in claims)
    return {verdict: by_verdict[verdict] for verdict in VERDICTS}


def tally(claims: Sequence[Claim], data: str = "") -> str:
    """Return a text such as `5 of 8 claims hold on digits; 1 is refuted, 2 are inconclusive`."""
    if not claims:
        return f"Measured on {data}; there are no claims" if data else "nothing is claimed"
    by_verdict = counts(claims)
    count, where = by_verdict[HOLDS], f" on {data}" if data else ""
    others = [f"{by_verdict[verdict]} {'are' if by_verdict[verdict] > 1 else 'is'} {verdict}"
              for verdict in VERDICTS if verdict != HOLDS and by_verdict[verdict]]  # fmt: skip
    head = f"{count} of {len(claims)} claims {'holds' if count == 1 else 'hold'}{where}"
    return "; ".join([head, ", ".join(others)] if others else [head])


NOTHING = "no built-in suite can decide this claim: {}"
SHORT = "This change makes the interval shorter, but may not decide the claim."
FEW = 5  # number of seeds to suggest if the intervals are unknown
# A factor on the variance, because the effects are only estimates; and the largest factor of seeds
# that is suggested.
MARGIN, MOST = 1.5, 100


def with_range(claim: Claim, about: Mapping[str, Any]) -> Claim:
    """Add notes on the length of the gap's interval to a claim about a gap.

    `about` contains the notes, and config changes that make the interval shorter. The changes are
    added if they would decide the claim with the same runs, or if the suite ran at the small scale.
    """
    notes, changes = about.get("gap_notes", []), tuple(about.get("gap_changes", ()))
    useful = bool(changes) and claim.holds is None and not claim.limit
    then = {current(verdict) for verdict in about.get("gap_then", ())}
    # A single verdict may be `refuted` by chance, so all must hold or all must be refuted.
    decides = then - {UNTESTED} == {HOLDS} or then == {REFUTED}
    note = " ".join([*notes, *[SHORT] * (useful and not decides)])
    also = "; ".join(filter(None, (claim.also, note)))
    suggest = useful and (decides or about.get("scale") == "small")
    return replace(claim, also=also, changes=changes if suggest else ())


def with_command(claim: Claim, about: Mapping[str, Any], folder: Path | None = None) -> Claim:
    """Add the command that would decide an open claim of a suite.

    If no built-in suite can decide the claim, the reason is added instead. A claim that is already
    decided does not change.

    Args:
        claim: The claim.
        about: Contents of the suite's suite.json.
        folder: The suite's folder. If possible, the command adds seeds to the suite in this folder.
            Otherwise, the command makes a new folder.
    """
    if claim.verdict in (HOLDS, REFUTED) or not str(about["again"]).startswith("fedmuon suite "):
        return claim
    words = of_all_seeds(shlex.split(about["again"]))
    if claim.untuned:
        command = f"fedmuon tune {shlex.quote(words[2])}"
        if (about.get("tuning") or {}).get("at", "") == "":
            searches = about.get("kind") != "training"  # the suite itself tries several step sizes
            cause = (
                "its grids of step sizes must change" if searches else "the suite has no [tuning]"
            )
            return replace(claim, also="; ".join(filter(None, (claim.also, NOTHING.format(cause)))))
        return replace(claim, command=command)
    words += [word for change in claim.changes for word in ("--set", change)]
    if about["scale"] == "small" or claim.changes:
        end = "full" if about["scale"] == "small" else "shorter"
    else:
        seeds, effect, end = about.get("seeds"), claim.effect, "more"
        count = len(seeds) if isinstance(seeds, list) else int(seeds or 0)
        measured, times, cause = np.isfinite(effect.value), times_as_many(claim, count), ""
        if np.isnan(effect.value).any():
            cause = "one of its effects could not be measured"
        elif not (seeds and effect.seeded):
            cause = "more seeds would not shorten the interval"
        elif math.isinf(times) and np.isnan(effect.high[measured] - effect.low[measured]).any():
            cause = "the length of the interval is unknown"
        elif times > MOST:
            cause = f"more than {MOST:g} times as many seeds are needed"
        if cause:
            return replace(claim, also="; ".join(filter(None, (claim.also, NOTHING.format(cause)))))
        words += ["--seeds", str(math.ceil(count * times))]
        if folder is not None and about.get("kind") == "training" and seeds == [*range(count)]:
            return replace(claim, command=shlex.join([*words, "--out", str(folder), "--resume"]))
    words[words.index("--scale") + 1] = "full"
    words += ["--out", f"runs/{about['suite']}-{end}"]
    return replace(claim, command=shlex.join(words))


def times_as_many(claim: Claim, seeds: int) -> float:
    """Return the factor by which the number of seeds must grow to decide the claim.

    With this number of seeds, no interval should contain an end of the rule's range. The factor is
    infinite if `MOST` times the number of seeds is not enough.
    """
    effect, rule = claim.effect, claim.rule
    if np.isnan(effect.value).any() or not seeds:
        return math.inf
    with np.errstate(invalid="ignore"):  # an infinite effect has no uncertainty
        beyond = claim.rule.refuses(effect.low, effect.high)  # here the longer intervals decide
        longer = np.where(beyond, effect.longer, 1.0)
        half = np.where(np.isinf(effect.value), 0.0, longer * (effect.high - effect.low) / 2)
    if np.isnan(half).any():
        return FEW / seeds if effect.seeded and seeds < FEW else math.inf
    ends = [end for end in (rule.low, rule.high) if math.isfinite(end)]
    near = np.min([np.abs(effect.value - end) for end in ends], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shorter = np.where(half > near, half / near, 0.0).max()
    n = np.arange(seeds, MOST * seeds + 1)
    free = np.where(n > 1, n - 1.0, np.inf)  # one seed: the interval is not over seeds
    width = half_width(1 / np.sqrt(n), free)  # t(n) / sqrt(n)
    enough = width * math.sqrt(MARGIN) * shorter <= width[0]
    return float(n[enough.argmax()] / seeds) if enough.any() else math.inf


def of_all_seeds(words: list[str]) -> list[str]:
    """Remove the options `--seed N` and `--seeds N`, which override the seeds of the suite file."""
    for option in {"--seed", "--seeds"}.intersection(words):
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    return words
