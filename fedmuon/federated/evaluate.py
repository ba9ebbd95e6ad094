"""Risks of a stack of models: the empirical risk F-hat, and the risk on held-out samples."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.threads import spread
from fedmuon.tasks.base import Batch, Params, Task

CHUNK = 1 << 24  # logits held at once by a thread
LEAST, MOST = 1024, 64  # samples of a piece, and pieces, unless these bring too many logits


@dataclass(frozen=True)
class Risk:
    """Weighted mean loss, and by name the means of what else the task measures: [S] float64."""

    loss: np.ndarray
    scores: dict[str, np.ndarray]


def risk(
    task: Task, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None = None
) -> Risk:
    """Means over samples, weighted by `weights` [n] that sum to 1; None is the plain mean."""
    parts = len(labels) if weights is None else 1  # counted, then divided: 0.886 is not
    loss, means = sums(task, params, inputs, labels, weights)  # 0.8860000000000007
    found = {name: value.cpu().numpy() / parts for name, value in means.items()}
    return Risk(loss.cpu().numpy() / parts, found)


def sums(
    task: Task, params: Params, inputs: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Params]:
    """The losses' and the scores' weighted sums [S] float64, left on the device; None counts."""
    rows = len(labels)
    if weights is None:
        weights = torch.ones(rows, dtype=torch.float64, device=labels.device)
    stack = len(next(iter(params.values())))
    step = max(1, min(CHUNK // (16 * stack), max(LEAST, -(-rows // MOST))))

    def look(start: int) -> tuple[Tensor, Params]:
        part = slice(start, start + step)
        losses, scores = task.losses(params, Batch(inputs[part], labels[part]))
        means = {name: values.double() @ weights[part] for name, values in scores.items()}
        return losses.double() @ weights[part], means

    loss = torch.zeros(stack, dtype=torch.float64, device=labels.device)
    means: dict[str, Tensor] = {}
    looks = [partial(look, at) for at in range(0, rows, step)]
    for more, measured in spread(looks, task.thread_safe):
        loss += more
        for name, value in measured.items():
            means[name] = means.get(name, 0) + value
    return loss, means


def sample_weights(sizes: np.ndarray, client_weights: np.ndarray) -> Tensor:
    """w_ij = p_i / n_i for samples sorted by client, shape [n] (001, section 3)."""
    return torch.from_numpy(np.repeat(client_weights / sizes, sizes))
