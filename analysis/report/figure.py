"""Losses and what else was measured, by round, of one run or of several side by side."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmuon.analysis.report.overlay import UNEVEN
from fedmuon.analysis.report.style import SERIES, canvas, legend_below, log_x, styled

Records = Sequence[Mapping[str, Any]]
LEFT_OUT = ("train_seconds", "seconds", "round", "test_gap", "client_loss")
Look = tuple[str, str, float]  # the line's style, its marks where they are few, its width
PLAIN: Look = ("-", "o", 1.2)
LOSSES: dict[str, Look] = {
    "train_loss": PLAIN,
    "test_loss": ("--", "s", 1.2),
    "client_loss": ("-", "", 0.6),  # of every round, whatever is evaluated
}
WORDS = {"train loss": "solid", "test loss": "dashed", "client loss": "thin"}
FEW = 12  # evaluations that are marked


@styled
def by_round(curves: Mapping[str, Sequence[Records]], narrow: bool = False) -> Figure:
    """Every named group of runs: mean over its seeds, and from the least to the largest."""
    measures, single = _measures(curves), len(curves) == 1
    figure, panels = canvas(1 + len(measures), narrow, 2.9)
    for place, (name, runs) in enumerate(curves.items()):
        colour = SERIES[place % len(SERIES)][0]
        for other, (loss, look) in enumerate(LOSSES.items()):
            label = loss.replace("_", " ")
            label, hue = (label, SERIES[other][0]) if single else (f"_{name}, {label}", colour)
            _draw(panels[0], runs, loss, hue, look, label)
        if not single:
            panels[0].plot([], [], color=colour, label=name)  # one label for all its losses
        for axes, measure in zip(panels[1:], measures, strict=True):
            _draw(axes, runs, measure, colour, PLAIN, "")
    _name_losses(panels[0])
    if uneven := _uneven(curves):
        panels[0].set_xscale("log")
    for axes, measure in zip(panels, ["loss", *measures], strict=True):
        axes.set_ylabel(measure.replace("_", " "))
        axes.set_xlabel("round")
        axes.set_xlim(panels[0].get_xlim())
        if uneven:
            log_x(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    legend_below(figure, panels[0], 1 if narrow else 3 if single else 2)
    return figure


def in_words(figure: Figure) -> str:
    """What the lines of these curves are, read off the figure that was drawn."""
    losses, *_ = figure.axes
    labels = [str(line.get_label()) for line in losses.lines if len(np.asarray(line.get_xdata()))]
    kinds = [f"{word} the {loss}" for loss, word in WORDS.items()
             if any(label.endswith(loss) for label in labels)]  # fmt: skip
    several = any("," in label for label in labels)
    bands = any(axes.collections for axes in figure.axes)
    log = losses.get_xscale() == "log"
    said = ["rounds on a logarithmic axis" * log,
            "a colour a row of the table" if several else "", ", ".join(kinds),
            "means over seeds, bands from the least to the largest" if bands else ""]  # fmt: skip
    return f"By round: {'; '.join(filter(None, said))}."


def _measures(curves: Mapping[str, Sequence[Records]]) -> list[str]:
    """What is measured beside the losses."""
    records = chain(*chain(*curves.values()))
    numbers = [
        name
        for record in records
        if "train_loss" in record
        for name, value in record.items()
        if isinstance(value, float)
    ]
    return [name for name in dict.fromkeys(numbers) if name not in (*LEFT_OUT, *LOSSES)][:2]


def _uneven(curves: Mapping[str, Sequence[Records]]) -> bool:
    """Whether a run is so long that a shorter one could not be seen beside it."""
    lengths = [records[-1]["round"] for runs in curves.values() for records in runs if records]
    return max(lengths, default=0) > UNEVEN * min(lengths, default=0)


def _name_losses(axes: Any) -> None:
    """One label for each loss that is drawn in all colours, where there are several."""
    drawn = [str(line.get_label()) for line in axes.lines]
    for loss, (style, _, width) in LOSSES.items():
        name = loss.replace("_", " ")
        others = [one for one in drawn if one.startswith("_") and not one.endswith(name)]
        if others and any(one.endswith(f", {name}") for one in drawn):
            axes.plot([], [], style, color="0.4", lw=width, label=name)


def _draw(
    axes: Any, runs: Sequence[Records], name: str, colour: str, look: Look, label: str
) -> None:
    """Mean over the runs, and their range where the line has marks."""
    found = [[(one["round"], one[name]) for one in records if name in one] for records in runs]
    if not all(found):
        return
    style, mark, width = look
    rounds = sorted(set.intersection(*({r for r, _ in one} for one in found)))
    values = np.array([[dict(one)[r] for r in rounds] for one in found])
    marks = {"marker": mark if len(rounds) <= FEW else "", "mfc": "none" if mark == "s" else colour}
    axes.plot(rounds, values.mean(0), style, color=colour, lw=width, label=label, ms=4, **marks)
    if len(found) > 1 and mark:
        axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
