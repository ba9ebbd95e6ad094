"""Quality of inexact polar maps: closed forms against mpmath, bounds against Monte Carlo."""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from map_quality import (
    initial_residual,
    mean_quality,
    newton_schulz_quality,
    orthogonality_residual,
    polar_error,
    power_count,
    quality,
    randomized_alignment,
    randomized_quality,
    residual_bound,
)
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import exact_sign, newton_schulz, randomized_polar, schedule
from fedmuon.orthogonalize.lipschitz_constants import polar_error_bound, residual, slowdown
from fedmuon.orthogonalize.polynomial import scaled_newton_schulz

SPECTRA = {
    "random": np.random.default_rng(0).random(8) + 0.01,
    "flat": np.ones(8),
    "clustered": np.array([1.0, 1 - 1e-9, 1 - 1e-9, 0.5, 0.5, 0.5 - 1e-12, 1e-3, 1e-3]),
    "tiny": np.array([1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-9, 1e-10, 1e-10]),
    "two scales": np.array([1e6] * 4 + [1.0] * 4),
    "heavy tail": 1 / np.arange(1, 9),
    "rank deficient": np.array([3.0, 2.0, 1.0, 0, 0, 0, 0, 0]),
}


def matrix(singular: np.ndarray, shape: tuple[int, int] = (8, 12), seed: int = 0) -> Tensor:
    """Random bases around the given singular values."""
    raw = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(raw, full_matrices=False)
    return (u * torch.as_tensor(singular, dtype=torch.float64)) @ vh


@pytest.mark.parametrize("coefficients", ["cubic", "quintic", "jordan", "polar-express-e2"])
@pytest.mark.parametrize("name", SPECTRA)
def test_proposition_2_2_is_exact(name, coefficients):
    """The iteration on 50-digit matrices, its trace and its norm, against the closed form."""
    singular, delta, steps = SPECTRA[name], float(np.linalg.norm(SPECTRA[name])), 3
    m = matrix(singular)
    with mpmath.workdps(50):
        a = mpmath.matrix(m.tolist())
        z, zero = a / mpmath.mpf(delta), mpmath.zeros(8, 12)
        for step in schedule(coefficients, steps):
            powers = [z]
            for _ in step[1:]:
                powers.append(z * (z.T * powers[-1]))
            z = sum((x * mpmath.mpf(c) for c, x in zip(step, powers, strict=True)), zero)
        gain = sum(a[i, j] * z[i, j] for i in range(8) for j in range(12))
        lost = float(1 - gain / sum(mpmath.svd_r(a, compute_uv=False)))
        over = float(max(mpmath.svd_r(z, compute_uv=False)) - 1)
    gamma, nu = newton_schulz_quality(singular, delta, steps, coefficients)
    # the matrix was rounded to doubles; the steepest schedule has slope 128 at 0
    assert gamma == pytest.approx(lost, abs=1e-13) and nu == pytest.approx(max(0, over), abs=1e-12)
    measured = quality(m, newton_schulz(m, steps, coefficients, 1e-30))
    assert measured.gamma.item() == pytest.approx(gamma, abs=1e-12)
    assert measured.nu.item() == pytest.approx(nu, abs=1e-12)
    if coefficients in ("cubic", "quintic"):
        assert nu == 0 and 0 <= gamma < 1
        worse = newton_schulz_quality(singular, 2 * delta, steps, coefficients)[0]
        assert worse > gamma + 1e-4  # the negative control: another divisor is another gamma


def test_quality_of_any_map_on_stacks():
    stack = torch.stack([matrix(s) for s in SPECTRA.values()] + [torch.zeros(8, 12).double()])
    found = quality(stack, exact_sign(stack))
    assert found.gamma.abs().max() < 1e-12 and found.nu.abs().max() < 1e-12
    half = quality(stack, 0.5 * exact_sign(stack))
    assert torch.allclose(half.gamma[:-1], torch.tensor(0.5).double()) and half.gamma[-1] == 0
    over = quality(stack.float(), 1.25 * exact_sign(stack).float())
    assert torch.allclose(over.nu[:-1], torch.tensor(0.25).double(), atol=1e-6)
    assert over.gamma[0] < 0  # more than aligned, at the price of nu
    signs = torch.tensor([1.0, 0.0]).double()[:, None, None, None] * exact_sign(stack)
    mean = mean_quality(stack, signs)
    assert torch.allclose(mean.gamma[:-1], torch.tensor(0.5).double()) and mean.nu.eq(0).all()


