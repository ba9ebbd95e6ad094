"""Where a local step gets its gradient from: exactly, bounded, or through a privacy mechanism.

An oracle creates the context of each local step for a batch of clients. Mini-batches come from the
plan of the run. Lots and noise of private runs come from the mechanism, and usually from a secret
stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import is_finite
from fedmuon.core.errors import NonFinite
from fedmuon.federated.experiment import Client
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.optim.chain import Context, forbidden_gradient
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.tasks.base import Batch, Params, Task, split_statistics

if TYPE_CHECKING:
    from fedmuon.privacy.mechanisms.gaussian import Mechanism

LARGE = 1e15  # float32 can represent its square, and sums of such squares


class Statistics:
    """The running statistics of norm layers, which the first gradient of a step moves."""

    def __init__(self, now: Params) -> None:
        self.now = now
        self._next: Params = {}

    def move(self, after: Params) -> None:
        """Store the values after the step, unless an earlier gradient of the step did."""
        self._next = self._next or after

    def step(self) -> None:
        """Use the stored values, because the step has ended."""
        self.now, self._next = self._next or self.now, {}


@dataclass(frozen=True)
class Exact:
    """The gradient of the mean loss over each client's mini-batch."""

    task: Task
    plan: RandomnessPlan
    clients: Sequence[Client]
    round: int
    numbers: tuple[int, ...] = ()  # the clients' numbers, if a link asks for them
    samples: Tensor | None = None  # their numbers of samples, if a link or rule asks for them
    stages: tuple[Stage, ...] = ()  # the stages that change samples

    def context(
        self, params: Params, received: Params, step: int, statistics: Statistics
    ) -> Context:
        """Return the context of a local step.

        Args:
            params: The models [K S, ...] before the step.
            received: The models that the clients received.
            step: The number of the step in the round.
            statistics: The running statistics, which the context's first gradient moves.
        """
        rows = [
            self.plan.rows(self.round, client, step, shard.size) for client, shard in self.clients
        ]
        batches = self._batches(step, rows)

        def gradient(at: Params) -> tuple[Tensor, Params]:
            loss, slope = self.task.gradient({**at, **statistics.now}, batches)
            slope, moved = split_statistics(slope)
            statistics.move(moved)
            return loss, self._sound(loss, slope, step)

        draws = [self.plan.draws(self.round, client, step) for client, _ in self.clients]
        return Context(
            *(params, gradient, draws),
            factor=self.plan.factor_at(self.round),
            clients=self.numbers,
            received=received,
            samples=self.samples,
            round=self.round,
        )

    def _batches(self, step: int, rows: Sequence[np.ndarray | None]) -> list[Batch]:
        """Return the samples in these rows of each client, with the keys of dropout masks."""
        pairs = list(zip(rows, self.clients, strict=True))
        batches = [shard.batch(chosen) for chosen, (_, shard) in pairs]
        for stage in self.stages:
            batches = [
                stage.samples(batch, client, self.round)
                for batch, (client, _) in zip(batches, self.clients, strict=True)
            ]
        if not self.task.keyed:
            return batches
        keys = [
            self.plan.keys(self.round, client, step, chosen, shard.size)
            for chosen, (client, shard) in pairs
        ]
        return [
            replace(batch, keys=torch.from_numpy(batch_keys))
            for batch, batch_keys in zip(batches, keys, strict=True)
        ]

    def _sound(self, loss: Tensor, slope: Params, step: int) -> Params:
        """Return the gradient. Raise an error if the loss is not finite."""
        if not is_finite(loss.sum()):
            where = f"clients {[client for client, _ in self.clients]}, round {self.round}"
            raise NonFinite(
                f"the loss is not finite ({where}, step {step}). Lower [local] lr or fix the data."
            )
        return slope


class Bounded(Exact):
    """An exact gradient without NaN, infinite and huge entries, so that no orthogonalizer fails.

    If one client could stop the run, the stop would disclose that client's data.
    """

    def _sound(self, loss: Tensor, slope: Params, step: int) -> Params:
        """Return the gradient with bounded entries."""
        return {
            name: value.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGE, LARGE)
            for name, value in slope.items()
        }


@dataclass(frozen=True)
class Private(Exact):
    """A noisy clipped gradient of a lot. Links can request only this release, and no gradients."""

    mechanism: "Mechanism | None" = None

    def context(
        self, params: Params, received: Params, step: int, statistics: Statistics
    ) -> Context:
        """Return the context of a local step, in which links can make one release."""
        assert self.mechanism is not None
        mechanism, order = self.mechanism, self.mechanism.fixed_order
        draws = [self.plan.draws(self.round, client, step) for client, _ in self.clients]
        turns = [0] * len(self.clients)
        if order is None:
            sizes = [shard.size for _, shard in self.clients]
            rows = [mechanism.rows(*pair) for pair in zip(draws, sizes, strict=True)]
        else:
            turns = [self.plan.turn(self.round, client, step) for client, _ in self.clients]
            rows = [
                order.rows(self.plan.seed, client, turn, shard.size, mechanism.lot)
                for turn, (client, shard) in zip(turns, self.clients, strict=True)
            ]
        release = mechanism.releases(
            self.task, self._batches(step, rows), draws, turns[0], self.round
        )
        return Context(
            *(params, forbidden_gradient, draws, release),
            factor=self.plan.factor_at(self.round),
            clients=self.numbers,
            received=received,
            samples=self.samples,
            round=self.round,
        )


def oracle_of(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    round: int,
    params: Params,
) -> Exact:
    """Return the oracle of a recipe, for clients that start a round from the models `params`."""
    known = any(link.knows_client for link in recipe.chain.links)
    numbers = tuple(client for client, _ in clients) if known else ()
    stages = tuple(stage for stage in recipe.stages if stage.changes_samples)
    settings = (task, plan, clients, round, numbers, _samples(recipe, clients, params), stages)
    if recipe.mechanism is not None:
        return Private(*settings, mechanism=recipe.mechanism)
    return Bounded(*settings) if recipe.isolates else Exact(*settings)


def _samples(recipe: Recipe, clients: Sequence[Client], params: Params) -> Tensor | None:
    """Return n_i for each replica [K S], or None if neither a link nor the client rule asks."""
    if not recipe.knows_samples and not any(link.knows_samples for link in recipe.chain.links):
        return None
    tensor = next(iter(params.values()))
    sizes = tensor.new_tensor([shard.size for _, shard in clients])
    return sizes.repeat_interleave(len(tensor) // len(clients))
