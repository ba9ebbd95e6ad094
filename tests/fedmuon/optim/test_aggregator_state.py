"""A state that an aggregator declares is saved and resumed; one that it hides is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brought import PLAIN, tables
from conftest import small
from cut_off import Stop

import fedmuon
from fedmuon import aggregators, links
from fedmuon.core.errors import InputError
from fedmuon.federated.rounds import server_update
from fedmuon.optim.recipe import initial_states
from fedmuon.optim.recipes import Chain, Link, Recipe
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.optim.stage import Reply, ServerState
from fedmuon.optim.user_recipe import as_recipe
from fedmuon.runs.directory import RunDirectory

Params = dict[str, torch.Tensor]


def after(last: int) -> Callable[[Any, Any], None]:
    """A callback that ends the run after a round."""

    def stop(record: Any, state: Any) -> None:
        if record["round"] == last:
            raise Stop

    return stop


def mean_of(replies: Any) -> Params:
    names = replies[0].params
    return {name: torch.stack([one.params[name] for one in replies]).mean(0) for name in names}


def zeros(params: Any) -> Params:
    return {f"velocity {name}": torch.zeros_like(value) for name, value in params.items()}


def heavy(replies: Any, state: Any) -> tuple[Params, Params]:
    """Averages of averages, which begin at 0."""
    found = mean_of(replies)
    after = {f"velocity {n}": 0.5 * state[f"velocity {n}"] + 0.5 * v for n, v in found.items()}
    return {name: after[f"velocity {name}"] for name in found}, after


HEAVY = fedmuon.Aggregator(heavy, init=zeros)


@pytest.mark.parametrize("recipe", ["fedavg", "fedmuon"])  # the second averages a momentum, too
def test_a_declared_state_is_resumed_to_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    """And it matters: without it, the model would be another one."""
    route = {"route": "all-matrices"} if recipe == "fedmuon" else {}
    config = tables(federation={"rounds": 6}, local={"recipe": recipe, **route})
    config["output"] = {"checkpoint-every": 2}
    whole = fedmuon.run(config, **PLAIN, aggregate=HEAVY)
    with pytest.raises(Stop):
        fedmuon.run(config, **PLAIN, aggregate=HEAVY, out=tmp_path, callbacks=[after(3)])
    tensors, _ = RunDirectory(tmp_path).newest_checkpoint() or ({}, {})
    assert bool(tensors["aggregate.velocity weight"].any())
    assert ("aggregate-momentum.velocity weight" in tensors) is (recipe == "fedmuon")
    again = fedmuon.run(**PLAIN, aggregate=HEAVY, out=tmp_path, resume=True)
    for name in ("model.safetensors", "momentum.safetensors"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    plain = fedmuon.run(config, **PLAIN, aggregate=mean_of)
    assert not torch.equal(plain.model["weight"], whole.model["weight"])


def test_a_declared_state_is_fedavgm_s() -> None:
    """v <- beta v + (mean - X), X <- X + v, with X in the state, too: the built-in rule's model."""

    def init(params: Any) -> Params:
        velocity = {f"v {name}": torch.zeros_like(value) for name, value in params.items()}
        return velocity | {f"x {name}": value.clone() for name, value in params.items()}

    def apply(replies: Any, state: Any) -> tuple[Params, Params]:
        model, kept = {}, {}
        for name, value in mean_of(replies).items():
            kept[f"v {name}"] = 0.9 * state[f"v {name}"] + (value - state[f"x {name}"])
            model[name] = kept[f"x {name}"] = state[f"x {name}"] + kept[f"v {name}"]
        return model, kept

    rounds = {"federation": {"rounds": 5, "aggregate": "mean"}}
    mine = fedmuon.Aggregator(apply, init=init)
    ours = fedmuon.run(small(rounds, local={"recipe": "fedavgm", "server-momentum": 0.9}))
    plain = {"federation": {"rounds": 5}}
    found = fedmuon.run(small(plain, local={"recipe": "fedavg"}), aggregate=mine)
    torch.testing.assert_close(found.model["weight"], ours.model["weight"])


@pytest.mark.parametrize("whole", [False, True])
def test_every_replica_has_a_state_of_its_own(whole: bool) -> None:
    """For an aggregator that sees single models, and for one that sees the stack."""
    recipe = replace(as_recipe([links.gradient()]), aggregate=replace(HEAVY, stacked=whole))
    drawn = torch.Generator().manual_seed(0)
    models = [torch.randn(3, 2, 4, generator=drawn) for _ in range(2)]
    state = ServerState(0, {"w": models[0]}, initial_states(recipe, {"w": models[0]}))
    replies = [Reply(k, {"w": one}, {}, torch.zeros(3)) for k, one in enumerate(models)]
    for factor in (0.5, 0.75):  # of the mean, that the average has had so far
        state = server_update(recipe, state, replies)
        torch.testing.assert_close(state.params["w"], factor * (models[0] + models[1]) / 2)
        assert state.states["aggregate"]["velocity w"].shape == (3, 2, 4)


