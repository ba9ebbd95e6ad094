"""Small experiments that many tests share, and what keeps a test from hanging on chance."""

import surroundings  # it hides what the imports below read

# isort: split

import contextlib
import dataclasses
import functools
import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import chromium  # noqa: F401  a fixture
from chaos.nursery import Nursery, nursery
from hypothesis import HealthCheck, settings
from replay import replayed
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from fedmuon.analysis.report import style
from fedmuon.config.load import Config, only_read, parse
from fedmuon.data.federated import FederatedData
from fedmuon.data.neighbours import Neighbours, draw, stack
from fedmuon.data.source import Source
from fedmuon.experiments.engines.ray_cluster import quiet_ray
from fedmuon.experiments.studies import stability
from fedmuon.experiments.suites.contents import merged
from fedmuon.federated import accountant as run_accountant
from fedmuon.optim import private as private_optimizers
from fedmuon.privacy import noise
from fedmuon.privacy.accounting import composition
from fedmuon.privacy.accounting.dominating_pairs import Event

TESTS = Path(__file__).resolve().parent
# A test file may use what another one has; no two have the same name.
sys.path += sorted({str(file.parent) for file in TESTS.rglob("test_*.py")} - {*sys.path})
gc.disable()  # until all is loaded, of which nothing is garbage

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
# sooner, and what a group makes is made once.
GROUPS = {
    "deployments": (
        "tests/experiments/engines/test_deployment.py",
        "tests/fedmuon/federated/test_stage_conformance.py::test_super_link_equals_inline",
        "tests/fedmuon/tasks/test_causal_lm_engines.py::test_ray_and_a_super_link_equal_inline",
    ),
    "clusters": (
        "tests/fedmuon/federated/test_engines_agree.py",
        "tests/fedmuon/federated/test_stage_conformance.py::test_ray_equals_inline",
        "tests/fedmuon/data/test_features.py::test_a_run_on_features_is_a_run_on_vectors",
        "tests/fedmuon/data/test_given_data.py::test_a_run_with_a_public_center",
        "tests/fedmuon/tasks/test_causal_lm.py::test_ray_equals_inline",
        "tests/fedmuon/tasks/test_peft_model.py::test_ray_equals_inline",
        "tests/architecture/test_examples.py::test_an_example_on_ray_is_that_inline",
        "tests/architecture/test_examples.py::test_named_objects_are_the_same_on_ray",
        "tests/server/test_grid.py",
        "tests/server/test_apart_nodes.py",
        "tests/experiments/engines/test_joined_ray.py",
        "tests/experiments/planning/test_plan.py::test_on_ray",
        "tests/experiments/suites/test_suite.py::test_ray_tasks_give_the_same_results",
        "tests/fedmuon/config/test_registered_methods.py::test_other_processes_load_the_package",
    ),
    "readme": ("tests/architecture/test_readme.py",),  # later commands read what earlier ones wrote
    "projects": (
        "tests/experiments/engines/test_process_life.py",
        "tests/experiments/engines/test_project.py",
    ),
    "forks": (  # of one process that has everything loaded
        "tests/fedmuon/runs/test_chaos.py",
        "tests/experiments/test_full_disks.py",
        "tests/architecture/test_examples.py::test_named_objects_after_kill_9",
        "tests/fedmuon/core/test_locks.py::test_two_private_runs_release_each_round_once",
        "tests/fedmuon/runs/test_run.py::test_no_room_on_the_disk_leaves_nothing_half_written",
        "tests/fedmuon/runs/test_run.py::test_resume_after_kill_9",
        "tests/fedmuon/tasks/test_causal_lm_engines.py::test_resume_after_kill_9",
        "tests/experiments/suites/test_sweep.py::test_a_killed_sweep",
    ),
    "archives": ("tests/architecture/test_packaging.py",),
    "pages": ("tests/analysis/report/test_report.py",),
    "training": ("tests/experiments/studies/test_training.py",),
    "calculator": (
        "tests/experiments/stability/test_bound.py::test_the_calculator_answers",
    ),  # in one process
    "compiled": ("tests/fedmuon/tasks/test_matrix.py",),  # by numba, in seconds
    "imports": ("tests/architecture/test_imports.py",),  # reads all files
    "strings": ("tests/architecture/test_reference_pages.py",),  # so does this
    "unread": ("tests/fedmuon/config/test_unread_keys.py",),
    "transformers": (  # which take two seconds to import
        "tests/experiments/studies/test_dp_text.py::test_one_method_is_tuned_and_writes",
        "tests/fedmuon/tasks/test_decoder.py",
        "tests/fedmuon/tasks/test_causal_lm.py",
        "tests/fedmuon/tasks/test_checkpointing.py",
        "tests/fedmuon/tasks/test_peft_model.py",
        "tests/fedmuon/data/test_corpora.py",
        "tests/fedmuon/tasks/test_deferred_checks.py::test_networks_ask_once",
        "tests/fedmuon/tasks/test_clipping_sound.py::test_others_are_not",
        "tests/fedmuon/optim/test_language_routes.py",
    ),
    "loops": ("tests/fedmuon/optim/test_other_loops.py",),  # of other libraries
}

