"""The defences of [robust] as stages of a recipe."""

import math
from collections.abc import Callable
from dataclasses import replace

from fedmuon.config.load import Config
from fedmuon.config.schema import reads
from fedmuon.core.rng import Draw, generator
from fedmuon.federated.honest_ball import matrix_radius, state_radius
from fedmuon.federated.model_routes import routed
from fedmuon.federated.schedule import schedule_of
from fedmuon.optim.ball import Ball
from fedmuon.optim.links import ADJUSTMENTS
from fedmuon.optim.mixing import Mixing
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.stage import Stage
from fedmuon.tasks.base import Task, is_statistic


def with_defences(config: Config, recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe with the stages of [robust] before all other stages.

    `Stage.read` of the first stage runs last. So the server first clips and then mixes, just before
    it aggregates.
    """
    table, stages = config.robust, list[Stage]()
    if table.mixing:
        stages.append(Mixing(table.mixing))
    if table.ball != "none":
        stages.append(ball_of(config, recipe, task))
    return replace(recipe, stages=(*stages, *recipe.stages)) if stages else recipe


def ball_of(config: Config, recipe: Recipe, task: Task) -> Ball:
    """Return the stage that clips the change of each client.

    Raise an error if the radius is not set, and no radius follows from the optimizer.
    """
    table, routes = config.robust, routed(config, task) or {}
    params = task.initial(generator(0, Draw.INITIAL))
    shapes = {
        name: tuple(value.shape[1:]) for name, value in params.items() if not is_statistic(name)
    }
    orthogonalized = reads(config, "orthogonalizer.name")
    inside = {name: shape for name, shape in shapes.items() if routes.get(name, 1)}
    factor = None
    if table.radius:
        radii = dict.fromkeys(inside if orthogonalized else shapes, table.radius)
        joint = table.radius
    else:
        radii = {
            name: matrix_radius(config, shape, routes.get(name, 1), _scale(config))
            for name, shape in inside.items()
        }
        joint = math.sqrt(sum(radius**2 for radius in radii.values()))
        factor = schedule_of(config)
    return Ball(
        tuple(radii.items()),
        joint if table.ball == "model" else 0.0,
        table.aux_radius if reads(config, "robust.aux-radius") else 0.0,
        state_radius(config),
        factor,
        recipe.direction,
    )


def _scale(config: Config) -> Callable[[int, int], float]:
    """Return the scale s(m, n) of an orthogonalized step."""
    return ADJUSTMENTS[config.local.adjust]
