"""Noise-aware smoothing: the smoothed polar map, with lambda from the known noise in the momentum.

The momentum of a private run contains Gaussian noise whose standard deviation sigma_M in each entry
is known, because it follows from the noise multiplier and not from the data. The largest singular
value of an m x n matrix of such noise is about

    e = sigma_M (sqrt(m) + sqrt(n)),

which its expected value does not exceed (Davidson and Szarek 2001, Theorem II.13). With

    lambda = c e^2,   Orth(M) = U diag(s / sqrt(s^2 + lambda)) V^T   for M = U diag(s) V^T,

singular values far below e, which noise alone can cause, stay small in the step. Values far above e
become nearly 1. lambda depends on public numbers only, so this choice costs no privacy.

**Variance.** The noise of a momentum with coefficient beta has the variance sigma_M^2 = (sigma C /
B)^2 v_t. After t steps of a single client,

    M <- beta M + (1 - beta) G:   v_t = (1 - beta)^2 (1 - beta^(2t)) / (1 - beta^2)
    M <- beta M + G:              v_t = (1 - beta^(2t)) / (1 - beta^2)

The first v_t tends to (1 - beta) / (1 + beta). A Nesterov form has the direction beta M + G, whose
variance also contains the covariance of M and G. The link computes these moments exactly at each
step, also with a Kalman filter and for averages over clients (`links.noise_moments`). sigma C / B
leaves out the factor by which a release increases its noise against rounding (at most 1.0005).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.optim.chain import Context, Link, State, per_client
from fedmuon.optim.links import average_noise, map_matrices, no_noise, noise_moments
from fedmuon.tasks.base import Params


def noise_floor(
    share: float,
    noise: float,
    memory: float,
    form: str = "polyak",
    gain: float = 1.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
) -> Link:
    """Return a link that orthogonalizes a noisy momentum with lambda = c e^2.

    Args:
        share: The factor c.
        noise: Standard deviation sigma C / B of the noise in each entry of a released gradient.
        memory: The coefficient beta of the momentum.
        form: The form of the momentum, as for `links.momentum`.
        gain: The gain kappa of a Kalman filter before the momentum, or 1 without a filter.
        adjust: The scale of the steps, as for `links.orthogonalize`.
        routes: Mapping from a parameter name to its number of matrices, if more than one.

    Returns:
        A link whose state contains, for each replica, the number of steps and the moments of the
            noise.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = noise_moments(state, memory, gain)
        deviation = noise * direction_variance(state, memory, form).sqrt()

        def smoothed(matrices: Tensor, context: Context, block: int) -> Tensor:
            edge = noise_edge(deviation, *matrices.shape[-2:])
            smallest = torch.finfo(matrices.dtype).tiny  # the square may underflow
            lam = (share * edge.square()).clamp(min=smallest)
            return maps.smoothed_polar(matrices, per_client(lam, matrices))

        step = map_matrices(smoothed, adjust, grouped=True, blocks=routes)
        return step.update(direction, {}, context)[0], state

    return Link("orthogonalize", no_noise, update, lasting=True, averaged=average_noise)


def noise_edge(deviation: Tensor, m: int, n: int) -> Tensor:
    """Return e, an upper bound of the expected largest singular value of m x n Gaussian noise.

    `deviation` is the standard deviation of the entries.
    """
    return deviation * (math.sqrt(m) + math.sqrt(n))


def direction_variance(moments: State, memory: float, form: str) -> Tensor:
    """Return the variance of the noise in a direction [replicas], for releases of variance 1.

    Args:
        moments: The moments E f^2, E f m and E m^2 of the gradient f and the momentum m <- beta m +
            f, as `links.noise_moments` returns them.
        memory: The coefficient beta.
        form: The form of the momentum, as for `links.momentum`.
    """
    f, cross, m = (moments["common"] + moments["own"]).unbind(-1)
    if form.endswith("nesterov"):  # the direction beta m + f
        m = memory**2 * m + 2 * memory * cross + f
    return (1 - memory) ** 2 * m if form.startswith("ema") else m
