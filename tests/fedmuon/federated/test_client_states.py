"""The store of clients' states, against a dictionary that keeps every state of every round."""

import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from compared import problem_of
from conftest import quick, small
from reference.methods import local_steps
from reference.rounds import Answered, Method, Visit, run
from reference.trees import Tree, Trees, each, zeros

from fedmuon.clients.stored_states import Memory
from fedmuon.core.errors import InputError
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_states import ClientStates
from fedmuon.federated.rounds import begin, simulate
from fedmuon.runs.prepare import prepare

ROOT = Path(__file__).resolve().parents[3]

ROUNDS, CLIENTS = 30, 9


def state(client: int, round: int, shift: float = 0.0):
    values = torch.arange(6.0).reshape(1, 2, 3) + 100 * client + round + shift
    return {"control": {"w": values, "a.b": values[:, 0]}, "momentum": {"w": -values}}


def flat(states):
    return {
        (link, name): one.tolist() for link, held in states.items() for name, one in held.items()
    }


def schedule(seed: int):
    rng = random.Random(seed)
    return [rng.sample(range(CLIENTS), rng.randint(0, 4)) for _ in range(ROUNDS)]


def require_equal(store, rounds, at, shift=0.0):
    """The store before round `at` has the last state of every client."""
    for client in range(CLIENTS):
        last = max((r for r in range(at) if client in rounds[r]), default=None)
        assert store.last_round(client, at) == last
        expected = {} if last is None else state(client, last, shift)
        assert flat(store.read(client, at)) == flat(expected)


@pytest.mark.parametrize("budget", quick([1 << 20, 200, 0], [200]))
@pytest.mark.parametrize("seed", quick(range(4), [0]))
def test_any_kill_resumes_from_a_checkpoint(tmp_path, budget, seed):
    """Kills at random rounds, before or after the checkpoint itself, or with the last one lost."""
    rng, rounds = random.Random(seed), schedule(seed)
    store, saved, at = ClientStates(tmp_path / "states", "run", budget), [0], 0
    store.restore(0, {})
    while at < ROUNDS:
        for client in rounds[at]:
            assert flat(store.read(client, at)) == flat(
                next((state(client, r) for r in range(at - 1, -1, -1) if client in rounds[r]), {})
            )
            store.write(client, at, state(client, at))
        at += 1
        kill = rng.random()
        if at % 5 == 0:
            store.flush()
            if kill > 0.3:  # else killed between the states and the checkpoint
                saved = [*saved[-1:], at]
                if kill > 0.4:  # else killed before what is old goes
                    store.commit(at)
        if kill < 0.45:
            at = rng.choice(saved)  # the newest may be damaged
            saved = [at]
            expected = {}
            for r in range(at):
                expected |= dict.fromkeys(rounds[r], r)
            store = ClientStates(tmp_path / "states", "run", budget)
            store.restore(at, expected)
            require_equal(store, rounds, at)
    require_equal(store, rounds, ROUNDS)
    store.remove()
    assert not (tmp_path / "states").exists()


def test_memory_stays_within_the_budget_and_files_do_not_pile_up(tmp_path):
    store = ClientStates(tmp_path / "states", "run", 1000)
    for at in range(400):
        for client in range(at % 50, at % 50 + 3):
            store.read(client, at)
            store.write(client, at, state(client, at))
        assert store._bytes <= 1000
        if at % 10 == 9:
            store.flush()
            store.commit(at + 1)
    held = store._place.keys() | store._new.keys()
    assert len(held) <= 3 * 52 and len(list((tmp_path / "states").iterdir())) < 40
    alone = ClientStates()
    for at in range(50):
        alone.write(0, at, state(0, at))
    assert len(alone._new) == 1  # without checkpoints, only the newest counts


def test_repeated_rounds_replace_what_came_after(tmp_path):
    store = ClientStates(tmp_path / "states")
    store.write(1, 0, state(1, 0))
    store.write(1, 3, state(1, 3))
    store.commit(4)
    store.write(1, 7, state(1, 7))
    store.write(1, 8, state(1, 8))
    assert [store.last_round(1, at) for at in (0, 4, 8, 9)] == [None, 3, 3, 8]
    store.write(1, 5, state(1, 5, 0.5))  # from the checkpoint of round 4 again
    assert store.last_round(1, 9) == 5
    assert flat(store.read(1, 9)) == flat(state(1, 5, 0.5))


def test_states_are_copies_of_their_part():
    both = torch.zeros(2, 3)
    store = ClientStates()
    store.write(0, 0, {"momentum": {"w": both[:1]}})
    both += 1
    assert store.read(0, 1)["momentum"]["w"].sum() == 0
    assert store.read(0, 1)["momentum"]["w"].untyped_storage().nbytes() == 3 * 4


@pytest.mark.parametrize("fault", ["missing", "cut", "changed", "other"])
def test_damage_is_named(tmp_path, fault):
    folder = tmp_path / "states"
    store = ClientStates(folder, "run")
    store.write(4, 2, state(4, 2))
    store.flush()
    (file,) = folder.iterdir()
    if fault == "missing":
        shutil.rmtree(folder)
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    if fault == "changed":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = ClientStates(folder, "another" if fault == "other" else "run")
    expected = {
        "missing": "does not contain the state of client 4 after round 2",
        "cut": "not a readable safetensors file",
        "changed": "is damaged",
        "other": "belongs to another run",
    }[fault]
    with pytest.raises(InputError, match=expected):
        again.restore(3, {4: 2})


