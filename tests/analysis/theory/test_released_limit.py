"""The limit from a released train error: its formula, and models whose risk is known by symmetry.

Labels are coin flips, so the risk is 1/2 for every draw. The train error is a number of errors with
a known law, and the released one has Gaussian noise, so failure probabilities are summed exactly.
"""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate
from scipy.special import ndtr
from scipy.stats import binom, norm

from fedmuon.analysis.theory.certified_risk import (
    Profile,
    ReleasedLimit,
    clopper_pearson,
    released_limit,
)
from fedmuon.core.errors import InputError
from fedmuon.core.gaussian_pair import gaussian_hockey_stick

Array = NDArray[Any]


def with_train_error(shift: float, samples: int) -> Profile:
    """The profile of replacing a sample that moves Gaussian releases by `shift` deviations."""

    def profile(noise: float, epsilons: Array) -> Array:
        return gaussian_hockey_stick(math.hypot(shift, 1 / (samples * noise)), epsilons)

    return profile


def limit_of(
    shift: float, samples: int, failure: float = 0.05, guess: float = 0.2
) -> ReleasedLimit:
    return released_limit(with_train_error(shift, samples), shift, samples, failure, guess)


# The formula


def mean_excess(noise: float, moved: float) -> float:
    """The mean of the positive part of s g - t, by quadrature."""
    part = integrate.quad(lambda g: (noise * g - moved) * norm.pdf(g), moved / noise, 12)
    return float(part[0])


@pytest.mark.parametrize("guess", [0.02, 0.2, 0.5, 0.51, 0.8])
@pytest.mark.parametrize(("shift", "samples"), [(0.01, 60_000), (0.3, 500)])
def test_the_limit_is_the_best_of_its_proof(guess: float, shift: float, samples: int) -> None:
    """For some epsilon and t, the limit equals the formula, and no other choice is much smaller."""
    limit = limit_of(shift, samples, guess=guess)
    noise, smallest, nearest = limit.noise, math.inf, math.inf
    width = math.hypot(shift, 1 / (samples * noise))
    shifts = [
        (moved, mean_excess(noise, moved)) for moved in noise * np.linspace(0.2, 6, 117)[10:60]
    ]
    for epsilon in width * np.linspace(0.2, 8, 400):
        height = float(gaussian_hockey_stick(width, np.array([epsilon]))[0])
        a = math.exp(epsilon)
        for moved, excess in shifts:
            if guess <= 0.5:
                value = a * (guess + moved) + (height + a * excess) / 0.05
            else:
                value = 1 - (1 - guess - moved - (height + excess) / 0.05) / a
            smallest = min(smallest, value)
            nearest = min(nearest, abs(value - limit.slope * guess - limit.intercept))
            if value > smallest + 0.1:
                break
    assert limit.slope * guess + limit.intercept == pytest.approx(smallest, abs=1e-7)
    assert nearest < 1e-7


def test_a_wrong_guess_is_valid_and_costs_little() -> None:
    right, other = (limit_of(0.03, 50_000, guess=guess) for guess in (0.2, 0.05))
    assert right.risk(0.2) <= other.risk(0.2) <= right.risk(0.2) + 0.004
    assert other.risk(0.05) <= right.risk(0.05)


def test_the_limit_is_monotonic_and_in_range() -> None:
    limit = limit_of(0.03, 50_000)
    assert (
        0.2 < limit_of(0.03, 200_000).risk(0.2) < limit.risk(0.2) < limit_of(0.06, 50_000).risk(0.2)
    )
    assert limit.risk(0.2) < limit_of(0.03, 50_000, 0.005).risk(0.2)
    assert limit.risk(1.0) == 1 and 0 <= limit.risk(-1.0) < limit.risk(0.0)
    assert limit_of(math.inf, 100).risk(0.0) == limit_of(1e9, 100).risk(0.0) == 1
    assert limit_of(0.0, 1).risk(0.5) == 1


def test_many_settings_cost_little() -> None:
    """The failure probability enters through the tail of a Gaussian, and not as a factor."""
    alone, among = limit_of(0.03, 50_000), limit_of(0.03, 50_000, 0.05 / 100)
    assert among.risk(0.2) - 0.2 < 2 * (alone.risk(0.2) - 0.2)


def test_wrong_arguments_are_refused() -> None:
    for arguments in ((0.1, 10, 0.0, 0.2), (0.1, 10, 0.05, 1.2), (0.1, 0, 0.05, 0.2)):
        with pytest.raises(InputError):
            limit_of(*arguments)


