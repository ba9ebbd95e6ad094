"""Linear regression on NumPy arrays: `arrays.py [inline | ray]`."""

import sys

import numpy as np
from torch import nn

import fedmuon

CONFIG = {
    "federation": {"clients": 4, "per-round": 2, "rounds": 10},
    "local": {"recipe": "fedavg", "lr": 0.1},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}
INPUTS = np.random.default_rng(0).normal(size=(200, 3))
TARGETS = INPUTS @ [1.0, -2.0, 0.5] + 3

if __name__ == "__main__":
    result = fedmuon.run(CONFIG, data=(INPUTS, TARGETS), task=lambda: nn.Linear(3, 1))
    weight, bias = result.model["weight"].round(decimals=2).tolist(), result.model["bias"].item()
    print(f"test loss {result.summary['test_loss']:.2g}, weight {weight}, bias {bias:.2f}")
