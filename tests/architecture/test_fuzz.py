"""The fuzzer's short form: cases once found, some hundred new ones, and what it would notice."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import quick
from fuzz.properties import command, environment
from replay import read

from tests.fuzz import base, campaign, outcome, reports, workers
from tests.fuzz.calls import Ending, judged, load, snapshot
from tests.fuzz.outcome import Case

CASES, SEED = 80, 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the templates; cases run in children, which alone are barred from networks."""
    folder = tmp_path_factory.mktemp("fuzz")
    load()
    workers.apart(lambda: base.make(folder))
    return folder


def ends(cases: list[Case], place: Path) -> dict[str, str]:
    """Case -> why it ended as none may, of those that did."""
    ended = workers.perform_all(cases, place, 1)
    return {
        str(case)[:300]: "never begun" if one is None else one.why
        for case, one in zip(cases, ended, strict=True)
        if one is None or one.end == "other"
    }  # fmt: skip


def saved(bare: bool) -> list[Case]:
    """The cases once found that need no templates, or those that do."""
    cases = [outcome.load(file) for file in outcome.saved()]
    found = [case for case in cases if (case["kind"] in ("configs", "files", "messages")) == bare]
    assert len(found) > (30 if bare else 20)
    return found


def test_what_was_found_stays_mended(tmp_path: Path) -> None:
    assert ends(saved(bare=True), tmp_path) == {}


@pytest.mark.slow
def test_what_was_found_in_folders_and_commands_stays_mended_and_new_cases_do(place: Path) -> None:
    assert ends(saved(bare=False), place) == {}
    kinds = list(campaign.KINDS)  # and new ones end as they may
    assert ends([campaign.draw(kinds, SEED, number) for number in range(CASES)], place) == {}


def test_a_seed_gives_the_same_cases() -> None:
    kinds = list(campaign.KINDS)
    first, again, another = (
        [campaign.draw(kinds, seed, number) for number in range(20)] for seed in (1, 1, 2)
    )
    assert str(first) == str(again) != str(another)


REFUSAL = "fedmuon: no: mend it\n"


@pytest.mark.parametrize(("ending", "wanted"), [
    (Ending(0, "fine", ""), "done"),
    (Ending(2, "", REFUSAL), "refused"),
    (Ending(2, "", "no\n"), "other"),
    (Ending(2, "", REFUSAL + "and more\n"), "other"),
    (Ending(1, "", REFUSAL), "other"),
    (Ending(0, "", "a warning\n"), "other"),
    (Ending(0, "\x1b[31m", ""), "other"),
    (Ending(None, "", "", "traceback: KeyError"), "other"),
    (Ending(None, "", "", "it hangs at x.py:1"), "other"),
])  # fmt: skip
def test_endings_are_told_apart(ending: Ending, wanted: str, tmp_path: Path) -> None:
    assert judged(ending, tmp_path, {}).end == wanted


def test_a_refusal_that_touched_a_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("1")
    before = snapshot(tmp_path)
    assert judged(Ending(2, "", REFUSAL), tmp_path, before).end == "refused"
    (tmp_path / "model").write_text("2")
    assert "model" in judged(Ending(2, "", REFUSAL), tmp_path, before).why


@pytest.mark.parametrize("act", quick(["crash", "exit", "memory"], ["crash"]))
def test_a_worker_that_dies_is_a_finding_and_the_rest_goes_on(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def perform(case: Any, place: Path) -> Any:
        if case["kind"] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if case["kind"] == "exit":
            os._exit(3)
        bytearray(8 << 30)  # refused by the limit

    monkeypatch.setattr(campaign, "perform", perform)
    first, last = workers.perform_all([{"kind": act}, {"kind": "exit"}], tmp_path, 1)
    assert first is not None and last is not None
    assert (first.end, last.end) == ("other", "other")


def test_markup_that_got_through_is_seen() -> None:
    page = "<!DOCTYPE html><html><style></style><p>&lt;script&gt;</p></html>"
    assert reports.leaks(page) == []
    assert reports.leaks(page.replace("&lt;script&gt;", "<script>1</script>"))
    assert reports.leaks(page.replace("<p>", '<p onclick="x">'))
    assert reports.leaks(page.replace("<p>", '<a href="http://x">'))


# What exploring finds is kept and replayed: a planted mistake, in a suite of its own

INF = float("inf")
CONFTEST = """
from pathlib import Path

import replay

replay.FOLDER = Path(__file__).parent / "found"


def pytest_collection_modifyitems(items):
    for item in items:
        replay.replayed(item)
"""
PLANTED = """
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=1, deadline=None, database=None)
@given(x=st.integers(0, 10**6), rest=st.lists(st.floats()))
def test_planted(x, rest):
    assert x < 1000
"""


def pytest_says(folder: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(folder)],
        cwd=folder, env=environment(200), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_planted_mistake_is_found_kept_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ordinary = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    assert pytest_says(tmp_path, *ordinary)[0] == 0  # the control: one example does not find it
    code, said = pytest_says(tmp_path, *command(5))
    assert code == 1 and "explored: FAILED test_planted.py::test_planted, kept in" in said, said
    kept = (tmp_path / "found" / "test_planted.test_planted.txt").read_text()
    assert kept == "found(x=1000, rest=[])\n"
    code, said = pytest_says(tmp_path, *ordinary)
    assert code == 1 and "explicit" in said and "x=1000" in said, said


def test_printed_examples_are_read_if_they_are_literals() -> None:
    long = "test_a(\n    x=-1,\n    y=(0.5, [-inf]),  # or any other generated value\n)"
    assert read(long) == {"x": -1, "y": (0.5, [-INF])}
    assert read("test_a(name='a\\n', ok=True)") == {"name": "a\n", "ok": True}
    for call in ("test_a(x=Config())", "test_a(1)", "x"):
        with pytest.raises(ValueError):
            read(call)
