"""Balls in bins: its pair against integrals and other adversaries, and the coverage of its ends."""

import math

import numpy as np
import pytest
from scipy.optimize import root_scalar
from scipy.stats import norm
from test_accounting import gaussian_epsilon
from test_fixed_order_sampling import toeplitz

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting.balls_in_bins import (
    drawn_losses,
    epsilon_of_bins,
    log_ratio,
    means_of,
)
from fedmuon.privacy.mechanisms.buffered import optimized
from fedmuon.privacy.mechanisms.fixed_order import sensitivity, square_root


@pytest.mark.parametrize(
    ("sample", "coefficients", "loss"),
    [([1.0, 0.0, 1.0, 0.0], [1.0, 0.0], 0.4337808304830272),
     ([1.0, 0.5, 1.0, 0.5], [1.0, 0.5], 0.9052974004451105),
     ([0.0, 1.0, 0.5, 1.0], [1.0, 0.5], 0.7802974004451104),
     ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.5, 0.5], 1.5799760835798948)],
)  # fmt: skip
def test_losses_are_those_of_jax_privacy(
    sample: list[float], coefficients: list[float], loss: float
) -> None:
    """jax_privacy, tests/experimental/monte_carlo/sample_generation_test.py,
    test_compute_privacy_loss_balls_in_bins: 4 steps, 2 bins, noise 1."""
    moved = means_of(np.array(coefficients), 4, 2)
    np.testing.assert_array_equal(
        moved[:, 0], toeplitz(np.array(coefficients), 4)[:, [0, 2]].sum(1)
    )
    found = log_ratio(np.array([sample]) @ moved, moved.T @ moved)
    assert found == pytest.approx(loss, abs=1e-12)


def integral(noise: float, epsilon: float) -> float:
    """delta of two bins of one step each, the larger of both directions, on a grid of outcomes."""
    x = np.linspace(-9, 10, 1001) * noise
    cell = (x[1] - x[0]) ** 2
    rest, moved = norm.pdf(x, 0, noise), norm.pdf(x, 1, noise)
    p = (moved[:, None] * rest + rest[:, None] * moved) / 2
    q = rest[:, None] * rest
    a = math.exp(epsilon)
    return max(np.maximum(p - a * q, 0).sum(), np.maximum(q - a * p, 0).sum()) * cell


def test_both_ends_enclose_what_an_integral_gives() -> None:
    noise, delta = 1.0, 1e-2
    found = epsilon_of_bins(np.ones(1), 2, 2, noise, delta, 400_000)
    assert integral(noise, found.upper) <= delta <= integral(noise, found.lower)
    assert found.upper < 1.06 * found.lower
    # One bin has the loss of a Gaussian, of the sensitivity of all steps.
    for c in (np.ones(1), square_root(3)):
        one = epsilon_of_bins(c, 6, 1, 4.0, delta, 200_000)
        exact = gaussian_epsilon(4.0 / sensitivity(c, 6, 1), delta)
        assert one.lower <= exact <= one.upper < 1.05 * exact


def test_bins_amplify_and_are_not_poisson_lots() -> None:
    """With buffers, too: less than lots in a public order, more than the best of all bins."""
    steps, bins, noise, delta = 48, 8, 3.0, 1e-3
    c = optimized(steps, bins, 2).coefficients(steps)
    found = epsilon_of_bins(c, steps, bins, noise, delta, 200_000)
    fixed = gaussian_epsilon(noise / sensitivity(c, steps, bins), delta)
    assert 0.3 * fixed < found.lower <= found.upper < 0.9 * fixed
    less = epsilon_of_bins(np.ones(1), steps, bins, noise, delta, 200_000)
    assert less.upper < found.lower  # independent noise of the same size spends less


def test_ends_hold_as_often_as_they_say() -> None:
    """And the estimate without its confidence, the control, is too small half of the time."""
    noise, delta, trials = 1.0, 5e-2, 2000
    exact = root_scalar(
        lambda epsilon: integral(noise, epsilon) - delta, bracket=(0, 3), xtol=1e-4
    ).root
    held, bare = 0, 0
    for seed in range(60):
        found = epsilon_of_bins(np.ones(1), 2, 2, noise, delta, trials, 0.9, seed)
        held += found.lower <= exact <= found.upper
        forth, back = drawn_losses(np.ones(1), 2, 2, noise, trials, seed)
        means = [np.maximum(-np.expm1(exact - one), 0).mean() for one in (forth, back)]
        bare += max(means) <= delta
    assert held >= 54
    assert 10 < bare < 50


