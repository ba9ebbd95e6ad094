"""The CNN job of every peer, and a plain training loop.

The job fixes the initial model, the participants of each round and the rows of each batch. Training
is one local epoch of SGD without momentum on these mini-batches, followed by the plain mean of the
clients' models. So two correct implementations differ only by rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Model = dict[str, Tensor]
START = "start "  # prefix of the first parameters in the file


@dataclass(frozen=True)
class Job:
    """A training job with all random choices.

    Attributes:
        inputs: Images [n, 1, 28, 28], sorted by client.
        labels: Labels [n], sorted by client.
        offsets: Index of the first sample of each client, and n at the end [N + 1].
        schedule: Participants of each round [R, K].
        rows: Rows of each batch among the samples of the client [R, K, E, b].
        start: The initial model.
        lr: Step size.
    """

    inputs: Tensor
    labels: Tensor
    offsets: NDArray[np.int64]
    schedule: NDArray[np.int64]
    rows: NDArray[np.int64]
    start: Model
    lr: float

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of client i, as views."""
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.inputs[part], self.labels[part]


def load(path: str | Path) -> Job:
    """Read a job."""
    with np.load(path) as file:
        start = {
            name.removeprefix(START): torch.from_numpy(file[name])
            for name in file.files
            if name.startswith(START)
        }
        inputs, labels = (torch.from_numpy(file[name]) for name in ("inputs", "labels"))
        images = inputs.view(-1, 1, 28, 28)
        offsets, schedule, rows = (file[name] for name in ("offsets", "schedule", "rows"))
        return Job(images, labels, offsets, schedule, rows, start, float(file["lr"]))


def cnn() -> nn.Sequential:
    """Return the CNN of McMahan et al. in plain torch, with the parameter order of the job."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def put(model: nn.Module, values: Model) -> None:
    """Copy parameters into a model, in the order of its own parameters."""
    with torch.no_grad():
        for held, value in zip(model.parameters(), values.values(), strict=True):
            held.copy_(value)


def train(model: nn.Module, inputs: Tensor, labels: Tensor, rows: NDArray, lr: float) -> None:
    """Train for one local epoch: an ordinary torch loop over the mini-batches [E, b]."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in torch.from_numpy(rows):
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def report(out: str | Path, model: Model, stamps: list[float]) -> None:
    """Write the last model, and print the seconds of every round as one JSON line."""
    values = torch.cat([value.detach().flatten() for value in model.values()])
    np.save(out, values.numpy(), allow_pickle=False)
    print(json.dumps({"round_seconds": np.diff(stamps).tolist()}), flush=True)
