"""Scales of an orthogonalized step against float64 SVDs: those of the shape, and PolarGrad's."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from torch import Tensor

from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.optim import Muon
from fedmuon.optim.links import map_matrices
from fedmuon.orthogonalize import exact_sign

SCALES: dict[str, Callable[[int, int, np.ndarray], float]] = {
    "none": lambda m, n, s: 1.0,
    "original": lambda m, n, s: math.sqrt(m / n) if m > n else 1.0,
    "match-rms": lambda m, n, s: 0.2 * math.sqrt(m if m > n else n),
    "scion": lambda m, n, s: math.sqrt(m) / math.sqrt(n),
    "polargrad": lambda m, n, s: float(s.sum()),
}
OF_TORCH = {"original": "original", "match-rms": "match_rms_adamw", "scion": "scion",
            "polargrad": "polargrad"}  # fmt: skip
SHAPES = [(3, 8), (8, 3), (5, 5)]


def expected(matrix: Tensor, adjust: str) -> np.ndarray:
    u, s, vh = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    m, n = matrix.shape
    return SCALES[adjust](m, n, s) * (u @ vh)


def apart(found: Tensor, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("adjust", SCALES)
def test_a_step_is_the_polar_factor_times_the_scale(adjust: str) -> None:
    torch.manual_seed(0)
    context: Any = None
    direction = {str(shape): torch.randn(2, *shape, dtype=torch.float64) for shape in SHAPES}
    direction["filter"] = torch.randn(2, 4, 3, 2, dtype=torch.float64)
    for grouped in (False, True):
        link = map_matrices(lambda m, context, block: exact_sign(m), adjust, grouped)
        found, _ = link.update(direction, {}, context)
        for name, value in direction.items():
            for one, image in zip(value.flatten(2), found[name].flatten(2), strict=True):
                assert apart(image, expected(one, adjust)) < 1e-10
    other = "scion" if adjust != "scion" else "polargrad"  # the control
    assert apart(found["(3, 8)"][0], expected(direction["(3, 8)"][0], other)) > 1e-2


@pytest.mark.parametrize("adjust", OF_TORCH)
def test_the_optimizer_has_the_same_scales(adjust: str) -> None:
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    params += [torch.nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))]  # stacked with another
    for param in params:
        param.grad = torch.randn_like(param)
    given: dict[str, Any] = {"orthogonalizer": exact_sign, "ns_dtype": torch.float64}
    Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn=OF_TORCH[adjust],
         **given).step()  # fmt: skip
    for param in params:
        assert param.grad is not None
        assert apart(-param.detach(), expected(param.grad, adjust)) < 1e-10
    with pytest.raises(InputError, match="'scion', 'polargrad'"):
        Muon(params, adjust_lr_fn="nuclear")


def test_polargrad_halves_a_quadratic_where_one_scale_stalls() -> None:
    """On |X - A|^2 / 2 the nuclear norm falls with the distance, so steps of one lr converge.
    The control: steps of a fixed length stop at that length."""
    target = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    ends = {}
    for adjust in ("polargrad", "original"):
        weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        given: dict[str, Any] = {"orthogonalizer": exact_sign, "ns_dtype": torch.float64}
        optimizer = Muon([weight], lr=0.3, weight_decay=0.0, momentum=0.0, adjust_lr_fn=adjust,
                         **given)  # fmt: skip
        for _ in range(60):
            weight.grad = (weight - target).detach()
            optimizer.step()
        ends[adjust] = float((weight - target).detach().norm())
    assert ends["polargrad"] < 1e-3 < 0.05 < ends["original"]


def test_polargrad_runs_on_the_matrix_task_but_has_no_bound() -> None:
    config = small({}, local={"adjust": "polargrad"})
    found = certify(CertifiedSetting(config, np.full(20, 200), Uniform(5, 0.05)))
    assert found.bound is None and "such a step has no Lipschitz constant" in found.refusal
    given = CertifiedSetting(config, np.full(20, 200), Uniform(5, 0.05), l_orth=1.0)
    assert "such a step has no Lipschitz constant" in certify(given).refusal
    sgd = parse({"local": {"recipe": "fedavg"}})  # the control, without a map
    assert certify(CertifiedSetting(sgd, np.full(20, 200), Uniform(5, 0.05))).bound is not None
    with pytest.raises(InputError, match="Set adjust = 'none' or 'polargrad'"):
        small({}, local={"adjust": "scion"})
