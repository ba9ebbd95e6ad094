"""Your own orthogonalizer, with and without a Lipschitz constant: `maps.py [inline | ray]`."""

import sys

import torch

import fedmuon

CONFIG = {
    "data": {"name": "synthetic", "train": 200, "test": 100},
    "federation": {"clients": 4, "per-round": 2, "rounds": 5},
    "local": {"lr": 0.01, "steps": 1},
    "engine": {"name": (*sys.argv, "inline")[1]},
}


def shrunk(m: torch.Tensor) -> torch.Tensor:
    """m / sqrt(1 + ||m||^2), the gradient of sqrt(1 + ||m||^2), whose Hessian is at most 1."""
    return m / (1 + m.square().sum((-2, -1), keepdim=True)).sqrt()


if __name__ == "__main__":
    maps = fedmuon.Orthogonalizer(shrunk), fedmuon.Orthogonalizer(shrunk, lipschitz=1.0)
    found = [fedmuon.stability(CONFIG, trials=3, orthogonalizer=one).bound for one in maps]
    print("without a constant", found[0]["status"], "and with one", found[1]["status"])
