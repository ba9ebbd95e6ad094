"""AOL preconditioning (Turbo-Muon) against a float64 loop over rows, and an SVD of its result."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmuon.analysis.theory.corollaries import Uniform
from fedmuon.config.load import parse
from fedmuon.experiments.stability.certificates import CertifiedSetting, certify
from fedmuon.optim import Muon
from fedmuon.optim.orthogonalizers import as_orthogonalizer, map_of_table, value_of_table
from fedmuon.optim.orthogonalizers import newton_schulz as newton_schulz_value
from fedmuon.orthogonalize import Uncertified, lipschitz, newton_schulz, schedule
from fedmuon.orthogonalize.lipschitz_constants import growth
from fedmuon.orthogonalize.polynomial import precondition

SHAPES = [(2, 3, 7), (2, 7, 3), (3, 5, 5), (1, 1), (4, 1), (1, 4), (2, 2, 30, 4)]


def looped(matrix: np.ndarray, floor: float) -> np.ndarray:
    """Rows over max(sqrt(sum_j |G_ij|), floor); the columns of a tall matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return looped(matrix.T, floor).T
    out = np.zeros_like(matrix)
    for i, row in enumerate(matrix):
        total = sum(abs(float(row @ other)) for other in matrix)
        out[i] = row / max(np.sqrt(total), floor)
    return out


def expected(stack: Tensor, steps: int, coefficients: str, floor: float) -> Tensor:
    """p_T of the singular values of the preconditioned matrices, by an SVD each."""
    found = []
    for matrix in stack.double().reshape(-1, *stack.shape[-2:]):
        u, s, vh = np.linalg.svd(looped(matrix.numpy(), floor), full_matrices=False)
        for a, b, c in schedule(coefficients, steps):
            s = a * s + b * s**3 + c * s**5
        found.append(torch.from_numpy((u * s) @ vh))
    return torch.stack(found).reshape(stack.shape)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_from_the_preconditioned_matrix(shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    stack = torch.randn(shape, dtype=dtype)
    for view in (stack, stack.mT.contiguous().mT):  # square ones do not depend on their storage
        for steps, coefficients in ((0, "cubic"), (4, "you"), (5, "jordan")):
            found = newton_schulz(view, steps, coefficients, 1e-7, "aol")
            assert found.shape == stack.shape and found.dtype == dtype
            assert apart(found, expected(stack, steps, coefficients, 1e-7)) < tolerance


def test_other_normalizations_and_the_other_side_fail_the_same_comparison() -> None:
    """Negative controls: Frobenius, rows of a tall matrix, and squares instead of moduli."""
    torch.manual_seed(0)
    stack = torch.randn(2, 9, 3, dtype=torch.float64)
    want = expected(stack, 4, "you", 1e-7)
    assert apart(newton_schulz(stack, 4, "you", 1e-7, "max"), want) > 1e-2
    transposed = torch.stack([torch.from_numpy(looped(one.numpy(), 1e-7).copy()) for one in stack])
    rows = stack / (stack @ stack.mT).abs().sum(-1, keepdim=True).sqrt()
    squares = stack.mT @ stack
    assert apart(precondition(stack, 1e-7), transposed) < 1e-12
    assert apart(rows, transposed) > 1e-2
    assert apart(stack / squares.square().sum(-2, keepdim=True).sqrt().sqrt(), transposed) > 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scales_zeros_and_the_floor(scale: float) -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.float64):
        stack = torch.randn(3, 4, 6, dtype=dtype) * scale
        stack[1] = 0
        stack[2, 1] = 0
        for floor in (1e-7, 1.0):
            want = torch.stack([torch.from_numpy(looped(m.double().numpy(), floor)) for m in stack])
            found = precondition(stack, floor)
            assert torch.equal(found[1], 0 * found[1]) and torch.equal(found[2, 1], 0 * found[2, 1])
            assert apart(found, want) < 1e-5
            assert float(torch.linalg.matrix_norm(found.double(), 2).max()) <= 1 + 1e-5


