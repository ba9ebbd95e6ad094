"""Measure the bytes of a round's messages, by serializing the messages of the first round.

On Ray, messages are pickled. If all messages of a call have the same content, this content is sent
once per call, or once per machine if it is large. With a SuperLink, each client receives its
complete message.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedmuon.clients.messages import array_record
from fedmuon.config.load import Config
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.traffic import returned_like
from fedmuon.federated.wire import pack
from fedmuon.optim.stage import ServerState
from fedmuon.server import messaging
from fedmuon.server.ray.flower_internals import identify, node_ids, numbered, weight
from fedmuon.server.ray.worker_pool import apart, large
from fedmuon.server.strategy import FedMuonStrategy

SAMPLE = 1024  # maximum number of serialized messages; further messages have the same size


@dataclass(frozen=True)
class Sizes:
    """The bytes that one round sends to the clients (`down`) and back to the server (`up`)."""

    down: int
    up: int


def on_ray(
    config: Config, experiment: Experiment, state: ServerState, workers: int, machines: int
) -> Sizes:
    """Measure the bytes of a round on Ray, where each worker gets one call."""
    ids = node_ids(config.federation.clients, config.federation.seed)
    partitions = {node: place for place, node in enumerate(ids)}
    messages = requests(config, experiment, state, ids)
    calls = min(workers, len(messages))
    content, bare = apart(messages)
    stored = content is not None and large(content)  # once on each machine, and in no call
    shared = len(pickle.dumps(content, 5)) * machines if stored else 0

    def call(part: Sequence[Message]) -> Any:
        nodes = [message.metadata.dst_node_id for message in part]
        return None if stored else content, part, {}, {node: partitions[node] for node in nodes}

    down = shared + _scaled(bare, calls, call)
    arrived = pickle.loads(pickle.dumps(bare[:SAMPLE], 5))
    replies = [_reply(experiment, state, message, partitions) for message in arrived]
    if calls == len(messages):  # in a call with one message, the reply also has an id
        for reply in replies:
            numbered(reply)
    up = _scaled(replies, calls, lambda part: [(reply, None) for reply in part], len(messages))
    return Sizes(down, up)


def on_link(config: Config, experiment: Experiment, state: ServerState) -> Sizes:
    """Measure the bytes of a round in a deployment with a SuperLink."""
    messages = requests(config, experiment, state)
    client = messages[0].metadata.dst_node_id
    reply = _reply(experiment, state, messages[0], {client: client})
    return Sizes(len(messages) * weight(messages[0]), len(messages) * weight(reply))


def requests(
    config: Config, experiment: Experiment, state: ServerState, ids: Sequence[int] = ()
) -> list[Message]:
    """Create the server's messages of the first round.

    `ids` contains the node ids. Without `ids`, the partition numbers are used as node ids.
    """
    identify()
    clients = [int(client) for client in experiment.plan.participants(0)]
    nodes = {client: ids[client] if ids else client for client in clients}
    keys = messaging.blank(clients) if experiment.recipe.masked_clients else None
    strategy = FedMuonStrategy(config, experiment, state, nodes, keys)
    messages = list(strategy.messages(MessageType.TRAIN, clients))
    for message in messages:
        numbered(message)
    return messages


def questions(nodes: Iterable[int]) -> list[Message]:
    """Create the first query to each node, which asks for the node's partition."""
    identify()
    return [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]


def _reply(
    experiment: Experiment, state: ServerState, message: Message, partitions: Mapping[int, int]
) -> Message:
    """Create a reply that is as large as a real reply."""
    client = partitions[message.metadata.dst_node_id]
    like = returned_like(experiment.recipe, state.params, state.states, client)
    stack = len(next(iter(state.params.values())))
    records: dict[str, Any] = {
        "arrays": array_record(pack(*like)),
        "metrics": MetricRecord({"loss": [0.5] * stack}),
        "who": ConfigRecord({"partition": client, "round": 0}),
    }
    return Message(RecordDict(records), reply_to=message)


def _scaled(
    messages: Sequence[Message],
    calls: int,
    call: Callable[[Sequence[Message]], Any],
    count: int = 0,
) -> int:
    """Return the bytes of `count` messages in `calls` calls, extrapolated from a sample."""
    count, per_call = count or len(messages), -(-len(messages) // calls)
    sample = list(messages[: min(SAMPLE, per_call)])
    size, first = (len(pickle.dumps(call(part), 5)) for part in (sample, sample[:1]))
    slope = (size - first) / (len(sample) - 1) if len(sample) > 1 else 0.0
    return round(calls * (first - slope) + count * slope) if slope else calls * first
