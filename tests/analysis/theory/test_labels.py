"""The labels of bounds: the weaker of two is given, and the page of them names tests that exist."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import small
from test_pitfalls import CITED, ROOT, functions
from typer.testing import CliRunner

import fedmuon
from fedmuon import analysis
from fedmuon.analysis.theory.generalization import Status
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.neighbours import execute
from fedmuon.experiments.stability.neighbours_report import findings
from fedmuon.experiments.suites.contents import merged
from fedmuon.tasks.constants import constants

ORDER = ["certified", "real-arithmetic", "claimed", "estimated", "refused"]  # the weaker, the later
UNEQUAL = np.array([5, 10, 15, 15, 20, 25])  # samples of each client: so are weights by samples
# label -> what a config, and what a case, is changed by to have it.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "certified": {"as it is": ({}, {}), "other recipe": ({"local": {"recipe": "local-muon"}}, {})},
    "real-arithmetic": {"float32": ({"engine": {"dtype": "float32"}}, {})},
    "claimed": {
        "custom orthogonalizer": ({"orthogonalizer": {"name": "maps:half"}}, {"l_map": 0.5})
    },
    "estimated": {
        "given L_orth": ({}, {"l_orth": 2.0}),
        "given Lg": ({}, {"l_g": 0.1}),
        "given C_hp": ({"stability": {"c-hp": 0.01}}, {}),
        "observed": ({}, {"constants": constants(), "caveats": ("seen",)}),
    },
    "refused": {
        "second moment": ({"local": {"recipe": "adamw"}}, {}),
        "median": ({"federation": {"aggregate": "median"}}, {}),
        "by the law": ({"federation": {"aggregate": "by-samples"}}, {"sizes": UNEQUAL}),
        "clients": ({"privacy": {"level": "client", "noise": 0.0}}, {}),
        "dropped": ({}, {"dropped": True}),
        "stopped": ({}, {"stopped": "by its loss"}),
        "no constants": ({}, {"refusal": "none were found"}),
    },
}
EVERY = [(label, name) for label, held in CHANGES.items() for name in held]
LAW = analysis.Uniform(3, 0.01)


def case_of(*changes: tuple[str, str]) -> certificates.CertifiedSetting:
    settings, each = zip(*(CHANGES[label][name] for label, name in changes), strict=True)
    tables: dict[str, Any] = {"local": {"lr": 0.01}}
    for one in settings:
        tables = merged(tables, one)
    more = {name: value for one in each for name, value in one.items()}
    facts: dict[str, Any] = {"sizes": np.full(6, 15), "participation": LAW, "shape": (7, 3), **more}
    return certificates.CertifiedSetting(small(**tables), **facts)


def compatible(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a config can have both: they change other tables, and do not exclude each other."""
    first, second = (CHANGES[label][name][0] for label, name in (one, other))
    excluded = one[0] == other[0] == "refused" and first and second
    excluded = excluded or {one[1], other[1]} == {
        "custom orthogonalizer",
        "second moment",
    }  # has no map
    return one == other or not (excluded or set(first) & set(second))


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one[1])
def test_the_weaker_of_two_labels_is_given(one: tuple[str, str]) -> None:
    for other in (other for other in EVERY if compatible(one, other)):
        case = case_of(one, other)
        label = max(one[0], other[0], key=ORDER.index)
        assert certificates.report(case, certificates.certify(case))["status"] == label, other


def test_what_is_refused_has_no_numbers() -> None:
    for name in CHANGES["refused"]:
        verdict = certificates.certify(case_of(("refused", name)))
        assert verdict.refusal and verdict.bound is None and verdict.certificates is None
    kept = certificates.certify(case_of(("certified", "as it is")))  # the control
    assert not kept.refusal and kept.bound is not None and kept.certificates is not None


@pytest.mark.parametrize("label", ORDER[:-1])
def test_any_certificate_can_be_violated(label: str) -> None:
    """By a neighbour above it, and by none that is at it."""
    case = case_of((label, next(iter(CHANGES[label]))))
    promised = certificates.certify(case).certificates
    assert promised is not None
    for times, wanted in ((1.0, label), (1 + 1e-9, "violated")):
        seen = dataclasses.replace(case, moved=times * promised)
        assert certificates.report(seen, certificates.certify(seen))["status"] == wanted


def test_the_page_has_every_label_with_tests_that_are_there() -> None:
    table, _, tests = (
        (ROOT / "docs" / "labels.md").read_text(encoding="utf-8").partition("## Tests")
    )
    rows = re.findall(r"^\| (\d+) \| `([\w-]+)` \|", table, re.MULTILINE)
    labels = [label for _, label in rows]
    entries = re.split(r"\n(\d+)\. ", tests)[1:]
    listed = dict(zip(entries[::2], entries[1::2], strict=True))
    assert [number for number, _ in rows] == [*listed] == [str(n + 1) for n in range(len(rows))]
    told = certificates.Certificate.__dataclass_fields__["status"].type
    assert {*get_args(Status)} <= {*labels} and {*labels} == {*ORDER, "realized", "violated"}
    assert all(word in str(told) for word in ("realized", "refused"))
    for number, label in rows:
        named = CITED.findall(listed[number])
        assert len(named) >= 3, label
        for file, name in named:
            assert name in functions(file), (file, name)


