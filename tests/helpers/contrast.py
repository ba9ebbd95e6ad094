"""Whether what a figure draws is seen on white and on the dark page (WCAG 2.2, 1.4.11)."""

import re
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.analysis.report.write import ASSETS

STYLE = (ASSETS / "page.css").read_text(encoding="utf-8")
PAPERS = "#ffffff", re.findall(r"--paper: (#\w{6})", STYLE)[0]


def light(colour: np.ndarray) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(colour: Any, paper: str) -> float:
    """Of what is drawn in that colour, perhaps partly transparent, to what it is drawn on."""
    *ink, alpha = to_rgba(colour)
    below = np.array(to_rgb(paper))
    low, high = sorted((light(below), light(alpha * np.array(ink) + (1 - alpha) * below)))
    return (high + 0.05) / (low + 0.05)


def inks(figure: Figure) -> set[Any]:
    """The colours of all lines and marks, but black, which a dark page turns to white."""
    found = set()
    for axes in figure.axes:
        for one in axes.lines:
            drawn = [one.get_markeredgecolor()] if one.get_markeredgewidth() else []
            drawn += [] if one.get_marker() in ("", "None") else [one.get_markerfacecolor()]
            drawn += [] if one.get_linestyle() == "None" else [one.get_color()]
            found |= {to_rgba(each, one.get_alpha()) for each in drawn if each != "none"}
        bars = [one for one in axes.collections if isinstance(one, LineCollection)]
        every: Any = [(each, bar.get_alpha()) for bar in bars for each in bar.get_colors()]
        found |= {to_rgba(each, alpha) for each, alpha in every}
    return found - {to_rgba(style.BLACK)}


def pale(figure: Figure) -> list[Any]:
    return [one for one in inks(figure) if min(contrast(one, paper) for paper in PAPERS) < 3]
