"""Read the tables of a folder, and write tables as CSV and LaTeX."""

import contextlib
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text, require_sound

Columns = Mapping[str, np.ndarray]
Table = dict[str, np.ndarray]
SETTING = ("suite", "data", "n", "lr", "lambda", "alpha", "per_round", "seed")
RUNS = (*SETTING, "gap", "bound", "mean_perturbation", "max_perturbation", "within", "gap_low",
        "gap_high", "table_gap", "bound_one", "share")  # fmt: skip
# The bound with the constants of all models; the range of the loss; terminal measures.
ASIDE = ("bound_global", "share_global", "range", "accuracy", "train_loss", "test_loss")
TRIALS = ("trial", "client", "index", "replacement", "perturbation", "exposure", "certificate")
SHIFTS = ("round", "trial", "client", "shift", "certificate")
NEIGHBOURS = (*SETTING, *TRIALS, "size", "old_label", "new_label")
WORDS = ("suite", "data", "within")
# Columns that may be nan: the theory may reject them, or there are no held-out samples.
MAY_BE_NAN = ("exposure", "certificate", "bound", "bound_one", "bound_global", "share",
              "share_global", "gap", "gap_low", "gap_high")  # fmt: skip
RUN_AGAIN = "run the experiment again in another folder"


def read_csv(file: Path, names: Sequence[str], also: Sequence[str] = ()) -> Table:
    """Read the named columns of a CSV file.

    Every column is an array with one entry per row. The columns in `WORDS` are returned as str, and
    all other columns as float64. Columns in `also` are optional: the file may lack them.
    """
    header, *rows = _whole(file, names)
    cells = dict(zip(header, zip(*rows, strict=True), strict=True))
    table: Table = {}
    for name in (*names, *(name for name in also if name in header)):
        if name in WORDS:
            table[name] = np.array(cells[name])
            continue
        try:
            values = np.array(cells[name], dtype=float)
        except ValueError:
            raise InputError(
                f"{file}: column {name} contains a value that is not a number: {RUN_AGAIN}"
            ) from None
        if np.isnan(values).any() and name not in MAY_BE_NAN:
            raise InputError(f"{file}: column {name} contains NaN: {RUN_AGAIN}")
        odd = (values < 0).any() or math.isinf(values.max())
        if odd and name in ("perturbation", "mean_perturbation"):
            raise InputError(
                f"{file}: column {name} contains a negative or infinite number: {RUN_AGAIN}"
            )
        table[name] = values
    return table


