"""Chains that train other variables than the parameters of the model.

The links of such a chain see a model that consists of the variables only: their context contains
the variables' values, and returns gradients with respect to them. A last link converts the step of
the variables to a step of the model.
"""

from dataclasses import replace

from torch import Tensor

from fedmuon.optim.chain import Chain, Context, Link, State, stateless
from fedmuon.optim.recipe import Recipe
from fedmuon.tasks.base import Params, Points, Released
from fedmuon.tasks.per_example.variables import TrainedSpace


def with_space(recipe: Recipe, space: TrainedSpace, name: str) -> Recipe:
    """Return the recipe, whose links train the variables of a space.

    A private recipe clips and adds noise to the gradients of the variables. Its mechanism receives
    the space, so that the account counts the blocks that are released.

    Args:
        recipe: The recipe.
        space: The variables.
        name: Name of the last link.
    """

    def embedded(direction: Params, context: Context) -> Params:
        return space.step(context.params, direction, context.round)

    inner = (within(link, space) for link in recipe.chain.links)
    mechanism = recipe.mechanism
    if mechanism is not None:
        mechanism = replace(mechanism, space=space)
    return replace(recipe, chain=Chain((*inner, stateless(name, embedded))), mechanism=mechanism)


def within(link: Link, space: TrainedSpace) -> Link:
    """Return a link that sees the variables of a round instead of the model."""

    def init(params: Params) -> State:
        return link.init(space.active(params, 0))

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return link.update(direction, state, _inner_context(context, space))

    return replace(link, init=init, update=update)


def _inner_context(context: Context, space: TrainedSpace) -> Context:
    round = context.round

    def whole(at: Params) -> Params:
        return space.with_active(context.params, at, round)

    def gradient(at: Params) -> tuple[Tensor, Params]:
        loss, slope = context.gradient(whole(at))
        return loss, space.slope(context.params, slope, round)

    def released(points: Points, *bounds: Tensor) -> Released:
        return context.released([(c, whole(at)) for c, at in points], *bounds)

    return replace(
        context,
        params=space.active(context.params, round),
        received=space.active(context.received, round) if context.received else {},
        gradient=gradient,
        released=released,
    )
