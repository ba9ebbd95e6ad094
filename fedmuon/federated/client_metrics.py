"""Measurements of each client in a round: the records of `clients.jsonl`.

A client measures its own part where its samples are: its loss before and after its local steps, how
far it drifted, the norm of its momentum, and its score on its own test samples. The server adds
what needs the other clients.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmuon.federated.client_data import Shard
from fedmuon.optim.chain import States
from fedmuon.tasks.base import Batch, Params, Task, split_statistics

PIECE = 1024  # samples that are evaluated together
MOMENTA = ("momentum", "local-momentum")  # links whose state is the momentum of a client
OWN_TEST = "client_test_"  # prefix of measurements on a client's own test samples


def client_metrics(
    task: Task, shard: Shard, received: Params, local: Params, states: States
) -> dict[str, float]:
    """Measure a client after its local steps.

    Args:
        task: The task.
        shard: The client's samples, and its own test samples if it has some.
        received: The model [1, ...] that it begins with.
        local: The client's model [1, ...] after its local steps.
        states: The states of its links after them.
    """
    learned, _ = split_statistics(local)
    found = {
        "loss_before": _means(task, received, shard.data)["loss"],
        "loss_after": _means(task, local, shard.data)["loss"],
        "drift": norm({name: value - received[name] for name, value in learned.items()}),
    }
    for name in MOMENTA:
        if name in states:
            found["momentum_norm"] = norm(states[name])
    if shard.test is not None and len(shard.test.labels):
        measured = _means(task, local, shard.test)
        found |= {f"{OWN_TEST}{name}": value for name, value in measured.items()}
    return found


def cosines_to_mean(before: Params, models: Sequence[Params]) -> list[float]:
    """The cosine of each model's update to the mean of all updates; NaN where one of them is 0."""

    def update(model: Params) -> Tensor:  # made twice, so that no two are held at once
        return _flat({name: one - before[name] for name, one in model.items()})

    if not models:
        return []
    mean = update(models[0])
    for model in models[1:]:
        mean += update(model)
    mean /= len(models)
    length, found = float(torch.linalg.vector_norm(mean)), []
    for model in models:
        one = update(model)
        both = length * float(torch.linalg.vector_norm(one))
        found.append(float(one @ mean) / both if both else math.nan)
    return found


def norm(tree: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all entries, in float64."""
    return float(torch.linalg.vector_norm(_flat(tree)))


def _flat(tree: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in tree.values()])


def _means(task: Task, params: Params, samples: Batch) -> dict[str, float]:
    """The mean loss of one model, and of what else the task measures."""
    sums: dict[str, Tensor] = {}
    for start in range(0, len(samples.labels), PIECE):
        part = slice(start, start + PIECE)
        losses, scores = task.losses(params, Batch(samples.inputs[part], samples.labels[part]))
        for name, values in {"loss": losses, **scores}.items():
            total = values[0].double().sum()
            sums[name] = sums[name] + total if name in sums else total
    return {name: float(total) / len(samples.labels) for name, total in sums.items()}
