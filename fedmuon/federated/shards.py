"""Clients' samples as tensors: one array sorted by client, of which each client is a slice."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import sent
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours
from fedmuon.federated.deal import dealing
from fedmuon.tasks.base import Batch, Replaced


@dataclass(frozen=True)
class Shard:
    """One client's rows, and the samples that some replicas replace among them, whose `position`
    the host knows, too: which of them a mini-batch holds is no question to a device."""

    data: Batch
    position: np.ndarray | None = None

    @classmethod
    def among(cls, data: Batch, neighbours: Neighbours | None, client: int) -> "Shard":
        """A client's rows in a stack of data sets, of which some replace samples of its own."""
        there = np.flatnonzero(neighbours.client == client) if neighbours else np.array([])
        if neighbours is None or not there.size:
            return cls(Batch(data.inputs, data.labels))
        position, dtype = neighbours.position[there], data.inputs.dtype
        inputs, labels = neighbours.inputs[there], neighbours.labels[there]
        values = (there, position, inputs, labels)
        own = (targets_on(data.labels.device, dtype, each) for each in values)
        return cls(dataclasses.replace(data, replaced=Replaced(*own)), position)

    @property
    def size(self) -> int:
        """n_i."""
        return len(self.data.labels)

    def batch(self, rows: np.ndarray | None) -> Batch:
        """The given rows in the given order; None is the full batch, without a copy."""
        if rows is None:
            return self.data
        chosen = sent(torch.from_numpy(rows), self.data.labels.device)
        return Batch(self.data.inputs[chosen], self.data.labels[chosen], self._within(rows))

    def _within(self, rows: np.ndarray) -> Replaced | None:
        """The replaced samples that the mini-batch holds, by their place in it."""
        there = self.data.replaced
        if there is None:
            return None
        position = there.position.cpu().numpy() if self.position is None else self.position
        place = np.full(self.size, -1)
        place[rows] = np.arange(len(rows))
        held = np.flatnonzero(place[position] >= 0)
        if not held.size:
            return None
        kept, device = torch.from_numpy(held), there.position.device
        at, kept = sent(torch.from_numpy(place[position[held]]), device), sent(kept, device)
        return Replaced(there.replica[kept], at, there.inputs[kept], there.labels[kept])


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

    def only(self, kept: np.ndarray) -> "Shards":
        """Those of the rows [n] that are kept, and of no other data set."""
        counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[self.offsets])
        there = torch.from_numpy(kept).to(self.labels.device)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Shards(self.inputs[there], self.labels[there], offsets, self.held_out)

    def __getitem__(self, client: int) -> Shard:
        """Client i's shard: views, no copies."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        own = Batch(self.inputs[rows], self.labels[rows])
        return Shard.among(own, self.neighbours, client)


def targets_on(device: torch.device, dtype: torch.dtype, values: np.ndarray) -> Tensor:
    """Labels as they are; real targets in the precision of the run."""
    found = torch.from_numpy(values)
    return sent(found, device, dtype if found.is_floating_point() else None)
