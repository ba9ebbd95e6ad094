"""Canaries in a run: gradients that nobody else has, added to its clipped sums by fair coins.

A canary takes the place of a sample: when a Poisson lot draws it, its gradient joins the others'
before the noise, or nothing does, as its coin says. In every parameter tensor that gradient has one
entry, of a sign and at a place that are public, and so long that every clipping rule cuts it to its
bound: the example of most influence. Lots, sums, noise and all that follows are the run's own; so
are evaluations, which see the samples that were there before.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.federated.shards import Shards
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.per_example.clipping import Clipping

MARK = 2**32  # times the canary's number, added to its label
LENGTH = 2.0  # of a canary's gradient in every tensor, in units of the bound


@dataclass(frozen=True, eq=False)
class Canaries:
    """`included` [m] are the coins; in the tensor `name` the gradient of canary i is `signs[name]
    [i]` times LENGTH C at the entry `places[name][i]`; it stands for the sample `rows[i]` of all,
    which is one of client `clients[i]`."""

    rows: np.ndarray
    clients: np.ndarray
    included: np.ndarray
    places: dict[str, Tensor]
    signs: dict[str, Tensor]

    @classmethod
    def drawn(
        cls, count: int, shards: Shards, template: Params, rng: np.random.Generator
    ) -> "Canaries":
        """So many, of random samples, places, signs and coins."""
        rows = np.sort(rng.choice(len(shards.labels), count, replace=False))
        clients = np.searchsorted(shards.offsets, rows, side="right") - 1
        places, signs = {}, {}
        for name, value in template.items():
            each = [distinct_places(rng, value[0].numel(), n) for n in np.bincount(clients)]
            places[name] = torch.from_numpy(np.concatenate(each)).to(value.device)
            drawn = torch.from_numpy(rng.choice([-1.0, 1.0], count))
            signs[name] = drawn.to(value.device, value.dtype)
        return cls(rows, clients, rng.random(count) < 0.5, places, signs)

    def marked(self, shards: Shards) -> Shards:
        """The shards with labels that tell a canary and its number."""
        require_classes(shards)
        labels = shards.labels.clone()
        numbers = torch.arange(1, len(self.rows) + 1, device=labels.device)
        labels[torch.from_numpy(self.rows).to(labels.device)] += MARK * numbers
        return dataclasses.replace(shards, labels=labels)

    def lengths(self, clipping: Clipping) -> dict[str, float]:
        """How long the clipped gradient of a canary is in each tensor."""
        long = LENGTH * clipping.bound
        squares = {name: torch.tensor([long * long], dtype=torch.float64) for name in self.places}
        return {name: long * float(one) for name, one in clipping.factors(squares).items()}

    def of(self, client: int) -> "Canaries":
        """Those of one client."""
        own = self.clients == client
        parts = (
            {name: one[own] for name, one in held.items()} for held in (self.places, self.signs)
        )
        return Canaries(self.rows[own], self.clients[own], self.included[own], *parts)

    def along(self, tensors: Params) -> dict[str, Tensor]:
        """The entries of the tensors [...] at the canaries' places, times their signs."""
        return {
            name: value.reshape(-1).index_select(0, self.places[name]) * self.signs[name]
            for name, value in tensors.items()
        }


def require_classes(shards: Shards) -> None:
    """Refuse targets that cannot carry a mark."""
    if shards.labels.dtype != torch.int64:
        raise InputError(
            "canaries are known by their labels, and these targets are no classes: audit a run "
            "with labels of whole numbers"
        )


def distinct_places(rng: np.random.Generator, entries: int, count: int) -> np.ndarray:
    """Random entries for canaries of one sum, each taken twice only when all are."""
    whole = [rng.permutation(entries) for _ in range(-(-count // entries))]
    return np.concatenate([np.array([], dtype=int), *whole])[:count]


@dataclass(frozen=True, eq=False)
class Planted:
    """A task whose clipped sums have the canaries in them; all else is the task's."""

    task: Task
    canaries: Canaries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Of the samples as they are."""
        return self.task.gradient(params, [_unmarked(batch) for batch in batches])

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Of the samples as they are."""
        return self.task.losses(params, _unmarked(batch))

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Of the samples that gave no place to a canary, and of the canaries that are there; the
        weights of the points sum to 1, and a canary's gradient is the same at all of them."""
        others = [_chosen(batch, batch.labels < MARK) for batch in batches]
        loss, sums = self.task.clipped(points, others, clipping)
        lengths = self.canaries.lengths(clipping)
        for k, batch in enumerate(batches):
            there = self._there(batch)
            for name, value in sums.items():
                entries = value.new_zeros(value[k].numel())
                signs, places = (
                    of[name][there] for of in (self.canaries.signs, self.canaries.places)
                )
                value[k] += entries.index_add_(0, places, lengths[name] * signs).view_as(value[k])
        return loss, sums

    def _there(self, batch: Batch) -> Tensor:
        """The numbers of the canaries in a lot whose coins say that they are in the data."""
        numbers = torch.div(batch.labels, MARK, rounding_mode="floor") - 1
        numbers = numbers[numbers >= 0]
        return numbers[self._coins[numbers]]

    @cached_property
    def _coins(self) -> Tensor:
        return torch.from_numpy(self.canaries.included).to(self.task.device)


def _chosen(batch: Batch, kept: Tensor) -> Batch:
    return Batch(batch.inputs[kept], batch.labels[kept])


def _unmarked(batch: Batch) -> Batch:
    marked = batch.labels >= MARK
    return dataclasses.replace(batch, labels=torch.where(marked, batch.labels % MARK, batch.labels))
