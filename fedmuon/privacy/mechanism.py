"""One private step of a client: a Poisson lot, clipped sums, noise (000, Algorithm 1)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedmuon.errors import NonFinite
from fedmuon.privacy.accounting import Answer
from fedmuon.privacy.noise import Normal, keyed, poisson_rows, secret, secret_generator
from fedmuon.privacy.release import Released, release
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.clipping import Clipping

REPEATABLE = (
    "Lots and noise follow from the seed (insecure-reproducible-noise): nothing is private."
)
Draws = Callable[..., np.random.Generator]  # draw(what, block=...) of one client's local step


def uncertified(answer: Answer) -> Answer:
    """What is left of an answer where the noise is repeatable."""
    note = f"{REPEATABLE} {answer.note}".strip()
    return dataclasses.replace(answer, certified=False, note=note)


@dataclass(frozen=True)
class Mechanism:
    """How private steps release: sigma = `noise` times the clipping bound, and lots of `lot`
    samples in expectation. Only a `repeatable` one draws from the run's seed."""

    clipping: Clipping
    noise: float
    lot: float
    repeatable: bool = False

    def rate(self, size: int) -> float:
        """The chance of a sample of a client that has `size` of them."""
        return min(1.0, self.lot / size)

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
        """What links of a private chain may ask of a step's lots, one lot a client."""
        normal: Normal = keyed(draws) if self.repeatable else secret(len(draws))

        def released(points: Points) -> Released:
            for _, params in points:
                _check(params, "the model is")
            _, sums = task.clipped(points, batches, self.clipping)
            found = release(sums, self.clipping, self.noise, self.lot, normal)
            _check(found.gradient, "what is released is")
            return found

        return released


def _check(public: Params, what: str) -> None:
    """Stop at numbers that are not finite, where all may see them: a stop at a lot's own loss would
    tell of its examples. A sum, which one such number spoils, takes a fifth of a look at each."""
    if not all(math.isfinite(float(value.sum())) for value in public.values()):
        raise NonFinite(f"{what} not finite in a private step: lower [local] lr")
