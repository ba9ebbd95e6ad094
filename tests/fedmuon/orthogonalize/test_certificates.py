"""Certificates: no pair of matrices beats them, a constant 1% smaller is beaten where it should be.

All ratios are measured in float64, whose rounding is far below the 1e-9 allowed here as long as
the two matrices are not closer than about 1e-6 of their size.
"""

import math
from typing import Literal

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmuon.orthogonalize import (
    COEFFICIENTS,
    Uncertified,
    clipped_sign,
    exact_sign,
    lipschitz,
    newton_schulz,
    schedule,
    smoothed_polar,
)
from fedmuon.orthogonalize.lipschitz_constants import max_slope

EPS = 0.1
KINDS: tuple[Literal["sharp"], Literal["paper"]] = ("sharp", "paper")
INNER = ((0.5, 2.0, -1.2),)  # its slope peaks inside (0, 1)
SCHEDULES = {
    "cubic": ("cubic", 5),
    "quintic": ("quintic", 5),
    "jordan": ("jordan", 5),
    "express-1": ("polar-express-e2", 1),  # its slope peaks at 1
    "express-9": ("polar-express-e2", 9),
    "taylor-3": ("taylor-3", 4),
    "inner": (INNER, 3),
}


CASES: dict[str, tuple[str, dict]] = {
    "polar": ("smoothed-polar", {"lam": 0.04}),
    "clipped": ("clipped-sign", {"gamma": 0.2}),
}
for label, (coefficients, count) in SCHEDULES.items():
    for normalization in ("plus", "max", "unit"):
        given_steps = {"coefficients": coefficients, "steps": count, "eps": EPS}
        parameters = {**given_steps, "normalization": normalization}
        CASES[f"{label}/{normalization}"] = "newton-schulz", parameters
APPLY = {"smoothed-polar": smoothed_polar, "clipped-sign": clipped_sign,
         "newton-schulz": newton_schulz}  # fmt: skip


def ratios(case: str, a: Tensor, b: Tensor) -> Tensor:
    """||Orth(A) - Orth(B)|| / ||A - B|| for stacks of pairs [S, m, n]."""
    name, parameters = CASES[case]
    moved = APPLY[name](a, **parameters) - APPLY[name](b, **parameters)
    return torch.linalg.norm(moved, dim=(-2, -1)) / torch.linalg.norm(a - b, dim=(-2, -1))


def certified(case: str, kind: Literal["paper", "sharp"] = "sharp") -> float:
    name, parameters = CASES[case]
    return lipschitz(name, kind, **parameters)


def steep_point(coefficients, steps: int) -> float:
    """Where |p_T'| is largest on a grid of [0, 1]: where an adversary should look."""
    x = np.linspace(0, 1, 100_001)
    return float(x[np.argmax(np.abs(_slopes(coefficients, steps, x)))])


def _slopes(coefficients, steps: int, x):
    slope = 1 + 0 * x
    for step in schedule(coefficients, steps):
        slope = slope * sum((2 * k + 1) * c * x ** (2 * k) for k, c in enumerate(step))
        x = sum(c * x ** (2 * k + 1) for k, c in enumerate(step))
    return slope


