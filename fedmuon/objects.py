"""What is known again of the user's objects: a run is gone on with by the same ones, or refused.

A run directory has it in objects.json: digests of the code of objects and of the files they stand
in, of the samples, and the schedule's values, which are what every later reader uses.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fedmuon.config import Config
from fedmuon.data.own import digest
from fedmuon.data.source import Source
from fedmuon.errors import InputError
from fedmuon.federated.dealing import own_digest
from fedmuon.federated.plan import Plan
from fedmuon.files import AFRESH, Record
from fedmuon.own import NAMED, own_objects
from fedmuon.reading import reads
from fedmuon.registry import settled, stands_in

FILE = "objects.json"
KINDS = ("partition", "task", "recipe", "orthogonalizer", "aggregate", "schedule")
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "fedmuon"}  # known by their names
FACTORS = "factors"


def described(config: Config, source: Source | None = None) -> Record:
    """By kind, `name:digest` of each object of the user's, and a digest of samples that lie in
    files."""
    own, found = own_objects(config), {}
    for kind in KINDS:
        if (mine := getattr(own, kind)) is not None:
            # A schedule's values are written, so what it remembers between calls does not matter.
            told = "\n".join([*_file(config, kind), *_parts(mine, {}, state=kind != "schedule")])
            found[kind] = f"{_called(mine)}:{sha256(told.encode()).hexdigest()[:16]}"
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


def _digest(told: Any) -> str:
    """Of an object without its name, which older folders have not."""
    return str(told).rpartition(":")[2]


def require_same(folder: Path, found: Record) -> Record:
    """What the run in `folder` began with, refused where another object is given now."""
    if not (folder / FILE).exists():
        return {}
    try:
        there = json.loads((folder / FILE).read_text(encoding="utf-8"))
        known = {kind: there[kind] for kind in there if kind != FACTORS}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / FILE} is damaged ({error}): {AFRESH}") from None
    for kind in known.keys() | found.keys():
        if _digest(known.get(kind)) != _digest(found.get(kind)) and (
            kind != "data" or kind in found
        ):
            raise InputError(
                f"the {kind} {'are others' if kind == 'data' else 'is another one'} than {folder} "
                "was begun with: give the same again, "
                f"or {AFRESH}"
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
    """The source of the file or module that the config names the object in."""
    table, key = NAMED[kind]
    names = [getattr(getattr(config, table), key), config.task.model if kind == "task" else ""]
    if getattr(config.given, kind) is None:
        for place in {settled(name).rpartition(":")[0] for name in names} - {""}:
            if place.partition(".")[0] not in LIBRARIES and (file := stands_in(place)):
                yield sha256(file.read_bytes()).hexdigest()


def _parts(found: Any, seen: dict[int, Any], state: bool = True) -> Iterator[str]:
    """Words that differ where two objects do: of functions their code and what it closes over, of
    values what they hold; `state` leaves that out. Of what is opaque there is but its type."""
    yield f"{type(found).__module__}.{type(found).__qualname__}"
    if found is None or isinstance(found, bool | int | float | complex | str | bytes | np.generic):
        yield repr(found)
    elif id(found) not in seen:
        if not isinstance(found, tuple | frozenset | CodeType):  # of which equal ones may be one
            seen[id(found)] = found
        for one in _held(found, state):
            yield from _parts(one, seen, state)


def _held(found: Any, state: bool) -> Iterator[Any]:
    """What an object is made of."""
    for kinds, parts in HELD.items():
        if isinstance(found, kinds):
            return parts(found)
    if isinstance(found, FunctionType | type):
        return _of_code(found, state)
    if isinstance(found, np.ndarray) or hasattr(found, "detach"):
        return _of_array(found) if state else iter(())
    return _of_value(found, state)


HELD: dict[type | tuple[type, ...], Callable[[Any], Iterator[Any]]] = {
    (BuiltinFunctionType, ModuleType): lambda one: iter([one.__name__]),
    CodeType: lambda one: iter([one.co_code, one.co_names, one.co_varnames, one.co_consts]),
    MethodType: lambda one: iter([one.__func__, one.__self__]),
    partial: lambda one: iter([one.func, one.args, one.keywords]),
    Mapping: lambda one: iter([part for pair in one.items() for part in pair]),
    (set, frozenset): lambda one: iter(sorted(one, key=repr)),
    (tuple, list): iter,
}  # fmt: skip


def _of_value(found: Any, state: bool) -> Iterator[Any]:
    yield type(found)
    if hasattr(found, "__dict__"):
        yield vars(found) if state else ()
    elif state and " at 0x" not in (words := repr(found)):
        yield words


def _of_code(found: FunctionType | type, state: bool) -> Iterator[Any]:
    """Of a function or a class; what libraries have is known by its name."""
    ours = str(found.__module__).partition(".")[0] not in LIBRARIES
    yield "" if ours else found.__qualname__
    if isinstance(found, FunctionType):
        yield from (found.__defaults__, found.__kwdefaults__)
        yield from [_content(cell) for cell in found.__closure__ or ()] if state else ()
        yield from (found.__code__, *_globals(found)) if ours else ()
    elif ours:
        yield from found.__bases__
        of_class = (FunctionType, staticmethod, classmethod, property, int, float, str, tuple)
        for name, one in vars(found).items():
            if isinstance(one, of_class) and name not in ("__module__", "__doc__"):
                yield (name, _unwrapped(one))


def _unwrapped(one: Any) -> Any:
    return (one.fget, one.fset) if isinstance(one, property) else getattr(one, "__func__", one)


def _globals(found: FunctionType) -> Iterator[Any]:
    """Numbers, words, functions and classes that the code takes from its module."""
    kinds = (bool, int, float, str, FunctionType, type)
    for name in found.__code__.co_names:
        if isinstance(one := found.__globals__.get(name), kinds):
            yield one


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _of_array(found: Any) -> Iterator[Any]:
    if hasattr(found, "detach"):
        import torch

        yield str(found.dtype)
        found = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    yield from (str(found.dtype), found.shape)
    if found.dtype.kind != "O":
        yield sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
