"""Noise-aware smoothing: its lambda against a loop and Monte Carlo, its account, and bad input."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import built, ended, gap, problem_of
from conftest import small
from cut_off import killed, same_states
from reference import private_muon
from reference.private_methods import block
from reference.private_muon import Settings
from torch import nn

from fedmuon import orthogonalize as maps
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.optim import DPMuon, links
from fedmuon.optim.chain import Context
from fedmuon.optim.noise_floor import direction_variance, noise_edge, noise_floor

LR, LOT, BOUND, NOISE, MEMORY, FLOOR = 0.3, 20.0, 0.3, 0.5, 0.8, 0.7
CENTRAL = {"clients": 1, "per-round": 1, "rounds": 3}
FEDERATION = {"clients": 5, "per-round": 3, "rounds": 4}
FORMS = ("ema", "ema-nesterov", "polyak", "nesterov")


def config(federation: dict[str, Any], recipe: str = "dp-muon", **tables: Any) -> Config:
    below: dict[str, dict[str, Any]] = {
        "federation": federation,
        "local": {"recipe": recipe, "lr": LR, "steps": 3, "momentum": MEMORY},
        "privacy": {"noise": NOISE, "lot": LOT, "bound": BOUND, "delta": 1e-3,
                    "insecure-reproducible-noise": True},
        "orthogonalizer": {"noise-floor": FLOOR, "lambda": 1e-4},
    }  # fmt: skip
    return small(below, **tables)


def settings(**changed: Any) -> Settings:
    known = Settings(LR, block(BOUND), NOISE * BOUND, LOT, MEMORY, floor=FLOOR)
    return replace(known, **changed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("federation", [CENTRAL, FEDERATION], ids=["central", "federation"])
def test_a_run_equals_the_loop_over_examples(federation: dict[str, Any], form: str) -> None:
    """The loop adds the squared coefficients of all draws, from the first step on."""
    table = config(federation, local={"momentum-form": form})
    problem, expected = problem_of(table), settings(form=form)
    model = ended(built(table)).params
    assert gap(model, private_muon.run(problem, expected)) < 1e-9
    for wrong in (replace(expected, floor=1.05 * FLOOR), replace(expected, floor=None)):
        assert gap(model, private_muon.run(problem, wrong)) > 1e-4  # negative controls


def test_a_run_with_inner_momentum_equals_the_loop() -> None:
    """Both features in one run."""
    weights = {"inner-weights": "0.5, 0.3, 0.2"}
    table = config(FEDERATION, "dp-muon-im", privacy=weights)
    problem, expected = problem_of(table), settings(weights=(0.5, 0.3, 0.2))
    model = ended(built(table)).params
    assert gap(model, private_muon.run(problem, expected)) < 1e-9
    for wrong in (
        replace(expected, average=private_muon.clip_then_average),
        replace(expected, weights=(1.0,)),
        replace(expected, floor=1.05 * FLOOR),
    ):  # negative controls
        assert gap(model, private_muon.run(problem, wrong)) > 1e-6


def momenta(form: str, gain: float, steps: int, size: int) -> tuple[np.ndarray, list[float]]:
    """The variances of pure noise in the direction at each step, measured and from the link."""
    rng = np.random.default_rng(0)
    shape = {"w": torch.zeros(1, size, dtype=torch.float64)}
    link = links.momentum(MEMORY, form)
    momentum, moments = link.init(shape), links.no_noise(shape)
    filtered, measured, known = np.zeros(size), [], []
    for t in range(steps):
        draw = rng.standard_normal(size)
        filtered = draw if t == 0 else (1 - gain) * filtered + gain * draw
        context = Context(shape, lambda at: (torch.zeros(1), at), [])
        incoming = {"w": torch.from_numpy(filtered)[None]}
        direction, momentum = link.update(incoming, momentum, context)
        moments = links.noise_moments(moments, MEMORY, gain)
        measured.append(float(direction["w"].square().mean()))
        known.append(float(direction_variance(moments, MEMORY, form)))
    return np.array(measured), known


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gain", [1.0, 0.6])
def test_the_variance_is_that_of_monte_carlo(form: str, gain: float) -> None:
    """At each step from the first on: 400,000 entries, a standard error of 0.22%, so 5 of them."""
    measured, known = momenta(form, gain, 30, 400_000)
    np.testing.assert_allclose(measured, known, rtol=0.0112)
    # The negative control: the other forms of momentum have other variances
    others = [momenta(other, gain, 30, 10)[1] for other in FORMS if other != form]
    assert all(np.abs(measured / other - 1).max() > 0.1 for other in others)


def test_the_variance_of_both_plain_forms_is_the_formula() -> None:
    """At step t, and in the limit (1 - beta) / (1 + beta)."""
    for form, scale in (("ema", (1 - MEMORY) ** 2), ("polyak", 1.0)):
        known = momenta(form, 1.0, 200, 1)[1]
        for t in (1, 2, 7, 200):
            expected = scale * (1 - MEMORY ** (2 * t)) / (1 - MEMORY**2)
            assert known[t - 1] == pytest.approx(expected, rel=1e-12)
        if form == "ema":
            assert known[-1] == pytest.approx((1 - MEMORY) / (1 + MEMORY), rel=1e-12)
            assert known[0] < 0.4 * known[-1]  # the limit would be wrong at the first steps


@pytest.mark.parametrize(("m", "n"), [(20, 20), (40, 10), (100, 60)])
def test_the_edge_bounds_the_mean_largest_singular_value(m: int, n: int) -> None:
    """200 matrices of noise: the mean is at most e, and above 90% of e."""
    draws = 0.3 * torch.randn(200, m, n, generator=torch.Generator().manual_seed(0)).double()
    mean = float(torch.linalg.matrix_norm(draws, 2).mean())
    e = float(noise_edge(torch.tensor(0.3), m, n))
    assert 0.9 * e < mean <= e


def test_each_shape_has_its_own_lambda() -> None:
    """And each matrix of a parameter that contains several."""
    shapes = {"a": (4, 4), "b": (9, 4), "c": (10, 3)}
    rng = torch.Generator().manual_seed(1)
    momenta = {
        name: torch.randn(2, *shape, generator=rng).double() for name, shape in shapes.items()
    }
    link = noise_floor(0.5, 0.1, 0.9, "polyak", routes={"a": 1, "b": 1, "c": 2})
    context = Context(momenta, lambda at: (torch.zeros(1), at), [])
    steps, _ = link.update(momenta, link.init(momenta), context)  # variance 0.1^2 at step 1

    def lam(m: int, n: int) -> float:
        return 0.5 * (0.1 * (math.sqrt(m) + math.sqrt(n))) ** 2

    for name in ("a", "b"):
        torch.testing.assert_close(
            steps[name], maps.smoothed_polar(momenta[name], lam(*shapes[name]))
        )
    parts = [maps.smoothed_polar(part, lam(5, 3)) for part in momenta["c"].split(5, 1)]
    torch.testing.assert_close(steps["c"], torch.cat(parts, 1))
    wrong = maps.smoothed_polar(momenta["b"], lam(4, 4))  # the negative control
    assert float((steps["b"] - wrong).abs().max()) > 1e-3


def test_a_tiny_noise_in_float32_leaves_lambda_positive() -> None:
    """The square of e would be 0."""
    momenta = {"w": torch.randn(1, 5, 3)}
    link = noise_floor(1e-3, 1e-25, 0.9)
    context = Context(momenta, lambda at: (torch.zeros(1), at), [])
    step, _ = link.update(momenta, link.init(momenta), context)
    torch.testing.assert_close(step["w"], maps.exact_sign(momenta["w"]), atol=1e-4, rtol=1e-4)


def test_the_account_is_that_of_dp_muon(tmp_path: Path) -> None:
    plain = config(CENTRAL, orthogonalizer={"noise-floor": 0.0})
    ours, others = (
        {**execute(table, tmp_path / name)["privacy"], "ledger": ""}
        for name, table in {"floor": config(CENTRAL), "plain": plain}.items()
    )
    reason = "it follows from the noise multiplier"
    assert reason in ours["note"] and reason not in others["note"]
    assert ours | {"note": ""} == others | {"note": ""}


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    """The moments of the noise are in the checkpoint."""
    table = config(FEDERATION | {"rounds": 6})
    killed(table, tmp_path / "run", range(1, 6))
    execute(table, tmp_path / "whole")
    same_states(tmp_path / "run", tmp_path / "whole")


BASE = {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 1.0, "lot": 8.0}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"local": {"recipe": "fedmuon"}, "privacy": {}},
            "Choose dp-muon, dp-muon-im or disk-muon",
        ),
        ({"local": {"recipe": "dp-muonbc"}}, "Choose dp-muon, dp-muon-im or disk-muon"),
        ({"orthogonalizer": {"lambda": 0.2}}, "Leave lambda out, or set noise-floor = 0"),
        ({"orthogonalizer": {"name": "exact-sign"}}, "Set .*name = 'smoothed-polar'"),
        (
            {"orthogonalizer": {"shards": 2}, "local": {"steps": 3}},
            "its λ belongs to whole matrices",
        ),
        ({"orthogonalizer": {"row-memory": 0.5}}, "without state"),
        ({"privacy": {"noise": 0.0}}, "Set noise or epsilon above 0"),
        ({"privacy": {"quantile": 0.5}}, "noise of the same scale at every step"),
        (
            {
                "privacy": {"sampling": "cyclic", "noise-correlation": "sqrt-toeplitz"},
                "federation": {"clients": 1, "per-round": 1},
            },
            "noise that is independent between steps",
        ),
        (
            {"attacks": {"kind": "sign-flip", "clients": "1"}},
            "messages of hostile clients is unkno",
        ),
        ({"robust": {"ball": "matrix", "radius": 0.5}}, "noise in clipped messages is unknown"),
        ({"robust": {"mixing": 1}}, "noise in mixed replies is unknown"),
        ({"orthogonalizer": {"noise-floor": -1.0}}, "noise-floor"),
    ],
)
def test_bad_combinations_are_rejected(changes: dict[str, Any], sentence: str) -> None:
    tables: dict[str, dict[str, Any]] = {"orthogonalizer": {"noise-floor": 1.0}}
    for table, keys in (*BASE.items(), *changes.items()):
        if not keys:
            tables.pop(table, None)
        else:
            tables[table] = tables.get(table, {}) | keys
    with pytest.raises(InputError, match=sentence):
        small({"orthogonalizer": {}}, **tables)


def test_the_torch_optimizer_takes_the_key() -> None:
    """And rejects it where it has no effect, or where its noise is unknown."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)).state_dict()
    inputs, labels = torch.randn(100, 4), torch.randint(2, (100,))
    privacy = {"bound": 0.1, "noise": 2.0, "lot": 20.0, "insecure-reproducible-noise": True}

    def moved(**orthogonalizer: Any) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        model.load_state_dict(start)
        private = DPMuon(model, population=100, privacy=privacy, orthogonalizer=orthogonalizer)
        for lot in private.lots(3):
            private.step(lot, inputs[lot.rows], labels[lot.rows])
        return next(model[1].parameters()).detach().clone()

    assert float((moved(**{"noise-floor": 1.0}) - moved()).abs().max()) > 1e-4
    with pytest.raises(InputError, match="Leave noise-floor out"):
        moved(name="newton-schulz", **{"noise-floor": 1.0})
    with pytest.raises(InputError, match="whole matrices"):
        moved(shards=2, **{"noise-floor": 1.0})
