"""The server's round: average what the clients return, then apply the recipe's rule."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.guard import at
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.client import Broadcast, Reply, joint
from fedmuon.optim.aggregators import Aggregator
from fedmuon.optim.chain import States
from fedmuon.optim.recipe_chains import Recipe, aggregate_state, aggregate_states, initial_states
from fedmuon.tasks.base import Params, Task, stacked


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
    with at(state.round):
        ordered = sorted(replies, key=lambda reply: reply.client)
        mean, states, kept = _combined(recipe, state, ordered)
        held = {name: one for name, one in state.states.items() if name not in kept}
        rule = partial(recipe.server, factor=factor) if recipe.scaled else recipe.server
        params, states = rule(state.params, mean, {**held, **states})
        states = {name: one for name, one in states.items() if name in recipe.kept}
        return ServerState(state.round + 1, params, states | kept)


def _combined(
    recipe: Recipe, state: ServerState, ordered: Sequence[Reply]
) -> tuple[Params, States, States]:
    """The participants' aggregate: of models, and of each state that comes back; and the states of
    the aggregator, if it has any."""
    if recipe.client_level is not None:
        held = joint(recipe, state.params, state.states)
        each = [joint(recipe, reply.params, reply.states) for reply in ordered]
        found = recipe.client_level.released(held, each, state.round)
        return found.pop("model"), found, {}
    before = {name: state.states.get(name, {}) for name in aggregate_states(recipe)}
    kept: States = {}

    def made(name: str, replies: Sequence[Reply]) -> Params:
        if not before:
            return combined(recipe.aggregate, replies)
        found, kept[name] = moved_on(recipe.aggregate, replies, before[name])
        return found

    states = {
        name: made(
            aggregate_state(name), [replace(one, params=one.states[name]) for one in ordered]
        )
        for name in recipe.returned
    }
    states |= _followed(recipe, ordered, states)
    return made(aggregate_state(), ordered), states, kept


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
    return _made(aggregator, replies, None)[0]


def moved_on(
    aggregator: Aggregator, replies: Sequence[Reply], state: Params
) -> tuple[Params, Params]:
    """The same of an aggregator with a state, and its next state."""
    return _made(aggregator, replies, state)


def _made(
    aggregator: Aggregator, replies: Sequence[Reply], state: Params | None
) -> tuple[Params, Params]:
    like = replies[0].params
    if aggregator.stacked:
        return _once(aggregator, replies, state, like)
    found, after = [], []
    for s in range(len(next(iter(like.values())))):
        one = {name: value[s] for name, value in like.items()}
        own = None if state is None else {name: value[s] for name, value in state.items()}
        pair = _once(aggregator, [_alone(reply, s) for reply in replies], own, one)
        found.append(pair[0])
        after.append(pair[1])
    return stacked(found), stacked(after)


def _once(
    aggregator: Aggregator, replies: Sequence[Reply], state: Params | None, like: Params
) -> tuple[Params, Params]:
    """One call of the aggregator, whose results must be like what it was given."""
    if state is None:
        return _checked(aggregator.apply(replies), like), {}
    found, after = aggregator.apply(replies, dict(state))
    kept = _checked(after, state, "its state")  # in memory of its own: a file has no tensor twice
    return _checked(found, like), {name: value.clone() for name, value in kept.items()}


def _alone(reply: Reply, s: int) -> Reply:
    """The reply of one replica."""
    params = {name: value[s] for name, value in reply.params.items()}
    states = {
        link: {name: value[s] for name, value in state.items()}
        for link, state in reply.states.items()
    }
    return replace(reply, params=params, states=states, loss=reply.loss[s])


def _checked(found: Mapping[str, Tensor], like: Params, what: str = "each parameter") -> Params:
    """Refuse what is no model like the clients', or no state like the one before."""
    if not isinstance(found, Mapping) or set(found) != set(like):
        raise InputError(
            f"[federation] aggregate returns no tensor for {what}: return a mapping of "
            f"{', '.join(sorted(like)[:3])}{', ...' if len(like) > 3 else ''} to tensors"
        )
    for name, value in found.items():
        if not _alike(value, held := like[name]):
            raise InputError(
                f"[federation] aggregate returns for {name} what is not {tuple(held.shape)} "
                f"{held.dtype} on {held.device}: return tensors like those of the replies"
            )
    # A graph of the aggregate's own is dropped; one that the replies brought is followed (adjoint).
    return {
        name: value if like[name].requires_grad else value.detach() for name, value in found.items()
    }


def _alike(value: object, held: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (held.shape, held.dtype, held.device)
        and value.layout == held.layout
    )


def mean_loss(replies: Sequence[Reply]) -> np.ndarray:
    """The participants' mean loss, per replica [S]; nan of nobody."""
    if not replies:
        return np.array([math.nan])
    total: Tensor = sum((reply.loss for reply in replies[1:]), start=replies[0].loss)
    return (total / len(replies)).double().cpu().numpy()
