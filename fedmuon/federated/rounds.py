"""Federated rounds: the complete Algorithm 1 of the Stability note.

The server samples clients and sends them its model and states (`broadcast`). Each client takes E
local steps of its chain (`client_update`). The server combines the replies and applies its rule
(`server_update`). `run_rounds` does all this in one process. Other engines carry the same messages
between processes and call the same functions.

All tensors of a model have a leading axis [S, ...] for S replicas, which are trained together. A
single run has S = 1. To compare a run with neighbouring data sets, each data set is one replica,
and all replicas share every random draw.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import is_finite, with_deferred_checks
from fedmuon.core.errors import NonFinite, in_round
from fedmuon.core.rng import Draw, generator
from fedmuon.core.threads import spread
from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.client_metrics import MOMENTA, client_metrics, cosines_to_mean
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.plan import RandomnessPlan
from fedmuon.federated.shards import Shard, Shards
from fedmuon.optim.chain import PERSONAL, Context, States, forbidden_gradient, zeros
from fedmuon.optim.compression import ESTIMATE, FEEDBACK, MODEL, decoded, templates
from fedmuon.optim.recipe import (
    Recipe,
    aggregate_state,
    aggregate_states,
    first_state,
    initial_states,
    personal_part,
    shared_part,
)
from fedmuon.privacy.mechanisms.client_level import ClientLevel, mapped
from fedmuon.tasks.base import Batch, Params, Task, blocks, split_statistics

LARGE = 1e15  # float32 can represent its square, and sums of such squares
CHUNK = 1 << 24  # maximum number of logits that a thread computes at once
LEAST, MOST = 1024, 64  # minimum samples per piece, and maximum pieces, within the limit of CHUNK


@dataclass(frozen=True)
class Experiment:
    """The objects of a run that all rounds share, and the stored states of the clients."""

    recipe: Recipe
    task: Task
    plan: RandomnessPlan
    shards: Shards
    client_states: ClientStates = field(default_factory=ClientStates)
    measured: bool = False  # whether rounds record measurements of each client, which needs S = 1


@dataclass(frozen=True)
class ServerState:
    """The server's model and states after `round` rounds.

    `older` contains earlier server states, from which some clients are still training.
    """

    round: int
    params: Params
    states: States
    older: "tuple[ServerState, ...]" = ()


@dataclass(frozen=True)
class Broadcast:
    """A message of the server: the round, the model, and the states that the server sends."""

    round: int
    params: Params
    states: States


@dataclass(frozen=True)
class Reply:
    """The reply of a client.

    `loss` [S] is the client's loss at the start of the last local step. `samples` is the number n_i
    of the client's samples, and `steps` is the number of local steps. `own` contains the client's
    persistent states, which are not sent. `metrics` contains the client's measurements, if they
    were requested. `part` says what `params` contains when an aggregator receives the reply:
    "model", or the name of a returned state.
    """

    client: int
    params: Params
    states: States
    loss: Tensor
    samples: int = 1
    steps: int = 1
    own: States = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    part: str = MODEL


@dataclass(frozen=True)
class Fault:
    """A failed attempt to get a client's reply, and the reason."""

    client: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Round:
    """A finished round.

    Attributes:
        state: The server's state after the round.
        participants: The clients that were selected.
        answered: The clients whose replies were used. The stability bound requires a reply of every
            selected client.
        loss: Mean loss of the clients that answered, per replica [S].
        faults: The failures during the round.
        clients: The measurements of each client that answered, if they were requested.
        bytes_down: Total bytes of the arrays that all participants received.
        bytes_up: Total bytes of the arrays in the replies that were used.
    """

    state: ServerState
    participants: np.ndarray
    answered: np.ndarray
    loss: np.ndarray
    faults: tuple[Fault, ...] = ()
    clients: tuple[dict[str, Any], ...] = ()
    bytes_down: int = 0
    bytes_up: int = 0


Engine = Callable[[Experiment, ServerState], Iterator[Round]]
Client = tuple[int, Shard]  # number and samples
NO_STATES: Mapping[int, States] = {}


# The algorithm


def begin(recipe: Recipe, task: Task, seed: int, stack: int = 1) -> ServerState:
    """Return the state before round 0, in which all replicas have the same model."""
    params = task.initial(generator(seed, Draw.INITIAL), stack)
    return ServerState(0, params, initial_states(recipe, params))


