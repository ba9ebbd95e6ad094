"""The certificate against hostile clients: its recursion, its limits, and attacks against it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import built, ended
from conftest import small

from fedmuon.analysis import Method
from fedmuon.analysis.theory.hostile import hostile_bound
from fedmuon.analysis.theory.recursion import method_amplification
from fedmuon.config.schema import OrthogonalizerTable
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability.certificates import from_parameters
from fedmuon.experiments.stability.finished_run import from_directory
from fedmuon.experiments.stability.hostile import hostile_report

METHODS = {
    "fedmuon": Method(0.9),
    "nesterov": Method(0.8, "ema-nesterov"),
    "polyak": Method(0.5, "polyak"),
    "local-muon": Method(0.9, afresh=True),
    "fedavg": Method(0.0),
    "fedavgm": Method(0.0, server=0.5),
    "decay": Method(0.9, decay=0.3),
}
RATES = np.array([0.1, 0.2, 0.05, 0.1])
SHARES = np.array([0.0, 0.4, 0.2, 0.4])
RADII = 3.0 * RATES


def by_loops(method: Method, slope: float, smooth: float, momentum: float, steps: int) -> float:
    """Each client as its own three numbers; the share of hostile clients is that of 5 clients."""
    x = m = v = 0.0
    for rate, radius, share in zip(RATES, RADII, SHARES, strict=True):
        models, momenta, moves = [], [], []
        for client in range(5):
            xi, mi, yi = x, 0.0 if method.afresh else m, 0.0
            for _ in range(steps):
                gradient = smooth * xi
                weight = 1 - method.beta if method.form.startswith("ema") else 1.0
                mi = method.beta * mi + weight * gradient
                ahead = method.beta * mi + weight * gradient
                direction = ahead if method.form.endswith("nesterov") else mi
                yi += rate * slope * direction + rate * method.decay * xi
                xi = abs(1 - rate * method.decay) * xi + rate * slope * direction
            if method.decay:  # clipping can cut off the decay
                xi = x + yi
            if client < round(5 * share):
                xi, yi = max(xi, x + 2 * radius), max(yi, 2 * radius)
                mi = 0.0 if method.afresh else max(mi, 2 * momentum)
            models.append(xi)
            momenta.append(mi)
            moves.append(yi)
        x, m = sum(models) / 5 + method.server * v, sum(momenta) / 5
        v = method.server * v + sum(moves) / 5
    return x


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [1, 3])
def test_bound_is_the_recursion_client_by_client(name: str, steps: int) -> None:
    method, constants = METHODS[name], (2.0, 0.7)
    momentum = 0.35 if name not in ("local-muon", "fedavg", "fedavgm") else 0.0
    bound = hostile_bound(method, RATES, *constants, RADII, SHARES, momentum, steps)
    expected = by_loops(method, *constants, momentum, steps)
    assert bound.distances[-1] == pytest.approx(expected, rel=1e-12)
    assert bound.distances[0] == 0.0  # nobody is hostile in the first round
    smaller = hostile_bound(method, RATES, *constants, 0.9 * RADII, SHARES, 0.9 * momentum, steps)
    assert smaller.distances[-1] == pytest.approx(
        0.9 * bound.distances[-1]
    )  # linear, and not equal


def test_bound_without_expansion_is_the_sum_of_the_shares() -> None:
    """With L = 0 nobody follows the others: 2 rho a in each round."""
    bound = hostile_bound(Method(0.9), RATES, 0.0, 1.0, RADII, SHARES, 0.3)
    np.testing.assert_allclose(bound.distances, np.cumsum(2 * RADII * SHARES), rtol=1e-12)
    np.testing.assert_allclose(bound.trivial, np.cumsum(2 * RADII), rtol=1e-12)
    all_hostile = hostile_bound(Method(0.9), RATES, 9.0, 1.0, RADII, np.ones(4), 0.3)
    assert all_hostile.last == pytest.approx(2 * RADII.sum())


def test_an_honest_round_grows_as_the_existing_recursion() -> None:
    """A push in round 0 alone grows like the amplification a_{0,k} of an E = 1 kick."""
    method, rates = Method(0.0), np.full(6, 0.1)
    shares = np.array([0.2, 0, 0, 0, 0, 0])
    pushed = hostile_bound(method, rates, 1.0, 0.9, np.full(6, 0.3), shares)
    kick = method_amplification(method, rates, 1.0, 0.9)[0, 0] / 0.1  # eta of the kick itself
    assert pushed.distances[-1] == pytest.approx(2 * 0.3 * 0.2 * kick, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": [0.1, 0.2, 0.3, 1.5]}, "must lie in"),
        ({"weights": [0.1]}, "weights"),
        ({"radii": [-1.0, 1, 1, 1]}, "radii"),
        ({"rates": []}, "must be a vector"),
        ({"momentum_bound": -1.0}, "momentum_bound"),
    ],
)
def test_numbers_out_of_range_are_rejected(changes: dict[str, Any], words: str) -> None:
    arguments = {"method": Method(0.9), "rates": RATES, "l_orth": 1.0, "l_g": 1.0, "radii": RADII,
                 "weights": SHARES}  # fmt: skip
    with pytest.raises(InputError, match=words):
        hostile_bound(**{**arguments, **changes})


# Attacks against the certificate

ATTACKS: dict[str, dict[str, Any]] = {
    "sign-flip": {"strength": 1e3}, "scaled": {"strength": 1e3}, "gaussian": {"strength": 1e3},
    "label-flip": {}, "alie": {"strength": 30.0}, "inner-product": {"strength": 1e3}, "mimic": {},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "fedmuon": {"local": {"recipe": "fedmuon", "lr": 0.05, "steps": 2, "momentum": 0.9}},
    "local-muon": {"local": {"recipe": "local-muon", "lr": 0.05, "steps": 2}},
    "polyak": {"local": {"recipe": "fedmuon", "lr": 0.05, "momentum": 0.5,
                         "momentum-form": "polyak"}},
    "fedavg": {"local": {"recipe": "fedavg", "lr": 0.5, "steps": 2},
               "robust": {"radius": 0.5}},
    "decay": {"local": {"recipe": "local-muon", "lr": 0.01, "weight-decay": 50.0},
              "robust": {"radius": 0.001}},  # far smaller than an honest change
}  # fmt: skip
FEDERATION = {"clients": 5, "per-round": 5, "rounds": 6}


def moved_and_bound(case: str, attack: str, clip: bool = True) -> tuple[float, float]:
    """How far two hostile clients move the final model, and the certificate."""
    tables = {**CASES[case], "federation": FEDERATION, "orthogonalizer": {"lambda": 0.1}}
    if case == "fedavg":
        tables.pop("orthogonalizer")
    robust = {"ball": "model", **tables.pop("robust", {})}
    kind = {"kind": attack, "clients": "1, 3", **ATTACKS[attack]}
    honest = small(**tables, robust=robust)
    hostile = small(**tables, robust=robust if clip else {}, attacks=kind)
    ends = [ended(built(config)).params["weight"] for config in (honest, hostile)]
    record = hostile_report(from_parameters(honest, 15), 2)
    return float((ends[0] - ends[1]).norm()), record["distance"]


@pytest.mark.parametrize("case", CASES)
def test_no_attack_moves_the_model_beyond_its_certificate(case: str) -> None:
    shares = {}
    for attack in ATTACKS:
        moved, bound = moved_and_bound(case, attack)
        shares[attack] = moved / bound
    print(case, {name: round(share, 3) for name, share in shares.items()})
    assert max(shares.values()) <= 1 and max(shares.values()) > 0.02  # not trivially far away


@pytest.mark.parametrize("case", CASES)
def test_without_the_ball_an_attack_moves_the_model_further(case: str) -> None:
    """The negative control of the above: the same attack, and a server that clips nothing."""
    moved, bound = moved_and_bound(case, "scaled", clip=False)
    assert moved > 3 * bound


# The command


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0


def test_command_for_parameters_and_for_a_run(tmp_path: Path, capsys: Any) -> None:
    options = ["--lr", "0.01", "--rounds", "10", "--clients", "10", "--per-round", "10"]
    synthetic = ["--set", "data.name=synthetic", "--set", "data.classes=3"]
    command("bound", *options, *synthetic, "--hostile", "2", "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["radius"] == pytest.approx(0.05 * 3**0.5) and record["weight"] == 0.2
    assert record["trivial"] == pytest.approx(10 * 2 * record["radius"])
    assert 0 < record["distance"] <= record["trivial"]
    run = small(federation=FEDERATION, robust={"ball": "model"},
                attacks={"kind": "sign-flip", "clients": "1"})  # fmt: skip
    execute(run, tmp_path / "run")
    report = hostile_report(from_directory(tmp_path / "run"), 1, folder=True)
    assert report["radius"] == pytest.approx(0.05 * 3**0.5) and report["weight"] == 0.2
    capsys.readouterr()
    command("bound", str(tmp_path / "run"), "--hostile", "1")
    said = " ".join(capsys.readouterr().out.split())
    assert "bound for 1 hostile client" in said and "vacuous" not in said
    assert not report["vacuous"]
    command("bound", "--lr", "10", *options[2:], *synthetic, "--hostile", "1")
    assert "1 (vacuous: no loss changes by more)" in " ".join(capsys.readouterr().out.split())


def test_the_assumptions_name_constants_that_nobody_checked() -> None:
    config = small(federation=FEDERATION, robust={"ball": "model"})
    proved = hostile_report(from_parameters(config, 15), 1)["assumptions"]
    assert "does not count rounding" in proved[-1]
    given = hostile_report(from_parameters(config, 15, l_orth=2.0, l_g=0.1), 1)["assumptions"]
    assert given[: len(proved)] == proved
    assert "L_orth = 2" in given[-2] and "Lg = 0.1" in given[-1]
    robust = {"ball": "model", "radius": 0.1}
    config = small(federation=FEDERATION, robust=robust)
    table = OrthogonalizerTable().model_copy(update={"name": "torch:tanh"})
    own = config.model_copy(update={"orthogonalizer": table})
    claimed = hostile_report(replace(from_parameters(own, 15), l_map=1.0), 1)["assumptions"]
    assert "claims L_orth = 1" in claimed[-1]


@pytest.mark.parametrize("option", [("--delta", "0.1"), ("--neighbours", "clients")])
def test_options_that_a_bound_without_failure_does_not_read(
    option: tuple[str, str], capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bound", "--hostile", "1", *option])
    assert ended.value.code == 2
    assert f"{option[0]} has no effect with --hostile" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("tables", "hostile", "folder", "words"),
    [
        ({}, 0, False, "--hostile is 0"),
        ({}, 6, False, "--hostile is 6"),
        ({}, 1, True, "clips nothing"),
        ({"task": {"name": "network", "model": "linear"}}, 1, False, "name = 'matrix'"),
        ({"robust": {"mixing": 1}}, 1, False, "mixing = 1"),
        ({"local": {"recipe": "fedavg"}}, 1, False, r"Set \[robust\] radius"),
        ({"federation": {"aggregate": "median"}}, 1, False, "weighted means"),
        ({"federation": {"aggregate": "by-samples"}}, 1, False, "needs the schedule"),
        ({"local": {"recipe": "muon"}}, 1, False, "state-radius"),
        (
            {"local": {"recipe": "fedmuon-aligned"}, "robust": {"ball": "model", "radius": 0.1}},
            1,
            False,
            "state-radius",
        ),
        ({"orthogonalizer": {"name": "gaussian-smoothed-sign"}}, 1, False, "know the noise"),
        ({"devices": {"mode": "threshold"}}, 1, False, "decide which clients take part"),
        ({"devices": {"mode": "synchronous", "dropout": 0.5}}, 1, False, "decide which clients"),
    ],
)
def test_settings_without_a_bound_are_rejected(
    tables: dict[str, Any], hostile: int, folder: bool, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        hostile_report(from_parameters(small(**tables), 15), hostile, folder)
