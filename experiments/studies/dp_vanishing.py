"""Study `dp-vanishing`: Corollary B.6 of DP-Muon when clipping shortens gradients.

The problem is the one of `dp-stationarity`, but each person has a slope c_i. The slopes are Pareto
quantiles with index 2.5. The second moment of gradients is at most G_2^2 = mean c_i^2 at any W.
Higher moments grow without bound as the number of people grows. Each f_i is 1-smooth for every c_i.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, NEGATIVE, Claim, Effect, Rule, curve
from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.config.schema import Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies import dp_stationarity as bounded
from fedmuon.experiments.studies.dp_stationarity import TERMS
from fedmuon.experiments.studies.study import (
    Call,
    Study,
    draw_with_bound,
    in_words,
    levels,
    seed_rows,
    slopes_claim,
    split,
)
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.runs.directory import Record


class Settings(bounded.People):
    """The keys that the suite's TOML file may contain."""

    noises: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
    least: Positive
    tail: Annotated[float, Field(gt=2)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each noise and horizon."""
    grid = itertools.product(settings.noises, settings.steps)
    return [
        Call(f"{noise:g}-{steps}", partial(measure, settings, noise, steps), steps)
        for noise, steps in grid
    ]


# Measurements


def slopes(settings: Settings) -> Tensor:
    """Return the slopes c_i of N people in random order.

    The slopes are c_min (1 - u)^(-1/a), where u takes N evenly spaced values.
    """
    quantiles = (np.arange(settings.people) + 0.5) / settings.people
    order = generator(bounded.SEED, Draw.PARTITION).permutation(settings.people)
    return torch.from_numpy(settings.least * quantiles[order] ** (-1 / settings.tail))


def measure(settings: Settings, noise: float, steps: int) -> Record:
    """Return a row for each seed.

    A row contains the mean nuclear norm, the bound with its terms, and K_T.
    """
    c, shape = slopes(settings), settings.shape
    fields = settings.model_dump(exclude={"least", "tail"})
    fields |= {"slope": float(c.max()), "probes": 1}
    points = bounded.Location.of(bounded.Settings.model_construct(**fields)).points
    problem = bounded.Location(points, c)
    gap, short, moment = problem.gap(), min(shape), float(c.square().mean().sqrt())
    scale = math.sqrt(gap / short)
    first = theorem.clip_scale(moment, theorem.Release(1.0, noise, settings.lot, shape))
    plan, clip = theorem.second_moment(steps, scale, first)
    clipped = bounded.Settings.model_construct(**fields, clip=clip)
    excesses: list[float] = []  # for each step, the largest mean over people of (||G||_F - C)_+

    def with_excesses(path: Iterator[Tensor]) -> Iterator[Tensor]:
        for now in path:
            squares = problem.squares(now.flatten(1))
            lengths = problem.weights(squares) * squares.sqrt()
            excesses.append(float((lengths - clip).clamp_min(0).mean(1).max()))
            yield now

    path = bounded.trajectory(problem, clipped, bounded.MUON, noise, plan)
    sizes, smallest, _ = bounded.follow(with_excesses(path), problem, plan)
    error, excess = max(0.0, 1 - smallest), theorem.moment_excess(moment, clip)
    release = theorem.Release(clip, noise, settings.lot, shape, excess)
    bound = theorem.dp_muon(plan, release, gap, short, error)
    exact = theorem.dp_muon(plan, release, gap, short)
    shared = {
        "noise": noise,
        "steps": steps,
        "clip": clip,
        "bound": bound.value,
        **{f"term_{name}": term for name, term in bound.terms.items()},
        "exact": exact.value,  # the bound for exact polar factors, which K_T assumes
        "constant": theorem.second_moment_rate(steps, release, moment, gap, short, scale),
        "ceiling": math.sqrt(short) * float(c.mean()),  # bound on any gradient's nuclear norm
        "polar_error": error,
        "excess": max(excesses),
        "excess_bound": excess,
    }
    return {"rows": seed_rows(shared, "mean_nuclear", sizes)}


# Claims

POWER = -1 / 6
STANDS_ON = (
    "The loss f is a mean over people of cᵢ√(cᵢ² + ‖W − Aᵢ‖²) − cᵢ² with Pareto slopes cᵢ. "
    "Therefore E‖G‖_F² ≤ G₂² = mean cᵢ² everywhere. L is min(m, n) from ‖·‖_op to ‖·‖_*, and "
    "f(W₀) − f* is computed. η₀ is √(D/L), and C₀ balances clipping and noise. Lots are Poisson "
    "samples of all people. The model is one matrix. The polar error is the largest error that "
    "occurred. The corollary bounds an expectation, and we compare each run with the bound. For "
    "every T' ≥ T, the bound is at most K_T T'^(−1/6). This follows by arithmetic and is not a "
    "claim of this suite: the code proves it next to the formula."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims are about the bound, its rate, the decrease of gradient norms, and clipping.
    """
    parts = split(rows, "noise", "σ")
    curves = {name: curve(part, "steps", "mean_nuclear") for name, part in parts.items()}
    slopes = {name: fit.slope for name, fit in curves.items()}
    late = {name: fit.late for name, fit in curves.items()}
    excess = rows["excess"] / rows["excess_bound"]
    return [
        *_bound_claims(rows),
        slopes_claim(
            "The measured norm has the promised rate: over the larger half of T, the norm falls "
            "like T^(−1/6) or faster. (The O(·) of the paper promises this rate for large T "
            "only.)",
            late,
            Rule(high=POWER),
            "log-log slopes: ",
        ),
        slopes_claim(
            "At every noise level σ, the nuclear norm of the gradient falls as T grows, although "
            "the third moment of gradients is infinite in the limit of many people.",
            slopes,
            NEGATIVE,
            "log-log slopes (slope of the bound at large T: −1/6): ",
        ),
        Claim(
            "At every T, clipping shortens gradients by at most G₂²/(4C) on average, a quarter "
            "of the paper's bound.",
            Effect.exact(
                "mean cut / (G₂²/(4C))", np.where(excess > 0, excess, np.inf), unit="ratio"
            ),
            AT_MOST_ONE,
            f"{excess.min():.3f} to {excess.max():.3f} of G₂²/(4C)",
        ),
    ]


def _bound_claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about the bound.

    A bound tests the theorem only if it is below the largest possible gradient norm.
    """
    share, informative = rows["mean_nuclear"] / rows["bound"], rows["bound"] < rows["ceiling"]
    judged = share[informative]
    largest = f"; the largest norm is {judged.max():.2f} of its bound" if informative.any() else ""
    ratios, details = [], {}
    for name, part in split(where(rows, steps=rows["steps"].max()), "noise", "σ").items():
        ratio = part["bound"][0] / part["ceiling"][0]
        horizon = number((part["constant"][0] / part["ceiling"][0]) ** (-1 / POWER), 2)
        ratios.append(ratio)
        details[name] = (
            f"{ratio:.2f} times √r mean cᵢ, and K_T T^(−1/6) is below √r mean cᵢ from T = "
            f"{horizon} on"
        )
    return [
        Claim(
            "The mean nuclear norm of the gradient is at most the bound with Corollary B.6's "
            "rule in every run whose bound is below √r mean cᵢ, which ‖∇f‖_* never exceeds on "
            "this problem.",
            Effect.exact("measured / bound", judged if informative.any() else np.nan, unit="ratio"),
            AT_MOST_ONE,
            f"{(judged <= 1).sum()} of {informative.sum()} such runs, of "
            f"{len(informative)}{largest}; polar error ε ≤ {number(rows['polar_error'].max(), 3)}",
        ),
        Claim(
            "At the largest T, the bound is below √r mean cᵢ at every noise level σ.",
            Effect.exact("bound / √r mean cᵢ", ratios, list(details), unit="ratio"),
            Rule(high=1.0, strict=True),
            in_words(details),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain the terms of the bound and the measured norms, by noise and T.
    """
    lines: Rows = [("σ", "T", *TERMS, "bound", "measured")]
    for noise in levels(rows, "noise"):
        for steps in levels(rows, "steps"):
            part = where(rows, noise=noise, steps=steps)
            terms = [f"{part[name][0]:.2f}" for name in (*(f"term_{k}" for k in TERMS), "bound")]
            size = f"{part['mean_nuclear'].mean():.2f}"
            lines.append((f"{noise:g}", f"{steps:.0f}", *terms, size))
    return lines


# Figures


@style.styled
def vanishing(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the norms, the bound and the term K_T T^(-1/6) against T.

    Each noise has its own panel.
    """
    noises, sizes = levels(rows, "noise"), np.unique(rows["steps"])
    figure, panels = style.canvas(len(noises), narrow, 2.9)
    for axes, noise in zip(panels, noises, strict=True):
        draw_with_bound(axes, rows, style.SERIES[0], "measured", "bound", noise=noise)
        first = where(rows, noise=noise, steps=sizes[0])["constant"][0]
        axes.plot(sizes, first * sizes**POWER, color=style.GREY, lw=1,
                  label=r"$K_{T_0}\, T^{-1/6}$, $T_0$ the smallest")  # fmt: skip
        axes.axhline(rows["ceiling"][0], color=style.GREY, lw=1, ls=":",
                     label="largest norm of any gradient")  # fmt: skip
        axes.set_title(f"σ = {noise:g}", loc="left")
        style.powers_of_2(axes, sizes)
        axes.set_xlabel("steps $T$")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    style.legend_below(figure, panels[0], 2)
    return figure


STUDY = Study(
    "dp-vanishing", Settings, cells, claims, numbers, STANDS_ON, {"dp-vanishing": vanishing}
)
