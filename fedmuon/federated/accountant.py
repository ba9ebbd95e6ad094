"""What a private run spends: noise found for a target, a ledger ahead of every round, a summary.

Every client has its own account, since it has its own samples and its own rounds: rate lot / n_i,
or one that is public, E releases a round in which it takes part. Who takes part is public, and
amplifies nothing.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.config import load as tables
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.files import AFRESH
from fedmuon.federated.private_checks import (
    Releasing,
    require_counted,
    require_lot,
    require_one_client,
    require_within,
)
from fedmuon.federated.rounds import Experiment, Round, ServerState
from fedmuon.privacy.accounting import epsilon, loose
from fedmuon.privacy.calibration import noise_for
from fedmuon.privacy.client_level import EACH, EVERYONE
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanism import Mechanism
from fedmuon.privacy.noise_secrecy import CAVEATS, STOPPED, uncertified
from fedmuon.privacy.pairs import Event, hardest
from fedmuon.tasks.base import Params

MOST_DELTA = 1e-5
LOW_BITS = "The noise is in floating point, of whose low bits epsilon does not know."
BEYOND = "More than [privacy] epsilon = {:g}: rounds that were broken off were released again."
DIAGNOSTICS = (
    "Losses and accuracies of this simulation are measured on the data themselves and are not "
    "released: publishing them would cost privacy that no ledger counts."
)
# All that noise was added to, or that follows from it; no other file of a run is for publication.
RELEASED = ("initial.safetensors", "model.safetensors", "momentum.safetensors")
least_noise = cache(noise_for)  # a second of work, and all runs of a suite ask the same


def calibrated(config: Config, experiment: Experiment, sizes: np.ndarray, params: Params) -> Config:
    """The config with the least noise that keeps every client within [privacy] epsilon; a noise
    that is given must do so."""
    privacy, mechanism = config.privacy, experiment.recipe.mechanism
    if mechanism is None:
        return config
    if not mechanism.public_rate:
        require_lot(mechanism.lot, sizes)
    require_one_client(mechanism, config)
    if not privacy.epsilon:
        return config
    blocks, taken = mechanism.clipping.blocks(params), rounds_taken(experiment)
    demands = hardest(  # of noise 1: it is the same for all
        Event(mechanism.rate(int(sizes[i])), 1.0, int(count))
        for i, count in enumerate(taken)
        if count
    )
    steps, goal = experiment.plan.steps, delta_of(config, sizes, mechanism)
    named = mechanism.adjacency
    alike = [_alike(mechanism, one.sampling_probability, one.count * steps) for one in demands]
    if privacy.noise:
        require_within(privacy, [
            epsilon(privacy.noise / over, rate, many, goal, blocks, adjacency=named)
            for over, rate, many in alike
        ])  # fmt: skip
        return config
    noise = max(
        over * least_noise(privacy.epsilon, rate, many, goal, blocks, adjacency=named)[0]
        for over, rate, many in alike
    )
    return config.model_copy(update={"privacy": privacy.model_copy(update={"noise": noise})})


def require_accountable(
    config: Config, experiment: Experiment, sizes: np.ndarray, params: Params
) -> None:
    """Refuse, before anything is written, what would be refused at a release or at the end."""
    mechanism = experiment.recipe.mechanism
    if mechanism is None:
        return
    blocks = mechanism.clipping.blocks(params)
    require_counted(
        mechanism, {mechanism.rate(int(size)) for size in sizes}, experiment.plan.steps, blocks,
        delta_of(config, sizes, mechanism), list(params.values()),
    )  # fmt: skip
    if mechanism.quantile is not None:  # and its noise leaves some for the sums
        mechanism.quantile.of_sums(mechanism.noise, blocks)


def _alike(mechanism: Mechanism, rate: float, steps: int) -> tuple[float, float, int]:
    """(s, rate, steps) of Poisson lots, with s times less noise, that spend the same: lots that
    take turns are one release of all samples."""
    if mechanism.turns is None:
        return 1.0, rate, steps
    return mechanism.turns.alike(steps, round(1 / rate)), 1.0, 1


def answered(
    ledger: Ledger, goal: float, released: Releasing, target: float, stopped: bool, *words: str
) -> dict[str, Any]:
    """What the client that spent most has spent at delta = `goal`, whether that is certified, and
    what else there is to know."""
    known = {"ledger": ledger.head, "released": list(RELEASED)}
    if not released.noise:
        note = f"Without noise nothing is private: epsilon is infinite. {DIAGNOSTICS}"
        return {**known, "epsilon": None, "certified": False, "note": note}
    answers = ledger.epsilons(goal)
    worst = max(answers, key=lambda client: answers[client].upper)
    most = answers[worst]
    for doubt in (CAVEATS[released.secrecy], STOPPED if stopped else ""):
        most = uncertified(most, doubt) if doubt else most
    beyond = BEYOND.format(target) if 0 < target < most.upper else ""
    low = "" if released.on_grid else LOW_BITS
    note = " ".join(filter(None, (most.note, beyond, low, *words, DIAGNOSTICS)))
    clients = {str(named(client)): one.upper for client, one in sorted(answers.items())}
    spent = dataclasses.asdict(most) | {"note": note}
    return {**known, **spent, "client": named(worst), "clients": clients}


def named(client: int) -> int | str:
    """A client of a ledger, where people read it."""
    return EACH if client == EVERYONE else client


def delta_of(config: Config, sizes: np.ndarray, mechanism: Mechanism | None = None) -> float:
    """[privacy] delta, or n^-1.1 of the largest client, or of the public population (003), of a
    `mechanism` of the user's too, and 1e-5 at most: small clients would make it large, and a delta
    near 1 / n_i protects nobody."""
    public = (mechanism or config.privacy).public_population
    return config.privacy.delta or least_delta(public or float(sizes.max()))


def least_delta(population: float) -> float:
    """What [privacy] delta = 0 stands for, of so many examples."""
    return min(MOST_DELTA, population**-1.1)


def mark_of(config: Config) -> str:
    """What tells a run's ledger from that of another config."""
    return hashlib.sha256(tables.dump(config).encode()).hexdigest()


