"""What the numerical studies compute, held against naive loops, closed forms and Monte Carlo."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies import (
    disk_regression,
    dp_bias,
    dp_muon_steps,
    heavy_tail,
    rank_dependence,
)
from fedmuon.optim.schedules import heavy_tailed

GIVEN: dict[Any, dict[str, Any]] = {
    heavy_tail: {"noise": 0.1, "margin": 0.1, "rows": 6, "columns": 4, "distance": 0.5,
                 "factors": [0.5], "seeds": 2, "sigma1": 0.0, "steps": [4096]},
    rank_dependence: {"inputs": 8, "batch": 16, "label_noise": 0.1, "memory": 0.9, "lr_sgd": 1.0,
                      "lr_muon": 0.05, "seeds": 2, "factors": [1.0]},
    dp_bias: {"norm": 2.0, "steps": 5, "coefficients": "quintic", "spacing": 0.02, "nodes": 8,
              "samples": 4000},
    dp_muon_steps: {"bound": 0.1, "lot": 64, "noise": 2.3395, "momentum": 0.95, "times": [1, 410],
                    "iterations": 5, "coefficients": ["cubic", "quintic", "jordan"], "draws": 2},
    disk_regression: {"noises": [0.1, 1.0], "lrs": [0.2, 1.0], "reach": 0.5, "shared_lr": 0.2,
                      "shared_gain": 0.7, "steps": 12, "samples": 40, "features": 5,
                      "condition": 4.0, "label_noise": 0.1},
}  # fmt: skip


def settings(study: Any, **given: Any) -> Any:
    """The study's table of settings, unchecked: a test may ask for less than a suite's file may."""
    return study.Settings.model_construct(**{**GIVEN[study], **given})


# heavy-tail


@pytest.mark.parametrize("index", [1.3, 1.7, 2.0])
def test_stable_draws_have_their_characteristic_function_and_moments(index: float) -> None:
    draws = heavy_tail.stable(np.array(index), (200_000,), np.random.default_rng(0))
    for t in (0.3, 1.0, 2.0):
        # Cosines have a variance of at most 1/2: five standard errors.
        assert abs(np.cos(t * draws).mean() - math.exp(-(t**index))) < 5 * 0.71 / 447
    other = math.exp(-(2.0 ** (index - 0.3)))
    assert abs(np.cos(2 * draws).mean() - other) > 5 * 0.71 / 447
    draws = np.abs(heavy_tail.stable(np.array(index), (400_000,), np.random.default_rng(1))) ** 0.4
    error = draws.std() / math.sqrt(len(draws))
    assert abs(draws.mean() - heavy_tail.moment(index, 0.4)) < 5 * error
    assert heavy_tail.moment(2, 2) == pytest.approx(2)  # normal of variance 2
    assert heavy_tail.moment(1.5, 1.5) == math.inf


def test_the_objective_is_smooth_not_convex_and_has_its_gradient() -> None:
    objective = heavy_tail.Objective.of(6, 4)
    rng = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(200, 6, 4, generator=rng, dtype=torch.float64)).requires_grad_()
    (found,) = torch.autograd.grad(objective.value(x).sum(), x)
    torch.testing.assert_close(found, objective.gradient(x.detach()), rtol=1e-12, atol=1e-12)
    assert (objective.value(x) >= 0).all()
    assert float(objective.value(torch.zeros(6, 4, dtype=torch.float64))) == 0
    y = x.detach() + 0.1 * torch.randn(200, 6, 4, generator=rng, dtype=torch.float64)
    change = objective.gradient(y) - objective.gradient(x.detach())
    move = y - x.detach()
    ratio = torch.linalg.matrix_norm(change) / torch.linalg.matrix_norm(move)
    assert float(ratio.max().detach()) <= 1
    assert float((change * move).sum((1, 2)).min().detach()) < 0  # curvature of both signs
    top = _top(objective.left)[:, None] * _top(objective.right)
    steep = objective.gradient(1e-6 * top) / 1e-6
    assert float(torch.linalg.matrix_norm(steep)) == pytest.approx(1, abs=1e-6)  # attained at 0


def _top(symmetric: Tensor) -> Tensor:
    return torch.linalg.eigh(symmetric)[1][:, -1]


def test_normalized_descent_is_the_naive_loop() -> None:
    steps, alpha = 7, 1.4
    asked = settings(heavy_tail, alphas=[alpha], sigma1=0.04)
    record = heavy_tail.measure(asked, "normalized-sgd", steps)
    rows = {(row["schedule"], row["seed"]): row for row in record["rows"]}
    field = heavy_tail.Noise(asked)
    draws = field.draw(steps, 0).numpy()
    for schedule, index, sigma1 in (("theorem", alpha, 0.04), ("alpha-free", None, 0.0)):
        eta, beta = heavy_tailed(steps, index)
        for seed in range(2):
            mean = _naive_normalized(draws[:, seed], eta, beta, field.growth(alpha, sigma1), steps)
            assert rows[schedule, seed]["mean_gradient"] == pytest.approx(mean, rel=1e-11)
    wrong = _naive_normalized(draws[:, 0], eta, 0.9 * beta, 0.0, steps)
    assert rows["alpha-free", 0]["mean_gradient"] != pytest.approx(wrong, rel=1e-4)


def _naive_normalized(
    draws: np.ndarray, eta: float, beta: float, growth: float, steps: int
) -> float:
    """002 (1) with Nesterov momentum and M / ||M||_F, one matrix at a time."""
    objective = heavy_tail.Objective.of(6, 4)
    x = np.linalg.qr(generator(0, Draw.INITIAL).standard_normal((6, 4)))[0] * 0.5
    c, total = np.zeros((6, 4)), 0.0
    for k in range(steps):
        slope = objective.gradient(torch.from_numpy(x)).numpy()
        size = float(np.linalg.norm(slope))
        total += size
        g = slope + (0.1 + growth * size) * draws[k]
        c = beta * c + g
        m = beta * c + g
        x = x - eta * m / np.linalg.norm(m)
    return total / steps


def test_all_methods_see_the_same_noise_and_sgd_has_its_step_sizes() -> None:
    record = heavy_tail.measure(settings(heavy_tail, alphas=[1.5, 2.0]), "sgd", 9)
    draws = heavy_tail.Noise(settings(heavy_tail, alphas=[1.5, 2.0])).draw(9, 0)
    objective = heavy_tail.Objective.of(6, 4)
    start = np.linalg.qr(generator(0, Draw.INITIAL).standard_normal((6, 4)))[0]
    x, total = torch.from_numpy(start * 0.5), 0.0
    for k in range(9):
        slope = objective.gradient(x)
        total += float(torch.linalg.matrix_norm(slope))
        x = x - 0.5 / 3 * (slope + 0.1 * draws[k, 3])  # alpha = 2, seed 1
    row = record["rows"][-1]
    assert (row["alpha"], row["seed"], row["factor"]) == (2.0, 1, 0.5)
    assert row["mean_gradient"] == pytest.approx(total / 9, rel=1e-12)


@pytest.mark.parametrize("method", heavy_tail.METHODS)
def test_every_method_moves_towards_the_minimum(method: str) -> None:
    asked = settings(heavy_tail, alphas=[2.0], noise=1e-6, factors=[2.0])
    rows = heavy_tail.measure(asked, method, 64)["rows"]
    start = heavy_tail.measure(asked, method, 1)["rows"]
    assert all(row["least_mean"] < 0.5 * start[0]["mean_gradient"] for row in rows)


def test_the_noise_obeys_the_assumption() -> None:
    field = heavy_tail.Noise(settings(heavy_tail, alphas=[2.0], seeds=4, noise=0.3))
    assert field.sigma0(2.0, 0.0) == pytest.approx(0.3 * math.sqrt(2 * 24))
    seen = torch.cat([field.draw(50, block) for block in range(40)]).flatten(0, 1)
    square = (0.3 * seen).square().sum((1, 2))
    error = float(square.std() / math.sqrt(len(square)))
    assert abs(float(square.mean()) - field.sigma0(2.0, 0.0) ** 2) < 5 * error
    # With growth t, E (s + t g)^2 ||S||^2 stays below sigma0^2 + sigma1^2 g^2.
    for size in (0.1, 1.0, 10.0):
        level = (0.3 + field.growth(2.0, 0.04) * size) ** 2 * 2 * 24
        assert level <= field.sigma0(2.0, 0.04) ** 2 + (0.04 * size) ** 2 + 1e-12


# rank-dependence


def test_constants_do_not_depend_on_the_rank() -> None:
    for rank in (2, 6):
        goal = rank_dependence.targets(rank, 8, 3)
        assert float((goal.square().sum((1, 2)) / (2 * rank)).max()) == pytest.approx(0.5)
        identity = torch.eye(rank, dtype=torch.float64).expand(3, rank, rank)
        torch.testing.assert_close(goal @ goal.mT, identity)
        rng = torch.Generator().manual_seed(1)
        at = torch.randn(3, rank, 8, dtype=torch.float64, generator=rng)
        change = rank_dependence.slope(at, goal) - rank_dependence.slope(0 * at, goal)
        nuclear = torch.linalg.matrix_norm(change, ord="nuc")
        assert (nuclear <= torch.linalg.matrix_norm(at, ord=2)).all()  # L = 1


def test_gradients_average_to_the_slope() -> None:
    goal = rank_dependence.targets(3, 8, 2)
    at = torch.full_like(goal, 0.1)
    oracle = partial(rank_dependence._oracle, goal, 2, 64, 0.1)
    found = torch.stack([oracle(step, {"X": at})[1]["X"] for step in range(300)])
    error = found.std(0) / math.sqrt(300)
    away = (found.mean(0) - rank_dependence.slope(at, goal)).abs()
    assert (away < 5 * error).all()
    assert not (away < 0.01 * error).all()


def test_sgd_with_momentum_is_the_naive_loop() -> None:
    """With each factor of the step size, on the same mini-batches."""
    asked = settings(rank_dependence, steps=[2, 6], factors=[1.0, 0.5])
    rows = rank_dependence.measure(asked, "sgd-m", 3)["rows"]
    goal = rank_dependence.targets(3, 8, 2)
    means = []
    for factor in (1.0, 0.5):
        x, m, sizes = torch.zeros_like(goal), torch.zeros_like(goal), []
        for step in range(6):
            sizes.append(torch.linalg.svdvals((x - goal) / 3).sum(-1))
            gradient = rank_dependence._oracle(goal, 2, 16, 0.1, step, {"X": x})[1]["X"]
            m = 0.9 * m + 0.1 * gradient
            x = x - factor * m
        means += torch.stack(sizes).mean(0).tolist()
    assert [row["steps"] for row in rows] == [2] * 4 + [6] * 4
    assert [row["factor"] for row in rows] == [1.0, 1.0, 0.5, 0.5] * 2
    assert [row["mean_nuclear"] for row in rows[4:]] == pytest.approx(means, rel=1e-9)
    assert means[0] != pytest.approx(means[2], rel=1e-4)


def test_sgd_is_flat_in_the_rank_at_its_best_step_size_for_each_rank() -> None:
    """With one step size for all ranks, its norm grows: 1 / L is too small at large ranks."""
    asked = settings(rank_dependence, inputs=32, batch=128, steps=[64], factors=[0.5, 1, 2, 4, 8])
    means: dict[tuple[int, float], list[float]] = {}
    for rank in (4, 32):
        for row in rank_dependence.measure(asked, "sgd-m", rank)["rows"]:
            means.setdefault((rank, row["factor"]), []).append(row["mean_nuclear"])
    best = {
        rank: min((float(np.mean(each)), at[1]) for at, each in means.items() if at[0] == rank)
        for rank in (4, 32)
    }
    assert best[32][1] >= 4 * best[4][1] and best[32][0] < 1.2 * best[4][0]
    assert np.mean(means[32, 1.0]) > 1.5 * np.mean(means[4, 1.0])


def test_a_step_size_that_diverges_has_an_infinite_norm() -> None:
    factors = [0.25, 0.5, 1.0, 2.0, 64.0, 256.0]
    asked = settings(rank_dependence, steps=[512], factors=factors)
    records = [
        row for rank in (4, 8) for row in rank_dependence.measure(asked, "sgd-m", rank)["rows"]
    ]
    rows = {name: np.array([row[name] for row in records]) for name in records[0]}
    assert ((rows["factor"] == 256) == np.isinf(rows["mean_nuclear"])).all()
    for tuned in rank_dependence.tunings(rows, "sgd-m").values():
        assert tuned.losses[-1] == math.inf and tuned.inside and tuned.best <= 1
    best = rank_dependence.tuned_rows({**rows, "method": rows["method"].astype("<U12")})
    assert np.isfinite(best["mean_nuclear"]).all()
    assert math.isfinite(rank_dependence.norms(best, "sgd-m", 512).slope.value)


def test_the_nuclear_norm_is_the_sum_of_the_singular_values() -> None:
    at = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 5)))
    wanted = torch.linalg.svdvals(at).sum(-1)
    at[1, 0, 0], at[2, 1, 1] = math.nan, 1e200  # the square of 1e200 is infinite
    found = rank_dependence.nuclear(at)
    assert found[1:3].tolist() == [math.inf, math.inf]
    assert found[[0, 3]].tolist() == pytest.approx(wanted[[0, 3]].tolist(), rel=1e-9)


@pytest.mark.parametrize("study", [heavy_tail, rank_dependence])
def test_the_usual_step_size_must_be_among_the_factors(study: Any) -> None:
    """Otherwise Muon or SGD-M would have one step size that its opponent lacks."""
    asked = settings(study, ranks=[2, 4], factors=[0.5, 2.0])
    with pytest.raises(InputError, match=r"does not contain 1, .* Add 1.0 to factors"):
        study.cells(asked, None)
    assert study.cells(settings(study, ranks=[2, 4], steps=[8], factors=[0.5, 1, 2.0]), None)


def test_the_exact_map_is_flat_where_one_step_is_not() -> None:
    def mean(method: str, rank: int) -> float:
        given = settings(rank_dependence, inputs=32, batch=128, lr_muon=0.02, steps=[64])
        rows = rank_dependence.measure(given, method, rank)["rows"]
        return float(np.mean([row["mean_nuclear"] for row in rows]))

    assert mean("muon-svd", 32) / mean("muon-svd", 4) == pytest.approx(1, abs=0.05)
    assert mean("muon-ns-1", 32) / mean("muon-ns-1", 4) > 1.3
    assert mean("sgd-m", 32) / mean("sgd-m", 4) > 1.5


# dp-bias


def test_laplacians_and_smoothing_of_known_maps() -> None:
    at = dp_bias.momentum("3 × 4", 2.0)
    first, second = dp_bias.laplacians(lambda m: m @ m.mT @ m, at, 0.02)
    # sum_ij d_ij^2 of M M' M is 2 (m + n + 1) M, and of that 0.
    torch.testing.assert_close(first, 2 * (3 + 4 + 1) * at, rtol=1e-9, atol=1e-9)
    assert float(second.abs().max()) < 1e-5
    point = torch.tensor([[0.7]], dtype=torch.float64)
    first, second = dp_bias.laplacians(lambda m: m**5, point, 0.02)
    assert float(first) == pytest.approx(20 * 0.7**3, rel=1e-6)
    assert float(second) == pytest.approx(120 * 0.7, rel=1e-4)
    at = dp_bias.momentum("2 × 2", 2.0)
    found = dp_bias._smoothed(lambda m: m @ m.mT @ m, at, 0.3, 3)
    expected = at @ at.mT @ at + 0.3**2 / 2 * 2 * (2 + 2 + 1) * at
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_orders_by_quadrature_and_a_wrong_correction() -> None:
    rhos = [1 / 64, 1 / 32]
    one, two = dp_bias.by_quadrature(settings(dp_bias, rhos=rhos), "2 × 2")["rows"]
    assert math.log2(two["plain"] / one["plain"]) == pytest.approx(2, abs=0.02)
    assert math.log2(two["corrected"] / one["corrected"]) == pytest.approx(4, abs=0.05)
    term = dp_bias.by_taylor(settings(dp_bias, rhos=rhos), "2 × 2")["rows"][0]
    assert one["plain"] == pytest.approx(term["plain"], rel=0.01)
    assert one["corrected"] == pytest.approx(term["corrected"], rel=0.02)
    # Probes of twice the width leave a bias of order 2.
    apply, at = dp_bias.output_map(settings(dp_bias, rhos=rhos)), dp_bias.momentum("2 × 2", 2.0)
    wrong = [
        2 * dp_bias._smoothed(apply, at, rho, 8)
        - dp_bias._smoothed(apply, at, math.sqrt(5) * rho, 8)
        - apply(at)
        for rho in rhos
    ]
    sizes = [float(torch.linalg.matrix_norm(part)) for part in wrong]
    assert math.log2(sizes[1] / sizes[0]) == pytest.approx(2, abs=0.05)


def test_biases_have_the_sign_and_direction_of_their_terms() -> None:
    rhos, shape = [1 / 64, 1 / 32], "2 × 2"
    apply, at = dp_bias.output_map(settings(dp_bias, rhos=rhos)), dp_bias.momentum(shape, 2.0)
    terms = dp_bias.leading_terms(apply, at, rhos, 0.02)
    heat = [dp_bias._smoothed(apply, at, rho, 8) - apply(at) for rho in rhos]
    ahead = [torch.linalg.vector_norm(one - term) for one, term in zip(heat, terms[0], strict=True)]
    rows = dp_bias.by_quadrature(settings(dp_bias, rhos=rhos), shape)["rows"]
    assert [row["plain_off"] for row in rows] == pytest.approx([float(size) for size in ahead])
    for row in rows:
        for kind in ("plain", "corrected"):
            assert row[f"{kind}_off"] < 0.01 * row[kind]
    # The wrong sign and a turned matrix have the term's norm, and are far away.
    right = list(terms[0])
    for changed in ([-one for one in right], [one.flip(0) for one in right]):
        both, terms = (torch.stack([torch.stack(one)] * 2) for one in (heat, changed))
        wrong = dp_bias._record(shape, "quadrature", rhos, both, terms)["rows"]
        assert all(row["plain_off"] > 0.5 * row["plain"] for row in wrong)


def test_monte_carlo_agrees_with_quadrature() -> None:
    (exact,) = dp_bias.by_quadrature(settings(dp_bias, rhos=[1 / 16]), "2 × 2")["rows"]
    (found,) = dp_bias.by_monte_carlo(settings(dp_bias, rhos=[1 / 16]), "2 × 2")["rows"]
    for kind in ("plain", "corrected"):
        assert abs(found[kind] - exact[kind]) < 5 * found[f"{kind}_error"]
    assert found["corrected_error"] < found["plain_error"] / 50  # what the exchange is for


def test_exchanged_draws_cancel_what_is_quadratic() -> None:
    at = dp_bias.momentum("3 × 4", 2.0)
    e, u = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 50, 3, 4)))
    cubic = dp_bias._chunk(lambda m: m @ m.mT @ m, at, e, u, 0.2)
    assert float(cubic[1].abs().max()) < 1e-12 * float(cubic[0].abs().max()) * 100
    assert float(cubic[0].abs().max()) > 0.1


# dp-muon-steps

POLYNOMIALS = {"cubic": (1.5, -0.5), "quintic": (15 / 8, -10 / 8, 3 / 8),
               "jordan": (3.4445, -4.775, 2.0315)}  # fmt: skip


def _composed(values: np.ndarray, coefficients: str, divisor: float) -> np.ndarray:
    """Five steps on singular values."""
    values = values / divisor
    for _ in range(5):
        terms = [a * values ** (2 * k + 1) for k, a in enumerate(POLYNOMIALS[coefficients])]
        values = np.sum(terms, axis=0)
    return values


@pytest.mark.parametrize("shape", [(24, 24), (24, 40)])
def test_lengths_and_chi_are_those_of_singular_values(shape: tuple[int, int]) -> None:
    asked = settings(dp_muon_steps)
    noise = generator(0, Draw.NOISE, step=1, block=shape[0] * shape[1]).standard_normal((2, *shape))
    for row in dp_muon_steps.measure(asked, shape, 1)["rows"]:
        if row["signal"] != "no gradient":
            continue
        weights = 0.95 ** np.arange(row["time"])
        width = 2.3395 * 0.1 / 64 * np.sqrt((weights**2).sum())
        values = np.linalg.svd(width * noise[0], compute_uv=False)
        name, norm = row["coefficients"], float(np.linalg.norm(values))
        lengths = [
            np.sqrt((_composed(one, name, max(1.0, float(np.linalg.norm(one)))) ** 2).mean())
            for one in (values, values / weights.sum())
        ]
        assert [row["length"], row["length_unit"]] == pytest.approx(lengths)
        assert [row["norm"], row["norm_unit"]] == pytest.approx([norm, norm / weights.sum()])
        if name == "jordan":
            assert math.isnan(row["slowdown"])
            continue
        delta = max(1 - (values / max(1, norm)) ** 2)
        power = {"cubic": 2, "quintic": 3}[name] ** 5
        assert row["slowdown"] == pytest.approx((1 - delta**power) ** -0.5, rel=1e-6)


def test_only_the_divisor_makes_the_steps_unequal() -> None:
    """M and M / s have the same direction: after division by their own norms, the same step."""
    rows = dp_muon_steps.measure(settings(dp_muon_steps), (24, 40), 0)["rows"]
    for row in rows:
        same = row["time"] == 1  # s_1 = 1
        assert (row["length"] == pytest.approx(row["length_unit"])) == same
    values = np.linalg.svd(np.random.default_rng(0).standard_normal((24, 40)), compute_uv=False)
    one, other = (
        _composed(size * values, "quintic", float(np.linalg.norm(size * values)))
        for size in (1.0, 0.05)
    )
    assert one == pytest.approx(other)


def test_claims_about_steps_can_fail() -> None:
    asked = settings(dp_muon_steps)
    rows = [row for k in range(6) for row in dp_muon_steps.measure(asked, (24, 24), k)["rows"]]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    found = dp_muon_steps.claims(columns)
    assert [one.holds for one in found] == [True] * 5
    for place, change in (
        (0, {"length_corrected": columns["length"]}),
        (1, {"length_corrected": np.where(columns["coefficients"] == "jordan", 1e-3,
                                          columns["length_corrected"])}),
        (2, {"norm_unit": columns["norm"] + 1}),
        (3, {"correction": columns["correction"] + 1}),
        (4, {"slowdown": columns["slowdown"] ** 0}),
    ):  # fmt: skip
        assert dp_muon_steps.claims({**columns, **change})[place].holds is False, place


# disk-regression


def test_the_regression_is_what_it_says() -> None:
    problem = disk_regression.regression(40, 5, 4.0, 0.1)
    assert float(torch.linalg.eigvalsh(problem.hessian)[-1]) == pytest.approx(1)
    x = torch.randn(3, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    (found,) = torch.autograd.grad(problem.loss(x).sum(), x)
    torch.testing.assert_close(found, problem.gradient(x.detach()))
    assert float(problem.loss(problem.best[None])) == pytest.approx(problem.floor)
    assert problem.floor > 0


@pytest.mark.parametrize(("method", "gain"), [("noisy-gd", 1.0), ("low-pass", 0.7), ("disk", 0.7)])
def test_filters_are_the_naive_loops(method: str, gain: float) -> None:
    rows = disk_regression.measure(settings(disk_regression, seeds=3), method, gain)["rows"]
    problem = disk_regression.regression(40, 5, 4.0, 0.1)
    for row in rows:
        final = _naive(problem, method, gain, row)
        assert row["loss"] == pytest.approx(float(problem.loss(final[None])), rel=1e-10)
        assert row["shared"] == (row["lr"] == 0.2)


def _naive(problem: disk_regression.Regression, method: str, gain: float, row: Any) -> Tensor:
    """003, Algorithm 2, one run at a time, with gamma = 1/2; or its base; or with one point."""
    x = torch.zeros(5, 1, dtype=torch.float64)
    smooth, before = torch.zeros_like(x), x
    c, lr, noise = (1 - gain) / (gain * 0.5), row["lr"], row["noise"]
    level = GIVEN[disk_regression]["noises"].index(noise)
    for step in range(12):
        rng = generator(0, Draw.BATCH, step=step, block=level)
        drawn = rng.standard_normal((3, 5, 1))[row["seed"]]
        g = problem.gradient(x)
        if method == "disk":
            g = c * problem.gradient(x + 0.5 * (x - before)) + (1 - c) * problem.gradient(x)
        g = g + noise * torch.from_numpy(drawn)
        smooth = g if step == 0 or method == "noisy-gd" else (1 - gain) * smooth + gain * g
        before, x = x, x - lr * smooth
    return x


def test_all_filters_start_from_the_first_gradient() -> None:
    def losses(method: str, gain: float, steps: int) -> list[float]:
        given = settings(disk_regression, seeds=3, steps=steps)
        return [row["loss"] for row in disk_regression.measure(given, method, gain)["rows"]]

    plain, low_pass, kalman = (
        [losses(method, gain, steps) for steps in (1, 2)]
        for method, gain in (("noisy-gd", 1.0), ("low-pass", 0.7), ("disk", 0.7))
    )
    assert low_pass[0] == pytest.approx(plain[0], rel=1e-12)
    assert kalman[0] == pytest.approx(plain[0], rel=1e-12)
    for one, other in itertools.combinations((plain[1], low_pass[1], kalman[1]), 2):
        assert one != pytest.approx(other, rel=1e-3)


def test_levels_have_independent_noise_and_theirs_is_scaled() -> None:
    low, high, twin = disk_regression.level_noise(3, [0.5, 2.0, 2.0], 4000, 2).view(3, -1)
    for drawn, level in ((low, 0.5), (high, 2.0), (twin, 2.0)):
        assert abs(float(drawn.std()) / level - 1) < 5 / math.sqrt(2 * 8000)
    for one, other in itertools.combinations((low, high, twin), 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / math.sqrt(8000)
    again = disk_regression.level_noise(3, [2.0, 2.0], 4000, 2).view(2, -1)
    assert float(torch.corrcoef(torch.stack([low, again[0]]))[0, 1]) == pytest.approx(1)


def test_plain_descent_has_its_closed_form() -> None:
    """In the eigenbasis x* - x shrinks by 1 - eta l a step, and noise adds eta^2 sigma^2."""
    problem = disk_regression.regression(40, 5, 4.0, 0.1)
    values, basis = torch.linalg.eigh(problem.hessian)
    mean = (basis.mT @ problem.best)[:, 0]
    spread = torch.zeros_like(mean)
    for _ in range(12):
        mean, spread = (1 - 0.2 * values) * mean, (1 - 0.2 * values) ** 2 * spread + 0.2**2
    expected = float((values * (mean**2 + spread)).sum() / 2) + problem.floor
    rows = disk_regression.measure(settings(disk_regression, seeds=2000), "noisy-gd", 1.0)["rows"]
    losses = np.array([row["loss"] for row in rows if (row["lr"], row["noise"]) == (0.2, 1.0)])
    assert abs(losses.mean() - expected) < 5 * losses.std() / math.sqrt(len(losses))


def test_errors_of_root_mean_squares_are_their_scatter_over_draws(monkeypatch: Any) -> None:
    """The relative standard errors of 60 draws on average, beside how much the quotients scatter:
    a deviation of 60 values is known to 10%."""
    apply, at = dp_bias.output_map(settings(dp_bias, rhos=[0.1])), dp_bias.momentum("2 × 2", 2.0)
    found, said = [], []
    for seed in range(60):
        monkeypatch.setattr(dp_bias, "SEED", seed)
        _, errors, spreads, doubts = dp_bias._sampled(apply, at, 0.1, 500)
        found.append([float(spreads[1] / spreads[0]), float(errors[0])])
        said.append(doubts)
    scatter = np.std(found, axis=0, ddof=1) / np.mean(found, axis=0)
    np.testing.assert_allclose(np.mean(said, axis=0), scatter, rtol=0.35)