@lru_cache(maxsize=2)
def first_model(task: Task, seed: int, stack: int = 1) -> Params:
    """Return the initial model, from which personal models start. Do not change its tensors."""
    return task.initial(generator(seed, Draw.INITIAL), stack)


def run_rounds(experiment: Experiment, state: ServerState) -> Iterator[Round]:
    """Run the remaining rounds in this process, starting from `state`."""
    plan, shards = experiment.plan, experiment.shards
    shard_of = shards.with_test if experiment.measured else shards.__getitem__
    for number in range(state.round, plan.rounds):
        participants = plan.participants(number)
        before, clients = state, [(int(i), shard_of(int(i))) for i in participants]
        state, replies, records = run_round(experiment, before, clients)
        sizes = traffic(experiment.recipe, before, len(participants), replies)
        yield Round(state, participants, participants, mean_loss(replies), (), records, **sizes)


def run_round(
    experiment: Experiment, state: ServerState, clients: Sequence[Client]
) -> tuple[ServerState, list[Reply], tuple[dict[str, Any], ...]]:
    """Run one round with these clients.

    Returns:
        The next server state, the replies as the clients sent them, and a record for each client if
            the experiment is `measured`.
    """
    recipe, plan, memory = experiment.recipe, experiment.plan, experiment.client_states
    own = {client: memory.read(client, state.round) for client, _ in clients if recipe.keeps_states}
    replies = []
    for start, numbers in starts(plan, state, [client for client, _ in clients]):
        chosen = {*numbers}
        some = [one for one in clients if one[0] in chosen]
        sent, task = read_broadcast(recipe, broadcast(recipe, start), start.params), experiment.task
        found = client_updates(recipe, task, plan, some, sent, own, experiment.measured)
        replies += compressed(recipe, sent, found, own)
    for reply in replies:
        if recipe.keeps_states:
            memory.write(reply.client, state.round, reply.own)
    after, records = next_state(experiment, state, replies)
    return after, replies, records


def starts(
    plan: RandomnessPlan, state: ServerState, clients: Sequence[int]
) -> list[tuple[ServerState, list[int]]]:
    """Group the clients of the next round by the server state from which each client started."""
    if plan.timetable is None or not plan.timetable.versions:
        return [(state, [*clients])]
    versions, known = plan.timetable.versions[state.round], (*state.older, state)
    began = dict(zip(plan.participants(state.round).tolist(), versions.tolist(), strict=True))
    groups = [(one, [i for i in clients if began[i] == one.round]) for one in known]
    return [(one, some) for one, some in groups if some]


def as_read(
    recipe: Recipe, plan: RandomnessPlan, state: ServerState, replies: Sequence[Reply]
) -> tuple[list[Reply], States]:
    """Convert replies to the form that the server's rule needs. Also return the next EF21 states.

    With FedBuff, a reply is converted to a change of the newest model. This change is 1 / sqrt(1 +
    staleness) times the difference between the client's reply and the model that the client
    received. Some returned states are already changes, such as the change of SCAFFOLD's control
    variate. These states are not weighted, because the server's state must match the clients'
    states.
    """
    found: list[Reply] = []
    exact = not recipe.codecs and (recipe.compression is None or not recipe.compression.down)
    with in_round(state.round):
        if plan.timetable is None or not plan.timetable.versions:
            return _uncompressed(recipe, state, replies)
        for start, clients in starts(plan, state, [reply.client for reply in replies]):
            some = {*clients}
            read, _ = _uncompressed(recipe, start, [one for one in replies if one.client in some])
            if start.round == state.round and exact:
                found += read  # these clients received the newest model unchanged
            else:
                began = received_trees(recipe, start)
                weight = (1 + state.round - start.round) ** -0.5
                found += [_moved_to(state, began, weight, reply) for reply in read]
    return found, {}


def _uncompressed(
    recipe: Recipe, state: ServerState, replies: Sequence[Reply]
) -> tuple[list[Reply], States]:
    """Decompress replies that started from this state. Also return the next EF21 states."""
    ordered = sorted(replies, key=lambda reply: reply.client)
    found, estimates = decompressed(recipe, state, ordered)
    if recipe.codecs:
        found = [replace(one, states=recipe.decoded(one.states, state.params)) for one in found]
    return found, estimates