# What a bound is called where the run rounds: a float32 run is not to be had as certified.

TINY = {"lr": 1e-7}  # the perturbations are below what float32 can tell apart


def perturbations(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    file = folder / "neighbours.csv"
    moved, promised = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(4, 6), unpack=True)
    return moved, promised


def test_rounding_alone_exceeds_a_certificate(tmp_path: Path) -> None:
    """The reason: it would be called certified, and be false. The control is the same run in
    float64, in which nothing is above its certificate."""
    for dtype in ("float32", "float64"):
        config = small(local=TINY, engine={"dtype": dtype}, stability={"neighbours": "all"})
        record = execute(config, tmp_path / dtype)
        moved, promised = perturbations(tmp_path / dtype)
        assert (moved > promised).any() == (dtype == "float32")
        assert record["status"] == ("violated" if dtype == "float32" else "certified")


WAYS = [{}, {"local": {"recipe": "fedmuon-aligned"}},
        {"orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
        {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.3}},
        {"orthogonalizer": {"name": "clipped-sign", "clip-level": 0.2}},
        {"stability": {"c-hp": "sharp"}}, {"stability": {"lipschitz": "paper"}}]  # fmt: skip


@pytest.mark.parametrize("tables", WAYS, ids=str)
def test_no_float32_run_is_certified(tables: dict) -> None:
    """The negative control is float64; estimates stay estimates in both."""
    for dtype, status in (("float32", "real-arithmetic"), ("float64", "certified")):
        config = small(**tables, engine={"dtype": dtype})
        case = certificates.CertifiedSetting(config, np.full(6, 15), LAW, shape=(7, 3))
        found = certificates.certify(case).bound
        assert found is not None and found.status == status
        told = any("does not count rounding" in one for one in found.assumptions)
        assert told == (dtype == "float32")
        guessed = certificates.certify(replace(case, l_g=0.2)).bound
        assert guessed is not None and guessed.status == "estimated"


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bound", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_every_page_says_so(tmp_path: Path) -> None:
    config = small(engine={"dtype": "float32"}, stability={"trials": 2})
    assert execute(config, tmp_path / "a")["status"] == "real-arithmetic"
    assert json.loads(shown(str(tmp_path / "a"), "--json"))["status"] == "real-arithmetic"
    assert "does not count rounding" in shown(str(tmp_path / "a"))
    assert fedmuon.bound(tmp_path / "a")["status"] == "real-arithmetic"
    page = findings(tmp_path / "a")
    assert page.stands_on.startswith("Status: real-arithmetic")
    assert any("does not count rounding" in one for one in page.assumptions)
    run(small(engine={"dtype": "float32"}), tmp_path / "b")
    assert fedmuon.bound(tmp_path / "b")["status"] == "real-arithmetic"
    parameters = ["--set", "orthogonalizer.lambda=0.1", "--lr", "0.01"]
    assert " certified" in shown(*parameters)
    assert "real-arithmetic" in shown(*parameters, "--set", "engine.dtype=float32")


def decaying(lr: float, rounds: int) -> dict[str, Any]:
    """lr decay = 2.5 makes half as much again of the model at every step, and of its rounding."""
    local = {"recipe": "fedavg", "lr": lr, "weight-decay": 2.5 / lr}
    return {"local": local, "federation": {"rounds": rounds}}


@pytest.mark.parametrize(("tables", "status"), [
    *(({"data": {"train": 300, "minimum": 5}, "local": {"lr": lr}}, status) for lr, status in (
        (1e-13, "real-arithmetic"), (1e-4, "certified"))),  # neighbours exceed the first's
    (decaying(3e-15, 60), "real-arithmetic"), (decaying(3e-15, 1), "real-arithmetic"),
    (decaying(1e-4, 60), "certified"),
])  # fmt: skip
def test_float64_is_not_certified_where_rounding_is_as_large(
    tables: dict[str, Any], status: str, tmp_path: Path
) -> None:
    """Short steps from a Gaussian start, with and without decay; the controls have long steps."""
    run(small(**tables), tmp_path / "a")
    found = certificates.certify(finished_run.from_directory(tmp_path / "a")).bound
    assert found is not None and found.status == status


def test_rounding_exceeds_no_certificate_that_is_attained(tmp_path: Path) -> None:
    """One step from 0 along one gradient, given 4,000 times: the neighbour goes as far as it may,
    and went 2e-13 of it further before certificates had what rounding comes to. The control is a
    certificate that is smaller by a millionth."""
    labels = np.array([0] * 4001 + [1])
    config = {
        "data": {"test": 2}, "federation": {"rounds": 1}, "task": {"initial": "zero"},
        "local": {"recipe": "fedavg", "steps": 1, "lr": 0.1}, "engine": {"device": "cpu"},
    }  # fmt: skip
    for seed in range(5):
        one = np.tile(np.random.default_rng(seed).standard_normal(3), (4002, 1))
        one[4000] *= -1
        given = {"data": (one, labels), "partition": [np.arange(4000)], "trials": 1}
        found = fedmuon.stability(config, **given, out=tmp_path / str(seed))
        (only,) = found.neighbours
        assert found.bound["status"] == "certified" and found.bound["violation"] == 0
        assert 1 - 1e-6 < only["perturbation"] / only["certificate"] <= 1
