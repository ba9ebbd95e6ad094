"""Check that a run is resumed with the same custom objects and samples that started the run.

A run folder contains the file objects.json with digests of the user's custom objects, of the files
that define the objects, and of the samples. The file also contains the values of the user's
schedule, so that the schedule is called only once per run. The digest of an object is a hash of its
code, and of the values that its code and its attributes contain.
"""

import dataclasses
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import NAMED, guard, user_objects
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, Record
from fedmuon.core.registry import LIBRARIES, absolute_name, local_imports, source_file
from fedmuon.data.source import Source
from fedmuon.data.user_data import digest
from fedmuon.federated.client_data import user_data_digest
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.first_version import fields as first_version_fields
from fedmuon.tasks.decoder import weights_digest

FILE = "objects.json"
KINDS = ("partition", "task", "recipe", "orthogonalizer", "aggregate", "schedule")
FACTORS = "factors"
# Attributes that version 1.0 did not have: (class, attribute).
SINCE_THEN = {("Recipe", "knows_samples"), ("Recipe", "stages"), ("Link", "knows_samples")}

# (folder, kind, id) -> the object, and its digest when the run in this folder first used it in this
# process. Later use may change its contents, but it is still the same object.
MET: dict[tuple[Path, str, int], tuple[Callable[[], Any], str]] = {}


def described(
    config: Config, folder: Path, source: Source | None = None, afresh: bool = False
) -> Record:
    """Return digests of the custom objects and samples that the run in `folder` uses.

    Args:
        config: The config with its custom objects.
        folder: The run folder.
        source: The samples. With None, the result contains no digest of samples.
        afresh: Whether the run is new. In a resumed run, an object that the run already used in
            this process keeps its earlier digest.

    Returns:
        A mapping from the kind of each object to `name:digest`, and from `data` and `weights` to
        their digests.
    """
    own, found = user_objects(config), {}
    for kind in KINDS:
        if (mine := getattr(own, kind)) is not None:
            key = (folder.resolve(), kind, id(mine))
            met, known = MET.get(key, (lambda: None, ""))
            if afresh or met() is not mine:
                with guard(config, kind):
                    known = _digest(config, kind, mine)
                    MET[key] = (_reference(mine), known)
            found[kind] = known
    if reads(config, "task.lora-rank") and config.task.lora_rank:  # without it, own files suffice
        found["weights"] = weights_digest(config.task.weights)
    if source is not None and own.data is not None:
        found["data"] = user_data_digest(config)
    elif source is not None and reads(config, "data.folder"):
        found["data"] = digest(source)
    return found


def require_same(folder: Path, found: Record) -> Record:
    """Return the content of objects.json in a run folder, or an empty result without this file.

    Raise an error if the digests in `found` differ from the digests in the file.
    """
    if not (folder / FILE).exists():
        return {}
    files.require_sound(folder, [FILE])
    try:
        there = json.loads(files.read_text(folder / FILE))
        known = {kind: digest for kind, digest in there.items() if kind != FACTORS}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / FILE} is damaged ({error}): restore the file from a copy, or {AFRESH}"
        ) from None
    for kind in known.keys() | found.keys():
        if known.get(kind) != found.get(kind) and (kind != "data" or kind in found):
            other = "differ" if kind in ("data", "weights") else "differs"
            raise InputError(
                f"the {kind} {other} from the {kind} with which the run in {folder} started. "
                f"Pass the same {kind} again, or {AFRESH}."
            )
    return there


def with_factors(
    plan: RandomnessPlan, config: Config, known: Record
) -> tuple[RandomnessPlan, Record]:
    """Return the plan with the values of the user's schedule.

    The schedule is called once per run.
    """
    if user_objects(config).schedule is None:
        return plan, {}
    factors = known.get(FACTORS)
    if factors is None:
        found = plan.factors()
        factors = [] if found is None else found.tolist()
    if len(factors) != plan.rounds:
        raise InputError(
            f"[local] schedule was saved for {len(factors)} rounds, but this run has "
            f"{plan.rounds} rounds: restore the run folder from a copy, or {AFRESH}"
        )
    return dataclasses.replace(plan, factor=factors.__getitem__), {FACTORS: factors}


