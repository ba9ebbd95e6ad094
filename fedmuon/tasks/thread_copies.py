"""Whether several threads may call a module at once, each with its own copy.

A copy is needed because a call with other parameters writes them into the module until it returns.
A copy of a user's class may share layers with the original, or store state between calls. Such a
module is copied only if its methods certainly do neither (`pure_layers.py`). Otherwise, one thread
calls it. Layers of torch and of fedmuon do neither.
"""

from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedmuon.core.errors import Guard
from fedmuon.tasks.pure_layers import CONSTANTS, EMPTY, TORCH, only_computes

LAYERS = (TORCH, "fedmuon.")
FUNCTIONS = ("torch.", "fedmuon.")
VALUES = (*CONSTANTS, Tensor)
HOOKS = tuple(name for name in EMPTY if "hook" in name)


def copyable(module: nn.Module) -> bool:
    """Return whether a copy of a module certainly computes the same, without side effects."""
    if _has_any_global_hook():
        return False
    return all(
        not any(vars(layer).get(name) for name in HOOKS)
        and (_contents_known(layer) if _class_known(layer) else only_computes(layer))
        for layer in module.modules()
    )


def of_known_layers(module: nn.Module) -> bool:
    """Return whether all layers of a module are layers of torch or of fedmuon."""
    return all(map(_class_known, module.modules()))


def stateless(function: Any) -> bool:
    """Return whether a loss or metric certainly stores nothing between calls.

    This is true for functions of torch and of fedmuon that do not call a function of the user.
    """
    kind = type(function)  # isinstance may run the object's own code, which may raise anything
    if issubclass(kind, nn.Module):
        return of_known_layers(function) and copyable(function)
    if issubclass(kind, partial):
        contents = [function.func, *function.args, *function.keywords.values()]
    elif kind is FunctionType and f"{function.__globals__.get('__name__', '')}.".startswith(
        FUNCTIONS
    ):
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
    else:
        return False
    return all(_known(value) or stateless(value) for value in contents)


def _class_known(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.".startswith(LAYERS)


def _contents_known(layer: nn.Module) -> bool:
    return all(_known(value) for name, value in vars(layer).items() if name not in EMPTY)


def _known(value: Any) -> bool:
    """Return whether a value is plain, a stateless function, or a list or tuple of such values."""
    if isinstance(value, list | tuple):
        return all(map(_known, value))
    if isinstance(value, Guard):  # it contains the object that it guards, for error messages
        return stateless(value.found)
    return isinstance(value, VALUES) or (isinstance(value, FunctionType) and stateless(value))
