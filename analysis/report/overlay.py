"""Draw the curves of many runs in one figure, in which check boxes select the visible runs.

This module computes the positions of all lines. The template assets/overlay.html draws the figure
with CSS and without scripts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmuon.analysis.report.numbers import number

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 326
LEFT, RIGHT, TOP, BOTTOM = 88, 530, 18, 278  # edges of the axes; wide labels move the left edge
GAP = 8  # distance between an axis and its labels
LETTERS = 16  # font size of the labels on narrow screens, the largest size (see assets/page.css)
# Advance widths of DejaVu Sans, one of the widest common fonts, in units of the font size.
DIGIT = 0.6363
ADVANCE = {"−": 0.8379, "+": 0.8379, ".": 0.3179, "e": 0.6153}
MOST = 200  # maximum number of points of a curve (approximately)
FIRST = "test loss", "train loss", "accuracy"  # order of measures with equally many runs
WIDE_RANGE = 100.0  # ratio of largest to smallest value above which the y axis is logarithmic
FEW_DECADES = 2.7  # a shorter logarithmic axis also gets ticks at 2 and 5 times powers of ten
ROOM = 0.02  # free space at each end of an axis, as a share of its length
UNEVEN = 10.0  # ratio of longest to shortest run above which the x axis is logarithmic
# The contrast to the light page and to the dark page is at least 3:1 (WCAG 2.2, 1.4.11).
COLOURS = "#2f7fd1", "#d2691e", "#1f9a6a", "#c2559b", "#8a6fd8", "#8a7a55"
DASHES = "", "7 3", "2 3", "9 3 2 3"


@dataclass(frozen=True)
class DrawnRun:
    """A run that the reader can select: its name, a note, and its curve for each measure."""

    name: str
    about: str
    curves: Mapping[str, Points]


@dataclass(frozen=True)
class Axis:
    """An axis for values from `low` to `high`, drawn from position `start` to position `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, end: float, wide: float = math.inf
    ) -> "Axis":
        """Make an axis that contains all values.

        The axis is logarithmic if all values are positive and the largest value is more than `wide`
        times the smallest value.
        """
        low, high = min(values), max(values)
        log = low > 0 and high > wide * low
        if log:
            low, high = math.log10(low), math.log10(high)
        room = max(0.5, 1e-9 * abs(low)) if low == high else ROOM * (high - low)
        return cls(low - room, high + room, start, end, log)

    def at(self, value: float) -> float:
        """Return the position at which a value is drawn."""
        scaled = math.log10(value) if self.log else value
        return self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, integer: bool = False) -> list[float]:
        """Return round values between the ends of the axis."""
        if self.log and self.high - self.low < FEW_DECADES:
            powers = range(math.floor(self.low), math.ceil(self.high))
            candidates = (factor * 10.0**power for power in powers for factor in (1, 2, 5))
            return [tick for tick in candidates if self.low <= math.log10(tick) <= self.high]
        smallest_step = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(smallest_step))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest_step)
        step = max(1, round(step)) if integer or self.log else step
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        candidates = (place * step for place in range(first, last + 1))
        return [10.0**tick if self.log else tick for tick in candidates]


def drawing(runs: Sequence[DrawnRun]) -> dict[str, Any]:
    """Return the values for the template assets/overlay.html.

    The values describe the line style of each run, and one panel per measure. The measure that most
    runs recorded comes first. The result is empty if no run recorded a finite value.
    """
    count = Counter[str]()
    for run in runs:
        for name, points in run.curves.items():
            count[name] += any(math.isfinite(y) for _, y in points)
    if not count:
        return {}
    rank = {name: place for place, name in enumerate(FIRST)}
    measures = sorted(count, key=lambda name: (-count[name], rank.get(name, len(FIRST))))
    cycle = len(COLOURS)
    return {
        "runs": [{"name": run.name, "about": run.about, "colour": COLOURS[place % cycle],
                  "dash": DASHES[place // cycle % len(DASHES)]} for place, run in enumerate(runs)],
        "panels": {name: _panel(runs, name) for name in measures},
        "boxes": [f"{kind}-{place}" for kind, items in (("run", runs), ("measure", measures))
                  for place in range(len(items))],
        "width": WIDTH, "height": HEIGHT, "start": LEFT, "right": RIGHT, "top": TOP,
        "bottom": BOTTOM, "gap": GAP,
    }  # fmt: skip


def _panel(runs: Sequence[DrawnRun], measure: str) -> dict[str, Any]:
    """Return the axes of one measure, and a line for each run that recorded this measure.

    The result is empty if no run recorded a finite value of this measure.
    """
    curves = {
        place: [(x, y) for x, y in run.curves.get(measure, ()) if math.isfinite(y)]
        for place, run in enumerate(runs)
    }
    curves = {place: points for place, points in curves.items() if points}
    if not curves:
        return {}
    all_points = [point for points in curves.values() for point in points]
    ends = [max(points)[0] for points in curves.values()]
    y = Axis.of([value for _, value in all_points], BOTTOM, TOP, WIDE_RANGE)
    beside = [(y.at(tick), number(tick, 6)) for tick in y.ticks()]
    left = max([LEFT, *(2 * GAP + _extent(text) for _, text in beside)])
    uneven = max(ends) > UNEVEN * min(ends)
    if uneven:  # round 0 cannot be shown on a logarithmic axis
        curves = {
            place: [point for point in points if point[0] > 0] for place, points in curves.items()
        }
        all_points = [point for points in curves.values() for point in points]
    x = Axis.of([value for value, _ in all_points], left, RIGHT, 1.0 if uneven else math.inf)
    below: list[tuple[float, str]] = []
    for tick in x.ticks(integer=True):  # skip ticks whose labels would cover the previous label
        at, text = x.at(tick), number(tick, 6)
        if not below or at - below[-1][0] > (_extent(text) + _extent(below[-1][1])) / 2:
            below.append((at, text))
    paths = {}
    for place, points in curves.items():
        if len(points) > MOST:  # keep the first point in each part of the axis, and the last point
            parts = {
                round(x.at(value) / (RIGHT - left) * MOST): value for value, _ in reversed(points)
            }
            kept_x = {points[-1][0], *parts.values()}
            points = [point for point in points if point[0] in kept_x]
        path = "L".join(f"{x.at(a):.2f} {y.at(b):.2f}" for a, b in points)
        paths[place] = f"M{path}" + ("h6" if len(points) == 1 else "")  # one point becomes a dash
    return {"left": left, "log": x.log, "beside": beside, "below": below, "paths": paths}


def _extent(text: str) -> float:
    """Return the width of a printed number on a narrow screen, in the length unit of the figure."""
    return LETTERS * sum(ADVANCE.get(char, DIGIT) for char in text)
