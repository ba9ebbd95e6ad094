"""Canaries among the examples of a run, and an auditor that guesses their coins.

A canary takes the place of a sample. When a Poisson lot draws it, its coin decides whether its
gradient joins the others before the noise, or nothing does. In every parameter tensor that gradient
has one entry, whose sign and place are public. It is so long that every clipping rule cuts it to
its bound, so it is the example of the largest influence. Lots, sums, noise and all that follows are
the run's own. Evaluations see the samples that were there before. The auditor sees all releases,
and nothing else of a run.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.federated.accountant import delta_of, rounds_taken
from fedmuon.federated.client_data import Shards
from fedmuon.federated.rounds import Engine, begin, run_rounds
from fedmuon.optim.chain import Chain, Context, Link, State
from fedmuon.optim.recipe import Recipe
from fedmuon.privacy.audit import Claimed, Setting, log_ratio
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.runs.loop import Run
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.per_example.clipping import Clipping

MARK = 2**32  # times the canary's number, added to its label
LENGTH = 2.0  # of a canary's gradient in every tensor, in units of the bound


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries and their coins.

    In the tensor `name`, the gradient of canary i is `signs[name][i]` LENGTH C at the entry
    `places[name][i]`, and 0 elsewhere.

    Attributes:
        rows: The samples whose places they take, among all samples [m].
        clients: The clients that hold these samples [m].
        included: The coins [m].
        places: By tensor [m].
        signs: By tensor [m].
    """

    rows: np.ndarray
    clients: np.ndarray
    included: np.ndarray
    places: dict[str, Tensor]
    signs: dict[str, Tensor]

    @classmethod
    def draw(
        cls, count: int, shards: Shards, template: Params, rng: np.random.Generator
    ) -> "Canaries":
        """Draw samples, places, signs and coins."""
        rows = np.sort(rng.choice(len(shards.labels), count, replace=False))
        clients = np.searchsorted(shards.offsets, rows, side="right") - 1
        places, signs = {}, {}
        for name, value in template.items():
            each = [distinct_places(rng, value[0].numel(), n) for n in np.bincount(clients)]
            places[name] = torch.from_numpy(np.concatenate(each)).to(value.device)
            drawn = torch.from_numpy(rng.choice([-1.0, 1.0], count))
            signs[name] = drawn.to(value.device, value.dtype)
        return cls(rows, clients, rng.random(count) < 0.5, places, signs)

    def mark(self, shards: Shards) -> Shards:
        """The shards, with labels that identify each canary."""
        require_classes(shards)
        labels = shards.labels.clone()
        numbers = torch.arange(1, len(self.rows) + 1, device=labels.device)
        labels[torch.from_numpy(self.rows).to(labels.device)] += MARK * numbers
        return dataclasses.replace(shards, labels=labels)

    def lengths(self, clipping: Clipping) -> dict[str, float]:
        """The norm of a canary's clipped gradient in each tensor."""
        long = LENGTH * clipping.bound
        squares = {name: torch.tensor([long * long], dtype=torch.float64) for name in self.places}
        return {name: long * float(one) for name, one in clipping.factors(squares).items()}

    def of(self, client: int) -> "Canaries":
        """The canaries of one client."""
        own = self.clients == client
        parts = (
            {name: one[own] for name, one in held.items()} for held in (self.places, self.signs)
        )
        return Canaries(self.rows[own], self.clients[own], self.included[own], *parts)

    def along(self, tensors: Params) -> dict[str, Tensor]:
        """Entries of the tensors [...] at the canaries' places, times their signs [m]."""
        return {
            name: value.reshape(-1).index_select(0, self.places[name]) * self.signs[name]
            for name, value in tensors.items()
        }


def require_classes(shards: Shards) -> None:
    """Reject targets that cannot carry a mark."""
    if shards.labels.dtype != torch.int64:
        raise InputError(
            "canaries are known by their labels, and these targets are no classes: audit a run "
            "with labels of whole numbers"
        )


