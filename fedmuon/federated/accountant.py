"""The privacy account of a run: the noise for a target, the ledger, and the summary.

`RunAccountant` does the work that every private run needs. Two classes do the work that depends on
the protected unit, which is an example or a client:

- `PerExample`: Each client has its own account, because it has its own samples and its own rounds.
  In each of the client's rounds, E steps make E releases, with sampling probability lot / n_i or a
  public probability. The schedule of clients is public, so it does not amplify privacy.
- `PerClient`: A round makes one release, which protects each whole client. In Poisson cohorts, all
  clients are sampled with the same probability K / N, so one account, `EVERYONE`, is valid for
  every client. The account `EVERYONE` contains one release per round. In all other cases (a public
  schedule, local trust, distributed trust), each client has its own account. The client's account
  contains one release, with sampling probability 1, for each of the client's rounds. With
  distributed trust, only the noise shares of the clients assumed to be honest count.

A round is written to the ledger before it starts.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedmuon.config.incompatible import LEAST_DELTA, in_one_process, one_client
from fedmuon.config.load import Config, dump
from fedmuon.config.schema import reads
from fedmuon.core.errors import InputError, rounded_up
from fedmuon.core.files import AFRESH, Record, finite, read_bytes
from fedmuon.federated.build import ResolvedConfig
from fedmuon.federated.experiment import Experiment, Round
from fedmuon.federated.language_model import is_pretrained
from fedmuon.federated.traffic import joint
from fedmuon.optim.chain import States
from fedmuon.optim.client_privacy import ClientPrivacy, level_of
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import ServerState, Trees
from fedmuon.privacy.accounting.composition import (
    LEAST_NOISE,
    Answer,
    account,
    epsilon,
    event,
    loose,
    noise_for,
    require_delta,
)
from fedmuon.privacy.accounting.dominating_pairs import Event, hardest
from fedmuon.privacy.accounting.truncated import account_cut, cut_probability, delta_left
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms import lattice
from fedmuon.privacy.mechanisms.client_level import (
    COHORTS,
    EACH,
    EVERYONE,
    REPLAY,
    ClientLevel,
    leaves,
)
from fedmuon.privacy.mechanisms.distributed import MODULUS
from fedmuon.privacy.mechanisms.fixed_order import ROUNDING
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.privacy.noise import CAVEATS, STOPPED, uncertified
from fedmuon.tasks.base import Params

MOST_DELTA = 1e-5
AIMED = 1e-4  # share of a target epsilon that is left for lots that are cut
LOW_BITS = (
    "The noise has floating-point values. Epsilon does not cover information that the low bits "
    "of these values can reveal."
)
BEYOND = (
    "The spent epsilon is more than [privacy] epsilon = {:g}, because interrupted rounds were "
    "released again."
)
PRETRAINED = (
    "The guarantee assumes that the pretrained weights are public. Epsilon does not cover a text "
    "on which they were trained, even if a client has the same text."
)
PAST_MODELS = (
    "Averages over past models do not change epsilon: past models follow from earlier releases, "
    "and the average gradient of each example is clipped once."
)
NOISE_FLOOR = (
    "The noise floor does not change epsilon: it follows from the noise multiplier and the "
    "momentum coefficient, and not from the data."
)
WINDOWS = (
    "An example is a window that predicts at most {} tokens, and epsilon protects one window. A "
    "longer text is several examples, and a change of its length moves all later windows of the "
    "client. To protect all text of a client, set [privacy] level = 'client'."
)
DIAGNOSTICS = (
    "Losses and accuracies are measured on the data without noise and are not part of the "
    "release. If you publish them, you spend privacy that the ledger does not count."
)
# Only these files may be published, because they contain noise or follow from files that do.
RELEASED = ("initial.safetensors", "model.safetensors", "momentum.safetensors")
RELEASED_AVERAGE = ("average.safetensors",)  # of the released models, with [output] average
cached_noise_for = cache(noise_for)  # a search takes a second, and the runs of a suite repeat it


class Demand(NamedTuple):
    """The input of the privacy accountant for one client: releases that spend the client's epsilon.

    Attributes:
        noise: The noise multiplier that the account uses.
        factor: The noise multiplier in the config divided by `noise`.
        rate: The sampling probability of the releases.
        steps: Number of releases.
    """

    noise: float
    factor: float
    rate: float
    steps: int


@dataclass(frozen=True)
class PerExample:
    """The privacy accounts of a run that protects single examples: one account per client."""

    config: Config
    experiment: Experiment
    sizes: np.ndarray
    released: Mechanism

    @property
    def ledger_about(self) -> tuple[str, Record | None]:
        """Facts that hold for all lines of the ledger, such as the source of the sampling rates."""
        rate_from = "public" if self.released.public_rate else "samples"
        fixed_order, max_lot = self.released.fixed_order, self.released.max_lot
        if max_lot:
            return rate_from, {"max_lot": max_lot, "lot": self.released.lot}
        return rate_from, None if fixed_order is None else fixed_order.about

    def blocks(self, params: Params) -> int:
        """Return the number of blocks in a release. Each block is clipped separately."""
        return self.released.blocks(params)

    def require_possible(self) -> None:
        """Raise an error if the lot or the correlated noise is not possible for these clients.

        A lot must not exceed the samples of the largest client. Correlated noise needs a single
        client and the engine `inline`.
        """
        mechanism = self.released
        if not mechanism.public_rate and mechanism.lot > self.sizes.max():
            raise InputError(
                f"[privacy] lot = {mechanism.lot:g} exceeds the {self.sizes.max()} samples of "
                "the largest client. Lower lot, or raise [data] train."
            )
        if mechanism.fixed_order is not None and mechanism.fixed_order.correlated:
            if self.config.engine.name != "inline":
                raise InputError(in_one_process(self.config))
            if self.config.federation.clients > 1:
                raise InputError(one_client(self.config))

    def cut(self) -> float:
        """Return an upper bound, for all clients, of the probability that a lot exceeds max-lot."""
        mechanism, steps = self.released, self.experiment.plan.steps
        if not mechanism.max_lot:
            return 0.0
        round_counts = rounds_taken(self.experiment).tolist()
        return max(
            (
                min(
                    1.0,
                    rounds * steps * cut_probability(size, mechanism.rate(size), mechanism.max_lot),
                )
                for size, rounds in set(zip(self.sizes.tolist(), round_counts, strict=True))
                if rounds and size
            ),
            default=0.0,
        )

    def demands(self) -> list[Demand]:
        """Return the accountant's input for the clients that can spend the largest epsilon."""
        mechanism, steps = self.released, self.experiment.plan.steps
        worst = hardest(  # with noise 1, because all clients use the same noise
            Event(mechanism.rate(int(self.sizes[client])), 1.0, int(rounds))
            for client, rounds in enumerate(rounds_taken(self.experiment))
            if rounds
        )
        demands = []
        for case in worst:
            factor, rate, count = 1.0, case.sampling_probability, case.count * steps
            if mechanism.fixed_order is not None:  # all lots are one release
                factor, rate, count = mechanism.fixed_order.alike(count, round(1 / rate)), 1.0, 1
            demands.append(Demand(self.config.privacy.noise / factor, factor, rate, count))
        return demands

    def releases(self, number: int) -> tuple[list[int], list[float], float, int]:
        """Return a round's ledger entry: the clients, their rates, the noise, and the steps."""
        participants = self.experiment.plan.participants(number).tolist()
        rates = [self.released.rate(int(self.sizes[client])) for client in participants]
        return participants, rates, self.released.noise, self.experiment.plan.steps

    def described(self, spent: Record, ledger: Ledger, blocks: int, delta: float) -> Record:
        """Return the table "privacy" of the summary: the settings, and the spent privacy."""
        mechanism = self.released
        settings = {
            "noise": mechanism.noise,
            "bound": mechanism.clipping.bound,
            "blocks": blocks,
            "lot": mechanism.lot,
            "arithmetic": "grid" if mechanism.on_grid else "continuous",
            "delta": delta,
            **({} if mechanism.quantile is None else mechanism.quantile.about),
            "unit": "example within its client",
            **{name: ledger.about[name] for name in ("adjacency", "rate_from", "sampling")},
            **({} if mechanism.fixed_order is None else mechanism.fixed_order.about),
            **({"max_lot": mechanism.max_lot} if mechanism.max_lot else {}),
        }
        return settings | spent

    def notes(self) -> list[str]:
        """Return notes on windows, methods without cost, and clients smaller than a lot."""
        context = self.config.data.context if reads(self.config, "data.context") else 0
        of_text = [WINDOWS.format(context)] if context else []
        without_cost = [*_without_cost(self.config)]
        few = int((self.sizes < self.released.lot).sum())
        if not few or self.released.public_rate:
            return [*of_text, *without_cost]
        have = "has" if few == 1 else "have"
        return [
            *of_text,
            *without_cost,
            f"{few} of {len(self.sizes)} clients {have} fewer samples than lot = "
            f"{self.released.lot:g}. A client with too few samples uses all its samples in each "
            f"lot, but the sum is still divided by lot = {self.released.lot:g}.",
        ]


