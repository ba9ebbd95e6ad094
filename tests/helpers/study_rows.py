"""Made-up rows of studies, their verdicts, and labels that cover each other in a figure."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import Claim


def columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    rows = list(rows)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def rows_of(value: Callable[..., dict[str, Any]], **factors: Iterable[Any]) -> Columns:
    """A row for each combination of factors, with what `value` makes of it."""
    every = (dict(zip(factors, one, strict=True)) for one in itertools.product(*factors.values()))
    return columns([one | value(**one) for one in every])


def verdicts(claims: Iterable[Claim]) -> list[bool | None]:
    return [claim.holds for claim in claims]


def one_seed(rows: Columns) -> Columns:
    return {name: column[rows["seed"] == 0] for name, column in rows.items()}


def overprinted(figure: Figure) -> list[str]:
    """Labels of ticks that cover the next one's, and titles that leave the figure."""
    figure.draw_without_rendering()
    wrong = []
    for axes in figure.axes:
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            shown = [one for one in ticks if low <= one.get_loc() <= high
                     and one.label1.get_visible() and one.label1.get_text()]  # fmt: skip
            boxes = [one.label1.get_window_extent() for one in shown]
            ends = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
            wrong += [f"{side} {a}" for a, b in itertools.pairwise(ends) if a[1] > b[0]]
        title = axes._left_title.get_window_extent()  # type: ignore[attr-defined]
        wrong += [axes.get_title("left")] if title.x1 > figure.bbox.x1 else []
    return wrong
