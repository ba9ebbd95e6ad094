"""Study `polar-error`: the error of a polar factor, in a map and in a run (001, Proposition D.4).

Maps: the largest distance from the polar factor over drawn matrices, one of them with all singular
values at the floor, beside what is proved and what 001 prints. Runs: the matrix classifier, whose
constants are proved, trained with a map T and with a smoothed polar factor S in its place, by one
client; a stack holds the run and its neighbours.
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

from fedmuon.analysis.theory import near_polar
from fedmuon.analysis.theory.corollaries import Realized, Run, certificate, smoothed_polar, theorem
from fedmuon.analysis.theory.gap import MeasuredGap, measured_gap
from fedmuon.analysis.theory.reach import Start, reach
from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.stability.reachable_ball import size_of
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.studies.walk import walk
from fedmuon.experiments.suites.contents import Asked
from fedmuon.optim.chain import Chain
from fedmuon.optim.gradients import gradient
from fedmuon.optim.orthogonal import named, orthogonalize
from fedmuon.optim.steps import descend, momentum
from fedmuon.orthogonalize import Uncertified, exact_sign, lipschitz, newton_schulz, schedule
from fedmuon.orthogonalize import smoothed_polar as smoothed
from fedmuon.orthogonalize.approximation import newton_schulz_error, printed_cubic_error
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params
from fedmuon.tasks.constants import constants

SEED = 0
SURE = 0.05  # the gap leaves its interval with this chance at most
MAPS = {
    "exact-sign": OrthogonalizerTable(name="exact-sign"),
    # From M / ||M||_F: no momentum is as short as eps.
    "cubic": OrthogonalizerTable(
        name="newton-schulz", coefficients="cubic", steps=5, eps=1e-15, normalization="max"
    ),
}


def five_cubic(x: np.ndarray) -> np.ndarray:
    """p_5, which rises from 0 to 1 on [0, 1]."""
    for a, b, _ in schedule("cubic", 5):
        x = a * x + b * x**3
    return x


OWN = {"exact-sign": np.ones_like, "cubic": five_cubic}  # what a map makes of s / ||M||_F


class Settings(Table):
    """What the suite's file holds."""

    degrees: Annotated[list[str], Field(min_length=1)]
    iterations: Annotated[list[Count], Field(min_length=1)]
    floors: Annotated[list[Positive], Field(min_length=1)]
    rank: Count
    draws: Annotated[int, Field(ge=2)]
    rows: Count
    classes: Count
    samples: Annotated[int, Field(ge=2)]
    held_out: Annotated[int, Field(ge=2)]
    memory: Annotated[float, Field(ge=0, lt=1)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    lambdas: Annotated[list[Positive], Field(min_length=1)]
    steps: Annotated[int, Field(ge=2)]
    neighbours: Count
    delta: Annotated[float, Field(gt=0, lt=1)]


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each family of maps, and for each run's map and step size."""
    maps = [Call(f"map-{name}", partial(of_maps, settings, name)) for name in settings.degrees]
    runs = [
        Call(f"run-{name}-{lr:g}", partial(of_runs, settings, name, lr), 10)
        for name in MAPS
        for lr in settings.lrs
    ]
    return [*maps, *runs]


def of_maps(asked: Settings, coefficients: str) -> Record:
    """A row for each number of steps and floor."""
    rows = []
    for steps in asked.iterations:
        for tau in asked.floors:
            matrices = drawn(asked.rank, tau, asked.draws)
            image = newton_schulz(matrices, steps, coefficients, normalization="unit")
            away = torch.linalg.matrix_norm(image - exact_sign(matrices))
            printed = printed_cubic_error(steps, tau, asked.rank)
            rows.append({
                "map": coefficients, "steps": steps, "tau": tau, "measured": float(away.max()),
                "bound": newton_schulz_error(coefficients, steps, tau, asked.rank),
                "printed": printed if coefficients == "cubic" else math.nan,
            })  # fmt: skip
    return {"rows": rows, "runs": []}


def drawn(rank: int, tau: float, count: int) -> Tensor:
    """Matrices [count, r, r + 1] in the unit ball of Frobenius norm with singular values >= tau;
    the first has them all at tau, the last one large one."""
    rng = generator(SEED, Draw.SYNTHETIC, block=rank)
    left, right = (np.linalg.qr(rng.standard_normal((count, rank + k, rank)))[0] for k in (0, 1))
    spare = max(1 - rank * tau**2, 0.0)  # of the sum of squares
    shares = rng.dirichlet(np.full(rank, 0.5), count) * rng.random((count, 1))
    shares[0], shares[-1] = 0, np.eye(rank)[0]
    values = np.sqrt(tau**2 + spare * shares) * (1 - 1e-15)
    return torch.from_numpy(left * values[:, None] @ np.swapaxes(right, 1, 2))


class Classifier:
    """1 - p_y of softmax(X^T u), u in the unit ball: a run's samples, and one that each neighbour
    has in the place of its sample of that number."""

    def __init__(self, asked: Settings) -> None:
        rng = generator(SEED, Draw.SYNTHETIC)
        count = asked.samples + asked.held_out + asked.neighbours
        points = rng.standard_normal((count, asked.rows))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        scores = points @ rng.standard_normal((asked.rows, asked.classes))
        labels = (scores + 0.5 * rng.gumbel(size=scores.shape)).argmax(1)
        points, labels = torch.from_numpy(points), torch.from_numpy(labels)
        sizes = [asked.samples, asked.held_out, asked.neighbours]
        parts = zip(points.split(sizes), labels.split(sizes), strict=True)
        self.train, self.test, self.others = parts
        self.classes = asked.classes

    def loss(self, x: Tensor, samples: Sequence[Tensor]) -> Tensor:
        """The mean loss [S] of X [S, d, c]."""
        return 1 - self.chances(x, samples)[1].mean(1)

    def accuracy(self, x: Tensor) -> float:
        """On the held-out samples, of X [1, d, c]."""
        points, labels = self.test
        return float(((points @ x)[0].argmax(-1) == labels).double().mean())

    def slope(self, x: Tensor) -> Tensor:
        """The gradient [S, d, c]: of replica s > 0, with sample s - 1 replaced."""
        total, count = self._sum(x, self.train), len(x) - 1
        new, old = ([one[:count, None] for one in both] for both in (self.others, self.train))
        total[1:] += self._sum(x[1:], new) - self._sum(x[1:], old)
        return total / len(self.train[0])

    def chances(self, x: Tensor, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """p [S, n, c], and p_y [S, n]."""
        chances = torch.softmax(samples[0] @ x, -1)
        return chances, chances.gather(2, samples[1].expand(len(x), -1)[..., None])[..., 0]

    def _sum(self, x: Tensor, samples: Sequence[Tensor]) -> Tensor:
        points, labels = samples
        chances, own = self.chances(x, samples)
        hot = torch.nn.functional.one_hot(labels, self.classes)
        return points.mT @ (own[..., None] * (chances - hot))


def of_runs(asked: Settings, name: str, lr: float) -> Record:
    """A row for each lambda of S: distances, drifts, certificates and bounds of T's run."""
    problem = Classifier(asked)
    found = trajectory(asked, problem, MAPS[name], lr, 1 + asked.neighbours)
    end = found.path[-1]
    norms = torch.linalg.matrix_norm(found.momenta[:, 0])
    gap = measured(asked, problem, name, lr, end[:1])
    shared = {
        "map": name,
        "lr": lr,
        "perturbation": float(torch.linalg.matrix_norm(end[1:] - end[0]).max()),
        "accuracy": problem.accuracy(end[:1]),
        "train_loss": gap.empirical,
        "test_loss": gap.population,
        "gap": gap.gap,
        "gap_low": gap.low,
        "gap_high": gap.high,
        "tube": neighbours_tube(asked, name, lr, norms.numpy()),
        "still": still(asked, found, lr),
    }
    beside = [against(asked, problem, name, found, lr, lam) for lam in asked.lambdas]
    return {"rows": [], "runs": [shared | one for one in beside]}


def measured(
    asked: Settings, problem: Classifier, name: str, lr: float, end: Tensor
) -> MeasuredGap:
    """The gap of the run's last model X [1, d, c], which is in the ball that the map's steps span:
    samples of one law are one class."""
    size = size_of(MAPS[name])
    assert size  # known of both maps
    ball = reach(Start(asked.classes), np.full(asked.steps, lr), asked.memory, size)
    train, test = (1 - problem.chances(end, of)[1][0] for of in (problem.train, problem.test))
    return measured_gap(
        [float(train.mean())], [1.0], [[1.0]], test.numpy(), np.zeros(len(test), dtype=int),
        confidence=1 - SURE, interval="shorter", loss_bound=ball.last.loss_bound,
    )  # fmt: skip


@dataclass(frozen=True)
class Trajectory:
    """X_0 = 0, ..., X_T [T + 1, S, d, c] of a run and its neighbours, and M at each call."""

    path: Tensor
    momenta: Tensor


def trajectory(
    asked: Settings, problem: Classifier, table: OrthogonalizerTable, lr: float, replicas: int = 1
) -> Trajectory:
    """The run with that map; replica 0 has the samples as they are."""
    chain = Chain((gradient(), momentum(asked.memory), orthogonalize(named(table)), descend(lr)))
    start = {"X": torch.zeros((replicas, asked.rows, asked.classes), dtype=torch.float64)}
    memory, momenta = torch.zeros_like(start["X"]), []

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        nonlocal memory
        slope = problem.slope(params["X"])
        memory = asked.memory * memory + (1 - asked.memory) * slope
        momenta.append(memory)
        return slope.new_zeros(len(slope)), {"X": slope}  # no link of this chain reads the loss

    steps = walk(chain, start, oracle, asked.steps, partial(generator, SEED))
    path = torch.stack([now["X"] for _, now in steps])
    return Trajectory(path, torch.stack(momenta))


def still(asked: Settings, found: Trajectory, lr: float) -> float:
    """The bound of T's run beside an S that does not move at all: D is the length of its path."""
    lengths = torch.linalg.matrix_norm(found.path[1:, 0] - found.path[:-1, 0]) / lr
    moved = near_polar.drift(lengths.numpy().reshape(-1, 1, 1), lr, asked.memory, 0.0, 0.0)
    part = Realized(np.zeros((asked.steps, 1), dtype=int))
    bound = theorem(_run(asked, lr), 0.0, part, asked.delta, shares=(1, 1))
    return near_polar.transferred(bound, constants().lipschitz, moved).value


def _run(asked: Settings, lr: float) -> Run:
    size = np.array([asked.samples])
    return Run(lr, asked.memory, asked.steps, 1, size, np.ones(1), constants())


def against(
    asked: Settings, problem: Classifier, name: str, found: Trajectory, lr: float, lam: float
) -> Record:
    """What the run of that map T has of S's, whose regularization is lambda: `certificate` is from
    T's run alone, `of_both` has the drift of the neighbour's own run, too."""
    table = OrthogonalizerTable(name="smoothed-polar", lambda_=lam)
    other = trajectory(asked, problem, table, lr).path[-1, 0]
    known, l_orth = constants(), lipschitz("smoothed-polar", "sharp", lam=lam)
    turned = (found.path[:-1] - found.path[1:]) / lr
    errors = torch.linalg.matrix_norm(turned - smoothed(found.momenta, lam)).numpy()
    own, widest = (
        near_polar.drift(one.reshape(-1, 1, 1), lr, asked.memory, l_orth, known.smoothness)
        for one in (errors[:, 0], errors.max(1))
    )
    run, part = _run(asked, lr), Realized(np.zeros((asked.steps, 1), dtype=int))
    alone = near_polar.around(
        torch.linalg.svdvals(found.momenta[:, :1])[:, None].numpy(), part.schedule,
        [2 * known.gradient_bound / asked.samples], lr, asked.memory, l_orth, known.smoothness,
        partial(near_polar.furthest, lam=lam, own=OWN[name]),
    )  # fmt: skip
    # Each fails by its share of delta, so that the least over lambda is a bound at delta.
    delta = asked.delta / len(asked.lambdas)
    bound = smoothed_polar(run, lam, part, delta, shares=(1, 1))
    return {
        "lambda": lam,
        "distance": float(torch.linalg.matrix_norm(found.path[-1, 0] - other)),
        "drift": own,
        "certificate": float(alone[0]),
        "of_both": float(certificate(run, l_orth, part)[0]) + own + widest,
        "bound_of_s": bound.value,
        "bound": near_polar.transferred(bound, known.lipschitz, own).value,
    }


def neighbours_tube(asked: Settings, name: str, lr: float, norms: np.ndarray) -> float:
    """What Remark D.1 certifies of a Newton-Schulz run's neighbours; nan where nothing."""
    if name not in asked.degrees:
        return math.nan
    known = constants()
    schedule = np.zeros((asked.steps, 1), dtype=int)
    given = [2 * known.gradient_bound / asked.samples], lr, asked.memory, known.smoothness
    try:
        table = MAPS[name]
        found = near_polar.norm_tube(
            norms.reshape(-1, 1, 1), schedule, *given,
            coefficients=table.coefficients, steps=table.steps,
        )  # fmt: skip
    except Uncertified:
        return math.nan
    return float(found.perturbation[0])
