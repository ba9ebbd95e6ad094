"""The adversary against certificates: it finds none too small, and those that are made so."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import attack
from fedmuon.analysis.theory import recursion
from fedmuon.experiments.stability import certify
from fedmuon.experiments.stability.covered_recipes import MAPLESS, MUON, method_of


def attacked(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    """Its exit code."""
    monkeypatch.setattr("sys.argv", ["attack", *given])
    return attack.main()


@pytest.mark.slow
def test_no_neighbour_is_above_and_the_planted_error_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--only", "fedavgm", "sgd", "clipped-sign"
    assert attacked(monkeypatch, "--pairs", "1", *few) == 0
    said = capsys.readouterr().out
    assert ", 0 above a certificate" in said and "exceeded in 0 cells" not in said
    assert "Poisson lots" in said  # why a recipe is not attacked


def forgotten(**changes: Any) -> Any:
    """What takes the recipe for another one."""
    return lambda config: replace(method_of(config), **changes)


def alike(chosen: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Weights 1/K."""
    return np.full(chosen.shape, 1 / chosen.shape[1])


WRONG = {  # what is made of the certificates, and where that is seen
    "the server's velocity is forgotten": (certify, "method_of", forgotten(server=0.0), "fedavgm"),
    "momenta begin afresh": (certify, "method_of", forgotten(afresh=True), "sgd"),
    "clients weigh the same": (recursion, "by_samples", alike, "fedavg"),
}


@pytest.mark.parametrize(
    "wrong",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in [*WRONG][:2]), [*WRONG][2]],
)
def test_a_wrong_certificate_is_found_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the whole: a few cells see it."""
    place, name, instead, family = WRONG[wrong]
    monkeypatch.setattr(place, name, instead)
    assert attacked(monkeypatch, "--pairs", "300", "--only", family) == 1


def test_what_is_not_attacked_is_told() -> None:
    """Every recipe is in one of the two lists."""
    every, refused = attack.families([])
    assert {recipe for recipe, _ in every} == {*MUON, *MAPLESS}
    assert not {*MUON, *MAPLESS} & {*refused} and "adamw" in refused
