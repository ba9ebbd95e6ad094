"""Make the pages that contain only stored results.

They are the gallery, the table of all claims, and the headlines.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from docs.making import papers, results
from docs.making.papers import Claim, Kept, cell, counted, table
from fedmuon.analysis.report.numbers import interval, quantity
from fedmuon.analysis.report.verdicts import SCOPE
from fedmuon.experiments.suites import contents

JUDGED = "suite", "claim", "verdict", "effect", "claim allows", "command that could decide it"
HEADLINES = Path(__file__).resolve().parent.parent / "about" / "headlines.toml"


def kept(folder: Path = results.FOLDER) -> dict[str, Kept]:
    """Return all stored results. The dictionary maps the name of a stored file to its content."""
    read = {file.stem: results.read(file.stem, folder) for file in sorted(folder.glob("*.json"))}
    shipped = contents.shipped()
    return {name: one for name, one in read.items() if one and one.get("suite", name) in shipped}


def claims(folder: Path = results.FOLDER) -> str:
    """Return all claims of the papers, then all claims of the stored suites.

    Both lists start with the number of claims of each verdict.
    """
    read = {number: papers.read(number) for number in papers.known()}
    every = [(number, one) for number, paper in read.items() for one in paper["claims"]]
    words = [papers.verdict(one, folder) for _, one in every]
    rows = [of_paper(number, one, word, folder)
            for (number, one), word in zip(every, words, strict=True)]  # fmt: skip
    suites = kept(folder)
    head = ("where", "the paper", "our result", "verdict", "evidence", "command")
    return "\n\n".join([
        f"{len(every)} claims of the papers: {counted(words)}."
        + papers.apart(sum(len(papers.outside(paper)) for paper in read.values())),
        "{.stacked .filtered}\n" + table(head, rows),
        "## What no file here can show",
        *(f"**{paper['name']}.** {paper['out_of_reach']['why']} "
          f"[List of claims]({link(number)}#what-no-file-here-can-show)."
          for number, paper in read.items() if papers.outside(paper)),
        "## Claims of our suites",
        f"{counted(all_words(suites))}, of {len(suites)} suites.",
        SCOPE,
        papers.legend("suites"),
        "{.filtered}\n" + table(JUDGED,
              [line for name in suites for line in of_suite(name, suites[name])]),
    ])  # fmt: skip


def of_paper(number: str, claim: Claim, word: str, folder: Path) -> list[str]:
    """Return the table row for one claim of a paper."""
    name = claim.get("suite", "")
    held = papers.stored(claim, folder)
    again = held["again"] if held else f"fedmuon suite {name}"
    test = f"pytest tests/{claim['test']}" if "test" in claim else ""
    command = claim.get("command") or (again if name else test)
    took = f" (the whole suite took {held['seconds']:.0f} s)" if held else ""
    place = f"[{papers.named(number)}]({link(number)}), {claim['where']}"
    return [place, claim["printed"], claim["ours"], f"**{word}**", papers.evidence(claim, folder),
            f"`{command}`{took}" if command else ""]  # fmt: skip


def link(number: str) -> str:
    """Return the link to a paper's page."""
    return f"/papers/{number}.md"


def all_words(suites: dict[str, Kept]) -> Iterator[str]:
    """Yield the verdict of every claim in the suites that ran at full scale."""
    for held in suites.values():
        if held["scale"] == "full":
            yield from (one["verdict"] for one in held["claims"])


def of_suite(name: str, held: Kept) -> Iterator[list[str]]:
    """Yield one table row per claim of a suite."""
    for one in held["claims"]:
        yield [f"`{name}`", one["claim"], marked(one, held), effect(one), one["rule"],
               f"`{one['command']}`" if one["command"] else ""]  # fmt: skip


def marked(claim: Claim, held: Kept) -> str:
    """Return the verdict, with the scale if it is not full scale."""
    return f"**{claim['verdict']}**{papers.scale(held)}"


def effect(claim: Claim) -> str:
    """Return the effect in the least favourable setting, with its interval.

    If the claim has several settings, the text also states in how many settings the claim holds.
    """
    seen = claim["effect"]
    if seen["value"] is None:
        return claim["why"] or claim["detail"]
    ends = [seen[end] for end in ("low", "high")]
    within = f" ({interval(*ends)})" if None not in ends and ends[0] != ends[1] else ""
    where = f", {seen['at']}" if seen["at"] and claim["places"] > 1 else ""
    share = f"; {claim['held']} of {claim['places']}" if claim["places"] > 1 else ""
    return f"{seen['name']}{where}: {quantity(seen['value'], seen.get('unit', ''))}{within}{share}"


def pictures(folder: Path = results.FOLDER) -> str:
    """Return one gallery section per stored suite."""
    return "\n\n".join(section(name, held) for name, held in kept(folder).items())


def section(name: str, held: Kept) -> str:
    """Return the gallery section of a suite: its verdicts, its picture and its circumstances."""
    said = counted(one["verdict"] for one in held["claims"]) or "Nothing is claimed"
    parts = [f"## `{name}`: {held['title']}", f"{said}{papers.scale(held)}."]
    if drawn := held.get("picture"):
        parts += [f"![{cell(drawn['title'])}](/results/{drawn['file']})", drawn["caption"]]
    return "\n\n".join([*parts, papers.circumstances(held)])


def headlines(folder: Path = results.FOLDER) -> str:
    """Return the questions of docs/about/headlines.toml with the answers of the stored suites."""
    asked = tomllib.loads(HEADLINES.read_text(encoding="utf-8"))["headlines"]
    return "\n\n".join(
        headline(one["title"], one["claims"], folder, one.get("picture", "")) for one in asked
    )


def headline(title: str, asked: dict[str, list[str]], folder: Path, picture: str = "") -> str:
    """Return a question, the figure of a suite, and the claims that answer the question.

    `asked` maps each suite to fragments of sentences. Claims with such a fragment are shown. For a
    suite without fragments, all claims are shown.
    """
    parts = [f"## {title}"]
    if drawn := (results.read(picture, folder) or {}).get("picture") if picture else None:
        parts += [f"![{cell(drawn['title'])}](/results/{drawn['file']})", drawn["caption"]]
    for name, fragments in asked.items():
        held = results.read(name, folder)
        if held is None:
            parts.append(f"There is no stored result of `{name}`. Run `fedmuon suite {name}`.")
            continue
        rows = [[one["claim"], marked(one, held), effect(one)] for one in held["claims"]
                if not fragments or any(part in one["claim"] for part in fragments)]  # fmt: skip
        parts += [table((f"`{name}`", "verdict", "effect"), rows), papers.circumstances(held)]
    return "\n\n".join(parts)
