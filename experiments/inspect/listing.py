"""Every run below a folder as rows that can be put in order by any column."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fedmuon.analysis.report.numbers import digits
from fedmuon.core.choices import SPREAD
from fedmuon.core.errors import InputError, plain
from fedmuon.core.files import finite
from fedmuon.experiments.inspect.status import Seen
from fedmuon.experiments.results import Comparison
from fedmuon.runs.directory import Record

WORDS = ("run", "state", "recipe", "data")
COLUMNS = (*WORDS, "seed", "rounds", "accuracy", "test_loss", "train_loss", "seconds")
LATE = ("test_gap", "seconds")  # measures that tables have last, or not at all
MOST = 3  # folders of a row that are all named


def row(run: Seen, root: Path) -> Record:
    """A run's cells by column; None where it has none. A damaged run says so as its state."""
    name = str(run.path.relative_to(root)) if run.path != root else run.path.name
    if run.damage:
        return {**dict.fromkeys(COLUMNS), "run": name, "state": "damaged"}
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


Side = tuple[list[str], list[list[str]], int]  # heads, rows, and how many columns are words


def side_by_side(found: Comparison) -> tuple[Side, Side, Side]:
    """Runs that are compared: by their folders the keys that differ and what was measured, and
    each of both by itself; every mean with its standard deviation beside it."""
    keys = [name for name in heads(found) if "." in name]
    measures = [name for name in found.measures if not name.startswith(LATE)]
    names = [escape(one) for one in names_of(found)]

    def side(words: list[str], numbers: list[str]) -> Side:
        rows = [
            [name, *(_said(row.get(one), one) for one in [*words, *numbers])]
            for name, row in zip(names, found.rows, strict=True)
        ]
        return ["run", *short(words), *map(head, numbers)], rows, 1 + len(words)

    return side(keys, ["seeds", *measures]), side([], ["seeds", *measures]), side(keys, [])


def names_of(found: Comparison) -> list[str]:
    """What the folders of each row are called where they part from the others; of many the ends."""
    groups = [found.folders[row["run"]] for row in found.rows]
    every = [folder.absolute() for folders in groups for folder in folders]
    root = os.path.commonpath([one.parent for one in every])
    names = [[str(folder.absolute().relative_to(root)) for folder in one] for one in groups]
    few = [one if len(one) <= MOST else [f"{one[0]} ... {one[-1]}"] for one in names]
    return [plain(", ".join(one), None) for one in few]


def short(keys: Sequence[str]) -> list[str]:
    """The keys without their tables, where no other one is called so."""
    alone = [name.rpartition(".")[2] for name in keys]
    return [one if alone.count(one) == 1 else key for one, key in zip(alone, keys, strict=True)]


def head(name: str) -> str:
    """A measure above its column; beside it stands its standard deviation."""
    return "±" if name.endswith(SPREAD) else name.replace("_", " ")


def _said(value: Any, name: str = "") -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and "." not in name:  # a key is as it was set
        return digits(value, 2 if name.endswith(SPREAD) else 4)
    return escape(plain(value, None))
