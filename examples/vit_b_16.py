"""Train an unchanged torchvision vit_b_16 with dropout. Needs `pip install torchvision`."""

import torch
import torchvision  # pyright: ignore[reportMissingImports]

import fedmuon

if __name__ == "__main__":
    config = {"local": {"lr": 0.002, "aux-lr": 0.01, "batch": 4, "steps": 1}}
    config |= {"federation": {"clients": 2, "per-round": 1, "rounds": 1}}
    config |= {"orthogonalizer": {"name": "randomized-polar", "rank": 4}}
    y = torch.arange(20) % 2
    x = torch.randn(20, 3, 32, 32) + y[:, None, None, None]  # your images [n, 3, height, width]
    model = torchvision.models.vit_b_16(image_size=32, num_classes=2, dropout=0.1)
    print("accuracy", fedmuon.run(config, data=(x, y), task=model).summary["accuracy"])
