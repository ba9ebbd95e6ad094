"""Pages of papers: each lists the claims of a paper, our results, and the evidence.

A claim of a paper has one of these verdicts:

    derived                  The claim is mathematical. We followed or gave the proof with explicit
                             constants, or an exact computation gives what the paper states.
    not contradicted in examples
                             The claim is mathematical. Runs or random draws could have
                             contradicted it and did not. They cannot prove it.
    holds                    A suite confirms the claim in the paper's own setting (same data, model
                             and scale).
    refuted                  The claim is mathematical, and a proof, a computation or an example
                             contradicts it. Or a suite contradicts it in the paper's own setting.
    holds in our setting     A suite confirms the claim with other data, another model or a smaller
                             scale.
    refuted in our setting   A suite contradicts the claim with other data, another model or a
                             smaller scale.
    inconclusive             A suite measured the effect, but its intervals or its setting do not
                             decide the claim.
    not tested here          No test and no suite covers the claim.

A claim in a paper's TOML file has these keys:

- `basis` is "mathematics", "the paper's setting", "substitute" (other data or another model) or
  "reduced" (a smaller scale).
- `by` says what shows a mathematical claim: "proof" (written in the file that `proof` names, or in
  `ours`), "computation" (exact, or an identity) or "examples" (runs or random draws). Each
  mathematical claim with a test or a suite needs this key, unless it is refuted.
- `paper` and `here` describe the two settings.
- `claim` lists fragments of sentences. The verdict uses each claim of the suite whose sentence
  contains one of the fragments. Without this key, the verdict uses all claims of the suite.
- `stored` is the name of the stored result if the suite has one for other data, such as
  "A3-mnist5k". Default: the name of the suite.
- `against` lists fragments, too. If a claim of the suite contains one of these fragments and holds,
  it contradicts the claim of the paper.
- `undecided` says why the suite's setting can neither confirm nor refute the claim. The verdict is
  then inconclusive.

A claim does not hold because a test passes, if the suite of the same claim is inconclusive. Entries
in `beyond` are results that the paper does not claim. They are not counted as claims.

The table `out_of_reach` lists claims that no file here can show, such as results of very large
networks. Its key `why` says once per paper why they cannot be shown. An entry in its list `claims`
has the keys `where`, `printed` and `paper`, and perhaps `note`. These claims have no verdict and
are counted apart.
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
DERIVED, IN_EXAMPLES = "derived", "not contradicted in examples"
OF_PAPERS = {  # verdict -> meaning
    DERIVED: (
        "The claim is mathematical. We followed or gave the proof with explicit constants, or an "
        "exact computation gives what the paper states."
    ),
    IN_EXAMPLES: (
        "The claim is mathematical. Runs or random draws could have contradicted it and did not. "
        "They cannot prove it."
    ),
    HOLDS: "A suite confirms the claim with the paper's own data, model and scale.",
    REFUTED: (
        "The claim is mathematical, and a proof, a computation or an example contradicts it. Or a "
        "suite contradicts the claim with the paper's own data, model and scale."
    ),
    HOLDS_IN_OURS: "A suite confirms the claim with other data, another model or a smaller scale.",
    REFUTED_IN_OURS: (
        "A suite contradicts the claim with other data, another model or a smaller scale. This "
        "does not refute the paper's own result."
    ),
    INCONCLUSIVE: (
        "A suite measured the effect, but its intervals or its setting do not decide the claim."
    ),
    UNTESTED: "No test and no suite at full scale covers the claim.",
}
MATHEMATICS, OWN, SUBSTITUTE, REDUCED = BASES = (
    "mathematics", "the paper's setting", "substitute", "reduced"
)  # fmt: skip
PROOF, COMPUTATION, EXAMPLES = "proof", "computation", "examples"
SHOWN_BY = {PROOF: DERIVED, COMPUTATION: DERIVED, EXAMPLES: IN_EXAMPLES}  # -> verdict
SETTINGS = {SUBSTITUTE: "other data or another model", REDUCED: "a smaller scale"}
WORDS = (*OF_PAPERS,)
FAMILY = 0.05  # probability at which a true claim of a paper may be refuted


def legend(kind: str) -> str:
    """Return a table that explains the verdicts.

    `kind` says whether they are verdicts on papers or on suites.
    """
    meanings: Mapping[str, str] = {"papers": OF_PAPERS, "suites": MEANINGS}[kind]
    return table(("verdict", "meaning"), [[f"**{word}**", said] for word, said in meanings.items()])


def read(number: str) -> dict[str, Any]:
    """Return the content of a paper's file.

    It has a short name, title, identifier, suites and claims.
    """
    return tomllib.loads((FOLDER / f"{number}.toml").read_text(encoding="utf-8"))


def known() -> list[str]:
    """Return the numbers of all papers."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def index() -> str:
    """Return a table of the papers, sorted by number."""
    rows = [[f"[{named(number)}]({number}.md)", titled(read(number))] for number in known()]
    return table(("short name", "paper"), rows)


