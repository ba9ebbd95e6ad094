"""Samples of the user's own as a source: arrays, tensors, a torch Dataset, or a table in a file."""

import csv
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text, require_regular
from fedmuon.data.given import pair_of
from fedmuon.data.source import Source


def as_source(data: Any, test: Any = None, where: str = "given") -> Source:
    """What was given as `data`; samples of `test` come after them, as the source's test part."""
    if isinstance(data, Source):
        if test is not None:
            raise InputError(
                "a Source says itself what is held out: give it official_test, and leave test out"
            )
        return data
    inputs, labels = _arrays(data)
    official = None
    if test is not None:
        more, answers = _arrays(test, "test")
        if more.shape[1:] != inputs.shape[1:] or answers.shape[1:] != labels.shape[1:]:
            raise InputError(
                f"test samples of shape {more.shape[1:]} are not like data of {inputs.shape[1:]}"
            )
        official = len(labels)
        inputs, labels = np.concatenate([inputs, more]), np.concatenate([labels, answers])
    classes = 0 if labels.dtype.kind == "f" else int(labels.max(initial=0)) + 1
    return Source("given", inputs, labels, classes, official, where)


def _arrays(data: Any, name: str = "data") -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = pair_of(data, name)
    if labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind in "iub":
        labels = labels[:, 0]
    if labels.dtype.kind in "iub":
        labels = labels.astype(np.int64)
    elif labels.dtype.kind == "f":
        labels = labels.astype(np.float64)
    else:
        raise InputError(f"labels of type {labels.dtype} are no numbers: number the classes from 0")
    if inputs.ndim == 1:
        inputs = inputs[:, None]
    return inputs.astype(np.uint8) if inputs.dtype == bool else inputs, labels


def digest(source: Source) -> str:
    """A hash of the samples, by which a resumed run knows them again."""
    found = hashlib.sha256()
    for array in (source.inputs, source.labels):
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


def npz(
    folder: str = "", inputs: str = "inputs", label: str = "labels", client: str = ""
) -> Source:
    """An .npz file with an array of inputs and one of labels; `client` names one for `column`."""
    path = _file(folder, "npz")
    try:
        with np.load(require_regular(path), allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except Exception as error:  # numpy and zipfile end in many ways
        raise InputError(f"{path} is no readable .npz file ({error})") from None
    return _from_columns(path, arrays, label, client, lambda: _taken(path, arrays, inputs))


def comma_separated(folder: str = "", label: str = "label", client: str = "") -> Source:
    """A .csv file with a head: the column `label`, perhaps one of clients, all others inputs."""
    path = _file(folder, "csv")
    try:
        rows = list(csv.reader(io.StringIO(read_text(path))))
        head, *body = rows
        found = zip(head, zip(*body, strict=True), strict=True)
        columns = {name: _numbers(column) for name, column in found}
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is no readable table of columns ({error})") from None
    return _from_columns(path, columns, label, client)


def parquet(folder: str = "", label: str = "label", client: str = "") -> Source:
    """A .parquet file, as `comma_separated`; needs pyarrow."""
    path = _file(folder, "parquet")
    try:
        from pyarrow import parquet as reader  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("parquet files need pyarrow: pip install pyarrow") from None
    try:
        table = reader.read_table(require_regular(path))
        columns = {name: np.asarray(table[name].to_numpy()) for name in table.column_names}
    except Exception as error:  # pyarrow's own
        raise InputError(f"{path} is no readable Parquet file ({error})") from None
    return _from_columns(path, columns, label, client)


def _from_columns(
    path: Path,
    columns: Mapping[str, np.ndarray],
    label: str,
    client: str,
    inputs: Callable[[], np.ndarray] | None = None,
) -> Source:
    labels = _taken(path, columns, label)
    owners = _codes(_taken(path, columns, client)) if client else None
    if labels.dtype.kind not in "iuf":  # words are numbered in their order
        labels = _codes(labels)
    others = [name for name in columns if name not in (label, client)]
    if inputs is None:
        held = np.stack([_real(path, name, columns[name]) for name in others], 1)
    else:
        held = inputs()
    return replace(as_source((held, labels), where=str(path)), name=path.stem, owner=owners)


def _file(folder: str, suffix: str) -> Path:
    path = Path(folder).expanduser()
    if not folder or not path.is_file():
        raise InputError(f"[data] folder = '{folder}' is no .{suffix} file: name one")
    return path


def _taken(path: Path, columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in columns:
        raise InputError(f"{path} has no column {name!r}: choose one of {', '.join(columns)}")
    return columns[name]


def _numbers(column: tuple[str, ...]) -> np.ndarray:
    """Integers, else reals, else the words themselves."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(column).astype(kind)
        except ValueError:
            continue
    return np.array(column)


def _real(path: Path, name: str, column: np.ndarray) -> np.ndarray:
    if column.dtype.kind not in "iufb":
        raise InputError(f"{path}: column {name!r} holds words: number them, or leave it out")
    return column.astype(np.float64)


def _codes(column: np.ndarray) -> np.ndarray:
    """Its distinct values, numbered in their order."""
    return np.unique(column, return_inverse=True)[1].astype(np.int64)
