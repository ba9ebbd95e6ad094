"""The IDX format of MNIST and its kin: big-endian arrays with a short header, gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_bytes

# Third byte of the magic number -> type of the values (Y. LeCun's description of the format).
TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file, in native byte order and with the shape that its header names."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES or not content[3]:
        raise InputError(
            f"{path} is not an IDX file (it begins with {content[:4].hex() or 'nothing'}): "
            "give the MNIST-style idx files themselves"
        )
    start = 4 + 4 * content[3]
    kind = np.dtype(TYPES[content[2]])
    # A header cut short unpacks as zeros; the length check below then names the numbers.
    shape = struct.unpack(f">{content[3]}I", content[4:start].ljust(start - 4, b"\0"))
    expected = start + kind.itemsize * math.prod(shape)
    if len(content) != expected or 0 in shape:
        raise InputError(
            f"{path} has {len(content)} bytes where its header, shape {shape}, asks for "
            f"{expected}: the file is damaged or empty, fetch it again"
        )
    values = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="), copy=False)


def _content(path: Path) -> bytes:
    """The file's bytes, decompressed where they are gzipped whatever the file is called."""
    try:
        content = read_bytes(path)
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} ({path.stat().st_size} bytes) is a damaged or truncated gzip file ({error}): "
            "fetch it again"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): check the file") from None


def has_train_files(folder: Path) -> bool:
    """Whether the folder looks like MNIST's: it has a file of train images."""
    return bool(_named(folder, "train-images"))


def read_mnist_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Images [n, ...], labels [n] int64 and where the official test part starts."""
    parts = [_pair(folder, part) for part in ("train-", "t10k-")]
    (train, train_labels), (test, test_labels) = parts
    if train.shape[1:] != test.shape[1:]:
        raise InputError(
            f"{folder} has train images of shape {train.shape[1:]} but test images of shape "
            f"{test.shape[1:]}: put the files of one data set there"
        )
    return np.concatenate([train, test]), np.concatenate([train_labels, test_labels]), len(train)


def read_idx_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, int | None]:
    """As `read_mnist_folder`, or the folder's only pair of files, which has no official split."""
    if _named(folder, "train-images") and _named(folder, "t10k-images"):
        return read_mnist_folder(folder)
    images, labels = _pair(folder, "*")
    return images, labels, None


def _pair(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    paths = [_only(folder, f"{prefix}{what}") for what in ("images", "labels")]
    images, labels = (read_idx(path) for path in paths)
    if images.ndim < 2 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(
            f"{paths[0]} has shape {images.shape} and {paths[1]} {labels.shape}: "
            "give one label for each sample"
        )
    if labels.dtype.kind == "f":
        raise InputError(f"{paths[1]} holds {labels.dtype} values: labels must be integers")
    return images, labels.astype(np.int64)


def _only(folder: Path, name: str) -> Path:
    found = _named(folder, name)
    if len(found) != 1:
        held = ", ".join(path.name for path in found) or "none"
        raise InputError(
            f"{folder} must hold one file {name}-idx*-ubyte, gzipped or not, and has {held}: "
            "check [data] folder"
        )
    return found[0]


def _named(folder: Path, name: str) -> list[Path]:
    """Files called like train-images-idx3-ubyte or train-images.idx3-ubyte, one per stem."""
    stems: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{name}[-.]idx*")):
        stems.setdefault(path.name.removesuffix(".gz"), path)  # "x" sorts before "x.gz"
    return list(stems.values())
