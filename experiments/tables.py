"""What people and programs are shown of a record: tables, and numbers that JSON has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.numbers import number, written

SWEEP = "sweep.json"  # the summary of a finished sweep
ENDLESS, WORDS = 10_000, 12  # columns of a terminal; of a column of words that can still be read
NOT_RELEASED = (
    "Losses and accuracies of private runs are measured on the data themselves and not released."
)

# What the numbers of bound.json are, for people.
BOUND_NAMES = {"value": "bound", "h": "sharp-stability branch H", "g": "bounded-difference "
               "branch G", "delta": "δ", "failure": "probability that it fails",
               "l_orth": "Lipschitz constant of the map", "n_eff": "effective sample size",
               "max_exposure": "largest exposure Y_i of a client",
               "max_certificate": "largest certificate of a client"}  # fmt: skip

# And of those that runs have had since their constants hold on a ball.
BALL_NAMES = {"range": "range B of the loss", "share": "bound over B",
              "radius": "radius of the ball around X⁰ that holds all models"}  # fmt: skip

Facts = Iterable[tuple[str, object]]


class Fitting(Table):
    """A table that turns to rows, a line for each cell, where it is wider than the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows below each other with the name of a column at each cell."""
        if self.fits(console, options):
            yield from super().__rich_console__(console, options)
            return
        turned = Table(
            title=self.title, caption=self.caption, title_justify="left", show_header=False
        )
        turned.add_column(no_wrap=True)
        turned.add_column(overflow="fold")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            for column, cell in zip(self.columns, cells, strict=True):
                turned.add_row(str(column.header), cell)
            turned.add_section()
        yield from turned.__rich_console__(console, options)

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether it fits with its numbers whole, and words on lines of `WORDS` or more letters."""
        rigid = Table(*(replace(column) for column in self.columns))
        for column in rigid.columns:
            texts = [column.header, *column.cells]
            wide = max(cell_len(Text.from_markup(str(one)).plain) for one in texts)
            column.min_width = wide if column.no_wrap else min(wide, WORDS)
        least = Measurement.get(console, options.update(max_width=ENDLESS), rigid).minimum
        return least <= options.max_width


def facts(title: str, rows: Facts, count: int = 6) -> Table:
    """A table with a row for each name, and none for what is None or empty.

    Args:
        title: The title, as plain text.
        rows: Names and values.
        count: The digits of a real number: six of one to compute with, four of a measured one.
    """
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
    """Rows of markup under their heads.

    The first `left` columns are words, which may be broken. The others are numbers, which are not.
    """
    shown = Fitting(title=title, title_justify="left")
    for place, name in enumerate(head):
        words = place < left
        shown.add_column(
            name, justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for row in rows:
        shown.add_row(*row)
    return shown


def short(keys: Sequence[str]) -> list[str]:
    """The keys without their tables, unless two have the same name."""
    alone = [name.rpartition(".")[2] for name in keys]
    return [one if alone.count(one) == 1 else key for one, key in zip(alone, keys, strict=True)]


def record_name(metric: str) -> str:
    """The name in records of a metric as --select spells it: `test-accuracy` is `accuracy`."""
    return {"test-accuracy": "accuracy"}.get(metric, metric.replace("-", "_"))


def spelled(name: str) -> str:
    """A metric of a record as --select spells it."""
    return "test-accuracy" if name == "accuracy" else name.replace("_", "-")


# Words for the account of a private run, as its summary holds it.


def adjacency_of(private: Mapping[str, Any]) -> str:
    """The adjacency of the epsilon in a summary.

    Earlier versions, whose rates were lot / n_i, wrote add-remove, and not where rates are from.
    """
    return private["adjacency"] if "rate_from" in private else "zero-out"


def unreleased(summary: Mapping[str, Any] | None) -> str:
    """What a title adds to numbers that were measured on the data of a private run."""
    return ", measured and not released" if "privacy" in (summary or {}) else ""


def standing(private: Mapping[str, Any]) -> str:
    """What the epsilon of a summary stands on: adjacency, sampling, unit, noise."""
    held = f"{private['mode']}, {adjacency_of(private)}, {released_by(private)}"
    if "trust" in private:
        whom = f"clients whole, trust {private['trust']}"
        if "honest" in private:
            whom += f" ({private['honest']} of {private['shares']} shares of noise count)"
        return f"{held}, {whom}, multiplier {number(private['noise'])}"
    blocks = f"{private['blocks']} block" + "s" * (private["blocks"] != 1)
    return f"{held}, {blocks} of multiplier {number(private['noise'])}"


def released_by(private: Mapping[str, Any]) -> str:
    """What a release has: a lot of examples, or at client level a cohort."""
    if "trust" in private:
        return "poisson cohorts" if private["sampling"] == "poisson" else "cohorts known to all"
    return f"{private['sampling']} lots"
