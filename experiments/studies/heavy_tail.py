"""Study `heavy-tail`: how fast do gradient norms fall if the noise has infinite variance?

The study is about Nesterov Muon, section 3. The objective has a known smoothness. The noise is
symmetric stable with an index slightly above alpha. A cell has one method and one number of steps.
All tail indices, schedules and seeds of a cell are computed together in one batch. With the same
seed, all methods use the same noise. For the comparison of SGD with Muon, both are tuned over the
same factors of their step sizes.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from scipy.special import gamma
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import Claim, Curve, Effect, Rule, Slope, curve, quotient
from fedmuon.analysis.theory.stationarity import rate
from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import (
    Call,
    Oracle,
    Study,
    heading,
    in_words,
    levels,
    run_chain,
    tuned_in_rows,
)
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, gradient, map_matrices, momentum, normalize
from fedmuon.optim.orthogonalizers import map_of_table
from fedmuon.optim.schedules import heavy_tailed
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

BLOCK = 128  # number of steps whose noise is drawn at once
SEED = 0
MAPS = {
    "muon-exact": OrthogonalizerTable(name="exact-sign"),
    "muon-ns": OrthogonalizerTable(name="newton-schulz", coefficients="quintic"),
    "muon-randomized": OrthogonalizerTable(
        name="randomized-polar", coefficients="quintic", rank=2, oversample=1
    ),
}
METHODS = (*MAPS, "normalized-sgd", "sgd")
TUNED = "muon-exact"  # the method that is compared with SGD
THEOREM, FREE, CLASSICAL = "theorem", "alpha-free", "classical"


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    Each entry of the noise is `noise` times a stable random number. The index of the stable
    distribution is alpha + `margin`. If the theorem allows it, the noise also grows with the
    gradient norm (`sigma1`).
    """

    alphas: Annotated[list[Annotated[float, Field(gt=1, le=2)]], Field(min_length=1)]
    steps: Annotated[list[Count], Field(min_length=2)]
    seeds: Annotated[int, Field(ge=2)]
    noise: Positive
    margin: Positive
    sigma1: Annotated[float, Field(ge=0)]
    distance: Positive  # distance of the start from 0, in spectral norm
    # factors of the step sizes with which SGD and Muon are compared
    factors: Annotated[list[Positive], Field(min_length=1)]
    rows: Count = 6
    columns: Count = 4

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape (m, n) of X."""
        return self.rows, self.columns


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each method and number of steps."""
    if 1.0 not in settings.factors:
        raise InputError(
            "factors does not contain 1, but Muon is also shown with its usual step size, so SGD "
            "would have fewer tuned values than Muon. Add 1.0 to factors."
        )
    return [
        Call(f"{method}-{steps}", partial(measure, settings, method, steps), steps)
        for method in METHODS
        for steps in settings.steps
    ]


# Measurements


