"""Tables and sentences about them, in the files of E2E and DART, as windows of tokens.

E2E is CSV with the columns mr and ref; DART is a JSON list of {"tripleset": [[subject, relation,
object], ...], "annotations": [{"source": ..., "text": ...}, ...]}. Files whose names contain train,
dev and test are the parts of that name.

A sample is `table END sentence END END ...`, T + 1 tokens long (000, Appendix: `source <bos> target
<eos>`): what is to be predicted begins after the first END, and ends with the second.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text
from fedmuon.data.source import Source
from fedmuon.data.text import tokens_of

PARTS = ("train", "dev", "test")


@dataclass(frozen=True)
class Pair:
    """A table as text, one sentence about it, and how many fields the table has."""

    table: str
    sentence: str
    fields: int


def table_text(name: str, folder: str | Path, context: int, tokenizer: str = "") -> Source:
    """Windows [n, T + 1] of the train part, then of the test part (of dev where there is none).

    Pairs that do not fit into a window are left out, as in 000; labels tell how many fields a table
    has. END is token V - 1.
    """
    tokens, parts = tokens_of(tokenizer), corpus(name, folder)
    held_out = parts.get("test") or parts.get("dev") or []
    pairs, count = [*parts["train"], *held_out], len(parts["train"])
    windows = [
        [*tokens.prompt(pair.table), *tokens.encode(f" {pair.sentence}"), tokens.end]
        for pair in pairs
    ]
    fit = [len(window) <= context + 1 for window in windows]
    official = sum(fit[:count])
    if not official:
        shortest = min((len(window) - 1 for window in windows[:count]), default=0)
        raise InputError(
            f"{name} ({folder}) has no table and sentence of at most [data] context = {context} "
            f"tokens together: the shortest have {shortest}"
        )
    rows = np.full((sum(fit), context + 1), tokens.end, np.uint32)
    for row, window in zip(rows, compress(windows, fit), strict=True):
        row[: len(window)] = window
    kinds, labels = np.unique([one.fields for one in compress(pairs, fit)], return_inverse=True)
    lost = len(pairs) - len(rows)
    where = f"{folder}; {lost} longer pairs left out" if lost else str(folder)
    test = official if official < len(rows) else None
    return Source(name, rows, labels, len(kinds), test, where, tokens.vocabulary)


def corpus(name: str, folder: str | Path) -> dict[str, list[Pair]]:
    """The pairs of each part that has a file; train is always there."""
    files = table_files(name, folder)
    if "train" not in files:
        raise InputError(
            f"[data] folder = '{folder}' has no *train*{SUFFIXES[name]}, where {name} keeps its "
            "training part: get the files, or make some up by `fedmuon make-text`"
        )
    return {part: list(READERS[name](file)) for part, file in files.items()}


def table_files(name: str, folder: str | Path) -> dict[str, Path]:
    """The file of each part in a folder, the first by name."""
    place = Path(folder).expanduser()
    found = sorted(place.glob(f"*{SUFFIXES[name]}")) if place.is_dir() else []
    parts = {part: [file for file in found if part in file.stem.lower()] for part in PARTS}
    return {part: files[0] for part, files in parts.items() if files}


def prompts(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """The sentences about each table, by the table, in the order of the file."""
    found: dict[str, list[str]] = {}
    for pair in pairs:
        found.setdefault(pair.table, []).append(pair.sentence)
    return found


def read_e2e(file: Path) -> Iterator[Pair]:
    """Rows of a CSV file: name[The Punter], food[Thai] -> one sentence."""
    try:
        yield from _e2e_rows(file)
    except csv.Error as error:
        raise InputError(f"{file} is no CSV ({error}): it is no E2E file") from None


def _e2e_rows(file: Path) -> Iterator[Pair]:
    rows = csv.DictReader(io.StringIO(_text(file), newline=""))
    if not {"mr", "ref"} <= set(rows.fieldnames or ()):
        raise InputError(f"{file} has no columns mr and ref in its first line: it is no E2E file")
    for row in rows:
        table, sentence = (" ".join((row[key] or "").split()) for key in ("mr", "ref"))
        if not table or not sentence:
            raise InputError(f"{file}, line {rows.line_num}: mr or ref is empty: mend that line")
        yield Pair(table, sentence, table.count("["))


def read_dart(file: Path) -> Iterator[Pair]:
    """Entries of a JSON list; every annotation of a set of triples is a pair (000, Appendix)."""
    try:
        entries = json.loads(_text(file))
    except ValueError:
        raise InputError(f"{file} is no JSON: it is no DART file") from None
    if not isinstance(entries, list):
        raise InputError(f"{file} holds no list: it is no DART file")
    for place, entry in enumerate(entries):
        try:
            yield from _annotated(entry)
        except (AttributeError, TypeError, KeyError, ValueError):
            raise InputError(
                f"{file}, entry {place}: a tripleset of [subject, relation, object] and "
                "annotations with a text are needed: mend that entry"
            ) from None


def _annotated(entry: Any) -> Iterator[Pair]:
    triples = [
        " : ".join((subject.strip(), relation.strip().lower(), value.strip()))
        for subject, relation, value in entry["tripleset"]
    ]
    for annotation in entry["annotations"]:
        sentence = " ".join(annotation["text"].split())
        if not sentence or not triples:
            raise ValueError
        yield Pair(" | ".join(triples), sentence, len(triples))


def _text(file: Path) -> str:
    try:
        return read_text(file, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as UTF-8 ({error}): get it again") from None


READERS: dict[str, Callable[[Path], Iterator[Pair]]] = {"e2e": read_e2e, "dart": read_dart}
SUFFIXES = {"e2e": ".csv", "dart": ".json"}
