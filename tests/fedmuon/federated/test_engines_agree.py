"""One config, one trajectory: the embedded engine against Flower's client processes on a real Ray
cluster of two nodes; and what happens when clients misbehave."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import quick, small
from live_grid import LiveGrid
from safetensors.numpy import load_file
from test_client_metrics import same_client_records

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.engines import ray_engine
from fedmuon.experiments.results import Result
from fedmuon.experiments.run import execute
from fedmuon.experiments.stability import certificates, finished_run
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.neighbours import execute as stability
from fedmuon.experiments.stability.neighbours import measure
from fedmuon.experiments.suites.contents import merged
from fedmuon.federated.build import build_plan, resolve
from fedmuon.federated.experiment import Engine
from fedmuon.federated.rounds import begin
from fedmuon.privacy.ledger import Ledger
from fedmuon.runs.directory import Record
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare
from fedmuon.runs.work_categories import CATEGORIES
from fedmuon.server.strategy import FlowerEngine

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def live(cluster: str) -> Iterator[LiveGrid]:
    """Workers of the cluster, warm for all tests, with the ClientApp that misbehaves on order."""
    from faulty_client import app

    grid = LiveGrid(config(cluster), app)
    yield grid
    grid.close()


def config(address: str, **given: dict) -> Config:
    given = {table: dict(keys) for table, keys in given.items()}
    given.setdefault("engine", {}).update({"name": "ray", "ray-address": address})
    return small(**given)


def on_ray(live: LiveGrid, what: Config, out: Path, resume: bool = False) -> Record:
    """A run with the live workers."""
    run = prepare(resolve(what), out, resume)
    return live.do(lambda grid: train(run, FlowerEngine(run.config, grid)))


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


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
MATRICES.append({"local": {"steps": 2}, "task": {"initial": "zero"}})
PRIVATE = {"noise": 0.5, "lot": 8.0, "insecure-reproducible-noise": True}
MATRICES.append({"local": {"recipe": "disk-muonbc", "steps": 2}, "privacy": PRIVATE})
INNER = {**PRIVATE, "inner-weights": "0.5, 0.3, 0.2"}
MATRICES.append({"local": {"recipe": "dp-muon-im", "steps": 2}, "privacy": INNER,
                 "orthogonalizer": {"noise-floor": 0.5, "lambda": 0.0001}})  # fmt: skip
MATRICES.append({"data": {"validation": 5, "client-test": 0.3}, "local": {"batch": 4}})
OTHERS = ("fedprox", "fedadam", "fedyogi", "fedadagrad", "local-adamw", "diloco", "muloco")
MATRICES += [{"local": {"recipe": recipe, "steps": 2, "batch": 4}} for recipe in OTHERS]
MATRICES.append(
    {
        "local": {"batch": 4},
        "devices": {"mode": "deadline", "select": 5, "speeds": "log-normal", "dropout": 0.2},
    }
)
MATRICES += [
    {
        "local": {"recipe": recipe, "batch": 4},
        "federation": {"rounds": 12},
        "devices": {"mode": mode, "speeds": "log-normal", "speed-spread": 1.0, **keys},
    }
    for recipe, mode, keys in (
        ("ringmaster", "threshold", {"threshold": 2, "dropout": 0.1}),
        ("fedmuon", "fedasync", {}),
    )
]
MATRICES.append({"local": {"recipe": "fednova", "epochs": 1.5, "steps": 5, "batch": 4}})
PERSISTENT = [
    {"local": {"recipe": recipe, "steps": 2, "batch": 4}, "federation": {"rounds": 12}}
    for recipe in ("scaffold", "fedmuon-corrected")
]
SPARSE = {"uplink": "top-k", "share": 0.3, "downlink": "qsgd", "levels": 1000, "feedback": "error"}
PERSISTENT.append(
    {
        **PERSISTENT[0],
        "compression": SPARSE,
        "devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal", "dropout": 0.2},
    }
)
NEIGHBOURS = [
    {
        "local": {"batch": batch, "steps": 2},
        "stability": {"trials": 5, "neighbours": neighbours},
        "engine": {"dtype": "float64"},
    }
    for batch in (0, 4)
    for neighbours in ("own", "worst")
]
NEIGHBOURS += [
    {
        "local": {"batch": batch, "steps": 2},
        "stability": {"trials": 3, "neighbours": "worst", "unit": unit}
        if unit == "clients"
        else {"neighbours": "all", "unit": unit},
        "engine": {"dtype": "float64"},
    }
    for batch, unit in ((0, "clients"), (4, "clients"), (0, "removed-clients"))
]
TEXT = {
    "data": {"name": "pydoc", "context": 12},
    "federation": {"rounds": 2},
    "task": {"name": "network", "model": "gpt", "width": 16, "depth": 1, "heads": 2},
    "local": {"batch": 4, "steps": 2, "lr": 0.01},
}


def _measure(run: Path, by: Callable[[Config], Engine]) -> None:
    """neighbours.csv of a run."""
    laboratory = FinishedRun.open(run)
    verdict = certificates.certify(finished_run.from_directory(run))
    measure(laboratory, verdict, lambda record: None, lambda *_: None, by(laboratory.config))


@pytest.mark.parametrize(
    "number",
    quick(range(len(MATRICES)), [8, len(CASES) + 1, *range(len(MATRICES) - 2, len(MATRICES))]),
)
def test_ray_is_inline(live: LiveGrid, tmp_path: Path, number: int) -> None:
    """One experiment after the other through the same workers, which hold what they cached."""
    ray = tmp_path / "ray"
    profiled = small(**merged(MATRICES[number], {"output": {"profile": True}}))
    summary = on_ray(live, profiled, ray)
    workers = summary["workers"]
    server, *processes = summary["profile_seconds"]
    assert server["process"] == "server" and server["seconds"]["idle"] > 0
    assert {one["pid"] for one in processes} == {one["pid"] for one in workers}
    by_round = json.loads((ray / "worker-profiles.json").read_text())
    assert [*by_round] == [one["process"] for one in processes] == ["worker 1", "worker 2"]
    last = profiled.federation.rounds
    assert all(group["last"] <= last for groups in by_round.values() for group in groups)
    # Which categories a short run shows depends on chance, so only their names are checked.
    assert sum(sum(one["seconds"].values()) for one in processes) > 0
    assert {name for one in processes for name in one["seconds"]} <= {*CATEGORIES}
    assert len({one["node"] for one in workers}) == len(workers) == 2
    assert all(one["memory"] > 50e6 for one in workers)
    assert sum(one["replies"] for one in workers) > 0  # a busy machine may leave all to one worker
    execute(small(**MATRICES[number]), tmp_path / "inline")
    assert distance(tmp_path / "inline", ray) <= 1e-12
    assert load_file(ray / "model.safetensors")["weight"].std() > 0
    names = ("participants", "dropped", "staleness", "simulated_seconds")
    taken = [
        [[one.get(name) for name in names] for one in records(run)]
        for run in (tmp_path / "inline", ray)
    ]
    assert taken[0] == taken[1]


@pytest.mark.parametrize("tables", quick(PERSISTENT, [PERSISTENT[0], PERSISTENT[-1]]))
def test_states_of_clients_on_ray_are_those_inline(
    live: LiveGrid, tmp_path: Path, tables: dict
) -> None:
    """Also if the run on Ray is interrupted between two checkpoints, and resumed."""
    inline, ray = tmp_path / "inline", tmp_path / "ray"
    execute(small(**tables), inline)
    run, seen = prepare(resolve(small(**tables)), ray, False), list[Record]()

    def stop(record: Record) -> None:
        seen.append(record)
        if len(seen) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        live.do(lambda grid: train(run, FlowerEngine(run.config, grid), stop))
    on_ray(live, small(**tables), ray, resume=True)
    assert distance(inline, ray) <= 1e-12  # on some processors, sums depend on the group's size
    sent = [[(one["bytes_down"], one["bytes_up"]) for one in records(run)] for run in (inline, ray)]
    assert sent[0] == sent[1] and min(sent[0][0]) > 0
    assert not (ray / "client-states").exists()


PERSONAL = {
    "fedper": {"recipe": "fedper", "personal": "head.*, hidden.bias"},
    "ditto": {"recipe": "ditto", "personal-weight": 0.3},
    "scaffold": {"recipe": "scaffold"},  # of which the final model is tuned
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(PERSONAL, ["fedper"]))
def test_personal_models_on_ray_are_those_inline(live: LiveGrid, tmp_path: Path, name: str) -> None:
    """Their parameters, which only clients have, and what each client measures with them."""
    tables = {
        "data": {"name": "digits", "train": 120, "test": 20, "client-test": 0.3},
        "federation": {"rounds": 3},
        "task": {"name": "network", "model": "mlp"},
        "local": {"batch": 4, "steps": 2, "lr": 0.05, **PERSONAL[name]},
    }
    if name == "scaffold":
        tables["output"] = {"fine-tune": 5}
    inline, ray = tmp_path / "inline", tmp_path / "ray"
    execute(small({}, **tables), inline)
    on_ray(live, small({}, **tables), ray)
    assert distance(inline, ray) <= 1e-12
    found = (inline / "personal.csv").read_bytes()
    assert found == (ray / "personal.csv").read_bytes() and found.count(b"\n") == 7
    measured = np.genfromtxt(inline / "personal.csv", delimiter=",", names=True)
    assert (measured["global_accuracy"] != measured["personal_accuracy"]).any()


@pytest.mark.parametrize("recipe", quick(["fedmuon-corrected", "fednova"], ["fedmuon-corrected"]))
def test_records_of_clients_on_ray_are_those_inline(
    live: LiveGrid, tmp_path: Path, recipe: str
) -> None:
    """With momenta that never leave their clients, and test samples that only their clients read;
    and not with those of another seed."""
    tables = {
        "data": {"client-test": 0.3}, "local": {"recipe": recipe, "steps": 2, "batch": 4},
        "federation": {"rounds": 4}, "output": {"clients": True},
    }  # fmt: skip
    execute(small(**tables), tmp_path / "inline")
    on_ray(live, small(**tables), tmp_path / "ray")
    same_client_records(tmp_path / "inline", tmp_path / "ray")
    other = {**tables, "federation": {"rounds": 4, "seed": 4}}
    execute(small(**other), tmp_path / "other")
    with pytest.raises(AssertionError):
        same_client_records(tmp_path / "other", tmp_path / "ray")


KNOWN = {"level": "client", "insecure-reproducible-noise": True, "noise": 0.5, "bound": 0.3}
RELEASED = [
    ("fedmuon", 1, {}),  # of six clients, which leaves rounds to nobody
    ("local-muon", 3, {"cohorts": "fixed"}),
    ("fedmuon", 3, {"cohorts": "fixed", "trust": "local"}),
    ("fedmuon", 3, {"cohorts": "fixed", "trust": "distributed"}),
]


@pytest.mark.parametrize(("recipe", "count", "privacy"), quick(RELEASED, [RELEASED[-1]]))
def test_client_level_on_ray_is_that_inline(
    live: LiveGrid, tmp_path: Path, recipe: str, count: int, privacy: dict
) -> None:
    """Clipped and noisy in the clients' processes, or in the server's; and cohorts of nobody."""
    what = small(
        federation={"per-round": count, "rounds": 6},
        local={"recipe": recipe, "steps": 2, "lr": 0.1},
        privacy=KNOWN | privacy,
        faults={"retries": 0},
        engine={"name": "ray"},
    )
    inline = what.model_copy(update={"engine": small().engine})
    execute(inline, tmp_path / "inline")
    on_ray(live, what, tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-12
    taken = [one["participants"] for one in records(tmp_path / "ray")]
    assert ([] in taken) == (not privacy)
    told = [Ledger.read(tmp_path / x / "ledger.jsonl").entries for x in ("inline", "ray")]
    assert told[0] == told[1] and len(told[0]) == 6


def test_flowers_own_loop_drives_the_strategy(live: LiveGrid, tmp_path: Path) -> None:
    """`Strategy.start` calls the hooks that `rounds` does without."""
    from fedmuon.server.strategy import FedMuonStrategy

    what = small(local={"schedule": "cosine", "recipe": "fedmuon-aligned", "steps": 2})
    execute(what, tmp_path / "inline")
    run = prepare(resolve(what), tmp_path / "flower")
    fresh = begin(run.experiment.recipe, run.experiment.task, what.federation.seed)
    strategy = FedMuonStrategy(run.config, run.experiment, fresh)
    live.do(lambda grid: strategy.start(grid, strategy.arrays(), what.federation.rounds))
    assert strategy.state.round == what.federation.rounds
    found = load_file(tmp_path / "inline" / "model.safetensors")["weight"]
    np.testing.assert_allclose(strategy.state.params["weight"][0], found, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NETWORKS)))
def test_a_network_on_ray_is_that_inline(live: LiveGrid, tmp_path: Path, number: int) -> None:
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
    on_ray(live, small(**tables), tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") <= allowed
    execute(small(**{**tables, "task": {"name": "network", "model": "mlp"}}), tmp_path / "mlp")
    with pytest.raises(AssertionError):
        distance(tmp_path / "inline", tmp_path / "mlp")


@pytest.mark.slow
def test_a_decoder_on_ray_is_that_inline(live: LiveGrid, tmp_path: Path) -> None:
    """Every client reads the text for itself; fused projections are cut there."""
    execute(small(**TEXT), tmp_path / "inline")
    on_ray(live, small(**TEXT), tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-10


def same_neighbours(inline: Path, ray: Path) -> None:
    """A stack of data sets travels through Flower; each client replaces its own samples in it."""
    found = [np.loadtxt(run / "neighbours.csv", delimiter=",", skiprows=1) for run in (inline, ray)]
    np.testing.assert_array_equal(found[0][:, :4], found[1][:, :4])
    np.testing.assert_allclose(found[1][:, 4], found[0][:, 4], rtol=1e-9, atol=1e-15)
    assert found[0][:, 4].max() > 1e-6


@pytest.mark.parametrize("number", quick(range(1, len(NEIGHBOURS)), [2, 4]))
def test_neighbours_on_ray_are_those_inline(live: LiveGrid, tmp_path: Path, number: int) -> None:
    what = small(**NEIGHBOURS[number])
    stability(what, tmp_path / "inline")
    on_ray(live, what, tmp_path / "ray")
    live.do(lambda grid: _measure(tmp_path / "ray", lambda held: FlowerEngine(held, grid)))
    same_neighbours(tmp_path / "inline", tmp_path / "ray")


def test_another_seed_is_another_trajectory(live: LiveGrid, tmp_path: Path) -> None:
    """Negative control of the agreement."""
    execute(small(), tmp_path / "inline")
    on_ray(live, small(federation={"seed": 4}), tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") > 1e-3


@pytest.fixture
def order(cluster: str) -> Iterator[Callable[[str, int], dict]]:
    """Tell a client that takes part in round 3 to misbehave there; the order ends with the test.

    One whose worker ends by it does so in the last round: no other has to wait for the next one.
    """
    folder = Path(os.environ["FEDMUON_FAULTS"])

    def given(kind: str, times: int) -> dict:
        for file in folder.iterdir():
            file.unlink()
        round = 7 if kind == "silent" else 3
        client = int(build_plan(small()).participants(round)[1])
        one = {"kind": kind, "client": client, "round": round, "times": times}
        (folder / "orders.json").write_text(json.dumps(one))
        return one

    yield given
    given("none", 0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts, which are for workers that have died."""
    monkeypatch.setattr("fedmuon.server.strategy.PAUSE", 0.0)


