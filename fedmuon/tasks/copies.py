"""Modules that several threads call at once, each its own copy: a call with other parameters puts
them into the module for as long as it takes."""

import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

OURS = ("torch", "fedmuon")
LIBRARIES = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
HELD = tuple(name for name in vars(nn.Module()) if "hook" in name)  # dictionaries of hooks


def copied(module: nn.Module) -> nn.Module | None:
    """A copy that computes the same by parameters of its own; None where that is not certain: a
    hook, or a function that knows the layers from elsewhere, would go on with those of the first.
    """
    if not all(_is_self_contained(layer) for layer in module.modules()):
        return None
    try:
        return copy.deepcopy(module)
    except Exception:  # whatever a library's or a user's class raises
        return None


def _is_self_contained(layer: nn.Module) -> bool:
    if any(vars(layer).get(name) for name in HELD):
        return False
    own = {name: one for name, one in vars(layer).items() if name not in vars(nn.Module())}
    kinds = [kind for kind in type(layer).__mro__ if not _is_library(kind.__module__)]
    return all(map(_is_known, own.values())) and all(map(_knows_itself_alone, kinds))


def _knows_itself_alone(kind: type) -> bool:
    shared = any(isinstance(value, nn.Module | Tensor) for value in vars(kind).values())
    return not shared and all(_knows_no_layers(one, set()) for one in _functions(kind))


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in (*OURS, "builtins", "typing")


def _is_known(value: Any) -> bool:
    """What a copy copies whole: values, layers, and functions that know nothing by themselves."""
    if isinstance(value, dict):
        return all(map(_is_known, [*value, *value.values()]))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_known, value))
    if isinstance(value, FunctionType):
        return _knows_no_layers(value, set())
    return isinstance(value, (*VALUES, Tensor, nn.Module, type, BuiltinFunctionType))


def _functions(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        if isinstance(value, property):
            yield from (one for one in (value.fget, value.fset) if isinstance(one, FunctionType))
        elif isinstance(one := getattr(value, "__func__", value), FunctionType):
            yield one


def _knows_no_layers(function: FunctionType, seen: set[int]) -> bool:
    """Whether all that a function takes from around it are values, libraries, classes and functions
    of which the same holds."""
    if id(function) in seen or _is_library(function.__module__):
        return True
    seen.add(id(function))
    names = _names(function.__code__)
    taken = [function.__globals__[name] for name in names if name in function.__globals__]
    taken += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    taken += [*vars(function).values(), *map(_content, function.__closure__ or ())]
    return all(_is_apart(one, seen) for one in taken)


def _is_apart(value: Any, seen: set[int]) -> bool:
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
        return file is None or any(Path(file).resolve().is_relative_to(at) for at in LIBRARIES)
    if isinstance(value, FunctionType):
        return _knows_no_layers(value, seen)
    if isinstance(value, list | tuple):
        return all(_is_apart(one, seen) for one in value)
    return isinstance(value, (*VALUES, type, BuiltinFunctionType))


def _names(code: CodeType) -> set[str]:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *(name for one in inside for name in _names(one))}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
