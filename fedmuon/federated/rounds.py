"""Federated rounds: the complete Algorithm 1 of the Stability note.

The plan of the run chooses the clients (`RandomnessPlan.participants`). The server sends them its
model and states (`starts`, `broadcast`). Each client takes E local steps of its chain
(`client_updates`), with gradients from an oracle (`oracles.py`). The server combines the replies
and applies its rule (`next_state`). `run_rounds` does all this in one process. Other engines carry
the same messages between processes and call the same functions: `starts`, `broadcast` and
`next_state` on the server, and `opened` and `client_updates` on the clients. If a recipe asks for
masks, their clients then mask each reply.

Optional features that change messages are stages of the recipe (`fedmuon.optim.stage`). A config
adds its stages in `configured_stages.py`. The ledger of a private run is no stage: `runs/loop.py`
wraps an engine in `RunAccountant.ahead`, which records each round before its lots are drawn.

All tensors of a model have a leading axis [S, ...] for S replicas, which are trained together. A
single run has S = 1. To compare a run with neighbouring data sets, each data set is one replica,
and all replicas share every random draw.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from fedmuon.core.device import with_deferred_checks
from fedmuon.core.errors import in_round
from fedmuon.core.rng import Draw, generator
from fedmuon.core.threads import spread
from fedmuon.federated.cohorts import Synchronous, cohorts_of
from fedmuon.federated.experiment import Client, Engine, Experiment, Round, mean_loss
from fedmuon.federated.oracles import Statistics, oracle_of
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.traffic import traffic
from fedmuon.optim.chain import PERSONAL, States
from fedmuon.optim.recipe import Recipe, aggregated, initial_states, weights_and_steps
from fedmuon.optim.stage import (
    MODEL,
    Broadcast,
    Reply,
    ServerState,
    replaced_rounds,
    split_model,
)
from fedmuon.tasks.base import Params, Task, blocks, repeated, split_statistics

NO_STATES: Mapping[int, States] = {}


def begin(recipe: Recipe, task: Task, seed: int, stack: int = 1) -> ServerState:
    """Return the state before round 0, in which all replicas have the same model."""
    params = task.initial(generator(seed, Draw.INITIAL), stack)
    return ServerState(0, params, initial_states(recipe, params))


@lru_cache(maxsize=2)
def first_model(task: Task, seed: int, stack: int = 1) -> Params:
    """Return the initial model, from which personal models start. Do not change its tensors."""
    return task.initial(generator(seed, Draw.INITIAL), stack)


# Lines 2 to 13 of Algorithm 1


def run_rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    """Run the remaining rounds in this process, starting from `state`.

    A stage can replace the rounds of the server, as gossip does.
    """
    return replaced_rounds(experiment.recipe.stages, _server_rounds)(experiment, state)


def _server_rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    plan = experiment.plan
    for number in range(state.round, plan.rounds):
        participants, before = plan.participants(number), state
        clients = [experiment.client(int(client)) for client in participants]
        state, replies, records = run_round(experiment, before, clients)
        sizes = traffic(experiment.recipe, before, len(participants), replies)
        yield Round(
            state=state, participants=participants, answered=participants,
            loss=mean_loss(replies), clients=records, **sizes,
        )  # fmt: skip


def run_round(
    experiment: Experiment, state: ServerState, clients: Sequence[Client]
) -> tuple[ServerState, list[Reply], tuple[dict[str, Any], ...]]:
    """Run one round with these clients.

    Returns:
        The next server state, the replies as the clients sent them, and a record for each client if
            the experiment is `measured`.
    """
    recipe, task, plan = experiment.recipe, experiment.task, experiment.plan
    stored, replies = experiment.client_states, list[Reply]()
    keeping = clients if recipe.stores else ()
    own = {client: stored.read(client, state.round) for client, _ in keeping}
    by_number = dict(clients)
    for start, numbers in starts(experiment, state, [*by_number]):
        received = received_message(recipe, start)
        cohort = [(client, by_number[client]) for client in numbers]
        replies += client_updates(recipe, task, plan, cohort, received, own, experiment.measured)
    reply_of = {reply.client: reply for reply in replies}
    for client, _ in keeping:
        stored.write(client, state.round, reply_of[client].own)
    after, records = next_state(experiment, state, replies)
    return after, replies, records


def simulate(
    experiment: Experiment, state: ServerState, engine: Engine = run_rounds
) -> ServerState:
    """Run all remaining rounds and return the last state."""
    for finished in engine(experiment, state):
        state = finished.state
    return state


# Line 3: the server's message


def starts(
    experiment: Experiment, state: ServerState, clients: Sequence[int]
) -> list[tuple[ServerState, list[int]]]:
    """Group the clients of the next round by the server state from which each client starts."""
    return _cohorts(experiment).starts(state, clients)


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return the message to every participant of the next round."""
    trees = {MODEL: state.params, **{name: state.states[name] for name in recipe.sent}}
    for stage in recipe.stages:
        trees = stage.send(trees, state)
    return Broadcast(state.round, *split_model(trees))


