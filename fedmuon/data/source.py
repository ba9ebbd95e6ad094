"""The class of data sources, and functions that scale each sample independently of all others."""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedmuon.core.errors import InputError

NORMALIZATIONS = ("unit", "ball")
PIXELS, TOKENS = "pixels", "tokens"
MANY_CLASSES = 1_000_000  # a label this high is rejected, unless there are as many samples
CHUNK = 512  # number of rows mapped at once, so that temporary arrays fit into a cache


@dataclass(frozen=True, eq=False)  # equal only if identical, because arrays are slow to compare
class Source:
    """Labelled samples in the order of the source, with their stored values.

    Attributes:
        name: Name of the source.
        inputs: Samples [n, ...] in their original shape and dtype.
        labels: Labels [n] int64 in [0, classes), or real-valued targets [n, ...].
        classes: Number of classes. Use 0 for real-valued targets.
        official_test: Index of the first sample of the source's official test part, if it has one.
        where: The place of the samples, for messages.
        vocabulary: Vocabulary size V if samples are windows of tokens 0 to V - 1. For other
            samples, it is 0.
        owner: The number [n] of the client that owns each sample, if known.
        owner_names: The name of each client in the column of clients, or an empty tuple.
        label_names: The name of each class if the labels were words, otherwise an empty tuple.
        center: A vector [d] that is subtracted from every sample before scaling, or None.
        public: The number of public samples whose mean is `center`. `inputs` does not contain these
            public samples.
        images: The images [n, ...] of which `inputs` are features, or None.

    Raises:
        InputError: If shapes do not match, or inputs or labels have invalid values.
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
    owner_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    images: np.ndarray | None = None

    def rows(
        self,
        normalize: str,
        chosen: np.ndarray | None = None,
        most: type[np.floating] = np.float64,
    ) -> np.ndarray:
        """Return all samples, or the samples with the indices `chosen`, as the rows of a matrix.

        For `normalize`, see `flat_rows`. The rows are stored in the precision `most` or less.
        """
        return flat_rows(self.inputs, normalize, chosen, self.center, most)

    def with_public_center(self, count: int) -> "Source":
        """Subtract the mean of the last `count` samples of the official test part from all samples.

        The source no longer contains these `count` samples, which count as public.

        Raises:
            InputError: If the official test part is missing or has too few samples.
        """
        n_test = 0 if self.official_test is None else len(self.labels) - self.official_test
        if count >= n_test:
            raise InputError(
                f"[data] center = 'public' needs {count} samples from the official test part of "
                f"{self.name}, but this part has {n_test} samples, and some must remain for "
                "testing" + (": lower center-samples" if n_test > 1 else ": set center = 'none'")
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
        inputs, labels = self.inputs, self.labels
        if (
            inputs.ndim < 2
            or (labels.ndim != 1 and self.classes)
            or len(inputs) != labels.shape[:1][0]
        ):
            return (
                f"has inputs of shape {inputs.shape} but labels of shape {labels.shape}: pass one "
                "label for each sample"
            )
        if 0 in inputs.shape:
            return (
                f"contains no values, because its inputs have shape {inputs.shape}: pass at least "
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
            if high >= max(MANY_CLASSES, len(labels)):
                distinct = len(np.unique(labels))
                return (
                    f"has labels up to {high}, which would be {high + 1} classes, but only "
                    f"{distinct} different labels: renumber the labels from 0 to {distinct - 1}"
                )
        elif not (finite := np.isfinite(labels).reshape(len(labels), -1).all(1)).all():
            place = int(finite.argmin())
            return (
                f"has a label that is NaN or infinite in sample {place}: correct or remove this "
                "sample"
            )
        if inputs.dtype.kind not in "uif":
            return f"contains values of type {type_of(inputs)}: convert them to real numbers"
        if inputs.dtype.kind == "f":
            with np.errstate(over="ignore"):  # wider floats are rounded to doubles
                inputs = inputs.astype(np.float64) if inputs.itemsize > 8 else inputs
            finite = np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim)))
            if not finite.all():
                place = int(finite.argmin())
                return f"contains NaN or infinity in sample {place}: correct or remove this sample"
        return ""


def joined(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Join train and test samples to one array, without changing how they are scaled.

    Samples of uint8 are pixels, which are divided by 255. If only one of the parts is uint8, the
    other part is brought to the same scale: whole numbers from 0 to 255 are pixels, and numbers
    from 0 to 1 are divided already. Samples of the same kind are only joined.

    Raises:
        InputError: If only one part is uint8, and the values of the other part have neither form.
    """
    kinds = {"data": train, "test": test}
    if (train.dtype == np.uint8) == (test.dtype == np.uint8):
        return np.concatenate([train, test])
    pixels, other = sorted(kinds, key=lambda name: kinds[name].dtype != np.uint8)
    values = kinds[other]
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    ints = values.dtype.kind in "iu" or bool(np.all(values == np.floor(values)))
    if other == "data" and not (low >= 0 and high <= 1):
        if ints and low >= 0 and high <= 255:  # data are not divided, so test must not be either
            return np.concatenate([train, test.astype(train.dtype)])
    elif low >= 0 and high <= 255 and (values.dtype.kind in "iu" or (ints and high > 1)):
        return np.concatenate([train.astype(np.uint8), test.astype(np.uint8)])
    elif low >= 0 and high <= 1:
        scaled = {pixels: np.divide(kinds[pixels], 255, dtype=np.float32), other: values}
        return np.concatenate([scaled["data"], scaled["test"]])
    raise InputError(
        f"{pixels} is of type uint8, so it contains pixels that are divided by 255, but {other} is "
        f"of type {values.dtype} with values from {low:g} to {high:g}: convert data and test to "
        "the same type"
    )


