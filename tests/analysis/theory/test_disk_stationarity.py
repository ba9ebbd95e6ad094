"""003's Theorems 3, 5, 6 and Corollary 4: exact second moments, naive loops, an accountant."""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from disk_moments import exact

from fedmuon.analysis.theory.private_stationarity import (
    Disk,
    corollary_4,
    disk,
    noise_of_privacy,
    printed_theorem_3,
    theorem_5,
)
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies import disk_stationarity as study
from fedmuon.experiments.studies.disk_stationarity import claims
from fedmuon.privacy.accounting.composition import epsilon

GRID = list(itertools.product((0.03, 0.3, 0.8, 1.0), (0.02, 0.3, 1.0), (10, 300)))


@pytest.mark.parametrize("start", ["first", "zero"])
def test_the_bound_is_above_exact_moments(start: Any) -> None:
    shares = []
    for (gain, rate, steps), noise, x in itertools.product(GRID, (0.0, 1.0, 100.0), (0.0, 2.0)):
        one = Disk(rate / 1.7, steps, gain, -1.0, noise=noise)
        gap = 1.7 * x**2 / 2
        found = disk(one, gap, 1.7, 1.7 * x, start).value
        true = exact(one, 1.7, x, start)
        assert true <= found * (1 + 1e-9) + 1e-12
        shares.append(true / found if found else 1.0)
        linear = replace(one, reach=0.4, linear=True)
        assert disk(linear, gap, 1.7, 1.7 * x, start).value == found
    assert max(shares) > 0.5  # and the bound is not idle


def test_what_the_bound_was_not_told_breaks_it() -> None:
    loud = Disk(0.3, 300, 0.8, -1.0, noise=4.0)
    assert exact(loud, 1.0, 0.0) > disk(replace(loud, noise=0.4), 0.0, 1.0).value
    far = Disk(0.01, 50, 1.0, -1.0)
    assert exact(far, 1.0, 2.0) > disk(far, 0.2, 1.0).value
    assert exact(far, 1.0, 2.0) <= disk(far, 2.0, 1.0).value


def test_the_proved_bound_is_never_above_the_printed_one() -> None:
    rng, finite = np.random.default_rng(0), 0
    for _ in range(300):
        gain, rate = rng.uniform(0.01, 1), 10 ** rng.uniform(-3, 0)
        one = Disk(rate / 2, int(rng.integers(1, 2000)), gain, -1.0,
                   sigma=rng.integers(2) * rng.random(), batch=int(rng.integers(1, 64)),
                   noise=rng.integers(2) * rng.random())  # fmt: skip
        gap = rng.random()
        slope = rng.random() * math.sqrt(2 * 2 * gap)
        printed = printed_theorem_3(one, gap, 2.0, slope)
        try:
            found = disk(one, gap, 2.0, slope, "zero").value
        except InputError:
            assert math.isinf(printed)
        else:
            assert found <= printed * (1 + 1e-9)
            finite += math.isfinite(printed)
    assert finite > 100


def test_the_printed_bound_is_the_proofs() -> None:
    """Lyapunov's function F + beta |e|^2: (28)'s coefficient of |e_{t-1}|^2 is 0 at this beta."""
    one = Disk(0.1, 50, 0.4, -1.0, sigma=1.0, batch=4, noise=0.3)
    eta, k, big = 0.1, 0.4, 1.5
    kept = (1 - k) ** 2 * (1 + 4 * big**2 * eta**2)
    beta = next(b for b in np.linspace(0, 1, 2_000_001)
                if b - eta * (1 - k) / 2 - (b + eta**2 * big) * kept >= 0)  # fmt: skip
    c1 = (1 + k - 2 * eta * big) - 8 * (beta + eta**2 * big) * (1 - k) ** 2 * big**2 * eta
    wanted = 2 * (0.7 + beta * 0.5) / (c1 * eta * 50)
    wanted += 2 * (beta + eta**2 * big) * k**2 / (c1 * eta) * (2 * 1.0 / 4 + 0.3)
    assert printed_theorem_3(one, 0.7, big, math.sqrt(0.5)) == pytest.approx(wanted, rel=1e-4)
    assert math.isinf(printed_theorem_3(replace(one, lr=5.0), 0.7, big, 1.0))