@dataclass(frozen=True)
class Objective:
    """A nonconvex loss that is 1-smooth in the Frobenius norm.

    The loss is f(X) = (1/3) sum h((A X B)_ij), where h(s) = s^2 / 2 + sin^2 s and ||A|| = ||B|| =
    1. The second derivative h'' = 1 + 2 cos 2s is in [-1, 3]. Therefore f is 1-smooth but not
    convex. The minimum of f is f* = 0.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, rows: int, columns: int) -> "Objective":
        """Make random symmetric A and B with eigenvalues from 1/2 to 1."""
        rng, sides = generator(SEED, Draw.SYNTHETIC), []
        for size in (rows, columns):
            basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
            sides.append(torch.from_numpy(basis * np.linspace(1, 0.5, size) @ basis.T))
        return cls(*sides)

    def value(self, at: Tensor) -> Tensor:
        inner = self.left @ at @ self.right
        return (inner.square() / 2 + inner.sin().square()).sum((-2, -1)) / 3

    def gradient(self, at: Tensor) -> Tensor:
        inner = self.left @ at @ self.right
        return self.left @ (inner + (2 * inner).sin()) @ self.right / 3


@dataclass(frozen=True)
class Noise:
    """Random gradient noise whose size grows with the gradient.

    The noise is (s + t ||grad f||_F) S, where s and t are constants, and S is a random array of
    shape [A seeds, m, n] with stable entries.
    """

    settings: Settings

    def size(self, alpha: float) -> float:
        """Return a bound on (E ||S||_F^alpha)^(1/alpha), the size of the random array S.

        The bound is (sum_ij E |S_ij|^alpha)^(1/alpha), where the sum is over the entries of S.
        """
        entry_moment = moment(min(2.0, alpha + self.settings.margin), alpha)
        return (math.prod(self.settings.shape) * entry_moment) ** (1 / alpha)

    def sigma0(self, alpha: float, sigma1: float) -> float:
        """Return the noise level sigma_0 of Nesterov Muon, eq. (2).

        If the noise has two terms a and b, the proof uses (a + b)^alpha <= 2^(alpha - 1) (a^alpha +
        b^alpha).
        """
        return (2 ** (1 - 1 / alpha) if sigma1 else 1.0) * self.settings.noise * self.size(alpha)

    def growth(self, alpha: float, sigma1: float) -> float:
        """Return t, the coefficient of the gradient norm in the noise.

        With this t, the noise satisfies the assumption of the theorem with `sigma1`.
        """
        return sigma1 / (2 ** (1 - 1 / alpha) * self.size(alpha))

    def draw(self, steps: int, block: int) -> Tensor:
        """Return the noise S of all steps in one block [BLOCK, A seeds, m, n].

        The stable index of a run is larger than its alpha, so that E |S|^alpha is finite.
        """
        above = np.minimum(2, np.array(self.settings.alphas) + self.settings.margin)
        index = np.repeat(above, self.settings.seeds)[:, None, None]
        rng = generator(SEED, Draw.BATCH, round=steps, step=block)
        return torch.from_numpy(stable(index, (BLOCK, len(index), *self.settings.shape), rng))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    alpha: float
    schedule: str
    factor: float
    rate: float
    memory: float
    sigma1: float


def groups(settings: Settings, method: str, steps: int) -> list[Group]:
    """Return the groups of runs for a method.

    For SGD, each group has its own factor of the usual step size. At the largest number of steps,
    exact Muon has the same factors of the schedule without alpha, which needs to know as little as
    SGD.
    """
    alphas = settings.alphas
    tuned = list(itertools.product(alphas, settings.factors))
    if method == "sgd":
        return [Group(a, CLASSICAL, c, c * steps**-0.5, 0.0, 0.0) for a, c in tuned]
    rate, memory = heavy_tailed(steps)
    usual = [Group(a, THEOREM, 1.0, *heavy_tailed(steps, a), settings.sigma1) for a in alphas]
    usual += [Group(a, FREE, 1.0, rate, memory, 0.0) for a in alphas]
    if method != TUNED or steps < max(settings.steps):
        return usual
    return usual + [Group(a, FREE, c, c * rate, memory, 0.0) for a, c in tuned if c != 1]


def measure(settings: Settings, method: str, steps: int) -> Record:
    """Return a row for each run: the mean of ||grad f(X_k)||_F over k < K.

    Muon uses the momentum of Nesterov Muon, eq. (1). SGD uses no momentum.
    """
    objective, field = Objective.of(*settings.shape), Noise(settings)
    all_groups, seeds = groups(settings, method, steps), settings.seeds
    start = np.linalg.qr(generator(SEED, Draw.INITIAL).standard_normal(settings.shape))[0]
    params = {
        "X": torch.from_numpy(start * settings.distance).repeat(len(all_groups) * seeds, 1, 1)
    }
    step_of = descend(_per_run([group.rate for group in all_groups], seeds))
    memory = momentum(_per_run([group.memory for group in all_groups], seeds), "nesterov")
    direction = map_matrices(map_of_table(MAPS[method])) if method in MAPS else normalize()
    links = (step_of,) if method == "sgd" else (memory, direction, step_of)
    oracle = _oracle(objective, field, all_groups, steps)
    total = torch.zeros(len(all_groups) * seeds, dtype=torch.float64)
    smallest = np.full(len(all_groups), np.inf)
    draws = partial(generator, SEED, round=steps)  # all runs share the sketch of a step
    for step, now in run_chain(Chain((gradient(), *links)), params, oracle, steps, draws):
        if step < steps:
            size = torch.linalg.matrix_norm(objective.gradient(now["X"]))
            total += size
            smallest = np.minimum(smallest, size.view(-1, seeds).mean(1).numpy())
    mean = total.view(-1, seeds) / steps
    return {
        "rows": [
            {
                "method": method,
                "schedule": group.schedule,
                "alpha": group.alpha,
                "factor": group.factor,
                "steps": steps,
                "seed": seed,
                "sigma0": field.sigma0(group.alpha, group.sigma1),
                "sigma1": group.sigma1,
                "mean_gradient": float(mean[place, seed]),
                "least_mean": float(smallest[place]),
            }
            for place, group in enumerate(all_groups)
            for seed in range(seeds)
        ]
    }


def _oracle(objective: Objective, field: Noise, all_groups: Sequence[Group], steps: int) -> Oracle:
    """Return a function that computes losses and noisy gradients of all runs.

    Runs with the same alpha and seed use the same noise.
    """
    alphas, seeds, shape = field.settings.alphas, field.settings.seeds, field.settings.shape
    grow = _per_run([field.growth(group.alpha, group.sigma1) for group in all_groups], seeds)[
        :, None, None
    ]
    place = torch.tensor([alphas.index(group.alpha) for group in all_groups])
    draw = lru_cache(1)(partial(field.draw, steps))

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        block, within = divmod(step, BLOCK)
        draws = draw(block)[within].view(len(alphas), seeds, *shape)[place]
        slope = objective.gradient(params["X"])
        size = field.settings.noise + grow * torch.linalg.matrix_norm(slope, keepdim=True)
        return objective.value(params["X"]), {"X": slope + size * draws.flatten(0, 1)}

    return oracle


def _per_run(values: Sequence[float], seeds: int) -> Tensor:
    """Repeat the value of each group, once for each seed."""
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(seeds)


def stable(index: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return random numbers with the characteristic function exp(-|t|^a), a = `index` in (1, 2].

    `index` is broadcast to `shape`. The method is that of Chambers, Mallows and Stuck (1976). For a
    = 2, the numbers are normal with variance 2.
    """
    angle = (rng.random(shape) - 0.5) * math.pi
    wait = rng.exponential(size=shape)
    turned = np.cos((1 - index) * angle) / wait
    return np.sin(index * angle) / np.cos(angle) ** (1 / index) * turned ** ((1 - index) / index)


