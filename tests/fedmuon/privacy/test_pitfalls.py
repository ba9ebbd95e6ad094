"""The page of pitfalls: every row names tests that are there, and what no other file tests."""

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedmuon
from fedmuon.experiments.cli import app

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)::(test_\w+)`")
PRIVATE = {
    "data": {"name": "synthetic", "train": 60, "test": 20, "dimension": 5, "classes": 3},
    "federation": {"clients": 2, "per-round": 2, "rounds": 1},
    "local": {"recipe": "dp-sgd"},
    "privacy": {"noise": 1.0, "lot": 8.0},
}


def rows() -> list[str]:
    lines = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ")][1:]


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


def test_every_row_names_tests_that_are_there() -> None:
    assert len(rows()) >= 20
    for row in rows():
        named = NAMED.findall(row)
        assert named, row
        for file, name in named:
            assert name in functions(file), (file, name)
    assert "test_that_is_not_there" not in functions("fedmuon/privacy/test_pitfalls.py")


def test_every_row_has_its_severity() -> None:
    found = [row.split("|")[2].strip() for row in rows()]
    assert set(found) == {"critical", "theoretical", "negligible"}


@pytest.mark.parametrize("private", [True, False])
def test_what_was_not_released_is_marked(private: bool, tmp_path: Path) -> None:
    """In the summary, on the terminal, in a comparison, in a notebook; and no other run is."""
    given = PRIVATE if private else {**PRIVATE, "local": {"recipe": "fedavg"}, "privacy": {}}
    ran = fedmuon.run(given, out=tmp_path / "run")
    released = ran.summary.get("privacy", {}).get("released", [])
    files = {one.name for one in ran.path.iterdir()}
    assert set(released) <= files and bool(released) == private
    assert not {"rounds.jsonl", "partition.npz", "summary.json"} & set(released)
    told = printed("compare", str(ran.path))
    said = printed("run", "--out", str(tmp_path / "again"), *settings(given))
    compared = fedmuon.compare([ran])
    for words in (told, said, str(compared), compared._repr_html_(), ran._repr_html_()):
        assert ("not released" in " ".join(words.split())) == private, words
    rounds = (ran.path / "rounds.jsonl").read_text(encoding="utf-8")
    assert ("client_loss" in json.loads(rounds.splitlines()[0])) != private


def printed(*command: str) -> str:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


def settings(given: dict[str, dict]) -> list[str]:
    return [
        word
        for table, held in given.items()
        for key, value in held.items()
        for word in ("--set", f"{table}.{key}={value}")
    ]
