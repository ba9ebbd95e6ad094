"""Rates under heavy-tailed noise: curves by tail index, and the slopes of all of them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report.slopes import Curve, curve
from fedmuon.analysis.report.style import (
    BLACK,
    SERIES,
    Columns,
    alike,
    canvas,
    legend_below,
    powers_of_2,
    styled,
)
from fedmuon.experiments.studies.heavy_tail.rates import (
    FREE,
    MUON,
    NAMES,
    THEOREM,
    best_sgd,
    promised,
)

SHOWN = (*MUON, "normalized-sgd", "sgd")


@styled
def curves(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each alpha: mean gradient norm against K, and a line of the theorem's slope."""
    alphas = np.unique(rows["alpha"])
    figure, panels = canvas(len(alphas), narrow, 2.2, across=min(3, len(alphas)))
    for axes, alpha in zip(panels, alphas, strict=True):
        for name, (colour, marker) in zip(SHOWN, SERIES, strict=False):
            _points(axes, _curve(rows, name, alpha), colour, marker, NAMES[name])
        _promise(axes, _curve(rows, MUON[0], alpha), promised(alpha, THEOREM))
        axes.set_title(f"α = {alpha:g}", loc="left")
        powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $K$")
    alike(panels, log=True)
    for axes in panels[:: 1 if narrow else min(3, len(alphas))]:
        axes.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_F$")
    legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


def _curve(rows: Columns, name: str, alpha: float) -> Curve:
    if name == "sgd":
        return best_sgd(rows, alpha)[1]
    return curve(rows, "steps", "mean_gradient", method=name, schedule=THEOREM, alpha=float(alpha))


def _points(axes: Axes, one: Curve, colour: str, marker: str, label: str) -> None:
    axes.errorbar(one.sizes, one.means, one.reach, color=colour, marker=marker, ms=3.5, lw=1.1,
                  mfc="none", elinewidth=0.8, label=label)  # fmt: skip


def _promise(axes: Axes, one: Curve, slope: float) -> None:
    """A line of that slope, a little above the curve that it is to be compared with."""
    line = 1.25 * one.means[-1] * (one.sizes / one.sizes[-1]) ** slope
    axes.plot(one.sizes, line, "--", color=BLACK, lw=1, label="slope of the theorem")


@styled
def slopes(rows: Columns, narrow: bool = False) -> Figure:
    """Fitted slopes with 95% intervals against alpha, for both schedules."""
    figure, panels = canvas(2, narrow, 2.9)
    alphas = np.unique(rows["alpha"])
    titles = {THEOREM: "schedule that knows α", FREE: "schedule without α"}
    for axes, (schedule, title) in zip(panels, titles.items(), strict=True):
        for place, (name, (colour, marker)) in enumerate(zip(SHOWN[:-1], SERIES, strict=False)):
            found = [
                curve(
                    rows, "steps", "mean_gradient", method=name, schedule=schedule, alpha=float(a)
                ).slope
                for a in alphas
            ]
            value, low, high = (
                np.array([getattr(one, end) for one in found]) for end in ("value", "low", "high")
            )
            axes.errorbar(alphas + 0.012 * (place - 1.5), value, (value - low, high - value),
                          fmt=marker, color=colour, ms=4, mfc="none", elinewidth=0.9,
                          label=NAMES[name])  # fmt: skip
        fine = np.linspace(alphas[0], alphas[-1], 100)
        line = [promised(a, schedule) for a in fine]
        axes.plot(fine, line, "--", color=BLACK, lw=1, label="promised")
        axes.set_title(title, loc="left")
        axes.set_xticks(alphas)
        axes.set_xlabel("tail index α")
        axes.set_ylabel("fitted slope")
    legend_below(figure, panels[0], 2 if narrow else 3)
    return figure
