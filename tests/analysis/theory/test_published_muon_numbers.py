"""What 002 and 004 print, checked by arithmetic: lemmas, factors, and numbers of their tables."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmuon.analysis.theory.stationarity import (
    Noise,
    Schedule,
    alpha_free,
    heavy_tailed,
    muon,
    nesterov_muon,
    sgd_momentum,
    tuned_muon,
    tuned_sgd,
)
from fedmuon.orthogonalize import newton_schulz, schedule
from fedmuon.orthogonalize.lipschitz_constants import polar_error_bound, residual, slowdown

# 002, Lemma A.10. A two-point variable, 1 - p with probability p and -p otherwise, has exact
# moments, and so has the sum of B of them.


def two_point_moments(alpha: float, chance: float, batch: int) -> tuple[float, float]:
    """E |X|^a of one sample, and E |mean of a batch|^a, by enumeration."""
    ones = np.arange(batch + 1)
    weights = stats.binom.pmf(ones, batch, chance)
    mean = float(weights @ np.abs(ones / batch - chance) ** alpha)
    return chance * (1 - chance) ** alpha + (1 - chance) * chance**alpha, mean


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0])
def test_a_batch_has_less_noise_by_lemma_a10(alpha: float) -> None:
    worst = 0.0
    for chance, batch in itertools.product(np.geomspace(1e-3, 0.5, 30), (1, 2, 3, 20, 100)):
        one, mean = two_point_moments(alpha, float(chance), batch)
        noise = Noise(alpha, one ** (1 / alpha), 0.0, batch)
        assert mean <= noise.size(7.0) ** alpha * (1 + 1e-12)
        split = Noise(alpha, (one / 3) ** (1 / alpha), (one * 2 / 3) ** (1 / alpha), batch)
        assert split.size(1.0) == pytest.approx(noise.size(7.0))  # sigma1 at a gradient of norm 1
        worst = max(worst, mean / one * batch ** (alpha - 1))
    assert worst <= 2
    # The negative control: a constant of 1 is enough for variances only.
    assert worst > 1.01 if alpha < 2 else worst == pytest.approx(1)
    one, mean = two_point_moments(alpha, 0.5, 100)
    assert mean > 2 * one / 100**alpha  # and the exponent cannot be alpha


# 002, Table 2: mean ± of 5 seeds (perplexity) and of 50 seeds (accuracy). The paper does not say
# what ± means.

PERPLEXITY = {"polyak": (27.6600, 0.2075), "nesterov": (28.0773, 0.3372),
              "randomized polyak": (29.7155, 0.0925), "randomized": (29.7168, 0.1004),
              "adamw": (35.4402, 0.8650), "sgd": (97.1136, 1.5568)}  # fmt: skip
ACCURACY = {"polyak": (0.9375, 0.0014), "nesterov": (0.9370, 0.0016)}


def chance(first: tuple[float, float], second: tuple[float, float], seeds: int) -> float:
    """The p-value of Welch's test, by hand, if ± is a standard deviation over seeds."""
    parts = [deviation**2 / seeds for _, deviation in (first, second)]
    freedom = sum(parts) ** 2 / sum(one**2 / (seeds - 1) for one in parts)
    t = (first[0] - second[0]) / math.sqrt(sum(parts))
    found = 2 * float(stats.t.sf(abs(t), freedom))
    wanted = stats.ttest_ind_from_stats(*first, seeds, *second, seeds, equal_var=False)
    assert found == pytest.approx(float(wanted.pvalue))
    return found


