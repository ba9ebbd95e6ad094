"""Draw the curves of runs on matplotlib axes, for notebooks, scripts and papers."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from fedmuon.analysis.report import style
from fedmuon.analysis.report.style import LOSS, LOSSES, Panels, Records
from fedmuon.core.errors import InputError, instead

WIDTHS = {"column": 3.3, "text": 6.8}  # inches: one column, and the text width of a two-column page
HEIGHT = 2.3  # height of a panel in a paper, in inches
# A font like Times for text and formulas, in a size that remains readable in print.
PAPER: dict[Any, Any] = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    **dict.fromkeys(("axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
}


def plotted(
    curves: Mapping[str, Sequence[Records]],
    x: str | Sequence[str] = "rounds",
    metric: str | None = None,
    ax: Axes | None = None,
    width: str | None = None,
) -> Any:
    """Draw curves and return their axes.

    Args:
        curves: For each name, the records of all rounds of its runs.
        x: The horizontal axis, one of `fedmuon.runs.directory.AXES`. With a list of axes, each axis
            gets its own panel.
        metric: Name of the measure to draw, or `loss` for all losses. If None, several panels are
            drawn.
        ax: Existing axes to draw on. If None, a new figure is made.
        width: A key of `WIDTHS` for a figure in the style of a paper.

    Returns:
        Axes if `metric` or `ax` is given and `x` is a text, otherwise `Panels`.

    Raises:
        InputError: If the metric or the width is unknown, or `ax` and `width` are both given. A
            list `x` must not be empty, and requires `metric` and no `ax`.
    """
    require_width(width, ax)
    narrow = width == "column"
    inches = 0.0 if width is None else WIDTHS[width]
    if not isinstance(x, str):
        _require_panels(x, metric, ax)
    elif metric is None and ax is None:
        with drawing(width):
            return Panels(style.round_panels(curves, narrow, x, inches).axes)
    across = [x] if isinstance(x, str) else [*x]
    all_places, name = (
        [style.places_of(curves, axis) for axis in across],
        _known(curves, metric or LOSS),
    )
    if ax is not None:  # the caller chooses the style
        _draw(ax, curves, all_places[0], name, across[0])
        _, labels = ax.get_legend_handles_labels()
        if labels:
            ax.legend()
        return ax
    with drawing(width):
        height = HEIGHT if width else 2.9
        size = inches or (style.NARROW * 1.4 if len(across) == 1 else style.WIDE)
        figure, panels = style.canvas(len(across), narrow, height, width=size)
        for panel, places, axis in zip(panels, all_places, across, strict=True):
            _draw(panel, curves, places, name, axis)
        if panels[0].get_legend_handles_labels()[1]:
            style.legend_below(figure, panels[0], 1 if narrow else 2)
    return panels[0] if isinstance(x, str) else Panels(panels)


def _require_panels(x: Sequence[str], metric: str | None, ax: Axes | None) -> None:
    """Reject a list of axes if it is empty, if no metric is given, or if `ax` is given."""
    if not x:
        raise InputError(
            "x is an empty list: name at least one axis, such as x=['rounds', 'bytes']"
        )
    if metric is None:
        raise InputError(
            f"x = {x!r} is a list, but no metric is set. Set one metric, such as "
            "metric='accuracy', for all panels."
        )
    if ax is not None:
        raise InputError(
            f"x = {x!r} is a list, which is drawn with one panel per entry, but ax is a single "
            "panel. Leave ax out, or call plot once for each entry of x."
        )


def _draw(
    axes: Axes, curves: Mapping[str, Sequence[Records]], places: Any, name: str, x: str
) -> None:
    if name != LOSS:
        for place, (label, runs) in enumerate(curves.items()):
            colour = style.SERIES[place % len(style.SERIES)][0]
            look = style.AGAIN[place // len(style.SERIES) % len(style.AGAIN)]
            style.draw_measure(axes, (runs, places[label]), name, colour, look,
                               label if len(curves) > 1 else "")  # fmt: skip
    else:
        style.draw_curves(axes, curves, places, LOSS)
    if style.are_uneven(places):
        axes.set_xscale("log", nonpositive="mask")
    style.finish_axes(axes, places, name, x, axes.get_xlim())


def _known(curves: Mapping[str, Sequence[Records]], metric: str) -> str:
    """Return the full name of a metric in the records.

    `metric` may be a name that the option `--select` accepts.
    """
    measure = {"test-accuracy": "accuracy"}.get(metric, metric.replace("-", "_"))
    losses = {name for runs in curves.values() for records in runs for record in records
              for name in LOSSES if name in record}  # fmt: skip
    measures = [LOSS, *(name for name in LOSSES if name in losses), *style.measures_of(curves)]
    if measure not in measures:
        raise InputError(f"metric = {metric!r} is not recorded: {instead(metric, measures)}")
    return measure


def require_width(width: str | None, ax: Axes | None) -> None:
    """Raise InputError for an unknown width, or if both a width and existing axes are passed."""
    if width is not None and width not in WIDTHS:
        raise InputError(f"width = {width!r} is unknown: use {' or '.join(map(repr, WIDTHS))}")
    if width is not None and ax is not None:
        raise InputError(f"width = {width!r} has no effect if you pass ax. Leave width or ax out.")


def drawing(width: str | None) -> Any:
    """Return a Matplotlib context with fedmuon's style.

    If `width` is set, the style uses the fonts of a paper.
    """
    return matplotlib.rc_context(style.SETTINGS if width is None else style.SETTINGS | PAPER)