# Digests of objects


def _digest(config: Config, kind: str, mine: Any) -> str:
    """Return `name:digest` of a custom object.

    The digest includes the file or module that the config names for the object, and the local files
    that this file imports.
    """
    table, key = NAMED[kind]
    names = [getattr(getattr(config, table), key), config.task.model if kind == "task" else ""]
    words = []
    if getattr(config.given, kind) is None:
        for place in {absolute_name(name).rpartition(":")[0] for name in names} - {""}:
            if place.partition(".")[0] not in LIBRARIES and (file := source_file(place)):
                beside = local_imports(file).values() if place.endswith(".py") else ()
                words += [sha256(files.read_bytes(one)).hexdigest() for one in (file, *beside)]
    # The values of a schedule are saved, so hidden state between its calls does not matter.
    words += parts(mine, {}, state=kind != "schedule")
    text = "\n".join(words)
    return f"{_called(mine)}:{sha256(text.encode()).hexdigest()[:16]}"


def _called(found: Any) -> str:
    """Return the name of a custom object, or of the function or module inside it."""
    if isinstance(found, partial):
        return _called(found.func)
    if isinstance(found, tuple | list) and found:
        return _called(found[0])
    held = getattr(found, "__dict__", {})
    for within in ("apply", "module"):  # inside an Orthogonalizer, Aggregator or Task
        if within in held and not isinstance(found, type):
            return _called(held[within])
    return str(getattr(found, "__name__", type(found).__name__))


def _reference(mine: Any) -> Callable[[], Any]:
    """Return a function that returns the object. The function uses a weak reference if possible."""
    try:
        return weakref.ref(mine)
    except TypeError:
        return lambda: mine


def parts(found: Any, seen: dict[int, Any], state: bool = True) -> Iterator[str]:
    """Yield strings that differ between two objects if the objects differ.

    For a function, the strings contain its code and the variables in its closure. For a value, the
    strings represent its contents. If `state` is false, contents are left out. An opaque object is
    represented only by its type.
    """
    yield f"{type(found).__module__}.{type(found).__qualname__}"
    if found is None or isinstance(found, bool | int | float | complex | str | bytes | np.generic):
        yield repr(found)
    elif id(found) not in seen:
        # Equal values of these types may be the same object.
        if not isinstance(found, tuple | frozenset | CodeType):
            seen[id(found)] = found
        for one in _held(found, state):
            yield from parts(one, seen, state)


def _held(found: Any, state: bool) -> Iterator[Any]:
    for kinds, held_by in HELD.items():
        if isinstance(found, kinds):
            own = found if state and type(found).__module__ != "builtins" else None
            return itertools.chain(held_by(found), _attributes(own))
    if isinstance(found, FunctionType | type):
        return _of_code(found, state)
    if isinstance(found, np.ndarray | torch.Tensor):
        return _of_array(found) if state else iter(())
    return _of_value(found, state)


def _attributes(found: Any) -> Iterator[Any]:
    """Yield the attributes of an object: its `__dict__`, and the slots of the user's classes."""
    yield from _as_in_the_first_version(found, getattr(found, "__dict__", {}))
    for kind in type(found).__mro__:
        names = vars(kind).get("__slots__", ()) if _is_ours(kind) else ()
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            spelled = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
            if spelled not in ("__dict__", "__weakref__") and hasattr(found, spelled):
                yield (spelled, getattr(found, spelled))


