"""What people and programs are shown of a record: tables, and numbers that JSON has."""

import math
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

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


def facts(title: str, rows: Facts) -> Table:
    """A row for each name: six digits of a real number; no row for what is None or empty."""
    shown = Table("", "", title=escape(title), title_justify="left", show_header=False)
    for name, value in rows:
        if value is not None and value != "":
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            shown.add_row(name, value if isinstance(value, Text) else escape(text))
    return shown


def listed(name: str, sentences: Sequence[str]) -> Facts:
    """Several sentences under one name."""
    return [("" if place else name, one) for place, one in enumerate(sentences)]


def columns(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """Rows of markup under their heads; the first `left` columns are words, the others numbers."""
    shown = Table(title=title, title_justify="left")
    for place, name in enumerate(head):
        shown.add_column(name, justify="left" if place < left else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def finite(value: float | None) -> float | None:
    """None for what overflowed, as JSON has no infinity."""
    return float(value) if value is not None and math.isfinite(value) else None
