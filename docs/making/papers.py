"""A page for each paper: its claims, our results, and what shows them.

A claim of a paper has one of these verdicts:

    holds                    it is mathematics, and a test or suite shows it; or a suite shows it in
                             the paper's own setting (same data, model and scale)
    refuted                  the same, and the result contradicts it
    holds in our setting     a suite with other data or another model, or at a smaller scale, finds
                             the same
    refuted in our setting   such a suite finds something else
    inconclusive             a suite measured it, and its intervals allow both
    not tested here          nothing here tests it

Its `basis` is mathematics, the paper's setting, substitute (other data or another model) or reduced
(a smaller scale). `paper` and `here` say both settings. `claim` are fragments of the sentences of
its suite's claims that it stands on: all of the suite if it names none. Those with a fragment of
`against` contradict it where they hold. What is `beyond` a paper is no claim of it, and is not
counted as one.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.making import results
from fedmuon.analysis.report.verdicts import (
    HOLDS,
    INCONCLUSIVE,
    MEANINGS,
    REFUTED,
    UNTESTED,
)
from fedmuon.experiments.suites import contents

FOLDER = Path(__file__).resolve().parent.parent / "papers"
Claim = Mapping[str, Any]
Kept = Mapping[str, Any]
HOLDS_IN_OURS, REFUTED_IN_OURS = f"{HOLDS} in our setting", f"{REFUTED} in our setting"
OF_PAPERS = {  # each with its meaning
    HOLDS: "It is mathematics, and a test or a suite shows it. Or a suite shows it with the "
    "paper's own data, model and scale.",
    REFUTED: "The same, and the result contradicts the claim.",
    HOLDS_IN_OURS: "A suite with other data, another model or a smaller scale finds the same.",
    REFUTED_IN_OURS: "Such a suite finds something else. This says nothing against the paper's own "
    "result.",
    INCONCLUSIVE: "A suite measured it, and the intervals allow both.",
    UNTESTED: "No test and no suite at full scale covers it.",
}
MATHEMATICS, OWN, SUBSTITUTE, REDUCED = BASES = (
    "mathematics", "the paper's setting", "substitute", "reduced"
)  # fmt: skip
WORDS = (*OF_PAPERS,)


def legend(kind: str) -> str:
    """The verdicts with their meanings, as Markdown: those on claims of papers, or of suites."""
    meanings: Mapping[str, str] = {"papers": OF_PAPERS, "suites": MEANINGS}[kind]
    return table(("verdict", "meaning"), [[f"**{word}**", said] for word, said in meanings.items()])


def read(number: str) -> dict[str, Any]:
    """A paper's short name, title, identifier, suites and claims."""
    return tomllib.loads((FOLDER / f"{number}.toml").read_text(encoding="utf-8"))


def known() -> list[str]:
    """Their numbers."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def index() -> str:
    """The papers by their numbers."""
    rows = [[f"[{named(number)}]({number}.md)", titled(read(number))] for number in known()]
    return table(("short name", "paper"), rows)


def named(number: str) -> str:
    """A paper's short name with its number: `DP-Muon (000)`."""
    return f"{read(number)['name']} ({number})"


def titled(paper: Mapping[str, Any]) -> str:
    """A paper's title, with its identifier where its text names one."""
    named = f" ({paper['identifier']})" if "identifier" in paper else ""
    return f"{paper['title']}{named}"


def page(number: str) -> str:
    """A table of the paper's claims, what shows each, and what its suites come to, as Markdown."""
    held = read(number)
    words = [verdict(one) for one in held["claims"]]
    rows = [[one["where"], one["printed"], one["ours"], f"**{word}**", evidence(one)]
            for one, word in zip(held["claims"], words, strict=True)]  # fmt: skip
    beyond = [[one["printed"], one["ours"], shown(one)] for one in held.get("beyond", [])]
    every = [*held["claims"], *held.get("beyond", [])]
    proofs = [f"- {one.get('where', one['printed'])}: `tests/{one['test']}`"
              for one in every if "test" in one]  # fmt: skip
    return "\n\n".join(
        [
            f"**{titled(held)}**",
            f"{len(words)} claims of the paper: {counted(words)}. "
            "[What these words mean](/about/claims.md). A ± is half of a 95% interval.",
            "{.stacked}\n"
            + table(("where", "the paper", "our result", "verdict", "evidence"), rows),
            *(
                ["## Beyond the paper", table(("the paper has", "our result", "verdict"), beyond)]
                if beyond
                else []
            ),
            "## Tests that show these results",
            "\n".join(proofs),
            "## Suites",
            "The verdicts above are about the paper. A verdict below is about the sentence beside "
            "it, on the suite's own data, model and scale. A suite can hold where it shows that "
            "the paper is wrong.",
            *(suite(name) for name in held["suites"]),
        ]
    )


def verdict(claim: Claim, folder: Path = results.FOLDER) -> str:
    """One of `OF_PAPERS`: what the suite that is kept at full scale, or else a test, shows."""
    own, tested = claim["basis"] in (MATHEMATICS, OWN), "test" in claim
    if claim.get("refuted"):
        return REFUTED
    held = results.read(claim["suite"], folder) if "suite" in claim else None
    if held is None or held["scale"] != "full":
        return HOLDS if tested and own else UNTESTED
    word = together(judged(claim, held))
    if word == HOLDS or (tested and claim["basis"] == MATHEMATICS and word != REFUTED):
        return HOLDS if own else HOLDS_IN_OURS
    if word == REFUTED:
        return REFUTED if own else REFUTED_IN_OURS
    return INCONCLUSIVE