class Counting:
    """Takes the first reply from its third call on."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, replies: Any) -> Any:
        self.held = self.held + 1
        return replies[0].params


def counting(kind: str) -> Any:
    calls, held = 0, torch.zeros(2)

    def number(replies: Any) -> Any:
        nonlocal calls
        calls += 1
        return mean_of(replies)

    def tensor(replies: Any) -> Any:
        held.add_(1)
        return mean_of(replies)

    return number if kind == "number" else tensor


HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: Counting(0), "its attribute held"),
    "array": (lambda: Counting(np.zeros(3)), "its attribute held"),
    "tensor": (lambda: Counting(torch.zeros(3)), "its attribute held"),
    "method": (lambda: Counting(0).__call__, "its attribute held"),
    "closure": (lambda: counting("number"), "its variable calls"),
    "in-place": (lambda: counting("tensor"), "its variable held"),
    "of-aggregator": (lambda: fedmuon.Aggregator(Counting(0)), "its attribute held"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_state_is_refused_before_the_first_round(name: str, tmp_path: Path) -> None:
    """Whatever it does: a resumed run would begin without it."""
    make, where = HIDDEN[name]
    with pytest.raises(
        InputError, match=rf"changes {where} .*fedmuon\.Aggregator.*init=init"
    ) as refused:
        fedmuon.run(tables(), **PLAIN, aggregate=make(), out=tmp_path / "run")
    assert "\n" not in str(refused.value) and not (tmp_path / "run" / "rounds.jsonl").exists()


def test_a_log_of_the_calls_is_no_state() -> None:
    seen: list[int] = []

    def apply(replies: Any) -> Any:
        seen.append(len(replies))
        return mean_of(replies)

    fedmuon.run(tables(), **PLAIN, aggregate=apply)
    assert seen


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "averages": ({"averages": True}, "Leave init out"),
    "no-function": ({"init": 3}, "init of an Aggregator has type int"),
    "no-tensor": ({"init": lambda params: {"a": 1}}, "returns a int for a"),
    "no-mapping": ({"init": lambda params: None}, "must return a mapping of names to tensors"),
    "lost": (
        {"apply": lambda replies, state: (mean_of(replies), {})},
        "must return one tensor for its state",
    ),
    "alone": ({"apply": lambda replies, state: mean_of(replies)}, "your aggregate <lambda>"),
    "no-arity": ({"apply": mean_of}, "takes 1 positional argument but 2 were given"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_state_that_is_none_is_one_sentence(name: str) -> None:
    given, words = ODD[name]
    with pytest.raises(InputError, match=words) as refused:
        held: dict[str, Any] = {"apply": heavy, "init": zeros, **given}
        fedmuon.run(tables(), **PLAIN, aggregate=fedmuon.Aggregator(**held))
    assert "\n" not in str(refused.value)


def test_a_state_has_a_name_that_no_link_s_has() -> None:
    link = Link("aggregate", links.zeros, lambda d, s, c: (d, s), lasting=True)
    chain = Chain((links.gradient(), link, links.descend(0.1)))
    named = ("aggregate",)
    with pytest.raises(InputError, match="Rename the link"):
        Recipe(chain, replace_by_mean, named, named, named, aggregate=HEAVY)


LASTING = Chain((links.gradient(), links.momentum(0.9), links.descend(0.1)))
NAMED = ("momentum",)


@pytest.mark.parametrize(
    ("sent", "kept", "lost"),
    [((), (), "sent and kept"), ((), NAMED, "sent"), (NAMED, (), "kept")],
)
def test_a_lasting_state_that_begins_afresh_is_refused(sent: Any, kept: Any, lost: str) -> None:
    """It comes back and is averaged, and yet nothing lasts."""
    with pytest.raises(
        InputError, match=f"momentum has lasting=True.* because momentum is missing in {lost}"
    ):
        Recipe(LASTING, replace_by_mean, sent, NAMED, kept)
    Recipe(LASTING, replace_by_mean, NAMED, NAMED, NAMED)
    Recipe(LASTING, replace_by_mean)  # local, and says so


def test_a_returned_state_that_is_not_kept_goes_no_further_than_the_rule(tmp_path: Path) -> None:
    """The rule may read it; it is in no checkpoint, from which the run is resumed."""
    seen = []

    def rule(old: Any, mean: Any, states: Any) -> Any:
        seen.append(sorted(states))
        return mean, states

    count = Link("count", links.zeros, lambda d, s, c: (d, s))
    chain = Chain((links.gradient(), count, links.descend(0.1)))
    recipe = Recipe(chain, rule, returned=("count",))
    config = tables(federation={"rounds": 4})
    config["local"].pop("recipe")
    with pytest.raises(Stop):
        fedmuon.run(config, **PLAIN, recipe=recipe, out=tmp_path, callbacks=[after(2)])
    assert fedmuon.run(**PLAIN, recipe=recipe, out=tmp_path, resume=True).summary["rounds"] == 4
    assert seen and all(names == ["count"] for names in seen)


def test_aggregators_of_ours_declare_no_state() -> None:
    assert all(made().init is None for made in (aggregators.mean, aggregators.median))
