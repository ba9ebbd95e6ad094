"""Symmetric products by panels: against full products, and a whole iteration against an SVD."""

import pytest
import torch
from torch import Tensor

from fedmuon.orthogonalize import newton_schulz, schedule, spectral
from fedmuon.orthogonalize.polynomial import gram_dtypes
from fedmuon.orthogonalize.spectral import PANEL, gram, symmetric_product, symmetric_share

SMALL, LARGE = 322, 350  # sizes without and with panels; the last panel has fewer rows
SIZES = [SMALL, 5 * PANEL + 4, LARGE]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def factors(rows: int, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Three polynomials of a symmetric matrix, in float64."""
    torch.manual_seed(0)
    draw = torch.randn(*lead, rows, rows + 20, dtype=torch.float64)
    g = draw @ draw.mT / rows
    return g, 3 * g + g @ g, g @ g


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("lead", [(), (1,), (2,)])
def test_it_is_the_full_product(rows: int, lead: tuple[int, ...]) -> None:
    a, b, c = factors(rows, lead)
    for found, expected in (
        (symmetric_product(a, b), a @ b),
        (symmetric_product(a, b, alpha=0.3), 0.3 * (a @ b)),
        (symmetric_product(a, b, c, 0.7, -2.0), 0.7 * c - 2.0 * (a @ b)),
        (gram(a, torch.float64), a @ a.mT),
    ):
        assert found.shape == expected.shape and apart(found, expected) < 1e-14


def test_panels_are_used_from_their_size_on() -> None:
    """The control: a product that is not symmetric is mirrored, if it is computed by panels."""
    for rows, inner, panels in ((SMALL, SMALL, False), (LARGE, LARGE, True), (128, 2048, True),
                                (128, 2047, False), (127, 9000, False)):  # fmt: skip
        a = torch.randn(rows, inner, dtype=torch.float64)
        b = torch.randn(inner, rows, dtype=torch.float64)
        found, full = symmetric_product(a, b), a @ b
        assert (apart(found, full) > 0.1) == panels == (symmetric_share(rows, inner) < 1)
        if panels:
            above = torch.ones(rows, rows).triu(PANEL).bool()  # outside the panels' own squares
            assert apart(found[above], full[above]) < 1e-14
            assert apart(found.mT[above], full[above]) < 1e-14
    assert symmetric_share(LARGE, LARGE) < 0.6 and symmetric_share(128, 2048) == 0.75


def test_derivatives_go_through_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every matrix, the products of an iteration are symmetric, so derivatives are the same."""
    torch.manual_seed(2)
    matrix, weights = torch.randn(2, LARGE, LARGE + 8, dtype=torch.float64)
    slopes = []
    for size in (1 << 25, 1 << 30):
        monkeypatch.setattr(spectral, "PANELS_FROM", size)
        point = matrix.clone().requires_grad_()
        (newton_schulz(point, 2, "quintic", 1e-7, "max") * weights).sum().backward()
        slopes.append(point.grad)
    assert apart(*slopes) < 1e-12


def test_panels_are_mapped_by_vmap() -> None:
    stack = torch.stack(factors(LARGE, ()))
    assert apart(torch.vmap(lambda m: symmetric_product(m, m))(stack), stack @ stack) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(LARGE, 6 * LARGE), (LARGE + 20, LARGE)])
def test_newton_schulz_of_large_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """On the Gram matrix and on the matrix itself, against the polynomial of singular values."""
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=dtype)
    assert bool(gram_dtypes(min(shape), max(shape), dtype, schedule("quintic", 5))) == (
        max(shape) > 2 * LARGE
    )
    found = newton_schulz(matrix, 5, "quintic", 1e-7, "max")
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for a, b, c in schedule("quintic", 5):
        s = a * s + b * s**3 + c * s**5
    assert apart(found.double(), (u * s) @ vh) < (1e-5 if dtype == torch.float32 else 1e-12)
