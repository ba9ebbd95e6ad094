"""The curves of many runs in one drawing, where boxes to tick choose the runs.

This file decides what is where; assets/overlay.html draws it, with style sheets and no script.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmuon.analysis.report.numbers import number

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 326
LEFT, RIGHT, TOP, BOTTOM = 88, 530, 18, 278  # of the axes, which begin later where labels are wide
GAP = 8  # between an axis and its labels
LETTERS = 16  # size of the labels on narrow screens, where it is largest (see assets/page.css)
# Advance widths in DejaVu Sans, one of the widest fonts of a system, in units of the size.
DIGIT = 0.6363
ADVANCE = {"−": 0.8379, "+": 0.8379, ".": 0.3179, "e": 0.6153}
MOST = 200  # points of a curve
FIRST = "test loss", "train loss", "accuracy"  # of measures that equally many runs have
WIDE_RANGE = 100.0  # times the least value, from which its axis is logarithmic
FEW_DECADES = 2.7  # of a logarithmic axis, where 2 and 5 have ticks, too
ROOM = 0.02  # of an axis, beside the curves
UNEVEN = 10.0  # times the shortest run, from which rounds are
# At least 3:1 to white and to the dark page (WCAG 2.2, 1.4.11).
COLOURS = "#2f7fd1", "#d2691e", "#1f9a6a", "#c2559b", "#8a6fd8", "#8a7a55"
DASHES = "", "7 3", "2 3", "9 3 2 3"


@dataclass(frozen=True)
class DrawnRun:
    """A run to tick: its name, a note, and its curves by measure."""

    name: str
    about: str
    curves: Mapping[str, Points]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` (logarithms if `log`), drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, end: float, wide: float = math.inf
    ) -> "Axis":
        """Make an axis that holds all values, logarithmic if the largest exceeds `wide` times the
        least."""
        low, high = min(values), max(values)
        log = low > 0 and high > wide * low
        if log:
            low, high = math.log10(low), math.log10(high)
        room = max(0.5, 1e-9 * abs(low)) if low == high else ROOM * (high - low)
        return cls(low - room, high + room, start, end, log)

    def at(self, value: float) -> float:
        """Where a value is drawn."""
        scaled = math.log10(value) if self.log else value
        return self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, integer: bool = False) -> list[float]:
        """Round values between the ends."""
        if self.log and self.high - self.low < FEW_DECADES:
            powers = range(math.floor(self.low), math.ceil(self.high))
            every = (one * 10.0**power for power in powers for one in (1, 2, 5))
            return [one for one in every if self.low <= math.log10(one) <= self.high]
        least = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(one * power for one in (1, 2, 5, 10) if one * power >= least)
        step = max(1, round(step)) if integer or self.log else step
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        every = (place * step for place in range(first, last + 1))
        return [10.0**one if self.log else one for one in every]


def drawing(runs: Sequence[DrawnRun]) -> dict[str, Any]:
    """Return the values that assets/overlay.html draws: runs with their looks, a panel per measure.

    The measure that most runs have comes first. The result is empty if nothing was measured.
    """
    count = Counter[str]()
    for run in runs:
        for name, points in run.curves.items():
            count[name] += any(math.isfinite(y) for _, y in points)
    if not count:
        return {}
    rank = {name: place for place, name in enumerate(FIRST)}
    measures = sorted(count, key=lambda name: (-count[name], rank.get(name, len(FIRST))))
    many = len(COLOURS)
    return {
        "runs": [{"name": run.name, "about": run.about, "colour": COLOURS[place % many],
                  "dash": DASHES[place // many % len(DASHES)]} for place, run in enumerate(runs)],
        "panels": {name: _panel(runs, name) for name in measures},
        "boxes": [f"{kind}-{place}" for kind, every in (("run", runs), ("measure", measures))
                  for place in range(len(every))],
        "width": WIDTH, "height": HEIGHT, "start": LEFT, "right": RIGHT, "top": TOP,
        "bottom": BOTTOM, "gap": GAP,
    }  # fmt: skip


def _panel(runs: Sequence[DrawnRun], measure: str) -> dict[str, Any]:
    """The axes of a measure and a line for each run that has it; empty if nothing is finite."""
    held = {
        place: [(x, y) for x, y in run.curves.get(measure, ()) if math.isfinite(y)]
        for place, run in enumerate(runs)
    }
    held = {place: points for place, points in held.items() if points}
    if not held:
        return {}
    every = [point for points in held.values() for point in points]
    ends = [max(points)[0] for points in held.values()]
    y = Axis.of([one for _, one in every], BOTTOM, TOP, WIDE_RANGE)
    beside = [(y.at(one), number(one, 6)) for one in y.ticks()]
    left = max([LEFT, *(2 * GAP + _extent(text) for _, text in beside)])
    uneven = max(ends) > UNEVEN * min(ends)
    if uneven:  # a logarithmic axis has no round 0
        held = {place: [one for one in points if one[0] > 0] for place, points in held.items()}
        every = [point for points in held.values() for point in points]
    x = Axis.of([one for one, _ in every], left, RIGHT, 1.0 if uneven else math.inf)
    below: list[tuple[float, str]] = []
    for one in x.ticks(integer=True):  # those whose labels do not cover the one before
        at, text = x.at(one), number(one, 6)
        if not below or at - below[-1][0] > (_extent(text) + _extent(below[-1][1])) / 2:
            below.append((at, text))
    paths = {}
    for place, points in held.items():
        if len(points) > MOST:  # the first in each part of the axis, and the last
            parts = {round(x.at(one) / (RIGHT - left) * MOST): one for one, _ in reversed(points)}
            kept = {points[-1][0], *parts.values()}
            points = [point for point in points if point[0] in kept]
        path = "L".join(f"{x.at(a):.2f} {y.at(b):.2f}" for a, b in points)
        paths[place] = f"M{path}" + ("h6" if len(points) == 1 else "")  # a single one is a dash
    return {"left": left, "log": x.log, "beside": beside, "below": below, "paths": paths}


def _extent(text: str) -> float:
    """The width of a number on a narrow screen, in units of the drawing."""
    return LETTERS * sum(ADVANCE.get(one, DIGIT) for one in text)
