"""A table of all runs below a folder, sortable by any column, and a comparison of runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from fedmuon.analysis.report.numbers import digits, number
from fedmuon.core.choices import SPREAD
from fedmuon.core.errors import InputError, plain
from fedmuon.core.files import finite
from fedmuon.experiments.inspect.index import statuses
from fedmuon.experiments.inspect.status import RunStatus
from fedmuon.experiments.results import Comparison, compared
from fedmuon.experiments.tables import SWEEP, ZERO_MEANS, short
from fedmuon.runs.directory import Record

WORDS = ("run", "state", "recipe", "data")
COLUMNS = (*WORDS, "seed", "rounds", "accuracy", "test_loss", "train_loss", "seconds")
LATE = ("test_gap", "seconds")  # measurements that come last in tables, or are left out
MOST = 3  # a row with more folders names only the first and the last


def row(run: RunStatus, root: Path) -> Record:
    """Return the table row of a run as a dictionary from column names to values.

    Missing values are None. A damaged run has only a state.
    """
    name = str(run.path.relative_to(root)) if run.path != root else run.path.name
    if run.damage:
        return {**dict.fromkeys(COLUMNS), "run": name, "state": "damaged"}
    measures, config = run.measures, run.config
    return {
        "run": name,
        "recipe": config.local.recipe,
        "data": config.data.name,
        "seed": config.federation.seed,
        "rounds": run.totals["rounds"],
        "of": config.federation.rounds,
        **{key: finite(measures.get(key)) for key in ("accuracy", "test_loss", "train_loss")},
        "seconds": run.totals["seconds"],
        "state": run.state.partition(":")[0],
        "private": run.private,
    }


def in_order(rows: Sequence[Record], column: str, reverse: bool) -> list[Record]:
    """Sort rows by a column, with rows without a value at the end."""
    name = column.replace(" ", "_").replace("-", "_")
    if name not in COLUMNS:
        raise InputError(f"there is no column {column!r}: sort by one of {', '.join(COLUMNS)}")
    present = [record for record in rows if record[name] is not None]
    return [
        *sorted(present, key=lambda record: record[name], reverse=reverse),
        *(record for record in rows if record[name] is None),
    ]


def cells(one: Record, names: Sequence[str]) -> list[str]:
    """Return the given columns of a row as text.

    For an unfinished run, the number of rounds is shown as `done/total`.
    """
    text = {name: _cell(value) for name, value in one.items()}
    if one["state"] not in ("finished", "damaged"):
        text["rounds"] += f"/{one['of']}"
    return [text[name] for name in names]


def comparison(labelled: Mapping[str, Sequence[Path]]) -> Comparison:
    """Compare the finished runs in these folders, grouped by label.

    If a folder is not a run folder, the runs directly inside it are compared, except damaged runs.
    Runs with different labels are in different groups.
    """
    places: dict[Path, bool] = {}  # folder of a run -> whether an error may leave the run out
    labels: dict[tuple[str, Path], Path] = {}
    for label, folders in labelled.items():
        for folder in folders:
            is_run = (folder / "config.toml").exists()
            below = (
                [] if is_run else [file.parent for file in sorted(folder.glob("*/summary.json"))]
            )
            for place in below or [folder]:
                places[place] = bool(below) and places.get(place, True)
                labels[label, place.resolve()] = place
    runs = dict(zip(places, statuses([*places]), strict=True))
    return compared([(label, runs[place]) for (label, _), place in labels.items()], places)


def heads(found: Comparison) -> list[str]:
    """Return the columns for compared runs: those of the rows up to `seeds`, then measures."""
    rows = [list(row) for row in found.rows]
    before = dict.fromkeys(name for row in rows for name in row[: row.index("seeds")])
    return [*before, "seeds", *found.measures]


Side = tuple[list[str], list[list[str]], int]  # headings, rows, and the number of text columns


def side_by_side(folders: Sequence[Path]) -> tuple[Comparison, Side, Side, Side]:
    """Return the comparison of runs, and three tables that show it.

    The tables show the differing keys with the measurements, the measurements only, and the keys
    only. Each row starts with the names of its folders. Each mean is followed by half of its
    95% interval.
    """
    result = comparison({"": folders})
    keys = [name for name in heads(result) if "." in name]
    measures = [name for name in result.measures if not name.startswith(LATE)]
    names = [escape(name) for name in names_of(result)]

    def side(words: list[str], numbers: list[str]) -> Side:
        rows = [
            [name, *(_cell(row.get(column), column) for column in [*words, *numbers])]
            for name, row in zip(names, result.rows, strict=True)
        ]
        return ["run", *short(words), *map(head, numbers)], rows, 1 + len(words)

    columns = ["seeds", *measures]
    return result, side(keys, columns), side([], columns), side(keys, [])


def names_of(found: Comparison) -> list[str]:
    """Return the folders of each row as text, without the common path.

    Runs of `run --seeds` are named by the folder that contains all of them. If there are more than
    `MOST` folders, only the first and the last are named.
    """
    groups = [found.folders[row["run"]] for row in found.rows]
    # A row with all runs of `run --seeds` names their folder.
    for place, group in enumerate(groups):
        home = group[0].absolute().parent.parent
        siblings = (home / SWEEP).is_file() and {*(home / "runs").iterdir()}
        if siblings == {folder.absolute() for folder in group}:
            groups[place] = [home]
    paths = [folder.absolute() for folders in groups for folder in folders]
    root = os.path.commonpath([path.parent for path in paths])
    names = [[str(folder.absolute().relative_to(root)) for folder in folders] for folders in groups]
    few = [parts if len(parts) <= MOST else [f"{parts[0]} ... {parts[-1]}"] for parts in names]
    return [plain(", ".join(parts), None) for parts in few]


def head(name: str) -> str:
    """Return the column heading of a measurement or of half its interval."""
    return "± 95%" if name.endswith(SPREAD) else name.replace("_", " ")


def _cell(value: Any, name: str = "") -> str:
    if value is None:
        return "–"
    if value == 0 and name in ZERO_MEANS:
        return ZERO_MEANS[name]
    if isinstance(value, float) and "." not in name:  # do not round config keys
        return digits(value, 2 if name.endswith(SPREAD) else 4)
    return escape(plain(value, None))


def spent(row: Record) -> str:
    """Return, as text, the largest privacy loss among the private runs of a table row."""
    epsilon, delta = number(row["spent epsilon"]), number(row["at delta"], 3)
    doubt = "" if row["certified"] else ", not certified"
    return (
        f"spent epsilon {epsilon} at delta = {delta}, {row['adjacency']}, level {row['level']}"
        f"{doubt}"
    )
