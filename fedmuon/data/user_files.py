"""Your own samples in one file as a source: .npz, .csv or .parquet."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text, require_regular
from fedmuon.data.source import Source
from fedmuon.data.user_data import as_source, too_large
from fedmuon.data.words import (
    MISSING,
    Place,
    is_missing,
    is_number,
    is_plain,
    listed,
    numbered,
    sample_place,
)

Columns = Mapping[str, np.ndarray]
BYTE_ORDER_MARK = "\ufeff"  # spreadsheet programs write it at the start of UTF-8 files


def npz(
    folder: str = "", inputs: str = "inputs", label: str = "labels", client: str = ""
) -> Source:
    """Read an .npz file with an array of inputs and an array of labels.

    `client`, if set, is the name of an array with the owner of each sample. The partition `column`
    uses this array.
    """
    path = _file(folder, "npz")
    try:
        with np.load(require_regular(path), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy and zipfile raise many kinds of errors
        # Only the system's reasons are shown, because numpy's errors advise to unpickle the file.
        cause = getattr(error, "strerror", None)
        reason = f" ({cause})" if cause else ""
        raise InputError(
            f"{path} is not a readable .npz file{reason}: check that [data] folder is the path of "
            "a file that numpy.savez wrote, and that its arrays contain numbers or text"
        ) from None
    _require_names(path, arrays, "array", label=label, inputs=inputs, client=client)
    return _source(path, arrays[inputs], arrays, label, client, sample_place)


def comma_separated(folder: str = "", label: str = "label", client: str = "") -> Source:
    """Read a .csv file with a column of labels and columns of inputs, named in the first line.

    `client`, if set, is the name of the column with the owner of each sample. Owners are compared
    as text, so `01` and `1` are two clients. Spaces around names, labels and clients are ignored.
    """
    path = _file(folder, "csv")
    try:
        text = read_text(path).removeprefix(BYTE_ORDER_MARK)
        reader = csv.reader(io.StringIO(text))
        rows = [(reader.line_num, row) for row in reader if row]  # a value can span lines
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"{path} is not a readable CSV table ({error}): check [data] folder"
        ) from None
    if len(rows) < 2:
        problem = "is empty" if not rows else "has a header, but no samples"
        raise InputError(
            f"{path} {problem}: write the names of the columns in the first line, and one sample "
            "in each further line"
        )
    (_, head), *body = rows
    names = [name.strip() for name in head]
    if len(names) == 1 and (
        mark := next((separator for separator in ";\t|" if separator in names[0]), "")
    ):
        raise InputError(
            f"the first line of {path} has no comma, but {mark!r}: separate the columns by commas"
        )
    for line, row in body:
        if len(row) != len(head):
            values = "value" if len(row) == 1 else "values"
            raise InputError(
                f"line {line} of {path} has {len(row)} {values}, but the header has {len(head)}: "
                "write one value for each column"
            )
    _require_distinct(path, names)
    named_columns = zip(names, zip(*(row for _, row in body), strict=True), strict=True)
    columns = {
        name: _owners(column) if name == client.strip() else _numbers(column)
        for name, column in named_columns
    }
    if (name := label.strip()) in columns and columns[name].dtype.kind == "f":
        place = names.index(name)
        _require_small(path, name, [(line, row[place].strip()) for line, row in body])
    return _of_table(path, columns, name, client.strip(), lambda k: f"line {body[k][0]}")


def _require_small(path: Path, name: str, cells: Sequence[tuple[int, str]]) -> None:
    """Check that labels which became floats are not whole numbers that need more than 64 bits."""
    if all(re.fullmatch(r"[+-]?\d+", cell) for _, cell in cells):
        line, cell = next(pair for pair in cells if _numbers([pair[1]]).dtype.kind == "f")
        raise InputError(too_large(f"the label {name!r}", cell, f"line {line} of {path}"))


def parquet(folder: str = "", label: str = "label", client: str = "") -> Source:
    """Read a .parquet file with the same columns as a .csv file. The reader requires pyarrow."""
    path = _file(folder, "parquet")
    try:
        # Imported here: pyarrow is optional.
        from pyarrow import parquet as reader  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            "Parquet files need pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        table = reader.read_table(require_regular(path))
        names = list(table.column_names)
        arrays = [np.asarray(column.to_numpy()) for column in table.itercolumns()]
    except Exception as error:  # pyarrow raises its own errors
        raise InputError(
            f"{path} is not a readable Parquet file ({error}): check [data] folder"
        ) from None
    _require_distinct(path, names)
    columns = dict(zip(names, arrays, strict=True))
    return _of_table(path, columns, label, client, lambda k: f"row {k}")


def _require_distinct(path: Path, names: list[str]) -> None:
    """Raise an error if two columns have the same name."""
    name, count = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        called = f"are named {name!r}" if name else "have no name"
        raise InputError(
            f"{count} columns of {path} {called}, so they cannot be told apart: write one name for "
            "each column in the first line"
        )


def _require_names(path: Path, columns: Columns, kind: str, **options: str) -> None:
    """Raise an error if an option names a column that the file does not contain."""
    if len(columns) < 2:
        raise InputError(
            f"{path} needs labels and at least one {kind} of inputs, but it contains "
            f"{listed(columns) or f'no {kind}s'}."
        )
    for option, name in options.items():
        if name not in columns and (name or option != "client"):
            raise InputError(
                f"{path} has no {kind} {name!r}: set [data.options] {option} to one of "
                f"{listed(columns)}"
            )


def _of_table(path: Path, columns: Columns, label: str, client: str, place: Place) -> Source:
    """Make a source from the columns of a table."""
    _require_names(path, columns, "column", label=label, client=client)
    others = [name for name in columns if name not in (label, client)]
    if not others:
        raise InputError(
            f"{path} has no column of inputs besides {listed(columns)}: add at least one column "
            "of numbers"
        )
    inputs = np.stack([_checked(path, name, columns[name], place) for name in others], 1)
    return _source(path, inputs, columns, label, client, place)


def _checked(path: Path, name: str, values: np.ndarray, place: Place) -> np.ndarray:
    """Return the values of a column of inputs as floats, if all of them are finite numbers."""
    if values.dtype.kind in "iub":
        return values.astype(np.float64)
    for number, value in enumerate(values.tolist()):
        cell = value.strip() if isinstance(value, str) else value
        if cell == "" or is_missing(cell):
            raise InputError(
                f"column {name!r} of {path} is empty in {place(number)}, but inputs must be "
                "numbers: fill in a number, or remove this sample"
            )
        if isinstance(cell, str) and (cell.lower() in MISSING or not is_number(cell)):
            raise InputError(
                f"column {name!r} of {path} contains words, such as {cell!r} in {place(number)}, "
                "but inputs must be numbers: convert the words to numbers, or leave the column out"
            )
        if not isinstance(cell, str | int | float):
            raise InputError(
                f"column {name!r} of {path} contains a value of type {type(cell).__name__} in "
                f"{place(number)}, but inputs must be numbers: convert the values to numbers, or "
                "leave the column out"
            )
        if not np.isfinite(float(cell)):
            raise InputError(
                f"column {name!r} of {path} is {value} in {place(number)}, but inputs must be "
                "finite: correct or remove this sample"
            )
    return values.astype(np.float64)


def _source(
    path: Path, inputs: np.ndarray, columns: Columns, label: str, client: str, place: Place
) -> Source:
    """Make a source from inputs and the columns of labels and owners."""

    def within(number: int) -> str:
        return f"{place(number)} of {path}"

    labels, owner, owners = columns[label], None, ()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 and labels.dtype.kind != "f":
        raise InputError(
            f"the labels {label!r} of {path} have the shape {labels.shape}, but each sample needs "
            "one class. If each row contains a one for its class, save labels.argmax(axis=1)."
        )
    if client:
        owner, owners = numbered(columns[client], f"the client {client!r}", within)
        if len(owner) != len(labels):
            raise InputError(
                f"the clients {client!r} of {path} have {len(owner)} values, but there are "
                f"{len(labels)} labels: save one client for each sample"
            )
    if labels.dtype.kind == "f" and labels.ndim == 1 and not (sound := np.isfinite(labels)).all():
        number = int(sound.argmin())
        raise InputError(
            f"the label {label!r} is {labels[number]} in {within(number)}, but labels must be "
            "finite: correct or remove this sample"
        )
    source = as_source((inputs, labels), where=str(path), what=f"the label {label!r}", place=within)
    return replace(source, name=path.stem, owner=owner, owner_names=owners)


def _file(folder: str, suffix: str) -> Path:
    path = Path(folder).expanduser()
    if not folder or not path.is_file():
        problem = f"is not a .{suffix} file" if path.exists() else "does not exist"
        if not folder:
            problem = f"is empty, but [data] name = '{suffix}' needs a file"
        raise InputError(
            f"[data] folder = '{folder}' {problem}: set [data] folder to the path of a "
            f".{suffix} file"
        )
    return path


def _owners(column: Sequence[str]) -> np.ndarray:
    """Return a column of owners as integers if all are written like integers, or else as text.

    Different texts stay different. As floats, two long numbers can become one.
    """
    cells = [cell.strip() for cell in column]
    values = _numbers(cells)
    plain = values.dtype.kind == "i" and [*map(str, values.tolist())] == cells
    return values if plain else np.array(cells, object)


def _numbers(column: Sequence[str]) -> np.ndarray:
    """Convert a column of text to integers or floats, or keep the text if this is not possible."""
    if not is_plain("".join(column)):
        return np.array(column, object)
    values: Any = np.array(column)
    for kind in (np.int64, np.float64):
        try:
            return values.astype(kind)
        except (ValueError, OverflowError):
            continue
    return values
