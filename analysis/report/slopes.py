"""Slopes on log-log axes, with the uncertainty that a finite number of seeds leaves in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from fedmuon.analysis.report import tables
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.tables import Columns

NORMAL = 1.96  # of a 95% interval, where the error itself is known


@dataclass(frozen=True)
class Slope:
    """A fitted slope, or another estimate, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """`−0.244 (−0.251 to −0.237)`."""
        value, low, high = (written(one, "+.3f") for one in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def half_width(error: ArrayLike, free: ArrayLike, many: int = 1) -> Any:
    """Half of Student's 95% interval of an estimate whose standard error has so many degrees of
    freedom; of so many estimates that are right together 95 times in 100."""
    return student.ppf(1 - 0.025 / many, free) * error


def fitted(sizes: ArrayLike, runs: Sequence[np.ndarray]) -> Slope:
    """The least-squares slope of log mean(runs[k]) on log sizes[k].

    It is sum_k w_k log mean_k with w = (x - x_mean) / ||x - x_mean||^2, so its variance is
    sum_k w_k^2 s_k^2 / (n_k mean_k^2) to first order: the seeds of one size are independent of
    those of another. The interval is Student's, see `_within`.
    """
    x = np.log(np.asarray(sizes, dtype=float))
    centred = x - x.mean()
    weights = centred / (centred @ centred)
    means = np.array([values.mean() for values in runs])
    return _within(weights @ np.log(means), weights * _errors(runs) / means, runs)


def _within(value: float, errors: np.ndarray, runs: Sequence[np.ndarray]) -> Slope:
    """The value whose errors [K], one from each mean of independent runs, add in squares, and its
    interval: Student's t with 1 / (sum_k q_k^2 / (n_k - 1)) degrees of freedom, where q_k is the
    share of mean k in the variance (Welch 1947)."""
    error = np.linalg.norm(errors)
    shares = (errors / error) ** 2 if error else np.full(len(runs), 1 / len(runs))
    half = half_width(error, 1 / (shares**2 / (_counts(runs) - 1)).sum())
    return Slope(float(value), float(value - half), float(value + half))


def _counts(runs: Sequence[np.ndarray]) -> np.ndarray:
    """How many there are; nan for a single run, which has no interval."""
    return np.array([len(values) if len(values) > 1 else np.nan for values in runs])


def _errors(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Standard errors of the means; a single run has none."""
    spread = [values.std(ddof=1) if len(values) > 1 else np.nan for values in runs]
    return np.array(spread) / np.sqrt(_counts(runs))


@dataclass(frozen=True)
class Curve:
    """Runs by size: [K] sizes in rising order, and the values of the seeds at each."""

    sizes: np.ndarray
    runs: Sequence[np.ndarray]

    @property
    def means(self) -> np.ndarray:
        """Their means [K]."""
        return np.array([values.mean() for values in self.runs])

    @property
    def reach(self) -> np.ndarray:
        """Half the width of the means' 95% intervals [K]."""
        return half_width(_errors(self.runs), _counts(self.runs) - 1)

    @property
    def slope(self) -> Slope:
        """The slope over all sizes."""
        return fitted(self.sizes, self.runs)

    @property
    def late(self) -> Slope:
        """The slope over the larger half of the sizes, where lower orders matter less."""
        first = (len(self.sizes) - 1) // 2
        return fitted(self.sizes[first:], self.runs[first:])


def curve(rows: Columns, size: str, value: str, **where: str | float) -> Curve:
    """The values of the rows that have these entries, by size."""
    chosen = tables.where(rows, **where)
    sizes = np.unique(chosen[size])
    return Curve(sizes, [chosen[value][chosen[size] == one] for one in sizes])


def quotient(above: np.ndarray, below: np.ndarray) -> Slope:
    """mean(above) / mean(below) of independent runs and its 95% interval, to first order."""
    means = np.array([above.mean(), below.mean()])
    value = means[0] / means[1]
    return _within(value, value * _errors([above, below]) / means, [above, below])


def paired(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of a - b over pairs, and half of its 95% interval (Student's t); nan of one pair."""
    away = np.array([one - other for one, other in pairs])
    if len(away) < 2 or not np.isfinite(away).all():
        return np.nan, np.nan
    half = half_width(away.std(ddof=1) / np.sqrt(len(away)), len(away) - 1)
    return round(float(away.mean()), 12), float(half)


def by_seed(
    runs: Columns, measure: str, rows: np.ndarray, others: np.ndarray
) -> tuple[float, float]:
    """The mean difference of these rows from the others, seed by seed, and half of its interval."""
    one, other = (dict(zip(runs["seed"][part].tolist(), runs[measure][part].tolist(), strict=True))
                  for part in (rows, others))  # fmt: skip
    return paired([(one[seed], other[seed]) for seed in one if seed in other])


def free_of_seeds(runs: Columns) -> float:
    """Degrees of freedom of a mean difference seed by seed."""
    return max(1.0, len(np.unique(runs["seed"])) - 1.0)


def mean_of(values: np.ndarray) -> Slope:
    """The mean of independent runs and its 95% interval (Student's t); one run leaves none."""
    value, half = float(values.mean()), paired([(float(one), 0.0) for one in values])[1]
    return Slope(value, value - half, value + half)


def jackknife(without: Sequence[float]) -> float:
    """Half of the 95% interval of a statistic whose values without each of G groups are these: the
    jackknife's variance is (G - 1)/G sum (theta_(g) - mean)^2 (Efron and Stein 1981)."""
    left, groups = np.array(without), len(without)
    if groups < 2 or np.isnan(left).any():
        return np.nan
    error = np.sqrt((groups - 1) * left.var())
    return float(half_width(error, groups - 1))
