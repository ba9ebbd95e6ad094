"""The server's round: average what the clients return, then apply the recipe's rule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedmuon.federated.local import Broadcast, Reply
from fedmuon.randomness import Draw, generator
from fedmuon.tasks.base import Params, Task
from fedmuon.transforms.base import States
from fedmuon.transforms.recipes import Recipe, initial_states


@dataclass(frozen=True)
class ServerState:
    """The model after `round` rounds, and the server's states."""

    round: int
    params: Params
    states: States


def begin(recipe: Recipe, task: Task, seed: int, stack: int = 1) -> ServerState:
    """The state before round 0: all replicas start from one model."""
    params = task.initial(generator(seed, Draw.INITIAL), stack)
    return ServerState(0, params, initial_states(recipe, params))


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """What every participant of the next round receives."""
    return Broadcast(state.round, state.params, {name: state.states[name] for name in recipe.sent})


def aggregate(recipe: Recipe, state: ServerState, replies: Iterable[Reply]) -> ServerState:
    """X, M <- means over the participants with weight 1/K each (001 (4), (5)), then the rule.

    Replies are added in the order of the schedule, so that every engine rounds alike.
    """
    ordered = sorted(replies, key=lambda reply: reply.client)
    mean = average([reply.params for reply in ordered])
    states = {name: average([reply.states[name] for reply in ordered]) for name in recipe.returned}
    params, states = recipe.server(state.params, mean, {**state.states, **states})
    return ServerState(state.round + 1, params, states)


def average(trees: Sequence[Params]) -> Params:
    """The entrywise mean of K trees."""
    total = {name: value / len(trees) for name, value in trees[0].items()}
    for tree in trees[1:]:
        for name, value in tree.items():
            total[name].add_(value, alpha=1 / len(trees))
    return total


def mean_loss(replies: Sequence[Reply]) -> np.ndarray:
    """The participants' mean loss, per replica [S]."""
    total: Tensor = sum((reply.loss for reply in replies[1:]), start=replies[0].loss)
    return (total / len(replies)).double().cpu().numpy()
