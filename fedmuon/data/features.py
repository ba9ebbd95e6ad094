"""Feature vectors of images: a fixed transform, and a projection that is learnt on public data.

Nothing is learnt from the samples of a run. The features of a sample depend only on this sample and
on public data, so they cost no privacy, and replacing a sample changes only its own features.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.files import cache_folder
from fedmuon.core.threads import spread
from fedmuon.data.image_features import TRANSFORMS
from fedmuon.data.readers import read, stamp
from fedmuon.data.source import Source

NO_PUBLIC = "none"
CHUNK = 16  # number of images that are transformed at once, so that arrays fit into a cache
PIECE = 32 * CHUNK  # number of images of a piece of work
MOST_PUBLIC = 10_000  # number of public images from which the projection is learnt
RIDGE = 0.01  # is added to every variance, as a share of the largest variance
SMALLEST_SIDE = 8  # in pixels
VERSION = 1  # of the stored features; increase it when a transform changes its result


@dataclass(frozen=True)
class Features:
    """Settings of the features.

    Attributes:
        transform: A key of `TRANSFORMS`.
        seed: Seed of the random filters of `random-conv`.
        public: Name of the data set on which the principal components are learnt, or `none`.
        components: Number of principal components. Use 0 for all.
    """

    transform: str
    seed: int = 0
    public: str = NO_PUBLIC
    components: int = 0

    def of(self, source: Source) -> Source:
        """Return the source with features [n, d] in place of images.

        Raises:
            InputError: If samples are not images, or the public images do not fit these images.
        """
        return replace(source, inputs=self.rows(source), images=source.inputs)

    def mapped(self, source: Source) -> Source:
        """Return the same source as `of`, with features in a memory map of a file in the cache.

        Only a source whose images are in the cache has such a file, see `read_mapped`.
        """
        if not isinstance(source.inputs, np.memmap):
            return self.of(source)
        public = stamp(self.public, ()) if self.public != NO_PUBLIC else ()
        settings = VERSION, self, source.where, public
        key = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        place = cache_folder() / f"features-{key}.npy"
        if not place.exists():
            rows = self.rows(source)
            with contextlib.suppress(OSError):
                _save(rows, place)
            if not place.exists():
                return replace(source, inputs=rows, images=source.inputs)
        rows = np.load(place, mmap_mode="r", allow_pickle=False)
        return replace(source, inputs=rows, images=source.inputs)

    def rows(self, source: Source) -> np.ndarray:
        """Return the features [n, d] float32 of all images of a source."""
        self._require_images(source)
        projection = None if self.public == NO_PUBLIC else self._projection(source)
        return self._of_images(source.inputs, projection)

    def _of_images(self, images: np.ndarray, projection: "Projection | None") -> np.ndarray:
        """Transform images in pieces, which do not depend on the number of threads."""
        width = self._of_piece(images[:1], projection).shape[1]
        rows = np.empty((len(images), width), np.float32)

        def transform(start: int) -> None:
            part = slice(start, start + PIECE)
            rows[part] = self._of_piece(images[part], projection)

        spread([partial(transform, start) for start in range(0, len(images), PIECE)])
        return rows

    def _of_piece(self, images: np.ndarray, projection: "Projection | None") -> np.ndarray:
        transform = TRANSFORMS[self.transform]
        with torch.no_grad():
            chunks = as_pixels(images).split(CHUNK)
            rows = torch.cat([transform(chunk, self.seed) for chunk in chunks])
            return (rows if projection is None else projection.of(rows)).numpy()

    def _projection(self, source: Source) -> "Projection":
        """Learn the projection on the public data.

        Raises:
            InputError: If the run's images have another shape, or contain public images, or there
                are more components than features.
        """
        public = read(self.public)
        shape, public_shape = source.inputs.shape[1:], public.inputs.shape[1:]
        if shape != public_shape:
            raise InputError(
                f"[data] public = '{self.public}' has images of shape {public_shape}, but the "
                f"images of {source.name} have shape {shape}: choose public data of the same shape"
            )
        if shared := shared_images(public.inputs, source.inputs):
            raise InputError(
                f"[data] public = '{self.public}' contains {shared} images of {source.name}, but "
                "public data must not contain samples of the run: choose other public data"
            )
        return _learnt(self, shape)

    def _require_images(self, source: Source) -> None:
        shape = source.inputs.shape[1:]
        if len(shape) not in (2, 3) or min(shape[-2:]) < SMALLEST_SIDE or source.vocabulary:
            raise InputError(
                f"[data] features = '{self.transform}' needs images of at least {SMALLEST_SIDE} x "
                f"{SMALLEST_SIDE} pixels, but the samples of {source.name} have shape {shape}: set "
                "features = 'none'"
            )


class Projection(NamedTuple):
    """A projection to principal components, which divides each by its standard deviation.

    Attributes:
        mean: The mean [d] of the public features.
        matrix: The scaled principal components [d, k].
    """

    mean: Tensor
    matrix: Tensor

    def of(self, features: Tensor) -> Tensor:
        """Project features [n, d] to [n, k]."""
        return (features - self.mean) @ self.matrix


@lru_cache(maxsize=1)
def _learnt(features: Features, shape: tuple[int, ...]) -> Projection:
    images = read(features.public).inputs[:MOST_PUBLIC]
    rows = features._of_images(images, None)
    d = rows.shape[1]
    if features.components > d:
        raise InputError(
            f"[data] components = {features.components} exceeds {d}, the number of features of "
            f"'{features.transform}' for images of shape {shape}: set components to at most {d}"
        )
    return principal_components(rows, features.components or d)


def principal_components(rows: np.ndarray, count: int) -> Projection:
    """Return the projection to the first principal components of `rows` [n, d].

    Each component is divided by the square root of its variance plus 1% of the largest variance.
    The largest entry of each component is positive.
    """
    mean = rows.mean(0, dtype=np.float64)
    centred = torch.from_numpy(rows - mean)
    # One piece runs in one thread, so the result does not depend on the number of threads.
    ((variances, vectors),) = spread(
        [lambda: torch.linalg.eigh(centred.T @ centred / len(centred))]
    )
    variances, vectors = variances.flip(0)[:count].clamp(min=0), vectors.flip(1)[:, :count]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    matrix = vectors * largest.sign() / (variances + RIDGE * variances[0]).sqrt()
    return Projection(torch.from_numpy(mean.astype(np.float32)), matrix.float().contiguous())


def as_pixels(images: np.ndarray) -> Tensor:
    """Return images as a float32 tensor [n, channels, height, width]. Divide uint8 by 255."""
    values = np.divide(images, 255 if images.dtype == np.uint8 else 1, dtype=np.float32)
    return torch.from_numpy(values if values.ndim == 4 else values[:, None])


def shared_images(public: np.ndarray, images: np.ndarray) -> int:
    """Return how many of the images are also public images."""
    hashes = set(_hashes(public))
    return sum(image in hashes for image in _hashes(images))


def _hashes(images: np.ndarray) -> Iterator[bytes]:
    for image in images:
        yield hashlib.sha256(np.ascontiguousarray(image).data).digest()


def _save(rows: np.ndarray, place: Path) -> None:
    """Save features to a file, completely or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(number, "wb") as file:
            np.save(file, rows, allow_pickle=False)
        Path(draft).rename(place)
    finally:
        Path(draft).unlink(missing_ok=True)
