"""Epsilons that were printed, beside those that the accountant certifies."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.style import BLACK, BLUE, RED, Columns, canvas, legend_below, styled

TICKS = (1, 2, 5, 10, 20, 50, 100)


@styled
def printed(rows: Columns, narrow: bool = False) -> Figure:
    """A line a setting, epsilon to the right on a log axis."""
    figure, (axes,) = canvas(1, narrow, 2.4 if narrow else 2.2)
    at = np.arange(len(rows["name"]))[::-1]
    low, high = rows["joint_lower"], rows["joint_upper"]
    axes.hlines(at, rows["printed"], high, color=RED, lw=0.8)
    axes.errorbar(high, at, xerr=[high - low, np.zeros_like(high)], fmt="s", color=RED, ms=5,
                  label="certified (joint)")  # fmt: skip
    axes.plot(rows["printed"], at, "o", color=BLACK, mfc="none", ms=8, label="printed")
    axes.plot(
        rows["per_release"], at, "x", color=BLUE, ms=5, label="per-release, certifies nothing"
    )
    for place, value in zip(at, high, strict=True):
        axes.annotate(f"{value:.3g}", (value, place), (0, 5), textcoords="offset points",
                      ha="center", color=RED)  # fmt: skip
    axes.set_yticks(at, [str(name).replace(", ", "\n", 1) for name in rows["name"]])
    axes.set_ylim(-0.5, len(at) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(0.6 * min(rows["printed"].min(), high.min()), 1.6 * high.max())
    axes.set_xticks([tick for tick in TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ε, zero-out")
    legend_below(figure, axes, 1 if narrow else 3)
    return figure


PICTURES = (
    Picture(
        "dp-muon-printed",
        printed,
        "Printed ε against certified ε, zero-out",
        "Circles are printed, crosses reproduce them by counting releases that share a lot as "
        "if each had its own, and squares are what Poisson lots spend, with their bracket "
        "(narrower than the mark). With one block a step it is a little below the print, as "
        "privacy loss distributions are tighter than Rényi accounting.",
    ),
)
