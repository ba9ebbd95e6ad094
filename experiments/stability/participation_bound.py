"""The bound on the participation gap: the loss on unseen clients minus that of training clients.

`fedmuon.analysis.theory.client_neighbours` states the theorem and its assumptions. This module
needs only NumPy. The module `participation_gap.py` measures the gap.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedmuon.analysis.theory.client_neighbours import SAME_POPULATION
from fedmuon.analysis.theory.generalization import Bound
from fedmuon.config.load import Config
from fedmuon.data.partition import BY_CLASS
from fedmuon.experiments.tables import listed

NAME = "bound on the participation gap"
DEALT = (
    "[federation] partition = '{}' divides the samples of each class of one data set, so the "
    "clients depend on each other and are not draws from a population of clients. Use data whose "
    "clients are known (partition = 'column')."
)


def dealt_by_class(config: Config) -> str:
    """Return why the clients of this config are no population, or "" if nothing is known.

    A default partition says nothing, because a bound from parameters has no data.
    """
    federation = config.federation
    if federation.partition in BY_CLASS and "partition" in federation.model_fields_set:
        return DEALT.format(federation.partition)
    return ""


def participation_bound(
    config: Config, clients: int, bound_with: Callable[[np.ndarray], Bound]
) -> Bound | None:
    """Return the bound on the participation gap, or None if there is none.

    There is none if neighbours differ in samples, or if the clients are no population.

    Args:
        config: The config.
        clients: Number of training clients N.
        bound_with: A function that returns the bound of the setting for weights p_i.
    """
    if config.stability.unit == "samples" or dealt_by_class(config):
        return None
    return bound_with(np.full(clients, 1 / clients))


def bound_entries(config: Config, bound: Bound | None, refusal: str) -> dict[str, Any]:
    """Return the entries of bound.json about the bound on the participation gap.

    `refusal` is the reason why the setting has no bound at all, or "".
    """
    entries: dict[str, Any] = {"participation_bound": None if bound is None else bound.value}
    if bound is not None:
        return entries | {"participation_assumes": SAME_POPULATION}
    return entries | {"participation_refusal": refusal or dealt_by_class(config)}


def bound_rows(record: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the entries of `bound_entries` as table rows, or [] if neighbours are samples."""
    if "participation_bound" not in record:
        return []
    if record["participation_bound"] is None:
        # Without any bound, the row "no bound" states the reason.
        return [] if record["refusal"] else [(f"no {NAME}", record["participation_refusal"])]
    assumed = record["participation_assumes"]
    return [(NAME, record["participation_bound"]), *listed("it also assumes", [assumed])]
