"""One table of stages and properties: whatever changes messages has each property.

Rows are stages with their settings, cohorts of FedBuff, and running statistics. A new stage needs
one row here, and one function in `tests/reference`.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from adapted import fresh, wide
from compared import (
    built,
    ended,
    gap,
    image,
    normalized_perceptron,
    perceptron,
    problem_of,
    with_module,
)
from conftest import small
from cut_off import killed
from deployments import NODES
from faulty_client import app
from live_grid import LiveGrid
from reference import adapters, compressors, methods, robust, rounds
from reference.compressors import top_k
from reference.rounds import Channel, Clipping, Method, Problem
from reference.trees import is_statistic
from safetensors.numpy import load_file

from fedmuon.config.load import Config
from fedmuon.config.user_objects import UserObjects
from fedmuon.experiments.engines.deployment import Deployment
from fedmuon.experiments.run import execute
from fedmuon.federated.build import resolve
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.oracles import LARGE, Bounded, Statistics
from fedmuon.federated.rounds import (
    begin,
    broadcast,
    next_state,
    run_round,
)
from fedmuon.federated.traffic import returned_like, sent_like
from fedmuon.optim.compression import Compression, identity
from fedmuon.optim.low_rank import EncodedStates, low_rank
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.stage import Stage
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare
from fedmuon.server.strategy import FlowerEngine

LR, N, SEED, LAMBDA = 0.3, 5, 3, 0.1
PLAIN = Channel(seed=SEED)
FEDAVG = {"recipe": "fedavg"}
ADAPTED = f"{Path(__file__).parents[2] / 'helpers' / 'adapted.py'}:fresh"
EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'stage.py'}:LargerHalf"


class Case(NamedTuple):
    """The arguments of the reference."""

    problem: Problem
    method: Method
    channel: Channel = PLAIN
    clipping: Clipping | None = None


@dataclass(frozen=True)
class Row:
    """A config, how the reference computes it, and a reference with one other constant.

    Attributes:
        tables: Tables of the config.
        wrong: Function that changes one constant of the reference.
        method: The method of the reference, for the config.
        channel: How the reference compresses messages.
        clipping: How the reference clips updates.
        module: The model of the task, or None for the matrix task.
        shapes: Whether the stage changes the names, shapes or dtypes of messages.
        on_engines: Tables that replace some of `tables` on Ray and on a SuperLink.
    """

    tables: dict[str, dict[str, Any]]
    wrong: Callable[[Case], Case]
    method: Callable[[Config], Method] = lambda config: methods.fedmuon(LR)
    channel: Channel = PLAIN
    clipping: Clipping | None = None
    module: Callable[[], Any] | None = None
    shapes: bool = True
    on_engines: dict[str, dict[str, Any]] = field(default_factory=dict)


def compressing(
    channel: Channel,
    other: Channel,
    method: Callable[[Config], Method] = lambda config: methods.fedmuon(LR),
    local: dict[str, Any] | None = None,
    **compression: Any,
) -> Row:
    tables = {"compression": compression, "local": local or {}}
    channel, other = replace(channel, seed=SEED), replace(other, seed=SEED)
    return Row(tables, lambda case: case._replace(channel=other), method, channel)


def of_server(config: Config) -> Method:
    return methods.ef21_muon(LR, lambda M: image(config, M, 0, 0, 0))


def fedavg(config: Config) -> Method:
    return methods.fedavg(LR)


def svd(config: Config) -> Method:
    return methods.fedmuon_svd(LR, rank=1)


def scaffold(config: Config) -> Method:
    return methods.scaffold(LR, N)


def corrected(config: Config) -> Method:
    return methods.fedmuon_corrected(LR, N)


def newest(case: Case) -> Case:
    """All replies count as replies to the newest model: no weights for staleness."""
    pairs = [[(client, number) for client, _ in reversed(replies)]
             for number, replies in enumerate(case.problem.versions)]  # fmt: skip
    return case._replace(problem=replace(case.problem, versions=pairs))


def late(
    channel: Channel = PLAIN,
    method: Callable[[Config], Method] = lambda config: methods.fedmuon(LR),
    **tables: dict[str, Any],
) -> Row:
    """FedBuff, whose updates have two replies of which some are late."""
    devices = {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal", "dropout": 0.2}
    given = {"devices": devices, "federation": {"rounds": 8}, **tables}
    shapes = "compression" in tables or tables.get("local", {}).get("recipe") == "fedmuon-svd"
    return Row(given, newest, method, replace(channel, seed=SEED), shapes=shapes)


FEDASYNC = {"mode": "fedasync", "speeds": "log-normal", "mixing": 0.7, "staleness-power": 1.5}
THRESHOLD = {"mode": "threshold", "threshold": 2, "buffer": 2, "speeds": "log-normal"}
# Three clients work at a time and each reply is an update, so some are discarded within 3 rounds.
DISCARDING = {
    "devices": {"mode": "threshold", "threshold": 2, "speeds": "log-normal"},
    "federation": {"per-round": 3},
}


def of_gradients(config: Config) -> Method:
    return methods.ringmaster(LR, lambda M: image(config, M, 0, 0, 0))


def older(case: Case) -> Case:
    """All replies begin one model earlier."""
    pairs = [[(client, max(0, version - 1)) for client, version in replies]
             for replies in case.problem.versions]  # fmt: skip
    return case._replace(problem=replace(case.problem, versions=pairs))


def averaged(
    way: str,
    change: Callable[[Method], Method],
    wrong: Callable[[Method], Method],
    shapes: bool = True,
    rounds: int = 0,
) -> Row:
    """An average of low-rank adapters, whose reference changes the method."""
    federation = {"adapters": way} | ({"subspace-rounds": rounds} if rounds else {})
    return Row(
        {"federation": federation},
        lambda case: case._replace(method=wrong(methods.fedmuon(LR))),
        lambda config: change(methods.fedmuon(LR)),
        module=fresh,
        shapes=shapes,
        on_engines={"task": {"name": ADAPTED}},
    )


def attack(
    kind: str,
    factor: float,
    other: float,
    method: Callable[[Config], Method] = lambda config: methods.fedmuon(LR),
    tables: dict[str, dict[str, Any]] | None = None,
    strength: float | None = None,
    hostile: tuple[int, ...] = (1, 3),
    **more: Any,
) -> Row:
    """Hostile clients from round 1 on, whose reference attacks with a factor."""
    table: dict[str, Any] = {
        "kind": kind, "clients": ", ".join(map(str, hostile)), "from-round": 1
    }  # fmt: skip
    if strength is not None:
        table["strength"] = strength

    def attacked(config: Config, factor: float = factor) -> Method:
        return robust.attacked(method(config), kind, hostile, factor, SEED, 1)

    return Row(
        {"attacks": table, **(tables or {})},
        lambda case: case._replace(method=attacked(config(tables or {}), other)),
        attacked,
        shapes=False,
        **more,
    )


ATTACKS = {
    "hostile clients, sign-flip": attack("sign-flip", 1.0, 0.99),
    "hostile clients, scaled": attack("scaled", 10.0, 9.9),
    "hostile clients, gaussian": attack("gaussian", 2.0, 1.99, strength=2.0),
    "hostile clients, label-flip": replace(
        attack("label-flip", 3, 3),
        wrong=lambda case: case._replace(
            method=robust.attacked(methods.fedmuon(LR), "label-flip", (1,), 3, SEED, 1)
        ),
    ),
    "hostile clients, alie": attack("alie", 0.0, 0.1, hostile=(1,)),
    "hostile clients, strong alie": attack("alie", 1.5, 1.4, strength=1.5, hostile=(1,)),
    "hostile clients, inner-product": attack("inner-product", 0.7, 0.69, strength=0.7),
    "hostile clients, mimic": replace(
        attack("mimic", 0.0, 0.0),
        wrong=lambda case: case._replace(
            method=robust.attacked(methods.fedmuon(LR), "mimic", (1,), 0.0, SEED, 1)
        ),
    ),
    "hostile clients of SCAFFOLD": attack(
        "sign-flip", 1.0, 0.99, lambda config: methods.scaffold(LR, N),
        {"local": {"recipe": "scaffold"}},
    ),
    "hostile clients that return directions": attack(
        "gaussian", 1.0, 0.9, lambda config: of_server(config), {"local": {"recipe": "ef21-muon"}},
    ),
    "hostile clients of sparse messages": attack(
        "sign-flip", 1.0, 0.99, tables={"compression": {"uplink": "top-k", "share": 0.3}},
    ),
    "late hostile replies": attack(
        "sign-flip", 1.0, 0.99,
        tables={"devices": {"mode": "fedbuff", "buffer": 2, "speeds": "log-normal",
                            "dropout": 0.2}, "federation": {"rounds": 8}},
    ),
}  # fmt: skip
ATTACKS["hostile clients of sparse messages"] = replace(
    ATTACKS["hostile clients of sparse messages"],
    channel=Channel(top_k(0.3), seed=SEED), shapes=True,
)  # fmt: skip

BALL = LR * 2 * math.sqrt(3)  # two steps on a matrix of shape 7 x 3
G_MAX = math.sqrt(2) / 4


def defended(
    robust_table: dict[str, Any],
    change: Callable[[Method], Method],
    wrong: Callable[[Method], Method],
    method: Callable[[Config], Method] = lambda config: methods.fedmuon(LR),
    local: dict[str, Any] | None = None,
    kind: str = "scaled",
    factor: float = 10.0,
    hostile: tuple[int, ...] = (1, 3),
) -> Row:
    """A defence of the server against hostile clients, whose reference changes the method."""
    attack = {"kind": kind, "clients": ", ".join(map(str, hostile))}

    def row(config: Config, change: Callable[[Method], Method] = change) -> Method:
        # The method that is changed last changes the replies first.
        return robust.attacked(change(method(config)), kind, hostile, factor, SEED)

    return Row(
        {"attacks": attack, "robust": robust_table, "local": local or {},
         "federation": {"per-round": 5}},
        lambda case: case._replace(method=row(config({}), wrong)),
        row,
        shapes=False,
    )  # fmt: skip


DEFENCES = {
    "ball of matrices": defended(
        {"ball": "matrix"}, lambda method: robust.in_ball(method, BALL, G_MAX),
        lambda method: robust.in_ball(method, BALL * 1.01, G_MAX),
    ),
    "ball of the momentum": defended(
        {"ball": "model", "state-radius": 0.05},
        lambda method: robust.in_ball(method, BALL, 0.05),
        lambda method: robust.in_ball(method, BALL, 0.06),
    ),
    "ball of gradient steps": defended(
        {"ball": "model", "radius": 0.1}, lambda method: robust.in_ball(method, 0.1),
        lambda method: robust.in_ball(method, 0.11), fedavg, FEDAVG, "sign-flip", 1.0,
    ),
    "mixing": defended(
        {"mixing": 1}, lambda method: robust.mixed(method, 1),
        lambda method: robust.mixed(method, 2), hostile=(1,),
    ),
    "ball and mixing": defended(
        {"mixing": 1, "ball": "matrix"},
        lambda method: robust.in_ball(robust.mixed(method, 1), BALL, G_MAX),
        lambda method: robust.mixed(robust.in_ball(method, BALL, G_MAX), 1), hostile=(1,),
    ),
}  # fmt: skip

TOP: dict[str, Any] = {"uplink": "top-k", "share": 0.3}
PRIVATE = {"level": "client", "bound": 0.05, "insecure-reproducible-noise": True}
DIGITS = {
    "data": {"name": "digits", "train": 120, "test": 20},
    "task": {"name": "network", "model": "mlp"},
    "local": {"recipe": "fedper", "personal": "head.*"},
}
STAGES: dict[str, Row] = {
    "top-k": compressing(Channel(top_k(0.3)), Channel(top_k(0.4)), **TOP),
    "top-k with error feedback": compressing(
        Channel(top_k(0.3), "error"), Channel(top_k(0.3)), **TOP, feedback="error"
    ),
    "top-k with EF21": compressing(
        Channel(top_k(0.3), "ef21"), Channel(top_k(0.3), "error"), **TOP, feedback="ef21"
    ),
    "random-k": compressing(
        Channel(compressors.random_k(0.3)), Channel(compressors.random_k(0.4)),
        uplink="random-k", share=0.3,
    ),
    "rows": compressing(
        Channel(compressors.rows(0.4), "error"), Channel(compressors.rows(0.6), "error"),
        uplink="rows", share=0.4, feedback="error",
    ),
    "qsgd in both directions": compressing(
        Channel(compressors.qsgd(7), "none", compressors.qsgd(7)),
        Channel(compressors.qsgd(8), "none", compressors.qsgd(8)),
        uplink="qsgd", downlink="qsgd", levels=7,
    ),
    "sign of SCAFFOLD": compressing(
        Channel(compressors.sign, "error"), Channel(compressors.sign), scaffold,
        {"recipe": "scaffold"}, uplink="sign", feedback="error",
    ),
    "low-rank": compressing(
        Channel(compressors.low_rank(1), "none", compressors.low_rank(1)),
        Channel(compressors.low_rank(1)), uplink="low-rank", downlink="low-rank", rank=1,
    ),
    "power": compressing(
        Channel(compressors.power(1), "error"), Channel(compressors.low_rank(1), "error"),
        uplink="power", rank=1, feedback="error",
    ),
    "EF21 of directions": compressing(
        Channel(top_k(0.3), "ef21"), Channel(top_k(0.4), "ef21"), of_server,
        {"recipe": "ef21-muon"}, **TOP, feedback="ef21",
    ),
    "encoded states": Row(
        {"local": {"recipe": "fedmuon-svd", "rank": 1}},
        lambda case: case._replace(method=methods.fedmuon_svd(LR, rank=2)), svd,
    ),
    "votes": Row(
        {"local": {"recipe": "sign-muon"}, "federation": {"per-round": 4}},
        lambda case: case._replace(method=methods.sign_muon(LR, SEED + 1)),
        lambda config: methods.sign_muon(LR, SEED),
    ),
    "personal parameters": Row(
        {"local": {"recipe": "fedper", "personal": "2.*"}},
        lambda case: case._replace(method=methods.fedper(LR, "2.weight")),
        lambda config: methods.fedper(LR, "2.*"), module=perceptron,
        on_engines=DIGITS,
    ),
    "personal statistics": Row(
        {"local": {"recipe": "fedper", "personal": "1.*"}},
        lambda case: case._replace(method=methods.fedper(LR, "1.weight")),
        lambda config: methods.fedper(LR, "1.*"), module=normalized_perceptron,
    ),
    "sparse shared parameters": Row(
        {"local": {"recipe": "fedper", "personal": "2.*"},
         "compression": {**TOP, "downlink": "top-k", "feedback": "error"}},
        lambda case: case._replace(channel=replace(case.channel, feedback="none")),
        lambda config: methods.fedper(LR, "2.*"),
        Channel(top_k(0.3), "error", top_k(0.3), SEED), module=perceptron, on_engines=DIGITS,
    ),
    "client privacy": Row(
        {"privacy": {**PRIVATE, "noise": 0.5, "cohorts": "fixed"}},
        lambda case: case._replace(clipping=Clipping(0.05, 0.6)),
        clipping=Clipping(0.05, 0.5), shapes=False,
    ),
    "noise of clients": Row(
        {"privacy": {**PRIVATE, "noise": 0.5, "cohorts": "fixed", "trust": "local"}},
        lambda case: case._replace(clipping=Clipping(0.05, 0.5)),
        clipping=Clipping(0.05, 0.5, "local"), shapes=False,
    ),
    "sparse noise of clients": Row(
        {"privacy": {**PRIVATE, "noise": 0.5, "cohorts": "fixed", "trust": "local"},
         "local": FEDAVG, "compression": TOP},
        lambda case: case._replace(channel=Channel(top_k(0.4), seed=SEED)), fedavg,
        Channel(top_k(0.3), seed=SEED), Clipping(0.05, 0.5, "local"),
    ),
    "clipping without noise": Row(
        {"privacy": {**PRIVATE, "noise": 0.0, "cohorts": "fixed"}},
        lambda case: case._replace(clipping=Clipping(0.055)),
        clipping=Clipping(0.05), shapes=False,
    ),
    "custom stage": Row(
        {"federation": {"stage": EXAMPLE}, "local": FEDAVG},
        lambda case: case._replace(channel=Channel()), fedavg,
        Channel(compressors.larger_half), shapes=False,
    ),
    "frozen factors": averaged(
        "freeze-a", adapters.freeze_a, lambda method: adapters.freeze_a(method, scale=1.01)
    ),
    **{
        f"frozen factors of private clients, {trust} trust": Row(
            {"federation": {"adapters": "freeze-a"},
             "privacy": {**PRIVATE, "noise": 0.5, "cohorts": "fixed", "trust": trust}},
            lambda case, trust=trust: case._replace(clipping=Clipping(0.05, 0.6, trust)),
            lambda config: adapters.freeze_a(methods.fedmuon(LR)),
            clipping=Clipping(0.05, 0.5, trust), module=fresh,
            on_engines={"task": {"name": ADAPTED}},
        )
        for trust in ("central", "local")
    },
    "mean of products": averaged(
        "exact", adapters.exact, lambda method: adapters.exact(method, halved=True), shapes=False
    ),
    "subspaces": averaged(
        "subspace", lambda method: adapters.subspace(method, 1, 2, 2),
        lambda method: adapters.subspace(method, 1, 3, 2), rounds=2,
    ),
    **{
        f"subspaces of private clients, {trust} trust": Row(
            {"federation": {"adapters": "subspace", "subspace-rounds": 2},
             "privacy": {**PRIVATE, "noise": 0.5, "cohorts": "fixed", "trust": trust}},
            lambda case, trust=trust: case._replace(clipping=Clipping(0.05, 0.6, trust)),
            lambda config: adapters.subspace(methods.fedmuon(LR), 1, 2, 2),
            clipping=Clipping(0.05, 0.5, trust), module=fresh,
            on_engines={"task": {"name": ADAPTED}},
        )
        for trust in ("central", "local")
    },
    "one subspace": averaged(
        "subspace", lambda method: adapters.subspace(method, 2, 0, 1),
        lambda method: adapters.subspace(method, 2, 0, 1, turned=0.01),
    ),
    "subspaces that follow the gradient": Row(
        {"federation": {"adapters": "subspace", "subspace-rounds": 2,
                        "subspace-bases": "gradient"}},
        lambda case: case._replace(
            method=adapters.following(methods.fedmuon(LR), 1, 2, 2, of_trained=True)),
        lambda config: adapters.following(methods.fedmuon(LR), 1, 2, 2), module=wide,
        on_engines={"task": {"name": ADAPTED.replace(":fresh", ":wide")}},
    ),
    **{
        f"clients of different ranks, {way}": Row(
            {"federation": {"adapters": way, "adapter-ranks": "1, 2"}},
            lambda case, change=change: case._replace(
                method=adapters.of_ranks(change(methods.fedmuon(LR)), (2, 1))),
            lambda config, change=change: adapters.of_ranks(change(methods.fedmuon(LR)), (1, 2)),
            module=fresh, on_engines={"task": {"name": ADAPTED}},
        )
        for way, change in (("factors", lambda method: method), ("exact", adapters.exact))
    },
    "late replies": late(),
    "replies that mix": late(devices=FEDASYNC),
    "replies of SCAFFOLD that mix": late(
        method=scaffold, local={"recipe": "scaffold"}, devices=FEDASYNC
    ),
    "replies below a threshold": replace(late(devices=THRESHOLD), wrong=older),
    "gradients below a threshold": replace(
        late(method=of_gradients, local={"recipe": "ringmaster"}, devices=THRESHOLD),
        wrong=older, on_engines=DISCARDING,
    ),
    "late signs": late(
        Channel(compressors.sign, "error"), fedavg, local=FEDAVG,
        compression={"uplink": "sign", "feedback": "error"},
    ),
    "late replies of SCAFFOLD": late(method=scaffold, local={"recipe": "scaffold"}),
    "late corrections": late(method=corrected, local={"recipe": "fedmuon-corrected"}),
    "late encoded states": late(method=svd, local={"recipe": "fedmuon-svd", "rank": 1}),
    "late sparse replies": late(
        Channel(top_k(0.3), "error", top_k(0.3)),
        compression={**TOP, "downlink": "top-k", "feedback": "error"},
    ),
    **ATTACKS,
    **DEFENCES,
    "statistics": Row(
        {"local": FEDAVG}, lambda case: case._replace(problem=replace(
            case.problem, statistics=lambda model, inputs: {})),
        fedavg, module=normalized_perceptron, shapes=False, on_engines={"local": {}},
    ),
    "late statistics": replace(
        late(method=fedavg, local=FEDAVG), module=normalized_perceptron, on_engines={"local": {}}
    ),
}  # fmt: skip
every_stage = pytest.mark.parametrize("name", STAGES)


def config(tables: dict[str, Any], module: Any = None, **more: Any) -> Config:
    """Five clients, three of them a round, who take two steps on batches of four samples."""
    below = {
        "federation": {"clients": N, "per-round": 3, "rounds": 4, "aggregate": "mean"},
        "local": {"steps": 2, "batch": 4, "lr": LR},
        "orthogonalizer": {"lambda": LAMBDA},
    }
    if module is not None:
        more["task"] = {"name": "given"}
    merged = {name: {**tables.get(name, {}), **more.get(name, {})} for name in {**tables, **more}}
    table = small(below, **merged)
    return table if module is None else with_module(table, module)


def table_of(name: str, **more: Any) -> Config:
    row = STAGES[name]
    return config(row.tables, row.module() if row.module else None, **more)


def case_of(name: str, table: Config) -> Case:
    row = STAGES[name]
    return Case(problem_of(table), row.method(table), row.channel, row.clipping)


def differences(name: str, case: Case) -> Iterator[float]:
    """How far models, states of the server and memories of clients are from the reference."""
    made = built(table_of(name))
    state, expected = ended(made), rounds.run(*case)
    trees = {"model": state.params, **state.states}
    yield from (gap(trees[tree], arrays) for tree, arrays in expected.server.items())
    for client, memory in enumerate(expected.memories):
        for link, tensors in made.client_states.read(client, made.plan.rounds).items():
            for key, value in tensors.items():
                if ":" not in key:  # a part of a message, such as the factors of `power`
                    stored = memory.get(link, {})
                    yield gap({key: value}, {key: stored[key]}) if key in stored else math.inf


@every_stage
def test_result_equals_the_reference(name: str) -> None:
    case = case_of(name, table_of(name))
    assert max(differences(name, case)) < 1e-11
    wrong = rounds.run(*STAGES[name].wrong(case)).server  # the negative control
    state = ended(built(table_of(name)))
    trees = {"model": state.params, **state.states}
    assert max(gap(trees[tree], arrays) for tree, arrays in wrong.items()) > 1e-5


@every_stage
def test_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    saved = {} if "privacy" in STAGES[name].tables else {"checkpoint-every": 1}
    table = table_of(name, output={"evaluate-every": 4, **saved})
    killed(table, tmp_path / "run", [table.federation.rounds // 2])
    weights = load_file(tmp_path / "run" / "model.safetensors")
    whole = ended(built(table)).params
    assert all(np.array_equal(weights[key], value[0].numpy()) for key, value in whole.items())


def shapes(trees: Any) -> dict[tuple[str, str], Any]:
    return {
        (tree, name): (tuple(value.shape), value.dtype)
        for tree, tensors in trees.items()
        for name, value in tensors.items()
    }


@every_stage
def test_messages_have_the_announced_shapes(name: str) -> None:
    made = built(table_of(name))
    bare = replace(made.recipe, stages=())
    state = begin(made.recipe, made.task, SEED)
    clients = [made.client(int(client)) for client in made.plan.participants(0)]
    _, replies, _ = run_round(made, state, clients)
    of_round = state.params, state.states
    before = returned_like(bare, *of_round)
    messages = [(broadcast(made.recipe, state), sent_like(made.recipe, *of_round),
                 sent_like(bare, *of_round))]  # fmt: skip
    messages += [(reply, returned_like(made.recipe, *of_round, reply.client), before)
                 for reply in replies]  # fmt: skip
    changed = False
    for message, (params, states), (params_before, states_before) in messages:
        assert shapes(message.trees) == shapes({"model": params, **states})
        changed |= shapes(message.trees) != shapes({"model": params_before, **states_before})
    assert changed == STAGES[name].shapes


@every_stage
def test_order_of_replies_does_not_matter(name: str) -> None:
    made = built(table_of(name))
    state = begin(made.recipe, made.task, SEED)
    for number in range(made.plan.rounds):
        clients = [made.client(int(client)) for client in made.plan.participants(number)]
        after, replies, _ = run_round(made, state, clients)
        for order in itertools.permutations(replies):
            again, _ = next_state(made, state, order)
            for tree, tensors in {"": after.params, **after.states}.items():
                same = {"": again.params, **again.states}[tree]
                assert all(torch.equal(same[key], value) for key, value in tensors.items())
        changes = [len(replies) == 1]  # the negative control: without one of several replies
        for reply in replies if len(replies) > 1 else ():
            fewer, _ = next_state(made, state, [other for other in replies if other is not reply])
            changes += [not torch.equal(fewer.params[key], x) for key, x in after.params.items()]
        assert any(changes)
        state = after


# A stage that has nothing to do


def with_stages(experiment: Experiment, *stages: Stage) -> Experiment:
    return replace(experiment, recipe=replace(experiment.recipe, stages=stages))


def equal_devices() -> Experiment:
    """FedBuff that waits for all clients of a round, which have equal speeds."""
    return built(config({"devices": {"mode": "fedbuff", "speed": 1e15, "cost": 1e-15}}))


def loose_clipping() -> Experiment:
    privacy = {**PRIVATE, "noise": 0.0, "bound": 1e3, "cohorts": "fixed"}
    return built(config({"privacy": privacy}))


def of_module(module: Any) -> Experiment:
    return built(config({"local": FEDAVG}, module))


@dataclass(frozen=True)
class Affine(Stage):
    """Sends factor x + shift, and undoes it. Two of these do not commute."""

    factor: float
    shift: float

    def _there(self, trees: Any) -> Any:
        return self._changed(trees, lambda x: self.factor * x + self.shift)

    def _back(self, trees: Any) -> Any:
        return self._changed(trees, lambda x: (x - self.shift) / self.factor)

    def _changed(self, trees: Any, change: Callable[[Any], Any]) -> Any:
        return {
            tree: {name: change(value) for name, value in tensors.items()}
            for tree, tensors in trees.items()
        }

    def send(self, message: Any, server: Any) -> Any:
        return self._there(message)

    def open(self, message: Any, model: Any) -> Any:
        return self._back(message)

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        return reply.with_trees(self._there(reply.trees))

    def read(self, replies: Any, received: Any, server: Any) -> Any:
        return [reply.with_trees(self._back(reply.trees)) for reply in replies], {}


LATTICE = 1e-11  # client privacy rounds updates to multiples of a small number
NEUTRAL: dict[str, tuple[str, Callable[[], Experiment], Callable[[], Experiment], float]] = {
    "compression": (
        "top-k", lambda: built(config({})),
        lambda: with_stages(built(config({})), Compression(identity(), identity(), clients=N)), 0.0,
    ),
    "encoded states": (
        "encoded states", lambda: built(config({})),
        lambda: with_stages(built(config({})), EncodedStates({"momentum": low_rank(3)})), 0.0,
    ),
    "personal parameters": (
        "personal parameters", lambda: of_module(perceptron()),
        lambda: with_stages(of_module(perceptron()), PersonalParameters(("none",))), 0.0,
    ),
    "client privacy": ("client privacy", lambda: built(config({})), loose_clipping, LATTICE),
    "custom stage": (
        "custom stage", lambda: built(config({"local": FEDAVG})),
        lambda: built(config({"local": FEDAVG, "federation": {"stage": "given"}}).with_objects(
            UserObjects(stage=Stage()))), 0.0,
    ),
    "two stages that undo themselves": (
        "custom stage", lambda: built(config({})),
        lambda: with_stages(built(config({})), Affine(2.0, 0.0), Affine(1.0, 1.0)), 1e-12,
    ),
    "late replies": ("late replies", lambda: built(config({})), equal_devices, 0.0),
    "statistics": (
        "statistics", lambda: of_module(normalized_perceptron(share=0.0)),
        lambda: of_module(normalized_perceptron()), 0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_stage_changes_nothing_to_the_bit(name: str) -> None:
    row, plain, neutral, tolerance = NEUTRAL[name]
    expected, found = ended(plain()).params, ended(neutral()).params
    other = ended(built(table_of(row))).params if name != "statistics" else found
    for key, value in expected.items():
        if not is_statistic(key):
            assert float((found[key] - value).abs().max()) <= tolerance
    moved = [float((other[key] - value).abs().max()) for key, value in expected.items()]
    assert max(moved) > 1e-4  # the negative control


# Oracles


def test_first_gradient_of_a_step_moves_statistics() -> None:
    first, second = {"mean": torch.ones(1)}, {"mean": torch.zeros(1)}
    statistics = Statistics({})
    statistics.move(first)
    statistics.move(second)
    statistics.step()
    assert statistics.now is first


def test_bounded_gradients_are_finite_and_can_be_squared() -> None:
    oracle: Any = Bounded(*([None] * 4))  # type: ignore[arg-type]
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 2.0])
    bounded = oracle._sound(odd, {"w": odd}, 0)["w"]
    assert bounded.tolist() == [0.0, 0.0, 0.0, pytest.approx(LARGE), 2.0]
    assert bounded.square().sum().isfinite() and not odd.square().sum().isfinite()


# Engines


@pytest.fixture(scope="module")
def live(cluster: str) -> Iterator[LiveGrid]:
    """Workers of a Ray cluster, which all rows use."""
    grid = LiveGrid(config({}, engine={"name": "ray", "ray-address": cluster}), app)
    yield grid
    grid.close()


def on_engines(name: str, clients: int) -> Config:
    """The row's config with this number of clients."""
    row = STAGES[name]
    tables = {**row.tables, **row.on_engines}
    fewer = {"per-round": 2, **tables.get("federation", {})}
    fewer["per-round"] = min(fewer["per-round"], clients)
    federation = {**fewer, "clients": clients, "rounds": 3}
    return config({**tables, "federation": federation})


