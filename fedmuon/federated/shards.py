"""The samples of all clients as tensors. They are sorted by client, so a client is a slice."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import to_device
from fedmuon.tasks.base import Batch, Replaced

if TYPE_CHECKING:
    from fedmuon.data.client_neighbours import ClientNeighbours
    from fedmuon.data.federated import FederatedData
    from fedmuon.data.neighbours import Neighbours

    DataSets = Neighbours | ClientNeighbours


@dataclass(frozen=True)
class Shard:
    """The samples of one client.

    For replicas that are neighbouring data sets, some samples may be replaced.

    Attributes:
        data: The samples, and their replacements if there are any.
        position: The positions of the replaced samples, on the CPU to avoid waiting for the GPU.
        test: The client's own test samples, if any.
    """

    data: Batch
    position: np.ndarray | None = None
    test: Batch | None = None

    @classmethod
    def among(cls, data: Batch, neighbours: "DataSets | None", client: int) -> "Shard":
        """Return a client's shard for several data sets, each of which may replace samples."""
        if neighbours is None:
            return cls(Batch(data.inputs, data.labels))
        values = neighbours.of_client(client)
        if not len(position := values[1]):
            return cls(Batch(data.inputs, data.labels))
        device, dtype = data.labels.device, data.inputs.dtype
        tensors = (targets_on(device, dtype, value) for value in values)
        replaced = Replaced(*tensors, several=neighbours.several)
        return cls(dataclasses.replace(data, replaced=replaced), position)

    @property
    def size(self) -> int:
        """The number of samples n_i."""
        return len(self.data.labels)

    def batch(self, rows: np.ndarray | None) -> Batch:
        """Return the samples with these row numbers.

        If `rows` is None, return all samples without a copy.
        """
        if rows is None:
            return self.data
        indices = to_device(torch.from_numpy(rows), self.data.labels.device)
        batch = Batch(self.data.inputs[indices], self.data.labels[indices])
        if (swaps := self.data.replaced) is None:
            return batch
        position = swaps.position.cpu().numpy() if self.position is None else self.position
        place = np.full(self.size, -1)  # position in the mini-batch of each client row
        place[rows] = np.arange(len(rows))
        contained = np.flatnonzero(place[position] >= 0)
        if not contained.size:
            return batch
        device = swaps.position.device
        at = to_device(torch.from_numpy(place[position[contained]]), device)
        index = to_device(torch.from_numpy(contained), device)
        samples = swaps.inputs[index], swaps.labels[index]
        replaced = Replaced(swaps.replica[index], at, *samples, several=swaps.several)
        return dataclasses.replace(batch, replaced=replaced)


@dataclass(frozen=True)
class Shards:
    """The samples of all clients, sorted by client, and the held-out samples."""

    inputs: Tensor
    labels: Tensor
    offsets: np.ndarray
    held_out: Batch
    neighbours: "DataSets | None" = None
    whose: tuple[np.ndarray, np.ndarray] | None = None  # train indices in the source, and clients
    validation: Batch | None = None
    client_test: "Shards | None" = None  # the clients' own test samples

    @classmethod
    def of(
        cls,
        data: "FederatedData",
        dtype: torch.dtype,
        device: torch.device,
        neighbours: "DataSets | None" = None,
    ) -> "Shards":
        """Create the shards from the data of all clients.

        The tensors have the dtype `dtype` and are on the device `device`.
        """

        def batch(inputs: np.ndarray, labels: np.ndarray) -> Batch:
            rows = torch.from_numpy(inputs).to(device, dtype)
            return Batch(rows, targets_on(device, dtype, labels))

        train = batch(data.inputs, data.labels)
        test = batch(data.test_inputs, data.test_labels)
        validation = batch(data.validation_inputs, data.validation_labels)
        tests = batch(data.client_test_inputs, data.client_test_labels)
        of_clients = cls(tests.inputs, tests.labels, data.client_test_offsets, test)
        whose = (data.train_index, data.client)
        return cls(
            train.inputs,
            train.labels,
            data.offsets,
            test,
            neighbours,
            whose,
            validation,
            of_clients,
        )

    @cached_property
    def partition_digest(self) -> str:
        """A hash of the partition, to check that server and client have the same partition."""
        return partition_digest(*self.whose) if self.whose else ""

    def size(self, client: int) -> int:
        """Return the number of samples n_i of a client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def only(self, kept: np.ndarray) -> "Shards":
        """Return shards with only the samples that a boolean mask selects."""
        counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[self.offsets])
        mask = torch.from_numpy(kept).to(self.labels.device)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Shards(self.inputs[mask], self.labels[mask], offsets, self.held_out)

    def with_test(self, client: int) -> Shard:
        """Return the shard of client i together with the client's own test samples, if any."""
        tests = self.client_test
        return dataclasses.replace(self[client], test=tests and tests[client].data)

    def __getitem__(self, client: int) -> Shard:
        """Return the shard of client i, as views of the shared tensors."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        batch = Batch(self.inputs[rows], self.labels[rows])
        return Shard.among(batch, self.neighbours, client)


def targets_on(device: torch.device, dtype: torch.dtype, values: np.ndarray) -> Tensor:
    """Convert labels to a tensor. Real-valued labels are converted to the precision of the run."""
    labels = torch.from_numpy(values)
    return to_device(labels, device, dtype if labels.is_floating_point() else None)


def partition_digest(train: np.ndarray, client: np.ndarray) -> str:
    """Return a hash of the partition: the indices of the train samples, and the client of each."""
    pairs = np.stack([train, client]).astype("<i8")
    return sha256(pairs.tobytes()).hexdigest()[:16]
