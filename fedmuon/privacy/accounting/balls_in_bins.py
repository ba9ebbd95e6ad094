"""Lots by balls in bins, with correlated noise: a Monte Carlo estimate of epsilon.

Each example is placed into one of b bins, independently and at random. The bins are the lots of the
run's n steps, in turn (Choquette-Choo et al. 2024, "Near exact privacy amplification for matrix
mechanisms"; Chua et al. 2024, "Balls-and-bins sampling for DP-SGD"). The bin of an example stays
secret, which amplifies privacy. An example takes part only in every b-th step, so the noise of
different steps may be correlated. Lots in a public order (`fedmuon.privacy.mechanisms.fixed_order`)
do not amplify privacy.

# The pair

The correlated noise has a lower triangular matrix C >= 0. Let m_i be the sum of the columns
i, i + b, i + 2b, ... of C. The distributions P = (1/b) sum_i N(m_i, s^2 I) and Q = N(0, s^2 I) are
a dominating pair in both directions, even if gradients depend on earlier releases. The adjacency is
zero-out, or add-remove if b is public. A comment in this file contains the proof.

# The estimate

`trials` privacy losses are drawn from each distribution, equally many in each bin of P. For a given
epsilon, the mean of max(0, 1 - e^(epsilon - loss)) estimates delta(epsilon). Hoeffding's inequality
(1963) yields the upper and the lower bound on epsilon. The errors of both directions and of the
lower bound together have a probability of at most 1 - confidence.
"""

import math
from typing import NamedTuple

import numpy as np

from fedmuon.core.errors import InputError

# Proof of the pair. All releases follow from C G + Z, where row s of G is the sum of the lot's
# gradients in step s, and Z is noise. H_a is jointly convex, so the bins of all other examples may
# be fixed. Given the past, subtract their part. In step t, the example would add a vector g_t of
# norm <= 1, which may depend on the past. If the example is in bin i, it moves row t of C G + Z by
# v_it, the sum of C_ts g_s over the steps s <= t of bin i. Under Q, the likelihood ratio after n
# steps is the mean over i of the products of exp(<v_it, z_t> / s^2 - ||v_it||^2 / 2 s^2) over t.
# H_a is the mean of a convex function F of this ratio: max(x - a, 0), or max(1 - a x, 0) for the
# reversed pair. Replace the factors of the last row, then of the row before, and so on, by the
# factors of the numbers w_it = sum_s C_ts. If all later rows are already replaced, the mean over
# them, V(l_1, ..., l_b) = E F(sum_i l_i A_i / b) with A_i > 0, has mixed derivatives
# E F'' A_i A_j / b^2 >= 0. Also, <v_it, v_jt> <= w_it w_jt, because C >= 0. For such V,
# E V(l_i exp(X_i - Var X_i / 2)) increases with each covariance of the Gaussian X. To see this, let
# X(u) = sqrt(1 - u) X + sqrt(u) Y for independent X and Y. The derivative along X(u) is half the
# sum of (Cov Y_ij - Cov X_ij) E[l_i l_j e_i e_j V_ij], which is not negative (Kahane's inequality,
# in one row). Each replacement therefore increases the mean. After the last replacement, the mean
# is that of the pair (P, Q). QED.
#
# The bounds of the estimate. The pair has b dimensions. The loss ln(P / Q) follows from the inner
# products <m_i, y>, whose covariance is the Gram matrix of the m_i. Each term of the mean is an
# independent number in [0, 1]. If the terms have the mean delta, their average is at most p < delta
# with probability exp(-N KL(p || delta)). The true delta(epsilon) and its estimate both decrease in
# epsilon. Let epsilon be the value at which the estimate reaches such a p. This value is too small
# only if the estimate at the true epsilon is at most p, so the probability is at most this number.

CHUNK = 4_000_000  # numbers that are drawn at once
MOST_NUMBERS = 4e10  # maximum of trials times bins, which takes some minutes
MOST_BINS = 4000  # limits the size of the Gram matrix


class Estimate(NamedTuple):
    """An interval for epsilon from Monte Carlo simulation.

    Attributes:
        upper: An upper bound on the true epsilon.
        lower: A lower bound on the true epsilon. Both bounds hold with the requested confidence.
        trials: Number of simulated privacy losses from each distribution.
    """

    upper: float
    lower: float
    trials: int


