"""`fedmuon plan`: nothing is written, what cannot run is refused, and the sums are right."""

import io
import json
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick, small
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from rich.console import Console

import fedmuon
from fedmuon.clients import client_app as clients
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.engines import probe, ray_engine
from fedmuon.experiments.planning import cost, pace
from fedmuon.experiments.planning.cost import array_bytes, plan
from fedmuon.experiments.planning.pace import Pace, Trial, few, rows_of
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.federated.experiment import Experiment, Round
from fedmuon.federated.rounds import begin, broadcast
from fedmuon.federated.wire import named
from fedmuon.optim.stage import ServerState
from fedmuon.runs.prepare import Run, prepare
from fedmuon.server import message_sizes
from fedmuon.server.ray.flower_internals import node_ids
from fedmuon.server.ray.worker import Worker
from fedmuon.server.ray.worker_pool import apart

MLP = {"task": {"name": "network", "model": "mlp"}, "local": {"batch": 4}}
DEVICES = {"devices": {"mode": "deadline", "select": 5}}
PRIVATE = {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 2.0, "lot": 8.0}}


def prepared(folder: Path, *below: dict, **tables: dict) -> tuple[Run, ServerState]:
    """A small run before its first round."""
    config = small(*below, **tables)
    folder.mkdir(exist_ok=True)
    run = prepare(resolve(config), folder / "run")
    return run, begin(run.experiment.recipe, run.experiment.task, config.federation.seed)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in and one for temporary files, both empty again at the end."""
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "here"
    left = [*(tmp_path / "here").iterdir(), *(tmp_path / "temporary").iterdir()]
    assert [one for one in left if not one.name.startswith("torchinductor")] == []


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What `fedmuon plan WORDS` prints, or how it refuses."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert (end.value.code or 0) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_the_command_says_what_a_run_costs(empty: Path, capsys) -> None:
    given = ["--set=data.name=synthetic", "--set=data.train=200", "--set=federation.rounds=7"]
    loaded = time.process_time()  # not the age of the process: a wrapper may have waited in it
    found = json.loads(told(capsys, *given, "--json"))
    assert loaded <= found["seconds"]["start"] <= time.process_time()
    assert found["rounds"] == 7 and found["tried"] == found["participants"] == 5
    parts = {name: value for name, value in found["seconds"].items()
             if name not in ("a round", "an evaluation", "all")}  # fmt: skip
    assert all(value >= 0 for value in parts.values()) and parts["first round"] > 0
    assert found["seconds"]["all"] == pytest.approx(sum(parts.values()))
    assert parts["later rounds"] == pytest.approx(6 * found["seconds"]["a round"])
    assert found["memory"]["driver"] > 50e6 and found["bytes"]["down"] == 0
    shown = told(capsys, *given)
    assert "from command to prompt" in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("wrong", [
    ["--set=federation.rounds=x"],
    ["--set=local.recipe=fedavgg"],
    ["--set=privacy.epsilon=3"],
    ["--set=federation.per-round=30"],
    ["--set=data.train=1000000000", "--set=data.name=synthetic", "--set=data.dimension=1000000"],
    ["missing.toml"],
    ["--engine=slurm"],
])  # fmt: skip
def test_what_cannot_run_has_no_cost(wrong: list[str], empty: Path, capsys) -> None:
    said = told(capsys, *wrong, code=2)
    assert said.startswith("fedmuon: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize("below", quick([{}, MLP, PRIVATE, DEVICES], [{}, PRIVATE, DEVICES]))
def test_every_kind_of_run_has_a_cost(below: dict, empty: Path) -> None:
    found = plan(small(below), started=2.0)
    assert found["seconds"]["start"] == 2.0 and found["seconds"]["records"] > 0
    assert found["seconds"]["all"] < 60


@pytest.mark.slow
def test_in_python(empty: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 3)
    data = torch.randn(60, 7), torch.arange(60) % 3
    config = {"federation": {"clients": 3, "rounds": 2}, "local": {"recipe": "fedavg", "lr": 0.1}}
    found = fedmuon.plan(config, data=data, task=model)
    assert found["participants"] == 3 and found["seconds"]["start"] == 0
    page = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text("utf-8")
    documented = re.findall(r"`([^`]+)`", page.partition("| key |")[2].partition("\n\n")[0])
    keys = {name for one in found.values() if isinstance(one, dict) for name in one}
    muon = {**config, "local": {"recipe": "fedmuon"}}
    maps = fedmuon.plan(muon, data=data, task=model)["orthogonalization"]
    assert set(documented) == set(found) | keys | set(maps) | set(maps["stacks"][0])
    assert found["bytes"]["a client up"] == sum(value.nbytes for value in model.parameters())


class Nobody:
    """A grid without a node."""

    workers, absent = 1, 0

    def get_node_ids(self) -> list[int]:
        return []

    def push_messages(self, messages: list[Message]) -> list[str]:
        assert not messages
        return []


def test_a_plan_has_nothing_to_go_on_with(empty: Path, tmp_path: Path, monkeypatch) -> None:
    """A round that fails is refused in the run's words, except the last ones."""
    config = small(engine={"name": "ray"}, faults={"retries": 0, "patience": 0.01})
    monkeypatch.setattr(ray_engine, "with_ray_grid", lambda config, work, *more: work(Nobody()))
    with pytest.raises(InputError, match=r"no connected node has partition .* Fix the cause\.$"):
        plan(config)
    with pytest.raises(InputError, match=r"Fix the cause, then continue with --resume\.$"):
        execute(config, tmp_path / "run")


