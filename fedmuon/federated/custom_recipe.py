"""Build the user's recipe or orthogonalizer, and try recipes that are not built in."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from fedmuon.config.demands import private_recipe_problems
from fedmuon.config.incompatible import missing_noise
from fedmuon.config.load import Config
from fedmuon.config.methods import METHODS, function_of
from fedmuon.config.registered import guard_of, packages_of, unusable
from fedmuon.config.schema import NEEDS, is_default, unread_by_own_recipe
from fedmuon.config.user_objects import guard, make_named, user_objects
from fedmuon.core.errors import InputError, OwnError
from fedmuon.core.registry import required_parameters, takes
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import value_of
from fedmuon.federated.model_routes import matrix_counts, routed, routing_of
from fedmuon.federated.trial_recipe import Initial, trial_steps, tried_recipe
from fedmuon.optim.chain import Chain
from fedmuon.optim.orthogonalizers import (
    Orthogonalizer,
    as_map,
    as_orthogonalizer,
    value_of_table,
)
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import make_recipe
from fedmuon.optim.user_recipe import as_recipe
from fedmuon.tasks.base import Task, split_statistics
from fedmuon.tasks.networks import NetworkTask


@lru_cache(maxsize=4)
def custom_recipe(config: Config, task: Task) -> Recipe:
    """Build the user's recipe and run a trial round. The result is cached for all clients."""
    user_recipe, local = user_objects(config).recipe, config.local
    facts: dict[str, Any] = {"task": task} | _map_for(config, user_recipe)
    if isinstance(task, NetworkTask) and "routes" in takes(user_recipe, {"routes": 0}):
        facts["routes"] = matrix_counts(task.module, *routing_of(config))
    created = make_named(config, "recipe", None, (Recipe, Chain, tuple, list), facts)
    within = guard(config, "recipe")
    recipe = as_recipe(created, within)
    private = recipe.mechanism is not None
    problems = [
        *unread_by_own_recipe(config, private),
        *(private_recipe_problems(config) if private else missing_noise(config)),
    ]
    if problems:
        raise InputError(problems[0])
    start, _ = split_statistics(task.initial(generator(0, Draw.INITIAL)))
    with within:
        tested = not private and not recipe.scaled  # the trial shows whether a link uses the factor
        if tested and not is_default("local.schedule", local.schedule):
            full, half = (trial_steps(recipe.chain, start, (0,), factor) for factor in (1.0, 0.5))
            if all(torch.equal(full[name], half[name]) for name in start):
                raise InputError(
                    f"[local] schedule = '{local.schedule}' has no effect, because your optimizer "
                    "never uses `context.factor`. Make links.descend(lr) the last link of your "
                    "chain, or leave schedule out."
                )
        if recipe.steps and recipe.steps != local.steps:
            raise InputError(
                f"[local] steps = {local.steps}, but your recipe was created with "
                f"steps={recipe.steps}. Create the recipe with steps={local.steps}, or set steps "
                f"= {recipe.steps}."
            )
        if recipe.clients and recipe.clients != config.federation.clients:
            raise InputError(
                f"[federation] clients = {config.federation.clients}, but your recipe was "
                f"created with clients={recipe.clients}. Create the recipe with "
                f"clients={config.federation.clients}, or set clients = {recipe.clients}."
            )
        fixed = tried_recipe(recipe, start, task.stack_limit)
    return replace(recipe, initial={**recipe.initial, **fixed}) if fixed else recipe


@lru_cache(maxsize=4)
def tried_registered(config: Config, task: Task) -> Initial:
    """Run trial rounds of a method that another package registers.

    The result is cached for all clients.
    """
    method, local = METHODS[config.local.recipe], config.local
    recipe = make_recipe(
        local,
        config.orthogonalizer,
        routed=routed(config, task),
        custom_map=user_map(config),
        clients=config.federation.clients,
    )
    if recipe.mechanism is not None:
        (package,) = packages_of(method.name)
        raise unusable(package, method.name, f"{method.make} returns a recipe with a mechanism")
    start, _ = split_statistics(task.initial(generator(0, Draw.INITIAL)))
    within = guard_of(method, function_of(method))
    try:
        with within:
            return tried_recipe(recipe, start, task.stack_limit)
    except OwnError:
        raise
    except InputError as error:
        raise InputError(f"{within.named} cannot be used: {error}") from error


def _map_for(config: Config, user_recipe: Any) -> dict[str, Orthogonalizer]:
    """Return the argument `orthogonalizer` for a custom recipe that has this parameter.

    The argument is the custom orthogonalizer, or the built-in orthogonalizer that the config names.
    If no key of [orthogonalizer] is set, a default in the recipe's signature is used. Raise an
    error if [orthogonalizer] is set but the recipe has no such parameter.
    """
    table, keys = config.orthogonalizer, []
    for name in NEEDS["orthogonalizer"]:
        value = value_of(config, f"orthogonalizer.{name}")
        if not is_default(f"orthogonalizer.{name}", value):
            keys.append(name)
    if not takes(user_recipe, {"orthogonalizer": 0}):
        for name in keys:
            raise InputError(
                f"[orthogonalizer] {name} has no effect, because your recipe has no parameter "
                f"`orthogonalizer`. Add that parameter, or leave {name} out."
            )
        return {}
    if (brought := make_named(config, "orthogonalizer", values=(Orthogonalizer,))) is not None:
        with guard(config, "orthogonalizer"):
            return {"orthogonalizer": as_map(brought)}
    needed = keys or "orthogonalizer" in required_parameters(user_recipe)
    return {"orthogonalizer": value_of_table(table)} if needed else {}


def user_map(config: Config) -> Orthogonalizer | None:
    """Return the custom orthogonalizer, or None if the orthogonalizer is built in."""
    custom = make_named(config, "orthogonalizer", values=(Orthogonalizer,))
    return None if custom is None else as_orthogonalizer(custom, guard(config, "orthogonalizer"))
