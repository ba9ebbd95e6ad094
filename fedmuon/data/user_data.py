"""A user's own samples as a source: arrays, tensors, torch Datasets, tables, or files of these."""

import csv
import hashlib
import io
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text, require_regular
from fedmuon.data.source import Source

MEND = "give (inputs, labels) of as many entries each, a torch Dataset of such pairs, or a Source"
KNOWN = ("torch.float16", "torch.float32", "torch.float64")  # floats of numpy
DENSE = "convert it to a dense array with {}, if it fits into memory"


def pair_of(data: Any, name: str = "data") -> tuple[np.ndarray, np.ndarray]:
    """Convert the argument `name` to inputs and labels.

    Args:
        data: (inputs, labels), a torch Dataset of pairs, or a Bunch of scikit-learn.
        name: Name of the argument, for errors.

    Raises:
        InputError: If the samples are of another kind.
    """
    if _has_columns(data) or _is_tensor(data) or hasattr(data, "__array__") or _is_sparse(data):
        mend = f"{name}=(frame.drop(columns='label'), frame['label'])"
        mend = mend if _has_columns(data) else f"{name}=(inputs, labels)"
        raise InputError(
            f"{name} is a {type(data).__name__} alone, which does not say which values are labels: "
            f"give {mend}"
        )
    if isinstance(data, Mapping):
        if not {"data", "target"} <= data.keys():  # as in a Bunch of scikit-learn
            raise InputError(
                f"{name} is a {type(data).__name__} without the entries 'data' and 'target': give "
                f"{name}=(inputs, labels)"
            )
        data = data["data"], data["target"]
    elif (
        not isinstance(data, tuple | list)
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
    ):
        pairs, data = data, ([], [])
        for number in range(len(pairs)):
            one = pairs[number]
            if not isinstance(one, tuple | list) or len(one) != 2:
                many = f" of {len(one)} values" if isinstance(one, tuple | list) else ""
                raise InputError(
                    f"sample {number} of {name} is a {type(one).__name__}{many}, not a pair: let "
                    "the dataset return (input, label)"
                )
            data[0].append(one[0])
            data[1].append(one[1])
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(f"{name} of type {type(data).__name__} are no samples: {MEND}")
    inputs, labels = data
    return as_array(inputs, f"the inputs of {name}"), as_array(labels, f"the labels of {name}")


def as_array(part: Any, what: str) -> np.ndarray:
    """Convert an array, a tensor, a table, or a sequence of arrays or tensors to an array."""
    if problem := _problem(part):
        raise InputError(f"{what} {problem}")
    if _is_tensor(part):
        return _of_tensor(part, what)
    if _has_columns(part):
        return _of_table(part, what)
    if isinstance(part, Iterable) and not hasattr(part, "__array__"):
        part = [  # numpy would read wrong values, or none
            as_array(one, what) if _is_tensor(one) or _problem(one) else one for one in part
        ]
    try:
        return np.asarray(part)
    except Exception as error:  # raised by an object of any library
        why = str(error) or type(error).__name__
        raise InputError(f"the samples are not alike ({why}): {MEND}") from None


def _problem(part: Any) -> str:
    """Why numpy would read wrong values; empty if it would not."""
    if _is_sparse(part):
        return f"are a sparse {type(part).__name__}: {DENSE.format('.toarray()')}"
    if isinstance(part, Mapping | Set):
        return f"are a {type(part).__name__}, of which numpy reads no values: give an array"
    if np.ma.is_masked(part):
        return "have masked entries: fill them in, or leave these samples out"
    return ""


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")  # if torch is not loaded, there is no tensor
    return torch is not None and isinstance(part, torch.Tensor)


def _of_tensor(part: Any, what: str) -> np.ndarray:
    """The values of a tensor. Floats that numpy lacks become float32, which is exact."""
    if problem := storage_problem(part):
        raise InputError(f"{what} are {problem}")
    try:
        part = part.detach().cpu().resolve_conj().resolve_neg()
        if part.is_floating_point() and str(part.dtype) not in KNOWN:
            part = part.float()
        return part.numpy()
    except (RuntimeError, TypeError, ValueError) as error:  # of subclasses and rare types
        raise InputError(
            f"{what} are a tensor of type {part.dtype} that numpy cannot read "
            f"({str(error).splitlines()[0]}): convert it to torch.float32"
        ) from None


def storage_problem(tensor: Any) -> str:
    """Why the entries of a tensor cannot be read, and what to do; empty if they can."""
    if tensor.is_nested:
        return "a nested tensor, whose rows may differ in length: pad it to one shape"
    if tensor.is_meta:
        return "a tensor on the device meta, which holds no values: make it on the device cpu"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}): convert it with .dequantize()"
    if str(tensor.layout) != "torch.strided":
        return f"a sparse tensor ({tensor.layout}): {DENSE.format('.to_dense()')}"
    return ""


def _is_sparse(part: Any) -> bool:
    """Whether it is a sparse matrix of scipy or similar."""
    return hasattr(part, "toarray") and hasattr(part, "nnz")


