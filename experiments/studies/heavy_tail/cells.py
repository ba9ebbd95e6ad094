"""Study `heavy-tail`: how fast gradients shrink when their noise has no variance (002, section 3).

The objective has a known smoothness, the noise is symmetric stable with an index just above alpha.
One cell has one method and one number of steps, and holds all tail indices, schedules and seeds as
one stack; the noise of a seed is the same for all methods.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from scipy.special import gamma
from torch import Tensor

from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import Oracle, walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.chain import Chain, Link
from fedmuon.optim.gradients import gradient
from fedmuon.optim.orthogonal import named, orthogonalize
from fedmuon.optim.schedules import heavy_tailed
from fedmuon.optim.steps import descend, momentum, normalize
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

BLOCK = 128  # steps whose noise is drawn at once
SEED = 0
MAPS = {
    "muon-exact": OrthogonalizerTable(name="exact-sign"),
    "muon-ns": OrthogonalizerTable(name="newton-schulz", coefficients="quintic"),
    "muon-randomized": OrthogonalizerTable(
        name="randomized-polar", coefficients="quintic", rank=2, oversample=1
    ),
}
METHODS = (*MAPS, "normalized-sgd", "sgd")
THEOREM, FREE, CLASSICAL = "theorem", "alpha-free", "classical"


class Settings(Table):
    """What the suite's file holds; the noise has entries `noise` times a stable draw of index
    alpha + `margin`, and grows with the gradient by `sigma1` where the theorem allows that."""

    alphas: Annotated[list[Annotated[float, Field(gt=1, le=2)]], Field(min_length=1)]
    steps: Annotated[list[Count], Field(min_length=2)]
    seeds: Annotated[int, Field(ge=2)]
    noise: Positive
    margin: Positive
    sigma1: Annotated[float, Field(ge=0)]
    distance: Positive  # of the start, in spectral norm
    factors: Annotated[list[Positive], Field(min_length=1)]  # of SGD's step size
    rows: Count = 6
    columns: Count = 4

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of X."""
        return self.rows, self.columns


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each method and number of steps."""
    return [
        Call(f"{method}-{steps}", partial(measured, settings, method, steps), steps)
        for method in METHODS
        for steps in settings.steps
    ]


@dataclass(frozen=True)
class Objective:
    """f(X) = (1/3) sum h((A X B)_ij) with h(s) = s^2 / 2 + sin^2 s, and ||A|| = ||B|| = 1.

    h'' = 1 + 2 cos 2s lies in [-1, 3]: f is not convex, is 1-smooth in Frobenius norm, and f* = 0.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, rows: int, columns: int) -> "Objective":
        """A and B symmetric, with eigenvalues from 1/2 to 1."""
        rng = generator(SEED, Draw.SYNTHETIC)
        return cls(_symmetric(rows, rng), _symmetric(columns, rng))

    def value(self, at: Tensor) -> Tensor:
        """f [...] at X [..., m, n]."""
        inner = self.left @ at @ self.right
        return (inner.square() / 2 + inner.sin().square()).sum((-2, -1)) / 3

    def gradient(self, at: Tensor) -> Tensor:
        """The gradient [..., m, n]."""
        inner = self.left @ at @ self.right
        return self.left @ (inner + (2 * inner).sin()) @ self.right / 3


def _symmetric(size: int, rng: np.random.Generator) -> Tensor:
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return torch.from_numpy(basis * np.linspace(1, 0.5, size) @ basis.T)


@dataclass(frozen=True)
class Noise:
    """(s + t ||grad f||_F) S at every step, S [A seeds, m, n] of stable entries."""

    settings: Settings

    @cached_property
    def index(self) -> np.ndarray:
        """The stable index of every run [A seeds, 1, 1], above alpha: E |S|^alpha exists."""
        above = np.minimum(2, np.array(self.settings.alphas) + self.settings.margin)
        return np.repeat(above, self.settings.seeds)[:, None, None]

    def size(self, alpha: float) -> float:
        """(sum_ij E |S_ij|^alpha)^(1/alpha), which bounds (E ||S||_F^alpha)^(1/alpha)."""
        each = moment(min(2.0, alpha + self.settings.margin), alpha)
        return (math.prod(self.settings.shape) * each) ** (1 / alpha)

    def sigma0(self, alpha: float, sigma1: float) -> float:
        """The sigma_0 of 002 (2); (a + b)^alpha <= 2^(alpha - 1) (a^alpha + b^alpha) joins two."""
        return (2 ** (1 - 1 / alpha) if sigma1 else 1.0) * self.settings.noise * self.size(alpha)

    def growth(self, alpha: float, sigma1: float) -> float:
        """The t that makes the noise grow with the gradient by this sigma_1."""
        return sigma1 / (2 ** (1 - 1 / alpha) * self.size(alpha))

    def drawn(self, steps: int, block: int) -> Tensor:
        """S of the steps of one block, [BLOCK, A seeds, m, n]."""
        rng = generator(SEED, Draw.BATCH, round=steps, step=block)
        shape = (BLOCK, len(self.index), *self.settings.shape)
        return torch.from_numpy(stable(self.index, shape, rng))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    alpha: float
    schedule: str
    factor: float
    rate: float
    memory: float
    sigma1: float


