"""Runs beside each other, as plain numbers: groups that differ in the seed alone, and what else
tells them apart."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmuon.config import Config, flatten
from fedmuon.files import Record

Finished = tuple[Path, Config, Record, list[Record]]  # folder, config, summary, rounds
SEED = "federation.seed"


def compared(runs: Sequence[Finished]) -> tuple[list[Record], dict[str, list[list[Record]]]]:
    """A row for each group, with means and standard deviations; and each group's curves by name."""
    groups: dict[tuple[Any, ...], list[Finished]] = {}
    flats = [flatten(config) for _, config, _, _ in runs]
    differing = _differing(flats)
    for flat, found in zip(flats, runs, strict=True):
        groups.setdefault(tuple(flat.get(name) for name in differing), []).append(found)
    rows, curves = [], {}
    for values, members in groups.items():
        changed = dict(zip(differing, values, strict=True))
        name = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in changed.items())
        name = name or members[0][0].name
        rows.append({"run": name, **changed, "seeds": len(members), **_measures(members)})
        curves[name] = [rounds for _, _, _, rounds in members]
    return rows, curves


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
                found[f"{name} ±"] = statistics.stdev(values)
    return found
