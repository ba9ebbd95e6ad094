"""Personal parts of models: tests of each client, fine-tuning, and what does not fit."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import arrays, built, ended, gap, perceptron, problem_of, with_module
from conftest import quick, small
from reference.gradients import scores
from reference.methods import ditto, fedavg, fedper, local_steps, plain
from reference.rounds import Method, Visit, is_personal, run
from reference.trees import Tree, largest_gap
from torch import nn

import fedmuon
from fedmuon import links, recipes
from fedmuon.config.load import Config
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_experiment
from fedmuon.federated.client_data import build_data
from fedmuon.federated.experiment import Experiment
from fedmuon.federated.personal import fine_tuned
from fedmuon.federated.rounds import begin, broadcast, client_updates
from fedmuon.federated.wire import pack
from fedmuon.optim.chain import PERSONAL, Chain
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.optim.stage import Stage
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.runs.directory import Record
from fedmuon.tasks.per_example.clipping import Clipping

LR, N, STEPS, ROUNDS = 0.5, 5, 3, 7
HEAD = "2.weight, 2.bias"


def config(**tables: Mapping[str, Any]) -> Config:
    """Five clients of 7 features and 3 classes, and a network with one hidden layer of 4."""
    given = {
        "federation": {"clients": N, "per-round": 2, "rounds": ROUNDS, "aggregate": "mean"},
        "data": {"train": 150, "client-test": 0.3},
        "task": {"name": "given"},
        "local": {"recipe": "fedper", "personal": HEAD, "lr": LR, "steps": STEPS, "batch": 7},
    }
    for name, keys in tables.items():
        given[name] = given.get(name, {}) | dict(keys)
    return with_module(small({}, **given), perceptron())


def experiment(table: Config, recipe: Recipe | None = None) -> Experiment:
    found = build_experiment(table)
    return replace(found, recipe=recipe or found.recipe)


def expected(table: Config, method: Method) -> tuple[Tree, list[Tree]]:
    """The server's model of the reference, and the personal part of each client's model."""
    problem = problem_of(table)
    result = run(problem, method)
    first = {name: x for name, x in problem.start.items() if is_personal(method, name)}
    first = first or problem.start
    return result.server["model"], [memory.get("personal", first) for memory in result.memories]


FEDPER = fedper(LR, HEAD)


# FedPer


def test_ditto_with_running_statistics_is_rejected() -> None:
    """Nobody would keep those of the personal models."""
    module = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    tables = {"task": {"name": "given"}, "local": {"recipe": "ditto"}}
    with pytest.raises(InputError, match="cannot store its running statistics"):
        build_experiment(small({}, **tables).with_objects(UserObjects(task=module)))


def test_a_state_before_the_personal_model_does_not_change_it() -> None:
    """Clients that were there before and new ones in one stack, with two states of their own."""
    links_ = (*recipes.ditto(LR).chain.links[:1], links.momentum(0.9),
              *recipes.ditto(LR).chain.links[1:])  # fmt: skip
    names = tuple(one.name for one in links_ if one.name in ("momentum", PERSONAL))
    assert names == ("momentum", PERSONAL)
    made = experiment(config(local={"recipe": "ditto", "personal": ""}))
    both = replace(made, recipe=replace(made.recipe, chain=Chain(links_), persistent=names))
    one, other = ended(both), ended(both)
    assert all(torch.equal(one.params[name], held) for name, held in other.params.items())
    met = [both.client_states.read(i, ROUNDS) for i in range(N)]
    assert any(met) and all({*names} == {*one} for one in met if one)


def test_personal_parameters_are_in_no_message() -> None:
    made = experiment(config())
    state = begin(made.recipe, made.task, 0)
    sent = broadcast(made.recipe, state)
    (reply,) = client_updates(made.recipe, made.task, made.plan, [(1, made.shards[1])], sent)
    for one in (sent, reply):
        assert sorted(pack(one.params, one.states)) == ["model.0.bias", "model.0.weight"]
    assert sorted(reply.own[PERSONAL]) == ["2.bias", "2.weight"]


def columns_of(folder: Path) -> dict[str, list[float]]:
    rows = list(csv.DictReader((folder / "personal.csv").open()))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def accuracy(model: Tree, x: np.ndarray, y: np.ndarray) -> float:
    return float((scores(model, x).argmax(1) == y).mean())


def require_measured(table: Config, folder: Path, X: Tree, mine: Sequence[Tree]) -> None:
    """The table and the summary of a run, sample by sample."""
    summary, data = execute(table, folder), build_data(table)
    first, found = data.client_test_offsets, columns_of(folder)
    for i in range(N):
        rows = slice(int(first[i]), int(first[i + 1]))
        x, y = data.client_test_inputs[rows].astype(float), data.client_test_labels[rows]
        assert (found["client"][i], found["samples"][i]) == (i, len(y))
        assert found["global_accuracy"][i] == pytest.approx(accuracy(X, x, y), rel=1e-12)
        own = accuracy(X | mine[i], x, y)
        assert found["personal_accuracy"][i] == pytest.approx(own, rel=1e-12)
    for part, column in (("", "global_accuracy"), ("_personal", "personal_accuracy")):
        values = found[column]
        assert summary[f"client_test{part}_accuracy"] == pytest.approx(sum(values) / N, rel=1e-12)
        spread = math.sqrt(sum((one - sum(values) / N) ** 2 for one in values) / N)
        assert summary[f"client_test{part}_accuracy_std"] == pytest.approx(spread, rel=1e-12)
        assert summary[f"client_test{part}_accuracy_worst_decile"] == min(values)
    assert found["global_accuracy"] != found["personal_accuracy"]


@pytest.mark.parametrize("recipe", ["fedper", "ditto"])
def test_personal_models_are_kept(tmp_path: Path, recipe: str) -> None:
    """Those of a loop; of a client that never took part, the first values."""
    local = {"recipe": "fedper"} if recipe == "fedper" else DITTO
    table = config(local=local, federation={"rounds": 2})
    execute(table, tmp_path / "run")
    result = fedmuon.Result(tmp_path / "run")
    X, mine = expected(table, FEDPER if recipe == "fedper" else ditto(LR, 0.4))
    assert len({client for r in range(2) for client, _ in problem_of(table).cohort(r)}) < N
    for i in range(N):
        found = {name: one[None] for name, one in result.personal_model(i).items()}
        assert gap(found, X | mine[i]) < 1e-12
    with pytest.raises(InputError, match="client is 5, but the run has only clients 0 to 4"):
        result.personal_model(N)
    plain = config(local={"recipe": "fedavg", "personal": ""}, federation={"rounds": 2})
    execute(plain, tmp_path / "plain")
    with pytest.raises(InputError, match="contains no personal models"):
        fedmuon.Result(tmp_path / "plain").personal_model(0)


def test_each_client_tests_its_own_model(tmp_path: Path) -> None:
    table = config(federation={"partition": "shards"})
    X, mine = expected(table, FEDPER)
    require_measured(table, tmp_path / "run", X, mine)
    plain = config(federation={"partition": "shards"}, local={"recipe": "fedavg", "personal": ""})
    assert "client_test_personal_accuracy" not in execute(plain, tmp_path / "plain")
    assert not (tmp_path / "plain" / "personal.csv").exists()


# Ditto

DITTO = {"recipe": "ditto", "personal": "", "personal-weight": 0.4}


@pytest.mark.parametrize("weight", [0.4, 0.0])
def test_each_client_of_ditto_tests_its_own_model(weight: float, tmp_path: Path) -> None:
    table = config(local=DITTO | {"personal-weight": weight}, federation={"partition": "shards"})
    require_measured(table, tmp_path / "run", *expected(table, ditto(LR, weight)))


def test_ditto_without_a_pull_is_local_training() -> None:
    """Each v follows the gradients of its own client from the first model, whatever others do."""
    table = config(local=DITTO | {"personal-weight": 0.0})
    made, pulled, problem = built(table), built(config(local=DITTO)), problem_of(table)
    ended(made)
    ended(pulled)
    alone = [problem.start] * N
    for r in range(ROUNDS):
        for client, _ in problem.cohort(r):
            alone[client] = local_steps(Visit(problem, r, client), alone[client], LR, 0.0, plain)
    for client, model in enumerate(alone):
        if model is not problem.start:
            assert gap(made.client_states.read(client, ROUNDS)[PERSONAL], model) < 1e-12
            assert gap(pulled.client_states.read(client, ROUNDS)[PERSONAL], model) > 1e-3


def test_a_stronger_pull_keeps_personal_models_nearer() -> None:
    def drift(weight: float) -> float:
        made = built(config(local=DITTO | {"personal-weight": weight}))
        X = arrays(ended(made).params)
        last = made.plan.participants(ROUNDS - 1).tolist()
        return max(gap(made.client_states.read(i, ROUNDS)[PERSONAL], X) for i in last)

    drifts = [drift(weight) for weight in (0.0, 0.2, 0.6, 1.5)]
    assert drifts == sorted(drifts, reverse=True)


def test_ditto_is_not_private() -> None:
    with pytest.raises(InputError, match="recipe = 'ditto' stores a state of each client"):
        build_experiment(config(local=DITTO, privacy={"level": "client", "noise": 1.0}))


# Fine-tuning

FEDAVG = {"recipe": "fedavg", "personal": ""}


@pytest.mark.parametrize("recipe", quick(["fedavg", "fednova", "fedper"], ["fednova", "fedper"]))
def test_fine_tuning_takes_local_steps_from_the_final_model(recipe: str, tmp_path: Path) -> None:
    """Also of clients that never took part; FedNova's own rule does not change what is tested."""
    tables = {
        "federation": {"partition": "shards"},
        "local": {"recipe": recipe, "personal": HEAD if recipe == "fedper" else ""},
    }
    table = config(**tables, output={"fine-tune": 4})
    problem, method = problem_of(table), FEDPER if recipe == "fedper" else fedavg(LR)
    X, mine = expected(table, method)
    tuned = []
    for i in range(N):  # with the draws of the round after the last
        visit = Visit(replace(problem, steps=4, factors=()), ROUNDS, i)
        before = X | mine[i] if recipe == "fedper" else X
        tuned.append(local_steps(visit, before, LR, 0.0, plain))
        assert largest_gap(tuned[-1], before) > 1e-3
    require_measured(table, tmp_path / "run", X, tuned)
    untuned = tmp_path / "untuned" / "model.safetensors"
    execute(config(**tables), untuned.parent)
    assert untuned.read_bytes() == (tmp_path / "run" / untuned.name).read_bytes()


