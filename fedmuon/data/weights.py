"""Stored parameters of a network, from safetensors files only: reading them runs no code.

A separate module, so that commands that read no weights need not load safetensors.
"""

from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from fedmuon.core.errors import InputError
from fedmuon.core.files import require_regular


def read_weights(place: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .safetensors file, or of all such files in a folder, by name."""
    path = Path(place).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"[task] weights = '{place}' has no .safetensors file: check the path")
    found: dict[str, np.ndarray] = {}
    for file in files:
        found |= _arrays(file)
    return found


def weights_digest(place: str | Path) -> str:
    """A hash of the names, types and values of the arrays."""
    found = sha256()
    for name, array in sorted(read_weights(place).items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


def _arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(require_regular(file), framework="pt") as opened:
            held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"[task] weights: {file} is no readable safetensors file ({error}): get it again"
        ) from None
    # numpy has no bfloat16.
    return {name: (v.float() if v.itemsize < 4 else v).numpy() for name, v in held.items()}
