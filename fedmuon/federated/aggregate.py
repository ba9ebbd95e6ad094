"""The server's round: average what the clients return, then apply the recipe's rule."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmuon.aggregators import Aggregator
from fedmuon.errors import InputError
from fedmuon.federated.local import Broadcast, Reply, joint
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


def aggregate(
    recipe: Recipe, state: ServerState, replies: Iterable[Reply], factor: float = 1.0
) -> ServerState:
    """X, M <- the recipe's aggregate of the participants' (001 (4), (5)), then the server's rule;
    step sizes were times `factor`.

    Replies are added in the order of the schedule, so that every engine rounds alike.
    """
    mean, states = _combined(recipe, state, sorted(replies, key=lambda reply: reply.client))
    rule = partial(recipe.server, factor=factor) if recipe.scaled else recipe.server
    params, states = rule(state.params, mean, {**state.states, **states})
    return ServerState(state.round + 1, params, states)


def _combined(
    recipe: Recipe, state: ServerState, ordered: Sequence[Reply]
) -> tuple[Params, States]:
    """The participants' aggregate: of models, and of each state that comes back."""
    if recipe.client_level is not None:
        held = joint(recipe, state.params, state.states)
        each = [joint(recipe, reply.params, reply.states) for reply in ordered]
        found = recipe.client_level.released(held, each, state.round)
        return found.pop("model"), found
    states = {
        name: combined(
            recipe.aggregate, [replace(reply, params=reply.states[name]) for reply in ordered]
        )
        for name in recipe.returned
    }
    states |= _followed(recipe, ordered, states)
    return combined(recipe.aggregate, ordered), states


def _followed(recipe: Recipe, replies: Sequence[Reply], states: States) -> States:
    """The states whose links say what averaging makes of them."""
    if recipe.aggregate.shares is None:
        return {}
    squares = sum(share**2 for share in recipe.aggregate.shares(replies))
    return {
        link.name: link.averaged(states[link.name], squares)
        for link in recipe.chain.links
        if link.averaged is not None and link.name in states
    }


def combined(aggregator: Aggregator, replies: Sequence[Reply]) -> Params:
    """What the aggregator makes of the replies; one that knows no stacks sees model by model."""
    like = replies[0].params
    if aggregator.stacked:
        return _checked(aggregator.apply(replies), like)
    found = []
    for s in range(len(next(iter(like.values())))):
        one = {name: value[s] for name, value in like.items()}
        found.append(_checked(aggregator.apply([_alone(reply, s) for reply in replies]), one))
    return {name: torch.stack([one[name] for one in found]) for name in like}


def _alone(reply: Reply, s: int) -> Reply:
    """The reply of one replica."""
    params = {name: value[s] for name, value in reply.params.items()}
    states = {
        link: {name: value[s] for name, value in state.items()}
        for link, state in reply.states.items()
    }
    return replace(reply, params=params, states=states, loss=reply.loss[s])


def _checked(found: Mapping[str, Tensor], like: Params) -> Params:
    """Refuse what is no model like the clients'."""
    if not isinstance(found, Mapping) or set(found) != set(like):
        raise InputError(
            "[federation] aggregate returns no tensor for each parameter: return a mapping of "
            f"{', '.join(sorted(like)[:3])}{', ...' if len(like) > 3 else ''} to tensors"
        )
    for name, value in found.items():
        held = like[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (held.shape, held.dtype):
            raise InputError(
                f"[federation] aggregate returns for {name} what is not {tuple(held.shape)} "
                f"{held.dtype}: return tensors like those of the replies"
            )
    return dict(found)


def mean_loss(replies: Sequence[Reply]) -> np.ndarray:
    """The participants' mean loss, per replica [S]; nan of nobody."""
    if not replies:
        return np.array([math.nan])
    total: Tensor = sum((reply.loss for reply in replies[1:]), start=replies[0].loss)
    return (total / len(replies)).double().cpu().numpy()
