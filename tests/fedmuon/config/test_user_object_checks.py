"""What the user brings is held to what a certificate, a resumed run and other processes need."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from brought import CLASSES, PLAIN, X, Y, linear, refused, tables
from torch import Tensor

import fedmuon
from fedmuon import links, recipes
from fedmuon.config.load import parse
from fedmuon.config.user_objects import UserObjects
from fedmuon.core.errors import InputError
from fedmuon.data.federated import Dealt, federate
from fedmuon.data.user_data import as_source
from fedmuon.experiments.stability import certificates
from fedmuon.federated.build import build_experiment, build_worker, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.shards import Shards, partition_digest
from fedmuon.optim import orthogonalizers
from fedmuon.optim.links import private_gradient
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping

pytestmark = pytest.mark.usefixtures("runs_apart")
MATRIX = tables(local={"recipe": "fedmuon"})
ONE = fedmuon.Chain((links.gradient(), links.descend(0.1)))


# Samples in the ball


def test_rows_outside_the_ball_have_no_constants() -> None:
    source, deal = as_source((5 * X, CLASSES)), np.arange(60) % 3
    given = UserObjects(data=(5 * X, CLASSES))
    config = resolve(parse({**MATRIX, "data": {"name": "given"}}).with_objects(given))
    for normalize, sound in (("unit", True), ("ball", True), ("pixels", False)):
        for most in (np.float64, np.float32):
            parts = Dealt(np.arange(50), deal[:50], np.arange(50, 60))
            data = federate(source, parts, normalize, most=most)
            if sound:
                build_experiment(config, data)
            factor = most(1 + 1e-5) if sound else most(1)
            with pytest.raises(InputError, match="samples of norm 1 or less"):
                build_experiment(config, replace(data, inputs=factor * data.inputs))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.longdouble])
def test_the_largest_and_smallest_numbers_are_moved_into_the_ball(kind: Any) -> None:
    held = np.finfo(kind)
    rows = [[held.max] * 3, [held.tiny] * 3, [held.smallest_subnormal] * 3, [0.0] * 3]
    samples = np.array(rows * 15, dtype=kind)
    if kind is np.longdouble and held.max > np.finfo(float).max:
        refused("NaN or infinity", MATRIX, data=(samples, CLASSES))
    else:
        fedmuon.run(MATRIX, data=(samples, CLASSES))


# Partitions


def shuffled(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Of one's own draws, by which each call deals otherwise."""
    return OWN.permutation(np.arange(len(labels)) % clients)


OWN = np.random.default_rng(os.getpid())


