"""Every run below a folder as rows that can be put in order by any column."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fedmuon.errors import InputError, plain
from fedmuon.experiments.laboratory.facts import digits
from fedmuon.experiments.looking.seen import Seen
from fedmuon.files import finite
from fedmuon.names import SPREAD
from fedmuon.results import Comparison
from fedmuon.storage import Record

WORDS = ("run", "state", "recipe", "data")
COLUMNS = (*WORDS, "seed", "rounds", "accuracy", "test_loss", "train_loss", "seconds")


def row(run: Seen, root: Path) -> Record:
    """A run's cells by column; None where it has none. A damaged run says so as its state."""
    name = str(run.path.relative_to(root)) if run.path != root else run.path.name
    try:
        measures, config = run.measures, run.config
        return {
            "run": name,
            "recipe": config.local.recipe,
            "data": config.data.name,
            "seed": config.federation.seed,
            "rounds": len(run.rounds),
            "of": config.federation.rounds,
            **{one: finite(measures.get(one)) for one in ("accuracy", "test_loss", "train_loss")},
            "seconds": run.rounds[-1]["seconds"] if run.rounds else None,
            "state": run.state.partition(":")[0],
            "private": run.private,
        }
    except InputError:
        return {**dict.fromkeys(COLUMNS), "run": name, "state": "damaged"}


def in_order(rows: Sequence[Record], column: str, reverse: bool) -> list[Record]:
    """The rows by a column, those without it last."""
    name = column.replace(" ", "_").replace("-", "_")
    if name not in COLUMNS:
        raise InputError(f"there is no column {column!r}: sort by one of {', '.join(COLUMNS)}")
    held = [one for one in rows if one[name] is not None]
    return [
        *sorted(held, key=lambda one: one[name], reverse=reverse),
        *(one for one in rows if one[name] is None),
    ]


def cells(one: Record, names: Sequence[str]) -> list[str]:
    """These columns of a row as words; rounds that are done, of an unfinished run of how many."""
    said = {name: _said(value) for name, value in one.items()}
    if one["state"] not in ("finished", "damaged"):
        said["rounds"] += f"/{one['of']}"
    return [said[name] for name in names]


def heads(found: Comparison) -> list[str]:
    """All columns of runs that are compared: those before `seeds` in any row, and measures."""
    rows = [list(row) for row in found.rows]
    before = dict.fromkeys(name for row in rows for name in row[: row.index("seeds")])
    return [*before, "seeds", *found.measures]


def side_by_side(found: Comparison) -> tuple[list[str], list[list[str]], int]:
    """Heads, rows and the number of columns of words of runs that are compared: the keys that
    differ, or the names of rows that these do not tell apart, seeds, and every mean with its
    standard deviation beside it."""
    keys = [name for name in heads(found) if "." in name]
    known = [tuple(row.get(key) for key in keys) for row in found.rows]
    words = keys if len(set(known)) == len(known) and keys else ["run", *keys]
    measures = [name for name in found.measures if not name.startswith(("test_gap", "seconds"))]
    short = [name.rpartition(".")[2] for name in words]
    head = [
        name if short.count(name) == 1 else whole for name, whole in zip(short, words, strict=True)
    ]
    head += [
        "±" if name.endswith(SPREAD) else name.replace("_", " ") for name in ["seeds", *measures]
    ]
    rows = [[_said(row.get(name), name) for name in [*words, "seeds", *measures]]
            for row in found.rows]  # fmt: skip
    return head, rows, len(words)


def _said(value: Any, name: str = "") -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and "." not in name:  # a key is as it was set
        return digits(value, 2 if name.endswith(SPREAD) else 4)
    return escape(plain(value, None))
