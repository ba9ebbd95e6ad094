"""Lots in a fixed order, and correlated noise, which cancels: the matrix mechanism of DP-FTRL.

# Fixed-order sampling: each sample once per epoch, and what this spends

The seed of the run draws the order of a client's n samples, anew for each epoch (`shuffle`) or once
(`cyclic`). The order is cut into b = ceil(n / lot) lots, which the client's steps take in turn.
Orders and sizes are public, so nothing is amplified. The adjacency is zero-out or replace-one,
because one more sample may move all others to other lots.

In T shuffled steps a sample is in at most ceil(T / b) lots. Each lot releases a Gaussian of
sensitivity 1 (in units of C sqrt(m)), whatever was released before. Together they are one release
of sensitivity sqrt(ceil(T / b)): this is the proof below with C = 1, which needs no distance
between steps. Correlated noise needs a distance of b between two steps of a sample, which `cyclic`
lots have.

# Correlated noise (Kairouz et al. 2021, Denisov et al. 2022)

Step t releases g_t + (C^-1 Z)_t. The entries of Z are independent N(0, s^2), with one row per step,
and C is lower triangular. A model adds up prefix sums A G of the releases, A = B C. Their noise is
B Z, far less than that of sums of independent noise. All releases are C^-1 (C G + Z), a function of
the Gaussian mechanism C G + Z, which alone is accounted for.

**C** is Toeplitz with c_0 = 1, c_j = c_{j-1} (2j - 1) / (2j) = binom(2j, j) / 4^j, the square root
of A (Fichtenberger, Henzinger, Upadhyay 2023), cut after `band` of them (Kalinin, Lampert 2024): as
(1 - x)^(-1/2) = sum_j c_j x^j, the whole C has C C = A. band = 1 is independent noise. Rows of
W = C^-1 Z follow from W_t = Z_t - sum_{0 < j < band} c_j W_{t-j}: `band` - 1 of them are stored.

**Noise for a momentum.** Muon orthogonalizes M_t = sum_j a_j g_{t-j} and never adds gradients up.
Its A has a_j = (1 - beta) beta^j, or for beta M_t + (1 - beta) g_t: a_j = (1 - beta) beta^(j+1)
but a_0 = 1 - beta^2. As power series, M_t is released with the noise of a / c times Z, and an
example that takes part once adds c: at equal epsilon the variance of an entry of M_t, late in a
long run, is in proportion to ||c||^2 ||a / c||^2. No c has less than the root of a: on |x| = 1, by
Cauchy-Schwarz,

    ||c|| ||a / c|| >= mean |a|,  with equality if |c|^2 is in proportion to |a|,

which c = a^(1/2) is. It and its inverse are series in x, as a has no zero and no pole in |x| <= 1.
So C is the root of the momentum's A, cut after `band` coefficients like that of prefix sums, which
is its limit for beta -> 1. Cut, it is no longer exactly the best: bands of 2 / (1 - beta) or more
lose little, and for short ones that of prefix sums may have a bit less (`noise_of_momentum`).

**Without a band.** Two or three buffers reach further than a band, and store less:
`fedmuon.privacy.mechanisms.buffered` has their C, fitted to the steps of a run. All that follows
holds for it, too.

With s = beta / (1 + beta), or 0 without looking ahead, c = ((1 - s x) / (1 - beta x))^(1/2), whose
derivative gives (j + 1) c_{j+1} = ((beta - s) / 2 + (beta + s) j) c_j - beta s (j - 1) c_{j-1}. It
falls and is not negative: for j >= 1 it is the integral of t^(j-1) over a positive measure on
[s, beta].

**Sensitivity.** An example takes part in steps at least b apart, and adds vectors g_i of norm <= 1
there. As C >= 0, ||C (G - G')||^2 = sum_{i, j} <C_i, C_j> <g_i, g_j> <= sum_{i, j} <C_i, C_j> over
the columns i, j in which it does. For n steps and i <= j, <C_i, C_j> = sum_{s < n-j} c_s c_{s+j-i}
falls with j, and with j - i, since c is non-negative and falls. The l-th step of a pattern is l b
or later (l = 0, 1, ...), and the l-th and the m-th are |m - l| b or more apart, so no pattern
exceeds that of the steps 0, b, 2b, ... (Kalinin, Lampert 2024, Theorem 2).

**Adaptivity.** Let gradients depend on earlier releases. Given these, the means of row t of C G + Z
on two neighbours differ by v_t. The bound above holds for each path, so sum_t ||v_t||^2 <= S^2
whatever was released. A further row, of norm^2 S^2 - sum_t ||v_t||^2, can only tell more. With it
the log-likelihood ratio is sum_t <v_t, z_t> / s^2 +- S^2 / 2 s^2, where z_t is the row's noise.
Given the past, E exp(i x <v_t, z_t> + x^2 s^2 ||v_t||^2 / 2) = 1, so the product over t has mean 1,
too. And sum_t ||v_t||^2 = S^2 is a constant. So sum_t <v_t, z_t> is exactly N(0, s^2 S^2), and the
loss is that of one Gaussian release of sensitivity S (cf. Denisov et al. 2022, Theorem 2.1).
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
from fedmuon.privacy.mechanisms.buffered import Buffers, weights_of
from fedmuon.privacy.noise import Normal

if TYPE_CHECKING:  # the account of lots in a fixed order answers without torch
    from torch import Tensor

ROUNDING = 1e-12  # relative, of noise that is multiplied and then divided
APART = (
    "correlated noise needs a whole epoch between two steps that use the same sample, which "
    "Poisson lots do not ensure: set [privacy] sampling = 'cyclic'"
)


def square_root(count: int, memory: float = 1.0, ahead: bool = False) -> np.ndarray:
    """The first coefficients c_0 = 1, c_1, ... of the square root of what adds up gradients.

    Args:
        count: How many.
        memory: beta of a momentum; 1 is for prefix sums.
        ahead: Whether it looks ahead, as Nesterov's does.
    """
    shift = memory / (1 + memory) if ahead else 0.0
    found = np.zeros(count)
    found[0], before = 1.0, 0.0
    for j in range(count - 1):
        ahead_of = ((memory - shift) / 2 + (memory + shift) * j) * found[j]
        found[j + 1] = (ahead_of - memory * shift * (j - 1) * before) / (j + 1)
        before = found[j]
    return found


def sensitivity(coefficients: np.ndarray, steps: int, apart: int) -> float:
    """The largest norm that an example adds to C G.

    It is attained if the example takes part in each `apart`-th step and adds vectors of norm 1.

    Args:
        coefficients: c_0, c_1, ...; they must not be negative, and must not grow.
        steps: How many steps there are.
        apart: The minimum distance between two steps of an example.
    """
    if not (coefficients[-1] >= 0 and (np.diff(coefficients) <= 0).all()):
        raise InputError(
            "the sensitivity of noise with these correlation coefficients is not known: give "
            "coefficients that do not grow and are not negative"
        )
    column = np.zeros(steps)
    for start in range(0, steps, apart):
        held = coefficients[: steps - start]
        column[start : start + len(held)] += held
    return float(np.linalg.norm(column))


def noise_of_momentum(
    coefficients: np.ndarray, steps: int, apart: int, memory: float, ahead: bool = False
) -> float:
    """The root mean square, over a run's steps, of the noise in an entry of the momentum or sum.

    In units of the noise of one release of all samples that spends the same epsilon.

    Args:
        coefficients: c_0, c_1, ... of the correlated noise; [1] is independent noise.
        steps: How many steps the run has.
        apart: The minimum distance between two steps of an example.
        memory: beta of the momentum; 1 is for prefix sums.
        ahead: Whether it looks ahead, as Nesterov's does.
    """
    a = weights_of(steps, memory, ahead)
    q = np.zeros(steps)  # weights of the independent noise in the momentum: q * c = a
    for t in range(steps):
        held = coefficients[1 : t + 1]
        q[t] = a[t] - held @ q[t - len(held) : t][::-1]
    variance = float(np.cumsum(q * q).mean())
    return sensitivity(coefficients, steps, apart) * math.sqrt(variance)


@dataclass
class Past:
    """The rows W_{t-1}, W_{t-2}, ... of the noise by block, in the memory of one process.

    Instead of rows it keeps their sums S_b, if buffers correlate them. Whoever knows them and the
    releases knows the sums of gradients, so no file and no message may contain them.
    """

    correlation: np.ndarray | Buffers
    _rows: dict[int, deque["Tensor"]] = field(default_factory=dict, repr=False)
    _next: int = 0

    def __reduce__(self) -> str:
        raise InputError(
            "earlier correlated noise is secret and cannot be copied to another process"
        )

    def at(self, step: int, fresh: Normal) -> Normal:
        """The noise of a step, from the independent noise `fresh`.

        Steps come one after the other; step 0 begins anew.
        """
        if step == 0:
            self._rows.clear()
        elif step != self._next:
            raise InputError(
                f"the noise of step {step} must cancel that of earlier steps, which no file "
                "stores and this process does not have: start a new run"
            )
        self._next = step + 1

        def row(shape: tuple[int, ...], block: int) -> "Tensor":
            found, buffers = fresh(shape, block), self.correlation
            if isinstance(buffers, Buffers):
                sums = self._rows.setdefault(block, deque())
                for scale, one in zip(buffers.scales, sums, strict=False):
                    found = found - scale * one
                begun = sums or [found * 0] * len(buffers.decays)
                decayed = zip(buffers.decays, begun, strict=True)
                self._rows[block] = deque(decay * one + found for decay, one in decayed)
                return found
            earlier = self._rows.setdefault(block, deque(maxlen=len(buffers) - 1))
            for weight, one in zip(buffers[1:], earlier, strict=False):
                found = found - float(weight) * one
            earlier.appendleft(found)
            return found

        return row


@dataclass(frozen=True)
class FixedOrderSampling:
    """How lots are ordered, and how noise is correlated.

    Attributes:
        sampling: `shuffle` or `cyclic`.
        band: With how many steps the noise of a step is correlated, counting itself: 1 is
            independent noise; 0 is for buffers, by which it is correlated with all.
        memory: beta of the momentum that should have least noise; 1 is for prefix sums.
        ahead: Whether this momentum looks ahead, as Nesterov's does.
        buffers: What correlates the noise instead of a band.
    """

    sampling: Sampling = "shuffle"
    band: int = 1
    memory: float = 1.0
    ahead: bool = False
    buffers: Buffers | None = None

    def __post_init__(self) -> None:
        least = 1 if self.buffers is None else 0
        if self.sampling not in get_args(Sampling)[1:] or self.band < least:
            raise InputError(
                f"the order of lots is '{self.sampling}' with band {self.band}: use shuffle or "
                "cyclic, and a band of at least 1"
            )
        if self.buffers is not None and self.band:
            raise InputError(
                "noise is correlated either by buffers or by a band: set band = 0 together with "
                "buffers"
            )
        if self.correlated and self.sampling != "cyclic":
            raise InputError(APART)
        if not 0 <= self.memory <= 1 or (self.ahead and self.memory == 1):
            raise InputError(
                f"the momentum coefficient is {self.memory}: give one in [0, 1), or 1 for prefix "
                "sums"
            )

    @property
    def correlated(self) -> bool:
        """Whether the noise of steps is correlated."""
        return self.band != 1

    @property
    def about(self) -> dict[str, Any]:
        """The settings in a ledger; `of_ledger` reads them."""
        known = {"sampling": self.sampling, "noise_correlation": "none", "band": self.band}
        if not self.correlated:
            return known
        name, momentum = ("sqrt-toeplitz", "momentum"), self.memory != 1
        if self.buffers is not None:
            name = "blt", "blt-momentum"
            pairs = zip(self.buffers.decays, self.buffers.scales, strict=True)
            known |= {"buffers": [list(pair) for pair in pairs]}
        known["noise_correlation"] = name[momentum]
        return known | ({"memory": self.memory, "ahead": int(self.ahead)} if momentum else {})

    @classmethod
    def of_ledger(cls, about: Mapping[str, Any]) -> "FixedOrderSampling":
        """The settings with these `about`."""
        buffers = None
        if pairs := about.get("buffers"):
            decays, scales = zip(*pairs, strict=True)
            buffers = Buffers(decays, scales)
        momentum = about.get("memory", 1.0), bool(about.get("ahead", 0))
        return cls(about["sampling"], about["band"], *momentum, buffers)

    def past(self) -> Past:
        """The memory of the noise of a run that begins."""
        return Past(self.coefficients(self.band) if self.buffers is None else self.buffers)

    def coefficients(self, count: int) -> np.ndarray:
        """The first c_0, c_1, ...; at most `band` of them if there is a band."""
        if self.buffers is not None:
            return self.buffers.coefficients(count)
        return square_root(min(self.band, count), self.memory, self.ahead)

    def rows(self, seed: int, client: int, step: int, size: int, lot: float) -> np.ndarray:
        """The sorted rows of the lot of a client's `step`-th step; at least one."""
        epoch, place = divmod(step, lots_of(size, lot))
        order = _order(seed, client, epoch if self.sampling == "shuffle" else 0, size)
        return np.sort(order[place * int(lot) : (place + 1) * int(lot)])

    def sensitivity(self, steps: int, lots: int) -> float:
        """The sensitivity of so many steps, with so many lots per epoch, in units of C sqrt(m)."""
        if not self.correlated:
            return math.sqrt(participations([1], steps, lots))
        return sensitivity(self.coefficients(steps), steps, lots)

    def alike(self, steps: int, lots: int) -> float:
        """The noise of these steps over that of one release of all samples that spends the same."""
        return self.sensitivity(steps, lots) * (1 + ROUNDING)

    def spent(
        self, noise: float, blocks: int, lots: int, rounds: Sequence[int], steps: int
    ) -> Event:
        """All releases of a client's rounds, with every attempt, at this number of steps per
        round."""
        done = Counter(rounds)
        if not self.correlated:
            whole = math.sqrt(participations(list(done.values()), steps, lots))
        elif len(done) == len(rounds):
            whole = self.sensitivity(len(rounds) * steps, lots)
        else:
            raise InputError(
                "a round of correlated noise was released twice, which the account does not "
                "cover: start a new run"
            )
        return Event(1.0, noise / (whole * math.sqrt(blocks)), 1)


def lots_of(size: int, lot: float) -> int:
    """b: the number of lots of a client's samples."""
    return math.ceil(size / lot)


@lru_cache(maxsize=64)
def _order(seed: int, client: int, epoch: int, size: int) -> np.ndarray:
    return generator(seed, Draw.ORDER, round=epoch, client=client).permutation(size)


def participations(attempts: Sequence[int], steps: int, lots: int) -> int:
    """The maximum number of releases with a sample.

    A sample is in one release per epoch that has begun. If a round is attempted again, its steps
    are those of the first attempt, so the sample is in one more release per epoch of the round.

    Args:
        attempts: How often the client's r-th round is attempted.
        steps: Steps per round.
        lots: Lots per epoch.
    """
    again = sum(
        (many - 1) * ((first + steps - 1) // lots - first // lots + 1)
        for many, first in zip(attempts, range(0, len(attempts) * steps, steps), strict=True)
    )
    return -(-len(attempts) * steps // lots) + again