def dealt_evenly(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    return np.arange(len(labels)) % clients


def test_a_worker_that_deals_otherwise_is_refused() -> None:
    """The message says what the server dealt; a partition of the generator that it is given is the
    same everywhere."""

    def seeded(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(len(labels)) % clients)

    for partition, sound in ((seeded, True), (shuffled, False)):
        given = UserObjects(data=(X, Y), task=linear, partition=partition)
        named = {"data": {"name": "given"}, "task": {"name": "given"}}
        config = parse({**tables(federation={"partition": "given"}), **named}).with_objects(given)
        config = resolve(config)
        data = build_data(config, read_source(config))
        dealt = Shards.of(data, torch.float64, torch.device("cpu")).partition_digest
        assert dealt == partition_digest(data.train_index, data.client)
        found = build_worker(config, 0)
        if sound:
            found.require_same_partition(dealt)
        else:
            with pytest.raises(InputError, match="only from the generator that it receives"):
                found.require_same_partition(dealt)


def test_the_laboratory_deals_as_the_run_did() -> None:
    config = {**MATRIX, "data": {"name": "synthetic", "train": 60, "test": 20, "dimension": 3}}
    assert fedmuon.stability(config, trials=2, partition=dealt_evenly).bound["status"]
    with pytest.raises(InputError, match="the partition now differs from"):
        fedmuon.stability(config, trials=2, partition=shuffled)


def test_runs_of_two_partitions_are_two_experiments(tmp_path: Path) -> None:
    parts = [range(20), range(20, 40), range(40, 60)], [range(k, 60, 3) for k in range(3)]
    for partition in (parts, (dealt_evenly, lambda y, n, rng: dealt_evenly(y, n, rng)[::-1])):
        ends = [
            fedmuon.run(tables(federation={"seed": seed}), **PLAIN, partition=one)
            for seed, one in enumerate(partition)
        ]
        assert [row["seeds"] for row in fedmuon.compare(ends).rows] == [1, 1]
        with pytest.raises(InputError, match="the partition differs from the partition"):
            fedmuon.run(**PLAIN, partition=partition[1], out=ends[0].path, resume=True)
        ends[1] = fedmuon.run(tables(federation={"seed": 1}), **PLAIN, partition=partition[0])
        assert [row["seeds"] for row in fedmuon.compare(ends).rows] == [2]


# Mechanisms


class Half(Mechanism):
    """Claims a rate that it does not keep to."""

    def rate(self, size: int) -> float:
        return super().rate(size) / 100


class Loose(Clipping):
    """Could clip otherwise."""


@pytest.mark.parametrize(
    "mechanism", [Half(Clipping("block", 1.0), 2.0, 5.0), Mechanism(Loose("block", 1.0), 2.0, 5.0)]
)
def test_a_mechanism_of_another_class_has_no_account(mechanism: Mechanism) -> None:
    chain = fedmuon.Chain((private_gradient(), links.descend(0.1)))
    whole = Mechanism(Clipping("block", 1.0), 2.0, 5.0)
    sound = fedmuon.Recipe(chain, replace_by_mean, mechanism=whole)
    assert fedmuon.run(tables(), **PLAIN, recipe=sound).summary["privacy"]["certified"]
    refused(
        "may release data that no privacy account counts",
        tables(),
        **PLAIN,
        recipe=replace(sound, mechanism=mechanism),
    )


# Links, rules, aggregates


def after(update: Any, *before: fedmuon.Link) -> list[fedmuon.Link]:
    return [links.gradient(), *before, links.stateless("mine", update), links.descend(0.1)]


def kept(update: Any) -> list[fedmuon.Link]:
    return [links.gradient(), fedmuon.Link("mine", links.zeros, update), links.descend(0.1)]


def into_its_state(direction: Any, state: Any, context: Any) -> Any:
    for name, value in direction.items():
        state[name].add_(value)
    return dict(state), state


def no_states() -> Any:
    return {}


def first_alone(direction: Any, context: Any) -> Any:
    return dict(list(direction.items())[:1])


NEW = "changes its input tensors in place, .* Return new tensors"
TAKES = r"returns \(direction, state\)"
LINKS: dict[str, tuple[Any, str]] = {
    "direction": (after(lambda d, c: {n: v.mul_(0.5) for n, v in d.items()}, links.momentum(0.9)),
                  NEW),
    "state": (kept(into_its_state), NEW),
    "params": (after(lambda d, c: {n: c.params[n].mul_(0.5) for n in d}), NEW),
    "alone": (kept(lambda d, state, context: d), TAKES),
    "nothing": (kept(lambda d, state, context: None), TAKES),
    "two": (kept(lambda d, state: (d, state)), TAKES),
    "one": (after(lambda d: d), TAKES),
    "no-mapping": (after(lambda d, context: 1.0), TAKES),
    "drops": (after(first_alone), "returns no direction for the parameter bias"),
    "no-direction": ([fedmuon.Link("idle", links.zeros, lambda d, s, c: (d, s))], "Make links."),
    "init": ([fedmuon.Link("mine", cast(Any, no_states), into_its_state)], "init of the link"),
}  # fmt: skip


def test_a_private_chain_s_links_are_tried_too() -> None:
    mechanism = Mechanism(Clipping("block", 1.0), 2.0, 5.0)
    updates: dict[str, Any] = {
        NEW: lambda d, c: {n: v.mul_(2) for n, v in d.items()},
        TAKES: lambda d: d,
    }
    for mend, update in updates.items():
        chain = fedmuon.Chain(
            (private_gradient(), links.stateless("mine", update), links.descend(0.1))
        )
        recipe = fedmuon.Recipe(chain, replace_by_mean, mechanism=mechanism)
        refused(mend, tables(), **PLAIN, recipe=recipe)


def test_the_user_s_own_error_is_the_cause() -> None:
    def fails(direction: Any, context: Any) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(InputError, match="RuntimeError: mine") as said:
        fedmuon.run(tables(), **PLAIN, recipe=after(fails))
    assert isinstance(said.value.__cause__, RuntimeError)


def plainly(old: Any, mean: Any, states: Any) -> Any:
    return mean, states


MINE = ("momentum",)
RULES: dict[str, tuple[fedmuon.Recipe, str]] = {
    "sent": (fedmuon.Recipe(ONE, plainly, ("momentum",)), "Add 'momentum' to `kept`"),
    "returned": (fedmuon.Recipe(ONE, plainly, (), ("momentum",), ("momentum",)), "no gradient t"),
    "all": (fedmuon.Recipe(ONE, plainly, MINE, MINE, MINE), "no gradient transformation"),
    "model": (fedmuon.Recipe(ONE, lambda old, mean, states: mean), "returns .model, states."),
    "two": (fedmuon.Recipe(ONE, lambda old, mean: (mean, {})), "takes .old, mean, states."),
    "less": (fedmuon.Recipe(ONE, lambda old, mean, states: ({}, states)), "no tensor with"),
    "state": (fedmuon.Recipe(ONE, lambda old, mean, states: (mean, {}), kept=("mine",)),
              "does not return the state mine"),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "mend"), [*LINKS.values(), *RULES.values()])
