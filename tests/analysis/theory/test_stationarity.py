"""Schedules and stationarity bounds of 002 and 004: formulas, sums, and what optimizers do."""

import json
import math

import numpy as np
import pytest
from conftest import quick
from test_bound import loaded
from typer.testing import CliRunner

from fedmuon.analysis.theory.private_stationarity import Disk, disk
from fedmuon.analysis.theory.stationarity import (
    Noise,
    Schedule,
    alpha_free,
    contraction,
    heavy_tailed,
    least_batch,
    least_power,
    muon,
    nesterov_muon,
    polynomial_quality,
    rate,
    sgd_momentum,
    sketched_quality,
    tuned_muon,
    tuned_sgd,
)
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.rates import ALL, READ
from fedmuon.orthogonalize.lipschitz_constants import polar_error_bound, residual

ROWS, COLUMNS = 4, 6


def test_schedules_are_the_printed_powers():
    """At K = 10^(3a-2) every exponent is a whole power of ten over the numerator."""
    for alpha in (1.2, 1.5, 1.8, 2.0):
        steps = 10_000
        found = heavy_tailed(steps, alpha)
        power = 3 * alpha - 2
        assert math.log(found.lr) / math.log(steps) * power == pytest.approx(1 - 2 * alpha)
        assert math.log(1 - found.beta) / math.log(steps) * power == pytest.approx(-alpha)
        # the two slowest terms, 1/(eta K) and eta/(1-beta), fall alike, and so does the noise
        assert math.log(found.lr / (1 - found.beta), steps) == pytest.approx(-rate(alpha))
        assert -math.log(found.lr * steps, steps) == pytest.approx(-rate(alpha))
        assert (1 - found.beta) ** (1 - 1 / alpha) == pytest.approx(steps ** -rate(alpha))
    assert heavy_tailed(81, 2.0).lr == pytest.approx(1 / 27)
    assert (alpha_free(81).lr, alpha_free(81).beta) == pytest.approx((1 / 27, 8 / 9))
    assert rate(2.0) == rate(2.0, "alpha-free") == 0.25
    assert rate(1.5) == pytest.approx(0.2) and rate(1.5, "alpha-free") == pytest.approx(1 / 6)
    assert tuned_muon(10_000, 4.0, 1.0, 2.0, 4).beta == pytest.approx(1 - 0.02 / 4)
    assert tuned_muon(10_000, 4.0, 1.0, 0.0, 4).beta == 0


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("rule", ["heavy-tailed", "alpha-free"])
def test_the_bound_falls_at_the_rate(alpha, rule):
    noise = Noise(alpha, sigma0=1.0)

    def value(steps: float) -> float:
        plan = alpha_free(int(steps)) if rule == "alpha-free" else heavy_tailed(int(steps), alpha)
        return nesterov_muon(plan, noise, 1.0, 1.0, (4, 4)).value

    slope = math.log(value(1e16) / value(1e12)) / math.log(1e4)
    # terms of the next power of K are still felt there where the powers lie close together
    assert slope == pytest.approx(-rate(alpha, rule), abs=0.01)


def summed(plan: Schedule, noise: Noise, gap: float, smooth: float, gamma: float, nu: float):
    """Lemmas C.6 and C.7 with sigma1 = 0: S_k as a sum over s, no geometric series closed."""
    eta, beta, reach = plan.lr, plan.beta, math.sqrt(ROWS) * (1 + nu)
    slope = math.sqrt(2 * smooth * gap)
    first = beta**2 * slope + (1 - beta**2) * noise.size(slope)
    total = 0.0
    for k in range(plan.steps):
        drift = sum(beta ** (k - s + 2) * smooth * eta * reach for s in range(1, k + 1))
        weights = [(1 - beta) * beta**k] * (k > 0)
        weights += [(1 - beta) * beta ** (k + 1 - s) for s in range(1, k)]
        weights += [(1 - beta) * (1 + beta)] * (k > 0)
        size = sum(a**noise.alpha for a in weights) ** (1 / noise.alpha)
        spread = 2 * math.sqrt(math.pi) * noise.reduction * noise.sigma0 * size
        total += beta**k * first + drift + spread
    descent = gap / (eta * plan.steps) + smooth * eta * reach**2 / 2
    return (descent + (1 + reach) * total / plan.steps) / (1 - gamma)


