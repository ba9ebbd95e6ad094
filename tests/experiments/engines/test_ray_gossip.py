"""Nodes without a server in Ray workers: the results of one process, and what travels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from cut_off import killed, same_states
from safetensors.numpy import load_file

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError, NonFinite
from fedmuon.experiments.engines.ray_gossip import addressed, parts_of
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.optim.graphs import Graph

pytestmark = pytest.mark.timeout(600)
N = 7
GRAPHS: list[dict[str, Any]] = [
    {"graph": "ring"},
    {"graph": "exponential", "varying-graph": True},
    {"graph": "random", "edge-share": 0.4, "varying-graph": True},
    {"graph": "complete"},
]


def table(federation: dict[str, Any], cluster: str = "", **tables: Any) -> Config:
    nodes = {"clients": N, "per-round": N, "rounds": 6, **federation}
    local = {"recipe": "demuon", "lr": 0.2, "momentum": 0.7, "steps": 2, "batch": 5}
    engine = {"engine": {"name": "ray", "ray-address": cluster}} if cluster else {}
    return resolve(small(federation=nodes, **{"local": local, **engine, **tables}))


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def test_a_worker_receives_only_messages_of_neighbours() -> None:
    weights, parts = Graph("ring", 8).weights(0), parts_of(8, 4)
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7]]
    messages = {node: {"w": torch.full((1, 1), float(node))} for node in parts[0]}
    sent = [sorted(received) for received in addressed(messages, weights, parts)]
    assert sent == [[0, 1], [1], [], [0]]
    assert parts_of(3, 9) == [[0], [1], [2]] and parts_of(5, 2) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("graph", quick(GRAPHS, GRAPHS[:1]))
def test_ray_equals_inline(cluster: str, graph: dict[str, Any], tmp_path: Path) -> None:
    execute(table(graph), tmp_path / "inline")
    execute(table(graph, cluster), tmp_path / "ray")
    models = [load_file(tmp_path / run / "model.safetensors") for run in ("inline", "ray")]
    for name, value in models[0].items():
        np.testing.assert_allclose(models[1][name], value, rtol=1e-12, atol=1e-12)
    lines = [records(tmp_path / run) for run in ("inline", "ray")]
    for inline, ray in zip(*lines, strict=True):
        assert inline["bytes_up"] == ray["bytes_up"] > 0
        assert inline["participants"] == ray["participants"]
        for field in ("consensus_error", "client_loss", "spectral_gap"):
            assert ray[field] == pytest.approx(inline[field], rel=1e-11, abs=1e-14)
    other = {"graph": "complete"} if graph["graph"] != "complete" else {"graph": "ring"}
    execute(table(other), tmp_path / "other")  # the negative control
    wrong = load_file(tmp_path / "other" / "model.safetensors")
    assert max(np.abs(wrong[name] - value).max() for name, value in models[0].items()) > 1e-6


def test_a_killed_run_resumes_on_ray(cluster: str, tmp_path: Path) -> None:
    config = table(GRAPHS[2], cluster, output={"checkpoint-every": 2})
    killed(config, tmp_path / "run", [3])
    execute(config, tmp_path / "whole")
    same_states(tmp_path / "run", tmp_path / "whole")
    errors = [[line["consensus_error"] for line in records(tmp_path / run)]
              for run in ("run", "whole")]  # fmt: skip
    assert errors[0] == errors[1] and len(errors[0]) == 6


def test_an_error_of_a_worker_is_one_sentence(cluster: str, tmp_path: Path) -> None:
    local = {"recipe": "demuon", "lr": 1e15, "momentum": 0.7, "steps": 2, "weight-decay": 1e15}
    config = table({"graph": "ring", "rounds": 60}, cluster, local=local)
    with pytest.raises((NonFinite, InputError), match="not finite") as caught:
        execute(config, tmp_path / "run")
    assert str(caught.value).count("\n") == 0
