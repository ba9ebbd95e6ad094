"""A first round of the user's recipe on drawn tensors, before any of its samples are touched.

A trial proves nothing: it refuses what is seen to be wrong, and says what links, the server's rule
and an aggregate take and return.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.errors import InputError, plain
from fedmuon.federated.rounds import Reply
from fedmuon.optim.chain import Context, Link, State, States, forbidden_gradient
from fedmuon.optim.probe import drawn_for, same
from fedmuon.optim.recipe import Recipe, aggregate_state, initial_states
from fedmuon.privacy.mechanisms.gaussian import Released
from fedmuon.tasks.base import Params, Points

LINK = (
    "update(direction, state, context) returns (direction, state), and that of links.stateless, "
    "update(direction, context), a direction: mappings of names to tensors"
)
RULE = (
    "the server's rule takes (old, mean, states) and returns (model, states), mappings like old "
    "and states"
)


def require_round(recipe: Recipe, start: Params) -> None:
    """Refuse a recipe whose states nobody holds, or whose chain or rule cannot make a round from
    the parameters `start` [1, ...]."""
    _require_states(recipe)
    params, ended = _stepped(recipe, start)
    kept = initial_states(recipe, start)
    _require_rule(
        recipe, start, params, {**kept, **{name: ended[name] for name in recipe.returned}}
    )


def _require_states(recipe: Recipe) -> None:
    """Refuse states that come back from no link, or are sent by a server that has none."""
    links = [link.name for link in recipe.chain.links]
    for name in recipe.returned:
        if name not in links:
            raise InputError(
                f"the recipe returns the state {name!r}, which no link of its chain has: name some "
                f"of {', '.join(links)}, or leave it out"
            )
    for name in recipe.sent:
        if name not in recipe.kept:
            raise InputError(
                f"the recipe sends the state {name!r}, which its server does not keep: name it in "
                "kept, too"
            )


def _stepped(recipe: Recipe, start: Params) -> tuple[Params, States]:
    """The parameters after two local steps, and the links' states."""
    states = {
        link.name: _tried(link, "init", LINK, link.init, start) for link in recipe.chain.links
    }
    params = start
    for step in range(2):
        context, direction = _context(recipe, params, step), {}
        for link in recipe.chain.links:
            direction, states[link.name] = _updated(link, direction, states[link.name], context)
        if lost := [name for name in params if name not in direction]:
            raise InputError(
                f"the chain ends without a direction for {lost[0]}: begin it with links.gradient()"
            )
        params = {name: value + direction[name] for name, value in params.items()}
    return params, states


def _context(recipe: Recipe, params: Params, step: int) -> Context:
    """What links may see of the squared distance to drawn parameters, released or not."""

    def gradient(at: Params) -> tuple[Tensor, Params]:
        slope = {name: value - one for (name, value), one in zip(at.items(), centre, strict=True)}
        first = next(iter(slope.values()))
        return first.new_zeros(len(first)), slope

    def released(points: Points, bounds: Tensor | None = None) -> Released:
        kept = None if bounds is None else torch.full_like(bounds, 0.5)
        return Released(gradient(points[-1][1])[1], kept)

    centre = list(_drawn(params, 0).values())
    draws = [partial(drawn_for, 0, step=step)]
    if recipe.mechanism is None:
        return Context(params, gradient, draws)
    return Context(params, forbidden_gradient, draws, released)


def _updated(link: Link, direction: Params, state: State, context: Context) -> tuple[Params, State]:
    """What a link makes of its direction and state, which it must leave as they are."""
    given = (direction, state, context.params)
    before = [_copied(one) for one in given]
    found = _tried(link, "update", LINK, link.update, direction, state, context)
    if not _are_mappings(found):
        raise InputError(f"the link {link.name} returns a {type(found).__name__} where {LINK}")
    if lost := [name for name in before[0] if name not in found[0]]:
        raise InputError(
            f"the link {link.name} drops the direction of {lost[0]}: return one for each parameter"
        )
    for held, one in zip(before, given, strict=True):
        if any(not same(value, one.get(name)) for name, value in held.items()):
            raise InputError(
                f"the link {link.name} writes into what it is given, which other links hold, too: "
                "return new tensors"
            )
    return found


def _tried(link: Link, part: str, mend: str, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except InputError:
        raise
    except Exception as error:  # whatever the user's function does
        raise InputError(
            f"{part} of the link {link.name} ends in {_said(error)}: {mend}"
        ) from error


def _require_rule(recipe: Recipe, old: Params, mean: Params, states: States) -> None:
    """Refuse a server's rule that does not give the next model and the states that are kept."""
    rule = partial(recipe.server, factor=1.0) if recipe.scaled else recipe.server
    try:
        found: Any = rule(old, mean, states)
    except InputError:
        raise
    except Exception as error:  # whatever the user's function does
        raise InputError(f"the server's rule ends in {_said(error)}: {RULE}") from error
    if not _are_mappings(found):
        raise InputError(f"the server's rule returns a {type(found).__name__}: {RULE}")
    params, after = found
    for name, value in old.items():
        if getattr(params.get(name), "shape", None) != value.shape:
            raise InputError(
                f"the server's rule returns no tensor like {name} of the model: {RULE}"
            )
    if lost := [name for name in recipe.kept if name not in after]:
        raise InputError(f"the server's rule returns no state {lost[0]}, which is kept: {RULE}")


def require_memoryless(recipe: Recipe, start: Params, count: int) -> None:
    """Refuse an aggregate that makes another model of the same `count` replies after others."""

    state = initial_states(recipe, start).get(aggregate_state())

    def made(seed: int) -> Params:
        replies = [_reply(recipe, start, count * seed + k, k) for k in range(count)]
        if state is None:
            return recipe.aggregate.combine(replies)[0]
        found, after = recipe.aggregate.combine(replies, _copied(state))
        return found | {f"its state {name}": value for name, value in after.items()}

    first, _, again = made(0), made(1), made(0)
    if any(not same(value, again[name]) for name, value in first.items()):
        raise InputError(
            "the aggregate makes another model of the same replies at each call, so a resumed run "
            "would differ: let it draw nothing, and declare what it keeps as a state, "
            "fedmuon.Aggregator(apply, init=init) with init(params) -> state and apply(replies, "
            "state) -> (params, state), or keep it in a state of the recipe, which its server's "
            "rule changes"
        )


def _reply(recipe: Recipe, start: Params, seed: int, client: int) -> Reply:
    params = _drawn(start, seed)
    states = {
        one.name: one.init(params) for one in recipe.chain.links if one.name in recipe.returned
    }
    first = next(iter(params.values()))
    return Reply(client, params, states, first.new_ones(len(first)), samples=client + 1)


def _drawn(like: Params, seed: int) -> Params:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=drawn).to(one) for name, one in like.items()}


def _copied(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}


def _are_mappings(found: Any) -> bool:
    pair = isinstance(found, tuple | list) and len(found) == 2
    return pair and all(isinstance(one, Mapping) for one in found)


def _said(error: Exception) -> str:
    return plain(f"{type(error).__name__}: {error}")
