"""Rates under heavy-tailed noise: curves by tail index, and the slopes of all of them."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.heavy_tail import findings
from fedmuon.experiments.studies.heavy_tail.findings import NAMES, norms, promised

LOOKS = dict(zip(NAMES, style.SERIES, strict=False))


@style.styled
def curves(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each alpha: mean gradient norm against K, and a line of the theorem's slope."""
    alphas = np.unique(rows["alpha"])
    across = min(3, len(alphas))
    figure, panels = style.canvas(len(alphas), narrow, 2.2, across)
    for axes, alpha in zip(panels, alphas, strict=True):
        for name, look in LOOKS.items():
            one = norms(rows, name, alpha)
            style.errorbars(axes, one.sizes, one.means, one.reach, look, NAMES[name])
        one = norms(rows, "muon-exact", alpha)  # which the line is a little above
        line = (
            1.25 * one.means[-1] * (one.sizes / one.sizes[-1]) ** promised(alpha, findings.THEOREM)
        )
        axes.plot(one.sizes, line, "--", color=style.BLACK, lw=1, label="slope of the theorem")
        axes.set_title(f"α = {alpha:g}", loc="left")
        style.powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $K$")
    style.alike(panels, log=True)
    for axes in panels[:: 1 if narrow else across]:
        axes.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_F$")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


@style.styled
def slopes(rows: Columns, narrow: bool = False) -> Figure:
    """Fitted slopes with 95% intervals against alpha, for both schedules."""
    figure, panels = style.canvas(2, narrow, 2.9)
    alphas = np.unique(rows["alpha"])
    for axes, (schedule, title) in zip(panels, findings.SCHEDULES.items(), strict=True):
        for place, (name, (colour, marker)) in enumerate(list(LOOKS.items())[:-1]):  # SGD has none
            fits = [norms(rows, name, alpha, schedule).slope for alpha in alphas]
            value, low, high = np.array([(one.value, one.low, one.high) for one in fits]).T
            axes.errorbar(alphas + 0.012 * (place - 1.5), value, (value - low, high - value),
                          fmt=marker, color=colour, ms=4, mfc="none", elinewidth=0.9,
                          label=NAMES[name])  # fmt: skip
        fine = np.linspace(alphas[0], alphas[-1], 100)
        line = [promised(alpha, schedule) for alpha in fine]
        axes.plot(fine, line, "--", color=style.BLACK, lw=1, label="promised")
        axes.set_title(title, loc="left")
        axes.set_xticks(alphas)
        axes.set_xlabel("tail index α")
        axes.set_ylabel("fitted slope")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


PICTURES = (
    Picture(
        "heavy-tail",
        curves,
        "Mean gradient norm against the number of steps, by tail index",
        "The Muon maps and normalized SGD on the schedule of 002, Theorem 3.4, SGD with its "
        "best step size at each α; 95% intervals over seeds. The dashed line has the slope "
        "−(α − 1)/(3α − 2) of the theorem: curves at least as steep bear it out.",
    ),
    Picture(
        "heavy-tail-slopes",
        slopes,
        "Fitted slopes beside the promised ones",
        "Points at or below the line shrink at least as fast as promised. The "
        "guarantee of the schedule that does not know α is weaker.",
    ),
)
