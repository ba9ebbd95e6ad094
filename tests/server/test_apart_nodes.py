"""Runs on Ray nodes that are started by `ray start`, each with an object store of its own."""

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
from ray_nodes import STORE, ray_nodes
from safetensors.numpy import load_file

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
# Most of the time of a round is within the call to a worker.
LONG = SMALL | {"local.steps": 400, "federation.rounds": 4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, dict[str, str]]]:
    with ray_nodes(2) as found:
        yield found


def started(
    keys: dict, out: Path, nodes: tuple[str, dict[str, str]] | None
) -> subprocess.Popen[str]:
    """`fedmuon run`, on those nodes or in its own process."""
    address, environment = nodes or ("", {**os.environ})
    engine = ["--engine", "ray", "--ray-address", address] if nodes else ["--engine", "inline"]
    given = [word for name, value in keys.items() for word in ("--set", f"{name}={value}")]
    line = [sys.executable, "-m", "fedmuon", "run", *engine, *given, "--out", str(out)]
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], out: Path) -> dict:
    """The summary of a run that went well."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return json.loads((out / "summary.json").read_text())


def distance(keys: dict, out: Path) -> float:
    """The largest relative difference from the same run in one process."""
    ended(started(keys, out.with_name("inline"), None), out.with_name("inline"))
    found = []
    for name in ("model", "momentum"):
        ray, inline = (
            load_file(run / f"{name}.safetensors")["weight"]
            for run in (out, out.with_name("inline"))
        )
        found.append(np.linalg.norm(ray - inline) / max(np.linalg.norm(inline), 1e-300))
    return float(max(found))


def test_two_nodes_share_a_run(nodes: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Each answers messages, and the model is that of one process."""
    workers = ended(started(SMALL, out := tmp_path / "ray", nodes), out)["workers"]
    assert len({one["node"] for one in workers}) == 2
    assert all(one["replies"] > 0 for one in workers)
    assert sum(one["replies"] for one in workers) == 36
    assert distance(SMALL, out) <= 1e-12


def test_a_round_has_more_bytes_than_the_object_stores(
    nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """Ray puts objects without room there on disk, and the result stays the same."""
    workers = ended(started(LARGE, out := tmp_path / "ray", nodes), out)["workers"]
    size = load_file(out / "model.safetensors")["weight"].nbytes
    assert len(workers) == 2 and size > 0.25 * STORE
    assert (1 + 3) * size > STORE  # the model, and what one of two workers answers for six clients
    assert distance(LARGE, out) <= 1e-12


def test_a_worker_is_killed_within_a_round(
    nodes: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """The clients that it was asked for are asked again, and the result stays the same."""
    process, out = started(LONG, tmp_path / "ray", nodes), tmp_path / "ray"
    log, end, killed = out / "rounds.jsonl", time.monotonic() + 120, 0
    while not killed and time.monotonic() < end and process.poll() is None:
        for number in marked(nodes[1][MARK]):
            if b"Worker.answer" in command(number) and log.exists() and log.stat().st_size:
                os.kill(number, signal.SIGKILL)
                killed = number
                break
        time.sleep(0.01)
    assert killed
    workers = ended(process, out)["workers"]
    assert killed not in [one["pid"] for one in workers]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    told = [fault["why"] for one in records for fault in one.get("faults", [])]
    assert told and all("its worker process died" in one for one in told)
    assert not any("dropped" in one for one in records)
    assert distance(LONG, out) <= 1e-12
