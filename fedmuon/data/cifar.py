"""CIFAR-10 from its binary batches, or from its Python ones without trusting the pickle."""

import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import regular, require_regular

SHAPE = (3, 32, 32)
BYTES = 3 * 32 * 32
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
Samples = tuple[np.ndarray, np.ndarray]


def has_cifar(folder: Path) -> bool:
    """Whether the folder, or a folder of the usual name in it, has CIFAR-10 batches."""
    return _first_batch(folder) is not None


def read_cifar_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Images [n, 3, 32, 32] uint8, labels [n] int64 and where the official test part starts."""
    first = _first_batch(folder)
    if first is None:
        raise InputError(f"{folder} has no CIFAR-10 batches (data_batch_1): check [data] folder")
    read = _read_binary if first.suffix == ".bin" else _read_pickle
    batches = [read(first.with_name(name + first.suffix)) for name in BATCHES]
    sizes = [len(labels) for _, labels in batches]
    if len(set(sizes)) != 1:  # the binary batches state no length of their own
        raise InputError(
            f"{first.parent} has batches of {sizes} images where all six should be of one size: "
            "a file is damaged, fetch them again"
        )
    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    return images, labels, sum(sizes[:-1])


def _first_batch(folder: Path) -> Path | None:
    """The first batch; binary ones are preferred, because they can hold nothing but bytes."""
    for kind, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        for place in (folder, folder / kind):
            path = place / (BATCHES[0] + suffix)
            if path.is_file():
                return path
    return None


def _read_binary(path: Path) -> Samples:
    try:
        content = np.fromfile(require_regular(path), np.uint8)
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({error.strerror}): all six CIFAR-10 batches are needed"
        ) from None
    if not content.size or content.size % (1 + BYTES):
        raise InputError(
            f"{path} has {content.size} bytes, no whole number of {1 + BYTES}-byte images: "
            "the file is damaged, fetch it again"
        )
    records = content.reshape(-1, 1 + BYTES)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)


def _read_pickle(path: Path) -> Samples:
    batch = _unpickle(path)
    values = {_text(key): value for key, value in batch.items()} if isinstance(batch, dict) else {}
    images, labels = _array(values.get("data")), values.get("labels")
    whole = isinstance(labels, list) and all(type(label) is int for label in labels)
    if images is None or not whole or images.size != BYTES * len(labels):
        raise InputError(
            f"{path} is no CIFAR-10 batch of uint8 images and integer labels: fetch it again, or "
            "use the binary version"
        )
    return images.reshape(-1, *SHAPE), np.array(labels, np.int64)


class _Inert:
    """Stands in for every name that the pickle calls: keeps what it is given and does nothing."""

    __slots__ = ("given", "state")

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes dicts, lists, strings and numbers; not even numpy's own constructors are called."""

    names = (
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",  # how Python 3 writes bytes in the old protocols
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        if f"{module_name}.{global_name}" not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
        return _Inert


def _unpickle(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} is missing: all six CIFAR-10 batches are needed")
    try:
        with open(path, "rb", opener=regular) as file:
            return _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a hostile or damaged file may fail in any way
        raise InputError(
            f"{path} is refused as a CIFAR-10 batch ({error}): it may hold only arrays and labels, "
            "fetch it again or use the binary version"
        ) from None


def _array(value: Any) -> np.ndarray | None:
    """The uint8 array that numpy's state tuple (version, shape, dtype, order, bytes) describes."""
    state = getattr(value, "state", None)
    if not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, kind, fortran, content = state
    content = _plain(content)
    plain_order = isinstance(kind, _Inert) and kind.given[:1] in ((b"u1",), ("u1",)) and not fortran
    if not plain_order or not isinstance(content, bytes) or shape != (len(content) // BYTES, BYTES):
        return None
    return np.frombuffer(content, np.uint8)


def _plain(value: Any) -> Any:
    """Bytes that came as (text, "latin1")."""
    if isinstance(value, _Inert) and value.given[1:] == ("latin1",):
        with contextlib.suppress(AttributeError, UnicodeEncodeError):  # then it is no bytes
            return value.given[0].encode("latin1")
    return value


def _text(key: Any) -> Any:
    key = _plain(key)
    return key.decode("latin1") if isinstance(key, bytes) else key
