"""Study `dp-stationarity`: Theorem 3.4 of DP-Muon and the nuclear norm that it bounds.

The problem satisfies all assumptions of the theorem with known constants. The gradient of each
person is shorter than c. The mean loss f is smooth with L = min(m, n) in the theorem's norms. f is
convex, so f(W_0) - f* is also known. Step size and momentum are those of Corollary 3.5. A cell has
one method, noise level and number of steps (horizon). All seeds of a cell are computed together in
one batch. With the same seed, both methods use the same lots and noise.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
from fedmuon.analysis.report.verdicts import (
    AT_MOST_ONE,
    NEGATIVE,
    Claim,
    Effect,
    Rule,
    counted,
    curve,
)
from fedmuon.analysis.theory import private_stationarity as theorem
from fedmuon.analysis.theory.stationarity import Schedule
from fedmuon.config.schema import Count, Local, OrthogonalizerTable, Positive, Privacy
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import (
    Call,
    Study,
    draw_with_bound,
    heading,
    in_words,
    levels,
    run_chain,
    seed_rows,
    slopes_claim,
    split,
)
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.recipes import make_recipe
from fedmuon.privacy.mechanisms.gaussian import release
from fedmuon.privacy.noise import keyed_streams, normals
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

SEED = 0  # seed of the data
REFINED = 50  # number of iterations towards the minimum
MUON = "dp-muon"
CORRECTED = "dp-muonbc"
METHODS = (MUON, CORRECTED)


class People(Table):
    """Settings that are the same for every cell.

    The settings describe the people, the horizons and a step.
    """

    steps: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=2)]
    seeds: Annotated[int, Field(ge=2)]
    rows: Count
    columns: Count
    people: Count
    lot: Positive
    distance: Positive  # distance of the centre from the start, in spectral norm
    spread: Positive  # standard deviation of an entry of a person's matrix around the centre
    iterations: Count  # number of Newton–Schulz iterations

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape (m, n) of W."""
        return self.rows, self.columns


class Settings(People):
    """The keys that the suite's TOML file may contain.

    `slope` is c, an upper bound on any person's gradient norm.
    """

    noises: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2)]
    slope: Positive
    clip: Positive
    probes: Count  # number of antithetic pairs of DP-MuonBC


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each method, noise and horizon."""
    grid = itertools.product(METHODS, settings.noises, settings.steps)
    return [
        Call(f"{method}-{noise:g}-{steps}", partial(measure, settings, method, noise, steps), steps)
        for method, noise, steps in grid
    ]


# Measurements


@dataclass(frozen=True)
class Location:
    """A convex and 1-smooth loss whose gradients are shorter than c for every person.

    The loss is f(W) = (1/N) sum_i h(|W - A_i|_F), where h(u) = c sqrt(c^2 + u^2) - c^2, and A
    contains a matrix [m, n] for each of N people. h' is below c, and h'' and h'(u)/u are in (0, 1].
    Therefore f is convex and 1-smooth in the Frobenius norm. It also follows that ||grad f(X) -
    grad f(Y)||_* <= sqrt(r) |X - Y|_F <= r ||X - Y||_op with r = min(m, n).
    """

    points: Tensor
    slope: float | Tensor  # a number, or one value per person [N]

    @classmethod
    def of(cls, settings: Settings) -> "Location":
        """Make random people A_i around a centre whose singular values all equal `distance`."""
        rng, shape = generator(SEED, Draw.SYNTHETIC), settings.shape
        left, right = (np.linalg.qr(rng.standard_normal((size, min(shape))))[0] for size in shape)
        offsets = settings.spread * rng.standard_normal((settings.people, *shape))
        points = settings.distance * left @ right.T + offsets
        return cls(torch.from_numpy(points).flatten(1), settings.slope)

    def squares(self, at: Tensor) -> Tensor:
        """Return the squared distances |W - A_i|_F^2 from W to all people.

        `at` has the shape [S, m n], and the result has the shape [S, N].
        """
        squares = at.square().sum(1)[:, None] + self._lengths - 2 * at @ self.points.mT
        return squares.clamp_min(0)

    @cached_property
    def _lengths(self) -> Tensor:
        return self.points.square().sum(1)

    def weights(self, squares: Tensor) -> Tensor:
        """Return the weights h'(u) / u of all people.

        A person's gradient is this weight times W - A_i.
        """
        return self.slope * (self.slope**2 + squares).rsqrt()

    def combined(self, at: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient as the sum of shares_i (W - A_i) over all people i."""
        return shares.sum(1)[:, None] * at - shares @ self.points

    def value(self, squares: Tensor) -> Tensor:
        """Return the loss f of each seed.

        `squares` contains the squared distances from W to every person.
        """
        return (self.slope * (self.slope**2 + squares).sqrt() - self.slope**2).mean(1)

    def gradient(self, at: Tensor) -> Tensor:
        return self.combined(at, self.weights(self.squares(at)) / len(self.points))

    def gap(self) -> float:
        """Return an upper bound on f(0) - f* that is exact up to rounding.

        Replacing W by the weighted mean of the A_i decreases f, and repetition leads to the
        minimum. f is convex, and W and W* are convex combinations of the A_i, so f(W) - f* <= |grad
        f(W)|_F 2 max |A_i|_F.
        """
        start = torch.zeros_like(self.points[:1])
        best = start
        for _ in range(REFINED):
            weights = self.weights(self.squares(best))
            best = weights @ self.points / weights.sum()
        slack = 2 * self.gradient(best).norm() * self.points.norm(dim=1).max()
        return float(self.value(self.squares(start)) - self.value(self.squares(best)) + slack)


