"""A release whose every bit is accounted for: sums on a lattice, and the exact discrete Gaussian.

Noise of real numbers is private by theorem; noise of floating-point numbers is not. The possible
outcomes depend on the sum that the noise is added to, and the last bits of a release reveal it
(Mironov 2012). Here nothing is rounded after the noise is added. Let all tensors have D entries
together, C' be the maximum norm that an example adds to a block, sigma the noise multiplier and g
the lattice's spacing. Then

    z = clamp(round(sum / g), +-2^52),   released g (z + Y) / lot,   Y ~ N_Z(0, s^2)^D,          (1)
    s = 2^32,   g = sigma (1 + 2^-40) Delta / s,   Delta = C' + 2 g sqrt(D).

What is released is a function of the integers z + Y alone, whatever the last division rounds. They
are float64's, which has all up to 2^53 = 2^21 s; that Y goes beyond, where it is rounded, has a
chance below exp(-2^40), to be added to delta.

*Sensitivity.* A floating-point quotient below 2^52 is within 1/4 of the true one (half a unit in
its last place), so an entry of z is within 3/4 < 1 of sum / g; clamping takes no two entries apart.
In a block of d <= D entries two neighbours' z are C' / g + 2 sqrt(d) <= Delta / g apart at most (2
Delta / g where an example is replaced). The noise s is sigma Delta / g: sigma means what it means
for real numbers.                                                                                (2)

*Accounting.* Nothing is lost to the lattice. Let rho_t(x) = exp(-x^2 / 2 t^2) and h(t) = 2 sum over
k >= 1 of exp(-2 pi^2 t^2 k^2). By Poisson's summation the sum of rho_t(y - x) over integers y is t
sqrt(2 pi) times something in [1 - h(t), 1 + h(t)], for every real x. Take X ~ N(v, s^2 - t^2), v an
integer, and y ~ N_Z(X, t^2), which is post-processing of X. Gaussians convolve, so y has the mass
phi_s(y - v) over something in [1 - h(t), 1 + h(t)], with phi_s the density of N(0, s^2); and
N_Z(v, s^2) has phi_s(y - v) / (1 + h(s)). For t <= s and h(t) <= 1/2 their ratio therefore lies in
exp(+-eta), eta = 3 h(t), and in exp(+-D eta) for D entries.                                     (3)
Poisson lots keep that, as they mix such masses with the same weights on both sides. So T steps of
(1), each chosen by what came before, have exp(+-T D eta) times the mass of a post-processing of T
subsampled Gaussians of sensitivity Delta / g and noise sqrt(s^2 - t^2). If these are (epsilon,
delta)-DP, the run is

    (epsilon + 2 T D eta, exp(T D eta) delta)-DP.                                                (4)

With t = 64, sqrt(s^2 - t^2) > s (1 - 2^-52); that and the roundings of g are what 1 + 2^-40 is for.
And 3 h(64) < 10^-35000: the accountant's upper end for real Gaussian noise (PLD and RDP) holds here
as it stands, since no number that it computes with could hold what (4) adds. Conversely N_Z(v, s^2)
plus N(0, t^2) is N(v, s^2 + t^2) up to as much, so the lower end is no other, either.

Not covered by proof, here or elsewhere: how the floating-point sums of two neighbouring lots round
apart before (1) sees them (Casacuberta et al. 2022; measured, by 1e-6 C in lots of 512 in float32,
a five-hundredth of the slack that is in C' for the norms), and how long a step takes.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import to_device
from fedmuon.core.errors import InputError
from fedmuon.privacy.mechanisms.discrete import STRIPS, Words, gaussian
from fedmuon.tasks.base import Params

BITS = 26
DEVIATION = STRIPS << BITS  # s
MOST = 2.0**52
Streams = Callable[[int], Sequence[Words]]  # block -> one source of words a client


def spacing(reach: float, noise: float, entries: int) -> float:
    """g of (1), solved for Delta: g s = sigma' C' / (1 - 2 sigma' sqrt(D) / s)."""
    more = noise * (1 + 2.0**-40)
    share = 2 * more * math.sqrt(entries) / DEVIATION
    if share > 0.5:
        raise InputError(
            f"noise = {noise:g} over {entries:,} entries is too coarse for the lattice: lower it, "
            "or set [privacy] arithmetic = 'continuous'"
        )
    return more * reach / (1 - share) / DEVIATION


def noisy(sums: Params, reach: float, noise: float, streams: Streams) -> tuple[float, Params]:
    """g and the integers z + Y of (1), as float64 tensors [K S, ...].

    A client's S replicas share Y. NaN stays NaN.
    """
    entries = sum(value[0].numel() for value in sums.values())
    step, found = spacing(reach, noise, entries), Params()
    for block, (name, value) in enumerate(sums.items()):
        words, shape = streams(block), tuple(value.shape)
        each = [gaussian(source, math.prod(shape[1:]), BITS, np.float64) for source in words]
        drawn = torch.from_numpy(np.stack(each)).reshape(-1, *shape[1:])
        drawn = drawn.repeat_interleave(shape[0] // len(words), 0)
        found[name] = rounded(value, step).add_(to_device(drawn, value.device))
    return step, found


def rounded(value: Tensor, step: float) -> Tensor:
    """z of (1)."""
    return (value.double() / step).round_().clamp_(-MOST, MOST)
