"""Show records as tables to people, and as JSON numbers to programs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.numbers import number, written

HALF_NOTE = "± is half of the 95% interval of the mean over seeds (Student's t)."
SWEEP = "sweep.json"  # the summary of a finished sweep
GAP = "gap.json"  # the summary of a finished `fedmuon gap`
MANY = 100  # a table with more rows is drawn quickly
MARKUP = re.compile(r"[\[\\\t\r]|:\S*:")  # text that rich does not print unchanged
FILL = "x"
ENDLESS, WORDS = 10_000, 12  # width of an unlimited terminal; minimum width of a text column
NOT_RELEASED = (
    "Losses and accuracies of private runs are measured on the private data without noise. "
    "They are not released, so epsilon does not cover them."
)

# Name in bound.json -> text for people.
BOUND_NAMES = {"value": "bound", "h": "sharp-stability branch H", "g": "bounded-difference "
               "branch G", "delta": "δ", "failure": "probability that the bound fails",
               "l_orth": "Lipschitz constant of the orthogonalizer",
               "n_eff": "effective sample size",
               "max_exposure": "largest exposure Y_i of a client",
               "max_certificate": "largest certificate of a client"}  # fmt: skip

# The same for numbers that newer runs have, whose constants hold on a ball.
BALL_NAMES = {"range": "range B of the loss", "share": "bound over B",
              "radius": "radius of the ball around X⁰ that contains all models"}  # fmt: skip

Facts = Iterable[tuple[str, object]]


class Fitting(Table):
    """A table that becomes a list, with one line per cell, if the terminal is too narrow.

    Attributes:
        dense: Whether a table that does not fit is first tried without its frame and with wrapped
            headings. Use this for tables with many rows.
    """

    dense = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table if it fits, or its rows without a frame, or one line per cell.

        A line of the list begins with the name of the column.
        """
        if self.fits(console, options):
            if len(self.rows) > MANY and (lines := self._repeated(console, options)):
                yield from lines
            else:
                yield from super().__rich_console__(console, options)
            return
        if self.dense:
            bare = self._bare()
            min_width = Measurement.get(console, options.update(max_width=ENDLESS), bare).minimum
            if min_width <= options.max_width:
                yield from bare.__rich_console__(console, options)
                return
        turned = Table(
            title=self.title,
            caption=self.caption,
            title_justify="left",
            caption_justify="left",
            show_header=False,
        )
        turned.add_column(no_wrap=True)
        turned.add_column(overflow="fold")
        for cells in self._lines():
            for column, cell in zip(self.columns, cells, strict=True):
                turned.add_row(str(column.header), cell)
            turned.add_section()
        yield from turned.__rich_console__(console, options)

    def _lines(self) -> Iterator[tuple[RenderableType, ...]]:
        """Return the cells of each row."""
        return zip(*(column.cells for column in self.columns), strict=True)

    def _repeated(self, console: Console, options: ConsoleOptions) -> list[Segment]:
        """Return the lines of a long table, made from the line of one row.

        Rich needs seconds for thousands of rows. The result is empty if a cell has markup or would
        be wrapped.
        """
        cells = [list(map(str, column.cells)) for column in self.columns]
        if self.caption or any(MARKUP.search("\n".join(column)) for column in cells):
            return []
        if any("\n" in cell for column in cells for cell in column):
            return []
        sizes = [max(map(cell_len, [str(column.header), *texts]))
                 for column, texts in zip(self.columns, cells, strict=True)]  # fmt: skip
        sample = Table(title=self.title, title_justify=self.title_justify)
        sample.columns = [replace(column, _cells=[]) for column in self.columns]
        sample.add_row(*(FILL * size for size in sizes))
        if Measurement.get(console, options.update(max_width=ENDLESS), sample).maximum > (
            options.max_width
        ):
            return []
        *before, row, last = Segment.split_lines(console.render(sample, options))
        edges = re.split(f"{FILL}+", "".join(part.text for part in row))
        if len(edges) != len(sizes) + 1:
            return []
        segments = [part for line in before for part in (*line, Segment.line())]
        for line in zip(*cells, strict=True):
            text = edges[0]
            for cell, size, column, edge in zip(line, sizes, self.columns, edges[1:], strict=True):
                room = " " * (size - cell_len(cell))
                text += (room + cell if column.justify == "right" else cell + room) + edge
            segments += [Segment(text), Segment.line()]
        return [*segments, *last, Segment.line()]

    def _bare(self) -> Table:
        """Return the rows as a table without a frame, whose headings can be wrapped at spaces."""
        bare = Table(
            title=self.title,
            caption=self.caption,
            title_justify="left",
            caption_justify="left",
            box=None,
        )
        for column in self.columns:
            cells = [width(str(cell)) for cell in column.cells]
            words = [cell_len(word) for word in str(column.header).replace("-", "- ").split()]
            widest = max(cells, default=0)
            bare.add_column(
                column.header,
                justify=column.justify,
                min_width=max([widest if column.no_wrap else min(widest, WORDS), *words]),
                overflow="fold",
                vertical="bottom",
            )
        for cells in self._lines():
            bare.add_row(*cells)
        return bare

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return whether the terminal is wide enough for the table.

        Numbers and short words, with at most `WORDS` letters, must not be broken.
        """
        rigid = Table(*(replace(column, _cells=[]) for column in self.columns))
        for column, original in zip(rigid.columns, self.columns, strict=True):
            texts = [str(cell) for cell in (original.header, *original.cells)]
            # Only these two texts determine the minimum width of the column.
            words = max(texts, key=lambda text: max(map(cell_len, plain(text).split()), default=0))
            column._cells = [(widest := max(texts, key=width)), words]
            column.min_width = width(widest) if column.no_wrap else min(width(widest), WORDS)
        min_width = Measurement.get(console, options.update(max_width=ENDLESS), rigid).minimum
        return min_width <= options.max_width


def width(markup: str) -> int:
    """Return the number of columns of the terminal that a text with markup takes."""
    return cell_len(plain(markup))


def plain(markup: str) -> str:
    """Return a text with markup without its markup."""
    return Text.from_markup(markup).plain if MARKUP.search(markup) else markup


def facts(title: str, rows: Facts, count: int = 6) -> Table:
    """Return a table with a row for each name. Rows without a value are left out.

    Args:
        title: The title, as plain text.
        rows: Names and values.
        count: The number of significant digits of a float. Use six digits for constants and four
            for measurements.
    """
    table = Table(
        "", "", title=escape(title), title_justify="left", caption_justify="left", show_header=False
    )
    for name, value in rows:
        if value is not None and value != "":
            text = written(value, f".{count}g") if isinstance(value, float) else str(value)
            table.add_row(name, value if isinstance(value, Text) else escape(text))
    return table


def listed(name: str, sentences: Sequence[str]) -> Facts:
    """Return several sentences as rows under one name."""
    return [("" if place else name, sentence) for place, sentence in enumerate(sentences)]


def columns(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    dense: bool = False,
) -> Fitting:
    """Return rows of markup as a table with column heads.

    The first `left` columns contain text, whose lines can be wrapped. The others contain numbers,
    whose lines are never wrapped. `dense` is the attribute of `Fitting`.
    """
    table = Fitting(title=title, title_justify="left", caption_justify="left")
    table.dense = dense
    for place, name in enumerate(head):
        words = place < left
        table.add_column(
            name, justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table


# Keys whose value 0 has another meaning, with this meaning
ZERO_MEANS = {
    "devices.deadline": "none", "devices.select": "per-round", "devices.buffer": "default",
    "devices.threshold": "per-round",
}  # fmt: skip


def short(keys: Sequence[str]) -> list[str]:
    """Return the config keys without their table names.

    A key keeps its table name if two keys would otherwise be equal.
    """
    alone = [name.rpartition(".")[2] for name in keys]
    return [name if alone.count(name) == 1 else key for name, key in zip(alone, keys, strict=True)]


def record_name(metric: str) -> str:
    """Return the name that records use for a metric of `--select`.

    For example, `test-accuracy` becomes `accuracy`.
    """
    return {"test-accuracy": "accuracy"}.get(metric, metric.replace("-", "_"))


def spelled(name: str) -> str:
    """Return the name that `--select` uses for a metric in a record."""
    return "test-accuracy" if name == "accuracy" else name.replace("_", "-")


# Text about the privacy account in the summary of a private run


def adjacency_of(private: Mapping[str, Any]) -> str:
    """Return the adjacency of the epsilon in a summary.

    Early versions wrote add-remove, but their sampling rate lot / n_i needs zero-out. Summaries of
    these versions have no entry `rate_from`.
    """
    return private["adjacency"] if "rate_from" in private else "zero-out"


def unreleased(summary: Mapping[str, Any] | None) -> str:
    """Return a suffix for titles of numbers that were measured on private data.

    For a run that is not private, the suffix is "".
    """
    return ", measured and not released" if "privacy" in (summary or {}) else ""


def spent_words(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences about the privacy that repeated or swept runs spent.

    The list is empty if the runs are not private.
    """
    if not (private := summary.get("privacy")):
        return []
    per_run, in_total = (
        f"epsilon {'infinite' if private[name] is None else number(private[name])} at delta "
        f"{number(private[delta], 3)}"
        for name, delta in (("epsilon", "delta"), ("epsilon_of_all", "delta_of_all"))
    )
    doubt = "" if private["certified"] else ", not certified"
    return [
        f"Each private run spends at most {per_run} ({private['adjacency']}, level "
        f"{private['level']}{doubt}). Publishing all {private['accounts']} runs spends at most "
        f"{in_total}, the sum.",
        NOT_RELEASED,
    ]


def standing(private: Mapping[str, Any]) -> str:
    """Return the conditions of the epsilon in a summary, as text.

    The conditions are the adjacency, the sampling, the unit and the noise.
    """
    conditions = f"{private['mode']}, {adjacency_of(private)}, {released_by(private)}"
    if "trust" in private:
        whom = f"whole clients, trust {private['trust']}"
        if "honest" in private:
            whom += f" ({private['honest']} of {private['shares']} shares of noise count)"
        return f"{conditions}, {whom}, multiplier {number(private['noise'])}"
    blocks = f"{private['blocks']} block" + "s" * (private["blocks"] != 1)
    return f"{conditions}, {blocks} of multiplier {number(private['noise'])}"


def released_by(private: Mapping[str, Any]) -> str:
    """Return the kind of samples in a release as text, such as `poisson lots`."""
    if "trust" in private:
        return "poisson cohorts" if private["sampling"] == "poisson" else "public cohorts"
    return f"{private['sampling']} lots"
