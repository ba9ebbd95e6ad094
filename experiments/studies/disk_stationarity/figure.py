"""Squared gradients under DiSK beside their bounds, by the gain."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.slopes import curve


@style.styled
def gains(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each reach, at the most noise and full batches: a colour for each step size."""
    grid = where(rows, corollary=0)
    grid = where(grid, noise=grid["noise"].max(), batch=0.0)
    reaches = np.unique(grid["reach"])
    figure, panels = style.canvas(len(reaches), narrow, 2.9)
    for axes, reach in zip(panels, reaches, strict=True):
        for lr, look in zip(np.unique(grid["lr"]), style.SERIES, strict=False):
            part = where(grid, reach=reach, lr=lr)
            one = curve(part, "gain", "mean_square")
            style.errorbars(axes, one.sizes, one.means, one.reach, look, f"measured, η = {lr:g}")
            bound = curve(part, "gain", "bound")
            axes.plot(bound.sizes, bound.means, "--", color=look[0], marker=look[1], ms=3, lw=1.2)
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="bound (small full marks)")
        axes.set_title(f"γ = {written(reach, 'g')}", loc="left")
        style.levels_on_x(axes, np.unique(grid["gain"]))
        axes.set_xlabel("gain κ")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla F(x_t)\Vert^2$")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


PICTURES = (
    Picture(
        "disk-stationarity",
        gains,
        "Mean squared gradient under DiSK beside its bound, by the gain",
        "Points are means over seeds with 95% intervals; dashed lines with the same marks are the "
        "bound, where there is one. κ = 1 is plain noisy descent.",
    ),
)
