"""The nuclear norm under a clip that grows, beside its bound and the bound's rate."""

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.slopes import curve
from fedmuon.experiments.studies.dp_vanishing.findings import POWER


@style.styled
def vanishing(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each noise: measured norms, the bound and K_T T^(-1/6) against T."""
    noises = np.unique(rows["noise"])
    figure, panels = style.canvas(len(noises), narrow, 2.9)
    for axes, noise in zip(panels, noises, strict=True):
        norms, bounds = (
            curve(rows, "steps", name, noise=float(noise)) for name in ("mean_nuclear", "bound")
        )
        style.errorbars(axes, norms.sizes, norms.means, norms.reach, style.SERIES[0], "measured")
        axes.plot(bounds.sizes, bounds.means, "--", color=style.BLUE, lw=1.2, label="bound")
        first = where(rows, noise=noise, steps=bounds.sizes[0])["constant"][0]
        axes.plot(bounds.sizes, first * bounds.sizes**POWER, color=style.GREY, lw=1,
                  label=r"$K_{T_0}\, T^{-1/6}$, $T_0$ the smallest")  # fmt: skip
        axes.axhline(rows["ceiling"][0], color=style.GREY, lw=1, ls=":",
                     label="largest of any gradient")  # fmt: skip
        axes.set_title(f"σ = {noise:g}", loc="left")
        style.powers_of_2(axes, bounds.sizes)
        axes.set_xlabel("steps $T$")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    style.legend_below(figure, panels[0], 2)
    return figure


PICTURES = (
    Picture(
        "dp-vanishing",
        vanishing,
        "Mean nuclear norm of the gradient under a clip that grows like T^(1/6)",
        "Points are means over seeds with 95% intervals; the dashed line is Theorem 3.4's bound "
        "with Corollary B.6's rule, the grey one its rate with the proved constant from the "
        "smallest T. The dotted line is what no gradient of this problem exceeds: a bound above "
        "it says nothing.",
    ),
)
