"""The labels of bounds: the weaker of two is given, and the page of them names tests that exist."""

import dataclasses
from typing import Any, get_args

import numpy as np
import pytest
from conftest import small
from test_pitfalls import NAMED, ROOT, functions

from fedmuon import analysis
from fedmuon.analysis.theory.generalization import Status
from fedmuon.experiments.stability import bound
from fedmuon.experiments.suites.contents import merged
from fedmuon.tasks.constants import constants

ORDER = ["certified", "real-arithmetic", "estimated", "refused"]  # the weaker, the later
# label -> what a config, and what a case, is changed by to have it.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "certified": {
        "as it is": ({}, {}),
        "other recipe": ({"local": {"recipe": "local-muon"}}, {}),
    },
    "real-arithmetic": {"float32": ({"engine": {"dtype": "float32"}}, {})},
    "estimated": {
        "given L_orth": ({}, {"l_orth": 2.0}),
        "given Lg": ({}, {"l_g": 0.1}),
        "given C_hp": ({"stability": {"c-hp": 0.01}}, {}),
        "observed": ({}, {"constants": constants(), "caveats": ("seen",)}),
    },
    "refused": {
        "second moment": ({"local": {"recipe": "adamw"}}, {}),
        "median": ({"federation": {"aggregate": "median"}}, {}),
        "by the law": ({"federation": {"aggregate": "by-samples"}}, {}),
        "clients": ({"privacy": {"level": "client", "noise": 0.0}}, {}),
        "dropped": ({}, {"dropped": True}),
        "stopped": ({}, {"stopped": "by its loss"}),
        "no constants": ({}, {"refusal": "none were found"}),
    },
}
EVERY = [(label, name) for label, held in CHANGES.items() for name in held]
LAW = analysis.Uniform(3, 0.01)


def case_of(*changes: tuple[str, str]) -> bound.Case:
    """What all these changes leave of a certified case."""
    settings, facts = zip(*(CHANGES[label][name] for label, name in changes), strict=True)
    tables: dict[str, Any] = {"local": {"lr": 0.01}}
    for one in settings:
        tables = merged(tables, one)
    more = {name: value for one in facts for name, value in one.items()}
    return bound.Case(small(**tables), np.full(6, 15), LAW, shape=(7, 3), **more)


def compatible(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a config can have both: they change other tables, and do not exclude each other."""
    first, second = (CHANGES[label][name][0] for label, name in (one, other))
    excluded = one[0] == other[0] == "refused" and first and second
    return one == other or not (excluded or set(first) & set(second))


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one[1])
def test_the_weaker_of_two_labels_is_given(one: tuple[str, str]) -> None:
    """Of all pairs of what changes a label."""
    for other in (other for other in EVERY if compatible(one, other)):
        case = case_of(one, other)
        label = max(one[0], other[0], key=ORDER.index)
        assert bound.report(case, bound.judge(case))["status"] == label, other


def test_what_is_refused_has_no_numbers() -> None:
    for name in CHANGES["refused"]:
        verdict = bound.judge(case_of(("refused", name)))
        assert verdict.refusal and verdict.bound is None and verdict.certificates is None
    kept = bound.judge(case_of(("certified", "as it is")))  # the control
    assert not kept.refusal and kept.bound is not None and kept.certificates is not None


@pytest.mark.parametrize("label", ORDER[:-1])
def test_any_certificate_can_be_violated(label: str) -> None:
    """By a neighbour above it, and by none that is at it."""
    case = case_of((label, next(iter(CHANGES[label]))))
    promised = bound.judge(case).certificates
    assert promised is not None
    for times, wanted in ((1.0, label), (1 + 1e-9, "violated")):
        seen = dataclasses.replace(case, moved=times * promised)
        assert bound.report(seen, bound.judge(seen))["status"] == wanted


def test_the_page_has_every_label_with_tests_that_are_there() -> None:
    lines = (ROOT / "docs" / "labels.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    labels = [row[1].strip(" `") for row in rows]
    told = bound.Verdict.__dataclass_fields__["status"].type
    assert {*get_args(Status)} <= {*labels} and {*labels} == {*ORDER, "realized", "violated"}
    assert all(word in str(told) for word in ("realized", "refused"))
    for row in rows:
        named = NAMED.findall(row[-2])
        assert len(named) >= 3, row[1]
        for file, name in named:
            assert name in functions(file), (file, name)
