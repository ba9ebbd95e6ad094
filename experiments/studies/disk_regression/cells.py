"""Study `disk-regression`: noisy gradient descent on a linear regression, plain, through a low-pass
filter, and through DiSK's Kalman filter (003, Figure 5a).

The gradient of the whole data is clipped nowhere, and Gaussian noise is added to it at every step.
One cell has one filter, and holds all step sizes, noise levels and seeds as one stack. A seed's
noise at a level is the same for all filters and step sizes; levels are independent of each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.config.schema import Count, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.chain import Chain, Link
from fedmuon.optim.gradients import filtered, released
from fedmuon.optim.steps import descend
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

SEED = 0
PLAIN, LOW_PASS, DISK = "noisy-gd", "low-pass", "disk"
Gain = Annotated[float, Field(gt=0, le=1)]


class Settings(Table):
    """What the suite's file holds; `gain` and `reach` are 003's kappa and gamma."""

    noises: Annotated[list[Positive], Field(min_length=2)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    gains: Annotated[list[Gain], Field(min_length=1)]
    reach: Positive
    shared_lr: Positive  # one of lrs, and of all methods under `as printed`
    shared_gain: Gain  # one of gains, likewise
    seeds: Annotated[int, Field(ge=2)]
    steps: Count
    samples: Count
    features: Count
    condition: Annotated[float, Field(ge=1)]  # of the inputs' second moments
    label_noise: Positive


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for plain descent, and one for each filter and gain."""
    if settings.shared_lr not in settings.lrs or settings.shared_gain not in settings.gains:
        raise InputError("shared-lr and shared-gain must be among lrs and gains: add them there")
    every = [(PLAIN, 1.0), *((name, gain) for name in (LOW_PASS, DISK) for gain in settings.gains)]
    return [
        Call(f"{name}-{gain:g}", partial(measured, settings, name, gain)) for name, gain in every
    ]


@dataclass(frozen=True)
class Regression:
    """F(x) = (x - x*)' H (x - x*) / 2 + F*, the mean of (a'x - y)^2 / 2 over the samples."""

    hessian: Tensor  # [d, d], largest eigenvalue 1
    best: Tensor  # [d, 1]
    floor: float

    def loss(self, at: Tensor) -> Tensor:
        """F [S] at x [S, d, 1]."""
        away = at - self.best
        return (away * (self.hessian @ away)).sum((1, 2)) / 2 + self.floor

    def gradient(self, at: Tensor) -> Tensor:
        """The gradient [S, d, 1]."""
        return self.hessian @ (at - self.best)


def regression(samples: int, features: int, condition: float, label_noise: float) -> Regression:
    """Synthetic data: a = D z with z standard normal, y = a'w + noise, scaled to be 1-smooth."""
    rng = generator(SEED, Draw.SYNTHETIC)
    scale = np.sqrt(np.geomspace(1, 1 / condition, features))
    inputs = rng.standard_normal((samples, features)) * scale
    truth = rng.standard_normal(features)
    labels = inputs @ truth + label_noise * rng.standard_normal(samples)
    top = np.linalg.norm(inputs, 2) / np.sqrt(samples)
    inputs, labels = inputs / top, labels / top
    best = np.linalg.lstsq(inputs, labels, rcond=None)[0]
    floor = float(np.square(inputs @ best - labels).mean() / 2)
    hessian = torch.from_numpy(inputs.T @ inputs / samples)
    return Regression(hessian, torch.from_numpy(best)[:, None], floor)


def measured(asked: Settings, method: str, gain: float) -> Record:
    """A row for each step size, noise level and seed: the loss of the last iterate, infinite if it
    diverged; `shared` marks the step size and gain that all methods have under `as printed`."""
    problem = regression(asked.samples, asked.features, asked.condition, asked.label_noise)
    shape = (len(asked.lrs), len(asked.noises), asked.seeds)
    lr = torch.tensor(asked.lrs, dtype=torch.float64)[:, None, None].expand(shape).flatten()
    chain = Chain((_filter(method, gain, asked.reach), descend(lr)))

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        """The gradient with this step's noise: the same at all points of a step."""
        shift = _noise(step, asked.noises, asked.seeds, asked.features).repeat(shape[0], 1, 1)
        return problem.loss(params["x"]), {"x": problem.gradient(params["x"]) + shift}

    params = {"x": torch.zeros((lr.numel(), asked.features, 1), dtype=torch.float64)}
    for _, now in walk(chain, params, oracle, asked.steps, partial(generator, SEED)):
        params = now
    losses = problem.loss(params["x"]).view(shape).nan_to_num(math.inf, math.inf)
    usual = gain == asked.shared_gain or method == PLAIN
    return {
        "rows": [
            {
                "method": method,
                "gain": gain,
                "lr": asked.lrs[i],
                "noise": asked.noises[j],
                "shared": int(usual and asked.lrs[i] == asked.shared_lr),
                "seed": seed,
                "loss": float(losses[i, j, seed]),
                "floor": problem.floor,
            }
            for i, j, seed in np.ndindex(shape)
        ]
    }


def _noise(step: int, noises: list[float], seeds: int, features: int) -> Tensor:
    """A step's noise [levels * seeds, d, 1]. Draws are keyed by level too: on a quadratic, shared
    ones would show a single comparison at every level, scaled."""
    sources = [generator(SEED, Draw.BATCH, step=step, block=level) for level in range(len(noises))]
    drawn = [rng.standard_normal((seeds, features, 1)) for rng in sources]
    return torch.cat(
        [noise * torch.from_numpy(one) for noise, one in zip(noises, drawn, strict=True)]
    )


def _filter(method: str, gain: float, reach: float) -> Link:
    """Where directions come from. The low-pass filter is DiSK at one point, from the same start:
    with gamma = inf the point ahead has the weight c = 0."""
    if method == PLAIN:
        return released()
    return filtered(gain, reach if method == DISK else math.inf)