@pytest.mark.parametrize("gamma", [-3.0, -1.0, -0.4, 0.5, 2.0])
def test_predictions_miss_by_no_more_than_r(gamma: float) -> None:
    """Gradients on the line with slopes of +1 and -1 between random points; |d| = 1."""
    rng, most = np.random.default_rng(0), Disk(0.1, 1, 0.5, gamma).missed
    edges = np.sort(np.array([-1.0, 0.0, gamma, -30, 30]))  # x_{t-1}, x_t and x_t + gamma d

    def misses(slopes: np.ndarray, knots: np.ndarray) -> float:
        g = np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
        at = {x: float(np.interp(x, knots, g)) for x in (-1.0, 0.0, gamma)}
        return abs(at[0.0] - at[-1.0] - (at[gamma] - at[0.0]) / gamma)

    at = np.unique(edges)
    signs = itertools.product((-1.0, 1.0), repeat=len(at) - 1)
    worst = max(misses(np.array(one), at) for one in signs)
    assert worst == pytest.approx(most, abs=1e-12)  # met, so no smaller r would do
    for _ in range(300):
        knots = np.unique(np.append(edges, rng.uniform(-4, 4, 5)))
        assert misses(rng.uniform(-1, 1, len(knots) - 1), knots) <= most + 1e-12


def test_theorem_6s_condition_is_not_enough() -> None:
    def denominator(k: float, rate: float) -> float:
        return 1 - (1 - k) ** 2 * (1 + k + 8 * (1 + 1 / k) * rate**2)

    assert 0.09 > 8 * 0.1**2 and denominator(0.09, 0.1) < 0 < denominator(0.3, 0.1)
    with pytest.raises(InputError, match="filter is too slow"):
        disk(Disk(0.1, 100, 0.09, 0.5), 1.0, 1.0)
    assert disk(Disk(0.1, 100, 0.5, 0.5), 1.0, 1.0).value > 0


# Corollary 4 and Theorem 5


@pytest.mark.parametrize("steps", [200, 3000, 10**6])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_corollary_4_has_root_6_in_the_place_of_4(steps: int, share: float) -> None:
    gap, big = 0.9, 1.3
    found = corollary_4(steps, gap, big, share * math.sqrt(2 * big * gap), 30.0)
    assert found.reduction == pytest.approx(share**2)
    assert found.run.gain == pytest.approx(share**2 * big * found.run.lr)
    own = disk(found.run, gap, big, share * math.sqrt(2 * big * gap), "zero").value
    assert own <= found.value < found.printed
    assert found.value / found.printed == pytest.approx(math.sqrt(6 * (1 + 1 / steps)) / 4)
    assert own > 0.8 * found.value
    wrong = replace(found.run, gain=min(1.0, 9 * found.run.gain))  # nine times the gain is worse
    assert disk(wrong, gap, big, share * math.sqrt(2 * big * gap), "zero").value > 1.2 * own


def test_corollary_4_keeps_to_exact_moments() -> None:
    for x, noise in ((1.0, 30.0), (3.0, 500.0)):
        found = corollary_4(2000, x**2 / 2, 1.0, x, noise)
        assert 0.1 * found.value < exact(found.run, 1.0, x, "zero") <= found.value


def test_the_noise_of_privacy_satisfies_the_accountant() -> None:
    for steps, target, delta in ((100, 1.0, 1e-5), (3000, 8.0, 1e-6)):
        multiplier = math.sqrt(noise_of_privacy(2.0, 500, 7, steps, target, delta) / 7) * 500 / 2.0
        spent = epsilon(multiplier, 1.0, steps, delta)
        assert 0.7 * target < spent.lower <= spent.upper <= target
        assert epsilon(multiplier / 1.5, 1.0, steps, delta).lower > target


def test_theorem_5_does_not_depend_on_t_and_falls_with_n() -> None:
    def value(steps: int, samples: int = 1000, target: float = 2.0) -> float:
        return theorem_5(1.0, samples, 50, steps, target, 1e-5, 0.5, 1.0, 0.7).value

    assert value(10**5) == pytest.approx(value(10**7), rel=1e-4)
    assert value(10**6, 4000) == pytest.approx(value(10**6) / 4, rel=1e-4)
    with pytest.raises(
        InputError, match=r"Theorem 5 of DiSK requires at least \d+ steps"
    ) as caught:
        value(50)
    least = int(str(caught.value).split("requires at least ")[1].split()[0])
    assert value(least) > 0
    with pytest.raises(InputError, match="Theorem 5"):
        value(least - 2)


