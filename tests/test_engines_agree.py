"""One config, one trajectory: the embedded engine against Flower's client processes on a real Ray
cluster of two nodes; and what happens when clients misbehave."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from conftest import small
from safetensors.numpy import load_file

from experiments import bound
from experiments.ray_engine import QUIET, engine, on_grid, run_on_ray
from experiments.run import execute
from experiments.stability import Laboratory, measure
from experiments.stability import execute as stability
from fedmuon.config import Config
from fedmuon.errors import InputError
from fedmuon.federated import setup
from fedmuon.federated.simulate import Engine
from fedmuon.run import prepare
from fedmuon.storage import Record

if TYPE_CHECKING:
    from flwr.serverapp import Grid

os.environ.update(QUIET)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster of two nodes, one CPU each, on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["FEDMUON_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    os.environ["PYTHONPATH"] = path
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield str(nodes.address)
    ray.shutdown()
    nodes.shutdown()


def config(address: str, **given: dict) -> Config:
    given = {table: dict(keys) for table, keys in given.items()}
    given.setdefault("engine", {}).update({"name": "ray", "ray-address": address})
    return small(**given)


def on_ray(what: Config, out: Path, faulty: bool = False, resume: bool = False) -> Record:
    """Run on the cluster, with the misbehaving ClientApp if asked."""
    if not faulty:
        return execute(None if resume else what, out, resume)
    from faulty_client import app

    return run_on_ray(prepare(setup.resolve(what), out, resume), client_app=app)


def distance(a: Path, b: Path) -> float:
    """The largest relative difference of models and momenta."""
    found = []
    for name in ("model", "momentum"):
        held, theirs = (load_file(run / f"{name}.safetensors") for run in (a, b))
        assert set(held) == set(theirs)
        for key, one in held.items():
            found.append(np.linalg.norm(one - theirs[key]) / max(np.linalg.norm(one), 1e-300))
    return float(max(found))


CASES = [
    *[({"recipe": r, "batch": b}, {}) for b in (0, 4) for r in ("fedavg", "fedavgm", "local-muon")],
    *[({"recipe": r, "batch": b}, {}) for b in (0, 4) for r in ("fedmuon", "fedmuon-aligned")],
    *[({"batch": b}, {"name": "newton-schulz"}) for b in (0, 4)],
    *[({"batch": b}, {"name": "gaussian-smoothed-sign"}) for b in (0, 4)],
    ({"batch": 4}, {"name": "randomized-polar", "rank": 2, "oversample": 1}),
]


NETWORKS = [
    {
        "data": {"name": "digits", "train": 120},
        "federation": {"rounds": 2},
        "task": {"name": "network", "model": "cnn"},
        "local": {"batch": batch, "steps": 2, "lr": 0.01},
        "engine": {"dtype": dtype},
    }
    for batch, dtype in ((0, "float64"), (4, "float64"), (4, "float32"))
]
MATRICES = [{"local": {**one, "steps": 2}, "orthogonalizer": other} for one, other in CASES]
NEIGHBOURS = [
    {
        "local": {"batch": batch, "steps": 2},
        "stability": {"trials": 5, "neighbours": neighbours},
        "engine": {"dtype": "float64"},
    }
    for batch in (0, 4)
    for neighbours in ("own", "worst")
]
TEXT = {
    "data": {"name": "pydoc", "context": 12},
    "federation": {"rounds": 2},
    "task": {"name": "network", "model": "gpt", "width": 16, "depth": 1, "heads": 2},
    "local": {"batch": 4, "steps": 2, "lr": 0.01},
}
SHARED = {
    "matrix": MATRICES, "network": NETWORKS, "text": [TEXT], "neighbours": NEIGHBOURS[1:],
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experiments one after the other through the same two workers, which hold what they cached."""
    out = tmp_path_factory.mktemp("shared")
    runs = [
        prepare(setup.resolve(config(cluster, **tables)), out / f"{kind}{number}", False)
        for kind, held in SHARED.items()
        for number, tables in enumerate(held)
    ]

    def work(grid: "Grid") -> None:
        from server.server_app import serve

        for run in runs:
            serve(run, grid)
            if run.directory.path.name.startswith("neighbours"):
                _measure(run.directory.path, lambda held: engine(held, grid))

    on_grid(runs[0].config, work)
    return out


def _measure(run: Path, by: Callable[[Config], Engine]) -> None:
    """neighbours.csv of a run."""
    laboratory = Laboratory.open(run)
    verdict = bound.judge(bound.from_directory(run))
    measure(laboratory, verdict, lambda record: None, lambda *_: None, by(laboratory.config))


@pytest.mark.parametrize("number", range(len(MATRICES)))
def test_ray_is_inline(shared: Path, tmp_path: Path, number: int) -> None:
    ray = shared / f"matrix{number}"
    execute(small(**MATRICES[number]), tmp_path / "inline")
    assert distance(tmp_path / "inline", ray) <= 1e-12
    assert load_file(ray / "model.safetensors")["weight"].std() > 0
    lines = [(run / "rounds.jsonl").read_text() for run in (tmp_path / "inline", ray)]
    first, second = ([json.loads(line) for line in text.splitlines()] for text in lines)
    assert [one["participants"] for one in first] == [one["participants"] for one in second]


