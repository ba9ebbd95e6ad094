"""A link's state may have any fixed shapes, and every engine then gives the same result."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import quick
from torch import Tensor

import fedmuon
from fedmuon import links
from fedmuon.core.errors import InputError
from fedmuon.optim.chain import Context
from tests.helpers.odd_states import ODD, SHAPES, measured

BAD: list[tuple[str, Any]] = [
    ("no replica axis", lambda some: {"n": some.new_zeros(())}),
    ("one for all", lambda some: {"n": some.new_zeros(7)}),
    ("no tensor", lambda some: {"n": 1.0}),
    ("key", lambda some: {3: some.new_zeros(len(some))}),
    ("bfloat16", lambda some: {"n": some.new_zeros(len(some)).bfloat16()}),
    ("bool", lambda some: {"n": some.new_zeros(len(some)).bool()}),
    ("complex", lambda some: {"n": some.new_zeros(len(some)).cfloat()}),
]


def recipe(shapes: Mapping[str, tuple[int, ...]], kept: bool = False, late: bool = False,
           heed: bool = True) -> fedmuon.Recipe:  # fmt: skip
    """SGD whose server divides its step by 1 + the mean of the clients' norms."""

    def rule(old: Any, mean: Any, states: Any) -> Any:
        values = [
            one.reshape(len(one), -1).mean(1) for one in states["measured"].values() if one.numel()
        ]
        scale = 1 / (1 + values[0]) if values and heed else torch.ones(1)
        model = {name: one + (mean[name] - one) * scale.view(-1, *[1] * (one.ndim - 1)).to(one)
                 for name, one in old.items()}  # fmt: skip
        return model, states

    chain = fedmuon.Chain((links.gradient(), measured(shapes, late), links.descend(1.0)))
    names = ("measured",) if kept else ()
    return fedmuon.Recipe(chain, rule, sent=names, returned=("measured",), kept=names)


def ran(made: fedmuon.Recipe, engine: str) -> float | str:
    tables = {
        "data": {"name": "digits", "train": 60, "test": 20, "minimum": 1},
        "federation": {"clients": 3, "per-round": 2, "rounds": 2},
        "local": {"steps": 2},
        "engine": {"name": engine, "dtype": "float64"},
    }
    try:
        return fedmuon.run(tables, recipe=made).summary["train_loss"]
    except InputError as error:
        return f"error: {error}"


INLINE = [(shapes, kept) for kept in (False, True) for shapes in ODD]


@pytest.mark.parametrize(
    ("shapes", "kept"), quick(INLINE, [*INLINE[: len(SHAPES)], ({"a": (1,), "b": (3, 2)}, True)])
)
def test_any_fixed_shapes_work_inline(shapes: dict[str, tuple[int, ...]], kept: bool) -> None:
    found = ran(recipe(shapes, kept), "inline")
    assert isinstance(found, float), found
    if shapes and not kept and all(0 not in one for one in shapes.values()):  # the state arrives
        assert found != ran(recipe(shapes, kept, heed=False), "inline")


@pytest.mark.parametrize("what", BAD, ids=lambda one: one[0])
def test_a_state_that_no_message_can_hold_is_rejected(what: tuple[str, Any]) -> None:
    def update(direction: Any, state: Any, context: Context) -> Any:
        return direction, what[1](next(iter(direction.values())).flatten(1)[:, 0])

    init = lambda params: what[1](next(iter(params.values())).flatten(1)[:, 0])  # noqa: E731
    chain = fedmuon.Chain((links.gradient(), fedmuon.Link("odd", init, update), links.descend(1.0)))
    made = fedmuon.Recipe(chain, lambda old, mean, states: (mean, states), returned=("odd",))
    found = ran(made, "inline")
    assert isinstance(found, str) and "the state 'odd'" in found, found


def test_a_kept_state_needs_its_shapes_from_the_start() -> None:
    found = ran(recipe({"norm": (1,)}, kept=True, late=True), "inline")
    assert isinstance(found, str) and "final names, shapes and dtypes in `init`" in found


