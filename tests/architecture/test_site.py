"""The site's made parts: formulas, drawings, papers, commands; and that it holds together."""

import ast
import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.path import Path as Outline
from small_suites import STUDY

from docs.making import check, commands, drawings, formulas, made, papers, results
from fedmuon.experiments.cli import main
from fedmuon.experiments.suites import contents

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CLAIMS = [(number, one) for number in papers.known() for kind in ("claims", "beyond")
          for one in papers.read(number).get(kind, [])]  # fmt: skip


def test_the_readme_is_short_and_names_the_papers_as_their_pages_do() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    for one in papers.known():
        assert f"| [{one}](docs/papers/{one}.md) | {papers.titled(papers.read(one))} |" in text
    assert "](/concepts/orth.md)" in made.readme("What", "it", "found")


def test_a_formula_is_a_picture_with_its_source() -> None:
    drawn = ElementTree.fromstring(formulas.svg(r"\frac{a'}{b}" + "\n" + r"\leq \|X\|_F"))
    assert drawn.attrib["aria-label"] == r"\frac{a'}{b} \leq \|X\|_F"
    (path,) = drawn
    assert path.attrib["fill"] == "currentColor" and path.attrib["d"].count("M") >= 6
    with pytest.raises(ValueError, match="foo"):
        formulas.svg(r"\foo{x}")


def test_every_formula_of_a_page_can_be_set() -> None:
    pages: dict[str, Path] = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        for wide, narrow in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", text, flags=re.S):
            pages[wide or narrow] = page
    assert len(pages) > 50
    for formula, page in pages.items():
        assert formulas.svg(formula), page
    with pytest.raises(ValueError, match="sqrt"):  # the control
        formulas.svg(r"1/\sqrt 2")


def test_outlines_keep_their_points() -> None:
    codes = [Outline.MOVETO, Outline.LINETO, Outline.CURVE3, Outline.CURVE3, Outline.CLOSEPOLY]
    points = [(0, 0), (1, 2), (3, 4), (5, -6), (0, 0)]
    assert formulas.outline(points, codes) == "M 0 0 L 1 -2 Q 3 -4 5 6 Z"


def test_a_drawing_takes_the_ink_of_its_page() -> None:
    text = drawings.inline("maps")
    held = ElementTree.fromstring(re.sub(r'\sxlink:href="#[^"]*"', "", text))
    assert "currentColor" in text and "#000000" not in text
    names = [one.attrib["id"] for one in held.iter() if "id" in one.attrib]
    used = set(re.findall(r'(?:href="|url\()#([^")]*)', text))
    assert names and used <= set(names) and all(one.startswith("maps-") for one in names)


def test_no_page_contains_a_conflict_of_versions() -> None:
    marks = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert marks.search("a\n<<<<<<< HEAD\n")  # the control
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if marks.search(page.read_text(encoding="utf-8"))] == []


def test_every_mark_is_made() -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    found = re.findall(r"^<!-- made: (.+) -->$", "\n".join(pages), re.MULTILINE)
    marks = [mark.split() for mark in found]
    assert {kind for kind, *_ in marks} == set(made.__all__)
    assert {words[0] for kind, *words in marks if kind == "drawing"} == set(drawings.DRAWINGS)
    assert [words[0] for kind, *words in marks if kind == "paper"] == papers.known()


@pytest.mark.parametrize(("number", "claim"), CLAIMS, ids=lambda one: str(one)[:40])
def test_a_claim_is_shown_by_something(number: str, claim: dict[str, Any]) -> None:
    """By a test that there is, or by claims of a suite that is shipped; else it is not tested."""
    if "where" in claim:  # of a paper
        assert claim["basis"] in papers.BASES
        word = papers.verdict(claim)
        assert "undecided" not in claim or "suite" in claim
        if "proof" in claim:
            assert claim["by"] == papers.PROOF and (ROOT / claim["proof"]).is_file()
        assert (word == papers.UNTESTED) == (not {"suite", "test"} & set(claim)), word
        assert claim["basis"] == papers.MATHEMATICS or "paper" in claim or "here" in claim
    else:
        assert {"suite", "test"} & set(claim)
    if test := claim.get("test"):
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    if suite := claim.get("suite"):
        assert suite in papers.read(number)["suites"]
        for kind in ("claim", "against"):
            named = claim.get(kind, "")
            every = [named] if isinstance(named, str) else named
            assert all(said_somewhere(one) or is_kept(suite, one) for one in every)


@functools.cache
def strings() -> tuple[str, ...]:
    """What the studies, the report's claims and the suites' files have as text."""
    files = [*(ROOT / "experiments/studies").rglob("*.py"), ROOT / "analysis/report/claims.py"]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    constants = [one.value for tree in trees for one in ast.walk(tree)
                 if isinstance(one, ast.Constant) and isinstance(one.value, str)]  # fmt: skip
    return (*constants, *(one.read_text(encoding="utf-8") for one in contents.shipped().values()))


def said_somewhere(fragment: str) -> bool:
    return any(fragment in one for one in strings())


def is_kept(suite: str, fragment: str) -> bool:
    """Whether a kept claim says it; studies write some sentences with numbers in them."""
    held = results.read(suite)
    return bool(held) and any(fragment in one["claim"] for one in held["claims"])


