"""Study `frontier`: how accurate can a model be while the bound on its gap is informative?

A cell is one run with one initial model, step size, lambda and seed. After given numbers of rounds
(horizons), the study evaluates the model and computes the bound, as if the run had ended there. The
constants of a bound are valid on the ball that the models cannot leave, or for all models.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import POINTS, POSITIVE, Claim, Effect, Rule, Slope, mean_of
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.stability.endings import endings
from fedmuon.experiments.studies.study import Call, Study, distinct, heading
from fedmuon.experiments.suites.contents import SuiteRequest, cell, require_free, require_read
from fedmuon.runs.directory import Record

KINDS = ("ball", "global")
SETTLED = {
    "data.name": "--data",
    "task.initial": "starts",
    "federation.seed": "seeds",
    "federation.rounds": "horizons",
    "local.lr": "lrs",
    "orthogonalizer.lambda": "lambdas",
}


class Settings(Table):
    """The keys that the suite's TOML file may contain. `horizons` are numbers of rounds."""

    seeds: Annotated[list[Natural], Field(min_length=1)]
    starts: Annotated[list[Literal["zero", "gaussian"]], Field(min_length=1)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    lambdas: Annotated[list[Positive], Field(min_length=1)]
    horizons: Annotated[list[Count], Field(min_length=1)]
    base: dict[str, dict[str, Scalar]]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each initial model, lambda, step size and seed."""
    require_free("[base]", settings.base, SETTLED)
    grid = itertools.product(settings.starts, settings.lambdas, settings.lrs, settings.seeds)
    calls = []
    for start, lam, lr, seed in grid:
        tables: dict[str, dict[str, Scalar]] = {
            "data": {"name": request.data},
            "task": {"initial": start},
            "federation": {"rounds": max(settings.horizons), "seed": seed},
            "local": {"lr": lr},
            "orthogonalizer": {"lambda": lam},
        }
        config = cell(settings.base, tables)
        require_read("[base]", settings.base, [config])
        name = f"{start}-lambda{lam:g}-lr{lr:g}-seed{seed}"
        work = partial(measure, config, sorted(set(settings.horizons)))
        calls.append(Call(name, work, max(settings.horizons)))
    return calls


# Measurements


def measure(config: Config, horizons: Sequence[int]) -> Record:
    """Return two rows for each number of rounds, one for each kind of constants."""
    first, *ends = endings(config, horizons, {kind: {"constants": kind} for kind in KINDS})
    head = {
        "start": config.task.initial,
        "lambda": config.orthogonalizer.lambda_,
        "lr": config.local.lr,
        "seed": config.federation.seed,
    }
    rows = []
    for end in ends:
        measured = {
            "rounds": end.round,
            "untrained": first.accuracy,
            "accuracy": end.accuracy,
            "train_loss": end.loss.gap.empirical,
            "test_loss": end.test_loss,
            "gap": end.loss.gap.gap,
            "gap_low": end.loss.gap.low,
            "gap_high": end.loss.gap.high,
        }
        # the smallest proved range of the loss
        top = min(certificate.loss_bound for certificate in end.certificates.values())
        for kind, verdict in end.certificates.items():
            value = verdict.bound.value if verdict.bound else math.inf
            bound = {"constants": kind, "bound": value, "range": top, "share": value / top}
            rows.append(head | measured | bound)
    return {"rows": rows}


# Claims

TENTH = 0.1  # share of B, the range of the loss
HALF = 0.5  # share of the accuracy that training gains
NOTHING = Slope(-1.0, -1.0, -1.0)  # refutes the claim if no setting learns
NAMES = {"ball": "the ball", "global": "all models"}
SHOWN = ("lr", "lambda", "rounds", "accuracy", "train_loss", "test_loss", "bound", "share")
STANDS_ON = (
    "Every bound is the bound of the Stability note, Theorem 4.1, with explicit constants, for a "
    "run that ends after the given round. B is the range of the loss over the ball that the "
    "iterates cannot leave. No gap exceeds B, so a bound above B says nothing, whichever "
    "constants it uses. From X⁰ = 0 with small steps, the loss hardly changes while the model "
    "already ranks the classes, so B is small. Therefore the figure shows bound / B and the "
    "accuracy. The best settings are chosen by held-out accuracy, which the bound does not use. "
    "A frontier shows what is possible, but does not guarantee that a search finds it. By "
    "construction, the bound with constants of the ball is never above the bound with constants "
    "of all models. The open question is whether the smaller bound is useful. In the table, the "
    "first line of each X⁰ and kind of constants is the most accurate model with a bound below B "
    "/ 10. The other lines are the longest run for each η. `any` is the most accurate model from "
    "this X⁰ with any bound (constants of the ball). Bounds are compared with the gap at the "
    "clients' label shares. Test losses are plain means. Certificates after the run (`realized`) "
    "are not used, because they are about the neighbours of one run and do not bound the gap."
)


def of(rows: Columns, start: str, kind: str) -> np.ndarray:
    """Return a mask that selects the rows with this initial model and this kind of constants."""
    return (rows["start"] == start) & (rows["constants"] == kind)


def frontier(rows: Columns, mine: np.ndarray) -> np.ndarray:
    """Return the models that are more accurate than every model with a smaller ratio bound / B.

    The result contains row numbers, sorted by the ratio bound / B. If several rows have the same
    bound, the result contains only the most accurate one. Rows without a finite bound are ignored.
    """
    mine = np.flatnonzero(mine & np.isfinite(rows["share"]))
    order = mine[np.lexsort((-rows["accuracy"][mine], rows["share"][mine]))]
    reached = np.maximum.accumulate(rows["accuracy"][order])
    return order[np.diff(reached, prepend=-np.inf) > 0]


def best(rows: Columns, mine: np.ndarray) -> int | None:
    """Return the index of the most accurate row that the mask selects.

    If the mask is empty, the result is None.
    """
    inside = np.flatnonzero(mine)
    return int(inside[rows["accuracy"][inside].argmax()]) if len(inside) else None


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims say that the bounds hold, that models with a bound below B / 10 can learn, and that
    the constants on the ball help.
    """
    gap, bound = rows["gap"], rows["bound"]
    low, high = (rows.get(name, gap) for name in ("gap_low", "gap_high"))
    within = Claim(
        "Every gap is at most its bound.",
        Effect.of_gaps(gap, low, high, bound),
        Rule(high=0.0),
        f"{(gap <= bound).sum()} of {len(gap)} bounds, and {(high <= bound).sum()} for the upper "
        "end of the gap's interval",
    )
    by_start = [_claims_of(rows, start) for start in distinct(rows, "start")]
    return [within, *itertools.chain(*by_start)]


def _claims_of(rows: Columns, start: str) -> tuple[Claim, Claim]:
    """Return the claims about models with a bound below B / 10.

    If a seed has no such model, its initial model X0 is used.
    """
    from_start, small = rows["start"] == start, rows["share"] < TENTH
    covered = []  # the best covered accuracy of each seed, or the accuracy of X0
    for kind in NAMES:
        seeds = _by_seed(rows, of(rows, start, kind))
        places = [(mask, best(rows, mask & (rows["share"] < TENTH))) for mask in seeds]
        best_or_first = [rows["untrained"][mask][0] if place is None else rows["accuracy"][place]
                         for mask, place in places]  # fmt: skip
        covered.append(np.array(best_or_first))
    ball, wide = covered
    first = np.array([rows["untrained"][mask][0] for mask in _by_seed(rows, from_start)])
    top = np.array([rows["accuracy"][mask].max() for mask in _by_seed(rows, from_start)])
    half = mean_of(ball - first - HALF * (top - first))  # paired by seed
    learns = float((top - first).mean()) > 0
    details = []
    for values, (kind, name) in zip((ball, wide), NAMES.items(), strict=True):
        none = not (of(rows, start, kind) & small).any()
        details.append(f"{values.mean():.3f} with {name}" + " (X⁰)" * none)
    covers = (from_start & small).any()
    learned = Claim(
        f"From X⁰ {start}, a model with a bound below B / 10 (constants of the ball) reaches "
        "half of the gain in accuracy by training.",
        Effect.between(
            "gain in accuracy − half of the best gain",
            {"": half if learns else NOTHING},
            unit=POINTS,
        ),
        Rule(low=0.0),
        f"accuracy of X⁰ {first.mean():.3f}, best with a bound below B / 10 {ball.mean():.3f}, "
        f"best of all {top.mean():.3f}",
    )
    ahead = Claim(
        f"From X⁰ {start}, at every seed, the best model with a bound below B / 10 is more "
        "accurate with constants of the ball than with constants of all models (or than X⁰, if "
        "no model has such a bound with constants of all models).",
        Effect.exact("gain in accuracy, per seed", ball - wide if covers else np.nan, unit=POINTS),
        POSITIVE,
        f"{(ball > wide).sum()} of {len(ball)} seeds; best accuracy: {', '.join(details)}",
    )
    return learned, ahead


def _by_seed(rows: Columns, mask: np.ndarray) -> list[np.ndarray]:
    return [mask & (rows["seed"] == seed) for seed in np.unique(rows["seed"][mask])]


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows show the best models with a bound below B / 10, and the longest runs.
    """
    lines: Rows = [("X⁰, constants: η, λ, R", "accuracy", "train loss", "test loss", "bound",
                    "bound / B")]  # fmt: skip
    for start in distinct(rows, "start"):
        for kind in NAMES:
            small = of(rows, start, kind) & (rows["share"] < TENTH)
            places, inside = [best(rows, small)], np.flatnonzero(small)
            for lr in np.unique(rows["lr"][inside]):
                same = inside[rows["lr"][inside] == lr]
                order = np.lexsort((rows["accuracy"][same], rows["rounds"][same]))
                places.append(int(same[order[-1]]))
            lines.append(heading(f"{start}, {kind}:", lines[0]))
            lines += dict.fromkeys(_line(rows, place) for place in places)
        lines.append(heading(f"{start}, any:", lines[0]))
        lines.append(_line(rows, best(rows, of(rows, start, "ball"))))
    return lines


def _line(rows: Columns, place: int | None) -> tuple[str, ...]:
    if place is None:
        return ("  none", *("–" for _ in range(5)))
    at = {name: float(column[place]) for name, column in rows.items() if name in SHOWN}
    setting = f"  {at['lr']:g}, {at['lambda']:g}, {at['rounds']:g}"
    losses = (f"{at[name]:.5f}" for name in ("train_loss", "test_loss"))
    bounds = (number(at[name], 2) for name in ("bound", "share"))
    return (setting, f"{at['accuracy']:.3f}", *losses, *bounds)


# Figures

LINES = dict(zip(NAMES, ("-", "--"), strict=True))
MANY = 300  # with more points, the marks are smaller


@style.styled
def by_share(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the accuracy of models against their bound divided by B.

    Each model is a point. A step line shows the best accuracy among all models with at most this
    bound. The lower panels show the test and train losses of the models on the step line.
    """
    starts = distinct(rows, "start")
    figure, panels = style.canvas(2 * len(starts), narrow, 2.3, len(starts))
    above, below = panels[: len(starts)], panels[len(starts) :]
    for axes, under, start in zip(above, below, starts, strict=True):
        for (kind, name), (colour, marker) in zip(NAMES.items(), style.SERIES, strict=False):
            mask = of(rows, start, kind) & (rows["share"] < 10)
            axes.plot(rows["share"][mask], rows["accuracy"][mask], marker, color=colour, mew=0,
                      ms=2 if mask.sum() > MANY else 4, rasterized=True)  # fmt: skip
            axes.plot([], [], marker, color=colour, mew=0, ms=4,
                      label=f"every model, constants of {name}")  # fmt: skip
            if not len(places := frontier(rows, mask)):
                continue
            x, top = rows["share"][places], rows["accuracy"][places]
            end = rows["share"][mask].max()  # the largest share of a point
            axes.step([*x, end], [*top, top[-1]], LINES[kind], color=colour, where="post", lw=1.4,
                      label=f"best model, constants of {name}")  # fmt: skip
            for loss, full in (("test_loss", colour), ("train_loss", "none")):
                under.plot(x, rows[loss][places], marker, color=colour, ms=4, mfc=full, mew=0.9)
        axes.set_title(f"X⁰ {start}", loc="left")
        under.set_title(f"X⁰ {start}: losses of the best", loc="left")
    for axes in panels:
        axes.axvline(TENTH, color=style.GREY, lw=1, ls=":")
        axes.set_xlim(0.8 * rows["share"].min(), min(10.0, 1.25 * rows["share"].max()))
        style.log_x(axes)
        axes.set_xlabel("bound / B")
    for group, label in ((above, "held-out accuracy"), (below, "loss")):
        style.alike(group)
        for axes in group[: len(starts) if narrow else 1]:
            axes.set_ylabel(label)
    for axes in above:
        axes.set_ylim(bottom=0)
    for label, full in (("test loss", style.BLACK), ("train loss", "none")):
        above[0].plot([], [], "o", color=style.BLACK, ms=4, mfc=full, mew=0.9, label=label)
    above[0].plot([], [], ":", color=style.GREY, lw=1, label="a tenth of B")
    style.legend_below(figure, above[0], 1 if narrow else 3)
    return figure


STUDY = Study("frontier", Settings, cells, claims, numbers, STANDS_ON, {"frontier": by_share})
