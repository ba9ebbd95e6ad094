"""The adversary against certificates: it finds none too small, and those that are made so."""

from dataclasses import replace

import pytest

from benchmarks import attack
from fedmuon.analysis.theory.methods import Method
from fedmuon.config import Config
from fedmuon.experiments.laboratory import verdict
from fedmuon.experiments.laboratory.methods import MAPLESS, MUON


def attacked(monkeypatch: pytest.MonkeyPatch, *given: str) -> int:
    """Its exit code."""
    monkeypatch.setattr("sys.argv", ["attack", *given])
    return attack.main()


def test_no_neighbour_is_above_and_the_planted_error_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--only", "fedavgm", "sgd", "clipped-sign"
    assert attacked(monkeypatch, "--pairs", "1", *few) == 0
    said = capsys.readouterr().out
    assert ", 0 above a certificate" in said and "exceeded in 0 cells" not in said
    assert "Poisson lots" in said  # why a recipe is not attacked


def test_a_wrong_recursion_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server whose velocity is forgotten."""
    plain = verdict.method_of

    def forgetful(config: Config) -> Method:
        return replace(plain(config), server=0.0)

    monkeypatch.setattr(verdict, "method_of", forgetful)
    assert attacked(monkeypatch, "--pairs", "300", "--only", "fedavgm") == 1


def test_what_is_not_attacked_is_told() -> None:
    """Every recipe is in one of the two lists."""
    every, refused = attack.families([])
    assert {recipe for recipe, _ in every} == {*MUON, *MAPLESS}
    assert not {*MUON, *MAPLESS} & {*refused} and "adamw" in refused
