"""Study `disk-stationarity`: the mean squared gradient under DiSK beside 003's bounds.

F(x) is the mean of log(1 + (a'x - y)^2)/2 over the samples, |a| <= 1: not convex. The curvature of
log(1 + u^2)/2 lies in [-1/8, 1] and its slope in [-1/2, 1/2], so L = 1, a gradient's variance is at
most 1/4, and D <= F(x_0). Batches are drawn with replacement; noise and batch of a seed and step
are the same for all filters.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.theory import disk_stationarity as theorem
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.chain import Chain, Link
from fedmuon.optim.gradients import filtered
from fedmuon.optim.steps import descend
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

SEED, SIGMA, SMOOTHNESS = 0, 0.5, 1.0


class Settings(Table):
    """What the suite's file holds; `level` and `horizons` are those of Corollary 4."""

    reaches: Annotated[list[float], Field(min_length=1)]
    gains: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)]
    lrs: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)]
    noises: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
    batches: Annotated[list[Natural], Field(min_length=1)]
    steps: Count
    horizons: Annotated[list[Count], Field(min_length=1)]
    level: Positive
    seeds: Annotated[int, Field(ge=2)]
    samples: Count
    features: Count
    outliers: Annotated[float, Field(ge=0, le=1)]  # their share


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each reach and gain, and one for each horizon of Corollary 4."""
    grid = [
        Call(f"disk-{reach:g}-{gain:g}", partial(measured, settings, reach, gain), settings.steps)
        for reach, gain in itertools.product(settings.reaches, settings.gains)
    ]
    return grid + [
        Call(f"corollary-{steps}", partial(tuned, settings, steps), steps)
        for steps in settings.horizons
    ]


@dataclass(frozen=True)
class Robust:
    """The problem: inputs [n, d] in the unit ball, labels [n]."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, asked: Settings) -> "Robust":
        """A linear truth with noise, and outliers far away."""
        rng = generator(SEED, Draw.SYNTHETIC)
        inputs = rng.standard_normal((asked.samples, asked.features))
        inputs /= np.maximum(1, np.linalg.norm(inputs, axis=1, keepdims=True))
        labels = inputs @ rng.standard_normal(asked.features)
        labels += 0.1 * rng.standard_normal(asked.samples)
        labels += 5 * (rng.random(asked.samples) < asked.outliers)
        return cls(torch.from_numpy(inputs), torch.from_numpy(labels))

    def value(self, at: Tensor) -> Tensor:
        """F [S] at x [S, d]."""
        return torch.log1p((at @ self.inputs.mT - self.labels).square()).mean(1) / 2

    def gradient(self, at: Tensor, weights: Tensor | None = None) -> Tensor:
        """The gradient [S, d] of the mean, or with weights [S, n] that sum to 1."""
        off = at @ self.inputs.mT - self.labels
        share = 1 / len(self.labels) if weights is None else weights
        return (off / (1 + off.square()) * share) @ self.inputs


def measured(asked: Settings, reach: float, gain: float) -> Record:
    """A row for each step size, noise, batch and seed, from the start of Algorithm 2."""
    rows = []
    for noise, batch in itertools.product(asked.noises, asked.batches):
        spread = asked.features * noise**2
        runs = [
            theorem.Disk(lr, asked.steps, gain, reach, SIGMA if batch else 0.0,
                         batch or math.inf, spread)
            for lr in asked.lrs
        ]  # fmt: skip
        rows += _rows(asked, runs, noise, "first", reach=reach, corollary=0, ceiling=math.nan)
    return {"rows": rows}


def tuned(asked: Settings, steps: int) -> Record:
    """A row for each seed: Corollary 4's run, from the start of its proof, full batches."""
    problem, noise = Robust.of(asked), asked.level
    gap, slope = _start(problem)
    best = theorem.corollary_4(steps, gap, SMOOTHNESS, slope, asked.features * noise**2)
    told = {"reach": -1.0, "corollary": 1, "ceiling": best.value}
    return {"rows": _rows(asked, [best.run], noise, "zero", **told)}


def _start(problem: Robust) -> tuple[float, float]:
    """F(0), which is at least D, and |grad F(0)|."""
    origin = torch.zeros((1, problem.inputs.shape[1]), dtype=torch.float64)
    return float(problem.value(origin)), float(problem.gradient(origin).norm())


def _rows(
    asked: Settings, runs: Sequence[theorem.Disk], noise: float, start: theorem.Start, **told: float
) -> list[Record]:
    """Rows of runs that differ in the step size, which are one stack with their seeds."""
    problem, one = Robust.of(asked), runs[0]
    gap, slope = _start(problem)
    lr = torch.tensor([run.lr for run in runs], dtype=torch.float64).repeat_interleave(asked.seeds)
    batch = 0 if math.isinf(one.batch) else int(one.batch)
    path = trajectory(asked, problem, one, lr, noise, batch, start)
    means = path.view(len(runs), asked.seeds)
    rows = []
    for run, sizes in zip(runs, means.tolist(), strict=True):
        shared = told | {
            "gain": run.gain,
            "lr": run.lr,
            "noise": noise,
            "batch": batch,
            "steps": run.steps,
            "bound": _bound(run, gap, slope, start),
            "zero_bound": _bound(run, gap, slope, "zero"),
            "printed": theorem.printed_theorem_3(run, gap, SMOOTHNESS, slope)
            if run.reach == -1
            else math.nan,
        }
        rows += [shared | {"seed": seed, "mean_square": size} for seed, size in enumerate(sizes)]
    return rows


def _bound(run: theorem.Disk, gap: float, slope: float, start: theorem.Start) -> float:
    """nan where the filter is too slow for the bound."""
    try:
        return theorem.disk(run, gap, SMOOTHNESS, slope, start).value
    except InputError:
        return math.nan


def trajectory(
    asked: Settings, problem: Robust, run: theorem.Disk, lr: Tensor, noise: float, batch: int,
    start: theorem.Start,
) -> Tensor:  # fmt: skip
    """(1/T) sum_t |grad F(x_t)|^2 [S] from x_0 = 0, a replica for each entry of lr [S]."""
    first = filtered(run.gain, run.reach)
    chain = Chain((_from_zero(first) if start == "zero" else first, descend(lr)))
    copies = len(lr) // asked.seeds

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        rng = generator(SEED, Draw.BATCH, step=step)
        shift = noise * torch.from_numpy(rng.standard_normal((asked.seeds, asked.features)))
        weights = None
        if batch:
            drawn = rng.integers(len(problem.labels), size=(asked.seeds, batch))
            weights = torch.zeros((asked.seeds, len(problem.labels)), dtype=torch.float64)
            ones = torch.full(drawn.shape, 1 / batch, dtype=torch.float64)
            weights.scatter_add_(1, torch.from_numpy(drawn), ones)
            weights = weights.repeat(copies, 1)
        slope = problem.gradient(params["x"], weights) + shift.repeat(copies, 1)
        return slope.new_zeros(len(slope)), {"x": slope}

    params = {"x": torch.zeros((len(lr), asked.features), dtype=torch.float64)}
    total = torch.zeros(len(lr), dtype=torch.float64)
    for step, now in walk(chain, params, oracle, run.steps, partial(generator, SEED)):
        if step < run.steps:
            total += problem.gradient(now["x"]).square().sum(1)
    return total / run.steps


def _from_zero(link: Link) -> Link:
    """The filter with g~_{-1} = 0, as in 003's proof: as if a step had led nowhere."""

    def init(params: Params) -> dict[str, Tensor]:
        state = link.init(params)
        return state | {"steps": torch.ones_like(state["steps"])}

    return replace(link, init=init)
