"""Study `disk-stationarity`: compare DiSK's mean squared gradient norm with its bounds.

F(x) is the mean of log(1 + (a'x - y)^2)/2 over the samples with |a| <= 1. F is not convex. The
function log(1 + u^2)/2 has curvature in [-1/8, 1] and slope in [-1/2, 1/2]. Therefore L = 1, the
variance of a gradient is at most 1/4, and D <= F(x_0). Samples of a batch are drawn with
replacement. At one seed and step, all filters use the same noise and batch.
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
from fedmuon.analysis.report.findings import Rows, number
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
from fedmuon.experiments.studies.study import Call, Study, in_words, levels, run_chain, seed_rows
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, disk_filter
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

SEED, SIGMA, SMOOTHNESS = 0, 0.5, 1.0


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `level` and `horizons` are used only by the runs for DiSK, Corollary 4.
    """

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
    outliers: Annotated[float, Field(ge=0, le=1)]  # share of outliers


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each pair of reach and gain, and a cell for each horizon of Corollary 4."""
    grid = [
        Call(f"disk-{reach:g}-{gain:g}", partial(measure, settings, reach, gain), settings.steps)
        for reach, gain in itertools.product(settings.reaches, settings.gains)
    ]
    return grid + [
        Call(f"corollary-{steps}", partial(measure_tuned, settings, steps), steps)
        for steps in settings.horizons
    ]


# Measurements


@dataclass(frozen=True)
class Robust:
    """The regression problem.

    The inputs have the shape [n, d] and are in the unit ball, and there is a label for each of n
    samples.
    """

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, settings: Settings) -> "Robust":
        """Make random data from a linear model with noise and distant outliers."""
        rng = generator(SEED, Draw.SYNTHETIC)
        inputs = rng.standard_normal((settings.samples, settings.features))
        inputs /= np.maximum(1, np.linalg.norm(inputs, axis=1, keepdims=True))
        labels = inputs @ rng.standard_normal(settings.features)
        labels += 0.1 * rng.standard_normal(settings.samples)
        labels += 5 * (rng.random(settings.samples) < settings.outliers)
        return cls(torch.from_numpy(inputs), torch.from_numpy(labels))

    def value(self, at: Tensor) -> Tensor:
        return torch.log1p((at @ self.inputs.mT - self.labels).square()).mean(1) / 2

    def gradient(self, at: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean gradient, or a weighted mean, in the shape [S, d].

        The weights have the shape [S, n] and sum to 1.
        """
        off = at @ self.inputs.mT - self.labels
        share = 1 / len(self.labels) if weights is None else weights
        return (off / (1 + off.square()) * share) @ self.inputs

    def start(self) -> tuple[float, float]:
        """Return two numbers at the initial point x = 0.

        The numbers are the loss F(0), which is an upper bound on D, and the gradient norm |grad
        F(0)|.
        """
        origin = torch.zeros((1, self.inputs.shape[1]), dtype=torch.float64)
        return float(self.value(origin)), float(self.gradient(origin).norm())


def measure(settings: Settings, reach: float, gain: float) -> Record:
    """Train with the initial state of DiSK's Algorithm 2.

    Return a row for each step size, noise level, batch size and seed.
    """
    rows = []
    for noise, batch in itertools.product(settings.noises, settings.batches):
        spread = settings.features * noise**2
        variance, size = (SIGMA, batch) if batch else (0.0, math.inf)
        runs = [
            theorem.Disk(lr, settings.steps, gain, reach, variance, size, spread)
            for lr in settings.lrs
        ]
        shared = {"reach": reach, "corollary": 0, "ceiling": math.nan}
        rows += _rows(settings, runs, noise, "first", shared)
    return {"rows": rows}


def measure_tuned(settings: Settings, steps: int) -> Record:
    """Run Corollary 4 on full batches, and return a row for each seed.

    The initial state is the one that the proof uses.
    """
    gap, slope = Robust.of(settings).start()
    spread = settings.features * settings.level**2
    best = theorem.corollary_4(steps, gap, SMOOTHNESS, slope, spread)
    shared = {"reach": -1.0, "corollary": 1, "ceiling": best.value}
    return {"rows": _rows(settings, [best.run], settings.level, "zero", shared)}


