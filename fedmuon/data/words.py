"""Labels and clients in words: number their distinct values, and reject missing values."""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError

# Cells that stand for a missing value, in lower case. pandas reads the same cells as missing.
MISSING = ("", "na", "n/a", "#n/a", "nan", "<na>", "null", "none")

Names = tuple[str, ...]
Place = Callable[[int], str]  # number of a sample -> its place in a message, such as "line 3"


def sample_place(number: int) -> str:
    """Return the place of a sample in a message."""
    return f"sample {number}"


def is_missing(value: Any) -> bool:
    """Return whether a value of a table is None, NaN, or the missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def numbered(
    values: np.ndarray, what: str, place: Place = sample_place, known: Names = ()
) -> tuple[np.ndarray, Names]:
    """Replace each value by the number of its name, from 0.

    Names are in alphabetical order, and numbers in ascending order. Spaces around a name are
    ignored.

    Args:
        values: One value per sample [n]: words, bytes, or numbers.
        what: The values in a message, such as "the label".
        place: The place of a sample in a message.
        known: If set, the names that are numbered already, in this order. No other name may occur.

    Returns:
        The numbers [n] int64, and the names in their order.

    Raises:
        InputError: If a value is missing, or if some values are words and others are numbers.
    """
    if values.ndim != 1:
        raise InputError(
            f"{what} has the shape {values.shape}, but must have one value per sample: pass an "
            "array with one dimension"
        )
    if values.dtype.kind in "iufb":
        for number, value in enumerate(values.tolist()):
            if is_missing(value):
                _reject_missing(what, place(number))
        unique, codes = np.unique(values, return_inverse=True)
        return codes.astype(np.int64), tuple(_of_number(value) for value in unique.tolist())
    words = _words(values, what, place)
    if known:
        return _known_codes(words, what, place, known), known
    names, codes = np.unique(np.array(words), return_inverse=True)
    return codes.astype(np.int64), tuple(_of_number(name) for name in names.tolist())


def _words(values: np.ndarray, subject: str, place: Place) -> list[Any]:
    """Return the values without surrounding spaces, or raise an error if one is missing."""
    words, kinds = [], set()
    for number, value in enumerate(values.tolist()):
        word = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        word = word.strip() if isinstance(word, str) else word
        if is_missing(word) or (isinstance(word, str) and not word):
            _reject_missing(subject, place(number))
        kinds.add(kind := _kind(word))
        if not kind or len(kinds) > 1:
            raise InputError(
                f"{subject} is {value!r}, of type {type(value).__name__}, in {place(number)}, but "
                "all values must be words, or all must be numbers: convert this value"
            )
        words.append(word)
    if kinds == {"word"}:
        _require_no_marker(words, subject, place)
    return words


def _known_codes(words: list[Any], subject: str, place: Place, names: Names) -> np.ndarray:
    order = {name: number for number, name in enumerate(names)}
    for number, word in enumerate(words):
        if word not in order:
            raise InputError(
                f"{subject} is '{word}' in {place(number)}, but the classes are {listed(names)}: "
                "correct this value, or add samples of this class to data"
            )
    return np.array([order[word] for word in words], np.int64)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    return "number" if isinstance(value, Real) else ""


def _of_number(value: Any) -> str:
    """Return a name for a number. Whole floats are written like integers."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _reject_missing(subject: str, where: str) -> None:
    raise InputError(f"{subject} is empty in {where}: fill it in, or remove this sample")


def _require_no_marker(words: list[str], subject: str, place: Place) -> None:
    """Raise an error if words such as NA stand among numbers: they are missing values."""
    marked = [number for number, word in enumerate(words) if word.lower() in MISSING]
    if (
        marked
        and len(marked) < len(words)
        and all(is_number(word) for word in words if word.lower() not in MISSING)
    ):
        raise InputError(
            f"{subject} is '{words[marked[0]]}' in {place(marked[0])}, but all other values are "
            "numbers: fill it in, or remove this sample"
        )


def is_number(word: str) -> bool:
    """Return whether a cell of a text file is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return is_plain(word)


def is_plain(text: str) -> bool:
    """Return whether Python reads numbers in a text as other programs do.

    Python also reads `1_000` and digits of other alphabets. NumPy ignores a zero byte at an end.
    """
    return text.isascii() and "_" not in text and "\0" not in text


def listed(names: Iterable[Any], most: int = 10) -> str:
    """Format names for a message: the first ten names, and the number of further names."""
    texts = [str(name) for name in names]
    suffix = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{suffix}"
