"""Whether the methods of a user's layer only compute, as their bytecode shows.

Such a method writes to nothing but its own variables. From outside, it reads only the layer,
constants, functions and classes of torch, some built-in functions, and functions that only compute.
The answer can be false for a layer that does only compute, but not the other way round, unless a
method changes torch's own state.
"""

import builtins
import dis
import math
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

TORCH = "torch.nn.modules."
CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
EMPTY = vars(nn.Module())  # the attributes of each layer
BUILTINS = {
    getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance",
        "len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted", "sum",
        "tuple", "zip", "AssertionError", "NotImplementedError", "RuntimeError", "TypeError",
        "ValueError",
    )
}  # fmt: skip
# Python adds these to a class by itself. Copies do not call `__init__`.
OF_EACH_CLASS = {
    "__module__", "__doc__", "__qualname__", "__init__", "__annotations__", "__dict__",
    "__weakref__", "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__",
}  # fmt: skip
# Operations that write outside of a function, or whose effect their name does not show.
UNSAFE = {
    "STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME",
    "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF",
    "LOAD_BUILD_CLASS", "IMPORT_NAME", "IMPORT_FROM",
}  # fmt: skip
OUTER = {"STORE_DEREF", "DELETE_DEREF"}  # the same, for a variable of an enclosing function
MISSING = object()


def only_computes(layer: nn.Module) -> bool:
    """Return whether no method of the layer's class stores anything or reads what can change."""
    attributes = [value for name, value in vars(layer).items() if name not in EMPTY]
    return all(map(is_constant, attributes)) and all(
        _members_compute(base)
        for base in type(layer).__mro__
        if base is not object and not base.__module__.startswith(TORCH)
    )


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    return type(value) in CONSTANTS or _is_torchs(value)


def _members_compute(kind: type) -> bool:
    if kind.__module__.startswith("torch."):  # such as the parametrizations of torch.nn.utils
        return False
    members = [value for name, value in vars(kind).items() if name not in OF_EACH_CLASS]
    special = [name for name in vars(kind) if name.startswith("__")]
    return type(kind) is type and set(special) <= OF_EACH_CLASS and all(map(_computes, members))


def _computes(member: Any) -> bool:
    if isinstance(member, staticmethod):
        member = member.__func__
    if isinstance(member, property) and member.fset is member.fdel is None:
        member = member.fget
    return is_constant(member) or _is_pure(member, set())


def _is_pure(function: Any, seen: set[CodeType]) -> bool:
    """Return whether a function only computes. `seen` contains the functions that call it."""
    if type(function) is not FunctionType or vars(function):
        return False
    code = function.__code__
    if code in seen:
        return True
    seen.add(code)
    outside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            outside.append(cell.cell_contents)
        except ValueError:  # a variable without a value
            return False
    known = vars(builtins) | function.__globals__
    for inner in _with_inner(code):
        if any(name.startswith("__") for name in inner.co_names):  # such as __dict__, __class__
            return False
        for step in dis.get_instructions(inner):
            enclosing = step.opname in OUTER and step.argval in code.co_freevars
            if step.opname in UNSAFE or enclosing:
                return False
            if step.opname == "LOAD_GLOBAL":
                outside.append(known.get(step.argval, MISSING))
    return all(_is_readable(value, seen) for value in outside)


def _is_readable(value: Any, seen: set[CodeType]) -> bool:
    if isinstance(value, ModuleType):
        return value is math or f"{value.__name__}.".startswith("torch.")
    return is_constant(value) or _is_builtin(value) or _is_pure(value, seen)


def _is_builtin(value: Any) -> bool:
    return isinstance(value, type | type(len)) and value in BUILTINS


def _is_torchs(value: Any) -> bool:
    """Return whether a value is a function or class of torch.

    A function of torch that contains a function of the user, as a decorator returns it, is not.
    """
    if isinstance(value, FunctionType) and not value.__closure__:
        return f"{value.__globals__.get('__name__', '')}.".startswith("torch.")
    if isinstance(value, type):
        return f"{value.__module__}.".startswith("torch.")
    name, modules = getattr(value, "__name__", None), (torch, nn.functional, math)
    return type(name) is str and any(vars(module).get(name) is value for module in modules)


def _with_inner(code: CodeType) -> list[CodeType]:
    """Return the code of a function, and of the functions and comprehensions inside it."""
    functions = [value for value in code.co_consts if isinstance(value, CodeType)]
    return [code, *(inner for function in functions for inner in _with_inner(function))]
