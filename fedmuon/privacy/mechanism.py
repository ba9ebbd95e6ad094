"""One private step of a client: a Poisson lot, clipped sums, noise (000, Algorithm 1 and (4)).

What is released leaves the data, and nothing else does.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedmuon.combinations import OF_REALS, UNTRUE, in_turns
from fedmuon.coupling import normal
from fedmuon.errors import InputError, NonFinite
from fedmuon.names import Arithmetic, NoiseSource
from fedmuon.privacy import lattice
from fedmuon.privacy.accounting import Answer, require_supported
from fedmuon.privacy.correlated import Past, square_root
from fedmuon.privacy.orders import Turns, lots_of
from fedmuon.privacy.quantile import Counting, Quantile
from fedmuon.privacy.streams import Streams, poisson_rows, secret_stream, words_of
from fedmuon.questions import finite, sent, unasked
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Batch, Params, Points, Task, blocks
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


def _secretly(clients: int, source: str = "secure") -> Streams:
    """One fresh stream for all clients and blocks."""
    streams = [secret_stream(source)] * clients
    return lambda block: streams


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


def uncertified(answer: Answer, why: str = REPEATABLE) -> Answer:
    """What is left of an answer where the noise is repeatable, or the run was stopped."""
    note = f"{why} {answer.note}".strip()
    return dataclasses.replace(answer, certified=False, note=note)


@dataclass(frozen=True)
class Released:
    """A noisy gradient [K S, ...]: the only thing that later links of a private chain may see.

    What is computed from it, and from what was released before, is post-processing. Where clipping
    follows a quantile, `kept` [K] is the noisy share of contributions that was not clipped.
    """

    gradient: Params
    kept: Tensor | None = None


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
    Lots that take `turns` are no Poisson ones (`fedmuon.privacy.orders`). Clipping may follow a
    `quantile` of the norms, which the account has in `noise`.
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
    turns: Turns | None = None
    quantile: Quantile | None = None

    def __post_init__(self) -> None:
        require_supported(self.adjacency)
        if self.adjacency == "add-remove" and not self.public_rate and self.turns is None:
            raise InputError(UNTRUE)
        for what, known in (("source", NoiseSource), ("arithmetic", Arithmetic)):
            if (value := getattr(self, what)) not in get_args(known):
                raise InputError(f"{what} '{value}' is unknown: use {' or '.join(get_args(known))}")
        if self.turns is not None and (why := in_turns(self.lot, self.public_rate, self.adjacency)):
            raise InputError(why)
        if self.arithmetic == "grid" and self._of_reals:
            raise InputError(OF_REALS)

    @property
    def _of_reals(self) -> bool:
        """Whether noise is mixed with other noise, or counts are released beside sums."""
        return self.quantile is not None or (self.turns is not None and self.turns.band > 1)

    @cached_property
    def _past(self) -> Past | None:
        """Of correlated noise."""
        if self.turns is None or self.turns.band == 1:
            return None
        return Past(square_root(self.turns.band))

    @property
    def on_grid(self) -> bool:
        """Whether releases are on a lattice."""
        secret = not self.repeatable and not self._of_reals
        return self.arithmetic == "grid" or (self.arithmetic == "auto" and secret)

    @property
    def again(self) -> bool:
        """Whether a round may be done over, to the same bytes: secret noise is new each time, and
        correlated noise goes on."""
        return self.repeatable and (self.turns is None or self.turns.band == 1)

    @property
    def secrecy(self) -> str:
        """Who can know the noise: see `DOUBTS`."""
        if self.repeatable:
            return "repeatable"
        return "secret" if self.source == "secure" else "predictable"

    def _streams(self, draws: Sequence[Draws]) -> Streams:
        return _keyed(draws) if self.repeatable else _secretly(len(draws), self.source)

    def rate(self, size: int) -> float:
        """The chance of a sample of a client that has `size` of them, or its share of the steps."""
        if self.turns is not None:
            return 1 / lots_of(size, self.lot)
        return self.public_rate or min(1.0, self.lot / size)

    @property
    def public_population(self) -> float:
        """The samples of a client as far as all may know; 0 if it is its own number."""
        return self.lot / self.public_rate if self.public_rate else 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of the noise in an entry of a released gradient, without the
        slack of `release`: 4.9e-4 of it in float32, which no correction of a bias can tell."""
        return self.noise * self.clipping.bound / self.lot if self.noise else 0.0

    def rows(self, draw: Draws, size: int) -> np.ndarray:
        """A Poisson lot of a client's samples; its rows are as secret as the noise."""
        if self.turns is not None:
            raise InputError(
                f"lots are Poisson ones here, and not sampling = {self.turns.sampling}"
            )
        rng = draw(Draw.LOT) if self.repeatable else _secretly(1, self.source)(0)[0]
        return poisson_rows(rng, size, self.rate(size))

    def releases(
        self, task: Task, batches: Sequence[Batch], draws: Sequence[Draws], step: int = 0
    ) -> Callable[..., Released]:
        """What links of a private chain may ask of a step's lots, one lot a client: once, since
        the account has one release a step. Correlated noise is that of the run's `step`. Beside
        the points stand the clients' bounds [K], where clipping follows a quantile."""
        streams = self._streams(draws)
        asked: list[bool] = []

        def released(points: Points, bounds: Tensor | None = None) -> Released:
            if asked:
                raise InputError(
                    "a private step asks for a second release, which no account has counted: let "
                    "one link of the chain ask once, and hand on what it got"
                )
            asked.append(True)
            if self.quantile is not None:
                if bounds is None:
                    raise InputError("clipping that follows a quantile needs a link that keeps it")
                found = self._counted(task, points, batches, draws, bounds)
            else:
                # Clipping may be done over, a release may not: neither published nor thrown away.
                sums = unasked(
                    task.device, lambda: self._sums(task, points, batches, self.clipping)
                )
                found = self._noisy(sums, streams, step)
            _check(found.gradient, "what is released is")
            return found

        return released

    def _noisy(self, sums: Params, streams: Streams, step: int) -> Released:
        if self.on_grid and self.noise:
            return release_on_grid(sums, self.clipping, self.noise, self.lot, streams)
        drawn = _normal(streams)
        drawn = drawn if self._past is None else self._past.at(step, drawn)
        return release(sums, self.clipping, self.noise, self.lot, drawn)

    def _sums(
        self, task: Task, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> Params:
        """Of clipped gradients, at a model that is finite."""
        for _, params in points:
            _check(params, "the model is")
        return task.clipped(points, batches, clipping)[1]

    def _counted(
        self,
        task: Task,
        points: Points,
        batches: Sequence[Batch],
        draws: Sequence[Draws],
        bounds: Tensor,
    ) -> Released:
        """Each client's release, clipped at its own bound, with what was not clipped."""
        if len(bounds) > len(batches):
            raise InputError(
                "clipping that follows a quantile follows that of one model: run it alone"
            )
        each = [(c, blocks(params, len(batches))) for c, params in points]
        found = [
            self._one([(c, own[k]) for c, own in each], task, batches[k], draws[k], float(bound))
            for k, bound in enumerate(bounds)
        ]
        names = found[0].gradient
        kept = torch.stack([one.kept for one in found if one.kept is not None])
        return Released(
            {name: torch.cat([one.gradient[name] for one in found]) for name in names}, kept
        )

    def _one(self, points: Points, task: Task, batch: Batch, draw: Draws, bound: float) -> Released:
        """A client's, by (1) of `fedmuon.privacy.quantile`."""
        assert self.quantile is not None
        at = Counting(self.clipping.rule, bound, self.clipping.joint_block)

        def sums() -> tuple[Params, float]:
            at.counted.clear()
            return self._sums(task, points, [batch], at), at.total()

        total, count = unasked(task.device, sums)
        drawn = _normal(self._streams([draw]))
        noise = self.quantile.of_sums(self.noise, at.blocks(total))
        found = release(total, at, noise, self.lot, drawn)
        last = float(drawn((1, 1), len(total))) if self.noise else 0.0
        kept = (count + self.quantile.noise * last) / self.lot + 0.5
        return Released(found.gradient, torch.tensor(kept, dtype=torch.float64))


def _check(public: Params, what: str) -> None:
    """Stop at numbers that are not finite, where all may see them: a stop at a lot's own loss would
    tell of its examples. A sum, which one such number spoils, takes a fifth of a look at each."""
    if not all(finite(value.sum()) for value in public.values()):
        raise NonFinite(f"{what} not finite in a private step: lower [local] lr")
