"""The ClientApp: unpack a message, call the core, pack the reply.

Clients keep nothing between rounds except what can be made again: the samples of the partitions
that this worker process has served, and the objects that the config describes.
"""

import faulthandler
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedmuon.config import Config, unflatten
from fedmuon.errors import InputError, plain
from fedmuon.federated.evaluate import risk
from fedmuon.federated.local import Broadcast, cohort_round, cohorts
from fedmuon.federated.wire import distrusted, named, pack, received
from fedmuon.federated.worker import Worker, worker
from fedmuon.own import NOTHING, Own
from fedmuon.tables import Scalar
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import States

FlatConfig = tuple[tuple[str, Scalar], ...]

Fetch = Callable[[], Own]  # what the caller handed over in Python, the same object each time


def nothing() -> Own:
    """All that a client needs is named in its config."""
    return NOTHING


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End this worker process if a message outlives its time: a client that hangs must not keep
    the simulation, which waits for its workers, from ending. The watchdog needs no Python."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def query(message: Message, context: Context) -> Message:
    """Which partition this node holds: node ids are random, partition ids are not."""
    return _reply(message, {"who": ConfigRecord({"partition": _partition(context)})})


def train(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """One client's round of local steps."""
    (reply,) = train_together([message], [context], fetch)
    return reply


def train_together(
    messages: Sequence[Message], contexts: Sequence[Context], fetch: Fetch = nothing
) -> list[Message]:
    """The same of clients that are asked the same, whom the core steps as one stack."""
    numbers = [_partition(context) for context in contexts]
    with distrusted():
        config, round, stack, rows, factor, dealt = _request(messages[0])
        most = float(messages[0].metadata.ttl)
    with deadline(most):
        clients = [_client(config, number, fetch()) for number in numbers]
        if dealt:
            clients[0].require_dealt(dealt)
        with distrusted():
            shards = [one.shard if rows is None else one.with_neighbours(rows) for one in clients]
            params, states = _arrays(messages[0], clients[0], stack)
        sent, recipe, plan = Broadcast(round, params, states), clients[0].recipe, clients[0].plan
        if factor is not None:  # the user's schedule is called once a run, by the server
            plan = replace(plan, factor=lambda round: factor)
        task, pairs = clients[0].task, list(zip(numbers, shards, strict=True))
        replies = [
            reply
            for cohort in cohorts(task, params, pairs)
            for reply in cohort_round(recipe, task, plan, cohort, sent)
        ]
    return [
        _reply(
            message,
            {
                "arrays": ArrayRecord(pack(reply.params, reply.states)),
                "metrics": MetricRecord({"loss": reply.loss.double().tolist()}),
                "who": ConfigRecord({"partition": reply.client, "round": round}),
            },
        )
        for message, reply in zip(messages, replies, strict=True)
    ]


def evaluate(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """The model's loss and what else the task measures on this client's own samples, per replica; a
    private client tells nothing that no ledger counts."""
    number = _partition(context)
    with distrusted():
        config, round, stack, *_ = _request(message)
    client = _client(config, number, fetch())
    if client.recipe.mechanism is not None:
        raise InputError("a private client measures nothing on its samples: that has no noise")
    with distrusted():
        params, _ = _arrays(message, client, stack, states=False)
    found = risk(client.task, params, client.shard.data.inputs, client.shard.data.labels)
    metrics = {"loss": found.loss} | found.scores
    return _reply(
        message,
        {
            "metrics": MetricRecord({name: held.tolist() for name, held in metrics.items()}),
            "who": ConfigRecord({"partition": number, "round": round}),
        },
    )


@lru_cache(maxsize=64)
def _client(config: FlatConfig, client: int, own: Own) -> Worker:
    """What the config says of one client; of those that come again soon it is kept."""
    return worker(_config(config, own), client)


@lru_cache(maxsize=2)
def _config(config: FlatConfig, own: Own) -> Config:
    """The config of a message, read once per worker process."""
    torch.set_num_threads(int(os.environ.get("FEDMUON_CLIENT_THREADS", "1")))
    with distrusted():
        return unflatten(dict(config)).beside(own)


def _request(
    message: Message,
) -> tuple[FlatConfig, int, int, np.ndarray | None, float | None, str]:
    """The config (hashable), the round, the number of replicas that a message speaks of, the data
    sets that they see (`Neighbours.rows`), if not all the same, what step sizes are times, and how
    the samples were dealt."""
    flat: dict[str, Any] = dict(message.content.config_records["config"])
    round, stack, rows = flat.pop("round"), flat.pop("stack"), flat.pop("rows", None)
    dealt = plain(flat.pop("dealt", ""), 60)
    if type(round) is not int or type(stack) is not int or round < 0 or stack < 1:
        raise InputError("the message names no round and number of replicas")
    factor = flat.pop("factor", None)
    if factor is not None and not (isinstance(factor, float) and 0 <= factor < math.inf):
        raise InputError("the message names no factor of step sizes")
    if odd := [name for name, value in flat.items() if not isinstance(value, Scalar)]:
        raise InputError(f"the message's {plain(odd[0], 60)} is no single value")
    if rows is not None and len(rows) != 3 * stack:
        raise InputError("the message does not name one data set a replica")
    held = None if rows is None else np.array(rows, np.int64).reshape(stack, 3)
    return tuple(sorted(flat.items())), round, stack, held, factor, dealt


def _arrays(
    message: Message, client: Worker, stack: int, states: bool = True
) -> tuple[Params, States]:
    """The model and, if wanted, the states: of as many replicas as there are bytes for."""
    record = message.content.array_records["arrays"]
    arrays = {name: array.data for name, array in record.items()}
    one = named(client.template(1)[0], {})
    if any(stack * value.nbytes > len(arrays.get(name, b"")) for name, value in one.items()):
        raise InputError(f"the message's arrays are not those of {plain(stack, 20)} replicas")
    params, template = client.template(stack)
    return received(arrays, params, template if states else {})


def _partition(context: Context) -> int:
    if "partition-id" not in context.node_config:
        raise InputError(
            "this SuperNode has no partition-id: start it with --node-config 'partition-id=0'"
        )
    return int(context.node_config["partition-id"])


def _reply(message: Message, records: dict) -> Message:
    return Message(RecordDict(records), reply_to=message)


class Clients(ClientApp):
    """A ClientApp that can answer for many clients at once, of one process."""

    def __init__(self, fetch: Fetch) -> None:
        super().__init__()
        self._fetch = fetch

    def together(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        """Replies to one round's messages, which share their content."""
        first = messages[0]
        if any(one.content is not first.content for one in messages[1:]):
            raise InputError("these messages do not ask for the same")
        if first.metadata.message_type != MessageType.TRAIN:
            return [self(*pair) for pair in zip(messages, contexts, strict=True)]
        return train_together(messages, contexts, self._fetch)


def client_app(fetch: Fetch = nothing) -> ClientApp:
    """The ClientApp of clients that are handed those objects."""
    made = Clients(fetch)
    made.query()(query)
    made.train()(partial(train, fetch=fetch))
    made.evaluate()(partial(evaluate, fetch=fetch))
    return made


app = client_app()
