"""The empirical risk of a stack of models, and the risk on held-out samples."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.threads import spread
from fedmuon.federated.shards import Shards
from fedmuon.tasks.base import Batch, Params, Task

CHUNK = 1 << 24  # maximum number of logits that a thread computes at once
LEAST, MOST = 1024, 64  # minimum samples per piece, and maximum pieces, within the limit of CHUNK


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
    scores = {name: value.cpu().numpy() / parts for name, value in means.items()}
    return Risk(loss.cpu().numpy() / parts, scores)


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
    for part_loss, measured in spread(looks, task.thread_safe):
        loss += part_loss
        for name, value in measured.items():
            means[name] = means.get(name, 0) + value
    return loss, means


def of_samples(task: Task, params: Params, batch: Batch) -> tuple[Tensor, Params]:
    """Return the losses and scores of each sample [S, n], evaluated in parts of limited size."""
    stack, count = len(next(iter(params.values()))), len(batch.labels)
    parts = [
        task.losses(params, Batch(batch.inputs[part], batch.labels[part]))
        for part in _pieces(count, stack)
    ]
    losses = torch.cat([loss for loss, _ in parts], dim=1)
    return losses, {
        name: torch.cat([scores[name] for _, scores in parts], 1) for name in parts[0][1]
    }


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
        return {
            "loss": losses.double(),
            **{name: values.double() for name, values in scores.items()},
        }

    pieces = _pieces(len(shards.labels), len(next(iter(params.values()))))
    results = spread([partial(look, part) for part in pieces], task.thread_safe)
    sizes = np.diff(shards.offsets)
    starts, counts = shards.offsets[:-1][sizes > 0], sizes[sizes > 0]
    return {
        name: np.add.reduceat(
            torch.cat([result[name] for result in results], 1).cpu().numpy(), starts, 1
        )
        / counts
        for name in results[0]
    }


def sample_weights(sizes: np.ndarray, client_weights: np.ndarray) -> Tensor:
    """Return the weight of each sample, sorted by client.

    A sample of client i has the weight p_i / n_i. Here, p_i is the weight of the client, and n_i is
    the number of its samples (Stability note, section 3).
    """
    return torch.from_numpy(np.repeat(client_weights / sizes, sizes))
