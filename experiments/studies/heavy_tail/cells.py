"""Study `heavy-tail`: how fast gradients shrink when their noise has no variance (002, section 3).

The objective has a known smoothness, the noise is symmetric stable with an index just above alpha.
One cell has one method and one number of steps, and holds all tail indices, schedules and seeds as
one stack; the noise of a seed is the same for all methods.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.experiments.studies.heavy_tail import noise as tails
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.randomness import Draw, generator
from fedmuon.schedules import heavy_tailed
from fedmuon.settings import Count, OrthogonalizerTable, Positive
from fedmuon.storage import Record
from fedmuon.tables import Table
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Chain, Link
from fedmuon.transforms.momentum import momentum
from fedmuon.transforms.oracle import gradient
from fedmuon.transforms.orthogonal import named, orthogonalize
from fedmuon.transforms.step import descend, normalize

TOGETHER = 128  # steps whose noise is drawn at once
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


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each method and number of steps."""
    given = settings.model_dump(exclude={"steps"})
    return [
        Call(f"{method}-{steps}", measured, {"method": method, "steps": steps, **given}, steps)
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

    alphas: Sequence[float]
    seeds: int
    shape: tuple[int, int]
    scale: float
    margin: float

    @cached_property
    def index(self) -> np.ndarray:
        """The stable index of every run [A seeds, 1, 1], above alpha: E |S|^alpha exists."""
        above = np.minimum(2, np.array(self.alphas) + self.margin)
        return np.repeat(above, self.seeds)[:, None, None]

    def size(self, alpha: float) -> float:
        """(sum_ij E |S_ij|^alpha)^(1/alpha), which bounds (E ||S||_F^alpha)^(1/alpha)."""
        each = tails.moment(min(2.0, alpha + self.margin), alpha)
        return (math.prod(self.shape) * each) ** (1 / alpha)

    def sigma0(self, alpha: float, sigma1: float) -> float:
        """The sigma_0 of 002 (2); (a + b)^alpha <= 2^(alpha - 1) (a^alpha + b^alpha) joins two."""
        return (2 ** (1 - 1 / alpha) if sigma1 else 1.0) * self.scale * self.size(alpha)

    def growth(self, alpha: float, sigma1: float) -> float:
        """The t that makes the noise grow with the gradient by this sigma_1."""
        return sigma1 / (2 ** (1 - 1 / alpha) * self.size(alpha))

    def drawn(self, steps: int, block: int) -> Tensor:
        """S of the steps of one block, [TOGETHER, A seeds, m, n]."""
        rng = generator(SEED, Draw.BATCH, round=steps, step=block)
        shape = (TOGETHER, len(self.index), *self.shape)
        return torch.from_numpy(tails.stable(self.index, shape, rng))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    alpha: float
    schedule: str
    factor: float
    rate: float
    memory: float
    sigma1: float


def groups(method: str, alphas: Sequence[float], given: Record, steps: int) -> list[Group]:
    """What is run of a method; SGD has the step size for bounded variance, times each factor."""
    if method == "sgd":
        rate = steps**-0.5
        factors = given["factors"]
        return [Group(a, CLASSICAL, c, c * rate, 0.0, 0.0) for a in alphas for c in factors]
    known = [Group(a, THEOREM, 1.0, *heavy_tailed(steps, a), given["sigma1"]) for a in alphas]
    return known + [Group(a, FREE, 1.0, *heavy_tailed(steps), 0.0) for a in alphas]


def chain(method: str, rate: Tensor, memory: Tensor) -> Chain:
    """The method as links; Nesterov momentum as in 002 (1), none for SGD."""
    step = descend(rate)
    if method == "sgd":
        return Chain((gradient(), step))
    direction: Link = normalize() if method not in MAPS else orthogonalize(named(MAPS[method]))
    return Chain((gradient(), momentum(memory, "nesterov"), direction, step))


def measured(
    method: str, steps: int, alphas: list[float], seeds: int, noise: float, margin: float,
    rows: int, columns: int, distance: float, **given: Any,
) -> Record:  # fmt: skip
    """A row for each run: the mean of ||grad f(X_k)||_F over k < K."""
    objective = Objective.of(rows, columns)
    field = Noise(alphas, seeds, (rows, columns), noise, margin)
    every = groups(method, alphas, given, steps)
    start = np.linalg.qr(generator(SEED, Draw.INITIAL).standard_normal((rows, columns)))[0]
    params = {"X": torch.from_numpy(start * distance).repeat(len(every) * seeds, 1, 1)}
    links = chain(method, *(_each(every, seeds, key) for key in ("rate", "memory")))
    oracle = _oracle(objective, field, every, seeds, steps)
    total = torch.zeros(len(every) * seeds, dtype=torch.float64)
    least = np.full(len(every), np.inf)
    for step, now in walk(links, params, oracle, steps, _sketches(steps)):
        if step < steps:
            size = torch.linalg.matrix_norm(objective.gradient(now["X"]))
            total += size
            least = np.minimum(least, size.view(-1, seeds).mean(1).numpy())
    return {"rows": _rows(method, steps, every, total.view(-1, seeds) / steps, least, field)}


def _oracle(
    objective: Objective, field: Noise, every: Sequence[Group], seeds: int, steps: int
) -> Callable[[int, Params], tuple[Tensor, Params]]:
    """Loss and noisy gradient; every group has the same draws for the same alpha and seed."""
    grow = _expanded([field.growth(one.alpha, one.sigma1) for one in every], seeds)[:, None, None]
    place = torch.tensor([list(field.alphas).index(one.alpha) for one in every])
    held: dict[int, Tensor] = {}

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        block, within = divmod(step, TOGETHER)
        if block not in held:
            held.clear()
            held[block] = field.drawn(steps, block)
        draws = held[block][within].view(len(field.alphas), seeds, *field.shape)[place]
        slope = objective.gradient(params["X"])
        size = field.scale + grow * torch.linalg.matrix_norm(slope, keepdim=True)
        return objective.value(params["X"]), {"X": slope + size * draws.flatten(0, 1)}

    return oracle


def _sketches(steps: int) -> Callable[..., np.random.Generator]:
    """A sketch serves all runs of its step."""

    def draws(what: Draw, *, step: int, block: int = 0) -> np.random.Generator:
        return generator(SEED, what, round=steps, step=step, block=block)

    return draws


def _each(every: Sequence[Group], seeds: int, key: str) -> Tensor:
    return _expanded([getattr(one, key) for one in every], seeds)


def _expanded(values: Sequence[float], seeds: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(seeds)


def _rows(
    method: str, steps: int, every: Sequence[Group], mean: Tensor, least: np.ndarray, field: Noise
) -> list[Record]:
    return [
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
        for seed in range(mean.shape[1])
    ]
