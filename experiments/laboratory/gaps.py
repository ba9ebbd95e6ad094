"""How far the momenta of a run keep from where the exact sign jumps: for the tube of Lemma D.12.

The rows of a softmax's gradients sum to 0, hence those of the momentum M [d, c] do; in the quotient
by the ones vector it has q = min(d, c - 1) singular values, which are the q largest of M.
"""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedmuon.experiments.laboratory.measure import Laboratory
from fedmuon.federated.aggregate import begin
from fedmuon.federated.simulate import simulate
from fedmuon.own import Own
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Chain, Context, Link, State

Gaps = dict[tuple[int, int, int], float]  # (round, local step, client) -> s_q


def smallest(folder: Path, given: Own) -> np.ndarray:
    """s_q(M) at all calls [R, E, K] of the run of the matrix task in the folder, which is made
    again; what rounding may have added, max(d, c) eps s_1, is taken off."""
    experiment = Laboratory.open(folder, given).experiment
    recipe, plan, found = experiment.recipe, experiment.plan, Gaps()
    links = [_watched(link, found) for link in recipe.chain.links]
    watched = dataclasses.replace(recipe, chain=Chain(tuple(links)))
    start = begin(recipe, experiment.task, plan.seed)
    simulate(dataclasses.replace(experiment, recipe=watched), start)
    calls = [
        [[found[r, k, int(i)] for i in cohort] for k in range(plan.steps)]
        for r, cohort in enumerate(plan.schedule())
    ]
    return np.array(calls)


def _watched(link: Link, found: Gaps) -> Link:
    """The link, writing down what comes before it if it orthogonalizes."""
    if link.name != "orthogonalize":
        return link

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        for draw, gap in zip(context.draws, _gaps(direction), strict=True):
            assert isinstance(draw, partial)
            _, round, client, step = draw.args
            found[round, step, client] = gap
        return link.update(direction, state, context)

    return dataclasses.replace(link, update=update)


def _gaps(direction: Params) -> list[float]:
    matrix = direction["weight"]
    d, c = matrix.shape[-2:]
    s = torch.linalg.svdvals(matrix.double())
    floor = s[:, min(d, c - 1) - 1] - max(d, c) * torch.finfo(matrix.dtype).eps * s[:, 0]
    return floor.clamp_min(0).tolist()
