"""Accuracy against bound / B."""

from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Picture
from fedmuon.experiments.studies.frontier.findings import NAMES, TENTH, frontier, of


@style.styled
def by_share(rows: Columns, narrow: bool = False) -> Figure:
    """Every run and horizon as a point, and the best accuracy up to each bound / B as a step."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    figure, panels = style.canvas(len(starts), narrow, 3.0)
    for axes, start in zip(panels, starts, strict=True):
        for (kind, name), (colour, marker) in zip(NAMES.items(), style.SERIES, strict=False):
            mine = of(rows, start, kind)
            x, y = frontier(rows, mine)
            seen = mine & (rows["share"] < 10)
            axes.plot(rows["share"][seen], rows["accuracy"][seen], marker, color=colour, ms=2.5,
                      alpha=0.3, mew=0, rasterized=True)  # fmt: skip
            axes.step(x[x < 10], y[x < 10], color=colour, where="post", lw=1.4,
                      label=f"constants of {name}")  # fmt: skip
        axes.axvline(TENTH, color=style.GREY, lw=1, ls=":")
        axes.set_title(f"X⁰ {start}", loc="left")
        style.log_x(axes)
        axes.set_xlabel("bound / B")
    style.alike(panels)
    panels[0].set_ylabel("held-out accuracy")
    style.legend_below(figure, panels[0], 1 if narrow else 2)
    return figure


PICTURES = (
    Picture(
        "frontier",
        by_share,
        "Held-out accuracy against the bound as a part of the loss's range",
        "Each point is a run after some round, with the bound of a run that ends there; lines are "
        "the best accuracy at a bound that is no larger. Left of the dotted line the bound is "
        "below a tenth of B. Higher and further left is better; right of 1 a bound says nothing.",
    ),
)