def _moved_to(
    state: ServerState, began: Mapping[str, Params], weight: float, reply: Reply
) -> Reply:
    """Add the weighted change of a reply to the newest model and states."""

    def moved(now: Params, then: Params, value: Params) -> Params:
        return {name: now[name] + weight * (one - then[name]) for name, one in value.items()}

    learned, statistics = split_statistics(reply.params)
    params = {**moved(state.params, began[MODEL], learned), **statistics}
    states = {
        name: moved(state.states[name], began[name], one) if name in began else one
        for name, one in reply.states.items()
    }
    return replace(reply, params=params, states=states)


def next_state(
    experiment: Experiment, state: ServerState, replies: Sequence[Reply]
) -> tuple[ServerState, tuple[dict[str, Any], ...]]:
    """Update the server with the replies of a round.

    Returns:
        The server state after the round, including the older models that later rounds need, and a
        record for each client if the experiment is `measured`.
    """
    recipe, plan, records = experiment.recipe, experiment.plan, ()
    read, estimates = as_read(recipe, plan, state, replies)
    if experiment.measured:  # before the aggregator, which may change its arguments
        records = client_records(state, read, recipe.direction)
    with in_round(state.round):
        after = _updated(recipe, state, read, estimates, plan.factor_at(state.round))
    if plan.timetable is None or not plan.timetable.versions:
        return after, records
    oldest = plan.timetable.oldest(after.round)
    known = (*state.older, replace(state, older=()))
    older = tuple(one for one in known if one.round >= oldest)
    return replace(after, older=older), records


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return the message to every participant of the next round."""
    states = {name: state.states[name] for name in recipe.sent}
    params, states = shared_part(recipe, state.params), recipe.encoded(states)
    if recipe.compression is not None and recipe.compression.down:
        trees = recipe.compression.broadcast({MODEL: params, **states}, state.round)
        params = trees.pop(MODEL)
        states = trees
    return Broadcast(state.round, params, states)


def client_update(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    sent: Broadcast,
    own: Mapping[int, States] = NO_STATES,
    measured: bool = False,
) -> list[Reply]:
    """Train several clients in one batch, for E local steps from the server's model.

    This function does lines 4 to 11 of Algorithm 1 in the Stability note.

    The tensors have the shape [K S, ...] for K clients with S replicas each. A link continues with
    the state that the server sent, or that the client stored in an earlier round (`own`). Without
    such a state, the link starts with a new state. If `measured` is true, S must be 1, and the
    replies contain metrics.
    """
    numbers, count = [client for client, _ in clients], len(clients)
    steps = plan.steps_of(clients[0][1].size)  # clients in one batch take the same number of steps
    received_states = recipe.decoded(sent.states, sent.params)
    states = {name: _repeated(state, count) for name, state in received_states.items()}
    with in_round(sent.round, numbers):
        first = {}
        if recipe.personalizes:
            stack = len(next(iter(sent.params.values())))
            first = _repeated(first_model(task, plan.seed, stack), count)
        start = _received(recipe, _repeated(sent.params, count), first, numbers, own)
        (params, statistics), (first, _) = map(split_statistics, (start, first))
        received, samples = params, _samples(recipe, clients, params)
        states = recipe.chain.init(params, states | _resumed(recipe, params, first, numbers, own))
        for step in range(steps):
            after: Params = {}  # running statistics after the first gradient of a step
            now = (sent.round, step)
            context = _context(recipe, task, plan, clients, params, now, statistics, after)
            context = replace(context, received=received, samples=samples)
            params, states = recipe.chain.step(params, states, context)
            statistics = after or statistics
        local = {**params, **statistics}
        if recipe.client is not None:
            given: dict[str, Any] = {}
            if recipe.scaled:
                given["factor"] = plan.factor_at(sent.round)
            if recipe.knows_samples:
                given["samples"] = samples
            params, states = recipe.client(received, params, states, steps, **given)
    whole = {**params, **statistics}
    models = blocks(shared_part(recipe, whole), count)
    sent_back = recipe.encoded({name: states[name] for name in recipe.returned})
    returned = {name: blocks(state, count) for name, state in sent_back.items()}
    persistent = {name: blocks(states[name], count) for name in recipe.persistent}
    if recipe.personal:
        persistent[PERSONAL] = blocks(personal_part(recipe, whole), count)
    some = next(iter(params.values()))
    unknown = some.new_full((len(some),), math.nan)  # a private chain reports no loss
    losses = states.get("gradient", {}).get("loss", unknown).chunk(count)
    metrics = _metrics_of_each(task, clients, start, local, states) if measured else [{}] * count
    return [
        Reply(
            client,
            models[k],
            {name: one[k] for name, one in returned.items()},
            losses[k],
            shard.size,
            steps,
            {name: one[k] for name, one in persistent.items()},
            metrics[k],
        )
        for k, (client, shard) in enumerate(clients)
    ]


def server_update(
    recipe: Recipe, state: ServerState, replies: Iterable[Reply], factor: float = 1.0
) -> ServerState:
    """Combine the replies (lines 12 and 13 of Alg. 1), then apply the server's rule.

    Args:
        recipe: The optimizer, which defines the combined states and the server's rule.
        state: The state before the round.
        replies: The replies, in any order. The replies are added in the order of the clients, so
            that all engines have equal rounding errors.
        factor: The factor of the step sizes in this round.
    """
    with in_round(state.round):
        return _updated(recipe, state, *_uncompressed(recipe, state, [*replies]), factor)


def _updated(
    recipe: Recipe, state: ServerState, replies: list[Reply], estimates: States, factor: float
) -> ServerState:
    """Return the server's next state, computed from replies that are already decompressed."""
    ordered = sorted(replies, key=lambda reply: reply.client)
    if recipe.keeps_states:  # aggregators never see these states
        ordered = [replace(reply, own={}) for reply in ordered]
    mean, states, kept = _combined(recipe, state, ordered)
    kept |= estimates
    before = {name: one for name, one in state.states.items() if name not in kept}
    given: dict[str, Any] = {"factor": factor} if recipe.scaled else {}
    if recipe.counted:
        weights = recipe.aggregate.shares
        assert weights is not None  # build_recipe requires it
        steps = [reply.steps for reply in ordered]
        given["answered"] = list(zip(weights(ordered), steps, strict=True))
    mean, statistics = split_statistics(mean)  # running statistics are averaged, without a rule
    old, _ = split_statistics(shared_part(recipe, state.params))
    params, states = recipe.server(old, mean, {**before, **states}, **given)
    params = {**params, **statistics}
    params = state.params | params if recipe.personal else params
    states = {name: one for name, one in states.items() if name in recipe.kept}
    return ServerState(state.round + 1, params, states | kept)