def test_suites_of_papers_are_shipped() -> None:
    assert said_somewhere("Every gap is at most") and not said_somewhere("gaps never grow")
    named = {name for number in papers.known() for name in papers.read(number)["suites"]}
    assert named <= set(contents.shipped()) and len(named) > 20
    table = papers.gallery()
    assert all(f"| `{name}` |" in table for name in contents.shipped())


def test_verdicts_are_those_that_are_kept(tmp_path: Path) -> None:
    claims = [{"claim": "All is well.", "verdict": "holds", "detail": "by far"},
              {"claim": "All grows.", "verdict": "refuted", "detail": "it falls"}]  # fmt: skip
    (tmp_path / "dp-bias.json").write_text(json.dumps({"claims": claims, "scale": "full"}))
    for asked, said in (
        ({"claim": "is well"}, "**holds** (`dp-bias`)"),
        ({"claim": ""}, "**1** holds, **1** refuted (`dp-bias`)"),
        ({"against": "is well"}, "**refuted** (`dp-bias`)"),
        ({"claim": ["is well", "All grows"]}, "**1** holds, **1** refuted (`dp-bias`)"),
        ({"suite": "rank", "test": "a"}, "no stored result; run `fedmuon suite rank`; tested"),
    ):
        assert papers.shown({"suite": "dp-bias"} | asked, tmp_path) == said
    with pytest.raises(ValueError, match="no stored claim contains 'is ill'"):
        papers.shown({"suite": "dp-bias", "claim": "is ill"}, tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_a_finished_suite_is_kept(tmp_path: Path) -> None:
    (tmp_path / "ranks.toml").write_text(STUDY, encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["suite", str(tmp_path / "ranks.toml"), "--out", str(tmp_path / "run")])
    assert results.keep(tmp_path / "run", tmp_path) == tmp_path / "ranks.json"
    held = results.read("ranks", tmp_path)
    assert held and {"scale", "data", "machine", "seconds", "again"} <= set(held)
    assert len(held["claims"]) == 7 and all(one["verdict"] for one in held["claims"])
    assert papers.circumstances(held).startswith("Full scale of this suite")
    assert results.read("rank", tmp_path) is None


def test_kept_results_are_of_suites_and_can_be_shown() -> None:
    for file in results.FOLDER.glob("*.json"):
        held = results.read(file.stem)
        assert held and held["suite"] in contents.shipped()
        assert file.stem in (held["suite"], f"{held['suite']}-{held['data']}")
        assert papers.suite(file.stem).count("\n| ") > 1


def test_every_command_and_option_is_in_the_reference() -> None:
    text = commands.reference()
    found = dict(commands.every(commands.app_as_click()))
    assert len(found) >= 18 and set(re.findall("^### `(.*)`$", text, re.M)) == set(found)
    for name, command in found.items():
        part = text.split(f"### `{name}`\n")[1].split("\n### ")[0]
        options = [one.opts[-1] for one in command.params if one.param_type_name == "option"]
        options = [one for one in options if one not in ("--json", "--quiet")]  # explained once
        assert all(one in part for one in options)
    assert "[bold]" not in text and "[/]" not in text
    without = [row for row in text.splitlines() if row.startswith("| `") and row.endswith("|  |")]
    assert without == []


def site(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def test_a_whole_site_has_no_flaw(tmp_path: Path) -> None:
    one = '<a href="two.html#here">x</a><a href="#">x</a><a href="https://a.org">x</a>'
    assert check.flaws(site(tmp_path, one=one, two='<p id="here"></p>')) == []


@pytest.mark.parametrize(("page", "flaw"), [
    ('<a href="none.html">x</a>', "links to none.html, which does not exist"),
    ('<a href="#none">x</a>', "links to #none, but that page has no such anchor"),
    ('<img src="none.png">', "links to none.png, which does not exist"),
    ('<script src="https://a.org/b.js"></script>', "fetches https://a.org/b.js"),
    ('<link href="//a.org/b.css" rel="stylesheet">', "fetches //a.org/b.css"),
])  # fmt: skip
def test_a_flaw_is_seen(page: str, flaw: str, tmp_path: Path) -> None:
    assert check.flaws(site(tmp_path, one=page)) == [f"one.html: {flaw}"]


def test_a_browser_s_own_requests_are_not_the_page_s() -> None:
    def job(initiator: str, url: str) -> dict[str, object]:
        return {"type": 2, "params": {"initiator": initiator, "url": url}}

    events = [job("not an origin", "https://time.org"), job("null", "file:///one.html"),
              {"type": 2}, {"type": 1, "params": {"url": "https://no-job.org"}}]  # fmt: skip
    log = {"constants": {"logEventTypes": {"URL_REQUEST_START_JOB": 2}}, "events": events}
    assert check.addresses(log) == []
    events.append(job("null", "https://a.org/b.js"))
    assert check.addresses(log) == ["https://a.org/b.js"]


@pytest.mark.needs_browser
@pytest.mark.slow
def test_a_browser_tells_what_is_asked_for_and_what_is_wide(tmp_path: Path, chromium: str) -> None:
    plain, script = "<p>text</p>", '<script src="http://127.0.0.1:9/b.js"></script>'
    site(tmp_path, plain=plain, asks=script, wide='<div style="width: 600px">x</div>')
    assert check.requested(tmp_path / "plain.html", chromium) == []
    assert check.requested(tmp_path / "asks.html", chromium) == ["http://127.0.0.1:9/b.js"]
    assert check.wider(tmp_path, chromium, 390) == ["wide.html"]
    assert check.wider(tmp_path, chromium, 1280) == []


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
