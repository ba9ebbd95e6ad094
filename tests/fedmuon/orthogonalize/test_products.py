"""Newton-Schulz with products in bfloat16, against a loop that rounds each product by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedmuon
from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.experiments.stability.influence import require_smooth
from fedmuon.optim.orthogonalizers import map_of_table, value_of_table
from fedmuon.orthogonalize import newton_schulz, schedule
from fedmuon.orthogonalize.coefficients import Coefficients

HALF = torch.bfloat16
UNIT = 2.0**-8  # half the distance of 1 to the next bfloat16, relative


def rounded(matrix: Tensor) -> Tensor:
    """The nearest bfloat16, in float64."""
    return matrix.to(HALF).double()


def looped(matrix: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """One matrix in float64, rounded to bfloat16 after each product, the shorter side first."""
    if matrix.shape[0] > matrix.shape[1]:
        return looped(matrix.mT, steps, coefficients).mT
    z = rounded(matrix.double() / max(float(matrix.double().norm()), 1e-7))
    for a, b, c in schedule(coefficients, steps):
        g = rounded(z @ z.mT)
        z = rounded(a * z + rounded(b * g + c * g @ g) @ z)
    return z


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 9, 40), (3, 40, 9), (2, 24, 24), (2, 70, 200), (1, 1)])
def test_it_is_the_iteration_rounded_to_bfloat16(shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = torch.randn(shape, dtype=dtype)
    for steps, coefficients in ((1, "you"), (5, "jordan")):
        found = newton_schulz(stack, steps, coefficients, 1e-7, "max", HALF)
        assert found.shape == stack.shape and found.dtype == dtype
        assert torch.equal(rounded(found), found.double())  # each entry is a bfloat16
        want = [looped(one, steps, coefficients) for one in stack.reshape(-1, *shape[-2:])]
        full = newton_schulz(stack.double(), steps, coefficients, 1e-7, "max")
        loops = torch.stack(want).reshape(shape)
        # Products of the processor round sums in another order, so entries may differ by a unit.
        assert apart(found, loops) < 0.75 * apart(loops, full) + UNIT
        assert apart(found, full) < 5 * UNIT * (1 + steps)
        if stack[0].numel() > 1:
            assert apart(found, full) > UNIT / 8  # the control: full precision is another thing


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e30])
def test_the_division_is_in_full_precision(scale: float) -> None:
    """Matrices whose squares leave the range of float32 are the same, up to their scale."""
    torch.manual_seed(0)
    stack = torch.randn(2, 6, 9)
    plain = newton_schulz(stack, 5, "jordan", 1e-30, "plus", HALF)
    found = newton_schulz(stack * scale, 5, "jordan", 1e-37 if scale < 1 else 1e-7, "plus", HALF)
    assert apart(found, plain) < 8 * UNIT
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4), 5, "jordan", products=HALF),
                       torch.zeros(2, 3, 4))  # fmt: skip
    assert newton_schulz(torch.zeros(0, 3, 4), 5, products=HALF).shape == (0, 3, 4)


def test_the_table_and_the_value_use_it() -> None:
    torch.manual_seed(0)
    stack = torch.randn(2, 8, 30)
    table = {"name": "newton-schulz", "products": "bfloat16", "coefficients": "jordan"}
    config = parse({"orthogonalizer": table}).orthogonalizer
    want = newton_schulz(stack, 5, "jordan", products=HALF)
    assert torch.equal(map_of_table(config)(stack, None, 0), want)  # pyright: ignore[reportArgumentType]
    value = value_of_table(config)
    assert value.lipschitz is None and torch.equal(value.apply(stack), want)
    assert value_of_table(config.model_copy(update={"products": "full"})).lipschitz


def test_a_run_differs_and_learns_as_much() -> None:
    runs = {}
    for products in ("full", "bfloat16"):
        runs[products] = fedmuon.run(
            {
                "data": {"name": "digits", "train": 400, "test": 200},
                "federation": {"clients": 4, "per-round": 2, "rounds": 6},
                "local": {"recipe": "fedmuon", "lr": 0.3},
                "orthogonalizer": {"name": "newton-schulz", "products": products},
            }
        )
    full, half = (np.asarray(runs[one].model["weight"]) for one in ("full", "bfloat16"))
    assert 1e-4 < np.linalg.norm(half - full) / np.linalg.norm(full) < 0.05
    assert abs(runs["full"].summary["accuracy"] - runs["bfloat16"].summary["accuracy"]) < 0.05


def test_what_it_is_not_for() -> None:
    table = {"name": "newton-schulz", "products": "bfloat16"}
    case = CertifiedSetting(parse({"orthogonalizer": table}), np.full(20, 200), Uniform(5, 0.05))
    found = certify(case)
    assert found.bound is None and "products = 'bfloat16' rounds" in found.refusal
    with pytest.raises(InputError, match="rounding is larger than the effect"):
        require_smooth(case.config)
    with pytest.raises(InputError, match="rounding errors hide the small bias"):
        parse({"orthogonalizer": table, "local": {"recipe": "dp-muonbc"},
               "privacy": {"noise": 1.0}})  # fmt: skip
    with pytest.raises(InputError, match="only by the orthogonalizer `newton-schulz`"):
        parse({"orthogonalizer": {"products": "bfloat16"}})
