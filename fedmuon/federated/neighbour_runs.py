"""A run and its neighbours in one stack that shares every draw.

Source: Stability note, section 3.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fedmuon.data.client_neighbours import ClientNeighbours
from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.experiment import Engine, Experiment
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.stage import ServerState
from fedmuon.tasks.base import Params


def run_neighbours(
    experiment: Experiment,
    neighbours: Neighbours | ClientNeighbours,
    seed: int,
    engine: Engine = run_rounds,
) -> Params:
    """Train one replica on each data set in `neighbours`, and return all final models."""
    experiment, fresh = _stacked(experiment, neighbours, seed)
    return simulate(experiment, fresh, engine).params


def neighbour_rounds(
    experiment: Experiment,
    neighbours: Neighbours | ClientNeighbours,
    seed: int,
    engine: Engine = run_rounds,
) -> Iterator[Params]:
    """Train one replica on each data set in `neighbours`, and yield all models of each round."""
    for result in engine(*_stacked(experiment, neighbours, seed)):
        yield result.state.params


def _stacked(
    experiment: Experiment, neighbours: Neighbours | ClientNeighbours, seed: int
) -> tuple[Experiment, ServerState]:
    """Return the experiment on these data sets, and its first state."""
    shards = replace(experiment.shards, neighbours=neighbours)
    experiment = replace(experiment, shards=shards, client_states=ClientStates(), measured=False)
    return experiment, begin(experiment.recipe, experiment.task, seed, neighbours.count)


def retrained(experiment: Experiment, stay: np.ndarray, seed: int) -> Params:
    """Train again with only the samples that the boolean mask `stay` selects.

    The initial model, the schedule and all random draws stay the same. Return the final model, with
    one replica.
    """
    less = replace(experiment, shards=experiment.shards.only(stay))
    return simulate(less, begin(less.recipe, less.task, seed)).params


def distances(params: Params, families: int = 1) -> np.ndarray:
    """Return the distance ||X_s - X_0||_F of each neighbour's model from the base model.

    The tensors contain one family after the other: a base model, followed by its T neighbours. The
    result has the shape [families, T].
    """
    apart = []
    for value in params.values():
        family = value.unflatten(0, (families, -1))
        apart.append((family[:, 1:] - family[:, :1]).double().flatten(2))
    return torch.linalg.vector_norm(torch.cat(apart, 2), dim=2).cpu().numpy()
