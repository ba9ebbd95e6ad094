"""Constants on a ball, and how far iterates get: naive formulas, 50 digits, dense nets, attacks."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import iv as intervals
from mpmath import matrix, mp, mpf
from safetensors.numpy import load_file

from fedmuon.analysis import (
    Realized,
    Run,
    Uniform,
    certificate,
    psi,
    stability,
    step_amplification,
    theorem,
)
from fedmuon.analysis.theory.trajectories import CELLS, Start, reach
from fedmuon.experiments.cli.theory import setting_of
from fedmuon.experiments.run import execute as run
from fedmuon.experiments.stability import certificates, finished_run, gap
from fedmuon.experiments.stability.certificates import start_of
from fedmuon.experiments.stability.finished_run import source_of
from fedmuon.experiments.stability.neighbours import execute
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.orthogonalize import clipped_sign, exact_sign, newton_schulz, smoothed_polar
from fedmuon.orthogonalize.coefficients import schedule
from fedmuon.orthogonalize.lipschitz_constants import growth, running_maxima
from fedmuon.tasks.base import Batch
from fedmuon.tasks.constants import constants, suprema
from fedmuon.tasks.matrix import MatrixTask

iv: Any = intervals
mp.dps = iv.dps = 50
RADII = (0.0, 1e-3, 0.1, 0.3, 0.7, 1.2, 2.0, 4.0)
Rows = np.ndarray


def softmax(s: Rows) -> Rows:
    raised = np.exp(s - s.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def slopes(s: Rows) -> Rows:
    """The gradients of 1 - p_0 in the logits [..., c], by the quotient rule."""
    p = softmax(s)
    first = np.zeros(s.shape[-1])
    first[0] = 1
    return -p[..., :1] * (first - p)


def hessians(s: Rows) -> Rows:
    """Those of 1 - p_0 [..., c, c]: every entry differentiated once more."""
    p, c = softmax(s), s.shape[-1]
    one = np.eye(c)
    found = np.empty((*s.shape, c))
    for j in range(c):
        for k in range(c):
            change = (one[0, k] - p[..., k]) * (one[0, j] - p[..., j])
            found[..., j, k] = -p[..., 0] * (change - p[..., j] * (one[j, k] - p[..., k]))
    return found


def logits(rng: np.random.Generator, classes: int, radius: float, count: int) -> Rows:
    """Centred logits [count, c] in the ball: most on its sphere, half with few distinct values."""
    s = rng.standard_normal((count, classes))
    s[::2] = rng.choice([-1.0, 0.0, 1.0], (len(s[::2]), classes)) + 0.05 * s[::2]
    s[::5] = 0.01 * s[::5] + np.eye(classes)[0] * rng.choice([-1, 1], (len(s[::5]), 1))
    s -= s.mean(1, keepdims=True)
    length = radius * rng.uniform(0, 1, (count, 1)) ** 0.1
    return s / np.maximum(np.linalg.norm(s, axis=1, keepdims=True), 1e-300) * length


def each(s: Rows, other: Rows) -> tuple[Rows, Rows, Rows]:
    """Gradients, distances of non-negative samples' gradients (of one class and of two), curvatures
    at logits [n, c] and others."""
    one, two = slopes(s), slopes(other)
    inner = (one * two).sum(1), (one * two[:, [1, 0, *range(2, s.shape[1])]]).sum(1)
    # u = u' if that is further, else u orthogonal to u'
    apart = np.square(one).sum(1) + np.square(two).sum(1) - 2 * np.minimum(np.minimum(*inner), 0)
    curved = np.abs(np.linalg.eigvalsh(hessians(s))).max(1)
    return np.linalg.norm(one, axis=1), np.sqrt(apart), curved


def seen(s: Rows, other: Rows) -> tuple[float, ...]:
    """The largest of each, the range of p_0, and how far it gets from that of a uniform softmax."""
    p = softmax(np.concatenate([s, other]))[:, 0]
    far = float(abs(p - 1 / s.shape[1]).max())
    return *(float(one.max()) for one in each(s, other)), float(p.max() - p.min()), far


def proved(classes: int, radius: float, nonnegative: bool = True) -> tuple[float, ...]:
    found = suprema(classes, radius, nonnegative)
    return tuple(float(getattr(found, one.name)) for one in dataclasses.fields(found))


@pytest.mark.parametrize("classes", [2, 3, 5, 10])
def test_no_logits_in_the_ball_are_above_its_suprema(classes: int) -> None:
    rng = np.random.default_rng(classes)
    for radius in RADII:
        most = proved(classes, radius)
        found = seen(*(logits(rng, classes, radius, 3000) for _ in range(2)))
        assert all(a <= b * (1 + 1e-12) + 1e-16 for a, b in zip(found, most, strict=True))
        assert proved(classes, radius, False)[1] == 2 * most[0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.floats(0, 6))
def test_no_climb_ends_above_the_suprema(seed: int, classes: int, radius: float) -> None:
    """Each step keeps the best of many small moves, projected back onto the ball."""
    rng = np.random.default_rng(seed)
    most = proved(classes, radius)
    for which in range(3):
        best, step = logits(rng, classes, radius, 2), 0.5 * radius
        for _ in range(12):
            tried = best + step * rng.standard_normal((40, 2, classes)) / math.sqrt(classes)
            tried -= tried.mean(-1, keepdims=True)
            size = np.linalg.norm(tried, axis=-1, keepdims=True)
            tried *= np.minimum(1, radius / np.maximum(size, 1e-300))
            values = each(tried[:, 0], tried[:, 1])[which]
            best, step = tried[int(values.argmax())], step * 0.7
            assert values.max() <= most[which] * (1 + 1e-12) + 1e-16


def test_a_supremum_that_is_three_percent_too_small_would_be_seen() -> None:
    """Negative control, and how sharp they are: ten classes nearly attain all of them."""
    rng = np.random.default_rng(0)
    for radius in (0.0, 0.1, 0.3, 0.6, 1.2):
        found = seen(*(logits(rng, 10, radius, 6000) for _ in range(2)))
        most = proved(10, radius)
        near = [0.97, 0.9, 0.97, 0.97, 0.97]
        assert all(a >= n * b for a, b, n in zip(found, most, near, strict=True)), radius


def test_at_the_start_they_are_known_exactly() -> None:
    """p = 1/c: ||grad|| = sqrt(1 - 1/c) / c, D = sqrt(2) / c, ||H|| = (1 - 2/c) / c for c >= 3."""
    for c in (3, 10, 100):
        wanted = math.sqrt(1 - 1 / c) / c, math.sqrt(2) / c, max(1 - 2 / c, 1 / c) / c, 0.0, 0.0
        assert proved(c, 0.0) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_they_grow_with_the_radius_to_those_of_all_models(classes: int) -> None:
    every = suprema(classes, np.linspace(0, 70, 400), nonnegative=True)
    top = constants()
    ends = (top.gradient_bound, 2 * top.gradient_bound, top.smoothness, top.loss_bound)
    ends = (*ends, 1 - 1 / classes)
    for one, end in zip(dataclasses.astuple(every), ends, strict=True):
        assert (np.diff(one) >= -1e-15).all() and one[-1] == end
    np.testing.assert_array_equal(
        suprema(classes, 0.3).gradient, suprema(classes, [0.3]).gradient[0]
    )


def exact(classes: int, s: list[Any]) -> list[Any]:
    raised = [mp.exp(one) for one in s]
    return [one / sum(raised) for one in raised]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_range_is_between_its_ends_in_fifty_digits(classes: int) -> None:
    """(1) is attained at one class against the rest; the other end at the worst of a fine net over
    a and one high w, which the pieces exceed by their width at most."""
    for radius in (0.1, 0.6, 2.0):
        r, m = mpf(radius), classes - 1
        top = exact(classes, [r * mp.sqrt(mpf(m) / classes)] + [-r / mp.sqrt(classes * m)] * m)[0]
        least = mpf(1)
        for k in range(200):
            f = mp.pi / 2 * k / 199 if m > 1 else mpf(0)
            a, t = -r * mp.sqrt(mpf(m) / classes) * mp.cos(f), r * mp.sin(f)
            high, low = t * mp.sqrt(mpf(m - 1) / m), -t / mp.sqrt(m * max(m - 1, 1))
            s = [a, -a / m + high] + [-a / m + low] * (m - 1)
            assert abs(sum(s)) < 1e-40 and abs(sum(one**2 for one in s) - r**2) < 1e-40
            least = min(least, exact(classes, s)[0])
        spread = mpf(proved(classes, radius)[3])
        assert top - least <= spread <= (top - least) * mpf("1.01")
        far, proved_far = top - mpf(1) / classes, mpf(proved(classes, radius)[4])
        assert far <= proved_far <= far * mpf("1.01")


def interval(a: Any, b: Any) -> Any:
    return iv.mpf([a, b])


def test_intervals_enclose_the_gradients_of_three_classes() -> None:
    """All of a disc of logits in boxes: no box can hold more than its enclosure, and the largest
    enclosure, which is no search either, is not much above the closed form."""
    radius, parts = 0.6, 16
    edges = np.linspace(-radius, radius, parts + 1)
    top = iv.mpf(0)
    for low, high in pairwise(edges):
        for left, right in pairwise(edges):
            x, y = interval(low, high), interval(left, right)
            if (abs(x) ** 2 + abs(y) ** 2).a > radius**2:
                continue
            others = iv.exp(-x * iv.sqrt(iv.mpf(3) / 2))  # of s_y = x sqrt(2/3), w = +-y / sqrt(2)
            up, down = (iv.exp(sign * y / iv.sqrt(2)) for sign in (1, -1))
            q = 1 / (1 + others * (up + down))
            share = 1 / (1 + iv.exp(-iv.sqrt(2) * y))
            square = (q * (1 - q)) ** 2 * (1 + share**2 + (1 - share) ** 2)
            top = max(top, square.b, key=float)
    enclosed = math.sqrt(float(top))
    found = proved(3, radius)[0]
    s = logits(np.random.default_rng(0), 3, radius, 20000)
    reached = float(np.linalg.norm(slopes(s), axis=1).max())
    assert reached <= enclosed and reached <= found <= 1.05 * enclosed


MAPS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "smoothed-polar": ({"lam": 0.1}, lambda M: smoothed_polar(M, 0.1)),
    "clipped-sign": ({"gamma": 0.2}, lambda M: clipped_sign(M, 0.2)),
    "exact-sign": ({}, exact_sign),
    "newton-schulz": (
        {"steps": 5, "coefficients": "jordan", "eps": 0.1},
        lambda M: newton_schulz(M, steps=5, coefficients="jordan", eps=0.1),
    ),
}


def op(stack: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(stack, 2)


@pytest.mark.parametrize("name", MAPS)
def test_no_output_is_larger_than_the_growth_says(name: str) -> None:
    given, apply = MAPS[name]
    phi, rng = growth(name, **given), np.random.default_rng(1)
    assert phi is not None
    size, share = 10.0 ** rng.uniform(-5, 1, 400), []
    for low in (False, True):  # of any rank, and of rank one, which attains it
        M = torch.from_numpy(rng.standard_normal((400, 6, 4)))
        M = M[:, :, :1] @ M[:, :1, :] if low else M
        M *= (torch.from_numpy(size) / op(M))[:, None, None]
        promised = torch.tensor([phi(one * (1 + 1e-12)) for one in size])
        share.append((op(apply(M)) / promised).max())
        assert share[-1] <= 1 + 1e-9
    assert share[1] > 0.98  # a growth that is a fiftieth smaller would be exceeded


GROWING = [(coefficients, normalization)
           for coefficients in ("cubic", "quintic", "jordan", "polar-express-e2")
           for normalization in ("plus", "max", "unit")]  # fmt: skip


@pytest.mark.parametrize(("coefficients", "normalization"), quick(GROWING, GROWING[::4]))
def test_newton_schulz_grows_as_its_polynomial_in_fifty_digits(
    coefficients: str, normalization: str
) -> None:
    phi = growth(
        "newton-schulz", steps=4, coefficients=coefficients, eps=0.1, normalization=normalization
    )
    assert phi is not None
    assert (running_maxima(schedule(coefficients, 30)) < 2.1).all()  # long schedules stay in reach
    assert np.isinf(
        running_maxima(schedule((9.0, 9.0, 9.0), 60))
    ).any()  # but for those that overflow
    for s in (0.0, 1e-3, 0.05, 0.3, 5.0):
        x = {"plus": s / (s + 0.1), "max": min(s / 0.1, 1), "unit": min(s, 1)}[normalization]
        top = mpf(0)
        for k in range(101):
            y = mpf(x) * k / 100
            for step in schedule(coefficients, 4):
                y = sum(mpf(c) * y ** (2 * j + 1) for j, c in enumerate(step))
            top = max(top, abs(y))
        assert top <= phi(s) <= 1.02 * top + 0.05
    assert growth("randomized-polar") is None


def descent(start: Rows, apply: Callable, steps: list[float], u: Rows, y: Rows) -> list[Any]:
    """The models [K, d, c] after each step of K clients, each with one sample (u_k, y_k)."""
    task = MatrixTask(start.shape[0], start.shape[1], torch.float64)
    X = torch.from_numpy(start).repeat(len(y), 1, 1)
    M, models = torch.zeros_like(X), []
    rows, labels = torch.from_numpy(u / np.linalg.norm(u, axis=1)[:, None]), torch.from_numpy(y)
    batches = [Batch(rows[k : k + 1], labels[k : k + 1]) for k in range(len(y))]
    for lr in steps:
        M = 0.9 * M + 0.1 * task.gradient({"weight": X}, batches)[1]["weight"]
        X = X - lr * apply(M)
        models.append(X)
    return models


@pytest.mark.parametrize("name", quick(MAPS, [*MAPS][::2]))
def test_no_trajectory_leaves_its_ball(name: str) -> None:
    """One sample again and again goes furthest: from 0, ten classes almost reach the radius."""
    given, apply = MAPS[name]
    phi, steps = growth(name, **given), [0.02] * 30 + [0.05] * 10
    rng, shares = np.random.default_rng(5), []
    assert phi is not None
    for weight in (rng.standard_normal((12, 10)) / math.sqrt(12), np.zeros((12, 10))):
        start = start_of(weight, None)
        assert start is not None
        radii = {t: reach(start, np.array(steps[:t]), 0.9, phi).radius for t in (1, 7, 30, 40)}
        u, y = rng.standard_normal((10, 12)), np.arange(10)
        went = descent(weight, apply, steps, u, y)
        moved = [float(op(went[t - 1] - torch.from_numpy(weight)).max()) for t in radii]
        shares.append([a / b for a, b in zip(moved, radii.values(), strict=True)])
        assert max(shares[-1]) <= 1 + 1e-9
    assert shares[-1][-1] > (0.9 if name == "exact-sign" else 0.6)


@pytest.mark.parametrize(
    ("classes", "nonnegative"),
    quick([(c, n) for c in (2, 3, 10) for n in (False, True)], [(2, True), (3, False), (10, True)]),
)
def test_no_pair_of_samples_parts_further_than_its_certificate(
    classes: int, nonnegative: bool
) -> None:
    """N = K = n = 1, where nothing is averaged. Under a map that is nearly linear the worst pairs
    would exceed a certificate that is one percent smaller; under a steep one none does either."""
    rng, shares = np.random.default_rng(classes), {}
    u, v = rng.standard_normal((2, 24, 6))
    u, v = (abs(u), abs(np.concatenate([u[:12], v[12:]]))) if nonnegative else (u, -u)
    y = np.concatenate([np.zeros(24, dtype=np.int64), rng.integers(classes, size=24)])
    for lam in (0.1, 10.0):
        phi, steps = growth("smoothed-polar", lam=lam), [0.01] * 20
        assert phi is not None
        way = reach(Start(classes, 0.0, nonnegative), np.array(steps), 0.9, phi)
        a = step_amplification(0.01, 0.9, 1 / math.sqrt(lam), way.smoothness, 20)
        apply = partial(smoothed_polar, lam=lam)
        end = descent(np.zeros((6, classes)), apply, steps, np.concatenate([u, v]), y)[-1]
        apart = torch.linalg.matrix_norm(end[:24] - end[24:])
        shares[lam] = float(apart.max()) / float((a * way.diameters).sum())
    assert max(shares.values()) <= 1 and shares[0.1] > 0.7 and shares[10.0] > 0.99


def test_the_radius_is_its_recursion() -> None:
    """Step by step, with local steps and step sizes by round; cells round up, a little."""
    phi, steps = growth("smoothed-polar", lam=0.01), np.array([0.1, 0.02, 0.05])
    assert phi is not None
    found = reach(Start(10, 0.4, True), steps, 0.8, phi, 2)
    radius, size = 0.0, 0.0
    for t, lr in enumerate(np.repeat(steps, 2)):
        gradient, apart, curved, *_ = proved(10, 0.4 + radius)
        at = found.smoothness.ravel()[t], found.diameters.ravel()[t]
        assert (curved, apart) <= at and at == pytest.approx((curved, apart), rel=5e-3)
        size = 0.8 * size + 0.2 * gradient
        radius += lr * size / math.sqrt(size**2 + 0.01)
    assert radius <= found.radius == pytest.approx(radius, rel=5e-3)
    end = proved(10, 0.4 + found.radius + 1 / CELLS)
    assert found.last.lipschitz == found.last.gradient_bound <= end[0]
    assert found.last.smoothness <= end[2] and found.last.loss_bound <= end[3]
    assert end[3] / 2 < found.deviation <= end[4]
    far = reach(Start(3, 1e9), np.full(3, 1e300), 0.8, phi)
    assert far.last == constants() and (far.smoothness == constants().smoothness).all()


REACHED = reach(
    Start(10), np.full(6, 0.05), 0.9, lambda s: s / math.hypot(s, 0.1), 2
)  # of lambda = 0.01
SIZES = np.array([40, 70, 30, 90])


def run_of(batch: int) -> Run:
    return Run(
        0.05, 0.9, 6, 2, SIZES, SIZES / SIZES.sum(), REACHED.last, batch=batch, reach=REACHED
    )


L_ORTH = 10.0


def weights() -> list[Any]:
    """a_t diam_t of the run above, matrix by matrix in fifty digits."""
    found, rows, keep, push = [], [], mpf(0.9), mpf(0.05) * mpf(L_ORTH)
    for g in REACHED.smoothness.ravel():
        step = [
            [1 + push * (1 - keep) * mpf(float(g)), push * keep],
            [(1 - keep) * mpf(float(g)), keep],
        ]
        rows.append(matrix(step))
    for t, diameter in enumerate(REACHED.diameters.ravel()):
        moved = matrix([push * (1 - keep), 1 - keep])
        for step in rows[t + 1 :]:
            moved = step * moved
        found.append(moved[0] * mpf(float(diameter)))
    return found


def load_of(client: int, size: int, plan: RandomnessPlan, schedule: Rows) -> float:
    """What a client's row that is drawn most weighs."""
    loads = [mpf(0)] * size
    for t, weight in enumerate(weights()):
        if client in schedule[t // 2]:
            rows = plan.rows(t // 2, client, t % 2, size)
            rows = range(size) if rows is None else rows.tolist()
            for j in rows:
                loads[j] += weight / len(rows) / 2
    return float(max(loads))


@pytest.mark.parametrize("batch", [0, 8])
def test_certificates_weigh_every_step_by_its_own_diameter(batch: int) -> None:
    """sum over the rounds and steps of a client of a_t diam_t / n_i / K, or by the row's share."""
    plan = RandomnessPlan(2, 4, 2, 6, 2, batch)
    schedule = plan.schedule()
    wanted = [load_of(i, size, plan, schedule) for i, size in enumerate(SIZES.tolist())]
    part = Realized(schedule, plan.rows if batch else None)
    np.testing.assert_allclose(certificate(run_of(batch), L_ORTH, part), wanted, rtol=1e-12)
    late = dataclasses.replace(REACHED, diameters=REACHED.diameters[::-1])
    other = certificate(dataclasses.replace(run_of(batch), reach=late), L_ORTH, part)
    assert (abs(other - wanted) > 1e-3 * np.array(wanted)).any()  # negative control


def test_psi_takes_the_same_weights() -> None:
    every = weights()
    of_rounds = np.array([float(a + b) for a, b in zip(every[::2], every[1::2], strict=True)])
    likely = certificate(run_of(0), L_ORTH, Uniform(2, 0.01))
    np.testing.assert_allclose(likely, psi(of_rounds, 4, 2, 0.01) / SIZES, rtol=1e-12)


def test_the_theorem_takes_range_and_slope_from_the_last_ball() -> None:
    run = run_of(0)
    part = Realized(RandomnessPlan(2, 4, 2, 6, 2).schedule())
    moved = certificate(run, 10.0, part)
    np.testing.assert_allclose(
        stability(run, 10.0, part),
        np.minimum(REACHED.last.loss_bound, REACHED.last.gradient_bound * moved),
    )
    everywhere = dataclasses.replace(run, constants=constants(), reach=None)
    one, other = (theorem(each, 10.0, part, 0.05) for each in (run, everywhere))
    assert one.value < 0.2 * other.value


CERTIFIED = [
    {},
    {"local": {"batch": 4, "steps": 2}},
    {"local": {"schedule": "cosine"}},
    {"orthogonalizer": {"name": "clipped-sign", "clip-level": 0.2}},
    {"orthogonalizer": {"name": "newton-schulz", "eps": 0.1}},
    {"orthogonalizer": {"name": "gaussian-smoothed-sign", "sigma": 0.3}},
    {"data": {"name": "digits"}},
]


@pytest.mark.parametrize(
    ("tables", "initial"),
    [
        pytest.param(tables, initial, marks=[pytest.mark.slow] * (place % 2 == (initial == "zero")))
        for place, tables in enumerate(CERTIFIED)
        for initial in ("zero", "gaussian")
    ],
    ids=lambda one: str(one)[:60],
)
def test_every_neighbour_is_within_the_certificate_of_its_ball(
    tables: dict, initial: str, tmp_path: Path
) -> None:
    config = small(**tables, task={"initial": initial}, stability={"neighbours": "all"})
    record = execute(config, tmp_path / "a")
    columns = np.loadtxt(tmp_path / "a" / "neighbours.csv", delimiter=",", skiprows=1)
    moved, promised = columns[:, 4], columns[:, 6]
    assert record["status"] == "certified" and record["constants"] == "ball"
    assert (moved <= promised).all() and moved.max() > 0
    where = finished_run.from_directory(tmp_path / "a", ["stability.constants=global"])
    wide = certificates.report(where, certificates.certify(where))
    assert wide["constants"] == "global" and wide["radius"] is None and wide["range"] == 1.0
    assert record["max_certificate"] < wide["max_certificate"] and record["value"] < wide["value"]
    assert record["gap"] <= record["value"] and record["share"] * record["range"] == pytest.approx(
        record["value"]
    )
    pixels = "No sample has a negative entry, before or after the replacement."
    assert (pixels in record["assumptions"]) == ("data" in tables)
    assert any(f"<= {record['radius']:.4g}" in one for one in record["assumptions"])


@pytest.mark.slow
def test_worst_neighbours_nearly_attain_the_certificate(tmp_path: Path) -> None:
    """From 0 on digits: a certificate that is a quarter smaller is exceeded."""
    config = small(
        data={"name": "digits", "train": 400}, task={"initial": "zero"}, local={"lr": 0.01},
        federation={"clients": 4, "per-round": 2, "rounds": 20},
        stability={"neighbours": "worst", "trials": 12},
    )  # fmt: skip
    record = execute(config, tmp_path / "a")
    moved = np.loadtxt(tmp_path / "a" / "neighbours.csv", delimiter=",", skiprows=1)[:, 4]
    assert 0.75 * record["max_certificate"] < moved.max() <= record["max_certificate"]


def test_what_has_no_ball_keeps_the_constants_of_all_models(tmp_path: Path) -> None:
    """Alignment, an Lg of the caller's, a map without a size, no run at all."""
    part, sizes, start = Realized(RandomnessPlan(0, 6, 3, 8).schedule()), np.full(6, 15), Start(3)
    kinds = {
        "ball": certificates.CertifiedSetting(small(), sizes, part, (7, 3), start=start),
        "aligned": certificates.CertifiedSetting(
            small(local={"recipe": "fedmuon-aligned"}), sizes, part, (7, 3), start=start
        ),
        "given": certificates.CertifiedSetting(small(), sizes, part, (7, 3), l_g=0.5, start=start),
        "unknown": certificates.CertifiedSetting(small(), sizes, part, (7, 3)),
    }
    kinds["observed"] = dataclasses.replace(kinds["ball"], constants=constants())  # of a network
    for name, case in kinds.items():
        record = certificates.report(case, certificates.certify(case))
        assert record["constants"] == (name if name in ("ball", "observed") else "global")
        assert (record["range"] == 1.0) == (name != "ball")
    assert start_of(np.zeros((4, 1)), None) is None


def test_a_gap_has_the_range_of_the_ball_only_where_that_is_proved() -> None:
    """Not in float32, beside a neighbour out of its certificate, of what is refused or unproved."""
    part, sizes, start = Realized(RandomnessPlan(0, 6, 3, 8).schedule()), np.full(6, 15), Start(3)
    config = small(local={"lr": 0.01})
    case = certificates.CertifiedSetting(
        config, sizes, part, (7, 3), start=start, moved=np.zeros(6)
    )
    top = gap.proved_range(case, certificates.certify(case))
    assert case.reach and top == case.reach.last.loss_bound < 0.1
    kinds = {
        "float32": {"config": small(engine={"dtype": "float32"}, local={"lr": 0.01})},
        "violated": {"moved": np.ones(6)},
        "dropped": {"dropped": True},
        "unknown start": {"start": None},
    }
    for name, change in kinds.items():
        other = dataclasses.replace(case, **change)
        assert gap.proved_range(other, certificates.certify(other)) == 1.0, name


def test_a_gap_of_range_one_says_why_and_what_is_shorter() -> None:
    """The changes that it names do make it shorter; where none does, none is named."""
    part, sizes, start = Realized(RandomnessPlan(0, 6, 3, 8).schedule()), np.full(6, 15), Start(3)
    single, every = {"engine": {"dtype": "float32"}}, {"stability": {"constants": "global"}}
    lacking: dict[str, dict[str, Any]] = {
        "": {},
        "engine.dtype=float64": single,
        "stability.constants=ball": every,
        "engine.dtype=float64 stability.constants=ball": single | every,
    }
    for changes, tables in lacking.items():
        config = small(**{"local": {"lr": 0.01}, **tables})
        case = certificates.CertifiedSetting(
            config, sizes, part, (7, 3), start=start, moved=np.zeros(6)
        )
        found = gap.why_one(case, certificates.certify(case))
        assert " ".join(found.changes) == changes and bool(found.note) == bool(changes)
        assert all(change in found.note for change in found.changes)
    case = certificates.CertifiedSetting(
        small(**{"local": {"lr": 0.01}, **single, **every}), sizes, part, (7, 3), start=start,
        moved=np.zeros(6),
    )  # fmt: skip
    kinds = {
        "these iterates can move from X⁰. For a shorter interval, increase [data] test": {
            "start": None
        },
        "set [local] weight-decay = 0, or increase": {
            "config": small(local={"lr": 0.01, "weight-decay": 0.1})
        },
        "set [local] recipe = 'fedmuon', or increase": {
            "config": small(local={"lr": 0.01, "recipe": "fedmuon-aligned"})
        },
        "set [local] weight-decay = 0 and recipe = 'fedmuon', or increase": {
            "config": small(local={"lr": 0.01, "recipe": "fedmuon-aligned", "weight-decay": 0.1})
        },
        "only for runs with certificates": {"dropped": True},
        "exceeds its certificate": {"moved": np.ones(6)},
        "set engine.dtype=float64 (if rounding": {
            "config": small(local={"lr": 0.01}, **single),
            "moved": np.ones(6),
        },
        "lower [local] lr": {"config": small(local={"lr": 100.0})},
    }
    for words, change in kinds.items():
        other = dataclasses.replace(case, **({"config": small(local={"lr": 0.01})} | change))
        found = gap.why_one(other, certificates.certify(other))
        assert words in found.note and not found.changes
        assert gap.proved_range(other, certificates.certify(other)) == 1.0
    text = small(task={"name": "network", "model": "mlp"}, local={"lr": 0.01})
    network = dataclasses.replace(case, config=text)
    assert gap.why_one(network, certificates.certify(network)) == gap.Why("")


def test_zero_is_known_without_a_run() -> None:
    """Any schedule of a run from 0: at least what a run of that schedule comes to."""
    names = ["local.lr=0.01", "local.steps=1", "orthogonalizer.lambda=0.1"]
    records = {}
    for initial in ("zero", "gaussian"):
        case = setting_of(None, [*names, f"task.initial={initial}"], {"size": 200})
        records[initial] = certificates.report(case, certificates.certify(case))
    assert [one["constants"] for one in records.values()] == ["ball", "global"]
    assert records["zero"]["value"] < 0.1 * records["gaussian"]["value"]
    drawn = Realized(RandomnessPlan(0, 20, 5, 50).schedule())
    case = dataclasses.replace(
        setting_of(None, [*names, "task.initial=zero"], {"size": 200}), participation=drawn
    )
    assert certificates.certify(case).bound.value < records["zero"]["value"]  # type: ignore[union-attr]


def test_a_start_is_known_by_its_centred_norm_and_its_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((7, 3)).astype(np.float32)
    start = start_of(weight + 5, source_of(small(data={"name": "digits"}), tmp_path))
    centred = (weight + 5).astype(float) @ (np.eye(3) - 1 / 3)
    assert start and (start.classes, start.nonnegative) == (3, True)
    assert start.reach == pytest.approx(np.linalg.svd(centred)[1][0])
    assert start_of(weight, source_of(small(), tmp_path)) == start_of(weight, None)
    missing = small(data={"name": "mnist", "folder": "nowhere"})
    assert source_of(missing, tmp_path) is None


def known(folder: Path) -> Start:
    start = finished_run.from_directory(folder).start
    assert start is not None
    return start


def test_samples_that_are_others_now_are_not_looked_at(tmp_path: Path) -> None:
    """Pixels of a file that was changed since say nothing about the run."""
    rng, file = np.random.default_rng(0), tmp_path / "samples.npz"
    labels = rng.integers(3, size=150)
    np.savez(file, inputs=rng.uniform(size=(150, 7)), labels=labels)
    config = small(data={"name": "npz", "folder": str(file), "train": 90, "test": 60})
    run(config, tmp_path / "a")
    assert known(tmp_path / "a").nonnegative
    np.savez(file, inputs=rng.uniform(size=(150, 7)), labels=labels)
    assert not known(tmp_path / "a").nonnegative


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_can_start_from_zero(dtype: str, tmp_path: Path) -> None:
    run(small(task={"initial": "zero"}, engine={"dtype": dtype}), tmp_path / "a")
    start = load_file(tmp_path / "a" / "initial.safetensors")["weight"]
    assert not start.any() and not np.signbit(start).any() and str(start.dtype) == dtype
    assert load_file(tmp_path / "a" / "model.safetensors")["weight"].any()
    run(None, tmp_path / "a", resume=True)
