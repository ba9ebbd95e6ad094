"""The embedded engine: the federated loop in this process, with no serialization."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.aggregate import ServerState, aggregate, begin, broadcast, mean_loss
from fedmuon.federated.client import Reply, replies
from fedmuon.federated.plan import Plan
from fedmuon.federated.shards import Shard, Shards
from fedmuon.optim.recipe_chains import Recipe
from fedmuon.tasks.base import Params, Task


@dataclass(frozen=True)
class Experiment:
    """What stays the same from round to round."""

    recipe: Recipe
    task: Task
    plan: Plan
    shards: Shards


@dataclass(frozen=True)
class Fault:
    """A participant that gave no sound reply at an attempt, or had to be asked again, and why."""

    client: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Round:
    """One finished round: the new state, who was to take part, and who answered; the mean loss of
    those is per replica [S]. A client in no `answered` was dropped, which voids the bound."""

    state: ServerState
    participants: np.ndarray
    answered: np.ndarray
    loss: np.ndarray
    faults: tuple[Fault, ...] = ()


Engine = Callable[[Experiment, ServerState], Iterator[Round]]


def rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    """The rounds that remain after `state` (001, Algorithm 1)."""
    plan, shards = experiment.plan, experiment.shards
    for number in range(state.round, plan.rounds):
        participants = plan.participants(number)
        state, found = advanced(experiment, state, [(int(i), shards[int(i)]) for i in participants])
        yield Round(state, participants, participants, mean_loss(found))


def advanced(
    experiment: Experiment, state: ServerState, clients: Sequence[tuple[int, Shard]]
) -> tuple[ServerState, list[Reply]]:
    """The state after the round of these clients, and what they returned."""
    recipe, plan = experiment.recipe, experiment.plan
    found = replies(recipe, experiment.task, plan, clients, broadcast(recipe, state))
    return aggregate(recipe, state, found, plan.factor_at(state.round)), found


def simulate(experiment: Experiment, state: ServerState, engine: Engine = rounds) -> ServerState:
    """Run to the end and return the last state."""
    for finished in engine(experiment, state):
        state = finished.state
    return state


# A run and its replace-one neighbours as one stack that shares every draw (001, section 3).


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
