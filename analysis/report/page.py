"""One HTML file that needs nothing else: no network, no script; figures inside, text escaped."""

import base64
import re
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fedmuon.analysis.report.verdicts import Claim, Verdict

MARKS: dict[Verdict, tuple[str, str]] = {  # class and sign
    "holds": ("yes", "✓"),
    "fails": ("no", "✗"),
    "undecided": ("open", "?"),
    "not testable at this scale": ("unknown", "–"),
}

HEAD = ("claim", "effect", "95% interval", "accepted")


def document(title: str, body: Sequence[str]) -> str:
    """A whole page; `body` is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def heading(level: int, text: str, anchor: str = "") -> str:
    """A heading that links can point to."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{name}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>" if text else ""


def items(texts: Sequence[str]) -> str:
    """A list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def answer(
    sentence: str, found: Mapping[Verdict, int], about: Sequence[tuple[str, str]], drawn: str,
    caution: str = "",
) -> str:  # fmt: skip
    """What was found in one sentence, how many claims have which verdict, what these should not be
    read without, of what, and a figure."""
    each = "".join(f"<li>{mark(one)}: {number}</li>" for one, number in found.items() if number)
    tally = f'<ul class="tally">{each}</ul>' if each else ""
    return (
        f'<section class="answer"><div>{paragraph(sentence, "verdict")}'
        f"{tally}{paragraph(caution)}{_pairs(about)}</div><div>{drawn}</div></section>"
    )


def claims(every: Sequence[Claim]) -> str:
    """A line a claim: its verdict, its sentence, and what else must be said; the rest is folded."""
    lines = []
    for one in every:
        also = f"<small>{escape(one.also)}</small>" if one.also else ""
        effect, interval = one.shown
        told = ("effect", effect), ("95% interval", interval), ("rule", one.accepted)
        told = *(told if effect else ()), ("why", one.why), ("by how much", one.detail)
        command = _command(one.command) if one.command else ""
        more = _pairs([pair for pair in told if pair[1]], command)
        lines.append(
            f"<details><summary>{mark(one.verdict)}<span>{escape(one.sentence)}{also}</span>"
            f"{_brief(one)}</summary>{more}</details>\n"
        )
    head = "".join(f"<span>{name}</span>" for name in ("verdict", *HEAD))
    return f'<div class="claims"><div class="head">{head}</div>{"".join(lines)}</div>'


def _brief(claim: Claim) -> str:
    """The effect at its worst place, its interval, and what the rule accepts."""
    effect, interval = claim.shown
    cells = effect.rpartition(": ")[2], interval, claim.accepted if effect else ""
    return "".join(
        f'<span class="brief" data-name="{name}">{escape(cell)}</span>'
        for name, cell in zip(HEAD[1:], cells, strict=True)
    )


def mark(verdict: Verdict) -> str:
    """The verdict: in words, with a sign, and in colour."""
    kind, sign = MARKS[verdict]
    return f'<span class="mark {kind}">{sign} {verdict}</span>'


def _pairs(pairs: Sequence[tuple[str, str]], command: str = "") -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    lines += f"<dt>what would decide it</dt><dd>{command}</dd>" if command else ""
    return f'<dl class="about">{lines}</dl>'


def _command(text: str) -> str:
    return f'<code class="command">{escape(text)}</code>'


def command(text: str) -> str:
    """One that a click selects whole."""
    return _command(text) if text else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    """Numbers beside their names, right-aligned, the names kept in sight; it scrolls in its own
    box."""
    reach = [name in ("±", "95%") for name in head]
    top = "".join(
        f'<th scope="col"{_kind(quiet)}>{escape(name)}</th>'
        for name, quiet in zip(head, reach, strict=True)
    )
    lines = []
    for name, *cells in rows:
        if cells and not any(cells):
            title = f'<td colspan="{len(head)}">{escape(name.strip())}</td>'
            lines.append(f'<tr class="group">{title}</tr>\n')
            continue
        kind = ' class="sub"' if name.startswith("  ") else ""
        shown = "".join(
            f"<td{_kind(quiet)}>{escape(cell)}</td>"
            for cell, quiet in zip(cells, reach[1:], strict=True)
        )
        lines.append(f"<tr{kind}><td>{escape(name.strip())}</td>{shown}</tr>\n")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="numbers"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody>'
        "</table></div>"
    )


def _kind(quiet: bool) -> str:
    return ' class="reach"' if quiet else ""


def facts(rows: Sequence[Sequence[str]]) -> str:
    """Words beside their names; long ones wrap."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<table class="facts"><tbody>{body}</tbody></table>' if rows else ""


def glossary(terms: Mapping[str, str]) -> str:
    """Each term with what it means."""
    lines = "".join(f"<dt>{escape(one)}</dt><dd>{escape(of)}</dd>" for one, of in terms.items())
    return f'<dl class="glossary">{lines}</dl>' if terms else ""


def told(text: str) -> str:
    """The words of a suite's file: paragraphs, items, and tables that keep their lines."""
    blocks: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        before, open_ = blocks[-1] if blocks else ("", [])
        deep = line.startswith("    ") or (line.startswith("  ") and before != "item")
        kind = "pre" if deep else "item" if line.startswith("- ") else ""
        if open_ and line.strip() and kind in (before, "") and kind != "item" and (
            kind == "pre" or before != "pre"):  # fmt: skip
            open_.append(line if kind == "pre" else line.strip())
        else:
            blocks.append((kind, [line] if line.strip() else []))
    shown = [
        f"<pre>{escape(chr(10).join(lines))}</pre>" if kind == "pre" else
        f'<div{" class=item" * (kind == "item")}>{escape(" ".join(lines))}</div>'
        for kind, lines in blocks if lines
    ]  # fmt: skip
    return f'<div class="told">{"".join(shown)}</div>' if shown else ""


def fold(summary: str, body: str) -> str:
    """What is seen once its line is clicked."""
    return f'<details class="more"><summary>{escape(summary)}</summary>{body}</details>'


def links(parts: Sequence[tuple[str, str]]) -> str:
    """(title, verdict) of each part, linked to its heading `part-0`, `part-1` and so on."""
    lines = (
        f'<li><a href="#part-{number}">{escape(title)}</a>: {escape(verdict)}</li>'
        for number, (title, verdict) in enumerate(parts)
    )
    return f"<ul>{''.join(lines)}</ul>"


def figure(wide: bytes, narrow: bytes, title: str, caption: str, files: str) -> str:
    """An SVG inside the page, another that takes its place on a narrow screen, and where to find
    it as a file."""
    return (
        f'<figure><picture><source media="(max-width: 640px)" srcset="{_inline(narrow)}">'
        f'<img src="{_inline(wide)}" alt="{escape(title)}"></picture>'
        f"<figcaption><strong>{escape(title)}.</strong> {escape(caption)} "
        f"<span>{escape(files)}</span></figcaption></figure>"
    )


def _inline(svg: bytes) -> str:
    both = svg.replace(b"</style>", f"{DARK_FIGURE}</style>".encode(), 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(both).decode()}"


_ASSETS = Path(__file__).parent / "assets"
STYLE = (_ASSETS / "page.css").read_text(encoding="utf-8")
DARK_FIGURE = (_ASSETS / "dark_figure.css").read_text(encoding="utf-8")
_GLOSSARY = tomllib.loads((_ASSETS / "glossary.toml").read_text(encoding="utf-8"))["term"]


def terms_of(text: str) -> dict[str, str]:
    """The terms of the glossary that occur in the text, with their meanings."""
    return {term["name"]: term["meaning"] for term in _GLOSSARY if re.search(term["seen"], text)}
