"""How much a run's releases tell about a unit, from its privacy ledger or from its plan."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmuon.analysis.theory.certified_risk import (
    ReleasedLimit,
    expected_risk,
    released_limit,
    risk_by_profile,
)
from fedmuon.orthogonalize import Uncertified
from fedmuon.privacy.accounting.composition import merge
from fedmuon.privacy.accounting.divergences import relative_entropy, upper_hockey_stick
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms.client_level import EVERYONE
from fedmuon.runs.directory import LEDGERS, RunDirectory

NO_ACCOUNT = (
    "the run has no privacy mechanism, so its model may depend on each sample without limit. Train "
    "with a recipe such as dp-muon and [privacy] noise, or with [privacy] level = 'client'"
)
CUT = (
    "[privacy] max-lot cuts lots, and no relative entropy is proved for lots that are cut. Set "
    "max-lot = 0"
)
NO_NOISE = "a release of the run has no noise. Set [privacy] noise above 0"
BY_INFORMATION, BY_PROFILE = "relative entropy, in expectation", "privacy profile, in expectation"
POINTS = 2**14  # of a grid; upper limits of H_a exceed finer ones, by 0.02% for 100 steps


class ExpectedLimit(NamedTuple):
    """A limit of the expected risk, and the inequality that gave it."""

    value: float
    method: str


@dataclass(frozen=True)
class Account:
    """The releases that depend on each protected unit, and the divergences that they cause.

    Attributes:
        unit: The protected unit, "example" or "client".
        releases: For each client: the releases that depend on one of its samples, or on the client
            itself [N].
        counts: Number of units of each client [N]: its samples, or 1.
    """

    unit: str
    releases: Sequence[tuple[Event, ...]]
    counts: np.ndarray

    @cached_property
    def of_clients(self) -> np.ndarray:
        """Upper limits of KL_a, the relative entropy with and without a unit of each client [N]."""
        different = {events: relative_entropy(events).upper for events in {*self.releases}}
        return np.array([different[events] for events in self.releases])

    @property
    def total(self) -> float:
        """The sum of KL_a over all units."""
        return float(self.of_clients @ self.counts)

    @property
    def units(self) -> int:
        """The number of units."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """KL_0, the mean over all units."""
        return self.total / self.units

    @property
    def shift(self) -> float:
        """The distance of two Gaussians about as different as the runs with a replaced unit."""
        return 2 * math.sqrt(2 * self.mean)

    @property
    def total_variation(self) -> float:
        """The mean total variation distance of the runs with a replaced unit, an upper limit."""
        return float(self.profile(np.zeros(1))[0])

    def of(self, counts: np.ndarray) -> "Account":
        """Return the account of some of the units, with their number for each client [N]."""
        present = np.flatnonzero(counts)
        return Account(self.unit, [self.releases[client] for client in present], counts[present])

    def profile(self, epsilons: np.ndarray, *others: Event) -> np.ndarray:
        """Return upper limits of the mean H_a of replacing one unit, at a = exp(epsilon).

        Args:
            epsilons: The epsilons.
            others: Further releases, which depend on every unit.
        """
        weights: dict[tuple[Event, ...], float] = {}
        for events, count in zip(self.releases, self.counts.tolist(), strict=True):
            weights[events] = weights.get(events, 0.0) + count / self.units
        curve = np.zeros(len(epsilons))
        for events, weight in weights.items():
            replaced = [dataclasses.replace(event, replaced=True) for event in (*events, *others)]
            curve += weight * upper_hockey_stick(replaced, epsilons, POINTS)
        return curve

    def with_train_error(self, noise: float, epsilons: np.ndarray) -> np.ndarray:
        """Return `profile` if the train error is also released, with noise of this deviation."""
        return self.profile(epsilons, Event(1.0, 2 * self.units * noise))

    def released_limit(self, failure: float, guess: float) -> ReleasedLimit:
        """Return the limit of the risk of one run from its released train error."""
        return released_limit(self.with_train_error, self.shift, self.units, failure, guess)

    def expected_limit(self, mean: float) -> ExpectedLimit:
        """Return the smaller limit of E R for E R_hat = mean."""
        epsilons, heights = self.expected_curve
        if not np.isfinite(epsilons).all():
            return ExpectedLimit(1.0, BY_INFORMATION)
        by_information = expected_risk(mean, self.mean)
        by_profile = risk_by_profile(mean, lambda _: heights, epsilons)
        if by_profile < by_information:
            return ExpectedLimit(by_profile, BY_PROFILE)
        return ExpectedLimit(by_information, BY_INFORMATION)

    def expected_risk(self, mean: float) -> float:
        """Return the value of `expected_limit`."""
        return self.expected_limit(mean).value

    @cached_property
    def expected_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The epsilons among which a limit in expectation is minimized, and the profile there."""
        if not math.isfinite(self.shift):
            return np.full(1, math.inf), np.ones(1)
        epsilons = np.linspace(0, 4, 401) * self.shift
        return epsilons, self.profile(epsilons)


def of_ledger(folder: Path, sizes: np.ndarray) -> Account:
    """Return the account of a finished run.

    Raises:
        Uncertified: If the run is not private, or the account has no proved relative entropy.
    """
    if not (folder / LEDGERS[0]).exists():
        raise Uncertified(NO_ACCOUNT)
    ledger = RunDirectory(folder).ledger()
    if ledger.about.get("max_lot"):
        raise Uncertified(CUT)
    unit = "client" if ledger.about.get("unit") == "client" else "example"
    return of_events(unit, events_of(ledger, len(sizes)), sizes)


def events_of(ledger: Ledger, clients: int) -> list[Sequence[Event]]:
    """Return the releases that each client takes part in. Clients without releases have none."""
    known = ledger.clients()
    if EVERYONE in known:  # one account holds for every client
        return [ledger.events(EVERYONE)] * clients
    return [ledger.events(client) if client in known else [] for client in range(clients)]


def of_events(unit: str, events: Sequence[Sequence[Event]], sizes: np.ndarray) -> Account:
    """Return the account of these releases of each client."""
    merged = [tuple(sorted(merge(releases))) for releases in events]
    if any(event.noise_multiplier == 0 for releases in merged for event in releases):
        raise Uncertified(NO_NOISE)
    counts = np.ones(len(sizes)) if unit == "client" else np.asarray(sizes, float)
    return Account(unit, merged, counts)