def test_links_and_rules_that_are_none_are_one_sentence(recipe: Any, mend: str) -> None:
    refused(mend, tables(), **PLAIN, recipe=recipe)


class Running:
    """The mean of what it ever saw, if `all`, or one that forgets."""

    def __init__(self, all: bool) -> None:
        self.all, self.seen, self.held = all, 0, {}

    def __call__(self, replies: Any) -> dict[str, Tensor]:
        self.seen += 1
        found = {}
        for name in replies[0].params:
            mean = torch.stack([one.params[name] for one in replies]).mean(0)
            held = self.held.get((name, mean.shape), torch.zeros_like(mean))
            share = 1 / self.seen if self.all else 0.5
            found[name] = self.held[name, mean.shape] = held + share * (mean - held)
        return found


@pytest.mark.parametrize("all", [True, False])
def test_an_aggregate_that_remembers_is_refused(all: bool) -> None:
    mend = "a state of the recipe that the server's rule updates"
    refused(mend, tables(), **PLAIN, aggregate=Running(all))
    recipe = fedmuon.Recipe(ONE, plainly, aggregate=fedmuon.aggregators.Aggregator(Running(all)))
    refused(mend, tables(), **PLAIN, recipe=recipe)


def test_an_aggregate_may_write_into_its_replies() -> None:
    def summed(replies: Any) -> dict[str, Tensor]:
        for one in replies[1:]:
            for name, value in one.params.items():
                replies[0].params[name].add_(value)
        return {name: value.div_(len(replies)) for name, value in replies[0].params.items()}

    ends = [fedmuon.run(tables(), **PLAIN, aggregate=one).model for one in (summed, "mean")]
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name])


# Maps


def flat_at_zero(m: Tensor) -> Tensor:
    """Steep near zero alone: its slope is 20 there, and below 1 at norms near 1."""
    return m / (m.flatten(-2).norm(dim=-1)[..., None, None] + 0.05)


def steep_far_out(m: Tensor) -> Tensor:
    """The identity within the ball of radius 100, and steeper outside."""
    return m * (m.flatten(-2).norm(dim=-1)[..., None, None] / 100).clamp(min=1)


