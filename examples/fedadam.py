"""FedAdam against FedAvg on digits (Reddi et al. 2021): `fedadam.py [inline | ray]`."""

import sys

from torch import manual_seed, nn

import fedmuon

CONFIG = {
    "data": {"name": "digits", "train": 1500, "test": 297, "minimum": 5},
    "federation": {"clients": 50, "per-round": 10, "rounds": 20, "options": {"alpha": 0.1}},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}
LOCAL = {"lr": 0.03162, "epochs": 1.0, "batch": 20}
METHODS = {"recipe": "fedavg"}, {"recipe": "fedadam", "server-lr": 0.01, "tau": 0.001}
manual_seed(0)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

if __name__ == "__main__":
    found = [fedmuon.run(CONFIG | {"local": LOCAL | one}, task=MODEL) for one in METHODS]
    print("FedAvg, FedAdam:", *(f"accuracy {one.summary['accuracy']:.3f}" for one in found))
