"""The page of pitfalls: every row names tests that are there, and what no other file tests."""

import ast
import csv
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from conftest import quick, small
from typer.testing import CliRunner

import fedmuon
from fedmuon.core.choices import Sampling
from fedmuon.experiments.cli import app
from fedmuon.experiments.report import gather, write_report
from fedmuon.experiments.run import execute
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import merged
from fedmuon.experiments.suites.suite import execute as make
from fedmuon.privacy.accounting.dominating_pairs import ADJACENCIES

ROOT = Path(__file__).resolve().parents[3]
CITED = re.compile(r"`([\w/]+/test_\w+\.py)::(test_\w+)`")
PRIVATE = {
    "data": {"name": "synthetic", "train": 60, "test": 20, "dimension": 5, "classes": 3},
    "federation": {"clients": 2, "per-round": 2, "rounds": 1},
    "local": {"recipe": "dp-sgd"},
    "privacy": {"noise": 1.0, "lot": 8.0},
}


PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith("| ")][1:]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


def test_every_row_names_tests_that_are_there() -> None:
    entries = re.split(r"\n(\d+)\. ", PAGE.partition("## Tests")[2])[1:]
    numbers = [row.split("|")[1].strip() for row in rows()]
    assert len(numbers) >= 20 and entries[::2] == numbers
    for entry in entries[1::2]:
        named = CITED.findall(entry)
        assert named, entry
        for file, name in named:
            assert name in functions(file), (file, name)
    assert "test_that_is_not_there" not in functions("fedmuon/privacy/test_pitfalls.py")


def test_every_row_has_its_severity() -> None:
    found = [row.split("|")[3].strip() for row in rows()]
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


# No epsilon without its adjacency: a walk over all that private runs and suites leave behind.

NAMED = re.compile("|".join(ADJACENCIES))
EPSILON = re.compile("ε|epsilon", re.IGNORECASE)
SECTION = re.compile(r"<(p|li|table|figure|figcaption|h[1-6]|tr|th|td)\b.*?</\1>", re.DOTALL)
VARIANTS = ("DP-SGD", "DP-Muon", "DiSK, γ = 0.5", "DP-FTRL", "shuffled lots")
TINY = {
    "data": {"train": 320, "test": 20, "minimum": 10},
    "federation": {"rounds": 1},
    "local": {"steps": 1},
    "privacy": {"lot": 8.0, "delta": 1e-3, "noise": 9.0},
    "output": {"evaluate-every": 1},
}


def unnamed(folder: Path) -> list[str]:
    """Where in the files of a folder an epsilon stands without what it compares."""
    walk = {".json": in_json, ".jsonl": in_json, ".csv": in_table, ".toml": in_toml,
            ".html": in_page, ".txt": in_page}  # fmt: skip
    return [
        f"{file.relative_to(folder)}: {place}"
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix in walk
        for place in walk[file.suffix](file.read_text(encoding="utf-8"))
    ]


def in_json(text: str) -> Iterator[str]:
    try:
        yield from within(json.loads(text), "")
    except json.JSONDecodeError:  # a record a line
        for line in text.splitlines():
            yield from within(json.loads(line), "")


def within(value: Any, named: str) -> Iterator[str]:
    """Objects with a number called epsilon, and sentences of one, that nothing around names."""
    if isinstance(value, dict):
        named += str(value.get("adjacency", ""))
        if any("epsilon" in name and isinstance(one, float) for name, one in value.items()):
            yield from [] if NAMED.search(named) else [f"an object with {', '.join(value)}"]
        named += " ".join(one for one in value.values() if isinstance(one, str))
        value = list(value.values())
    for one in value if isinstance(value, list) else []:
        yield from within(one, named)
    if isinstance(value, str) and EPSILON.search(value) and not NAMED.search(named + value):
        yield value