@pytest.mark.parametrize("apply", [flat_at_zero, steep_far_out])
def test_constants_are_tried_at_scales(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, like = fedmuon.Orthogonalizer(apply, 1.0), torch.zeros(1, 6, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="times the distance of the matrices"):
        orthogonalizers.require_sound(found, like)
    monkeypatch.setattr(orthogonalizers, "SCALES", (1.0, 1.0, 1.0))
    orthogonalizers.require_sound(found, like)


# Schedules


@pytest.mark.parametrize("gives", ["x", -1, [1.0, 2.0], np.ones(2), torch.ones(2), None])
def test_a_schedule_that_is_none_is_one_sentence(gives: Any) -> None:
    given = UserObjects(schedule=lambda round: gives)
    config = parse({"local": {"schedule": "given"}, "federation": {"rounds": 2}})
    words = r"\[local\] schedule returned .* a number of 0 or more"
    with pytest.raises(InputError, match=words) as said:
        certificates.from_parameters(config.with_objects(given), 100)
    assert "\n" not in str(said.value)


def test_a_bound_from_parameters_follows_the_schedule(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def half(round):\n    return 0.5\n")
    config = parse({"local": {"schedule": f"{tmp_path / 'one.py'}:half"}})
    factors = certificates.from_parameters(config, 100).factors
    assert factors is not None and set(factors) == {0.5}


# Recipes: beside one of the user's, and in the making of one, nothing is ignored in silence


def plain(lr: float = 0.1) -> list[fedmuon.Link]:
    return [links.gradient(), links.descend(lr)]


def unscheduled() -> list[fedmuon.Link]:
    def down(direction: links.Params, context: fedmuon.Context) -> links.Params:
        return {name: -0.1 * value for name, value in direction.items()}

    return [links.gradient(), links.stateless("mine", down)]


def made(**keys: Any) -> fedmuon.Recipe:
    return recipes.fedmuon_aligned(lr=0.1, routes={"weight": 1, "bias": 0}, **keys)


@pytest.mark.parametrize(("given", "config", "mend"), [
    ({"recipe": plain}, {"orthogonalizer": {"name": "newton-schulz"}}, "leave name out"),
    ({"recipe": plain}, {"orthogonalizer": {"lambda": 5.0}}, "leave lambda out"),
    ({"recipe": plain()}, {"orthogonalizer": {"lambda": 5.0}}, "leave lambda out"),
    ({"recipe": plain, "orthogonalizer": lambda m: m}, {}, "leave name out"),
    ({"recipe": unscheduled, "schedule": lambda round: 0.0}, {}, "or leave schedule out"),
    ({"recipe": unscheduled(), "schedule": "cosine"}, {}, "or leave schedule out"),
    ({"recipe": made(steps=3)}, {"local": {"steps": 7}}, "steps=7"),
    ({"recipe": lambda orthogonalizer: plain()},
     {"orthogonalizer": {"name": "gaussian-smoothed-sign"}}, "Choose one of smoothed-polar"),
])  # fmt: skip
def test_what_no_recipe_of_the_user_s_reads_is_refused(given: Any, config: Any, mend: str) -> None:
    refused(mend, tables(**config), **PLAIN, **given)


@pytest.mark.parametrize("schedule", ["cosine", lambda round: 0.5])
def test_links_that_read_the_factor_are_scheduled(schedule: Any) -> None:
    fedmuon.run(tables(), **PLAIN, recipe=plain, schedule=schedule)
    stepping = tables(local={"steps": 3})
    fedmuon.run(stepping, **PLAIN, recipe=made(steps=3), schedule=schedule)


def test_a_recipe_gets_the_map_that_is_named_or_keeps_its_own() -> None:
    got: list[Any] = []

    def optional(orthogonalizer: Any = "mine") -> list[fedmuon.Link]:
        got.append(orthogonalizer)
        return plain()

    def needed(orthogonalizer: Any) -> list[fedmuon.Link]:
        return optional(orthogonalizer)

    half = fedmuon.Orthogonalizer(lambda m: m / 2)
    fedmuon.run(tables(), **PLAIN, recipe=optional)
    fedmuon.run(tables(), **PLAIN, recipe=optional, orthogonalizer=half)
    named = {"name": "newton-schulz", "steps": 7}
    fedmuon.run(tables(orthogonalizer=named), **PLAIN, recipe=optional)
    fedmuon.run(tables(), **PLAIN, recipe=needed)
    own, given, schulz, usual = dict.fromkeys(got)
    matrix = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert own == "mine" and given is half
    for one, other in ((schulz, fedmuon.orthogonalizers.newton_schulz(7)),
                       (usual, fedmuon.orthogonalizers.smoothed_polar())):  # fmt: skip
        assert torch.equal(one.apply(matrix), other.apply(matrix))
        assert one.lipschitz == other.lipschitz


@pytest.mark.parametrize(("recipe", "key", "value"), [
    ("fedmuon", "batch", 4),
    ("fedmuon", "steps", 3),
    ("fedmuon", "schedule", "cosine"),
    ("fedmuon", "recipe", "fedavg"),
    ("fedmuon", "route", "all-matrices"),
    ("fedavg", "orthogonalizer", lambda m: m),
    ("sgd", "routes", {"weight": 1}),
    ("fedavg", "momentum", 0.3),
    ("fedmuon", "aux", "adamw"),  # all parameters are matrices
    ("muon", "aux_lr", 0.2),
])  # fmt: skip
def test_a_recipe_is_not_made_of_what_it_does_not_read(recipe: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key.replace('_', '-')}.* has no effect"):
        getattr(recipes, recipe)(**{key: value})


def test_recipes_are_made_of_what_they_read() -> None:
    assert recipes.fedmuon_aligned(steps=7, alignment=0.3, momentum=0.5).steps == 7
    for one in (recipes.fedmuon, recipes.local_muon, recipes.fedmuon_aligned):
        one(lr=0.2, weight_decay=0.1, orthogonalizer=lambda m: m, routes={"weight": 1})
    recipes.fedmuon(routes={"weight": 1, "bias": 0}, aux="adamw", aux_lr=0.01)
    recipes.fedavgm(server_momentum=0.5)
    recipes.sgd(momentum=0.5)
    recipes.fedavg(lr=0.3)


def test_a_recipe_that_asks_for_routes_gets_those_of_the_network() -> None:
    got: list[Any] = []

    def routed(routes: Any, route: str) -> list[fedmuon.Link]:
        got.append(routes)
        return plain()

    fedmuon.run(tables(local={"route": "all-matrices"}), **PLAIN, recipe=routed)
    assert got[0] == {"weight": 1, "bias": 0}