def type_of(array: np.ndarray) -> str:
    """Return the name of the type of an array's values, for a message."""
    return "str" if array.dtype.kind == "U" else str(array.dtype)


def flat_rows(
    raw: np.ndarray,
    normalize: str,
    chosen: np.ndarray | None = None,
    center: np.ndarray | None = None,
    most: type[np.floating] = np.float64,
) -> np.ndarray:
    """Flatten all samples, or the samples with the indices `chosen`, to the rows of a matrix.

    Each row is scaled independently of the others. `pixels` divides uint8 images by 255, in
    float32, leaves other values unchanged, and then subtracts the vector `center` [d]. `tokens`
    converts to float32, which represents integers below 2^24 exactly. For other values of
    `normalize`, see `unit_rows`. Float64 rows are rounded to the dtype `most`.
    """
    if normalize not in (PIXELS, TOKENS):
        return unit_rows(raw, normalize, chosen, center, most)
    raw = raw if chosen is None else raw[chosen]
    rows = raw.reshape(len(raw), math.prod(raw.shape[1:]))
    if normalize == TOKENS:
        return rows.astype(np.float32)
    if rows.dtype == np.uint8:
        rows = np.divide(rows, 255, dtype=np.float32)
    if center is not None:
        rows = rows - center.astype(rows.dtype if rows.dtype.kind == "f" else np.float64)
    return rows.astype(np.float32 if rows.dtype == np.float32 else most, copy=False)


def unit_rows(
    raw: np.ndarray,
    normalize: str = "unit",
    chosen: np.ndarray | None = None,
    center: np.ndarray | None = None,
    most: type[np.floating] = np.float64,
) -> np.ndarray:
    """Scale all samples, or the samples with the indices `chosen`, to norms of at most 1.

    Each sample is scaled independently of the others. If the scale were computed from all samples,
    replacing one sample would change all rows. A neighbouring data set must differ in only one row.

    Args:
        raw: Samples [m, ...]. If they are uint8 images, they are first divided by 255.
        normalize: `unit` maps a sample u to u / ||u||_2, and zero to zero. `ball` maps u to u /
            max(1, ||u||_2).
        chosen: Indices of the samples to scale. None means all samples.
        center: A vector [d] that is first subtracted from each sample, or None.
        most: The dtype of the result, to which the float64 rows are rounded.

    Returns:
        Rows [m, d] with ||u||_2 <= 1, before the rounding to `most`.
    """
    if normalize not in NORMALIZATIONS:
        raise InputError(
            f"[data] normalize = '{normalize}' does not exist: use {' or '.join(NORMALIZATIONS)}"
        )
    rows = raw.reshape(len(raw), math.prod(raw.shape[1:]))
    mapped = np.empty((len(rows) if chosen is None else len(chosen), rows.shape[1]), most)
    for start in range(0, len(mapped), CHUNK):
        part = slice(start, start + CHUNK)
        chunk = rows[part if chosen is None else chosen[part]]
        mapped[part] = _into_ball(chunk, normalize, center)
    return mapped


def _into_ball(rows: np.ndarray, normalize: str, center: np.ndarray | None = None) -> np.ndarray:
    """Scale each row so that its norm is at most 1, even after rounding.

    The computed norm has a relative error below (d/2 + 4) 2^-53, in any order of addition. The
    error comes from rounding in the sum of d squares, the root and the divisions. Each row is
    divided by its norm, which is first enlarged by twice this error.
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