def moment(index: float, order: float) -> float:
    """Return E |X|^p for a stable random number X with index a.

    The result is infinite for p >= a, unless a = 2.
    """
    if index == 2:
        return 2**order * gamma((1 + order) / 2) / math.sqrt(math.pi)
    if order >= index:
        return math.inf
    top = 2 ** (order + 1) * gamma((order + 1) / 2) * gamma(-order / index)
    return float(top / (index * math.sqrt(math.pi) * gamma(-order / 2)))


# Claims

SCHEDULES = {THEOREM: "schedule that depends on α", FREE: "schedule without α"}
MUON = {
    "muon-exact": "Muon, exact",
    "muon-ns": "Muon, Newton–Schulz",
    "muon-randomized": "Muon, randomized",
}
NAMES = {**MUON, "normalized-sgd": "normalized SGD", "sgd": "SGD"}
TOLERANCE = 0.03  # possible effect of lower-order terms on a slope at these K
STANDS_ON = (
    "The objective is 1-smooth and not convex, and its minimum is 0. The entries of the noise "
    "are symmetric stable random variables with an index just above α (2 at α = 2). Therefore "
    "equation (2) of Nesterov Muon holds with the σ₀ and σ₁ in rows.csv. The measure is the mean "
    "over k of ‖∇f(X_k)‖_F. It is at least the minimum over k, which the theorems bound. Runs "
    "share the sketches of the randomized orthogonalizer at each step. A rate is an upper bound "
    "for large K. At small K, constants and terms of lower order are visible. For α < 2, the "
    "means of SGD have infinite variance, so their intervals are too narrow. SGD and Muon are "
    "compared at the largest K, each at the best of the same factors of its step size, chosen on "
    "these runs."
)


def promised(alpha: float, schedule: str) -> float:
    """Return the exponent of K in the bound of Nesterov Muon.

    The exponent comes from Theorem 3.4 or Corollary 3.6.
    """
    return -rate(alpha, "heavy-tailed" if schedule == THEOREM else FREE)


def norms(rows: Columns, method: str, alpha: float, schedule: str = THEOREM) -> Curve:
    """Return a method's mean gradient norms for each K. `schedule` has no effect on SGD."""
    if method == "sgd":
        return tuning(rows, "sgd", CLASSICAL, alpha)[1]
    usual: dict[str, Any] = {"method": method, "schedule": schedule, "alpha": alpha, "factor": 1.0}
    return curve(rows, "steps", "mean_gradient", **usual)


