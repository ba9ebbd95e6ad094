"""Check that a run is resumed with the same custom objects and samples that started the run.

A run folder contains the file objects.json with digests of the user's custom objects, of the files
that define the objects, of a method of another package, and of the samples. The file also contains
the values of the user's schedule, so that the schedule is called only once per run. The digest of
an object is a hash of its code, and of the values that its code and its attributes contain.
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
from fedmuon.config.methods import registered_function
from fedmuon.config.schema import reads
from fedmuon.config.user_objects import NAMED, guard, user_objects
from fedmuon.core import files
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, Record
from fedmuon.core.registry import LIBRARIES, absolute_name, local_imports, source_file
from fedmuon.data.source import Source
from fedmuon.data.user_data import digest
from fedmuon.federated.client_data import user_data_digest
from fedmuon.federated.language_model import base_dtype_of
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.first_version import fields as first_version_fields
from fedmuon.tasks.decoder import weights_digest
from fedmuon.tasks.frozen_base import base_digest
from fedmuon.tasks.peft_model import BroughtAdapters

FILE = "objects.json"
KINDS = ("partition", "task", "recipe", "orthogonalizer", "aggregate", "stage", "schedule")
FACTORS = "factors"
# Attributes that version 1.0 did not have: (class, attribute).
SINCE_THEN = {("Recipe", "stages"), ("Link", "knows_samples")}

# Classes that have moved since version 1.0: name -> name in version 1.0.
MOVED = {"fedmuon.optim.aggregator.Aggregator": "fedmuon.optim.aggregators.Aggregator"}

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
    objects, fingerprints = user_objects(config), {}
    for kind in KINDS:
        value = getattr(objects, kind)
        if kind == "recipe" and value is None:
            value = registered_function(config.local.recipe)
        if value is not None:
            key = (folder.resolve(), kind, id(value))
            met, fingerprint = MET.get(key, (lambda: None, ""))
            if afresh or met() is not value:
                with guard(config, kind):
                    fingerprint = _digest(config, kind, value)
                    MET[key] = (_reference(value), fingerprint)
            fingerprints[kind] = fingerprint
    if reads(config, "task.lora-rank") and config.task.lora_rank:  # without it, own files suffice
        fingerprints["weights"] = _weights_digest(config)
    if source is not None and objects.data is not None:
        fingerprints["data"] = user_data_digest(config)
    elif source is not None and reads(config, "data.folder"):
        fingerprints["data"] = digest(source)
    return fingerprints


def _weights_digest(config: Config) -> str:
    """Return a hash of the fixed weights to which adapters are added."""
    if config.task.name == "causal-lm":
        return base_digest(config.task.weights, base_dtype_of(config))
    return weights_digest(config.task.weights)


def require_same(folder: Path, found: Record) -> Record:
    """Return the content of objects.json in a run folder, or an empty result without this file.

    Raise an error if the digests in `found` differ from the digests in the file.
    """
    if not (folder / FILE).exists():
        return {}
    files.require_sound(folder, [FILE])
    try:
        saved = json.loads(files.read_text(folder / FILE))
        expected = {kind: digest for kind, digest in saved.items() if kind != FACTORS}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / FILE} is damaged ({error}): restore the file from a copy, or {AFRESH}"
        ) from None
    for kind in expected.keys() | found.keys():
        if expected.get(kind) != found.get(kind) and (kind != "data" or kind in found):
            other = "differ" if kind in ("data", "weights") else "differs"
            raise InputError(
                f"the {kind} {other} from the {kind} with which the run in {folder} started. "
                f"Pass the same {kind} again, or {AFRESH}."
            )
    return saved


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
        computed = plan.factors()
        factors = [] if computed is None else computed.tolist()
    if len(factors) != plan.rounds:
        raise InputError(
            f"[local] schedule was saved for {len(factors)} rounds, but this run has "
            f"{plan.rounds} rounds: restore the run folder from a copy, or {AFRESH}"
        )
    return dataclasses.replace(plan, factor=factors.__getitem__), {FACTORS: factors}


# Digests of objects


def _digest(config: Config, kind: str, value: Any) -> str:
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
                words += [sha256(files.read_bytes(path)).hexdigest() for path in (file, *beside)]
    # The values of a schedule are saved, so hidden state between its calls does not matter.
    words += parts(value, {}, state=kind != "schedule")
    text = "\n".join(words)
    return f"{_called(value)}:{sha256(text.encode()).hexdigest()[:16]}"


def _called(value: Any) -> str:
    """Return the name of a custom object, or of the function or module inside it."""
    if isinstance(value, partial):
        return _called(value.func)
    if isinstance(value, tuple | list) and value:
        return _called(value[0])
    attributes = getattr(value, "__dict__", {})
    for within in ("apply", "module"):  # inside an Orthogonalizer, Aggregator or Task
        if within in attributes and not isinstance(value, type):
            return _called(attributes[within])
    return str(getattr(value, "__name__", type(value).__name__))


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the object. The function uses a weak reference if possible."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def parts(found: Any, seen: dict[int, Any], state: bool = True) -> Iterator[str]:
    """Yield strings that differ between two objects if the objects differ.

    For a function, the strings contain its code and the variables in its closure. For a value, the
    strings represent its contents. If `state` is false, contents are left out. An opaque object is
    represented only by its type.
    """
    name = f"{type(found).__module__}.{type(found).__qualname__}"
    yield MOVED.get(name, name)
    if found is None or isinstance(found, bool | int | float | complex | str | bytes | np.generic):
        yield repr(found)
    elif id(found) not in seen:
        # Equal values of these types may be the same object.
        if not isinstance(found, tuple | frozenset | CodeType):
            seen[id(found)] = found
        for part in _held(found, state):
            yield from parts(part, seen, state)


def _held(value: Any, state: bool) -> Iterator[Any]:
    if isinstance(value, BroughtAdapters):
        return iter([value.digest if state else ""])
    for kinds, held_by in HELD.items():
        if isinstance(value, kinds):
            owner = value if state and type(value).__module__ != "builtins" else None
            return itertools.chain(held_by(value), _attributes(owner))
    if isinstance(value, FunctionType | type):
        return _of_code(value, state)
    if isinstance(value, np.ndarray | torch.Tensor):
        return _of_array(value) if state else iter(())
    return _of_value(value, state)


def _attributes(value: Any) -> Iterator[Any]:
    """Yield the attributes of an object: its `__dict__`, and the slots of the user's classes."""
    yield from _as_in_the_first_version(value, getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ()) if _is_ours(kind) else ()
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            spelled = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
            if spelled not in ("__dict__", "__weakref__") and hasattr(value, spelled):
                yield (spelled, getattr(value, spelled))


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