def named(number: str) -> str:
    """Return the short name of a paper followed by its number, such as `DP-Muon (000)`."""
    return f"{read(number)['name']} ({number})"


def titled(paper: Mapping[str, Any]) -> str:
    """Return a paper's title, with its identifier if its file contains one."""
    named = f" ({paper['identifier']})" if "identifier" in paper else ""
    return f"{paper['title']}{named}"


def page(number: str) -> str:
    """Return a paper's page as Markdown.

    It contains the claims with evidence, and the results of the paper's suites.
    """
    held = read(number)
    words = [verdict(one) for one in held["claims"]]
    rows = [[one["where"], one["printed"], one["ours"], f"**{word}**", evidence(one)]
            for one, word in zip(held["claims"], words, strict=True)]  # fmt: skip
    beyond = [[one["printed"], one["ours"], shown(one)] for one in held.get("beyond", [])]
    others = dict.fromkeys(one["stored"] for one in held["claims"] if "stored" in one)
    every = [*held["claims"], *held.get("beyond", [])]
    proofs = [f"- {one.get('where', one['printed'])}: `tests/{one['test']}`"
              for one in every if "test" in one]  # fmt: skip
    return "\n\n".join(
        [
            f"**{titled(held)}**",
            f"{len(words)} claims of the paper: {counted(words)}.{apart(len(outside(held)))} "
            "[What these words mean](/about/claims.md). A ± is half of a 95% interval.",
            "{.stacked}\n"
            + table(("where", "the paper", "our result", "verdict", "evidence"), rows),
            *out_of_reach(held),
            *(
                ["## Beyond the paper", table(("the paper has", "our result", "verdict"), beyond)]
                if beyond
                else []
            ),
            "## Tests that show these results",
            "\n".join(proofs),
            "## Suites",
            "The verdicts above are about claims of the paper. The verdicts below are about "
            "claims of our suites, with the suite's own data, model and scale. If a suite shows "
            "that the paper is wrong, the verdict on the suite's own claim can be `holds`.",
            *(suite(name) for name in [*held["suites"], *others]),
        ]
    )


