"""000's stationarity bound: its sums, its tail, and DP-Muon on Poisson lots, which keeps to it."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from test_stationarity import answer, polar

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
    assert own["terms"]["clipping"] == 0 and "nothing here proves" in own["assumptions"][-1]
    assert (own["lr"], own["beta"], own["rule"]) == (0.001, 0.5, "given")


def test_what_the_bound_refuses() -> None:
    with pytest.raises(InputError, match="above 0"):
        Release(0.0, 1.0, 10, (2, 2))
    with pytest.raises(InputError, match="a degree more"):
        dp_muon(Schedule(0.1, 0.5, 10, "given"), Release(1, 1, 10, (2, 2)), 1, 1, 1.0)
