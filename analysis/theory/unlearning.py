"""Certified unlearning by output perturbation: how much noise hides that samples were there.

**Leaving is no worse than being replaced.** Let client i lose the sample z, one of n_i >= 2. Its
full-batch gradient is the mean of all n_i, that of the others F':

    grad F - grad F' = (g_z - grad F') / n_i,

and grad F', a mean of sample gradients, is in the convex hull of their set, whose diameter is the
set's: so the difference is at most diam / n_i (2 G_max / n_i), what a replacement may do. F' is
Lg-smooth, as a mean. Where participants count alike, whatever n_i is, nothing else changes: 001's
recursion and certificate Delta_i Y_i hold for the run that never saw z. Several samples leave one
after the other; the j-th of client i, from 0, leaves n_i - j behind it, so k_i of each client move
X^R by at most

    Delta = sum_i Delta_i Y_i n_i (1/n_i + 1/(n_i - 1) + ... + 1/(n_i - k_i + 1)).

**Noise.** X^R + sigma N(0, I) and what retraining would give plus the same noise are two Gaussians
at a distance d <= Delta. No test tells them apart beyond (epsilon, delta), either way, exactly if

    Phi(d/(2 sigma) - epsilon sigma/d) - e^epsilon Phi(-d/(2 sigma) - epsilon sigma/d) <= delta

(Balle and Wang 2018, Theorem 8), whose left side rises with d/sigma. It is about real numbers:
sigma must not depend on the samples, and the low bits of floating point are not covered.
"""

import math
from collections.abc import Mapping

import numpy as np

from fedmuon.analysis.theory.checks import at_least, probability
from fedmuon.core.errors import InputError

FAR = 1e9  # distance over sigma at most, and its inverse: nobody asks for more
PRECISION = 1e-12
ROUNDING = 1e-6  # of delta, at the smallest shifts


def removal(certificates: np.ndarray, sizes: np.ndarray, leaving: Mapping[int, int]) -> float:
    """Delta, from Delta_i Y_i [N] and n_i [N], where leaving[i] samples of client i leave."""
    moved = 0.0
    for client, count in leaving.items():
        size = int(sizes[client])
        if count >= size:
            raise InputError(
                f"client {client} would lose all its {size} samples, and its gradient with them: "
                "leave it one"
            )
        shares = sum(1 / (size - gone) for gone in range(count))
        moved += float(certificates[client]) * size * shares
    return moved


def indistinguishable(shift: float, epsilon: float) -> float:
    """The least delta of two unit Gaussians at that distance: the left side above, of d/sigma.

    With a = shift/2 - epsilon/shift, b = a - shift, phi(a) = e^epsilon phi(b): it is phi(a) times
    the difference of Mills' ratios at -a and -b, which loses no digits that matter.
    """
    from scipy.special import erfcx, log_ndtr, ndtr

    shift, epsilon = at_least("shift", shift), at_least("epsilon", epsilon)
    if shift == 0:
        return 0.0
    a, root = shift / 2 - epsilon / shift, math.sqrt(2)
    if a > 0:
        return float(ndtr(a)) - math.exp(min(epsilon + float(log_ndtr(a - shift)), 0.0))
    ratios = float(erfcx(-a / root)) - float(erfcx((shift - a) / root))
    return max(0.0, math.exp(-a * a / 2) / 2 * ratios)


def noise_multiplier(epsilon: float, delta: float) -> float:
    """The least sigma / Delta for (epsilon, delta), from above."""
    if not 0 <= epsilon < math.inf:
        raise InputError(f"epsilon = {epsilon} is refused: give a number of 0 or more")
    low, high = 1 / FAR, FAR  # of the shift d / sigma
    delta = probability("delta", delta)
    if indistinguishable(low, epsilon) > delta:
        raise InputError(
            f"epsilon = {epsilon:g} and delta = {delta:g} ask for more than {FAR:g} times the "
            "certificate as noise: give larger ones"
        )
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if indistinguishable(middle, epsilon) <= delta else (low, middle)
    return (1 + ROUNDING) / low
