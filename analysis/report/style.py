"""The figure style of fedmuon, and the figure of the curves of runs."""

import contextlib
import io
import logging
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fedmuon.analysis.report.numbers import digits, written
from fedmuon.analysis.report.overlay import UNEVEN
from fedmuon.analysis.report.tables import Columns as Columns
from fedmuon.core.errors import InputError
from fedmuon.core.files import write_bytes
from fedmuon.runs.directory import AXES, positions

WIDE, NARROW = 6.8, 3.5  # inches
DPI, SCREEN = 200, 100
# Inches that a figure reserves for its legend; characters by which broken labels are shorter.
LEGEND, MARGIN = 0.7, 6
# The palette of Okabe and Ito, with a darker orange and sky blue. The contrast of opaque marks to
# the light page and to the dark page is at least 3:1 (WCAG 2.2, 1.4.11).
BLUE, RED, GREEN, ORANGE, SKY, PINK = (
    "#0072B2", "#D55E00", "#009E73", "#C08400", "#3A96CE", "#CC79A7",
)  # fmt: skip
BLACK, GREY = "#000000", "#707070"
ON_DARK, ON_LIGHT = "#fefefe", "#010101"  # text on coloured areas; a dark page does not invert it
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (RED, "D"), (PINK, "v"), (SKY, "P"))
# Metadata entry that varies between runs and is therefore left out of each format.
VARIES = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}
STYLE = {
    "font.size": 8.5,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("axes.titlesize", "axes.labelsize"), 9),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    "axes.linewidth": 0.7,
    "pdf.fonttype": 42,
    "svg.hashsalt": "fedmuon",
}
# The default settings of matplotlib, overridden by `STYLE`. The backend is not changed, because no
# figure of this module needs one.
SETTINGS: dict[Any, Any] = {
    key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"
} | STYLE
NAMES = {
    "n": "training samples $n$",
    "lr": r"step size $\eta$",
    "lambda": r"$1/\sqrt{\lambda}$",
    "alpha": r"label skew $\alpha$",
    "per_round": "participants per round $K$",
    "bound": "bound on the gap",
    "mean_perturbation": r"mean perturbation $\Vert X-X'\Vert_F$",
}


# A decorator that draws in this style and then restores the settings of the caller.
styled = matplotlib.rc_context(SETTINGS)


class Picture(Figure):
    """A figure that a notebook can show without a Matplotlib backend."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return image(self, "png"), {"width": round(self.get_figwidth() * SCREEN)}


class Panel(Axes):
    """Axes that a notebook shows as a picture of the whole figure."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        figure = self.get_figure(root=True)
        return figure._repr_png_() if isinstance(figure, Picture) else None


class Panels(tuple[Axes, ...]):
    """The axes of all panels of one figure. A notebook shows the whole figure."""

    __slots__ = ()

    @property
    def axes(self) -> list[Axes]:
        """The axes as a list, like `Figure.axes`."""
        return list(self)

    @property
    def figure(self) -> Figure:
        """The figure that contains all axes."""
        return figure_of(self[0])

    def savefig(self, file: Any, **options: Any) -> None:
        """Save the figure.

        Args:
            file: A path or a file object.
            options: Options of `matplotlib.figure.Figure.savefig`.
        """
        self.figure.savefig(file, **options)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        figure = self.figure
        return figure._repr_png_() if isinstance(figure, Picture) else None


