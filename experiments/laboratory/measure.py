"""What a finished model lost: the gap F - F_hat with its interval, and the plain difference."""

from dataclasses import dataclass

import numpy as np

from fedmuon.analysis import MeasuredGap, label_shares, measured_gap
from fedmuon.config import Config
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import classes_of
from fedmuon.data.partition import weights
from fedmuon.errors import InputError
from fedmuon.federated.simulate import Experiment
from fedmuon.tasks.base import Batch, Params


@dataclass(frozen=True)
class Loss:
    """The gap at the clients' label shares; plain test minus weighted train loss (001, Table 2)."""

    gap: MeasuredGap
    plain: float


def measured_losses(
    config: Config, data: FederatedData, classes: int, experiment: Experiment, params: Params
) -> list[Loss]:
    """The losses of every model of a stack [S, ...]; all share the data of `experiment`.

    Cross-entropy has no range, so the gap of a network comes with the normal approximation.
    """
    interval = "hoeffding" if config.task.name == "matrix" else "normal"
    shards, clients = experiment.shards, len(data.sizes)
    if not len(data.test_labels):
        raise InputError("no sample is held out, so the gap is unknown: leave some for [data] test")
    owner = np.repeat(np.arange(clients), data.sizes)
    shares = label_shares(classes_of(data.labels), owner, clients, max(1, classes))
    chances = weights(data.sizes, config.federation.risk_weights)
    train, test = (
        experiment.task.losses(params, batch)[0].double().cpu().numpy()
        for batch in (Batch(shards.inputs, shards.labels), shards.held_out)
    )
    of_test, found = classes_of(data.test_labels), []
    for fitted, held in zip(train, test, strict=True):
        means = np.bincount(owner, fitted, clients) / data.sizes
        gap = measured_gap(means, chances, shares, held, of_test, interval=interval)
        found.append(Loss(gap, float(held.mean() - gap.empirical)))
    return found
