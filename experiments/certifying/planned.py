"""The certificate that a private run will have, computed before the run from its account alone."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from fedmuon.analysis.report.numbers import at_most, number
from fedmuon.analysis.theory.checks import positive, probability, share, whole
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.experiments.certifying.account import CUT, NO_ACCOUNT, Account, of_events
from fedmuon.experiments.certifying.rows import GUESS
from fedmuon.experiments.tables import columns
from fedmuon.federated.accountant import (
    PerClient,
    PerExample,
    rounds_taken,
    unit_of,
    with_noise,
)
from fedmuon.federated.build import ResolvedConfig, build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.rounds import begin
from fedmuon.privacy.accounting.composition import event, least_noise
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.tasks.base import Params

ERRORS = (0.05, 0.1, 0.2, 0.4)  # train errors for which the limits are shown
PRECISION = 1e-3
MOST_NOISE = 1e9


@dataclass(frozen=True)
class PlannedRun:
    """The releases that a private run will make.

    Attributes:
        unit: The protected unit, "example" or "client".
        sizes: Number of samples of each client [N].
        noise: The noise multiplier of the config.
        releases: The releases of each client, for this noise.
    """

    unit: str
    sizes: np.ndarray
    noise: float
    releases: Sequence[Sequence[Event]]

    @classmethod
    def of(cls, config: Config) -> "PlannedRun":
        """Build the run of a private config, and collect its releases.

        Raises:
            InputError: If the config is not private, or its account has no relative entropy.
        """
        resolved = resolve(config)
        data = build_data(resolved, read_source(resolved))
        experiment = build_experiment(resolved, data)
        fresh = begin(experiment.recipe, experiment.task, config.federation.seed)
        return cls.of_experiment(resolved, experiment, data.sizes, fresh.params)

    @classmethod
    def of_experiment(
        cls, config: ResolvedConfig, experiment: Experiment, sizes: np.ndarray, params: Params
    ) -> "PlannedRun":
        """Collect the releases of a run that has been built."""
        if not experiment.recipe.private:
            raise InputError(f"There is no certificate before training, because {NO_ACCOUNT}.")
        noisy = with_noise(config, experiment, sizes, params)
        unit = unit_of(noisy, experiment, sizes)
        assert unit is not None
        if config.privacy.max_lot:
            raise InputError(f"There is no certificate before training, because {CUT}.")
        releases = _releases(unit, noisy.privacy.noise, unit.blocks(params))
        kind = "client" if isinstance(unit, PerClient) else "example"
        return cls(kind, sizes, noisy.privacy.noise, releases)

    def with_noise(self, noise: float) -> "PlannedRun":
        """Return the same run with another noise multiplier."""
        scale = noise / self.noise
        releases = [
            [
                dataclasses.replace(release, noise_multiplier=scale * release.noise_multiplier)
                for release in client
            ]
            for client in self.releases
        ]
        return dataclasses.replace(self, noise=noise, releases=releases)

    @property
    def account(self) -> Account:
        """The account of the releases."""
        return of_events(self.unit, self.releases, self.sizes)


def _releases(unit: PerExample | PerClient, noise: float, blocks: int) -> list[list[Event]]:
    """Return the releases of each client, for a noise multiplier above 0."""
    if not noise:
        raise InputError(
            "[privacy] noise = 0 releases exact sums, so there is no certificate. Set noise above "
            "0, or --width."
        )
    plan = unit.experiment.plan
    if isinstance(unit, PerClient):
        level = unit.released
        counts = [plan.rounds] * plan.clients if level.poisson else rounds_taken(unit.experiment)
        return [
            [event(noise * level.counted, level.rate, int(count))] if count else []
            for count in counts
        ]
    mechanism, releases = unit.released, []
    for size, rounds in zip(unit.sizes.tolist(), rounds_taken(unit.experiment), strict=True):
        if not rounds or not size:
            releases.append([])
            continue
        rate, steps = mechanism.rate(size), int(rounds) * plan.steps
        if mechanism.fixed_order is None:
            releases.append([event(noise, rate, steps, blocks)])
        else:  # all lots of a client are one release
            factor = mechanism.fixed_order.alike(steps, round(1 / rate))
            releases.append([event(noise / factor, 1.0, 1, blocks)])
    return releases


def plan(
    config: Config,
    confidence: float = 0.95,
    settings: int = 1,
    width: float | None = None,
    guess: float = GUESS,
) -> Record:
    """Return the limits that a private run will have, for several train errors.

    Args:
        config: The config of the run.
        confidence: The confidence of the limit for one model.
        settings: Number of settings from which the setting is chosen with the same samples.
        width: If set, the smallest noise is searched with which the limit for one model exceeds the
            train error by at most this number, if the train error is the guess.
        guess: The train error that is expected.
    """
    failure = (1 - probability("confidence", confidence)) / whole("settings", settings)
    share("guess", guess)
    if width is not None:
        _require_width(width, guess)
        privacy = config.privacy.model_copy(update={"noise": 1.0, "epsilon": 0.0})
        config = config.model_copy(update={"privacy": privacy})
    planned = PlannedRun.of(config)
    if width is not None:
        planned = planned.with_noise(_noise_for(planned, width, failure, guess))
    account = planned.account
    rows = [
        {
            "train_error": error,
            "estimated": account.expected_risk(error) if settings == 1 else None,
            "certified": account.released_limit(failure, error).risk(error),
        }
        for error in sorted({*ERRORS, guess})
    ]
    return {
        "unit": account.unit,
        "units": account.units,
        "noise": planned.noise,
        "divergence": account.mean,
        "confidence": confidence,
        "settings": settings,
        "guess": guess,
        "width": _width(account, failure, guess),
        "rows": rows,
    }


def _require_width(width: float, guess: float) -> None:
    """Raise InputError unless a limit of the error that exceeds the guess by `width` is below 1."""
    if guess + positive("width", width) < 1:
        return
    if guess == 1:
        raise InputError("with guess 1, no limit of the error is below 1. Choose a smaller guess.")
    raise InputError(
        f"a width of {width:g} says nothing with guess {guess:g}: choose one below {1 - guess:g}"
    )


def _width(account: Account, failure: float, guess: float) -> float:
    """Return by how much the limit for one model exceeds a train error that equals the guess."""
    return account.released_limit(failure, guess).risk(guess) - guess


def _noise_for(planned: PlannedRun, width: float, failure: float, guess: float) -> float:
    """Return the smallest noise for which the limit for one model is within `width`."""

    def widest(noise: float) -> float:
        return _width(planned.with_noise(noise).account, failure, guess)

    least = widest(MOST_NOISE)
    if least > width:
        raise InputError(
            f"a width of {width:g} is impossible with {planned.account.units:,} protected "
            f"{planned.unit}s: even without any signal, the limit for one model is {least:.3g} "
            f"above a train error of {guess:g}. Choose a larger width, or more samples."
        )
    return least_noise(widest, width, 10.0, 2.0, PRECISION)


def table(record: Record) -> Table:
    """Return the record of `plan` as a table for the terminal."""
    rows = [_row(row) for row in record["rows"]]
    title = (
        f"Limits before training: noise {number(record['noise'], 4)}, {record['units']:,} "
        f"{record['unit']}s, KL₀ = {number(record['divergence'], 3)}"
    )
    certified = f"certified at most ({record['confidence']:g})"
    head = ("if the train error is", "estimated at most", certified)
    return columns(title, head, rows, left=0)


def note(record: Record) -> str:
    """Return the text below the table: the `--guess` of each limit, and the width."""
    lines = [
        "Each certified limit is for a --guess that equals the train error of its row.",
        f"With --guess {record['guess']:g}, it is {number(record['width'], 3)} above a train error "
        f"of {record['guess']:g}.",
    ]
    if record["settings"] > 1:
        lines.append(
            f"All certified limits pay for {record['settings']} settings. A limit in expectation "
            "(estimated) holds only for one setting."
        )
    return "\n".join(lines)


def _row(row: Record) -> tuple[str, ...]:
    limits: list[Any] = [row["estimated"], row["certified"]]
    return (
        number(row["train_error"], 4),
        *("-" if limit is None else at_most(limit) for limit in limits),
    )
