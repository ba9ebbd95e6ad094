"""How private fine-tuning gets on, by step."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.style import SERIES, Columns, canvas, legend_below, styled


@styled
def learning(ends: Columns, rows: Columns, narrow: bool = False) -> Figure:
    """Held-out loss by step, from curves.csv: means over seeds, least and largest as a band."""
    figure, (axes,) = canvas(1, narrow, 3.0)
    methods = list(dict.fromkeys(rows["method"].tolist()))
    for name, (colour, marker) in zip(methods, SERIES, strict=False):
        mine = rows["method"] == name
        steps = np.unique(rows["step"][mine])
        runs = [rows["loss"][mine & (rows["step"] == step)] for step in steps]
        low, mean, high = np.array([(v.min(), v.mean(), v.max()) for v in runs]).T
        axes.plot(steps, mean, color=colour, lw=1.4, marker=marker, ms=4, mfc="none", label=name)
        if (high > low).any():
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_xlabel("private step")
    axes.set_ylabel("held-out NLL of a target token")
    legend_below(figure, axes, 2 if narrow else len(methods))
    return figure


def in_words(figure: Figure) -> str:
    """What a line with a band is, where there are bands."""
    (axes,) = figure.axes
    said = "A line is the mean over seeds, its band their least and largest."
    return said * bool(axes.collections)


PICTURES = (
    Picture(
        "dp-text",
        learning,
        "Held-out negative log-likelihood by private step",
        "The mean over held-out sentences of the mean over their tokens; lower is better. All "
        "methods begin from one decoder and spend the same joint ε (zero-out) in all.",
        in_words,
    ),
)
