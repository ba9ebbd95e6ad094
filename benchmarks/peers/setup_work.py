"""The jobs of `benchmarks.published`: other simulators' networks, and plain training of them.

As in `cnn_work`, a job fixes the first model, who trains when, and on which rows. The networks are
written as their projects describe them. They have no dropout, so that all can end at one model.
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
    """`simple_cnn` of pfl-research's CIFAR-10 benchmark: two convolutions, 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def blazefl_cnn() -> nn.Module:
    """BlazeFL's CNN, that of torch's CIFAR-10 tutorial."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84),
        nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm beside the identity, or a 1 x 1 convolution."""

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
        """relu(body + side)."""
        return torch.relu(self.body(x) + self.side(x))


def resnet18() -> nn.Module:
    """BlazeFL's larger network: torchvision's ResNet-18, with its 7 x 7 stem; 11.2M parameters."""
    width, layers = 64, [Residual(64, 64, 1), Residual(64, 64, 1)]
    while width < 512:
        layers += [Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)]
        width *= 2
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two of torch's encoder layers of width 64 on an image's 64 patches, without positions."""

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
    """The name of the network, and the job."""
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
    """What is averaged, by name: parameters and running statistics."""
    return {name: one for name, one in model.state_dict().items() if one.is_floating_point()}


def local_epoch(model: nn.Module, job: Job, given: Model, turn: int, client: int) -> Model:
    """A client's model after its steps from the server's, in a round."""
    model.train()
    model.load_state_dict(given, strict=False)
    place = job.schedule[turn].tolist().index(client)
    train(model, *job.client(client), job.rows[turn, place], job.lr)
    return {name: value.clone() for name, value in tensors(model).items()}


def mean(ends: list[Model]) -> Model:
    """The plain mean of models."""
    return {name: torch.stack([one[name] for one in ends]).mean(0) for name in ends[0]}


def started() -> float:
    """Seconds of processors so far, once torch has loaded what its optimizers need at first."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()
    return time.process_time()


def tell(out: str | Path, model: Model, stamps: list[float], busy: float) -> None:
    """Write the last model; print seconds of rounds, seconds of processors since `busy`, memory."""
    values = torch.cat([model[name].detach().flatten() for name in sorted(model)])
    np.save(out, values.numpy(), allow_pickle=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = np.diff(stamps).tolist()
    cpu = (time.process_time() - busy) / len(seconds)
    print(json.dumps({"round_seconds": seconds, "cpu": cpu, "peak": peak}), flush=True)
