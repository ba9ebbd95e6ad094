"""Renyi differential privacy of composed Poisson-subsampled Gaussians.

The Rényi divergence of order a is ln E_Q (P/Q)^a / (a - 1). The divergence of P from Q is not
smaller than that of Q from P (Mironov, Talwar, Zhang 2019). The pairs (P, Q) of
`dominating_pairs.py` have the largest hockey-stick divergences, and therefore also the largest
Rényi divergence. The trapezoid rule computes the integral up to rounding. The orders and the
conversion to (epsilon, delta) are those of dp-accounting.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedmuon.privacy.accounting.dominating_pairs import Event

ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
POINTS = 2**17
REACH = 14.0  # standard deviations beyond both peaks of the integrand


def divergence(event: Event, order: float) -> float:
    """Return the Rényi divergence of one release at the given order."""
    q, s = event.sampling_probability, event.noise_multiplier
    spacing = min(0.4, s / 2)  # the nearest singularity is pi s away from the real axis
    far = (2 * order - 1 if event.replaced else order) / s  # beyond it, the integrand decays
    if (
        q == 1 or far > POINTS * spacing
    ):  # an upper bound: by convexity, using all data without sampling spends at least as much
        return (4 if event.replaced else 1) * order / (2 * s * s)
    z = np.arange(-REACH, far + REACH, spacing)
    terms = order * _log_mixed(q, z / s - 0.5 / s**2) - z * z / 2
    if event.replaced:
        terms -= (order - 1) * _log_mixed(q, -z / s - 0.5 / s**2)
    largest = terms.max()
    total = largest + math.log(np.exp(terms - largest).sum() * spacing / math.sqrt(2 * math.pi))
    return max(0.0, float(total)) / (order - 1)


def _log_mixed(q: float, exponent: np.ndarray) -> np.ndarray:
    """Return ln(1 - q + q exp(exponent)), the log density ratio of a mixture over N(0, s^2)."""
    with np.errstate(over="ignore"):
        return np.where(
            exponent > 30,
            exponent + math.log(q) + np.log1p((1 - q) / q * np.exp(-exponent)),
            np.log1p(q * np.expm1(exponent)),
        )


def epsilon(events: Sequence[Event], delta: float) -> float:
    """Return the epsilon of all given releases, the smallest epsilon over all orders."""
    spent = (
        (order, sum(event.count * divergence(event, order) for event in events)) for order in ORDERS
    )
    return max(0.0, min(converted(total, order, delta) for order, total in spent))


def converted(spent: float, order: float, delta: float) -> float:
    """Convert a Rényi divergence to epsilon (Canonne, Kamath, Steinke 2020, Prop. 12)."""
    if delta**2 + math.expm1(-spent) > 0:  # delta <= sqrt(1 - exp(-KL)) at epsilon = 0
        return 0.0
    return spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