def test_polyak_is_best_in_table_2_but_not_clearly() -> None:
    """Best mean on both benchmarks; 0.05 < p < 0.1 on both if ± is a standard deviation."""
    assert min(PERPLEXITY, key=lambda one: PERPLEXITY[one]) == "polyak"
    assert max(ACCURACY, key=lambda one: ACCURACY[one]) == "polyak"
    assert chance(PERPLEXITY["polyak"], PERPLEXITY["nesterov"], 5) == pytest.approx(0.052, abs=1e-3)
    assert chance(ACCURACY["polyak"], ACCURACY["nesterov"], 50) == pytest.approx(0.100, abs=1e-3)
    # If ± is a standard error, the interval of the difference contains 0 by far.
    error = math.hypot(PERPLEXITY["polyak"][1], PERPLEXITY["nesterov"][1])
    assert (28.0773 - 27.6600) / error < 1.1
    assert chance(PERPLEXITY["nesterov"], PERPLEXITY["adamw"], 5) < 1e-5  # a control


def test_randomized_muon_has_the_higher_perplexity_in_table_2() -> None:
    for full, sketched, gap in (("nesterov", "randomized", 1.64),
                                ("polyak", "randomized polyak", 2.06)):  # fmt: skip
        assert PERPLEXITY[sketched][0] - PERPLEXITY[full][0] == pytest.approx(gap, abs=5e-3)
        assert chance(PERPLEXITY[full], PERPLEXITY[sketched], 5) < 1e-3
        distance = PERPLEXITY["adamw"][0] - PERPLEXITY[full][0]
        assert gap / distance < 0.27  # at most 27% of the distance to AdamW
    assert chance(PERPLEXITY["randomized"], PERPLEXITY["randomized polyak"], 5) > 0.9  # a control


def test_the_schedule_of_corollary_3_6_at_the_steps_of_nanogpt() -> None:
    """K = 1,490: the theorem's step is 7.8 times smaller than the tuned 0.0325."""
    plan = alpha_free(1490)
    assert plan.lr == pytest.approx(0.0042, abs=5e-5) and plan.beta == pytest.approx(
        0.974, abs=5e-4
    )
    assert heavy_tailed(1490, 2.0).lr == pytest.approx(plan.lr)
    assert 0.0325 / plan.lr == pytest.approx(7.79, abs=5e-3)
    # At such K the bound says nothing: it exceeds the gradient norm at the start, sqrt(2 L gap).
    for sigma, times in ((1.0, 114), (0.0, 87.9)):
        found = nesterov_muon(plan, Noise(sigma0=sigma), 1.0, 1.0, (768, 768)).value
        assert found / math.sqrt(2) == pytest.approx(times, rel=0.01)
    tuned = Schedule(0.0325, 0.9665, 1490, "tuned")
    bound = nesterov_muon(tuned, Noise(sigma0=1.0), 1.0, 1.0, (768, 768))
    assert (
        bound.terms["drift"] > 5 * nesterov_muon(plan, Noise(), 1.0, 1.0, (768, 768)).terms["drift"]
    )


# 004, Remark 1, q = 0, and what a few steps do.


def smallest_residual(rank: int) -> float:
    """The smallest initial residual of a matrix of this rank: all singular values are equal."""
    return 1 - 1 / rank


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_remark_1_the_initial_residual_is_below_one(rank: int) -> None:
    """1 - 1/r <= delta_0 < 1 for rank r, with equality on the left for equal singular values."""
    rng = np.random.default_rng(rank)
    for power in (0, 1, 4):
        s = rng.random(rank) ** power + 1e-3
        u, v = (np.linalg.qr(rng.standard_normal((one, rank)))[0] for one in (9, 12))
        matrix = (u * s) @ v.T
        z = matrix / np.linalg.norm(matrix)
        found = 1 - np.linalg.eigvalsh(u.T @ z @ z.T @ u).min()  # on the column space
        assert found == pytest.approx(1 - (s.min() / np.linalg.norm(s)) ** 2, abs=1e-12)
        assert smallest_residual(rank) - 1e-12 <= found < 1
        assert power or found == pytest.approx(smallest_residual(rank), abs=1e-12)
        if rank > 1 and power:  # the negative control: the operator norm as divisor
            assert 1 - (s.min() / s.max()) ** 2 < found
    # No number below 1 bounds delta_0 for all matrices: the constant of Theorem 1 depends on it.
    assert 1 - (1e-6 / math.hypot(1, 1e-6)) ** 2 > 1 - 1e-11


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_no_step_only_normalizes(shape: tuple[int, int]) -> None:
    """F.2, q = 0: M / |M|_F, whose polar error 1 - s_r/|M|_F is that of Lemma 1 without steps."""
    m = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = newton_schulz(m, 0, "quintic")
    torch.testing.assert_close(found, m / m.norm(), rtol=1e-6, atol=0)
    s = torch.linalg.svdvals(m)
    error = 1 - float(s[-1] / m.norm())
    initial = 1 - float(s[-1] / m.norm()) ** 2
    assert polar_error_bound(residual(initial, 2, 0)) == pytest.approx(error, rel=1e-12)
    assert slowdown(error) == pytest.approx(float(m.norm() / s[-1]))
    one_step = newton_schulz(m, 1, "quintic")
    assert float((found - one_step).norm()) > 0.1


