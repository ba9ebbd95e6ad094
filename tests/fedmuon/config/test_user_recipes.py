"""Beside a recipe of the user's, and in the making of one, nothing is ignored in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from brought import PLAIN, refused, tables

import fedmuon
from fedmuon import links, recipes
from fedmuon.core.errors import InputError

pytestmark = pytest.mark.usefixtures("runs_apart")
NS = {"name": "newton-schulz", "steps": 7}


def plain(lr: float = 0.1) -> list[fedmuon.Link]:
    return [links.gradient(), links.descend(lr)]


def unscheduled() -> list[fedmuon.Link]:
    def down(direction: links.Params, context: fedmuon.Context) -> links.Params:
        return {name: -0.1 * value for name, value in direction.items()}

    return [links.gradient(), links.stateless("mine", down)]


def made(**keys: Any) -> fedmuon.Recipe:
    return recipes.fedmuon_aligned(lr=0.1, routes={"weight": 1, "bias": 0}, **keys)


def config(**local: Any) -> dict[str, Any]:
    held = tables(local=local)
    return {**held, "local": {k: one for k, one in held["local"].items() if k != "recipe"}}


IDLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "name": ({"orthogonalizer": {"name": "newton-schulz"}}, {"recipe": plain}, "leave name out"),
    "lambda": ({"orthogonalizer": {"lambda": 5.0}}, {"recipe": plain}, "leave lambda out"),
    "value": ({"orthogonalizer": {"lambda": 5.0}}, {"recipe": plain()}, "leave lambda out"),
    "object": ({}, {"recipe": plain, "orthogonalizer": lambda m: m}, "leave name out"),
    "schedule": ({}, {"recipe": unscheduled, "schedule": lambda round: 0.0}, "leave schedule out"),
    "cosine": ({}, {"recipe": unscheduled(), "schedule": "cosine"}, "leave schedule out"),
    "steps": ({"local": {"steps": 7}}, {"recipe": made(steps=3)}, "steps=7"),
    "drawn": (
        {"orthogonalizer": {"name": "gaussian-smoothed-sign"}},
        {"recipe": lambda orthogonalizer: plain()},
        "choose one of smoothed-polar",
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_no_recipe_of_the_user_s_reads_is_refused(name: str) -> None:
    changes, given, mend = IDLE[name]
    of = config() | {table: config().get(table, {}) | keys for table, keys in changes.items()}
    refused(mend, of, **PLAIN, **given)


@pytest.mark.parametrize("schedule", ["cosine", lambda round: 0.5])
def test_links_that_read_the_factor_are_scheduled(schedule: Any) -> None:
    fedmuon.run(config(), **PLAIN, recipe=plain, schedule=schedule)
    fedmuon.run(config(steps=3), **PLAIN, recipe=made(steps=3), schedule=schedule)


def test_a_recipe_gets_the_map_that_is_named_or_keeps_its_own() -> None:
    got: list[Any] = []

    def optional(orthogonalizer: Any = "mine") -> list[fedmuon.Link]:
        got.append(orthogonalizer)
        return plain()

    def needed(orthogonalizer: Any) -> list[fedmuon.Link]:
        return optional(orthogonalizer)

    half = fedmuon.Orthogonalizer(lambda m: m / 2)
    fedmuon.run(config(), **PLAIN, recipe=optional)
    fedmuon.run(config(), **PLAIN, recipe=optional, orthogonalizer=half)
    fedmuon.run(config() | {"orthogonalizer": NS}, **PLAIN, recipe=optional)
    fedmuon.run(config(), **PLAIN, recipe=needed)
    own, given, named, usual = dict.fromkeys(got)
    matrix = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert own == "mine" and given is half
    for one, other in ((named, fedmuon.orthogonalizers.newton_schulz(7)),
                       (usual, fedmuon.orthogonalizers.smoothed_polar())):  # fmt: skip
        assert torch.equal(one.apply(matrix), other.apply(matrix))
        assert one.lipschitz == other.lipschitz


NAMED: Any = recipes  # the type checker knows their parameters
UNREAD: dict[str, Callable[[], Any]] = {
    "batch": lambda: NAMED.fedmuon(batch=4),
    "steps": lambda: NAMED.fedmuon(steps=3),
    "schedule": lambda: NAMED.fedmuon(schedule="cosine"),
    "recipe": lambda: NAMED.fedmuon(recipe="fedavg"),
    "route": lambda: NAMED.fedmuon(route="all-matrices"),
    "orthogonalizer": lambda: NAMED.fedavg(orthogonalizer=lambda m: m),
    "routes": lambda: NAMED.sgd(routes={"weight": 1}),
    "momentum": lambda: NAMED.fedavg(momentum=0.3),
    "aux": lambda: NAMED.fedmuon(aux="adamw"),  # all parameters are matrices
    "aux-lr": lambda: NAMED.muon(aux_lr=0.2),
}


@pytest.mark.parametrize("key", UNREAD)
def test_a_recipe_is_not_made_of_what_it_does_not_read(key: str) -> None:
    with pytest.raises(InputError, match=f"{key}.* has no effect"):
        UNREAD[key]()


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

    fedmuon.run(config(route="all-matrices"), **PLAIN, recipe=routed)
    assert got[0] == {"weight": 1, "bias": 0}
