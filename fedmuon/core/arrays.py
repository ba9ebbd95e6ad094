"""Conversion of arrays and tensors to files that cannot contain code: .npz, .npy, safetensors.

A tensor on the CPU is written without a copy, as a NumPy array in the same memory. Torch and NumPy
are imported only by the functions that need them. Commands that only show a run therefore start
fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH, require_regular

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def array_bytes(**arrays: np.ndarray) -> bytes:
    """Return the bytes of an .npz file with these arrays. Equal arrays produce equal bytes."""
    import numpy as np  # late, because it is slow and not needed to show a run

    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of an .npy file that contains the array."""
    import numpy as np  # late, as above

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Convert tensors to the bytes of a safetensors file. A replica axis of length 1 is removed."""
    return safetensors_bytes(
        to_numpy(
            {name: tensor[0] if len(tensor) == 1 else tensor for name, tensor in tensors.items()}
        )
    )


def safetensors_bytes(
    arrays: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a safetensors file with arrays and metadata."""
    from safetensors.numpy import save  # loads numpy, which is not needed to show a run

    return save({**arrays}, None if about is None else {**about})


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Convert tensors to contiguous arrays on the CPU."""
    return {name: value.detach().contiguous().cpu().numpy() for name, value in tensors.items()}


def digest_of_arrays(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Return one SHA-256 of the metadata and of all arrays, with their names, dtypes and shapes."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        digest.update(f"{name} torch.{value.dtype} {value.shape}".encode())
        digest.update(value.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file."""
    return _read(path, "pt")


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays (numpy) and the metadata of a safetensors file."""
    return _read(path, "np")


def _read(path: Path, framework: str) -> tuple[dict[str, Any], dict[str, str]]:
    with _opened(path, framework) as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file.

    Raises:
        InputError: If the size of the file disagrees with its header.
    """
    with _opened(path, "np") as file:
        return file.metadata() or {}


@contextlib.contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    try:
        with safe_open(require_regular(path), framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a readable safetensors file ({error}): restore the file from a copy, "
            f"or {AFRESH}"
        ) from None
