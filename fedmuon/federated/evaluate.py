"""Risks of a stack of models: the empirical risk F-hat, and the risk on held-out samples."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmuon.tasks.base import Batch, Params, Task

CHUNK = 1 << 24  # logits held at once


@dataclass(frozen=True)
class Risk:
    """Weighted mean loss, and by name the means of what else the task measures: [S] float64."""

    loss: np.ndarray
    scores: dict[str, np.ndarray]


def risk(
    task: Task, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None = None
) -> Risk:
    """Means over samples, weighted by `weights` [n] that sum to 1; None is the plain mean."""
    rows, parts = len(labels), 1
    if weights is None:  # counted, then divided: 0.886 is not 0.8860000000000007
        parts, weights = rows, torch.ones(rows, dtype=torch.float64, device=labels.device)
    stack = len(next(iter(params.values())))
    step = max(1, CHUNK // (16 * stack))
    loss = torch.zeros(stack, dtype=torch.float64, device=labels.device)
    means: dict[str, Tensor] = {}
    for start in range(0, rows, step):
        part = slice(start, start + step)
        losses, scores = task.losses(params, Batch(inputs[part], labels[part]))
        loss += losses.double() @ weights[part]
        for name, values in scores.items():
            means[name] = means.get(name, 0) + values.double() @ weights[part]
    found = {name: value.cpu().numpy() / parts for name, value in means.items()}
    return Risk(loss.cpu().numpy() / parts, found)


def sample_weights(sizes: np.ndarray, client_weights: np.ndarray) -> Tensor:
    """w_ij = p_i / n_i for samples sorted by client, shape [n] (001, section 3)."""
    return torch.from_numpy(np.repeat(client_weights / sizes, sizes))
