"""How much longer an SVD takes, by Lemma 11 and by the clock."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Picture

LABELS = 5
"""Powers of two that a slim picture has room to name, less one."""


@style.styled
def ratios(rows: Columns, times: Columns, narrow: bool = False) -> Figure:
    """Measured against predicted ratios, a colour for each number of steps."""
    figure, (axes,) = style.canvas(1, narrow, 3.2)
    measured = times["svd_seconds"] / times["seconds"]
    every = np.log2(np.concatenate([measured, times["made"]]))
    low, high = np.floor(every.min()), np.floor(every.max()) + 1
    ends = 2.0 ** np.array([low, high])
    ticks = 2.0 ** np.arange(low, high + 1, max(1, np.ceil((high - low) / LABELS)))
    axes.plot(ends, ends, color=style.GREY, lw=1, label="equal")
    for steps, (colour, marker) in zip(np.unique(times["steps"]), style.SERIES, strict=False):
        part = where(times, steps=steps)
        axes.plot(part["made"], part["svd_seconds"] / part["seconds"], marker, color=colour,
                  ms=5, label=f"q = {steps:.0f}")  # fmt: skip
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        axes.set(**{f"{name}scale": "log", f"{name}lim": ends})
        axis.set_ticks(ticks, [*map(style.plain, ticks)])
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("an SVD's time over that of q steps, predicted")
    axes.set_ylabel("the same, measured")
    style.legend_below(figure, axes, 3)
    return figure


PICTURES = (
    Picture(
        "wall-clock",
        ratios,
        "How much longer an SVD takes than Newton–Schulz, by Lemma 11 and by the clock",
        "A point is a shape. Below the line Newton–Schulz is slower than products of square "
        "matrices would be: small and thin ones do not reach that speed.",
    ),
)