def pairs(case: str, shape: tuple[int, int], count: int = 200) -> tuple[Tensor, Tensor]:
    """Adversarial pairs [S, m, n]: far, near, at zero, rank one, opposite signs, steepest point."""
    name, parameters = CASES[case]
    g = torch.Generator().manual_seed(7)

    def noise(*lead: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=g, dtype=torch.float64)

    base = noise(count)
    near = base * torch.logspace(-6, 2, count, dtype=torch.float64)[:, None, None]
    step = 1e-5 * torch.linalg.norm(near, dim=(-2, -1), keepdim=True)
    q = min(shape)
    u, _, vh = torch.linalg.svd(noise(count), full_matrices=False)
    at = 0.0
    if name == "newton-schulz":
        at = steep_point(parameters["coefficients"], parameters["steps"])
    sizes = torch.logspace(-5, 1, count, dtype=torch.float64)[:, None]
    one = torch.zeros(count, q, dtype=torch.float64)
    one[:, :1] = sizes
    steep = torch.full((count, q), 0.01, dtype=torch.float64)
    steep[:, :1] = at * EPS * torch.linspace(0.5, 20, count, dtype=torch.float64)[:, None]
    opposite = torch.cat([sizes, -sizes, torch.zeros(count, q - 2, dtype=torch.float64)], 1)

    def build(spectrum: Tensor) -> Tensor:
        return (u * spectrum.unsqueeze(-2)) @ vh

    couples = [
        (base, noise(count)),
        (near, near + step * noise(count)),
        (near, 0 * near),
        (build(one), -build(one)),
        (build(one), build(1.0001 * one)),
        (build(steep), build(steep * 1.0001 + 1e-6)),
        (build(opposite), build(opposite.roll(1, 1))),
        (build(opposite), build(opposite.abs())),
        (build(opposite + 1e-3), build(opposite - 1e-3)),
    ]
    return torch.cat([a for a, _ in couples]), torch.cat([b for _, b in couples])


@pytest.mark.parametrize("shape", [(2, 2), (3, 7)])
@pytest.mark.parametrize("case", CASES)
def test_no_pair_beats_the_certificate(case, shape):
    worst = float(ratios(case, *pairs(case, shape)).max())
    assert worst <= certified(case) * (1 + 1e-9)
    assert certified(case) <= certified(case, "paper") * (1 + 1e-12)


def test_a_direction_that_is_aligned_has_the_constant_of_its_parts():
    """Remark 3.2, for a direction that is a map with a known constant; both are steepest at 0."""
    for share in (0.0, 0.3, 1.0):
        constant = (1 - share) / math.sqrt(0.04) + share / 0.5

        def step(m: Tensor, share: float = share) -> Tensor:
            return (1 - share) * smoothed_polar(m, 0.04) + share * clipped_sign(m, 0.5)

        a, b = pairs("polar", (3, 7))
        moved = torch.linalg.norm(step(a) - step(b), dim=(-2, -1))
        assert (moved <= constant * (1 + 1e-9) * torch.linalg.norm(a - b, dim=(-2, -1))).all()
        tiny = 1e-4 * torch.eye(3, 7, dtype=torch.float64)
        assert torch.linalg.norm(step(tiny)) > 0.99 * constant * torch.linalg.norm(tiny)


def largest_size(coefficients, steps: int) -> float:
    """rho_T of Lemma D.3, in a naive loop."""
    size = 1.0
    for step in schedule(coefficients, steps):
        size = sum(abs(c) * size ** (2 * power + 1) for power, c in enumerate(step))
    return size


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("coefficients", ["cubic", "quintic", "jordan", INNER, ((1.0, 0.5, 0.25),)])
def test_no_result_is_longer_than_the_printed_size(coefficients, steps):
    """||Z_T||_F <= rho_T (Lemma D.3); positive coefficients attain it, so that less would fail."""
    a, b = pairs("polar", (3, 7))
    one = torch.zeros(1, 3, 7, dtype=torch.float64)
    one[0, 0, 0] = 1e9  # of rank one, so that Z_0 is as long as it can be
    every = newton_schulz(torch.cat([a, b, one]), steps, coefficients, EPS)
    longest, most = (
        float(torch.linalg.norm(every, dim=(-2, -1)).max()),
        largest_size(coefficients, steps),
    )
    assert longest <= most * (1 + 1e-9)
    if not isinstance(coefficients, str) and min(coefficients[0]) > 0:
        assert longest > 0.999 * most


QUICK = "polar", "clipped", "quintic/max", "inner/plus"