def _without_cost(config: Config) -> Iterator[str]:
    """Yield why settings that change a private step do not change its privacy."""
    if reads(config, "privacy.inner-weights") and len(config.privacy.past_weights) > 1:
        yield PAST_MODELS
    if reads(config, "orthogonalizer.noise-floor") and config.orthogonalizer.noise_floor:
        yield NOISE_FLOOR


@dataclass(frozen=True)
class PerClient:
    """The privacy accounts of a run that protects whole clients."""

    config: Config
    experiment: Experiment
    sizes: np.ndarray
    released: ClientLevel

    @property
    def ledger_about(self) -> tuple[str, dict[str, str | int]]:
        """Facts that hold for all lines of the ledger, such as the source of the sampling rates."""
        level = self.released
        facts: dict[str, str | int] = {
            "unit": "client",
            "trust": level.trust,
            "adjacency": level.adjacency,
            "rate_from": "public",
            "sampling": "poisson" if level.poisson else "none",
        }
        if level.shared:
            facts |= {"shares": level.cohort, "honest": level.shares, "modulus": MODULUS}
        return "public", facts

    def blocks(self, params: Params) -> int:
        """Return 1, because an update is clipped as a whole."""
        return 1

    def demands(self) -> list[Demand]:
        """Return the accountant's input for the client that takes part in the most rounds."""
        level, plan = self.released, self.experiment.plan
        rounds = plan.rounds if level.poisson else int(rounds_taken(self.experiment).max())
        factor = (1 + ROUNDING) / level.counted if level.shared else 1.0
        return [Demand(self.config.privacy.noise * level.counted, factor, level.rate, rounds)]

    def releases(self, number: int) -> tuple[list[int], list[float], float, int]:
        """Return a round's ledger entry: the clients, their rates, the noise, and one step."""
        level, plan = self.released, self.experiment.plan
        plan.forget(number)
        participants = [EVERYONE] if level.poisson else plan.participants(number).tolist()
        return participants, [level.rate] * len(participants), level.noise * level.counted, 1

    def described(self, spent: Record, ledger: Ledger, blocks: int, delta: float) -> Record:
        """Return the table "privacy" of the summary, with settings and spent privacy."""
        level = self.released
        settings = {
            "noise": level.noise,
            "bound": level.bound,
            "cohort": level.cohort,
            "delta": delta,
            "arithmetic": "grid" if level.on_grid else "continuous",
        }
        return settings | spent | self.ledger_about[1]

    def notes(self) -> list[str]:
        """Return notes for the user about random draws that must stay secret."""
        if self.released.seed is not None:
            return []
        return [REPLAY, COHORTS] if self.released.poisson else [REPLAY]


