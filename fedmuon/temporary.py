"""Temporary run folders, which go with the last result that lies in them, and copies that stay."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from fedmuon.errors import InputError
from fedmuon.files import mendable


class Temporary:
    """A new folder, removed with this object or when Python ends, by the process that made it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="out-of-fedmuon-"))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Temporary":
        return self  # copies of a result lie in the same folder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # what was pickled elsewhere removes nothing


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a child that was forked from it
        shutil.rmtree(path, ignore_errors=True)


def copied(folder: Path, place: Path) -> None:
    """Copy a folder to a place where nothing is, whole or not at all."""
    if os.path.lexists(place):
        raise InputError(f"{place} exists: choose another path, or remove it first")
    if place.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{place} lies inside the run folder {folder}: choose a path outside it")
    with mendable(place, "write"):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            (whole := draft / "run").mkdir()  # with the rights of a new folder
            for one in folder.iterdir():
                (shutil.copytree if one.is_dir() else shutil.copy2)(one, whole / one.name)
            whole.rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
