"""Distances from the polar factor (001, D.3, D.4, Remarks D.1, D.3), and what runs make of them."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp, mpf

from fedmuon.analysis import (
    Realized,
    Run,
    amplification,
    exposure,
    smoothed_polar,
    tube_certificate,
)
from fedmuon.analysis.theory.exact_polar import (
    NEAR,
    around,
    drift,
    furthest,
    norm_tube,
    transferred,
)
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import polar_error as study
from fedmuon.experiments.studies.polar_error import claims
from fedmuon.orthogonalize import Uncertified, lipschitz, newton_schulz, schedule
from fedmuon.orthogonalize.lipschitz_constants import (
    newton_schulz_error,
    printed_cubic_error,
)
from fedmuon.tasks.constants import constants

mp.dps = 50
LR, BETA, STEPS, CLIENTS = 0.02, 0.5, 2, 5
SCHEDULE = np.array([[0, 1, 2], [2, 3, 4], [0, 3, 1], [1, 2, 4]])
Map = Callable[[np.ndarray], np.ndarray]


def image(m: np.ndarray, f: Map) -> np.ndarray:
    """U f(S) V^T; f maps 0 to 0."""
    u, s, v = np.linalg.svd(m, full_matrices=False)
    return (u * f(s)[..., None, :]) @ v


def msign(m: np.ndarray) -> np.ndarray:
    return image(m, lambda s: (s > 1e-12) * 1.0)


def smoothed(m: np.ndarray, lam: float) -> np.ndarray:
    return image(m, lambda s: s / np.sqrt(s**2 + lam))


def polynomial(name: str, steps: int, x: Any) -> Any:
    for step in schedule(name, steps):
        x = sum(mpf(c) * x ** (2 * k + 1) for k, c in enumerate(step))
    return x


# maps


@pytest.mark.parametrize("name", ["cubic", "quintic", "jordan", "polar-express-e2", "taylor-4"])
@pytest.mark.parametrize(("steps", "tau", "rank"), [(0, 0.2, 1), (1, 0.3, 4), (4, 0.05, 2)])
def test_the_error_is_that_of_a_fine_grid(name: str, steps: int, tau: float, rank: int) -> None:
    found = newton_schulz_error(name, steps, tau, rank) / math.sqrt(rank)
    top = math.sqrt(1 - (rank - 1) * tau**2)
    grid = [abs(polynomial(name, steps, mpf(x)) - 1) for x in np.linspace(tau, top, 400)]
    assert max(grid) <= found * (1 + mpf(10) ** -15)
    assert found <= max(grid) * (1 + mpf(10) ** -3)


@pytest.mark.parametrize(("steps", "tau"), [(1, 0.1), (5, 0.3), (3, 1 / math.sqrt(2))])
def test_the_cubic_step_in_closed_form_and_as_printed(steps: int, tau: float) -> None:
    exact = math.sqrt(2) * (1 - polynomial("cubic", steps, mpf(tau)))
    found = newton_schulz_error("cubic", steps, tau, 2)
    assert abs(found - exact) <= mpf(10) ** -8 * exact + mpf(10) ** -13
    # 1 - p^2 is what the printed bound bounds, before it is halved and more.
    squares = math.sqrt(2) * (1 - polynomial("cubic", steps, mpf(tau)) ** 2)
    assert squares <= printed_cubic_error(steps, tau, 2) * (1 + 1e-12)
    assert found < printed_cubic_error(steps, tau, 2)


@pytest.mark.parametrize("name", ["cubic", "jordan"])
def test_no_matrix_is_further_and_one_below_the_floor_is(name: str) -> None:
    matrices = study.draw_matrices(3, 0.2, 300)
    thin = study.draw_matrices(3, 0.01, 2)  # the negative control: singular values below the floor
    sizes, lost = (
        np.linalg.norm(newton_schulz(one, 3, name, normalization="unit").numpy()
                       - msign(one.numpy()), axis=(1, 2)) for one in (matrices, thin)
    )  # fmt: skip
    allowed = newton_schulz_error(name, 3, 0.2, 3)
    assert float(sizes.max()) <= allowed * (1 + 1e-12)
    assert float(sizes.max()) >= (0.99 if name == "cubic" else 0.7) * allowed
    assert float(lost[0]) > allowed


def test_a_rank_that_leaves_less_room_helps_a_polynomial_that_comes_back() -> None:
    """Jordan's p_3 is furthest from 1 above 0.8, where none of four values >= 0.3 can be."""
    alone, four = (newton_schulz_error("jordan", 1, 0.3, rank) for rank in (1, 4))
    assert four / 2 < alone * 0.9
    assert newton_schulz_error("cubic", 1, 0.5, 4) == pytest.approx(2 * (1 - 0.6875), rel=1e-9)


