"""The corollaries against their statements, assembled by hand in 50 digits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from mpmath import matrix, mp, mpf

from fedmuon.analysis import (
    Realized,
    Run,
    Uniform,
    amplification,
    batch_exposure,
    bound,
    certificate,
    exposure,
    full_participation,
    g_alone,
    gaussian_smoothed_sign,
    newton_schulz,
    partial_participation,
    psi,
    smoothed_polar,
    stability,
    step_amplification,
    theorem,
)
from fedmuon.core.errors import InputError
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.tasks.constants import constants

mp.dps = 50
SIZES = np.array([400, 900, 300, 1200, 700, 500])
RUN = Run(0.02, 0.9, 12, 2, SIZES, SIZES / SIZES.sum(), constants())
PLAN = RandomnessPlan(3, 6, 2, 12, 2)
SEEN = Realized(PLAN.schedule())
DRAWN = Uniform(2, 0.01)


def by_hand(l_orth: float, exposures=None) -> np.ndarray:
    """(13) or (16) with full batches."""
    proved = RUN.constants
    a = amplification(RUN.lr, RUN.beta, l_orth, proved.smoothness, 12, 2)
    if exposures is None:
        exposures = exposure(a, SEEN.schedule, 6)
    moved = proved.lipschitz * 2 * proved.gradient_bound / SIZES * exposures
    return np.minimum(1.0, moved)


def test_a_fixed_schedule_is_corollary_4_2() -> None:
    found = theorem(RUN, 3.0, SEEN, 0.05)
    wanted = bound(by_hand(3.0), SIZES, RUN.weights, 0.05)
    assert (found.value, found.h, found.g) == pytest.approx((wanted.value, wanted.h, wanted.g))
    assert found.failure == 0.05 and found.status == "certified"
    np.testing.assert_allclose(stability(RUN, 3.0, SEEN), by_hand(3.0), rtol=1e-13)
    assert theorem(RUN, 30.0, SEEN, 0.05).value > 2 * found.value  # and L matters
    whole = theorem(RUN, 3.0, SEEN, 0.05, shares=(1.0, 1.0))
    assert whole.g == pytest.approx(g_alone(by_hand(3.0), SIZES, RUN.weights, 0.05), rel=1e-13)


def test_a_random_schedule_is_corollary_4_3() -> None:
    a = amplification(RUN.lr, RUN.beta, 3.0, RUN.constants.smoothness, 12, 2)
    found = theorem(RUN, 3.0, DRAWN, 0.05)
    wanted = bound(by_hand(3.0, psi(a, 6, 2, 0.01)), SIZES, RUN.weights, 0.05)
    assert found.value == pytest.approx(wanted.value, rel=1e-13)
    assert found.failure == pytest.approx(0.06)
    assert found.value > theorem(RUN, 3.0, SEEN, 0.05).value
    assert theorem(RUN, 3.0, Uniform(6, 0.01), 0.05).failure == 0.05  # nothing random at K = N


def test_mini_batches_are_theorem_j_1() -> None:
    run, plan = replace(RUN, batch=40), replace(PLAN, batch=40)
    a = step_amplification(RUN.lr, RUN.beta, 3.0, RUN.constants.smoothness, 12, 2)
    exposures = batch_exposure(a, plan.schedule(), SIZES, plan.rows)
    found = certificate(run, 3.0, Realized(plan.schedule(), plan.rows))
    np.testing.assert_allclose(found, 2 * RUN.constants.gradient_bound * exposures, rtol=1e-13)
    pathwise = certificate(run, 3.0, SEEN)
    top = 2 * RUN.constants.gradient_bound / 40
    np.testing.assert_allclose(pathwise, top * exposure(a.sum(axis=1), SEEN.schedule, 6))
    assert (found <= pathwise).all() and found.sum() < 0.9 * pathwise.sum()
    mean = certificate(RUN, 3.0, SEEN)  # of a path; one path of batches can reach more
    assert (found >= mean * (1 - 1e-12)).all() and (found > 1.05 * mean).any()
    whole = Realized(PLAN.schedule(), PLAN.rows)
    full = certificate(replace(run, batch=2000), 3.0, whole)
    np.testing.assert_allclose(full, certificate(RUN, 3.0, SEEN), rtol=1e-12)


@pytest.mark.parametrize("participation", [SEEN, DRAWN])
def test_the_named_maps(participation) -> None:
    extra = 0.01 if participation is DRAWN else 0.0
    polar = smoothed_polar(RUN, 0.25, participation, 0.05)
    assert polar.value == pytest.approx(theorem(RUN, 2.0, participation, 0.05).value)
    table = {"steps": 3, "coefficients": "cubic", "eps": 2.0}
    schulz = newton_schulz(RUN, participation, 0.05, polynomial=table)
    l_orth = lipschitz("newton-schulz", "sharp", **table)
    assert schulz.value == pytest.approx(theorem(RUN, l_orth, participation, 0.05).value)
    printed = newton_schulz(RUN, participation, 0.05, kind="paper", polynomial=table)
    assert printed.value >= schulz.value
    noise = {"sigma": 0.5, "alpha": 0.02, "shape": (40, 3)}
    sign = gaussian_smoothed_sign(RUN, participation, 0.05, **noise)
    l_orth = lipschitz("gaussian-smoothed-sign", "sharp", calls=12 * 2 * 2, **noise)
    assert sign.value == pytest.approx(theorem(RUN, l_orth, participation, 0.05).value)
    assert sign.failure == pytest.approx(0.07 + extra)
    assert polar.failure == schulz.failure == pytest.approx(0.05 + extra)
    assert any("noise keeps" in sentence for sentence in sign.assumptions)


def test_status_and_refusals() -> None:
    guessed = theorem(replace(RUN, proved=False), 3.0, SEEN, 0.05)
    assert guessed.status == "estimated" and "estimates" in guessed.assumptions[-1]
    assert theorem(RUN, 3.0, SEEN, 0.05, 1.0).h < theorem(RUN, 3.0, SEEN, 0.05).h
    with pytest.raises(Uncertified, match="kind='sharp'"):
        table = {"steps": 6, "coefficients": "jordan", "eps": 1e-7}
        newton_schulz(RUN, SEEN, 0.05, kind="paper", polynomial=table)
    with pytest.raises(InputError):
        theorem(RUN, 3.0, Realized(PLAN.schedule()[:5]), 0.05)
    with pytest.raises(InputError):
        theorem(RUN, 3.0, Uniform(7, 0.01), 0.05)


def test_what_overflows_counts_as_the_loss_bound() -> None:
    """eps_i = min(B, L Delta Y) is B for clients of the early rounds, whatever their Y is."""
    late = np.array([[0, 1]] * 1199 + [[2, 3]])
    run = replace(RUN, lr=1.0, rounds=1200)
    e, b, g, big = mpf(1), mpf(0.9), mpf(run.constants.smoothness), mpf(100)
    step = matrix([[1 + e * big * (1 - b) * g, e * big * b], [(1 - b) * g, b]])
    kick = matrix([e * big * (1 - b), 1 - b])
    last = kick[0] + (step * kick)[0]
    top, slope = mpf(run.constants.gradient_bound), mpf(run.constants.lipschitz)
    wanted = [1.0, 1.0, *(slope * 2 * top / n * last / 2 for n in (300, 1200)), 0.0, 0.0]
    assert (step**2400 * kick)[0] > mpf(10) ** 308 and 0 < wanted[2] < 0.05
    found = stability(run, 100.0, Realized(late))
    assert found == pytest.approx([float(value) for value in wanted], rel=1e-12)
    given = theorem(run, 100.0, Realized(late), 0.05)
    assert given.value == bound(found, SIZES, run.weights, 0.05).value
    whole = theorem(run, 100.0, Uniform(2, 0.01), 0.05)
    assert whole.value == bound(np.ones(6), SIZES, run.weights, 0.05).value
    assert given.value < whole.value
    batches = RandomnessPlan(3, 6, 2, 12, 2, batch=4)
    small = replace(RUN, lr=1e3, batch=4)
    drawn = stability(small, 1e30, Realized(batches.schedule(), batches.rows))
    assert (drawn == 1.0).all()
    with pytest.raises(InputError, match=r"exceeds 1e308\. Use fewer"):
        full_participation(replace(EQUAL, lr=1.0, rounds=1200), 100.0, 0.05)


EQUAL = replace(RUN, sizes=np.full(6, 500), weights=np.full(6, 1 / 6))


def exact_27(eps, delta, c_hp, n):
    """(27), with the log(2n) of H for the printed log(4n)."""
    log = mp.log(4 / mpf(delta))
    return 2 * eps + mpf(c_hp) * (eps * mp.log(2 * n) * log + mp.sqrt(log / n))


def test_corollary_k_2() -> None:
    """(27) prints log(4n), but halving delta leaves the log(2n) of H as it is: we keep that."""
    found = full_participation(EQUAL, 3.0, 0.05, 1.5)
    a = amplification(RUN.lr, RUN.beta, 3.0, RUN.constants.smoothness, 12, 2)
    slope = mpf(RUN.constants.gradient_bound) * mpf(RUN.constants.lipschitz)
    eps = 2 * slope / 3000 * sum(mpf(value) for value in a)
    assert found.eps == pytest.approx(float(eps), rel=1e-12)
    wanted = exact_27(eps, 0.05, 1.5, 3000)
    assert abs(mpf(found.bound.h) - wanted) < mpf(10) ** -12 * wanted
    everyone = Realized(np.tile(np.arange(6), (12, 1)))
    assert found.bound.h == pytest.approx(theorem(EQUAL, 3.0, everyone, 0.05, 1.5).h, rel=1e-12)
    assert found.bound.failure == 0.05
    assert found.amplified == pytest.approx(a.sum() / (0.02 * 3 * 2 * 12))
    rate = slope * found.amplified * 0.02 * 3 * 2 * 12 / 3000 + 1 / mp.sqrt(3000)
    assert found.order == pytest.approx(float(rate), rel=1e-12)


def test_corollary_k_3() -> None:
    found = partial_participation(EQUAL, 3.0, 2, 0.05, 0.01, 1.5)
    a = amplification(RUN.lr, RUN.beta, 3.0, RUN.constants.smoothness, 12, 2)
    slope = mpf(RUN.constants.gradient_bound) * mpf(RUN.constants.lipschitz)
    eps = 2 * slope / 500 * mpf(psi(a, 6, 2, 0.01))
    assert found.eps == pytest.approx(float(eps), rel=1e-12)
    wanted = exact_27(eps, 0.05, 1.5, 3000)
    assert abs(mpf(found.bound.h) - wanted) < mpf(10) ** -12 * wanted
    assert found.bound.failure == pytest.approx(0.06)
    pace, log = 0.02 * 3 * 2, math.log(600)
    wave = 12 / 6 + math.sqrt(12 * (1 - 2 / 6) / 12 * log) + log / 2
    order = float(slope) / 500 * found.amplified * pace * wave + 1 / math.sqrt(3000)
    assert found.amplified == pytest.approx(a.max() / pace)
    assert found.order == pytest.approx(order, rel=1e-12)


def test_rates_ask_for_equal_clients() -> None:
    for run in (RUN, replace(EQUAL, weights=RUN.weights), replace(EQUAL, batch=8)):
        with pytest.raises(InputError, match="function `theorem`"):
            full_participation(run, 3.0, 0.05)
    still = full_participation(replace(EQUAL, lr=0.0), 3.0, 0.05)
    assert still.eps == 0 and still.amplified == 0