@pytest.mark.parametrize("alpha", [1.3, 2.0])
def test_the_closed_form_bounds_the_sums_of_its_proof(alpha):
    for noise in (Noise(alpha, 0.7), Noise(alpha, 0.0, batch=4), Noise(alpha, 0.7, batch=9)):
        for plan in (heavy_tailed(200, alpha), alpha_free(200), Schedule(0.01, 0.5, 200, "given")):
            for gamma, nu in ((0.0, 0.0), (0.3, 0.2)):
                found = nesterov_muon(plan, noise, 2.0, 3.0, (ROWS, COLUMNS), gamma, nu)
                wanted = summed(plan, noise, 2.0, 3.0, gamma, nu)
                assert wanted <= found.value <= 2.5 * wanted
                assert found.value == pytest.approx(sum(found.terms.values()))


def test_growing_noise_asks_for_a_batch():
    noise = Noise(1.5, 1.0, 0.2)
    with pytest.raises(ValueError, match="batch must be above"):
        contraction(noise, (ROWS, COLUMNS))
    enough = least_batch(noise, (ROWS, COLUMNS), 0.1, 0.1)
    big = Noise(1.5, 1.0, 0.2, math.ceil(enough) + 1)
    assert 0 < contraction(big, (ROWS, COLUMNS), 0.1, 0.1) < 0.05
    with pytest.raises(ValueError, match="batch must be above"):
        contraction(Noise(1.5, 1.0, 0.2, math.floor(enough)), (ROWS, COLUMNS), 0.1, 0.1)
    plan = heavy_tailed(1000, 1.5)
    found = nesterov_muon(plan, Noise(1.5, 1.0, 0.2, 10**6), 1.0, 1.0, (ROWS, COLUMNS))
    assert found.terms["growing noise"] > 0 and "A.8" in found.assumptions[-1]
    assert found.value > nesterov_muon(plan, Noise(1.5, 1.0, 0, 10**6), 1, 1, (4, 6)).value


def polar(m: np.ndarray) -> np.ndarray:
    u, _, vh = np.linalg.svd(m, full_matrices=False)
    return u @ vh


def cubic(m: np.ndarray, steps: int) -> np.ndarray:
    z = m / np.linalg.norm(m, axis=(-2, -1), keepdims=True)
    for _ in range(steps):
        z = 1.5 * z - 0.5 * z @ z.swapaxes(-1, -2) @ z
    return z


def pareto(rng: np.random.Generator, shape: tuple[int, ...], tail: float) -> np.ndarray:
    """A uniform direction of Pareto length: E |xi|^a = tail / (tail - a) for a < tail."""
    noise = rng.standard_normal(shape)
    noise /= np.linalg.norm(noise, axis=(-2, -1), keepdims=True)
    return noise * (1 + rng.pareto(tail, (*shape[:-2], 1, 1)))


@pytest.mark.parametrize("sigma", quick([1.0, 1e-6], [1.0]))
def test_nesterov_muon_keeps_to_its_bound(sigma):
    """f = |X|^2/2 from |X_0| = 3, Pareto noise without a variance; means of 200 runs."""
    alpha, tail, steps, rng = 1.5, 1.8, 400, np.random.default_rng(0)
    plan = heavy_tailed(steps, alpha)
    x = np.full((200, ROWS, COLUMNS), 3 / math.sqrt(ROWS * COLUMNS))
    memory, seen = np.zeros_like(x), []
    for _ in range(steps):
        seen.append(np.linalg.norm(x, axis=(1, 2)).mean())
        g = x + sigma * pareto(rng, x.shape, tail)
        memory = plan.beta * memory + g
        x = x - plan.lr * polar(plan.beta * memory + g)
    noise = Noise(alpha, sigma * (tail / (tail - alpha)) ** (1 / alpha))
    found = nesterov_muon(plan, noise, 4.5, 1.0, (ROWS, COLUMNS), gradient=3.0)
    assert min(seen) <= found.value
    if sigma == 1.0:  # the negative control: noise that the bound was not told, a longer horizon
        wrong = nesterov_muon(heavy_tailed(10**9, alpha), Noise(alpha, 0.0), 4.5, 1.0, (4, 6))
        assert min(seen) > wrong.value


INEXACT = [(0, 0.03), (1, 0.0), (3, 0.0), (3, 0.03)]