@pytest.mark.slow
def test_ray_and_flower_agree_with_inline() -> None:
    """A returned state that begins empty, and beside it a stored state of two tensors."""
    made = recipe({"norm": (1,)}, late=True)
    first, *others = made.chain.links
    stored = measured({"a": (1,), "b": (3, 2)}, name="stored")
    made = replace(made, chain=fedmuon.Chain((first, stored, *others)), sent=("stored",),
                   returned=("measured", "stored"), kept=("stored",))  # fmt: skip
    assert ran(made, "ray") == ran(made, "inline")


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ODD, ids=str)
def test_all_engines_agree_for_all_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    for kept, late in ((False, False), (False, True), (True, False)):
        made = recipe(shapes, kept, late)
        found = ran(made, "inline")
        assert isinstance(found, float) and ran(made, "ray") == found


# What links, rules and aggregators are told


def test_links_and_rules_can_ask_for_their_sample_count() -> None:
    """FedAvg by weighted steps: a client multiplies its change by n_i, the server divides."""
    seen: list[Any] = []

    def update(direction: Any, state: Any, context: Context) -> Any:
        if not fedmuon.in_trial():
            seen.append(context.samples)
        return direction, state

    def client(received: Any, params: Any, states: Any, steps: int, samples: Tensor) -> Any:
        weight = {n: samples.view(-1, *[1] * (one.ndim - 1)) for n, one in params.items()}
        moved = {n: received[n] + weight[n] * (one - received[n]) for n, one in params.items()}
        return moved, states | {"count": {"n": samples[:, None].clone()}}

    def server(old: Any, mean: Any, states: Any) -> Any:
        count = states["count"]["n"][:, 0]
        return {n: one + (mean[n] - one) / count.view(-1, *[1] * (one.ndim - 1))
                for n, one in old.items()}, {}  # fmt: skip

    asking = fedmuon.Link("asking", lambda params: {}, update, knows_samples=True)
    deaf = fedmuon.Link("deaf", lambda params: {}, update)
    chain = fedmuon.Chain((links.gradient(), asking, deaf, links.descend(1.0)))
    made = fedmuon.Recipe(chain, server, returned=("count",), client=client)
    found = ran(made, "inline")
    assert any(one is not None and (one > 2).all() for one in seen) and None in seen

    plain = fedmuon.Recipe(fedmuon.Chain((links.gradient(), links.descend(1.0))),
                           lambda old, mean, states: (mean, states),
                           aggregate=fedmuon.aggregators.by_samples())  # fmt: skip
    assert found == pytest.approx(ran(plain, "inline"), rel=1e-12)
    equal = fedmuon.Recipe(plain.chain, plain.server)  # the control: 1/K
    assert found != pytest.approx(ran(equal, "inline"), rel=1e-9)


def test_an_aggregator_is_told_which_state_it_combines() -> None:
    told: set[str] = set()

    def apply(replies: Any) -> Any:
        if not fedmuon.in_trial():
            told.update(one.part for one in replies)
        return {name: sum(one.params[name] for one in replies) / len(replies)
                for name in replies[0].params}  # fmt: skip

    made = recipe({"norm": (1,)})
    made = fedmuon.Recipe(made.chain, made.server, returned=made.returned,
                          aggregate=fedmuon.Aggregator(apply))  # fmt: skip
    assert isinstance(ran(made, "inline"), float)
    assert told == {"model", "measured"}


def test_trial_calls_can_be_recognized() -> None:
    calls = {True: 0, False: 0}

    def update(direction: Any, state: Any, context: Context) -> Any:
        calls[fedmuon.in_trial()] += 1
        return direction, state

    link = fedmuon.Link("counting", lambda params: {}, update)
    chain = fedmuon.Chain((links.gradient(), link, links.descend(1.0)))
    ran(fedmuon.Recipe(chain, lambda old, mean, states: (mean, states)), "inline")
    assert calls[True] > 0 and 4 <= calls[False] <= 8  # 2 rounds, 2 steps, 2 clients in batches
    assert not fedmuon.in_trial()
