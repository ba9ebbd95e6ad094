"""Limits of the risk: coverage summed exactly, and models whose risk is known by symmetry.

In the models of the second part, labels are coin flips, so that the risk is 1/2 for every draw. The
train error is below 1/2, because the released sums contain the labels.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, ndtr, ndtri
from scipy.stats import beta, binom

from fedmuon.analysis.theory.certified_risk import (
    binary_divergence,
    chernoff,
    clopper_pearson,
    empirical_bernstein,
    expected_risk,
    largest_risk,
    risk_by_profile,
)
from fedmuon.core.errors import InputError
from fedmuon.core.gaussian_pair import gaussian_hockey_stick
from fedmuon.privacy.accounting.divergences import relative_entropy
from fedmuon.privacy.accounting.dominating_pairs import Event

Array = NDArray[Any]
RISKS = (1e-4, 0.01, 0.05, 0.3, 0.5, 0.9, 0.999)


def gaussian_entropy(s: float) -> float:
    """KL_a of one release with every sample."""
    return relative_entropy([Event(1.0, s)]).upper


# Divergence of Bernoulli distributions


@pytest.mark.parametrize("mean", [0.0, 1e-6, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("budget", [1e-6, 1e-3, 0.1, 2.0])
def test_largest_risk_is_the_root_of_the_divergence(mean: float, budget: float) -> None:
    def excess(risk: float) -> float:
        return binary_divergence(mean, risk) - budget

    root = brentq(excess, mean + 1e-9, 1 - 1e-16, xtol=1e-15)
    assert largest_risk(mean, budget) == pytest.approx(root, rel=1e-9)
    assert expected_risk(mean, budget) == largest_risk(mean, budget)
    assert excess(largest_risk(mean, budget)) > 0  # it is rounded up


def test_divergence_has_the_right_values_at_its_ends() -> None:
    assert binary_divergence(0, 0) == binary_divergence(1, 1) == binary_divergence(0.3, 0.3) == 0
    assert binary_divergence(0, 0.5) == binary_divergence(1, 0.5) == math.log(2)
    assert binary_divergence(0.1, 0) == binary_divergence(0.1, 1) == math.inf
    assert binary_divergence(0, 1) == binary_divergence(1, 0) == math.inf
    assert binary_divergence(0.2, 0.7) == pytest.approx(binary_divergence(0.8, 0.3), rel=1e-15)


def test_largest_risk_of_extreme_budgets() -> None:
    assert largest_risk(0.2, 0.0) == pytest.approx(0.2, abs=1e-7)
    assert largest_risk(0.2, math.inf) == largest_risk(1.0, 0.0) == 1
    assert largest_risk(0.0, math.log(2)) == pytest.approx(0.5)
    for mean in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="must be from 0 to 1"):
            largest_risk(mean, 0.1)


# Held-out samples


def failing(limits: Array, samples: int, risk: float) -> float:
    """Return the probability that the limit of the number of errors is below the risk."""
    return float(binom.pmf(np.arange(samples + 1), samples, risk)[limits < risk].sum())


def naive_limit(errors: int, samples: int, failure: float) -> float:
    """Find the risk at which so few errors have the failure probability."""

    def excess(risk: float) -> float:
        parts = [
            math.comb(samples, k) * risk**k * (1 - risk) ** (samples - k) for k in range(errors + 1)
        ]
        return math.fsum(parts) - failure

    root: Any = brentq(excess, 0, 1, xtol=1e-14)
    return root


@pytest.mark.parametrize(("errors", "samples"), [(0, 1), (0, 20), (3, 20), (19, 20), (234, 1000)])
def test_clopper_and_pearson_agree_with_two_other_computations(errors: int, samples: int) -> None:
    limit = clopper_pearson(errors, samples, 0.03)
    assert limit == pytest.approx(beta.ppf(0.97, errors + 1, samples - errors), rel=1e-12)
    assert limit == pytest.approx(naive_limit(errors, samples, 0.03), rel=1e-9)


def test_clopper_and_pearson_fail_with_exactly_the_failure_probability() -> None:
    samples, failure = 40, 0.05
    limits = np.array([clopper_pearson(k, samples, failure) for k in range(samples + 1)])
    assert all(failing(limits, samples, risk) <= failure + 1e-12 for risk in RISKS)
    for limit in limits[:-1]:  # just above a limit, the failure probability is attained
        assert failing(limits, samples, limit + 1e-12) == pytest.approx(failure, rel=1e-6)
    assert limits[-1] == 1


def test_held_out_limits_have_the_published_constants() -> None:
    logarithm = math.log(2 / 0.05)  # two losses, 0 and 1, have the variance 1/2
    bernstein = 0.5 + math.sqrt(logarithm / 2) + 7 * logarithm / 3
    assert empirical_bernstein(np.array([0.0, 1.0])) == pytest.approx(bernstein)
    assert chernoff(0.0, 30) == pytest.approx(1 - 0.05 ** (1 / 30))
    assert clopper_pearson(0, 30) == pytest.approx(1 - 0.05 ** (1 / 30))


@pytest.mark.parametrize("samples", [1, 7, 200])
def test_the_limit_of_chernoff_fails_at_most_with_the_failure_probability(samples: int) -> None:
    for failure in (0.05, 0.5):
        limits = np.array([chernoff(k / samples, samples, failure) for k in range(samples + 1)])
        assert all(failing(limits, samples, risk) <= failure for risk in RISKS)
        exact = [clopper_pearson(k, samples, failure) for k in range(samples + 1)]
        assert (limits >= np.array(exact) - 1e-12).all()


def test_the_limit_of_chernoff_concerns_one_side_only() -> None:
    """With one sample and R = 1/2, kl(mean || R) is always ln 2, which exceeds ln(1 / 0.51)."""
    assert binary_divergence(0, 0.5) == binary_divergence(1, 0.5) > -math.log(0.51)
    assert chernoff(0, 1, 0.51) < 0.5 < chernoff(1, 1, 0.51)


def two_point_limits(samples: int, failure: float) -> Array:
    """Return the empirical Bernstein limit of each number of ones among zeros."""
    ones = np.arange(samples + 1)
    losses = (np.arange(samples) < ones[:, None]).astype(float)
    return np.array([empirical_bernstein(row, failure=failure) for row in losses])


@pytest.mark.parametrize("samples", [2, 10, 100])
def test_the_empirical_bernstein_limit_covers_rare_large_losses(samples: int) -> None:
    for failure in (0.05, 0.5):
        limits = two_point_limits(samples, failure)
        assert all(failing(limits, samples, risk) <= failure for risk in RISKS)


def test_the_empirical_bernstein_limit_needs_its_last_term() -> None:
    samples, failure = 100, 0.05
    last = 7 * math.log(2 / failure) / (3 * (samples - 1))
    assert failing(two_point_limits(samples, failure) - last, samples, 0.01) > 7 * failure


def test_the_empirical_bernstein_limit_scales_and_shifts_with_the_losses() -> None:
    losses = np.random.default_rng(0).random(50)
    limit = empirical_bernstein(losses)
    assert empirical_bernstein(3 * losses - 2, width=3) == pytest.approx(3 * limit - 2)


@pytest.mark.slow
def test_the_empirical_bernstein_limit_covers_skewed_losses() -> None:
    """Simulate three values, of which the largest one is rare."""
    generator = np.random.default_rng(1)
    values, shares = np.array([0.0, 0.1, 1.0]), [0.6, 0.39, 0.01]
    draws = generator.choice(values, size=(20_000, 60), p=shares)
    limits = np.array([empirical_bernstein(row, failure=0.2) for row in draws])
    assert (limits < values @ shares).mean() <= 0.2


def test_held_out_limits_reject_wrong_arguments() -> None:
    with pytest.raises(InputError, match="exceed the number of samples"):
        clopper_pearson(3, 2)
    with pytest.raises(InputError, match="needs 2 losses"):
        empirical_bernstein(np.zeros(1))
    for losses in ([0.0, 1.1], [0.0, math.inf], [math.nan, 0.0]):
        with pytest.raises(InputError, match="bounded loss"):
            empirical_bernstein(np.array(losses))
    for failure in (0.0, 1.0, math.nan):
        for limit in (chernoff, clopper_pearson):
            with pytest.raises(InputError, match="failure probability"):
                limit(0, 10, failure)


# Formulas of the privacy account


def gaussian_curve(shift: float) -> Callable[[Array], Array]:
    """Return H_a of two Gaussians whose means differ by `shift` standard deviations."""
    return lambda epsilons: gaussian_hockey_stick(shift, epsilons)


@pytest.mark.parametrize(("mean", "shift"), [(0.05, 0.5), (0.3, 1.0), (0.3, 0.1)])
def test_risk_by_profile_is_the_power_of_the_best_test(mean: float, shift: float) -> None:
    """The power of a test of N(0, 1) against N(shift, 1) at size `mean` is the dual of H_a."""
    curve = gaussian_curve(shift)
    limit = risk_by_profile(mean, curve)
    naive = min(math.exp(e) * mean + curve(np.array([e]))[0] for e in np.linspace(-3, 3, 1201))
    assert limit == pytest.approx(naive, rel=1e-14)
    assert limit == pytest.approx(ndtr(ndtri(mean) + shift), rel=1e-4)


def test_risk_by_profile_uses_only_the_requested_epsilons() -> None:
    curve = gaussian_curve(1.0)
    expected = 0.2 * math.e + float(curve(np.ones(1))[0])
    assert risk_by_profile(0.2, curve, [1.0]) == pytest.approx(expected)
    assert risk_by_profile(0.9, curve, [3.0]) == 1


# Models whose labels are coin flips


def signs_error(samples: int, s: float) -> float:
    """E R_hat of the sign of a noisy sum of +-1 labels."""
    ones = np.arange(samples + 1)
    plus = ndtr((2 * ones - samples) / s)
    errors = plus * (1 - ones / samples) + (1 - plus) * ones / samples
    return float(binom.pmf(ones, samples, 0.5) @ errors)


def mean_error(samples: int, s: float) -> float:
    """E R_hat of the rounded noisy mean of 0-1 labels. It equals the sign of a sum of +-1/2."""
    return signs_error(samples, 2 * s)


def table_error(samples: int, cells: int, s: float) -> float:
    """E R_hat of a noisy table with the sum of the +-1 labels of each cell."""
    others = binom.pmf(np.arange(samples), samples - 1, 1 / cells)
    return sum(
        share * binom.pmf(np.arange(k + 1), k, 0.5) @ ndtr(-(1 + 2 * np.arange(k + 1) - k) / s)
        for k, share in enumerate(others)
    )


def appearances_error(q: float, s: float, steps: int) -> float:
    """E R_hat if each sample has a cell, which appears in each lot with probability q."""
    counts = np.arange(steps + 1)
    return float(binom.pmf(counts, steps, q) @ ndtr(-counts / (s * math.sqrt(steps))))


@pytest.mark.parametrize("s", [0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("samples", [1, 2, 8])
def test_train_errors_of_coin_flips_satisfy_the_expected_form(samples: int, s: float) -> None:
    errors = [
        mean_error(samples, s),
        signs_error(samples, s),
        *(table_error(samples, cells, s) for cells in (1, 8, 100)),
    ]
    for error in errors:
        assert error < 0.5 <= expected_risk(error, gaussian_entropy(s))
        assert binary_divergence(error, 0.5) <= gaussian_entropy(s)
    assert errors[2] == pytest.approx(errors[1])  # one cell


@pytest.mark.parametrize(("q", "s", "steps"), [(0.3, 5.0, 100), (0.5, 2.0, 4), (0.1, 1.0, 20)])
def test_train_errors_of_subsampled_coin_flips_satisfy_the_expected_form(
    q: float, s: float, steps: int
) -> None:
    limits = relative_entropy([Event(q, s, steps)])
    assert binary_divergence(appearances_error(q, s, steps), 0.5) <= limits.lower


def test_a_table_of_labels_comes_within_a_factor_of_one_half_pi() -> None:
    """One cell per sample: kl(Phi(-1/s) || 1/2) / KL_0 increases with the noise to 2 / pi."""
    ratios = [
        binary_divergence(float(ndtr(-1 / s)), 0.5) / gaussian_entropy(s)
        for s in np.geomspace(0.2, 300, 60)
    ]
    assert (np.diff(ratios) > 0).all()
    assert ratios[-1] == pytest.approx(2 / math.pi, rel=1e-4)


def log_fresh(dimension: int, s: float, threshold: float) -> float:
    """Return ln P(<z + s N, z'> > threshold) for independent z, z' on the unit sphere.

    <z, z'> has a density proportional to (1 - x^2)^((d - 3) / 2).
    """
    reach = min(1.0, 20 / math.sqrt(dimension))
    x = np.linspace(-reach, reach, 20_001)[1:-1]
    constant = gammaln(dimension / 2) - gammaln((dimension - 1) / 2) - math.log(math.pi) / 2
    logs = constant + (dimension - 3) / 2 * np.log1p(-x * x) + log_ndtr((x - threshold) / s)
    return float(np.logaddexp.reduce(logs)) + math.log(x[1] - x[0])


def directions_divergence(dimension: int, s: float, threshold: float) -> float:
    """kl(E R_hat || E R) if the model is z + s N, and the loss of z' is 1[<model, z'> < threshold].

    A risk near 1 is not a double, so that logarithms of 1 - R are used.
    """
    known, fresh = log_ndtr((1 - threshold) / s), log_fresh(dimension, s, threshold)
    error = float(ndtr((threshold - 1) / s))
    log_risk = math.log1p(-math.exp(fresh))
    return float((1 - error) * (known - fresh) + error * (math.log(error) - log_risk))


def test_random_directions_come_within_a_factor_of_five_fourths() -> None:
    """The released direction is recognized, and a fresh one almost never is."""
    ratio = directions_divergence(10**5, 0.05, 0.917) / gaussian_entropy(0.05)
    assert 1 / 1.25 < ratio < 1


def test_random_directions_approach_the_limit_as_the_noise_falls() -> None:
    cases = [(10**4, 0.1, 0.875), (10**5, 0.05, 0.917), (10**7, 0.02, 0.957)]
    ratios = [directions_divergence(d, s, t) / gaussian_entropy(s) for d, s, t in cases]
    assert ratios == sorted(ratios) and 0.9 < ratios[-1] < 1


def test_the_profile_of_replacing_a_sample_covers_coin_flips() -> None:
    for s in (0.7, 1.0, 3.0, 10.0):
        assert risk_by_profile(float(ndtr(-1 / s)), gaussian_curve(2 / s)) >= 0.5
        assert risk_by_profile(float(ndtr(-1 / s)), gaussian_curve(0.9 / s)) < 0.5  # too small


# Wrong accounts are rejected by the same models


@pytest.mark.parametrize("s", [2.0, 10.0])
def test_half_of_the_shift_is_rejected(s: float) -> None:
    wrong = gaussian_entropy(2 * s)
    error = table_error(1, 1, s)
    assert binary_divergence(error, 0.5) > 2.4 * wrong
    assert expected_risk(error, wrong) < 0.5


def test_a_rate_that_is_too_small_is_rejected() -> None:
    """Lots of a fixed size contain 30% of the samples, but the account assumes 15%."""
    wrong = relative_entropy([Event(0.15, 5.0, 100)]).upper
    assert binary_divergence(appearances_error(0.3, 5.0, 100), 0.5) > 2.2 * wrong


def smallest_error(models: int, samples: int) -> float:
    """Return the expected smallest train error of models that do not depend on the labels."""
    return float((binom.sf(np.arange(samples), samples, 0.5) ** models).sum() / samples)


def test_a_choice_by_train_error_that_is_not_counted_is_rejected() -> None:
    """The best of 50 models from noise alone knows labels, although no release contains them."""
    models, samples = 50, 20
    error = smallest_error(models, samples)
    uncounted, counted = gaussian_entropy(10.0), math.log(models) / samples
    assert binary_divergence(error, 0.5) > 20 * uncounted
    assert expected_risk(error, uncounted) < 0.5 <= expected_risk(error, counted)
    assert signs_error(samples, 10.0) < 0.5 <= expected_risk(signs_error(20, 10.0), uncounted)


# Simulations of the algorithms themselves

DRAWS = 20_000


def simulate_mean(generator: np.random.Generator, samples: int, s: float) -> tuple[Array, Array]:
    """Return R_hat and a loss on a fresh sample, for each draw."""
    labels = generator.integers(0, 2, (DRAWS, samples))
    released = (labels.sum(1) + s * generator.normal(size=DRAWS)) / samples
    predicted = released > 0.5
    fresh = generator.integers(0, 2, DRAWS)
    return (predicted[:, None] != labels).mean(1), predicted != fresh


def simulate_signs(generator: np.random.Generator, samples: int, s: float) -> tuple[Array, Array]:
    labels = generator.choice([-1, 1], (DRAWS, samples))
    predicted = np.sign(labels.sum(1) + s * generator.normal(size=DRAWS))
    return (predicted[:, None] != labels).mean(1), predicted != generator.choice([-1, 1], DRAWS)


def simulate_table(generator: np.random.Generator, samples: int, s: float) -> tuple[Array, Array]:
    """Return the errors of a table with as many cells as samples."""
    rows = np.arange(DRAWS)
    cells = generator.integers(0, samples, (DRAWS, samples))
    labels = generator.choice([-1, 1], (DRAWS, samples))
    table = s * generator.normal(size=(DRAWS, samples))
    np.add.at(table, (rows[:, None], cells), labels)
    train = np.sign(np.take_along_axis(table, cells, 1)) != labels
    fresh = np.sign(table[rows, generator.integers(0, samples, DRAWS)])
    return train.mean(1), fresh != generator.choice([-1, 1], DRAWS)


MODELS = {
    "mean": (simulate_mean, mean_error),
    "signs": (simulate_signs, signs_error),
    "table": (simulate_table, lambda samples, s: table_error(samples, samples, s)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("s", [0.5, 2.0])
def test_simulated_coin_flips_satisfy_the_expected_form_too(model: str, s: float) -> None:
    """The margins are four standard errors of the mean."""
    samples = 6
    simulate, exact = MODELS[model]
    train, fresh = simulate(np.random.default_rng(7), samples, s)
    margin = 4 * float(train.std()) / math.sqrt(DRAWS)
    assert abs(float(train.mean()) - exact(samples, s)) <= margin
    assert abs(float(fresh.mean()) - 0.5) <= 2 / math.sqrt(DRAWS)
    lowest = float(train.mean()) + margin
    assert binary_divergence(min(0.5, lowest), 0.5) <= gaussian_entropy(s)


def test_simulated_lots_of_a_fixed_size_have_the_exact_train_error() -> None:
    """Each step releases all cells, to which only the lot's samples contribute their labels."""
    samples, lot, s, steps, draws = 10, 3, 5.0, 100, 2000
    generator = np.random.default_rng(3)
    lots = generator.random((draws, steps, samples)).argsort(axis=2) < lot
    labels = generator.choice([-1, 1], (draws, samples))
    sums = (lots * labels[:, None] + s * generator.normal(size=lots.shape)).sum(1)
    errors = np.sign(sums) != labels
    margin = 4 * float(errors.std()) / math.sqrt(errors.size)
    assert abs(float(errors.mean()) - appearances_error(lot / samples, s, steps)) <= margin
    wrong = relative_entropy([Event(lot / samples / 2, s, steps)]).upper
    assert binary_divergence(float(errors.mean()) + margin, 0.5) > 2 * wrong


def test_simulated_choices_by_train_error_have_the_exact_train_error() -> None:
    generator, draws, models, samples = np.random.default_rng(5), 4000, 50, 20
    labels = generator.choice([-1, 1], (draws, 1, samples))
    noise = generator.normal(size=(draws, models, samples))
    train = (np.sign(noise) != labels).mean(2).min(1)
    margin = 4 * float(train.std()) / math.sqrt(draws)
    assert abs(float(train.mean()) - smallest_error(models, samples)) <= margin


def test_simulated_directions_have_the_exact_errors() -> None:
    dimension, s, threshold = 50, 0.3, 0.7
    generator = np.random.default_rng(11)
    known, fresh = generator.normal(size=(2, DRAWS, dimension))
    known, fresh = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (known, fresh))
    model = known + s * generator.normal(size=known.shape)
    probabilities = [
        (known, ndtr((1 - threshold) / s)),
        (fresh, math.exp(log_fresh(dimension, s, threshold))),
    ]
    for directions, exact in probabilities:
        share = ((model * directions).sum(1) > threshold).mean()
        assert abs(share - exact) <= 4 * math.sqrt(exact * (1 - exact) / DRAWS)
