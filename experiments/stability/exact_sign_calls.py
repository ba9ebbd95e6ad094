"""A run of the matrix task made again, and looked at wherever it orthogonalizes."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor

from fedmuon.federated.rounds import Experiment, begin, simulate
from fedmuon.optim.chain import Chain, Context, Link, State
from fedmuon.tasks.base import Params

Found = TypeVar("Found")
Look = Callable[[int, Tensor, Tensor], Found]  # at a client, its model and its momentum [d, c]


def looked_at(experiment: Experiment, look: Look[Found]) -> list[list[list[Found]]]:
    """What there is to see at all calls [R, E, K], cohorts in the schedule's order."""
    recipe, plan = experiment.recipe, experiment.plan
    found: dict[tuple[int, int, int], Found] = {}
    links = [_watched(link, look, found) for link in recipe.chain.links]
    watched = dataclasses.replace(recipe, chain=Chain(tuple(links)))
    start = begin(recipe, experiment.task, plan.seed)
    simulate(dataclasses.replace(experiment, recipe=watched), start)
    return [
        [[found[r, k, int(i)] for i in cohort] for k in range(plan.steps)]
        for r, cohort in enumerate(plan.schedule())
    ]


def _watched(link: Link, look: Look[Found], found: dict[tuple[int, int, int], Found]) -> Link:
    """The link, looking at what comes before it if it orthogonalizes."""
    if link.name != "orthogonalize":
        return link

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        each = zip(context.draws, context.params["weight"], direction["weight"], strict=True)
        for draw, model, momentum in each:
            assert isinstance(draw, partial)
            _, round, client, step = draw.args
            found[round, step, client] = look(client, model, momentum)
        return link.update(direction, state, context)

    return dataclasses.replace(link, update=update)
