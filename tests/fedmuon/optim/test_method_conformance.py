"""One table of methods and properties: each built-in method has each property.

A new method needs one row here, and one function in `tests/reference/methods.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import adapted
from compared import built, ended, gap, image, perceptron, problem_of, with_module
from conftest import quick, small
from cut_off import killed
from reference import methods, rounds
from reference.rounds import Method
from safetensors.numpy import load_file

from fedmuon import orthogonalizers, recipes
from fedmuon.config.load import Config
from fedmuon.config.methods import BUILT_IN, BY_SAMPLES, ORTHOGONALIZED, PRIVATE, has
from fedmuon.federated.build import build_experiment
from fedmuon.federated.rounds import begin, received_message, run_round, simulate, train_group
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import ServerState

LR, N, LAMBDA = 0.4, 5, 0.1


@dataclass(frozen=True)
class Row:
    """A method with constants that have an effect, under the names of [local] with underscores.

    `words` are constants that are no numbers, and `local` contains other keys of [local].
    """

    numbers: dict[str, float]
    words: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)


DECAY = {"weight_decay": 0.1}
HEAVY = {"momentum": 0.6, **DECAY}
OUTER = {"server_lr": 0.7, "server_momentum": 0.5}
ADAPTIVE = {"server_lr": 0.05, "tau": 0.02, **DECAY}
MEMORIES = {"server_momentum": 0.8, "server_memory": 0.7}
METHODS: dict[str, Row] = {
    "sgd": Row(HEAVY, {"momentum_form": "polyak"}),
    "normalized-sgd": Row(HEAVY, {"momentum_form": "ema-nesterov"}),
    "adamw": Row(DECAY),
    "muon": Row(HEAVY, {"momentum_form": "nesterov"}),
    "fedavg": Row(DECAY),
    "fedavgm": Row({"server_momentum": 0.5, **DECAY}),
    "local-muon": Row(HEAVY),
    "fedmuon": Row(HEAVY),
    "fedmuon-aligned": Row({"alignment": 0.3, **HEAVY}),
    "fedmuon-corrected": Row(HEAVY),
    "fedmuon-svd": Row(HEAVY, {"rank": 1}),
    "lora-muon": Row(HEAVY),
    "ef21-muon": Row(HEAVY, {"momentum_form": "ema-nesterov"}),
    "ringmaster": Row(HEAVY),
    "ringmaster-free": Row({}),
    "sign-muon": Row(HEAVY),
    "muloco": Row({**HEAVY, **OUTER}, {"momentum_form": "polyak"}),
    "fedprox": Row({"proximal": 0.7, **DECAY}),
    "fedper": Row(DECAY, {"personal": "2.weight, *.bias"}),
    "ditto": Row({"personal_weight": 0.4, **DECAY}),
    "fednova": Row(DECAY, local={"epochs": 1.5}),
    "scaffold": Row({"server_lr": 0.8, **DECAY}),
    "fedadam": Row({**ADAPTIVE, **MEMORIES}),
    "fedyogi": Row({**ADAPTIVE, **MEMORIES}),
    "fedadagrad": Row(ADAPTIVE),
    "local-adamw": Row(DECAY),
    "diloco": Row({**OUTER, **DECAY}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "batches": {"batch": 7},
    "one step of all samples": {"steps": 1, "batch": 0},
    "schedule": {"batch": 7, "schedule": "step", "options": {"every": 1, "factor": 0.5}},
    "last round without steps": {"schedule": "step", "options": {"every": 2, "factor": 0.0}},
}
COUNTS_CLIENTS = ("scaffold", "fedmuon-corrected")  # their rules know the number of clients
PERSONAL = ("fedper", "ditto")  # their rows train a perceptron, whose parameters have names
ADAPTERS = ("lora-muon",)  # their rows train low-rank adapters
PLAIN = [name for name in METHODS if name not in (*PERSONAL, *ORTHOGONALIZED)]
CLIPPED = ["fedavg", "fedavgm", "sgd", "normalized-sgd", "local-muon", "fedmuon", "muon",
           "fedmuon-aligned"]  # fmt: skip
every_method = pytest.mark.parametrize("name", METHODS)


def test_each_built_in_method_has_a_row() -> None:
    without_server = {name for name in BUILT_IN if has(name, "gossip")}  # test_gossip.py
    assert METHODS.keys() == BUILT_IN.keys() - {*PRIVATE} - without_server


def config(name: str, setting: str = "batches", **tables: dict[str, Any]) -> Config:
    row = METHODS[name]
    constants = {key.replace("_", "-"): x for key, x in {**row.numbers, **row.words}.items()}
    given = {"steps": 2, **SETTINGS[setting], **row.local}
    if "epochs" in given:  # which replace the steps, whose default has no effect
        given = {**given, "steps": 5, "batch": 7}
    below = {
        "federation": {"clients": N, "per-round": 3, "rounds": 3, "aggregate": "mean"},
        "orthogonalizer": {"lambda": LAMBDA},
    }
    table = {"recipe": name, "lr": LR, **constants, **given}
    if name not in (*PERSONAL, *ADAPTERS):
        return small(below, local=table, **tables)
    tables = {"task": {"name": "given"}, **tables}
    module = adapted() if name in ADAPTERS else perceptron()
    return with_module(small(below, local=table, **tables), module)


def reference(name: str, table: Config, **changed: Any) -> Method:
    """The method of the reference, of which one constant may be changed."""
    row = METHODS[name]
    constants: dict[str, Any] = {"lr": LR, **row.numbers, **row.words, **changed}
    if name in COUNTS_CLIENTS:
        constants = {"clients": N, **constants}
    if name == "fedmuon-aligned":
        constants = {"steps": table.local.steps, **constants}
    if name == "sign-muon":
        constants["seed"] = table.federation.seed
    if name in ("ef21-muon", "ringmaster", "ringmaster-free"):
        constants["orthogonalizer"] = lambda M: image(table, M, 0, 0, 0)
    return getattr(methods, name.replace("-", "_"))(**constants)


def distance(state: ServerState, expected: rounds.Trees) -> float:
    """The largest difference of the models and of all states of the server."""
    trees = {"model": state.params, **state.states}
    trees.pop("adapters", None)  # a measurement
    assert trees.keys() == expected.keys()
    return max(gap(tree, expected[name]) for name, tree in trees.items())


@every_method
@pytest.mark.parametrize("setting", SETTINGS)
def test_result_equals_the_reference(name: str, setting: str) -> None:
    """The server's model and states, and what each client stores."""
    table = config(name, setting)
    made, problem = built(table), problem_of(table)
    state = ended(made)
    expected = rounds.run(problem, reference(name, table))
    assert distance(state, expected.server) < 1e-12
    for client, memory in enumerate(expected.memories):
        stored = made.client_states.read(client, made.plan.rounds)
        assert all(gap(tree, memory[link]) < 1e-12 for link, tree in stored.items())
        assert bool(stored) <= made.recipe.keeps_states
    assert state.round == made.plan.rounds