def _is_ours(definition: FunctionType | type) -> bool:
    """Return whether the user wrote this function or class, and not a library."""
    module = str(definition.__module__)
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
    (BuiltinFunctionType, ModuleType): lambda item: iter([item.__name__]),
    CodeType: lambda code: iter([code.co_code, code.co_names, code.co_varnames, code.co_consts]),
    MethodType: lambda method: iter([method.__func__, method.__self__]),
    partial: lambda function: iter([function.func, function.args, function.keywords]),
    Mapping: lambda mapping: iter([part for pair in mapping.items() for part in pair]),
    (set, frozenset): lambda values: iter(sorted(values, key=repr)),
    (tuple, list): iter,
}  # fmt: skip


def _of_value(value: Any, state: bool) -> Iterator[Any]:
    yield type(value)
    attributes = list(_attributes(value)) if state else []
    module = type(value).__module__
    supported = module.partition(".")[0] in LIBRARIES or hasattr(value, "named_parameters")
    if not supported and _is_installed(module):  # objects of other libraries may contain anything
        attributes = [pair for pair in attributes if _is_plain(pair[1])]
    yield from attributes
    if state and not attributes and " at 0x" not in (words := repr(value)):
        yield words


def _of_code(definition: FunctionType | type, state: bool) -> Iterator[Any]:
    custom = _is_ours(definition)
    yield "" if custom else definition.__qualname__
    if isinstance(definition, FunctionType):
        yield from (definition.__defaults__, definition.__kwdefaults__)
        yield from [_content(cell) for cell in definition.__closure__ or ()] if state else ()
        yield from [*vars(definition).items()] if custom and state else ()
        if not custom:
            return
        yield definition.__code__
        # The values that the code reads from its module: numbers, strings, functions and classes.
        # With `state`, also plain collections and arrays.
        kinds = (bool, int, float, str, FunctionType, type)
        global_values = (
            (name, definition.__globals__.get(name)) for name in _names(definition.__code__)
        )
        yield from (
            (name, value)
            for name, value in global_values
            if isinstance(value, kinds) or (state and _is_plain(value))
        )
    elif custom:
        yield from definition.__bases__
        kinds = (FunctionType, staticmethod, classmethod, property, partial, int, float, str, tuple)
        for name, value in vars(definition).items():
            plain = state and isinstance(value, list | dict) and _is_plain(value)
            relevant = name not in ("__module__", "__doc__", "__slots__")
            if plain or (isinstance(value, kinds) and relevant):
                inside = getattr(value, "__func__", value)
                yield (name, (value.fget, value.fset) if isinstance(value, property) else inside)


def _names(code: CodeType) -> dict[str, None]:
    """Return the names that the code of a function uses, including functions inside it."""
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return dict.fromkeys([*code.co_names, *(name for nested in inside for name in _names(nested))])


def _is_plain(value: Any) -> bool:
    """Return whether an object consists only of numbers, strings and arrays."""
    if isinstance(value, dict):
        return all(_is_plain(element) for pair in value.items() for element in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(element) for element in value)
    values = bool | int | float | complex | str | bytes | np.generic | np.ndarray
    return value is None or isinstance(value, values | torch.Tensor)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _of_array(array: Any) -> Iterator[Any]:
    """Yield the bytes of an array or tensor, or its type if it contains no values."""
    yield str(array.dtype)
    if isinstance(array, np.ndarray):
        yield array.shape
        if array.dtype.kind != "O":
            yield sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return
    if torch.nn.parameter.is_lazy(array) or array.is_meta:
        return
    if array.is_nested:
        yield from array.unbind()
    elif array.is_quantized:
        yield from (array.int_repr(), repr(array.qscheme()), array.dequantize())
    elif array.layout != torch.strided:
        dense = array.detach().cpu().to_dense()
        at = dense.nonzero()
        yield from (str(array.layout), tuple(dense.shape), at, dense[tuple(at.T)])
    else:
        flat = array.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        yield from _of_array(flat.view(torch.uint8).numpy())
