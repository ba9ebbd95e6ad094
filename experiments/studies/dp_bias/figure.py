"""The bias of an orthogonalized noisy momentum, without and with 000's correction."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report.slopes import NORMAL
from fedmuon.analysis.report.style import (
    BLUE,
    RED,
    Columns,
    alike,
    canvas,
    legend_below,
    powers_of_2,
    styled,
)

KINDS = {"plain": (BLUE, "o", "without correction"), "corrected": (RED, "s", "corrected")}
TERMS = {"plain": r"$(\rho^2/2)\,\Delta Q$", "corrected": r"$-(\rho^4/4)\,\Delta^2 Q$"}


@styled
def orders(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each matrix: norms of both biases against rho, with their leading terms."""
    shapes = list(dict.fromkeys(rows["shape"].tolist()))
    figure, panels = canvas(len(shapes), narrow, 3.0)
    for axes, shape in zip(panels, shapes, strict=True):
        for kind in KINDS:
            _curves(axes, {name: column[rows["shape"] == shape] for name, column in rows.items()},
                    kind)  # fmt: skip
        axes.set_title(f"{shape} matrix", loc="left")
        axes.set_xlabel("noise ρ of an entry of the momentum")
        powers_of_2(axes, np.unique(rows["rho"]))
    alike(panels, log=True)
    panels[0].set_ylabel("norm of the bias")
    legend_below(figure, panels[0], 2)
    return figure


def _curves(axes: Axes, rows: Columns, kind: str) -> None:
    colour, marker, told = KINDS[kind]
    for way in ("taylor", "quadrature", "monte-carlo"):
        here = np.flatnonzero(rows["way"] == way)
        x, y = rows["rho"][here], rows[kind][here]
        if way == "taylor":
            axes.plot(x, y, color=colour, lw=1, label=TERMS[kind])
        elif way == "quadrature":
            axes.plot(x, y, marker, color=colour, ms=7, mfc="none", lw=0,
                      label=f"{told}, quadrature")  # fmt: skip
        else:
            reach = NORMAL * rows[f"{kind}_error"][here]
            axes.errorbar(x, y, np.minimum(reach, 0.999 * y), fmt=marker, color=colour, ms=3,
                          elinewidth=1, label=f"{told}, Monte Carlo")  # fmt: skip
