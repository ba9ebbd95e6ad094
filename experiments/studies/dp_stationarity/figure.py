"""How stationary private Muon becomes, beside the bound that is proved of it."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report.slopes import curve
from fedmuon.analysis.report.style import (
    BLACK,
    GREY,
    SERIES,
    Columns,
    alike,
    canvas,
    legend_below,
    powers_of_2,
    styled,
)


@styled
def beside(rows: Columns, names: Mapping[str, str], narrow: bool = False) -> Figure:
    """A panel for each method: mean nuclear norms and bounds against T, a colour for each noise."""
    figure, panels = canvas(len(names), narrow, 2.9)
    for axes, (method, told) in zip(panels, names.items(), strict=True):
        for noise, (colour, marker) in zip(np.unique(rows["noise"]), SERIES, strict=False):
            _pair(axes, rows, {"method": method, "noise": float(noise)}, colour, marker)
        axes.plot([], [], "--", color=BLACK, lw=1.2, label="bound (Theorem 3.4)")
        axes.axhline(rows["ceiling"][0], color=GREY, lw=1, ls=":", label="largest of any gradient")
        axes.set_title(told, loc="left")
        powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $T$")
    alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


def _pair(axes: Axes, rows: Columns, where: Mapping[str, str | float], colour: str, marker: str):
    seen = curve(rows, "steps", "mean_nuclear", **where)
    axes.errorbar(seen.sizes, seen.means, seen.reach, color=colour, marker=marker, ms=4, mfc="none",
                  lw=1.2, elinewidth=0.9, label=f"measured, σ = {where['noise']:g}")  # fmt: skip
    bound = curve(rows, "steps", "bound", **where)
    axes.plot(bound.sizes, bound.means, "--", color=colour, lw=1.2)