def unit_of(
    config: Config, experiment: Experiment, sizes: np.ndarray
) -> PerExample | PerClient | None:
    """Return the accounts for the unit that a run protects, which is an example or a client.

    Return None if the run is not private.
    """
    recipe = experiment.recipe
    if (level := level_of(recipe.stages)) is not None:
        return PerClient(config, experiment, sizes, level)
    if recipe.mechanism is not None:
        return PerExample(config, experiment, sizes, recipe.mechanism)
    return None


def with_noise(
    config: ResolvedConfig, experiment: Experiment, sizes: np.ndarray, params: Params
) -> ResolvedConfig:
    """Set the smallest noise that keeps every client within [privacy] epsilon.

    Args:
        config: The config. If the config sets both noise and epsilon, the noise must be large
            enough for epsilon.
        experiment: The run before its noise is known.
        sizes: Number of samples of each client [N].
        params: The model's parameters.

    Returns:
        The config with the noise, or the same object if no noise has to be computed.

    Raises:
        InputError: If lots or noise cannot be used, or if the noise set in the config spends more
            than epsilon.
    """
    if (unit := unit_of(config, experiment, sizes)) is None:
        return config
    if isinstance(unit, PerExample):  # client-level runs are already checked with their config
        unit.require_possible()
    privacy, adjacency = config.privacy, unit.released.adjacency
    if not privacy.epsilon:
        return config
    delta, blocks = delta_of(config, sizes, experiment.recipe.mechanism), unit.blocks(params)
    cut = unit.cut() if isinstance(unit, PerExample) else 0.0
    if privacy.noise:
        spent = _spent_at_most(unit, blocks, delta, cut)
        if spent > privacy.epsilon:
            raise InputError(
                f"[privacy] noise = {privacy.noise:g} spends epsilon {spent:.4g} ({adjacency}), "
                f"which is more than [privacy] epsilon = {privacy.epsilon:g}. Set only one of "
                "noise and epsilon."
            )
        return config
    target = privacy.epsilon * (1 - AIMED if cut else 1)
    remaining = _left_by_cuts(experiment.recipe.mechanism, delta, cut, target)
    noise = max(
        demand.factor
        * cached_noise_for(
            target, demand.rate, demand.steps, remaining, blocks, adjacency=adjacency
        )[0]
        for demand in unit.demands()
    )
    table = privacy.model_copy(update={"noise": noise})
    return ResolvedConfig(config.model_copy(update={"privacy": table}))