def _as_in_the_first_version(
    subject: Any, attributes: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Return attributes, without those that version 1.0 did not have if they have no effect.

    Otherwise, no run whose optimizer is such an object could be resumed with a later version.
    """
    kind = type(subject).__qualname__ if type(subject).__module__.startswith("fedmuon.") else ""
    if kind == "Recipe":
        attributes = first_version_fields(subject)
    return ((name, value) for name, value in attributes.items()
            if (kind, name) not in SINCE_THEN or value)  # fmt: skip


def _is_ours(found: FunctionType | type) -> bool:
    """Return whether the user wrote this function or class, and not a library."""
    module = str(found.__module__)
    return module.partition(".")[0] not in LIBRARIES and not _is_installed(module)


@lru_cache
def _is_installed(module: str) -> bool:
    """Return whether a module belongs to an installed package.

    The program that the user runs never counts as installed.
    """
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


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
    held = list(_attributes(found)) if state else []
    module = type(found).__module__
    known = module.partition(".")[0] in LIBRARIES or hasattr(found, "named_parameters")
    if not known and _is_installed(module):  # objects of other libraries may contain anything
        held = [pair for pair in held if _is_plain(pair[1])]
    yield from held
    if state and not held and " at 0x" not in (words := repr(found)):
        yield words


def _of_code(found: FunctionType | type, state: bool) -> Iterator[Any]:
    ours = _is_ours(found)
    yield "" if ours else found.__qualname__
    if isinstance(found, FunctionType):
        yield from (found.__defaults__, found.__kwdefaults__)
        yield from [_content(cell) for cell in found.__closure__ or ()] if state else ()
        yield from [*vars(found).items()] if ours and state else ()
        if not ours:
            return
        yield found.__code__
        # The values that the code reads from its module: numbers, strings, functions and classes.
        # With `state`, also plain collections and arrays.
        kinds = (bool, int, float, str, FunctionType, type)
        held = ((name, found.__globals__.get(name)) for name in _names(found.__code__))
        yield from (
            (name, one)
            for name, one in held
            if isinstance(one, kinds) or (state and _is_plain(one))
        )
    elif ours:
        yield from found.__bases__
        kinds = (FunctionType, staticmethod, classmethod, property, partial, int, float, str, tuple)
        for name, one in vars(found).items():
            plain = state and isinstance(one, list | dict) and _is_plain(one)
            known = name not in ("__module__", "__doc__", "__slots__")
            if plain or (isinstance(one, kinds) and known):
                inside = getattr(one, "__func__", one)
                yield (name, (one.fget, one.fset) if isinstance(one, property) else inside)


def _names(code: CodeType) -> dict[str, None]:
    """Return the names that the code of a function uses, including functions inside it."""
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return dict.fromkeys([*code.co_names, *(name for one in inside for name in _names(one))])


def _is_plain(found: Any) -> bool:
    """Return whether an object consists only of numbers, strings and arrays."""
    if isinstance(found, dict):
        return all(_is_plain(one) for pair in found.items() for one in pair)
    if isinstance(found, list | tuple | set | frozenset):
        return all(_is_plain(one) for one in found)
    values = bool | int | float | complex | str | bytes | np.generic | np.ndarray
    return found is None or isinstance(found, values | torch.Tensor)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _of_array(found: Any) -> Iterator[Any]:
    """Yield the bytes of an array or tensor, or its type if it contains no values."""
    yield str(found.dtype)
    if isinstance(found, np.ndarray):
        yield found.shape
        if found.dtype.kind != "O":
            yield sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
        return
    if torch.nn.parameter.is_lazy(found) or found.is_meta:
        return
    if found.is_nested:
        yield from found.unbind()
    elif found.is_quantized:
        yield from (found.int_repr(), repr(found.qscheme()), found.dequantize())
    elif found.layout != torch.strided:
        dense = found.detach().cpu().to_dense()
        at = dense.nonzero()
        yield from (str(found.layout), tuple(dense.shape), at, dense[tuple(at.T)])
    else:
        flat = found.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        yield from _of_array(flat.view(torch.uint8).numpy())
