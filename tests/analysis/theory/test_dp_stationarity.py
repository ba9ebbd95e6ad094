"""Study `dp-stationarity`: its problem's constants, its numbers, and claims that can fail."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies import dp_stationarity as study
from fedmuon.experiments.studies.dp_stationarity import CORRECTED, NAMES, TERMS, claims
from fedmuon.optim.links import PROBES

ROWS, COLUMNS, PEOPLE, SLOPE, STEPS = 2, 3, 12, 2.0, 8
# The clip is below the slope, so that something is clipped.
TINY: dict[str, Any] = {
    "rows": ROWS, "columns": COLUMNS, "people": PEOPLE, "slope": SLOPE, "clip": 1.5, "lot": 5.0,
    "distance": 3.0, "spread": 1.0, "iterations": 3, "probes": 2, "seeds": 3,
}  # fmt: skip
SETTINGS = study.Settings(**TINY, noises=[0.0, 2.0], steps=[STEPS, 2 * STEPS])


def problem() -> study.Location:
    return study.Location.of(SETTINGS)


def test_the_problem_has_the_constants_that_the_theorem_asks_for() -> None:
    f, rng = problem(), torch.Generator().manual_seed(0)
    x = (3 * torch.randn(100, 6, generator=rng, dtype=torch.float64)).requires_grad_()
    (found,) = torch.autograd.grad(f.value(f.squares(x)).sum(), x)
    torch.testing.assert_close(found, f.gradient(x.detach()), rtol=1e-9, atol=1e-9)
    x = x.detach()
    alone = study.Location(f.points[:1], SLOPE)
    assert 0.99 * SLOPE < float(alone.gradient(100 * x).norm(dim=1).max()) < SLOPE
    y = x + 0.1 * torch.randn(100, 6, generator=rng, dtype=torch.float64)
    change, move = f.gradient(y) - f.gradient(x), y - x
    assert float((change * move).sum(1).min()) > 0  # convex
    assert float((change.norm(dim=1) / move.norm(dim=1)).max()) <= 1
    nuclear = torch.linalg.svdvals(change.view(-1, ROWS, COLUMNS)).sum(-1)
    assert float((nuclear / torch.linalg.svdvals(move.view(-1, ROWS, COLUMNS))[:, 0]).max()) <= ROWS
    # Close to its own person alone the curvature 1 is met, so no smaller L would do there.
    near = alone.gradient(f.points[:1] + 1e-4).norm() / (1e-4 * math.sqrt(6))
    assert float(near) == pytest.approx(1, abs=1e-6)


def test_the_gap_is_that_of_another_minimizer() -> None:
    points = problem().points.numpy()

    def value(w: np.ndarray) -> float:
        lengths = np.linalg.norm(w - points, axis=1)
        return float(np.mean(SLOPE * np.hypot(SLOPE, lengths) - SLOPE**2))

    best = minimize(value, points.mean(0), method="BFGS", options={"gtol": 1e-7})
    assert problem().gap() == pytest.approx(value(np.zeros(6)) - best.fun, rel=1e-9)


class Naive:
    """One seed of DP-Muon or DP-MuonBC in numpy, person by person."""

    def __init__(self, method: str, noise: float, seed: int) -> None:
        points = problem().points.numpy().reshape(PEOPLE, ROWS, COLUMNS)
        plan = theorem.light_tailed(STEPS, 1.0, math.sqrt(problem().gap() / ROWS))[0]
        self.eta, self.beta = plan.lr, plan.beta
        w, memory, self.sizes, self.error, self.longest = 0 * points[0], 0 * points[0], [], 0.0, 0.0
        for step in range(STEPS):
            draw = functools.partial(generator, seed, round=STEPS, step=step)
            own = [SLOPE * (w - a) / math.hypot(SLOPE, np.linalg.norm(w - a)) for a in points]
            self.sizes.append(np.linalg.svd(np.mean(own, 0), compute_uv=False).sum())
            taken = draw(Draw.LOT).random(PEOPLE) < 5 / PEOPLE
            total = noise * 1.5 * draw(Draw.NOISE).standard_normal(w.shape)
            for g in itertools.compress(own, taken):
                total = total + g * min(1, 1.5 / np.linalg.norm(g))
            memory = self.beta * memory + total / 5
            step_of = self.corrected if method == "dp-muonbc" else self.plain
            turned = step_of(memory, noise, step + 1, draw)
            left, _, right = np.linalg.svd(memory, full_matrices=False)
            self.error = max(self.error, np.linalg.norm(turned - left @ right, 2))
            self.longest = max(self.longest, np.linalg.norm(turned, 2))
            w = w - self.eta * turned

    def plain(self, m: np.ndarray, *_: Any) -> np.ndarray:
        """Three quintic steps from M / max(1, |M|_F)."""
        z = m / max(1, np.linalg.norm(m))
        for _step in range(3):
            gram = z @ z.T
            z = 15 / 8 * z - 10 / 8 * gram @ z + 3 / 8 * gram @ gram @ z
        return z

    def corrected(self, m: np.ndarray, noise: float, t: int, draw: Any) -> np.ndarray:
        """2 Q(M / s) less the mean over the probes (000, section 4)."""
        total = sum(self.beta**k for k in range(t))
        rho = noise * 1.5 / 5 * math.sqrt(sum(self.beta ** (2 * k) for k in range(t))) / total
        m, smooth = m / total, []
        for j in range(2):
            u = draw(Draw.PROBE, block=0 * PROBES + j).standard_normal(m.shape)
            smooth += [self.plain(m + rho * u), self.plain(m - rho * u)]
        return 2 * self.plain(m) - np.mean(smooth, 0)


@functools.cache
def rows(method: Any, noise: float) -> list[dict[str, Any]]:
    return study.measure(SETTINGS, method, noise, STEPS)["rows"]


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("method", study.METHODS)
def test_what_is_measured_is_what_a_naive_loop_measures(method: str, noise: float) -> None:
    runs = [Naive(method, noise, seed) for seed in range(3)]
    for row, run in zip(rows(method, noise), runs, strict=True):
        assert row["mean_nuclear"] == pytest.approx(np.mean(run.sizes), rel=1e-9)
        assert row["longest_step"] == pytest.approx(max(one.longest for one in runs), rel=1e-9)
        wanted = max(one.error for one in runs) if method == "dp-muon" else 0.0
        # Its steps multiply the last digits, which hang on the processor.
        assert row["polar_error"] == pytest.approx(wanted, rel=1e-7)
    assert len({row["mean_nuclear"] for row in rows(method, noise)}) == 3  # seeds share no draws


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("method", study.METHODS)
def test_the_bound_is_000s_formula_with_every_constant(method: str, noise: float) -> None:
    row, gap = rows(method, noise)[0], problem().gap()
    eta, beta = math.sqrt(gap / ROWS) * STEPS**-0.75, 1 - STEPS**-0.5
    gamma, drift = theorem.averages(beta, STEPS)
    spread = 1.5 * math.sqrt(1 / 5 + ROWS * COLUMNS * (noise / 5) ** 2)
    cost = 2 - row["polar_error"]
    wanted = (
        gap / (eta * STEPS), ROWS * eta / 2, cost * math.sqrt(ROWS) * 0.5,
        cost * math.sqrt(ROWS) * spread * gamma, cost * ROWS * eta * drift,
    )  # fmt: skip
    found = [row[f"term_{name}"] * (1 - row["polar_error"]) for name in TERMS]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert row["bound"] == pytest.approx(sum(wanted) / (1 - row["polar_error"]), rel=1e-9)
    assert row["ceiling"] == pytest.approx(math.sqrt(ROWS) * SLOPE)


def test_measured_runs_keep_to_the_bound_and_a_false_bound_is_reported() -> None:
    real = [row for method in study.METHODS for noise in (0.0, 2.0) for row in rows(method, noise)]
    again = [{**row, "steps": 2 * STEPS, "mean_nuclear": row["mean_nuclear"] / 2} for row in real]
    columns = {name: np.array([row[name] for row in real + again]) for name in real[0]}
    assert [claim.holds for claim in claims(columns)][:2] == [True, True]
    found = claims({**columns, "bound": columns["bound"] / 100})
    assert [claim.holds for claim in found][:2] == [False, False]
    assert "0 of 12 runs" in found[0].detail


def made(power: float = -0.25, share: float = 0.3, loud: str = "noise", **own: float) -> Any:
    """Bounds 10 T^-1/4 (times 4 with noise) below a ceiling of 20, norms a share of T^power."""
    found = []
    for method, noise, steps, seed in itertools.product(NAMES, (0.0, 4.0), (16, 64, 256), range(4)):
        bound = 10 * steps**-0.25 * (4 if noise else 1)
        largest = loud if noise else "drift"
        size = share * bound * steps ** (power + 0.25) * (1 + 0.01 * seed)
        found.append(
            {"method": method, "noise": noise, "steps": steps, "seed": seed, "bound": bound,
             "mean_nuclear": size * (own.get("corrected", 1.0) if method == CORRECTED else 1.0),
             **{f"term_{name}": (0.9 if name == largest else 0.025) * bound for name in TERMS},
             "ceiling": own.get("ceiling", 20.0), "polar_error": 0.1, "longest_step": 1.5}
        )  # fmt: skip
    return {name: np.array([row[name] for row in found]) for name in found[0]}


@pytest.mark.parametrize(("change", "broken"), [
    ({}, []), ({"share": 1.01}, [0, 1]), ({"corrected": 4.0}, [1]), ({"share": 0.05}, [4]),
    ({"power": 0.05, "share": 0.12}, [2, 3]), ({"loud": "descent"}, [5]), ({"ceiling": 2.0}, [6]),
])  # fmt: skip
def test_claims_hold_and_fail(change: dict[str, Any], broken: list[int]) -> None:
    verdicts = [claim.holds for claim in claims(made(**change))]
    assert verdicts == [place not in broken for place in range(7)]
