"""One private step of a client: a Poisson lot, clipped sums, noise (000, Algorithm 1 and (4)).

What is released leaves the data, and nothing else does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
from torch import Tensor

from fedmuon.config.incompatible import OF_REALS, UNTRUE, in_turns
from fedmuon.core.choices import Arithmetic, NoiseSource
from fedmuon.core.device import unasked
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw
from fedmuon.privacy.accounting.composition import require_supported
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling, Past, lots_of, square_root
from fedmuon.privacy.mechanisms.quantile import CountedRelease, Quantile
from fedmuon.privacy.mechanisms.release import (
    Released,
    clipped_sums,
    release,
    release_on_grid,
    require_finite,
)
from fedmuon.privacy.noise import (
    Draws,
    Streams,
    keyed_streams,
    normals,
    poisson_rows,
    secret_streams,
)
from fedmuon.privacy.noise_visibility import secrecy
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.per_example.clipping import Clipping


@dataclass(frozen=True)
class Mechanism:
    """How private steps release: sigma = `noise` times the clipping bound, and lots of `lot`
    samples in expectation. Only a `repeatable` one draws from the run's seed, others from `source`.

    `adjacency` is what the account names (`dominating_pairs.py`): add-remove holds where no rate
    depends on how many samples there are, with a `public_rate`; sums are over `lot` all the same.
    Lots of a `fixed_order` are no Poisson lots (`fixed_order.py`). Clipping may follow a
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
    fixed_order: FixedOrderSampling | None = None
    quantile: Quantile | None = None

    def __post_init__(self) -> None:
        require_supported(self.adjacency)
        if self.adjacency == "add-remove" and not self.public_rate and self.fixed_order is None:
            raise InputError(UNTRUE)
        for what, known in (("source", NoiseSource), ("arithmetic", Arithmetic)):
            if (value := getattr(self, what)) not in get_args(known):
                raise InputError(f"{what} '{value}' is unknown: use {' or '.join(get_args(known))}")
        if self.fixed_order is not None and (
            why := in_turns(self.lot, self.public_rate, self.adjacency)
        ):
            raise InputError(why)
        if self.arithmetic == "grid" and self._of_reals:
            raise InputError(OF_REALS)

    @property
    def _of_reals(self) -> bool:
        """Whether noise is mixed with other noise, or counts are released beside sums."""
        return self.quantile is not None or (
            self.fixed_order is not None and self.fixed_order.band > 1
        )

    @cached_property
    def _past(self) -> Past | None:
        """Of correlated noise."""
        if self.fixed_order is None or self.fixed_order.band == 1:
            return None
        return Past(square_root(self.fixed_order.band))

    @property
    def on_grid(self) -> bool:
        """Whether releases are on a lattice."""
        secret = not self.repeatable and not self._of_reals
        return self.arithmetic == "grid" or (self.arithmetic == "auto" and secret)

    @property
    def again(self) -> bool:
        """Whether a round may be done over, to the same bytes: secret noise is new each time, and
        correlated noise goes on."""
        return self.repeatable and (self.fixed_order is None or self.fixed_order.band == 1)

    @property
    def secrecy(self) -> str:
        """Who can know the noise: see `fedmuon.privacy.noise_visibility`."""
        return secrecy(self.repeatable, self.source)

    def _streams(self, draws: Sequence[Draws]) -> Streams:
        return keyed_streams(draws) if self.repeatable else secret_streams(len(draws), self.source)

    def rate(self, size: int) -> float:
        """The chance of a sample of a client that has `size` of them, or its share of the steps."""
        if self.fixed_order is not None:
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
        if self.fixed_order is not None:
            raise InputError(
                f"lots are Poisson ones here, and not sampling = {self.fixed_order.sampling}"
            )
        rng = draw(Draw.LOT) if self.repeatable else secret_streams(1, self.source)(0)[0]
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
                how = CountedRelease(self.quantile, self.clipping, self.noise, self.lot, task)
                drawn = [normals(self._streams([draw])) for draw in draws]
                found = how.of(points, batches, bounds, drawn)
            else:
                # Clipping may be done over, a release may not: neither published nor thrown away.
                sums = unasked(
                    task.device, lambda: clipped_sums(task, points, batches, self.clipping)
                )
                found = self._noisy(sums, streams, step)
            require_finite(found.gradient, "what is released is")
            return found

        return released

    def _noisy(self, sums: Params, streams: Streams, step: int) -> Released:
        if self.on_grid and self.noise:
            return release_on_grid(sums, self.clipping, self.noise, self.lot, streams)
        drawn = normals(streams)
        drawn = drawn if self._past is None else self._past.at(step, drawn)
        return release(sums, self.clipping, self.noise, self.lot, drawn)
