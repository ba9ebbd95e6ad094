"""What is known again of the user's objects: a run is gone on with by the same ones, or refused.

A run directory has it in objects.json: digests of the code of objects and of the files they stand
in, of the samples, and the schedule's values, which are what every later reader uses.
"""

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedmuon import files
from fedmuon.beside import LIBRARIES, neighbours
from fedmuon.config import Config
from fedmuon.data.own import digest
from fedmuon.data.source import Source
from fedmuon.data.weights import weights_digest
from fedmuon.digests import parts
from fedmuon.errors import InputError
from fedmuon.federated.dealing import own_digest
from fedmuon.federated.plan import Plan
from fedmuon.files import AFRESH, Record
from fedmuon.own import NAMED, guard, own_objects
from fedmuon.reading import reads
from fedmuon.registry import settled, stands_in

FILE = "objects.json"
KINDS = ("partition", "task", "recipe", "orthogonalizer", "aggregate", "schedule")
FACTORS = "factors"


# (folder, kind, id) -> the object, and its digest when the run in that folder first met it in this
# process: use may change what it holds, and it is the same one yet.
MET: dict[tuple[Path, str, int], tuple[Callable[[], Any], str]] = {}


def described(
    config: Config, folder: Path, source: Source | None = None, afresh: bool = False
) -> Record:
    """By kind, `name:digest` of each object of the user's as the run in `folder` met it, which
    begins `afresh` or goes on, and of samples that lie in files."""
    own, found = own_objects(config), {}
    for kind in KINDS:
        if (mine := getattr(own, kind)) is not None:
            key = (folder.resolve(), kind, id(mine))
            met, known = MET.get(key, (lambda: None, ""))
            if afresh or met() is not mine:
                with guard(config, kind):
                    known = _digest(config, kind, mine)
                    MET[key] = (_reference(mine), known)
            found[kind] = known
    if reads(config, "task.lora-rank") and config.task.lora_rank:  # else its own files have all
        found["weights"] = weights_digest(config.task.weights)
    if source is not None and own.data is not None:
        found["data"] = own_digest(config)
    elif source is not None and reads(config, "data.folder"):
        found["data"] = digest(source)
    return found


def _called(found: Any) -> str:
    """What people call the object: its function's or class's name, or that of what it wraps."""
    if isinstance(found, partial):
        return _called(found.func)
    if isinstance(found, tuple | list) and found:
        return _called(found[0])
    held = getattr(found, "__dict__", {})
    for within in ("apply", "module"):  # of an Orthogonalizer or Aggregator, of a Task
        if within in held and not isinstance(found, type):
            return _called(held[within])
    return str(getattr(found, "__name__", type(found).__name__))


def _reference(mine: Any) -> Callable[[], Any]:
    """What returns the object, and keeps it only if it cannot be had otherwise."""
    try:
        return weakref.ref(mine)
    except TypeError:
        return lambda: mine


def _digest(config: Config, kind: str, mine: Any) -> str:
    # A schedule's values are written, so what it remembers between calls does not matter.
    told = "\n".join([*_file(config, kind), *parts(mine, {}, state=kind != "schedule")])
    return f"{_called(mine)}:{sha256(told.encode()).hexdigest()[:16]}"


def require_same(folder: Path, found: Record) -> Record:
    """What the run in `folder` began with, refused where another object is given now."""
    if not (folder / FILE).exists():
        return {}
    files.require_sound(folder, [FILE])
    try:
        there = json.loads(files.read_text(folder / FILE))
        known = {kind: digest for kind, digest in there.items() if kind != FACTORS}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / FILE} is damaged ({error}): {AFRESH}") from None
    for kind in known.keys() | found.keys():
        if known.get(kind) != found.get(kind) and (kind != "data" or kind in found):
            other = "are others" if kind in ("data", "weights") else "is another one"
            raise InputError(
                f"the {kind} {other} than {folder} was begun with: give the same again, or {AFRESH}"
            )
    return there


def kept(plan: Plan, config: Config, there: Record) -> tuple[Plan, Record]:
    """The plan with the user's schedule as it was written, or is now to be, called once a run."""
    if own_objects(config).schedule is None:
        return plan, {}
    factors = there.get(FACTORS)
    if factors is None:
        found = plan.factors()
        factors = [] if found is None else found.tolist()
    if len(factors) != plan.rounds:
        raise InputError(f"[local] schedule was written of {len(factors)} rounds: {AFRESH}")
    return dataclasses.replace(plan, factor=factors.__getitem__), {FACTORS: factors}


def as_bytes(found: Record) -> dict[str, bytes]:
    """The file and its content, if there is anything to tell."""
    return {FILE: (json.dumps(found, sort_keys=True) + "\n").encode()} if found else {}


def _file(config: Config, kind: str) -> Iterator[str]:
    """The sources of the file or module that the config names the object in, and of a file's
    neighbours."""
    table, key = NAMED[kind]
    names = [getattr(getattr(config, table), key), config.task.model if kind == "task" else ""]
    if getattr(config.given, kind) is None:
        for place in {settled(name).rpartition(":")[0] for name in names} - {""}:
            if place.partition(".")[0] not in LIBRARIES and (file := stands_in(place)):
                beside = neighbours(file).values() if place.endswith(".py") else ()
                for one in (file, *beside):
                    yield sha256(files.read_bytes(one)).hexdigest()