def ratio(f: Map, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.norm(f(a) - f(b), axis=(-2, -1)) / np.linalg.norm(a - b, axis=(-2, -1))


def test_without_a_floor_the_constant_holds_above_one_and_not_below() -> None:
    """Remark D.1, with 1/nu for its 2/nu."""
    rng, floor = np.random.default_rng(0), 0.3
    constant = lipschitz("newton-schulz", "sharp", steps=3, eps=floor, normalization="max")
    assert constant == pytest.approx(1.5**3 / floor, rel=1e-8)

    def apply(m: np.ndarray) -> np.ndarray:
        unit = torch.from_numpy(m / np.linalg.norm(m, axis=(-2, -1), keepdims=True))
        return newton_schulz(unit, 3, "cubic", normalization="unit").numpy()

    a = rng.standard_normal((4000, 2, 3))
    a *= floor * (1 + rng.random((4000, 1, 1))) / np.linalg.norm(a, axis=(1, 2), keepdims=True)
    thin = floor * np.array([[1.0, 0, 0], [0, 0, 0]])  # the steep entry, at the floor
    a[0], move = thin, 1e-6 * rng.standard_normal(a.shape)
    move[0] = 1e-6 * np.array([[0, 0, 0], [0, 1.0, 0]])
    b = a + move
    b *= np.maximum(1, floor / np.linalg.norm(b, axis=(1, 2), keepdims=True))
    steep = ratio(apply, a, b)
    assert steep.max() <= constant * (1 + 1e-6) and steep[0] >= 0.999 * constant
    assert ratio(apply, a[:1] / 2, b[:1] / 2) > constant  # the negative control
    assert lipschitz("newton-schulz", "paper", steps=3, eps=floor) > 5 * constant


def test_the_sign_between_matrices_of_other_ranks() -> None:
    """Remark D.3: 1/gamma where all positive singular values are >= gamma, of whatever ranks."""
    rng, gamma, seen = np.random.default_rng(1), 0.5, []
    for r, s in itertools.product(range(4), repeat=2):
        for _ in range(50):
            left, right = (np.linalg.qr(rng.standard_normal((k, 3)))[0] for k in (3, 4))
            a = (left[:, :r] * (gamma + rng.random(r) * rng.integers(2))) @ right[:, :r].T
            b = (left[:, :s] * (gamma + rng.random(s))) @ right[:, :s].T
            if r != s or np.linalg.norm(a - b) > 1e-9:
                seen.append(float(ratio(msign, a, b)))
    assert max(seen) <= (1 + 1e-9) / gamma and max(seen) > 0.99 / gamma
    small = 0.1 * np.eye(3)  # the negative control: a value below gamma
    assert ratio(msign, small, 0 * small) > 1 / gamma


def test_what_the_maps_refuse() -> None:
    small = "Frobenius norm of at most 1"
    wrong = ((0.0, 1, "tau is 0"), (0.8, 2, small), (1.1, 1, small), (0.5, 0, "rank is 0"))
    for tau, rank, words in wrong:
        with pytest.raises(InputError, match=words):
            newton_schulz_error("cubic", 3, tau, rank)


# runs


def train(means: np.ndarray, turn: Map, curvature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """001's Algorithm 1 on |X - mean_i|^2 curvature / 2 (or its slope at 0): X^R, M's [R, E, K]."""
    x, m, seen = np.zeros_like(means[0]), np.zeros_like(means[0]), []
    for cohort in SCHEDULE:
        xs, ms = [], []
        for i in cohort:
            xi, mi = x, m
            for _ in range(STEPS):
                mi = BETA * mi + (1 - BETA) * (curvature * xi - means[i])
                seen.append(mi)
                xi = xi - LR * turn(mi)
            xs.append(xi)
            ms.append(mi)
        x, m = np.mean(xs, axis=0), np.mean(ms, axis=0)
    return x, np.array(seen).reshape(4, 3, STEPS, *x.shape).swapaxes(1, 2)


def clients(spread: float = 0.2) -> np.ndarray:
    rng = np.random.default_rng(3)
    return 0.3 * msign(rng.standard_normal((3, 4))) + spread * rng.standard_normal((CLIENTS, 3, 4))


def naive(errors: np.ndarray, l_orth: float, l_g: float) -> Any:
    """The recursion of 001 (6) with eta e for what a sample adds, one client at a time."""
    x = m = mpf(0)
    for r in range(len(errors)):
        ends = []
        for position in range(errors.shape[2]):
            xi, mi = x, m
            for k in range(errors.shape[1]):
                mi = mpf(BETA) * mi + (1 - mpf(BETA)) * l_g * xi
                xi = xi + mpf(LR) * (l_orth * mi + mpf(float(errors[r, k, position])))
            ends.append((xi, mi))
        x, m = (sum(end[j] for end in ends) / len(ends) for j in (0, 1))
    return x


@pytest.mark.parametrize(("l_orth", "l_g"), [(3.0, 1.0), (1e3, 0.5), (2.0, 0.0)])
def test_the_drift_is_the_recursion(l_orth: float, l_g: float) -> None:
    errors = np.random.default_rng(0).random((4, STEPS, 3))
    found = drift(errors, LR, BETA, l_orth, l_g)
    assert abs(found - naive(errors, l_orth, l_g)) <= mpf(10) ** -13 * found


@pytest.mark.parametrize("lam", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_runs_end_within_the_drift(lam: float, spread: float) -> None:
    means = clients(spread)
    turned, momenta = train(means, msign)
    other, _ = train(means, lambda m: smoothed(m, lam))
    errors = np.linalg.norm(msign(momenta) - smoothed(momenta, lam), axis=(-2, -1))
    allowed = drift(errors, LR, BETA, 1 / math.sqrt(lam), 1.0)
    assert np.linalg.norm(turned - other) <= allowed
    assert drift(0 * errors, LR, BETA, 1 / math.sqrt(lam), 1.0) == 0
    sensitivity, rng = 0.1, np.random.default_rng(4)
    a = amplification(LR, BETA, 1 / math.sqrt(lam), 1.0, 4, STEPS)
    certificate = sensitivity * exposure(a, SCHEDULE, CLIENTS)
    for c in range(CLIENTS):
        moved = means.copy()
        step = rng.standard_normal((3, 4))
        moved[c] += sensitivity * step / np.linalg.norm(step)
        after, seen = train(moved, msign)
        its = np.linalg.norm(msign(seen) - smoothed(seen, lam), axis=(-2, -1))
        its = drift(its, LR, BETA, 1 / math.sqrt(lam), 1.0)
        assert np.linalg.norm(after - turned) <= certificate[c] + allowed + its


def test_neighbours_are_within_what_the_run_alone_certifies() -> None:
    """Exact sign and a flat Newton-Schulz: no neighbour is run to know it; half of it is not
    enough where one call is all there is."""
    rng, moved = np.random.default_rng(5), np.full(CLIENTS, 0.02)
    for turn, own in ((msign, np.ones_like), (flat_newton_schulz, cubic_2)):
        means = clients(0.05)
        reference, momenta = train(means, turn)
        values = np.linalg.svd(momenta, compute_uv=False)
        error = partial(furthest, lam=1e-2, own=own)
        found = around(values, SCHEDULE, moved, LR, BETA, 10.0, 1.0, error)
        assert np.allclose(found, naive_around(values, moved, error), rtol=1e-12)
        for c in np.repeat(np.arange(CLIENTS), 3):
            other, step = means.copy(), rng.standard_normal((3, 4))
            other[c] += moved[c] * step / np.linalg.norm(step)
            assert np.linalg.norm(train(other, turn)[0] - reference) <= found[c]
    # The negative control, on the line: M = 0.1 and a neighbour across 0. With the neighbour's
    # error taken to be the run's own, one step of 2 eta is beyond what is certified.
    error, jump = partial(furthest, lam=1.0, own=np.ones_like), (np.full((1, 1, 1, 1), 0.1), [[0]])
    given = [0.15], 1.0, 0.0, 1.0, 1.0
    assert around(*jump, *given, error)[0] >= 2
    assert around(*jump, *given, lambda values, radius: error(values, 0 * radius))[0] < 2
    with pytest.raises(InputError, match="values contains a negative number"):
        around(-jump[0], [[0]], *given, error)


def naive_around(values: np.ndarray, moved: np.ndarray, error: Any) -> list[float]:
    ends = []
    for replaced in range(CLIENTS):
        x = m = 0.0
        for r, cohort in enumerate(SCHEDULE):
            states = []
            for position, i in enumerate(cohort):
                xi, mi = x, m
                for k in range(STEPS):
                    at = values[r, k, [position]]
                    mi = BETA * mi + (1 - BETA) * (xi + moved[i] * (i == replaced))
                    own, its = (float(error(at, np.array([[one]]))[0, 0]) for one in (0.0, mi))
                    xi += LR * min(own + 10 * mi + its, 2 * math.sqrt(3))
                states.append((xi, mi))
            x, m = np.mean(states, 0)
        ends.append(x)
    return ends


@pytest.mark.parametrize("name", ["sign", "cubic"])
def test_no_matrix_nearby_has_a_larger_error(name: str) -> None:
    turn, own = {"sign": (msign, np.ones_like), "cubic": (flat_newton_schulz, cubic_2)}[name]
    rng, radius, lam = np.random.default_rng(8), 0.05, 3e-3
    at = image(rng.standard_normal((3, 4)), lambda s: 0.3 * np.array([1.0, 0.5, 0.2]) + 0 * s)
    values = np.linalg.svd(at, compute_uv=False)[None]
    allowed = furthest(values, np.array([[radius]]), lam, own)[0, 0]
    steps, (left, _, right) = rng.standard_normal((300, 3, 4)), np.linalg.svd(at)
    steps[0] = -np.outer(left[:, 2], right[2])  # the smallest value falls
    steps *= radius / np.linalg.norm(steps, axis=(1, 2), keepdims=True)

    def errors(m: np.ndarray) -> np.ndarray:
        turned = np.stack([turn(one) for one in m])
        return np.linalg.norm(turned - smoothed(m, lam), axis=(1, 2))

    seen = errors(at + steps).max()
    assert errors(at[None])[0] == pytest.approx(furthest(values, np.zeros((1, 1)), lam, own)[0, 0])
    assert {"sign": 0.9, "cubic": 0.4}[name] * allowed < seen <= allowed
    if name == "sign":  # the negative control: from a little further away
        assert errors(at + 1.19 * steps[:1]).max() > allowed


def cubic_2(x: np.ndarray) -> np.ndarray:
    for _ in range(2):
        x = 1.5 * x - 0.5 * x**3
    return x


def flat_newton_schulz(m: np.ndarray) -> np.ndarray:
    """Two cubic steps from M / ||M||_F, of stacks."""
    return image(m, lambda s: cubic_2(s / np.linalg.norm(s, axis=-1, keepdims=True)))


def test_the_drift_is_met_where_gradients_do_not_move_and_misses_a_map_it_was_not_told() -> None:
    means = np.broadcast_to(clients()[0], (CLIENTS, 3, 4))
    scale = 0.25 * msign(means[0])
    turned, momenta = train(means, lambda m: smoothed(m, 1e-2) + scale, curvature=0.0)
    other, _ = train(means, lambda m: smoothed(m, 1e-2), curvature=0.0)
    errors = np.full(momenta.shape[:3], np.linalg.norm(scale))
    moved = np.linalg.norm(turned - other)
    assert moved == pytest.approx(drift(errors, LR, BETA, 10.0, 0.0), rel=1e-12)
    assert moved > drift(errors / 2, LR, BETA, 10.0, 0.0)


def test_a_drift_beyond_doubles_is_infinite_and_bad_errors_are_refused() -> None:
    errors = np.ones((3000, 1, 1))
    assert drift(errors, 1.0, 0.5, 1e6, 1.0) == math.inf
    errors[:-1] = 0  # the last call is not amplified
    assert drift(errors, 1.0, 0.5, 1e6, 1.0) == 1.0
    for bad in (np.ones((3, 2)), -errors, errors * math.nan):
        with pytest.raises(InputError, match=r"errors (has shape|contains a negative number)"):
            drift(bad, 0.1, 0.5, 1.0, 1.0)


def test_the_bound_of_one_run_is_lent_to_another() -> None:
    run = Run(0.01, 0.9, 5, 1, np.array([100]), np.ones(1), constants())
    found = smoothed_polar(run, 1e-2, Realized(np.zeros((5, 1), dtype=int)), 0.05)
    lent = transferred(found, 0.5, 0.25)
    for name in ("value", "h", "g"):
        assert getattr(lent, name) == pytest.approx(getattr(found, name) + 2 * 0.5 * 0.25)
    assert lent.failure == found.failure and lent.assumptions == (*found.assumptions, NEAR)


@pytest.mark.parametrize("kind", ["paper", "sharp"])
def test_neighbours_stay_in_the_norm_tube(kind: Any) -> None:
    """Remark D.1 by the induction of D.12."""
    means, moved = 5 * clients(0.05), np.full(CLIENTS, 0.01)
    reference, momenta = train(means, flat_newton_schulz)
    norms = np.linalg.norm(momenta, axis=(-2, -1))
    tube = norm_tube(norms, SCHEDULE, moved, LR, BETA, 1.0, STEPS, kind, steps=2)
    a = amplification(LR, BETA, tube.l_orth, 1.0, 4, STEPS)
    np.testing.assert_allclose(tube.perturbation, moved * exposure(a, SCHEDULE, CLIENTS))
    wanted = lipschitz("newton-schulz", kind, steps=2, eps=tube.gamma, normalization="max")
    assert tube.l_orth == pytest.approx(wanted, rel=1e-8)
    rng = np.random.default_rng(5)
    for c in np.repeat(np.arange(CLIENTS), 5):
        other, step = means.copy(), rng.standard_normal((3, 4))
        other[c] += moved[c] * step / np.linalg.norm(step)
        after, seen = train(other, flat_newton_schulz)
        assert np.linalg.norm(seen, axis=(-2, -1)).min() >= tube.gamma
        assert np.linalg.norm(after - reference) <= tube.perturbation[c]
    with pytest.raises(
        Uncertified,
        match=r"replaced by the norm \|M\|_F\. This run has no certificate",
    ):
        norm_tube(norms, SCHEDULE, 500 * moved, LR, BETA, 1.0, STEPS, kind, steps=2)


def test_a_rank_that_no_momentum_exceeds_takes_the_place_of_full_rank() -> None:
    """Remark D.3: rank 2 of 3 x 4, and a neighbour that leaves the subspace breaks it."""
    frame = np.linalg.qr(np.random.default_rng(6).standard_normal((4, 2)))[0]
    means = (5 * clients(0.05)) @ frame @ frame.T
    reference, momenta = train(means, msign)
    values = np.linalg.svd(momenta, compute_uv=False)
    smallest = values[..., 2] * (values[..., 2] > 1e-12)
    with pytest.raises(Uncertified):
        tube_certificate(smallest, SCHEDULE, np.full(CLIENTS, 0.05), LR, BETA, 1.0, STEPS)
    tube = tube_certificate(values[..., 1], SCHEDULE, np.full(CLIENTS, 0.05), LR, BETA, 1.0, STEPS)
    rng = np.random.default_rng(7)
    for c in range(CLIENTS):
        other, step = means.copy(), rng.standard_normal((3, 4)) @ frame @ frame.T
        other[c] += 0.05 * step / np.linalg.norm(step)
        assert np.linalg.norm(train(other, msign)[0] - reference) <= tube.perturbation[c]
    away, (left, _, right) = means.copy(), np.linalg.svd(means[0])
    away[0] += 1e-4 * np.outer(left[:, 2], right[3])
    small = tube_certificate(values[..., 1], SCHEDULE, np.full(CLIENTS, 1e-4), LR, BETA, 1.0, STEPS)
    assert np.linalg.norm(train(away, msign)[0] - reference) > small.perturbation[0]


# the study

TINY: dict[str, Any] = {
    "degrees": ["cubic", "jordan"], "iterations": [1, 4], "floors": [0.1, 0.3], "rank": 2,
    "draws": 20, "rows": 2, "classes": 4, "samples": 40, "held_out": 30, "memory": 0.5,
    "lrs": [0.0001, 0.001], "lambdas": [1e-6, 1e-4], "steps": 6, "neighbours": 3, "delta": 0.05,
}  # fmt: skip


def asked() -> study.Settings:
    return study.Settings.model_construct(**TINY)


def test_the_classifier_and_its_neighbours_are_the_naive_ones() -> None:
    problem = study.Classifier(asked())
    x = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = problem.slope(x)
    for s in range(4):
        points, labels = (one.clone() for one in problem.train)
        if s:
            points[s - 1], labels[s - 1] = (one[s - 1] for one in problem.others)
        at = x[s].clone().requires_grad_()
        chances = torch.softmax(points @ at, 1)
        loss = 1 - chances[torch.arange(40), labels].mean()
        (wanted,) = torch.autograd.grad(loss, at)
        torch.testing.assert_close(found[s], wanted)
        own = 1 - problem.chances(x[[s]], (points, labels))[1].mean(1)
        assert float(own) == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("name", study.MAPS)
def test_a_runs_row_is_that_of_a_naive_loop(name: str) -> None:
    problem, lr = study.Classifier(asked()), 0.001
    row = study.measure_runs(asked(), name, lr)["runs"][1]
    ends, errors = [], []
    for turn in ("own", "smoothed"):
        x, m, away = torch.zeros(4, 2, 4, dtype=torch.float64), 0.0, []
        for _ in range(6):
            m = 0.5 * m + 0.5 * problem.slope(x)
            near = torch.from_numpy(smoothed(m.numpy(), 1e-4))
            exact = torch.from_numpy(msign(m.numpy()))
            unit = m / torch.linalg.matrix_norm(m)[:, None, None]
            own = exact if name == "exact-sign" else newton_schulz(unit, 5, normalization="unit")
            away.append(torch.linalg.matrix_norm(own - near).numpy())
            x = x - lr * (own if turn == "own" else near)
        ends.append(x)
        errors.append(np.array(away))
    assert row["distance"] == pytest.approx(float((ends[0][0] - ends[1][0]).norm()), rel=1e-6)
    moved = torch.linalg.matrix_norm(ends[0][1:] - ends[0][0]).max()
    assert row["perturbation"] == pytest.approx(float(moved), rel=1e-6)
    wanted = drift(errors[0][:, :1, None], lr, 0.5, 100.0, constants().smoothness)
    assert row["drift"] == pytest.approx(wanted, rel=1e-6)
    assert math.isnan(row["tube"]) == (name == "exact-sign")
    steps = math.sqrt(2) * 0.001 * 6 if name == "exact-sign" else None  # of length eta sqrt(q)
    hoeffding = math.sqrt(math.log(1 / 0.05) / (2 * 40))
    if steps:
        assert row["still"] == pytest.approx(hoeffding + 2 * math.sqrt(2) / 4 * steps, rel=1e-6)


def columns() -> tuple[Any, Any]:
    records = [one.compute() for one in study.cells(asked(), None)]  # pyright: ignore[reportArgumentType]
    tables = [[row for one in records for row in one[name]] for name in ("rows", "runs")]
    rows, runs = ({k: np.array([row[k] for row in one]) for k in one[0]} for one in tables)
    return rows, runs


def test_claims_hold_and_fail() -> None:
    rows, runs = columns()
    assert [one.holds for one in claims(rows, runs)][:6] == [True] * 6
    assert claims(rows, {**runs, "gap_high": runs["bound"] + 1})[5].verdict == "inconclusive"
    reach = (runs["gap_high"] - runs["gap_low"]) / 2  # 30 held-out samples whose range is proved
    assert (reach < 0.1 * math.sqrt(math.log(40) / 60)).all()
    assert claims(rows, {**runs, "bound": runs["bound"] + 1})[5].holds
    telling = {**runs, "still": 0 * runs["bound"] + 99, "bound": runs["bound"] / 99}
    assert claims(rows, telling)[6].holds
    broken = [
        (0, {"bound": rows["bound"] / 2}, {}),
        (1, {"bound": rows["bound"] * 2}, {}),
        (2, {"printed": rows["printed"] / 9}, {}),
        (3, {}, {"drift": runs["drift"] / 1e9}),
        (4, {}, {"certificate": runs["certificate"] / 1e9}),
        (4, {}, {"of_both": runs["of_both"] / 1e9}),
        (4, {}, {"tube": runs["tube"] / 1e9}),
        (5, {}, {name: runs[name] + 1e3 for name in ("gap", "gap_low", "gap_high")}),
        (6, {}, {"bound": runs["bound"] + 1}),
        (6, {}, {"still": runs["bound"] * 0.9}),
    ]
    for place, a, b in broken:
        assert claims({**rows, **a}, {**runs, **b})[place].holds is False, place
