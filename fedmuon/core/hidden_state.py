"""Detection of undeclared state: numbers, arrays and tensors that a custom object changes.

Checkpoints contain only declared state. This module searches attributes of objects, and variables
in closures of functions.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from numbers import Number
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

DEEP = 4  # maximum depth of attributes of attributes
LARGEST = 1 << 20  # arrays with more entries are compared at a subset of their entries


class HiddenState:
    """A snapshot of the numbers, arrays and tensors that a custom object contains."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self._before = self._values()

    def changed(self) -> str:
        """Return the place of a value that changed since the snapshot.

        Return an empty text if no value changed.
        """
        for name, value in self._values().items():
            if name not in self._before or not self._before[name].same(value):
                return f"its {name}"
        return ""

    def _values(self) -> dict[str, "_Value"]:
        return {name: _Value(value) for name, value in _walk(self._found, "", DEEP)}


class _Value:
    """A value, and a mark that differs after the value was changed in place.

    The mark of a tensor is torch's version counter. The mark of an array contains the bytes of the
    array.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.mark = value, None
        if isinstance(value, Tensor):
            self.mark = value._version
        elif not isinstance(value, np.ndarray):
            self.mark = repr(value)
        elif value.dtype.kind != "O":
            self.mark = value.ravel()[:: max(1, value.size // LARGEST)].tobytes()

    def same(self, other: "_Value") -> bool:
        before, now = self.value, other.value
        if type(before) is not type(now) or self.mark != other.mark:
            return False
        if not isinstance(before, Tensor) or before is now:
            return True
        alike = (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
        return alike and before.equal(now)


def _walk(value: Any, name: str, deep: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Number | np.ndarray | Tensor):
        if name:
            yield name, value
    elif deep:
        for place, part in _parts(value, name):
            yield from _walk(part, place, deep - 1)


def _parts(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, part) for the parts of an object that may contain state.

    Numbers in a dict or list are ignored, because they may be a harmless log of calls.
    """
    if isinstance(owner, MethodType):
        yield name, owner.__self__
    elif isinstance(owner, partial):
        yield name, owner.func
    elif isinstance(owner, FunctionType):
        for variable, cell in zip(
            owner.__code__.co_freevars, owner.__closure__ or (), strict=False
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"variable {variable}", cell.cell_contents
    elif isinstance(owner, dict | list):
        pairs = list(owner.items() if isinstance(owner, dict) else enumerate(owner))
        arrays = [(key, value) for key, value in pairs if isinstance(value, np.ndarray | Tensor)]
        yield from ((f"{name}[{key!r:.40}]", array) for key, array in arrays)
    elif not isinstance(owner, type):
        attributes = getattr(owner, "__dict__", {})
        yield from (
            (f"{name}.{key}" if name else f"attribute {key}", attributes[key]) for key in attributes
        )