def adversary(c: np.ndarray, noise: float, epsilon: float, kind: str, count: int) -> float:
    """delta of an example whose gradient follows the past, 6 steps in 2 bins, both ways."""
    steps, bins, rng = 6, 2, np.random.default_rng(5)
    matrix, found = toeplitz(c, steps), []
    for there in (True, False):
        bin_of = rng.integers(bins, size=count)
        moved = np.zeros((bins, steps, count))  # by which each bin moves each row
        given, seen = np.zeros((steps, count)), np.zeros((steps, count))
        logs = np.zeros((bins, count))
        for t in range(steps):
            if kind == "sign of the last release" and t:
                given[t] = np.where(seen[t - 1] > 0, 1.0, -1.0)
            else:
                given[t] = -1.0 if kind == "alternating" and (t // bins) % 2 else 1.0
            for one in range(bins):
                own = [s for s in range(t + 1) if s % bins == one]
                moved[one, t] = matrix[t, own] @ given[own]
            seen[t] = noise * rng.standard_normal(count)
            if there:
                seen[t] += moved[bin_of, t, np.arange(count)]
            logs += (moved[:, t] * seen[t] - moved[:, t] ** 2 / 2) / noise**2
        loss = np.logaddexp(*logs) - math.log(bins)
        found.append(np.maximum(-np.expm1(epsilon - (loss if there else -loss)), 0).mean())
    return max(found)


def test_no_adversary_exceeds_the_pair() -> None:
    """The control has a negative coefficient: opposite gradients then exceed what is claimed."""
    noise, epsilon, count = 2.0, 0.5, 200_000
    c = square_root(4)
    most = adversary(c, noise, epsilon, "constant", count)
    spread = 4 / math.sqrt(count)
    forth, back = drawn_losses(c, 6, 2, noise, count, 1)
    pair = max(np.maximum(-np.expm1(epsilon - one), 0).mean() for one in (forth, back))
    assert most == pytest.approx(pair, abs=spread)
    for kind in ("sign of the last release", "alternating"):
        assert adversary(c, noise, epsilon, kind, count) < most + spread
    odd = np.array([1.0, 0.0, -0.8])
    constant, alternating = (
        adversary(odd, noise, epsilon, kind, count) for kind in ("constant", "alternating")
    )
    assert alternating > constant + spread
    with pytest.raises(InputError, match="coefficients of 0 or more"):
        epsilon_of_bins(odd, 6, 2, noise, 1e-2)


def test_three_ends_share_what_the_confidence_leaves() -> None:
    """N KL of the estimate and delta is ln(3 / (1 - confidence)): the upper end's in one direction,
    where that of the other is no larger, and the lower end's."""
    trials, delta, confidence = 60_000, 2e-2, 0.99
    forth, back = drawn_losses(np.ones(1), 6, 3, 1.0, trials, 5)
    found = epsilon_of_bins(np.ones(1), 6, 3, 1.0, delta, trials, confidence, 5)

    def estimate(losses: np.ndarray, epsilon: float) -> float:
        return float(np.maximum(-np.expm1(epsilon - losses), 0).mean())

    ends = [estimate(forth, found.upper), estimate(back, found.upper)]
    assert estimate(forth, found.lower) > delta > max(ends) > min(ends)
    for p in (max(ends), estimate(forth, found.lower)):
        divergence = p * math.log(p / delta) + (1 - p) * math.log((1 - p) / (1 - delta))
        assert trials * divergence == pytest.approx(math.log(3 / (1 - confidence)), rel=1e-6)


def test_what_trials_cannot_show() -> None:
    for given, why in (
        ({"trials": 1000}, "are too few for an epsilon at delta = 1e-05"),
        ({"trials": 0}, "trials is 0, but it must be an integer of 1 or more"),
        ({"trials": 10**12}, "trials = 1,000,000,000,000 and bins = 4 need"),
        ({"bins": 4001}, "4,001 bins are too many"),
        ({"confidence": 1.0}, "confidence is 1.0, but it must be between 0 and 1"),
        ({"noise": 0.0}, "noise is 0.0, but it must be a positive and finite number"),
        ({"delta": 0.0}, "delta is 0.0, but it must be between 0 and 1"),
    ):
        known = {"coefficients": np.ones(1), "steps": 8, "bins": 4, "noise": 1.0, "delta": 1e-5}
        with pytest.raises(InputError, match=why):
            epsilon_of_bins(**{**known, **given})
