"""Train an unchanged torchvision resnet18 with BatchNorm. Needs `pip install torchvision`."""

import torch
import torchvision  # pyright: ignore[reportMissingImports]

import fedmuon

if __name__ == "__main__":
    config = {"local": {"lr": 0.02, "aux-lr": 0.05, "batch": 16, "steps": 2}}
    config |= {"federation": {"clients": 3, "per-round": 2, "rounds": 2}}
    config |= {"orthogonalizer": {"name": "randomized-polar", "rank": 8}}
    y = torch.arange(120) % 2
    x = torch.randn(120, 3, 32, 32) + y[:, None, None, None]  # your images [n, 3, height, width]
    model = torchvision.models.resnet18(num_classes=2)
    print("accuracy", fedmuon.run(config, data=(x, y), task=model).summary["accuracy"])
