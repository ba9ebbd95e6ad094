"""Gradients of replicas in which many samples of a client are replaced, such as all of them.

If a replica replaces one sample, a task corrects the shared sum of gradients by two terms. If a
replica replaces many samples, the sum over its own samples costs less than the corrections. The
shared batch is therefore computed for all replicas, and then each replica with replacements is
computed again, with its own samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedmuon.tasks.base import Batch, Params, Points, Replaced

Sums = Callable[[Points, Sequence[Batch]], tuple[Tensor, Params]]
Gradient = Callable[[Params, Sequence[Batch]], tuple[Tensor, Params]]


def has_own_samples(batches: Sequence[Batch]) -> bool:
    """Return whether some replica may replace more than one sample of a batch."""
    return any(batch.replaced is not None and batch.replaced.several for batch in batches)


def with_own_samples(sums: Sums, points: Points, batches: Sequence[Batch]) -> tuple[Tensor, Params]:
    """Return the losses and sums of a task, where replicas may replace any number of samples.

    Args:
        sums: A function of points and batches that returns the losses [K S] and the sums
            [K S, ...] of a task. It receives batches without replacements.
        points: The points with their coefficients. The parameters have the shape [K S, ...].
        batches: The batches of the K clients.
    """
    shared = [replace(batch, replaced=None) for batch in batches]
    loss, total = sums(points, shared)
    replicas, rows, own_batches = len(loss) // len(batches), [], []
    for client, batch in enumerate(batches):
        if batch.replaced is not None:
            for replica in batch.replaced.replica.unique().tolist():
                rows.append(client * replicas + replica)
                own_batches.append(own_batch(batch, batch.replaced, replica))
    if rows:  # each replica is computed as a client of its own
        at = [(c, {name: value[rows] for name, value in params.items()}) for c, params in points]
        loss[rows], own_total = sums(at, own_batches)
        for name, value in own_total.items():
            total[name][rows] = value
    return loss, total


def mean_with_own_samples(
    gradient: Gradient, params: Params, batches: Sequence[Batch]
) -> tuple[Tensor, Params]:
    """Return the mean losses and gradients of a task, as `with_own_samples` does for sums."""

    def at_last(points: Points, own_batches: Sequence[Batch]) -> tuple[Tensor, Params]:
        return gradient(points[-1][1], own_batches)

    return with_own_samples(at_last, [(1.0, params)], batches)


def own_batch(batch: Batch, replaced: Replaced, replica: int) -> Batch:
    """Return the samples of one replica as a batch without replacements."""
    rows = torch.nonzero(replaced.replica == replica).flatten()
    position = replaced.position[rows]
    inputs, labels = batch.inputs.clone(), batch.labels.clone()
    inputs[position], labels[position] = replaced.inputs[rows], replaced.labels[rows]
    return Batch(inputs, labels, keys=batch.keys)
