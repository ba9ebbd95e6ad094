"""Noisy gradient descent through filters, by noise level."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.style import (
    SERIES,
    Columns,
    alike,
    canvas,
    legend_below,
    log_x,
    styled,
)
from fedmuon.experiments.studies.disk_regression.filtering import NAMES, SETTINGS, compared

TOLD = {"noisy-gd": "noisy gradient descent", "low-pass": "low-pass filter", "disk": "DiSK"}


@styled
def by_noise(rows: Columns, narrow: bool = False) -> Figure:
    """Excess losses of the methods over noisy gradient descent's, a panel for each setting."""
    figure, panels = canvas(len(SETTINGS), narrow, 2.9)
    noises = np.unique(rows["noise"])
    for axes, setting in zip(panels, SETTINGS, strict=True):
        for name, (colour, marker) in zip(NAMES, SERIES, strict=False):
            ends = [compared(rows, setting, name, NAMES[0], float(noise)) for noise in noises]
            low, high = 1 + np.array(ends).T
            axes.errorbar(noises, (low + high) / 2, (high - low) / 2, color=colour, marker=marker,
                          ms=4, mfc="none", lw=1.2, elinewidth=0.9, label=TOLD[name])  # fmt: skip
        axes.set_title(setting.name, loc="left")
        log_x(axes)
        axes.set_xlabel("noise σ of an entry of the gradient")
    alike(panels)
    panels[0].set_ylabel("excess loss / that of plain descent")
    legend_below(figure, panels[0], 1 if narrow else 3)
    return figure
