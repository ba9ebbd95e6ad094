"""The recursion and its three-state extension against 50-digit and brute-force definitions."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import matrix, mp, mpf

from fedmuon.analysis import aligned_amplification, amplification, step_amplification
from fedmuon.analysis.theory import recursion
from fedmuon.analysis.theory.recursion import of_rounds, scheduled_amplification
from fedmuon.core.errors import InputError

mp.dps = 50
DIGITS = 1e-12  # relative: a hundred roundings of 1e-16 with room, far below any modelling error

LR = st.floats(1e-6, 0.3)
BETA = st.one_of(st.floats(1e-9, 1), st.sampled_from([0.0, 0.9, 0.999999, 1.0]))
L_ORTH = st.floats(1e-2, 30)
L_G = st.one_of(st.just(0.0), st.floats(1e-9, 2))  # no subnormal products: they have few digits


def exact_transition(lr: float, beta: float, l_orth: float, l_g: float):
    """(6), (7) from the doubles as they are, without rounding."""
    e, b, big, g = (mpf(value) for value in (lr, beta, l_orth, l_g))
    step = matrix([[1 + e * big * (1 - b) * g, e * big * b], [(1 - b) * g, b]])
    return step, matrix([e * big * (1 - b), 1 - b])


def close(found, wanted, tolerance: float = DIGITS) -> bool:
    """Relative agreement with 50-digit numbers."""
    pairs = zip(np.asarray(found).ravel(), np.ravel(wanted), strict=True)
    return all(abs(mpf(float(a)) - b) <= tolerance * abs(b) for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(LR, BETA, L_ORTH, L_G, st.integers(1, 12), st.integers(1, 5))
def test_amplification_is_its_definition(lr, beta, l_orth, l_g, rounds, steps) -> None:
    step, kick = exact_transition(lr, beta, l_orth, l_g)
    one = [
        [(step ** (steps * (rounds - 1 - s) + steps - 1 - k) * kick)[0] for k in range(steps)]
        for s in range(rounds)
    ]
    per_step = step_amplification(lr, beta, l_orth, l_g, rounds, steps)
    assert per_step.shape == (rounds, steps)
    assert close(per_step, one)
    assert close(amplification(lr, beta, l_orth, l_g, rounds, steps), [sum(row) for row in one])
    found_step, found_kick = recursion.transition(lr, beta, l_orth, l_g)
    assert close(found_step, step.tolist()) and close(found_kick, list(kick))


def test_a_wrong_recursion_is_seen() -> None:
    """Negative control: the model moving before the momentum, or one power too many."""
    step, kick = exact_transition(0.05, 0.9, 4.0, 0.2)
    a = amplification(0.05, 0.9, 4.0, 0.2, 5, 2)
    off = [((step ** (2 * (4 - s) + 1)) * (kick + step * kick))[0] for s in range(5)]
    lagging, _ = exact_transition(0.05, 0.9, 4.0, 0.2)
    lagging[0, 0] = mpf(1)
    late = [((lagging ** (2 * (4 - s))) * (kick + lagging * kick))[0] for s in range(5)]
    assert not close(a, off) and not close(a, late)


def test_a_million_steps_are_quick_and_keep_their_digits() -> None:
    """A small increment 1e-9 a step would be blurred by 1e6 roundings of 1 + 1e-9."""
    lr, beta, l_orth, l_g, count = 1e-6, 0.9, 1.0, 0.3, 10**6
    start = time.process_time()  # a busy machine does not count, and a slow one has ten times more
    a = amplification(lr, beta, l_orth, l_g, count)
    assert time.process_time() - start < 5.0
    step, kick = exact_transition(lr, beta, l_orth, l_g)
    for s in (0, 1, 123_456, count - 2, count - 1):
        assert close(a[s], [(step ** (count - 1 - s) * kick)[0]])
    assert (np.diff(a) <= 0).all()


@settings(max_examples=60, deadline=None)
@given(LR, BETA, L_ORTH, L_G)
def test_spectral_radius(lr, beta, l_orth, l_g) -> None:
    step, _ = exact_transition(lr, beta, l_orth, l_g)
    trace, determinant = step[0, 0] + step[1, 1], mpf(beta)
    root = (trace + mp.sqrt(trace**2 - 4 * determinant)) / 2
    radius = recursion.spectral_radius(lr, beta, l_orth, l_g)
    assert close(radius, [root])
    bound = recursion.spectral_radius_bound(lr, l_orth, l_g)
    assert close(bound, [1 + mpf(lr) * mpf(l_orth) * mpf(l_g)])
    assert radius <= bound * (1 + 1e-15)


def test_the_radius_is_the_growth_rate() -> None:
    a = amplification(0.1, 0.7, 10.0, 0.2, 400)
    assert math.isclose(a[0] / a[1], recursion.spectral_radius(0.1, 0.7, 10.0, 0.2), rel_tol=1e-12)
    assert a[0] / a[1] < recursion.spectral_radius_bound(0.1, 10.0, 0.2) - 1e-3


@pytest.mark.parametrize("steps", [1, 3])
def test_infinite_is_what_overflows_and_nothing_else(steps: int) -> None:
    step, moved = exact_transition(1.0, 0.9, 1e3, 1.0)
    wanted = []
    for _ in range(400 * steps):
        wanted.append(moved[0])
        moved = step * moved
    found = step_amplification(1.0, 0.9, 1e3, 1.0, 400, steps).ravel()[::-1]
    kept = np.isfinite(found)
    assert kept.any() and (found[~kept] == np.inf).all()
    assert [value < 1.7e308 for value in wanted] == kept.tolist()
    assert close(found[kept], np.array(wanted)[kept])
    a = amplification(1.0, 0.9, 1e3, 1.0, 400, steps)
    assert np.isfinite(a[-1]) and np.isinf(a[0])
    # A sum may overflow where no term does.
    assert np.isinf(of_rounds(np.full((1, 2), 1e308)))


def test_bad_input_is_refused() -> None:
    for bad in ({"beta": 1.1}, {"beta": -0.1}, {"lr": math.nan}, {"lr": -1}, {"l_orth": math.inf}):
        with pytest.raises(InputError):
            amplification(**{"lr": 0.1, "beta": 0.9, "l_orth": 1, "l_g": 1, **bad}, rounds=3)
    for rounds, steps in ((0, 1), (3, 0), (2.5, 1)):
        with pytest.raises(InputError, match="must be an integer"):
            amplification(0.1, 0.9, 1, 1, rounds, steps)  # type: ignore[arg-type]
    for bad in (np.ones(3), -np.ones(4), np.full(4, np.nan)):
        with pytest.raises(InputError, match="l_g"):
            step_amplification(0.1, 0.9, 1.0, bad, 2, 2)
    for bad in (-0.1, 1.1):
        with pytest.raises(InputError, match="share"):
            aligned_amplification(0.05, 0.9, 4.0, 0.2, 3, 1, bad)
    with pytest.raises(InputError, match="divides"):
        aligned_amplification(0.0, 0.9, 4.0, 0.2, 3, 1, 0.1)


def aligned_by_force(lr, beta, l_orth, l_g, steps, alpha, schedule, client):
    """The three norms propagated call by call, D from the mean of the directions really taken."""
    e, b, big, g, share = (mpf(value) for value in (lr, beta, l_orth, l_g, alpha))
    x = m = d = mpf(0)
    for cohort in schedule.tolist():
        ends = []
        for i in cohort:
            xi, mi, taken = x, m, mpf(0)
            for _ in range(steps):
                mi = b * mi + (1 - b) * (g * xi + (1 if i == client else 0))
                direction = (1 - share) * big * mi + share * d
                xi, taken = xi + e * direction, taken + direction
            ends.append((xi, mi, taken / steps))
        x, m, d = (sum(end[j] for end in ends) / len(cohort) for j in range(3))
    return x


@settings(max_examples=25, deadline=None)
@given(
    LR, BETA, L_ORTH, L_G, st.integers(1, 4), st.floats(0, 1), st.integers(0, 99), st.integers(0, 5)
)
def test_alignment_is_brute_force(lr, beta, l_orth, l_g, steps, alpha, seed, client) -> None:
    rng = np.random.default_rng(seed)
    schedule = np.stack([rng.choice(6, 3, replace=False) for _ in range(7)])
    a = aligned_amplification(lr, beta, l_orth, l_g, 7, steps, alpha)
    exposure = sum(mpf(float(a[s])) for s in range(7) if client in schedule[s]) / 3
    wanted = aligned_by_force(lr, beta, l_orth, l_g, steps, alpha, schedule, client)
    assert abs(exposure - wanted) <= DIGITS * wanted


def test_alignment_without_alignment_is_the_paper() -> None:
    plain = amplification(0.05, 0.9, 4.0, 0.2, 30, 3)
    np.testing.assert_allclose(aligned_amplification(0.05, 0.9, 4.0, 0.2, 30, 3), plain, rtol=1e-13)
    # Negative control: shrinking L alone forgets that D carries the perturbation on.
    shrunk = amplification(0.05, 0.9, 2.0, 0.2, 30, 3)
    half = aligned_amplification(0.05, 0.9, 4.0, 0.2, 30, 3, alignment=0.5)
    assert (half[:-1] > shrunk[:-1] * 1.01).all()
    long = aligned_amplification(1.0, 0.9, 1e3, 1.0, 1000, 2, 0.5)
    assert np.isinf(long[0])  # a_s knows how many rounds follow, not how many went before
    assert (long[-20:] == aligned_amplification(1.0, 0.9, 1e3, 1.0, 20, 2, 0.5)).all()


def products(lr, beta, l_orth, l_g, factors, steps, late: int = 0) -> list:
    """e1^T A_{T-1} ... A_{t+1} b_t for every t, multiplied out from the left; `late` is a fault."""
    pairs = [
        exact_transition(lr, beta, l_orth, g)
        if factor == 1
        else exact_transition(float(mpf(lr) * mpf(factor)), beta, l_orth, g)
        for factor, g in zip(np.repeat(factors, steps).tolist(), l_g, strict=True)
    ]
    found = []
    for t, (_, kick) in enumerate(pairs):
        row = matrix([[1, 0]])
        for step, _ in reversed(pairs[t + 1 - late :]):
            row = row * step
        found.append((row * kick)[0])
    return found


@settings(max_examples=30, deadline=None)
@given(LR, BETA, L_ORTH, st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_smoothness_by_step_is_the_product_of_its_matrices(
    lr, beta, l_orth, rounds, steps, seed
) -> None:
    rng = np.random.default_rng(seed)
    l_g, factors = rng.uniform(0, 2, (rounds, steps)), rng.choice([0.0, 0.5, 1.0, 2.0], rounds)
    found = scheduled_amplification(lr, beta, l_orth, l_g, factors, steps)
    assert close(found, products(lr, beta, l_orth, l_g.ravel().tolist(), factors, steps))
    plain = step_amplification(lr, beta, l_orth, l_g.ravel(), rounds, steps)
    assert close(plain, products(lr, beta, l_orth, l_g.ravel().tolist(), np.ones(rounds), steps))


def test_smoothness_of_the_wrong_step_is_seen() -> None:
    """Negative controls: A_t for A_{t+1}, and the order of steps reversed."""
    l_g = np.linspace(0.1, 2, 6)
    found = step_amplification(0.3, 0.8, 5.0, l_g, 3, 2)
    assert not close(found, products(0.3, 0.8, 5.0, l_g.tolist(), np.ones(3), 2, late=1))
    assert not close(found, products(0.3, 0.8, 5.0, l_g[::-1].tolist(), np.ones(3), 2))
    scheduled = scheduled_amplification(0.3, 0.8, 5.0, l_g, np.array([1.0, 0.3, 2.5]), 2)
    assert not close(scheduled, products(0.3, 0.8, 5.0, l_g.tolist(), [2.5, 0.3, 1.0], 2))


def test_factors_of_one_change_nothing_and_what_overflows_is_infinite() -> None:
    given = (0.01, 0.9, 3.0, 0.8)
    one = scheduled_amplification(*given, np.ones(500), 2)
    np.testing.assert_allclose(one, step_amplification(*given, 500, 2), rtol=1e-12)
    found = scheduled_amplification(1e200, 0.9, 1e200, 1.0, np.ones(5), 2)
    assert np.isinf(found[0]).all() and not np.isnan(found).any()


@pytest.mark.slow
def test_a_million_constants_by_step_are_the_constant() -> None:
    steps = step_amplification(1e-6, 0.9, 1.0, np.full((10**5, 10), 0.3), 10**5, 10)
    wanted = step_amplification(1e-6, 0.9, 1.0, 0.3, 10**5, 10)
    np.testing.assert_allclose(steps, wanted, rtol=1e-11)