def _rows(
    settings: Settings, runs: Sequence[theorem.Disk], noise: float, start: theorem.Start,
    shared: Record,
) -> list[Record]:  # fmt: skip
    """Return one row for each of several runs that are computed together in one batch.

    The runs differ only in step size and seed.
    """
    problem, first_run = Robust.of(settings), runs[0]
    gap, slope = problem.start()
    rates = torch.tensor([run.lr for run in runs], dtype=torch.float64)
    lr = rates.repeat_interleave(settings.seeds)
    batch = 0 if math.isinf(first_run.batch) else int(first_run.batch)
    path = trajectory(settings, problem, first_run, lr, noise, batch, start)
    rows = []
    for run, sizes in zip(runs, path.view(len(runs), settings.seeds), strict=True):
        bounds = []
        for begin in (start, "zero"):
            try:
                bounds.append(theorem.disk(run, gap, SMOOTHNESS, slope, begin).value)
            except InputError:  # the filter is too slow for the bound
                bounds.append(math.nan)
        of_run = {
            "gain": run.gain,
            "lr": run.lr,
            "noise": noise,
            "batch": batch,
            "steps": run.steps,
            "bound": bounds[0],
            "zero_bound": bounds[1],
            "printed": theorem.printed_theorem_3(run, gap, SMOOTHNESS, slope)
            if run.reach == -1
            else math.nan,
        }
        rows += seed_rows(shared | of_run, "mean_square", sizes)
    return rows


def trajectory(
    settings: Settings, problem: Robust, run: theorem.Disk, lr: Tensor, noise: float, batch: int,
    start: theorem.Start,
) -> Tensor:  # fmt: skip
    """Return the mean of |grad F(x_t)|^2 over all steps t, for each run.

    All runs start from x_0 = 0. There is one run for each element of `lr`.
    """
    link = disk_filter(run.gain, run.reach)
    seeds, features, samples = settings.seeds, settings.features, len(problem.labels)
    copies = len(lr) // seeds

    def from_zero(params: Params) -> dict[str, Tensor]:
        """Start the filter from zero, g~_{-1} = 0, as the proof in the DiSK paper does."""
        state = link.init(params)
        return state | {"steps": torch.ones_like(state["steps"])}

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        rng = generator(SEED, Draw.BATCH, step=step)
        shift = noise * torch.from_numpy(rng.standard_normal((seeds, features)))
        weights = None
        if batch:
            drawn = rng.integers(samples, size=(seeds, batch))
            weights = torch.zeros((seeds, samples), dtype=torch.float64)
            ones = torch.full(drawn.shape, 1 / batch, dtype=torch.float64)
            weights.scatter_add_(1, torch.from_numpy(drawn), ones)
            weights = weights.repeat(copies, 1)
        slope = problem.gradient(params["x"], weights) + shift.repeat(copies, 1)
        return slope.new_zeros(len(slope)), {"x": slope}

    first = replace(link, init=from_zero) if start == "zero" else link
    chain = Chain((first, descend(lr)))
    params = {"x": torch.zeros((len(lr), features), dtype=torch.float64)}
    total = torch.zeros(len(lr), dtype=torch.float64)
    for step, now in run_chain(chain, params, oracle, run.steps, partial(generator, SEED)):
        if step < run.steps:
            total += problem.gradient(now["x"]).square().sum(1)
    return total / run.steps


# Claims

