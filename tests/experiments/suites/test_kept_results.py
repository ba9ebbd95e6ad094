"""`make results`, and the pages that are made of what it keeps."""

import json
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import quick
from small_suites import STUDY

from docs.making import kept, papers, regenerate, results
from fedmuon.analysis.report.findings import Picture
from fedmuon.analysis.report.verdicts import (
    HOLDS,
    INCONCLUSIVE,
    MEANINGS,
    REFUTED,
    UNTESTED,
)
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli.show import Progress
from fedmuon.experiments.studies.find import find
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import Work, execute, here
from fedmuon.runs import provenance

GAIN = {"name": "gain", "value": 2.0, "low": 1.5, "high": 2.5, "at": "here"}
# What the pages of the papers ask of this suite, in one sentence.
ASKED = [one["claim"] for number in papers.known() for one in papers.read(number)["claims"]
         if one.get("suite") == "dp-bias" and "claim" in one]  # fmt: skip
CLAIM = {"claim": f"All is well: {'; '.join(ASKED)}.", "verdict": HOLDS,
         "detail": "by far", "why": "", "rule": "> 1",
         "p": {HOLDS: 0.001, REFUTED: 0.001},
         "command": "", "places": 2, "held": 2, "effect": GAIN}  # fmt: skip
HELD = {"suite": "dp-bias", "title": "Bias", "data": "", "scale": "full", "seconds": 3.0,
        "again": "fedmuon suite dp-bias --scale full", "machine": {"cores": 2}}  # fmt: skip


def held(folder: Path, *words: str, **more: Any) -> dict[str, Any]:
    """Keep a result of dp-bias with claims of these verdicts."""
    content = HELD | {"claims": [CLAIM | {"verdict": one} for one in words]} | more
    (folder / "dp-bias.json").write_text(json.dumps(content))
    return content


@pytest.fixture(autouse=True, scope="module")
def _papers_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(papers, "read", cache(papers.read))
        yield


@pytest.fixture
def ranks(tmp_path: Path) -> Work:
    (tmp_path / "ranks.toml").write_text(STUDY, encoding="utf-8")
    return find(str(tmp_path / "ranks.toml"), None, "full", {})


def test_a_stopped_suite_goes_on_and_is_kept(
    ranks: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "runs", tmp_path / "kept"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Progress, "on_round_end", regenerate.stop)
        regenerate.regenerate(ranks, *places)
    (cell,) = (regenerate.place_of("ranks", places[0]) / "cells").iterdir()
    before = cell.stat().st_mtime_ns
    assert regenerate.state("ranks", *places) == "1 cells computed"
    file = regenerate.regenerate(ranks, *places)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert cell.stat().st_mtime_ns == before and len(found["claims"]) == 7
    assert found["sources"] == regenerate.state_of_sources() and "commit" in found
    assert 0 < (places[1] / found["picture"]["file"]).stat().st_size <= results.LARGEST
    assert regenerate.state("ranks", *places) == "kept"
    assert regenerate.cost("ranks", places[1]) == found["seconds"]
    file.write_text(json.dumps(found | {"scale": "small"}))
    assert regenerate.state("ranks", *places) == "kept at scale small"
    file.write_text(json.dumps(found | {"sources": "others"}))
    assert regenerate.state("ranks", *places).startswith("kept of other sources, ")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("processes", quick([True, False], [False]))
