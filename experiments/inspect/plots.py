"""Curves in text: a sparkline in one line, and a panel of braille dots with axes.

A braille character has 2 x 4 dots, so W x H characters are a picture of 2W x 4H dots.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from fedmuon.analysis.report.numbers import digits

BARS = "▁▂▃▄▅▆▇█"
BLANK = 0x2800  # the braille character without dots
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits by column, from top to bottom
Points = Sequence[tuple[float, float]]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the finite values as bars of eight heights, in at most `width` characters.

    If there are more than `width` values, each bar is the mean of several neighbouring values.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    ends = [len(finite) * place // count for place in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    return "".join(BARS[_level(mean, low, high, len(BARS))] for mean in means)


def panel(title: str, points: Points, width: int, height: int) -> list[str]:
    """Draw a curve in lines of exactly `width` characters.

    The first line is the title with the last value. Then `height` lines range from the maximum down
    to the minimum. The last line is the axis with the first and last x.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        lines = [title, "no finite value was measured", *[""] * height]
        return [line[:width].ljust(width) for line in lines]
    low, high = (end(y for _, y in finite) for end in (min, max))
    labels = [digits(high), *[""] * (height - 2), digits(low)]
    margin = max(map(len, labels))
    drawn = braille(finite, max(1, width - margin - 1), height)
    lines = [f"{label:>{margin}}┤{line}" for label, line in zip(labels, drawn, strict=True)]
    first, last = (f"{finite[end][0]:g}" for end in (0, -1))
    axis = " " * margin + "└" + first + last.rjust(width - margin - 1 - len(first), "─")
    head = f"{title} {digits(finite[-1][1])}"
    return [head[:width].ljust(width), *lines, axis[:width]]


def braille(points: Points, width: int, height: int) -> list[str]:
    """Draw a line through the points as `height` lines of `width` characters.

    The minimum and maximum of x and y are at the edges.
    """
    cells = [[0] * width for _ in range(height)]
    xs, ys = zip(*points, strict=True)
    placed = [
        (_level(x, min(xs), max(xs), 2 * width), _level(y, min(ys), max(ys), 4 * height))
        for x, y in points
    ]
    for start, end in pairwise(placed if len(placed) > 1 else placed * 2):
        right, up = end[0] - start[0], end[1] - start[1]
        count = max(abs(right), abs(up), 1)
        for step in range(count + 1):  # all dots from one point to the next, both included
            column = round(start[0] + right * (step / count))
            down = 4 * height - 1 - round(start[1] + up * (step / count))
            cells[down // 4][column // 2] |= DOTS[column % 2][down % 4]
    return ["".join(chr(BLANK + cell) for cell in line) for line in cells]


def _level(value: float, low: float, high: float, count: int) -> int:
    """Return the nearest of `count` levels from `low` to `high`, or the middle if low = high."""
    if not low < high:
        return (count - 1) // 2
    return round((value - low) / (high - low) * (count - 1))


def side_by_side(panels: Sequence[Sequence[str]], across: int, gap: int = 2) -> list[str]:
    """Join panels of equal size in rows of `across` panels."""
    lines = []
    for start in range(0, len(panels), across):
        row = panels[start : start + across]
        lines += [(" " * gap).join(parts).rstrip() for parts in zip(*row, strict=True)]
        lines.append("")
    return lines[:-1]
