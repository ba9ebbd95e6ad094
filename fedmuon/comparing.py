"""Runs beside each other, as plain numbers: groups that differ in the seed alone, and what else
tells them apart."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmuon.config import Config, flatten
from fedmuon.files import Record
from fedmuon.names import SPREAD

Finished = tuple[Path, Config, Record, list[Record]]  # folder, config, summary, rounds
SEED = "federation.seed"
DIGEST = "data.options.digest"  # of samples that were given, which nobody reads


def compared(runs: Sequence[Finished]) -> tuple[list[Record], dict[str, list[list[Record]]]]:
    """A row for each group, with means and standard deviations; and each group's curves by name."""
    runs = list({run[0].resolve(): run for run in runs}.values())
    flats = [flatten(config) for _, config, _, _ in runs]
    differing = _differing(flats)
    shown = [name for name in differing if name != DIGEST]
    groups: dict[tuple[Any, ...], list[Finished]] = {}
    for flat, run in zip(flats, runs, strict=True):
        key = (*(flat.get(name) for name in differing), _objects(run[0]))
        while any(one[1].federation.seed == flat[SEED] for one in groups.get(key, ())):
            key = (*key, "again")  # who has the same seed is no other seed of the same
        groups.setdefault(key, []).append(run)
    changes = [{name: flatten(one[0][1]).get(name) for name in shown} for one in groups.values()]
    names = [_name(changed, flats) for changed in changes]
    rows, curves = [], {}
    for name, changed, members in zip(names, changes, groups.values(), strict=True):
        folder = members[0][0]
        name = f"{name} ({folder.name})" if name and names.count(name) > 1 else name or folder.name
        name = f"{name} ({folder})" if name in curves else name
        rows.append({"run": name, **changed, "seeds": len(members), **_measures(members)})
        curves[name] = [rounds for _, _, _, rounds in members]
    return rows, curves


def _objects(folder: Path) -> str:
    """What tells a run's objects of the user's from others."""
    file = folder / "objects.json"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _name(changed: Mapping[str, Any], flats: Sequence[Mapping[str, Any]]) -> str:
    """What a group has of the keys that differ; with their table where other tables have such."""
    every = Counter(key.partition(".")[2] for key in dict.fromkeys(k for one in flats for k in one))
    short = {key: key.partition(".")[2] for key in changed}
    said = {key: one if every[one] == 1 else key for key, one in short.items()}
    return ", ".join(f"{said[key]}={value}" for key, value in changed.items())


def _differing(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys, but the seed, whose values are not the same in all."""
    names = dict.fromkeys(name for flat in flats for name in flat if name != SEED)
    return [name for name in names if len({flat.get(name) for flat in flats}) > 1]


def _measures(members: Sequence[Finished]) -> Record:
    """Mean and, of several seeds, standard deviation of what the summaries measure."""
    found: Record = {}
    for name in (name for name in members[0][2] if name not in ("seed", "rounds")):
        held = [summary.get(name) for _, _, summary, _ in members]
        values = [value for value in held if isinstance(value, float)]
        if values and len(values) == len(held):
            found[name] = statistics.fmean(values)
            if len(values) > 1:
                found[f"{name}{SPREAD}"] = statistics.stdev(values)
    return found