def record_of(others: float, engine: str = "ray") -> dict[str, Any]:
    """A cost as `plan` returns it."""
    seconds = dict.fromkeys([*cost.ROWS, "a round", "an evaluation"], 1.0)
    sent = {"down": 132e3, "up": 63e3, "a client down": 63e3, "a client up": 63e3}
    return {
        "engine": engine, "workers": 2, "rounds": 50, "participants": 5, "tried": 5,
        "seconds": seconds, "memory": {"driver": 4e8, "worker": 3e8, "model": {}},
        "bytes": sent,
        "others": others,
    }  # fmt: skip


@pytest.mark.parametrize(("others", "said"), [(0.0, False), (1.2, True)])
def test_who_had_the_processors_is_said_above_the_seconds(others: float, said: bool) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    for one in cost.tables(record_of(others)):
        console.print(one)
    text = console.export_text()
    assert ("other programs used 1.2 cores" in text.partition("seconds of")[0]) is said
    assert "clients of a round share" in text
    assert "clients of a round share" not in str(cost.tables(record_of(others, "inline"))[2:])


def test_rules_that_refuse_few_replies_have_a_cost(empty: Path) -> None:
    def without_largest(replies: list[Any]) -> dict[str, Any]:
        kept = sorted(replies, key=lambda one: one.loss)[:-1]
        return {name: sum(one.params[name] for one in kept) / len(kept) for name in kept[0].params}

    assert fedmuon.plan(small({"local": {"recipe": "fedavg"}}), aggregate=without_largest)


@pytest.mark.slow
def test_a_deployment_has_a_cost(empty: Path) -> None:
    few = {"data": {"train": 90}, "federation": {"clients": 2, "per-round": 1}}
    found = plan(small(engine={"name": "deployment"}, **few))
    assert found["workers"] == 2 and found["memory"]["worker"] > 100e6 and found["bytes"]["up"] > 0
    assert found["seconds"]["first round"] > found["seconds"]["a round"] > 0


# Sums.


