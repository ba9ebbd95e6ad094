"""Custom recipes: convert a chain or a list of links to a recipe, and name it in errors."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedmuon.core.errors import Guard, InputError, mapping
from fedmuon.core.registry import unfit
from fedmuon.optim.aggregators import as_aggregator
from fedmuon.optim.chain import Chain, Context, Link, States
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.server_rules import replace_by_mean
from fedmuon.optim.user_stage import as_stages
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Params
from fedmuon.tasks.per_example.clipping import Clipping


def centralized(*links: Link) -> Recipe:
    """Return a recipe for centralized training with these links.

    With several clients, the server averages their models and all states that last between rounds.
    """
    chain = Chain(links)
    lasting = tuple(link.name for link in chain.links if link.lasting)
    return Recipe(chain, replace_by_mean, lasting, lasting, lasting)


def as_recipe(found: Any, guard: Guard | None = None) -> Recipe:
    """Convert a chain or a sequence of links to a recipe, or check a custom recipe.

    Args:
        found: A `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of links.
        guard: A guard, whose object is named in errors of the recipe's functions.

    Returns:
        The recipe. A chain becomes a centralized optimizer (`centralized`).

    Raises:
        InputError: If the object is not a recipe, a chain or a sequence of links.

    Example:
        >>> from fedmuon import links, recipes
        >>> made = recipes.as_recipe([links.gradient(), links.momentum(0.9), links.descend(0.1)])
        >>> made.kept
        ('momentum',)
    """
    if guard is not None:
        with guard:
            return _guard_recipe(_converted(found, guard.named), guard)
    return _converted(found)


def _converted(value: Any, key: str = "") -> Recipe:
    """Convert an object to a recipe. `named` is the key of the config that names the object."""
    if isinstance(value, Recipe):
        if value.mechanism is not None:
            for part, kind in ((value.mechanism, Mechanism), (value.mechanism.clipping, Clipping)):
                if type(part) is not kind:
                    raise InputError(
                        f"the recipe uses the class {type(part).__name__}, which may release data "
                        "that no privacy account counts. Private recipes accept only fedmuon's "
                        f"own class {kind.__name__}. Use {kind.__name__}."
                    )
        return value
    links = value.links if isinstance(value, Chain) else value
    if isinstance(links, tuple | list) and links and all(isinstance(link, Link) for link in links):
        return centralized(*links)
    raise unfit(
        value,
        "recipe",
        "a fedmuon.Recipe (from fedmuon.recipes, for example), a fedmuon.Chain or a list of "
        "links (from fedmuon.links); a torch optimizer is not a recipe",
        key,
    )


@dataclass(frozen=True)
class _Chain(Chain):
    """A custom chain, whose errors name the custom object."""

    guard: Guard = field(default_factory=lambda: Guard("recipe"))

    def init(self, params: Params, given: States) -> States:
        with self.guard:
            return super().init(params, given)

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        with self.guard:
            return super().step(params, states, context)


def _guard_recipe(recipe: Recipe, guard: Guard) -> Recipe:
    """Return the recipe with functions whose errors name the custom object."""

    def within(link: Link, part: str, read: Callable[[Any], Any]) -> Any:
        function = getattr(link, part)
        error_guard = guard.part(f"{part} of the link {link.name}", function)
        return None if function is None else error_guard.calling(function, read)

    links = [
        dataclasses.replace(
            link,
            init=within(link, "init", mapping),
            update=within(link, "update", _pair_of_mappings),
            averaged=within(link, "averaged", mapping),
        )
        for link in recipe.chain.links
    ]
    server, aggregate = guard.part("server rule", recipe.server), recipe.aggregate
    client = recipe.client
    if client is not None:
        client = guard.part("client rule", client).calling(client, _pair_of_mappings)
    return dataclasses.replace(
        recipe,
        client=client,
        chain=_Chain(tuple(links), guard),
        server=server.calling(recipe.server, _pair_of_mappings),
        stages=tuple(
            guarded
            for stage in recipe.stages
            for guarded in as_stages(stage, guard.part("stage", stage))
        ),
        aggregate=as_aggregator(aggregate, guard.part("aggregate", aggregate.apply)),
    )


def _pair_of_mappings(result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two mappings in the result of a custom function as two dictionaries."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"the function returns a {type(result).__name__}, but a pair of mappings is required"
        )
    return mapping(result[0]), mapping(result[1])
