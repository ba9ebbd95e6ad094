"""The jobs of `benchmarks.published`: networks of other simulators, and a plain training loop.

As in `cnn_work`, a job fixes the initial model, the participants of each round and the rows of each
batch. The networks follow the descriptions of their projects. They have no dropout, so that all
contestants can end with the same model.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cnn_work import START, Job, Model, train
from torch import Tensor, nn

SHAPE = (3, 32, 32)  # CIFAR-10's images


def pfl_cnn() -> nn.Module:
    """Return `simple_cnn` of pfl-research's CIFAR-10 benchmark.

    It has two convolutions and 128 hidden units.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def blazefl_cnn() -> nn.Module:
    """Return BlazeFL's CNN, which is the CNN of torch's CIFAR-10 tutorial."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84),
        nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, plus a skip connection.

    The skip connection is the identity, or a 1 x 1 convolution if the stride exceeds 1.
    """

    def __init__(self, read: int, made: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(read, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(),
            nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.side: nn.Module = nn.Identity()
        if stride > 1:
            self.side = nn.Sequential(
                nn.Conv2d(read, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body + side)."""
        return torch.relu(self.body(x) + self.side(x))


def resnet18() -> nn.Module:
    """Return BlazeFL's larger network: ResNet-18 of torchvision, with 11.2M parameters."""
    width, layers = 64, [Residual(64, 64, 1), Residual(64, 64, 1)]
    while width < 512:
        layers += [Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)]
        width *= 2
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """A transformer on the 64 patches of an image, without position embeddings.

    It has two encoder layers of torch with width 64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Conv2d(3, 64, 4, stride=4)
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)
        ))  # fmt: skip
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify the mean of the patches."""
        return self.head(self.layers(self.read(images).flatten(2).transpose(1, 2)).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "pfl-research's CNN": pfl_cnn,
    "BlazeFL's CNN": blazefl_cnn,
    "ResNet-18": resnet18,
    "a transformer": Transformer,
}


def read_job(path: str | Path) -> tuple[str, Job]:
    """Read a job, and return the name of its network and the job."""
    with np.load(path) as file:
        held = {name: file[name] for name in file.files}
    inputs, labels = torch.from_numpy(held["inputs"]), torch.from_numpy(held["labels"])
    start = {
        name.removeprefix(START): torch.from_numpy(value)
        for name, value in held.items()
        if name.startswith(START)
    }
    places = held["offsets"], held["schedule"], held["rows"]
    job = Job(inputs.view(-1, *SHAPE), labels, *places, start, float(held["lr"]))
    return str(held["network"]), job


def tensors(model: nn.Module) -> Model:
    """Return the tensors that are averaged, by name: parameters and running statistics."""
    return {name: one for name, one in model.state_dict().items() if one.is_floating_point()}


def local_epoch(model: nn.Module, job: Job, given: Model, turn: int, client: int) -> Model:
    """Train a client from the server's model in round `turn`, and return the client's model."""
    model.train()
    model.load_state_dict(given, strict=False)
    place = job.schedule[turn].tolist().index(client)
    train(model, *job.client(client), job.rows[turn, place], job.lr)
    return {name: value.clone() for name, value in tensors(model).items()}


def mean(ends: list[Model]) -> Model:
    """Return the plain mean of models."""
    return {name: torch.stack([one[name] for one in ends]).mean(0) for name in ends[0]}


def started() -> float:
    """Take one optimizer step, so that torch loads its modules, and return the CPU seconds."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()
    return time.process_time()


def tell(out: str | Path, model: Model, stamps: list[float], busy: float) -> None:
    """Write the last model, and print one JSON line with times and memory.

    The line contains the seconds of each round, the CPU seconds per round since `busy`, and the
    peak memory in MB.
    """
    values = torch.cat([model[name].detach().flatten() for name in sorted(model)])
    np.save(out, values.numpy(), allow_pickle=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = np.diff(stamps).tolist()
    cpu = (time.process_time() - busy) / len(seconds)
    print(json.dumps({"round_seconds": seconds, "cpu": cpu, "peak": peak}), flush=True)