def test_fine_tuning_has_the_last_round_s_step_size() -> None:
    options = {"every": 1, "factor": 0.5}
    table = config(
        local=FEDAVG | {"schedule": "step", "options": options},
        federation={"rounds": 2},
        output={"fine-tune": 1},
    )
    made, problem = built(table), problem_of(table)
    state = ended(made)
    (found,) = fine_tuned(made, state, [3], 1)
    visit = Visit(replace(problem, steps=1, factors=()), 2, 3)
    wanted = local_steps(visit, arrays(state.params), LR * 0.5, 0.0, plain)
    assert gap(found, wanted) < 1e-12


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"data": {"client-test": 0.0}},
            "used only by tests on the clients' own samples. Set .* client-test",
        ),
        ({"local": DITTO}, "`ditto`, `ef21-muon` and `sign-muon`. .* trains its own model"),
        (
            {"local": {"recipe": "ef21-muon", "personal": ""}},
            "`ef21-muon` and `sign-muon`. .* no local steps. Choose another optimizer",
        ),
        (
            {"privacy": {"level": "client", "noise": 1.0}},
            "only by runs without privacy. The ledger .* does not count fine-tuned models. Leave "
            r"all keys of \[privacy\] out to train without privacy, or leave fine-tune out",
        ),
    ],
)
def test_where_fine_tuning_has_no_effect(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**{"local": FEDAVG, **tables, "output": {"fine-tune": 2}})


