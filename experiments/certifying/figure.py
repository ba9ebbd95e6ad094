"""The certificates of a run as a picture."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.numbers import number
from fedmuon.experiments.certifying.rows import RiskCertificate, RiskCertificates

MARKS = {"certified": "o", "estimated": "D"}


def panels(certificates: RiskCertificates, narrow: bool = False, width: float = 0.0) -> Figure:
    """Draw the certificates of each loss beside the train and test values."""
    measures = [name for name in ("error", "loss") if name in certificates.train]
    figure, axes = style.canvas(len(measures), narrow, 2.6, width=width)
    for axis, measure in zip(axes, measures, strict=True):
        rows = [
            row for row in certificates.rows if row.measure == measure and row.value is not None
        ]
        _draw(axis, certificates, measure, rows)
    style.legend_below(figure, axes[0], 4)
    return figure


def _draw(
    axis: Axes, certificates: RiskCertificates, measure: str, rows: Sequence[RiskCertificate]
) -> None:
    axis.axvline(certificates.train[measure], color=style.BLUE, lw=1.4, label="train")
    if measure in certificates.test:
        axis.axvline(certificates.test[measure], color=style.ORANGE, lw=1.4, ls="--", label="test")
    for status, mark in MARKS.items():
        chosen = [(place, row.value) for place, row in enumerate(rows) if row.status == status]
        filled = style.BLACK if status == "certified" else "none"
        axis.plot(
            [value for _, value in chosen], [place for place, _ in chosen], mark,
            color=style.BLACK, markerfacecolor=filled, ls="none", label=f"{status}, at most",
        )  # fmt: skip
    for place, row in enumerate(rows):
        if row.value is not None:
            axis.annotate(
                number(row.value, 3), (row.value, place), xytext=(6, 0), fontsize=8,
                textcoords="offset points", va="center",
            )  # fmt: skip
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1.12)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.grid(axis="x", color=style.GREY, alpha=0.25, lw=0.6)
    axis.set_xlabel("error rate" if measure == "error" else "loss $1 - p_y$")


figure = style.styled(panels)