KEYS = ("reach", "gain", "lr", "noise", "batch", "steps")
STANDS_ON = (
    "F is the mean of log(1 + (aᵀx − y)²)/2 with |a| ≤ 1. It is not convex, L = 1, the gradient "
    "of a sample has variance at most 1/4, and F(x₀) − F* ≤ F(x₀). Batches are drawn with "
    "replacement, nothing is clipped, and Gaussian noise is added. The bounds are about the mean "
    "over t of E‖∇F(x_t)‖². We compare them with means over seeds. For γ ≠ −1, the prediction of "
    "the filter has an error, and a slow filter with a large step size has no bound. Theorem 3 "
    "uses the smallest β that its proof allows. Its comparison uses the initial state that the "
    "proof assumes."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims: runs stay below the bound, Corollary 4 holds, and filtering helps."""
    grid = where(rows, corollary=0)
    return [*_bound_claims(grid), *_corollary_claims(where(rows, corollary=1)),
            *_filter_claims(grid)]  # fmt: skip


def _settings(rows: Columns) -> list[Columns]:
    """Split the table into settings. The rows of one setting differ only in the seed."""
    keys = np.stack([rows[name] for name in KEYS], 1)
    masks = [(keys == key).all(1) for key in np.unique(keys, axis=0)]
    return [{name: column[mask] for name, column in rows.items()} for mask in masks]


def _bound_claims(grid: Columns) -> Sequence[Claim]:
    """Return the claims that each mean over seeds, with its interval, is below its bound."""
    pairs = [(mean_of(part["mean_square"]), float(part["bound"][0])) for part in _settings(grid)]
    bounded = [(mean, bound) for mean, bound in pairs if not np.isnan(bound)]
    share = np.array([mean.value / bound for mean, bound in bounded])
    part = where(grid, reach=-1.0)
    finite = np.isfinite(part["printed"])
    ratio = part["printed"][finite] / part["zero_bound"][finite]
    failed = _settings({name: column[~finite] for name, column in part.items()})
    unbounded = np.isnan(part["zero_bound"]).any()
    return [
        Claim(
            "The mean squared gradient is at most the bound in every setting that has a bound.",
            _under(bounded, ()),
            AT_MOST_ONE,
            f"{(share <= 1).sum()} of {len(share)} settings; {len(pairs) - len(bounded)} more "
            f"settings have no bound; measured / bound {number(share.min(), 2)} to "
            f"{number(share.max(), 2)}",
        ),
        Claim(
            "For γ = −1, our bound is never above the bound of Theorem 3. Our bound also exists "
            "in settings where the conditions of Theorem 3 fail.",
            Effect.exact(
                "published / our bound",
                0.0 if unbounded else np.where(np.isnan(ratio), 0.0, ratio),
                unit="ratio",
            ),
            Rule(low=1.0),
            f"published / our bound {ratio.min():.3g} to {ratio.max():.3g}; Theorem 3 gives no "
            f"bound in {len(failed)} settings",
        ),
    ]


def _corollary_claims(best: Columns) -> Sequence[Claim]:
    """Return the claims about Corollary 4.

    The claims say that the bound of Corollary 4 holds, and that longer runs have smaller means.
    """
    parts = {steps: where(best, steps=steps) for steps in levels(best, "steps")}
    details, under = [], []
    for steps, part in parts.items():
        mean, ceiling = part["mean_square"].mean(), part["ceiling"][0]
        kappa = number(part["gain"][0], 3)
        details.append(f"T = {steps:.0f}: {number(mean)} ≤ {number(ceiling)}, κ = {kappa}")
        under.append((mean_of(part["mean_square"]), float(ceiling)))
    means = [part["mean_square"].mean() for part in parts.values()]
    slope = float(np.polyfit(np.log(list(parts)), np.log(means), 1)[0])
    falls = {
        f"T = {after:.0f}": quotient(*(parts[steps]["mean_square"] for steps in (after, before)))
        for before, after in itertools.pairwise(parts)
    }
    return [
        Claim(
            "Runs with the settings of Corollary 4 stay below √(6(1 + 1/T) C_κ L D W/T), a bound "
            "with √6 instead of the paper's 4.",
            _under(under, [f"T = {steps:.0f}" for steps in parts]),
            AT_MOST_ONE,
            "; ".join(details),
        ),
        Claim(
            "With the step size and gain of Corollary 4, the mean squared gradient falls as T "
            "grows.",
            Effect.between("mean / mean of the next shorter run", falls, unit="ratio"),
            Rule(high=1.0, strict=True),
            f"log-log slope {number(slope)} (slope of the bound: −0.5)",
        ),
    ]


def _under(means: Sequence[tuple[Slope, float]], places: Sequence[str]) -> Effect:
    """Return the ratio of the mean over seeds to the bound, with its interval, for each setting."""
    ends = [[end / bound for end in (mean.value, mean.low, mean.high)] for mean, bound in means]
    free = np.array([mean.free for mean, _ in means])
    return Effect(
        "measured / bound", *np.array(ends).reshape(-1, 3).T, places, free=free, unit="ratio"
    )


def _filter_claims(grid: Columns) -> Sequence[Claim]:
    """Return the claims about the benefit of filtering.

    The claims are about the largest noise level, gamma = -1 and full batches. Runs with the same
    seed are compared with each other.
    """
    part = where(grid, reach=-1.0, noise=grid["noise"].max(), batch=0.0)
    best, reduction = np.full(3, np.nan), (np.nan, np.nan)
    details, at_smallest_bound = {}, {}
    for lr in levels(part, "lr"):
        lr_part = where(part, lr=lr)
        gains = [gain for gain in levels(lr_part, "gain") if gain < 1]
        saved = {gain: _saved(lr_part, gain, len(gains)) for gain in gains}
        ends = np.array([(value, value - reach, value + reach) for value, reach in saved.values()])
        best = ends.max(axis=0) if len(ends) else np.full(3, np.nan)  # values of the best gain
        bounds = np.where(np.isnan(lr_part["bound"]), np.inf, lr_part["bound"])
        chosen_gain = float(lr_part["gain"][bounds.argmin()])
        reduction = _saved(lr_part, chosen_gain)
        saved = {gain: f"{written(a, '+.1%')} ± {b:.1%}" for gain, (a, b) in saved.items()}
        details[f"η = {lr:g}"] = ", ".join(f"κ = {gain:g} {text}" for gain, text in saved.items())
        percent = f"{written(reduction[0], '+.1%')} ± {reduction[1]:.1%}"
        at_smallest_bound[f"η = {lr:g}"] = f"κ = {chosen_gain:g} {percent}"
    return [
        Claim(
            "At the strongest noise and the largest step size, some gain κ < 1 has a smaller "
            "mean squared gradient than κ = 1 (no filter).",
            Effect("reduction by the best gain", *best.reshape(3, 1), unit="ratio"),
            POSITIVE,
            "reduction of the mean compared with κ = 1: " + in_words(details),
        ),
        Claim(
            "At the strongest noise and the largest step size, the gain κ with the smallest "
            "bound has a smaller mean squared gradient than κ = 1 (no filter).",
            Effect.around(
                "reduction by the gain with the smallest bound", *reduction, unit="ratio"
            ),
            POSITIVE,
            "reduction of the mean compared with κ = 1: " + in_words(at_smallest_bound),
        ),
    ]


def _saved(part: Columns, gain: float, count: int = 1) -> tuple[float, float]:
    """Return by how much this gain reduces the mean, compared with kappa = 1.

    The result is the relative reduction and half the width of its interval. Runs with the same seed
    are compared. With `count` intervals, the probability that all of them contain the true value is
    95%.
    """
    filtered, plain = (where(part, gain=kappa) for kappa in (gain, 1.0))
    if not len(plain["seed"]):
        return float("nan"), float("nan")
    less = (
        plain["mean_square"][plain["seed"].argsort()]
        - filtered["mean_square"][filtered["seed"].argsort()]
    )
    scale = plain["mean_square"].mean()
    half = half_width(less.std(ddof=1) / np.sqrt(len(less)), len(less) - 1, count)
    return less.mean() / scale, half / scale


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The settings with the largest noise and full batches come first, followed by Corollary 4.
    """
    lines: Rows = [("γ", "κ", "η", "T", "measured", "bound", "Theorem 3, published", "Corollary 4")]
    grid = where(rows, corollary=0)
    tables = [where(grid, noise=grid["noise"].max(), batch=0.0), where(rows, corollary=1)]
    for part in itertools.chain(*map(_settings, tables)):
        values = (
            part["mean_square"].mean(),
            *(part[k][0] for k in ("bound", "printed", "ceiling")),
        )
        reach, gain, lr, steps = (part[name][0] for name in ("reach", "gain", "lr", "steps"))
        head = written(reach, "g"), number(gain, 3), number(lr, 3), f"{steps:.0f}"
        lines.append((*head, *(number(float(value)) for value in values)))
    return lines


# Figures


@style.styled
def gains(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the mean squared gradient norm against the gain, for the largest noise and full batches.

    There is a panel for each reach.
    """
    grid = where(rows, corollary=0)
    grid = where(grid, noise=grid["noise"].max(), batch=0.0)
    reaches = np.unique(grid["reach"])
    figure, panels = style.canvas(len(reaches), narrow, 2.9)
    for axes, reach in zip(panels, reaches, strict=True):
        for lr, look in zip(np.unique(grid["lr"]), style.SERIES, strict=False):
            part = where(grid, reach=reach, lr=lr)
            measured = curve(part, "gain", "mean_square")
            style.errorbars(
                axes, measured.sizes, measured.means, measured.reach, look, f"measured, η = {lr:g}"
            )
            bound = curve(part, "gain", "bound")
            axes.plot(bound.sizes, bound.means, "--", color=look[0], marker=look[1], ms=3, lw=1.2)
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="bound (small filled marks)")
        axes.set_title(f"γ = {written(reach, 'g')}", loc="left")
        style.levels_on_x(axes, np.unique(grid["gain"]))
        axes.set_xlabel("gain κ")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla F(x_t)\Vert^2$")
    style.legend_below(figure, panels[0], 2 if narrow else 4)
    return figure


STUDY = Study(
    "disk-stationarity", Settings, cells, claims, numbers, STANDS_ON, {"disk-stationarity": gains}
)