@pytest.mark.parametrize(("steps", "sigma1"), quick(INEXACT, INEXACT[:2]))
def test_inexact_nesterov_muon_keeps_to_its_bound(steps, sigma1):
    """The same with cubic steps, or the polar factor at 0; gamma is the largest that was measured,
    nu is 0. With sigma1 > 0 the noise grows with the gradient."""
    alpha, tail, horizon, rng = 1.5, 1.8, 300, np.random.default_rng(2)
    plan, unit = heavy_tailed(horizon, alpha), (tail / (tail - alpha)) ** (1 / alpha)
    x = np.full((50, ROWS, COLUMNS), 3 / math.sqrt(ROWS * COLUMNS))
    memory, seen, gamma = np.zeros_like(x), [], 0.0
    for _ in range(horizon):
        size = np.linalg.norm(x, axis=(1, 2), keepdims=True)
        seen.append(size.mean())
        scale = (0.2**alpha + (sigma1 * size) ** alpha) ** (1 / alpha)  # of Assumption 3.2
        g = x + scale / unit * pareto(rng, x.shape, tail)
        memory = plan.beta * memory + g
        m = plan.beta * memory + g
        output = cubic(m, steps) if steps else polar(m)
        assert np.linalg.norm(output, 2, axis=(1, 2)).max() <= 1 + 1e-12
        aligned = (m * output).sum((1, 2)) / np.linalg.svd(m, compute_uv=False).sum(-1)
        gamma = max(gamma, float((1 - aligned).max()))
        x = x - plan.lr * output
    noise, near = Noise(alpha, 0.2, sigma1), (ROWS, COLUMNS)
    found = nesterov_muon(plan, noise, 4.5, 1.0, near, gamma=max(0.0, gamma), gradient=3.0)
    assert (0.01 if steps else -1e-9) < gamma < 1 and min(seen) <= found.value
    exact = nesterov_muon(plan, noise, 4.5, 1.0, near, gradient=3.0)
    assert found.value > exact.value or not steps
    wrong = nesterov_muon(
        heavy_tailed(10**15, alpha), Noise(alpha, 0.0), 4.5, 1.0, near, max(0.0, gamma)
    )
    assert min(seen) > wrong.value  # the negative control: another horizon, and no noise


def trajectory(plan: Schedule, step, sigma: float, runs: int = 100) -> float:
    """Mean nuclear norm of the gradient of |X|^2/2 over the steps and over runs."""
    rng = np.random.default_rng(1)
    x = np.ones((runs, ROWS, COLUMNS)) * np.eye(ROWS, COLUMNS)
    memory, total = np.zeros_like(x), 0.0
    for _ in range(plan.steps):
        total += np.linalg.svd(x, compute_uv=False).sum(-1).mean()
        g = x + sigma / math.sqrt(ROWS * COLUMNS) * rng.standard_normal(x.shape)
        memory = plan.beta * memory + (1 - plan.beta) * g
        x = x - plan.lr * step(memory)
    return total / plan.steps


@pytest.mark.parametrize("sigma", quick([0.0, 1.0, 5.0], [0.0, 1.0]))
def test_the_optimizers_of_004_keep_to_their_bounds(sigma):
    """L = r from ||.||_op to ||.||_*; the residual of Newton-Schulz is measured where it ran."""
    gap, smooth, steps = ROWS / 2, float(ROWS), 300
    plan = tuned_muon(steps, gap, smooth, sigma, ROWS)
    terms = (gap, smooth, sigma, ROWS)
    seen = trajectory(plan, polar, sigma)
    svd = muon(plan, *terms)
    assert 0.02 * svd.value < seen <= svd.value

    errors = []

    def inexact(m: np.ndarray) -> np.ndarray:
        z = cubic(m, 3)
        errors.append(np.linalg.norm(polar(m) - z, 2, axis=(1, 2)).max())
        return z

    seen = trajectory(plan, inexact, sigma, runs=20)
    found = muon(plan, *terms, polar_error=max(errors))
    assert svd.value < found.value and seen <= found.value
    assert found.contraction == pytest.approx(1 - max(errors))

    plan = tuned_sgd(steps, gap, smooth, sigma)
    seen = trajectory(plan, lambda m: m, sigma)
    assert seen <= sgd_momentum(plan, *terms).value
    if sigma == 5.0:  # the negative control: noise that the bound was not told
        loud = trajectory(Schedule(0.1, 0.0, steps, "given"), lambda m: m, 50.0)
        assert loud > sgd_momentum(plan, gap, smooth, 0.0, ROWS).value


def test_what_rank_costs():
    """Without noise SGD pays sqrt(r) and Muon nothing; with noise r^(1/2) against r^(1/4)."""
    steps = 10**8

    def slope(value) -> float:
        return math.log(value(1024) / value(4)) / math.log(256)

    def of_muon(sigma: float):
        return lambda r: muon(tuned_muon(steps, 1, 1, sigma, r), 1, 1, sigma, r).value

    def of_sgd(sigma: float):
        plan = tuned_sgd(steps, 1, 1, sigma)
        return lambda r: sgd_momentum(plan, 1, 1, sigma, r).value

    assert slope(of_muon(0.0)) == 0 and slope(of_sgd(0.0)) == pytest.approx(0.5)
    assert slope(of_muon(1.0)) == pytest.approx(0.25, abs=0.01)
    assert slope(of_sgd(1.0)) == pytest.approx(0.5)


