"""Noise that cancels: the matrix mechanism of DP-FTRL (Kairouz et al. 2021, Denisov et al. 2022).

Step t releases g_t + (C^-1 Z)_t, with Z of independent N(0, s^2) entries, a row a step, and C lower
triangular. A model adds up prefix sums A G of what is released, A = B C, and their noise is B Z,
far less than that of sums of independent noise. All releases are C^-1 (C G + Z), a function of the
Gaussian mechanism C G + Z, which alone is accounted for.

**C** is Toeplitz with c_0 = 1, c_j = c_{j-1} (2j - 1) / (2j) = binom(2j, j) / 4^j, the square root
of A (Fichtenberger, Henzinger, Upadhyay 2023), cut after `band` of them (Kalinin, Lampert 2024): as
(1 - x)^(-1/2) = sum_j c_j x^j, the whole C has C C = A. band = 1 is independent noise. Rows of
W = C^-1 Z follow from W_t = Z_t - sum_{0 < j < band} c_j W_{t-j}: `band` - 1 of them are kept.

**Sensitivity.** An example takes part in steps at least b apart, and adds vectors g_i of norm <= 1
there. As C >= 0, ||C (G - G')||^2 = sum_{i, j} <C_i, C_j> <g_i, g_j> <= sum_{i, j} <C_i, C_j> over
the columns i, j in which it does. For n steps and i <= j, <C_i, C_j> = sum_{s < n-j} c_s c_{s+j-i}
falls with j, and with j - i, since c is non-negative and falls. The l-th step of a pattern is l b
or later (l = 0, 1, ...), and the l-th and the m-th are |m - l| b or more apart, so no pattern
exceeds that of the steps 0, b, 2b, ... (Kalinin, Lampert 2024, Theorem 2).

**Adaptivity.** Let gradients depend on what was released. Given that, the means of row t of
C G + Z on two neighbours differ by v_t, and sum_t ||v_t||^2 <= S^2 whatever was released, as the
bound above is one of paths. A further row, of norm^2 S^2 - sum_t ||v_t||^2, can only tell more;
with it the log-likelihood ratio is sum_t <v_t, z_t> / s^2 +- S^2 / 2 s^2, z_t the row's noise.
Given the past, E exp(i x <v_t, z_t> + x^2 s^2 ||v_t||^2 / 2) = 1, so the product over t has mean 1,
too, and sum_t ||v_t||^2 = S^2 is a constant: sum_t <v_t, z_t> is exactly N(0, s^2 S^2), and the
loss that of one Gaussian release of sensitivity S (cf. Denisov et al. 2022, Theorem 2.1).
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import get_args

import numpy as np
from torch import Tensor

from fedmuon.core.choices import Sampling
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.noise import Normal


def square_root(count: int) -> np.ndarray:
    """The first coefficients c_0, c_1, ... of the square root of the prefix sums."""
    steps = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def sensitivity(coefficients: np.ndarray, steps: int, apart: int) -> float:
    """The norm of what an example adds to C G in so many steps, if it takes part in each `apart`-th
    and adds a vector of norm 1: the most of any pattern with steps at least so far apart.

    Coefficients must not be negative, and must not grow.
    """
    _require_falling(coefficients)
    column = np.zeros(steps)
    for start in range(0, steps, apart):
        held = coefficients[: steps - start]
        column[start : start + len(held)] += held
    return float(np.linalg.norm(column))


def _require_falling(coefficients: np.ndarray) -> None:
    if not (coefficients[-1] >= 0 and (np.diff(coefficients) <= 0).all()):
        raise InputError(
            "the sensitivity of noise that is correlated by these coefficients is not known: give "
            "ones that do not grow and are not negative"
        )


@dataclass
class Past:
    """The rows W_{t-1}, W_{t-2}, ... of the noise, block by block, in the memory of one process.

    Who knows them and what was released knows the sums: no file and no message may have them.
    """

    coefficients: np.ndarray
    _rows: dict[int, deque[Tensor]] = field(default_factory=dict, repr=False)
    _next: int = 0

    def __reduce__(self) -> str:
        raise InputError("the past of correlated noise is secret, and stays where it was drawn")

    def at(self, step: int, fresh: Normal) -> Normal:
        """The noise of that step, from `fresh`, independent one; steps come one after the other,
        0 begins anew."""
        if step == 0:
            self._rows.clear()
        elif step != self._next:
            raise InputError(
                f"the noise of step {step} is to cancel that of the steps before it, which is kept "
                "by no file and is not in this process: begin the run afresh"
            )
        self._next = step + 1
        return lambda shape, block: self._row(fresh(shape, block), block)

    def _row(self, fresh: Tensor, block: int) -> Tensor:
        rows = self._rows.setdefault(block, deque(maxlen=len(self.coefficients) - 1))
        for weight, row in zip(self.coefficients[1:], rows, strict=False):
            fresh = fresh - float(weight) * row
        rows.appendleft(fresh)
        return fresh


# Lots that take turns: each sample once an epoch, and what that spends.
#
# A client's n samples stand in an order that is drawn from the run's seed, anew in each epoch
# (`shuffle`) or once (`cyclic`), and are cut into b = ceil(n / lot) lots, which its steps take in
# turn. Orders and sizes are public: nothing is amplified. What holds is zero-out, or replace-one,
# since one sample more may move all others to other lots.
#
# Of T steps that are shuffled a sample is in ceil(T / b) at most. Each releases a Gaussian of
# sensitivity 1 (in units of C sqrt(m)), whatever was released before: together they are one of
# sensitivity sqrt(ceil(T / b)), by the proof in `fedmuon.privacy.mechanisms.fixed_order` with C
# = 1, which asks for no distance between steps. Correlated noise asks for b between two steps of
# a sample, which `cyclic` lots have.

ROUNDING = 1e-12  # of noise that is divided by what it was times
APART = (
    "noise that is correlated asks for an epoch between two steps of a sample, which lots that are "
    "drawn anew do not keep: set [privacy] sampling = 'cyclic'"
)


@dataclass(frozen=True)
class FixedOrderSampling:
    """How lots take turns, and with how many steps the noise of a step is correlated, itself one of
    them: 1 is independent."""

    sampling: Sampling = "shuffle"
    band: int = 1

    def __post_init__(self) -> None:
        if self.sampling not in get_args(Sampling)[1:] or self.band < 1:
            raise InputError("lots take turns by shuffle or cyclic, with a band of at least 1")
        if self.band > 1 and self.sampling != "cyclic":
            raise InputError(APART)

    @property
    def about(self) -> dict[str, str | int]:
        """What a ledger says of it."""
        correlated = "none" if self.band == 1 else "sqrt-toeplitz"
        return {"sampling": self.sampling, "noise_correlation": correlated, "band": self.band}

    def rows(self, seed: int, client: int, step: int, size: int, lot: float) -> np.ndarray:
        """The rows of the lot of a client's `step`-th step, sorted: never none."""
        epoch, place = divmod(step, lots_of(size, lot))
        order = _order(seed, client, epoch if self.sampling == "shuffle" else 0, size)
        return np.sort(order[place * int(lot) : (place + 1) * int(lot)])

    def sensitivity(self, steps: int, lots: int) -> float:
        """Of so many steps, with so many lots in an epoch, in units of C sqrt(m)."""
        if self.band == 1:
            return math.sqrt(participations([1], steps, lots))
        return sensitivity(square_root(min(self.band, steps)), steps, lots)

    def alike(self, steps: int, lots: int) -> float:
        """How many times less noise one release of all samples would spend the same with."""
        return self.sensitivity(steps, lots) * (1 + ROUNDING)

    def spent(
        self, noise: float, blocks: int, lots: int, rounds: Sequence[int], steps: int
    ) -> Event:
        """What all attempts at the rounds of a client, each of so many steps, released together."""
        done = Counter(rounds)
        if self.band == 1:
            whole = math.sqrt(participations(list(done.values()), steps, lots))
        elif len(done) == len(rounds):
            whole = self.sensitivity(len(rounds) * steps, lots)
        else:
            raise InputError("a round of correlated noise was released twice: no account covers it")
        return Event(1.0, noise / (whole * math.sqrt(blocks)), 1)


def lots_of(size: int, lot: float) -> int:
    """b: how many lots a client's samples make."""
    return math.ceil(size / lot)


@lru_cache(maxsize=64)
def _order(seed: int, client: int, epoch: int, size: int) -> np.ndarray:
    return generator(seed, Draw.ORDER, round=epoch, client=client).permutation(size)


def participations(attempts: Sequence[int], steps: int, lots: int) -> int:
    """In how many releases a sample is at most, if a client's r-th round, of so many steps, is
    attempted attempts[r] times.

    Once in each epoch that is begun, and once more in each epoch of a round that is attempted
    again: its steps are those of the first attempt, and hold a sample once an epoch.
    """
    again = sum(
        (many - 1) * ((first + steps - 1) // lots - first // lots + 1)
        for many, first in zip(attempts, range(0, len(attempts) * steps, steps), strict=True)
    )
    return -(-len(attempts) * steps // lots) + again
