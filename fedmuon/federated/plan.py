"""The participants, mini-batches and draws of local steps, as a function of the seed.

They do not depend on the data, as Assumption 4.2 of the Stability note requires. Stages that draw
random numbers, such as compression, derive them from the same seed. Secret lots, noise and Poisson
cohorts of private runs do not come from the seed.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, generator, sample_keys

if TYPE_CHECKING:
    from fedmuon.federated.clock import Timetable

BIASED = (
    "the [devices] settings of this run decide which clients take part, but stability bounds and "
    "runs on neighbouring data sets need uniformly sampled clients. Set availability = 'always', "
    "dropout = 0, and mode = 'synchronous' or 'none'."
)


@dataclass(frozen=True)
class RandomnessPlan:
    """The plan of a run: the participants of each round, and all draws that are not secret."""

    seed: int
    clients: int
    per_round: int
    rounds: int
    steps: int = 1
    batch: int = 0  # 0 means all samples
    epochs: float = 0.0  # passes over a client's samples; if not 0, these replace `steps`
    fixed: np.ndarray | None = None  # a schedule [R, K] that replaces the drawn one
    factor: Callable[[int], float] | None = None  # the step-size factor as a function of the round
    poisson: bool = False  # each client takes part with probability K / N, drawn in each round
    secret: str = ""  # the noise source for Poisson cohorts; if set, it replaces the seed
    biased: bool = False  # whether simulated devices decide which clients take part
    timetable: "Timetable | None" = None  # of simulated devices, set when the data are known
    _cohorts: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def factors(self) -> np.ndarray | None:
        """Return the step-size factor of each round, or None if the run has no schedule."""
        if self.factor is None:
            return None
        return np.array([self.factor_at(round) for round in range(self.rounds)])

    def factor_at(self, round: int) -> float:
        """Return the step-size factor of a round."""
        if self.factor is None:
            return 1.0
        number = as_factor(self.factor(round))
        if not isinstance(number, float) or not 0 <= number < math.inf:
            raise InputError(
                f"[local] schedule returned {number} for round {round}, but a step-size factor "
                "must be at least 0. Return a number of 0 or more."
            )
        return number

    def participants(self, round: int) -> np.ndarray:
        """Return the sorted numbers of the clients that take part in a round.

        By default, K of the N clients are drawn uniformly without replacement. A Poisson cohort may
        be empty, and stays the same until `forget` is called. With simulated devices, the result
        contains the clients whose replies are used.
        """
        if self.fixed is not None:
            return np.sort(self.fixed[round])
        if self.timetable is not None:
            return self.timetable.answered[round]
        if round in self._cohorts:
            return self._cohorts[round]
        rng = generator(self.seed, Draw.SCHEDULE, round=round)
        if not self.poisson:
            return np.sort(rng.choice(self.clients, self.per_round, replace=False))
        from fedmuon.privacy.noise import poisson_rows, secret_stream  # only private runs need it

        stream = secret_stream(self.secret) if self.secret else rng
        self._cohorts[round] = poisson_rows(stream, self.clients, self.per_round / self.clients)
        return self._cohorts[round]

    def forget(self, round: int) -> None:
        """Forget the secret cohort of this round, so that `participants` draws a new cohort.

        Call this function before a round is repeated after a private release.
        """
        self._cohorts.pop(round, None)

    def schedule(self) -> np.ndarray:
        """Return the participants of all rounds as an array [R, K]."""
        if self.poisson:
            raise InputError(
                "[privacy] cohorts = 'poisson' draws the clients of a round only when the round "
                "begins, so no list of all rounds exists in advance. Set cohorts = 'fixed'."
            )
        if self.biased:
            raise InputError(BIASED)
        return self._schedule

    @cached_property
    def _schedule(self) -> np.ndarray:
        drawn = np.stack([self.participants(round) for round in range(self.rounds)])
        drawn.flags.writeable = False
        return drawn

    def steps_of(self, size: int) -> int:
        """Return the number of local steps in a round for a client with `size` samples."""
        if not self.epochs:
            return self.steps
        return max(1, math.ceil(round(self.epochs * size / (self.batch or size), 9)))

    def turn(self, round: int, client: int, step: int) -> int:
        """Return how many steps a client took before this step, counted over all rounds."""
        return int((self.schedule()[:round] == client).sum()) * self.steps + step

    def rows(self, round: int, client: int, step: int, size: int) -> np.ndarray | None:
        """Draw the row numbers of a client's mini-batch.

        The result None means that the mini-batch contains all rows.
        """
        if self.batch == 0 or self.batch >= size:
            return None
        rng = generator(self.seed, Draw.BATCH, round=round, client=client, step=step)
        return rng.choice(size, self.batch, replace=False)

    def keys(
        self, round: int, client: int, step: int, rows: np.ndarray | None, size: int
    ) -> np.ndarray:
        """Return the keys of the dropout masks for the samples in `rows`.

        If `rows` is None, return the keys for all samples of the client.
        """
        rng = generator(self.seed, Draw.DROPOUT, round=round, client=client, step=step)
        return sample_keys(rng, rows, size)

    def draws(self, round: int, client: int, step: int) -> Callable[..., np.random.Generator]:
        """Return a function that creates the random generators of one local step of a client."""
        return partial(generator, self.seed, round=round, client=client, step=step)


def as_factor(found: Any) -> float | str:
    """Convert a number, or an array of one number, to a float, and any other value to text."""
    held = found.detach() if hasattr(found, "detach") else found
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):  # not one number
        if isinstance(held, SupportsFloat):
            return float(held)
    return found if isinstance(found, str) else plain(found, 60)
