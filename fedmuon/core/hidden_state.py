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
        return {name: _Value(one) for name, one in _walk(self._found, "", DEEP)}


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
        one, now = self.value, other.value
        if type(one) is not type(now) or self.mark != other.mark:
            return False
        if not isinstance(one, Tensor) or one is now:
            return True
        alike = (one.shape, one.dtype, one.device) == (now.shape, now.dtype, now.device)
        return alike and one.equal(now)


def _walk(found: Any, name: str, deep: int) -> Iterator[tuple[str, Any]]:
    if isinstance(found, Number | np.ndarray | Tensor):
        if name:
            yield name, found
    elif deep:
        for more, one in _parts(found, name):
            yield from _walk(one, more, deep - 1)


def _parts(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, part) for the parts of an object that may contain state.

    Numbers in a dict or list are ignored, because they may be a harmless log of calls.
    """
    if isinstance(found, MethodType):
        yield name, found.__self__
    elif isinstance(found, partial):
        yield name, found.func
    elif isinstance(found, FunctionType):
        for variable, cell in zip(
            found.__code__.co_freevars, found.__closure__ or (), strict=False
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"variable {variable}", cell.cell_contents
    elif isinstance(found, dict | list):
        pairs = list(found.items() if isinstance(found, dict) else enumerate(found))
        arrays = [(key, one) for key, one in pairs if isinstance(one, np.ndarray | Tensor)]
        yield from ((f"{name}[{key!r:.40}]", one) for key, one in arrays)
    elif not isinstance(found, type):
        held = getattr(found, "__dict__", {})
        yield from ((f"{name}.{key}" if name else f"attribute {key}", held[key]) for key in held)
