"""The class of data sources, and the normalization that maps each sample separately."""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedmuon.core.errors import InputError

NORMALIZATIONS = ("unit", "ball")
PIXELS, TOKENS = "pixels", "tokens"
CHUNK = 512  # number of rows mapped at once, so that temporary arrays fit into a cache


@dataclass(frozen=True)
class Source:
    """Labelled samples in the order of the source, with their stored values.

    Attributes:
        name: Name of the source.
        inputs: Samples [n, ...] in their original shape and dtype.
        labels: Labels [n] int64 in [0, classes), or real-valued targets [n, ...].
        classes: Number of classes; 0 for real-valued targets.
        official_test: Index of the first sample of the source's official test part, if it has one.
        where: The place of the samples, for messages.
        vocabulary: Vocabulary size V if samples are windows of tokens 0 to V - 1; otherwise 0.
        owner: The owner [n] of each sample, if known.
        center: The vector [d] that is subtracted from every sample before scaling, if any.
        public: The number of public samples whose mean is `center`. They come after these samples.

    Raises:
        InputError: If shapes, labels or values are unsuitable.
    """

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    classes: int
    official_test: int | None
    where: str
    vocabulary: int = 0
    owner: np.ndarray | None = None
    center: np.ndarray | None = None
    public: int = 0

    def rows(self, normalize: str, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return all samples, or the chosen ones in order, as rows [m, d]; see `flat_rows`."""
        return flat_rows(self.inputs, normalize, chosen, self.center)

    def with_public_center(self, count: int) -> "Source":
        """Subtract the mean of public samples: the last `count` samples of the official test part.

        These samples are removed from the source. Their mean is known before any training sample.

        Raises:
            InputError: If the source has no official test part, or it has too few samples.
        """
        held = 0 if self.official_test is None else len(self.labels) - self.official_test
        if count >= held:
            raise InputError(
                f"[data] center = 'public' needs {count} samples from the official test part of "
                f"{self.name}, but this part has {held} samples, and some must remain for testing"
                + (": lower center-samples" if held > 1 else ": set center = 'none'")
            )
        public = self.inputs[-count:].reshape(count, -1)
        mean = public.mean(0, dtype=np.float64) / (255 if public.dtype == np.uint8 else 1)
        owner = None if self.owner is None else self.owner[:-count]
        return replace(
            self, inputs=self.inputs[:-count], labels=self.labels[:-count], owner=owner,
            center=mean, public=count,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if problem := self._problem():
            same = self.name == self.where  # then the samples were passed in Python
            raise InputError(f"{'data' if same else f'{self.name} ({self.where})'} {problem}")

    def _problem(self) -> str:
        held, labels = self.inputs, self.labels
        if held.ndim < 2 or (labels.ndim != 1 and self.classes) or len(held) != labels.shape[:1][0]:
            return (
                f"has inputs of shape {held.shape} but labels of shape {labels.shape}: pass one "
                "label for each sample"
            )
        if 0 in held.shape:
            return (
                f"contains no values, because its inputs have shape {held.shape}: pass at least "
                "one sample"
            )
        if self.classes:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                last = max(self.classes - 1, high - low)
                return (
                    f"has labels from {low} to {high}, but labels must be the numbers from 0 to "
                    f"the number of classes minus 1: renumber the labels from 0 to {last}"
                )
        elif not (finite := np.isfinite(labels).reshape(len(labels), -1).all(1)).all():
            place = int(finite.argmin())
            return (
                f"has a label that is NaN or infinite in sample {place}: correct or remove this "
                "sample"
            )
        if held.dtype.kind not in "uif":
            return f"contains values of type {type_of(held)}: convert them to real numbers"
        if held.dtype.kind == "f":
            with np.errstate(over="ignore"):  # wider floats are rounded to doubles
                held = held.astype(np.float64) if held.itemsize > 8 else held
            finite = np.isfinite(held).all(axis=tuple(range(1, held.ndim)))
            if not finite.all():
                place = int(finite.argmin())
                return f"contains NaN or infinity in sample {place}: correct or remove this sample"
        return ""


def type_of(array: np.ndarray) -> str:
    """Return the type of an array's values, as shown in a message."""
    return "str" if array.dtype.kind == "U" else str(array.dtype)


def flat_rows(
    raw: np.ndarray,
    normalize: str,
    chosen: np.ndarray | None = None,
    center: np.ndarray | None = None,
) -> np.ndarray:
    """Flatten samples [m, ...], or the chosen ones in their order, to rows [m, d].

    Each row is mapped separately. `pixels` divides uint8 images by 255, in float32, and leaves
    other values unchanged. `tokens` converts to float32, which represents integers below 2^24
    exactly. For other values of `normalize`, see `unit_rows`. The vector `center` [d] is subtracted
    first, in the units of `pixels`.
    """
    if normalize not in (PIXELS, TOKENS):
        return unit_rows(raw, normalize, chosen, center)
    raw = raw if chosen is None else raw[chosen]
    rows = raw.reshape(len(raw), math.prod(raw.shape[1:]))
    if normalize == TOKENS:
        return rows.astype(np.float32)
    if rows.dtype == np.uint8:
        rows = np.divide(rows, 255, dtype=np.float32)
    if center is not None:
        rows = rows - center.astype(rows.dtype if rows.dtype.kind == "f" else np.float64)
    return rows if rows.dtype in (np.float32, np.float64) else rows.astype(np.float64)


def unit_rows(
    raw: np.ndarray,
    normalize: str = "unit",
    chosen: np.ndarray | None = None,
    center: np.ndarray | None = None,
) -> np.ndarray:
    """Map samples [m, ...], or the chosen ones in their order, into the unit ball.

    Each row is mapped separately. If the scale were computed from many samples, replacing one
    sample would change all the others. A replace-one neighbour would then differ in more than one
    row.

    Args:
        raw: Samples [m, ...]; uint8 images are first divided by 255.
        normalize: `unit` maps u to u / ||u||_2 (zero stays zero); `ball` to u / max(1, ||u||_2).
        chosen: Indices of the rows to map; None maps all rows.
        center: The vector [d] that is first subtracted from each row, if any.

    Returns:
        Rows [m, d] float64 with ||u||_2 <= 1.
    """
    if normalize not in NORMALIZATIONS:
        raise InputError(
            f"[data] normalize = '{normalize}' does not exist: use {' or '.join(NORMALIZATIONS)}"
        )
    rows = raw.reshape(len(raw), math.prod(raw.shape[1:]))
    mapped = np.empty((len(rows) if chosen is None else len(chosen), rows.shape[1]))
    for start in range(0, len(mapped), CHUNK):
        part = slice(start, start + CHUNK)
        some = rows[part if chosen is None else chosen[part]]
        mapped[part] = _into_ball(some, normalize, center)
    return mapped


def _into_ball(rows: np.ndarray, normalize: str, center: np.ndarray | None = None) -> np.ndarray:
    """Map rows [m, d] into the ball, so that the returned doubles satisfy ||u||_2 <= 1.

    Rounding in the sum of d squares, the root and the divisions causes a relative error below
    (d/2 + 4) 2^-53, whatever the order of the sum. Dividing by a norm that is enlarged by twice
    this error is therefore sufficient.
    """
    u = rows.astype(np.float64)
    if rows.dtype == np.uint8:
        u /= 255
    if center is not None:
        u -= center
    # Scale by a power of two, which is exact. Squares of 1e200 or 1e-200 would be out of range.
    _, exponent = np.frexp(np.abs(u).max(axis=1, keepdims=True))
    scale = np.ldexp(1.0, exponent - 1)
    scaled = u / scale
    norm = np.sqrt(np.einsum("nd,nd->n", scaled, scaled))[:, None]
    norm *= 1 + (u.shape[1] + 8) * 2.0**-53
    if normalize == "ball":
        with np.errstate(over="ignore"):
            outside = norm * scale > 1
        return np.where(outside, scaled / np.maximum(norm, 1), u)
    return np.divide(scaled, norm, out=scaled, where=norm > 0)
