"""The cases of `tests.architecture.evidence` cover what the product lists; its digests work."""

import json
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from architecture import evidence, mutants
from architecture.cases import CASES, NEW_STUDIES, Case, Step

# What `fedmuon list` calls them, and the key of a config that names one. Data sources and callbacks
# are left out: most need files or packages that a machine may lack.
LISTS = {
    "recipes": ("local", "recipe"), "maps": ("orthogonalizer", "name"),
    "aggregators": ("federation", "aggregate"), "partitions": ("federation", "partition"),
    "models": ("task", "model"), "tasks": ("task", "name"), "schedules": ("local", "schedule"),
}  # fmt: skip
KEYS = (
    *(("engine", key) for key in ("name", "dtype")),
    *(("privacy", key) for key in ("level", "trust", "cohorts", "sampling", "noise-correlation")),
)


def fedmuon(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.delitem(sys.modules, "fedmuon.__main__", raising=False)  # runpy warns of it
        patch.setattr(sys, "argv", ["fedmuon", *words])
        runpy.run_module("fedmuon", run_name="__main__")


def listed(kind: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    fedmuon("list", kind)
    found = re.findall(r"^│ ([\w-]+) +│", capsys.readouterr().out, re.MULTILINE)
    assert found
    return set(found)


def explained(table: str, key: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The values that `fedmuon config explain` names."""
    fedmuon("config", "explain", f"{table}.{key}")
    lines = re.findall(r"^│ values +│ (.*?) *│$", capsys.readouterr().out, re.MULTILINE)
    return set(re.split(r", (?:or )?", lines[0]))


def kinds(place: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The kinds of suites, from the error message of a kind that does not exist."""
    file = place / "suite.toml"
    file.write_text('kind = "no-such-kind"\n')
    fedmuon("suite", str(file), "--out", str(place / "out"))
    said = " ".join(capsys.readouterr().err.split())
    found = re.search(r"choose one of ([\w, -]+)", said)
    assert found
    return {name.strip() for name in found[1].split(",")}


def used(cases: Iterable[Case]) -> dict[tuple[str, str], set[str]]:
    """The names in the tables of all steps, by table and key; a suite's kind has no table."""
    found = defaultdict(set)
    for at, value in (pair for case in cases for step in case.steps
                      for pair in strings("", step.tables)):  # fmt: skip
        found[at].add(value)
    return found


def strings(table: str, values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    """All strings of nested tables, with the name of their own table and their key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from strings(key, value)
        elif isinstance(value, str):
            yield (table, key), value


def missing(cases: Iterable[Case], expected: Mapping[tuple[str, str], set[str]]) -> set[str]:
    found = used(cases)
    return {
        f"{'.'.join(at).strip('.')} = {name}"
        for at, names in expected.items()
        for name in names - found.get(at, set())
    }


# Recipes that the commit to compare with does not have; nor has it the study `bias`.
SINCE = (
    *("fedprox", "fednova", "scaffold", "fedadam", "fedyogi", "fedadagrad", "local-adamw"),
    *("diloco", "muloco", "fedmuon-corrected", "fedper", "ditto", "fedmuon-svd", "ef21-muon"),
    *("lora-muon", "sign-muon", "demuon", "dp-muon-im", "ringmaster", "ringmaster-free"),
)


def test_every_listed_name_is_in_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert len(CASES) == 30
    one = Case((Step("a", tables={"local": {"recipe": "x"}}),))
    assert used([one]) == {("local", "recipe"): {"x"}}
    expected = {at: listed(kind, capsys) for kind, at in LISTS.items()}
    expected |= {at: explained(*at, capsys) for at in KEYS}
    expected["", "kind"] = kinds(tmp_path, capsys)
    assert sum(map(len, expected.values())) > 70
    since = {f"local.recipe = {one}" for one in SINCE} | {f"kind = {one}" for one in NEW_STUDIES}
    newer = ("momentum", "blt", "blt-momentum")
    since |= {f"privacy.noise-correlation = {name}" for name in newer}
    since |= {"task.name = causal-lm", "local.schedule = power"}
    robust = ("centered-clipping", "geometric-median")
    since |= {f"federation.aggregate = {name}" for name in robust}
    assert missing(CASES.values(), expected) == since
    for left_out in ("ray", "heavy-tail", "muon", "networks", "deployment"):
        others = [case for name, case in CASES.items() if name != left_out]
        assert missing(others, expected), left_out


def written(place: Path, **changes: Any) -> evidence.Digests:
    """The digests of a folder with one file of each sort."""
    out = place / "out"
    out.mkdir(exist_ok=True)
    values = {"weight": 1.0, "loss": 0.5, "accuracy": 0.25, "seconds": 3.0, "title": "a", **changes}
    save_file({"weight": np.array([values["weight"]])}, out / "model.safetensors")
    line = {"round": 1, "loss": values["loss"], "train_seconds": values["seconds"]}
    (out / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    kept = {"accuracy": values["accuracy"], "title": values["title"], "versions": {"a": "1"}}
    (out / "summary.json").write_text(json.dumps(kept))
    (out / "runs.csv").write_text(f"seed,train_seconds\n0,{values['seconds']}\n")
    return evidence.read(place, [out])


@pytest.mark.parametrize(
    ("change", "part"),
    [({"weight": 1 + 2**-52}, "model"), ({"loss": 0.5 + 2**-53}, "rounds"),
     ({"accuracy": 0.26}, "numbers"), ({"seconds": 4.0}, None), ({"title": "b"}, None)],
    ids=str,
)  # fmt: skip
def test_a_digest_sees_the_last_bit_and_no_time(
    tmp_path: Path, change: dict[str, Any], part: str | None
) -> None:
    first, again, other = written(tmp_path), written(tmp_path), written(tmp_path, **change)
    assert set(line_of(first, again).values()) == {"equal"}
    changed = [name for name, cell in line_of(first, other).items() if cell == "different"]
    assert changed == ([part] if part else [])


def line_of(before: evidence.Digests, after: evidence.Digests) -> dict[str, str]:
    (line,) = evidence.compared({"a": before}, {"a": after}).values()
    return line


def test_a_case_that_fails_or_says_nothing_is_not_equal() -> None:
    for said in ("failed: out: no such key", None):
        nothing: evidence.Digests = dict.fromkeys(evidence.PARTS, said)
        assert evidence.different(line_of(nothing, nothing))


@pytest.mark.slow
def test_a_case_repeats_and_another_step_size_shows() -> None:
    assert evidence.control(["fedmuon"], 2) == 0


def test_every_mutant_has_one_line_to_break() -> None:
    for package, old, new in mutants.MUTANTS:
        files = (mutants.ROOT / package).rglob("*.py")
        assert sum(file.read_text(encoding="utf-8").count(old) for file in files) == 1, old
        assert new != old