def test_theorem_5_as_printed_does_not_follow_from_corollary_4() -> None:
    """At its T, 003's own (7) falls like N^(-1/2); at the square of that T, like 1/N."""

    def seven(samples: float, power: int) -> float:
        sigma, entries, target, log = 1.0, 100.0, 1.0, 10.0
        horizon = (math.sqrt(2) * samples * target * sigma / math.sqrt(entries * log)) ** power
        spread = 2 * sigma**2 + entries * horizon * log / (samples * target) ** 2
        return 4 * math.sqrt(spread / horizon)

    slopes = [math.log(seven(1e9, p) / seven(1e7, p)) / math.log(100) for p in (1, 2)]
    assert slopes == pytest.approx([-0.5, -1.0], abs=0.01)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"gain": 0.0}, "gain"), ({"reach": 0.0}, "reach"), ({"lr": -1.0}, "lr"),
     ({"noise": math.nan}, "noise"), ({"batch": 0}, "batch"), ({"lr": 1.5}, "lr <= 1/L")],
)  # fmt: skip
def test_what_is_refused(change: dict[str, float], why: str) -> None:
    with pytest.raises(InputError, match=why):
        disk(Disk(**{"lr": 0.1, "steps": 5, "gain": 0.5, **change}), 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="slope is 2, but it must be at most"):
        corollary_4(1000, 1.0, 1.0, 2.0, 1.0)


# the study

TINY: dict[str, Any] = {
    "reaches": [-1.0, 0.5], "gains": [0.3, 1.0], "lrs": [0.1, 0.4], "noises": [0.0, 1.0],
    "batches": [0, 4], "steps": 6, "horizons": [300, 600], "level": 1.0, "seeds": 2, "samples": 30,
    "features": 3, "outliers": 0.1,
}  # fmt: skip


def asked(**change: Any) -> study.Settings:
    return study.Settings.model_construct(**TINY | change)


def test_the_regression_has_the_constants_that_the_bound_is_told() -> None:
    problem = study.Robust.of(asked())
    assert float(problem.inputs.norm(dim=1).max()) <= 1 + 1e-12
    x = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = (3 * x).requires_grad_()
    (found,) = torch.autograd.grad(problem.value(at).sum(), at)
    torch.testing.assert_close(found, problem.gradient(at.detach()))
    hot = torch.eye(30, dtype=torch.float64)
    own = torch.stack([problem.gradient(at.detach(), row.expand(50, -1)) for row in hot])
    assert float((own - found).square().sum(2).mean(0).max()) <= study.SIGMA**2
    assert float(own.norm(dim=2).max()) <= 0.5
    moved = torch.stack([problem.gradient(at.detach() + 1e-5, row.expand(50, -1)) for row in hot])
    steep = (moved - own).norm(dim=2) / (1e-5 * math.sqrt(3))
    assert float(steep.max()) <= study.SMOOTHNESS * (1 + 1e-6)


