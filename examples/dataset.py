"""A torch Dataset and a network: `dataset.py [inline | ray]`."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedmuon.data

CONFIG = {
    "federation": {"clients": 6, "per-round": 3, "rounds": 10, "partition": "shards"},
    "local": {"recipe": "fedmuon", "lr": 0.1, "batch": 32, "aux-lr": 1.0},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}
DIGITS = TensorDataset(*(torch.as_tensor(part[:600]) for part in fedmuon.data.load("digits")))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 10))


if __name__ == "__main__":
    found = fedmuon.run(CONFIG, data=DIGITS, task=network)
    print(f"accuracy {found.summary['accuracy']:.2f}")
