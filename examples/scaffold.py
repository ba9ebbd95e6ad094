"""SCAFFOLD against FedAvg as in Flower's niid_bench: `scaffold.py [inline | ray]`."""

import sys

from torch import manual_seed, nn

import fedmuon

CONFIG = {
    "data": {"name": "digits", "train": 1500, "test": 297, "minimum": 8},
    "federation": {"clients": 10, "per-round": 10, "rounds": 10, "options": {"alpha": 0.5}},
    "local": {"lr": 0.01, "steps": 10, "batch": 64, "weight-decay": 1e-5},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}
manual_seed(0)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

if __name__ == "__main__":
    found = [fedmuon.run(CONFIG, task=MODEL, recipe=name) for name in ("fedavg", "scaffold")]
    print("FedAvg, SCAFFOLD:", *(f"accuracy {one.summary['accuracy']:.3f}" for one in found))