def figure_of(axes: Axes) -> Figure:
    """Return the figure that contains the axes."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def canvas(
    panels: int, narrow: bool, height: float, across: int | None = None, width: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Make a figure whose panels are side by side, or below each other if `narrow` is True.

    Args:
        panels: Number of panels.
        narrow: Whether the figure is for a narrow page.
        height: Height of a row in inches.
        across: Number of panels in a row. By default, all panels are in one row.
        width: Width in inches; by default the width of a page.
    """
    columns = 1 if narrow else across or panels
    rows = -(-panels // columns)
    size = (width or (NARROW if narrow else WIDE), height * rows)
    figure = Picture(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    kind = {"axes_class": Panel}
    all_axes = list(figure.subplots(rows, columns, squeeze=False, subplot_kw=kind).flat)
    for spare in all_axes[panels:]:
        spare.remove()
    return figure, all_axes[:panels]


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Put a legend below the whole figure. All panels must have the same labels.

    If the labels are long, the legend has fewer columns than `columns`. Labels that are too long
    for one column are broken into lines. The figure becomes taller by the height of the legend, so
    the panels keep their height.
    """
    handles, labels = axes.get_legend_handles_labels()
    look: dict[str, Any] = {"loc": "outside lower center", "handlelength": 1.6,
                            "columnspacing": 1.2, "handletextpad": 0.5}  # fmt: skip
    for count in range(columns, 0, -1):
        box = figure.legend(handles, labels, ncols=count, **look)
        wide = box.get_window_extent().width / figure.bbox.width
        if wide > 1:
            box.remove()
        else:
            break
    else:
        width = int(max(map(len, labels)) / wide) - MARGIN
        box = figure.legend(handles, [textwrap.fill(label, width) for label in labels], **look)
    growth = box.get_window_extent().height / figure.dpi - LEGEND
    figure.set_figheight(figure.get_figheight() + max(0.0, growth))


def legend(axes: Axes, columns: int) -> None:
    """Put a legend below the x axis of a panel, so that the legend covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        box = axes.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=columns,
            handlelength=1.6, columnspacing=1.0, handletextpad=0.5, borderaxespad=0.0,
        )  # fmt: skip
        for line in box.get_lines():
            line.set_markersize(max(4.0, line.get_markersize()))


def errorbars(
    axes: Axes, x: np.ndarray, y: np.ndarray, reach: Any, look: tuple[str, str], label: str = ""
) -> None:
    """Draw a line with hollow marks and error bars. `look` is an entry of `SERIES`."""
    axes.errorbar(x, y, reach, color=look[0], marker=look[1], ms=4, mfc="none", lw=1.2,
                  elinewidth=0.9, label=label)  # fmt: skip


def levels_on_x(axes: Axes, levels: np.ndarray) -> None:
    """Make the x axis logarithmic, with a tick at each level."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.set_xticks(levels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def alike(panels: Sequence[Axes], log: bool = False) -> None:
    """Set the same y axis for all panels. The axis is logarithmic if `log` is True."""
    for axes in panels if log else ():
        axes.set_yscale("log")
    ends = np.array([axes.get_ylim() for axes in panels])
    for axes in panels:
        axes.set_ylim(ends[:, 0].min(), ends[:, 1].max())
        if log:
            _log_ticks(axes.yaxis, *axes.get_ylim())


def heat_map(
    axes: Axes,
    table: np.ndarray,
    texts: np.ndarray | None,
    norm: Normalize,
    highest_is_best: bool,
    size: float = 7.0,
) -> AxesImage:
    """Draw a table as coloured cells with text. The lightest colour is the best value.

    Args:
        axes: The panel. Its ticks are not changed.
        table: Array [rows, columns] of values. The first row is at the bottom. Cells that are not
            finite are white.
        texts: Array [rows, columns] with the text of each cell, or None for cells without text.
        norm: Scale of the colours.
        highest_is_best: Whether the largest or the smallest value is best.
        size: Font size of the text.

    Returns:
        The image, for example for a colour bar.
    """
    masked = np.ma.masked_invalid(table)
    colours = "viridis" if highest_is_best else "viridis_r"
    image = axes.imshow(masked, origin="lower", aspect="auto", cmap=colours, norm=norm)
    axes.spines[:].set_visible(False)
    for (row, column), text in np.ndenumerate(np.empty((0, 0)) if texts is None else texts):
        if np.ma.is_masked(masked[row, column]):
            colour = GREY
        else:
            light = np.dot(image.to_rgba(table[row, column])[:3], (0.299, 0.587, 0.114)) > 0.5
            colour = ON_LIGHT if light else ON_DARK
        axes.text(column, row, text, ha="center", va="center", size=size, color=colour)
    return image


def frame_best(axes: Axes, table: np.ndarray, highest_is_best: bool) -> None:
    """Draw a frame around the best finite cell of a heat map."""
    if np.isfinite(table).any():
        place = (np.nanargmax if highest_is_best else np.nanargmin)(table)
        row, column = np.unravel_index(place, table.shape)
        corner = (float(column) - 0.5, float(row) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=RED, lw=2, clip_on=False))


def powers_of_2(axes: Axes, levels: np.ndarray) -> None:
    """Make the x axis logarithmic, with at most four ticks.

    The ticks are at the levels that are powers of 2. If no level is a power of 2, ticks can be at
    any level.
    """
    ticks = levels[np.log2(levels) % 1 == 0]
    labels = None if len(ticks) else [plain(level) for level in levels]
    ticks = ticks if len(ticks) else levels
    axes.set_xscale("log", base=2)
    stride = slice(None, None, max(1, -(-len(ticks) // 4)))
    axes.set_xticks(ticks[stride], labels and labels[stride])
    axes.xaxis.set_minor_locator(NullLocator())


def plain(value: float) -> str:
    """Return a number as a short text: 20000 becomes 20k, and 0.005 stays 0.005."""
    if value >= 1000 and value % 100 == 0:
        return f"{value / 1000:g}k"
    return f"{value:.0f}" if 1000 <= value < 1e5 else written(value, ".3g")


def compact(value: float) -> str:
    """Return a number with two digits: 0.051, 12, 1.2e−5."""
    if not np.isfinite(value):
        return "–"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return written(value, "#.2g").rstrip(".")
    return _scientific(value, 1)


def _scientific(value: float, digits: int) -> str:
    mantissa, power = f"{value:.{digits}e}".split("e")
    return f"{written(float(mantissa), f'.{digits}f')}e{written(int(power), 'd')}"


def log_x(axes: Axes) -> None:
    """Make the x axis logarithmic.

    The ticks are at powers of ten. If the axis contains few powers of ten, there are more ticks at
    2 and 5 times the powers of ten.
    """
    axes.set_xscale("log", nonpositive="mask")
    _log_ticks(axes.xaxis, *axes.get_xlim())


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic, if the figure shows at least one positive value."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    if (np.isfinite(values) & (values > 0)).any():
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, *axes.get_ylim())


def scale_of(axis: Axis) -> str:
    """Return what the label of an axis says about its scale: nothing if the scale is linear."""
    return " (log scale)" if axis.get_scale() == "log" else ""


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    if high / low < 4:  # too few of 1, 2 and 5 times powers of ten lie on the axis
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
    elif high / low < 100:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    if high / low < 100:
        axis.set_major_formatter(FuncFormatter(_tick))
    axis.set_minor_formatter(NullFormatter())


def _tick(value: float, _: object) -> str:
    """Return the label of a tick, with enough digits to distinguish adjacent ticks."""
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    if value < 1e6 and value % 1000 == 0:
        return f"{value / 1000:g}k"
    near = (abs(float(f"{value:.{digits}e}") - value) <= 1e-6 * abs(value) for digits in range(5))
    return _scientific(value, next((digits for digits, is_near in enumerate(near) if is_near), 5))


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write STEM.pdf (vector graphics, embedded TrueType fonts) and STEM.png (200 dpi)."""
    pdf, picture = (stem.with_name(f"{stem.name}.{kind}") for kind in ("pdf", "png"))
    for file in (pdf, picture):
        saved_as(figure, file)
    return pdf, picture


def saved_as(figure: Figure, file: Path) -> None:
    """Write the figure. The suffix of the file sets the format: .png, .pdf or .svg."""
    write_bytes(file, image(figure, kind_of(file)))


def kind_of(file: Path) -> str:
    """Return the format of a figure in this file. Raise InputError for another suffix."""
    kind = file.suffix.removeprefix(".").lower()
    if kind not in VARIES:
        raise InputError(
            f"{file} is not a .png, .pdf or .svg file. Choose a file name with one of these "
            "endings."
        )
    return kind


def image(figure: Figure, kind: str) -> bytes:
    """Return the figure as bytes in the format "png", "pdf" or "svg".

    The same figure always returns the same bytes.
    """
    buffer, metadata = io.BytesIO(), {VARIES[kind]: None}
    log = logging.getLogger("fontTools")
    level = log.level
    log.setLevel(logging.ERROR)  # suppress the warning that the date in DejaVu Sans is old
    try:
        with matplotlib.rc_context(SETTINGS):
            figure.savefig(buffer, format=kind, metadata=metadata, dpi=DPI, facecolor="white")
    finally:
        log.setLevel(level)
    return buffer.getvalue()


Records = Sequence[Mapping[str, Any]]
LEFT_OUT = ("train_seconds", "seconds", "simulated_seconds", "round", "test_gap", "client_loss")
Look = tuple[str, str, float]  # line style, mark (drawn if there are few points), line width
PLAIN: Look = ("-", "o", 1.2)
LOSSES: dict[str, Look] = {
    "train_loss": PLAIN,
    "test_loss": ("--", "s", 1.2),
    "client_loss": ("-", "", 0.6),  # recorded in every round, also without an evaluation
    "unseen_loss": ("-.", "D", 1.2),
}
AGAIN: tuple[Look, ...] = (PLAIN, (":", "^", 1.2), ("-.", "D", 1.2))  # looks for repeated colours
WORDS = {"train loss": "solid", "test loss": "dashed", "client loss": "thin",
         "unseen loss": "dash-dotted"}  # fmt: skip
FEW = 12  # maximum number of points that get marks


def round_panels(
    curves: Mapping[str, Sequence[Records]],
    narrow: bool = False,
    x: str = "rounds",
    width: float = 0.0,
) -> Figure:
    """Draw the curves of groups of runs: the mean over seeds, and a band of its 95% interval.

    The first panel shows the losses. If the records contain other measures, up to two more panels
    show them. Each point shows the end of a round. Both coordinates of a point, such as the time
    and the loss, are means over seeds.

    Args:
        curves: For each name, the records of all rounds of its runs.
        narrow: Whether the figure is for a narrow page.
        x: The horizontal axis, one of `fedmuon.runs.directory.AXES`.
        width: Width in inches; by default the width of a page.
    """
    places, measures = places_of(curves, x), measures_of(curves)[:2]
    figure, panels = canvas(1 + len(measures), narrow, 2.9 if not width else 2.3, width=width)
    for axes, measure in zip(panels, [LOSS, *measures], strict=True):
        draw_curves(axes, curves, places, measure)
    if are_uneven(places):
        panels[0].set_xscale("log", nonpositive="mask")
    for axes, measure in zip(panels, [LOSS, *measures], strict=True):
        finish_axes(axes, places, measure, x, panels[0].get_xlim())
        if len(curves) == 1:
            write_single_points(axes, measure, x)
    legend_below(figure, panels[0], 1 if narrow else 4 if len(curves) == 1 else 2)
    return figure


def write_single_points(axes: Axes, measure: str, x: str) -> None:
    """Replace a panel by numbers if each of its curves has only a single point."""
    lines = [line for line in axes.lines if len(np.asarray(line.get_xdata()))]
    if not lines or any(len(np.asarray(line.get_xdata())) > 1 for line in lines):
        return
    axes.set_axis_off()
    for place, line in enumerate(lines):
        label = str(line.get_label())
        name = measure if label.startswith("_") else label
        value = float(np.asarray(line.get_ydata())[0])
        line.set_visible(False)
        line.set_label(f"_{label}")  # not in the legend
        height = 0.5 + 0.14 * ((len(lines) - 1) / 2 - place)
        axes.text(
            0.5, height, f"{name.replace('_', ' ')} {digits(value)}", color=line.get_color(),
            ha="center", transform=axes.transAxes,
        )  # fmt: skip
    at = float(np.asarray(lines[0].get_xdata())[0])
    axes.text(
        0.5, 0.1, f"measured only at {AXES[x]} {at:g}", color="0.4", ha="center",
        transform=axes.transAxes,
    )  # fmt: skip


by_round = styled(round_panels)

Places = Mapping[str, Sequence[Sequence[float]]]
LOSS = "loss"  # the panel of all losses


def places_of(curves: Mapping[str, Sequence[Records]], x: str) -> Places:
    """For each run, return the positions of its rounds on the horizontal axis."""
    return {name: [positions(records, x, name) for records in runs]
            for name, runs in curves.items()}  # fmt: skip


def are_uneven(places: Places) -> bool:
    """State whether the longest run is more than `UNEVEN` times as long as the shortest run."""
    lengths = [run[-1] for runs in places.values() for run in runs if run]
    return max(lengths, default=0) > UNEVEN * min(lengths, default=0)


def measures_of(curves: Mapping[str, Sequence[Records]]) -> list[str]:
    """Return the names of all measures in the records, except the losses."""
    records = chain(*chain(*curves.values()))
    numbers = [
        name
        for record in records
        if "train_loss" in record
        for name, value in record.items()
        if isinstance(value, float) and name not in (*LEFT_OUT, *LOSSES)
    ]
    return list(dict.fromkeys(numbers))


def draw_curves(
    axes: Axes, curves: Mapping[str, Sequence[Records]], places: Places, measure: str
) -> None:
    """Draw one measure, or all losses, of several groups of runs. Each group has its own colour."""
    single = len(curves) == 1
    for place, (name, records) in enumerate(curves.items()):
        colour, runs = SERIES[place % len(SERIES)][0], (records, places[name])
        group_look = AGAIN[place // len(SERIES) % len(AGAIN)]
        if measure != LOSS:
            draw_measure(axes, runs, measure, colour, group_look, "")
            continue
        for other, (loss, look) in enumerate(LOSSES.items()):
            label = loss.replace("_", " ")
            label, hue = (label, SERIES[other][0]) if single else (f"_{name}, {label}", colour)
            draw_measure(axes, runs, loss, hue, look, label)
        if not single:
            line, mark, _ = group_look
            mark = mark if group_look != PLAIN else ""
            axes.plot([], [], line, marker=mark, color=colour, label=name)  # label for all losses
    if measure == LOSS:
        _name_losses(axes)


def finish_axes(
    axes: Axes, places: Places, measure: str, x: str, limits: tuple[float, float]
) -> None:
    """Label both axes, and set their limits and ticks."""
    axes.set_ylabel(measure.replace("_", " "))
    axes.set_xlabel(AXES[x])
    axes.set_xlim(limits)
    if are_uneven(places):
        log_x(axes)
    else:
        by_rounds = x == "rounds"
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=by_rounds))