def measure(settings: Settings, method: str, noise: float, steps: int) -> Record:
    """Return a row for each seed.

    A row contains the mean of ||grad f(W_k)||_* over all steps k < T, and the bound.

    The polynomials of Newton–Schulz must map (0, 1] into itself. The polar error is then 1 minus
    the smallest singular value of the direction O. The bound uses the largest polar error of all
    steps and seeds.
    """
    problem, short = Location.of(settings), min(settings.shape)
    gap = problem.gap()
    # the step size and momentum of DP-Muon, Corollary 3.5, with eta_0 = sqrt(D / L)
    plan = theorem.light_tailed(steps, 1.0, math.sqrt(gap / short))[0]
    sizes, smallest, largest = follow(
        trajectory(problem, settings, method, noise, plan), problem, plan
    )
    error = max(0.0, 1 - smallest) if method == MUON else 0.0
    excess = max(0.0, settings.slope - settings.clip)
    release = theorem.Release(settings.clip, noise, settings.lot, settings.shape, excess)
    bound = theorem.dp_muon(plan, release, gap, short, error)
    shared = {
        "method": method,
        "noise": noise,
        "steps": steps,
        "bound": bound.value,
        **{f"term_{name}": term for name, term in bound.terms.items()},
        "ceiling": math.sqrt(short) * settings.slope,  # upper bound on any gradient's nuclear norm
        "polar_error": error,
        "longest_step": largest,
    }
    return {"rows": seed_rows(shared, "mean_nuclear", sizes)}


def trajectory(
    problem: Location, settings: Settings, method: str, noise: float, plan: Schedule
) -> Iterator[Tensor]:
    """Yield the models W_0 = 0, ..., W_T of DP-Muon or DP-MuonBC.

    Each model has the shape [S, m, n] and contains all seeds. Each seed has its own Poisson lots.
    """
    local = Local(recipe=method, lr=plan.lr, momentum=plan.beta, momentum_form="polyak")
    table = OrthogonalizerTable(
        name="newton-schulz", coefficients="quintic", steps=settings.iterations,
        normalization="unit",
    )  # fmt: skip
    privacy = Privacy(bound=settings.clip, noise=noise, lot=settings.lot, probes=settings.probes,
                      insecure_reproducible_noise=True)  # fmt: skip
    recipe = make_recipe(local, table, privacy=privacy)
    mechanism, people = recipe.mechanism, len(problem.points)
    assert mechanism is not None
    draws = [partial(generator, seed, round=plan.steps) for seed in range(settings.seeds)]

    def oracle(step: int, params: Params) -> tuple[Tensor, Params]:
        at, now = params["W"].flatten(1), [partial(draw, step=step) for draw in draws]
        lots = torch.zeros((len(at), people), dtype=at.dtype)
        for lot, draw in zip(lots, now, strict=True):
            lot[mechanism.rows(draw, people)] = 1
        squares = problem.squares(at)
        weights = problem.weights(squares)
        factors = mechanism.clipping.factors({"W": weights.square() * squares})["W"]
        sums = {"W": problem.combined(at, lots * factors * weights).view_as(params["W"])}
        released = release(
            sums, mechanism.clipping, mechanism.noise, mechanism.lot, normals(keyed_streams(now))
        )
        return problem.value(squares), released.gradient

    start = {"W": torch.zeros((settings.seeds, *settings.shape), dtype=torch.float64)}
    for _, now in run_chain(recipe.chain, start, oracle, plan.steps, draws):
        yield now["W"]


