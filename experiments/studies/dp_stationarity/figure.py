"""How stationary private Muon becomes, beside the bound that is proved of it."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.slopes import curve
from fedmuon.experiments.studies.dp_stationarity.findings import CORRECTED, NAMES


@style.styled
def norms_and_bounds(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each method: mean nuclear norms and bounds against T, a colour for each noise."""
    figure, panels = style.canvas(len(NAMES), narrow, 2.9)
    for axes, (method, name) in zip(panels, NAMES.items(), strict=True):
        for noise, look in zip(np.unique(rows["noise"]), style.SERIES, strict=False):
            _pair(axes, rows, method, float(noise), look)
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="bound (Theorem 3.4)")
        axes.axhline(rows["ceiling"][0], color=style.GREY, lw=1, ls=":",
                     label="largest of any gradient")  # fmt: skip
        axes.set_title(name + (", outside the theorem" if method == CORRECTED else ""), loc="left")
        style.powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $T$")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


def _pair(axes: Axes, rows: Columns, method: str, noise: float, look: tuple[str, str]) -> None:
    norms, bounds = (
        curve(rows, "steps", name, method=method, noise=noise) for name in ("mean_nuclear", "bound")
    )
    label = f"measured, σ = {noise:g}"
    style.errorbars(axes, norms.sizes, norms.means, norms.reach, look, label)
    axes.plot(bounds.sizes, bounds.means, "--", color=look[0], lw=1.2)


PICTURES = (
    Picture(
        "dp-stationarity",
        norms_and_bounds,
        "Mean nuclear norm of the gradient beside its bound",
        "Points are means over seeds, with 95% intervals; dashed lines of the same colour are "
        "Theorem 3.4's bound. Beside the corrected method it is drawn for comparison only: the "
        "theorem does not cover the correction. The dotted "
        "line is the nuclear norm that no gradient of this problem exceeds: a bound above it "
        "says nothing.",
    ),
)