def in_words(figure: Figure) -> str:
    """Return a sentence that describes the lines of a figure from `round_panels`."""
    losses, *_ = figure.axes
    labels = [str(line.get_label()) for line in losses.lines if len(np.asarray(line.get_xdata()))]
    kinds = [f"{word} the {loss}" for loss, word in WORDS.items()
             if any(label.endswith(loss) for label in labels)]  # fmt: skip
    several = any("," in label for label in labels)
    bands = any(axes.collections for axes in figure.axes)
    log = losses.get_xscale() == "log"
    label = losses.get_xlabel()
    parts = [f"{label.replace('round', 'rounds')} on a logarithmic axis" * log,
             "one colour per row of the table" if several else "", ", ".join(kinds),
             "means over seeds, with bands of their 95% intervals" * bands]  # fmt: skip
    return f"By {label}: {'; '.join(filter(None, parts))}."


def _name_losses(axes: Any) -> None:
    """Add a grey legend entry for each drawn loss, if the figure shows several groups of runs."""
    drawn = [str(line.get_label()) for line in axes.lines]
    for loss, (style, _, width) in LOSSES.items():
        name = loss.replace("_", " ")
        others = [label for label in drawn if label.startswith("_") and not label.endswith(name)]
        if others and any(label.endswith(f", {name}") for label in drawn):
            axes.plot([], [], style, color="0.4", lw=width, label=name)