def follow(
    path: Iterator[Tensor], problem: Location, plan: Schedule
) -> tuple[Tensor, float, float]:
    """Follow the path W_0, ..., W_T.

    Returns:
        The mean nuclear norm of the true gradient for each seed, and the smallest and the largest
        singular value among all directions O.
    """
    before = next(path)
    total, smallest, largest = torch.zeros(len(before), dtype=before.dtype), math.inf, 0.0
    for after in path:
        gradient = problem.gradient(before.flatten(1)).view_as(before)
        total += torch.linalg.svdvals(gradient).sum(-1)
        turned = torch.linalg.svdvals((before - after) / plan.lr)
        smallest, largest = min(smallest, float(turned.min())), max(largest, float(turned.max()))
        before = after
    return total / plan.steps, smallest, largest


# Claims

NAMES = {MUON: "DP-Muon", CORRECTED: "DP-MuonBC"}
TERMS = ("descent", "step", "clipping", "noise", "drift")
STANDS_ON = (
    "The loss f is a mean over people of c√(c² + ‖W − Aᵢ‖²) − c². It is convex, with L = min(m, "
    "n) from ‖·‖_op to ‖·‖_*. Every person's gradient is shorter than c, and f(W₀) − f* is "
    "computed. Lots are Poisson samples of all people, so the noise term of the theorem holds "
    "for them. The model is one matrix. Step size and memory are those of Corollary 3.5 with η₀ "
    "= √(D/L). Only the error ε of the polar factor is not known in advance. As in Lemma 3.3, ε "
    "is the largest error that occurred, in this suite at any step of any seed. The theorem "
    "bounds an expectation, and we compare each run with the bound. Steps of DP-MuonBC may be "
    "longer than 1 in spectral norm, so the theorem does not cover them. We compare DP-MuonBC "
    "with the bound for ε = 0, which is the smallest bound."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims are about the bound, about the decrease of the norm with T, and about how tight the
    bound is.
    """
    within, outside, tight = _bound_claims(rows)
    falling = []
    for method, name in NAMES.items():
        parts = split(where(rows, method=method), "noise", "σ").items()
        slopes = {noise: curve(part, "steps", "mean_nuclear").slope for noise, part in parts}
        sentence = (
            f"{name}: at every noise level σ, the nuclear norm of the gradient falls as T grows."
        )
        before = "log-log slopes (slope of the bound at large T: −1/4): "
        falling.append(slopes_claim(sentence, slopes, NEGATIVE, before))
    return [within, outside, *falling, tight, *_largest_horizon_claims(rows)]


def _bound_claims(rows: Columns) -> tuple[Claim, Claim, Claim]:
    """Return three claims: DP-Muon's bound, DP-MuonBC, and the tightness of the bound.

    Each run of DP-Muon is compared with its bound. The theorem does not cover DP-MuonBC.
    """
    plain, corrected = (where(rows, method=method) for method in NAMES)
    shares = [part["mean_nuclear"] / part["bound"] for part in (plain, corrected)]
    details = [
        f"{(share <= 1).sum()} of {len(share)} runs; the largest norm is {share.max():.2f} of "
        "its bound"
        for share in shares
    ]
    ratios, used = {}, {}
    for noise, part in split(rows, "noise", "σ").items():
        last, other = (curve(part, "steps", "mean_nuclear", method=k).means[-1] for k in NAMES)
        ratio = where(part, method=MUON)["mean_nuclear"] / where(part, method=MUON)["bound"]
        ratios[noise] = f"{other / last:.3f}"
        used[noise] = f"{ratio.min():.2f} to {ratio.max():.2f}"
    within = Claim(
        "DP-Muon: the mean nuclear norm of the gradient is at most the bound of Theorem 3.4 in "
        "every run.",
        Effect.exact("measured / bound", shares[0], unit="ratio"),
        AT_MOST_ONE,
        f"{details[0]}; polar error ε ≤ {number(plain['polar_error'].max(), 3)}",
    )
    outside = Claim(
        "DP-MuonBC: the mean nuclear norm of the gradient is at most the bound for exact polar "
        "factors in every run, although Theorem 3.4 does not cover DP-MuonBC.",
        Effect.exact("measured / bound", shares[1], unit="ratio"),
        AT_MOST_ONE,
        f"{details[1]}; longest step {corrected['longest_step'].max():.3g} in spectral norm; norm, "
        f"DP-MuonBC / DP-Muon, at T = {rows['steps'].max():.0f}: {in_words(ratios)}",
    )
    tight = Claim(
        "In every run, the bound is at most 10 times the measured norm of DP-Muon.",
        Effect.exact("measured / bound", shares[0], unit="ratio"),
        Rule(low=0.1),
        "measured / bound: " + in_words(used),
    )
    return within, outside, tight


def _largest_horizon_claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims at the largest T.

    The claims say which term is the largest, and whether the bound is informative.
    """
    part = where(rows, method=MUON, steps=rows["steps"].max())
    largest, shares, ratios = [], {}, {}
    for noise, noise_part in split(part, "noise", "σ").items():
        terms = {name: float(noise_part[f"term_{name}"][0]) for name in TERMS}
        largest.append(max(terms, key=lambda name: terms[name]))
        share = terms[largest[-1]] / noise_part["bound"][0]
        shares[noise] = f"{largest[-1]}, {share:.0%}"
        ratios[noise] = f"{noise_part['bound'][0] / noise_part['ceiling'][0]:.2f} times √r c"
    quiet = where(part, noise=part["noise"].min())
    return [
        counted(
            "The largest term of the bound is the drift of the momentum at the smallest σ, and "
            "the noise at the largest σ.",
            [largest[0] == "drift", largest[-1] == "noise"],
            "two noises",
            f"{in_words(shares)} of the bound at T = {rows['steps'].max():.0f}",
        ),
        Claim(
            "At the largest T and the smallest σ, the bound is below √r c, which ‖∇f‖_* never "
            "exceeds on this problem.",
            Effect.exact("bound / √r c", quiet["bound"] / quiet["ceiling"], unit="ratio"),
            Rule(high=1.0, strict=True),
            in_words(ratios),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return table rows with the terms of the bound and the measured norms, by noise and T."""
    lines: Rows = [
        ("σ: T", *TERMS, "bound", *(label.removeprefix("DP-") for label in NAMES.values()))
    ]
    names = (*(f"term_{name}" for name in TERMS), "bound")
    for noise in levels(rows, "noise"):
        lines.append(heading(f"{noise:g}:", lines[0]))
        for steps in levels(rows, "steps"):
            parts = [where(rows, method=name, noise=noise, steps=steps) for name in NAMES]
            bound = [f"{parts[0][name][0]:.2f}" for name in names]
            norms = [f"{part['mean_nuclear'].mean():.2f}" for part in parts]
            lines.append((f"  {steps:.0f}", *bound, *norms))
    return lines


# Figures


@style.styled
def norms_and_bounds(rows: Columns, narrow: bool = False) -> Figure:
    """Draw mean nuclear norms and bounds against T.

    There is a panel for each method and a colour for each noise level.
    """
    figure, panels = style.canvas(len(NAMES), narrow, 2.9)
    for axes, (method, name) in zip(panels, NAMES.items(), strict=True):
        for noise, look in zip(levels(rows, "noise"), style.SERIES, strict=False):
            label = f"measured, σ = {noise:g}"
            draw_with_bound(axes, rows, look, label, method=method, noise=noise)
        axes.plot([], [], "--", color=style.BLACK, lw=1.2, label="bound (Theorem 3.4)")
        axes.axhline(rows["ceiling"][0], color=style.GREY, lw=1, ls=":",
                     label="largest norm of any gradient")  # fmt: skip
        axes.set_title(name + (", outside the theorem" if method == CORRECTED else ""), loc="left")
        style.powers_of_2(axes, np.unique(rows["steps"]))
        axes.set_xlabel("steps $T$")
    style.alike(panels, log=True)
    panels[0].set_ylabel(r"mean of $\Vert\nabla f(W_t)\Vert_*$")
    style.legend_below(figure, panels[0], 2 if narrow else 3)
    return figure


STUDY = Study(
    "dp-stationarity",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    {"dp-stationarity": norms_and_bounds},
)
