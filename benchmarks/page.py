"""Figures of benchmarks as rows: printed as they come, handed on, and set on one page."""

import argparse
import html
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fedmuon.runs.provenance import commit, machine, versions

WIDTH = 80
TITLES = ("figure", "ours", "peer", "ratio", "aim", "of the best")
COLUMNS = (31, 8, 8, 8, 8, 12)  # characters, a space before each but the first
OF_THE_BEST = "of the best: arithmetic a second, as a part of this machine's fastest matrix product"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd;
  white-space: nowrap; vertical-align: top }
th:first-child, td:first-child { text-align: left; white-space: normal }
small { display: block; color: #666 } td.met { color: #06683a } td.missed { color: #a11 }
tr.part th { padding-top: 1.2rem; border-bottom: 2px solid #888 }
"""


@dataclass(frozen=True)
class Row:
    """A figure: ours beside a peer's, both in `unit`, and what the ratio, or else ours, should be.

    `share` is ours as a part of the machine's best. A failed row says why in its note.
    """

    figure: str
    ours: float | None = None
    peer: float | None = None
    ratio: float | None = None
    aim: float | None = None
    note: str = ""
    unit: str = "s"
    share: float | None = None
    share_aim: float | None = None
    at_most: bool = False
    failed: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is as good as it should be; None where nobody said what that is."""
        if self.failed:
            return False
        value = self.ours if self.ratio is None else self.ratio
        aims = [(value, self.aim, self.at_most), (self.share, self.share_aim, False)]
        held = [_reached(*one) for one in aims if one[1] is not None]
        return all(held) if held else None

    def unjudged(self) -> "Row":
        """Without its aims."""
        return replace(self, aim=None, share_aim=None)

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands in the columns of `TITLES`."""
        ratio = amount(self.ratio, "x")
        if self.failed:
            ratio = "FAILED"
        elif self.met is False:
            ratio = f"{ratio} !".strip()
        unit = "x" if self.ratio is not None else self.unit
        aim = "" if self.aim is None else f"{'<=' if self.at_most else '>='} {self.aim:g} {unit}"
        share = "" if self.share is None else f"{self.share:.0%}"
        share += "" if self.share_aim is None else f" (>= {self.share_aim:.0%})"
        amounts = (amount(self.ours, self.unit), amount(self.peer, self.unit))
        return (self.figure, *amounts, ratio, aim, share)


def _reached(value: float | None, aim: float | None, at_most: bool) -> bool:
    return value is not None and aim is not None and (value <= aim if at_most else value >= aim)


def amount(value: float | None, unit: str) -> str:
    """A number in its unit; seconds below one as milliseconds or microseconds."""
    if value is None:
        return ""
    if unit != "s" or value >= 1:
        return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def text(row: Row) -> str:
    """A row as a line or two, and its note below, within 80 columns."""
    figure, *cells = row.cells
    first, *rest = textwrap.wrap(figure, COLUMNS[0], subsequent_indent="  ")
    note = textwrap.wrap(row.note, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([_line((first, *cells)), *rest, *note])


def _line(cells: Sequence[str]) -> str:
    first, *others = zip(cells, COLUMNS, strict=True)
    places = (cell.rjust(width) for cell, width in others)
    return " ".join([first[0].ljust(first[1]), *places]).rstrip()


def say(words: str) -> None:
    """How far it is, for whoever waits: not part of what is found."""
    print(f"  {words}", file=sys.stderr, flush=True)


def parser(about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the file that it may be asked to add its rows to."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return made


def tell(rows: Iterable[Row], file: Path | None = None) -> None:
    """Print each row when it is known; where there is a page to come, add it to the file as a line
    of JSON and print that it is done."""
    if not file:
        print(_line(TITLES), flush=True)
    for row in rows:
        if file:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")
        print(f"  done: {row.figure}" if file else text(row), flush=True)


def read(file: Path) -> list[Row]:
    """The rows that `tell` added."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def place(load: Sequence[float], seconds: float) -> list[str]:
    """Where and when: what ratios of another run may not be compared without; load by its minute's
    mean before and after."""
    here, known = machine(torch.get_num_threads()), versions()
    busy = ", then ".join(f"{one:.1f}" for one in load)
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {(commit() or 'unknown')[:12]}, "
        f"in {seconds / 60:.1f} minutes, load {busy}",
        f"{here['processor']}: {here['cores']} cores, {here['threads']} threads",
        f"torch {known['torch']}, numpy {known['numpy']}, ray {known['ray']}, "
        f"flwr {known['flwr']}, Python {known['python']}",
    ]


def verdict(parts: Mapping[str, Sequence[Row]]) -> list[str]:
    """How many aims are met, if there are any, and what failed; what a column is."""
    every = [row for rows in parts.values() for row in rows]
    aimed = [row for row in every if row.met is not None and not row.failed]
    failed, met = sum(row.failed for row in every), sum(bool(row.met) for row in aimed)
    found = [f"{met} of {len(aimed)} aims are met (! is one missed)"] if aimed else []
    found += [f"{failed} parts failed"] if failed else []
    shares = any(row.share is not None for row in every)
    return ["; ".join(found)] * bool(found) + [OF_THE_BEST] * shares


def as_text(parts: Mapping[str, Sequence[Row]], where: Sequence[str]) -> str:
    """The page in 80 columns."""
    lines = [wrapped for one in where for wrapped in textwrap.wrap(one, WIDTH)]
    lines += [wrapped for one in verdict(parts) for wrapped in textwrap.wrap(one, WIDTH)]
    lines += ["", _line(TITLES)]
    for name, rows in parts.items():
        lines += ["", f"-- {name} ".ljust(WIDTH, "-"), *map(text, rows)]
    return "\n".join(lines) + "\n"


def as_html(parts: Mapping[str, Sequence[Row]], where: Sequence[str]) -> str:
    """The same as one file that needs no other."""
    head = "".join(f"<p>{html.escape(one)}</p>" for one in [*where, *verdict(parts)])
    titles = "".join(f"<th>{title}</th>" for title in TITLES)
    body = "".join(
        f'<tr class="part"><th colspan="{len(TITLES)}">{html.escape(name)}</th></tr>'
        + "".join(map(_html_row, rows))
        for name, rows in parts.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>fedmuon, side by side</title>'
        f"<style>{STYLE}</style><h1>fedmuon, side by side</h1>{head}"
        f"<table><tr>{titles}</tr>{body}</table></html>\n"
    )


def _html_row(row: Row) -> str:
    figure, *cells = map(html.escape, row.cells)
    note = f"<small>{html.escape(row.note)}</small>" if row.note else ""
    kind = {None: "", True: "met", False: "missed"}[row.met]
    marked = [f'<td class="{kind}">{cell}</td>' for cell in cells]
    return f"<tr><td>{figure}{note}</td>{''.join(marked)}</tr>"


def write(folder: Path, parts: Mapping[str, Sequence[Row]], where: Sequence[str]) -> str:
    """page.txt and page.html in the folder; the text."""
    folder.mkdir(parents=True, exist_ok=True)
    page = as_text(parts, where)
    (folder / "page.txt").write_text(page, encoding="utf-8")
    (folder / "page.html").write_text(as_html(parts, where), encoding="utf-8")
    return page


def load() -> float:
    """Of the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
