"""Slopes on log-log axes, with the uncertainty that a finite number of seeds leaves in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.report.claims import Columns

NORMAL = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Slope:
    """A fitted slope, or another estimate, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """`−0.244 (−0.251 to −0.237)`."""
        low, value, high = (_signed(one) for one in (self.low, self.value, self.high))
        return f"{value} ({low} to {high})"


def fitted(sizes: Sequence[float], runs: Sequence[np.ndarray]) -> Slope:
    """The least-squares slope of log mean(runs[k]) on log sizes[k].

    It is sum_k w_k log mean_k with w = (x - x_mean) / ||x - x_mean||^2, so its variance is
    sum_k w_k^2 s_k^2 / (n_k mean_k^2) to first order: the seeds of one size are independent of
    those of another.
    """
    x = np.log(np.asarray(sizes, dtype=float))
    centred = x - x.mean()
    weights = centred / (centred @ centred)
    means = np.array([values.mean() for values in runs])
    value = float(weights @ np.log(means))
    reach = NORMAL * float(np.sqrt(weights**2 @ (_errors(runs) / means) ** 2))
    return Slope(value, value - reach, value + reach)


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
        return fitted(list(self.sizes), self.runs)

    @property
    def late(self) -> Slope:
        """The slope over the larger half of the sizes, where lower orders matter less."""
        first = (len(self.sizes) - 1) // 2
        return fitted(list(self.sizes[first:]), self.runs[first:])


def curve(rows: Columns, size: str, value: str, **where: str | float) -> Curve:
    """The values of the rows that have these entries, by size."""
    chosen = np.all([rows[name] == wanted for name, wanted in where.items()], axis=0)
    sizes = np.unique(rows[size][chosen])
    return Curve(sizes, [rows[value][chosen & (rows[size] == one)] for one in sizes])


def quotient(above: np.ndarray, below: np.ndarray) -> Slope:
    """mean(above) / mean(below) of independent runs and its 95% interval, to first order."""
    value = float(above.mean() / below.mean())
    means = np.array([above.mean(), below.mean()])
    reach = NORMAL * value * float(np.linalg.norm(_errors([above, below]) / means))
    return Slope(value, value - reach, value + reach)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