@pytest.mark.parametrize("name", quick(PLAIN, ["scaffold", "adamw"]))
def test_result_on_a_perceptron_equals_the_reference(name: str) -> None:
    """Methods without an orthogonalizer on a model with matrices and vectors."""
    table = with_module(config(name, task={"name": "given"}), perceptron())
    state, problem = ended(built(table)), problem_of(table)
    assert distance(state, rounds.run(problem, reference(name, table)).server) < 1e-12
    other = replace(problem, seed=problem.seed + 1)  # the negative control
    assert distance(state, rounds.run(other, reference(name, table)).server) > 1e-3


@pytest.mark.parametrize("name", [name for name in METHODS if name in BY_SAMPLES])
def test_weights_by_samples_equal_the_reference(name: str) -> None:
    table = config(name, federation={"aggregate": "by-samples"})
    state, problem = ended(built(table)), problem_of(table)
    assert distance(state, rounds.run(problem, reference(name, table)).server) < 1e-12
    plain = replace(problem, by_samples=False)  # the negative control
    assert distance(state, rounds.run(plain, reference(name, table)).server) > 1e-4


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("name", CLIPPED)
def test_private_clients_equal_the_reference(name: str, trust: str) -> None:
    """Methods whose server averages models and states, with noise that can be repeated."""
    privacy = {"level": "client", "noise": 0.5, "bound": 0.1, "cohorts": "fixed", "trust": trust}
    table = config(name, privacy={**privacy, "insecure-reproducible-noise": True})
    state, problem, method = ended(built(table)), problem_of(table), reference(name, table)
    clipping = rounds.Clipping(0.1, 0.5, trust)
    assert distance(state, rounds.run(problem, method, clipping=clipping).server) < 1e-12
    wider = replace(clipping, bound=0.11)  # the negative control
    assert distance(state, rounds.run(problem, method, clipping=wider).server) > 1e-3


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_clients_without_a_trusted_server_send_noisy_updates(trust: str) -> None:
    """With distributed trust, as integers."""
    privacy = {"level": "client", "noise": 0.5, "bound": 0.1, "cohorts": "fixed", "trust": trust}
    made = built(config("fedavg", privacy={**privacy, "insecure-reproducible-noise": True}))
    state = begin(made.recipe, made.task, made.plan.seed)
    _, replies, _ = run_round(made, state, [made.client(client) for client in range(3)])
    integers = [reply.params["weight"].dtype == torch.int64 for reply in replies]
    assert integers == [trust == "distributed"] * 3


