"""Figure of a run's profile: which kinds of work took the time, per process and per round."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture
from fedmuon.core.files import Record
from fedmuon.experiments.inspect.profile import Shares, processes_of, rounds_of_workers, shares
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.runs import work_categories as kinds
from fedmuon.runs.profile_records import PROFILE, added, grouped

HATCH = "////"  # distinguishes categories of the same colour
LOOKS = {  # category -> colour and hatch
    kinds.GRADIENTS: (style.BLUE, ""),
    kinds.ORTHOGONALIZATION: (style.ORANGE, ""),
    kinds.OPTIMIZER: (style.GREEN, ""),
    kinds.COPIES: (style.SKY, ""),
    kinds.CHECKS: (style.GREEN, HATCH),
    kinds.PRIVACY: (style.ORANGE, HATCH),
    kinds.DATA: (style.BLUE, HATCH),
    kinds.MESSAGES: (style.RED, ""),
    kinds.EVALUATION: (style.PINK, ""),
    kinds.RECORDS: (style.PINK, HATCH),
    kinds.IDLE: (style.GREY, ""),
    kinds.OTHER: (style.BLACK, ""),
}
SMALL = 0.005  # largest share of a category that is drawn as `other`
LONG = 3.0  # a bar is cut if it is longer than this multiple of the median
NAMED = 3  # maximum number of cut bars whose heights are written
BARS = 12  # maximum number of bars of processes
TITLE = "Where the time went"
CAPTION = (
    "The bars are divided into kinds of work, which stacks were sampled for. The time of a "
    "process is divided among the kinds in which it worked, so the parts add up to its time."
)


def profile_pictures(run: RunStatus) -> list[Picture]:
    """Return the figure of the profile for a page, or an empty list without a profile."""
    processes = processes_of(run)
    draw = partial(profile_figure, processes, run.rounds, rounds_of_workers(run.path))
    return [Picture("profile", draw, TITLE, CAPTION)] if processes else []


@style.styled
def profile_figure(
    processes: Sequence[Record],
    rounds: Sequence[Record],
    of_workers: Mapping[str, Sequence[Record]],
    narrow: bool = False,
) -> Figure:
    """Draw the shares of each process, and the seconds of groups of rounds.

    Args:
        processes: The profile of each process, from the summary.
        rounds: The records of the rounds.
        of_workers: The groups of rounds of each worker, by its name.
        narrow: Whether the figure is for a narrow page.
    """
    of_run, *workers = processes
    by_round = {record["round"]: record[PROFILE] for record in rounds if PROFILE in record}
    groups = {of_run["process"]: grouped(by_round, max(by_round, default=1))}
    if of_workers:
        groups["mean of workers"] = mean_groups([*of_workers.values()])
    figure, panels = style.canvas(1 + len(groups), narrow, 2.5)
    drawn = _drawn_categories([process["seconds"] for process in processes])
    if workers:
        _draw_processes(panels[0], processes, drawn)
    else:
        _draw_categories(panels[0], of_run, drawn)
    for axes, (name, group) in zip(panels[1:], groups.items(), strict=True):
        _draw_rounds(axes, group, drawn)
        axes.set_xlabel("round" + (f" ({name})" if workers else ""))
    if workers:  # otherwise, the first panel names the categories
        style.legend_below(figure, panels[0], 3 if narrow else 6)
    return figure


def _drawn_categories(processes: Sequence[Shares]) -> list[str]:
    """Return the categories that are large enough in a process to be drawn."""
    large = {
        name for seconds in processes for name, share in shares(seconds).items() if share > SMALL
    }
    small = any(name not in large for seconds in processes for name in seconds)
    return [name for name in kinds.CATEGORIES if name in large or (small and name == kinds.OTHER)]


def _parts(seconds: Shares, drawn: Sequence[str]) -> list[float]:
    """Return the seconds of the drawn categories. `other` contains all that are not drawn."""
    rest = sum(value for name, value in seconds.items() if name not in drawn)
    return [seconds.get(name, 0.0) + rest * (name == kinds.OTHER) for name in drawn]


def _look(category: str) -> dict[str, Any]:
    colour, hatch = LOOKS[category]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.4, "label": category}


def _draw_categories(axes: Axes, process: Record, drawn: Sequence[str]) -> None:
    """Draw a horizontal bar with the share of each category of a single process."""
    total = sum(process["seconds"].values())
    for place, (category, share) in enumerate(
        zip(drawn, _parts(shares(process["seconds"]), drawn), strict=True)
    ):
        axes.barh(place, share, height=0.75, **_look(category))
        axes.text(share, place, f" {share:.1%}", va="center", size=8)
    axes.set_yticks(range(len(drawn)), drawn)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)  # room for the text of the longest bar
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(f"share of {total:.3g} seconds")
    axes.tick_params(axis="y", length=0)


def _draw_processes(axes: Axes, processes: Sequence[Record], drawn: Sequence[str]) -> None:
    """Draw a horizontal bar of shares for each process."""
    shown = processes[:BARS]
    parts = np.array([_parts(shares(process["seconds"]), drawn) for process in shown])
    places, starts = np.arange(len(shown)), np.zeros(len(shown))
    for category, widths in zip(drawn, parts.T, strict=True):
        axes.barh(places, widths, left=starts, height=0.7, **_look(category))
        starts = starts + widths
    names = [f"{process['process']}\n{sum(process['seconds'].values()):.3g} s" for process in shown]
    axes.set_yticks(places, names)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    more = len(processes) - len(shown)
    axes.set_xlabel("share of the time" + (f" ({more} more workers not drawn)" if more else ""))
    axes.tick_params(axis="y", length=0)


def _draw_rounds(axes: Axes, groups: Sequence[Record], drawn: Sequence[str]) -> None:
    """Draw a bar for each group of rounds: the mean seconds per round."""
    firsts = np.array([group["first"] for group in groups], dtype=float)
    sizes = np.array([group["last"] - group["first"] + 1 for group in groups], dtype=float)
    parts = np.array([_parts(group["seconds"], drawn) for group in groups]).reshape(-1, len(drawn))
    bottom = np.zeros(len(groups))
    for category, heights in zip(drawn, parts.T, strict=True):
        heights = heights / sizes
        axes.bar(firsts - 0.5, heights, sizes * 0.9, bottom, align="edge", **_look(category))
        bottom = bottom + heights
    axes.set_xlim(0.5, groups[-1]["last"] + 0.5 if groups else 1.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("seconds per round")
    _cut_long_bars(axes, groups, bottom)


def _cut_long_bars(axes: Axes, groups: Sequence[Record], heights: np.ndarray) -> None:
    """End the axis below very long bars, such as that of the round in which workers start.

    A text states the rounds and the heights of these bars.
    """
    long = heights > LONG * np.median(heights)
    if not long.any():
        return
    axes.set_ylim(0, 1.5 * heights[~long].max())
    cut = [
        f"round {group['first']}: {height:.3g} s"
        for group, height, is_long in zip(groups, heights, long, strict=True)
        if is_long
    ]
    more = [f"and {len(cut) - NAMED} more"] if len(cut) > NAMED else []
    text = "\n".join([*cut[:NAMED], *more])
    axes.text(0.99, 0.99, text, transform=axes.transAxes, ha="right", va="top", size=7)


def mean_groups(workers: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the groups of rounds of several workers, with the mean of their seconds."""
    by_place: dict[tuple[int, int], list[Mapping[str, float]]] = {}
    for groups in workers:
        for group in groups:
            by_place.setdefault((group["first"], group["last"]), []).append(group["seconds"])
    return [
        {
            "first": first,
            "last": last,
            "seconds": {name: value / len(workers) for name, value in added(parts).items()},
        }
        for (first, last), parts in sorted(by_place.items())
    ]