# Coverage, if labels are coin flips

Law = tuple[Array, Array]  # train errors and their probabilities


def of_table(samples: int, s: float) -> Law:
    """A noisy table with one cell per sample: each label is wrong with probability Phi(-1/s)."""
    ranks = np.arange(samples + 1)
    return ranks / samples, binom.pmf(ranks, samples, ndtr(-1 / s))


def of_sign(samples: int, s: float) -> Law:
    """The sign of the noisy sum of +-1 labels, for the number of labels +1."""
    ones = np.arange(samples + 1)
    masses, plus = binom.pmf(ones, samples, 0.5), ndtr((2 * ones - samples) / s)
    errors = np.concatenate([1 - ones / samples, ones / samples])
    return errors, np.concatenate([masses * plus, masses * (1 - plus)])


def failing(law: Law, limit: ReleasedLimit) -> float:
    """Return the probability that the limit is below 1/2."""
    errors, masses = law
    largest = (0.5 - limit.intercept) / limit.slope  # released errors below it fail
    return float(masses @ ndtr((largest - errors) / limit.noise))


@pytest.mark.parametrize("law", [of_table, of_sign])
@pytest.mark.parametrize("s", [0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("samples", [1, 4, 30, 1000])
def test_the_limit_fails_at_most_with_the_failure_probability(
    law: Any, s: float, samples: int
) -> None:
    for failure in (0.01, 0.05, 0.5, 0.95):
        for guess in (0.1, 0.3, 0.5, 0.7):
            limit = limit_of(2 / s, samples, failure, guess)
            assert failing(law(samples, s), limit) <= failure


def test_a_model_without_signal_has_almost_the_limit_of_a_test_set() -> None:
    """Its distance to the train error is about three times that of a limit by held-out samples."""
    samples = 50_000
    free = limit_of(0.0, samples, guess=0.2).risk(0.2) - 0.2
    held_out = clopper_pearson(samples // 5, samples) - 0.2
    assert 1 < free / held_out < 4


def test_simulated_tables_satisfy_the_limit() -> None:
    """The algorithm itself: labels, a noisy table, and its released train error."""
    generator, samples, s, draws = np.random.default_rng(3), 40, 1.5, 20_000
    limit = limit_of(2 / s, samples, 0.5, 0.3)
    labels = generator.choice([-1, 1], (draws, samples))
    table = labels + s * generator.normal(size=labels.shape)
    released = (np.sign(table) != labels).mean(1) + limit.noise * generator.normal(size=draws)
    share = np.mean([limit.risk(u) < 0.5 for u in released])
    exact = failing(of_table(samples, s), limit)
    assert abs(share - exact) <= 4 * math.sqrt(max(exact, 1e-3) / draws) and exact <= 0.5


# Wrong variants are rejected by the same models


def test_a_fifth_of_the_shift_is_rejected() -> None:
    samples, s, failure = 1000, 2.0, 0.5
    law = of_table(samples, s)
    assert failing(law, limit_of(2 / s, samples, failure, 0.3)) == pytest.approx(0, abs=1e-6)
    assert failing(law, limit_of(0.4 / s, samples, failure, 0.3)) > 0.99


def test_a_train_error_without_its_release_is_rejected() -> None:
    """Noise alone chooses each prediction, but the exact train error fluctuates."""
    samples, failure = 400, 0.05

    def uncounted(noise: float, epsilons: Array) -> Array:
        return gaussian_hockey_stick(1e-6, epsilons)

    limit = released_limit(uncounted, 1e-6, samples, failure, 0.5)
    exact = ReleasedLimit(1e-9, limit.slope, limit.intercept - 2 * limit.noise)
    law = of_table(samples, 1e9)
    assert failing(law, exact) > 2 * failure
    assert failing(law, limit_of(1e-6, samples, failure, 0.5)) <= failure


def test_a_choice_among_many_models_that_is_not_counted_is_rejected() -> None:
    """The smallest released train error of models from noise alone, at a large failure rate."""
    samples, models, failure = 100, 10_000, 0.5
    law = of_table(samples, 1e9)

    def failing_among(limit: ReleasedLimit) -> float:
        return -math.expm1(models * math.log1p(-failing(law, limit)))

    assert failing_among(limit_of(0.0, samples, failure, 0.5)) > 1.5 * failure
    assert failing_among(limit_of(0.0, samples, failure / models, 0.5)) <= failure
