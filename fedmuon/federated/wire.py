"""Convert server states to flat dictionaries of named tensors, for messages and files.

The names are `model.<parameter>` and `<link>.<parameter>`. Messages are not trusted: names, shapes
and types are checked before arrays are read.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import SAME_VERSION, InputError, OwnError, plain
from fedmuon.optim.chain import States
from fedmuon.tasks.base import Params

BEFORE = 10  # bytes of an .npy file before its header; the last two give the header's length


def pack(params: Params, states: States) -> dict[str, Tensor]:
    """Convert a model and states to flat tensors on the CPU."""
    return {name: value.detach().cpu() for name, value in named(params, states).items()}


def named(params: Params, states: States) -> dict[str, Tensor]:
    """Return the tensors of a model and states in one dictionary, with flat names."""
    trees = {"model": params, **states}
    return {
        f"{tree}.{name}": value for tree, values in trees.items() for name, value in values.items()
    }


def unpack(tensors: Mapping[str, Tensor], params: Params, states: States) -> tuple[Params, States]:
    """Convert a flat dictionary of tensors to a model and states, with the shapes of `params`.

    Raise an error if an array is missing or unexpected, or has another shape or dtype.
    """
    trees = {"model": params, **states}
    expected = {f"{tree}.{name}" for tree, values in trees.items() for name in values}
    for problem, odd in (
        ("arrays are missing", sorted(expected - set(tensors))),
        ("the message has unexpected arrays", sorted(set(tensors) - expected)),
    ):
        if odd:
            names = ", ".join(plain(name, 60) for name in odd[:3])
            suffix = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            raise InputError(f"{problem}: {names}{suffix}")
    unpacked: States = {}
    for tree, values in trees.items():
        unpacked[tree] = {}
        for name, like in values.items():
            tensor = tensors[f"{tree}.{name}"]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise InputError(
                    f"the array {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                    f"but {tuple(like.shape)} and {like.dtype} were expected"
                )
            # Copy to the memory order and the device of the expected tensor.
            unpacked[tree][name] = torch.empty_like(like).copy_(tensor)
    return unpacked.pop("model"), unpacked


def received(arrays: Mapping[str, bytes], like: Params, states: States) -> tuple[Params, States]:
    """Unpack a received message, but reject an unexpected size before memory is allocated."""
    expected = named(like, states)
    tensors = {
        name: _read(data, expected[name], name) for name, data in arrays.items() if name in expected
    }
    others = {name: torch.empty(0) for name in arrays if name not in expected}
    return unpack({**tensors, **others}, like, states)


def _read(data: bytes, like: Tensor, name: str) -> Tensor:
    """Read an .npy array. Raise an error if the header or the length is not as expected."""
    try:
        start = BEFORE + int.from_bytes(data[BEFORE - 2 : BEFORE], "little")
        shape, columns, dtype = _header(data[:start])
    except Exception:  # numpy's parser raises many kinds of errors
        raise InputError(f"the array {name} is not an .npy file. {SAME_VERSION}") from None
    expected = torch.empty(0, dtype=like.dtype).numpy().dtype
    if shape != tuple(like.shape) or dtype != expected:
        raise InputError(
            f"the array {name} has shape {plain(shape)} and dtype {plain(dtype)}, but "
            f"{tuple(like.shape)} and {expected} were expected"
        )
    if len(data) - start != like.nbytes:
        raise InputError(
            f"the array {name} has {len(data) - start} bytes, but its header requires "
            f"{like.nbytes} bytes. {SAME_VERSION}"
        )
    values = np.frombuffer(data, dtype, offset=start)
    return torch.from_numpy(values.reshape(shape, order="F" if columns else "C").copy())


@lru_cache(maxsize=64)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, memory order and dtype in an .npy header."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError
    return np.lib.format.read_array_header_1_0(file)


@contextlib.contextmanager
def distrusted() -> Iterator[None]:
    """Within this block, convert every error to an InputError whose message has one line."""
    try:
        yield
    except OwnError:  # of a custom object, not of the message
        raise
    except InputError as error:
        raise InputError(plain(error, 500)) from None
    except Exception as error:
        text = f"{type(error).__name__}: {plain(error)}"
        raise InputError(f"the message is malformed ({text}). {SAME_VERSION}") from None
