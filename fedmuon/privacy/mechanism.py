"""One private step of a client: a Poisson lot, clipped sums, noise (000, Algorithm 1 and (4)).

What is released leaves the data, and nothing else does.
"""

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedmuon.combinations import UNTRUE
from fedmuon.coupling import normal
from fedmuon.errors import InputError, NonFinite
from fedmuon.privacy.accounting import Answer, require_supported
from fedmuon.questions import finite, sent, unasked
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.clipping import Clipping, slack

REPEATABLE = (
    "Lots and noise follow from the seed (insecure-reproducible-noise): nothing is private."
)
STOPPED = (
    "A callback ended this run by what it saw of it, which was not released: no ledger counts what "
    "its length tells."
)
Draws = Callable[..., np.random.Generator]  # draw(what, block=...) of one client's local step
Normal = Callable[[tuple[int, ...], int], Tensor]  # (shape [K S, ...], block) -> N(0, 1) entries


def secret_generator() -> np.random.Generator:
    """A generator seeded with 256 bits of the operating system's entropy: nobody can subtract its
    noise."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def secret(clients: int = 1) -> Normal:
    """Fresh noise for each client, shared by its replicas; no two calls agree."""
    rng = secret_generator()
    return lambda shape, block: normal([rng] * clients, shape)


def keyed(draws: Sequence[Callable[..., np.random.Generator]]) -> Normal:
    """Noise that is a function of (seed, round, client, step, block); draws[k] is client k's.

    It repeats a run exactly, and thereby gives its noise away to all who know the seed; it is for
    experiments on data that need no protection, and must be asked for.
    """
    return lambda shape, block: normal([draw(Draw.NOISE, block=block) for draw in draws], shape)


def poisson_rows(rng: np.random.Generator, size: int, rate: float) -> np.ndarray:
    """The rows of a Poisson lot: each of `size` rows with probability `rate`, independently.

    Sorted, and maybe none. This is the sampling that the accountant's amplification assumes; a
    shuffled lot of fixed size is another mechanism.
    """
    return np.flatnonzero(rng.random(size) < rate)


def uncertified(answer: Answer, why: str = REPEATABLE) -> Answer:
    """What is left of an answer where the noise is repeatable, or the run was stopped."""
    note = f"{why} {answer.note}".strip()
    return dataclasses.replace(answer, certified=False, note=note)


@dataclass(frozen=True)
class Released:
    """A noisy gradient [K S, ...]: the only thing that later links of a private chain may see.

    What is computed from it, and from what was released before, is post-processing.
    """

    gradient: Params


def release(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, drawn: Normal
) -> Released:
    """(sum + N(0, (sigma C')^2)) / expected lot size, block by block; C' = C (1 + slack), so that
    the multiplier sigma holds for norms as they are computed (`fedmuon.tasks.clipping`).

    The divisor is the *expected* size of a lot, which is public; the size that was drawn is not.
    An empty lot's sums are zero and release noise like any other's. All m blocks are one release
    of sensitivity C sqrt(m), whose multiplier is therefore sigma / sqrt(m).
    """
    if noise_multiplier < 0 or not expected_lot > 0:
        raise InputError(
            f"noise multiplier {noise_multiplier} must not be negative and the expected lot size "
            f"{expected_lot} must be positive"
        )
    if noise_multiplier == 0:
        return Released({name: value / expected_lot for name, value in sums.items()})
    if math.isinf(clipping.bound):
        raise InputError("noise needs a finite clipping bound: set one, or noise = 0")
    scale, found = noise_multiplier * clipping.bound, Params()
    for block, (name, value) in enumerate(sums.items()):
        entries = sent(drawn(tuple(value.shape), block), value.device, value.dtype)
        found[name] = (value + scale * (1 + slack(value.dtype)) * entries) / expected_lot
    return Released(found)


@dataclass(frozen=True)
class Mechanism:
    """How private steps release: sigma = `noise` times the clipping bound, and lots of `lot`
    samples in expectation. Only a `repeatable` one draws from the run's seed.

    `adjacency` is what the account names (`fedmuon.privacy.pairs`): add-remove holds where no rate
    depends on how many samples there are, with a `public_rate`; sums are over `lot` all the same.
    """

    clipping: Clipping
    noise: float
    lot: float
    repeatable: bool = False
    public_rate: float = 0.0  # 0: lot over the samples that a client has
    adjacency: str = "zero-out"

    def __post_init__(self) -> None:
        require_supported(self.adjacency)
        if self.adjacency == "add-remove" and not self.public_rate:
            raise InputError(UNTRUE)

    def rate(self, size: int) -> float:
        """The chance of a sample of a client that has `size` of them."""
        return self.public_rate or min(1.0, self.lot / size)

    @property
    def spread(self) -> float:
        """The standard deviation of the noise in an entry of a released gradient, without the
        slack of `release`: 4.9e-4 of it in float32, which no correction of a bias can tell."""
        return self.noise * self.clipping.bound / self.lot if self.noise else 0.0

    def rows(self, draw: Draws, size: int) -> np.ndarray:
        """A Poisson lot of a client's samples; its rows are as secret as the noise."""
        rng = draw(Draw.LOT) if self.repeatable else secret_generator()
        return poisson_rows(rng, size, self.rate(size))

    def releases(
        self, task: Task, batches: Sequence[Batch], draws: Sequence[Draws]
    ) -> Callable[[Points], Released]:
        """What links of a private chain may ask of a step's lots, one lot a client: once, since
        the account has one release a step."""
        drawn = keyed(draws) if self.repeatable else secret(len(draws))
        asked: list[bool] = []

        def released(points: Points) -> Released:
            if asked:
                raise InputError(
                    "a private step asks for a second release, which no account has counted: let "
                    "one link of the chain ask once, and hand on what it got"
                )
            asked.append(True)
            # Clipping may be done over, a release may not: neither published nor thrown away.
            sums = unasked(task.device, lambda: self._sums(task, points, batches))
            found = release(sums, self.clipping, self.noise, self.lot, drawn)
            _check(found.gradient, "what is released is")
            return found

        return released

    def _sums(self, task: Task, points: Points, batches: Sequence[Batch]) -> Params:
        """Of clipped gradients, at a model that is finite."""
        for _, params in points:
            _check(params, "the model is")
        return task.clipped(points, batches, self.clipping)[1]


def _check(public: Params, what: str) -> None:
    """Stop at numbers that are not finite, where all may see them: a stop at a lot's own loss would
    tell of its examples. A sum, which one such number spoils, takes a fifth of a look at each."""
    if not all(finite(value.sum()) for value in public.values()):
        raise NonFinite(f"{what} not finite in a private step: lower [local] lr")
