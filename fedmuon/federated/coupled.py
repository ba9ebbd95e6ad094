"""A run and its replace-one neighbours as one stack that shares every draw (001, section 3)."""

import dataclasses

import numpy as np
import torch

from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.aggregate import begin
from fedmuon.federated.simulate import Engine, Experiment, rounds, simulate
from fedmuon.tasks.base import Params


def coupled(
    experiment: Experiment, neighbours: Neighbours, seed: int, engine: Engine = rounds
) -> Params:
    """The last models [S, ...] of the S data sets in `neighbours`, from one start."""
    shards = dataclasses.replace(experiment.shards, neighbours=neighbours)
    experiment = dataclasses.replace(experiment, shards=shards)
    fresh = begin(experiment.recipe, experiment.task, seed, len(neighbours.client))
    return simulate(experiment, fresh, engine).params


def distances(params: Params, families: int = 1) -> np.ndarray:
    """||X_s - X_0||_F over all matrices for the members s >= 1 of every family, [families, T].

    A stack [families (1 + T), ...] holds its families one after the other, the base run first.
    """
    apart = []
    for value in params.values():
        family = value.unflatten(0, (families, -1))
        apart.append((family[:, 1:] - family[:, :1]).double().flatten(2))
    return torch.linalg.vector_norm(torch.cat(apart, 2), dim=2).cpu().numpy()
