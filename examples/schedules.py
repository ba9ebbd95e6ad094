"""Step sizes that change by round, by name or by function: `schedules.py [inline | ray]`."""

import sys

import fedmuon

CONFIG = {
    "data": {"name": "synthetic", "train": 200, "test": 100},
    "federation": {"clients": 4, "per-round": 2, "rounds": 6},
    "local": {"steps": 1, "lr": 0.05},
    "orthogonalizer": {"lambda": 0.1},
    "engine": {"name": (*sys.argv, "inline")[1], "dtype": "float64"},
}


def root(round: int) -> float:
    return (round + 1) ** -0.5


if __name__ == "__main__":
    found = [fedmuon.run(CONFIG, schedule=one) for one in ("constant", "cosine", root)]
    losses = [one.summary["test_loss"] for one in found]
    bounds = [fedmuon.bound(one)["value"] for one in found]
    print("losses", *(f"{one:.4f}" for one in losses), "bounds", *(f"{one:.3f}" for one in bounds))
