"""Study `rank-dependence`: how the nuclear norm of the gradient grows with the rank (004, H.2).

The model is y = X x with X [r, n], the loss ||X x - y||^2 / (2 r), the mean over outputs that
networks are trained on. Then D_0 = f(0) - f* = 1/2 and L = 1, in the operator norm and its dual as
004 has them, whatever r is: what grows with r is the optimizer's doing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.chain import Chain
from fedmuon.optim.gradients import gradient
from fedmuon.optim.orthogonal import named, orthogonalize
from fedmuon.optim.steps import descend, momentum
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

MAPS = {
    "muon-svd": OrthogonalizerTable(name="exact-sign"),
    **{
        f"muon-ns-{q}": OrthogonalizerTable(name="newton-schulz", coefficients="quintic", steps=q)
        for q in (1, 2, 3)
    },
}
METHODS = ("sgd-m", *MAPS)


class Settings(Table):
    """What the suite's file holds; step sizes are the same for all ranks."""

    ranks: Annotated[list[Count], Field(min_length=2)]
    steps: Annotated[list[Count], Field(min_length=1)]  # the lengths over which means are taken
    seeds: Annotated[int, Field(ge=2)]
    inputs: Count
    batch: Count
    label_noise: Positive
    memory: Annotated[float, Field(ge=0, lt=1)]
    lr_sgd: Positive
    lr_muon: Positive


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each method and rank; all seeds are one stack."""
    return [
        Call(f"{method}-r{rank}", partial(measured, settings, method, rank), rank)
        for method in METHODS
        for rank in settings.ranks
    ]


def measured(asked: Settings, method: str, rank: int) -> Record:
    """A row for each length K and seed: the mean of ||grad f(X_k)||_* over k < K."""
    goal, longest = targets(rank, asked.inputs, asked.seeds), max(asked.steps)
    turned = [orthogonalize(named(MAPS[method]))] if method in MAPS else []
    rate = asked.lr_muon if method in MAPS else asked.lr_sgd
    chain = Chain((gradient(), momentum(asked.memory), *turned, descend(rate)))
    oracle = partial(_oracle, goal, asked.batch, asked.label_noise)
    path = walk(chain, {"X": torch.zeros_like(goal)}, oracle, longest, partial(generator, rank))
    sizes = torch.stack([nuclear(slope(now["X"], goal)) for step, now in path if step < longest])
    rows = []
    for length in asked.steps:
        head = {"method": method, "rank": rank, "steps": length}
        mean = sizes[:length].mean(0).tolist()
        rows += [head | {"seed": seed, "mean_nuclear": size} for seed, size in enumerate(mean)]
    return {"rows": rows}


def targets(rank: int, inputs: int, seeds: int) -> Tensor:
    """X* [S, r, n] with orthonormal rows: r directions of equal weight, in operator norm 1."""
    draws = generator(rank, Draw.SYNTHETIC).standard_normal((seeds, inputs, rank))
    return torch.from_numpy(np.linalg.qr(draws)[0]).mT.contiguous()


def slope(at: Tensor, goal: Tensor) -> Tensor:
    """grad f(X) = (X - X*) / r, as inputs are standard normal."""
    return (at - goal) / goal.shape[-2]


def _oracle(
    goal: Tensor, batch: int, label_noise: float, step: int, params: Params
) -> tuple[Tensor, Params]:
    """The loss [S] of a fresh mini-batch and its gradient."""
    seeds, rank, inputs = goal.shape
    rng = generator(rank, Draw.BATCH, step=step)
    x = torch.from_numpy(rng.standard_normal((seeds, inputs, batch)))
    noise = torch.from_numpy(rng.standard_normal((seeds, rank, batch))) * label_noise
    error = (params["X"] - goal) @ x - noise
    return error.square().sum(1).mean(1) / (2 * rank), {"X": error @ x.mT / (batch * rank)}


def nuclear(at: Tensor) -> Tensor:
    """||A||_* [S] of A [S, r, n], from the eigenvalues of the smaller Gram matrix."""
    return torch.linalg.eigvalsh(at @ at.mT).clamp_min(0).sqrt().sum(-1)
