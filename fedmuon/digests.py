"""Words that tell objects apart by what they would do: code, and what it and values hold."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fedmuon.beside import LIBRARIES


def parts(found: Any, seen: dict[int, Any], state: bool = True) -> Iterator[str]:
    """Words that differ where two objects do: of functions their code and what it closes over, of
    values what they hold; `state` leaves that out. Of what is opaque there is but its type."""
    yield f"{type(found).__module__}.{type(found).__qualname__}"
    if found is None or isinstance(found, bool | int | float | complex | str | bytes | np.generic):
        yield repr(found)
    elif id(found) not in seen:
        if not isinstance(found, tuple | frozenset | CodeType):  # of which equal ones may be one
            seen[id(found)] = found
        for one in _held(found, state):
            yield from parts(one, seen, state)


def _held(found: Any, state: bool) -> Iterator[Any]:
    """What an object is made of."""
    for kinds, held_by in HELD.items():
        if isinstance(found, kinds):
            own = found if state and type(found).__module__ != "builtins" else None
            return itertools.chain(held_by(found), _attributes(own))
    if isinstance(found, FunctionType | type):
        return _of_code(found, state)
    if isinstance(found, np.ndarray) or _is_tensor(found):
        return _of_array(found) if state else iter(())
    return _of_value(found, state)


def _attributes(found: Any) -> Iterator[Any]:
    """What an object holds by names: in its dictionary, and in slots of the user's classes."""
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        names = vars(kind).get("__slots__", ()) if _is_ours(kind) else ()
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            spelled = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
            if spelled not in ("__dict__", "__weakref__") and hasattr(found, spelled):
                yield (spelled, getattr(found, spelled))


def _is_ours(found: FunctionType | type) -> bool:
    """Whether the user wrote it: what libraries have is known by its name."""
    module = str(found.__module__)
    return module.partition(".")[0] not in LIBRARIES and not _is_installed(module)


@lru_cache
def _is_installed(module: str) -> bool:
    """Whether the module lies where packages are installed; a program's own does not, though what
    runs it may."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _is_foreign(found: Any) -> bool:
    """Whether an object is another library's, which may hold anything; modules hold weights."""
    module = type(found).__module__
    known = module.partition(".")[0] in LIBRARIES or hasattr(found, "named_parameters")
    return not known and _is_installed(module)


def _is_tensor(found: Any) -> bool:
    return "torch" in sys.modules and isinstance(found, sys.modules["torch"].Tensor)


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
    if _is_foreign(found):
        held = [pair for pair in held if _is_plain(pair[1])]
    yield from held
    if state and not held and " at 0x" not in (words := repr(found)):
        yield words


def _of_code(found: FunctionType | type, state: bool) -> Iterator[Any]:
    """Of a function or a class."""
    ours = _is_ours(found)
    yield "" if ours else found.__qualname__
    if isinstance(found, FunctionType):
        yield from (found.__defaults__, found.__kwdefaults__)
        yield from [_content(cell) for cell in found.__closure__ or ()] if state else ()
        yield from [*vars(found).items()] if ours and state else ()
        yield from (found.__code__, *_globals(found, state)) if ours else ()
    elif ours:
        yield from found.__bases__
        yield from _of_class(found, state)


def _of_class(found: type, state: bool) -> Iterator[Any]:
    """What a class of the user's says by itself."""
    kinds = (FunctionType, staticmethod, classmethod, property, partial, int, float, str, tuple)
    for name, one in vars(found).items():
        plain = state and isinstance(one, list | dict) and _is_plain(one)
        if plain or (isinstance(one, kinds) and name not in ("__module__", "__doc__", "__slots__")):
            yield (name, _unwrapped(one))


def _unwrapped(one: Any) -> Any:
    return (one.fget, one.fset) if isinstance(one, property) else getattr(one, "__func__", one)


def _globals(found: FunctionType, state: bool) -> Iterator[Any]:
    """Numbers, words, functions, classes, and with `state` plain collections and arrays, that the
    code takes from its module."""
    for name in _names(found.__code__):
        one = found.__globals__.get(name)
        known = isinstance(one, (bool, int, float, str, FunctionType, type))
        if known or (state and _is_plain(one)):
            yield (name, one)


def _names(code: CodeType) -> dict[str, None]:
    """The names that code asks for, and that of the functions inside it does."""
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return dict.fromkeys([*code.co_names, *(name for one in inside for name in _names(one))])


def _is_plain(found: Any) -> bool:
    """Whether it is made of numbers, words and arrays alone."""
    if isinstance(found, dict):
        return all(_is_plain(one) for pair in found.items() for one in pair)
    if isinstance(found, list | tuple | set | frozenset):
        return all(_is_plain(one) for one in found)
    values = bool | int | float | complex | str | bytes | np.generic | np.ndarray
    return found is None or isinstance(found, values) or _is_tensor(found)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _of_array(found: Any) -> Iterator[Any]:
    if _is_tensor(found):
        yield from _of_tensor(found)
        return
    yield from (str(found.dtype), found.shape)
    if found.dtype.kind != "O":
        yield sha256(np.ascontiguousarray(found).tobytes()).hexdigest()


def _of_tensor(found: Any) -> Iterator[Any]:
    """What a tensor holds, however it is stored; of one without values there is its type."""
    import torch

    yield str(found.dtype)
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
