"""Derivatives of orthogonalization maps: against central differences of their values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.orthogonalize.spectral import derivative, factors

Map = Callable[[Tensor], Tensor]
MAPS: dict[str, Map] = {
    "smoothed": lambda m: maps.smoothed_polar(m, 0.1),
    "sharp": lambda m: maps.smoothed_polar(m, 1e-8),  # by way of an SVD
    "clipped": lambda m: maps.clipped_sign(m, 0.7),
    "exact": maps.exact_sign,
    "cubic": lambda m: maps.newton_schulz(m, 3, eps=0.1),
}
SHAPES = [(7, 3), (3, 7), (4, 4)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=made)


def pulled(apply: Map, matrix: Tensor, cotangents: Tensor) -> Tensor:
    """The adjoint derivative at one stack [B, m, n], of many cotangents [k, B, m, n] at once."""
    leaf = matrix.clone().requires_grad_()
    return torch.autograd.grad(apply(leaf), leaf, cotangents, is_grads_batched=True)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAPS)
def test_against_central_differences(name: str, shape: tuple[int, int]) -> None:
    """<H, DF(M)[D]> for every entry D, by values of the map alone, which err by 1e-16 / step."""
    apply, matrix, step = MAPS[name], drawn(2, *shape), 1e-5
    cotangents, count = drawn(3, 2, *shape, seed=1), shape[0] * shape[1]
    found, expected = pulled(apply, matrix, cotangents), torch.zeros(3, 2, count).double()
    for place, entry in enumerate(torch.eye(count).double().view(count, *shape)):
        moved = (apply(matrix + step * entry) - apply(matrix - step * entry)) / (2 * step)
        expected[..., place] = (cotangents * moved).sum((-2, -1))
    assert (found.flatten(2) - expected).abs().max() < 1e-8 * max(1.0, float(found.abs().max()))
    elsewhere = pulled(apply, matrix + 0.01 * drawn(2, *shape, seed=6), cotangents).flatten(2)
    assert (elsewhere - expected).abs().max() > 1e-4


def test_the_value_is_that_without_a_derivative() -> None:
    matrix = drawn(3, 7, 3)
    for apply in MAPS.values():
        assert torch.equal(apply(matrix.clone().requires_grad_()), apply(matrix))


EQUAL = [(0.8, 0.8, 0.0), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (0.9, 0.9 + 1e-13, 0.3)]


@pytest.mark.parametrize("values", EQUAL)
def test_equal_and_zero_singular_values(values: tuple[float, ...]) -> None:
    """Where torch's eigh divides by a gap of 0: against matrices that are nearly the same."""
    u, v = (torch.linalg.qr(drawn(*shape, seed=2))[0] for shape in ((6, 3), (3, 3)))
    matrix = (u * torch.tensor(values, dtype=torch.float64)) @ v
    towards, root = drawn(6, 3, seed=3), torch.tensor(0.1, dtype=torch.float64).sqrt()
    found = derivative(factors(matrix, root, torch.hypot), towards)
    step = 1e-5
    ahead, behind = (maps.smoothed_polar(matrix + t * step * towards, 0.1) for t in (1, -1))
    assert (found - (ahead - behind) / (2 * step)).abs().max() < 1e-6


def test_it_is_its_own_adjoint_and_not_steeper_than_the_certificate() -> None:
    for divisor, root in ((torch.hypot, 0.1), (torch.maximum, 0.7)):
        held = factors(drawn(5, 7, 3), torch.tensor(root).double(), divisor)
        one, other = drawn(5, 7, 3, seed=4), drawn(5, 7, 3, seed=5)
        there, back = derivative(held, one), derivative(held, other)
        torch.testing.assert_close((other * there).sum(), (one * back).sum(), rtol=1e-12, atol=0)
        assert (there.norm(dim=(1, 2)) <= one.norm(dim=(1, 2)) / root).all()
