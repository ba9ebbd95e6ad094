"""Losses of a model on the samples of each client, per predicted token if the samples are text.

The loss of a window of text is a mean over its predicted tokens. Windows may predict different
numbers of tokens, because prompts are not predicted. So a client's loss is the sum over its tokens
divided by their number. For other samples, it is the mean over the samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmuon.config.load import Config
from fedmuon.data.unseen import some_of_each
from fedmuon.federated.client_data import left_out
from fedmuon.federated.evaluation import of_samples
from fedmuon.federated.shards import targets_on
from fedmuon.tasks.base import IGNORED, Batch, Params, Task
from fedmuon.tasks.networks import NetworkTask


@dataclass(frozen=True)
class ClientLosses:
    """The mean loss of each client, per predicted token if the samples are text.

    Attributes:
        clients: The number of each client [C].
        tokens: Number of predicted tokens, or of samples, of each client [C].
        losses: Mean loss of each client [C].
        scores: The other measures of the task, by name, each as a mean of each client [C].
        text: Whether the samples are text.
    """

    clients: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    scores: Mapping[str, np.ndarray]
    text: bool

    @property
    def loss(self) -> float:
        """The mean over clients. Each client has the same weight."""
        return float(self.losses.mean())

    @property
    def worst_decile(self) -> float:
        """The mean loss of the tenth of the clients, at least one, with the largest losses."""
        tenth = -(-len(self.losses) // 10)
        return float(np.sort(self.losses)[-tenth:].mean())

    def fields(self, prefix: str) -> dict[str, float]:
        """Return the measures as fields of a record, whose names begin with `prefix`."""
        fields = {f"{prefix}_loss": self.loss, f"{prefix}_loss_worst_decile": self.worst_decile}
        if self.text:
            fields[f"{prefix}_perplexity"] = float(np.exp(self.loss))
        return fields | {
            f"{prefix}_{name}": float(values.mean()) for name, values in self.scores.items()
        }


def predicted_counts(task: Task, samples: Batch) -> tuple[Tensor, bool]:
    """Return how many tokens each sample predicts [n], and whether the samples are text.

    The number is 1 for samples that are not text.
    """
    if isinstance(task, NetworkTask):
        targets = task.targets(samples.inputs, samples.labels)
        if targets.ndim == 2 and not targets.is_floating_point():
            return (targets != IGNORED).sum(1).double(), True
    count = len(samples.labels)
    return torch.ones(count, dtype=torch.float64, device=samples.labels.device), False


def client_losses(task: Task, params: Params, samples: Batch, owners: np.ndarray) -> ClientLosses:
    """Measure the first replica of a model on the samples of several clients.

    Args:
        task: The task.
        params: The parameters [S, ...].
        samples: The samples [n, ...].
        owners: The client of each sample [n]. Clients without samples are left out.
    """
    losses, scores = of_samples(task, params, samples)
    counts, text = predicted_counts(task, samples)
    clients, places = np.unique(owners, return_inverse=True)
    codes = torch.from_numpy(places).to(counts.device)
    tokens = counts.new_zeros(len(clients)).index_add(0, codes, counts)

    def mean(values: Tensor) -> np.ndarray:
        sums = torch.zeros_like(tokens).index_add(0, codes, values[0].double() * counts)
        return (sums / tokens).cpu().numpy()

    means = {name: mean(values) for name, values in scores.items()}
    return ClientLosses(clients, tokens.cpu().numpy(), mean(losses), means, text)


class LeftOutSamples(NamedTuple):
    """Samples of clients that never train, with the client of each sample and all names."""

    samples: Batch
    owners: np.ndarray
    names: tuple[str, ...]


def left_out_samples(
    config: Config, task: Task, group: str, everything: bool = False
) -> LeftOutSamples | None:
    """Return samples of the clients that never train, or None if the group has no clients.

    There are about `[data] test` samples, with the same number of each client, as far as it has so
    many.

    Args:
        config: The resolved config.
        task: The task, whose dtype and device the samples get.
        group: `unseen` or `validation`.
        everything: Whether to return all samples from which training clients get their train
            samples: those before the official test part, if there are any.
    """
    source = left_out(config, group)
    if source is None:
        return None
    assert source.owner is not None
    chosen = some_of_each(source, config.data.test)
    if everything:
        chosen = np.arange(source.official_test or len(source.labels))
    rows = torch.from_numpy(source.rows(config.data.normalize, chosen))
    labels = targets_on(task.device, task.dtype, source.labels[chosen])
    names = source.owner_names or tuple(map(str, range(int(source.owner.max()) + 1)))
    return LeftOutSamples(
        Batch(rows.to(task.device, task.dtype), labels), source.owner[chosen], names
    )
