"""Who guesses the coins of canaries among examples: all releases are seen, and nothing else of a
run."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fedmuon.experiments.auditing.audit_limits import Claimed
from fedmuon.experiments.auditing.canary_injection import Canaries, Planted
from fedmuon.experiments.auditing.likelihood_ratio import log_ratio
from fedmuon.federated.accountant import delta_of, rounds_taken
from fedmuon.federated.rounds import Engine, begin, run_rounds
from fedmuon.optim.chain import Chain, Context, Link, State
from fedmuon.optim.recipe import Recipe
from fedmuon.privacy.audit import Setting
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.runs.loop import Run
from fedmuon.tasks.base import Params, Points


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
    adjacency = "zero-out"

    @classmethod
    def drawn(cls, run: Run, count: int, rng: np.random.Generator) -> "Auditor":
        """With so many canaries among the samples of the run."""
        experiment, sizes = run.experiment, run.data.sizes
        mechanism = experiment.recipe.mechanism
        assert mechanism is not None
        template = begin(experiment.recipe, experiment.task, run.config.federation.seed).params
        canaries = Canaries.drawn(count, experiment.shards, template, rng)
        return cls(canaries, mechanism, np.array([mechanism.rate(int(n)) for n in sizes]))

    @property
    def included(self) -> np.ndarray:
        """The coins."""
        return self.canaries.included

    @property
    def places(self) -> dict[str, np.ndarray]:
        """Whose places the canaries take."""
        return {"rows": self.canaries.rows}

    def audited(self, run: Run) -> tuple[Run, Engine]:
        """The same run with the canaries in its data and the auditor at its releases."""
        was = run.experiment
        experiment = dataclasses.replace(
            was,
            recipe=self.watching(was.recipe),
            task=Planted(was.task, self.canaries),
            shards=self.canaries.marked(was.shards),
        )
        return dataclasses.replace(run, experiment=experiment), run_rounds

    @property
    def clients(self) -> np.ndarray:
        """Whose samples the canaries are among."""
        return self.canaries.clients

    def claimed(self, run: Run) -> Claimed:
        """What each client's samples are a part of, by the declared mechanism."""
        plan, blocks = run.experiment.plan, self.mechanism.clipping.blocks(self.canaries.places)
        steps = plan.steps * rounds_taken(run.experiment)
        settings = [
            Setting(self.mechanism.noise, float(rate), int(many), blocks)
            for rate, many in zip(self.rates, steps, strict=True)
        ]
        delta = delta_of(run.config, run.data.sizes, self.mechanism)
        return Claimed(settings, delta, self.mechanism.adjacency)

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
            if seen and (own := self.canaries.clients == client).any():
                y, s = (np.stack(part) for part in zip(*seen, strict=True))
                total[own] = log_ratio(y, s, self.rates[client])
        return total

    def scores_of_model(self, first: Params, last: Params) -> np.ndarray:
        """From the model alone, [1, ...] before and after: how far it went against the gradient of
        each canary, in units of all entries' root mean square, less the median."""
        moved = {name: (first[name] - last[name])[0] for name in first}
        every = self.canaries.along(moved)
        scale = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in moved.items()}
        found = sum(value.double().cpu().numpy() / scale[name] for name, value in every.items())
        return np.asarray(found - np.median(found))


def _watched(link: Link, look: Callable[..., None]) -> Link:
    """The link, what it is given of the data being looked at."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        def released(points: Points) -> Any:
            found = context.released(points)
            look(found.gradient, context.draws)
            return found

        return link.update(direction, state, dataclasses.replace(context, released=released))

    return dataclasses.replace(link, update=update)
