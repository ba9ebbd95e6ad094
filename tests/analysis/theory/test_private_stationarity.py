"""000's stationarity bound: its sums, its tail, and DP-Muon on Poisson lots, which keeps to it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from test_stationarity import answer, polar

from fedmuon.analysis.theory import private_stationarity as rates
from fedmuon.analysis.theory.private_stationarity import (
    SINGLE,
    Release,
    averages,
    dp_muon,
    light_tailed,
    tail_excess,
)
from fedmuon.analysis.theory.stationarity import Schedule
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import dp_vanishing as study
from fedmuon.experiments.studies.dp_vanishing import TERMS, claims
from fedmuon.orthogonalize import newton_schulz

ROWS, COLUMNS, PEOPLE = 3, 5, 100


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_the_averages_are_those_of_the_weights(beta: float, steps: int) -> None:
    roots, ages = 0.0, 0.0
    for t in range(1, steps + 1):
        weights = np.array([beta ** (t - j) for j in range(1, t + 1)])
        weights /= weights.sum()
        roots += math.sqrt((weights**2).sum())
        ages += sum(w * (t - j) for j, w in enumerate(weights, 1))
    assert averages(beta, steps) == pytest.approx((roots / steps, ages / steps), abs=1e-12)
    assert averages(beta, steps)[1] <= beta / (1 - beta)  # 000's closed form, which is its limit


def test_blocks_of_steps_are_close_ceilings() -> None:
    steps, beta = 4 * SINGLE, 1 - 1e-5
    t = np.arange(1, steps + 1)
    exact = np.sqrt((1 - beta) / (1 + beta) * (1 + beta**t) / (1 - beta**t)).mean()
    age = (beta / (1 - beta) - t * beta**t / (1 - beta**t)).mean()
    gamma, drift = averages(beta, steps)
    assert exact <= gamma <= 1.001 * exact
    assert age <= drift <= 1.001 * age


def test_the_tail_is_its_integral() -> None:
    for clip in (0.0, 0.5, 2.0):
        wanted, _ = quad(lambda u: math.e * math.exp(-((u / 1.5) ** 2)), clip, math.inf)
        assert tail_excess(1.5, clip) == pytest.approx(wanted)
        if clip:  # what 000 goes on to
            assert wanted < math.e * 1.5**2 / (2 * clip) * math.exp(-((clip / 1.5) ** 2))


def test_the_rule_falls_at_its_rate() -> None:
    def value(steps: int) -> float:
        plan, clip = light_tailed(steps, 1.0)
        release = Release(clip, 1.0, 64, (4, 4), tail_excess(1.0, clip))
        return dp_muon(plan, release, 1.0, 1.0).value / math.sqrt(math.log(steps))

    slope = math.log(value(10**16) / value(10**12)) / math.log(1e4)
    assert slope == pytest.approx(-0.25, abs=0.01)


def taylor(m: np.ndarray, steps: int = 16) -> np.ndarray:
    """Degree 2 from M / max(1, |M|_F), as 000 has it."""
    z = m / np.maximum(1, np.linalg.norm(m, axis=(-2, -1), keepdims=True))
    for _ in range(steps):
        gram = z @ z.swapaxes(-1, -2)
        z = 15 / 8 * z - 10 / 8 * gram @ z + 3 / 8 * gram @ gram @ z
    return z


class Seen:
    """What DP-Muon did on f(W) = mean |W - A_i|^2 / 2 from W = 0, over independent runs."""

    def __init__(self, plan: Schedule, release: Release, skew: float = 0.0, runs: int = 10) -> None:
        rng = np.random.default_rng(5)
        points = 1 + rng.standard_normal((PEOPLE, ROWS, COLUMNS)) / 2
        points[: PEOPLE // 10] += skew  # a tenth of all lies far away
        centre, w = points.mean(0), np.zeros((runs, ROWS, COLUMNS))
        memory, size, self.error, self.excess = np.zeros_like(w), 0.0, 0.0, 0.0
        for _ in range(plan.steps):
            size += float(np.linalg.svd(w - centre, compute_uv=False).sum(-1).mean())
            g = w[:, None] - points
            norm = np.linalg.norm(g, axis=(-2, -1), keepdims=True)
            self.excess = max(self.excess, float(np.maximum(norm - release.clip, 0).mean()))
            chosen = rng.random((runs, PEOPLE, 1, 1)) < release.lot / PEOPLE
            total = (chosen * g * np.minimum(1, release.clip / norm)).sum(1)
            total += release.noise * release.clip * rng.standard_normal(w.shape)
            memory = plan.beta * memory + total / release.lot
            step = taylor(memory)
            wrong = np.linalg.norm(polar(memory) - step, 2, axis=(1, 2)).max()
            self.error = max(self.error, float(wrong))
            w = w - plan.lr * step
        self.size = size / plan.steps
        self.gap = float((centre**2).sum() / 2)


@pytest.mark.parametrize("noise", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("clip", [1.5, 20.0])
def test_dp_muon_keeps_to_the_bound(noise: float, clip: float) -> None:
    """L = r from ||.||_op to ||.||_*; excess and quality are measured where it ran."""
    plan, release = Schedule(0.03, 0.9, 100, "given"), Release(clip, noise, 50, (ROWS, COLUMNS))
    seen = Seen(plan, release)
    told = Release(clip, noise, 50, (ROWS, COLUMNS), seen.excess)
    assert seen.error < 1
    found = dp_muon(plan, told, seen.gap, ROWS, polar_error=seen.error)
    assert 0.05 * found.value < seen.size <= found.value


def test_what_the_bound_was_not_told_breaks_it() -> None:
    """The negative controls: noise, and clipping of a few that lie far away."""
    plan, silent = Schedule(0.05, 0.9, 200, "given"), Release(2.0, 0.0, 50, (ROWS, COLUMNS))
    loud = Seen(plan, Release(2.0, 400.0, 50, (ROWS, COLUMNS)))
    assert loud.size > dp_muon(plan, silent, loud.gap, ROWS).value
    plan = Schedule(0.1, 0.5, 200, "given")
    far = Seen(plan, silent, skew=40.0)
    assert far.size > dp_muon(plan, silent, far.gap, ROWS).value
    told = Release(2.0, 0.0, 50, (ROWS, COLUMNS), far.excess)
    assert far.size <= dp_muon(plan, told, far.gap, ROWS).value


def test_the_command_gives_the_numbers() -> None:
    given = ["--paper", "000", "--steps", "5000", "--gap", "4", "--batch", "64", "--rank", "3"]
    found = answer(*given, "--columns", "5", "--noise", "2", "--tail", "1.5", "--q", "7")
    plan, clip = light_tailed(5000, 1.5, 2.0)
    release = Release(clip, 2.0, 64, (3, 5), tail_excess(1.5, clip))
    wanted = dp_muon(plan, release, 4.0, 1.0, found["eps_q"])
    assert found["value"] == wanted.value and found["terms"] == wanted.terms
    assert found["clip"] == clip and "Corollary 3.5" in found["assumptions"][-1]
    own = answer(*given, "--clip", "0.5", "--excess", "0", "--lr", "0.001", "--beta", "0.5")
    assert (
        own["terms"]["clipping"] == 0
        and "passed by the caller and is not proved" in own["assumptions"][-1]
    )
    assert (own["lr"], own["beta"], own["rule"]) == (0.001, 0.5, "given")


# 000's B.5, B.6 and C.6 with constants: against sums, quadrature, Monte Carlo and naive loops.


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("steps", [1, 10, 1000, 50_000])
def test_the_memory_ceiling_holds_and_is_met(beta: float, steps: int) -> None:
    gamma, first = averages(beta, steps)[0], math.sqrt((1 - beta) / (1 + beta))
    ceiling = first * (1 + (rates.C1 / (steps * -math.log(beta)) if beta else 0.0))
    assert gamma <= ceiling
    printed = rates.C1 / (steps * math.sqrt(1 - beta)) + math.sqrt(1 - beta)  # c1, and c2 = 1
    assert ceiling <= printed
    if beta == 0.999 and steps == 50_000:
        assert gamma > 0.998 * ceiling  # without all of c1 it is no ceiling
        assert gamma > first * (1 + 0.9 * rates.C1 / (steps * -math.log(beta)))


def test_c1_is_its_integral() -> None:
    """int sqrt(coth(x/2)) - 1, singular like sqrt(2/x) at 0."""
    near, _ = quad(lambda s: 2 * s * (1 / math.sqrt(math.tanh(s * s / 2)) - 1), 1e-9, 1)
    far, _ = quad(lambda x: 1 / math.sqrt(math.tanh(x / 2)) - 1, 1, 60)
    assert near + far == pytest.approx(rates.C1, rel=1e-7)


def test_the_excess_is_met_by_gradients_of_twice_the_clip() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths, clip = rng.pareto(2.5, 30) * rng.uniform(0.1, 3), rng.uniform(0.1, 5)
        excess = np.maximum(lengths - clip, 0).mean()
        assert excess <= rates.moment_excess(math.sqrt((lengths**2).mean()), clip) * (1 + 1e-12)
    assert rates.moment_excess(3.0, 1.5) == pytest.approx(3.0 - 1.5)  # all of length 2 C
    assert 0.99 * rates.moment_excess(3.0, 1.5) < 3.0 - 1.5  # so no smaller factor than 1/4


def priced(steps: int, noise: float = 2.0, scale: float = 0.7, first: float = 1.3) -> Any:
    plan, clip = rates.second_moment(steps, scale, first)
    release = Release(clip, noise, 50, (3, 5), rates.moment_excess(2.0, clip))
    return dp_muon(plan, release, 4.0, 1.5, 0.1).value, release, plan


@pytest.mark.parametrize("noise", [0.0, 2.0, 50.0])
def test_the_bound_keeps_to_its_rate_from_every_horizon_on(noise: float) -> None:
    horizons = [2, 7, 50, 10**3, 10**5, 10**7, 10**9]
    values, constants = [], []
    for steps in horizons:
        value, release, plan = priced(steps, noise)
        assert (plan.lr, plan.beta) == (0.7 * steps ** (-5 / 6), 1 - steps ** (-2 / 3))
        values.append(value * steps ** (1 / 6))
        constants.append(rates.second_moment_rate(steps, release, 2.0, 4.0, 1.5, 0.7, 0.1))
    for k, constant in enumerate(constants):
        assert max(values[k:]) <= constant
    assert sorted(constants, reverse=True) == constants
    assert values[-1] > 0.95 * constants[-1]
    # The negative control: with the rule of Corollary 3.5's memory the noise does not keep it.
    plan, clip = rates.second_moment(10**9, 0.7, 1.3)
    wrong = type(plan)(plan.lr, 1 - 1e-1, 10**9, "given")
    release = Release(clip, 50.0, 50, (3, 5), rates.moment_excess(2.0, clip))
    assert dp_muon(wrong, release, 4.0, 1.5).value * 10**1.5 > constants[0] / 5


def test_the_clip_scale_balances() -> None:
    best = rates.clip_scale(2.0, Release(9.0, 2.0, 50, (3, 5)))
    steps = 10**15

    def constant(first: float) -> float:
        _, release, _ = priced(steps, first=first)
        return rates.second_moment_rate(steps, release, 2.0, 4.0, 1.5, 0.7)

    assert constant(best) <= min(constant(0.9 * best), constant(1.1 * best))
    assert constant(best) < 0.9 * constant(4 * best)


@pytest.mark.parametrize(("formula", "given", "why"), [
    (Release, (0.0, 1.0, 10, (2, 2)), "above 0"), (rates.second_moment, (1,), "at least 2"),
    (dp_muon, (Schedule(0.1, 0.5, 10, ""), Release(1, 1, 10, (2, 2)), 1, 1, 1.0), "higher degree"),
    (rates.moment_excess, (1.0, 0.0), "clip"),
    (rates.probe_error, ("quintic", 5, (2, 3), 0.1, 0), "pairs"),
])  # fmt: skip
def test_what_is_refused(formula: Any, given: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        formula(*given)


def test_the_command_has_the_rule() -> None:
    given = ["--paper", "000", "--steps", "5000", "--gap", "4", "--batch", "64", "--rank", "3"]
    found = answer(*given, "--columns", "5", "--noise", "2", "--moment", "1.5", "--q", "7")
    first = rates.clip_scale(1.5, Release(1.0, 2.0, 64, (3, 5)))
    plan, clip = rates.second_moment(5000, 2.0, first)
    release = Release(clip, 2.0, 64, (3, 5), rates.moment_excess(1.5, clip))
    wanted = dp_muon(plan, release, 4.0, 1.0, found["eps_q"])
    assert found["value"] == wanted.value and found["rule"] == "second-moment"
    assert found["assumptions"][-1] == rates.MOMENT
    other = answer(*given, "--moment", "1.5", "--clip", "3")
    assert other["excess"] == pytest.approx(1.5**2 / 12)


# probes


def scattered(at: torch.Tensor, rho: float, pairs: int, draws: int = 4000) -> float:
    """Monte Carlo: (E |zeta|_F^2)^(1/2) of J antithetic pairs."""
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(draws, pairs, *at.shape, dtype=at.dtype, generator=rng)
    q = [newton_schulz(at + s * rho * u, 5, "quintic", normalization="unit") for s in (1, -1)]
    mean = ((q[0] + q[1]) / 2).mean(1)
    return float(mean.var(0).sum().sqrt())


@pytest.mark.parametrize("rho", [1e-3, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("size", [0.0, 0.05, 2.0])
def test_probes_scatter_within_both_bounds(rho: float, size: float) -> None:
    at = size * torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.5, 0.1]], dtype=torch.float64)
    one, four = (scattered(at, rho, pairs) for pairs in (1, 4))
    assert one <= rates.probe_error("quintic", 5, (2, 3), rho)
    assert four <= rates.probe_error("quintic", 5, (2, 3), rho, 4)
    if one > 1e-9:
        assert four == pytest.approx(one / 2, rel=0.1)  # 1/J, as 000 has it


def test_antithetic_pairs_earn_the_half() -> None:
    """Y = rho^2 u^2 has deviation sqrt 2 rho^2 = (E Y'^2 / 2)^(1/2): the inequality is met by
    quadratic maps, and without the pairs a linear map breaks it."""
    u = np.random.default_rng(0).standard_normal(400_000)
    assert (u**2).std() == pytest.approx(math.sqrt((4 * u**2).mean() / 2), rel=0.01)
    assert u.std() > math.sqrt(1 / 2) * 1.3


def test_no_output_is_larger_and_one_is_nearly_as_large() -> None:
    rng = torch.Generator().manual_seed(1)
    for name, steps, side in (("quintic", 5, 3), ("jordan", 5, 3), ("cubic", 1, 4)):
        ceiling = rates.largest_output(name, steps, side)
        m = torch.randn(3000, side, side + 1, dtype=torch.float64, generator=rng)
        m = m * torch.rand(3000, 1, 1, dtype=torch.float64, generator=rng) * 2
        m[0] = 0.57 * torch.eye(side, side + 1)
        sizes = torch.linalg.matrix_norm(newton_schulz(m, steps, name, normalization="unit"))
        assert 0.6 * ceiling < float(sizes.max()) <= ceiling
        assert ceiling <= 1.5 * math.sqrt(side)


# the study

TINY: dict[str, Any] = {
    "noises": [4.0, 16.0], "steps": [8, 16], "seeds": 4, "rows": 2, "columns": 3, "people": 40,
    "lot": 10.0, "least": 2.0, "tail": 2.5, "distance": 3.0, "spread": 1.0, "iterations": 5,
}  # fmt: skip


def columns() -> Any:
    asked = study.Settings(**TINY)
    rows = [row for noise in asked.noises for steps in asked.steps
            for row in study.measure(asked, noise, steps)["rows"]]  # fmt: skip
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def test_slopes_have_the_second_moment_of_their_tail() -> None:
    asked = study.Settings(**{**TINY, "people": 200_000})
    own = study.slopes(asked).numpy()
    assert own.min() >= 2.0 and (own**2).mean() == pytest.approx(4 * 2.5 / 0.5, rel=0.1)
    ranks = np.sort(own)[::-1][[199, 1999]]
    assert math.log(ranks[0] / ranks[1]) / math.log(10) == pytest.approx(1 / 2.5, rel=0.01)


def test_the_row_is_000s_formula_and_the_claims_can_fail() -> None:
    rows = columns()
    asked = study.Settings(**TINY)
    moment = math.sqrt(float(study.slopes(asked).square().mean()))
    assert rows["excess_bound"] == pytest.approx(moment**2 / (4 * rows["clip"]))
    assert rows["bound"] == pytest.approx(sum(rows[f"term_{name}"] for name in TERMS))
    chi = 1 / (1 - rows["polar_error"])
    clipping = (2 - rows["polar_error"]) * chi * math.sqrt(2) * rows["excess_bound"]
    assert rows["term_clipping"] == pytest.approx(clipping)
    shorter = rows["steps"] == 8
    assert rows["clip"][~shorter] == pytest.approx(rows["clip"][shorter] * 2 ** (1 / 6))
    # Every bound here is above what any gradient can be: no run could break it.
    held = [claim.holds for claim in claims(rows)]
    assert (*held[:2], held[4]) == (None, False, True)
    said = {**rows, "ceiling": rows["bound"] * 1.01}
    assert [claim.holds for claim in claims(said)][:2] == [True, True]
    steep = {**said, "mean_nuclear": rows["mean_nuclear"] * rows["steps"] ** -1.0}
    assert all(claim.holds for claim in claims(steep))
    slow = np.where(rows["steps"] == 8, 1.0, 2.0 ** (-1 / 8)) * (1 + 1e-3 * rows["seed"])
    for place, change in (
        (0, {"mean_nuclear": rows["bound"] * 1.005}),
        (0, {"mean_nuclear": rows["bound"] * np.where(np.arange(len(slow)) == 5, 1.005, 0.5)}),
        (1, {"ceiling": rows["bound"] * 0.99}),
        (1, {"ceiling": np.where(rows["noise"] == 16, 0.99, 1.01) * rows["bound"]}),
        (2, {"mean_nuclear": slow}),
        (3, {"mean_nuclear": rows["steps"] ** 0.1 * (1 + 1e-3 * rows["seed"])}),
        (4, {"excess": 0 * rows["excess"]}),
        (4, {"excess": 9 * rows["excess_bound"]}),
    ):
        assert claims({**said, **change})[place].holds is False, place