def rounds_taken(experiment: Experiment) -> np.ndarray:
    """How often each client takes part [N]."""
    return np.bincount(experiment.plan.schedule().ravel(), minlength=experiment.plan.clients)


@dataclass(frozen=True)
class Spending:
    """The account of a run; open it before the first release."""

    config: Config
    mechanism: Mechanism
    ledger: Ledger
    sizes: np.ndarray
    blocks: int
    experiment: Experiment

    @classmethod
    def open(
        cls,
        path: Path,
        config: Config,
        experiment: Experiment,
        sizes: np.ndarray,
        state: ServerState,
        head: str | None = None,
    ) -> "Spending":
        """The account of a private run, kept in the file at `path`, which must know all that the
        model of `state` has behind it, saved beside `head`."""
        mechanism = experiment.recipe.mechanism
        assert mechanism is not None
        rates = "public" if mechanism.public_rate else "samples"
        about = mechanism.secrecy, state.round, head, mechanism.adjacency, rates
        turns = None if mechanism.turns is None else mechanism.turns.about
        ledger = Ledger.open(path, mark_of(config), *about, turns)
        if ledger.lost:
            raise InputError(f"{path} {ledger.lost}: {AFRESH}")
        blocks = mechanism.clipping.blocks(state.params)
        return cls(config, mechanism, ledger, sizes, blocks, experiment)

    def ahead(self, rounds: Iterator[Round], done: int) -> Iterator[Round]:
        """The rounds after the first `done`, each in the ledger before anything of it is drawn."""
        plan, blocks = self.experiment.plan, self.blocks
        for number in range(done, plan.rounds):
            chosen = plan.participants(number)
            rates = [self.mechanism.rate(int(self.sizes[client])) for client in chosen]
            self.ledger.begin(number, chosen, rates, self.mechanism.noise, blocks, plan.steps)
            yield next(rounds)

    def summary(self, stopped: bool = False) -> dict[str, Any]:
        """What summary.json says: the client that spent most, and what the number stands on;
        `stopped` says that a callback ended the run."""
        mechanism = self.mechanism
        goal = delta_of(self.config, self.sizes, mechanism)
        about = {
            "noise": mechanism.noise,
            "bound": mechanism.clipping.bound,
            "blocks": self.blocks,
            "lot": mechanism.lot,
            "arithmetic": "grid" if mechanism.on_grid else "continuous",
            "delta": goal,
            **({} if mechanism.quantile is None else mechanism.quantile.about),
            "unit": "example within its client",
            **{name: self.ledger.about[name] for name in ("adjacency", "rate_from", "sampling")},
            **({} if mechanism.turns is None else mechanism.turns.about),
        }
        target = self.config.privacy.epsilon
        words = self._small(), loose(goal, mechanism.public_population or float(self.sizes.max()))
        return about | answered(self.ledger, goal, mechanism, target, stopped, *words)

    def _small(self) -> str:
        """What to know of clients that have fewer samples than a lot."""
        few = int((self.sizes < self.mechanism.lot).sum())
        if not few or self.mechanism.public_rate:
            return ""
        return (
            f"{few} of {len(self.sizes)} clients have fewer samples than a lot: every lot holds "
            f"all of theirs, and their sums are divided by {self.mechanism.lot:g} all the same."
        )