def alignments(m: Tensor, delta: float, draws: int, **given) -> np.ndarray:
    """<M, T(M)> for independent sketches."""
    rng = np.random.default_rng(0)
    stack = m.expand(draws, *m.shape)
    outputs = randomized_polar(stack, delta=delta, generator=rng.spawn(draws), **given)
    assert quality(stack, outputs).nu.max() < 1e-12
    return (stack * outputs).sum((-2, -1)).numpy()


@pytest.mark.parametrize("name", SPECTRA)
def test_proposition_2_3_by_monte_carlo(name):
    """Four standard errors below the mean of 200 draws, never above the proved floor."""
    singular, told = SPECTRA[name], 0
    m, rank = matrix(singular), int((singular > 0).sum())
    for (s, coefficients), (p, power, steps), delta in itertools.product(
        ((1, "cubic"), (2, "quintic"), (4, "cubic")),
        ((2, 0, 0), (3, 1, 2), (2, 2, 3)),
        (float(singular.max()), float(np.linalg.norm(singular))),
    ):
        if s < rank:
            floor = randomized_alignment(singular, s, p, power, delta)
            given = {"rank": s, "oversample": p, "power": power, "steps": steps}
            seen = alignments(m, delta, 200, coefficients=coefficients, **given)
            error = seen.std() / math.sqrt(len(seen))
            assert seen.mean() + 4 * error + 1e-12 * seen.mean() >= floor
            told += floor > 0
    assert told or name == "flat"  # the floor says something where anything stands out


def test_a_floor_that_is_not_proved_is_violated():
    """Half the divisor doubles the floor: without Newton-Schulz steps no sketch gets there."""
    singular = SPECTRA["heavy tail"]
    seen = alignments(matrix(singular), 2.0, 100, rank=3, oversample=3, power=1, steps=0)
    assert seen.mean() < 0.9 * randomized_alignment(singular, 3, 3, 1, 1.0)
    assert seen.mean() > randomized_alignment(singular, 3, 3, 1, 2.0)


def test_the_power_count_is_the_least_that_proves_something():
    rng, asked = np.random.default_rng(1), set()
    for _ in range(200):
        singular = np.sort(rng.random(40) ** rng.uniform(0.02, 2))[::-1]
        s, p = int(rng.integers(1, 30)), int(rng.integers(2, 4))
        h = power_count(singular, s, p)
        assert randomized_alignment(singular, s, p, h, singular[0]) > 0
        assert randomized_quality(singular, s, p, h, singular[0])[0] < 1
        assert h == 0 or randomized_alignment(singular, s, p, h - 1, singular[0]) == 0
        asked.add(h)
    assert {0, 1, 2} <= asked and max(asked) > 10
    assert power_count(SPECTRA["rank deficient"], 3, 2) == 0
    with pytest.raises(ValueError, match="oversample > 7"):
        power_count(np.ones(8), 2, 2)
    assert power_count(np.ones(8), 2, 8) == 0


def image(x: Any, degree: int) -> Any:
    """x p(x^2) with p the Taylor polynomial of 004, Definition 2, term by term."""
    return x * sum(
        mpmath.mpf(math.comb(2 * s, s)) / 4**s * (1 - x * x) ** s for s in range(degree + 1)
    )


