"""What people and programs are shown of a record: tables, and numbers that JSON has."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.numbers import written

ENDLESS, WORDS = 10_000, 12  # columns of a terminal; of a column of words that can still be read

# What the numbers of bound.json are, for people.
BOUND_NAMES = {"value": "bound", "h": "sharp-stability branch H", "g": "bounded-difference "
               "branch G", "delta": "δ", "failure": "probability that it fails",
               "l_orth": "Lipschitz constant of the map", "n_eff": "effective sample size",
               "max_exposure": "largest ε_i of a client",
               "max_certificate": "largest certificate of a client"}  # fmt: skip

# And of those that runs have had since their constants hold on a ball.
BALL_NAMES = {"range": "range B of the loss", "share": "bound over B",
              "radius": "radius of the ball around X⁰ that holds all models"}  # fmt: skip

Facts = Iterable[tuple[str, object]]


class Fitting(Table):
    """A table that turns to rows, a line a cell, where it is wider than the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows below each other."""
        if self.fits(console, options):
            yield from super().__rich_console__(console, options)
            return
        yield from _turned(self).__rich_console__(console, options)

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether it needs no turning."""
        least = Measurement.get(console, options.update(max_width=ENDLESS), _rigid(self)).minimum
        return least <= options.max_width


def _rigid(table: Table) -> Table:
    """The table with its numbers whole, and its words on lines of `WORDS` characters or more."""
    made = Table(*(replace(column) for column in table.columns))
    for column in made.columns:
        texts = [column.header, *column.cells]
        wide = max(cell_len(Text.from_markup(str(one)).plain) for one in texts)
        column.min_width = wide if column.no_wrap else min(wide, WORDS)
    return made


def _turned(table: Table) -> Table:
    """The rows below each other: in each the name of a column, and what stands there."""
    shown = Table(title=table.title, caption=table.caption, title_justify="left", show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    heads = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for head, cell in zip(heads, cells, strict=True):
            shown.add_row(head, cell)
        shown.add_section()
    return shown


def facts(title: str, rows: Facts, count: int = 6) -> Table:
    """A row for each name, none for what is None or empty: six digits of a real number that one
    may go on computing with, or four, as `digits`, of one that was measured."""
    shown = Table("", "", title=escape(title), title_justify="left", show_header=False)
    for name, value in rows:
        if value is not None and value != "":
            text = written(value, f".{count}g") if isinstance(value, float) else str(value)
            shown.add_row(name, value if isinstance(value, Text) else escape(text))
    return shown


def listed(name: str, sentences: Sequence[str]) -> Facts:
    """Several sentences under one name."""
    return [("" if place else name, one) for place, one in enumerate(sentences)]


def columns(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> Fitting:
    """Rows of markup under their heads; the first `left` columns are words, which may be broken,
    the others numbers, which are not."""
    shown = Fitting(title=title, title_justify="left")
    for place, name in enumerate(head):
        words = place < left
        shown.add_column(
            name,
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
        )
    for row in rows:
        shown.add_row(*row)
    return shown
