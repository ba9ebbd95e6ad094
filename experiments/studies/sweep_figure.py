"""Figures of a sweep.

The figures show the metric against one numeric key, or as a heat map over two numeric keys.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedmuon.analysis.report import style
from fedmuon.experiments.tables import record_name

RECIPE = "local.recipe"
Row = Mapping[str, Any]
CROWDED = 18  # with more cells across a figure, they show no numbers


@style.styled
def over_grid(summary: Row, axes: Sequence[str], words: str, rising: bool) -> Figure:
    """Draw the mean metric over seeds at each point of the grid, for each recipe.

    The best point is marked.

    Args:
        summary: The content of sweep.json.
        axes: The numeric keys of the grid. The figure shows the first two keys, at the best values
            of all other keys.
        words: The metric's name.
        rising: Whether larger values are better.
    """
    name = record_name(summary["select"])
    groups: dict[str, list[Row]] = {}
    for row in summary["table"]:
        groups.setdefault(str(row.get(RECIPE) or ""), []).append(row)
    draw = _lines if len(axes) == 1 else _heat_maps
    return draw(groups, axes[:2], name, words, rising)


def _best(rows: Sequence[Row], name: str, rising: bool) -> Row | None:
    """Return the row with the best value of the metric.

    If no row has the metric, the result is None.
    """
    measured = [row for row in rows if row[name] is not None]
    return (max if rising else min)(measured, key=lambda row: row[name], default=None)


def _lines(
    groups: Mapping[str, Sequence[Row]], keys: Sequence[str], name: str, words: str, rising: bool
) -> Figure:
    """Draw the metric along one key, with a line for each recipe.

    If the key has no effect on a recipe, its line is dashed.
    """
    figure, (panel,) = style.canvas(1, False, 3.2)
    (key,) = keys
    drawn: dict[str, list[float]] = {"x": [], "y": []}
    for place, (recipe, rows) in enumerate(groups.items()):
        look = style.SERIES[place % len(style.SERIES)]
        levels = sorted({row[key] for row in rows if row[key] != ""})
        best = {x: _best([row for row in rows if row[key] == x], name, rising) for x in levels}
        measured = {x: row for x, row in best.items() if row is not None}
        x, y = (
            np.array([*measured], dtype=float),
            np.array([row[name] for row in measured.values()]),
        )
        ends = [(row[name], row[f"{name}_high"]) for row in measured.values()]  # None for one seed
        reach = np.array([0.0 if high is None else high - mean for mean, high in ends])
        alone = _best(rows, name, rising)
        if measured:
            style.errorbars(panel, x, y, reach, look, recipe)
            at = int((np.argmax if rising else np.argmin)(y))
            panel.plot(x[at], y[at], look[1], color=look[0], ms=7)
        elif alone is not None:
            panel.axhline(alone[name], ls="--", color=look[0], lw=1.2, label=recipe)
            drawn["y"].append(alone[name])
        diverged = [level for level in levels if level not in measured]
        panel.plot(diverged, [0.98] * len(diverged), "x", color=look[0], ms=5,
                   transform=panel.get_xaxis_transform())  # fmt: skip
        drawn["x"] += levels
        drawn["y"] += y.tolist()
    if _wide(drawn["x"]):
        style.log_x(panel)
    if _wide(drawn["y"]):
        style.log_y(panel)
    elif drawn["y"]:  # intervals from few seeds can be long and are cut off
        low, high = min(drawn["y"]), max(drawn["y"])
        reach = 0.25 * (high - low) or 0.1 * abs(high) or 1.0
        panel.set_ylim(low - reach, high + reach)
    panel.set_xlabel(_title(key))
    panel.set_ylabel(words)
    if any(groups):
        style.legend_below(figure, panel, 3)
    return figure


def _wide(values: Sequence[float]) -> bool:
    """Return whether the values differ so much that they need a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) >= 10 * min(values)


def _title(key: str) -> str:
    short = key.partition(".")[2]
    return style.NAMES.get(short, short)


def _heat_maps(
    groups: Mapping[str, Sequence[Row]], keys: Sequence[str], name: str, words: str, rising: bool
) -> Figure:
    """Draw a heat map for each recipe that both keys affect.

    A cross marks a point whose runs diverged.
    """
    groups = {recipe: rows for recipe, rows in groups.items()
              if any(row[keys[0]] != "" and row[keys[1]] != "" for row in rows)}  # fmt: skip
    across, up = (
        sorted({row[key] for rows in groups.values() for row in rows if row[key] != ""})
        for key in keys
    )
    means = {
        recipe: np.array([[_mean(rows, keys, (x, y), name, rising) for x in across] for y in up])
        for recipe, rows in groups.items()
    }
    finite_means = [float(mean) for grid in means.values() for mean in grid[np.isfinite(grid)].flat]
    low, high = min(finite_means, default=0.0), max(finite_means, default=1.0)
    count = max(1, len(means))
    figure, panels = style.canvas(count, False, 1.3 + 0.3 * len(up), min(2, count))
    for panel, (recipe, grid) in zip(panels, means.items(), strict=False):
        crowded = grid.shape[1] * min(2, count) > CROWDED
        texts = np.array([
            ["×" if not np.isfinite(mean) else "" if crowded else style.compact(mean)
             for mean in row] for row in grid
        ])  # fmt: skip
        scale = LogNorm if _wide(finite_means) else Normalize
        image = style.heat_map(panel, grid, texts, scale(low, high), rising)
        style.frame_best(panel, grid, rising)
        panel.set_title(recipe)
        panel.set_xticks(range(len(across)), [f"{x:.3g}" for x in across])
        panel.set_yticks(range(len(up)), [f"{y:.3g}" for y in up])
        panel.set_xlabel(_title(keys[0]))
        panel.set_ylabel(_title(keys[1]))
        if panel is panels[count - 1]:
            figure.colorbar(image, ax=panels, fraction=0.05, label=words)
    return figure


def _mean(
    rows: Sequence[Row], keys: Sequence[str], at: tuple[Any, Any], name: str, rising: bool
) -> float:
    """Return the best mean among all rows that have the values `at` for the two keys."""
    matches = [row for row in rows if (row[keys[0]], row[keys[1]]) == at]
    best = _best(matches, name, rising)
    return math.nan if best is None else best[name]