@pytest.mark.parametrize("degree", [0, 2.5])
def test_a_degree_is_a_whole_number(degree: float) -> None:
    with pytest.raises(InputError, match="whole number from 1"):
        residual(0.5, degree, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_residual_bound_of_004(name, degree):
    singular = SPECTRA[name][SPECTRA[name] > 0]
    m, initial = matrix(SPECTRA[name]), 1 - (singular.min() / np.linalg.norm(singular)) ** 2
    assert initial_residual(m).item() == pytest.approx(initial, abs=1e-12)
    with mpmath.workdps(60):
        tiny = mpmath.mpf("1e-55")  # what sixty digits leave open
        start = [mpmath.mpf(float(s)) for s in singular]
        size = mpmath.sqrt(sum(s * s for s in start))
        x = [s / size for s in start]
        first = 1 - min(x) ** 2
        for steps in range(6):
            exact, most = 1 - min(x) ** 2, first ** ((degree + 1) ** steps)
            assert exact <= most + tiny and 1 - min(x) <= 1 - mpmath.sqrt(1 - most) + tiny
            bound = residual_bound(initial, degree, steps)
            assert bound == pytest.approx(float(most), rel=1e-9)
            own = residual(float(first), degree, steps)
            assert own == pytest.approx(float(exact), rel=1e-9, abs=1e-50)
            z = scaled_newton_schulz(m, torch.linalg.matrix_norm(m), steps, f"taylor-{degree}")
            assert orthogonality_residual(m, z).item() == pytest.approx(float(exact), abs=1e-12)
            assert orthogonality_residual(m, z).item() <= bound + 1e-12
            off = polar_error(m, z).item()
            assert off == pytest.approx(polar_error_bound(float(exact)), abs=1e-7)
            assert off <= polar_error_bound(bound) + 1e-7  # eps = delta^(1/2) of rounding in delta
            x = [image(value, degree) for value in x]


def test_other_coefficients_violate_the_bound():
    """Jordan's steps do not converge to the polar factor, and so break delta_0^(3^q)."""
    m = matrix(np.linspace(0.5, 1, 8))
    initial = initial_residual(m).item()
    z = newton_schulz(m, 5, "jordan", 1e-30)
    assert orthogonality_residual(m, z).item() > 100 * residual_bound(initial, 2, 5)
    good = newton_schulz(m, 5, "quintic", 1e-30)
    assert orthogonality_residual(m, good).item() <= residual_bound(initial, 2, 5) + 1e-12


def test_the_bound_holds_on_all_of_the_unit_interval():
    for degree in range(1, 9):
        for delta in np.linspace(0, 1, 401):
            assert residual(delta, degree, 1) <= delta ** (degree + 1) * (1 + 1e-14)
        assert residual(1e-5, degree, 1) > 0  # where 1 - (1 - d) p^2 has lost every digit
    assert residual(0.4, 1, 1) > residual_bound(0.4, 2, 1)  # a degree less does not keep it
    assert residual_bound(0.5, 4, 10_000) == 0 and residual_bound(1.0, 4, 10_000) == 1


def test_slowdown():
    assert slowdown(0.0) == 1 and slowdown(0.5) == 2 and slowdown(1.0) == math.inf
    assert polar_error_bound(1e-20) == pytest.approx(5e-21)
    for steps in range(1, 5):  # it falls to 1 doubly exponentially
        assert slowdown(polar_error_bound(residual_bound(0.5, 2, steps))) - 1 < 0.5 ** (3**steps)


def test_impossible_spectra_are_refused_with_the_mend():
    for call, word in [
        (lambda: newton_schulz_quality([2.0, 1.0], 1.0, 5), "delta >= "),
        (lambda: randomized_alignment([2.0, 1.0], 1, 2, 0, 1.0), "delta >= "),
        (lambda: randomized_alignment([2.0, 1.0], 1, 1, 0, 2.0), "oversample >= 2"),
        (lambda: randomized_alignment([2.0, 1.0], 3, 2, 0, 2.0), "rank <= 2"),
        (lambda: power_count([0.0, 0.0], 1, 2), "one of them positive"),
        (lambda: residual(1.5, 2, 1), "lies in"),
        (lambda: residual(0.5, 0, 1), "from 1 on"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()
