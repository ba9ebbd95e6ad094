"""`report.html`: findings with their verdict first, in one file without a network."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedmuon.analysis.report import page, style
from fedmuon.analysis.report.claims import Claim
from fedmuon.analysis.report.columns import MEND
from fedmuon.analysis.report.findings import Findings, Rows
from fedmuon.errors import InputError
from fedmuon.files import mendable, write_bytes

ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def write_page(folder: Path, found: Sequence[Findings]) -> Path:
    """Write FOLDER/report.html, and its figures as PDF and PNG below FOLDER/figures/."""
    figures, target = folder / "figures", folder / "report.html"
    pictures = [_draw(one, figures / one.name if len(found) > 1 else figures) for one in found]
    write_bytes(target, _page(found, pictures).encode())
    return target


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


def _draw(part: Findings, place: Path) -> list[str]:
    """Save every figure, and return them as HTML; the page has them wide and narrow."""
    with mendable(place, "create"):
        place.mkdir(parents=True, exist_ok=True)
    with as_written(place):
        return [
            page.figure(
                style.save(picture.draw(False), place / picture.name)[1].read_bytes(),
                style.png(picture.draw(True)),
                picture.title,
                picture.caption,
            )
            for picture in part.pictures
        ]


def verdict(claims: Sequence[Claim], data: str = "") -> str:
    """`7 of 8 claims hold on fashion-mnist; 1 cannot be judged`."""
    if not claims:
        return f"Measured on {data}; nothing is claimed" if data else "nothing is claimed"
    held, open_ = (sum(claim.holds is value for claim in claims) for value in (True, None))
    where, tail = f" on {data}" if data else "", f"; {open_} cannot be judged" if open_ else ""
    return f"{held} of {len(claims)} claims {'holds' if held == 1 else 'hold'}{where}{tail}"


def _page(found: Sequence[Findings], pictures: Sequence[Sequence[str]]) -> str:
    single = len(found) == 1
    claims = [claim for part in found for claim in part.claims]
    result = verdict(claims, ", ".join(dict.fromkeys(part.data for part in found)))
    title = found[0].title if single else "Federated and private Muon"
    body = [page.heading(1, title), page.paragraph(result, "verdict")]
    if not single:
        body.append(page.links([(part.title, verdict(part.claims)) for part in found]))
    for number, (part, drawn) in enumerate(zip(found, pictures, strict=True)):
        body += [] if single else [page.heading(2, part.title, f"part-{number}")]
        body += _section(part, drawn)
    return page.document(f"{title}: {result}", body)


def _section(part: Findings, pictures: Sequence[str]) -> list[str]:
    """Verdict, numbers, figures, assumptions, and how to have it again."""
    return [
        *([page.claims_table(part.claims)] if part.claims else []),
        *_table(part.numbers_title, part.head, part.numbers),
        *(line for one in part.more for line in _table(*one)),
        page.paragraph(part.note),
        *([page.heading(3, "Figures")] if pictures else []),
        *pictures,
        *([page.heading(3, "What this stands on")] if part.stands_on else []),
        page.paragraph(part.stands_on),
        page.items(part.assumptions),
        page.heading(3, "How to reproduce"),
        page.paragraph(part.again),
        page.facts(part.circumstances),
    ]


def _table(title: str, head: Sequence[str], rows: Rows) -> list[str]:
    return [page.heading(3, title), page.table(head, rows, title)]