def test_the_spectrum_is_nearer_to_one_and_half_precision_works() -> None:
    torch.manual_seed(2)
    stack = torch.randn(20, 16, 64, dtype=torch.float64)
    plain = torch.linalg.svdvals(stack / stack.norm(dim=(-2, -1), keepdim=True))
    found = torch.linalg.svdvals(precondition(stack, 1e-7))
    assert bool((found.min(-1).values > 1.5 * plain.min(-1).values).all())
    assert bool((found <= 1 + 1e-12).all())
    half = newton_schulz(stack.bfloat16(), 4, "you", 1e-7, "aol")
    assert half.dtype == torch.bfloat16
    assert apart(half, newton_schulz(stack, 4, "you", 1e-7, "aol")) < 0.05


def test_no_lipschitz_constant_exists() -> None:
    """The rows (1, 0) and (0, R): moving the first by 1/R shortens its image by a fixed part, so
    the ratio grows with R. The control: the ratio of `max` stays below its constant."""
    ratios = []
    for length in (1.0, 1e3, 1e6):
        one = torch.tensor([[1.0, 0.0], [0.0, length]], dtype=torch.float64)
        turned = one + torch.tensor([[0.0, 1.0 / length], [0.0, 0.0]], dtype=torch.float64)
        moved, plain = (
            newton_schulz(one, 1, "cubic", 1.0, kind) - newton_schulz(turned, 1, "cubic", 1.0, kind)
            for kind in ("aol", "max")
        )
        ratios.append(float(moved.norm() / (one - turned).norm()))
        certified = lipschitz("newton-schulz", "sharp", steps=1, eps=1.0, normalization="max")
        assert float(plain.norm() / (one - turned).norm()) <= certified
    assert ratios[1] > 50 * ratios[0] and ratios[2] > 500 * ratios[1] > 5e4
    for kind in ("sharp", "paper"):
        with pytest.raises(Uncertified, match="'aol' has no Lipschitz constant"):
            lipschitz("newton-schulz", kind, steps=3, normalization="aol")


def test_bounds_of_a_config_reject_it_and_its_size_is_known() -> None:
    table = {"name": "newton-schulz", "normalization": "aol", "steps": 4, "coefficients": "you"}
    config = parse({"orthogonalizer": table})
    found = certify(CertifiedSetting(config, np.full(20, 200), Uniform(5, 0.05)))
    assert found.bound is None and "'aol' has no Lipschitz constant" in found.refusal
    size = growth("newton-schulz", steps=4, coefficients="you", normalization="aol")
    assert size is not None
    torch.manual_seed(3)
    matrices = torch.randn(50, 3, 5, dtype=torch.float64)
    largest = torch.linalg.matrix_norm(newton_schulz(matrices, 4, "you", 1e-7, "aol"), 2).max()
    assert float(largest) <= size(100.0)


def test_configs_values_and_the_optimizer_use_it() -> None:
    torch.manual_seed(4)
    stack = torch.randn(2, 6, 4, dtype=torch.float64)
    want = expected(stack, 4, "you", 1e-7)
    config = parse({"orthogonalizer": {"name": "newton-schulz", "normalization": "aol",
                                       "steps": 4, "coefficients": "you"}})  # fmt: skip
    unused: Any = None
    assert apart(map_of_table(config.orthogonalizer)(stack, unused, 0), want) < 1e-11
    value = newton_schulz_value(4, "you", normalization="aol")
    for one in (value, value_of_table(config.orthogonalizer)):
        assert one.lipschitz is None and apart(as_orthogonalizer(one).apply(stack), want) < 1e-11
    weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    weight.grad = stack[0].clone()
    given = {"ns_coefficients": "you", "ns_steps": 4, "ns_dtype": torch.float64}
    Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="original", ns_normalization="aol",
         **given).step()  # fmt: skip
    assert apart(-weight.detach(), want[0] * (6 / 4) ** 0.5) < 1e-10
    with pytest.raises(ValueError, match="plus, max, unit, aol"):
        Muon([weight], ns_normalization="l1")