def groups(asked: Settings, method: str, steps: int) -> list[Group]:
    """What is run of a method; SGD has the step size for bounded variance, times each factor."""
    alphas, rate = asked.alphas, steps**-0.5
    if method == "sgd":
        return [Group(a, CLASSICAL, c, c * rate, 0.0, 0.0) for a in alphas for c in asked.factors]
    known = [Group(a, THEOREM, 1.0, *heavy_tailed(steps, a), asked.sigma1) for a in alphas]
    return known + [Group(a, FREE, 1.0, *heavy_tailed(steps), 0.0) for a in alphas]


def chain(method: str, rate: Tensor, memory: Tensor) -> Chain:
    """The method as links; Nesterov momentum as in 002 (1), none for SGD."""
    step = descend(rate)
    if method == "sgd":
        return Chain((gradient(), step))
    direction: Link = normalize() if method not in MAPS else orthogonalize(named(MAPS[method]))
    return Chain((gradient(), momentum(memory, "nesterov"), direction, step))


def measured(asked: Settings, method: str, steps: int) -> Record:
    """A row for each run: the mean of ||grad f(X_k)||_F over k < K."""
    objective, field = Objective.of(*asked.shape), Noise(asked)
    every, seeds = groups(asked, method, steps), asked.seeds
    start = np.linalg.qr(generator(SEED, Draw.INITIAL).standard_normal(asked.shape))[0]
    params = {"X": torch.from_numpy(start * asked.distance).repeat(len(every) * seeds, 1, 1)}
    rate, memory = (
        _per_run([getattr(one, key) for one in every], seeds) for key in ("rate", "memory")
    )
    oracle = _oracle(objective, field, every, steps)
    total = torch.zeros(len(every) * seeds, dtype=torch.float64)
    least = np.full(len(every), np.inf)
    draws = partial(generator, SEED, round=steps)  # a sketch serves all runs of its step
    for step, now in walk(chain(method, rate, memory), params, oracle, steps, draws):
        if step < steps:
            size = torch.linalg.matrix_norm(objective.gradient(now["X"]))
            total += size
            least = np.minimum(least, size.view(-1, seeds).mean(1).numpy())
    mean = total.view(-1, seeds) / steps
    return {
        "rows": [
            {
                "method": method,
                "schedule": one.schedule,
                "alpha": one.alpha,
                "factor": one.factor,
                "steps": steps,
                "seed": seed,
                "sigma0": field.sigma0(one.alpha, one.sigma1),
                "sigma1": one.sigma1,
                "mean_gradient": float(mean[place, seed]),
                "least_mean": float(least[place]),
            }
            for place, one in enumerate(every)
            for seed in range(seeds)
        ]
    }


def _oracle(objective: Objective, field: Noise, every: Sequence[Group], steps: int) -> Oracle:
    """Loss and noisy gradient; every group has the same draws for the same alpha and seed."""
    alphas, seeds, shape = field.settings.alphas, field.settings.seeds, field.settings.shape
    grow = _per_run([field.growth(one.alpha, one.sigma1) for one in every], seeds)[:, None, None]
    place = torch.tensor([alphas.index(one.alpha) for one in every])
    drawn = lru_cache(1)(partial(field.drawn, steps))

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        block, within = divmod(step, BLOCK)
        draws = drawn(block)[within].view(len(alphas), seeds, *shape)[place]
        slope = objective.gradient(params["X"])
        size = field.settings.noise + grow * torch.linalg.matrix_norm(slope, keepdim=True)
        return objective.value(params["X"]), {"X": slope + size * draws.flatten(0, 1)}

    return oracle


def _per_run(values: Sequence[float], seeds: int) -> Tensor:
    """A number for each run, from one for each group."""
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(seeds)


def stable(index: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws of characteristic function exp(-|t|^a), a = `index` in (1, 2] broadcast to `shape`.

    The method of Chambers, Mallows and Stuck (1976); at a = 2 they are normal of variance 2.
    """
    angle = (rng.random(shape) - 0.5) * math.pi
    wait = rng.exponential(size=shape)
    turned = np.cos((1 - index) * angle) / wait
    return np.sin(index * angle) / np.cos(angle) ** (1 / index) * turned ** ((1 - index) / index)


def moment(index: float, order: float) -> float:
    """E |X|^p of one such draw; infinite from p = a on, unless a = 2."""
    if index == 2:
        return 2**order * gamma((1 + order) / 2) / math.sqrt(math.pi)
    if order >= index:
        return math.inf
    top = 2 ** (order + 1) * gamma((order + 1) / 2) * gamma(-order / index)
    return float(top / (index * math.sqrt(math.pi) * gamma(-order / 2)))