def opened(recipe: Recipe, sent: Broadcast, model: Callable[[], Params]) -> Broadcast:
    """Return the model and states that clients use.

    Args:
        recipe: The optimizer, whose stages were applied to the message.
        sent: The message.
        model: Function that returns a model of the run, which provides the shapes.
    """
    trees = sent.trees
    for stage in reversed(recipe.stages):
        trees = stage.open(trees, model)
    return sent.with_trees(trees)


# Lines 4 to 11: the clients


def client_updates(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    received: Broadcast,
    own: Mapping[int, States] = NO_STATES,
    measured: bool = False,
) -> list[Reply]:
    """Train all clients, in groups, and return the replies that they send, in their order.

    Each group is trained as one batch of limited size, and all clients of a group take the same
    number of steps. If a stage isolates clients, each client is trained alone. Otherwise, rounding
    could make a client's result depend on other clients. On a GPU, a round is repeated with checks
    if its assumptions do not hold (`fedmuon.core.device`). A round with secret or correlated noise
    is not repeated, because the privacy account would not count the second release. Stages are
    applied once, after the checks.

    Args:
        recipe: The optimizer.
        task: The task.
        plan: The plan of the run.
        clients: The clients, with their samples.
        received: The server's message, as `opened` returns it.
        own: The states that each client stored in its last round.
        measured: Whether replies contain measurements, which needs S = 1.
    """
    groups = _groups(recipe, task, plan, clients, received)
    work = [
        partial(train_group, recipe, task, plan, group, received, own, measured) for group in groups
    ]

    def computed() -> dict[int, Reply]:
        parts = spread(work, task.thread_safe and recipe.thread_safe)
        return {reply.client: reply for part in parts for reply in part}

    repeatable = recipe.mechanism is None or recipe.mechanism.again
    replies = with_deferred_checks(task.device, computed) if repeatable else computed()
    return [sent_reply(recipe, received, replies[client], own) for client, _ in clients]


def sent_reply(
    recipe: Recipe, received: Broadcast, reply: Reply, own: Mapping[int, States] = NO_STATES
) -> Reply:
    """Return the reply as a client sends it. `received` is the message as `opened` returns it."""
    for stage in recipe.stages:
        reply = stage.reply(reply, received, own.get(reply.client, {}))
    return reply


def train_group(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    received: Broadcast,
    own: Mapping[int, States] = NO_STATES,
    measured: bool = False,
) -> list[Reply]:
    """Train several clients in one batch, for E local steps from the server's model.

    The tensors have the shape [K S, ...] for K clients with S replicas each. A link continues with
    the state that the server sent, or that the client stored in an earlier round (`own`). Without
    such a state, the link starts with a new state. The replies have not passed the stages.
    """
    numbers, count = [client for client, _ in clients], len(clients)
    memories = [own.get(client, {}) for client in numbers]
    steps = plan.steps_of(clients[0][1].size)  # clients in one batch take the same number of steps
    states = {name: repeated(state, count) for name, state in received.states.items()}
    with in_round(received.round, numbers):
        first = _first_of_batch(task, plan, received, count)
        start = repeated(received.params, count)
        for stage in recipe.stages:
            start = stage.adopt(start, first, memories)
        for stage in recipe.stages:
            start, states = split_model(stage.assign({MODEL: start, **states}, numbers))
        started, now = split_statistics(start)
        states |= _resumed(recipe, started, first, memories)
        params, states = started, recipe.chain.init(started, states)
        oracle = oracle_of(recipe, task, plan, clients, received.round, params)
        statistics = Statistics(now)
        for step in range(steps):
            context = oracle.context(params, started, step, statistics)
            params, states = recipe.chain.step(params, states, context)
            statistics.step()
        local = {**params, **statistics.now}
        factor = plan.factor_at(received.round)
        params, states = recipe.apply_client(started, params, states, steps, factor, oracle.samples)
    models = blocks({**params, **statistics.now}, count)
    returned = {name: blocks(states[name], count) for name in recipe.returned}
    persistent = {name: blocks(states[name], count) for name in recipe.persistent}
    tensor = next(iter(params.values()))
    unknown = tensor.new_full((len(tensor),), math.nan)  # a private chain reports no loss
    losses = states.get("gradient", {}).get("loss", unknown).chunk(count)
    metrics: Sequence[Mapping[str, float]] = [{}] * count
    if measured:
        from fedmuon.federated.client_metrics import metrics_of_each

        metrics = metrics_of_each(task, clients, start, local, states)
    return [
        Reply(
            client,
            models[k],
            {name: parts[k] for name, parts in returned.items()},
            losses[k],
            shard.size,
            steps,
            {name: parts[k] for name, parts in persistent.items()},
            metrics[k],
        )
        for k, (client, shard) in enumerate(clients)
    ]


# Lines 12 and 13: the server


