"""Noisy gradient descent through filters, by noise level."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.disk_regression.findings import NAMES, TUNED, compared


@style.styled
def by_noise(rows: Columns, narrow: bool = False) -> Figure:
    """Excess losses of the methods over noisy gradient descent's, a panel for each setting."""
    figure, panels = style.canvas(len(TUNED), narrow, 2.9)
    noises = np.unique(rows["noise"])
    for axes, setting in zip(panels, TUNED, strict=True):
        for (name, label), look in zip(NAMES.items(), style.SERIES, strict=False):
            ends = [compared(rows, setting, name, "noisy-gd", float(noise)) for noise in noises]
            low, high = 1 + np.array(ends).T
            style.errorbars(axes, noises, (low + high) / 2, (high - low) / 2, look, label)
        axes.set_title(setting, loc="left")
        style.log_x(axes)
        axes.set_xlabel("noise σ of an entry of the gradient")
    style.alike(panels)
    panels[0].set_ylabel("excess loss / that of plain descent")
    style.legend_below(figure, panels[0], 1 if narrow else 3)
    return figure


PICTURES = (
    Picture(
        "disk-regression",
        by_noise,
        "Excess loss of the last iterate by noise level",
        "Relative to noisy gradient descent, which is 1; below 1 is better. Intervals are 95% "
        "of the mean difference from it: methods share the noise of a seed and level. "
        "Under `one step size` all share it, under `tuned` each has its best step size and gain at "
        "each level.",
    ),
)
