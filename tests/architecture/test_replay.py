"""What exploring finds is kept and replayed: a planted mistake, in a suite of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.properties import command, environment
from replay import read

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


def outcome(folder: Path, *command: str) -> tuple[int, str]:
    """The exit code of a pytest, and what it says."""
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
    assert outcome(tmp_path, *ordinary)[0] == 0  # the control: one example does not find it
    code, said = outcome(tmp_path, *command(5))
    assert code == 1 and "explored: FAILED test_planted.py::test_planted, kept in" in said, said
    assert (tmp_path / "found" / "test_planted.test_planted.txt").read_text() == (
        "found(x=1000, rest=[])\n"
    )
    code, said = outcome(tmp_path, *ordinary)
    assert code == 1 and "explicit" in said and "x=1000" in said, said


def test_printed_examples_are_read() -> None:
    long = "test_a(\n    x=-1,\n    y=(0.5, [-inf]),  # or any other generated value\n)"
    assert read(long) == {"x": -1, "y": (0.5, [-INF])}
    assert read("test_a(name='a\\n', ok=True)") == {"name": "a\n", "ok": True}


def test_what_is_no_literal_is_not_kept() -> None:
    for call in ("test_a(x=Config())", "test_a(1)", "x"):
        with pytest.raises(ValueError):
            read(call)