def test_newton_schulz_costs_a_factor_that_vanishes():
    plan = tuned_muon(1000, 1, 1, 1, 8)
    exact = muon(plan, 1, 1, 1, 8).value
    errors = [polar_error_bound(residual(0.999, 2, q)) for q in range(1, 12)]
    values = [muon(plan, 1, 1, 1, 8, polar_error=error).value for error in errors]
    assert values == sorted(values, reverse=True) and values[0] > 5 * exact
    assert values[-1] == pytest.approx(exact, rel=1e-9)
    with pytest.raises(ValueError, match="more Newton-Schulz steps"):
        muon(plan, 1, 1, 1, 8, polar_error=1.0)
    with pytest.raises(ValueError, match="lr <= "):
        sgd_momentum(plan, 1, 100.0, 1, 8)


def answer(*arguments: str) -> dict:
    shown = CliRunner().invoke(app, ["stationarity", "--json", *arguments])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.output)


def test_the_command_takes_singular_values_for_gamma_and_nu():
    singular = [1.0, 0.5, 0.1, 0.05]
    text = ",".join(map(str, singular))
    gamma, nu = polynomial_quality(singular, "jordan", 3)
    found = answer("--singular", text, "--coefficients", "jordan", "--q", "3")
    assert (found["gamma"], found["nu"]) == (gamma, nu) and nu > 0
    wanted = answer("--gamma", str(gamma), "--nu", str(nu))
    assert found["value"] == pytest.approx(wanted["value"], rel=1e-12)
    sketched = answer("--singular", "1,1,1,0.9,0.9,0.9,0.9", "--sketch", "3", "--oversample", "2")
    s = [1.0] * 3 + [0.9] * 4
    assert sketched["power"] == least_power(s, 3, 2) > 0
    assert sketched["gamma"] == sketched_quality(s, 3, 2, sketched["power"])[0]
    for words, said in (
        (["--singular", text, "--nu", "0.1"], "--singular already determines --nu"),
        (["--q", "3"], "--q has an effect only together with --singular"),
        (["--singular", text, "--power", "1"], "--power has an effect only together with --sketch"),
        (["--singular", text, "--sketch", "1", "--q", "2"], "--q has no effect if --sketch is set"),
        (["--singular", "1,x"], "must be a list of numbers. Write"),
        (["--singular", "1,1,1,1", "--sketch", "3", "--oversample", "2", "--power", "0"],
         "no alignment is proved"),
    ):  # fmt: skip
        shown = CliRunner().invoke(app, ["stationarity", *words])
        assert isinstance(shown.exception, InputError) and said in str(shown.exception)


def test_the_command_gives_the_numbers_of_analysis():
    given = ["--steps", "5000", "--alpha", "1.5", "--sigma0", "2", "--batch", "8", "--rank", "6",
             "--gap", "3", "--l0", "0.5", "--gamma", "0.1", "--nu", "0.2"]  # fmt: skip
    found = answer("--paper", "002", *given)
    wanted = nesterov_muon(
        heavy_tailed(5000, 1.5), Noise(1.5, 2.0, 0.0, 8), 3.0, 0.5, (6, 6), 0.1, 0.2
    )
    assert found["value"] == wanted.value and found["terms"] == wanted.terms
    assert found["power_of_steps"] == pytest.approx(-0.2) and len(found["assumptions"]) == 4
    free = answer("--paper", "002", "--schedule", "alpha-free", *given)
    assert free["lr"] == alpha_free(5000).lr and free["power_of_steps"] == pytest.approx(-1 / 6)
    own = answer("--paper", "002", "--lr", "0.001", "--beta", "0.5")
    assert (own["lr"], own["beta"], own["rule"]) == (0.001, 0.5, "given")
    last = answer("--paper", "004", "--delta0", "0.9", "--q", "3", "--degree", "1")
    assert last["delta_q"] == residual(0.9, 1, 3) and last["chi_q"] > 1
    assert last["value"] > last["others"]["muon-svd"]["value"]
    assert last["others"]["sgd-momentum"]["rule"] == "tuned for SGD with momentum"


