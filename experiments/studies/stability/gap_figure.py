"""The measured gap of every run beside its bound (001, Table 2, its column gap <= bound)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator

from fedmuon.analysis.report.style import BLACK, BLUE, GREY, ORANGE, Columns, canvas, legend, styled


@styled
def gap_and_bound(runs: Columns, narrow: bool = False) -> Figure:
    """Every run [S] in order of its bound: gap with its 95% interval, bound, bound with C_hp = 1.

    Where bounds dwarf the gaps, the axis is linear around zero and logarithmic above.
    """
    figure, (axes,) = canvas(1, narrow, 3.2)
    order = np.argsort(runs["bound"], kind="stable")
    place, gap = np.arange(1, len(order) + 1), runs["gap"][order]
    reach = np.stack([gap - runs["gap_low"][order], runs["gap_high"][order] - gap])
    axes.axhline(0, color=GREY, lw=0.8)
    size = max(2.0, min(6.0, (300 if not narrow else 130) / len(order)))
    axes.errorbar(place, gap, reach, fmt="o", color=BLUE, ms=min(size, 4), elinewidth=0.9,
                  label="gap, 95% interval")  # fmt: skip
    axes.plot(place, runs["bound"][order], "_", color=BLACK, ms=size + 1, mew=1.6, label="bound")
    axes.plot(place, runs["bound_one"][order], "d", color=ORANGE, ms=size, mfc="none",
              label="bound with $C_{hp}$ = 1")  # fmt: skip
    _scale(axes, runs)
    if (runs["bound"] >= 1).any():
        axes.axhline(1, color=GREY, lw=1, ls=":", label="vacuous from 1 on")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("run, in order of its bound")
    axes.set_ylabel(r"test minus train risk $F-\hat F$")
    legend(axes, 2 if narrow else 4)
    return figure


def _scale(axes: Axes, runs: Columns) -> None:
    """Symmetric log where the largest bound is ten times any end of an interval."""
    ends = np.abs(np.concatenate([runs["gap_low"], runs["gap_high"]]))
    ends, bounds = (values[np.isfinite(values)] for values in (ends, runs["bound"]))
    if len(ends) and len(bounds) and bounds.max() > 10 * ends.max():
        linear = 10 ** np.ceil(np.log10(ends.max()))
        axes.set_yscale("symlog", linthresh=linear)
        axes.yaxis.set_minor_locator(
            SymmetricalLogLocator(base=10, linthresh=linear, subs=list(range(2, 10)))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