def test_cells_of_several_suites_are_computed_side_by_side(
    processes: bool, ranks: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each cell once, the longest first, and the tables are those of one process."""
    if not processes:  # which take seconds to start
        monkeypatch.setattr(regenerate, "Workers", lambda jobs: nullcontext(here))
    runs, alone, kept_in = tmp_path / "runs", tmp_path / "alone", tmp_path / "kept"
    (tmp_path / "more.toml").write_text(STUDY.replace("seeds = 2", "seeds = 3"), encoding="utf-8")
    works = {"ranks": ranks, "more": find(str(tmp_path / "more.toml"), None, "full", {})}
    monkeypatch.setattr(
        regenerate, "work_of", lambda name: works.get(name) or find(name, None, "small", {})
    )
    seconds = {"ranks": 9.0}
    monkeypatch.setattr(regenerate, "cost", lambda name, *_: seconds.get(name, float("inf")))
    regenerate.together(("disk-glue", *works), 2, runs, kept_in)  # its folder is not here
    assert re.search(r"^seconds (\d+)/\1 ", capsys.readouterr().out, re.MULTILINE)
    for name, work in works.items():
        folder = regenerate.place_of(name, runs)
        files = {one: (folder / "cells" / f"{one.name}.json") for one in work.cells}
        before = {file: file.stat().st_mtime_ns for file in files.values()}
        regenerate.regenerate(work, runs, kept_in)
        assert {file: file.stat().st_mtime_ns for file in files.values()} == before
        execute(work, alone / name)
        for table in folder.glob("*.csv"):
            assert table.read_bytes() == (alone / name / table.name).read_bytes()


def test_sources_are_those_that_compute(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return regenerate.state_of_sources.__wrapped__(tmp_path)

    first = digest("fedmuon/a.py", "1")
    assert digest("experiments/studies/x_findings.py", "1") == first
    assert digest("analysis/report/write.py", "1") == first
    second = digest("fedmuon/a.py", "2")
    assert second != first
    assert digest("experiments/suites/x.toml", "") not in (first, second)


def test_the_commit_is_git_s_or_nobody_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert regenerate.commit(tmp_path) is None
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, text=True).strip()
        assert provenance.commit() == head
        assert re.fullmatch("[0-9a-f]{40}", regenerate.commit() or "")  # of the sources
    monkeypatch.setenv("PATH", "")
    assert regenerate.commit() is None


def test_data_are_those_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "A1", "cnn", "A4", "lm", "dp-bias"
    for there, images in ((Path("x"), "fashion-mnist"), (None, "mnist5k")):
        monkeypatch.setattr(regenerate.readers, "found_folder", lambda _, there=there: there)
        assert [*map(regenerate.data_of, names)] == [images, images, "mnist5k", "pydoc", None]


def test_suites_run_cheapest_first_and_a_refused_one_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(work: str) -> str:
        asked.append(work)
        if work == "rank":
            raise InputError("rank has no data")
        return "kept"

    seconds = {"rank": 5.0, "dp-bias": 9.0}
    monkeypatch.setattr(regenerate, "cost", lambda name, *_: seconds.get(name, float("inf")))
    monkeypatch.setattr(regenerate, "work_of", lambda name: name)
    monkeypatch.setattr(regenerate, "regenerate", run)
    monkeypatch.setattr(regenerate, "state", lambda name, *_: "kept" * (name == "A1"))
    monkeypatch.setattr(regenerate, "RUNS", tmp_path)
    words = ["--only", "A1", "A2", "dp-bias", "rank"]
    assert regenerate.main(words) == 1 and asked == ["rank", "dp-bias", "A2"]
    said = capsys.readouterr()
    assert said.err == "rank has no data\n"
    assert said.out.index("9 s") < said.out.index("A1  ") and "unknown" in said.out
    assert regenerate.main(["--list", *words]) == 0 and len(asked) == 3
    assert regenerate.main(["--again", "--only", "A1"]) == 0 and asked[-1] == "A1"


def test_a_budget_stops_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timers = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "setitimer", lambda _, seconds: timers.append(seconds))
    monkeypatch.setattr(regenerate, "one_by_one", regenerate.stop)
    assert regenerate.main(["--only", "dp-bias", "--budget", "60"]) == 130
    assert timers == [60.0, 0] and "same command again to continue" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "one"), [
    ([HOLDS, HOLDS], HOLDS), ([HOLDS, UNTESTED], UNTESTED),
    ([UNTESTED, INCONCLUSIVE, HOLDS], INCONCLUSIVE), ([INCONCLUSIVE, HOLDS, REFUTED], REFUTED),
])  # fmt: skip
def test_several_claims_hold_if_all_do(words: list[str], one: str) -> None:
    assert papers.together(words) == one


def test_a_verdict_on_a_paper_names_what_it_stands_on(tmp_path: Path) -> None:
    """Only mathematics and the paper's own setting confirm or refute."""
    claim = {"suite": "dp-bias"}
    rows = [
        (HOLDS, papers.DERIVED, papers.HOLDS_IN_OURS), (REFUTED, REFUTED, papers.REFUTED_IN_OURS),
        (INCONCLUSIVE, INCONCLUSIVE, INCONCLUSIVE), (UNTESTED, INCONCLUSIVE, INCONCLUSIVE),
    ]  # fmt: skip
    for word, by_paper, by_us in rows:
        held(tmp_path, word)
        for basis in papers.BASES:
            wanted = by_paper if basis in (papers.MATHEMATICS, papers.OWN) else by_us
            wanted = word if basis == papers.OWN and word == HOLDS else wanted
            asked = claim | {"basis": basis, "by": papers.PROOF}
            assert papers.verdict(asked, tmp_path) == wanted
    held(tmp_path, INCONCLUSIVE)  # a test that passes then decides nothing
    tested = claim | {"test": "a::b", "by": papers.PROOF}
    for basis in papers.BASES:
        assert papers.verdict(tested | {"basis": basis}, tmp_path) == papers.INCONCLUSIVE
    shown = {"test": "a::b", "basis": papers.MATHEMATICS, "where": "Lemma 1"}
    for by, word in ((papers.PROOF, papers.DERIVED), (papers.COMPUTATION, papers.DERIVED),
                     (papers.EXAMPLES, papers.IN_EXAMPLES)):  # fmt: skip
        assert papers.verdict(shown | {"by": by}, tmp_path) == word
    for unnamed in (shown, shown | {"by": "runs"}):
        with pytest.raises(ValueError, match="'Lemma 1' needs `by`"):
            papers.verdict(unnamed, tmp_path)
    assert papers.verdict(shown | {"refuted": True}, tmp_path) == papers.REFUTED
    assert papers.verdict({"basis": papers.OWN}, tmp_path) == papers.UNTESTED


def test_one_of_many_refuted_claims_needs_a_small_p_value(tmp_path: Path) -> None:
    """Nesterov Muon, Figure 1c: p-values of 0.020 and 0.043 among four claims refute nothing."""
    paper = {"suite": "dp-bias", "basis": papers.SUBSTITUTE}

    def decided(*chances: float, against: bool = False, **effect: Any) -> str:
        words = [HOLDS if against else REFUTED] * len(chances)
        content = held(tmp_path, *words)
        for one, p in zip(content["claims"], chances, strict=True):
            one["p"] = {HOLDS: p, REFUTED: p}
            one["effect"] = GAIN | effect
            if p < 0:  # of an earlier version
                del one["p"]
        (tmp_path / "dp-bias.json").write_text(json.dumps(content))
        return papers.verdict(paper | ({"against": "All is well"} if against else {}), tmp_path)

    assert decided(0.020, 0.043, 0.9, 0.9) == INCONCLUSIVE
    asked = papers.evidence(paper, tmp_path)
    assert asked.endswith(
        "4 of 4 claims of the suite refuted, but not after a correction for 4 claims"
    )
    assert decided(0.012, 0.043, 0.9, 0.9) == papers.REFUTED_IN_OURS
    assert "correction" not in papers.evidence(paper, tmp_path)
    assert decided(0.020) == papers.REFUTED_IN_OURS  # alone, it needs no correction
    assert decided(0.020, 0.043, 0.9, 0.9, against=True) == INCONCLUSIVE
    assert decided(0.012, 0.9, 0.9, 0.9, against=True) == papers.REFUTED_IN_OURS
    assert decided(-1, -1) == INCONCLUSIVE  # without p-values, and with an interval
    assert decided(-1, -1, low=2.0, high=2.0) == papers.REFUTED_IN_OURS  # counted, not sampled


def test_a_setting_that_cannot_decide_neither_confirms_nor_refutes(tmp_path: Path) -> None:
    claim = {"suite": "dp-bias", "basis": papers.SUBSTITUTE}
    for word in (HOLDS, REFUTED, INCONCLUSIVE):
        held(tmp_path, word)
        short = claim | {"undecided": "too few steps"}
        assert papers.verdict(short, tmp_path) == papers.INCONCLUSIVE
        assert (papers.verdict(claim, tmp_path) == papers.INCONCLUSIVE) == (word == INCONCLUSIVE)
    assert papers.evidence(short).endswith("not decided: too few steps")
    assert "not decided" not in papers.evidence(claim)


def test_claims_out_of_reach_are_counted_apart_with_one_reason() -> None:
    claims = [{"where": "Table 9", "printed": "a large loss", "paper": "a large network"}] * 2
    far = {"out_of_reach": {"why": "It needs 8 GPUs.", "claims": claims}}
    title, why, rows = papers.out_of_reach(far)
    assert title.startswith("## ") and why == "It needs 8 GPUs." and rows.count("Table 9") == 2
    assert papers.out_of_reach({}) == [] and papers.apart(0) == "" and "**2**" in papers.apart(2)
    for number in papers.known():
        paper = papers.read(number)
        far = papers.outside(paper)
        assert f".{papers.apart(len(far))} [What these words mean]" in papers.page(number)
        assert all(set(one) - {"note"} == {"where", "printed", "paper"} for one in far)
        judged = {one["where"] for one in paper["claims"]}
        assert not judged & {one["where"] for one in far}


def test_a_small_scale_is_never_shown_as_the_full_one(tmp_path: Path) -> None:
    claim = {"suite": "dp-bias", "basis": papers.OWN}
    assert papers.verdict(claim, tmp_path) == papers.UNTESTED
    full = held(tmp_path, HOLDS, REFUTED)
    assert papers.verdict(claim, tmp_path) == papers.REFUTED and [*kept.all_words({"a": full})]
    assert "scale" not in papers.verdicts("dp-bias", {}, full)
    small = held(tmp_path, HOLDS, REFUTED, scale="small")
    assert papers.verdict(claim, tmp_path) == papers.UNTESTED
    assert not [*kept.all_words({"a": small})]
    assert (
        papers.verdicts("dp-bias", {}, small)
        == "**1** holds, **1** refuted at small scale (`dp-bias`)"
    )
    assert "**refuted** at small scale" in kept.claims(tmp_path)
    assert "**1** refuted at small scale." in kept.pictures(tmp_path)


def test_results_of_earlier_versions_have_the_present_verdicts(tmp_path: Path) -> None:
    former = "holds", "fails", "undecided", "not testable at this scale"
    held(tmp_path, *former)
    found = results.read("dp-bias", tmp_path) or {}
    now = [HOLDS, REFUTED, INCONCLUSIVE, UNTESTED]
    assert [one["verdict"] for one in found["claims"]] == now == [*MEANINGS]
    legend = papers.legend("suites"), papers.legend("papers")
    assert all(f"| **{word}** | " in text for text in legend for word in now)


def test_every_claim_is_a_row_and_is_counted(tmp_path: Path) -> None:
    held(tmp_path, HOLDS, INCONCLUSIVE)
    of_papers, of_suites = kept.claims(tmp_path).split("## Claims of our suites")
    every = [one for number in papers.known() for one in papers.read(number)["claims"]]
    apart = sum(len(papers.outside(papers.read(number))) for number in papers.known())
    *counts, more = re.findall(r"\*\*(\d+)\*\* ", of_papers.split("\n")[0])
    assert sum(map(int, counts)) == len(every) == of_papers.count("\n| [")
    assert int(more) == apart > 0
    assert "**1** holds, **1** inconclusive, of 1 suites." in of_suites
    assert "| gain, here: 2 (1.5 to 2.5); 2 of 2 | > 1 |" in of_suites


def test_what_was_not_seen_says_why() -> None:
    nothing = {"name": "", "value": None, "low": None, "high": None, "at": ""}
    assert kept.effect(CLAIM | {"effect": nothing}) == "by far"
    point = GAIN | {"low": 2.0, "high": 2.0}
    assert kept.effect(CLAIM | {"effect": point, "places": 1}) == "gain: 2"


def test_a_picture_is_small_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {False: 9, True: 3}
    kinds = {"svg": lambda of: b"x" * of, "png": lambda of: b"y" * (of - 1)}
    monkeypatch.setattr(results, "KINDS", kinds)
    one = Picture("p", lambda narrow: sizes[narrow], "A title", "A caption")
    for largest, name, size in ((9, "s.svg", 9), (8, "s.png", 8), (3, "s.svg", 3), (2, "s.png", 2)):
        drawn = results.draw([one], tmp_path / "s", largest)
        assert drawn == {"file": name, "title": "A title", "caption": "A caption"}
        assert [(tmp_path / name).stat().st_size, len([*tmp_path.iterdir()])] == [size, 1]
    assert results.draw([one], tmp_path / "s", 1) is None and not [*tmp_path.iterdir()]


def test_what_is_kept_is_small_and_says_where_it_is_from() -> None:
    files = {file.name for file in results.FOLDER.iterdir()}
    for name, one in kept.kept().items():
        assert {"scale", "data", "again", "machine", "versions", "seconds"} <= set(one), name
        files -= {f"{name}.json", (one.get("picture") or {}).get("file")}
    assert not files
    assert all(file.stat().st_size <= results.LARGEST for file in results.FOLDER.iterdir())


def test_headlines_are_of_suites_and_of_claims() -> None:
    asked = tomllib.loads(kept.HEADLINES.read_text(encoding="utf-8"))["headlines"]
    for name, fragments in (pair for one in asked for pair in one["claims"].items()):
        assert name in contents.shipped()
        if (found := results.read(name)) and found["claims"]:
            assert all(any(part in one["claim"] for one in found["claims"]) for part in fragments)
    assert "Run `fedmuon suite A1`." in kept.headline("Bounds", {"A1": []}, Path("nowhere"))


TUNED = [pytest.param(name, marks=pytest.mark.needs_fashion_mnist)
         if stored["data"] == "fashion-mnist" else name for name in sorted(contents.shipped())
         if (stored := results.read(name) or {}).get("kind") == "training"]  # fmt: skip


@pytest.mark.parametrize("name", TUNED)
def test_stored_verdicts_follow_the_rule_for_tuned_methods(name: str) -> None:
    stored = results.read(name)
    assert stored and results.ruled(stored) == stored


def test_the_rule_changes_a_stored_verdict_only_to_inconclusive() -> None:
    stored = results.read("context")  # not tuned
    assert stored
    wrong = {**stored, "claims": [dict(one, verdict=HOLDS, why="") for one in stored["claims"]]}
    assert {one["verdict"] for one in results.ruled(wrong)["claims"]} == {INCONCLUSIVE}


def test_claims_that_are_newer_than_a_stored_result_change_no_other_claim() -> None:
    """The suite's file has a claim where the result has one on the accounts of its runs."""
    stored = results.read("context")  # not tuned
    assert stored
    account = {**stored["claims"][-1], "claim": "Every run is certified.", "verdict": HOLDS}
    older = {**stored, "claims": [*stored["claims"][:-1], account]}
    assert results.ruled(older)["claims"][-1] == account
    last = {**stored["claims"][-1], "verdict": HOLDS}  # negative control
    older["claims"][-1] = last
    assert results.ruled(older)["claims"][-1] != last
