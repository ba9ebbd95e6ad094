"""Study `rank-dependence`: how the nuclear norm of the gradient grows with the rank.

The source is Newton–Schulz convergence, Appendix H.2. The model is y = X x with X [r, n]. The loss
is ||X x - y||^2 / (2 r), a mean over outputs as usual for networks. In the paper's norms (the
operator norm and its dual), D_0 = f(0) - f* = 1/2 and L = 1 for every r. Therefore any growth with
r comes from the optimizer.

A growth can also come from a step size that does not fit every rank. Therefore a cell runs all
factors of the usual step size, and methods are compared with the best factor at each rank.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Curve, Effect, Rule, Slope, curve
from fedmuon.config.schema import Count, OrthogonalizerTable, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import (
    Call,
    Study,
    in_words,
    levels,
    run_chain,
    seed_rows,
    tuned_in_rows,
)
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.chain import Chain
from fedmuon.optim.links import descend, gradient, map_matrices, momentum
from fedmuon.optim.orthogonalizers import map_of_table
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

MAPS = {
    "muon-svd": OrthogonalizerTable(name="exact-sign"),
    **{
        f"muon-ns-{q}": OrthogonalizerTable(name="newton-schulz", coefficients="quintic", steps=q)
        for q in (1, 2, 3)
    },
}
METHODS = ("sgd-m", *MAPS)
USUAL = "sgd-m, 1/L"  # SGD-M with the step size of the theorem, the same for all ranks


class Settings(Table):
    """The keys that the suite's TOML file may contain."""

    ranks: Annotated[list[Count], Field(min_length=2)]
    steps: Annotated[list[Count], Field(min_length=1)]  # numbers of steps to average over
    seeds: Annotated[int, Field(ge=2)]
    inputs: Count
    batch: Count
    label_noise: Positive
    memory: Annotated[float, Field(ge=0, lt=1)]
    lr_sgd: Positive
    lr_muon: Positive
    # factors of these two step sizes, of which each rank has its best
    factors: Annotated[list[Positive], Field(min_length=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each method and rank.

    A cell computes all step sizes and seeds together in one batch.
    """
    if 1.0 not in settings.factors:
        raise InputError(
            "factors does not contain 1, but the growth of SGD-M is also shown at lr-sgd itself. "
            "Add 1.0 to factors."
        )
    return [
        Call(f"{method}-r{rank}", partial(measure, settings, method, rank), rank)
        for method in METHODS
        for rank in settings.ranks
    ]


# Measurements


def measure(settings: Settings, method: str, rank: int) -> Record:
    """Return a row for each K, factor of the step size, and seed.

    A row contains the mean of ||grad f(X_k)||_* over the steps k < K. All factors use the same
    mini-batches.
    """
    factors, seeds, longest = settings.factors, settings.seeds, max(settings.steps)
    goal = targets(rank, settings.inputs, seeds).repeat(len(factors), 1, 1)
    turned = [map_matrices(map_of_table(MAPS[method]))] if method in MAPS else []
    rate = settings.lr_muon if method in MAPS else settings.lr_sgd
    rates = rate * torch.tensor(factors, dtype=torch.float64).repeat_interleave(seeds)
    chain = Chain((gradient(), momentum(settings.memory), *turned, descend(rates)))
    oracle = partial(_oracle, goal, seeds, settings.batch, settings.label_noise)
    start = {"X": torch.zeros_like(goal)}
    sizes = []
    for step, now in run_chain(chain, start, oracle, longest, partial(generator, rank)):
        if step < longest:
            sizes.append(nuclear(slope(now["X"], goal)))
    rows = []
    for length in settings.steps:
        means = torch.stack(sizes)[:length].mean(0).view(len(factors), seeds)
        for factor, values in zip(factors, means, strict=True):
            head = {"method": method, "rank": rank, "factor": factor, "steps": length}
            rows += seed_rows(head, "mean_nuclear", values)
    return {"rows": rows}


def targets(rank: int, inputs: int, seeds: int) -> Tensor:
    """Return random targets X* [S, r, n] with orthonormal rows, so their operator norm is 1."""
    draws = generator(rank, Draw.SYNTHETIC).standard_normal((seeds, inputs, rank))
    return torch.from_numpy(np.linalg.qr(draws)[0]).mT.contiguous()


def slope(at: Tensor, goal: Tensor) -> Tensor:
    """Return the gradient (X - X*) / r of the expected loss."""
    return (at - goal) / goal.shape[-2]


def nuclear(at: Tensor) -> Tensor:
    """Return the nuclear norm of each matrix, infinite if the run of this matrix has diverged.

    The norm is computed from the eigenvalues of the smaller Gram matrix.
    """
    gram = at @ at.mT
    diverged = ~gram.isfinite().all(-1).all(-1)
    finite_gram = gram.masked_fill(diverged[:, None, None], 0.0)
    norms = torch.linalg.eigvalsh(finite_gram).clamp_min(0).sqrt().sum(-1)
    return norms.masked_fill(diverged, torch.inf)


def _oracle(
    goal: Tensor, seeds: int, batch: int, label_noise: float, step: int, params: Params
) -> tuple[Tensor, Params]:
    """Return the losses and the gradient on a new mini-batch, the same for every step size."""
    runs, rank, inputs = goal.shape
    rng = generator(rank, Draw.BATCH, step=step)
    x, noise = (
        torch.from_numpy(rng.standard_normal((seeds, size, batch))).repeat(runs // seeds, 1, 1)
        for size in (inputs, rank)
    )
    noise = noise * label_noise
    error = (params["X"] - goal) @ x - noise
    return error.square().sum(1).mean(1) / (2 * rank), {"X": error @ x.mT / (batch * rank)}


# Claims

NAMES = {USUAL: "SGD-M, η = 1/L", "sgd-m": "SGD-M", "muon-svd": "Muon, SVD",
         "muon-ns-1": "Muon, q = 1", "muon-ns-2": "Muon, q = 2",
         "muon-ns-3": "Muon, q = 3"}  # fmt: skip
FLAT = 0.1  # slopes of at most this size count as flat
PROMISED = 0.5  # slope of SGD-M by Theorem 3; our copy of the paper lacks the published slope
STANDS_ON = (
    "The model is a matrix regression whose loss is a mean over outputs. Its target has r "
    "singular values, all equal to 1, so f(X₀) − f* = 1/2 and L = 1 in the paper's norms for "
    "every r. Except for SGD-M with η = 1/L, each method uses at each r the best of the same "
    "factors of its step size, by the mean of ‖∇f‖_* at the largest K in these runs. The "
    "paper's theorems bound this mean by √r times a constant for SGD-M, and by a constant for "
    "Muon. These are upper bounds, which a problem need not reach. The paper instead measures a "
    "convolution of a network on CIFAR-10."
)


def norms(rows: Columns, method: str, length: float) -> Curve:
    """Return the mean nuclear norms of a method over K steps, for each rank."""
    return curve(rows, "rank", "mean_nuclear", method=method, steps=length)


def slopes(rows: Columns, method: str) -> dict[str, Slope]:
    """Return the slope of log norm against log rank, for each number of steps K.

    The slopes are sorted by K.
    """
    return {f"K = {k:.0f}": norms(rows, method, k).slope for k in levels(rows, "steps")}


def tunings(rows: Columns, method: str) -> dict[float, Tuned]:
    """Return the mean nuclear norm at the largest K for each factor, by rank."""
    last = where(rows, method=method, steps=rows["steps"].max())
    return {
        rank: tuned_in_rows(
            where(last, rank=rank), f"{NAMES[method]} (r = {rank:.0f})", "factor", "mean_nuclear"
        )
        for rank in levels(last, "rank")
    }


def tuned_rows(rows: Columns) -> Columns:
    """Return the rows with each method's best factor at each rank, and those of SGD-M at 1/L."""
    mask = (rows["method"] == "sgd-m") & (rows["factor"] == 1)
    usual = {name: column[mask] for name, column in rows.items()}
    parts = [usual | {"method": np.full(mask.sum(), USUAL)}]
    parts += [
        where(rows, method=method, rank=rank, factor=tuned.best)
        for method in METHODS
        for rank, tuned in tunings(rows, method).items()
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in rows}


def less_than_sgd(last: Mapping[str, Slope]) -> dict[str, Slope]:
    """Return by how much the slope of each variant of Muon is smaller than the slope of SGD-M.

    Methods use the same random numbers, so their slopes are not independent. Therefore, the ends of
    the intervals are compared.
    """
    sgd = last["sgd-m"]
    return {
        NAMES[name]: Slope(
            sgd.value - muon.value, sgd.low - muon.high, sgd.high - muon.low,
            min(sgd.free, muon.free), sgd.few or muon.few,
        )
        for name, muon in last.items()
        if name in MAPS
    }  # fmt: skip


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about the slopes of log norm against log rank."""
    tuned, best = {name: tunings(rows, name) for name in METHODS}, tuned_rows(rows)
    by_method = {name: slopes(best, name) for name in NAMES}
    last = {name: list(by_length.values())[-1] for name, by_length in by_method.items()}
    factors = {name: "factors " + ", ".join(f"{tuning.best:g}" for tuning in tuned[name].values())
              for name in METHODS}  # fmt: skip

    def untuned(*names: str) -> str:
        return objection(names, {name: [*tuned[name].values()] for name in names})

    return [
        Claim(
            "With SGD-M at the step size 1/L for every rank r, the nuclear norm of the gradient "
            "grows with r, about like √r.",
            Effect.between("log-log slope", {"": last[USUAL]}, unit="slope"),
            Rule(PROMISED - 0.25, PROMISED + 0.25),
            f"{in_words(by_method[USUAL])}; √r is a slope of +{PROMISED}; the slope at the largest "
            "K must be within ±0.25 of that",
        ),
        Claim(
            "With SGD-M at its best step size for each rank r, the nuclear norm of the gradient "
            "grows with r.",
            Effect.between("log-log slope", {"": last["sgd-m"]}, unit="slope"),
            POSITIVE,
            f"{last['sgd-m']}; {factors['sgd-m']}",
            untuned=untuned("sgd-m"),
        ),
        *(
            Claim(
                f"{NAMES[name]}: the nuclear norm at the largest number of steps K is about flat "
                f"in the rank, with a log-log slope within ±{FLAT}, at the best step size for "
                "each rank.",
                Effect.between("log-log slope", {"": last[name]}, unit="slope"),
                Rule(-FLAT, FLAT),
                f"{in_words(by_method[name])}; {factors[name]}",
                untuned=untuned(name),
            )
            for name in MAPS
        ),
        Claim(
            "At the largest number of steps K, the nuclear norm grows less with the rank for "
            "every variant of Muon than for SGD-M, each at its best step size for each rank.",
            Effect.between("slope, SGD-M − Muon", less_than_sgd(last), unit="slope"),
            POSITIVE,
            "; ".join(f"{NAMES[name]} {last[name]}" for name in METHODS),
            untuned=untuned(*METHODS),
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table: slopes of the runs with the best step sizes."""
    return table(tuned_rows(rows))


def table(rows: Columns) -> Rows:
    """Return a table of slopes by method and number of steps."""
    head = ("method", *(f"slope over K = {length:.0f}" for length in levels(rows, "steps")))
    return [head, *((NAMES[name], *map(str, slopes(rows, name).values())) for name in named(rows))]


def named(rows: Columns) -> list[str]:
    """Return the methods of the rows, in the order of `NAMES`."""
    return [name for name in NAMES if name in rows["method"]]


# Figures


def figure(rows: Columns, narrow: bool = False) -> Figure:
    """Draw norms and slopes of the runs with the best step sizes."""
    return dependence(tuned_rows(rows), narrow)


@style.styled
def dependence(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the mean norms against r at the largest K, and the slopes against K."""
    figure, (left, right) = style.canvas(2, narrow, 2.9)
    lengths = np.unique(rows["steps"])
    for name, look in zip(named(rows), style.SERIES, strict=False):
        label = NAMES[name]
        last, fits = norms(rows, name, lengths[-1]), slopes(rows, name).values()
        style.errorbars(left, last.sizes, last.means, last.reach, look, label)
        value, low, high = np.array([(fit.value, fit.low, fit.high) for fit in fits]).T
        style.errorbars(right, lengths, value, (value - low, high - value), look)
    guide = norms(rows, named(rows)[0], lengths[-1])
    line = 1.3 * guide.means[-1] * np.sqrt(guide.sizes / guide.sizes[-1])
    left.plot(guide.sizes, line, ":", color=style.BLACK, lw=1.2, label="slope 1/2")
    right.axhline(0, color=style.GREY, lw=0.8)
    right.axhline(0.5, color=style.BLACK, lw=1.2, ls=":")
    style.powers_of_2(left, guide.sizes)
    style.powers_of_2(right, lengths)
    style.log_y(left)
    left.set_xlabel("rank $r$")
    left.set_ylabel(r"mean of $\Vert\nabla f(X_k)\Vert_*$")
    right.set_xlabel("steps $K$")
    right.set_ylabel("fitted slope in $r$")
    style.legend_below(figure, left, 3)
    return figure


STUDY = Study(
    "rank-dependence", Settings, cells, claims, numbers, STANDS_ON, {"rank-dependence": figure}
)
