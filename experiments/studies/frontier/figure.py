"""Accuracy against bound / B."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.frontier.findings import NAMES, TENTH, frontier, of

LINES = dict(zip(NAMES, ("-", "--"), strict=True))
MANY = 300  # points, which are small


@style.styled
def by_share(rows: Columns, narrow: bool = False) -> Figure:
    """Above, every run and horizon as a point, and the best accuracy up to each bound / B as a
    step; below, the test and train losses of these best."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    figure, panels = style.canvas(2 * len(starts), narrow, 2.3, len(starts))
    above, below = panels[: len(starts)], panels[len(starts) :]
    for axes, under, start in zip(above, below, starts, strict=True):
        for (kind, name), look in zip(NAMES.items(), style.SERIES, strict=False):
            _draw(axes, under, rows, of(rows, start, kind) & (rows["share"] < 10), look, kind, name)
        axes.set_title(f"X⁰ {start}", loc="left")
        under.set_title(f"X⁰ {start}: losses of the best", loc="left")
    for axes in panels:
        axes.axvline(TENTH, color=style.GREY, lw=1, ls=":")
        axes.set_xlim(0.8 * rows["share"].min(), min(10.0, 1.25 * rows["share"].max()))
        style.log_x(axes)
        axes.set_xlabel("bound / B")
    for group in (above, below):
        style.alike(group)
    for axes in above:
        axes.set_ylim(bottom=0)
    for group, label in ((above, "held-out accuracy"), (below, "loss")):
        for axes in group[: len(starts) if narrow else 1]:
            axes.set_ylabel(label)
    style.legend_below(figure, _labels(above[0]), 1 if narrow else 3)
    return figure


def _draw(above: Axes, below: Axes, rows: Columns, seen: np.ndarray, look: tuple[str, str],
          kind: str, name: str) -> None:  # fmt: skip
    """One kind of constants in both panels."""
    colour, marker = look
    above.plot(rows["share"][seen], rows["accuracy"][seen], marker, color=colour, mew=0,
               ms=2 if seen.sum() > MANY else 4, rasterized=True)  # fmt: skip
    if not len(places := frontier(rows, seen)):
        return
    x, top = rows["share"][places], rows["accuracy"][places]
    end = rows["share"][seen].max()  # as far as there are points
    above.step([*x, end], [*top, top[-1]], LINES[kind], color=colour, where="post", lw=1.4,
               label=f"best with constants of {name}")  # fmt: skip
    for loss, full in (("test_loss", colour), ("train_loss", "none")):
        below.plot(x, rows[loss][places], marker, color=colour, ms=4, mfc=full, mew=0.9)


def _labels(axes: Axes) -> Axes:
    """With what tells test from train below."""
    for label, full in (("test loss", style.BLACK), ("train loss", "none")):
        axes.plot([], [], "o", color=style.BLACK, ms=4, mfc=full, mew=0.9, label=label)
    axes.plot([], [], ":", color=style.GREY, lw=1, label="a tenth of B")
    return axes


PICTURES = (
    Picture(
        "frontier",
        by_share,
        "Held-out accuracy against the bound as a part of the loss's range",
        "Above, each point is a run after some round, with the bound of a run that ends there; "
        "lines are the best accuracy at a bound that is no larger. Below are the losses of these "
        "best: full marks held out, hollow ones on the clients' samples. Left of the dotted line "
        "the bound is below a tenth of B. Higher and further left is better; right of 1 a bound "
        "says nothing. Certificates after the run (`realized`) are not drawn: they certify one "
        "run's neighbours, and are no bound of the gap.",
    ),
)
