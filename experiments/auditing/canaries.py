"""Canaries in real runs, and auditors that guess which canaries were included.

Each canary has a secret coin that decides whether the canary takes part in training. An auditor
sees only the releases: the noisy values that the run publishes. Lots, sums, noise and later
computations are those of the run. Evaluations use the original samples.

# Canaries among the examples

A canary replaces a sample. If a Poisson lot contains the canary, the coin decides whether the
canary's gradient is added before the noise. In every parameter tensor, this gradient has one
nonzero entry, whose position and sign are public. The gradient is so long that every clipping rule
reduces it to its bound, so no example has a larger influence.

# Canaries among the clients

A canary replaces a client. If a cohort contains the canary and the coin includes the canary, the
canary's update changes one entry of the model. The position and the sign of this entry are public.
The update is longer than the bound, so clipping gives it norm C, the maximum for a client.
If the coin excludes the canary, the update is 0 before and after clipping, so all sums are the same
as in a federation without this client (`client_level.py`). The coin therefore tests add-remove
adjacency if cohorts are Poisson samples, and zero-out adjacency otherwise.

Under distributed trust, all but H clients of a cohort may collude: they tell the server what they
sent. The privacy guarantee must also hold against colluding clients. In this audit, clients without
a canary collude, but at least H clients of the cohort do not collude. The messages of the colluding
clients are subtracted. The remaining sum contains the messages of H clients, or of all canaries if
there are more than H canaries. The remaining sum is at least as private as claimed, because H
shares have H/K of the noise variance.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.federated.accountant import delta_of, rounds_taken
from fedmuon.federated.experiment import Engine, Experiment, Round, mean_loss
from fedmuon.federated.rounds import (
    begin,
    client_updates,
    received_message,
    run_rounds,
    sent_reply,
    server_update,
)
from fedmuon.federated.shards import Shards
from fedmuon.federated.traffic import traffic
from fedmuon.optim.chain import Chain, Context, Link, State
from fedmuon.optim.client_privacy import level_of
from fedmuon.optim.recipe import Recipe, ServerRule
from fedmuon.optim.stage import Broadcast, Reply, ServerState
from fedmuon.privacy.audit import Claimed, Setting, log_ratio
from fedmuon.privacy.mechanisms import distributed
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.runs.prepare import Run
from fedmuon.tasks.base import Batch, Params, Points, Task
from fedmuon.tasks.per_example.clipping import Clipping

MARK = 2**32  # a label becomes: label + MARK * (number of the canary)
# Length of a canary's gradient in every tensor, in units of the clipping bound. For a client's
# update, the unit is max(1, bound).
LENGTH = 2.0


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries and their secret coins.

    In the tensor `name`, the gradient of canary i is `signs[name][i] * LENGTH * C` at the entry
    `places[name][i]`, and 0 elsewhere.

    Attributes:
        rows: Indices of the samples that the canaries replace, among all samples [m].
        clients: The clients to which these samples belong [m].
        included: The coins [m]; True includes the canary.
        places: The position of the nonzero entry in each tensor [m].
        signs: The sign of the nonzero entry in each tensor [m].
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
        """Choose the replaced samples, places, signs and coins of the canaries at random."""
        rows = np.sort(rng.choice(len(shards.labels), count, replace=False))
        clients = np.searchsorted(shards.offsets, rows, side="right") - 1
        places, signs = {}, {}
        for name, value in template.items():
            per_client = [distinct_places(rng, value[0].numel(), n) for n in np.bincount(clients)]
            places[name] = torch.from_numpy(np.concatenate(per_client)).to(value.device)
            drawn = torch.from_numpy(rng.choice([-1.0, 1.0], count))
            signs[name] = drawn.to(value.device, value.dtype)
        return cls(rows, clients, rng.random(count) < 0.5, places, signs)

    def mark(self, shards: Shards) -> Shards:
        """Return the shards with labels that show which canary replaces a sample."""
        require_classes(shards)
        labels = shards.labels.clone()
        numbers = torch.arange(1, len(self.rows) + 1, device=labels.device)
        labels[torch.from_numpy(self.rows).to(labels.device)] += MARK * numbers
        return dataclasses.replace(shards, labels=labels)

    def lengths(self, clipping: Clipping) -> dict[str, float]:
        """Return the norm of a canary's clipped gradient in each tensor."""
        long = LENGTH * clipping.bound
        squares = {name: torch.tensor([long * long], dtype=torch.float64) for name in self.places}
        return {name: long * float(factor) for name, factor in clipping.factors(squares).items()}

    def of(self, client: int) -> "Canaries":
        """Return the canaries of one client."""
        mask = self.clients == client
        parts = (
            {name: entries[mask] for name, entries in tensors.items()}
            for tensors in (self.places, self.signs)
        )
        return Canaries(self.rows[mask], self.clients[mask], self.included[mask], *parts)

    def along(self, tensors: Params) -> dict[str, Tensor]:
        """Return the entries of the tensors at the places of the canaries, times their signs."""
        return {
            name: value.reshape(-1).index_select(0, self.places[name]) * self.signs[name]
            for name, value in tensors.items()
        }