def require_accountable(
    config: Config, experiment: Experiment, sizes: np.ndarray, fresh: ServerState
) -> None:
    """Raise an error if the accountant would reject a later release of the run."""
    if (unit := unit_of(config, experiment, sizes)) is None:
        return
    delta = delta_of(config, sizes, experiment.recipe.mechanism)
    if isinstance(unit, PerClient):
        tensors = leaves(update_like(experiment.recipe, fresh.params, fresh.states))
        require_counted(unit.released, {unit.released.rate}, 1, 1, delta, tensors)
        return
    mechanism, blocks = unit.released, unit.blocks(fresh.params)
    if mechanism.noise and (cut := unit.cut()):
        _left_by_cuts(mechanism, delta, cut, _spent_at_most(unit, blocks, delta, cut))
    rates = {mechanism.rate(int(size)) for size in sizes}
    tensors = list(mechanism.trained(fresh.params).values())
    require_counted(mechanism, rates, experiment.plan.steps, blocks, delta, tensors)
    if mechanism.quantile is not None:  # the private count must leave some noise for the sums
        mechanism.quantile.of_sums(mechanism.noise, blocks)


def update_like(recipe: Recipe, params: Params, states: States) -> Trees:
    """Return tensors like those of a client's update that privacy of clients clips."""
    trees = joint(recipe, params, states)
    for stage in recipe.stages:
        if isinstance(stage, ClientPrivacy):
            break
        trees = stage.returned_like(trees)
    return trees


def _spent_at_most(unit: PerExample | PerClient, blocks: int, delta: float, cut: float) -> float:
    """Return the largest epsilon that any client spends in the planned run.

    `cut` is the probability that at least one lot exceeds max-lot and is therefore cut.
    """
    adjacency = unit.released.adjacency
    answers = [
        account_cut(
            lambda at, demand=demand: epsilon(
                demand.noise, demand.rate, demand.steps, at, blocks, adjacency=adjacency
            ),
            delta,
            cut,
        )
        for demand in unit.demands()
    ]
    return max((answer.upper for answer in answers), default=0.0)


def _left_by_cuts(mechanism: Mechanism | None, delta: float, cut: float, epsilon: float) -> float:
    """Return the part of delta that remains for the releases.

    The rest of delta covers the probability that a lot is cut. Raise an error if less than half of
    delta remains. Rounds that are repeated after an interruption reduce the remaining delta.
    """
    remaining = delta_left(delta, cut, epsilon)
    if cut and mechanism is not None and remaining < max(delta / 2, LEAST_DELTA):
        at = "this noise" if math.isinf(epsilon) else f"epsilon = {epsilon:.3g}"
        helps = ", or the noise" if 4 * cut < delta else ""  # at best, epsilon = 0
        raise InputError(
            f"[privacy] max-lot = {mechanism.max_lot} is too small: with probability up to "
            f"{cut:.2g}, at least one lot of a client is cut. With {at}, these cuts use up more "
            f"than half of delta = {delta:.2g}. Raise max-lot{helps}."
        )
    return remaining