def together(words: Sequence[str]) -> str:
    """The verdict on several claims that stand for one: it holds if all hold."""
    order = (REFUTED, INCONCLUSIVE, UNTESTED)
    return next((one for one in order if one in words), HOLDS)


def evidence(claim: Claim) -> str:
    """What a claim's verdict rests on: both settings, the suite and the test."""
    said = {"paper": "paper", "here": "ours", "suite": "suite"}
    parts = [claim["basis"], *(f"{word}: {claim[key]}" for key, word in said.items()
                               if key in claim)]  # fmt: skip
    if against := claim.get("against"):
        sentences = [against] if isinstance(against, str) else against
        parts += [f"it contradicts the suite's claim “{one}”" for one in sentences]
    parts += ["a test"] * ("test" in claim)
    return "; ".join(parts)


def shown(claim: Claim, folder: Path = results.FOLDER) -> str:
    """The verdicts that are kept, or how to have them; and whether a test shows it."""
    parts = ["tested"] if "test" in claim else []
    if name := claim.get("suite"):
        parts.insert(0, verdicts(name, claim, results.read(name, folder)))
    return "; ".join([*parts, *(f"`{claim[key]}`" for key in ("command",) if key in claim)])


def verdicts(name: str, claim: Claim, kept: Kept | None) -> str:
    """Counts by verdict of the suite's claims that it stands on, or that are against it."""
    if kept is None:
        return f"no stored result; run `fedmuon suite {name}`"
    words = judged(claim, kept)
    said = counted(words) if len(words) > 1 else f"**{words[0]}**"
    return f"{said}{scale(kept)} (`{name}`)"


def counted(words: Iterable[str]) -> str:
    """`**12** hold, **1** refuted`, in the order of `WORDS`."""
    found = Counter(words)
    many = {one: one.replace(HOLDS, "hold") for one in WORDS}
    return ", ".join(f"**{found[one]}** {many[one] if found[one] > 1 else one}"
                     for one in sorted(found, key=WORDS.index))  # fmt: skip


def scale(kept: Kept) -> str:
    """What a verdict of a smaller scale says of itself; nothing at full scale."""
    return "" if kept["scale"] == "full" else f" at {kept['scale']} scale"


def judged(claim: Claim, kept: Kept) -> list[str]:
    """What the kept claims that it stands on come to for it; those against it are turned round."""
    turned = {HOLDS: REFUTED, REFUTED: HOLDS}
    against = matching(claim.get("against", []), kept)
    own = claim.get("claim", [] if against else [""])
    return [*(one["verdict"] for one in matching(own, kept)),
            *(turned.get(one["verdict"], one["verdict"]) for one in against)]  # fmt: skip


def matching(fragments: str | Sequence[str], kept: Kept) -> list[Claim]:
    """The kept claims whose sentence has one of the fragments, each of which some has."""
    named = [fragments] if isinstance(fragments, str) else fragments
    if lost := [one for one in named if not any(one in held["claim"] for held in kept["claims"])]:
        raise ValueError(f"no claim that is kept says {lost[0]!r}")
    return [held for held in kept["claims"] if any(one in held["claim"] for one in named)]


def suite(name: str) -> str:
    """A suite's title and note, and its verdicts or how to have them."""
    about, kept = contents.read(name), results.read(name)
    parts = [f"### `{name}`: {about['title']}", str(about.get("note", ""))]
    if kept is None:
        parts.append(f"There is no stored result. Run `fedmuon suite {name}`.")
    else:
        rows = [[one["claim"], one["verdict"], one["detail"]] for one in kept["claims"]]
        parts += [table(("claim of the suite", "verdict", "details"), rows), circumstances(kept)]
    return "\n\n".join(part for part in parts if part)


def circumstances(kept: Kept) -> str:
    """What was run where, and how to run it again."""
    machine = ", ".join(f"{name} {one}" for name, one in kept.get("machine", {}).items())
    on = f" on {kept['data']}" if kept["data"] else ""
    commit = f", commit {kept['commit'][:8]}" if kept.get("commit") else ""
    seeds = f", seeds {kept['seeds']}" if kept.get("seeds") else ""
    used = next((one["paper"] for number in known() for one in read(number)["claims"]
                 if one.get("suite") == kept.get("suite") and "paper" in one
                 and not one["paper"].startswith("no experiment")), "")  # fmt: skip
    return (
        f"{str(kept['scale']).capitalize()} scale of this suite{on}{seeds}"
        + f"; the paper used {used.rstrip('.')}" * bool(used)
        + f". The whole suite took {kept['seconds']:.0f} seconds ({machine}{commit}). "
        f"Reproduce it with `{kept['again']}`."
    )


def gallery() -> str:
    """All suites that are shipped: which papers they are of, and what they came to."""
    of = {number: read(number)["suites"] for number in known()}
    rows = []
    for name in sorted(contents.shipped()):
        papers = [f"[{read(number)['name']}]({number}.md)" for number in of if name in of[number]]
        seen = verdicts(name, {}, results.read(name)).split(" (`")[0]
        rows.append([f"`{name}`", contents.read(name)["title"], ", ".join(papers) or "ours", seen])
    return table(("suite", "what it is", "paper", "verdicts"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(text: str) -> str:
    """Text that stays within its cell."""
    return " ".join(text.replace("|", "\\|").split())
