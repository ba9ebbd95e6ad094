"""Which modules several threads may call at once, each its own copy: a call with other parameters
puts them into the module for as long as it takes.

A copy of a user's class may go on with the layers of the first, or keep something between calls:
these stay one, for one thread. Of torch's layers and ours neither is so.
"""

from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedmuon.core.guard import Guard

LAYERS = ("torch.nn.modules.", "fedmuon.")
FUNCTIONS = ("torch.", "fedmuon.")
VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor, type(None))
EMPTY = vars(nn.Module())
HOOKS = tuple(name for name in EMPTY if "hook" in name)


def copyable(module: nn.Module) -> bool:
    """Whether a copy surely computes the same by parameters of its own, and nothing else changes:
    layers of torch's and ours, without hooks or functions that somebody gave them."""
    return not _has_any_global_hook() and all(
        _is_of(type(layer).__module__, LAYERS)
        and not any(vars(layer).get(name) for name in HOOKS)
        and _known(value for name, value in vars(layer).items() if name not in EMPTY)
        for layer in module.modules()
    )


def stateless(function: Any) -> bool:
    """Whether a loss or a measure is one of torch's or ours, which keep nothing between calls, nor
    call what somebody gave them."""
    kind = type(function)  # isinstance asks the object as well, which may raise anything
    if issubclass(kind, nn.Module):
        return copyable(function)
    if issubclass(kind, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    elif kind is FunctionType and _is_of(function.__globals__["__name__"], FUNCTIONS):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    else:
        return False
    return all(_known([one]) or stateless(one) for one in held)


def _known(values: Iterable[Any]) -> bool:
    return all(
        _known(value) if isinstance(value, list | tuple) else _is_value(value) for value in values
    )


def _is_value(value: Any) -> bool:
    if isinstance(value, Guard):  # it holds what it guards, to name it
        return stateless(value.found)
    return isinstance(value, VALUES) or (isinstance(value, FunctionType) and stateless(value))


def _is_of(module: str, places: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(places)
