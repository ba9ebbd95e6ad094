"""Small experiments that many tests share, and what keeps a test from hanging on chance."""

import surroundings  # noqa: F401  it clears what the imports below read

# isort: split

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from replay import replayed
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from fedmuon.config import Config, only_read, parse
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours, draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.suites.contents import merged
from fedmuon.privacy import mechanism

# The same examples each time; `make fuzz` looks elsewhere, and what it finds is replayed.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "explore",
    derandomize=False,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# These start clusters and deployments. Each group has one worker, which starts its tests one after
# the other: two clusters would fight for the cores and starve one another.
PROCESSES = {
    "deployments": ("tests/test_deployment.py", "tests/test_project.py"),
    "clusters": (
        "tests/test_engines_agree.py",
        "tests/test_examples.py::test_an_example_on_ray_is_that_inline",
        "tests/test_examples.py::test_named_objects_are_the_same_on_ray",
        "tests/test_process_life.py",
        "tests/test_suite.py::test_ray_tasks_give_the_same_results",
    ),
    "readme": ("tests/test_readme.py",),  # later commands read what earlier ones wrote
}


class OneForProcesses(LoadScopeScheduling):
    """Tests go to whichever worker is free, those of a group of `PROCESSES` all to the same.

    The mark xdist_group is for this, but with pytest 9.2 pytest-xdist 3.8 passes it over in silence
    (pytest-dev/pytest-xdist#1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        groups = (group for group, tests in PROCESSES.items() if nodeid.startswith(tests))
        return next(groups, nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneForProcesses:
    """How `pytest -n 2` shares the tests out."""
    return OneForProcesses(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases that exploring has found."""
    for item in items:
        if isinstance(item, pytest.Function):
            replayed(item)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run beside each other, and numbers should not hang on the machine."""
    torch.set_num_threads(1)


class Entropy:
    """Stands for `secrets` where noise and lots are drawn: the same bits in every run."""

    def __init__(self) -> None:
        self._bits = random.Random(0)

    def randbits(self, count: int) -> int:
        """That many bits, other ones at each call."""
        return self._bits.getrandbits(count)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global generators begin anew, and secret noise repeats, so that statistics do too."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    monkeypatch.setattr(mechanism, "secrets", Entropy())


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


def draw_neighbours(
    data: FederatedData, source: Source, trials: int, seed: int, normalize: str = "unit"
) -> Neighbours:
    """The unchanged data set, then one neighbour per trial: S = trials + 1."""
    return stack(source, draw(data, source, trials, seed), normalize)
