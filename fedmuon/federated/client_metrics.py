"""Measurements of each client in a round, for the file `clients.jsonl`.

A client measures its loss before and after its local steps, its drift, the norm of its momentum,
and its score on its own test samples. The server adds measurements that compare clients, such as
cosines between their updates.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmuon.federated.experiment import Client
from fedmuon.federated.shards import Shard
from fedmuon.optim.chain import States, zeros
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.tasks.base import Batch, Params, Task, blocks, split_statistics

PIECE = 1024  # number of samples that are evaluated together
MOMENTA = ("momentum", "local-momentum")  # links whose state is a client's momentum
OWN_TEST = "client_test_"  # prefix of a client's results on its own test samples


def client_metrics(
    task: Task, shard: Shard, received: Params, local: Params, states: States
) -> dict[str, float]:
    """Measure a client after its local steps.

    Args:
        task: The task.
        shard: The client's samples, and its own test samples if it has any.
        received: The model [1, ...] that the client received.
        local: The client's model [1, ...] after its local steps.
        states: The states of the client's gradient transformations after its local steps.
    """
    learned, _ = split_statistics(local)
    metrics = {
        "loss_before": _means(task, received, shard.data)["loss"],
        "loss_after": _means(task, local, shard.data)["loss"],
        "drift": norm({name: value - received[name] for name, value in learned.items()}),
    }
    for name in MOMENTA:
        if name in states:
            metrics["momentum_norm"] = norm(states[name])
    if shard.test is not None and len(shard.test.labels):
        measured = _means(task, local, shard.test)
        metrics |= {f"{OWN_TEST}{name}": value for name, value in measured.items()}
    return metrics


def client_records(
    before: ServerState, replies: Sequence[Reply], direction: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return a record of each client's measurements in this round, in the order of the clients.

    A record also contains the cosine between the client's update and the mean update. Numbers that
    are not finite are left out.
    """
    ordered = sorted(replies, key=lambda reply: reply.client)
    base = zeros(before.params) if direction else before.params  # a direction is already an update
    cosines = cosines_to_mean(base, [split_statistics(reply.params)[0] for reply in ordered])
    records = []
    for reply, cosine in zip(ordered, cosines, strict=True):
        metrics = {**reply.metrics, "cosine": cosine}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        records.append({"client": reply.client, "samples": reply.samples, **finite})
    return tuple(records)


def metrics_of_each(
    task: Task, clients: Sequence[Client], start: Params, local: Params, states: States
) -> list[dict[str, float]]:
    """Measure each client of a batch, before and after its local steps."""
    starts, models = (blocks(tree, len(clients)) for tree in (start, local))
    momenta = {name: blocks(states[name], len(clients)) for name in MOMENTA if name in states}
    return [
        client_metrics(
            *(task, shard, starts[k], models[k]),
            {name: trees[k] for name, trees in momenta.items()},
        )
        for k, (_, shard) in enumerate(clients)
    ]


def cosines_to_mean(before: Params, models: Sequence[Params]) -> list[float]:
    """Return the cosine between each update and the mean update.

    The cosine is NaN if one of the two updates is 0.
    """

    def update(model: Params) -> Tensor:  # computed twice, to store only one update at a time
        return _flat({name: value - before[name] for name, value in model.items()})

    if not models:
        return []
    mean = update(models[0])
    for model in models[1:]:
        mean += update(model)
    mean /= len(models)
    length, cosines = float(torch.linalg.vector_norm(mean)), []
    for model in models:
        change = update(model)
        product = length * float(torch.linalg.vector_norm(change))
        cosines.append(float(change @ mean) / product if product else math.nan)
    return cosines


def norm(tree: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all entries of all tensors, in float64."""
    return float(torch.linalg.vector_norm(_flat(tree)))


def _flat(tree: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in tree.values()])


def _means(task: Task, params: Params, samples: Batch) -> dict[str, float]:
    """Return the mean loss and the mean scores of one model on these samples."""
    sums: dict[str, Tensor] = {}
    for start in range(0, len(samples.labels), PIECE):
        part = slice(start, start + PIECE)
        losses, scores = task.losses(params, Batch(samples.inputs[part], samples.labels[part]))
        for name, values in {"loss": losses, **scores}.items():
            total = values[0].double().sum()
            sums[name] = sums[name] + total if name in sums else total
    return {name: float(total) / len(samples.labels) for name, total in sums.items()}
