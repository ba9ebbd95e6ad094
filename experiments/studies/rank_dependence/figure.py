"""How the gradient's nuclear norm depends on the rank, by method."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.slopes import curve
from fedmuon.analysis.report.style import (
    BLACK,
    GREY,
    SERIES,
    Columns,
    canvas,
    legend_below,
    log_y,
    powers_of_2,
    styled,
)


@styled
def dependence(rows: Columns, names: Mapping[str, str], narrow: bool = False) -> Figure:
    """Means against r at the largest K, and slopes in r against K."""
    figure, (left, right) = canvas(2, narrow, 2.9)
    lengths = np.unique(rows["steps"])
    for (name, told), (colour, marker) in zip(names.items(), SERIES, strict=False):
        look = {"color": colour, "marker": marker, "ms": 4, "mfc": "none", "elinewidth": 0.9}
        last = curve(rows, "rank", "mean_nuclear", method=name, steps=float(lengths[-1]))
        left.errorbar(last.sizes, last.means, last.reach, lw=1.2, label=told, **look)
        slopes = [
            curve(rows, "rank", "mean_nuclear", method=name, steps=float(length)).slope
            for length in lengths
        ]
        value = np.array([one.value for one in slopes])
        ends = value - [one.low for one in slopes], [one.high for one in slopes] - value
        right.errorbar(lengths, value, ends, lw=1.2, **look)
    guide = curve(rows, "rank", "mean_nuclear", method="sgd-m", steps=float(lengths[-1]))
    line = 1.3 * guide.means[-1] * np.sqrt(guide.sizes / guide.sizes[-1])
    left.plot(guide.sizes, line, ":", color=BLACK, lw=1.2, label="slope 1/2")
    right.axhline(0, color=GREY, lw=0.8)
    right.axhline(0.5, color=BLACK, lw=1.2, ls=":")
    powers_of_2(left, guide.sizes)
    powers_of_2(right, lengths)
    log_y(left)
    left.set_xlabel("rank $r$")
    left.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_*$")
    right.set_xlabel("steps $K$")
    right.set_ylabel("fitted slope in $r$")
    legend_below(figure, left, 3)
    return figure
