"""The report's table of texts that a language model writes before and after training."""

import json
from pathlib import Path

from fedmuon.analysis.report.findings import Rows, Titled
from fedmuon.core.files import read_text
from fedmuon.runs.directory import CONTINUATIONS


def continuations_tables(folder: Path) -> list[Titled]:
    """Return the table of a run's texts in a list, which is empty without such texts."""
    file = folder / CONTINUATIONS
    if not file.is_file():
        return []
    rows: Rows = []
    for text in json.loads(read_text(file)):
        rows += [
            (text["prompt"], "before", in_one_line(text["before"])),
            ("", "after", in_one_line(text["after"])),
        ]
    head = ("prompt", "training", "continuation")
    return [("Continuations with the most likely tokens", head, rows)]


def in_one_line(text: str) -> str:
    """Return a text with single spaces in place of line breaks and control characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
