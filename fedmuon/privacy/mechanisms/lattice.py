"""Releases that are private in every bit: sums rounded to a lattice, plus exact discrete noise.

Theorems prove the privacy of noise with real numbers, but not of noise with floating-point numbers.
The possible outcomes depend on the sum to which the noise is added. The last bits of a release can
therefore reveal this sum (Mironov 2012). In this module, nothing is rounded after the noise is
added. Let D be the number of entries of all tensors together, C' the maximum norm that an example
adds to a block, sigma the noise multiplier, and g the spacing of the lattice. The released value is
g (z + Y) / lot, with

    z = clamp(round(sum / g), +-2^52),   Y ~ N_Z(0, s^2)^D,                                      (1)
    s = 2^32,   g = sigma (1 + 2^-40) Delta / s,   Delta = C' + 2 g sqrt(D).

The release depends only on the integers z + Y, for every rounding of the last division. The
integers are stored as float64, which represents all integers up to 2^53 = 2^21 s. The probability
that an entry of Y is larger, and is rounded, is below exp(-2^40). This probability is added to
delta.

*Sensitivity.* A floating-point quotient below 2^52 is within 1/4 of the true quotient (half a unit
in its last place), so an entry of z is within 3/4 < 1 of sum / g. Clamping does not increase the
distance of two entries. In a block of d <= D entries, the z of two neighbours therefore differ by
at most C' / g + 2 sqrt(d) <= Delta / g (2 Delta / g if an example is replaced). The noise s equals
sigma Delta / g, so sigma has the same meaning as for real numbers.                              (2)

*Accounting.* The lattice costs no privacy. Let rho_t(x) = exp(-x^2 / 2 t^2) and h(t) = 2 sum over
k >= 1 of exp(-2 pi^2 t^2 k^2). By Poisson's summation, for every real x, the sum of rho_t(y - x)
over integers y is t sqrt(2 pi) times a number in [1 - h(t), 1 + h(t)]. Let X ~ N(v, s^2 - t^2) for
an integer v, and y ~ N_Z(X, t^2), which is post-processing of X. Gaussians convolve, so y has the
mass phi_s(y - v) divided by a number in [1 - h(t), 1 + h(t)], where phi_s is the density of
N(0, s^2). N_Z(v, s^2) has the mass phi_s(y - v) / (1 + h(s)). For t <= s and h(t) <= 1/2, the ratio
of the two masses therefore lies in exp(+-eta), eta = 3 h(t), and in exp(+-D eta) for D entries. (3)
Poisson lots preserve this, because they mix such masses with the same weights on both sides. T
steps of (1), each chosen by earlier releases, therefore have exp(+-T D eta) times the mass of a
post-processing of T subsampled Gaussians of sensitivity Delta / g and noise sqrt(s^2 - t^2). If
these are (epsilon, delta)-DP, the run is

    (epsilon + 2 T D eta, exp(T D eta) delta)-DP.                                                (4)

With t = 64, sqrt(s^2 - t^2) > s (1 - 2^-52). The factor 1 + 2^-40 covers this difference and the
roundings of g. As 3 h(64) < 10^-35000, the accountant's upper bound of epsilon for real Gaussian
noise (PLD and RDP) is valid without change: the additional terms of (4) are too small for any
number in its computation. Conversely, N_Z(v, s^2) plus N(0, t^2) is N(v, s^2 + t^2) up to the same
error, so the lower bound is also unchanged.

Two effects are not covered by the proof. The first effect is rounding before (1): the
floating-point sums of two neighbouring lots may be rounded differently (Casacuberta et al. 2022).
For lots of 512 in float32, we measured differences of 1e-6 C. This is a five-hundredth of the slack
of C' for rounding errors of norms. The second effect is the running time of a step, which may
depend on the data.
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
Streams = Callable[[int], Sequence[Words]]  # function from a block to one source per client


def spacing(reach: float, noise: float, entries: int) -> float:
    """Return the lattice spacing g, which solves eq. (1) of this module."""
    raised_noise = noise * (1 + 2.0**-40)
    share = 2 * raised_noise * math.sqrt(entries) / DEVIATION
    if share > 0.5:
        raise InputError(
            f"noise = {noise:g} is too large for exact noise on a lattice with {entries:,} "
            "entries. Lower noise, or set [privacy] arithmetic = 'continuous'."
        )
    return raised_noise * reach / (1 - share) / DEVIATION


def noisy(sums: Params, reach: float, noise: float, streams: Streams) -> tuple[float, Params]:
    """Return the lattice spacing g, and the noisy integers z + Y as float64 tensors.

    The replicas of a client get the same noise Y. NaN stays NaN.
    """
    entries = sum(value[0].numel() for value in sums.values())
    step, integers = spacing(reach, noise, entries), Params()
    for block, (name, value) in enumerate(sums.items()):
        words, shape = streams(block), tuple(value.shape)
        draws = [gaussian(source, math.prod(shape[1:]), BITS, np.float64) for source in words]
        drawn = torch.from_numpy(np.stack(draws)).reshape(-1, *shape[1:])
        drawn = drawn.repeat_interleave(shape[0] // len(words), 0)
        integers[name] = rounded(value, step).add_(to_device(drawn, value.device))
    return step, integers


def rounded(value: Tensor, step: float) -> Tensor:
    """Convert sums to multiples z of the lattice spacing, rounded and clamped."""
    return (value.double() / step).round_().clamp_(-MOST, MOST)
