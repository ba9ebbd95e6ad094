"""No set of coefficients reverses a singular value, whatever the normalization."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from conftest import quick

from fedmuon.config.load import parse
from fedmuon.core.errors import InputError
from fedmuon.optim import Muon
from fedmuon.optim.orthogonalizers import map_of_table
from fedmuon.optim.orthogonalizers import newton_schulz as orthogonalizer
from fedmuon.orthogonalize import COEFFICIENTS, newton_schulz, with_safety
from fedmuon.orthogonalize.coefficients import AOL, NORMALIZATIONS, Schedule, schedule
from fedmuon.orthogonalize.lipschitz_constants import sign_change
from fedmuon.orthogonalize.polynomial import precondition

REVERSING = "turbo"
SETS = [name for name in COEFFICIENTS if name != REVERSING]
STEPS = range(1, 13)
KINDS = [*NORMALIZATIONS, AOL]


def lowest_factor(polynomials: Schedule, pieces: int = 64) -> Fraction:
    """Return a lower bound of g over all steps f(x) = x g(x^2), with exact fractions.

    This is another computation than that of `sign_change`: Bernstein coefficients bound g on pieces
    of [0, u^2], and the largest of them, of f(x)^2 / u^2 as a polynomial in x^2, bounds the next u.
    The bound is nearer with more pieces; with 64 it diverges for 12 steps of CANS.
    """
    least, reach = Fraction(10**9), Fraction(1)  # reach is a bound of x^2
    for step in polynomials:
        g = [Fraction(c) for c in step]
        square = [Fraction(0)] * (2 * len(g))
        for i, a in enumerate(g):
            for j, b in enumerate(g):
                square[i + j + 1] += a * b  # f(x)^2 = y g(y)^2
        ends = [(reach * k / pieces, reach * (k + 1) / pieces) for k in range(pieces)]
        least = min(least, *(min(bernstein(g, *one)) for one in ends))
        reach = max(max(bernstein(square, *one)) for one in ends)
        reach = Fraction(int(reach * 10**12) + 1, 10**12)  # rounded up, with a short denominator
    return least


def value(polynomials: Schedule, x: np.ndarray) -> np.ndarray:
    for step in polynomials:
        x = sum((c * x ** (2 * k + 1) for k, c in enumerate(step)), 0 * x)
    return x


def bernstein(polynomial: list[Fraction], low: Fraction, high: Fraction) -> list[Fraction]:
    """Return the Bernstein coefficients on [low, high], between which the polynomial lies."""
    top = len(polynomial) - 1
    moved = [
        sum((polynomial[j] * comb(j, i) * low ** (j - i) for j in range(i, top + 1)), Fraction(0))
        * (high - low) ** i
        for i in range(top + 1)
    ]
    return [
        sum((Fraction(comb(k, i), comb(top, i)) * moved[i] for i in range(k + 1)), Fraction(0))
        for k in range(top + 1)
    ]


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_positive_for_1_to_12_steps(name: str) -> None:
    assert all(sign_change(schedule(name, steps)) is None for steps in STEPS)
    assert lowest_factor(schedule(name, 2)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_exact_fractions_agree_for_all_steps(name: str) -> None:
    assert lowest_factor(schedule(name, max(STEPS)), pieces=256) > 0


def test_turbo_is_rejected_by_both_computations() -> None:
    """The control: a set that reverses singular values above 0.8837."""
    for steps in (1, 4, 12):
        at = sign_change(schedule(REVERSING, steps))
        assert at is not None and 0.8836 < at < 0.885
        assert lowest_factor(schedule(REVERSING, steps)) < 0
    x = np.linspace(0.885, 1, 1001)
    assert (value(schedule(REVERSING, 4), x) < 0).all()


@pytest.mark.parametrize("factor", quick([1.01, 1.05, 1.5, 2.0], [1.01, 1.5]))
def test_safety_does_not_change_a_sign(factor: float) -> None:
    several = [name for name in SETS if len(COEFFICIENTS[name].steps) > 1]
    for name in several:
        for steps in (1, 3, 5, 12):
            assert sign_change(schedule(with_safety(name, factor), steps)) is None, name
    # A factor above 1 / 0.8837 = 1.132 keeps the first step of turbo positive.
    for steps in (1, 4):
        found = sign_change(schedule(with_safety(REVERSING, factor), steps))
        assert (found is None) == (factor > 1.132)


def directions(
    name: str, kind: str, matrix: torch.Tensor, steps: int, low: float = 1e-6
) -> torch.Tensor:
    """Return u_i^T Z v_i for the singular directions of the normalized matrix above `low`."""
    started = precondition(matrix, 1e-7) if kind == AOL else matrix
    u, s, vh = torch.linalg.svd(started, full_matrices=False)
    coefficients = schedule(name, steps)  # numbers, of which `turbo` is not rejected by name
    found = newton_schulz(matrix, steps, coefficients, 1e-7, kind)
    return (u.mT @ found @ vh.mT).diagonal(dim1=-2, dim2=-1)[s > low]


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(10, 784, generator=generator, dtype=torch.float64)
    rank_1 = wide[:1, :40].mT @ wide[1:2, :40]
    return [torch.eye(10, dtype=torch.float64), wide, rank_1, wide.mT]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_no_direction_of_a_matrix_is_reversed(name: str, kind: str) -> None:
    for matrix in matrices():
        for steps in (1, 4, 5):
            assert (directions(name, kind, matrix, steps) > 0).all()


def test_turbo_reverses_directions() -> None:
    """The control: what fedmuon 1.0 did with turbo and aol, and with rank 1 and any divisor."""
    one, wide, rank_1, _ = matrices()
    assert torch.allclose(directions(REVERSING, AOL, one, 4), torch.tensor(-0.99).double(), 1e-2)
    assert 0.4 < float((directions(REVERSING, AOL, wide, 4) < 0).double().mean()) < 0.8
    for kind in KINDS:
        assert (directions(REVERSING, kind, rank_1, 4, low=1e-3) < 0).all()


def test_turbo_scaled_is_turbo_of_a_smaller_argument() -> None:
    x = np.linspace(0, 1, 10_001)
    want = value(schedule(REVERSING, 4), 0.84 * x)
    found = value(schedule("turbo-scaled", 4), x)
    assert np.allclose(found, want, rtol=1e-12, atol=1e-14)
    assert np.abs(found[x >= 0.072] - 1).max() < 0.013
    assert np.abs(found[x >= 0.005] - 1).max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_turbo_is_rejected_with_every_normalization(kind: str) -> None:
    table = {"name": "newton-schulz", "coefficients": REVERSING, "steps": 4, "normalization": kind}
    with pytest.raises(InputError, match=r"reverse singular values above 0\.88.*turbo-scaled"):
        map_of_table(parse({"orthogonalizer": table}).orthogonalizer)
    with pytest.raises(InputError, match="reverse singular values"):
        newton_schulz(torch.eye(3), 4, REVERSING, 1e-7, kind)
    with pytest.raises(InputError, match="reverse singular values"):
        orthogonalizer(4, REVERSING, normalization=kind)
    with pytest.raises(ValueError, match="reverse singular values"):
        Muon([torch.nn.Parameter(torch.eye(3))], lr=1.0, ns_coefficients=REVERSING, ns_steps=4,
             ns_normalization=kind)  # fmt: skip
    map_of_table(
        parse({"orthogonalizer": {**table, "coefficients": "turbo-scaled"}}).orthogonalizer
    )
    map_of_table(parse({"orthogonalizer": {**table, "safety": 1.14}}).orthogonalizer)