def require_counted(
    released: Mechanism | ClientLevel,
    rates: set[float],
    steps: int,
    blocks: int,
    delta: float,
    tensors: Sequence[Tensor],
) -> None:
    """Raise an error if the accountant cannot compute the privacy of these releases.

    Also raise an error if the releases draw noise on a grid of numbers that is not possible.
    """
    counted, shared = 1.0, False
    if isinstance(released, ClientLevel):  # noise shares have another lattice
        counted, shared = released.counted, released.shared
    if 0 < released.noise * counted < LEAST_NOISE:
        raise InputError(_too_little(released))
    for rate in rates:
        event(released.noise * counted, rate, steps, blocks)
    if released.noise:
        require_delta(delta)
        if released.on_grid and not shared:
            lattice.spacing(1.0, released.noise, sum(tensor[0].numel() for tensor in tensors))


def _too_little(released: Mechanism | ClientLevel) -> str:
    """Return the error message for too little noise, with values that are sufficient."""
    if not (isinstance(released, ClientLevel) and released.shared):
        return (
            f"[privacy] noise = {released.noise:g} is too small for the accountant. Set noise = "
            f"{LEAST_NOISE:g} or more, or noise = 0."
        )
    needed = math.ceil((LEAST_NOISE / released.noise) ** 2 * released.cohort)  # shares
    share = rounded_up(needed / released.cohort)
    few = (
        f", because with honest = {released.honest:g} only {released.shares} of "
        f"{released.cohort} noise shares count"
    ) * (released.shares < released.cohort)
    honest = f", or honest = {share}{' or more' * (share != '1')}" * (needed <= released.cohort)
    return (
        f"[privacy] noise = {released.noise:g} is too small for the accountant{few}. Set noise = "
        f"{rounded_up(LEAST_NOISE / released.counted)} or more{honest}."
    )


def protected(config: Config, sizes: np.ndarray, mechanism: Mechanism | None = None) -> float:
    """Return the number of protected clients or examples, from which delta is chosen.

    With client-level privacy, the result is the number of clients. Otherwise, the result is the
    number of examples of one client.

    Args:
        config: The config. A public population of examples in the config is the result.
        sizes: Number of samples of each client [N]. Without a public population, the function
            returns the size of the largest client.
        mechanism: The user's own mechanism. Its public population overrides the population in the
            config.
    """
    if config.privacy.level == "client":
        return float(config.federation.clients)
    return (mechanism or config.privacy).public_population or float(sizes.max())


def delta_of(config: Config, sizes: np.ndarray, mechanism: Mechanism | None = None) -> float:
    """Return [privacy] delta, or a default value if it is 0.

    The default value is n^-1.1, but at most 1e-5, where n is the result of `protected`. The value
    n^-1.1 is from DiSK. The maximum of 1e-5 matters for clients with few samples, because a delta
    near 1 / n protects nobody.
    """
    return config.privacy.delta or min(MOST_DELTA, protected(config, sizes, mechanism) ** -1.1)


def rounds_taken(experiment: Experiment) -> np.ndarray:
    """Return, for each client, the number of rounds in which the client takes part."""
    return np.bincount(experiment.plan.schedule().ravel(), minlength=experiment.plan.clients)


def epsilons(ledger: Ledger, delta: float, accountant: str = "pld") -> dict[int, Answer]:
    """Return the epsilon of each client in the ledger, for this delta."""
    adjacency, sampling = ledger.about["adjacency"], ledger.about["sampling"]

    @cache
    def answer(spent: tuple[Event, ...], cut: float) -> Answer:
        return account_cut(
            lambda at: account(spent, at, "joint", accountant, adjacency, sampling), delta, cut
        )

    return {
        client: answer(tuple(sorted(ledger.events(client))), ledger.cut(client))
        for client in ledger.clients()
    }


