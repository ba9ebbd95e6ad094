"""Runs on Ray nodes that are started by `ray start`, each with an object store of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chaos.processes import MARK, command, marked
from ray_nodes import STORE, ray_nodes, spilled
from safetensors.numpy import load_file

from fedmuon.experiments.cli import main
from fedmuon.runs.directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = {
    "data.train": 60, "data.test": 30, "federation.clients": 6, "federation.per-round": 6,
    "federation.rounds": 6, "local.lr": 0.1, "engine.dtype": "float64", "engine.device": "cpu",
}  # fmt: skip
# A model has 24 MB, and a node's object store 80 MB for the model and three replies or more.
LARGE = SMALL | {
    "local.recipe": "fedavgm", "data.name": "synthetic", "data.train": 12, "data.test": 6,
    "data.dimension": 60_000, "data.classes": 50, "data.minimum": 1, "federation.partition": "iid",
    "federation.rounds": 2,
}  # fmt: skip
# A model has 48 MB, so no store has room for a model and a reply.
LARGER = LARGE | {"data.classes": 100}
# Most of the time of a round is within the call to a worker.
LONG = SMALL | {"local.steps": 400, "federation.rounds": 4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, dict[str, str]]]:
    with ray_nodes(2) as found:
        yield found


def words(keys: dict, out: Path) -> list[str]:
    given = [word for name, value in keys.items() for word in ("--set", f"{name}={value}")]
    return ["run", *given, "--out", str(out)]


@contextlib.contextmanager
def started(
    keys: dict, out: Path, nodes: tuple[str, dict[str, str]]
) -> Iterator[subprocess.Popen[str]]:
    """`fedmuon run` on those nodes; it does not outlive the block."""
    address, environment = nodes
    engine = ["--engine", "ray", "--ray-address", address]
    line = [sys.executable, "-m", "fedmuon", *words(keys, out), *engine]
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def summary_of(process: subprocess.Popen[str], out: Path) -> dict:
    """The summary of a run that went well."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads((out / "summary.json").read_text())


def ended(keys: dict, out: Path, nodes: tuple[str, dict[str, str]]) -> dict:
    """The summary of a run that went well from its start to its end."""
    with started(keys, out, nodes) as process:
        return summary_of(process, out)


def distance(keys: dict, out: Path) -> float:
    """The largest relative difference from the same run in this process."""
    with pytest.raises(SystemExit) as end:
        main([*words(keys, out.with_name("inline")), "--engine", "inline"])
    assert not end.value.code
    found = []
    for name in ("model", "momentum"):
        ray, inline = (
            load_file(run / f"{name}.safetensors")["weight"]
            for run in (out, out.with_name("inline"))
        )
        found.append(np.linalg.norm(ray - inline) / max(np.linalg.norm(inline), 1e-300))
    return float(max(found))


def test_two_nodes_share_a_run(nodes: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Each answers messages, and the model is that of one process.

    A worker that starts late on a busy machine may find all rounds answered: then they run again.
    """
    workers = ended(SMALL, out := tmp_path / "ray", nodes)["workers"]
    for attempt in range(5):
        if not all(one["replies"] > 0 for one in workers):
            workers = ended(SMALL, out := tmp_path / f"again{attempt}", nodes)["workers"]
    assert len({one["node"] for one in workers}) == 2
    assert all(one["replies"] > 0 for one in workers)
    assert sum(one["replies"] for one in workers) == 36
    assert distance(SMALL, out) <= 1e-12


def test_a_round_has_more_bytes_than_the_object_stores(
    nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """Ray puts objects without room there on disk, and the result stays the same."""
    before = spilled(*nodes)
    workers = ended(LARGER, out := tmp_path / "ray", nodes)["workers"]
    size = load_file(out / "model.safetensors")["weight"].nbytes
    assert len(workers) == 2 and size > 0.5 * STORE
    assert spilled(*nodes) > before
    assert distance(LARGER, out) <= 1e-12


@pytest.fixture(scope="module")
def full_nodes() -> Iterator[tuple[str, dict[str, str]]]:
    with ray_nodes(2, full_disk=True) as found:
        yield found


def test_stores_and_disk_are_full_for_a_call_with_several_clients(
    full_nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """A reply with several models finds no room; then each client is asked alone. The result is
    that of one process, or, where earlier objects still fill the stores, the run stops and says so.
    """
    with started(LARGE, out := tmp_path / "ray", full_nodes) as process:
        _, said = process.communicate(timeout=300)
    assert spilled(*full_nodes) == 0
    if process.returncode:
        stopped_by_full_stores(process.returncode, said, out)
        return
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    told = [fault["why"] for one in records for fault in one.get("faults", [])]
    assert told and all(one.startswith("Ray's object store is full, and") for one in told)
    assert not any("dropped" in one for one in records)
    assert distance(LARGE, out) <= 1e-12


def stopped_by_full_stores(code: int, said: str, out: Path) -> None:
    """One sentence and exit code 2, and the folder can be resumed."""
    assert code == 2 and said.count("fedmuon: ") == 1 and "Traceback" not in said
    assert "Ray's object store is full, and so is the disk" in said and "--resume" in said
    assert not RunDirectory(out).lost()


def test_stores_and_disk_are_full_for_any_call(
    full_nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """A model and one reply find no room: the run says so, and can be resumed."""
    keys, out = LARGE | {"data.dimension": 108_000}, tmp_path / "ray"
    with started(keys, out, full_nodes) as process:
        _, said = process.communicate(timeout=300)
    stopped_by_full_stores(process.returncode, said, out)
    assert not (out / "rounds.jsonl").read_text()


def test_a_worker_is_killed_within_a_round(
    nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """The clients that it was asked for are asked again, and the result stays the same."""
    out = tmp_path / "ray"
    log, end, killed = out / "rounds.jsonl", time.monotonic() + 120, 0
    with started(LONG, out, nodes) as process:
        while not killed and time.monotonic() < end and process.poll() is None:
            for number in marked(nodes[1][MARK]):
                if b"Worker.answer" in command(number) and log.exists() and log.stat().st_size:
                    os.kill(number, signal.SIGKILL)
                    killed = number
                    break
            time.sleep(0.01)
        assert killed
        workers = summary_of(process, out)["workers"]
    assert killed not in [one["pid"] for one in workers]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    told = [fault["why"] for one in records for fault in one.get("faults", [])]
    assert told and all("the worker process of this client died" in one for one in told)
    assert not any("dropped" in one for one in records)
    assert distance(LONG, out) <= 1e-12
