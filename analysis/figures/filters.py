"""Noisy gradient descent through filters, by noise level."""

import numpy as np
from matplotlib.figure import Figure

from analysis.figures.style import SERIES, Columns, alike, canvas, legend_below, log_x, styled
from analysis.filtering import NAMES, SETTINGS, chosen
from analysis.slopes import NORMAL

TOLD = {"noisy-gd": "noisy gradient descent", "low-pass": "low-pass filter", "disk": "DiSK"}


@styled
def by_noise(rows: Columns, narrow: bool = False) -> Figure:
    """Excess losses of the methods over noisy gradient descent's, a panel for each setting."""
    figure, panels = canvas(len(SETTINGS), narrow, 2.9)
    noises = np.unique(rows["noise"])
    for axes, setting in zip(panels, SETTINGS, strict=True):
        base = [chosen(rows, setting, NAMES[0], float(noise))[2].mean() for noise in noises]
        for name, (colour, marker) in zip(NAMES, SERIES, strict=False):
            runs = [chosen(rows, setting, name, float(noise))[2] for noise in noises]
            means = np.array([one.mean() for one in runs]) / base
            reach = NORMAL * np.array([one.std(ddof=1) / np.sqrt(len(one)) for one in runs]) / base
            axes.errorbar(noises, means, reach, color=colour, marker=marker, ms=4, mfc="none",
                          lw=1.2, elinewidth=0.9, label=TOLD[name])  # fmt: skip
        axes.set_title(setting.name, loc="left")
        log_x(axes)
        axes.set_xlabel("noise σ of an entry of the gradient")
    alike(panels)
    panels[0].set_ylabel("excess loss / that of plain descent")
    legend_below(figure, panels[0], 1 if narrow else 3)
    return figure
