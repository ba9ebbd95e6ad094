"""Text as windows of tokens, which are its bytes: Python's own documentation, or any local files.

A sample is T + 1 bytes in a row: T of them are seen, and each is followed by the one to predict.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedmuon.data.source import Source
from fedmuon.errors import InputError

BYTES = 256  # the vocabulary
GROUPS = 10
HELD_OUT = 5  # one byte in so many is for testing


def pydoc(context: int = 64) -> Source:
    """What `help()` knows about the language, inputs [n, T + 1]; the text is that of this Python.

    Labels are ten groups of topics, alike in length as far as topics go. Topics quote each other:
    a paragraph that an earlier one repeats is left out, so that no test window was trained on.
    """
    from pydoc_data import topics

    held: list[list[bytes]] = [[] for _ in range(GROUPS)]
    for topic in _once(topics.topics):
        min(held, key=lambda group: sum(map(len, group))).append(topic)
    groups = [b"\n\n".join(group) for group in held]
    return _source("pydoc", groups, context, str(topics.__file__))


def text(folder: str | Path = "", context: int = 64) -> Source:
    """A text file, whose labels are its ten parts, or a folder of files, each of a label."""
    files = text_files(folder) if folder else []
    if not files:
        raise InputError(
            f"[data] folder = '{folder}' has no text: name = 'text' needs a file, or a folder of "
            "files"
        )
    groups = [file.read_bytes() for file in files]
    if len(groups) == 1:
        edges = np.linspace(0, len(groups[0]), GROUPS + 1).astype(int).tolist()
        groups = [groups[0][a:b] for a, b in pairwise(edges)]
    return _source("text", groups, context, str(folder))


def text_files(folder: str | Path) -> list[Path]:
    """The file itself, or the visible files of a folder, by name."""
    place = Path(folder).expanduser()
    if place.is_file():
        return [place]
    found = place.iterdir() if place.is_dir() else ()
    return sorted(file for file in found if file.is_file() and file.name[0] != ".")


def windows(tokens: np.ndarray, context: int) -> np.ndarray:
    """Tokens [l] -> windows [(l - 1) // T, T + 1], one after the other: each begins with the last
    token of the one before it, which is predicted there and only seen here."""
    count = max(0, (len(tokens) - 1) // context)
    return tokens[np.arange(count)[:, None] * context + np.arange(context + 1)]


def _once(topics: Mapping[str, str]) -> Iterator[bytes]:
    """Topics from the longest to the shortest, without the paragraphs that came before."""
    seen: set[str] = set()
    for _, topic in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        yield "\n\n".join(_fresh(topic.split("\n\n"), seen)).encode()


def _fresh(paragraphs: Iterable[str], seen: set[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        words = " ".join(paragraph.split())
        if words not in seen:
            seen.add(words)
            yield paragraph


def _source(name: str, groups: list[bytes], context: int, where: str) -> Source:
    """Windows of each group's first four fifths, by group, then those of the last fifths: train
    and test windows share no byte."""
    tokens = [np.frombuffer(group, np.uint8) for group in groups]
    cuts = [len(group) - len(group) // HELD_OUT for group in tokens]
    parts = [windows(group[:cut], context) for group, cut in zip(tokens, cuts, strict=True)]
    later = [windows(group[cut:], context) for group, cut in zip(tokens, cuts, strict=True)]
    sizes = np.array([len(part) for part in parts + later])
    if not sizes.all():
        raise InputError(
            f"{name} ({where}) is too short for [data] context = {context}: each of its "
            f"{len(groups)} parts needs {HELD_OUT * (context + 1)} bytes"
        )
    labels = np.repeat(np.tile(np.arange(len(groups)), 2), sizes)
    official = int(sizes[: len(groups)].sum())
    return Source(name, np.concatenate(parts + later), labels, len(groups), official, where, BYTES)
