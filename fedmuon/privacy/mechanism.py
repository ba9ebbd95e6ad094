"""One private step of a client: a Poisson lot, clipped sums, noise (000, Algorithm 1 and (4)).

What is released leaves the data, and nothing else does.
"""

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from torch import Tensor

from fedmuon.combinations import UNTRUE
from fedmuon.coupling import normal
from fedmuon.errors import InputError, NonFinite
from fedmuon.names import Arithmetic, NoiseSource
from fedmuon.privacy import lattice
from fedmuon.privacy.accounting import Answer, require_supported
from fedmuon.privacy.discrete import Words
from fedmuon.privacy.keystream import KeyStream
from fedmuon.questions import finite, sent, unasked
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.clipping import Clipping, slack

REPEATABLE = (
    "Lots and noise follow from the seed (insecure-reproducible-noise): nothing is private."
)
PREDICTABLE = (
    "Lots and noise are PCG64's (noise-source), which is no cryptographic generator: what it has "
    "put out may give its secret state away."
)
STOPPED = (
    "A callback ended this run by what it saw of it, which was not released: no ledger counts what "
    "its length tells."
)
DOUBTS = {"secret": "", "predictable": PREDICTABLE, "repeatable": REPEATABLE}
Draws = Callable[..., np.random.Generator]  # draw(what, block=...) of one client's local step
Normal = Callable[[tuple[int, ...], int], Tensor]  # (shape [K S, ...], block) -> N(0, 1) entries
Stream = np.random.Generator | KeyStream
Streams = Callable[[int], Sequence[Stream]]  # block -> one a client


def secret_generator() -> np.random.Generator:
    """PCG64 seeded with 256 bits of the operating system's entropy: a quarter cheaper than a
    `KeyStream`, and no cryptographic generator."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def _secretly(clients: int, source: str = "secure") -> Streams:
    """One fresh stream for all clients and blocks."""
    streams = [secret_stream(source)] * clients
    return lambda block: streams


def secret_stream(source: str = "secure") -> Stream:
    """A fresh stream that nobody can repeat: a key stream, or what `noise-source` names."""
    return KeyStream() if source == "secure" else secret_generator()


def _keyed(draws: Sequence[Draws]) -> Streams:
    return lambda block: [draw(Draw.NOISE, block=block) for draw in draws]


def secret(clients: int = 1) -> Normal:
    """Fresh noise for each client, shared by its replicas; no two calls agree."""
    return _normal(_secretly(clients))


def keyed(draws: Sequence[Draws]) -> Normal:
    """Noise that is a function of (seed, round, client, step, block); draws[k] is client k's.

    It repeats a run exactly, and thereby gives its noise away to all who know the seed; it is for
    experiments on data that need no protection, and must be asked for.
    """
    return _normal(_keyed(draws))


def _normal(streams: Streams) -> Normal:
    return lambda shape, block: normal(streams(block), shape)


def words_of(stream: Stream) -> Words:
    """Its source of uniform words."""
    return (stream if isinstance(stream, KeyStream) else stream.bit_generator).random_raw


def poisson_rows(rng: Stream, size: int, rate: float) -> np.ndarray:
    """The rows of a Poisson lot: each of `size` rows with probability `rate`, independently.

    Sorted, and maybe none. This is the sampling that the accountant's amplification assumes; a
    shuffled lot of fixed size is another mechanism.
    """
    if isinstance(rng, KeyStream):
        return np.flatnonzero(rng.happens(size, rate))
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
    _require_sound(clipping, noise_multiplier, expected_lot)
    if noise_multiplier == 0:
        return Released({name: value / expected_lot for name, value in sums.items()})
    scale, found = noise_multiplier * clipping.bound, Params()
    for block, (name, value) in enumerate(sums.items()):
        entries = sent(drawn(tuple(value.shape), block), value.device, value.dtype)
        found[name] = (value + scale * (1 + slack(value.dtype)) * entries) / expected_lot
    return Released(found)


def release_on_grid(
    sums: Params, clipping: Clipping, noise_multiplier: float, expected_lot: float, streams: Streams
) -> Released:
    """The same on a lattice, with noise that is exact to the last bit: `fedmuon.privacy.lattice`
    has the proof."""
    _require_sound(clipping, noise_multiplier, expected_lot)
    reach = max(clipping.bound * (1 + slack(value.dtype)) for value in sums.values())
    step, found = lattice.noisy(
        sums, reach, noise_multiplier, lambda block: [words_of(one) for one in streams(block)]
    )
    per = step / expected_lot
    return Released({name: (found[name].mul_(per)).to(sums[name].dtype) for name in sums})


def _require_sound(clipping: Clipping, noise: float, lot: float) -> None:
    if noise < 0 or not lot > 0:
        raise InputError(
            f"noise multiplier {noise} must not be negative and the expected lot size {lot} must "
            "be positive"
        )
    if noise and math.isinf(clipping.bound):
        raise InputError("noise needs a finite clipping bound: set one, or noise = 0")


@dataclass(frozen=True)
class Mechanism:
    """How private steps release: sigma = `noise` times the clipping bound, and lots of `lot`
    samples in expectation. Only a `repeatable` one draws from the run's seed, others from `source`.

    `adjacency` is what the account names (`fedmuon.privacy.pairs`): add-remove holds where no rate
    depends on how many samples there are, with a `public_rate`; sums are over `lot` all the same.
    `arithmetic` decides between `release` and `release_on_grid`, which auto is for secret noise.
    """

    clipping: Clipping
    noise: float
    lot: float
    repeatable: bool = False
    public_rate: float = 0.0  # 0: lot over the samples that a client has
    adjacency: str = "zero-out"
    source: NoiseSource = "secure"
    arithmetic: Arithmetic = "auto"

    def __post_init__(self) -> None:
        require_supported(self.adjacency)
        if self.adjacency == "add-remove" and not self.public_rate:
            raise InputError(UNTRUE)
        for what, known in (("source", NoiseSource), ("arithmetic", Arithmetic)):
            if (value := getattr(self, what)) not in get_args(known):
                raise InputError(f"{what} '{value}' is unknown: use {' or '.join(get_args(known))}")

    @property
    def on_grid(self) -> bool:
        """Whether releases are on a lattice."""
        return self.arithmetic == "grid" or (self.arithmetic == "auto" and not self.repeatable)

    @property
    def secrecy(self) -> str:
        """Who can know the noise: see `DOUBTS`."""
        if self.repeatable:
            return "repeatable"
        return "secret" if self.source == "secure" else "predictable"

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
        rng = draw(Draw.LOT) if self.repeatable else _secretly(1, self.source)(0)[0]
        return poisson_rows(rng, size, self.rate(size))

    def releases(
        self, task: Task, batches: Sequence[Batch], draws: Sequence[Draws]
    ) -> Callable[[Points], Released]:
        """What links of a private chain may ask of a step's lots, one lot a client: once, since
        the account has one release a step."""
        streams = _keyed(draws) if self.repeatable else _secretly(len(draws), self.source)
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
            found = self._noisy(sums, streams)
            _check(found.gradient, "what is released is")
            return found

        return released

    def _noisy(self, sums: Params, streams: Streams) -> Released:
        if self.on_grid and self.noise:
            return release_on_grid(sums, self.clipping, self.noise, self.lot, streams)
        return release(sums, self.clipping, self.noise, self.lot, _normal(streams))

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
