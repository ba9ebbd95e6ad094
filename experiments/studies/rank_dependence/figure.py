"""How the gradient's nuclear norm depends on the rank, by method."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.rank_dependence.findings import NAMES, norms, slopes


@style.styled
def dependence(rows: Columns, narrow: bool = False) -> Figure:
    """Means against r at the largest K, and slopes in r against K."""
    figure, (left, right) = style.canvas(2, narrow, 2.9)
    lengths = np.unique(rows["steps"])
    for (name, label), look in zip(NAMES.items(), style.SERIES, strict=False):
        last, every = norms(rows, name, lengths[-1]), slopes(rows, name).values()
        style.errorbars(left, last.sizes, last.means, last.reach, look, label)
        value, low, high = np.array([(one.value, one.low, one.high) for one in every]).T
        style.errorbars(right, lengths, value, (value - low, high - value), look)
    guide = norms(rows, "sgd-m", lengths[-1])
    line = 1.3 * guide.means[-1] * np.sqrt(guide.sizes / guide.sizes[-1])
    left.plot(guide.sizes, line, ":", color=style.BLACK, lw=1.2, label="slope 1/2")
    right.axhline(0, color=style.GREY, lw=0.8)
    right.axhline(0.5, color=style.BLACK, lw=1.2, ls=":")
    style.powers_of_2(left, guide.sizes)
    style.powers_of_2(right, lengths)
    style.log_y(left)
    left.set_xlabel("rank $r$")
    left.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_*$")
    right.set_xlabel("steps $K$")
    right.set_ylabel("fitted slope in $r$")
    style.legend_below(figure, left, 3)
    return figure


PICTURES = (
    Picture(
        "rank-dependence",
        dependence,
        "Mean nuclear norm of the gradient against the rank",
        "First means over the longest run, with 95% intervals over seeds, then the slope in r of "
        "means over K steps; dotted lines are a slope of 1/2. One Newton–Schulz step from "
        "M/‖M‖_F leaves small singular values where r is large, so q = 1 follows SGD-M part "
        "of the way; the exact map does not.",
    ),
)
