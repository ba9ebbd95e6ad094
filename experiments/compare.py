"""Runs beside each other, as plain numbers: groups that differ in the seed alone, and what else
tells them apart."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmuon.config import load as tables
from fedmuon.config.load import Config, flatten
from fedmuon.config.read_if import reads
from fedmuon.config.user_objects import NAMED
from fedmuon.core.choices import GIVEN, SPREAD
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record, read_text
from fedmuon.experiments.results import NOT_RELEASED, Comparison

Finished = tuple[Path, Config, Record, list[Record]]  # folder, config, summary, rounds
SEED, NOISE = "federation.seed", "privacy.noise"
SPENT = 0.01  # of a target, by which the noise that is found for it may miss it
DIGEST = "data.options.digest"  # of samples that were given, which nobody reads


def comparison(labelled: Mapping[str, Sequence[Path]]) -> Comparison:
    """The finished runs in these folders, by labels; or right below one that is no run, where those
    that are damaged are left out."""
    found, left = [], []
    for label, folders in labelled.items():
        for folder in folders:
            found += [(label, one) for one in _in(folder, left)]
    if not found:
        raise InputError(left[0] if left else "there is nothing to compare: name a finished run")
    runs = [one for _, one in found]
    note = NOT_RELEASED if any("privacy" in summary for _, _, summary, _ in runs) else ""
    rows, curves, folders = compared(runs, [label for label, _ in found])
    return Comparison(rows, curves, note, folders, left)


def _in(folder: Path, left: list[str]) -> list[Finished]:
    """The run, or those right below; why one of these is left out is added to `left`."""
    below = () if (folder / "config.toml").exists() else sorted(folder.glob("*/summary.json"))
    if not below:
        return [_read(folder)]
    found = []
    for file in below:
        try:
            found.append(_read(file.parent))
        except InputError as error:
            left.append(str(error))
    return found


def _read(folder: Path) -> Finished:
    """A finished run, refused where a file of it was changed."""
    from fedmuon.runs.directory import RunDirectory

    directory = RunDirectory(folder)
    summary = directory.finished()
    directory.require_unchanged()
    return folder, tables.load(folder / "config.toml"), summary, directory.records()


Compared = tuple[list[Record], dict[str, list[list[Record]]], dict[str, list[Path]]]


def compared(runs: Sequence[Finished], labels: Sequence[str] = ()) -> Compared:
    """A row for each group, with means and standard deviations; and by its name each group's curves
    and folders. Runs of different `labels`, one for each run, are in different groups."""
    labels = labels or [""] * len(runs)
    own = {(label, run[0].resolve()): run for label, run in zip(labels, runs, strict=True)}
    flats = _with_objects([flatten(_as_read(run)) for run in own.values()], [*own.values()])
    for flat, one in zip(flats, own.values(), strict=True):
        if _follows(one):
            flat[NOISE] = "by epsilon"
    differing = _differing(flats)
    shown = [name for name in differing if name != DIGEST]
    groups: dict[tuple[Any, ...], list[Finished]] = {}
    of: dict[tuple[Any, ...], Record] = {}
    for (label, _), flat, run in zip(own, flats, own.values(), strict=True):
        key = (label, *(flat.get(name) for name in differing), *_objects(run[0]).items())
        while any(one[1].federation.seed == flat[SEED] for one in groups.get(key, ())):
            key = (*key, "again")  # who has the same seed is no other seed of the same
        groups.setdefault(key, []).append(run)
        of.setdefault(key, {name: flat.get(name) for name in shown if _told(run, name)})
    names = [_name(changed, flats) for changed in of.values()]
    rows, curves, folders = [], {}, {}
    for (key, members), name in zip(groups.items(), names, strict=True):
        label, folder = key[0], members[0][0]
        name = f"{name} ({folder.name})" if name and names.count(name) > 1 else name or folder.name
        if label:
            name = label if [one[0] for one in groups].count(label) == 1 else f"{label}: {name}"
        name = f"{name} ({folder})" if name in curves else name
        row = {"run": name, **of[key], **_spent(members)}
        rows.append({**row, "seeds": len(members), **_measures(members)})
        curves[name] = [rounds for _, _, _, rounds in members]
        folders[name] = [folder for folder, _, _, _ in members]
    return rows, curves, folders


def _as_read(run: Finished) -> Config:
    """The config, of a run without neighbours with the defaults of what only they read."""
    config = run[1]
    if _has_neighbours(run[0]):
        return config
    return config.model_copy(update={"stability": type(config.stability)()})


def _has_neighbours(folder: Path) -> bool:
    return (folder / "neighbours.csv").exists()


def _follows(run: Finished) -> bool:
    """Whether the noise is what [privacy] epsilon asks for, of that seed's own clients: the run
    spent its target."""
    _, config, summary, _ = run
    target, spent = config.privacy.epsilon, summary.get("privacy", {}).get("epsilon")
    return bool(target and spent) and math.isclose(spent, target, rel_tol=SPENT)


def _objects(folder: Path) -> Record:
    """What tells a run's objects of the user's from others, by kind."""
    file = folder / "objects.json"
    told = json.loads(read_text(file)) if file.exists() else {}
    return {kind: str(one) for kind, one in told.items()}


def _with_objects(
    flats: Sequence[dict[str, Any]], runs: Sequence[Finished]
) -> list[dict[str, Any]]:
    """The flat configs with the names of objects that were handed over, and with their digests
    where others have the same name."""
    told = [_objects(run[0]) for run in runs]
    for kind, (table, key) in NAMED.items():
        place = f"{table}.{key}"
        every = {one[kind].partition(":")[::2] for one in told if ":" in one.get(kind, "")}
        alike = Counter(name for name, _ in every)
        for flat, one in zip(flats, told, strict=True):
            name, _, digest = one.get(kind, "").partition(":")
            if flat.get(place) == GIVEN and digest:
                flat[place] = name if alike[name] == 1 else f"{name} of digest {digest[:6]}"
    return [*flats]


def _told(run: Finished, name: str) -> bool:
    """Whether the key says anything of the run."""
    idle = name.startswith("stability.") and not _has_neighbours(run[0])
    return ".options." in name or (reads(run[1], name) and not idle)


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


def _spent(members: Sequence[Finished]) -> Record:
    """What private runs spent, the seed that spent most, and what that epsilon says."""
    accounts = [one[2]["privacy"] for one in members if "privacy" in one[2]]
    if not accounts:
        return {}
    known = [math.inf if one["epsilon"] is None else one["epsilon"] for one in accounts]
    worst = accounts[known.index(max(known))]
    return {
        "spent epsilon": max(known),
        "at delta": max(one["delta"] for one in accounts),
        "adjacency": adjacency_of(worst),
        "level": "client" if worst.get("unit") == "client" else "example",
        "certified": all(one["certified"] for one in accounts),
    }


def adjacency_of(private: Mapping[str, Any]) -> str:
    """What holds of the epsilon in a summary: earlier versions, whose rates were lot / n_i, said
    add-remove of it, and did not say where rates are from."""
    return private["adjacency"] if "rate_from" in private else "zero-out"


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