def test_a_reply_that_the_server_did_not_take_is_forgotten(tmp_path, monkeypatch):
    """On a node: it is asked again from the state before, and from no other, also after a kill."""
    folder = tmp_path / "node"

    def ask(round: int, last: int, keep: bool = True):
        content = {
            "run": "r",
            "clients": [4],
            "last": [last],
            "saved": [0],
            "with-server": False,
            "round": round,
        }
        message: Any = SimpleNamespace(content=SimpleNamespace(config_records={"memory": content}))
        context: Any = SimpleNamespace(node_config={"state-dir": str(folder)})
        memory = Memory(message, context, 4)
        found = flat(memory.recall(round))
        if keep:
            memory.keep(state(4, round))
        return found

    assert ask(3, -1) == {}
    assert ask(5, 3) == flat(state(4, 3))
    assert ask(5, 3) == flat(state(4, 3))  # a retry in the same round
    assert ask(9, 3) == flat(state(4, 3))  # the reply of round 5 was not taken
    assert ask(11, 9) == flat(state(4, 9))
    with pytest.raises(InputError, match="has lost the state of the client after round 5"):
        ask(12, 5)
    with monkeypatch.context() as patch:
        patch.setattr(ClientStates, "flush", lambda store: 1 / 0)  # killed before the new file
        with pytest.raises(ZeroDivisionError):
            ask(13, 9)
    assert ask(13, 9) == flat(state(4, 9))


def test_a_node_keeps_the_states_of_runs_apart(tmp_path):
    """Another run begins anew and cannot be given the first one's states; these stay for a week."""

    def ask(run: str, round: int, last: int):
        content = {
            "run": run,
            "clients": [4],
            "last": [last],
            "saved": [0],
            "with-server": False,
            "round": round,
        }
        message: Any = SimpleNamespace(content=SimpleNamespace(config_records={"memory": content}))
        context: Any = SimpleNamespace(node_config={"state-dir": str(tmp_path)})
        memory = Memory(message, context, 4)
        found = flat(memory.recall(round))
        memory.keep(state(4, round, shift=len(run)))
        return found

    assert ask("a", 3, -1) == {}
    assert ask("other", 5, -1) == {}
    with pytest.raises(InputError, match="has lost the state of the client after round 3"):
        ask("third", 6, 3)
    assert ask("a", 6, 3) == flat(state(4, 3, shift=1))
    assert ask("other", 6, 5) == flat(state(4, 5, shift=5))
    first, *_ = folders = sorted(tmp_path.iterdir())
    assert len(folders) == 3
    of_another_client = tmp_path / f"{'0' * 16}-client-14"
    of_another_client.mkdir()
    for old in (first, of_another_client):
        os.utime(old, (0, 0))
    assert ask("fourth", 0, -1) == {}
    assert not first.exists() and of_another_client.exists() and len(list(tmp_path.iterdir())) == 4


def test_a_run_with_states_on_nodes_has_an_id_of_its_own(tmp_path):
    """Not that of another run with the same config; the same after a resume."""
    remote = resolve(small(local={"recipe": "scaffold"}, engine={"name": "ray"}))
    first, other = (prepare(remote, tmp_path / name) for name in ("a", "b"))
    assert first.directory.mark == other.directory.mark
    ids = [run.experiment.client_states.run for run in (first, other)]
    assert len(set(ids)) == 2 and all(len(one) == 32 for one in ids)
    again = prepare(remote, tmp_path / "a", resume=True)
    assert again.experiment.client_states.run == ids[0]
    (tmp_path / "a" / "rounds.jsonl").write_text("begun")
    (tmp_path / "a" / "run-id.txt").write_text(f"{'0' * 32}\n")
    with pytest.raises(InputError, match=r"run-id\.txt does not match"):
        prepare(remote, tmp_path / "a", resume=True)
    for recipe, engine in (("scaffold", "inline"), ("fedavg", "ray")):
        one = resolve(small(local={"recipe": recipe}, engine={"name": engine}))
        prepare(one, tmp_path / recipe)
        assert not (tmp_path / recipe / "run-id.txt").exists()


def test_a_node_says_what_its_message_lacks():
    message: Any = SimpleNamespace(content=SimpleNamespace(config_records={"memory": {}}))
    with pytest.raises(InputError, match="malformed"):
        Memory(message, cast(Any, None), 4)


def test_the_method_of_the_page_is_its_loop() -> None:
    """FedDyn as docs/how-to/recipe.md writes it, against a loop in NumPy."""
    text = (ROOT / "docs" / "how-to" / "recipe.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = (one.split("\n\n\nconfig")[0] for one in blocks if "def feddyn" in one)
    page: dict[str, Any] = {}
    exec(code, page)
    lr, alpha, count = 0.7, 0.1, 6
    config = small(local={"recipe": "fedavg", "lr": lr, "steps": 3})
    made = build_experiment(config)
    made = replace(made, recipe=page["feddyn"](lr, alpha, count))
    state = begin(made.recipe, made.task, 3)

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X = received["model"]
        dual = own.get("dual", zeros(X))

        def pulled(x: Tree, G: Tree, k: int) -> Tree:
            return each(lambda g, d, x, X: g - d + alpha * (x - X), G, dual, x, X)

        x = local_steps(visit, X, lr, 0.0, pulled)
        own["dual"] = each(lambda d, x, X: d - alpha * (x - X), dual, x, X)
        return {"model": x}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        share, X, mean = len(answered.steps) / count, server["model"], means["model"]
        h = each(lambda h, m, x: h - alpha * share * (m - x), server["h"], mean, X)
        return {"model": each(lambda m, h: m - h / alpha, mean, h), "h": h}

    method = Method(client, server, lambda model: {"h": zeros(model)})
    X = run(problem_of(config), method).server["model"]["weight"]
    found = simulate(made, state).params["weight"][0].numpy()
    np.testing.assert_allclose(found, X, atol=1e-12)