def epsilon_of_bins(
    coefficients: np.ndarray,
    steps: int,
    bins: int,
    noise: float,
    delta: float,
    trials: int = 1_000_000,
    confidence: float = 0.999,
    seed: int = 0,
) -> Estimate:
    """Estimate the epsilon of a run with balls-in-bins sampling.

    Args:
        coefficients: The nonnegative coefficients c_0, c_1, ... of the correlated noise, or [1] for
            independent noise.
        steps: The number n of steps in the run.
        bins: The number b of bins. Steps 0, 1, 2, ... use the bins in turn.
        noise: The noise multiplier s that applies to all blocks together.
        delta: The delta of (epsilon, delta).
        trials: Number of simulated privacy losses from each distribution, rounded up to a multiple
            of b.
        confidence: Probability that the true epsilon is between the lower and the upper bound.
        seed: Seed of the simulation.
    """
    _require_sound(coefficients, steps, bins, noise, trials, confidence)
    if not 0 < delta < 1:
        raise InputError(
            f"delta is {delta}, but it must be between 0 and 1. Use a small value, such as 1e-5."
        )
    trials = -(-trials // bins) * bins
    min_divergence = math.log(3 / (1 - confidence)) / trials  # smallest KL, for all three bounds
    if -math.log1p(-delta) < min_divergence:
        raise InputError(
            f"{trials:,} trials are too few for an epsilon at delta = {delta:g} with "
            f"confidence {confidence:g}. Use at least "
            f"{math.ceil(4 * trials * min_divergence / delta):,} trials."
        )
    forth, back = drawn_losses(coefficients, steps, bins, noise, trials, seed)
    low, high = _deviation(delta, min_divergence, -1), _deviation(delta, min_divergence, 1)
    upper = max(_crossing(losses, trials, low)[1] for losses in (forth, back))
    return Estimate(upper, _crossing(forth, trials, high)[0], trials)


def drawn_losses(
    coefficients: np.ndarray, steps: int, bins: int, noise: float, trials: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate the privacy losses of the pair (P, Q) in both directions, and return two arrays.

    The first array contains ln(P / Q) at draws from P, and the second array ln(Q / P) at draws from
    Q.

    Args:
        coefficients: The coefficients c_0, c_1, ... of the correlated noise.
        steps: The number n of steps in the run.
        bins: The number b of bins.
        noise: The noise multiplier s.
        trials: Number of losses in each array.
        seed: Seed of the simulation.
    """
    moved = means_of(coefficients, steps, bins)
    gram = moved.T @ moved / noise**2
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    rng, losses = np.random.default_rng(seed), ([], [])
    rows = max(1, CHUNK // bins)
    for side, of_bins in enumerate((True, False)):
        for start in range(0, trials, rows):
            bin_index = np.arange(start, min(start + rows, trials)) % bins
            along = rng.standard_normal((len(bin_index), bins)) @ root.T
            if of_bins:
                along += gram[bin_index]
            losses[side].append(log_ratio(along, gram) * (1 if of_bins else -1))
    return np.concatenate(losses[0]), np.concatenate(losses[1])


def means_of(coefficients: np.ndarray, steps: int, bins: int) -> np.ndarray:
    """Return the means m_0, m_1, ... of the mixture P as the columns of an array [steps, bins]."""
    c = np.zeros(steps)
    c[: min(len(coefficients), steps)] = coefficients[:steps]
    first = np.zeros(steps)
    for start in range(0, steps, bins):
        first[start:] += c[: steps - start]
    moved = np.zeros((steps, bins))
    for place in range(min(bins, steps)):
        moved[place:, place] = first[: steps - place]
    return moved


def log_ratio(along: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return the privacy loss ln(P / Q) of each simulated outcome y.

    Args:
        along: The inner products of y with each mean m_i, divided by s^2, as an array [outcomes,
            bins].
        gram: The inner products of the means with each other, divided by s^2, as an array [bins,
            bins].
    """
    exponents = along - np.diag(gram) / 2
    largest = exponents.max(1)
    return largest + np.log(np.exp(exponents - largest[:, None]).mean(1))


def _crossing(losses: np.ndarray, trials: int, delta: float) -> tuple[float, float]:
    """Return an interval with the epsilon at which the estimated delta equals `delta`."""
    positive = losses[losses > 0]

    def estimate(epsilon: float) -> float:
        above = positive[positive > epsilon]
        return float(-np.expm1(epsilon - above).sum()) / trials

    if estimate(0.0) <= delta:
        return 0.0, 0.0
    low, high = 0.0, float(positive.max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if estimate(middle) > delta else (low, middle)
    return low, high


def _deviation(delta: float, min_divergence: float, side: int) -> float:
    """Return the number p nearest to delta with a divergence KL(p || delta) >= `min_divergence`.

    If `side` is negative, p is below delta. Otherwise, p is above delta.
    """

    def divergence(p: float) -> float:
        first = p * math.log(p / delta) if p else 0.0
        return first + ((1 - p) * math.log((1 - p) / (1 - delta)) if p < 1 else 0.0)

    near, far = delta, 0.0 if side < 0 else 1.0
    for _ in range(200):
        middle = (near + far) / 2
        near, far = (near, middle) if divergence(middle) >= min_divergence else (middle, far)
    return far


def _require_sound(
    coefficients: np.ndarray, steps: int, bins: int, noise: float, trials: int, confidence: float
) -> None:
    if not len(coefficients):
        raise InputError(
            "coefficients is empty, but balls-in-bins accounting needs at least one coefficient "
            "of the correlated noise. Pass [1] for independent noise."
        )
    if (np.asarray(coefficients) < 0).any():
        raise InputError(
            f"a coefficient of the correlated noise is {np.min(coefficients):g}, but "
            "balls-in-bins accounting is proved only for coefficients of 0 or more. Pass "
            "coefficients of 0 or more, or [1] for independent noise."
        )
    for name, value in (("steps", steps), ("bins", bins), ("trials", trials)):
        if value < 1:
            raise InputError(f"{name} is {value}, but it must be an integer of 1 or more.")
    if not 0 < noise < math.inf:
        raise InputError(f"noise is {noise}, but it must be a positive and finite number.")
    if trials * bins > MOST_NUMBERS:
        raise InputError(
            f"trials = {trials:,} and bins = {bins:,} need {trials * bins:,} random numbers, but "
            f"at most {MOST_NUMBERS:g} are supported. Lower trials or bins."
        )
    if steps * bins > 1e8:
        raise InputError(
            f"steps * bins is {steps * bins:,}, but at most 1e8 is supported. Lower steps or bins."
        )
    if bins > MOST_BINS:
        raise InputError(
            f"{bins:,} bins are too many. Use larger lots, so that there are at most "
            f"{MOST_BINS:,} bins."
        )
    if not 0 < confidence < 1:
        raise InputError(
            f"confidence is {confidence}, but it must be between 0 and 1. Use a value such as 0.99."
        )
