"""Sizes of the tensors in a GGUF file, from its header.

The package gguf reads the whole header, including the vocabulary, which takes seconds. This module
skips everything except the shapes of the tensors, so it can say how much memory a model needs
before anything is loaded.

A header consists of the magic number, the version, the number of tensors, the number of metadata
entries, these entries, and the name, the shape, the type and the place of each tensor.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO

MAGIC, VERSIONS = b"GGUF", (2, 3)
TEXT, LIST = 8, 9
BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of other types
MOST_DIMENSIONS = 4


def gguf_entries(path: Path) -> int:
    """Return the number of entries of all tensors in a GGUF file.

    Raises:
        ValueError: If the file has no GGUF header of a known version.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version, tensors, entries = struct.unpack("<IQQ", _read(file, 20))
        if version not in VERSIONS:
            raise ValueError(f"its GGUF version {version} is unknown")
        try:
            for _ in range(entries):
                _skip_text(file)
                _skip_value(file, _number(file, 4))
            return sum(_tensor_size(file) for _ in range(tensors))
        except (OSError, OverflowError, RecursionError):  # lengths beyond all files, nested lists
            raise ValueError("its header is damaged") from None


def _tensor_size(file: BinaryIO) -> int:
    _skip_text(file)
    count = _number(file, 4)
    if count > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {count} dimensions")
    size = math.prod(_number(file, 8) for _ in range(count))
    _read(file, 12)  # the type and the place
    return size


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == TEXT:
        _skip_text(file)
    elif kind == LIST:
        inner, count = struct.unpack("<IQ", _read(file, 12))
        if inner in BYTES:
            file.seek(BYTES[inner] * count, 1)
            return
        for _ in range(count):
            _skip_value(file, inner)
    elif kind in BYTES:
        file.seek(BYTES[kind], 1)
    else:
        raise ValueError(f"its metadata have the unknown type {kind}")


def _skip_text(file: BinaryIO) -> None:
    file.seek(_number(file, 8), 1)


def _number(file: BinaryIO, size: int) -> int:
    return int.from_bytes(_read(file, size), "little")


def _read(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise ValueError("it ends within its header")
    return content
