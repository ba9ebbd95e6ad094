"""Arrays and tensors as the bytes of files that hold no code: .npz, .npy, safetensors."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, require_regular


def array_bytes(**arrays: np.ndarray) -> bytes:
    """Arrays as the bytes of an .npz; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    """An array as the bytes of an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as the bytes of a safetensors file, without a replica axis of length 1."""
    plain = {
        name: (value[0] if len(value) == 1 else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    return save(plain, metadata)


def require_whole(path: Path) -> None:
    """Reject a safetensors file whose size disagrees with its header."""
    with _opened(path):
        pass


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    with _opened(path) as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(require_regular(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file ({error}): {AFRESH}") from None