def read_json(file: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read a JSON file that contains an object. The object must have the given names."""
    require_sound(file.parent, [file.name])
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} {_fault(error, 'valid JSON')}: {RUN_AGAIN}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} is not a JSON object: {RUN_AGAIN}")
    require(content, names, file)
    return content


def require(record: Mapping[str, Any], names: Sequence[str], file: Path) -> None:
    """Raise InputError if a record lacks one of the names. The error mentions the file."""
    if missing := [name for name in names if name not in record]:
        raise InputError(f"{file} does not contain {missing[0]}: {RUN_AGAIN}")


def read_table(file: Path, names: Sequence[str] = (), words: Sequence[str] = ()) -> Table:
    """Read all columns of a CSV file. The columns in `names` and `words` must exist.

    A column is float64 if all its cells are numbers. The columns in `words` always remain str.
    """
    header, *rows = _whole(file, (*names, *words))
    cells = zip(*rows, strict=True)
    table = {name: np.array(column) for name, column in zip(header, cells, strict=True)}
    for name, column in table.items():
        if name not in words:
            with contextlib.suppress(ValueError):
                table[name] = np.array(column.tolist(), dtype=float)
    return table


def where(columns: Columns, **wanted: str | float) -> Columns:
    """Return the table rows in which each named column has the given value."""
    rows = np.all([columns[name] == value for name, value in wanted.items()], axis=0)
    return {name: column[rows] for name, column in columns.items()}


def require_consistent(runs: Table, neighbours: Table, folder: Path) -> None:
    """Raise InputError if the two tables contradict each other.

    Such tables were truncated or edited. In consistent tables, every run has neighbours, and all
    runs have the same number of neighbours. Every gap lies in its interval, and the column `within`
    states whether the gap is at most the bound.
    """
    keys, count = (
        Counter(zip(*(table[name].tolist() for name in SETTING), strict=True))
        for table in (runs, neighbours)
    )
    if set(keys) != set(count) or len(set(count.values())) != 1 or set(keys.values()) != {1}:
        raise InputError(
            f"{folder}: runs.csv and neighbours.csv are not from the same experiment: {RUN_AGAIN}"
        )
    gap, bound, within = runs["gap"], runs["bound"], runs["within"] == "True"
    low, high, measured = runs["gap_low"], runs["gap_high"], ~np.isnan(gap + bound)
    for row in np.flatnonzero((gap < low) | (gap > high)):
        raise InputError(
            f"{folder / 'runs.csv'}, line {row + 2}: the gap {gap[row]:g} is outside its interval "
            f"from {low[row]:g} to {high[row]:g}: {RUN_AGAIN}"
        )
    for row in np.flatnonzero((within != (gap <= bound)) & measured):
        raise InputError(
            f"{folder / 'runs.csv'}, line {row + 2}: the column 'within' is {within[row]}, which "
            f"contradicts the gap {gap[row]:g} and the bound {bound[row]:g}: {RUN_AGAIN}"
        )


def _fault(error: Exception, form: str) -> str:
    """Return why a file cannot be used: it is missing, unreadable, or in another form."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return "cannot be read" if isinstance(error, OSError) else f"is not {form}"


def _whole(file: Path, names: Sequence[str]) -> list[list[str]]:
    """Read the header and the rows of a CSV file.

    The header must contain the given names, and every row must be as long as the header.
    """
    require_sound(file.parent, [file.name])
    try:
        text = read_text(file)
        lines = list(csv.reader(text.splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} {_fault(error, 'a valid CSV file')}: {RUN_AGAIN}") from None
    if not lines or not text.endswith("\n"):
        raise InputError(f"{file} is truncated: {RUN_AGAIN}")
    header, *rows = lines
    if missing := [name for name in names if name not in header]:
        raise InputError(f"{file} does not contain the column {missing[0]}: {RUN_AGAIN}")
    if not rows:
        raise InputError(f"{file} contains no rows: {RUN_AGAIN}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise InputError(f"{file} is truncated in line {number}: {RUN_AGAIN}")
    return lines


Rows = list[tuple[str, ...]]
VALUE = r"[-−+≥≤ ]*(?:\d[\d.,]*(?:e[-−+]?\d+)?|–)(?:%)?"
UNCERTAIN = {  # heading of the second column -> cells that are split into a value and this column
    "± 95%": re.compile(rf"({VALUE}) ± (.*)"),  # ± is half of a 95% interval
    "SD": re.compile(rf"({VALUE}) \(SD (.*)\)"),
    "95%": re.compile(rf"({VALUE}) \((.* to .*)\)"),
}
ASCII = {"−": "-", "–": ""}


def split_intervals(head: Sequence[str], rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Split cells such as `0.2 ± 0.1`, `0.2 (0.1 to 0.3)` or `0.2 (SD 0.1)` into two columns.

    One column contains the value, and the other contains the interval or the standard deviation.
    """
    columns = [[row[k] if k < len(row) else "" for row in rows] for k in range(len(head))]
    names, parts = [], []
    for place, (name, cells) in enumerate(zip(head, columns, strict=True)):
        kind, pattern = next(
            ((kind, regex) for kind, regex in UNCERTAIN.items()
             if place and any(regex.fullmatch(cell) for cell in cells)), ("", None)
        )  # fmt: skip
        if pattern is None:
            names.append(name)
            parts.append(cells)
            continue
        pairs = [split.groups() if (split := pattern.fullmatch(cell)) else (cell, "")
                for cell in cells]  # fmt: skip
        names += [name.removesuffix(" (95%)"), kind]
        parts += [[value for value, _ in pairs], [reach for _, reach in pairs]]
    return names, [list(row) for row in zip(*parts, strict=True)]


def as_csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """Return a table as CSV text for other programs.

    Minus signs are ASCII characters, and unknown cells are empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for name, *cells in rows:
        plain = [re.sub("−(?=[\\d.])", "-", ASCII.get(cell, cell)) for cell in cells]
        writer.writerow([name.strip(), *plain])
    return text.getvalue().encode()


def slug(title: str) -> str:
    """Turn a title into a file name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60].strip("-") or "table"