def next_state(
    experiment: Experiment, state: ServerState, replies: Sequence[Reply]
) -> tuple[ServerState, tuple[dict[str, Any], ...]]:
    """Update the server with the replies of a round.

    Returns:
        The server state after the round, including the older models that later rounds need, and a
        record for each client if the experiment is `measured`.
    """
    recipe, cohorts, records = experiment.recipe, _cohorts(experiment), ()
    with in_round(state.round):
        read, of_stages = cohorts.read(
            state, replies, partial(read_replies, recipe), partial(received_message, recipe)
        )
    if experiment.measured:  # before the aggregator, which may change its arguments
        from fedmuon.federated.client_metrics import client_records

        records = client_records(state, read, recipe.direction)
    with in_round(state.round):
        factor = experiment.plan.factor_at(state.round)
        after = _updated(recipe, state, read, of_stages, factor)
    return cohorts.remembering(state, after), records


def server_update(
    recipe: Recipe, state: ServerState, replies: Iterable[Reply], factor: float = 1.0
) -> ServerState:
    """Combine the replies of clients that started from `state`, then apply the server's rule.

    Args:
        recipe: The optimizer, which defines the combined states and the server's rule.
        state: The state before the round.
        replies: The replies, in any order. The replies are added in the order of the clients, so
            that all engines have equal rounding errors.
        factor: The factor of the step sizes in this round.
    """
    with in_round(state.round):
        return _updated(recipe, state, *read_replies(recipe, state, [*replies]), factor)


def received_message(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return the message as clients use it, when the server sends this state."""
    return opened(recipe, broadcast(recipe, state), lambda: state.params)


def read_replies(
    recipe: Recipe, state: ServerState, replies: Sequence[Reply]
) -> tuple[list[Reply], States]:
    """Undo the stages of replies that started from this state.

    Returns:
        The replies in the order of the clients, and the next states of the stages.
    """
    read, of_stages = sorted(replies, key=lambda reply: reply.client), States()
    for stage in reversed(recipe.stages):
        read, states = stage.read(read, partial(received_message, recipe, state), state)
        of_stages |= states
    return read, of_stages


def _updated(
    recipe: Recipe, state: ServerState, replies: list[Reply], of_stages: States, factor: float
) -> ServerState:
    """Return the server's next state.

    Args:
        recipe: The optimizer.
        state: The state before the round.
        replies: The replies in the order of the clients, whose stages are undone.
        of_stages: The next states of the stages.
        factor: The factor of the step sizes in this round.
    """
    mean, states, of_aggregator = aggregated(recipe, state.states, replies)
    others = {**of_aggregator, **of_stages}
    before = {name: tree for name, tree in state.states.items() if name not in others}
    mean, statistics = split_statistics(mean)  # running statistics are averaged, without a rule
    old = {name: value for name, value in state.params.items() if name in mean}
    answered = partial(weights_and_steps, recipe, replies)
    params, states = recipe.apply_server(old, mean, {**before, **states}, factor, answered)
    params = {**params, **statistics}
    kept = {name: value for name, value in state.params.items() if name not in params}
    states = {name: tree for name, tree in states.items() if name in recipe.kept}
    return ServerState(state.round + 1, {**kept, **params}, {**states, **others})


# The start of a client's round


def _cohorts(experiment: Experiment) -> Synchronous:
    return cohorts_of(experiment.plan, experiment.recipe)


def _groups(
    recipe: Recipe, task: Task, plan: RandomnessPlan, clients: Sequence[Client], received: Broadcast
) -> list[Sequence[Client]]:
    """Divide the clients into groups that are trained as one batch."""
    entries = sum(value.numel() for value in received.params.values())
    size = 1 if recipe.isolates else max(1, task.stack_limit // entries)
    by_steps: dict[int, list[Client]] = {}
    for client in clients:
        by_steps.setdefault(plan.steps_of(client[1].size), []).append(client)
    return [
        alike[start : start + size]
        for alike in by_steps.values()
        for start in range(0, len(alike), size)
    ]


def _first_of_batch(
    task: Task, plan: RandomnessPlan, received: Broadcast, count: int
) -> Callable[[], Params]:
    """Return a function that returns the run's initial model, repeated for each client."""

    def first() -> Params:
        stack = len(next(iter(received.params.values())))
        return repeated(first_model(task, plan.seed, stack), count)

    return first


def _resumed(
    recipe: Recipe, params: Params, first: Callable[[], Params], memories: Sequence[States]
) -> States:
    """Return the persistent states of a batch of clients.

    A client that has not stored a state uses the initial state of the link. The initial state of a
    personal model is the run's initial model.
    """
    resumed: States = {}
    for link in recipe.chain.links:
        if link.name not in recipe.persistent or not (link.name == PERSONAL or any(memories)):
            continue
        start = split_statistics(first())[0] if link.name == PERSONAL else params
        parts = blocks(link.init(start), len(memories))
        for number, memory in enumerate(memories):
            stored = memory.get(link.name, {})
            parts[number] = {
                name: stored[name].to(value) if stored else value
                for name, value in parts[number].items()
            }
        resumed[link.name] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return resumed
