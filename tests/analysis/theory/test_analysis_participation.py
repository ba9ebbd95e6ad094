"""Exposure, Psi and sensitivity against explicit loops, 50 digits and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from test_analysis_recursion import close

from fedmuon.analysis import (
    amplification,
    batch_exposure,
    exposure,
    full_batch_sensitivity,
    loss_stability,
    mini_batch_sensitivity,
    perturbation,
    psi,
    step_amplification,
)
from fedmuon.core.errors import InputError
from fedmuon.federated.plan import RandomnessPlan

mp.dps = 50


def cohorts(rng: np.random.Generator, clients: int, per_round: int, rounds: int) -> np.ndarray:
    return np.stack([rng.choice(clients, per_round, replace=False) for _ in range(rounds)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12))
def test_exposure_is_its_double_loop(seed: int, clients: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    per_round = int(rng.integers(1, clients + 1))
    schedule, a = cohorts(rng, clients, per_round, rounds), rng.exponential(size=rounds)
    wanted = [sum(mpf(a[s]) for s in range(rounds) if i in schedule[s]) / per_round
              for i in range(clients)]  # fmt: skip
    assert close(exposure(a, schedule, clients), wanted)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3))
def test_batch_exposure_is_its_loop_over_samples(seed: int, batch: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, plan = rng.integers(2, 8, 5), RandomnessPlan(seed, 5, 2, 6, steps, batch)
    a = step_amplification(0.1, 0.8, 4.0, 0.3, 6, steps)
    wanted = []
    for i in range(5):
        loads = [mpf(0)] * int(sizes[i])
        for s in range(6):
            for k in range(steps if i in plan.participants(s) else 0):
                rows = plan.rows(s, i, k, int(sizes[i]))
                rows = range(int(sizes[i])) if rows is None else rows.tolist()
                for j in rows:
                    loads[j] += mpf(a[s, k]) / len(rows) / 2
        wanted.append(max(loads))
    assert close(batch_exposure(a, plan.schedule(), sizes, plan.rows), wanted)


def test_an_infinite_weight_reaches_who_took_part_and_no_one_else() -> None:
    a, schedule = np.array([math.inf, 2.0]), np.array([[0, 1], [1, 2]])
    assert exposure(a, schedule, 4).tolist() == [math.inf, math.inf, 1.0, 0.0]
    rows = {(0, 0): [0, 1], (0, 1): [2, 3], (1, 1): [0, 1], (1, 2): [0, 1]}
    taken = batch_exposure(
        a[:, None], schedule, [4, 4, 4, 4], lambda s, i, k, n: np.array(rows[s, i])
    )
    assert taken.tolist() == [math.inf, math.inf, 0.5, 0.0]
    assert psi(a, 4, 2, 0.1) == psi(a, 4, 4, 0.1) == math.inf
    assert psi([1e308] * 3, 4, 2, 0.1) == math.inf
    moved = perturbation([0.0, 1.0, 1e300], [math.inf, math.inf, 1e300])
    assert moved.tolist() == [0.0, math.inf, math.inf]
    assert loss_stability(moved, 0.5, 2.0).tolist() == [0.0, 2.0, 2.0]
    assert loss_stability(moved, 0.0, 2.0).tolist() == [0.0, 0.0, 0.0]


def test_a_row_drawn_twice_counts_twice() -> None:
    schedule = np.array([[0]])
    found = batch_exposure(np.ones((1, 1)), schedule, [4], lambda *_: np.array([2, 2, 1]))
    assert math.isclose(found[0], 2 / 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(1e-9, 0.999))
def test_psi_is_its_formula(seed: int, clients: int, rho: float) -> None:
    rng = np.random.default_rng(seed)
    per_round, a = int(rng.integers(1, clients + 1)), rng.exponential(size=9)
    total, share = sum(mpf(value) for value in a), mpf(per_round) / clients
    log, squares = mp.log(2 * clients / mpf(rho)), sum(mpf(value) ** 2 for value in a)
    wanted = total / clients
    if per_round < clients:
        wave = mp.sqrt(2 * share * (1 - share) * squares * log)
        wanted = (share * total + wave + mpf(max(a)) / 3 * log) / per_round
    assert close(psi(a, clients, per_round, rho), [wanted])


def test_psi_survives_huge_amplification() -> None:
    a = amplification(0.1, 0.9, 1.0, 1.0, 60)
    assert math.isclose(psi(a * 1e200, 9, 3, 0.1), psi(a, 9, 3, 0.1) * 1e200, rel_tol=1e-12)
    assert psi(np.zeros(4), 9, 3, 0.1) == 0


@pytest.mark.parametrize("per_round", [1, 4, 11])
def test_psi_covers_all_clients(per_round: int) -> None:
    """max_i Y_i <= Psi(rho) in at least 1 - rho of 3000 schedules; the mean exposure is not."""
    rng, a = np.random.default_rng(5), amplification(0.1, 0.9, 3.0, 0.2, 30)
    orders = rng.permuted(np.tile(np.arange(12), (3000, 30, 1)), axis=2)[:, :, :per_round]
    worst = np.array([exposure(a, schedule, 12).max() for schedule in orders])
    for rho in (0.02, 0.2, 0.6):
        assert (worst <= psi(a, 12, per_round, rho)).mean() >= 1 - rho
    # Negative control: without its deviation terms Psi covers next to nothing.
    assert (worst <= a.sum() / 12).mean() < 0.05


def test_sensitivities_and_loss_stability() -> None:
    sizes = np.array([3, 10, 400])
    top, lipschitz, bound = mpf(0.37), mpf(0.9), mpf(0.8)
    assert close(full_batch_sensitivity(0.37, sizes), [2 * top / int(n) for n in sizes])
    assert close(mini_batch_sensitivity(0.37, 7, sizes), [2 * top / min(7, int(n)) for n in sizes])
    moved = perturbation(full_batch_sensitivity(0.37, sizes), [0.0, 2.0, 1e6])
    assert close(moved, [0, 2 * 2 * top / 10, 2 * top / 400 * 10**6])
    wanted = [min(bound, lipschitz * move) for move in (0, 4 * top / 10, 2 * top / 400 * 10**6)]
    assert close(loss_stability(moved, 0.9, 0.8), wanted)


@pytest.mark.parametrize(("formula", "given"), [
    *((exposure, (a, np.array(schedule), 3)) for a, schedule in (
        ([1.0, 2.0], [[0, 1]]), ([1.0], [[0, 3]]), ([1.0], [[1, 1]]), ([1.0], [[0.5, 1]]),
        ([math.nan], [[0, 1]]))),
    (psi, ([1.0], 3, 4, 0.1)), (psi, ([1.0], 3, 2, 0.0)), (psi, ([1.0], 3, 2, 1.0)),
    (full_batch_sensitivity, (1.0, [3, 0])), (full_batch_sensitivity, (-1.0, [3])),
    (mini_batch_sensitivity, (1.0, 0, [3])), (perturbation, ([1.0], [1.0, 2.0])),
    (batch_exposure, (np.ones(3), np.array([[0]]), [4], lambda *_: None)),
])  # fmt: skip
def test_bad_input_is_refused(formula, given) -> None:
    with pytest.raises(InputError):
        formula(*given)