@pytest.mark.parametrize(
    "case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_climbing_the_ratio_does_not_beat_the_certificate(case):
    """Gradient ascent from the worst pairs; the difference is kept at 1e-3 of a size or more."""
    a, b = pairs(case, (2, 3), 40)
    start = ratios(case, a, b)
    anywhere = torch.randperm(len(start), generator=torch.Generator().manual_seed(8))
    order = torch.cat([start.topk(16).indices, anywhere[:16]])
    middle = ((a + b) / 2)[order].requires_grad_()
    gap = ((a - b) / torch.linalg.norm(a - b, dim=(-2, -1), keepdim=True))[order].requires_grad_()
    optimizer = torch.optim.Adam([middle, gap], lr=3e-3)
    worst = 0.0
    for _ in range(60):
        half = 5e-4 * gap / torch.linalg.norm(gap, dim=(-2, -1), keepdim=True)
        found = ratios(case, middle + half, middle - half)
        assert bool(found.isfinite().all())
        worst = max(worst, float(found.detach().max()))
        optimizer.zero_grad()
        (-found.log().sum()).backward()
        for leaf in (middle, gap):  # coinciding singular values have no derivative in eigh
            assert leaf.grad is not None
            leaf.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    assert 0 < worst <= certified(case) * (1 + 1e-9)


@pytest.mark.parametrize(
    "case", [one for one in CASES if not one.startswith(("express-1", "taylor", "inner"))]
)
def test_one_percent_less_is_beaten(case):
    """Each of these maps is steepest at 0, where a small matrix and zero attain the constant."""
    small = 1e-9 * torch.eye(2, 3, dtype=torch.float64)[None]
    assert float(ratios(case, small, 0 * small)[0]) > 0.99 * certified(case)
    assert float(ratios(case, small, -small)[0]) > 0.99 * certified(case)


@pytest.mark.parametrize("kind", ["max", "unit"])
def test_a_peak_at_one_is_attained_on_the_sphere_of_the_projection(kind):
    """p_T' peaks at x = 1: a rank-one matrix of the norm of the floor is there."""
    floor = 1.0 if kind == "unit" else EPS
    edge, case = floor * torch.eye(2, 1, dtype=torch.float64)[None], f"express-1/{kind}"
    assert float(ratios(case, edge, (1 - 1e-5) * edge)[0]) > 0.99 * certified(case)


def test_reference_values():
    """Constants computed independently, to the digits known."""
    for name, sharp, paper in [("cubic", 75.94, 2.29e22), ("quintic", 231.7, 2.76e292),
                               ("jordan", 4848.8, math.inf)]:  # fmt: skip
        given = {"steps": 5, "coefficients": name, "eps": 0.1}
        assert lipschitz("newton-schulz", "sharp", **given) == pytest.approx(sharp, rel=2e-4)
        assert lipschitz("newton-schulz", "paper", **given) == pytest.approx(paper, rel=3e-3)
    given = {"sigma": 0.01, "alpha": 0.05, "calls": 250}
    name = "gaussian-smoothed-sign"
    assert lipschitz(name, "paper", **given, shape=(784, 10)) == pytest.approx(3.716e6, 1e-3)
    sharp = lipschitz(name, "sharp", **given, shape=(784, 10))
    assert sharp == pytest.approx(4.871, 1e-4)
    assert lipschitz(name, "sharp", **given, shape=(10, 784)) == sharp


def _exact_peak(coefficients, steps: int):
    """max |p_T'| on [0, 1] in 50 digits: local maxima of a fine grid, each by golden section."""
    grid = np.linspace(0, 1, 40_001)
    values = np.abs(_slopes(coefficients, steps, grid))
    inner = np.flatnonzero((values[1:-1] >= values[:-2]) & (values[1:-1] >= values[2:])) + 1
    worth = inner[values[inner] > 0.99 * values.max()]
    with mpmath.workdps(50):
        ends = [mpmath.mpf(0), mpmath.mpf(1)]
        peaks = [
            _golden(coefficients, steps, float(grid[k - 1]), float(grid[k + 1])) for k in worth
        ]
        return max(abs(_slopes(coefficients, steps, x)) for x in ends + peaks)


def _golden(coefficients, steps: int, low: float, high: float):
    a, b, ratio = mpmath.mpf(low), mpmath.mpf(high), (mpmath.sqrt(5) - 1) / 2
    for _ in range(60):
        x, y = b - ratio * (b - a), a + ratio * (b - a)
        left = abs(_slopes(coefficients, steps, x)) > abs(_slopes(coefficients, steps, y))
        a, b = (a, y) if left else (x, b)
    return (a + b) / 2


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [
        ("cubic", 10), ("quintic", 5), ("jordan", 5), ("polar-express-e2", 1),
        ("polar-express-e2", 9), ("polar-express-e3", 9), ("taylor-6", 5), (INNER, 1), (INNER, 4),
        (((-1.0, 3.0, -2.0), (2.0, -4.0, 1.7), (0.1, 3.0, 0.0)), 5),
        (((0.0, 1.0, 0.0),), 3), (((0.3, -2.0, 5.0, -3.2),), 2),
    ],
)  # fmt: skip
def test_the_interval_maximum_against_many_digits(coefficients, steps):
    bound = max_slope(schedule(coefficients, steps))
    assert bound is not None
    peak = _exact_peak(coefficients, steps)
    assert peak <= bound <= peak * (1 + 1e-9)