def in_table(text: str) -> Iterator[str]:
    header, *rows = csv.reader(text.splitlines())
    if not any(name in ("epsilon", "target", "printed") for name in header):
        return
    for row in rows:
        one = dict(zip(header, row, strict=True))
        if one.get("adjacency") not in ADJACENCIES or one.get("sampling") not in get_args(Sampling):
            yield str(one)


def in_toml(text: str) -> Iterator[str]:
    private = tomllib.loads(text).get("privacy", {})
    if "epsilon" in private and private.get("adjacency") not in ADJACENCIES:
        yield str(private)


def in_page(text: str) -> Iterator[str]:
    """Claims, tables, captions and labels of figures, one by one."""
    for found in SECTION.finditer(text):
        plain = re.sub("<[^>]*>", " ", found.group())
        if EPSILON.search(plain) and not NAMED.search(plain):
            yield plain


@pytest.mark.parametrize("adjacency", quick(ADJACENCIES, ["add-remove"]))
def test_of_a_run(tmp_path: Path, adjacency: str) -> None:
    given = {"epsilon": 4.0, "noise": 9.0, "lot": 6.0, "adjacency": adjacency}
    if adjacency == "add-remove":
        given["population"] = 40
    config = small(local={"recipe": "dp-sgd", "lr": 0.1}, privacy=given)
    private = execute(config, tmp_path / "run")["privacy"]
    assert private["adjacency"] == adjacency and private["epsilon"] <= 4.0
    assert not unnamed(tmp_path)
    for more in ("--json", "--delta=1e-6"):
        shown = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "run"), more]).output
        assert adjacency in shown and "poisson" in shown
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert f'"adjacency": "{adjacency}"' in ledger.read_text().splitlines()[0]
    for name in ("summary.json", "config.toml"):  # control: the word gone
        file = tmp_path / "run" / name
        file.write_text(re.sub('"?adjacency"?', '"beside"', file.read_text()))
    assert len(unnamed(tmp_path)) == 2


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "name",
    quick(
        ["dp-classification", "dp-classification-cnn", "dp-federated", "disk-ablation", "dp-ftrl"],
        ["dp-federated", "dp-ftrl"],
    ),
)
def test_of_a_suite(tmp_path: Path, name: str) -> None:
    """Two of its variants, on its small scale made smaller, with the report."""
    content = contents.read(name)
    kept = {one: content["variants"][one] for one in VARIANTS if one in content["variants"]}
    least: dict[str, Any] = merged(content["small"], {"base": TINY})
    if "sweep" in least:
        least["sweep"] = {"values": least["sweep"]["values"][-1:]}
    content |= {"variants": kept, "small": least}
    grids = content["tuning"]["grids"]
    content["tuning"]["grids"] = {one: grids[one] for one in grids if one in kept}
    pairs = {key: {one["better"], one.get("than", "")} for key, one in content["claims"].items()}
    content["claims"] = {key: content["claims"][key] for key in pairs if pairs[key] <= set(kept)}
    file, out = tmp_path / f"{name}.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(content), encoding="utf-8")
    make(kinds.find(str(file), "mnist5k" if "cnn" in name else "digits", "small", {}), out)
    found = gather(out)[0]
    texts = (found.title, found.note, *found.head, *(claim.sentence for claim in found.claims))
    assert not [text for text in texts if EPSILON.search(text) and not NAMED.search(text)]
    assert "choosing among several trainings spends more" in found.claims[-1].detail
    *compared, accounted = found.claims  # no step size is stored for this file
    pattern = re.compile(r"the step sizes of .+ were not tuned")
    assert compared and all(pattern.fullmatch(one.untuned) for one in compared)
    assert len(compared) == len(content["claims"]) and not accounted.untuned  # control
    if name == "dp-federated":
        write_report(out)  # draws, which takes seconds
    assert not unnamed(out) and NAMED.search(found.stands_on)
    table = out / "clients.csv"
    table.write_text(table.read_text().replace("zero-out", ""))
    assert unnamed(out)  # control