@contextlib.contextmanager
def limits_kept(axes: Axes) -> Iterator[None]:
    """Within this context, what is drawn does not change the limits of the axes.

    The interval of two or three runs can be so long that the curves would look flat.
    """
    limits = axes.dataLim.frozen()
    yield
    axes.dataLim.set(limits)


def shade(
    axes: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, alpha: float
) -> None:
    """Shade the area between two curves, without changing the limits of the axes."""
    with limits_kept(axes):
        axes.fill_between(x, low, high, color=colour, alpha=alpha, lw=0)


def draw_measure(
    axes: Any,
    drawn: tuple[Sequence[Records], Sequence[Sequence[float]]],
    name: str,
    colour: str,
    look: Look,
    label: str,
) -> None:
    """Draw the mean of a measure over runs. If `look` has a mark, also draw its 95% interval.

    `drawn` contains the records of the runs, and the positions of these records on the x axis.
    """
    runs, places = drawn
    curves = [
        [(record["round"], record[name]) for record in records if name in record]
        for records in runs
    ]
    if not all(curves):
        return
    style, mark, width = look
    rounds = sorted(set.intersection(*({r for r, _ in curve} for curve in curves)))
    values = np.array([[dict(curve)[r] for r in rounds] for curve in curves])
    at = [
        {record["round"]: p for record, p in zip(*pair, strict=True)}
        for pair in zip(runs, places, strict=True)
    ]
    across = np.array([[place[r] for r in rounds] for place in at]).mean(0)
    marks = {"marker": mark if len(rounds) <= FEW else "", "mfc": "none" if mark == "s" else colour}
    axes.plot(across, values.mean(0), style, color=colour, lw=width, label=label, ms=4, **marks)
    if len(curves) > 1 and mark:
        from fedmuon.analysis.report.verdicts import mean_with_interval  # scipy

        _, low, high = mean_with_interval(values)
        shade(axes, across, low, high, colour, 0.2)
