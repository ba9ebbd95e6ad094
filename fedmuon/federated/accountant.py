"""What no private run may be, refused before anything of it is written: lots that no client can
fill, noise that no account has or that spends more than its target."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedmuon.config import load as tables
from fedmuon.config.incompatible import IN_ONE_PROCESS, ONE_CLIENT
from fedmuon.config.load import Config
from fedmuon.config.schema import Privacy
from fedmuon.core.errors import InputError, rounded_up
from fedmuon.core.files import AFRESH
from fedmuon.federated.rounds import Experiment, Round, ServerState
from fedmuon.privacy.accounting.calibration import noise_for
from fedmuon.privacy.accounting.composition import (
    LEAST_NOISE,
    Answer,
    epsilon,
    event,
    loose,
    require_delta,
)
from fedmuon.privacy.accounting.dominating_pairs import Event, hardest
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.mechanisms.client_level import EACH, EVERYONE, ClientLevel
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.privacy.noise_visibility import CAVEATS, STOPPED, uncertified
from fedmuon.tasks.base import Params

Releasing = Mechanism | ClientLevel


def require_counted(
    released: Releasing,
    rates: set[float],
    steps: int,
    blocks: int,
    delta: float,
    tensors: list[Tensor],
) -> None:
    """Refuse releases that no account has, or noise that no lattice holds in these tensors.

    An account has noise times its counted part: of K shares, that of H alone."""
    counted, shared = 1.0, False
    if isinstance(released, ClientLevel):
        counted, shared = released.counted, released.shared  # which has a lattice of its own
    if 0 < released.noise * counted < LEAST_NOISE:
        raise InputError(_too_little(released))
    for rate in rates:
        event(released.noise * counted, rate, steps, blocks)
    if released.noise:
        require_delta(delta)
        if released.on_grid and not shared:
            lattice.spacing(1.0, released.noise, sum(one[0].numel() for one in tensors))


def _too_little(released: Releasing) -> str:
    """Which keys give the account its noise, and how much of each is enough."""
    if not (isinstance(released, ClientLevel) and released.shared):
        return (
            f"[privacy] noise = {released.noise:g} is less than an account computes with: set "
            f"noise = {LEAST_NOISE:g} or more, or 0"
        )
    wanted = math.ceil((LEAST_NOISE / released.noise) ** 2 * released.cohort)  # shares of it
    share = rounded_up(wanted / released.cohort)
    few = (
        f", as only {released.shares} of {released.cohort} shares of it count (honest = "
        f"{released.honest:g})"
    ) * (released.shares < released.cohort)
    honest = f", or honest = {share}{' or more' * (share != '1')}" * (wanted <= released.cohort)
    return (
        f"[privacy] noise = {released.noise:g} is too little{few}: set noise = "
        f"{rounded_up(LEAST_NOISE / released.counted)} or more{honest}"
    )


def require_one_client(mechanism: Mechanism, config: Config) -> None:
    """Refuse correlated noise, of a mechanism of the user's, too, where it would not cancel."""
    if mechanism.turns is None or mechanism.turns.band == 1:
        return
    if config.engine.name != "inline":
        raise InputError(IN_ONE_PROCESS)
    if config.federation.clients > 1:
        raise InputError(ONE_CLIENT)


def require_lot(lot: float, sizes: np.ndarray) -> None:
    """Refuse a lot that no client can fill."""
    if lot > sizes.max():
        raise InputError(
            f"[privacy] lot = {lot:g} exceeds the {sizes.max()} samples of the largest client: "
            "lower it, or raise [data] train"
        )


def require_within(privacy: Privacy, answers: list[Answer]) -> None:
    """Refuse a noise that does not reach the target that stands beside it."""
    most = max((one.upper for one in answers), default=0.0)
    if most > privacy.epsilon:
        raise InputError(
            f"[privacy] noise = {privacy.noise:g} spends {most:.4g} ({answers[0].adjacency}), more "
            f"than epsilon = {privacy.epsilon:g}: leave one of them out"
        )


# What a private run spends: noise found for a target, a ledger ahead of every round, a summary.
#
# Every client has its own account, since it has its own samples and its own rounds: rate lot / n_i,
# or one that is public, E releases a round in which it takes part. Who takes part is public, and
# amplifies nothing.

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