def test_the_command_gives_the_numbers_of_disk():
    given = ["--steps", "900", "--sigma0", "2", "--batch", "8", "--rank", "3", "--columns", "4",
             "--gap", "3", "--l0", "0.5", "--noise", "0.4", "--clip", "1.5",
             "--gain", "0.6"]  # fmt: skip
    spread = 12 * (1.5 * 0.4 / 8) ** 2

    def bound_at(lr: float, spread: float = spread, reach: float = -1.0) -> float:
        run = Disk(lr, 900, 0.6, reach, 2.0, 8, spread)
        try:
            return disk(run, 3.0, 0.5).value
        except InputError:
            return math.inf

    found = answer("--paper", "003", *given)
    assert found["noise_of_a_release"] == pytest.approx(spread**0.5, rel=1e-12)
    assert found["value"] == pytest.approx(bound_at(found["lr"]), rel=1e-12)
    assert found["value"] == pytest.approx(min(bound_at(2.0 * 0.5**j) for j in range(40)), rel=1e-9)
    assert found["others"]["printed, from 0"]["value"] > found["value"]
    off = answer("--paper", "003", *given, "--lr", "0.01", "--reach", "0.5")
    assert off["value"] == pytest.approx(bound_at(0.01, reach=0.5), rel=1e-12)
    assert "others" not in off and off["rule"] == "given"
    assert bound_at(found["lr"], 4 * spread) > found["value"] * 1.001  # negative control


def test_the_command_answers_without_torch_and_refuses_with_the_mend():
    for answered, held in loaded(*(["stationarity", "--paper", paper] for paper in READ)):
        assert "assumes" in answered and held == set()
    for arguments, word in [
        (["--paper", "005"], "Use 000 (DP-Muon), 002"),
        (["--paper", "003", "--beta", "0.9"], "Set --gain"),
        (["--paper", "003", "--alpha", "1.5"], "Set --alpha to 2"),
        (["--paper", "003", "--smoothness", "0"], "above 0"),
        (["--alpha", "1"], "must be above 1 and at most 2"),
        (["--schedule", "cosine"], "'heavy-tailed' or 'alpha-free'"),
        (["--paper", "004", "--alpha", "1.5"], "Set --alpha to 2"),
        (["--sigma1", "1"], "batch must be above"),
        (["--gamma", "1"], "requires a gamma in"),
        (["--steps", "1"], "at least 2"),
        (
            ["--paper", "000", "--tail=1", "--moment=2"],
            "--tail has no effect if --moment is set",
        ),
    ]:
        shown = CliRunner().invoke(app, ["stationarity", *arguments])
        assert shown.exit_code and word in str(shown.exception)


OTHER = {
    "--steps": "400", "--gap": "2", "--smoothness": "3", "--batch": "7", "--rank": "4",
    "--lr": "0.001", "--beta": "0.5", "--alpha": "1.5", "--sigma0": "2", "--sigma1": "0.1",
    "--schedule": "alpha-free", "--gamma": "0.1", "--nu": "0.1", "--delta0": "0.9", "--degree": "1",
    "--q": "3", "--noise": "2", "--columns": "40", "--tail": "2", "--moment": "2", "--clip": "0.7",
    "--excess": "0.1", "--gain": "0.4", "--reach": "0.5", "--singular": "1,0.5,0.01",
    "--coefficients": "cubic", "--sketch": "1", "--oversample": "3", "--power": "2",
}  # fmt: skip
# What some options of 002 are read with.
SPECTRUM = ("--singular", "1,0.5,0.01")
BESIDE: dict[str, tuple[str, ...]] = dict.fromkeys(("--coefficients", "--q", "--sketch"), SPECTRUM)
BESIDE |= dict.fromkeys(("--oversample", "--power"), (*SPECTRUM, "--sketch", "1"))
REFUSED = {"003": ("--alpha", "--sigma1", "--beta"), "004": ("--alpha", "--sigma1")}  # as they are


@pytest.mark.parametrize("paper", quick(READ, ("002", "004")))
def test_each_option_of_a_paper_is_read_and_no_other(paper: str):
    """At the options' own defaults, but for a batch that all papers have room in."""
    assert set(OTHER) == {*ALL, *(one for names in READ.values() for one in names)}
    for name, value in OTHER.items():
        beside = BESIDE.get(name, ()) if paper == "002" else ()
        before = answer("--paper", paper, "--batch", "9", *beside)
        given = ["stationarity", "--paper", paper, "--batch", "9", *beside, name, value]
        done = CliRunner().invoke(app, [*given, "--json"])
        if name in (*ALL, *READ[paper]) and name not in REFUSED.get(paper, ()):
            assert json.loads(done.output) != before, name
        else:
            known = name in REFUSED.get(paper, ())
            why = "assumes bounded variance" if known else f"{name} has no effect for paper {paper}"
            assert "Set --gain" in str(done.exception) or why in str(done.exception), name
