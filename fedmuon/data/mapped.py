"""Sources as memory maps: many client processes share one copy, and touch only their own rows.

The first process to need a source writes its arrays below the cache folder ($FEDMUON_CACHE, or
fedmuon/ in the user's cache); the key names everything the arrays depend on.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.data.readers import mnist5k_path
from fedmuon.data.source import Source
from fedmuon.data.sources import FILES, found_folder, read
from fedmuon.data.text import text_files

Stamp = tuple[tuple[str, int, int], ...]
VERSION = 2  # of what is stored; raise it when a reader changes


def mapped(name: str, options: tuple[tuple[str, Any], ...]) -> Source:
    """The named source with memory-mapped inputs; read anew where nothing can be cached."""
    return _mapped(name, options, stamp(name, options))


def stamp(name: str, options: tuple[tuple[str, Any], ...]) -> Stamp:
    """What changes when a file that the source is read from does."""
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
    """The files that a source is read from; none if it is made, or comes from the hub."""
    if name == "mnist5k":
        return [path] if (path := mnist5k_path()) else []
    if name == "text":
        return text_files(options["folder"]) if options.get("folder") else []
    folder = found_folder(name, options.get("folder", "")) if name in FILES else None
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []


def _write(source: Source, place: Path) -> None:
    """All arrays or none: a folder that appears by a rename; the first of two writers wins."""
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
