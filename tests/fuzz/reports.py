"""Reports of folders whose names, words and numbers try to be more than words and numbers."""

import csv
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import base, mutations, values
from tests.fuzz.calls import call, judged, snapshot
from tests.fuzz.outcome import Case, Outcome, other

KIND = "reports"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "a",
    "table", "thead", "tbody", "tr", "th", "td", "span", "div", "figure", "picture", "source",
    "img", "figcaption", "strong", "section", "details", "summary", "small", "code", "dl", "dt",
    "dd", "pre",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "name", "content", "class", "id", "tabindex", "role", "aria-label", "href",
    "src", "srcset", "media", "alt", "scope", "colspan", "data-name",
}  # fmt: skip
HOSTILE = [one for one in values.TEXTS if "\0" not in one]
NAMES = (
    "title", "data", "suite", "scale", "again", "note", "constant", "status", "assumptions",
    "machine", "versions", "published", "seconds", "trajectories", "delta", "kind", "told", "card",
    "seeds", "alone",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 1e308, float("nan"), 10**400, [], {}, [["<script>"]], {"<b>": "<i>"},
    {"data": "<script>", "runs": "x"}, ["<img src=x>"], {"runs": 10**400},
)  # fmt: skip
FORMULAS = "=+-@\t\r"


def draw(rng: Random) -> Case:
    """Hostile words in the files of a suite or of a run, or in the names of files and folders."""
    what = rng.choice(("made", "made", "folder", "stability", "csv", "csv"))
    case: Case = {"kind": KIND, "what": what, "text": rng.choice(HOSTILE), "at": rng.random()}
    if what == "made":
        pools = rng.choices((HOSTILE, ODD), (0.6, 0.4), k=rng.choice((1, 1, 2, 4)))
        changes = {rng.choice(NAMES): rng.choice(pool) for pool in pools}
        cells = [_cell(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
        case |= {"about": changes, "cells": cells}
    if what == "stability":
        file = rng.choice(("bound.json", "summary.json", "neighbours.csv", "config.toml"))
        case |= {"file": file, "how": mutations.drawn(rng, Path(file).suffix)}
    return case


def perform(case: Case, place: Path) -> Outcome:
    """Write the report, or the suite's tables, and look into what came out."""
    if case["what"] == "csv":
        return _tables(case, place)
    folder = _folder(case, place)
    before = snapshot(place)
    outcome = judged(call(["report", folder.name], place), place, before)
    pages = [
        page for page in place.rglob("report.html") if str(page.relative_to(place)) not in before
    ]
    found = [odd for page in pages for odd in leaks(page.read_text(encoding="utf-8"))]
    return other(f"the page holds {found[0]}") if found and outcome.end == "done" else outcome


def _folder(case: Case, place: Path) -> Path:
    from tests.helpers import made_suite

    if case["what"] == "stability":
        held = base.copied(place.parent, "stability", place)
        mutations.spoil(held, [{"file": 0.0, **case["how"]}], Path(case["file"]).suffix)
        return held
    name = _name(case["text"]) if case["what"] == "folder" else "made"
    runs, neighbours = made_suite.made(trials=2)
    for cell in case.get("cells", ()):
        table = (runs, neighbours)[cell["table"]]
        column = list(table)[int(cell["column"] * len(table))]
        table[column] = table[column].astype(object)
        table[column][0] = cell["text"]
    return made_suite.write(place / name, runs, neighbours, **case.get("about", {}))


def _tables(case: Case, place: Path) -> Outcome:
    """No cell that a suite writes begins like a formula, unless it is a number."""
    file = place / f"{_name(case['text'])}.toml"
    title = base.SUITE.replace("Two by two", "T").replace('"T"', values.quoted(case["text"]), 1)
    base.write(file, title)
    before = snapshot(place)
    outcome = judged(call(["suite", f"./{file.name}", "--out", "out"], place), place, before)
    rows = [row for table in place.rglob("*.csv")
            for row in csv.reader(table.read_text(encoding="utf-8").splitlines())]  # fmt: skip
    cells = [cell for row in rows for cell in row]
    odd = [cell for cell in cells if cell[:1] and cell[0] in FORMULAS and not _number(cell)]
    return other(f"a cell is a formula: {odd[0]!r:.80}") if odd else outcome


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _name(text: str) -> str:
    return text.replace("/", "_").replace("\0", "_")[:60].strip(".") or "plain"


def _cell(rng: Random) -> dict[str, Any]:
    text = rng.choice((*HOSTILE, "1e308", "-1e308", "1e999", "9" * 400, "0x1"))
    return {"table": rng.randrange(2), "column": rng.random(), "text": text}


class _Reader(HTMLParser):
    """Notes whatever a report must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Tags and attributes other than ours, and links that leave the page."""
        self.odd += [f"a <{tag}>"] if tag not in TAGS else []
        for name, value in attrs:
            self.odd += [f"{name}= in <{tag}>"] if name not in ATTRIBUTES else []
            if name in ("href", "src", "srcset") and not (value or "").startswith(
                ("#part-", "data:image/svg+xml;base64,")
            ):
                self.odd.append(f"{name}={value!r:.60}")

    def handle_comment(self, data: str) -> None:
        self.odd.append("a comment")


def leaks(page: str) -> list[str]:
    reader = _Reader()
    reader.feed(page)
    styles = page.count("<style") - 1
    return [*reader.odd, *(["another style"] if styles else [])]