@pytest.mark.parametrize("step", [INNER[0], (0.3, -2.0, 5.0), (-1.0, 3.0, -2.0), (1.0, 1.0, -3.0)])
def test_the_interval_maximum_against_all_roots(step):
    """Two steps: p'' has degree 23, and every critical point is a root that mpmath can find."""
    inner = np.polynomial.Polynomial([0, step[0], 0, step[1], 0, step[2]])
    slope = (step[0] * inner + step[1] * inner**3 + step[2] * inner**5).deriv()
    with mpmath.workdps(40):
        coefficients = [mpmath.mpf(float(c)) for c in slope.deriv().coef[::-1]]
        roots = mpmath.polyroots(coefficients, maxsteps=500, extraprec=400)
        real = [r.real for r in roots if abs(r.imag) < 1e-12 and 0 <= r.real <= 1]
        points = [mpmath.mpf(0), mpmath.mpf(1), *real]
        peak = max(abs(_slopes((step,), 2, x)) for x in points)
    bound = max_slope(schedule((step,), 2))
    assert bound is not None and peak <= bound <= peak * (1 + 1e-9)


ENDS_IN_ZERO = ((0.0, 1.0, 3.0), (0.0, 1.78, 1.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("place", range(3))
def test_a_step_of_zeros_makes_a_constant_map(place):
    """Its constant is 0, of both kinds; the control is the same schedule without it."""
    steps = ENDS_IN_ZERO[:2]
    constant = (*steps[:place], ENDS_IN_ZERO[2], *steps[place:])
    assert max_slope(constant) == 0.0
    for kind in KINDS:
        assert lipschitz("newton-schulz", kind, steps=3, coefficients=constant) == 0.0
        assert lipschitz("newton-schulz", kind, steps=2, coefficients=steps) > 1.0


@pytest.mark.parametrize("last", [5e-324, 1e-318, 1e-310, 1e-300, 1e-250])
def test_steps_near_underflow_are_bounded(last):
    """Steps that multiply what underflow leaves: of 1e-318 after two steep steps, no box closed."""
    steps = ((3.0, 3.0, 3.0), (3.0, 3.0, 3.0), (last, 0.0, 0.0))
    bound = max_slope(steps)
    peak = last * float(np.abs(_slopes(steps[:2], 2, 1.0)))
    assert bound is not None and peak <= bound <= max(peak * (1 + 1e-9), 1e-200)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(*[st.floats(-3, 3).map(lambda c: round(c, 2))] * 3), min_size=1, max_size=3
    ),
    x=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
@example(steps=list(ENDS_IN_ZERO), x=[0.5])
def test_no_point_is_steeper_than_the_interval_maximum(steps, x):
    bound = max_slope(tuple(steps))
    assert bound is not None
    slopes = np.abs(_slopes(steps, len(steps), np.array(x)))
    assert slopes.max() <= bound * (1 + 1e-12) + 1e-12
    grid = np.abs(_slopes(steps, len(steps), np.linspace(0, 1, 20_001))).max()
    assert bound <= grid * 1.01 + 1e-9  # nor is it a loose bound


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(COEFFICIENTS)),
    steps=st.integers(0, 6),
    eps=st.floats(1e-8, 10),
    kind=st.sampled_from(["plus", "max", "unit"]),
    sigma=st.floats(1e-6, 1e3),
    alpha=st.floats(1e-6, 0.999),
    calls=st.integers(1, 10**6),
    shape=st.tuples(st.integers(1, 400), st.integers(1, 400)),
)
def test_sharp_is_never_larger_than_paper(name, steps, eps, kind, sigma, alpha, calls, shape):
    gaussian = {"sigma": sigma, "alpha": alpha, "calls": calls, "shape": shape}
    iterated = {"steps": steps, "coefficients": name, "eps": eps, "normalization": kind}
    for map_name, parameters in [
        ("newton-schulz", iterated),
        ("gaussian-smoothed-sign", gaussian),
        ("smoothed-polar", {"lam": eps}),
        ("clipped-sign", {"gamma": eps}),
        ("exact-sign", {"gamma": eps}),
    ]:
        sharp = lipschitz(map_name, "sharp", **parameters)
        assert 0 < sharp <= lipschitz(map_name, "paper", **parameters)