def distinct_places(rng: np.random.Generator, entries: int, count: int) -> np.ndarray:
    """Draw entries for the canaries of one sum. None repeats before all are taken."""
    whole = [rng.permutation(entries) for _ in range(-(-count // entries))]
    return np.concatenate([np.array([], dtype=int), *whole])[:count]


@dataclass(frozen=True, eq=False)
class TaskWithCanaries:
    """A task whose clipped sums have the canaries in them. All else is the task's."""

    task: Task
    canaries: Canaries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """The gradient of the samples as they are."""
        return self.task.gradient(params, [_unmarked(batch) for batch in batches])

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The losses of the samples as they are."""
        return self.task.losses(params, _unmarked(batch))

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Clipped sums of the samples that gave no place to a canary, and of the included canaries.

        The weights of the points sum to 1, and a canary's gradient is the same at all points.
        """
        others = []
        for batch in batches:
            kept = batch.labels < MARK
            others.append(Batch(batch.inputs[kept], batch.labels[kept]))
        loss, sums = self.task.clipped(points, others, clipping)
        lengths = self.canaries.lengths(clipping)
        coins = torch.from_numpy(self.canaries.included).to(self.task.device)
        for k, batch in enumerate(batches):
            numbers = torch.div(batch.labels, MARK, rounding_mode="floor") - 1
            numbers = numbers[numbers >= 0]
            there = numbers[coins[numbers]]
            for name, value in sums.items():
                entries = value.new_zeros(value[k].numel())
                signs, places = (
                    of[name][there] for of in (self.canaries.signs, self.canaries.places)
                )
                value[k] += entries.index_add_(0, places, lengths[name] * signs).view_as(value[k])
        return loss, sums


def _unmarked(batch: Batch) -> Batch:
    marked = batch.labels >= MARK
    return dataclasses.replace(batch, labels=torch.where(marked, batch.labels % MARK, batch.labels))


@dataclass(eq=False)
class ExampleAuditor:
    """An auditor that sees every release and knows the canaries' gradients, but no coin.

    A release is R = (sum + noise) / lot. Without the canary, the entry at its place in each tensor
    is about N(0, v). Here v is the mean square of all entries of lot R, at least the noise's own
    variance. With the canary in the lot, the logarithm of the likelihood ratio is

        x = y - s / 2,    y = sum_w a_w z_w / v_w,    s = sum_w a_w^2 / v_w,

    where z_w is lot R_w along the canary, which has length a_w. Lots are secret, so one release
    says ln(1 - q + q e^x). A score is the sum over releases.
    """

    canaries: Canaries
    mechanism: Mechanism
    rates: np.ndarray  # by client
    # (round, client, step) -> y of the client's canaries, and s
    found: dict[tuple[int, int, int], tuple[np.ndarray, float]] = field(default_factory=dict)
    adjacency = "zero-out"

    @classmethod
    def draw(cls, run: Run, count: int, rng: np.random.Generator) -> "ExampleAuditor":
        """Draw canaries among the samples of the run."""
        experiment, sizes = run.experiment, run.data.sizes
        mechanism = experiment.recipe.mechanism
        assert mechanism is not None
        template = begin(experiment.recipe, experiment.task, run.config.federation.seed).params
        canaries = Canaries.draw(count, experiment.shards, template, rng)
        return cls(canaries, mechanism, np.array([mechanism.rate(int(n)) for n in sizes]))

    @property
    def included(self) -> np.ndarray:
        """The coins."""
        return self.canaries.included

    @property
    def places(self) -> dict[str, np.ndarray]:
        """The samples whose places the canaries take."""
        return {"rows": self.canaries.rows}

    def with_canaries(self, run: Run) -> tuple[Run, Engine]:
        """The run with the canaries in its data, and with the auditor at its releases."""
        was = run.experiment
        experiment = dataclasses.replace(
            was,
            recipe=self.watching(was.recipe),
            task=TaskWithCanaries(was.task, self.canaries),
            shards=self.canaries.mark(was.shards),
        )
        return dataclasses.replace(run, experiment=experiment), run_rounds

    @property
    def clients(self) -> np.ndarray:
        """The clients that hold the canaries [m]."""
        return self.canaries.clients

    def claim(self, run: Run) -> Claimed:
        """The releases that each client's samples are a part of, by the declared mechanism."""
        plan, blocks = run.experiment.plan, self.mechanism.clipping.blocks(self.canaries.places)
        steps = plan.steps * rounds_taken(run.experiment)
        settings = [
            Setting(self.mechanism.noise, float(rate), int(many), blocks)
            for rate, many in zip(self.rates, steps, strict=True)
        ]
        delta = delta_of(run.config, run.data.sizes, self.mechanism)
        return Claimed(settings, delta, self.mechanism.adjacency)

    def watching(self, recipe: Recipe) -> Recipe:
        """The recipe. The auditor looks at each release before the chain goes on."""
        links = tuple(
            dataclasses.replace(link, update=partial(self._look_first, link))
            for link in recipe.chain.links
        )
        return dataclasses.replace(recipe, chain=Chain(links))

    def _look_first(
        self, link: Link, direction: Params, state: State, context: Context
    ) -> tuple[Params, State]:
        """Update the link. The auditor looks at each release before the link gets it."""

        def released(points: Points) -> Any:
            found = context.released(points)
            self.look(found.gradient, context.draws)
            return found

        return link.update(direction, state, dataclasses.replace(context, released=released))

    def look(self, released: Params, draws: Sequence[Callable[..., Any]]) -> None:
        """Look at what the clients of a cohort release: one draw and one row of `released` each."""
        lot, least = self.mechanism.lot, (self.mechanism.noise * self.mechanism.clipping.bound) ** 2
        for k, draw in enumerate(draws):
            assert isinstance(draw, partial)
            _, round, client, step = draw.args
            one, own = {name: value[k] for name, value in released.items()}, self.of[client]
            y, s, seen = torch.zeros(len(own.rows)), 0.0, own.along(one)
            for name, length in self.canaries.lengths(self.mechanism.clipping).items():
                spread = max(least, lot**2 * float(one[name].square().mean()))
                y += (length * lot / spread) * seen[name].float().cpu()
                s += length**2 / spread
            self.found[round, client, step] = y.numpy(), s

    @cached_property
    def of(self) -> dict[int, Canaries]:
        """The canaries of each client."""
        return {client: self.canaries.of(client) for client in range(len(self.rates))}

    def scores(self) -> np.ndarray:
        """The log-likelihood ratios of all releases [m]."""
        total = np.zeros(len(self.canaries.rows))
        for client in range(len(self.rates)):
            seen = [one for (_, who, _), one in self.found.items() if who == client]
            if seen and (own := self.canaries.clients == client).any():
                y, s = (np.stack(part) for part in zip(*seen, strict=True))
                total[own] = log_ratio(y, s, self.rates[client])
        return total

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """Scores from the first and the last model [1, ...] alone.

        A score is how far the model moved against the gradient of a canary, in units of the root
        mean square of all entries, minus the median score.
        """
        moved = {name: (first[name] - last[name])[0] for name in first}
        every = self.canaries.along(moved)
        scale = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in moved.items()}
        found = sum(value.double().cpu().numpy() / scale[name] for name, value in every.items())
        return np.asarray(found - np.median(found))