def simulate(
    experiment: Experiment, state: ServerState, engine: Engine = run_rounds
) -> ServerState:
    """Run all remaining rounds and return the last state."""
    for finished in engine(experiment, state):
        state = finished.state
    return state


def traffic(
    recipe: Recipe, state: ServerState, asked: int, replies: Sequence[Reply]
) -> dict[str, int]:
    """Return the bytes of all models and states that a round sends, in each direction.

    Args:
        recipe: The recipe.
        state: The state before the round.
        asked: Number of clients that received the model, without repeated messages.
        replies: The replies that the server used, in the form that the clients sent.
    """
    down = payload_bytes(*sent_like(recipe, state.params, state.states))
    up = sum(payload_bytes(reply.params, reply.states) for reply in replies)
    return {"bytes_down": asked * down, "bytes_up": up}


def payload_bytes(params: Params, states: States) -> int:
    """Return the bytes of the arrays in a message, without names and shapes."""
    return sum(value.nbytes for tree in (params, *states.values()) for value in tree.values())


def mean_loss(replies: Sequence[Reply]) -> np.ndarray:
    """Return the mean loss of the replies for each replica, or NaN if there are no replies."""
    if not replies:
        return np.array([math.nan])
    total: Tensor = sum((reply.loss for reply in replies[1:]), start=replies[0].loss)
    return (total / len(replies)).double().cpu().numpy()


