"""Figure of a run's clients: histograms of their last records, and the drift by round."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.numbers import digits
from fedmuon.core.files import Record
from fedmuon.experiments.inspect.clients import RANKED_BY, known_names, last_of_each, word_of
from fedmuon.runs.directory import CLIENTS, client_records

BAND = (0.1, 0.9)  # quantiles of the drift
TITLE = "Clients"
CAPTION = (
    "The histograms show the last record of each client: its loss after its local steps and, if it "
    "has its own test samples, its score on them. The curve shows the median of the clients' drift "
    "‖x − X‖ by round, with a band from the 10% to the 90% quantile."
)


def clients_picture(folder: Path) -> list[Picture]:
    """Return the clients' figure for a page, or an empty list if the run has no client records."""
    if not (folder / CLIENTS).exists() or not (records := client_records(folder)):
        return []
    return [Picture("client-records", partial(clients_figure, records), TITLE, CAPTION)]


@style.styled
def clients_figure(records: Sequence[Record], narrow: bool = False) -> Figure:
    """Draw histograms of the clients' last losses and scores, and the drift by round."""
    last = last_of_each(records)
    names = ["loss_after", *known_names(RANKED_BY[:2], last)[:1]]
    figure, panels = style.canvas(len(names) + 1, narrow, 2.6)
    for axes, name, (colour, _) in zip(panels, names, style.SERIES, strict=False):
        values = np.array([record[name] for record in last if name in record])
        count = int(np.clip(np.ceil(2 * np.sqrt(len(values))), 1, 20))  # number of bins, 1 to 20
        bins = np.histogram_bin_edges(values, count).tolist()  # equal values give a single bin
        axes.hist(values, bins=bins, color=colour, edgecolor="white", lw=0.6)
        mean = float(values.mean()) if len(values) else np.nan
        axes.axvline(mean, color=style.BLACK, lw=1.2, ls="--", label=f"mean {digits(mean, 3)}")
        axes.set_xlabel(f"{word_of(name)}{' the local steps' * (name == 'loss_after')}")
        axes.set_ylabel("clients")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        style.legend(axes, 1)
    _draw_drift(panels[-1], records)
    panels[-1].xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    style.legend(panels[-1], 1 if len(names) > 1 and not narrow else 2)
    return figure


def _draw_drift(axes: Axes, records: Sequence[Record]) -> None:
    by_round: dict[int, list[float]] = {}
    for record in records:
        by_round.setdefault(record["round"], []).append(record.get("drift", np.nan))
    rounds = sorted(by_round)
    low, middle, high = np.array([
        np.nanquantile(by_round[number], [BAND[0], 0.5, BAND[1]]) for number in rounds
    ]).T  # fmt: skip
    mark = "o" if len(rounds) <= 12 else ""
    axes.fill_between(rounds, low, high, color=style.GREEN, alpha=0.25, lw=0, label="10% to 90%")
    axes.plot(rounds, middle, color=style.GREEN, lw=1.4, marker=mark, ms=3, label="median")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_ylabel(r"drift $\Vert x-X\Vert$")