class Clock:
    """Time that passes only in the rounds of an engine, `seconds` of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
        self.now, self.tried, self._seconds = 0.0, [], seconds
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)

    def engine(self, experiment: Experiment, state: ServerState) -> Iterator[Round]:
        """Rounds that do nothing else."""
        for chosen in experiment.plan.schedule():
            self.tried.append(len(chosen))
            self.now += self._seconds(experiment.plan, chosen, len(self.tried) == 1)
            yield Round(state, chosen, chosen, np.zeros(1))


def foretold(clock: Clock, run: Run, state: ServerState, **given: Any) -> Pace:
    return pace.pace(Trial(run.experiment, state, clock.engine), run.data.sizes, **given)


def crowd(tmp_path: Path, clients: int = 60) -> tuple[Run, ServerState]:
    """All of many clients in every round, of unlike sizes."""
    tables = {"data": {"train": 3000, "alpha": 0.3}, "local": {"steps": 4},
              "federation": {"clients": clients, "per-round": clients}}  # fmt: skip
    return prepared(tmp_path, tables)


@pytest.mark.parametrize("slow", quick([1e-6, 1e-4, 1e-3, 0.1], [1e-4, 0.1]))
def test_a_slow_inline_round_is_foretold_by_rows(slow: float, tmp_path: Path, monkeypatch) -> None:
    run, state = crowd(tmp_path)

    def seconds(plan: Any, chosen: np.ndarray, first: bool) -> float:
        return slow * plan.steps * run.data.sizes[chosen].sum() + first

    clock = Clock(monkeypatch, seconds)
    found = foretold(clock, run, state)
    assert found.round == pytest.approx(slow * 4 * 3000)
    assert found.extra == pytest.approx(1.0)
    assert clock.now < 2 * pace.AFFORD + 1 or found.tried == 1
    assert found.tried == (60 if slow < 1e-3 else found.tried) and max(clock.tried) == found.tried


@pytest.mark.parametrize("slow", quick([1e-4, 0.02, 0.3], [0.02]))
def test_a_slow_round_on_workers_is_foretold_by_clients(slow, tmp_path, monkeypatch) -> None:
    run, state = crowd(tmp_path)

    def affine(plan: Any, chosen: np.ndarray, first: bool) -> float:
        assert plan.steps == 4  # nobody can be asked for fewer
        return 0.01 + slow * len(chosen) + 2.0 * first

    found = foretold(Clock(monkeypatch, affine), run, state, least=2, divisible=False)
    assert found.round == pytest.approx(0.01 + 60 * slow, rel=1e-6 if slow < 0.3 else 0.01)
    assert found.extra == pytest.approx(2.0)

    def bent(plan: Any, chosen: np.ndarray, first: bool) -> float:
        return slow * len(chosen) ** 2

    wrong = foretold(Clock(monkeypatch, bent), run, state, least=2, divisible=False)
    assert wrong.tried == 60 or wrong.round < 0.9 * slow * 60**2  # what bends is not foretold


def test_few_are_some_of_those_who_take_part(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path)
    whole = run.experiment.plan
    some = few(whole, 2, 20, skipped=3)
    assert some.schedule().shape == (20, 2)
    for number, chosen in enumerate(some.schedule()):
        assert set(chosen) <= set(whole.schedule()[(3 + number) % 8]) and len(set(chosen)) == 2
    sizes = run.data.sizes
    naive = np.mean([sum(int(sizes[i]) for i in chosen) for chosen in whole.schedule()])
    assert rows_of(whole, sizes) == pytest.approx(naive)
    assert rows_of(replace(whole, batch=4), sizes) == 12


# What is sent.


def asked(run: Run, state: ServerState, calls: int) -> tuple[int, int, list[Message]]:
    """Bytes of real calls of a real worker and of its real replies, shared content with each."""
    ids = node_ids(run.config.federation.clients, run.config.federation.seed)
    messages = message_sizes.requests(run.config, run.experiment, state, ids)
    each, down, up, replies = -(-len(messages) // calls), 0, 0, []
    worker = Worker(clients.app, run.config.federation.clients, {})
    for start in range(0, len(messages), each):
        content, bare = apart(messages[start : start + each])
        asked = [one.metadata.dst_node_id for one in bare]
        partitions = {node: ids.index(node) for node in asked}
        call = pickle.dumps((content, bare, {}, partitions), 5)
        down += len(call)
        found, states = worker.answer(*pickle.loads(call))
        assert not any(reply.has_error() for reply in found)
        up += len(pickle.dumps((found, states), 5))
        replies += found
    return down, up, replies


CALLS = [({}, 1), ({}, 2), ({}, 6), (MLP, 1), (MLP, 2), (MLP, 6)]


@pytest.mark.parametrize(("below", "calls"), quick(CALLS, CALLS[1::4]))
def test_bytes_on_ray_are_those_of_real_messages(below: dict, calls: int, tmp_path: Path) -> None:
    tables = {"federation": {"clients": 6, "per-round": 6}, "data": {"dimension": 7}}
    run, state = prepared(tmp_path, below, **tables)
    found = on_ray(run, state, calls, calls)
    assert found == pytest.approx(asked(run, state, calls)[:2], rel=0.01)


def on_ray(run: Run, state: ServerState, calls: int, machines: int) -> tuple[int, int]:
    """Bytes down and up, as they are planned."""
    found = message_sizes.on_ray(run.config, run.experiment, state, calls, machines)
    return found.down, found.up


def test_bytes_of_many_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"data": {"train": 900, "minimum": 1}, "federation": {"clients": 300, "per-round": 300}}
    run, state = prepared(tmp_path, **many)
    real = asked(run, state, 2)[:2]
    assert on_ray(run, state, 2, 1) == pytest.approx(real, rel=0.01)
    monkeypatch.setattr(message_sizes, "SAMPLE", 40)
    assert on_ray(run, state, 2, 1) == pytest.approx(real, rel=0.03)
    other, first = prepared(tmp_path / "other", {"data": {"dimension": 14}}, **many)
    assert on_ray(other, first, 2, 1)[1] > 1.05 * real[1]  # twice the model is another number


def test_bytes_of_a_deployment_are_those_of_its_objects(tmp_path: Path) -> None:
    run, state = prepared(tmp_path)
    found = message_sizes.on_link(run.config, run.experiment, state)
    _, _, replies = asked(run, state, 3)
    each = [
        sum(len(one.deflate()) for one in get_all_nested_objects(reply).values())
        for reply in replies
    ]
    assert found.up == pytest.approx(sum(each), rel=0.01)


def test_a_clients_arrays_are_weighed(tmp_path: Path) -> None:
    run, state = prepared(tmp_path)
    sent = broadcast(run.experiment.recipe, state)
    tensors = named(sent.params, sent.states)
    assert len(tensors) == 2
    written = sum(value.numpy().nbytes for value in tensors.values())
    assert array_bytes(tensors) == written == 2 * 8 * 21


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_ray(cluster: str, empty: Path) -> None:
    tables = {"name": "ray", "ray-address": cluster}
    found = plan(small(engine=tables, federation={"per-round": 4}))
    assert found["workers"] == 2 and found["tried"] == 4
    assert found["memory"]["worker"] > 100e6 and found["bytes"]["up"] > 4 * 2 * 8 * 21
    assert found["seconds"]["first round"] > found["seconds"]["a round"] > 0


def test_a_process_of_a_deployment_answers_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, by a real message; it prints the most bytes that it held."""
    run, state = prepared(tmp_path)
    message = message_sizes.requests(run.config, run.experiment, state)[0]
    file = tmp_path / "0.pickle"
    file.write_bytes(pickle.dumps((message, run.config.federation.clients)))
    monkeypatch.setattr(sys, "argv", ["probe", str(file)])
    probe.main()
    assert int(capfd.readouterr().out) > 50e6


def test_rounds_of_a_deployment_are_foretold_from_such_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One per core at a time, and a second of waiting."""
    run, state = prepared(tmp_path)
    asked: list[int] = []

    def timed(messages: list[Message], nodes: int, folder: Path) -> tuple[float, int]:
        asked.append(len(messages))
        return float(len(asked)), 1000 * len(asked)  # 1 s for questions, 2 s for training

    monkeypatch.setattr(pace, "probed", timed)
    monkeypatch.setattr(pace.os, "cpu_count", lambda: 2)
    found, start, _, nodes, memory, down, up = pace.deployed(run, state)
    assert asked == [2, 2] and (nodes, memory) == (6, 2000)
    assert found.round == 2.0 * 2 + pace.WAIT  # three participants on two cores
    assert start == 1.0 * (pace.SERIAL + pace.EACH * 3)
    sent = message_sizes.on_link(run.config, run.experiment, state)
    assert (down, up) == (sent.down, sent.up) and down > up > 0


@pytest.mark.skipif(os.name != "posix", reason="takes a shell script for a process that fails")
def test_a_process_that_cannot_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fails))
    with pytest.raises(InputError, match="a client process failed"):
        pace.probed(["a message"], 1, tmp_path)
