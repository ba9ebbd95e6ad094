"""Write report.html, a single file that works offline and shows the verdicts first.

This module also writes claims.json, the figures as PDF and PNG, and the tables as CSV and LaTeX.
All files are in the folder of report.html. The HTML templates are in assets/.
"""

import base64
import contextlib
import functools
import html
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Findings, Picture, Rows
from fedmuon.analysis.report.latex import table_file
from fedmuon.analysis.report.overlay import DrawnRun, drawing
from fedmuon.analysis.report.tables import RUN_AGAIN, as_csv, slug, split_intervals
from fedmuon.analysis.report.verdicts import MEANINGS, SCOPE, counts, tally
from fedmuon.core.errors import InputError
from fedmuon.core.files import mendable, write_bytes

ASSETS = Path(__file__).parent / "assets"
MARKS = {  # CSS class and symbol of each verdict
    "holds": ("yes", "✓"),
    "refuted": ("no", "✗"),
    "inconclusive": ("open", "?"),
    "not tested here": ("unknown", "–"),
}
ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def write_page(
    folder: Path,
    found: Sequence[Findings],
    runs: Sequence[DrawnRun] = (),
    left_out: Sequence[str] = (),
    unfinished: Sequence[str] = (),
) -> Path:
    """Write FOLDER/report.html, claims.json, and the files of figures and tables.

    Args:
        folder: Folder to write to.
        found: The parts of the page, one per suite or run.
        runs: Runs to draw in one figure.
        left_out: Reasons why other folders are not on the page.
        unfinished: Notes on what is missing in unfinished runs.

    Returns:
        The path of the page.
    """
    several = len(found) > 1
    parts = [_part(folder, part, part.name if several else "") for part in found]
    claims = [claim for part in found for claim in part.claims]
    data = dict.fromkeys(part.data for part in found if part.claims or not claims)
    text = render(
        "report.html",
        title="Federated and private Muon" if several else found[0].title,
        result=tally(claims, ", ".join(data) if all(data) else ""),
        counts=counts(claims),
        caution="",
        parts=parts,
        drawing=drawing(runs),
        left_out=left_out,
        unfinished=unfinished,
    )
    records = [
        {
            "name": part.name,
            "title": part.title,
            "data": part.data,
            "stands_on": part.stands_on,
            "counts": counts(part.claims),
            "claims": [claim.record() for claim in part.claims],
        }
        for part in found
    ]
    record = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
    write_bytes(folder / "claims.json", record.encode())
    write_bytes(folder / "report.html", text.encode())
    return folder / "report.html"


def render(template: str, **context: Any) -> str:
    """Fill a template of assets/ with the given values, and escape special characters of HTML."""
    return _templates().get_template(template).render(context)


@functools.cache
def _templates() -> Any:
    """Return the environment that loads the HTML templates.

    A template variable without a value is an error.
    """
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    env.globals |= {"MARKS": MARKS, "MEANINGS": MEANINGS, "SCOPE": SCOPE, "terms_of": terms_of}
    return env


@contextlib.contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Raise InputError if a readable file does not have the structure that fedmuon writes."""
    try:
        yield
    except InputError:
        raise
    except ODD as error:
        raise InputError(
            f"{folder} was changed, or written by another version of fedmuon ({error!r:.80}): "
            f"{RUN_AGAIN}"
        ) from error


def _part(folder: Path, part: Findings, name: str) -> dict[str, Any]:
    places = [folder / kind / name for kind in ("figures", "tables")]
    for place in places:
        with mendable(place, "create"):
            place.mkdir(parents=True, exist_ok=True)
    with as_written(places[0]):
        figures = [_figure(folder, places[0], picture) for picture in part.pictures]
    tables = ((part.numbers_title, part.head, part.numbers), *part.more)
    return {
        "part": part,
        "short": tally(part.claims),
        "result": tally(part.claims, part.data),
        "counts": counts(part.claims),
        "caution": " ".join(filter(None, (part.pending, part.caution))),
        "figures": figures,
        "tables": [_table(folder, places[1], *table) for table in tables],
        "runs": _table(folder, places[1], *part.runs) if part.runs else None,
        "told": blocks(part.told),
    }


def _figure(folder: Path, place: Path, picture: Picture) -> dict[str, str]:
    """Save a figure as files, and return a wide and a narrow SVG of the figure for the page."""
    drawn = picture.draw(False)
    pdf, png = style.save(drawn, place / picture.name)
    sentences = picture.caption, picture.read(drawn) if picture.read else ""
    dark = (ASSETS / "dark_figure.css").read_bytes()
    svgs = [
        base64.b64encode(
            style.image(figure, "svg").replace(b"</style>", dark + b"</style>", 1)
        ).decode()
        for figure in (drawn, picture.draw(True))
    ]
    wide, narrow = (f"data:image/svg+xml;base64,{svg}" for svg in svgs)
    return {
        "title": picture.title,
        "caption": " ".join(filter(None, sentences)),
        "files": f"Files: {pdf.relative_to(folder)}, {png.name}.",
        "wide": wide,
        "narrow": narrow,
    }


def _table(folder: Path, place: Path, title: str, head: Sequence[str], rows: Rows) -> Any:
    """Save a table as CSV and LaTeX, and return its cells."""
    names, cells = split_intervals(head, rows)
    file = place / f"{slug(title)}.csv"
    write_bytes(file, as_csv(names, cells))
    write_bytes(file.with_suffix(".tex"), table_file(names, cells, title))
    files = f"Files: {file.relative_to(folder)}, {file.stem}.tex."
    return {
        "title": title,
        "head": names,
        "rows": [(name, row) for name, *row in cells],
        "files": files,
    }


def blocks(text: str) -> list[tuple[str, str]]:
    """Split the description of a suite into paragraphs, list items and preformatted tables.

    Returns:
        For each block, its kind ("" for a paragraph, "item" or "pre") and its text.
    """
    parts: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        before, lines = parts[-1] if parts else ("", [])
        deep = line.startswith("    ") or (line.startswith("  ") and before != "item")
        kind = "pre" if deep else "item" if line.startswith("- ") else ""
        follows = kind == before if kind else before != "pre"
        if lines and line.strip() and kind != "item" and follows:
            lines.append(line if kind == "pre" else line.strip())
        else:
            parts.append((kind, [line] if line.strip() else []))
    return [(kind, ("\n" if kind == "pre" else " ").join(lines)) for kind, lines in parts if lines]


def terms_of(page: str) -> dict[str, str]:
    """Return the glossary terms that occur in the text of an HTML page, with their meanings."""
    text = html.unescape(re.sub("<[^>]*>", " ", page))
    terms = tomllib.loads((ASSETS / "glossary.toml").read_text(encoding="utf-8"))["term"]
    return {term["name"]: term["meaning"] for term in terms if re.search(term["seen"], text)}
