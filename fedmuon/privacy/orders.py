"""Lots that take turns: each sample once an epoch, and what that spends.

A client's n samples stand in an order that is drawn from the run's seed, anew in each epoch
(`shuffle`) or once (`cyclic`), and are cut into b = ceil(n / lot) lots, which its steps take in
turn. Orders and sizes are public: nothing is amplified. What holds is zero-out, or replace-one,
since one sample more may move all others to other lots.

Of T steps that are shuffled a sample is in ceil(T / b) at most. Each releases a Gaussian of
sensitivity 1 (in units of C sqrt(m)), whatever was released before: together they are one of
sensitivity sqrt(ceil(T / b)), by the proof in `fedmuon.privacy.correlated` with C = 1, which asks
for no distance between steps. Correlated noise asks for b between two steps of a sample, which
`cyclic` lots have.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np

from fedmuon.core.choices import Sampling
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.privacy.correlated import sensitivity, square_root
from fedmuon.privacy.pairs import Event

ROUNDING = 1e-12  # of noise that is divided by what it was times
APART = (
    "noise that is correlated asks for an epoch between two steps of a sample, which lots that are "
    "drawn anew do not keep: set [privacy] sampling = 'cyclic'"
)


@dataclass(frozen=True)
class Turns:
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
