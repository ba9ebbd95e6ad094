"""Losses and what else was measured, by round, of one run or of several side by side."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.style import SERIES, canvas, legend_below, styled

Records = Sequence[Mapping[str, Any]]
LEFT_OUT = ("train_seconds", "seconds", "round", "test_gap", "client_loss")
LOSSES = {"train_loss": "-", "test_loss": "--"}


@styled
def by_round(curves: Mapping[str, Sequence[Records]], narrow: bool = False) -> Figure:
    """Every named group of runs: mean over its seeds, and from the least to the largest."""
    measures = _measures(curves)
    figure, panels = canvas(1 + len(measures), narrow, 2.9)
    for place, (name, runs) in enumerate(curves.items()):
        colour = SERIES[place % len(SERIES)][0]
        for loss, style in LOSSES.items():
            label = loss.replace("_", " ")
            label = f"{name}, {label}" if len(curves) > 1 else label
            _draw(panels[0], runs, loss, colour, style, label)
        for axes, measure in zip(panels[1:], measures, strict=True):
            _draw(axes, runs, measure, colour, "-", "")
    for axes, measure in zip(panels, ["loss", *measures], strict=True):
        axes.set_ylabel(measure.replace("_", " "))
        axes.set_xlabel("round")
    legend_below(figure, panels[0], 1 if narrow else 2)
    return figure


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


def _draw(
    axes: Any, runs: Sequence[Records], name: str, colour: str, style: str, label: str
) -> None:
    found = [[(one["round"], one[name]) for one in records if name in one] for records in runs]
    if not all(found):
        return
    rounds = sorted(set.intersection(*({r for r, _ in one} for one in found)))
    values = np.array([[dict(one)[r] for r in rounds] for one in found])
    axes.plot(rounds, values.mean(0), style, color=colour, lw=1.2, label=label,
              marker="o" if len(rounds) == 1 else "")  # fmt: skip
    if len(found) > 1:
        axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
