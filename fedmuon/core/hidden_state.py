"""What a custom object holds between its calls: numbers, arrays, tensors; and whether it changes.

A state that nobody declared is in no checkpoint. What is found here is what objects usually hold
it in: attributes of an instance, and variables that a function closes over.
"""

from collections.abc import Iterator
from functools import partial
from numbers import Number
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

DEEP = 4  # attributes of attributes
LARGEST = 1 << 20  # entries of an array that are compared one by one


class Held:
    """The values that an object holds now, by where they are."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self._before = self._values()

    def changed(self) -> str:
        """The first value that is another one than before; nothing where all are the same."""
        for name, (kind, value, mark) in self._values().items():
            before = self._before.get(name)
            if before is None or not _same(before, (kind, value, mark)):
                return f"its {name}"
        return ""

    def _values(self) -> dict[str, tuple[type, Any, Any]]:
        return {name: (type(one), one, _mark(one)) for name, one in _walk(self._found, "", DEEP)}


def _walk(found: Any, name: str, deep: int) -> Iterator[tuple[str, Any]]:
    """Numbers, arrays and tensors, by words for where they are."""
    if isinstance(found, Number | np.ndarray | Tensor):
        if name:
            yield name, found
    elif deep:
        for more, one in _parts(found, name):
            yield from _walk(one, more, deep - 1)


def _parts(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What an object is made of, as far as a state may be there."""
    if isinstance(found, MethodType):
        yield name, found.__self__
    elif isinstance(found, partial):
        yield name, found.func
    elif isinstance(found, FunctionType):
        cells = zip(found.__code__.co_freevars, found.__closure__ or (), strict=False)
        yield from ((f"variable {variable}", _content(cell)) for variable, cell in cells)
    elif isinstance(found, dict):
        yield from ((f"{name}[{key!r:.40}]", one) for key, one in _arrays(found.items()))
    elif isinstance(found, list):
        yield from ((f"{name}[{place}]", one) for place, one in _arrays(enumerate(found)))
    elif not isinstance(found, type):
        held = getattr(found, "__dict__", {})
        yield from ((f"{name}.{key}" if name else f"attribute {key}", held[key]) for key in held)


def _arrays(pairs: Any) -> Iterator[tuple[Any, Any]]:
    """Those of a collection that are arrays or tensors: its numbers may be a log of the calls."""
    return ((key, one) for key, one in list(pairs) if isinstance(one, np.ndarray | Tensor))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _mark(value: Any) -> Any:
    """What changes when a value is written to: torch counts that, and numpy does not."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, np.ndarray):
        flat = value.ravel()[:: max(1, value.size // LARGEST)]
        return flat.tobytes() if flat.dtype.kind != "O" else None
    return repr(value)


def _same(one: tuple[type, Any, Any], other: tuple[type, Any, Any]) -> bool:
    if one[0] is not other[0] or one[2] != other[2]:
        return False
    if not isinstance(one[1], Tensor):
        return True
    alike = (one[1].shape, one[1].dtype, one[1].device) == (
        other[1].shape, other[1].dtype, other[1].device
    )  # fmt: skip
    return one[1] is other[1] or (alike and one[1].equal(other[1]))
