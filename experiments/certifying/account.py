"""The relative entropy of a run's releases, from its privacy ledger or from its plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmuon.orthogonalize import Uncertified
from fedmuon.privacy.accounting.composition import merge
from fedmuon.privacy.accounting.divergences import relative_entropy
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


@dataclass(frozen=True)
class Divergences:
    """Upper limits of the relative entropy with and without one protected unit.

    Attributes:
        unit: The protected unit, "example" or "client".
        of_clients: For each client: the relative entropy for one of its samples, or for the client
            itself [N].
        counts: Number of units of each client [N]: its samples, or 1.
    """

    unit: str
    of_clients: np.ndarray
    counts: np.ndarray

    @property
    def total(self) -> float:
        """The sum over all units."""
        return float(self.of_clients @ self.counts)

    @property
    def units(self) -> int:
        """The number of units."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """KL_0, the mean over all units."""
        return self.total / self.units

    def of(self, chosen: np.ndarray) -> "Divergences":
        """Return the divergences of the chosen clients, a mask [N]."""
        return Divergences(self.unit, self.of_clients[chosen], self.counts[chosen])


def of_ledger(folder: Path, sizes: np.ndarray) -> Divergences:
    """Return the divergences of a finished run.

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


def of_events(unit: str, events: Sequence[Sequence[Event]], sizes: np.ndarray) -> Divergences:
    """Return the divergences of these releases of each client."""
    values: dict[tuple[Event, ...], float] = {}
    of_clients = []
    for releases in events:
        key = tuple(sorted(merge(releases)))
        if any(event.noise_multiplier == 0 for event in key):
            raise Uncertified(NO_NOISE)
        if key not in values:
            values[key] = relative_entropy(key).upper
        of_clients.append(values[key])
    counts = np.ones(len(sizes)) if unit == "client" else np.asarray(sizes, float)
    return Divergences(unit, np.array(of_clients), counts)