WORDS = {
    "raise": "on fire",
    "nan": "NaN or infinity",
    "shape": "were expected",
    "wrong-round": "round 99",
    "silent": "",
    "kill": "Actor",
}
# Seconds that are waited to their end; of a killed worker's messages some are never answered, and
# the others are at once.
LONGEST = {"silent": 6.0, "kill": 20.0}


@pytest.mark.parametrize("kind", quick(WORDS, ["raise"]))
def test_strict_survives_what_passes(
    live: LiveGrid, order: Callable, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """One bad attempt: the round is asked again with the same participants, and nothing is lost."""
    if kind not in ("silent", "kill"):
        request.getfixturevalue("hurried")
    execute(small(), tmp_path / "inline")
    # So that no worker still starts when time is short; what one that dies now took is asked again.
    on_ray(live, config("", faults={"deadline": 60.0}), tmp_path / "warm")
    given = order(kind, 1)
    table = {"deadline": LONGEST.get(kind, 60.0), "retries": 6}
    on_ray(live, small(faults=table, engine={"name": "ray"}), tmp_path / "ray")
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-12
    faults = [fault for one in records(tmp_path / "ray") for fault in one.get("faults", [])]
    fault = next(one for one in faults if one["client"] == given["client"])
    unanswered = kind == "kill" and "no answer" in fault["why"]
    assert WORDS[kind] in fault["why"] or unanswered


def test_strict_stops_where_it_can_be_resumed(
    live: LiveGrid, order: Callable, tmp_path: Path, hurried: None
) -> None:
    execute(small(), tmp_path / "inline")
    what = small(faults={"retries": 1}, engine={"name": "ray"})
    given = order("raise", 99)
    with pytest.raises(InputError, match=f"round 3 .*client {given['client']}: .*on fire"):
        on_ray(live, what, tmp_path / "ray")
    order("raise", 0)
    on_ray(live, what, tmp_path / "ray", resume=True)
    assert distance(tmp_path / "inline", tmp_path / "ray") <= 1e-12


@pytest.mark.parametrize("kind", quick(["raise", "nan", "silent"], ["nan"]))
def test_drop_averages_the_others_and_says_so(
    live: LiveGrid, order: Callable, tmp_path: Path, kind: str
) -> None:
    execute(small(), tmp_path / "inline")
    on_ray(live, small(), tmp_path / "warm")
    given = order(kind, 99)
    table = {"policy": "drop", "deadline": LONGEST.get(kind, 60.0)}
    what = small(faults=table, engine={"name": "ray"}, output={"clients": True})
    summary = on_ray(live, what, tmp_path / "ray")
    assert summary["rounds_with_drops"] == 1
    lines, round = records(tmp_path / "ray"), given["round"]
    assert [line.get("dropped") for line in lines].index([given["client"]]) == round
    assert lines[round]["participants"] == build_plan(small()).participants(round).tolist()
    told = [(one["round"], one["client"]) for one in Result(tmp_path / "ray").clients()]
    assert len(told) == 23 and (round + 1, given["client"]) not in told
    assert distance(tmp_path / "inline", tmp_path / "ray") > 1e-6


@pytest.mark.slow
def test_the_stability_command_on_ray_is_that_inline(
    live: LiveGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run, then its neighbours, each on a grid; those of commands of their own are started by
    the examples."""
    asked = []
    stability(small(**NEIGHBOURS[0]), tmp_path / "inline")

    def with_ray_grid(config: Config, work: Callable, verbose: bool) -> object:
        asked.append(config)
        return live.do(work)

    monkeypatch.setattr(ray_engine, "with_ray_grid", with_ray_grid)
    stability(config("", **NEIGHBOURS[0]), tmp_path / "ray")
    assert len(asked) == 2
    same_neighbours(tmp_path / "inline", tmp_path / "ray")


@pytest.mark.needs_gpu
def test_clients_share_one_gpu(tmp_path: Path) -> None:
    """Two clients at a time on half a GPU each: the CPU's trajectory up to float32 rounding."""
    single = {"dtype": "float32"}
    execute(small(engine={**single, "device": "cpu"}), tmp_path / "cpu")
    half = {"name": "ray", "device": "cuda", "cpus-per-client": 1.0, "gpus-per-client": 0.5}
    execute(small(engine={**single, **half}), tmp_path / "gpu")
    assert distance(tmp_path / "cpu", tmp_path / "gpu") <= 1e-4