def client_records(
    before: ServerState, replies: Sequence[Reply], direction: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return a record of each client's measurements in this round, in the order of the clients.

    A record also contains the cosine between the client's update and the mean update. Numbers that
    are not finite are left out.
    """
    ordered = sorted(replies, key=lambda reply: reply.client)
    base = zeros(before.params) if direction else before.params  # a direction is already an update
    cosines = cosines_to_mean(base, [split_statistics(one.params)[0] for one in ordered])
    found = []
    for reply, cosine in zip(ordered, cosines, strict=True):
        metrics = {**reply.metrics, "cosine": cosine}
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        found.append({"client": reply.client, "samples": reply.samples, **known})
    return tuple(found)


def _metrics_of_each(
    task: Task, clients: Sequence[Client], start: Params, local: Params, states: States
) -> list[dict[str, float]]:
    """Measure each client of a batch, before and after its local steps."""
    starts, models = (blocks(one, len(clients)) for one in (start, local))
    momenta = {name: blocks(states[name], len(clients)) for name in MOMENTA if name in states}
    return [
        client_metrics(
            *(task, shard, starts[k], models[k]), {name: one[k] for name, one in momenta.items()}
        )
        for k, (_, shard) in enumerate(clients)
    ]


# Many clients together


def client_updates(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    sent: Broadcast,
    own: Mapping[int, States] = NO_STATES,
    measured: bool = False,
) -> list[Reply]:
    """Train all clients, in groups, and return their replies in the order of `clients`.

    Each group is trained as one batch of limited size, and all clients of a group take the same
    number of steps. With client-level privacy, each client is trained alone. Otherwise, rounding
    could make a client's result depend on other clients. On a GPU, a round is repeated with checks
    if its assumptions do not hold (`fedmuon.core.device`). A round with secret or correlated noise
    is not repeated, because the privacy account would not count the second release.

    `sent` is the result of `read_broadcast`.
    """
    level = recipe.client_level
    entries = sum(value.numel() for value in sent.params.values())
    size = 1 if level is not None else max(1, task.stack_limit // entries)
    alike: dict[int, list[Client]] = {}
    for one in clients:
        alike.setdefault(plan.steps_of(one[1].size), []).append(one)
    groups = [
        some[start : start + size] for some in alike.values() for start in range(0, len(some), size)
    ]
    work = [
        partial(client_update, recipe, task, plan, group, sent, own, measured) for group in groups
    ]

    def computed() -> list[Reply]:
        parts = spread(work, task.thread_safe and recipe.thread_safe)
        found = {reply.client: reply for some in parts for reply in some}
        return [found[client] for client, _ in clients]

    if recipe.mechanism is not None and not recipe.mechanism.again:
        return computed()
    replies = with_deferred_checks(task.device, computed)
    if level is None:
        return replies
    return [privatize_reply(recipe, level, sent, reply) for reply in replies]


def privatize_reply(recipe: Recipe, level: ClientLevel, sent: Broadcast, reply: Reply) -> Reply:
    """Apply client-level privacy to a reply.

    The loss is removed from the reply. If clients do not trust the server, the update is also
    clipped, and noise is added.
    """
    reply = replace(reply, loss=torch.full_like(reply.loss, math.nan))
    if level.trust == "central":
        return reply
    before, after = (joint(recipe, one.params, one.states) for one in (sent, reply))
    states = level.perturbed(before, after, sent.round, reply.client)
    return replace(reply, params=states.pop("model"), states=states)


# Compressed messages


def compressed(
    recipe: Recipe,
    sent: Broadcast,
    replies: Sequence[Reply],
    own: Mapping[int, States] = NO_STATES,
) -> list[Reply]:
    """Compress replies, and store each client's compression error in `own` of the reply.

    `sent` is the result of `read_broadcast`.
    """
    if recipe.compression is None or not recipe.compression.up:
        return list(replies)
    found = []
    received = {MODEL: sent.params, **sent.states}
    for reply in replies:
        returned = {MODEL: reply.params, **reply.states}
        tensors = [one for tree in returned.values() for one in tree.values()]
        if not all(is_finite(one.sum()) for one in tensors):
            raise NonFinite(
                f"the update of client {reply.client} is not finite (round {sent.round}). Lower "
                "[local] lr."
            )
        memory = own.get(reply.client, {}).get(FEEDBACK, {})
        trees, memory = recipe.compression.message(
            returned, received, memory, sent.round, reply.client
        )
        kept = {**reply.own, FEEDBACK: memory} if recipe.compression.keeps else reply.own
        found.append(replace(reply, params=trees.pop(MODEL), states=trees, own=kept))
    return found


def received_trees(recipe: Recipe, state: ServerState) -> dict[str, Params]:
    """Return the model and the states that a client receives when the server sends this state."""
    like, sent = shared_part(recipe, state.params), broadcast(recipe, state)
    trees = {MODEL: sent.params, **recipe.decoded(sent.states, state.params)}
    if recipe.compression is None or not recipe.compression.down:
        return trees
    return decoded(recipe.compression.downlink, trees, split_statistics(like)[0])


def decompressed(
    recipe: Recipe, state: ServerState, replies: Sequence[Reply]
) -> tuple[list[Reply], States]:
    """Decompress the replies. Also return the next EF21 states of the server."""
    if recipe.compression is None or not recipe.compression.up:
        return list(replies), {}
    base = received_trees(recipe, state)
    names = (MODEL, *recipe.returned) if recipe.compression.estimates else ()
    mean = {name: state.states[f"{ESTIMATE}{name}"] for name in names}
    messages = [{MODEL: reply.params, **reply.states} for reply in replies]
    found, mean = recipe.compression.replies(messages, base, mean)
    read = [
        replace(reply, params=trees.pop(MODEL), states=trees)
        for reply, trees in zip(replies, found, strict=True)
    ]
    return read, {f"{ESTIMATE}{name}": value for name, value in mean.items()}


def read_broadcast(recipe: Recipe, sent: Broadcast, model: Params) -> Broadcast:
    """Decompress a message, and return the model and states that clients use.

    Args:
        recipe: The optimizer, whose compressor was applied to the message.
        sent: The message.
        model: A model of the run, which provides the shapes.
    """
    if recipe.compression is None or not recipe.compression.down:
        return sent
    trees = {MODEL: sent.params, **sent.states}
    like = split_statistics(shared_part(recipe, model))[0]
    trees = decoded(recipe.compression.downlink, trees, like)
    return Broadcast(sent.round, trees.pop(MODEL), trees)


def joint(recipe: Recipe, params: Params, states: States) -> dict[str, Params]:
    """Return the model and the states that a client returns, by name."""
    learned, _ = split_statistics(params)
    returned = {
        name: states[name] if name in states else first_state(recipe, name, learned)
        for name in recipe.returned
    }
    return {"model": params, **returned}


def sent_like(recipe: Recipe, params: Params, states: States) -> tuple[Params, States]:
    """Return tensors with the shapes and dtypes that the arrays of a broadcast must have."""
    found = {name: states[name] for name in recipe.sent}
    found |= {
        name: recipe.codecs[name].template(found[name]) for name in found if name in recipe.codecs
    }
    params = shared_part(recipe, params)
    if recipe.compression is not None and recipe.compression.down:
        like = split_statistics(params)[0]
        found = templates(recipe.compression.downlink, {MODEL: params, **found}, like)
        params = found.pop(MODEL)
    return params, found


def returned_like(recipe: Recipe, params: Params, states: States) -> tuple[Params, States]:
    """Return tensors with the shapes and dtypes that the arrays of a reply must have."""
    found = joint(recipe, shared_part(recipe, params), states)
    for name, codec in recipe.codecs.items():
        if name in found:  # otherwise, the server sends this state but clients do not return it
            found[name] = codec.template(found[name])
    if recipe.compression is not None and recipe.compression.up:
        like = split_statistics(found[MODEL])[0]
        found = templates(recipe.compression.uplink, found, like)
    if recipe.masked:
        found = mapped(lambda one: torch.empty(one.shape, dtype=torch.int64), found)
    return found.pop("model"), found


# The context of a local step, and the first state of a client


def _samples(recipe: Recipe, clients: Sequence[Client], params: Params) -> Tensor | None:
    """Return n_i for each replica [K S], or None if neither a link nor the client rule asks."""
    if not recipe.knows_samples and not any(one.knows_samples for one in recipe.chain.links):
        return None
    some = next(iter(params.values()))
    sizes = some.new_tensor([shard.size for _, shard in clients])
    return sizes.repeat_interleave(len(some) // len(clients))


def _context(
    recipe: Recipe,
    task: Task,
    plan: RandomnessPlan,
    clients: Sequence[Client],
    params: Params,
    now: tuple[int, int],
    statistics: Params,
    after: Params,
) -> Context:
    """Return the context for the links of the optimizer in one local step.

    In a private run, links can request only private releases, and no gradients. The first gradient
    uses the running `statistics` of BatchNorm, and writes the next statistics into `after`.
    """
    round, step = now
    factor, mechanism = plan.factor_at(round), recipe.mechanism
    draws = [plan.draws(round, client, step) for client, _ in clients]
    known = any(link.knows_client for link in recipe.chain.links)
    numbers = tuple(client for client, _ in clients) if known else ()

    def batches_of(rows: Sequence[np.ndarray | None]) -> list[Batch]:
        pairs = list(zip(rows, clients, strict=True))
        found = [shard.batch(own) for own, (_, shard) in pairs]
        if not task.keyed:
            return found
        keys = [plan.keys(round, client, step, own, shard.size) for own, (client, shard) in pairs]
        pieces = zip(found, map(torch.from_numpy, keys), strict=True)
        return [replace(batch, keys=own) for batch, own in pieces]

    if mechanism is None:
        batches = batches_of([plan.rows(round, client, step, one.size) for client, one in clients])

        def gradient(at: Params) -> tuple[Tensor, Params]:
            loss, slope = task.gradient({**at, **statistics}, batches)
            if statistics:
                slope, moved = split_statistics(slope)
                if not after:
                    after.update(moved)
            if recipe.client_level is not None:
                # Remove NaN, infinite and huge entries, so that no orthogonalizer fails. If one
                # client could stop the run, the stop would disclose that client's data.
                slope = {
                    name: value.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGE, LARGE)
                    for name, value in slope.items()
                }
            elif not is_finite(loss.sum()):
                where = f"clients {[client for client, _ in clients]}, round {round}, step {step}"
                raise NonFinite(
                    f"the loss is not finite ({where}). Lower [local] lr or fix the data."
                )
            return loss, slope

        return Context(params, gradient, draws, factor=factor, clients=numbers)
    turns = [
        0 if mechanism.fixed_order is None else plan.turn(round, client, step)
        for client, _ in clients
    ]
    rows = [
        mechanism.rows(draw, shard.size)
        if mechanism.fixed_order is None
        else mechanism.fixed_order.rows(plan.seed, client, turn, shard.size, mechanism.lot)
        for draw, turn, (client, shard) in zip(draws, turns, clients, strict=True)
    ]
    batches = batches_of(rows)
    release = mechanism.releases(task, batches, draws, turns[0])
    return Context(params, forbidden_gradient, draws, release, factor, numbers)


def _repeated(tree: Params, times: int) -> Params:
    """Repeat tensors along the replica axis, and preserve their memory order."""
    if times == 1:
        return tree
    turned = {name: value.ndim > 2 and value.mT.is_contiguous() for name, value in tree.items()}
    return {
        name: torch.cat([value.mT] * times).mT if turned[name] else torch.cat([value] * times)
        for name, value in tree.items()
    }


def _received(
    recipe: Recipe,
    sent: Params,
    first: Params,
    numbers: Sequence[int],
    own: Mapping[int, States],
) -> Params:
    """Return the models from which a batch of clients starts.

    Each model is the server's model with the client's personal parameters. If the client has not
    stored personal parameters, the parameters of the initial model are used.
    """
    if not recipe.personal:
        return sent
    parts = blocks(personal_part(recipe, first), len(numbers))
    for place, client in enumerate(numbers):
        if held := own.get(client):
            parts[place] = {
                name: held[PERSONAL][name].to(one) for name, one in parts[place].items()
            }
    mine = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
    return {name: mine[name] if name in mine else sent[name] for name in first}


def _resumed(
    recipe: Recipe,
    params: Params,
    first: Params,
    numbers: Sequence[int],
    own: Mapping[int, States],
) -> States:
    """Return the persistent states of a batch of clients.

    A client that has not stored a state uses the initial state of the link. The initial state of a
    personal model is the run's initial model.
    """
    found: States = {}
    for link in recipe.chain.links:
        personal = link.name == PERSONAL
        known = personal or any(own.get(client) for client in numbers)
        if link.name not in recipe.persistent or not known:
            continue
        parts = blocks(link.init(first if personal else params), len(numbers))
        for place, client in enumerate(numbers):
            if held := own.get(client):
                mine = parts[place]
                parts[place] = {name: held[link.name][name].to(one) for name, one in mine.items()}
        found[link.name] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return found


# The server's aggregate


def _combined(
    recipe: Recipe, state: ServerState, replies: Sequence[Reply]
) -> tuple[Params, States, States]:
    """Return the combined model, the combined returned states, and the aggregator's own states."""
    if recipe.client_level is not None:
        before = joint(recipe, state.params, state.states)
        each = [joint(recipe, reply.params, reply.states) for reply in replies]
        found = recipe.client_level.released(before, each, state.round)
        return found.pop("model"), found, {}
    memory = {name: state.states.get(name, {}) for name in aggregate_states(recipe)}
    kept: States = {}

    def combine(name: str, replies: Sequence[Reply]) -> Params:
        found, after = recipe.aggregate.combine(replies, memory.get(name))
        if memory:
            kept[name] = after
        return found

    states = {
        name: combine(
            aggregate_state(name),
            [replace(one, params=one.states[name], part=name) for one in replies],
        )
        for name in recipe.returned
    }
    if recipe.aggregate.shares is not None:  # for states that depend on the averaging of noise
        squares = sum(share**2 for share in recipe.aggregate.shares(replies))
        states |= {
            link.name: link.averaged(states[link.name], squares)
            for link in recipe.chain.links
            if link.averaged is not None and link.name in states
        }
    return combine(aggregate_state(), replies), states, kept


# A run and its replace-one neighbours in one stack that shares every draw (Stability note, sec. 3)


def run_neighbours(
    experiment: Experiment, neighbours: Neighbours, seed: int, engine: Engine = run_rounds
) -> Params:
    """Train one replica on each data set in `neighbours`, and return all final models."""
    shards = replace(experiment.shards, neighbours=neighbours)
    experiment = replace(experiment, shards=shards, client_states=ClientStates(), measured=False)
    fresh = begin(experiment.recipe, experiment.task, seed, len(neighbours.client))
    return simulate(experiment, fresh, engine).params


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


# The empirical risk F-hat of a stack of models, and the risk on held-out samples


@dataclass(frozen=True)
class Risk:
    """The mean loss of each replica, and the mean of each other score, in float64.

    Each tensor has the shape [S] for S replicas.
    """

    loss: np.ndarray
    scores: dict[str, np.ndarray]


def risk(
    task: Task, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None = None
) -> Risk:
    """Return the mean loss and scores over samples, weighted by `weights` [n] if they are set."""
    # Counts are divided at the end, so that 443 of 500 is 0.886 and not 0.8860000000000007.
    parts = len(labels) if weights is None else 1
    loss, means = sums(task, params, inputs, labels, weights)
    found = {name: value.cpu().numpy() / parts for name, value in means.items()}
    return Risk(loss.cpu().numpy() / parts, found)


def sums(
    task: Task, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Params]:
    """Return the sums of losses and of scores over the samples, for each replica.

    If `weights` is set, the loss and the scores of each sample are multiplied by its weight.
    """
    if weights is None:
        weights = torch.ones(len(labels), dtype=torch.float64, device=labels.device)
    stack = len(next(iter(params.values())))

    def look(part: slice) -> tuple[Tensor, Params]:
        losses, scores = task.losses(params, Batch(inputs[part], labels[part]))
        means = {name: values.double() @ weights[part] for name, values in scores.items()}
        return losses.double() @ weights[part], means

    loss = torch.zeros(stack, dtype=torch.float64, device=labels.device)
    means: dict[str, Tensor] = {}
    looks = [partial(look, part) for part in _pieces(len(labels), stack)]
    for more, measured in spread(looks, task.thread_safe):
        loss += more
        for name, value in measured.items():
            means[name] = means.get(name, 0) + value
    return loss, means


def _pieces(rows: int, stack: int) -> list[slice]:
    """Split the rows into ranges that are small enough to evaluate."""
    step = max(1, min(CHUNK // (16 * stack), max(LEAST, -(-rows // MOST))))
    return [slice(start, start + step) for start in range(0, rows, step)]


def client_means(task: Task, params: Params, shards: Shards) -> dict[str, np.ndarray]:
    """Return the mean loss and the mean scores of each client that has samples.

    The results have the shape [S, C], for S replicas and C clients.
    """

    def look(part: slice) -> Params:
        losses, scores = task.losses(params, Batch(shards.inputs[part], shards.labels[part]))
        return {"loss": losses.double(), **{name: one.double() for name, one in scores.items()}}

    pieces = _pieces(len(shards.labels), len(next(iter(params.values()))))
    found = spread([partial(look, part) for part in pieces], task.thread_safe)
    sizes = np.diff(shards.offsets)
    starts, counts = shards.offsets[:-1][sizes > 0], sizes[sizes > 0]
    return {
        name: np.add.reduceat(torch.cat([one[name] for one in found], 1).cpu().numpy(), starts, 1)
        / counts
        for name in found[0]
    }


def sample_weights(sizes: np.ndarray, client_weights: np.ndarray) -> Tensor:
    """Return the weight of each sample, sorted by client.

    A sample of client i has the weight p_i / n_i. Here, p_i is the weight of the client, and n_i is
    the number of its samples (Stability note, section 3).
    """
    return torch.from_numpy(np.repeat(client_weights / sizes, sizes))
