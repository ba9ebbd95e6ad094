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
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture, Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    POSITIVE,
    Claim,
    Effect,
    Rule,
    Slope,
    curve,
    half_width,
    mean_of,
    quotient,
)
from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.run_chain import run_chain
from fedmuon.experiments.studies.study import Call, Study
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain, Link
from fedmuon.optim.links import descend, disk_filter
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


def cells(settings: Settings, asked: SuiteRequest) -> Sequence[Call]:
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
    first = disk_filter(run.gain, run.reach)
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
    for step, now in run_chain(chain, params, oracle, run.steps, partial(generator, SEED)):
        if step < run.steps:
            total += problem.gradient(now["x"]).square().sum(1)
    return total / run.steps


def _from_zero(link: Link) -> Link:
    """The filter with g~_{-1} = 0, as in 003's proof: as if a step had led nowhere."""

    def init(params: Params) -> dict[str, Tensor]:
        state = link.init(params)
        return state | {"steps": torch.ones_like(state["steps"])}

    return replace(link, init=init)


# Claims and numbers.

KEYS = ("reach", "gain", "lr", "noise", "batch", "steps")
STANDS_ON = (
    "F is the mean of log(1 + (aᵀx − y)²)/2, |a| ≤ 1: not convex, L = 1, a sample's gradient has "
    "variance at most 1/4, F(x₀) − F* ≤ F(x₀). Batches are drawn with replacement, nothing is "
    "clipped, and Gaussian noise is added. The bounds are of the mean over t of E‖∇F(x_t)‖²; means "
    "over seeds are held against them. For γ ≠ −1 the filter's prediction errs, and a slow filter "
    "at a large step size has no bound. 003's Theorem 3 is taken with the smallest β that its "
    "proof allows, and compared from that proof's start."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound; the bound beside the printed one; Corollary 4; what filtering is worth."""
    grid, best = where(rows, corollary=0), where(rows, corollary=1)
    return [within(grid), printed(grid), corollary(best), falling(best), worth(grid),
            chosen(grid)]  # fmt: skip


def within(grid: Columns) -> Claim:
    """Setting by setting, where there is a bound; of an expectation, so means have intervals."""
    found = _means(grid)
    known = [(mean, bound) for mean, bound in found if not np.isnan(bound)]
    share = np.array([mean.value / bound for mean, bound in known])
    return Claim(
        "The mean squared gradient is at most the bound in every setting that has one.",
        _under(known, ()),
        AT_MOST_ONE,
        f"{(share <= 1).sum()} of {len(share)} settings, {len(found) - len(known)} have none; "
        f"measured over bound {number(share.min(), 2)} to {number(share.max(), 2)}",
    )


def printed(grid: Columns) -> Claim:
    """gamma = -1: never above 003's Theorem 3, from the same start."""
    part = where(grid, reach=-1.0)
    finite = np.isfinite(part["printed"])
    ratio = part["printed"][finite] / part["zero_bound"][finite]
    lost = np.unique(np.stack([part[name][~finite] for name in KEYS], 1), axis=0)
    return Claim(
        "For γ = −1 the bound is never above Theorem 3's, and holds where that one's conditions "
        "fail.",
        Effect.exact(
            "printed over proved",
            np.where(np.isnan(ratio), 0.0, ratio)
            if not np.isnan(part["zero_bound"]).any()
            else 0.0,
            unit="ratio",
        ),
        Rule(low=1.0),
        f"printed over proved here {ratio.min():.3g} to {ratio.max():.3g}; Theorem 3 says nothing "
        f"in {len(lost)} settings",
    )


def corollary(best: Columns) -> Claim:
    """Corollary 4's runs."""
    horizons = np.unique(best["steps"])
    parts = [where(best, steps=steps) for steps in horizons]
    shown = [
        f"T = {steps:.0f}: {number(part['mean_square'].mean())} ≤ {number(part['ceiling'][0])}, "
        f"κ = {number(part['gain'][0], 3)}"
        for steps, part in zip(horizons, parts, strict=True)
    ]
    held = [(mean_of(part["mean_square"]), float(part["ceiling"][0])) for part in parts]
    return Claim(
        "Corollary 4's runs keep to √(6(1 + 1/T) C_κ L D W/T), which has √6 where 003 has 4.",
        _under(held, [f"T = {steps:.0f}" for steps in horizons]),
        AT_MOST_ONE,
        "; ".join(shown),
    )


def _under(means: Sequence[tuple[Slope, float]], places: Sequence[str]) -> Effect:
    """Each mean over seeds, with its interval, over its bound."""
    ends = [[end / bound for end in (mean.value, mean.low, mean.high)] for mean, bound in means]
    return Effect(
        "measured over bound", *np.array(ends).reshape(-1, 3).T, places=places, unit="ratio"
    )


def falling(best: Columns) -> Claim:
    """Longer tuned runs end with smaller means."""
    horizons = np.unique(best["steps"])
    means = [where(best, steps=steps)["mean_square"].mean() for steps in horizons]
    slope = float(np.polyfit(np.log(horizons), np.log(means), 1)[0])
    return Claim(
        "With Corollary 4's step size and gain the mean falls with T.",
        Effect.between(
            "mean over that of the run before",
            {
                f"T = {after:.0f}": quotient(
                    *(where(best, steps=one)["mean_square"] for one in (after, before))
                )
                for before, after in itertools.pairwise(horizons)
            },
            unit="ratio",
        ),
        Rule(high=1.0, strict=True),
        f"log-log slope {number(slope)} (the bound's is −0.5)",
    )


def worth(grid: Columns) -> Claim:
    """What filtering is for, seed by seed: at the most noise some gain below 1 is better than none,
    beyond 95% intervals for all gains at once."""
    shown, held = [], np.full(3, np.nan)
    for lr, part in _loudest(grid):
        gains = [gain for gain in np.unique(part["gain"]).tolist() if gain < 1]
        saved = {gain: _saved(part, gain, len(gains)) for gain in gains}
        ends = np.array([(value, value - reach, value + reach) for value, reach in saved.values()])
        held = ends.max(axis=0) if len(ends) else np.full(3, np.nan)  # of the best gain
        shown += [f"η = {lr:g}: " + ", ".join(f"κ = {gain:g} {_percent(*one)}"
                                              for gain, one in saved.items())]  # fmt: skip
    return Claim(
        "At the most noise some gain below 1 beats κ = 1, plain noisy descent, at the largest step "
        "size.",
        Effect("saved by the best gain", *held.reshape(3, 1), unit="ratio"),
        POSITIVE,
        "saved of κ = 1's mean: " + "; ".join(shown),
    )


def chosen(grid: Columns) -> Claim:
    """Whether the bound sees that: it names a gain before the run, which then beats none."""
    shown, held = [], (np.nan, np.nan)
    for lr, part in _loudest(grid):
        known = np.where(np.isnan(part["bound"]), np.inf, part["bound"])
        gain = float(part["gain"][known.argmin()])
        saved = _saved(part, gain)
        held = saved
        shown.append(f"η = {lr:g}: κ = {gain:g} {_percent(*saved)}")
    return Claim(
        "At the most noise the gain whose bound is least beats κ = 1 at the largest step size.",
        Effect.around("saved by the gain whose bound is least", *held, unit="ratio"),
        POSITIVE,
        "saved of κ = 1's mean: " + "; ".join(shown),
    )


def _loudest(grid: Columns) -> list[tuple[float, Columns]]:
    """Each step size with its rows at gamma = -1, the most noise and full batches."""
    part = where(grid, reach=-1.0, noise=grid["noise"].max(), batch=0.0)
    return [(lr, where(part, lr=lr)) for lr in np.unique(part["lr"]).tolist()]


def _saved(part: Columns, gain: float, many: int = 1) -> tuple[float, float]:
    """By how much of kappa = 1's mean that gain's is smaller, seed by seed, with its interval: of
    so many as are right together 95 times in 100."""
    own, plain = (where(part, gain=one) for one in (gain, 1.0))
    if not len(plain["seed"]):
        return float("nan"), float("nan")
    less = plain["mean_square"][plain["seed"].argsort()] - own["mean_square"][own["seed"].argsort()]
    scale = plain["mean_square"].mean()
    half = half_width(less.std(ddof=1) / np.sqrt(len(less)), len(less) - 1, many)
    return less.mean() / scale, half / scale


def _percent(value: float, reach: float) -> str:
    return f"{written(value, '+.1%')} ± {reach:.1%}"


def _means(part: Columns) -> list[tuple[Slope, float]]:
    """The mean over seeds and the bound of every setting."""
    table = np.stack([part[name] for name in KEYS], 1)
    _, inverse = np.unique(table, axis=0, return_inverse=True)
    at = [inverse.ravel() == k for k in range(inverse.max() + 1)]
    return [(mean_of(part["mean_square"][one]), float(part["bound"][one][0])) for one in at]


def numbers(rows: Columns) -> Rows:
    """Settings at the most noise with full batches, then Corollary 4's."""
    lines: Rows = [("γ", "κ", "η", "T", "measured", "bound", "Theorem 3, printed", "Corollary 4")]
    grid = where(rows, corollary=0)
    shown = [where(grid, noise=grid["noise"].max(), batch=0.0), where(rows, corollary=1)]
    for part in shown:
        for key in np.unique(np.stack([part[name] for name in KEYS], 1), axis=0):
            one = where(part, **dict(zip(KEYS, key.tolist(), strict=True)))
            values = (one["mean_square"].mean(), *(one[k][0] for k in ("bound", "printed")))
            cells = [number(float(value)) for value in (*values, one["ceiling"][0])]
            head = written(key[0], "g"), number(key[1], 3), number(key[2], 3)
            lines.append((*head, f"{key[5]:.0f}", *cells))
    return lines


# The figure.


@style.styled
def gains(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each reach, at the most noise and full batches: a colour for each step size."""
    grid = where(rows, corollary=0)
    grid = where(grid, noise=grid["noise"].max(), batch=0.0)
    reaches = np.unique(grid["reach"])
    figure, panels = style.canvas(len(reaches), narrow, 2.9)
    for axes, reach in zip(panels, reaches, strict=True):
        for lr, look in zip(np.unique(grid["lr"]), style.SERIES, strict=False):
            part = where(grid, reach=reach, lr=lr)
            one = curve(part, "gain", "mean_square")
            style.errorbars(axes, one.sizes, one.means, one.reach, look, f"measured, η = {lr:g}")
            bound = curve(part, "gain", "bound")
            axes.plot(bound.sizes, bound.means, "--", color=look[0], marker=look[1], ms=3, lw=1.2)
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="bound (small full marks)")
        axes.set_title(f"γ = {written(reach, 'g')}", loc="left")
        style.levels_on_x(axes, np.unique(grid["gain"]))
        axes.set_xlabel("gain κ")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla F(x_t)\Vert^2$")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


PICTURES = (
    Picture(
        "disk-stationarity",
        gains,
        "Mean squared gradient under DiSK beside its bound, by the gain",
        "Points are means over seeds with 95% intervals; dashed lines with the same marks are the "
        "bound, where there is one. κ = 1 is plain noisy descent.",
    ),
)

STUDY = Study(
    "disk-stationarity",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    PICTURES,
)
