"""Clients' samples as tensors: one array sorted by client, of which each client is a slice."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.dealing import dealing
from fedmuon.tasks.base import Batch, Replaced


@dataclass(frozen=True)
class Shard:
    """One client's rows, and the samples that some replicas replace among them."""

    data: Batch

    @property
    def size(self) -> int:
        """n_i."""
        return len(self.data.labels)

    def batch(self, rows: np.ndarray | None) -> Batch:
        """The given rows in the given order; None is the full batch, without a copy."""
        if rows is None:
            return self.data
        chosen = torch.from_numpy(rows).to(self.data.labels.device)
        replaced = self.data.replaced and _within(self.data.replaced, chosen, self.size)
        return Batch(self.data.inputs[chosen], self.data.labels[chosen], replaced)


@dataclass(frozen=True)
class Shards:
    """All clients' rows; `inputs` [n, d], `labels` [n], `offsets` [N + 1]; and held-out rows."""

    inputs: Tensor
    labels: Tensor
    offsets: np.ndarray
    held_out: Batch
    neighbours: Neighbours | None = None
    whose: tuple[np.ndarray, np.ndarray] | None = None  # of the source, and the client of each

    @classmethod
    def of(
        cls,
        data: FederatedData,
        dtype: torch.dtype,
        device: torch.device,
        neighbours: Neighbours | None = None,
    ) -> "Shards":
        """The data on a device, in the precision of the run."""
        inputs, test = (
            torch.from_numpy(rows).to(device, dtype) for rows in (data.inputs, data.test_inputs)
        )
        labels, answers = (
            targets_on(device, dtype, values) for values in (data.labels, data.test_labels)
        )
        whose = (data.train_index, data.client)
        return cls(inputs, labels, data.offsets, Batch(test, answers), neighbours, whose)

    @cached_property
    def dealt(self) -> str:
        """What a worker must have dealt, too."""
        return dealing(*self.whose) if self.whose else ""

    def size(self, client: int) -> int:
        """n_i."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def __getitem__(self, client: int) -> Shard:
        """Client i's shard: views, no copies."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        own = Batch(self.inputs[rows], self.labels[rows])
        return Shard(dataclasses.replace(own, replaced=replaced(self.neighbours, client, own)))


def targets_on(device: torch.device, dtype: torch.dtype, values: np.ndarray) -> Tensor:
    """Labels as they are; real targets in the precision of the run."""
    found = torch.from_numpy(values).to(device)
    return found.to(dtype) if found.is_floating_point() else found


def replaced(neighbours: Neighbours | None, client: int, like: Batch) -> Replaced | None:
    """The samples of one client that some data sets of a stack replace, as tensors like its own."""
    there = np.flatnonzero(neighbours.client == client) if neighbours else np.array([])
    if neighbours is None or not there.size:
        return None
    device = like.labels.device
    labels = targets_on(device, like.inputs.dtype, neighbours.labels[there])
    return Replaced(
        torch.from_numpy(there).to(device),
        torch.from_numpy(neighbours.position[there]).to(device),
        torch.from_numpy(neighbours.inputs[there]).to(device, like.inputs.dtype),
        labels,
    )


def _within(replaced: Replaced, rows: Tensor, size: int) -> Replaced | None:
    """The replaced samples that the mini-batch holds, by their place in it."""
    place = torch.full((size,), -1, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(len(rows), device=rows.device)
    position = place[replaced.position]
    held = position >= 0
    if not bool(held.any()):
        return None
    return Replaced(
        replaced.replica[held], position[held], replaced.inputs[held], replaced.labels[held]
    )
