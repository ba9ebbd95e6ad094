"""Small experiments that many tests share."""

import os

# One thread each, in processes that tests start too, is faster than two fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from experiments.contents import merged
from fedmuon.config import Config, only_read, parse

# These start clusters and deployments, which would fight for the cores and starve one another.
PROCESSES = (
    "tests/test_deployment.py",
    "tests/test_engines_agree.py",
    "tests/test_suite.py::test_ray_tasks_give_the_same_results",
)


class OneForProcesses(LoadScopeScheduling):
    """Tests go to whichever worker is free, those of `PROCESSES` all to the same.

    The mark xdist_group is for this, but with pytest 9.2 pytest-xdist 3.8 passes it over in silence
    (pytest-dev/pytest-xdist#1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return "processes" if nodeid.startswith(PROCESSES) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneForProcesses:
    """How `pytest -n 2` shares the tests out."""
    return OneForProcesses(config, log)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run beside each other, and numbers should not hang on the machine."""
    torch.set_num_threads(1)


def small(below: dict | None = None, **tables: dict) -> Config:
    """A quick experiment: 6 clients of 3 classes in 7 dimensions, float64; what it has by itself,
    and what `below` has, means "where it is read"."""
    base = {
        "data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7, "classes": 3},
        "federation": {"clients": 6, "per-round": 3, "rounds": 8, "seed": 3},
        "local": {"lr": 0.05, "steps": 1},
        "orthogonalizer": {"lambda": 0.1},
        "engine": {"dtype": "float64", "device": "cpu"},
        "output": {"evaluate-every": 4, "checkpoint-every": 2},
    }
    base["data"]["minimum"] = 5
    return parse(merged(only_read(merged(merged(base, below or {}), tables)), tables))
