"""Answer messages in a client: unpack a message, train or evaluate, mask and pack the reply.

Between rounds, a client process stores the persistent states of the optimizer (`stored_states.py`)
and the private key of its mask (`masks.py`). The process also caches the samples of its clients and
the objects that the config describes.
"""

import faulthandler
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from fedmuon.clients.masks import mask_reply
from fedmuon.clients.messages import (
    MEASURED,
    Fetch,
    FlatConfig,
    answer,
    array_record,
    nothing,
    partition,
    record_of,
    request,
)
from fedmuon.clients.stored_states import Memory
from fedmuon.config.load import Config, unflatten
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import SAME_VERSION, InputError, plain
from fedmuon.federated.build import LocalClient, build_worker
from fedmuon.federated.evaluation import risk
from fedmuon.federated.rounds import client_updates, first_model, opened
from fedmuon.federated.wire import distrusted, named, pack, received
from fedmuon.optim.chain import States
from fedmuon.optim.stage import Broadcast
from fedmuon.runs.process_profile import this_process
from fedmuon.tasks.base import Params


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End the process if this block takes longer than the time to live of the message.

    A simulation waits for its workers. Without this limit, a client that hangs would block the
    simulation. The limit works even if Python hangs.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def train_together(
    messages: Sequence[Message], contexts: Sequence[Context], fetch: Fetch = nothing
) -> list[Message]:
    """Train the clients of messages with the same content in one batch, and return the replies."""
    numbers = [partition(context) for context in contexts]
    with distrusted():
        config, round, stack, rows, factor, dealt = request(messages[0])
        seconds = float(messages[0].metadata.ttl)
    profiled = ("output.profile", True) in config
    with deadline(seconds), this_process.of_round(round, profiled):
        clients = [_client(config, number, fetch()) for number in numbers]
        if dealt:
            clients[0].require_same_partition(dealt)
        with distrusted():
            shards = [
                client.shard if rows is None else client.with_neighbours(rows, stack)
                for client in clients
            ]
            params, states = _arrays(messages[0], clients[0], stack)
        setup = clients[0].setup
        recipe, task, plan = setup.recipe, setup.task, setup.plan
        with distrusted():
            model = partial(first_model, task, plan.seed, stack)
            sent = opened(recipe, Broadcast(round, params, states), model)
        if factor is not None:  # only the server calls a custom schedule
            plan = replace(plan, factor=lambda round: factor)
        pairs = list(zip(numbers, shards, strict=True))
        memories = [
            Memory(*arguments)
            for arguments in zip(messages, contexts, numbers, strict=True)
            if recipe.keeps_states
        ]
        stored = {memory.client: memory.recall(round) for memory in memories}
        measured = stack == 1 and setup.measured  # without neighbouring data sets
        replies = client_updates(recipe, task, plan, pairs, sent, stored, measured)
        for memory, reply in zip(memories, replies if memories else (), strict=True):
            memory.keep(reply.own)
        if recipe.masked_clients:
            triples = zip(replies, messages, contexts, strict=True)
            with distrusted():
                replies = [mask_reply(recipe.masked_clients, *triple) for triple in triples]
    return [
        answer(
            message,
            {
                "arrays": array_record(pack(reply.params, reply.states)),
                "metrics": MetricRecord({"loss": reply.loss.double().tolist()}),
                "who": ConfigRecord({"partition": reply.client, "round": round}),
                **({MEASURED: MetricRecord({**reply.metrics})} if reply.metrics else {}),
            },
        )
        for message, reply in zip(messages, replies, strict=True)
    ]


def evaluate(message: Message, context: Context, fetch: Fetch = nothing) -> Message:
    """Evaluate the model on this client's samples, and reply with losses and metrics per replica.

    The strategy of fedmuon does not request evaluations. Other Flower strategies may.

    Raises:
        InputError: If the run is private, because the ledger does not count an evaluation.
    """
    number = partition(context)
    with distrusted():
        config, round, stack, *_ = request(message)
    client = _client(config, number, fetch())
    if client.setup.recipe.private:
        raise InputError(
            "a client of a private run does not report the loss on its samples, because this "
            "loss contains no noise. Evaluate the model on the server's test samples."
        )
    with distrusted():
        params, _ = _arrays(message, client, stack, states=False)
    if params.keys() != first_model(client.setup.task, client.setup.plan.seed, stack).keys():
        raise InputError(
            "the server requested the loss of a personal model, but part of a personal model "
            "never leaves its client. To measure personal models, set [data] client-test."
        )
    result = risk(client.setup.task, params, client.shard.data.inputs, client.shard.data.labels)
    metrics = {"loss": result.loss} | result.scores
    return answer(
        message,
        {
            "metrics": MetricRecord({name: values.tolist() for name, values in metrics.items()}),
            "who": ConfigRecord({"partition": number, "round": round}),
        },
    )


@lru_cache(maxsize=64)
def _client(config: FlatConfig, client: int, objects: UserObjects) -> LocalClient:
    return build_worker(_config(config, objects), client)


@lru_cache(maxsize=2)
def _config(config: FlatConfig, objects: UserObjects) -> Config:
    """Parse the config of a message, and set torch's number of threads. The result is cached."""
    torch.set_num_threads(int(os.environ.get("FEDMUON_CLIENT_THREADS", "1")))
    with distrusted():
        return unflatten(dict(config)).with_objects(objects)


def _arrays(
    message: Message, client: LocalClient, stack: int, states: bool = True
) -> tuple[Params, States]:
    """Unpack the model of a message and, with `states`, also the states.

    Raises:
        InputError: If the arrays are too small for the number of replicas in the message.
    """
    record = record_of(message.content, "arrays", ArrayRecord)
    arrays = {name: array.data for name, array in record.items()}
    single = named(client.template(1)[0], {})
    if any(stack * value.nbytes > len(arrays.get(name, b"")) for name, value in single.items()):
        raise InputError(
            f"the server's message announces {plain(stack, 20)} replicas, but its arrays are too "
            f"small for this number. {SAME_VERSION}"
        )
    params, template = client.template(stack)
    return received(arrays, params, template if states else {})
