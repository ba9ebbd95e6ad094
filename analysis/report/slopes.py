"""Slopes on log-log axes, with the uncertainty that a finite number of seeds leaves in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.report import columns
from fedmuon.analysis.report.columns import Columns

NORMAL = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Slope:
    """A fitted slope, or another estimate, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """`−0.244 (−0.251 to −0.237)`."""
        return f"{self.value:+.3f} ({self.low:+.3f} to {self.high:+.3f})".replace("-", "−")


def fitted(sizes: ArrayLike, runs: Sequence[np.ndarray]) -> Slope:
    """The least-squares slope of log mean(runs[k]) on log sizes[k].

    It is sum_k w_k log mean_k with w = (x - x_mean) / ||x - x_mean||^2, so its variance is
    sum_k w_k^2 s_k^2 / (n_k mean_k^2) to first order: the seeds of one size are independent of
    those of another.
    """
    x = np.log(np.asarray(sizes, dtype=float))
    centred = x - x.mean()
    weights = centred / (centred @ centred)
    means = np.array([values.mean() for values in runs])
    return _within(weights @ np.log(means), float(np.linalg.norm(weights * _errors(runs) / means)))


def _within(value: float, error: float) -> Slope:
    return Slope(float(value), float(value - NORMAL * error), float(value + NORMAL * error))


def _errors(runs: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([values.std(ddof=1) / np.sqrt(len(values)) for values in runs])


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
        return NORMAL * _errors(self.runs)

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
    chosen = columns.where(rows, **where)
    sizes = np.unique(chosen[size])
    return Curve(sizes, [chosen[value][chosen[size] == one] for one in sizes])


def quotient(above: np.ndarray, below: np.ndarray) -> Slope:
    """mean(above) / mean(below) of independent runs and its 95% interval, to first order."""
    means = np.array([above.mean(), below.mean()])
    value = means[0] / means[1]
    return _within(value, value * np.linalg.norm(_errors([above, below]) / means))