# Cases of these functions take long and share nothing, so each case may have another worker.
APART = ("tests/architecture/test_notebooks.py::test_a_page_runs_and_its_text_is_true",)
NEEDS = {
    "needs_fashion_mnist": (
        Path("/usr/share/datasets/fashion-mnist").is_dir,
        "the data of Fashion-MNIST: apt-get install dataset-fashion-mnist",
    ),
    "needs_gpu": (torch.cuda.is_available, "a GPU"),
}
BEFORE = pytest.StashKey[set[Path]]()
LEFT = pytest.StashKey[list[str]]()


def group_of(nodeid: str) -> str:
    return next((group for group, tests in GROUPS.items() if nodeid.startswith(tests)), "")


class OneForGroups(LoadScopeScheduling):
    """Share out the tests: a function with all its parameters goes to the next free worker.

    So the function makes only once what it keeps. All tests of a group of `GROUPS` go to the same
    worker, and begin first. Each case of a function of `APART` goes to the next free worker.

    The mark xdist_group is for this, but with pytest 9.2 pytest-xdist 3.8 passes it over in silence
    (pytest-dev/pytest-xdist#1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        return group_of(nodeid) or nodeid.partition("[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneForGroups:
    """How `pytest -n` shares the tests out: in the order in which they were collected."""
    config.option.loadscopereorder = False
    return OneForGroups(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shuffle SEED`: the tests in a random order, to find those that depend on others."""
    parser.addoption("--shuffle", type=int, help="run the tests in the random order of this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases that exploring has found, begin with the groups, and shuffle."""
    for item in items:
        if isinstance(item, pytest.Function):
            replayed(item)
    order = {group: place for place, group in enumerate(GROUPS)}
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect what tests leave, and do not go through all that is loaded each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Remember what lies around before the first test; workers of a session have no say in it."""
    if not hasattr(config, "workerinput"):
        config.stash[BEFORE] = surroundings.listing()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves anything behind."""
    if (before := session.config.stash.get(BEFORE, None)) is None:
        return
    ended = bool(session.config.getoption("numprocesses", None))  # xdist's workers have
    session.config.stash[LEFT] = left = surroundings.leftovers(before, ended)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name what the session has left behind."""
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind by the tests", sep="=", red=True)
        terminalreporter.write("".join(f"{one}\n" for one in left))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose data set or device this machine lacks."""
    for name, (there, what) in NEEDS.items():
        if item.get_closest_marker(name) and not there():
            pytest.skip(f"needs {what}")


@pytest.fixture(autouse=True)
def _system_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the system's data sets to the tests that need them."""
    if request.node.get_closest_marker("needs_fashion_mnist"):
        monkeypatch.delenv("FEDMUON_SYSTEM_DATA")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run beside each other, and numbers should not hang on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_rate() -> Iterator[None]:
    """A suite times a large product, which takes longer than all else that it does in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stability, "SIDE", 64)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks() -> Iterator[None]:
    """What one process has written another reads, as long as nobody cuts the power: each run would
    wait ten times for a disk that others use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_account_of_equal_releases() -> Iterator[None]:
    """Most private runs of tests make the releases of another test's run, and their account takes
    ten times as long as the run. What test files import by name is computed each time."""
    computed = composition.account

    @functools.cache
    def kept(events: tuple[Event, ...], *how: Any, **named: Any) -> composition.Answer:
        return computed(events, *how, **named)

    def account(events: Iterable[Event], *how: Any, **named: Any) -> composition.Answer:
        return kept(tuple(events), *how, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module in (composition, run_accountant, private_optimizers):
            patch.setattr(module, "account", account)
        yield


@contextlib.contextmanager
def without_rendering() -> Iterator[None]:
    """Figures are made while this lasts, and their files hold nothing: for whoever does not look at
    them, as nearly all the time that a report takes goes into fonts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "image", lambda figure, kind: b"<svg/>")
        yield


@pytest.fixture
def undrawn() -> Iterator[None]:
    with without_rendering():
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What starts `fedmuon` commands in processes of their own, without loading them anew."""
    with nursery(tmp_path_factory.mktemp("forks"), quick=True) as children:
        yield children


@pytest.fixture(scope="session")
def deployment() -> Iterator[Any]:
    """SuperNodes of a SuperLink, whose apps start at once."""
    from deployments import forking

    with forking() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster of two nodes, one CPU each, on this machine."""
    quiet_ray()
    import ray
    from ray.cluster_utils import Cluster

    os.environ["FEDMUON_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    path = os.pathsep.join([str(TESTS / "helpers"), str(TESTS.parent)])
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
        return self._bits.getrandbits(count)

    def urandom(self, count: int) -> bytes:
        return self._bits.randbytes(count)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global generators begin anew, and secret noise repeats, so that statistics do too."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.default_generator.manual_seed(0)  # manual_seed takes a millisecond to tell devices
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    monkeypatch.setattr(noise, "secrets", Entropy())
    monkeypatch.setattr(noise, "os", Entropy())


@pytest.fixture
def runs_apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that name no folder lie among the tests' own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))


def quick(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test: `make test` runs it with those in `kept`, `make test-all` with all."""
    rows = [(one, one if isinstance(one, tuple) else (one,)) for one in values]
    return [one if one in kept else pytest.param(*row, marks=pytest.mark.slow) for one, row in rows]


def small(below: dict | None = None, **tables: dict) -> Config:
    """A quick experiment: 6 clients of 3 classes in 7 dimensions, float64; what it has by itself,
    and what `below` has, means "where it is read"."""
    base = {
        "data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7, "classes": 3},
        # Naive loops in tests take the plain mean; test_averages.py has the means of the papers.
        "federation": {"clients": 6, "per-round": 3, "rounds": 8, "seed": 3, "aggregate": "mean"},
        "local": {"lr": 0.05, "steps": 1},
        "orthogonalizer": {"lambda": 0.1},
        "engine": {"dtype": "float64", "device": "cpu"},
        "output": {"evaluate-every": 4, "checkpoint-every": 2},
    }
    base["data"]["minimum"] = 5
    return parse(merged(only_read(merged(merged(base, below or {}), tables)), tables))


def private(rounds: int = 3, /, federation: Any = None, **privacy: Any) -> Config:
    """The same with DP-SGD, of samples in lots of 6."""
    return small(
        federation={"rounds": rounds, **(federation or {})},
        local={"recipe": "dp-sgd", "lr": 0.1, "steps": 2},
        privacy={"lot": 6.0, "bound": 0.2, "delta": 1e-3} | privacy,
    )


def draw_neighbours(
    data: FederatedData, source: Source, trials: int, seed: int, normalize: str = "unit"
) -> Neighbours:
    """The unchanged data set, then one neighbour per trial: S = trials + 1."""
    return stack(source, draw(data, source, trials, seed), normalize)


def neighbour(data: FederatedData, neighbours: Neighbours, s: int) -> FederatedData:
    """Neighbour s as an ordinary data set, in its own copy."""
    inputs, labels, train_index = data.inputs.copy(), data.labels.copy(), data.train_index.copy()
    if neighbours.client[s] >= 0:
        row = data.offsets[neighbours.client[s]] + neighbours.position[s]
        inputs[row], labels[row] = neighbours.inputs[s], neighbours.labels[s]
        train_index[data.order[row]] = neighbours.replacement[s]
    return dataclasses.replace(data, inputs=inputs, labels=labels, train_index=train_index)
