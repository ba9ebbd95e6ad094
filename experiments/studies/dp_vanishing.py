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
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture, Rows
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, NEGATIVE, Claim, Effect, Rule, curve
from fedmuon.analysis.theory import private_stationarity as rates
from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.config.schema import Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.studies import dp_stationarity as bounded
from fedmuon.experiments.studies.study import Call, Study
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.runs.directory import Record


class Settings(bounded.People):
    """What the suite's file holds."""

    noises: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
    least: Positive
    tail: Annotated[float, Field(gt=2)]


def cells(settings: Settings, asked: SuiteRequest) -> Sequence[Call]:
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


# Claims and numbers.

TERMS = ("descent", "step", "clipping", "noise", "drift")
POWER = -1 / 6
STANDS_ON = (
    "f is a mean over people of cᵢ√(cᵢ² + ‖W − Aᵢ‖²) − cᵢ² with Pareto slopes cᵢ, so E‖G‖_F² ≤ G₂² "
    "= mean cᵢ² everywhere, L = min(m, n) from ‖·‖_op to ‖·‖_*, f(W₀) − f* computed. η₀ = √(D/L), "
    "and C₀ balances clipping and noise. Lots are Poisson lots of all people; one matrix moves. "
    "The polar error is the largest that was met. The corollary bounds an expectation; each run is "
    "held against it. That the bound keeps to K_T T'^(−1/6) from every T on is arithmetic, proved "
    "beside the formula, and no claim here."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound; whether it says much; whether its rate shows; falling; what clipping
    takes."""
    return [within(rows), telling(rows), shows(rows), falling(rows), clipped(rows)]


def within(rows: Columns) -> Claim:
    """Run by run, where the bound is below what no gradient exceeds: elsewhere no run could break
    it."""
    share, said = rows["mean_nuclear"] / rows["bound"], rows["bound"] < rows["ceiling"]
    held = share[said] <= 1
    judged = share[said] if said.any() else np.nan
    largest = f"; the largest is {share[said].max():.2f} of its bound" if said.any() else ""
    return Claim(
        "The mean nuclear norm of the gradient is at most the bound with Corollary B.6's rule in "
        "every run whose bound says more than ‖∇f‖_* ≤ √r mean cᵢ, which holds everywhere.",
        Effect.exact("measured over bound", judged, unit="ratio"),
        AT_MOST_ONE,
        f"{held.sum()} of {said.sum()} such runs, of {len(said)}{largest}; polar error ε ≤ "
        f"{number(rows['polar_error'].max(), 3)}",
    )


def telling(rows: Columns) -> Claim:
    """Whether the bound is below what holds of any gradient of this problem, and from where on
    K_T T^(-1/6) is, with the constant that 000 leaves open."""
    end, shown, ratios = where(rows, steps=rows["steps"].max()), [], []
    for noise in _noises(rows):
        one = where(end, noise=noise)
        ratios.append(one["bound"][0] / one["ceiling"][0])
        known = (one["constant"][0] / one["ceiling"][0]) ** (-1 / POWER)
        shown.append(f"σ = {noise:g}: {one['bound'][0] / one['ceiling'][0]:.2f} times that, and "
                     f"K_T T^(−1/6) is below it from T = {number(known, 2)} on")  # fmt: skip
    return Claim(
        "At the largest T the bound says more than ‖∇f‖_* ≤ √r mean cᵢ at every noise.",
        Effect.exact(
            "bound over ceiling",
            ratios,
            [f"σ = {noise:g}" for noise in _noises(rows)],
            unit="ratio",
        ),
        Rule(high=1.0, strict=True),
        "; ".join(shown),
    )


def shows(rows: Columns) -> Claim:
    """The rate in what was measured; O() leaves any start, so 000 does not promise it here."""
    slopes = {noise: curve(rows, "steps", "mean_nuclear", noise=noise).late
              for noise in _noises(rows)}  # fmt: skip
    return Claim(
        "The rate shows in what is measured: over the larger half of T the norm falls like "
        "T^(−1/6) or faster. (000's O(·) promises it of large T only.)",
        Effect.between(
            "log-log slope", {f"σ = {k:g}": one for k, one in slopes.items()}, unit="slope"
        ),
        Rule(high=POWER),
        "log-log slopes: " + "; ".join(f"σ = {noise:g}: {one}" for noise, one in slopes.items()),
    )


def falling(rows: Columns) -> Claim:
    """Longer runs have smaller norms on average."""
    slopes = {noise: curve(rows, "steps", "mean_nuclear", noise=noise).slope
              for noise in _noises(rows)}  # fmt: skip
    return Claim(
        "The norm falls with T at every noise, although gradients have no third moment as people "
        "grow in number.",
        Effect.between(
            "log-log slope", {f"σ = {k:g}": one for k, one in slopes.items()}, unit="slope"
        ),
        NEGATIVE,
        "log-log slopes (the bound's goes to −1/6): "
        + "; ".join(f"σ = {noise:g}: {slope}" for noise, slope in slopes.items()),
    )


def clipped(rows: Columns) -> Claim:
    """Clipping cuts at every T, by at most G2^2 / (4 C)."""
    share = rows["excess"] / rows["excess_bound"]
    return Claim(
        "Clipping cuts gradients at every T, by at most G₂²/(4C) on average; 000 has four times "
        "that.",
        Effect.exact("excess over G₂²/(4C)", np.where(share > 0, share, np.inf), unit="ratio"),
        AT_MOST_ONE,
        f"{share.min():.3f} to {share.max():.3f} of G₂²/(4C)",
    )


def numbers(rows: Columns) -> Rows:
    """The bound's terms by noise and T, and what was measured."""
    lines: Rows = [("σ", "T", *TERMS, "bound", "measured")]
    for noise in _noises(rows):
        for steps in np.unique(rows["steps"]).tolist():
            one = where(rows, noise=noise, steps=steps)
            shown = [f"{one[name][0]:.2f}" for name in (*(f"term_{k}" for k in TERMS), "bound")]
            measured = f"{one['mean_nuclear'].mean():.2f}"
            lines.append((f"{noise:g}", f"{steps:.0f}", *shown, measured))
    return lines


def _noises(rows: Columns) -> list[float]:
    return np.unique(rows["noise"]).tolist()


# The figure.


@style.styled
def vanishing(rows: Columns, narrow: bool = False) -> Figure:
    """A panel for each noise: measured norms, the bound and K_T T^(-1/6) against T."""
    noises = np.unique(rows["noise"])
    figure, panels = style.canvas(len(noises), narrow, 2.9)
    for axes, noise in zip(panels, noises, strict=True):
        norms, bounds = (
            curve(rows, "steps", name, noise=float(noise)) for name in ("mean_nuclear", "bound")
        )
        style.errorbars(axes, norms.sizes, norms.means, norms.reach, style.SERIES[0], "measured")
        axes.plot(bounds.sizes, bounds.means, "--", color=style.BLUE, lw=1.2, label="bound")
        first = where(rows, noise=noise, steps=bounds.sizes[0])["constant"][0]
        axes.plot(bounds.sizes, first * bounds.sizes**POWER, color=style.GREY, lw=1,
                  label=r"$K_{T_0}\, T^{-1/6}$, $T_0$ the smallest")  # fmt: skip
        axes.axhline(rows["ceiling"][0], color=style.GREY, lw=1, ls=":",
                     label="largest of any gradient")  # fmt: skip
        axes.set_title(f"σ = {noise:g}", loc="left")
        style.powers_of_2(axes, bounds.sizes)
        axes.set_xlabel("steps $T$")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    style.legend_below(figure, panels[0], 2)
    return figure


PICTURES = (
    Picture(
        "dp-vanishing",
        vanishing,
        "Mean nuclear norm of the gradient under a clip that grows like T^(1/6)",
        "Points are means over seeds with 95% intervals; the dashed line is Theorem 3.4's bound "
        "with Corollary B.6's rule, the grey one its rate with the proved constant from the "
        "smallest T. The dotted line is what no gradient of this problem exceeds: a bound above "
        "it says nothing.",
    ),
)

STUDY = Study(
    "dp-vanishing",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    PICTURES,
)
