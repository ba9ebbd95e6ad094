"""The GLUE tasks SST-2, MNLI, QNLI and QQP, read from .tsv files as labelled windows of tokens.

A folder contains the published files train.tsv and dev.tsv. For MNLI, the second file is
dev_matched.tsv. The samples of dev are held out, because GLUE does not publish the labels of its
test part.

A sample is `sentence END END ...`, or `sentence END sentence END END ...` for tasks with two
sentences. Each sample has T + 1 tokens. If the sentences are too long for this, tokens are cut from
the end of the longer sentence first.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text
from fedmuon.data.source import Source
from fedmuon.data.text import tokens_of


class Form(NamedTuple):
    """The format of a GLUE task: its columns, its labels in order, and its held-out file."""

    sentences: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    held_out: str = "dev.tsv"


FORMS = {
    "sst-2": Form(("sentence",), "label", ("0", "1")),
    "mnli": Form(
        ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"),
        "dev_matched.tsv",
    ),
    "qnli": Form(("question", "sentence"), "label", ("entailment", "not_entailment")),
    "qqp": Form(("question1", "question2"), "is_duplicate", ("0", "1")),
}  # fmt: skip
Row = tuple[tuple[str, ...], int]  # sentences, label


def glue(name: str, folder: str | Path, context: int = 64, tokenizer: str = "") -> Source:
    """Read a GLUE task as labelled windows of tokens: train samples, then held-out samples.

    Args:
        name: A key of `FORMS`.
        folder: Folder with the files of the task.
        context: The context length T. Each sample has T + 1 tokens.
        tokenizer: Folder of a tokenizer. If empty, each byte is a token.

    Raises:
        InputError: If a file is missing or has another format.
    """
    tokens, place = tokens_of(tokenizer), Path(folder).expanduser()
    parts = [[*read_rows(name, place / file)] for file in ("train.tsv", FORMS[name].held_out)]
    rows = [*parts[0], *parts[1]]
    inputs = np.full((len(rows), context + 1), tokens.end, np.uint32)
    for window, (sentences, _) in zip(inputs, rows, strict=True):
        encoded = cut([tokens.encode(sentence) for sentence in sentences], context)
        ids = [token for sentence in encoded for token in (*sentence, tokens.end)]
        window[: len(ids)] = ids
    labels = np.array([label for _, label in rows], np.int64)
    classes = len(FORMS[name].labels)
    return Source(name, inputs, labels, classes, len(parts[0]), str(place), tokens.vocabulary)


def cut(sentences: Sequence[list[int]], context: int) -> list[list[int]]:
    """Shorten the sentences of one sample so that they fit into T tokens, with END after each."""
    sizes, room = [len(sentence) for sentence in sentences], context - len(sentences)
    if room < len(sentences):
        raise InputError(
            f"[data] context = {context} is too short for the {len(sentences)} sentences of one "
            f"sample. Set context to at least {2 * len(sentences)}."
        )
    while sum(sizes) > room:
        sizes[sizes.index(max(sizes))] -= 1
    return [sentence[:size] for sentence, size in zip(sentences, sizes, strict=True)]


def read_rows(name: str, file: Path) -> Iterator[Row]:
    """Yield the sentences and the label of each line. A quotation mark is an ordinary character.

    MNLI lines with the label `-` are skipped, because the annotators did not agree on a label. The
    few QQP lines without a question or a label are skipped too.
    """
    form = FORMS[name]
    try:
        lines = read_text(file, "utf-8-sig", newline="\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read as UTF-8 text ({error}). Set [data] folder to a folder with "
            f"the files train.tsv and {form.held_out} of {name}."
        ) from None
    head = lines[0].rstrip("\r").split("\t")
    columns = (*form.sentences, form.label)
    if missing := [column for column in columns if column not in head]:
        raise InputError(
            f"{file} has no column {', '.join(missing)} in its first line, so the file does not "
            f"belong to the task {name}. Check [data] folder and name."
        )
    places = [head.index(column) for column in columns]
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if cells == [""]:
            continue
        values = [cells[place].strip() if place < len(cells) else "" for place in places]
        *sentences, label = values
        if name == "mnli" and label == "-":
            continue
        if name == "qqp" and not (label and all(sentences)):
            continue
        if label not in form.labels or not all(sentences):
            raise InputError(
                f"line {number} of {file} is incomplete: each line needs "
                f"{' and '.join(form.sentences)}, and a {form.label} that is one of "
                f"{', '.join(form.labels)}. Correct this line."
            )
        yield tuple(sentences), form.labels.index(label)