def client_name(client: int) -> int | str:
    """Return the name of a client for messages to the user."""
    return EACH if client == EVERYONE else client


@dataclass(frozen=True)
class RunAccountant:
    """The privacy account of a run. Call `open` before the first release."""

    unit: PerExample | PerClient
    ledger: Ledger
    blocks: int

    @classmethod
    def open(
        cls,
        path: Path,
        config: Config,
        experiment: Experiment,
        sizes: np.ndarray,
        state: ServerState,
        head: str | None = None,
        rounds_begun: int = 0,
        opened: bool = False,
    ) -> "RunAccountant":
        """Open the account of a private run, or create it.

        Args:
            path: The ledger file. It must contain all rounds that `state` includes.
            config: The config, which must contain the noise.
            experiment: The run.
            sizes: Number of samples of each client [N].
            state: The state from which the run continues.
            head: The hash of the ledger's last line when this state was saved.
            rounds_begun: Number of rounds that began, as far as other files show. These can be more
                rounds than `state` includes, and each of them made its releases.
            opened: Whether another file shows that the ledger was opened before.

        Raises:
            InputError: If the ledger is damaged, belongs to another run, or cannot be continued.
        """
        unit = unit_of(config, experiment, sizes)
        assert unit is not None
        released, (rate_from, facts) = unit.released, unit.ledger_about
        # Hash the run's own file if it exists, because earlier versions wrote fewer keys.
        config_file = path.parent / "config.toml"
        content = read_bytes(config_file) if config_file.exists() else dump(config).encode()
        fingerprint = hashlib.sha256(content).hexdigest()
        rounds_done = max(state.round, rounds_begun)
        settings = released.secrecy, rounds_done, head, released.adjacency, rate_from
        ledger = Ledger.open(path, fingerprint, *settings, facts, opened)
        if ledger.lost:
            raise InputError(f"{path} {ledger.lost}: {AFRESH}")
        return cls(unit, ledger, unit.blocks(state.params))

    def ahead(self, rounds: Iterator[Round], done: int) -> Iterator[Round]:
        """Yield the rounds after the first `done` rounds.

        Each round is written to the ledger before its lots and noise are drawn.
        """
        for number in range(done, self.unit.experiment.plan.rounds):
            participants, rates, noise, steps = self.unit.releases(number)
            self.ledger.begin(number, participants, rates, noise, self.blocks, steps)
            yield next(rounds)

    def summary(self, stopped: bool = False) -> Record:
        """Return the table "privacy" of summary.json, for the client with the largest epsilon.

        Args:
            stopped: Whether a callback ended the run early.
        """
        unit, config = self.unit, self.unit.config
        mechanism = unit.experiment.recipe.mechanism
        delta = delta_of(config, unit.sizes, mechanism)
        released = [*RELEASED, *(RELEASED_AVERAGE if config.output.average else ())]
        spent: Record = {"ledger": self.ledger.head, "released": released}
        if not unit.released.noise:
            note = f"Without noise there is no privacy: epsilon is infinite. {DIAGNOSTICS}"
            spent |= {"epsilon": None, "certified": False, "note": note}
            return unit.described(spent, self.ledger, self.blocks, delta)
        answers = epsilons(self.ledger, delta)
        worst = max(answers, key=lambda client: answers[client].upper)
        answer = answers[worst]
        for doubt in (CAVEATS[unit.released.secrecy], STOPPED if stopped else ""):
            answer = uncertified(answer, doubt) if doubt else answer
        target = config.privacy.epsilon
        notes = [
            answer.note,
            BEYOND.format(target) if 0 < target < answer.upper else "",
            "" if unit.released.on_grid else LOW_BITS,
            *unit.notes(),
            PRETRAINED if is_pretrained(config) else "",
            loose(delta, protected(config, unit.sizes, mechanism)),
            DIAGNOSTICS,
        ]
        clients = {
            str(client_name(client)): finite(answers[client].upper) for client in sorted(answers)
        }
        spent |= dataclasses.asdict(answer) | {"note": " ".join(filter(None, notes))}
        spent |= {name: finite(spent[name]) for name in ("epsilon", "lower", "upper", "rdp")}
        spent |= {"client": client_name(worst), "clients": clients}
        return unit.described(spent, self.ledger, self.blocks, delta)