SUPER_LINK = ("top-k with EF21", "sign of SCAFFOLD", "votes", "personal parameters",
              "custom stage", "subspaces", "subspaces that follow the gradient",
              "late sparse replies", "replies that mix", "replies below a threshold",
              "gradients below a threshold")  # fmt: skip
SCHEDULE = ("participants", "staleness", "discarded", "simulated_seconds", "bytes_down", "bytes_up")


def test_late_rows_are_late_on_engines() -> None:
    """Three nodes and three rounds are enough for late and for discarded replies."""
    for name in ("replies that mix", "replies below a threshold", "gradients below a threshold"):
        schedule = built(on_engines(name, NODES)).plan.timetable
        assert schedule is not None
        lateness = np.concatenate([r - v for r, v in enumerate(schedule.versions)])
        assert 0 < lateness.max() < 2
        assert bool(schedule.discarded) == ("gradients" in name)


def same_models(folder: Path, other: Path) -> None:
    models = [load_file(run / "model.safetensors") for run in (folder, other)]
    for key, value in models[0].items():
        np.testing.assert_allclose(models[1][key], value, rtol=1e-12, atol=1e-12)


def same_schedules(folder: Path, other: Path) -> None:
    """The same clients answer at the same simulated times, and replies are as late and as large."""
    schedules = [
        [
            [json.loads(line).get(field) for field in SCHEDULE]
            for line in (run / "rounds.jsonl").open()
        ]
        for run in (folder, other)
    ]
    assert schedules[0] == schedules[1] and len(schedules[0]) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in STAGES if "statistics" not in name])
def test_ray_equals_inline(live: LiveGrid, name: str, tmp_path: Path) -> None:
    """Statistics are those of given modules, which only run inline."""
    table = on_engines(name, N)
    execute(table, tmp_path / "inline")
    run = prepare(resolve(table), tmp_path / "ray")
    live.do(lambda grid: train(run, FlowerEngine(run.config, grid)))
    same_models(tmp_path / "inline", tmp_path / "ray")
    same_schedules(tmp_path / "inline", tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUPER_LINK)
def test_super_link_equals_inline(deployment: Deployment, name: str, tmp_path: Path) -> None:
    table = on_engines(name, NODES)
    execute(table, tmp_path / "inline")
    deployment.execute(table, tmp_path / "deployed")
    same_models(tmp_path / "inline", tmp_path / "deployed")
    same_schedules(tmp_path / "inline", tmp_path / "deployed")