@pytest.mark.parametrize("shape", [(6, 3), (3, 3), (2, 5), (4, 1)])
def test_the_gaussian_floor_fails_as_rarely_as_it_says(shape):
    """P(s_q(Z + sigma H) <= gamma) <= alpha / calls for the Z of an adversary, within 4 sigma."""
    sigma, alpha, calls, draws = 0.3, 0.8, 2, 40_000
    gamma = 1 / lipschitz(
        "gaussian-smoothed-sign", "sharp", sigma=sigma, alpha=alpha, calls=calls, shape=shape
    )
    rate = alpha / calls
    g = torch.Generator().manual_seed(3)
    allowed = rate + 4 * math.sqrt(rate * (1 - rate) / draws)
    noise = sigma * torch.randn(draws, *shape, generator=g, dtype=torch.float64)
    one = torch.zeros(shape, dtype=torch.float64)
    one[0, 0] = 5.0
    for fixed in (torch.zeros(shape).double(), one, torch.randn(shape, generator=g).double()):
        least = torch.linalg.svdvals(fixed + noise)[:, -1]
        assert float((least <= gamma).double().mean()) <= allowed
    least = torch.linalg.svdvals(noise)[:, -1]  # the control: a floor five times as high fails
    assert float((least <= 5 * gamma).double().mean()) > allowed


def _by_rotation(sigma: float, alpha: float, calls: int, shape: tuple[int, int]):
    """sigma (sqrt(d1 - q) - sqrt(q) - sqrt(2 ln(calls / alpha))) in 50 digits."""
    with mpmath.workdps(50):
        d1, q = max(shape), min(shape)
        tail = mpmath.sqrt(2 * mpmath.log(mpmath.mpf(calls) / mpmath.mpf(alpha)))
        return mpmath.mpf(sigma) * (mpmath.sqrt(d1 - q) - mpmath.sqrt(q) - tail)


def test_the_largest_of_all_floors_is_used():
    """By rotation where q counts, by columns where it does not; M's rows beyond q never count."""
    given = {"sigma": 0.3, "alpha": 0.05, "calls": 250}
    for shape in [(784, 10), (10, 784), (300, 40)]:
        floor = 1 / lipschitz("gaussian-smoothed-sign", "sharp", **given, shape=shape)
        assert abs(floor / _by_rotation(**given, shape=shape) - 1) < 1e-13
    for shape in [(60, 2), (5, 5), (20, 100)]:
        floor = 1 / lipschitz("gaussian-smoothed-sign", "sharp", **given, shape=shape)
        assert floor > _by_rotation(**given, shape=shape)


