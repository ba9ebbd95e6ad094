"""Quality of inexact polar maps: closed forms against mpmath, bounds against Monte Carlo.

(gamma, nu) of 002, Assumption 2.1: <M, T(M)> >= (1 - gamma) ||M||_* and ||T(M)||_op <= 1 + nu.
delta_q, eps_q of 004, Definition 3: how far Z Z^T is from a projector, and Z from the polar factor.
"""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from conftest import quick
from torch import Tensor

from fedmuon.analysis.theory.stationarity import (
    least_power,
    polynomial_quality,
    sketched_quality,
)
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import newton_schulz, randomized_polar, schedule
from fedmuon.orthogonalize.lipschitz_constants import (
    newton_schulz_error,
    polar_error_bound,
    residual,
    slowdown,
)
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


def quality(m: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """(gamma, nu) [...] of a map that took M [..., m, n] to the output."""
    alignment = (m * output).sum((-2, -1)) / torch.linalg.svdvals(m).sum(-1)
    return 1 - alignment, (torch.linalg.matrix_norm(output, 2) - 1).clamp_min(0)


EXACT = [*itertools.product(SPECTRA, ("cubic", "quintic", "jordan", "polar-express-e2"))]


@pytest.mark.parametrize(
    ("name", "coefficients"),
    quick(EXACT, [*EXACT[:4], *zip(SPECTRA, ["quintic"] * 7, strict=True)]),
)
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
    gamma, nu = polynomial_quality(singular, coefficients, steps, delta)
    # the matrix was rounded to doubles; the steepest schedule has slope 128 at 0
    assert gamma == pytest.approx(lost, abs=1e-13) and nu == pytest.approx(max(0, over), abs=1e-12)
    measured = quality(m, newton_schulz(m, steps, coefficients, 1e-30))
    assert [one.item() for one in measured] == pytest.approx([gamma, nu], abs=1e-12)
    if coefficients in ("cubic", "quintic"):
        assert nu == 0 and 0 <= gamma < 1
        worse = polynomial_quality(singular, coefficients, steps, 2 * delta)[0]
        assert worse > gamma + 1e-4  # the negative control: another divisor is another gamma


def alignment_floor(s: np.ndarray, rank: int, oversample: int, power: int, delta: float) -> float:
    """A floor of E <M, T(M)> over Gaussian sketches; 0 where none is proved."""
    try:
        lost, _ = sketched_quality(s, rank, oversample, power, delta)
    except InputError:
        return 0.0
    return (1 - lost) * s.sum()


def alignments(m: Tensor, delta: float, draws: int, **given) -> np.ndarray:
    """<M, T(M)> for independent sketches."""
    stack, rng = m.expand(draws, *m.shape), np.random.default_rng(0)
    outputs = randomized_polar(stack, delta=delta, generator=rng.spawn(draws), **given)
    assert quality(stack, outputs)[1].max() < 1e-12
    return (stack * outputs).sum((-2, -1)).numpy()


@pytest.mark.parametrize("name", quick(SPECTRA, ["flat", "heavy tail", "rank deficient"]))
def test_proposition_2_3_by_monte_carlo(name):
    """Four standard errors below the mean of 200 draws, never above the proved floor."""
    told, falling = 0, np.sort(SPECTRA[name])[::-1]
    m, s = matrix(SPECTRA[name]), falling[falling > 0]
    for (rank, coefficients), (p, power, steps), delta in itertools.product(
        ((1, "cubic"), (2, "quintic"), (4, "cubic")),
        ((2, 0, 0), (3, 1, 2), (2, 2, 3)),
        (float(s.max()), float(np.linalg.norm(s))),
    ):
        if rank < len(s):
            floor = alignment_floor(s, rank, p, power, delta)
            given = {"rank": rank, "oversample": p, "power": power, "steps": steps}
            seen = alignments(m, delta, 200, coefficients=coefficients, **given)
            error = seen.std() / math.sqrt(len(seen))
            assert seen.mean() + 4 * error + 1e-12 * seen.mean() >= floor
            told += floor > 0
    assert told or name == "flat"  # the floor says something where anything stands out


@pytest.mark.parametrize("name", SPECTRA)
def test_the_least_power_is_the_first_that_is_proved(name):
    """Equation (18) against trying one number after the other."""
    s = np.sort(SPECTRA[name])[::-1]
    s, tried = s[s > 0], 0
    for rank, oversample in itertools.product(range(1, len(s)), (2, 3, 10)):
        proved = [h for h in range(60) if alignment_floor(s, rank, oversample, h, 9e6) > 0]
        try:
            found = least_power(s, rank, oversample)
        except InputError as error:
            assert "power iterations do not improve" in str(error) and not proved
            continue
        tried += found > 0
        assert found == proved[0] if proved else found >= 60
    assert tried or name not in ("random", "clustered")
    for bad, words in (
        ((s, len(s), 3), "must be below"),
        ((s, 1, 1), "oversample is 1"),
        (([0.0, 0.0], 1, 2), "above 0"),
        (([1.0, -1.0], 1, 2), "negative number"),
    ):
        with pytest.raises(InputError, match=words):
            least_power(*bad)
    with pytest.raises(InputError, match="at least"):
        polynomial_quality(s, "cubic", 3, s[0] / 2)


def test_a_floor_that_is_not_proved_is_violated():
    """Half the divisor doubles the floor: without Newton-Schulz steps no sketch gets there."""
    s = SPECTRA["heavy tail"]
    seen = alignments(matrix(s), 2.0, 100, rank=3, oversample=3, power=1, steps=0).mean()
    assert alignment_floor(s, 3, 3, 1, 2.0) < seen < 0.9 * alignment_floor(s, 3, 3, 1, 1.0)


def residual_bound(initial: float, degree: int, steps: int) -> float:
    """delta_0^((k+1)^q) >= delta_q (004, Theorem 2), on all of [0, 1].

    With a_s = (2s)!/(4^s s!^2) and p = sum_{s<=k} a_s d^s one has phi' = (2k+1) a_k d^k p (004,
    Lemma 3), a series with positive coefficients from d^k on. Hence phi(d) / d^(k+1) rises, to
    phi(1) = 1 at d = 1, and phi(d) <= d^(k+1): there is no need for d to be small.
    """
    with np.errstate(over="ignore"):
        return float(np.float64(initial) ** np.power(float(degree + 1), steps))


def distances(m: Tensor, output: Tensor) -> tuple[float, float]:
    """||Pi - Z Z^T||_op, Pi the projector onto the column space of M, and ||U V^T - Z||_op."""
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    basis = u * (s > max(m.shape) * torch.finfo(m.dtype).eps * s[0])
    off = torch.linalg.eigvalsh(basis @ basis.mT - output @ output.mT).abs().max()
    return float(off), float(torch.linalg.matrix_norm(basis @ vh - output, 2))


def image(x: Any, degree: int) -> Any:
    """x p(x^2) with p the Taylor polynomial of 004, Definition 2, term by term."""
    return x * sum(
        mpmath.mpf(math.comb(2 * s, s)) / 4**s * (1 - x * x) ** s for s in range(degree + 1)
    )


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_residual_bound_of_004(name, degree):
    singular = SPECTRA[name][SPECTRA[name] > 0]
    m, initial = matrix(SPECTRA[name]), 1 - (singular.min() / np.linalg.norm(singular)) ** 2
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
            projected, off = distances(m, z)
            assert projected == pytest.approx(float(exact), abs=1e-12)
            assert projected <= bound + 1e-12
            assert off == pytest.approx(polar_error_bound(float(exact)), abs=1e-7)
            assert off <= polar_error_bound(bound) + 1e-7  # eps = delta^(1/2) of rounding in delta
            x = [image(value, degree) for value in x]


def test_other_coefficients_violate_the_bound():
    """Jordan's steps do not converge to the polar factor, and so break delta_0^(3^q)."""
    singular = np.linspace(0.5, 1, 8)
    m, initial = matrix(singular), 1 - (0.5 / float(np.linalg.norm(singular))) ** 2
    bound = residual_bound(initial, 2, 5)
    assert distances(m, newton_schulz(m, 5, "jordan", 1e-30))[0] > 100 * bound
    assert distances(m, newton_schulz(m, 5, "quintic", 1e-30))[0] <= bound + 1e-12


def test_the_ad_hoc_polynomial_is_not_monotone():
    """004, H.4: x p(x)^2 of Jordan's coefficients leaves [0, 1] and turns; Taylor's does not."""
    x = np.linspace(0, 1, 10_001)

    def image(coefficients: Any) -> np.poly1d:
        (a, b, c), p = schedule(coefficients, 1)[0], np.poly1d
        return p([1.0, 0.0]) * p([c, b, a]) ** 2

    ad_hoc, taylor = image("jordan"), image("quintic")
    slope = ad_hoc.deriv()
    assert slope(0) == pytest.approx(3.4445**2) and slope(0) > 0 > slope(1)
    assert slope(1) == pytest.approx(-0.5068, abs=1e-4)
    assert ad_hoc(x).max() == pytest.approx(1.4457, abs=1e-4)
    assert x[ad_hoc(x).argmax()] == pytest.approx(0.3075, abs=1e-3)
    assert (np.diff(taylor(x)) > 0).all() and taylor(1) == pytest.approx(1)


def test_the_bound_holds_on_all_of_the_unit_interval():
    for degree in range(1, 9):
        for delta in np.linspace(0, 1, 401):
            assert residual(delta, degree, 1) <= delta ** (degree + 1) * (1 + 1e-14)
        assert residual(1e-5, degree, 1) > 0  # where 1 - (1 - d) p^2 has lost every digit
    assert residual(0.4, 1, 1) > residual_bound(0.4, 2, 1)  # a degree less does not keep it


def test_slowdown():
    assert slowdown(0.0) == 1 and slowdown(0.5) == 2 and slowdown(1.0) == math.inf
    assert polar_error_bound(1e-20) == pytest.approx(5e-21)
    for steps in range(1, 5):  # it falls to 1 doubly exponentially
        assert slowdown(polar_error_bound(residual_bound(0.5, 2, steps))) - 1 < 0.5 ** (3**steps)


@pytest.mark.parametrize(
    "given", [(1.5, 2, "at most 1"), (0.5, 0, "of 1 or more"), (0.5, 2.5, "integer")]
)
def test_impossible_residuals_are_refused_with_the_mend(given: Any) -> None:
    initial, degree, words = given
    with pytest.raises(InputError, match=words):
        residual(initial, degree, 3)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_error_of_newton_schulz_is_reached_by_equal_singular_values(rank: int) -> None:
    """||NS(M) - msign(M)||_F of M = tau I of that rank, whose norm the map is not told."""
    tau, steps = 0.3, 4
    x = tau
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x**3
    bound = newton_schulz_error("cubic", steps, tau, rank)
    assert math.sqrt(rank) * (1 - x) == pytest.approx(bound, rel=1e-9)
