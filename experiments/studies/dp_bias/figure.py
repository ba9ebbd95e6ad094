"""The bias of an orthogonalized noisy momentum, without and with 000's correction."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.slopes import NORMAL

KINDS = {
    "plain": (style.BLUE, "o", "without correction"),
    "corrected": (style.RED, "s", "corrected"),
}
TERMS = {"plain": r"$(\rho^2/2)\,\Delta Q$", "corrected": r"$-(\rho^4/4)\,\Delta^2 Q$"}


@style.styled
def orders(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each matrix: norms of both biases against rho, with their leading terms."""
    shapes = list(dict.fromkeys(rows["shape"].tolist()))
    figure, panels = style.canvas(len(shapes), narrow, 3.0)
    for axes, shape in zip(panels, shapes, strict=True):
        for kind in KINDS:
            _curves(axes, where(rows, shape=shape), kind)
        axes.set_title(f"{shape} matrix", loc="left")
        axes.set_xlabel("noise ρ of an entry of the momentum")
        style.powers_of_2(axes, np.unique(rows["rho"]))
    style.alike(panels, log=True)
    panels[0].set_ylabel("norm of the bias")
    style.legend_below(figure, panels[0], 2)
    return figure


def _curves(axes: Axes, rows: Columns, kind: str) -> None:
    colour, marker, label = KINDS[kind]
    ways = {way: where(rows, way=way) for way in ("taylor", "quadrature", "monte-carlo")}
    at = {way: (part["rho"], part[kind]) for way, part in ways.items()}
    axes.plot(*at["taylor"], color=colour, lw=1, label=TERMS[kind])
    axes.plot(*at["quadrature"], marker, color=colour, ms=7, mfc="none", lw=0,
              label=f"{label}, quadrature")  # fmt: skip
    reach = np.minimum(NORMAL * ways["monte-carlo"][f"{kind}_error"], 0.999 * at["monte-carlo"][1])
    axes.errorbar(*at["monte-carlo"], reach, fmt=marker, color=colour, ms=3, elinewidth=1,
                  label=f"{label}, Monte Carlo")  # fmt: skip


PICTURES = (
    Picture(
        "dp-bias",
        orders,
        "Bias of the orthogonalized direction against the noise in the momentum",
        "Points are measured, with 95% intervals of Monte Carlo; lines are the leading terms "
        "(ρ²/2) ΔQ and −(ρ⁴/4) Δ²Q, from finite differences of Q. Points leave the lines where "
        "ρ is no longer small beside the smallest singular value.",
    ),
)
