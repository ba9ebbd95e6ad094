"""Canaries in a run: gradients that nobody else has, added to its clipped sums by fair coins.

A canary takes the place of a sample: when a Poisson lot draws it, its gradient joins the others'
before the noise, or nothing does, as its coin says. In every parameter tensor that gradient has one
entry, of a sign and at a place that are public, and so long that every clipping rule cuts it to its
bound: the example of most influence. Lots, sums, noise and all that follows are the run's own; so
are evaluations, which see the samples that were there before.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.errors import InputError
from fedmuon.federated.shards import Shards
from fedmuon.privacy.mechanism import Mechanism
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.clipping import Clipping
from fedmuon.transforms.base import Chain, Context, Link, State
from fedmuon.transforms.recipes import Recipe

MARK = 2**32  # times the canary's number, added to its label
SLIGHT, MOST_POINTS = 0.1, 16  # of the noise's own variance; points of an integral
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
            each = [_places(rng, value[0].numel(), n) for n in np.bincount(clients)]
            places[name] = torch.from_numpy(np.concatenate(each)).to(value.device)
            drawn = torch.from_numpy(rng.choice([-1.0, 1.0], count))
            signs[name] = drawn.to(value.device, value.dtype)
        return cls(rows, clients, rng.random(count) < 0.5, places, signs)

    def marked(self, shards: Shards) -> Shards:
        """The shards with labels that tell a canary and its number."""
        if shards.labels.dtype != torch.int64:
            raise InputError(
                "canaries are known by their labels, and these targets are no classes: audit a run "
                "with labels of whole numbers"
            )
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


def _places(rng: np.random.Generator, entries: int, count: int) -> np.ndarray:
    """Random entries for a client's canaries, each taken twice only when all are."""
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


@dataclass(eq=False)
class Auditor:
    """Who sees every release and knows the canaries' gradients, but no coin.

    A release is R = (sum + noise) / lot. In each tensor the entry at a canary's place is, but for
    the canary, about N(0, v) with v the mean square of all entries of lot R, and at least the
    noise's own variance. With the canary in the lot the logarithm of the likelihood ratio is

        x = y - s / 2,    y = sum_w a_w z_w / v_w,    s = sum_w a_w^2 / v_w,

    where z_w is lot R_w along the canary, of length a_w. As lots are secret, one release says
    ln(1 - q + q e^x), and a score is the sum over releases.
    """

    canaries: Canaries
    mechanism: Mechanism
    rates: np.ndarray  # by client
    found: dict[tuple[int, int, int], tuple[np.ndarray, float]] = field(default_factory=dict)

    def watching(self, recipe: Recipe) -> Recipe:
        """The recipe, whose releases are seen here before its chain goes on."""
        links = tuple(_watched(link, self.look) for link in recipe.chain.links)
        return dataclasses.replace(recipe, chain=Chain(links))

    def look(self, released: Params, draws: Sequence[Callable[..., Any]]) -> None:
        """At what the clients of a cohort release, one draw and one row of the stack a client."""
        for k, draw in enumerate(draws):
            assert isinstance(draw, partial)
            _, round, client, step = draw.args
            one = {name: value[k] for name, value in released.items()}
            self.found[round, client, step] = self._along(one, self.of[client])

    def _along(self, released: Params, own: Canaries) -> tuple[np.ndarray, float]:
        """y of these canaries, and s."""
        least = (self.mechanism.noise * self.mechanism.clipping.bound) ** 2
        lot, y, s = self.mechanism.lot, torch.zeros(len(own.rows)), 0.0
        seen = own.along(released)
        for name, length in self.canaries.lengths(self.mechanism.clipping).items():
            spread = max(least, lot**2 * float(released[name].square().mean()))
            y += (length * lot / spread) * seen[name].float().cpu()
            s += length**2 / spread
        return y.numpy(), s

    @cached_property
    def of(self) -> dict[int, Canaries]:
        """The canaries of each client."""
        return {client: self.canaries.of(client) for client in range(len(self.rates))}

    def scores(self) -> np.ndarray:
        """The sums over all releases [m]."""
        total = np.zeros(len(self.canaries.rows))
        for client in range(len(self.rates)):
            seen = [one for (_, who, _), one in self.found.items() if who == client]
            if seen:
                y, s = (np.stack(part) for part in zip(*seen, strict=True))
                total[self.canaries.clients == client] = told(y, s, self.rates[client])
        return total

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """From the model alone, [1, ...] before and after: how far it went against the gradient of
        each canary, in units of all entries' root mean square, less the median."""
        moved = {name: (first[name] - last[name])[0] for name in first}
        every = self.canaries.along(moved)
        scale = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in moved.items()}
        found = sum(value.double().cpu().numpy() / scale[name] for name, value in every.items())
        return np.asarray(found - np.median(found))


def told(y: np.ndarray, s: np.ndarray, rate: float) -> np.ndarray:
    """The log-likelihood ratio of y [T, m] with the canary, (1 - q) N(b, s_t) + q N(b + s_t, s_t),
    and without it, N(b, s_t).

    Here b is what other samples do at a canary's places in every release: N(0, t^2), where t^2 is
    what the variance over canaries of the mean over time has beyond noise and canaries. Without it
    the ratio is sum_t ln(1 - q + q exp(y_t - s_t / 2)); else b is integrated out, on a grid around
    its mean given y, wide enough for both cases.
    """
    steps, mean = len(y), float(s.mean())
    ours = (rate * mean) ** 2 / 4 + rate * (1 - rate) * mean**2 / steps / 2
    shared = float(np.var(y.mean(0))) - mean / steps - ours
    if shared <= SLIGHT * mean / steps:
        return _ratio(y - s[:, None] / 2, rate)
    precision = float((1 / s).sum()) + 1 / shared
    center, spread = (y / s[:, None]).sum(0) / precision, precision**-0.5
    low = -rate * mean / spread - 3
    grid = np.linspace(low, 3, max(7, min(MOST_POINTS, math.ceil(3 - low)))) * spread
    # Up to what no b changes, ln P(b | y) without the canary is -(b - center)^2 precision / 2.
    weights = -(grid**2) * precision / 2
    within = [
        weight + _ratio(y - (center + b) - s[:, None] / 2, rate)
        for b, weight in zip(grid, weights, strict=True)
    ]
    return np.logaddexp.reduce(within) - np.logaddexp.reduce(weights)


def _ratio(x: np.ndarray, rate: float) -> np.ndarray:
    """sum_t ln(1 - q + q e^x)."""
    return np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + x).sum(0)


def _watched(link: Link, look: Callable[..., None]) -> Link:
    """The link, what it is given of the data being looked at."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        def released(points: Points) -> Any:
            found = context.released(points)
            look(found.gradient, context.draws)
            return found

        return link.update(direction, state, dataclasses.replace(context, released=released))

    return dataclasses.replace(link, update=update)