@pytest.mark.parametrize("shape", [(60, 12), (12, 60)])
def test_the_rotated_floor_fails_as_rarely_as_it_says(shape):
    """It is at most s_min of what a rotation leaves of H alone, whatever M is; few draws, as the
    inequality is not tight: none of them may fail. The control: 2.2 times the floor does."""
    sigma, alpha, calls, draws = 0.3, 0.8, 2, 2_000
    floor = float(_by_rotation(sigma, alpha, calls, shape))
    found = lipschitz(
        "gaussian-smoothed-sign", "sharp", sigma=sigma, alpha=alpha, calls=calls, shape=shape
    )
    assert found == pytest.approx(1 / floor, rel=1e-12)
    g = torch.Generator().manual_seed(4)
    noise = sigma * torch.randn(draws, 60, 12, generator=g, dtype=torch.float64)
    large = 50 * torch.randn(60, 12, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(large, mode="complete")[0].T
    for fixed in (large, 0 * large):
        least = torch.linalg.eigvalsh((fixed + noise).mT @ (fixed + noise))[:, 0].sqrt()
        rest = (turn @ noise)[:, 12:]
        below = torch.linalg.eigvalsh(rest.mT @ rest)[:, 0].sqrt()
        assert bool((below <= least * (1 + 1e-9)).all())
        assert not (least <= floor).any()
        assert float(below.mean()) >= sigma * (math.sqrt(48) - math.sqrt(12))  # Gordon
    assert float((least <= 2.2 * floor).double().mean()) > alpha / calls  # of M = 0


def test_exact_sign_in_its_tube():
    """1/gamma holds for pairs in the tube, is nearly attained, and nothing holds outside."""
    gamma = 0.5
    bound = lipschitz("exact-sign", "sharp", gamma=gamma)
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(500, 4, 3, dtype=torch.float64), full_matrices=False)
    spectrum = gamma + torch.rand(500, 1, 3, dtype=torch.float64)
    spectrum[:250] = gamma
    a = (u * spectrum) @ vh
    angle = torch.tensor(1e-4, dtype=torch.float64)
    turn = torch.eye(4, dtype=torch.float64)
    turn[0, 0] = turn[1, 1] = angle.cos()
    turn[0, 1], turn[1, 0] = -angle.sin(), angle.sin()
    for b in (a.roll(1, 0), turn @ a):
        moved = torch.linalg.norm(exact_sign(a) - exact_sign(b), dim=(-2, -1))
        ratio = moved / torch.linalg.norm(a - b, dim=(-2, -1))
        assert float(ratio.max()) <= bound * (1 + 1e-9)
    assert float(ratio.max()) > 0.99 * bound
    assert lipschitz("exact-sign", "paper", gamma=gamma) == 2 * bound


def test_what_has_no_constant_is_refused():
    for name, word in [("exact-sign", "Set gamma"), ("randomized-polar", "sketch miss")]:
        with pytest.raises(Uncertified, match=word):
            lipschitz(name, "sharp")
    assert issubclass(Uncertified, ValueError)


def test_impossible_parameters_are_refused():
    gaussian = {"sigma": 0.1, "alpha": 0.1, "calls": 10, "shape": (4, 3)}
    for name, parameters in [
        ("smoothed-polar", {"lam": 0.0}),
        ("clipped-sign", {"gamma": -1.0}),
        ("exact-sign", {"gamma": 0.0}),
        ("newton-schulz", {"steps": 5, "eps": 0.0}),
        ("newton-schulz", {"steps": -1}),
        ("newton-schulz", {"steps": 5, "normalization": "l1"}),
        ("newton-schulz", {"steps": 5, "coefficients": (1.5, math.nan, 0.0)}),
        ("gaussian-smoothed-sign", gaussian | {"sigma": 0.0}),
        ("gaussian-smoothed-sign", gaussian | {"alpha": 1.0}),
        ("gaussian-smoothed-sign", gaussian | {"calls": 0}),
        ("unknown", {}),
    ]:
        with pytest.raises(ValueError, match=r"must be|Use|use|Pass"):
            lipschitz(name, "sharp", **parameters)
    with pytest.raises(ValueError, match="'paper' or 'sharp'"):
        lipschitz("smoothed-polar", "exact", lam=1.0)  # type: ignore[arg-type]