def test_a_recipe_of_ones_own_may_be_unfit_for_fine_tuning() -> None:
    table = {"data": {"name": "synthetic", "train": 400, "client-test": 0.5},
             "output": {"fine-tune": 2}}  # fmt: skip
    private = Recipe(
        Chain((links.private_gradient(), links.descend(LR))),
        replace_by_mean,
        mechanism=Mechanism(Clipping("block", 1.0), 0.5, 4.0),
    )
    for mine, words in (
        (private, "the ledger does not count"),
        (recipes.ditto(LR), "already trains a model per client"),
    ):
        with pytest.raises(InputError, match=words):
            fedmuon.run(table, recipe=mine)


# Runs

RESUMED = {
    "ditto": {"local": DITTO},
    "fine-tuned": {"local": FEDAVG, "output": {"fine-tune": 3}},
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, name: str) -> None:
    table, seen = config(**RESUMED[name]), list[Record]()

    def stop(record: Record) -> None:
        seen.append(record)
        if len(seen) == 5:
            raise KeyboardInterrupt

    execute(table, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(table, tmp_path / "cut", on_round_end=stop)
    execute(table, tmp_path / "cut", resume=True)
    for file in ("model.safetensors", "personal.csv", "personal.safetensors"):
        if file == "personal.safetensors" and not (tmp_path / "whole" / file).exists():
            assert table.output.fine_tune  # whose models are tested alone
            continue
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()
    again = execute(table, tmp_path / "cut", resume=True)  # a finished run is left alone
    assert "client_test_personal_accuracy" in again
    (tmp_path / "cut" / "personal.csv").write_text("client\n")
    with pytest.raises(InputError, match=r"personal\.csv"):
        execute(table, tmp_path / "cut", resume=True)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"local": {"personal": "3.*"}},
            r"'3\.\*' .*matches no parameter of the model\. The parameters are 0\.weight",
        ),
        ({"local": {"personal": "*"}}, "matches every parameter"),
        ({"local": {"personal": "0.*, 2.*"}}, "matches every parameter"),
        ({"local": {"personal": " , "}}, "needs to know which part .* Set"),
        (
            {"privacy": {"level": "client", "noise": 1.0}},
            "level = 'client' does not allow this, because",
        ),
    ],
)
def test_what_fedper_rejects(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_experiment(config(**tables))


class OwnPersonal(PersonalParameters):
    """A stage whose class is not one of fedmuon's, as users write it."""


class Storing(Stage):
    stores = ("personal",)

    def reply(self, reply: Any, received: Any, memory: Any) -> Any:
        return reply.storing("personal", reply.params)


def with_stage(stage: Stage, **tables: Mapping[str, Any]) -> Config:
    local = {"recipe": "fedavg", "personal": ""}
    table = config(**{"local": local, "federation": {"stage": "given"}, **tables})
    return table.with_objects(replace(table.given, stage=stage))


@pytest.mark.parametrize("tables", [{}, {"output": {"fine-tune": 2}}])
def test_a_subclass_tests_personal_models_as_fedper_does(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    patterns = tuple(HEAD.split(", "))
    own = execute(with_stage(OwnPersonal(patterns), **tables), tmp_path / "own")
    fedper = execute(config(**tables), tmp_path / "fedper")
    name = "client_test_personal_accuracy"
    assert own[name] == fedper[name] and own["test_loss"] == fedper["test_loss"]
    body = execute(with_stage(OwnPersonal(("0.*",)), **tables), tmp_path / "body")  # the control
    assert body["test_loss"] != fedper["test_loss"]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (OwnPersonal(("3.*",)), r"'3\.\*' in the stage OwnPersonal matches no parameter"),
        (PersonalParameters(("3.*",)), r"in the stage PersonalParameters matches no parameter"),
        (OwnPersonal(("*",)), "of the stage OwnPersonal matches every parameter of the model"),
        (OwnPersonal(()), "the stage OwnPersonal stores .* returns True for no parameter"),
        (Storing(), "the stage Storing stores the client state 'personal'"),
    ],
)
def test_what_a_personal_stage_rejects(stage: Stage, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_experiment(with_stage(stage))


def test_only_fedper_reads_the_patterns() -> None:
    with pytest.raises(
        InputError,
        match=r"personal = '2.weight, 2.bias' has no effect.* only by the optimizer `fedper`",
    ):
        config(local={"recipe": "fedavg"})


def test_what_a_recipe_with_personal_parameters_cannot_have() -> None:
    fedmuon_ = recipes.fedmuon(LR)
    with pytest.raises(InputError, match="the recipe also has sent = "):
        replace(fedmuon_, stages=(PersonalParameters(("head.*",)),))
    with pytest.raises(InputError, match="but it must be a tuple of patterns"):
        replace(recipes.fedavg(LR), stages=(PersonalParameters("head.*"),))  # type: ignore[arg-type]
    chain = Chain((links.private_gradient(), links.descend(LR)))
    noisy = Mechanism(Clipping("block", 1.0), 0.5, 4.0)
    mine = Recipe(chain, replace_by_mean, mechanism=noisy, stages=(PersonalParameters(("2.*",)),))
    tables = {"data": {"name": "synthetic", "train": 300, "test": 50}}
    module = nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(InputError, match="remove `persistent` and `personal`"):
        fedmuon.run(tables, recipe=mine, task=module)


def test_muon_keeps_a_personal_part_too() -> None:
    """The mechanism is the recipe's, not FedPer's: here with Local Muon and a server's momentum."""
    table = config()
    routes = {"0.weight": 1, "0.bias": 0, "2.weight": 1, "2.bias": 0}
    muon = recipes.local_muon(0.05, routes=routes)
    made = experiment(table, replace(muon, stages=(PersonalParameters(("2.*",)),)))
    state = ended(made)
    start = begin(made.recipe, made.task, table.federation.seed).params
    assert (state.params["2.weight"] == start["2.weight"]).all()
    assert (state.params["0.weight"] != start["0.weight"]).any()
    momenta = experiment(
        table, replace(recipes.fedavgm(LR), stages=(PersonalParameters(("2.*",)),))
    )
    assert sorted(ended(momenta).states["momentum"]) == ["0.bias", "0.weight"]
