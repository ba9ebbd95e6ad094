"""Small experiments that many tests share."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
import torch

from fedmuon.config import Config, parse


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run beside each other: one thread each is faster than two fighting."""
    torch.set_num_threads(1)


def small(**tables: dict) -> Config:
    """A quick experiment: 6 clients of 3 classes in 7 dimensions, float64."""
    base = {
        "data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7, "classes": 3},
        "federation": {"clients": 6, "per-round": 3, "rounds": 8, "seed": 3},
        "local": {"lr": 0.05, "steps": 1},
        "orthogonalizer": {"lambda": 0.1},
        "engine": {"dtype": "float64", "device": "cpu"},
        "output": {"evaluate-every": 4, "checkpoint-every": 2},
    }
    base["data"]["minimum"] = 5
    for table, keys in tables.items():
        base.setdefault(table, {}).update(keys)
    return parse(base)
