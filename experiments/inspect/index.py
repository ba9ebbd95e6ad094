"""An index of finished runs, so that commands on thousands of run folders answer quickly.

To list a finished run, its files are checked against their checksums and its config is validated.
This takes some milliseconds per run. The index stores the results of this work, in one file per
folder of runs. The files are in the user's cache folder, so no run folder changes.

A result is used only if the names, sizes and times of all files of the run are as they were when
the files were read. Unfinished and damaged runs have no results in the index. Private runs have
none either, because their summaries contain losses that are not released. If the index is missing,
damaged or not writable, the run folders are read again.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmuon.config.load import NAMING, Config
from fedmuon.config.schema import FIELDS
from fedmuon.core.choices import is_own
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, cache_folder, digest, read_bytes, write_bytes
from fedmuon.experiments.inspect.status import SETTLED, Changed, RunStatus, changed, folders_below
from fedmuon.runs.directory import LARGE, NOT_SHOWN

FEWEST = 20  # a smaller number of runs is read quickly without an index
MOST = 200  # maximum number of index files; the oldest are removed
Entries = dict[str, Record]  # name of a run folder -> what the index stores about the run


def runs_below(folder: Path) -> list[RunStatus]:
    """Return all runs in the folder and below it, ordered by path."""
    return statuses([*folders_below(folder)], brief=True)


def statuses(folders: Sequence[Path], brief: bool = False) -> list[RunStatus]:
    """Return the status of each run, from the index if the files of the run did not change.

    Then update the index.

    Args:
        folders: Run folders.
        brief: Whether large files need only a partial check, as in `RunStatus`.
    """
    groups: dict[Path, list[Path]] = {}
    for folder in folders:
        groups.setdefault(folder.parent, []).append(folder)
    runs: dict[Path, RunStatus] = {}
    for parent, group in groups.items():
        if (file := _place(parent, len(group))) is None:
            runs |= {folder: RunStatus(folder, brief) for folder in group}
            continue
        old = _read(file)
        new: Entries = {}
        for folder in group:
            runs[folder], entry = _status(folder, brief, old.get(folder.name))
            if entry:
                new[folder.name] = entry
        names = {folder.name for folder in group}
        others = {name: old_entry for name, old_entry in old.items()
                  if name not in names and (parent / name).is_dir()}  # fmt: skip
        if (new := others | new) != old:
            _write(file, new)
    return [runs[folder] for folder in folders]


def place(parent: Path) -> Path:
    """Return the path of the index of the runs in a folder."""
    return cache_folder() / "runs" / f"{digest(os.path.realpath(parent).encode())[:32]}.json"


def _place(parent: Path, count: int) -> Path | None:
    """Return the path of the index of `count` runs, or None if these runs have no index."""
    with contextlib.suppress(InputError):  # the cache folder is unknown
        if count >= FEWEST:
            return place(parent)
    return None


def _status(folder: Path, brief: bool, entry: Record | None) -> tuple[RunStatus, Record | None]:
    """Return the status of a run, and its entry for the index, if it may have one."""
    now = time.time_ns()
    try:
        files = changed(folder)  # before the files are read, so that a later change is noticed
    except OSError:  # the folder is missing, is a file or was removed
        return RunStatus(folder, brief), None
    if entry and entry["files"] == _key(files) and (brief or entry["whole"]):
        return _recalled(folder, brief, entry), entry
    run = RunStatus(folder, brief)
    with contextlib.suppress(InputError):
        stored = run.ended and not run.damage and not run.private
        if stored and _is_settled(files, now) and _is_plain(run.config):
            large = any(size > LARGE for name, _, _, size in files if name in NOT_SHOWN)
            entry = {
                "files": _key(files),
                "whole": not (brief and large),
                "config": _changes(run.config),
                "summary": run.summary,
                "totals": run.totals,
            }
            return run, entry
    return run, None


def _recalled(folder: Path, brief: bool, entry: Record) -> RunStatus:
    """Return the status of a run whose properties have the values in the index."""
    run = RunStatus(folder, brief, recalled=True)
    values = {name: entry[name] for name in ("summary", "totals")}
    vars(run).update(values, damage="", config=_config(entry["config"]))  # as if computed before
    return run


def _key(files: Changed) -> str:
    return digest(repr(files).encode())


def _is_settled(files: Changed, now: int) -> bool:
    return all(max(modified, moved) < now - SETTLED for _, modified, moved, _ in files)


def _is_plain(config: Config) -> bool:
    """Return whether reading the config depends only on config.toml, and not on a user's module."""
    return not any(is_own(getattr(getattr(config, table), key)) for table, key in NAMING)


def _changes(config: Config) -> dict[str, Record]:
    """Return the keys whose values differ from their defaults, by table."""
    tables = {name: (getattr(config, name), table) for name, table in _defaults().items()}
    return {
        name: {key: value for key, value in section if value != getattr(table, key)}
        for name, (section, table) in tables.items()
    }


def _config(changes: Mapping[str, Record]) -> Config:
    """Return the config with these changes. It was validated before it came to the index."""
    tables = {
        name: table.model_copy(update={key: _frozen(value) for key, value in changes[name].items()})
        for name, table in _defaults().items()
    }
    return Config.model_construct(**tables)


def _frozen(value: Any) -> Any:
    """Return a value with tuples in place of the lists of JSON, because configs have no lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def _defaults() -> dict[str, Any]:
    return {name: field.default for name, field in Config.model_fields.items()}


@cache
def _maker() -> str:
    """Return a text that differs if the version, the keys or their defaults differ."""
    defaults = [(table, key, field.default) for table, keys in FIELDS.items()
                for key, field in keys.items()]  # fmt: skip
    return digest(f"2 {version('fedmuon')} {defaults}".encode())


def _read(file: Path) -> Entries:
    """Return the entries of an index.

    There are none if the index is missing, damaged or from another version.
    """
    try:
        head, _, body = read_bytes(file).partition(b"\n")
    except (InputError, OSError):
        return {}
    return json.loads(body) if head.decode(errors="replace") == _seal(body) else {}


def _write(file: Path, entries: Entries) -> None:
    """Replace an index, if its folder is writable, and remove the oldest of too many indexes."""
    body = json.dumps(entries).encode()
    with contextlib.suppress(InputError, OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(file, _seal(body).encode() + b"\n" + body)
        for old in _oldest(file.parent.glob("*.json")):
            old.unlink(missing_ok=True)


def _oldest(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[MOST:]


def _seal(body: bytes) -> str:
    """Return the first line of an index, which shows whether the rest is complete and current."""
    return digest(_maker().encode() + body)
