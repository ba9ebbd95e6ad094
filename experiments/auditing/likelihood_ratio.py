"""The log-likelihood ratio of what releases are along a canary, with it and without it."""

import math

import numpy as np

SLIGHT, MOST_POINTS = 0.1, 16  # of the noise's own variance; points of an integral


def log_ratio(y: np.ndarray, s: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """The log-likelihood ratio of y [T, m] with the canary, (1 - q) N(b, s_t) + q N(b + s_t, s_t),
    and without it, N(b, s_t).

    The rate q is one for all, or that of each [T, m], 0 where a canary has no part in a release.

    Here b is what other samples do at a canary's places in every release: N(0, t^2), where t^2 is
    what the variance over canaries of the mean over time has beyond noise and canaries. Without it
    the ratio is sum_t ln(1 - q + q exp(y_t - s_t / 2)); else b is integrated out, on a grid around
    its mean given y, wide enough for both cases.
    """
    steps, mean, share = len(y), float(s.mean()), float(np.mean(rate))
    ours = (share * mean) ** 2 / 4 + share * (1 - share) * mean**2 / steps / 2
    shared = float(np.var(y.mean(0))) - mean / steps - ours
    if shared <= SLIGHT * mean / steps:
        return _ratio(y - s[:, None] / 2, rate)
    precision = float((1 / s).sum()) + 1 / shared
    center, spread = (y / s[:, None]).sum(0) / precision, precision**-0.5
    low = -share * mean / spread - 3
    grid = np.linspace(low, 3, max(7, min(MOST_POINTS, math.ceil(3 - low)))) * spread
    # Up to what no b changes, ln P(b | y) without the canary is -(b - center)^2 precision / 2.
    weights = -(grid**2) * precision / 2
    within = [
        weight + _ratio(y - (center + b) - s[:, None] / 2, rate)
        for b, weight in zip(grid, weights, strict=True)
    ]
    return np.logaddexp.reduce(within) - np.logaddexp.reduce(weights)


def _ratio(x: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """sum_t ln(1 - q + q e^x)."""
    with np.errstate(divide="ignore"):  # where q is 0 or 1
        return np.logaddexp(np.log1p(-np.asarray(rate)), np.log(rate) + x).sum(0)