@every_method
def test_each_constant_matters(name: str) -> None:
    """The negative control: a change of one constant by 5% is another result.

    A small change of the momentum flips no vote here.
    """
    table = config(name)
    problem, state = problem_of(table), ended(built(table))
    for key, value in {"lr": LR, **METHODS[name].numbers}.items():
        factor = 1.6 if (name, key) == ("sign-muon", "momentum") else 1.05
        other = rounds.run(problem, reference(name, table, **{key: factor * value}))
        memories = [tree for tree in other.memories if "personal" in tree]
        changed = distance(state, other.server) > 1e-5
        assert changed or (key == "personal_weight" and memories), key


@every_method
def test_clients_in_one_batch_equal_clients_one_by_one(name: str) -> None:
    table = config(name, "one step of all samples")
    made = built(table)
    state = begin(made.recipe, made.task, made.plan.seed)
    sent = received_message(made.recipe, state)
    clients = [(client, made.shards[client]) for client in range(N)]
    if made.plan.epochs:  # clients in one batch take the same number of steps
        made = replace(made, plan=replace(made.plan, epochs=0.0, steps=2))
    together = train_group(made.recipe, made.task, made.plan, clients, sent)
    for reply, client in zip(together, clients, strict=True):
        (alone,) = train_group(made.recipe, made.task, made.plan, [client], sent)
        trees = {**alone.trees, **{f"own {link}": tree for link, tree in alone.own.items()}}
        batch = {**reply.trees, **{f"own {link}": tree for link, tree in reply.own.items()}}
        for tree, tensors in trees.items():
            for key, value in tensors.items():
                torch.testing.assert_close(batch[tree][key], value, rtol=1e-11, atol=1e-14)
    assert not torch.equal(*(next(iter(reply.params.values())) for reply in together[:2]))


@every_method
def test_replicas_equal_single_runs(name: str) -> None:
    """Replicas with other step sizes."""
    table, sizes = config(name), (0.3, LR)
    lr = torch.tensor(sizes, dtype=torch.float64)
    made = build_experiment(table, lr=lr)
    state = begin(made.recipe, made.task, made.plan.seed, len(sizes))
    state = simulate(made, state)
    for replica, size in enumerate(sizes):
        local = table.local.model_copy(update={"lr": size})
        alone = ended(built(table.model_copy(update={"local": local})))
        for key, value in alone.params.items():
            torch.testing.assert_close(state.params[key][replica], value[0], rtol=1e-10, atol=1e-13)
    moved = [value[0] - value[1] for value in state.params.values()]
    assert max(float(value.abs().max()) for value in moved) > 1e-6


@every_method
def test_float32_follows_float64(name: str) -> None:
    double = ended(built(config(name)))
    single = ended(built(config(name, engine={"dtype": "float32"})))
    for tree in (single.params, *single.states.values()):
        assert all(value.dtype == torch.float32 for value in tree.values())
    for key, value in double.params.items():
        torch.testing.assert_close(single.params[key].double(), value, rtol=2e-3, atol=2e-4)
    assert any(not torch.equal(single.params[key].double(), x) for key, x in double.params.items())


@every_method
def test_config_equals_the_recipe_in_python(name: str) -> None:
    row, table = METHODS[name], config(name)
    constants: dict[str, Any] = {"lr": LR, **row.numbers, **row.words}
    if name in ORTHOGONALIZED:
        constants["orthogonalizer"] = orthogonalizers.smoothed_polar(LAMBDA)
    if name in COUNTS_CLIENTS:
        constants["clients"] = N
    if name == "fedmuon-aligned":
        constants["steps"] = table.local.steps
    make: Callable[..., Recipe] = getattr(recipes, name.replace("-", "_"))
    made = built(table)
    other = ended(replace(made, recipe=make(**constants)))
    weaker = ended(replace(built(table), recipe=make(**{**constants, "lr": 0.9 * LR})))
    same = ended(built(table)).params
    assert all(torch.equal(other.params[key], value) for key, value in same.items())
    assert any(not torch.equal(weaker.params[key], value) for key, value in same.items())


@pytest.mark.parametrize("name", quick(METHODS, ["adamw", "ditto", "ef21-muon", "scaffold"]))
def test_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    table = config(name, output={"checkpoint-every": 1, "evaluate-every": 3})
    killed(table, tmp_path / "run", [2])
    weights = load_file(tmp_path / "run" / "model.safetensors")
    whole = ended(built(table)).params
    assert all(np.array_equal(weights[key], value[0].numpy()) for key, value in whole.items())