def _has_columns(part: Any) -> bool:
    """Whether it is a table with named columns, as those of pandas, polars and pyarrow."""
    return not isinstance(part, Mapping) and (
        hasattr(part, "__dataframe__")
        or (hasattr(part, "columns") and hasattr(part, "to_numpy"))
        or (hasattr(part, "column_names") and hasattr(part, "itercolumns"))
    )


def _of_table(frame: Any, what: str) -> np.ndarray:
    """The numbers [rows, columns] of a table of any library."""
    if hasattr(frame, "items"):  # pandas; a name may occur twice
        named = frame.items()
    elif hasattr(frame, "iter_columns"):  # polars
        named = ((one.name, one) for one in frame.iter_columns())
    elif hasattr(frame, "itercolumns"):  # pyarrow
        named = zip(frame.column_names, frame.itercolumns(), strict=True)
    else:
        raise InputError(
            f"a table of type {type(frame).__name__} cannot be read: convert it to a numpy array "
            "or a pandas DataFrame"
        )
    columns = []
    for name, column in named:
        values = np.asarray(column if hasattr(column, "__array__") else column.to_numpy())
        if values.dtype == object and all(isinstance(one, Real) for one in values):
            values = values.astype(np.float64)
        if values.dtype.kind not in "iufb" or values.ndim != 1:
            held = getattr(column, "dtype", values.dtype)
            raise InputError(
                f"{what} have a column {name!r} of type {held}, which is not numeric: encode it as "
                "numbers, or drop it"
            )
        columns.append(values)
    if not columns:
        raise InputError(f"{what} are a {type(frame).__name__} without columns: give at least one")
    return np.stack(columns, axis=1)


# Sources.


def as_source(data: Any, test: Any = None, where: str = "given") -> Source:
    """Convert the arguments `data` and `test` to a source.

    Args:
        data: A Source, or samples as in `pair_of`.
        test: Samples that become the official test part; not with a Source.
        where: Where the samples come from, for messages.

    Raises:
        InputError: If the samples are unsuitable.
    """
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
    """A hash of the samples, by which a resumed run recognizes them."""
    found = hashlib.sha256()
    for array in (source.inputs, source.labels):
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


def npz(
    folder: str = "", inputs: str = "inputs", label: str = "labels", client: str = ""
) -> Source:
    """Read an .npz file with an array of inputs and one of labels.

    `client` names an array with the owner of each sample, for the partition `column`.
    """
    path = _file(folder, "npz")
    try:
        with np.load(require_regular(path), allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except Exception as error:  # numpy and zipfile raise many kinds of errors
        raise InputError(f"{path} is no readable .npz file ({error})") from None
    return _from_columns(path, arrays, label, client, inputs)


def comma_separated(folder: str = "", label: str = "label", client: str = "") -> Source:
    """Read a .csv file with a header: a column of labels, perhaps one of clients, and inputs."""
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
    """Read a .parquet file like a .csv file; needs pyarrow."""
    path = _file(folder, "parquet")
    try:
        # Imported here: pyarrow is optional.
        from pyarrow import parquet as reader  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("parquet files need pyarrow: pip install pyarrow") from None
    try:
        table = reader.read_table(require_regular(path))
        columns = {name: np.asarray(table[name].to_numpy()) for name in table.column_names}
    except Exception as error:  # pyarrow raises its own errors
        raise InputError(f"{path} is no readable Parquet file ({error})") from None
    return _from_columns(path, columns, label, client)


def _from_columns(
    path: Path,
    columns: Mapping[str, np.ndarray],
    label: str,
    client: str,
    inputs: str | None = None,
) -> Source:
    """A source of named columns, or of the array `inputs` and the columns of labels and clients."""
    asked = [label] if inputs is None else [label, inputs]
    for name in [*asked, client] if client else asked:
        if name not in columns:
            raise InputError(f"{path} has no column {name!r}: choose one of {', '.join(columns)}")
    labels, owners = columns[label], _codes(columns[client]) if client else None
    if labels.dtype.kind not in "iuf":  # words are numbered in alphabetical order
        labels = _codes(labels)
    if inputs is not None:
        held = columns[inputs]
    else:
        others = [name for name in columns if name not in (label, client)]
        for name in others:
            if columns[name].dtype.kind not in "iufb":
                raise InputError(
                    f"{path}: column {name!r} holds words: number them, or leave it out"
                )
        held = np.stack([columns[name].astype(np.float64) for name in others], 1)
    return replace(as_source((held, labels), where=str(path)), name=path.stem, owner=owners)


def _file(folder: str, suffix: str) -> Path:
    path = Path(folder).expanduser()
    if not folder or not path.is_file():
        raise InputError(f"[data] folder = '{folder}' is no .{suffix} file: name one")
    return path


def _numbers(column: tuple[str, ...]) -> np.ndarray:
    """The column as integers, else as reals, else as words."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(column).astype(kind)
        except ValueError:
            continue
    return np.array(column)


def _codes(column: np.ndarray) -> np.ndarray:
    """Number the distinct values in their order."""
    return np.unique(column, return_inverse=True)[1].astype(np.int64)
