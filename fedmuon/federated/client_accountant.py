"""What a run at client level spends: one release a round, of which a whole client is a part.

Poisson cohorts are drawn alike, so that one account stands for every client (`EVERYONE`): a
release a round at the rate K / N. Of a schedule that all may know, or under local or distributed
trust, each client has its own: a release at rate 1 in each round in which it takes part, and none
in others. Under distributed trust the shares of clients assumed honest make the noise that counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.config.load import Config
from fedmuon.federated import accountant
from fedmuon.federated.accountant import (
    Spending,
    answered,
    least_delta,
    least_noise,
    mark_of,
    require_counted,
    require_within,
    rounds_taken,
)
from fedmuon.federated.rounds import Experiment, Round, ServerState, joint
from fedmuon.privacy.accounting.composition import epsilon, loose
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.client_level import (
    COHORTS,
    EVERYONE,
    MODULUS,
    REPLAY,
    ClientLevel,
    leaves,
)
from fedmuon.privacy.mechanisms.fixed_order import ROUNDING
from fedmuon.tasks.base import Params


def delta_of(config: Config) -> float:
    """[privacy] delta, or N^-1.1 and 1e-5 at most: the examples are clients."""
    return config.privacy.delta or least_delta(config.federation.clients)


def calibrated(config: Config, experiment: Experiment, sizes: np.ndarray, params: Params) -> Config:
    """The config with the least noise that keeps every client within [privacy] epsilon; a noise
    that is given must do so."""
    level, privacy = experiment.recipe.client_level, config.privacy
    if level is None:
        return accountant.calibrated(config, experiment, sizes, params)
    if not privacy.epsilon:
        return config
    plan, goal = experiment.plan, delta_of(config)
    taken = plan.rounds if level.poisson else int(rounds_taken(experiment).max())
    if privacy.noise:
        counts = privacy.noise * level.counted
        spent = epsilon(counts, level.rate, taken, goal, adjacency=level.adjacency)
        require_within(privacy, [spent])
        return config
    named = level.adjacency
    noise = least_noise(privacy.epsilon, level.rate, taken, goal, adjacency=named)[0]
    if level.shared:
        noise *= (1 + ROUNDING) / level.counted
    return config.model_copy(update={"privacy": privacy.model_copy(update={"noise": noise})})


def require_accountable(
    config: Config, experiment: Experiment, sizes: np.ndarray, fresh: ServerState
) -> None:
    """Refuse, before anything is written, what would be refused at a release or at the end."""
    level = experiment.recipe.client_level
    if level is None:
        accountant.require_accountable(config, experiment, sizes, fresh.params)
        return
    released = joint(experiment.recipe, fresh.params, fresh.states)
    require_counted(level, {level.rate}, 1, 1, delta_of(config), leaves(released))


@dataclass(frozen=True)
class ClientSpending:
    """The account of a run; open it before the first release."""

    config: Config
    level: ClientLevel
    ledger: Ledger
    experiment: Experiment

    @classmethod
    def open(
        cls,
        path: Path,
        config: Config,
        experiment: Experiment,
        state: ServerState,
        head: str | None = None,
    ) -> "ClientSpending":
        """The account in the file at `path`, which must know all that the model of `state` has
        behind it, saved beside `head`."""
        level = experiment.recipe.client_level
        assert level is not None
        known = level.secrecy, state.round, head, level.adjacency, "public"
        ledger = Ledger.open(path, mark_of(config), *known, about(level))
        return cls(config, level, ledger, experiment)

    def ahead(self, rounds: Iterator[Round], done: int) -> Iterator[Round]:
        """The rounds after the first `done`, each in the ledger before anything of it is drawn."""
        plan = self.experiment.plan
        for number in range(done, plan.rounds):
            plan.forget(number)
            chosen = [EVERYONE] if self.level.poisson else plan.participants(number).tolist()
            rates = [self.level.rate] * len(chosen)
            noise = self.level.noise * self.level.counted
            self.ledger.begin(number, chosen, rates, noise, 1, 1)
            yield next(rounds)

    def summary(self, stopped: bool = False) -> dict[str, Any]:
        """What summary.json says: the most that a client spent, and what the number stands on;
        `stopped` says that a callback ended the run."""
        level, goal = self.level, delta_of(self.config)
        head = {"noise": level.noise, "bound": level.bound, "cohort": level.cohort, "delta": goal}
        head["arithmetic"] = "grid" if level.on_grid else "continuous"
        secret = [] if level.seed is not None else [REPLAY, *([COHORTS] if level.poisson else [])]
        target = self.config.privacy.epsilon
        words = *secret, loose(goal, level.clients)
        spent = answered(self.ledger, goal, level, target, stopped, *words)
        return head | spent | about(level)


def about(level: ClientLevel) -> dict[str, str | int]:
    """What every epsilon of such a run is said to be of."""
    shared = {"shares": level.cohort, "honest": level.shares, "modulus": MODULUS}
    return {
        "unit": "client",
        "trust": level.trust,
        "adjacency": level.adjacency,
        "rate_from": "public",
        "sampling": "poisson" if level.poisson else "none",
        **(shared if level.shared else {}),
    }


def account(
    path: Path,
    config: Config,
    experiment: Experiment,
    sizes: np.ndarray,
    state: ServerState,
    head: str | None = None,
) -> Spending | ClientSpending:
    """The account of a private run, of whichever unit."""
    if experiment.recipe.client_level is not None:
        return ClientSpending.open(path, config, experiment, state, head)
    return Spending.open(path, config, experiment, sizes, state, head)