def tuning(rows: Columns, method: str, schedule: str, alpha: float) -> tuple[Tuned, Curve]:
    """Return the mean gradient norm for each factor of a step size at the largest K.

    Also return the norms for each K with the best of these factors.
    """
    runs = where(rows, method=method, schedule=schedule, alpha=alpha)
    last = where(runs, steps=runs["steps"].max())
    tuned = tuned_in_rows(last, NAMES[method], "factor", "mean_gradient")
    return tuned, curve(runs, "steps", "mean_gradient", factor=tuned.best)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims that Muon attains both rates, and that heavy tails harm SGD more."""
    rate_claims = []
    for schedule, method in itertools.product(SCHEDULES, MUON):
        differences, slopes = {}, {}
        for alpha in levels(rows, "alpha"):
            slope, exponent = norms(rows, method, alpha, schedule).slope, promised(alpha, schedule)
            ends = (end - exponent for end in (slope.value, slope.low, slope.high))
            differences[f"α = {alpha:g}"] = Slope(*ends, slope.free, slope.few)
            slopes[f"α = {alpha:g}"] = f"{slope}, promised {written(exponent, '.3f')}"
        strictly = sum(difference.low <= 0 for difference in differences.values())
        rate_claims.append(
            Claim(
                f"{NAMES[method]} with the {SCHEDULES[schedule]}: at every α, the gradient norm "
                f"falls at least at the promised rate, within {TOLERANCE} in the slope.",
                Effect.between("slope − promised slope", differences, unit="slope"),
                Rule(high=TOLERANCE),
                f"{in_words(slopes)}; without the tolerance in {strictly} of {len(differences)}",
            )
        )
    return [*rate_claims, *_against_sgd(rows)]


def _against_sgd(rows: Columns) -> Sequence[Claim]:
    """Return the claims that SGD is worse than exact Muon, each with its best step size.

    Muon uses the schedule without alpha. The claims are about the largest K. The estimates for
    different alpha are independent, because each alpha has its own runs.
    """
    ratios: dict[float, Slope] = {}
    tuned: dict[str, list[Tuned]] = {NAMES["sgd"]: [], NAMES[TUNED]: []}
    for alpha in levels(rows, "alpha"):
        ends = []
        for method, schedule in (("sgd", CLASSICAL), (TUNED, FREE)):
            tuned_method, norms_of_best = tuning(rows, method, schedule, alpha)
            tuned[NAMES[method]].append(
                replace(tuned_method, method=f"{NAMES[method]} (α = {alpha:g})")
            )
            ends.append(norms_of_best.runs[-1])
        ratios[alpha] = quotient(*ends)
    steps = {}
    for (low, below), (high, above) in itertools.pairwise(ratios.items()):
        # first-order error of the quotient of two independent estimates
        value = above.value / below.value
        errors = [
            (estimate.high - estimate.low) / 2 / estimate.value for estimate in (above, below)
        ]
        half, free = abs(value) * math.hypot(*errors), min(above.free, below.free)
        steps[f"from α = {low:g} to {high:g}"] = Slope(value, value - half, value + half, free)
    behind = sum(ratio.low > 1 for ratio in ratios.values())
    ahead = sum(ratio.high < 1 for ratio in ratios.values())
    texts = {
        f"α = {alpha:g}": f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        for alpha, ratio in ratios.items()
    }
    words = (
        "mean gradient norm, SGD / Muon, each with its best step size, at K = "
        f"{rows['steps'].max():.0f}: "
    )
    heaviest, ratio = min(ratios.items())
    return [
        Claim(
            "The heavier the tail, the larger the gradient norm of SGD relative to exact Muon.",
            Effect.between("SGD / Muon, relative to the next heavier tail", steps, unit="ratio"),
            Rule(high=1.0, strict=True),
            words + in_words(texts),
            f"SGD is clearly behind Muon at {behind} of {len(ratios)} values of α, and clearly "
            f"ahead at {ahead}",
            untuned=objection([*tuned], tuned),
        ),
        Claim(
            f"At the heaviest tail, α = {heaviest:g}, the gradient norm of SGD is clearly larger "
            "than that of exact Muon.",
            Effect.between("SGD / Muon", {"": ratio}, unit="ratio"),
            Rule(low=1.0, strict=True),
            f"{words}α = {heaviest:g}: {texts[f'α = {heaviest:g}']}",
            untuned=objection([*tuned], {name: results[:1] for name, results in tuned.items()}),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table by method, schedule and alpha.

    The rows contain the slopes and the norm at the largest K.
    """
    alphas = levels(rows, "alpha")
    lines: Rows = [
        ("method: α", "slope (95%)", "slope, larger half of K", "promised slope", "final norm")
    ]
    for schedule, name in SCHEDULES.items():
        for method in (*MUON, "normalized-sgd"):
            lines.append(heading(f"{NAMES[method]}, {name}:", lines[0]))
            for alpha in alphas:
                exponent = written(promised(alpha, schedule), ".3f")
                lines.append(_line(f"  {alpha:g}", norms(rows, method, alpha, schedule), exponent))
    lines.append(heading(f"{NAMES['sgd']}, the best c / √K:", lines[0]))
    for alpha in alphas:
        tuned, fit = tuning(rows, "sgd", CLASSICAL, alpha)
        lines.append(_line(f"  {alpha:g}, c = {tuned.best:g}", fit, "–"))
    lines.append(heading(f"{NAMES[TUNED]}, the best c times the {SCHEDULES[FREE]}:", lines[0]))
    for alpha in alphas:
        tuned, fit = tuning(rows, TUNED, FREE, alpha)
        lines.append((f"  {alpha:g}, c = {tuned.best:g}", "–", "–", "–", number(fit.means[-1])))
    return lines


