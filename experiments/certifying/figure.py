"""The certificates of a run as a picture."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.numbers import at_most
from fedmuon.core.errors import InputError
from fedmuon.experiments.certifying.group_tables import MOST, by_source
from fedmuon.experiments.certifying.groups import GroupCertificate, GroupCertificates
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
        chosen = [
            (place, row.value)
            for place, row in enumerate(rows)
            if row.status == status and row.value is not None
        ]
        if not chosen:
            continue
        filled = style.BLACK if status == "certified" else "none"
        axis.plot(
            [value for _, value in chosen], [place for place, _ in chosen], mark,
            color=style.BLACK, markerfacecolor=filled, ls="none", label=f"{status}, at most",
        )  # fmt: skip
    for place, row in enumerate(rows):
        if row.value is not None:
            axis.annotate(
                at_most(row.value, 3), (row.value, place), xytext=(6, 0), fontsize=8,
                textcoords="offset points", va="center",
            )  # fmt: skip
    names = [row.name for row in rows]
    labels = [
        f"{row.name}, {row.status}" if names.count(row.name) > 1 else row.name for row in rows
    ]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1.12)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axis.grid(axis="x", color=style.GREY, alpha=0.25, lw=0.6)
    axis.set_xlabel("error rate" if measure == "error" else "loss $1 - p_y$")


def group_panels(
    certificates: GroupCertificates, narrow: bool = False, width: float = 0.0
) -> Figure:
    """Draw the error of each class or client and its limits, one panel per source."""
    parts = {
        source: [row for row in rows if row.certified is not None][:MOST]
        for source, rows in by_source(certificates).items()
    }
    parts = {source: rows for source, rows in parts.items() if rows}
    if not parts:
        reasons = "; ".join(certificates.refused.values()).rstrip(".")
        raise InputError(f"there is no limit to draw: {reasons}.")
    height = 1.0 + 0.22 * max(map(len, parts.values()))
    figure, axes = style.canvas(len(parts), narrow, height, width=width)
    largest = max(row.certified or 0.0 for rows in parts.values() for row in rows)
    for axis, (source, rows) in zip(axes, parts.items(), strict=True):
        _draw_groups(axis, rows)
        axis.set_xlim(0, 1.05 * largest)
        worst = f", {MOST} worst of {certificates.groups[source]:,}"
        axis.set_title(source + worst * (certificates.groups[source] > MOST), loc="left")
    axes[0].set_ylabel(certificates.per)
    with_most = max(axes, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    style.legend_below(figure, with_most, 3)
    return figure


def _draw_groups(axis: Axes, rows: Sequence[GroupCertificate]) -> None:
    places = range(len(rows))
    errors = [math.nan if row.error is None else row.error for row in rows]
    limits = [math.nan if row.certified is None else row.certified for row in rows]
    axis.hlines(places, errors, limits, color=style.GREY, lw=1)
    axis.plot(errors, places, "D", ms=4, color=style.BLUE, ls="none", label="error")
    estimated = [math.nan if row.estimated is None else row.estimated for row in rows]
    if not np.isnan(estimated).all():
        axis.plot(estimated, places, "D", ms=4, color=style.BLACK, markerfacecolor="none",
                  ls="none", label="estimated, at most")  # fmt: skip
    axis.plot(limits, places, "o", ms=5, color=style.BLACK, ls="none", label="certified, at most")
    axis.set_yticks(places, [row.group for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", color=style.GREY, alpha=0.25, lw=0.6)
    axis.set_xlabel("error rate")


figure = style.styled(panels)
group_figure = style.styled(group_panels)


def figure_of(certificates: RiskCertificates | GroupCertificates) -> Figure:
    """Draw the limits of a run, or of its classes or clients."""
    if isinstance(certificates, RiskCertificates):
        return figure(certificates)
    return group_figure(certificates)
