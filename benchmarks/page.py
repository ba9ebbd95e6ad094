"""Rows of benchmark results: print each row, pass rows to the main process, and make one page."""

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
COLUMNS = (31, 8, 8, 8, 8, 12)  # widths in characters; a space separates the columns
OF_THE_BEST = "of the best: our arithmetic rate as a share of this machine's fastest matrix product"
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
    """One measured figure, with the value of a peer and an aim.

    Attributes:
        figure: Name of the figure.
        ours: Our value, in `unit`.
        peer: The value of the peer, in `unit`.
        ratio: The ratio of the two values.
        aim: The aim for `ratio`, or for `ours` if there is no ratio.
        note: A note. For a failed row, it states the reason.
        unit: Unit of the values.
        share: Our arithmetic rate as a share of the machine's best rate.
        share_aim: The smallest share that is aimed for.
        at_most: Whether the value must be at most the aim, instead of at least.
        failed: Whether the measurement failed.
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
        """Whether all aims are met; None if there is no aim."""
        if self.failed:
            return False
        value = self.ours if self.ratio is None else self.ratio
        aims = [(value, self.aim, self.at_most), (self.share, self.share_aim, False)]
        held = [_reached(*one) for one in aims if one[1] is not None]
        return all(held) if held else None

    def unjudged(self) -> "Row":
        """Return the row without its aims."""
        return replace(self, aim=None, share_aim=None)

    @property
    def cells(self) -> tuple[str, ...]:
        """The text of each column of `TITLES`."""
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
    """Return a number with its unit. Seconds below 1 become milliseconds or microseconds."""
    if value is None:
        return ""
    if unit != "s" or value >= 1:
        return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def text(row: Row) -> str:
    """Return a row as one or more lines with its note below, within 80 columns."""
    figure, *cells = row.cells
    first, *rest = textwrap.wrap(figure, COLUMNS[0], subsequent_indent="  ")
    note = textwrap.wrap(row.note, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([_line((first, *cells)), *rest, *note])


def _line(cells: Sequence[str]) -> str:
    first, *others = zip(cells, COLUMNS, strict=True)
    places = (cell.rjust(width) for cell, width in others)
    return " ".join([first[0].ljust(first[1]), *places]).rstrip()


def say(words: str) -> None:
    """Print progress to stderr. It is not part of the results."""
    print(f"  {words}", file=sys.stderr, flush=True)


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the option `--rows FILE` to append its rows."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return made


def tell(rows: Iterable[Row], file: Path | None = None) -> None:
    """Print each row as soon as it is known.

    With a file, append the row to the file as a line of JSON, and print only that it is done.
    """
    if not file:
        print(_line(TITLES), flush=True)
    for row in rows:
        if file:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")
        print(f"  done: {row.figure}" if file else text(row), flush=True)


def read(file: Path) -> list[Row]:
    """Read the rows that `tell` appended to a file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def place(load: Sequence[float], seconds: float) -> list[str]:
    """Return the date, commit, machine and versions, which readers need to compare ratios.

    `load` contains the load average of one minute, before and after the benchmark.
    """
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
    """Return lines with the number of met aims, the failed parts and the meaning of a column."""
    every = [row for rows in parts.values() for row in rows]
    aimed = [row for row in every if row.met is not None and not row.failed]
    failed, met = sum(row.failed for row in every), sum(bool(row.met) for row in aimed)
    found = [f"{met} of {len(aimed)} aims are met (! is one missed)"] if aimed else []
    found += [f"{failed} parts failed"] if failed else []
    shares = any(row.share is not None for row in every)
    return ["; ".join(found)] * bool(found) + [OF_THE_BEST] * shares


def as_text(parts: Mapping[str, Sequence[Row]], where: Sequence[str]) -> str:
    """Return the page as text within 80 columns."""
    lines = [wrapped for one in where for wrapped in textwrap.wrap(one, WIDTH)]
    lines += [wrapped for one in verdict(parts) for wrapped in textwrap.wrap(one, WIDTH)]
    lines += ["", _line(TITLES)]
    for name, rows in parts.items():
        lines += ["", f"-- {name} ".ljust(WIDTH, "-"), *map(text, rows)]
    return "\n".join(lines) + "\n"


def as_html(parts: Mapping[str, Sequence[Row]], where: Sequence[str]) -> str:
    """Return the page as one self-contained HTML file."""
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
    """Write page.txt and page.html to the folder, and return the text."""
    folder.mkdir(parents=True, exist_ok=True)
    page = as_text(parts, where)
    (folder / "page.txt").write_text(page, encoding="utf-8")
    (folder / "page.html").write_text(as_html(parts, where), encoding="utf-8")
    return page


def load() -> float:
    """Return the load average of the last minute, or nan if the system does not provide it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
