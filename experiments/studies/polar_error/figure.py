"""How near maps come to the polar factor, and what that is worth in a run."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.polar_error.findings import NAMES


@style.styled
def drifts(rows: Columns, runs: Columns, narrow: bool = False) -> Figure:
    """A panel for each map: distance and drift against lambda, a colour for each step size."""
    figure, panels = style.canvas(len(NAMES), narrow, 2.9)
    for axes, (name, title) in zip(panels, NAMES.items(), strict=True):
        for lr, look in zip(np.unique(runs["lr"]), style.SERIES, strict=False):
            part = where(runs, map=name, lr=lr)
            axes.plot(part["lambda"], part["distance"], look[1], color=look[0], ms=4.5,
                      label=f"distance, η = {lr:g}")  # fmt: skip
            shown = np.where(part["drift"] < 100, part["drift"], np.nan)
            axes.plot(part["lambda"], shown, "--", color=look[0], marker=look[1], mfc="none", ms=3,
                      lw=1.2)  # fmt: skip
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="drift D (hollow)")
        axes.set_title(title, loc="left")
        axes.set_xscale("log")
        axes.set_xlabel("λ of the smoothed polar factor S")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"$\Vert X_T - X_S\Vert_F$ at the end")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


PICTURES = (
    Picture(
        "polar-error",
        drifts,
        "Distance of two runs beside the drift that their maps' errors allow",
        "Full marks are the distance at the end of a run from the same run with a smoothed polar "
        "factor; dashed lines with the same marks, hollow, are the proved drift, "
        "left out above 100. Large λ are far from the map, small ones have large Lipschitz "
        "constants.",
    ),
)
