"""Lots in a fixed order, and correlated noise that cancels: the matrix mechanism of DP-FTRL.

# Fixed-order sampling: each sample once per epoch, and the privacy spent

The seed of the run draws the order of a client's n samples, again for each epoch (`shuffle`) or
once (`cyclic`). The order is cut into b = ceil(n / lot) lots, which the client's steps use in turn.
Orders and sizes are public, so there is no amplification. The adjacency is zero-out or replace-one,
because one more sample may move all others to other lots.

In T shuffled steps, a sample is in at most ceil(T / b) lots. Each lot releases a Gaussian of
sensitivity 1 (in units of C sqrt(m)), whatever was released before. All T releases together cost as
much as one release of sensitivity sqrt(ceil(T / b)). This follows from the proof below for C = 1,
for steps at any distance. Correlated noise needs a distance of at least b between two steps of a
sample, which `cyclic` lots have.

# Correlated noise (Kairouz et al. 2021, Denisov et al. 2022)

Step t releases g_t + (C^-1 Z)_t. The entries of Z are independent N(0, s^2), with one row per step,
and C is lower triangular. A model adds up the releases. Its prefix sums are A G + B Z, where
A = B C. The noise B Z is much smaller than prefix sums of independent noise. All releases are
C^-1 (C G + Z), a function of the Gaussian mechanism C G + Z. It is sufficient to account for this
mechanism.

**C** is Toeplitz with c_0 = 1, c_j = c_{j-1} (2j - 1) / (2j) = binom(2j, j) / 4^j. This is the
square root of A (Fichtenberger, Henzinger, Upadhyay 2023), cut after `band` coefficients (Kalinin,
Lampert 2024). Without the cut, C C = A, because sum_j c_j x^j = (1 - x)^(-1/2). With band = 1, the
noise is independent. Rows of W = C^-1 Z follow from W_t = Z_t - sum_{0 < j < band} c_j W_{t-j}, so
`band` - 1 rows are stored.

**Noise for a momentum.** Muon orthogonalizes M_t = sum_j a_j g_{t-j} and never adds up gradients.
Without Nesterov's look-ahead, a_j = (1 - beta) beta^j. With look-ahead, beta M_t + (1 - beta) g_t
has a_j = (1 - beta) beta^(j+1), except a_0 = 1 - beta^2. In terms of power series, the noise of M_t
is a / c times Z, and an example that takes part once adds c. At equal epsilon, the variance of an
entry of M_t, late in a long run, is therefore proportional to ||c||^2 ||a / c||^2. No c has a
smaller variance than the root of a: on |x| = 1, by Cauchy-Schwarz,

    ||c|| ||a / c|| >= mean |a|,  with equality if |c|^2 is proportional to |a|,

which is true for c = a^(1/2). This root and its inverse are series in x, because a has no zero and
no pole in |x| <= 1. C is therefore the root of the momentum's A, cut after `band` coefficients. For
beta -> 1, this root becomes the root of prefix sums. A root that is cut is no longer exactly
optimal. If `band` is at least 2 / (1 - beta), the cut adds little noise. With short bands, the root
of prefix sums may have slightly less noise (`noise_of_momentum`).

**Without a band.** Two or three buffers use the noise of more earlier steps than a band, and need
less memory. `fedmuon.privacy.mechanisms.buffered` defines their C, fitted to the steps of a run.
Everything below also holds for this C.

Let s = beta / (1 + beta) with Nesterov's look-ahead, and s = 0 without it. Then
c = ((1 - s x) / (1 - beta x))^(1/2). Its derivative gives

    (j + 1) c_{j+1} = ((beta - s) / 2 + (beta + s) j) c_j - beta s (j - 1) c_{j-1}.

The coefficients decrease and are not negative: for j >= 1, c_j is the integral of t^(j-1) over a
positive measure on [s, beta].

**Sensitivity.** An example takes part in steps that are at least b apart, and adds vectors g_i of
norm <= 1 in these steps. As C >= 0, ||C (G - G')||^2 = sum_{i, j} <C_i, C_j> <g_i, g_j> <=
sum_{i, j} <C_i, C_j> over the columns i, j of these steps. For n steps and i <= j, <C_i, C_j> =
sum_{s < n-j} c_s c_{s+j-i} decreases with j, and with j - i, because c is non-negative and
decreasing. The l-th step of a pattern is at least l b (l = 0, 1, ...), and the l-th and the m-th
step are at least |m - l| b apart. No pattern therefore exceeds the pattern of the steps 0, b, 2b,
... (Kalinin, Lampert 2024, Theorem 2).

**Adaptivity.** Let gradients depend on earlier releases. Given these releases, the means of row t
of C G + Z for two neighbours differ by v_t. The bound above is valid for each path, so sum_t
||v_t||^2 <= S^2, whatever was released. An additional row, of norm^2 S^2 - sum_t ||v_t||^2, can
only reveal more. With this row, the log-likelihood ratio is sum_t <v_t, z_t> / s^2 +- S^2 / 2 s^2,
where z_t is the noise of the row. Given the past, E exp(i x <v_t, z_t> + x^2 s^2 ||v_t||^2 / 2) =
1, so the product over t has mean 1, too. With the additional row, sum_t ||v_t||^2 = S^2 is a
constant. Therefore, sum_t <v_t, z_t> is exactly N(0, s^2 S^2), and the privacy loss is that of one
Gaussian release of sensitivity S (cf. Denisov et al. 2022, Theorem 2.1).
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fedmuon.core.choices import Sampling
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.mechanisms.buffered import Buffers, require_momentum, weights_of
from fedmuon.privacy.noise import Normal

if TYPE_CHECKING:  # the account of lots in a fixed order does not need torch
    from torch import Tensor

ROUNDING = 1e-12  # relative rounding error of noise that is multiplied and then divided
APART = (
    "correlated noise needs a whole epoch between two steps that use the same sample, but "
    "Poisson lots do not ensure this. Set [privacy] sampling = 'cyclic'."
)


def square_root(count: int, memory: float = 1.0, ahead: bool = False) -> np.ndarray:
    """Return the first coefficients of the square root of the matrix A.

    The lower triangular matrix A maps gradients to momenta, or to prefix sums.

    Args:
        count: Number of coefficients to return.
        memory: The momentum coefficient beta, or 1 for prefix sums.
        ahead: Whether the momentum has Nesterov's look-ahead.
    """
    shift = memory / (1 + memory) if ahead else 0.0
    coefficients = np.zeros(count)
    coefficients[0], before = 1.0, 0.0
    for j in range(count - 1):
        ahead_of = ((memory - shift) / 2 + (memory + shift) * j) * coefficients[j]
        coefficients[j + 1] = (ahead_of - memory * shift * (j - 1) * before) / (j + 1)
        before = coefficients[j]
    return coefficients


def sensitivity(coefficients: np.ndarray, steps: int, apart: int) -> float:
    """Return the sensitivity of C G, which is the largest norm that one example can add to C G.

    An example attains this norm if it takes part in every `apart`-th step and adds a vector of norm
    1 in each of these steps.

    Args:
        coefficients: The coefficients c_0, c_1, ... of the correlated noise. The coefficients must
            not be negative and must not increase.
        steps: Number of steps.
        apart: Minimum number of steps between two uses of the same example.
    """
    if not (np.diff(coefficients) <= 0).all():
        raise InputError(
            "the coefficients of correlated noise increase, but the sensitivity is known only for "
            "coefficients that never increase. Pass coefficients that never increase."
        )
    if not coefficients[-1] >= 0:
        raise InputError(
            f"the last coefficient of correlated noise is {coefficients[-1]:g}, but the "
            "sensitivity is known only for coefficients of 0 or more. Pass coefficients of 0 or "
            "more."
        )
    column = np.zeros(steps)
    for start in range(0, steps, apart):
        part = coefficients[: steps - start]
        column[start : start + len(part)] += part
    return float(np.linalg.norm(column))


def noise_of_momentum(
    coefficients: np.ndarray, steps: int, apart: int, memory: float, ahead: bool = False
) -> float:
    """Return the relative noise in an entry of the momentum or prefix sum.

    The function computes the root mean square of the noise over all steps. The result is this noise
    divided by the noise that a single release of all samples needs for the same epsilon.

    Args:
        coefficients: The coefficients c_0, c_1, ... of the correlated noise. Use [1] for
            independent noise.
        steps: Number of steps in the run.
        apart: Minimum number of steps between two uses of the same example.
        memory: The momentum coefficient beta, or 1 for prefix sums.
        ahead: Whether the momentum has Nesterov's look-ahead.
    """
    a = weights_of(steps, memory, ahead)
    q = np.zeros(steps)  # weights of the independent noise in the momentum: q * c = a
    for t in range(steps):
        lagged = coefficients[1 : t + 1]
        q[t] = a[t] - lagged @ q[t - len(lagged) : t][::-1]
    variance = float(np.cumsum(q * q).mean())
    return sensitivity(coefficients, steps, apart) * math.sqrt(variance)


@dataclass
class Past:
    """The noise of earlier steps, which one process stores in memory for each block.

    With a band, the noise W_{t-1}, W_{t-2}, ... of earlier steps is stored. With buffers, the sums
    S_b of the buffers are stored instead. Keep the stored noise secret. Anyone who knows this noise
    and the releases can compute the sums of gradients. No file and no message may contain the
    stored noise.
    """

    correlation: np.ndarray | Buffers
    _rows: dict[int, deque["Tensor"]] = field(default_factory=dict, repr=False)
    _next: int = 0

    def __reduce__(self) -> str:
        raise InputError(
            "correlated noise of earlier steps is secret and cannot be copied to another "
            "process. Keep the run in one process."
        )

    def at(self, step: int, fresh: Normal) -> Normal:
        """Return a function that draws the correlated noise of a step.

        Call this method once per step, in the order of the steps. Step 0 starts a new sequence.

        Args:
            step: Number of the step, counted from 0.
            fresh: Function that draws independent standard normal noise.
        """
        if step == 0:
            self._rows.clear()
        elif step != self._next:
            raise InputError(
                f"the noise of step {step} must cancel noise of earlier steps, but this process "
                "does not have the earlier noise. Secret noise is never stored in a file. Start "
                "a new run."
            )
        self._next = step + 1

        def row(shape: tuple[int, ...], block: int) -> "Tensor":
            noise, buffers = fresh(shape, block), self.correlation
            if isinstance(buffers, Buffers):
                sums = self._rows.setdefault(block, deque())
                for scale, past in zip(buffers.scales, sums, strict=False):
                    noise = noise - scale * past
                begun = sums or [noise * 0] * len(buffers.decays)
                decayed = zip(buffers.decays, begun, strict=True)
                self._rows[block] = deque(decay * past + noise for decay, past in decayed)
                return noise
            earlier = self._rows.setdefault(block, deque(maxlen=len(buffers) - 1))
            for weight, past in zip(buffers[1:], earlier, strict=False):
                noise = noise - float(weight) * past
            earlier.appendleft(noise)
            return noise

        return row


@dataclass(frozen=True)
class FixedOrderSampling:
    """Settings for lots in a fixed order, and for the correlation of noise between steps.

    Attributes:
        sampling: `shuffle` draws a new order of the samples for each epoch. `cyclic` uses the same
            order in every epoch.
        band: Number of coefficients of the correlated noise. The noise of a step is computed from
            new independent noise and from the noise of the `band` - 1 steps before. Use 1 for
            independent noise. Use 0 with buffers, which correlate the noise of all steps.
        memory: The coefficient beta of the momentum for which the noise is optimized. Use 1 for
            prefix sums.
        ahead: Whether this momentum has Nesterov's look-ahead.
        buffers: Buffers that correlate the noise instead of a band.
    """

    sampling: Sampling = "shuffle"
    band: int = 1
    memory: float = 1.0
    ahead: bool = False
    buffers: Buffers | None = None

    def __post_init__(self) -> None:
        floor = 1 if self.buffers is None else 0
        if self.sampling not in get_args(Sampling)[1:]:
            raise InputError(
                f"sampling is '{self.sampling}', but lots in a fixed order need sampling = "
                "'shuffle' or 'cyclic'. Set one of these values."
            )
        if self.band < floor:
            raise InputError(f"band is {self.band}, but it must be an integer of {floor} or more.")
        if self.buffers is not None and self.band:
            raise InputError(
                f"band is {self.band} and buffers are set, but noise can be correlated either by "
                "a band or by buffers. Set band = 0, or buffers = None."
            )
        if self.correlated and self.sampling != "cyclic":
            raise InputError(APART)
        require_momentum(self.memory, self.ahead)

    @property
    def correlated(self) -> bool:
        """Return whether the noise of different steps is correlated."""
        return self.band != 1

    @property
    def about(self) -> dict[str, Any]:
        """Return the settings as a table for the ledger.

        The method `of_ledger` converts the table back to an object.
        """
        settings = {"sampling": self.sampling, "noise_correlation": "none", "band": self.band}
        if not self.correlated:
            return settings
        name, momentum = ("sqrt-toeplitz", "momentum"), self.memory != 1
        if self.buffers is not None:
            name = "blt", "blt-momentum"
            pairs = zip(self.buffers.decays, self.buffers.scales, strict=True)
            settings |= {"buffers": [list(pair) for pair in pairs]}
        settings["noise_correlation"] = name[momentum]
        return settings | ({"memory": self.memory, "ahead": int(self.ahead)} if momentum else {})

    @classmethod
    def of_ledger(cls, about: Mapping[str, Any]) -> "FixedOrderSampling":
        """Create the settings from a table of a ledger, which `about` returned earlier."""
        buffers = None
        if pairs := about.get("buffers"):
            decays, scales = zip(*pairs, strict=True)
            buffers = Buffers(decays, scales)
        momentum = about.get("memory", 1.0), bool(about.get("ahead", 0))
        return cls(about["sampling"], about["band"], *momentum, buffers)

    def past(self) -> Past:
        """Return an empty store for the noise of earlier steps. A new run needs an empty store."""
        return Past(self.coefficients(self.band) if self.buffers is None else self.buffers)

    def coefficients(self, count: int) -> np.ndarray:
        """Return the first coefficients c_0, c_1, ... of the correlated noise.

        Args:
            count: Number of coefficients. Without buffers, at most `band` coefficients are
                returned.
        """
        if self.buffers is not None:
            return self.buffers.coefficients(count)
        return square_root(min(self.band, count), self.memory, self.ahead)

    def rows(self, seed: int, client: int, step: int, size: int, lot: float) -> np.ndarray:
        """Return the sorted row numbers of the samples in a client's lot. A lot is never empty."""
        epoch, place = divmod(step, lots_of(size, lot))
        order = _order(seed, client, epoch if self.sampling == "shuffle" else 0, size)
        return np.sort(order[place * int(lot) : (place + 1) * int(lot)])

    def sensitivity(self, steps: int, lots: int) -> float:
        """Return the sensitivity of all releases in these steps together, in units of C sqrt(m).

        The bound C applies to each of m blocks, and `lots` is the number of lots per epoch.
        """
        if not self.correlated:
            return math.sqrt(participations([1], steps, lots))
        return sensitivity(self.coefficients(steps), steps, lots)

    def alike(self, steps: int, lots: int) -> float:
        """Return the factor by which these steps need more noise than one release.

        Both have the same epsilon.
        """
        return self.sensitivity(steps, lots) * (1 + ROUNDING)

    def spent(
        self, noise: float, blocks: int, lots: int, rounds: Sequence[int], steps: int
    ) -> Event:
        """Return one event with the privacy cost of all releases of a client in `rounds`."""
        attempts = Counter(rounds)
        if not self.correlated:
            total_sensitivity = math.sqrt(participations(list(attempts.values()), steps, lots))
        elif len(attempts) == len(rounds):
            total_sensitivity = self.sensitivity(len(rounds) * steps, lots)
        else:
            raise InputError(
                "the ledger contains two attempts at the same round with correlated noise, and "
                "no privacy account covers repeated rounds. Start a new run."
            )
        return Event(1.0, noise / (total_sensitivity * math.sqrt(blocks)), 1)


def lots_of(size: int, lot: float) -> int:
    """Return the number of lots per epoch for a client with `size` samples."""
    return math.ceil(size / lot)


@lru_cache(maxsize=64)
def _order(seed: int, client: int, epoch: int, size: int) -> np.ndarray:
    return generator(seed, Draw.ORDER, round=epoch, client=client).permutation(size)


def participations(attempts: Sequence[int], steps: int, lots: int) -> int:
    """Return the maximum number of releases that contain the same sample.

    Each epoch that has started contains the sample in one release. If a round is repeated, the same
    lots are used again. Each repetition therefore adds one release for every epoch that overlaps
    with the round.

    Args:
        attempts: The number of attempts at each round in which the client took part.
        steps: Number of steps per round.
        lots: Number of lots per epoch.
    """
    repeated = sum(
        (count - 1) * ((first + steps - 1) // lots - first // lots + 1)
        for count, first in zip(attempts, range(0, len(attempts) * steps, steps), strict=True)
    )
    return -(-len(attempts) * steps // lots) + repeated
