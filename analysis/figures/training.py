"""Curves of trained variants, and where they end along a sweep."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.comparisons import here, levels, name_of
from analysis.figures.style import BLACK, GREY, SERIES, Columns, canvas, log_x, log_y, styled

LINES = (*SERIES, (BLACK, "X"), (GREY, "*"))
AXES = {"round": "round", "train_seconds": "seconds of training"}
HUGE = 1e6  # a loss from here on is a divergence
MOST = 4  # marks and legend columns that a wide figure has room for


@styled
def curves(
    rows: Columns, variants: Sequence[str], by: str, x: float = np.nan, narrow: bool = False
) -> Figure:
    """Held-out loss solid, train loss dashed, and accuracy, by round or by seconds of training.

    A line is the mean over seeds, its band their minimum and maximum. `x` is a value of the sweep.
    """
    figure, (loss, accuracy) = canvas(2, narrow, 2.9)
    for place, name in enumerate(variants):
        for axes, measure, dash in (
            (loss, "test_loss", "-"), (loss, "train_loss", "--"), (accuracy, "accuracy", "-"),
        ):  # fmt: skip
            _line(axes, _means(rows, name, x, by, measure), place, dash, name)
    for axes, label in ((loss, "loss (train dashed)"), (accuracy, "accuracy")):
        axes.set_xlabel(AXES[by])
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
    log_y(loss)
    legend_of_all(figure, accuracy, narrow)
    return figure


def _means(rows: Columns, variant: str, x: float, by: str, measure: str) -> np.ndarray:
    """Place, mean, minimum and maximum over seeds at every evaluated round, [rounds, 4].

    A round that a run did not reach, or at which it had diverged, ends the line.
    """
    mine = here(rows, variant, x)
    seeds, found = len(np.unique(rows["seed"][mine])), []
    for number in np.unique(rows["round"][mine]):
        now = mine & (rows["round"] == number)
        values = rows[measure][now]
        if len(values) < seeds or not (np.abs(values) < HUGE).all():
            break
        found.append((rows[by][now].mean(), values.mean(), values.min(), values.max()))
    return np.array(found).reshape(-1, 4)


def _line(axes: Axes, points: np.ndarray, place: int, dash: str, label: str) -> None:
    colour, marker = LINES[place % len(LINES)]
    at, mean, low, high = points.T
    axes.plot(at, mean, dash, color=colour, lw=1.4, marker=marker if dash == "-" else "",
              ms=3.5, markevery=max(1, len(at) // 6), label=label)  # fmt: skip
    axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)


def legend_of_all(figure: Figure, axes: Axes, narrow: bool) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    short = max(map(len, labels), default=0) <= 22
    columns = (2 if short else 1) if narrow else (MOST if short else 2)
    columns = min(columns, len(labels))
    if len(labels) % columns and not len(labels) % (columns - 1 or 1):
        columns -= 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.8,
                  columnspacing=1.2)  # fmt: skip


@styled
def terminal(
    runs: Columns, variants: Sequence[str], measures: Sequence[str], label: str,
    narrow: bool = False,
) -> Figure:  # fmt: skip
    """Terminal measures along the sweep: means over seeds, and bands from minimum to maximum."""
    figure, panels = canvas(len(measures), narrow, 2.9)
    values = levels(runs)
    for axes, measure in zip(panels, measures, strict=True):
        for place, name in enumerate(variants):
            every = [runs[measure][here(runs, name, x)] for x in values]
            points = [(x, of.mean(), of.min(), of.max())
                      for x, of in zip(values, every, strict=True) if len(of)]  # fmt: skip
            _line(axes, np.array(points).reshape(-1, 4), place, "-", name)
        if (values > 0).all() and values[np.isfinite(values)].max() >= 10 * values.min():
            log_x(axes)
        axes.set_xlabel(label)
        axes.set_ylabel(f"terminal {name_of(measure)}")
        if measure not in ("accuracy", "gap"):
            log_y(axes)
    legend_of_all(figure, panels[-1], narrow)
    return figure