@pytest.mark.parametrize("number", range(len(NETWORKS)))
def test_a_network_on_ray_is_that_inline(shared: Path, tmp_path: Path, number: int) -> None:
    """A CNN's parameters travel by name. Convolutions and eigenvectors lose more digits: inline
    steps the clients as one stack, whose sums have another order. float32 has 1e-7 to lose, which
    four steps of a smoothed polar map multiply by its slope at small singular values."""
    tables = NETWORKS[number]
    torch.use_deterministic_algorithms(True)
    try:
        execute(small(**tables), tmp_path / "inline")
    finally:
        torch.use_deterministic_algorithms(False)
    allowed = 1e-10 if tables["engine"]["dtype"] == "float64" else 1e-4
    assert distance(tmp_path / "inline", shared / f"network{number}") <= allowed
    execute(small(**{**tables, "task": {"name": "network", "model": "mlp"}}), tmp_path / "mlp")
    with pytest.raises(AssertionError):
        distance(tmp_path / "inline", tmp_path / "mlp")


def test_a_decoder_on_ray_is_that_inline(shared: Path, tmp_path: Path) -> None:
    """Every client reads the text for itself; fused projections are cut there."""
    execute(small(**TEXT), tmp_path / "inline")
    assert distance(tmp_path / "inline", shared / "text0") <= 1e-10


def same_neighbours(inline: Path, ray: Path) -> None:
    """A stack of data sets travels through Flower; each client replaces its own samples in it."""
    found = [np.loadtxt(run / "neighbours.csv", delimiter=",", skiprows=1) for run in (inline, ray)]
    np.testing.assert_array_equal(found[0][:, :4], found[1][:, :4])
    np.testing.assert_allclose(found[1][:, 4], found[0][:, 4], rtol=1e-9, atol=1e-15)
    assert found[0][:, 4].max() > 1e-6


@pytest.mark.parametrize("number", range(len(NEIGHBOURS) - 1))
def test_neighbours_on_ray_are_those_inline(shared: Path, tmp_path: Path, number: int) -> None:
    stability(small(**SHARED["neighbours"][number]), tmp_path / "inline")
    same_neighbours(tmp_path / "inline", shared / f"neighbours{number}")


def test_the_stability_command_on_ray_is_that_inline(cluster: str, tmp_path: Path) -> None:
    stability(small(**NEIGHBOURS[0]), tmp_path / "inline")
    stability(config(cluster, **NEIGHBOURS[0]), tmp_path / "ray")
    same_neighbours(tmp_path / "inline", tmp_path / "ray")


def test_another_seed_is_another_trajectory(cluster: str, tmp_path: Path) -> None:
    """Negative control of the agreement."""
    execute(small(), tmp_path / "inline")
    on_ray(config(cluster, federation={"seed": 4}), tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") > 1e-3


def order(kind: str, times: int) -> dict:
    """Tell the client that takes part in round 3 to misbehave there."""
    client = int(setup.plan(small()).participants(3)[1])
    folder = Path(os.environ["FEDMUON_FAULTS"])
    shutil.rmtree(folder)
    folder.mkdir()
    given = {"kind": kind, "client": client, "round": 3, "times": times}
    (folder / "orders.json").write_text(json.dumps(given))
    return given


def faults(run: Path) -> list[dict]:
    lines = (run / "rounds.jsonl").read_text().splitlines()
    return [fault for line in lines for fault in json.loads(line).get("faults", [])]


WORDS = {
    "raise": "on fire",
    "nan": "not finite",
    "shape": "not the expected",
    "wrong-round": "round 99",
    "silent": "",
    "kill": "Actor",
}


@pytest.mark.parametrize("kind", WORDS)
def test_strict_survives_what_passes(cluster: str, tmp_path: Path, kind: str) -> None:
    """One bad attempt: the round is asked again with the same participants, and nothing is lost."""
    execute(small(), tmp_path / "inline")
    what = config(cluster, faults={"deadline": 20.0, "retries": 4})
    given = order(kind, 1)
    on_ray(what, tmp_path / "ray", faulty=True)
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-12
    fault = faults(tmp_path / "ray")[0]
    assert fault["client"] == given["client"] and WORDS[kind] in fault["why"]


def test_strict_stops_where_it_can_be_resumed(cluster: str, tmp_path: Path) -> None:
    execute(small(), tmp_path / "inline")
    what = config(cluster, faults={"retries": 1})
    given = order("raise", 99)
    with pytest.raises(InputError, match=f"round 3 .*client {given['client']}: .*on fire"):
        on_ray(what, tmp_path / "ray", faulty=True)
    order("raise", 0)
    on_ray(what, tmp_path / "ray", faulty=True, resume=True)
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-12


@pytest.mark.parametrize("kind", ["raise", "nan", "silent"])
def test_drop_averages_the_others_and_says_so(cluster: str, tmp_path: Path, kind: str) -> None:
    execute(small(), tmp_path / "inline")
    what = config(cluster, faults={"policy": "drop", "deadline": 20.0})
    given = order(kind, 99)
    summary = on_ray(what, tmp_path / "ray", faulty=True)
    assert summary["rounds_with_drops"] == 1
    lines = [
        json.loads(line) for line in (tmp_path / "ray" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [line.get("dropped") for line in lines].index([given["client"]]) == 3
    assert lines[3]["participants"] == setup.plan(small()).participants(3).tolist()
    assert distance(tmp_path / "inline", tmp_path / "ray") > 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_clients_share_one_gpu(tmp_path: Path) -> None:
    """Two clients at a time on half a GPU each: the CPU's trajectory up to float32 rounding."""
    single = {"dtype": "float32"}
    execute(small(engine={**single, "device": "cpu"}), tmp_path / "cpu")
    half = {"name": "ray", "device": "cuda", "cpus-per-client": 1.0, "gpus-per-client": 0.5}
    execute(small(engine={**single, **half}), tmp_path / "gpu")
    assert distance(tmp_path / "cpu", tmp_path / "gpu") <= 1e-4
