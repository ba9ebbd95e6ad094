"""Canaries among clients, and an auditor that guesses their coins.

A canary takes the place of a client. If a cohort has it and its coin includes it, its update is one
entry of the model, whose sign and place are public. The update is longer than the bound; clipped,
it has norm C, the maximum for a client. Otherwise its update is 0, and so is its clipped update, so
that all sums are those of a federation without the client (`client_level.py`). A coin is therefore
add-remove of a client if cohorts are Poisson samples, and zero-out otherwise. The steps of all
other clients, clipping, noise and the server's rule are the run's own.

Under distributed trust, all but H of a cohort may tell the server what they sent, and the account
must hold against all of them. Here the clients that are no canaries do this, up to all but H. Their
messages are subtracted, and the sum of the others is left: of H clients, or of all canaries if
there are more. This is as private as is claimed, or more: the noise of H shares has H / K of the
variance.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.experiments.auditing.canary_samples import distinct_places
from fedmuon.federated.accountant import delta_of, rounds_taken
from fedmuon.federated.rounds import (
    Broadcast,
    Engine,
    Experiment,
    Reply,
    Round,
    ServerState,
    begin,
    broadcast,
    client_updates,
    mean_loss,
    privatize_reply,
    server_update,
)
from fedmuon.optim.recipe import ServerRule
from fedmuon.privacy.audit import Claimed, Setting, log_ratio
from fedmuon.privacy.mechanisms import distributed
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.runs.loop import Run
from fedmuon.tasks.base import Params

LENGTH = 2.0  # of a canary's update, in units of the bound or of 1, whichever is larger


@dataclass(eq=False)
class ClientAuditor:
    """An auditor that sees every release and knows the canaries' updates, but no coin.

    A release is the server's mean, times K. Under local trust it is the message of each client;
    under distributed trust, what colluders leave of a sum. Let z be its entries at the canaries'
    places, times their signs, and v the mean square of all entries, at least the noise's own
    variance. A release says y = C z / v and s = C^2 / v to `fedmuon.privacy.audit.log_ratio`.

    Attributes:
        level: The mechanism.
        clients: The clients whose places the canaries take [m].
        included: The coins [m].
        entries: The entry that each canary moves, counted over all tensors in turn [m].
        signs: The side to which it moves this entry [m].
        seen: y, s and rates of each release.
        shares_seen: Under distributed trust, the maximum number of shares of noise in a release.
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
        """Draw canaries among the clients of the run."""
        experiment, federation = run.experiment, run.config.federation
        level = experiment.recipe.client_level
        assert level is not None
        params = begin(experiment.recipe, experiment.task, federation.seed).params
        entries = distinct_places(rng, sum(one[0].numel() for one in params.values()), count)
        clients = np.sort(rng.choice(federation.clients, count, replace=False))
        return cls(level, clients, rng.random(count) < 0.5, entries, rng.choice([-1.0, 1.0], count))

    @property
    def adjacency(self) -> str:
        """What a coin changes between two federations."""
        return self.level.adjacency

    @property
    def places(self) -> dict[str, np.ndarray]:
        """The clients whose places the canaries take."""
        return {"clients": self.clients}

    def with_canaries(self, run: Run) -> tuple[Run, Engine]:
        """The run, and an engine whose rounds have the canaries."""
        return run, self.rounds

    def claim(self, run: Run) -> Claimed:
        """The releases that each client is a part of, by the declared mechanism."""
        level, plan = self.level, run.experiment.plan
        many = np.full(plan.clients, plan.rounds) if level.poisson else rounds_taken(run.experiment)
        noise = level.noise * level.counted
        settings = [Setting(noise, level.rate, int(rounds), 1) for rounds in many]
        return Claimed(settings, delta_of(run.config, run.data.sizes), level.adjacency)

    def rounds(self, experiment: Experiment, state: ServerState) -> Iterator[Round]:
        """The rounds of `run_rounds`, with the canaries in their places."""
        plan, recipe = experiment.plan, experiment.recipe
        for number in range(state.round, plan.rounds):
            participants = plan.participants(number)
            found = self._replies(experiment, participants.tolist(), broadcast(recipe, state))
            # The chance of each canary to be in the round's sum, as far as is public.
            rates = np.isin(self.clients, participants)
            if self.level.poisson:
                rates = np.full(len(self.clients), self.level.rate)
            if self.level.shared:
                self._look_behind(found, rates)
            watched = dataclasses.replace(recipe, server=self._watched(recipe.server, rates))
            state = server_update(watched, state, found, plan.factor_at(number))
            yield Round(state, participants, participants, mean_loss(found))

    def _replies(
        self, experiment: Experiment, participants: list[int], sent: Broadcast
    ) -> list[Reply]:
        """Replies of the clients that gave no place to a canary, and of the canaries.

        An included canary moves the model that was sent; another one returns it as it was.
        """
        recipe, shards = experiment.recipe, experiment.shards
        number = {int(client): i for i, client in enumerate(self.clients)}
        others = [(one, shards[one]) for one in participants if one not in number]
        found = client_updates(recipe, experiment.task, experiment.plan, others, sent)
        states = {name: sent.states[name] for name in recipe.returned}
        first = next(iter(sent.params.values()))
        no_loss = first.new_full((len(first),), math.nan)
        for client in participants:
            if client in number:
                one = number[client]
                params = self._moved(sent.params, one) if self.included[one] else sent.params
                own = Reply(client, params, states, no_loss)
                found.append(privatize_reply(recipe, self.level, sent, own))
                if self.level.trust == "local":
                    self._look(_apart(sent.params, found[-1].params), self.clients == client)
        return found

    def _moved(self, params: Params, number: int) -> Params:
        """The model with the update of this canary."""
        found, place = dict(params), int(self.entries[number])
        for name, value in params.items():
            if 0 <= place < value[0].numel():
                entries = value.new_zeros(value[0].numel())
                entries[place] = LENGTH * max(1.0, self.level.bound) * float(self.signs[number])
                found[name] = value + entries.view(value.shape[1:])
            place -= value[0].numel()
        return found

    def _watched(self, rule: ServerRule, rates: np.ndarray) -> ServerRule:
        """The server's rule. The auditor looks at the mean first."""

        def server(old: Params, mean: Params, *states: Any, **factor: Any) -> Any:
            if self.level.trust == "central":
                self._look(self.level.cohort * _apart(old, mean), rates)
            return rule(old, mean, *states, **factor)

        return server

    def _look_behind(self, replies: list[Reply], rates: np.ndarray) -> None:
        """Look at the sum of the canaries, and of others if there are fewer than H."""
        level, ordered = self.level, sorted(replies, key=lambda one: one.client not in self.clients)
        honest = ordered[: max(level.shares, int(rates.sum()))]
        step = distributed.spacing(level.bound, level.noise, level.cohort)
        total = torch.stack([_flat(reply.params) for reply in honest]).sum(0)
        self._look(step * total, rates, len(honest) / level.cohort)
        self.shares_seen = max(self.shares_seen, len(honest))

    def _look(self, moved: Tensor, rates: np.ndarray, share: float = 1.0) -> None:
        """Look at a release [D], which has this share of the noise's variance."""
        least = share * (self.level.noise * self.level.bound) ** 2
        spread = max(least, float(moved.square().mean()))
        y = self.level.bound * self._along(moved) / spread
        self.seen.append((y, self.level.bound**2 / spread, rates.astype(float)))

    def _along(self, moved: Tensor) -> np.ndarray:
        """Entries at the canaries' places, times their signs."""
        return moved[torch.from_numpy(self.entries)].numpy() * self.signs

    def scores(self) -> np.ndarray:
        """The log-likelihood ratios of all releases [m]."""
        if not self.seen:
            return np.zeros(len(self.clients))
        y, s, rates = (np.stack(part) for part in zip(*self.seen, strict=True))
        return log_ratio(y, s, rates)

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """Scores from the first and the last model [1, ...] alone.

        A score is how far the model moved to the side of a canary, in units of the root mean square
        of all entries, minus the median score.
        """
        moved = _apart(first, last)
        found = self._along(moved) / (float(moved.square().mean().sqrt()) or 1.0)
        return found - np.median(found)


def _apart(old: Params, new: Params) -> Tensor:
    """new - old of the first replica, in one row."""
    return _flat({name: new[name] for name in old}) - _flat(old)


def _flat(params: Params) -> Tensor:
    """The first replica's entries, in one row."""
    return torch.cat([value[0].double().reshape(-1) for value in params.values()]).cpu()