def require_classes(shards: Shards) -> None:
    """Raise an error if the targets are not class labels, because only labels can mark canaries."""
    if shards.labels.dtype != torch.int64:
        raise InputError(
            "an audit recognizes canaries by their class labels, but the targets of this run are "
            "not class labels. Audit a run with integer labels."
        )


def distinct_places(rng: np.random.Generator, entries: int, count: int) -> np.ndarray:
    """Choose random places for canaries whose gradients are added up.

    Two canaries get the same place only if there are too few places.
    """
    permutations = [rng.permutation(entries) for _ in range(-(-count // entries))]
    return np.concatenate([np.array([], dtype=int), *permutations])[:count]


@dataclass(frozen=True, eq=False)
class TaskWithCanaries:
    """A task that also adds the included canaries to its clipped sums."""

    task: Task
    canaries: Canaries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def gradient(self, params: Params, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        """Return the gradient of the samples with their original labels."""
        return self.task.gradient(params, [_unmarked(batch) for batch in batches])

    def losses(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the losses of the samples with their original labels."""
        return self.task.losses(params, _unmarked(batch))

    def clipped(
        self, points: Points, batches: Sequence[Batch], clipping: Clipping
    ) -> tuple[Tensor, Params]:
        """Return clipped sums over the samples without a canary and the included canaries.

        A canary's gradient is added once, because this gradient is the same at all points and the
        weights of the points sum to 1.
        """
        others = []
        for batch in batches:
            ordinary = batch.labels < MARK
            keys = None if batch.keys is None else batch.keys[ordinary]
            others.append(Batch(batch.inputs[ordinary], batch.labels[ordinary], keys=keys))
        loss, sums = self.task.clipped(points, others, clipping)
        lengths = self.canaries.lengths(clipping)
        coins = torch.from_numpy(self.canaries.included).to(self.task.device)
        for k, batch in enumerate(batches):
            numbers = torch.div(batch.labels, MARK, rounding_mode="floor") - 1
            numbers = numbers[numbers >= 0]
            present = numbers[coins[numbers]]
            for name, value in sums.items():
                entries = value.new_zeros(value[k].numel())
                signs, places = (
                    tensors[name][present]
                    for tensors in (self.canaries.signs, self.canaries.places)
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
    is approximately N(0, v). The variance v is the mean square of all entries of lot · R, and at
    least the variance of the noise. If the lot contains the canary, the log-likelihood ratio is

        x = y - s / 2,    y = sum_w a_w z_w / v_w,    s = sum_w a_w^2 / v_w.

    Here w numbers the tensors, z_w is the component of lot · R_w along the canary, and a_w is the
    canary's clipped length. Lots are secret and contain an example with probability q, so the
    log-likelihood ratio of one release is ln(1 - q + q e^x). A score is the sum of these ratios.
    """

    canaries: Canaries
    mechanism: Mechanism
    rates: np.ndarray  # sampling rate of each client
    # (round, client, step) -> y for each canary of the client, and s
    found: dict[tuple[int, int, int], tuple[np.ndarray, float]] = field(default_factory=dict)
    adjacency = "zero-out"

    @classmethod
    def draw(cls, run: Run, count: int, rng: np.random.Generator) -> "ExampleAuditor":
        """Choose canaries among the samples of the run at random."""
        experiment, sizes = run.experiment, run.data.sizes
        mechanism = experiment.recipe.mechanism
        assert mechanism is not None
        template = begin(experiment.recipe, experiment.task, run.config.federation.seed).params
        canaries = Canaries.draw(count, experiment.shards, template, rng)
        return cls(canaries, mechanism, np.array([mechanism.rate(int(n)) for n in sizes]))

    @property
    def included(self) -> np.ndarray:
        """Return the secret coins. True means that the canary is included."""
        return self.canaries.included

    @property
    def places(self) -> dict[str, np.ndarray]:
        """Return the samples that the canaries replace."""
        return {"rows": self.canaries.rows}

    def with_canaries(self, run: Run) -> tuple[Run, Engine]:
        """Return the run with canaries, and the engine that executes it.

        The recipe of the returned run shows each release to the auditor.
        """
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
        """Return, for each canary, the client to which it belongs."""
        return self.canaries.clients

    def claim(self, run: Run) -> Claimed:
        """Return the declared settings of the releases that depend on each client's samples."""
        plan, blocks = run.experiment.plan, self.mechanism.clipping.blocks(self.canaries.places)
        steps = plan.steps * rounds_taken(run.experiment)
        settings = [
            Setting(self.mechanism.noise, float(rate), int(count), blocks)
            for rate, count in zip(self.rates, steps, strict=True)
        ]
        delta = delta_of(run.config, run.data.sizes, self.mechanism)
        return Claimed(settings, delta, self.mechanism.adjacency)

    def watching(self, recipe: Recipe) -> Recipe:
        """Return the recipe, changed so that its links show each release to the auditor."""
        links = tuple(
            dataclasses.replace(link, update=partial(self._look_first, link))
            for link in recipe.chain.links
        )
        return dataclasses.replace(recipe, chain=Chain(links))

    def _look_first(
        self, link: Link, direction: Params, state: State, context: Context
    ) -> tuple[Params, State]:
        """Update the link, and show each release to the auditor before the link uses it."""

        def released(points: Points) -> Any:
            releases = context.released(points)
            self.look(releases.gradient, context.draws)
            return releases

        return link.update(direction, state, dataclasses.replace(context, released=released))

    def look(self, released: Params, draws: Sequence[Callable[..., Any]]) -> None:
        """Record the releases of a cohort: `draws` and `released` have one row per client."""
        lot, floor = self.mechanism.lot, (self.mechanism.noise * self.mechanism.clipping.bound) ** 2
        for k, draw in enumerate(draws):
            assert isinstance(draw, partial)
            round, client, step = (draw.keywords[name] for name in ("round", "client", "step"))
            row, canaries = {name: value[k] for name, value in released.items()}, self.of[client]
            y, s, products = torch.zeros(len(canaries.rows)), 0.0, canaries.along(row)
            for name, length in self.canaries.lengths(self.mechanism.clipping).items():
                spread = max(floor, lot**2 * float(row[name].square().mean()))
                y += (length * lot / spread) * products[name].float().cpu()
                s += length**2 / spread
            self.found[round, client, step] = y.numpy(), s

    @cached_property
    def of(self) -> dict[int, Canaries]:
        """Return a dictionary from each client to its canaries."""
        return {client: self.canaries.of(client) for client in range(len(self.rates))}

    def scores(self) -> np.ndarray:
        """Return the log-likelihood ratio of each canary, summed over all releases."""
        total = np.zeros(len(self.canaries.rows))
        for client in range(len(self.rates)):
            releases = [release for (_, owner, _), release in self.found.items() if owner == client]
            if releases and (mask := self.canaries.clients == client).any():
                y, s = (np.stack(part) for part in zip(*releases, strict=True))
                total[mask] = log_ratio(y, s, self.rates[client])
        return total

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """Return scores that use only the first and the last model [1, ...].

        The score of a canary is how far the model moved against the canary's gradient. The move of
        each tensor is divided by the root mean square of the tensor's change. The median of all
        scores is then subtracted.
        """
        moved = {name: (first[name] - last[name])[0] for name in first}
        products = self.canaries.along(moved)
        scale = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in moved.items()}
        scores = sum(value.double().cpu().numpy() / scale[name] for name, value in products.items())
        return np.asarray(scores - np.median(scores))


@dataclass(eq=False)
class ClientAuditor:
    """An auditor that sees every release and knows the canaries' updates, but no coin.

    Under central trust, a release is K times the server's mean. Under local trust, a release is the
    message of one client. Under distributed trust, a release is the part of a sum that colluding
    clients cannot subtract. Let z be the release's entries at the canaries' places, times the
    canaries' signs. Let v be the mean square of all entries, and at least the variance of the
    noise. Then the auditor passes y = C z / v and s = C^2 / v to `fedmuon.privacy.audit.log_ratio`.

    Attributes:
        level: The client-level mechanism.
        clients: The clients that the canaries replace [m].
        included: The coins [m].
        entries: The entry that each canary changes, as an index into the concatenated tensors [m].
        signs: The sign of this change [m].
        seen: The values y, s and rates of each release.
        shares_seen: Under distributed trust, the maximum number of noise shares in a release.
    """

    level: ClientLevel
    clients: np.ndarray
    included: np.ndarray
    entries: np.ndarray
    signs: np.ndarray
    seen: list[tuple[np.ndarray, float, np.ndarray]] = field(default_factory=list)
    shares_seen: int = 0

    @classmethod
    def draw(cls, run: Run, count: int, rng: np.random.Generator) -> "ClientAuditor":
        """Choose canaries among the clients of the run at random."""
        experiment, federation = run.experiment, run.config.federation
        level = level_of(experiment.recipe.stages)
        assert level is not None
        params = begin(experiment.recipe, experiment.task, federation.seed).params
        entries = distinct_places(rng, sum(value[0].numel() for value in params.values()), count)
        clients = np.sort(rng.choice(federation.clients, count, replace=False))
        return cls(level, clients, rng.random(count) < 0.5, entries, rng.choice([-1.0, 1.0], count))

    @property
    def adjacency(self) -> str:
        """Return the adjacency of two federations that differ in one coin."""
        return self.level.adjacency

    @property
    def places(self) -> dict[str, np.ndarray]:
        """Return the clients that the canaries replace."""
        return {"clients": self.clients}

    def with_canaries(self, run: Run) -> tuple[Run, Engine]:
        """Return the run, and an engine whose rounds contain the canaries."""
        return run, self.rounds

    def claim(self, run: Run) -> Claimed:
        """Return the declared settings of all releases to which each client contributes."""
        level, plan = self.level, run.experiment.plan
        counts = (
            np.full(plan.clients, plan.rounds) if level.poisson else rounds_taken(run.experiment)
        )
        noise = level.noise * level.counted
        settings = [Setting(noise, level.rate, int(rounds), 1) for rounds in counts]
        return Claimed(settings, delta_of(run.config, run.data.sizes), level.adjacency)

    def rounds(self, experiment: Experiment, state: ServerState) -> Iterator[Round]:
        """Yield the rounds as `run_rounds` does, with canaries in place of some clients."""
        plan, recipe = experiment.plan, experiment.recipe
        for number in range(state.round, plan.rounds):
            participants = plan.participants(number)
            sent = received_message(recipe, state)
            replies = self._replies(experiment, participants.tolist(), sent)
            # Probability that each canary is in the round's sum, given all public information.
            rates = np.isin(self.clients, participants)
            if self.level.poisson:
                rates = np.full(len(self.clients), self.level.rate)
            if self.level.shared:
                self._look_behind(replies, rates)
            watched = dataclasses.replace(recipe, server=self._watched(recipe.server, rates))
            sizes = traffic(recipe, state, len(participants), replies)
            state = server_update(watched, state, replies, plan.factor_at(number))
            yield Round(state, participants, participants, mean_loss(replies), **sizes)

    def _replies(
        self, experiment: Experiment, participants: list[int], sent: Broadcast
    ) -> list[Reply]:
        """Return the replies of the clients without a canary and of the canaries.

        An included canary replies with the server's model after a change of one entry. Any other
        canary replies with the server's model itself.
        """
        recipe, shards = experiment.recipe, experiment.shards
        number = {int(client): i for i, client in enumerate(self.clients)}
        others = [(client, shards[client]) for client in participants if client not in number]
        replies = client_updates(recipe, experiment.task, experiment.plan, others, sent)
        states = {name: sent.states[name] for name in recipe.returned}
        first = next(iter(sent.params.values()))
        no_loss = first.new_full((len(first),), math.nan)
        for client in participants:
            if client in number:
                canary = number[client]
                params = self._moved(sent.params, canary) if self.included[canary] else sent.params
                reply = Reply(client, params, states, no_loss)
                private = recipe.stages[0].reply(reply, sent, {})  # client privacy comes first
                if self.level.trust == "local":
                    self._look(_apart(sent.params, private.params), self.clients == client)
                other_stages = dataclasses.replace(recipe, stages=recipe.stages[1:])
                replies.append(sent_reply(other_stages, sent, private))
        return replies

    def _moved(self, params: Params, number: int) -> Params:
        """Return the model with the update of canary `number`."""
        moved, place = dict(params), int(self.entries[number])
        for name, value in params.items():
            if 0 <= place < value[0].numel():
                entries = value.new_zeros(value[0].numel())
                entries[place] = LENGTH * max(1.0, self.level.bound) * float(self.signs[number])
                moved[name] = value + entries.view(value.shape[1:])
            place -= value[0].numel()
        return moved

    def _watched(self, rule: ServerRule, rates: np.ndarray) -> ServerRule:
        """Return the server's rule, changed so that the auditor sees the mean first."""

        @wraps(rule)  # so that it asks for the same facts of a round
        def server(old: Params, mean: Params, *states: Any, **facts: Any) -> Any:
            if self.level.trust == "central":
                self._look(self.level.cohort * _apart(old, mean), rates)
            return rule(old, mean, *states, **facts)

        return server

    def _look_behind(self, replies: list[Reply], rates: np.ndarray) -> None:
        """Record the sum of all canaries' messages, plus other messages if there are few canaries.

        The sum contains at least H messages.
        """
        level, ordered = self.level, sorted(replies, key=lambda r: r.client not in self.clients)
        honest = ordered[: max(level.shares, int(rates.sum()))]
        step = distributed.spacing(level.bound, level.noise, level.cohort)
        total = torch.stack([_flat(reply.params) for reply in honest]).sum(0)
        self._look(step * total, rates, len(honest) / level.cohort)
        self.shares_seen = max(self.shares_seen, len(honest))

    def _look(self, moved: Tensor, rates: np.ndarray, share: float = 1.0) -> None:
        """Record one release, which contains the fraction `share` of the noise variance."""
        floor = share * (self.level.noise * self.level.bound) ** 2
        spread = max(floor, float(moved.square().mean()))
        y = self.level.bound * self._along(moved) / spread
        self.seen.append((y, self.level.bound**2 / spread, rates.astype(float)))

    def _along(self, moved: Tensor) -> np.ndarray:
        """Return the entries at the canaries' places, times the canaries' signs."""
        return moved[torch.from_numpy(self.entries)].numpy() * self.signs

    def scores(self) -> np.ndarray:
        """Return the log-likelihood ratio of each canary, summed over all releases."""
        if not self.seen:
            return np.zeros(len(self.clients))
        y, s, rates = (np.stack(part) for part in zip(*self.seen, strict=True))
        return log_ratio(y, s, rates)

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """Return scores that use only the first and the last model [1, ...].

        The score of a canary is how far the model moved in the direction of the canary's update,
        divided by the root mean square of the model's change. The median of all scores is then
        subtracted.
        """
        moved = _apart(first, last)
        scores = self._along(moved) / (float(moved.square().mean().sqrt()) or 1.0)
        return scores - np.median(scores)


def _apart(old: Params, new: Params) -> Tensor:
    """Return the difference new - old of the first replica as one vector."""
    return _flat({name: new[name] for name in old}) - _flat(old)


def _flat(params: Params) -> Tensor:
    """Return the entries of the first replica as one vector."""
    return torch.cat([value[0].double().reshape(-1) for value in params.values()]).cpu()
