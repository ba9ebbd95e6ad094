"""One HTML file that needs nothing else: no network, no script; figures inside, text escaped."""

import base64
from collections.abc import Sequence
from html import escape

from fedmuon.analysis.report.claims import Claim

# class, and what is seen
VERDICTS = {True: ("yes", "✓ yes"), False: ("no", "✗ NO"), None: ("unknown", "? cannot say")}
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc; --soft: #f4f4f2;
  --good: #00664b; --bad: #a33c00; --quiet: #555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --paper: #16181b; --line: #45494f;
  --soft: #212429; --good: #4fd1a5; --bad: #ff9a5c; --quiet: #a9adb3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
p, ul { margin: .4rem 0; max-width: 46rem; }
.verdict { font-size: 1.2rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th { color: var(--quiet); font-weight: 600; font-size: .9rem; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right;
  white-space: nowrap; }
.numbers thead th:not(:first-child) { white-space: normal; }
.facts { font-size: .95rem; } .facts td:first-child { color: var(--quiet); }
.claims { width: 100%; }
.claims td:nth-child(1) { width: 38%; }
.claims td:nth-child(2) { white-space: nowrap; font-weight: 600; }
.yes { color: var(--good); } .no { color: var(--bad); } .unknown { color: var(--quiet); }
figure { margin: 1.2rem 0; }
figure img { display: block; width: 100%; max-width: 52rem; height: auto; background: #fff;
  padding: .5rem; border-radius: 4px; }
figcaption { color: var(--quiet); font-size: .95rem; max-width: 46rem; margin-top: .3rem; }
a { color: inherit; }
@media (max-width: 640px) {
  .claims, .claims tbody, .claims tr, .claims td { display: block; width: auto !important; }
  .claims thead { display: none; }
  .claims tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .claims td { border: 0; padding: .1rem 0; }
  .claims td:nth-child(3) { color: var(--quiet); font-size: .95rem; }
}
@media print { h2 { break-before: auto; } figure, tr { break-inside: avoid; } }
"""


def document(title: str, body: Sequence[str]) -> str:
    """A whole page; `body` is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
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


def claims_table(claims: Sequence[Claim]) -> str:
    """Claim, whether it holds, by how much; one below the other on a telephone."""
    rows = "".join(
        f"<tr><td>{escape(claim.sentence)}</td><td>{mark(claim.holds)}</td>"
        f"<td>{escape(claim.detail)}</td></tr>\n"
        for claim in claims
    )
    head = "<thead><tr><th>claim</th><th>holds</th><th>by how much</th></tr></thead>"
    return f'<table class="claims">{head}<tbody>\n{rows}</tbody></table>'


def mark(holds: bool | None) -> str:
    """yes, NO or cannot say: in words, with a sign, and in colour."""
    kind, words = VERDICTS[holds]
    return f'<span class="{kind}">{words}</span>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    """Numbers beside their names, right-aligned; the table scrolls in its own box."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="numbers"><thead><tr>{top}</tr></thead>{_rows(rows)}</table></div>'
    )


def facts(rows: Sequence[Sequence[str]]) -> str:
    """Words beside their names; long ones wrap."""
    return f'<table class="facts">{_rows(rows)}</table>'


def _rows(rows: Sequence[Sequence[str]]) -> str:
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<tbody>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</tbody>"


def links(parts: Sequence[tuple[str, str]]) -> str:
    """(title, verdict) of each part, linked to its heading `part-0`, `part-1` and so on."""
    lines = (
        f'<li><a href="#part-{number}">{escape(title)}</a>: {escape(verdict)}</li>'
        for number, (title, verdict) in enumerate(parts)
    )
    return f"<ul>{''.join(lines)}</ul>"


def figure(wide: bytes, narrow: bytes, title: str, caption: str) -> str:
    """A PNG inside the page, and another that takes its place on a narrow screen."""
    return (
        f'<figure><picture><source media="(max-width: 640px)" srcset="{_inline(narrow)}">'
        f'<img src="{_inline(wide)}" alt="{escape(title)}"></picture>'
        f"<figcaption><strong>{escape(title)}.</strong> {escape(caption)}</figcaption></figure>"
    )


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
