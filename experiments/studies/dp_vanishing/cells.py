"""Study `dp-vanishing`: 000's Corollary B.6 where clipping does cut, at every horizon.

The problem is that of `dp-stationarity`, but each person has a slope c_i of their own, Pareto
quantiles with index 2.5: the second moment of gradients is at most G_2^2 = mean c_i^2 wherever W
is, and no larger moment stays bounded as people become more. Each f_i is 1-smooth whatever c_i.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.theory import private_rates as rates
from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.config.schema import Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies.dp_stationarity import cells as bounded
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked
from fedmuon.runs.directory import Record


class Settings(bounded.People):
    """What the suite's file holds."""

    noises: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
    least: Positive
    tail: Annotated[float, Field(gt=2)]


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each noise and horizon."""
    every = itertools.product(settings.noises, settings.steps)
    return [
        Call(f"{noise:g}-{steps}", partial(measured, settings, noise, steps), steps)
        for noise, steps in every
    ]


def slopes(asked: Settings) -> Tensor:
    """c_i [N]: the least times (1 - u)^(-1/a) at N evenly spread u, in random order."""
    rest = (np.arange(asked.people) + 0.5) / asked.people
    order = generator(bounded.SEED, Draw.PARTITION).permutation(asked.people)
    return torch.from_numpy(asked.least * rest[order] ** (-1 / asked.tail))


def measured(asked: Settings, noise: float, steps: int) -> Record:
    """A row for each seed: the mean nuclear norm, the bound with its terms, and K_T."""
    own, shape = slopes(asked), asked.shape
    given = asked.model_dump(exclude={"least", "tail"}) | {"slope": float(own.max()), "probes": 1}
    problem = bounded.Location(
        bounded.Location.of(bounded.Settings.model_construct(**given)).points, own
    )
    gap, short, moment = problem.gap(), min(shape), float(own.square().mean().sqrt())
    scale = math.sqrt(gap / short)
    first = rates.clip_scale(moment, theorem.Release(1.0, noise, asked.lot, shape))
    plan, clip = rates.second_moment(steps, scale, first)
    settings = bounded.Settings.model_construct(**given, clip=clip)
    excesses: list[float] = []
    path = bounded.trajectory(problem, settings, bounded.MUON, noise, plan)
    sizes, least, _ = bounded.watched(_cut(path, problem, clip, excesses), problem, plan)
    error, excess = max(0.0, 1 - least), rates.moment_excess(moment, clip)
    release = theorem.Release(clip, noise, asked.lot, shape, excess)
    bound = theorem.dp_muon(plan, release, gap, short, error)
    exact = theorem.dp_muon(plan, release, gap, short)
    shared = {
        "noise": noise,
        "steps": steps,
        "clip": clip,
        "bound": bound.value,
        **{f"term_{name}": term for name, term in bound.terms.items()},
        "exact": exact.value,  # for polar factors without error, of which K_T is
        "constant": rates.second_moment_rate(steps, release, moment, gap, short, scale),
        "ceiling": math.sqrt(short) * float(own.mean()),  # of any gradient's nuclear norm
        "polar_error": error,
        "excess": max(excesses),
        "excess_bound": excess,
    }
    return {
        "rows": [
            shared | {"seed": seed, "mean_nuclear": float(size)} for seed, size in enumerate(sizes)
        ]
    }


def _cut(
    path: Iterator[Tensor], problem: bounded.Location, clip: float, excesses: list[float]
) -> Iterator[Tensor]:
    """The same path; `excesses` gets the largest mean over people of (||G||_F - C)_+ of a step."""
    for now in path:
        squares = problem.squares(now.flatten(1))
        lengths = problem.weights(squares) * squares.sqrt()
        excesses.append(float((lengths - clip).clamp_min(0).mean(1).max()))
        yield now
