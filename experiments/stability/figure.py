"""The figure of all perturbations of a run, by client, with the certificates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import DRAWS, Columns, expected_maximum, share
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tables import SHIFTS, read_csv
from fedmuon.core.files import require_sound, sums_of

SHIFTS_FILE = "shifts.csv"


def census_panels(
    neighbours: Columns,
    narrow: bool = False,
    width: float = 0.0,
    *,
    bound: Mapping[str, Any] | None = None,
    shifts: Columns | None = None,
) -> Figure:
    """Draw the perturbations of all neighbours of one run by client, with the certificates.

    The second panel shows the perturbations divided by their certificates. Without certificates,
    the second panel shows the perturbations. `bound` is the content of bound.json, whose bound is
    in the legend, because it is a loss and the panels show distances. `shifts` are the columns of
    shifts.csv, which runs with client neighbours have. A third panel then shows them.
    """
    panels = 2 if shifts is None else 3
    figure, axes = style.canvas(panels, narrow, 3.6, 2, width)  # room for a legend of five lines
    left, right = axes[:2]
    if shifts is not None:
        grid = axes[2].get_gridspec()
        assert grid is not None
        axes[2].set_subplotspec(grid[-1, :])  # the whole row
        draw_shifts(axes[2], shifts)
    draw_strips(left, neighbours)
    if bound is not None:
        left.plot([], [], " ", label=bound_words(bound))
    style.legend(left, 1)

    # The distribution of this share over neighbours, and the maximum of perturbations and shares.
    part, name = share(neighbours), "perturbation / certificate"
    if np.isnan(part).any():
        part, name = neighbours["perturbation"], r"perturbation $\Vert X-X'\Vert_F$"
    right.ecdf(part, color=style.BLUE, lw=1.6, label=f"all {len(part)} neighbours")
    right.axvline(part.max(), color=style.BLACK, lw=1.2, label=f"largest: {number(part.max(), 3)}")
    if len(part) >= 10 * DRAWS:  # with fewer neighbours, other draws could look different
        mean = expected_maximum(part, DRAWS)
        label = f"largest of {DRAWS} random, on average: {number(mean, 3)}"
        right.axvline(mean, color=style.ORANGE, lw=1.4, ls="--", label=label)
    if "certificate" in name:  # the axis shows how far the neighbours are from their certificates
        right.axvline(1.0, color=style.GREY, lw=1.2, ls=":", label="certificate")
        right.set_xlim(0, 1.05 * max(1.0, float(part.max())))
    else:
        right.set_xlim(left=0)
    right.set_ylim(0, 1.02)
    right.grid(axis="y", color=style.GREY, alpha=0.25, lw=0.6)
    right.set_xlabel(name)
    right.set_ylabel("share of neighbours")
    style.legend(right, 1)
    return figure


census_figure = style.styled(census_panels)


def shifts_of(folder: Path) -> Columns | None:
    """Return the columns of shifts.csv, or None if the run has no such file."""
    if SHIFTS_FILE not in sums_of(folder):
        return None
    require_sound(folder, [SHIFTS_FILE])
    return read_csv(folder / SHIFTS_FILE, SHIFTS)


def bound_words(record: Mapping[str, Any]) -> str:
    """Return the bound in bound.json as an entry of the legend, with its share of the range B."""
    if (value := record["value"]) is None:
        return "no bound on the gap $F-\\hat F$"
    top = record.get("range", 1.0)  # folders of old versions have no range, which was 1
    share = f" = {number(value / top, 3)} $B$" + ", vacuous" * (value >= top) if top else ""
    return (
        f"bound on the gap $F-\\hat F$: {number(value, 3)}{share}\n"
        "($B$: range of the loss; the axis shows distances, not losses)"
    )


def in_order(neighbours: Columns) -> tuple[np.ndarray, str]:
    """Return the clients in increasing order, and the name of the quantity that orders them.

    The quantity is the certificate. If certificates are unknown, it is the exposure, and if that is
    unknown, too, the perturbation.
    """
    clients = np.unique(neighbours["client"])
    names = {"certificate": "certificate", "exposure": "exposure $Y_i(C)$"}
    complete = (name for name in names if not np.isnan(neighbours[name]).any())
    key = next(complete, "perturbation")
    largest = [neighbours[key][neighbours["client"] == i].max() for i in clients]
    return clients[np.argsort(largest, kind="stable")], names.get(key, "largest perturbation")


def draw_strips(axes: Axes, neighbours: Columns) -> None:
    """Draw a quantile plot of each client's perturbations, and a bar at its certificate."""
    (clients, order), moved = in_order(neighbours), neighbours["perturbation"]
    rank, promised, idle = np.empty(len(moved)), np.empty(len(clients)), []
    for place, i in enumerate(clients, 1):
        rows = np.flatnonzero(neighbours["client"] == i)
        within = (np.arange(len(rows)) + 0.5) / len(rows) * 0.7 - 0.35  # smallest value on the left
        rank[rows] = place + within[np.argsort(np.argsort(moved[rows], kind="stable"))]
        promised[place - 1] = neighbours["certificate"][rows].max()
        idle += [place] if (moved[rows] == 0).any() else []
    up, size = moved > 0, 1.8 if len(moved) > 300 else 3.5
    axes.plot(rank[up], moved[up], "o", color=style.BLUE, ms=size, mew=0,
              rasterized=True, label="one neighbour")  # fmt: skip
    places, finite = np.arange(1, len(clients) + 1), (promised > 0) & np.isfinite(promised)
    if finite.any():
        axes.hlines(promised[finite], places[finite] - 0.4, places[finite] + 0.4, color=style.BLACK,
                    lw=1.6, label="certificate")  # fmt: skip
    if idle:  # a log axis has no zero, so zeros are marked at the bottom
        label = f"{(moved == 0).sum()} of {len(moved)} are 0 (not on the log axis)"
        axes.plot(idle, [0.02] * len(idle), "x", color=style.RED, ms=5,
                  transform=axes.get_xaxis_transform(), label=label)  # fmt: skip
    style.log_y(axes)
    axes.set_xlim(0.3, len(clients) + 0.7)
    if len(clients) <= 20:  # with more clients, the numbers would overlap
        turn = 90 if len(clients) > 10 else 0
        axes.set_xticks(range(1, len(clients) + 1), [f"{i:.0f}" for i in clients], rotation=turn)
        axes.set_xlabel(f"client, in increasing order of {order}")
    else:
        axes.set_xlabel(f"clients in increasing order of {order}")
    axes.set_ylabel(rf"perturbation $\Vert X-X'\Vert_F${style.scale_of(axes.yaxis)}")


def draw_shifts(axes: Axes, shifts: Columns) -> None:
    """Draw the shift of the worst measured client over rounds, with its certificate above."""
    rounds, client = shifts["round"], int(shifts["client"][0])
    certificate, shift = (  # both are 0 before the first round of the client
        np.where(shifts[name] > 0, shifts[name], np.nan) for name in ("certificate", "shift")
    )
    look = {"lw": 1.6, "marker": ".", "ms": 4}
    if np.isfinite(certificate).any():
        words = f"certificate after this round (client {client})"
        axes.plot(rounds, certificate, color=style.BLACK, label=words, **look)
    words = f"worst measured neighbour (client {client})"
    axes.plot(rounds, shift, color=style.BLUE, label=words, **look)
    style.log_y(axes)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel(rf"shift $\Vert X-X'\Vert_F${style.scale_of(axes.yaxis)}")
    style.legend(axes, 1)
