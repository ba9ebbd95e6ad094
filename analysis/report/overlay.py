"""The curves of many runs in one drawing: who ticks a run sees it. No script: style sheets hide
what is not ticked, and show everything where they cannot."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

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
class Run:
    """A run to tick: its name, what else to say of it, and its curves by measure."""

    name: str
    about: str
    curves: Mapping[str, Points]


@dataclass(frozen=True)
class Axis:
    """An axis: where its ends are on the drawing, and whether they are those of logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def of(
        cls, values: Sequence[float], start: float, end: float, wide: float = math.inf
    ) -> "Axis":
        """One that reaches a little beyond the least value and the greatest; logarithmic where this
        is more than `wide` times that."""
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


def overlay(runs: Sequence[Run]) -> str:
    """All runs with boxes to tick, and their curves, of one measure at a time."""
    if not (measures := _measures(runs)):
        return ""
    drawn = "".join(_panel(runs, name, place) for place, name in enumerate(measures))
    rules = [*(f"run-{place}" for place in range(len(runs))),
             *(f"measure-{place}" for place in range(len(measures)))]  # fmt: skip
    hidden = ",".join(f".overlay:has(#{one}:not(:checked)) .{one}" for one in rules)
    label = f"{', '.join(measures)} by round, of {len(runs)} runs"
    return (
        f'<section class="overlay"><style>{hidden}{{display:none}}</style>'
        f"<fieldset><legend>Drawn by round</legend>{_radios(measures)}</fieldset>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{drawn}</svg>'
        f'<fieldset class="of"><legend>Runs</legend>{_boxes(runs)}</fieldset></section>'
    )


def _measures(runs: Sequence[Run]) -> list[str]:
    """What was measured; first what the most runs have."""
    count = Counter[str]()
    for run in runs:
        count.update({name: bool(_finite(points)) for name, points in run.curves.items()})
    rank = {name: place for place, name in enumerate(FIRST)}
    return sorted(count, key=lambda name: (-count[name], rank.get(name, len(FIRST))))


def look(place: int) -> str:
    """How the line of a run is drawn: another colour, and after all of them another dash."""
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[place % len(COLOURS)]}"' + f' stroke-dasharray="{dash}"' * bool(dash)


def _radios(measures: Sequence[str]) -> str:
    return "".join(
        f'<label><input type="radio" name="measure" id="measure-{place}"{" checked" * (not place)}>'
        f"{escape(name)}</label> "
        for place, name in enumerate(measures)
    )


def _boxes(runs: Sequence[Run]) -> str:
    return "".join(
        f'<label><input type="checkbox" id="run-{place}" checked><svg viewBox="0 0 28 8" '
        f'aria-hidden="true"><path d="M0 4H28" {look(place)}/></svg>'
        f"<span>{escape(run.name)} <small>{escape(run.about)}</small></span></label>"
        for place, run in enumerate(runs)
    )


def _panel(runs: Sequence[Run], measure: str, number: int) -> str:
    """The axes of a measure, and a line a run that has it."""
    held = {place: _finite(run.curves.get(measure, ())) for place, run in enumerate(runs)}
    held = {place: points for place, points in held.items() if points}
    if not held:
        text = f'<text x="{LEFT}" y="{TOP + 20}">nothing finite was measured</text>'
        return f'<g class="measure-{number}">{text}</g>'
    every = [point for points in held.values() for point in points]
    ends = [max(points)[0] for points in held.values()]
    uneven = max(ends) > UNEVEN * min(ends)
    y = Axis.of([one for _, one in every], BOTTOM, TOP, WIDE_RANGE)
    x = Axis.of([one for one, _ in every], _left(y), RIGHT, 1.0 if uneven else math.inf)
    lines = "".join(
        f'<path class="run-{place}" d="{_path(_thinned(points, x), x, y)}" {look(place)}>'
        f"<title>{escape(runs[place].name)}</title></path>"
        for place, points in held.items()
    )
    return f'<g class="measure-{number}">{_axes(x, y)}{lines}</g>'


def _left(y: Axis) -> float:
    """Where the axes begin, so that the widest label of y fits beside them."""
    return max([LEFT, *(2 * GAP + _extent(label(one)) for one in y.ticks())])


def _spread(x: Axis) -> list[float]:
    """The ticks of x, without those whose labels would cover the one before."""
    kept: list[float] = []
    for one in x.ticks(integer=True):
        wide = _extent(label(one)) + _extent(label(kept[-1])) if kept else 0.0
        if not kept or x.at(one) - x.at(kept[-1]) > wide / 2:
            kept.append(one)
    return kept


def label(value: float) -> str:
    """A tick's value as it is written beside the axis."""
    return number(value, 6)


def _extent(text: str) -> float:
    """The width of a number on a narrow screen, in units of the drawing."""
    return LETTERS * sum(ADVANCE.get(one, DIGIT) for one in text)


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _thinned(points: Points, x: Axis) -> list[tuple[float, float]]:
    """The points; of many the first in each of `MOST` parts of the axis, and the last."""
    if len(points) <= MOST:
        return [*points]
    parts = {round(x.at(one) / (x.end - x.start) * MOST): one for one, _ in reversed(points)}
    kept = {points[-1][0], *parts.values()}
    return [point for point in points if point[0] in kept]


def _path(points: Points, x: Axis, y: Axis) -> str:
    """A polygon through the points; a single one is a dash."""
    found = [f"{x.at(a):.2f} {y.at(b):.2f}" for a, b in points]
    return f"M{'L'.join(found)}" + ("h6" if len(found) == 1 else "")


def _axes(x: Axis, y: Axis) -> str:
    """Both axes with their ticks."""
    left = x.start
    frame = f'<path class="axis" d="M{left:.1f} {TOP}V{BOTTOM}H{RIGHT}"/>'
    below = (
        f'<text x="{x.at(one):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{label(one)}</text>'
        for one in _spread(x)
    )
    beside = (
        f'<path class="grid" d="M{left:.1f} {y.at(one):.1f}H{RIGHT}"/>'
        f'<text x="{left - GAP:.1f}" y="{y.at(one) + 4:.1f}" text-anchor="end">{label(one)}</text>'
        for one in y.ticks()
    )
    text = "round, on a logarithmic axis" if x.log else "round"
    name = f'<text x="{(left + RIGHT) / 2:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{text}</text>'
    return f"{frame}{''.join(beside)}{''.join(below)}{name}"
