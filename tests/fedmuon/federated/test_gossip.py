"""DeMuon: training without a server, against a loop over nodes, and what its records say."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from compared import arrays, built, ended, gap, problem_of
from conftest import small
from cut_off import killed, same_runs, without_wall_times
from reference import gossip
from reference.trees import largest_gap
from safetensors.numpy import load_file
from sentences import one_sentence

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.gossip import NodeGroup, consensus_error, gossip_of
from fedmuon.federated.rounds import begin, run_rounds, simulate
from fedmuon.optim.graphs import Graph, contraction
from fedmuon.server.strategy import FlowerEngine

LR, BETA, DECAY, N, ROUNDS = 0.3, 0.7, 0.1, 6, 5
LOCAL = {"recipe": "demuon", "lr": LR, "momentum": BETA, "steps": 2, "batch": 7}
STATES = {"node-model": "models", "momentum": "momenta", "node-tracker": "trackers"}
GRAPHS: dict[str, dict[str, Any]] = {
    "ring": {"graph": "ring"},
    "torus": {"graph": "torus"},
    "exponential": {"graph": "exponential"},
    "one neighbour per round": {"graph": "exponential", "varying-graph": True},
    "complete": {"graph": "complete"},
    "random": {"graph": "random", "edge-share": 0.5},
    "drawn anew": {"graph": "random", "edge-share": 0.5, "varying-graph": True},
}


def table(federation: dict[str, Any] | None = None, **tables: Any) -> Config:
    given: dict[str, Any] = {"local": LOCAL, "orthogonalizer": {"lambda": 0.1}} | tables
    nodes = {"clients": N, "per-round": N, "rounds": ROUNDS, **(federation or {})}
    return resolve(small({"federation": nodes}, **given, federation=federation or {}))


def ring(round: int) -> np.ndarray:
    """Node i and its two neighbours have the weight 1/3."""
    weights = np.zeros((N, N))
    for i in range(N):
        for j in (i - 1, i, i + 1):
            weights[i, j % N] = 1 / 3
    return weights


def nodes_of(config: Config) -> tuple[Any, list[dict[str, Any]]]:
    """The experiment after its rounds, and the states of all nodes."""
    made = built(config)
    ended(made)
    return made, [made.client_states.read(node, made.plan.rounds) for node in range(N)]


def distance(config: Config, expected: gossip.Nodes) -> float:
    _, nodes = nodes_of(config)
    return max(
        gap(nodes[node][state], getattr(expected, name)[node])
        for state, name in STATES.items()
        for node in range(N)
    )


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_equals_the_reference(name: str) -> None:
    config = table(GRAPHS[name], local={**LOCAL, "weight-decay": DECAY})
    graph, problem = gossip_of(built(config).recipe).graph, problem_of(config)
    weights = ring if name == "ring" else graph.weights
    expected = gossip.demuon(problem, weights, LR, BETA, DECAY)
    assert distance(config, expected) < 1e-12
    mean = gossip.mean(expected.models)
    assert gap(ended(built(config)).params, mean) < 1e-12
    for wrong in ({"momentum": BETA * 1.05}, {"lr": LR * 1.05}, {"weight_decay": 0.0}):
        constants: dict[str, Any] = {"lr": LR, "momentum": BETA, "weight_decay": DECAY, **wrong}
        assert distance(config, gossip.demuon(problem, weights, **constants)) > 1e-4


def test_another_graph_or_no_tracking_is_another_result() -> None:
    """The negative controls."""
    config = table()
    problem = problem_of(config)
    torus = Graph("torus", N).weights
    assert distance(config, gossip.demuon(problem, torus, LR, BETA)) > 1e-3
    assert distance(config, gossip.demuon(problem, ring, LR, BETA, tracking=False)) > 1e-3


@pytest.mark.parametrize("batch", [0, 7])
def test_complete_graph_is_a_centralized_step_on_the_mean(batch: int) -> None:
    """With w = 1/N, each node has the model of EF21-Muon without compression."""
    local = {**LOCAL, "batch": batch, "weight-decay": DECAY}
    config = table({"graph": "complete"}, local=local)
    central = resolve(
        small(
            {"federation": {"clients": N, "per-round": N, "rounds": ROUNDS}},
            local={**local, "recipe": "ef21-muon"},
            orthogonalizer={"lambda": 0.1},
        )
    )
    expected = arrays(ended(built(central)).params)
    made, nodes = nodes_of(config)
    assert all(gap(states["node-model"], expected) < 1e-12 for states in nodes)
    in_python = simulate(
        replace(made, recipe=replace(made.recipe, stages=())), begin(made.recipe, made.task, 3)
    )
    assert gap(in_python.params, expected) < 1e-12
    _, others = nodes_of(table({"graph": "ring"}, local=local))  # the negative control
    assert max(gap(states["node-model"], expected) for states in others) > 1e-3


def test_mean_of_trackers_is_the_mean_of_momenta() -> None:
    for tables in GRAPHS.values():
        _, nodes = nodes_of(table(tables))
        means = [gossip.mean([arrays(states[name]) for states in nodes])
                 for name in ("momentum", "node-tracker")]  # fmt: skip
        assert largest_gap(*means) < 1e-14


@pytest.mark.parametrize("kind", ["tracker", "model"])
def test_a_false_message_moves_the_mean_of_all_nodes_for_good(kind: str) -> None:
    """By its error divided by the number of nodes. Correct messages do not remove the error."""
    made = built(table({"graph": "ring"}))
    weights, numbers = gossip_of(made.recipe).graph.weights(0), range(N)
    start = begin(made.recipe, made.task, made.plan.seed)
    means = {}
    for error in (0.0, 3.0):
        nodes = [made.client(node) for node in numbers]
        group = NodeGroup(made.recipe, made.task, made.plan, nodes, start.params,
                          {node: {} for node in numbers})  # fmt: skip
        for round in range(4):
            messages = group.track(round)
            if kind == "tracker" and round == 1:
                messages[0]["weight"] = messages[0]["weight"] + error
            messages = group.step(round, weights, messages)
            if kind == "model" and round == 3:  # the last round, because gradients see the models
                messages[0]["weight"] = messages[0]["weight"] + error
            group.average(weights, messages)
        states = [group.states[node] for node in numbers]
        means[error] = {
            name: gossip.mean([arrays(state[name]) for state in states])["weight"]
            for name in ("momentum", "node-tracker", "node-model")
        }
    if kind == "tracker":  # the mean of the momenta is that of the trackers without the error
        for error, of_run in means.items():
            shift = of_run["node-tracker"] - of_run["momentum"]
            np.testing.assert_allclose(shift, error / N, atol=1e-13)
    else:
        shift = means[3.0]["node-model"] - means[0.0]["node-model"]
        np.testing.assert_allclose(shift, 3.0 / N, rtol=1e-12)


@pytest.mark.parametrize("graph", ["ring", "torus", "random"])
def test_consensus_error_falls_at_the_rate_of_the_second_eigenvalue(graph: str) -> None:
    """The step size is 0 after three rounds, so the nodes only average."""
    schedule = {"schedule": "step", "options": {"every": 3, "factor": 0.0}}
    config = table({"graph": graph, "clients": 8, "per-round": 8, "rounds": 60},
                   local={**LOCAL, **schedule})  # fmt: skip
    made = built(config)
    errors = []
    for finished in run_rounds(made, begin(made.recipe, made.task, 3)):
        stored = (made.client_states.read(node, finished.state.round) for node in range(8))
        errors.append(consensus_error([states["node-model"] for states in stored]))
    weights = gossip_of(made.recipe).graph.weights(0)
    second = sorted(abs(np.linalg.eigvalsh(weights)))[-2]
    alone = [error for error in errors[3:] if error > 1e-9]  # before rounding stops the decrease
    ratios = [after / before for before, after in itertools.pairwise(alone)]
    assert max(ratios) <= second * (1 + 1e-9)  # in each round
    assert ratios[-1] == pytest.approx(second, rel=1e-3)  # the slowest part remains
    assert contraction(weights) == pytest.approx(second, abs=1e-12)
    assert errors[2] > 1e-3
    others = [size for size in abs(np.linalg.eigvalsh(weights)) if size < second - 1e-9]
    assert ratios[-1] > 1.05 * max(others)  # the negative control


def test_records_have_the_consensus_error_and_the_spectral_gap(tmp_path: Path) -> None:
    config = table(GRAPHS["drawn anew"])
    summary = execute(config, tmp_path / "run")
    made, nodes = nodes_of(config)
    models = [arrays(states["node-model"]) for states in nodes]
    mean = gossip.mean(models)
    squares = sum(((model[name] - mean[name]) ** 2).sum() for model in models for name in mean)
    expected = float(np.sqrt(squares / N))
    records = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").open()]
    assert records[-1]["consensus_error"] == pytest.approx(expected, rel=1e-12)
    assert summary["consensus_error"] == records[-1]["consensus_error"]
    graph = gossip_of(made.recipe).graph
    for record in records:
        weights = graph.weights(record["round"] - 1)
        gap_of_round = 1 - np.linalg.svd(weights - 1 / N, compute_uv=False)[0]
        assert record["spectral_gap"] == pytest.approx(gap_of_round, abs=1e-12)
        edges = sum(weights[i, j] > 0 for i in range(N) for j in range(N) if i != j)
        assert record["bytes_up"] == 2 * edges * 21 * 8 and record["bytes_down"] == 0
        assert record["participants"] == [*range(N)]
    assert len({record["spectral_gap"] for record in records}) > 1
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(np.abs(weights[name] - mean[name]).max() < 1e-14 for name in mean)
    stored = np.load(tmp_path / "run" / "graph.npy")
    assert np.array_equal(stored[0], graph.weights(0))


def test_a_run_resumes_bit_identically_after_20_kills(tmp_path: Path) -> None:
    """One kill after each of 20 rounds, with a graph that is drawn anew in each round."""
    config = table({**GRAPHS["drawn anew"], "rounds": 21},
                   output={"checkpoint-every": 3, "evaluate-every": 7})  # fmt: skip
    killed(config, tmp_path / "run", range(1, 21))
    execute(config, tmp_path / "whole")
    same_runs(tmp_path / "run", tmp_path / "whole")
    records = without_wall_times(tmp_path / "run")
    assert len({record["spectral_gap"] for record in records}) > 10  # so the graph has changed
    execute(table({**GRAPHS["drawn anew"], "rounds": 21, "seed": 4}), tmp_path / "other")
    with pytest.raises(AssertionError):  # the negative control
        same_runs(tmp_path / "run", tmp_path / "other")


def test_a_changed_file_is_seen_when_the_run_resumes(tmp_path: Path) -> None:
    file = tmp_path / "graph.csv"
    file.write_text("\n".join(",".join(["1/6"] * N) for _ in range(N)))
    config = table({"graph": "file", "graph-file": str(file)}, output={"checkpoint-every": 1})

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "run", on_round_end=stop)
    rows = [["1/3" if (i - j) % N in (0, 1, N - 1) else "0" for j in range(N)] for i in range(N)]
    file.write_text("\n".join(map(",".join, rows)))
    from fedmuon.optim.graphs import _period

    _period.cache_clear()  # as in a new process
    with pytest.raises(InputError, match=r"graph\.npy does not match this config"):
        execute(config, tmp_path / "run", resume=True)


def test_replicas_equal_single_runs() -> None:
    sizes = (0.2, LR)
    made = build_experiment(table(), lr=torch.tensor(sizes, dtype=torch.float64))
    state = simulate(made, begin(made.recipe, made.task, made.plan.seed, len(sizes)))
    for replica, size in enumerate(sizes):
        alone = ended(built(table(local={**LOCAL, "lr": size})))
        for name, value in alone.params.items():
            torch.testing.assert_close(state.params[name][replica], value[0], rtol=1e-10, atol=0)


def test_networks_train_without_a_server() -> None:
    """Vectors take the auxiliary step along their tracker, and all nodes average them."""
    config = table(
        {"graph": "ring"},
        data={"name": "digits", "train": 120, "test": 20},
        task={"name": "network", "model": "mlp"},
        local={**LOCAL, "lr": 0.02},
    )
    made = built(config)
    start = begin(made.recipe, made.task, 3)
    state = simulate(made, start)
    for name, value in state.params.items():
        assert bool(value.isfinite().all()) and not torch.equal(value, start.params[name])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"federation": {"per-round": 3}}, "per-round = 3 is not possible .* all nodes exchange"),
        ({"engine": {"name": "deployment"}}, "its nodes have no server. Set .* 'inline' or 'ray'"),
        ({"compression": {"uplink": "qsgd"}}, "its nodes send exact tensors"),
        ({"federation": {"aggregate": "median"}}, "average by the weights of the graph"),
        ({"devices": {"mode": "synchronous"}}, "these devices wait for a server"),
        ({"output": {"clients": True}}, "there is no mean update"),
        ({"orthogonalizer": {"row-memory": 0.5}}, "store no state of the orthogonalizer"),
        ({"federation": {"graph": "file"}}, "graph = 'file' needs a file"),
        ({"federation": {"graph": "random", "edge-share": 0.01}}, "is not connected"),
        (
            {"privacy": {"level": "client", "noise": 0.5, "bound": 0.3,
                         "insecure-reproducible-noise": True}},
            "stored states",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_rejected(tables: dict[str, Any], words: str) -> None:
    with one_sentence(words):
        build_experiment(table(**tables))


def test_a_flower_server_does_not_run_nodes_without_a_server() -> None:
    made = built(table())
    with pytest.raises(InputError, match=r"trains without a server, .* Use `fedmuon run`"):
        FlowerEngine(table(), cast(Any, None))(made, begin(made.recipe, made.task, 3))


def test_all_nodes_take_part_by_default() -> None:
    tables = {"federation": {"clients": 9}, "local": {"recipe": "demuon"}}
    assert Config.of(tables).federation.per_round == 9
    assert Config.of({"local": {"recipe": "demuon"}}).federation.per_round == 20
    assert Config.of({"local": {"recipe": "fedmuon"}}).federation.per_round == 5