@pytest.mark.parametrize(("reach", "gain", "batch", "start"), [
    (0.5, 0.3, 4, "first"), (-1.0, 0.3, 0, "zero"), (2.0, 1.0, 4, "first"),
])  # fmt: skip
def test_the_trajectory_is_algorithm_2_in_a_naive_loop(
    reach: float, gain: float, batch: int, start: Any
) -> None:
    problem, run = study.Robust.of(asked()), Disk(0.4, 6, gain, reach)
    lr = torch.full((2,), 0.4, dtype=torch.float64)
    found = study.trajectory(asked(), problem, run, lr, 1.0, batch, start)
    inputs, labels = problem.inputs.numpy(), problem.labels.numpy()
    c = (1 - gain) / (gain * reach)
    for seed in range(2):
        x, before, smooth, total = np.zeros(3), np.zeros(3), np.zeros(3), 0.0
        for step in range(6):
            rng = generator(0, Draw.BATCH, step=step)
            shift = rng.standard_normal((2, 3))[seed]
            rows = rng.integers(30, size=(2, batch))[seed] if batch else np.arange(30)

            def slope(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
                off = inputs[rows] @ at - labels[rows]
                return (off / (1 + off**2)) @ inputs[rows] / len(rows)

            total += float((slope(x, np.arange(30)) ** 2).sum()) / 6
            ahead = x + reach * (x - before)
            g = c * slope(ahead, rows) + (1 - c) * slope(x, rows) + shift
            own = start == "first" and step == 0
            smooth = g if own else (1 - gain) * smooth + gain * g
            before, x = x, x - 0.4 * smooth
        assert float(found[seed]) == pytest.approx(total, rel=1e-10)


@cache
def columns() -> Any:
    cells = study.cells(asked(seeds=5), None)  # pyright: ignore[reportArgumentType]
    rows = [row for call in cells for row in call.compute()["rows"]]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def test_claims_hold_and_fail() -> None:
    rows = columns()
    below = {**rows, "mean_square": rows["ceiling"] * (0.5 + 1e-3 * rows["seed"])}
    held = [one.holds for one in claims(rows)[:2]] + [claims(below)[2].holds]
    assert held == [True, True, True]
    falls = {**rows, "mean_square": rows["mean_square"] / rows["steps"]}
    assert claims(falls)[3].holds
    for place, change in (
        (0, {"bound": rows["bound"] / 1e4}),
        (1, {"zero_bound": rows["zero_bound"] * 99}),
        (1, {"zero_bound": np.where(rows["reach"] == -1, np.nan, 1.0)}),
        (2, {"mean_square": rows["ceiling"] * (99 + rows["seed"])}),
        (3, {"mean_square": rows["mean_square"] * rows["steps"] ** 3}),
    ):
        assert claims({**rows, **change})[place].holds is False, place


def test_what_filtering_is_worth_is_a_paired_comparison_with_plain_descent() -> None:
    """Losses that scatter by a third from seed to seed, alike for both gains."""
    rows = columns()
    shared = 1 + 0.3 * (-1) ** rows["seed"]

    def verdicts(saved: float, **change: np.ndarray) -> list[bool | None]:
        own = np.where(rows["gain"] < 1, 1 - saved * (1 + 0.1 * rows["seed"]), 1.0)
        made = {**rows, "mean_square": shared * own, "bound": rows["gain"], **change}
        return [one.holds for one in claims(made)[4:]]

    assert verdicts(0.05) == [True, True]
    assert verdicts(0.05, bound=1 / rows["gain"]) == [True, False]  # the bound names kappa = 1
    assert verdicts(-0.05) == [False, False]
    assert verdicts(0.0) == [False, False]
    noise = shared * np.where(rows["gain"] < 1, np.where(rows["seed"] == 0, 0.9, 1.0), 1.0)
    assert verdicts(0.0, mean_square=noise) == [None, None]  # less on average, by one seed alone
    kept = (rows["gain"] < 1) | (rows["corollary"] == 1)
    without = {name: column[kept] for name, column in rows.items()}
    assert [one.holds for one in claims(without)[4:]] == [None, None]  # nothing to beat


# What 003 says in Appendix A of its algorithm.


@pytest.mark.parametrize(("w", "h", "v"), [(1.0, 0.6, 0.3), (2.0, 0.1, 0.5), (1.0, 0.9, 0.01)])
def test_the_gain_converges_at_another_rate_than_is_printed(w: float, h: float, v: float) -> None:
    """A.4, by the recursion of p_t: its limits are right; with -h for 3h its rate would be, too."""
    p, seen = 5.0, []
    for _ in range(400):
        p = (w - h) * (p + h + v) / (p + w + v)
        seen.append(p)
    root = math.sqrt(v + h) * math.sqrt(4 * w - 3 * h + v)
    assert p == pytest.approx((root - (h + v)) / 2, rel=1e-12)

    def rate(middle: float) -> float:
        return (2 * w + middle + v - root) / (2 * w + middle + v + root)

    shrinks = [(b - p) / (a - p) for a, b in itertools.pairwise(seen) if abs(b - p) > 1e-9]
    assert shrinks[-1] == pytest.approx(rate(-h), rel=1e-3)
    assert rate(3 * h) > 1.1 * rate(-h)  # which is printed


@pytest.mark.parametrize("kappa", [0.3, 0.7, 1.0])
def test_disk_with_sgd_is_nesterovs_method_only_without_momentum(kappa: float) -> None:
    """A.5: on f = a x^2 / 2 both are x_{t+1} = p x_t - q x_{t-1}, with p and q linear in a."""
    step, reach = 0.1, (1 - kappa) / kappa

    def disk(a: float) -> tuple[float, float]:
        """p and q, from two runs of Algorithm 2 without noise, a step after x_{t-1} and x_t."""
        found = []
        for before, now in ((0.0, 1.0), (1.0, 0.0)):
            smooth = (before - now) / step
            slope = a * (now + reach * (now - before))
            smooth = (1 - kappa) * smooth + kappa * slope
            found.append(now - step * smooth)
        return found[0], -found[1]

    (p, q), (p1, q1) = disk(0.0), disk(1.0)
    assert (p, q) == pytest.approx((2 - kappa, 1 - kappa))  # so its momentum is 1 - kappa
    # Nesterov's: p = (1 + mu)(1 - s a), q = mu (1 - s a), one s for both
    of_now, of_before = (p - p1) / p, (q - q1) / q if q else 0.0
    assert (abs(of_now - of_before) < 1e-12 or q == 0) == (kappa == 1)
