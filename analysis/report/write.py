"""`report.html`: findings with their verdict first, in one file without a network; beside it
claims.json, the figures as PDF and PNG, and the tables as CSV and LaTeX."""

import contextlib
import html
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedmuon.analysis.report import page, style
from fedmuon.analysis.report.findings import Findings, Picture, Rows
from fedmuon.analysis.report.overlay import Run, overlay
from fedmuon.analysis.report.page import terms_of
from fedmuon.analysis.report.tables import MEND, apart, as_csv, as_latex, slug
from fedmuon.analysis.report.verdicts import counts, tally
from fedmuon.core.errors import InputError
from fedmuon.core.files import mendable, write_bytes

ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
CHOSEN = "What is printed, what is left open, and what is chosen here"


def write_page(
    folder: Path,
    found: Sequence[Findings],
    runs: Sequence[Run] = (),
    left_out: Sequence[str] = (),
    unfinished: Sequence[str] = (),
) -> Path:
    """Write FOLDER/report.html, claims.json, and the files of figures and tables.

    Args:
        folder: Where to write.
        found: The parts of the page, one per suite or run.
        runs: Runs to draw in one figure.
        left_out: Why other folders are not on the page.
        unfinished: What unfinished runs lack.

    Returns:
        The path of the page.
    """
    several = len(found) > 1
    parts = [_Part(folder, one, one.name if several else "") for one in found]
    body = [part.body() for part in parts]
    every = [*_list("Left out", left_out), *_list("Unfinished", unfinished)]
    if drawn := overlay(runs):
        every += [page.heading(3, "All runs"), drawn]
    write_bytes(folder / "claims.json", _claims(found))
    write_bytes(folder / "report.html", _page(found, body, every).encode())
    return folder / "report.html"


def _claims(found: Sequence[Findings]) -> bytes:
    """Every claim with verdict, effect, interval, rule and command, as JSON."""
    parts = [
        {
            "name": part.name,
            "title": part.title,
            "data": part.data,
            "stands_on": part.stands_on,
            "counts": counts(part.claims),
            "claims": [one.record() for one in part.claims],
        }
        for part in found
    ]
    return (json.dumps(parts, indent=1, ensure_ascii=False) + "\n").encode()


@contextlib.contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Refuse what is sound CSV and JSON, but holds other things than fedmuon writes there."""
    try:
        yield
    except InputError:
        raise
    except ODD as error:
        raise InputError(
            f"{folder} was changed by hand, or written by another version ({error!r:.80}): {MEND}"
        ) from error


def _list(heading: str, reasons: Sequence[str]) -> list[str]:
    """What the page does not have, and why; nothing where it has all."""
    return [page.heading(3, heading), page.items(reasons)] if reasons else []


def _page(found: Sequence[Findings], bodies: Sequence[Sequence[str]], every: Sequence[str]) -> str:
    """The whole page, with what is of `every` part between the first answer and the rest."""
    single = len(found) == 1
    claims = [claim for part in found for claim in part.claims]
    data = dict.fromkeys(part.data for part in found if part.claims or not claims)
    result = tally(claims, ", ".join(data) if all(data) else "")
    title = found[0].title if single else "Federated and private Muon"
    body = [page.heading(1, title)]
    if not single:
        index = page.links([(part.title, tally(part.claims)) for part in found])
        body.append(page.answer(f"{result}.", counts(claims), [], index))
    if single:
        (answer, *lines), *_ = bodies
        return page.document(f"{title}: {result}", [*body, answer, *every, *lines])
    body += every
    for number, (part, lines) in enumerate(zip(found, bodies, strict=True)):
        body += [page.heading(2, part.title, f"part-{number}"), *lines]
    return page.document(f"{title}: {result}", body)


class _Part:
    """One section of a page, which saves its figures and tables as they are put in."""

    def __init__(self, folder: Path, found: Findings, name: str) -> None:
        self.folder, self.found, self.name = folder, found, name

    def body(self) -> list[str]:
        """Answer, verdicts, figures, settings, numbers, what they stand on, how to have them again;
        and what the words in all this mean."""
        part = self.found
        first, *figures = [*self._figures(), ""]
        result = f"{tally(part.claims, part.data)}."
        caution = " ".join(filter(None, (part.pending, part.caution)))
        above = [
            page.answer(result, counts(part.claims), part.about, first, caution),
            *([page.heading(3, "Verdicts"), page.claims(part.claims)] if part.claims else []),
            *([page.heading(3, "Figures")] if any(figures) else []),
            *figures,
        ]
        below = [*self._numbers(), *self._circumstances()]
        words = page.glossary(terms_of(_words([*above, *below])))
        return [*above, *below, *([page.heading(3, "Words and symbols"), words] if words else [])]

    def _numbers(self) -> list[str]:
        part = self.found
        card = [page.heading(3, "The experiment"), page.facts(part.card)] if part.card else []
        tables = ((part.numbers_title, part.head, part.numbers), *part.more)
        runs = [self._table(*part.runs)] if part.runs else []
        return [
            *card,
            *(line for one in tables for line in (page.heading(3, one[0]), self._table(*one))),
            page.paragraph(part.note),
            *(page.fold(f"{part.runs[0]} ({len(part.runs[2])})", one) for one in runs if part.runs),
        ]

    def _circumstances(self) -> list[str]:
        part = self.found
        told, stands = page.told(part.told), part.stands_on or part.assumptions
        return [
            *([page.heading(3, CHOSEN), told] if told else []),
            *([page.heading(3, "What this stands on")] if stands else []),
            page.paragraph(part.stands_on),
            page.items(part.assumptions),
            page.heading(3, "How to reproduce"),
            page.command(part.again),
            page.facts(part.circumstances),
        ]

    def _figures(self) -> list[str]:
        """Save every figure, and return them as HTML; the page has them wide and narrow."""
        place = self._place("figures")
        with as_written(place):
            return [self._figure(place, picture) for picture in self.found.pictures]

    def _figure(self, place: Path, picture: Picture) -> str:
        drawn = picture.draw(False)
        pdf, png = style.save(drawn, place / picture.name)
        files = f"As files: {pdf.relative_to(self.folder)}, {png.name}."
        said = picture.caption, picture.read(drawn) if picture.read else ""
        caption = " ".join(filter(None, said))
        both = style.svg(drawn), style.svg(picture.draw(True))
        return page.figure(*both, picture.title, caption, files)

    def _table(self, title: str, head: Sequence[str], rows: Rows) -> str:
        """The table, and the same as files."""
        names, cells = apart(head, rows)
        file = self._place("tables") / f"{slug(title)}.csv"
        write_bytes(file, as_csv(names, cells))
        write_bytes(file.with_suffix(".tex"), as_latex(names, cells, title))
        beside = f"As files: {file.relative_to(self.folder)}, {file.stem}.tex."
        return page.table(names, cells, title) + page.paragraph(beside, "beside")

    def _place(self, kind: str) -> Path:
        place = self.folder / kind / self.name
        with mendable(place, "create"):
            place.mkdir(parents=True, exist_ok=True)
        return place


def _words(lines: Sequence[str]) -> str:
    """The text of HTML, without what stands inside of tags."""
    return html.unescape(re.sub("<[^>]*>", " ", " ".join(lines)))
