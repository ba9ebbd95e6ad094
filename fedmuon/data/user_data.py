"""Your own samples as a source: arrays, tensors, torch Datasets, or tables."""

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.data.source import Source, joined, type_of
from fedmuon.data.words import Names, Place, is_missing, is_number, listed, numbered, sample_place

MEND = (
    "pass (inputs, labels), a table with [data] target, or a sequence of pairs (input, label) or "
    "dicts"
)
LARGEST_LABEL = np.iinfo(np.int64).max
LABELS = ("label", "labels", "target", "targets", "y")  # usual names of the label's entry
KNOWN = ("torch.float16", "torch.float32", "torch.float64")  # the float types that numpy has
DENSE = "convert it with {} to a dense array, if this array fits into memory"


def pair_of(
    data: Any, name: str = "data", target: str = "", like: Sequence[str] = (), client: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Convert samples in any supported form to inputs and labels.

    Args:
        data: (inputs, labels), a scikit-learn Bunch, a table with a column of labels, or a sequence
            of pairs or dicts, such as a torch Dataset or a Hugging Face data set.
        name: Name of the argument `data` in error messages.
        target: The table column or dict key that contains the labels. For dicts, it may be empty if
            one key has a common name, such as label.
        like: The names that named inputs must have. The inputs are returned in the order of these
            names.
        client: The table column or dict key that contains the client of each sample. It is not an
            input.

    Raises:
        InputError: If the samples are not in one of these forms.
    """
    if _has_columns(data):
        return _parts_of_table(data, name, target, like, client)
    if _is_sequence(data):
        inputs, labels = _parts_of_items(data, name, target, like, client)
    else:
        if target and name != "test":  # a pair may also be a table
            raise InputError(
                f"[data] target = '{target}' has no effect, because {name} is a "
                f"{type(data).__name__}, which has neither columns nor dict items: leave target "
                "out"
            )
        inputs, labels = _parts(data, name)
    if like and _has_columns(inputs):
        columns = _in_order(dict(_columns(inputs)), like, name)
        inputs = _stacked(columns, f"the inputs of {name}")
    if _has_columns(labels) and len(columns := _columns(labels)) == 1:
        labels = _values(columns[0][1])  # a column of words is no table of numbers
    if isinstance(labels, list | tuple) and any(isinstance(label, str) for label in labels):
        labels = np.array(labels, object)  # numpy would convert numbers among words to words
    return as_array(inputs, f"the inputs of {name}"), as_array(labels, f"the labels of {name}")


def _in_order(values: Mapping[str, Any], like: Sequence[str], name: str) -> list[tuple[str, Any]]:
    """Return the named values in the order of `like`, and reject other names."""
    if values.keys() != {*like}:
        missing = [key for key in like if key not in values]
        extra = [key for key in values if key not in like]
        raise InputError(
            f"the samples of {name} "
            + " and ".join(
                f"{word} {listed(names)}"
                for word, names in (
                    ("lack the input", missing),
                    ("have the unexpected input", extra),
                )
                if names
            )
            + ": use the same names in data and test"
        )
    return [(key, values[key]) for key in like]


def _names_of(data: Any, target: str, client: str = "") -> list[str]:
    """Return the names of the inputs of valid samples.

    The result is empty if the inputs have no names.
    """
    if _has_columns(data):
        return [name for name, _ in _columns(data) if name not in (target, client)]
    if _is_sequence(data):
        first = data[0]
        return (
            [str(key) for key in _entries(first, "data", target, client)[0]]
            if isinstance(first, Mapping)
            else []
        )
    inputs, _ = _parts(data, "data")
    return [name for name, _ in _columns(inputs)] if _has_columns(inputs) else []


def _parts(data: Any, name: str) -> tuple[Any, Any]:
    """Return the inputs and the labels of a pair or of a scikit-learn Bunch."""
    if _is_tensor(data) or hasattr(data, "__array__") or _is_sparse(data):
        raise InputError(
            f"{name} is only a {type(data).__name__}, so it is unclear which values are labels: "
            f"pass {name}=(inputs, labels)"
        )
    if isinstance(data, Mapping):
        if not {"data", "target"} <= data.keys():  # the keys of a scikit-learn Bunch
            raise InputError(
                f"{name} is a {type(data).__name__} with the entries {listed(data)}, but "
                f"without the entries 'data' and 'target': pass {name}=(inputs, labels), or pass "
                f"one entry of {name} if this entry contains samples with labels"
            )
        return data["data"], data["target"]
    if not _is_pair(data):
        raise InputError(
            f"{name} is a {type(data).__name__}, which cannot be read as samples: {MEND}"
        )
    return data[0], data[1]


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2


def _is_sequence(data: Any) -> bool:
    """Return whether this is a sequence of samples.

    A list with two arrays is not a sequence of samples, because it may be (inputs, labels).
    """
    if isinstance(data, tuple | list):
        first_items = data[:2] if len(data) == 2 else data[:1]
        dicts = bool(first_items) and all(isinstance(item, Mapping) for item in first_items)
        return dicts or (len(data) > 2 and _is_pair(data[0]))
    array_like = _is_tensor(data) or _is_sparse(data) or hasattr(data, "__array__")
    return (
        not (array_like or isinstance(data, Mapping | str))
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
    )


def _parts_of_items(
    data: Any, name: str, target: str, like: Sequence[str] = (), client: str = ""
) -> tuple[list[Any], list[Any]]:
    """Return the inputs and the labels of a sequence of pairs or dicts."""
    items = [data[number] for number in range(len(data))]
    dicts = bool(items) and isinstance(items[0], Mapping)
    if target and not dicts:
        raise InputError(
            f"[data] target = '{target}' has no effect, because the samples of {name} are not "
            "dicts: leave target out"
        )
    keys, label = _entries(items[0], name, target, client) if dicts else ([], "")
    if dicts and like:
        keys = [key for _, key in _in_order({str(key): key for key in keys}, like, name)]
    for number, item in enumerate(items):
        if dicts:
            sound = isinstance(item, Mapping) and {*keys, label} <= item.keys()
            expected = f"a dict with the entries {listed([*keys, label])}, like sample 0"
        else:
            sound = _is_pair(item)
            expected = "a pair: let the dataset return (input, label), or a dict"
        if not sound:
            size = f" of {len(item)} values" if isinstance(item, tuple | list | Mapping) else ""
            raise InputError(
                f"sample {number} of {name} is a {type(item).__name__}{size}, but it must be "
                f"{expected}"
            )
    if not dicts:
        return [item[0] for item in items], [item[1] for item in items]
    inputs = [item[keys[0]] if len(keys) == 1 else [item[key] for key in keys] for item in items]
    return inputs, [item[label] for item in items]


def _entries(
    item: Mapping[Any, Any], name: str, target: str, client: str = ""
) -> tuple[list[Any], Any]:
    """Return the keys of the inputs and the key of the label in a sample that is a dict."""
    item = {key: value for key, value in item.items() if not client or key != client}
    label_keys = [target] if target else [key for key in LABELS if key in item]
    if target and target not in item:
        raise InputError(
            f"[data] target = '{target}' does not exist, because the samples of {name} contain "
            f"only {listed(item)}. Set target to the key of the label."
        )
    if len(label_keys) != 1:
        raise InputError(
            f"the samples of {name} have the entries {listed(item)}, and it is unclear which "
            "entry is the label: set [data] target to the name of the label entry"
        )
    others = [key for key in item if key != label_keys[0]]
    numbers = all(
        isinstance(item[key], Real) or getattr(item[key], "ndim", 1) == 0 for key in others
    )
    if len(others) != 1 and not (others and numbers):
        raise InputError(
            f"besides the label '{label_keys[0]}', the samples of {name} have the entries "
            f"{listed(others) or 'none'}. Keep one entry as the input, or several entries that "
            "are single numbers."
        )
    return others, label_keys[0]


def as_array(part: Any, what: str) -> np.ndarray:
    """Convert arrays, tensors, tables, or sequences of arrays, tensors or images to one array."""
    if problem := _problem(part):
        raise InputError(f"{what} {problem}")
    if _is_tensor(part):
        return _of_tensor(part, what)
    if _has_columns(part):
        return _stacked(_columns(part), what)
    if isinstance(part, Iterable) and not hasattr(part, "__array__"):
        part = [  # numpy would read wrong values, or fail
            as_array(sample, what)
            if _is_tensor(sample) or _is_image(sample) or _problem(sample)
            else sample
            for sample in part
        ]
    try:
        array = _of_image(part) if _is_image(part) else np.asarray(part)
    except Exception as error:  # raised by an object of any library
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{what} {_unlike(part) or f'cannot be read ({reason}): {MEND}'}"
        ) from None
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _unlike(part: Any) -> str:
    """Describe the first sample whose shape differs from the shape of sample 0.

    Return an empty text if all shapes agree.
    """
    with contextlib.suppress(Exception):  # errors of any library, also for ragged input
        shapes = [np.shape(sample) for sample in part]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                return (
                    f"differ in shape: sample 0 has shape {shapes[0]}, but sample {number} has "
                    f"shape {shape}. Bring all samples to one shape."
                )
    return ""


def _is_image(part: Any) -> bool:
    return hasattr(part, "getbands") and hasattr(part, "convert")


def _of_image(image: Any) -> np.ndarray:
    """Return the pixels of an image as an array [channels, rows, columns].

    Palette colours are converted to red, green and blue. Black-and-white pixels are converted to 0
    and 255.
    """
    image = image.convert({"P": "RGB", "PA": "RGBA", "1": "L"}.get(image.mode, image.mode))
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _problem(part: Any) -> str:
    """Return why NumPy would read wrong values from an object.

    Return an empty text if NumPy reads the right values.
    """
    if _is_sparse(part):
        return f"are a sparse {type(part).__name__}: {DENSE.format('.toarray()')}"
    if isinstance(part, Mapping | Set):
        return f"are a {type(part).__name__}, which numpy cannot convert to values: pass an array"
    if np.ma.is_masked(part):
        return "have masked entries: fill these entries in, or leave their samples out"
    return ""


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")  # if torch is not loaded, there is no tensor
    return torch is not None and isinstance(part, torch.Tensor)


def _of_tensor(part: Any, what: str) -> np.ndarray:
    """Return the values of a tensor as an array.

    Float types that numpy lacks become float32, which represents their values exactly.
    """
    if problem := storage_problem(part):
        raise InputError(f"{what} are {problem}")
    try:
        part = part.detach().cpu().resolve_conj().resolve_neg()
        if part.is_floating_point() and str(part.dtype) not in KNOWN:
            part = part.float()
        return part.numpy()
    except (RuntimeError, TypeError, ValueError) as error:  # tensor subclasses and rare dtypes
        raise InputError(
            f"{what} are a tensor of type {part.dtype}, which numpy cannot read "
            f"({str(error).splitlines()[0]}): convert the tensor to torch.float32"
        ) from None


def storage_problem(tensor: Any) -> str:
    """Return why a tensor's entries cannot be read, and what to do.

    Return an empty text if the entries can be read.
    """
    if tensor.is_nested:
        return "a nested tensor, whose rows may differ in length: pad the rows to one shape"
    if tensor.is_meta:
        return (
            "a tensor on the device meta, which has no values: create the tensor on the device cpu"
        )
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}): convert the tensor with .dequantize()"
    if str(tensor.layout) != "torch.strided":
        return f"a sparse tensor ({tensor.layout}): {DENSE.format('.to_dense()')}"
    return ""


def _is_sparse(part: Any) -> bool:
    """Return whether an object is a sparse matrix of scipy or a similar library."""
    return hasattr(part, "toarray") and hasattr(part, "nnz")


def _has_columns(part: Any) -> bool:
    """Return whether an object is a table with named columns, as in pandas, polars or pyarrow."""
    return not isinstance(part, Mapping) and (
        hasattr(part, "__dataframe__")
        or (hasattr(part, "columns") and hasattr(part, "to_numpy"))
        or (hasattr(part, "column_names") and hasattr(part, "itercolumns"))
    )


def _columns(frame: Any) -> list[tuple[str, Any]]:
    """Return the name and the values of each column of a table from any library."""
    if hasattr(frame, "items"):  # pandas
        columns = frame.items()
    elif hasattr(frame, "iter_columns"):  # polars
        columns = ((column.name, column) for column in frame.iter_columns())
    elif hasattr(frame, "itercolumns"):  # pyarrow
        columns = zip(frame.column_names, frame.itercolumns(), strict=True)
    else:
        raise InputError(
            f"a table of type {type(frame).__name__} is not supported: convert the table to a "
            "numpy array or a pandas DataFrame"
        )
    return [(str(name), column) for name, column in columns]


def _stacked(columns: list[tuple[str, Any]], what: str) -> np.ndarray:
    """Join numeric columns to one array [rows, columns]."""
    if not columns:
        raise InputError(f"{what} are a table without columns: pass at least one column")
    arrays = []
    for name, column in columns:
        values = _values(column)
        if values.dtype == object and values.ndim == 1:
            gaps = [number for number, value in enumerate(values) if is_missing(value)]
            if all(isinstance(value, Real) or is_missing(value) for value in values):
                if gaps:
                    raise InputError(
                        f"{what} have no value in column {name!r} of sample {gaps[0]}: fill in a "
                        "number, or remove this sample"
                    )
                values = values.astype(np.float64)
        if values.dtype.kind not in "iufb" or values.ndim != 1:
            dtype = getattr(column, "dtype", values.dtype)
            texts = [pair for pair in enumerate(values) if isinstance(pair[1], str)]
            words = [pair for pair in texts if not is_number(pair[1])] or texts
            example = f" (such as {words[0][1]!r} in sample {words[0][0]})" if words else ""
            raise InputError(
                f"{what} have a column {name!r} of type {dtype}{example}, which is not numeric: "
                "encode this column as numbers, or drop it"
            )
        arrays.append(values)
    return np.stack(arrays, axis=1)


def _values(column: Any) -> np.ndarray:
    """Return the values of one column of a table."""
    return np.asarray(column if hasattr(column, "__array__") else column.to_numpy())


def owners_of(data: Any, client: str) -> np.ndarray:
    """Return the values of the table column or dict entry that contains the client of each sample.

    Raises:
        InputError: If the samples are neither a table nor dicts, or lack this column or entry.
    """
    if _has_columns(data):
        columns = [(name, column) for name, column in _columns(data) if name == client]
        if len(columns) == 1:
            return _values(columns[0][1])
        names: Iterable[Any] = (name for name, _ in _columns(data))
    elif _is_sequence(data) and isinstance(data[0], Mapping):
        items = [data[number] for number in range(len(data))]
        if all(client in item for item in items):
            return np.array([item[client] for item in items], object)
        number = next(at for at, item in enumerate(items) if client not in item)
        raise InputError(
            f"[data] client = '{client}' is not an entry of sample {number} of data, which has "
            f"{listed(items[number])}: add the entry to this sample, or set client to an entry of "
            "all samples"
        )
    else:
        raise InputError(
            f"[data] client = '{client}' has no effect, because data is a {type(data).__name__}, "
            "which has neither columns nor dict items: pass partition=, an array with the client "
            "of each sample, instead"
        )
    raise InputError(
        f"[data] client = '{client}' does not name one column of data, which has "
        f"{listed(names)}: set client to the column of clients"
    )


def _parts_of_table(
    frame: Any, name: str, target: str, like: Sequence[str] = (), client: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the label column of a table."""
    columns = _columns(frame)
    names = [column_name for column_name, _ in columns]
    if not target:
        raise InputError(
            f"{name} is a {type(frame).__name__} with the columns {listed(names)}, and it is "
            "unclear which column is the label: set [data] target to the name of the label "
            f"column, or pass {name}=(inputs, labels)"
        )
    if names.count(target) != 1:
        matches = "several columns" if target in names else "no column"
        raise InputError(
            f"[data] target = '{target}' matches {matches} of {name}, which has {listed(names)}: "
            "set target to the column of labels"
        )
    others = [column for column in columns if column[0] not in (target, client)]
    labels = next(column for column_name, column in columns if column_name == target)
    others = _in_order(dict(others), like, name) if like else others
    return _stacked(others, f"the inputs of {name}"), _values(labels)


# Sources


def as_source(
    data: Any,
    test: Any = None,
    where: str = "given",
    target: str = "",
    client: str = "",
    what: str = "the label",
    place: Place = sample_place,
) -> Source:
    """Convert the arguments `data` and `test` to a source.

    Labels that are words are numbered in alphabetical order. If `data` contains uint8 images and
    `test` contains the same images in another type, `test` is converted, see `joined`.

    Args:
        data: A Source, or samples in any form that `pair_of` accepts.
        test: Samples that become the official test part. Do not set this if `data` is a Source.
        where: The place of the samples, for messages.
        target: The table column or dict key that contains the labels, see `pair_of`.
        client: The table column or dict key that contains the client of each sample.
        what: The label of a sample, for messages.
        place: The place of a sample, for messages.

    Raises:
        InputError: If the samples are not in a supported form, or contain invalid values.
    """
    if isinstance(data, Source):
        if test is not None:
            raise InputError(
                "test was passed together with a Source, but a Source contains its own test "
                "samples: set official_test in the Source, and leave test out"
            )
        for key, name in (("target", target), ("client", client)):
            if name:
                raise InputError(
                    f"[data] {key} = '{name}' has no effect, because a Source already has labels "
                    f"and owners: leave {key} out"
                )
        return data
    owner, owners = None, ()
    if client:
        owner, owners = numbered(owners_of(data, client), f"the client {client!r}", place)
    inputs, labels, words = _arrays(data, "data", target, client=client, what=what, place=place)
    official = None
    if test is not None:
        names = _names_of(data, target, client)
        like = names if len({*names}) == len(names) else []  # a name may occur twice
        test_inputs, test_labels, _ = _arrays(
            test, "test", target, like, client, "the label of test", known=words
        )
        if test_inputs.shape[1:] != inputs.shape[1:] or test_labels.shape[1:] != labels.shape[1:]:
            raise InputError(
                f"test samples have shape {test_inputs.shape[1:]}, but the samples of data have "
                f"shape {inputs.shape[1:]}: pass samples of the same shape"
            )
        official = len(labels)
        inputs, labels = joined(inputs, test_inputs), np.concatenate([labels, test_labels])
    classes = 0 if labels.dtype.kind == "f" else int(labels.max(initial=0)) + 1
    return Source(
        "given", inputs, labels, classes, official, where,
        owner=owner, owner_names=owners, label_names=words,
    )  # fmt: skip


def _arrays(
    data: Any,
    name: str = "data",
    target: str = "",
    like: Sequence[str] = (),
    client: str = "",
    what: str = "the label",
    place: Place = sample_place,
    known: Names = (),
) -> tuple[np.ndarray, np.ndarray, Names]:
    """Return inputs, labels, and the names of the classes if labels are words.

    `known` are the names of classes that are numbered already.
    """
    inputs, labels = pair_of(data, name, target, like, client)
    words: Names = ()
    if labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind != "f":
        labels = labels[:, 0]
    if labels.dtype == object and len(labels):
        labels = _of_objects(labels, what, place)
    if known and labels.dtype.kind not in "USO":
        raise InputError(
            f"{what} is a number, of type {type_of(labels)}, but the labels of data are words, "
            f"such as '{known[0]}': use the same labels in data and test"
        )
    if labels.dtype.kind in "iub":
        if labels.dtype.kind == "u" and (largest := int(labels.max(initial=0))) > LARGEST_LABEL:
            where = place(int(labels.reshape(len(labels), -1).max(1).argmax()))
            raise InputError(too_large(what, largest, where))
        labels = labels.astype(np.int64)
    elif labels.dtype.kind == "f":
        labels = labels.astype(np.float64)
    elif labels.dtype.kind in "USO" and len(labels):
        labels, words = numbered(labels, what, place, known)
    else:
        raise InputError(
            f"labels have type {type_of(labels)}, but must be numbers or words: number the classes "
            "from 0"
        )
    if inputs.ndim == 1:
        inputs = inputs[:, None]
    return inputs.astype(np.float32) if inputs.dtype == bool else inputs, labels, words


def too_large(what: str, value: int | str, where: str) -> str:
    """Return the message about a whole number that is too large for a label."""
    return (
        f"{what} is {value} in {where}, but labels must be the numbers from 0 to the number of "
        "classes minus 1: renumber the labels"
    )


def _of_objects(labels: np.ndarray, what: str, place: Place) -> np.ndarray:
    """Return labels that are Python objects as numbers if all of them are numbers."""
    values = labels.reshape(-1).tolist()
    if not all(isinstance(value, Real) or is_missing(value) for value in values):
        return labels
    for number, value in enumerate(values):
        if is_missing(value):
            raise InputError(
                f"{what} is empty in {place(number)}: fill it in, or remove this sample"
            )
    return np.array(values).reshape(labels.shape)


def digest(source: Source) -> str:
    """Return a hash of all samples.

    A resumed run compares this hash to check that its data are unchanged. If samples are features,
    the hash is of their images, because features may be rounded differently on another machine.
    """
    hasher = hashlib.sha256()
    for array in (source.inputs if source.images is None else source.images, source.labels):
        hasher.update(f"{array.dtype} {array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()[:16]