def outside(paper: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a paper that no file here can show."""
    return paper.get("out_of_reach", {}).get("claims", [])


def apart(number: int) -> str:
    """Return a sentence that counts the claims out of reach, or "" if there are none."""
    return f" **{number}** more cannot be shown here." if number else ""


def out_of_reach(paper: Mapping[str, Any]) -> list[str]:
    """Return the section with the claims that no file here can show, and the reason."""
    rows = [[one["where"], one["printed"], one["paper"], one.get("note", "")]
            for one in outside(paper)]  # fmt: skip
    if not rows:
        return []
    head = ("where", "the paper", "the paper's setting", "note")
    why = paper["out_of_reach"]["why"]
    return ["## What no file here can show", why, "{.stacked}\n" + table(head, rows)]


def verdict(claim: Claim, folder: Path = results.FOLDER) -> str:
    """Return the verdict on a claim of a paper. The verdict is one of `OF_PAPERS`.

    Raises:
        ValueError: If a mathematical claim holds, and no key `by` says what shows it.
    """
    if claim.get("refuted"):
        return REFUTED
    word = of_evidence(claim, folder)
    if claim["basis"] == MATHEMATICS and word == HOLDS:
        if claim.get("by") not in SHOWN_BY:
            raise ValueError(
                f"the claim {claim.get('where', '')!r} needs `by`, one of {[*SHOWN_BY]}"
            )
        return SHOWN_BY[claim["by"]]
    ours = {HOLDS: HOLDS_IN_OURS, REFUTED: REFUTED_IN_OURS}
    return ours.get(word, word) if claim["basis"] in SETTINGS else word


def of_evidence(claim: Claim, folder: Path) -> str:
    """Return what suite and test say about a claim. If there is a suite's result, it decides."""
    held = stored(claim, folder)
    if held is None or held["scale"] != "full":
        own = claim["basis"] in (MATHEMATICS, OWN)
        return HOLDS if own and "test" in claim else UNTESTED
    if "undecided" in claim:
        return INCONCLUSIVE
    word = together(corrected(claim, held))
    return INCONCLUSIVE if word == UNTESTED else word


def corrected(claim: Claim, kept: Kept) -> list[str]:
    """Return the verdicts of `judged`, after a correction for their number k.

    One of k verdicts may be `refuted` by chance, with a probability of up to k/20. So a claim of a
    paper that k claims of a suite decide is refuted only if k times a p-value is at most 1/20
    (Bonferroni). A refuted claim without this evidence counts as inconclusive.
    """
    words = judged(claim, kept)
    own, against = evident(claim, kept)
    chances = [*(chance(one, REFUTED) for one in own), *(chance(one, HOLDS) for one in against)]
    sure = [len(words) == 1 or len(words) * p <= FAMILY for p in chances]
    return [INCONCLUSIVE if word == REFUTED and not one else word
            for word, one in zip(words, sure, strict=True)]  # fmt: skip


def chance(stored: Claim, word: str) -> float:
    """Return the p-value of a verdict on a stored claim.

    A result of an earlier version contains no p-values. Then the p-value counts as 1, or as 0 if
    the effect has no uncertainty.
    """
    if "p" in stored:
        return stored["p"][word]
    effect = stored.get("effect", {})
    return float(effect.get("value") is None or effect["low"] != effect["high"])


def stored(claim: Claim, folder: Path) -> Kept | None:
    """Return the stored result of the suite that is evidence for a claim, or None."""
    return results.read(claim.get("stored", claim["suite"]), folder) if "suite" in claim else None


def together(words: Sequence[str]) -> str:
    """Combine the verdicts on several claims into one.

    The result is `holds` only if all claims hold.
    """
    order = (REFUTED, INCONCLUSIVE, UNTESTED)
    return next((one for one in order if one in words), HOLDS)


def evidence(claim: Claim, folder: Path = results.FOLDER) -> str:
    """Return the evidence for a claim's verdict as text: both settings, the suite and the test."""
    held = stored(claim, folder)
    said = {"paper": "paper", "here": "ours", "suite": "suite"}
    parts = [SETTINGS.get(claim["basis"], claim["basis"])]
    if by := claim.get("by"):
        parts.append(f"{by} in `{claim['proof']}`" if "proof" in claim else by)
    parts += [f"{word}: {claim[key]}" for key, word in said.items() if key in claim]
    if against := claim.get("against"):
        sentences = [against] if isinstance(against, str) else against
        parts += [f"contradicted by the suite's claim “{one}”" for one in sentences]
    parts += ["a test"] * ("test" in claim)
    if held and REFUTED in (words := judged(claim, held)) and REFUTED not in corrected(claim, held):
        parts.append(f"{words.count(REFUTED)} of {len(words)} claims of the suite refuted, but not "
                     f"after a correction for {len(words)} claims")  # fmt: skip
    if why := claim.get("undecided"):
        parts.append(f"not decided: {why}")
    return "; ".join(parts)


def shown(claim: Claim, folder: Path = results.FOLDER) -> str:
    """Return the evidence for a claim as text: the stored verdicts and whether there is a test.

    If no verdict is stored, the text contains the command that computes it.
    """
    parts = ["tested"] if "test" in claim else []
    if name := claim.get("suite"):
        parts.insert(0, verdicts(name, claim, results.read(name, folder)))
    return "; ".join([*parts, *(f"`{claim[key]}`" for key in ("command",) if key in claim)])


def verdicts(name: str, claim: Claim, kept: Kept | None) -> str:
    """Count the verdicts on the claims of the suite that are evidence for a claim of the paper."""
    if kept is None:
        return f"no stored result; run `fedmuon suite {name}`"
    if why := claim.get("undecided"):
        return f"**{INCONCLUSIVE}**: {why}{scale(kept)} (`{name}`)"
    words = judged(claim, kept)
    said = counted(words) if len(words) > 1 else f"**{words[0]}**"
    return f"{said}{scale(kept)} (`{name}`)"


def counted(words: Iterable[str]) -> str:
    """Count the verdicts, and return a text such as `**12** hold, **1** refuted`."""
    found = Counter(words)
    many = {one: one.replace(HOLDS, "hold") for one in WORDS}
    return ", ".join(f"**{found[one]}** {many[one] if found[one] > 1 else one}"
                     for one in sorted(found, key=WORDS.index))  # fmt: skip


def scale(kept: Kept) -> str:
    """Return a note on the scale of a result. At full scale, the note is ""."""
    return "" if kept["scale"] == "full" else f" at {kept['scale']} scale"


def judged(claim: Claim, kept: Kept) -> list[str]:
    """Return the stored verdicts that are evidence for a claim of a paper.

    The verdicts on claims in `against` are reversed, because these claims contradict the paper.
    """
    turned = {HOLDS: REFUTED, REFUTED: HOLDS}
    own, against = evident(claim, kept)
    return [*(one["verdict"] for one in own),
            *(turned.get(one["verdict"], one["verdict"]) for one in against)]  # fmt: skip


def evident(claim: Claim, kept: Kept) -> tuple[list[Claim], list[Claim]]:
    """Return the stored claims that are evidence for a claim of a paper, and those against it."""
    against = matching(claim.get("against", []), kept)
    own = claim.get("claim", [] if against else [""])
    return matching(own, kept), against


def matching(fragments: str | Sequence[str], kept: Kept) -> list[Claim]:
    """Return the stored claims whose sentence contains at least one of the fragments.

    Raises:
        ValueError: If no stored claim contains one of the fragments.
    """
    named = [fragments] if isinstance(fragments, str) else fragments
    if lost := [one for one in named if not any(one in held["claim"] for held in kept["claims"])]:
        raise ValueError(f"no stored claim contains {lost[0]!r}")
    return [held for held in kept["claims"] if any(one in held["claim"] for one in named)]


def suite(name: str) -> str:
    """Return a suite's title, note and verdicts.

    If the verdicts are not stored, the command that computes them is shown.
    """
    kept = results.read(name)
    about = contents.read(kept["suite"] if kept else name)
    parts = [f"### `{name}`: {about['title']}", str(about.get("note", ""))]
    if kept is None:
        parts.append(f"There is no stored result. Run `fedmuon suite {name}`.")
    else:
        rows = [[one["claim"], one["verdict"], one["detail"]] for one in kept["claims"]]
        parts += [table(("claim of the suite", "verdict", "details"), rows), circumstances(kept)]
    return "\n\n".join(part for part in parts if part)


def circumstances(kept: Kept) -> str:
    """Return a text about the circumstances of a result.

    The text names the scale, the data, the machine, the time, and the command that repeats the
    suite.
    """
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
    """Return a table of all shipped suites with their papers and verdicts."""
    of = {number: read(number)["suites"] for number in known()}
    rows = []
    for name in sorted(contents.shipped()):
        papers = [f"[{read(number)['name']}]({number}.md)" for number in of if name in of[number]]
        seen = verdicts(name, {}, results.read(name)).split(" (`")[0]
        rows.append([f"`{name}`", contents.read(name)["title"], ", ".join(papers) or "ours", seen])
    return table(("suite", "what it is", "paper", "verdicts"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(text: str) -> str:
    """Escape text so that it stays within its table cell."""
    return " ".join(text.replace("|", "\\|").split())
