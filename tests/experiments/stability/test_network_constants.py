"""Estimated constants: never above proved ones, and the curvature is the Hessian's norm."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small

import fedmuon
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import bound
from fedmuon.experiments.stability.network_constants import curvature, observed_constants
from fedmuon.federated.build import resolve
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants
from fedmuon.tasks.matrix import MatrixTask

TASK = MatrixTask(6, 3, torch.float64)


def batch(n: int) -> Batch:
    rng = np.random.default_rng(2)
    inputs = rng.standard_normal((n, 6))
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(rng.integers(0, 3, n)))


def test_estimates_never_exceed_what_is_proved() -> None:
    models = [TASK.initial(np.random.default_rng(seed)) for seed in (0, 1)]
    found, proved = observed_constants(TASK, models, batch(40)), constants()
    assert 0.1 * proved.gradient_bound < found.gradient_bound <= proved.gradient_bound
    assert found.lipschitz == found.gradient_bound
    assert 0 < found.smoothness <= proved.smoothness
    assert 0.3 < found.loss_bound <= proved.loss_bound


def test_curvature_is_the_norm_of_the_hessian() -> None:
    some, X = batch(12), TASK.initial(np.random.default_rng(3))["weight"]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(some.inputs @ flat.view(6, 3), 1)
        return (1 - chances[torch.arange(12), some.labels]).mean()

    hessian = torch.autograd.functional.hessian(loss, X.flatten())
    assert isinstance(hessian, torch.Tensor)
    expected = float(torch.linalg.eigvalsh(hessian).abs().max())
    assert curvature(TASK, {"weight": X}, some) == pytest.approx(expected, rel=0.05)
    assert curvature(TASK, {"weight": X}, some) <= expected * (1 + 1e-6)


def network(**local: object) -> dict:
    return {
        "data": {"name": "digits", "train": 120, "test": 60, "minimum": 5},
        "task": {"name": "network", "model": "mlp"},
        "federation": {"clients": 4, "per-round": 2, "rounds": 2},
        "local": {"lr": 1e-3, "steps": 1, "aux-lr": 1e-3, **local},
    }


@pytest.mark.slow
def test_the_bound_of_a_network_is_estimated_and_says_so(tmp_path: Path) -> None:
    execute(small(**network()), tmp_path / "a")
    case = bound.from_directory(tmp_path / "a")
    found = bound.judge(case)
    assert found.bound is not None and found.bound.status == "estimated"
    assert any("may be larger elsewhere" in line for line in found.bound.assumptions)
    assert not any("proved" in line for line in found.bound.assumptions)
    assert case.l_orth == pytest.approx(1 / np.sqrt(0.1))  # not the auxiliary step, which is 1
    record = bound.report(case, found)
    assert record["status"] == "estimated"


@pytest.mark.slow
def test_a_constant_that_is_its_author_s_word_is_said_of_networks_too(tmp_path: Path) -> None:
    tables = small(**network()).model_dump(by_alias=True)
    tables["orthogonalizer"] = {}
    half = fedmuon.Orthogonalizer(lambda m: 0.5 * m, 0.5)
    found = fedmuon.bound(fedmuon.run(tables, orthogonalizer=half, out=tmp_path / "a"))
    assert found["status"] == "estimated"
    assert any("L_orth = 0.5, for which its author answers" in one for one in found["assumptions"])


@pytest.mark.slow
def test_adamw_beside_muon_has_no_constant(tmp_path: Path) -> None:
    execute(small(**network(aux="adamw")), tmp_path / "a")
    verdict = bound.judge(bound.from_directory(tmp_path / "a"))
    assert verdict.bound is None and "AdamW's step" in verdict.refusal


def test_parameters_alone_say_nothing_of_a_network() -> None:
    config = resolve(small(**network()))
    verdict = bound.judge(bound.from_parameters(config, 30))
    assert "make the run" in verdict.refusal