def _line(name: str, fit: Curve, exponent: str) -> tuple[str, ...]:
    slopes = [
        f"{written(slope.value, '.3f')} ± {slope.high - slope.value:.3f}"
        for slope in (fit.slope, fit.late)
    ]
    return name, *slopes, exponent, number(fit.means[-1])


# Figures

LOOKS = dict(zip(NAMES, style.SERIES, strict=False))


@style.styled
def curves(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the mean gradient norm and the theorem's slope against K.

    There is a panel for each alpha.
    """
    alphas = np.unique(rows["alpha"])
    across = min(3, len(alphas))
    figure, panels = style.canvas(len(alphas), narrow, 2.2, across)
    for axes, alpha in zip(panels, alphas, strict=True):
        for name, look in LOOKS.items():
            fit = norms(rows, name, alpha)
            style.errorbars(axes, fit.sizes, fit.means, fit.reach, look, NAMES[name])
        fit = norms(rows, "muon-exact", alpha)  # the line of the slope is slightly above this curve
        line = 1.25 * fit.means[-1] * (fit.sizes / fit.sizes[-1]) ** promised(alpha, THEOREM)
        axes.plot(fit.sizes, line, "--", color=style.BLACK, lw=1, label="slope of the theorem")
        axes.set_title(f"α = {alpha:g}", loc="left")
        style.powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $K$")
    style.alike(panels, log=True)
    for axes in panels[:: 1 if narrow else across]:
        axes.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_F$")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


@style.styled
def slopes(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the fitted slopes with 95% intervals against alpha, for both step size schedules."""
    figure, panels = style.canvas(2, narrow, 2.9)
    alphas = np.unique(rows["alpha"])
    for axes, (schedule, title) in zip(panels, SCHEDULES.items(), strict=True):
        for place, (name, (colour, marker)) in enumerate(list(LOOKS.items())[:-1]):  # without SGD
            fits = [norms(rows, name, alpha, schedule).slope for alpha in alphas]
            value, low, high = np.array([(fit.value, fit.low, fit.high) for fit in fits]).T
            axes.errorbar(alphas + 0.012 * (place - 1.5), value, (value - low, high - value),
                          fmt=marker, color=colour, ms=4, mfc="none", elinewidth=0.9,
                          label=NAMES[name])  # fmt: skip
        fine = np.linspace(alphas[0], alphas[-1], 100)
        line = [promised(alpha, schedule) for alpha in fine]
        axes.plot(fine, line, "--", color=style.BLACK, lw=1, label="promised slope")
        axes.set_title(title, loc="left")
        axes.set_xticks(alphas)
        axes.set_xlabel("tail index α")
        axes.set_ylabel("fitted slope")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


STUDY = Study(
    "heavy-tail",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    {"heavy-tail": curves, "heavy-tail-slopes": slopes},
)
