"""Tables of a page, and beside it as CSV and LaTeX: values and their intervals in columns apart."""

import csv
import io
import re
from collections.abc import Sequence

from fedmuon.analysis.report.findings import Rows

VALUE = r"[-−+≥≤ ]*(?:\d[\d.,]*(?:e[-−+]?\d+)?|–)(?:%)?"
SPREAD = re.compile(rf"({VALUE}) ± (.*)")
WITHIN = re.compile(rf"({VALUE}) \((.* to .*)\)")
ASCII = {"−": "-", "–": ""}
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def apart(head: Sequence[str], rows: Rows) -> tuple[list[str], list[list[str]]]:
    """The table with two columns in the place of one that has `0.2 ± 0.1` or `0.2 (0.1 to 0.3)`."""
    columns = [[row[k] if k < len(row) else "" for row in rows] for k in range(len(head))]
    names, found = [], []
    for place, (name, cells) in enumerate(zip(head, columns, strict=True)):
        kind, pattern = next(
            ((kind, one) for kind, one in (("±", SPREAD), ("95%", WITHIN))
             if place and any(one.fullmatch(cell) for cell in cells)), ("", None)
        )  # fmt: skip
        if pattern is None:
            names.append(name)
            found.append(cells)
            continue
        both = [split.groups() if (split := pattern.fullmatch(cell)) else (cell, "")
                for cell in cells]  # fmt: skip
        names += [name.removesuffix(" (95%)"), kind]
        found += [[value for value, _ in both], [reach for _, reach in both]]
    return names, [list(row) for row in zip(*found, strict=True)]


def as_csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    """As programs read it: ASCII minus signs, nothing for what is unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for name, *cells in rows:
        plain = [re.sub("−(?=[\\d.])", "-", ASCII.get(cell, cell)) for cell in cells]
        writer.writerow([name.strip(), *plain])
    return text.getvalue().encode()


def as_latex(head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> bytes:
    """A tabular below its title, for a document whose engine reads UTF-8 and Greek letters."""
    lines = [
        f"% {title}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\hline",
        *(" & ".join(map(_escaped, row)) + r" \\" for row in (head, *rows)),
        r"\hline",
        r"\end{tabular}",
    ]
    lines.insert(4, r"\hline")
    return ("\n".join(lines) + "\n").encode()


def _escaped(cell: str) -> str:
    kept = "".join(LATEX.get(one, one) for one in cell)
    minus = re.sub("−(?=[\\d.])", "$-$", kept)
    return f"\\quad {minus.strip()}" if cell.startswith("  ") else minus


def slug(title: str) -> str:
    """A title as a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60].strip("-") or "table"
