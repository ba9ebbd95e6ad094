"""Small experiments that many tests share, and what keeps a test from hanging on chance."""

import surroundings  # noqa: F401  it clears what the imports below read

# isort: split

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import chromium  # noqa: F401  a fixture
from chaos.nursery import Nursery, nursery
from hypothesis import HealthCheck, settings
from replay import replayed
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from fedmuon.config import Config, only_read, parse
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours, draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.engines.ray_cluster import quieten
from fedmuon.experiments.studies.stability import cells
from fedmuon.experiments.suites.contents import merged
from fedmuon.privacy import keystream, streams

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

# Each group has one worker, which starts its tests one after the other; the larger a group, the
# sooner, and what a group makes is made once. Two of four mostly wait for processes: -n 4.
GROUPS = {
    "deployments": (
        "tests/test_deployment.py",
        "tests/test_process_life.py",
        "tests/test_project.py",
    ),
    "clusters": (
        "tests/test_engines_agree.py",
        "tests/test_examples.py::test_an_example_on_ray_is_that_inline",
        "tests/test_examples.py::test_named_objects_are_the_same_on_ray",
        "tests/test_grid.py",
        "tests/test_plan.py::test_on_ray",
        "tests/test_suite.py::test_ray_tasks_give_the_same_results",
    ),
    "readme": ("tests/test_readme.py",),  # later commands read what earlier ones wrote
    "forks": (  # of one process that has everything loaded
        "tests/test_chaos.py",
        "tests/test_examples.py::test_named_objects_after_kill_9",
        "tests/test_locks.py::test_two_private_runs_release_each_round_once",
        "tests/test_run.py::test_resume_after_kill_9",
    ),
    "archives": ("tests/test_packaging.py",),
    "pages": ("tests/test_report.py",),
    "training": ("tests/test_training.py",),
}


class OneForGroups(LoadScopeScheduling):
    """Tests go to whichever worker is free, those of a group of `GROUPS` all to the same.

    The mark xdist_group is for this, but with pytest 9.2 pytest-xdist 3.8 passes it over in silence
    (pytest-dev/pytest-xdist#1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        groups = (group for group, tests in GROUPS.items() if nodeid.startswith(tests))
        return next(groups, nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneForGroups:
    """How `pytest -n` shares the tests out."""
    return OneForGroups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases that exploring has found."""
    for item in items:
        if isinstance(item, pytest.Function):
            replayed(item)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run beside each other, and numbers should not hang on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_rate() -> Iterator[None]:
    """A suite times a large product, which takes longer than all else that it does in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "SIDE", 64)
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What starts `fedmuon` commands in processes of their own, without loading them anew."""
    with nursery(tmp_path_factory.mktemp("forks"), quick=True) as children:
        yield children


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster of two nodes, one CPU each, on this machine."""
    quieten()
    import ray
    from ray.cluster_utils import Cluster

    os.environ["FEDMUON_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    os.environ["PYTHONPATH"] = path
    # A folder of its own, with a short name because of the sockets, whoever owns /tmp/ray.
    folder = tempfile.mkdtemp(prefix="fm-ray-", dir="/tmp" if os.name == "posix" else None)
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:  # where the head's address is written down
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield str(nodes.address)
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


class Entropy:
    """Stands for `secrets` and `os` where keys and seeds of noise are drawn: the same bits in every
    run."""

    def __init__(self) -> None:
        self._bits = random.Random(0)

    def randbits(self, count: int) -> int:
        """That many bits, other ones at each call."""
        return self._bits.getrandbits(count)

    def urandom(self, count: int) -> bytes:
        """That many bytes, other ones at each call."""
        return self._bits.randbytes(count)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global generators begin anew, and secret noise repeats, so that statistics do too."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    monkeypatch.setattr(streams, "secrets", Entropy())
    monkeypatch.setattr(keystream, "os", Entropy())


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
