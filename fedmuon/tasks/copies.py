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

LAYERS = ("torch.nn.modules.", "fedmuon.")
FUNCTIONS = ("torch.", "fedmuon.")
VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor, type(None))
EMPTY = vars(nn.Module())
HOOKS = tuple(name for name in EMPTY if "hook" in name)


def copyable(module: nn.Module) -> bool:
    """Whether a copy surely computes the same by parameters of its own, and nothing else changes:
    layers of torch's and ours, without hooks, or functions that somebody gave them."""
    return all(
        _is_of(type(layer).__module__, LAYERS)
        and not any(vars(layer).get(name) for name in HOOKS)
        and _known(value for name, value in vars(layer).items() if name not in EMPTY)
        for layer in module.modules()
    )


def stateless(function: Any) -> bool:
    """Whether a loss or a measure is one of torch's or ours, which keep nothing between calls."""
    if isinstance(function, partial):
        held = [*function.args, *function.keywords.values()]
        return stateless(function.func) and _known(held)
    kind = function if isinstance(function, FunctionType) else type(function)
    return _is_of(str(kind.__module__), FUNCTIONS)


def _known(values: Iterable[Any]) -> bool:
    return all(
        _known(value) if isinstance(value, list | tuple) else _is_value(value) for value in values
    )


def _is_value(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is None and _is_of(str(value.__module__), FUNCTIONS)
    return isinstance(value, VALUES)


def _is_of(module: str, places: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(places)