def test_what_a_few_steps_do_depends_on_the_rank() -> None:
    """chi_q >= the value for equal singular values 1/sqrt(r), iterated here by hand."""
    for rank, q, printed in ((10, 3, 1.01), (256, 3, 2.53), (512, 3, 3.51), (512, 1, 12.1),
                             (256, 5, 1.08), (512, 5, 1.25), (768, 5, 1.42)):  # fmt: skip
        x = 1 / math.sqrt(rank)
        for a, b, c in schedule("quintic", q):
            x = a * x + b * x**3 + c * x**5
        found = slowdown(polar_error_bound(residual(smallest_residual(rank), 2, q)))
        assert found == pytest.approx(1 / x, rel=1e-9) and found == pytest.approx(printed, rel=5e-3)
    for rank in (10, 256, 512):  # any other spectrum of this rank is worse
        s = np.linspace(1, 2, rank)
        other = 1 - (s.min() / np.linalg.norm(s)) ** 2
        assert slowdown(polar_error_bound(residual(other, 2, 3))) > slowdown(
            polar_error_bound(residual(smallest_residual(rank), 2, 3))
        )
    # Steps until chi_q <= 1.1: they grow like the logarithm of the rank.
    needed = [
        next(q for q in range(20)
             if slowdown(polar_error_bound(residual(smallest_residual(r), 2, q))) <= 1.1)
        for r in (4, 64, 256, 1024, 4096)
    ]  # fmt: skip
    assert needed == [2, 4, 5, 6, 8]


def test_the_third_contribution_is_a_fourth_root_with_noise() -> None:
    """SGD's bound over Muon's grows like r^(1/2) without noise, like r^(1/4) with noise."""

    def ratio(rank: int, sigma: float, steps: float) -> float:
        terms = (1.0, 1.0, sigma, rank)
        own, vector = tuned_muon(int(steps), *terms), tuned_sgd(int(steps), 1.0, 1.0, sigma)
        return sgd_momentum(vector, *terms).value / muon(own, *terms).value

    def power(sigma: float, steps: float) -> float:
        return math.log(ratio(4096, sigma, steps) / ratio(16, sigma, steps)) / math.log(256)

    assert power(0.0, 1e6) == pytest.approx(0.5)
    assert power(1.0, 1e14) == pytest.approx(0.25, abs=0.003)
    assert abs(power(1.0, 1e14) - 0.5) > 0.2  # the negative control: not the printed root
    # By hand, without either function: the leading terms with noise are c T^(-1/4) r^(1/2) (SGD)
    # and c' T^(-1/4) r^(1/4) (Muon), so one factor of 16 in r is a factor of 2.
    assert ratio(16 * 256, 1.0, 1e14) / ratio(256, 1.0, 1e14) == pytest.approx(2, rel=0.01)
