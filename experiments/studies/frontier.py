"""Study `frontier`: how well a model predicts while a proved bound on its gap still says something.

A cell is one run: a start, a step size, a lambda, a seed. After each of the horizons it looks at
the model, and asks the theory for the bound of a run that ends there: its schedule is the first
part of the longer one's. Bounds come with both kinds of constants, of the ball and of all models.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from fedmuon.analysis import Realized
from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Picture, Rows, number
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import POINTS, POSITIVE, Claim, Effect, Rule, Slope, mean_of
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.certify import Verdict, judge
from fedmuon.experiments.stability.gap import proved_range
from fedmuon.experiments.stability.measure import measured_losses
from fedmuon.experiments.stability.reachable_ball import start_of
from fedmuon.experiments.studies.study import Call, Study
from fedmuon.experiments.suites.contents import SuiteRequest, cell, require_free, require_read
from fedmuon.federated.build import build_experiment, resolve
from fedmuon.federated.client_data import build_data, read_source
from fedmuon.federated.rounds import Experiment, begin, risk, run_rounds
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Params

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
    """What the suite's file holds; `horizons` are numbers of rounds."""

    seeds: Annotated[list[Natural], Field(min_length=1)]
    starts: Annotated[list[Literal["zero", "gaussian"]], Field(min_length=1)]
    lrs: Annotated[list[Positive], Field(min_length=1)]
    lambdas: Annotated[list[Positive], Field(min_length=1)]
    horizons: Annotated[list[Count], Field(min_length=1)]
    base: dict[str, dict[str, Scalar]]


def cells(settings: Settings, asked: SuiteRequest) -> Sequence[Call]:
    """A cell for each start, lambda, step size and seed."""
    require_free("[base]", settings.base, SETTLED)
    every = itertools.product(settings.starts, settings.lambdas, settings.lrs, settings.seeds)
    found = []
    for start, lam, lr, seed in every:
        own: dict[str, dict[str, Scalar]] = {
            "data": {"name": asked.data},
            "task": {"initial": start},
            "federation": {"rounds": max(settings.horizons), "seed": seed},
            "local": {"lr": lr},
            "orthogonalizer": {"lambda": lam},
        }
        config = cell(settings.base, own)
        require_read("[base]", settings.base, [config])
        name = f"{start}-lambda{lam:g}-lr{lr:g}-seed{seed}"
        work = partial(followed, config, sorted(set(settings.horizons)))
        found.append(Call(name, work, max(settings.horizons)))
    return found


def followed(config: Config, horizons: Sequence[int]) -> Record:
    """The model and its bounds after each of these numbers of rounds."""
    config = resolve(config)
    source = read_source(config)
    data = build_data(config, source)
    experiment = build_experiment(config, data)
    models = _models(experiment, config.federation.seed, horizons)
    held, plan = experiment.shards.held_out, experiment.plan
    test = risk(experiment.task, models, held.inputs, held.labels)
    right, (first, *_) = test.scores["accuracy"], models["weight"]
    start, sizes = start_of(first.cpu().numpy(), source), data.sizes
    judged, every = [], plan.factors()
    for horizon in horizons:
        seen = Realized(plan.schedule()[:horizon], plan.rows if plan.batch else None)
        settings = (_ending(config, horizon, kind) for kind in KINDS)
        factors = None if every is None else every[:horizon]
        cases = [
            Case(one, sizes, seen, first.shape, start=start, factors=factors) for one in settings
        ]
        verdicts = [judge(case) for case in cases]
        judged.append((verdicts, proved_range(cases[0], verdicts[0])))
    tops = [1.0, *(top for _, top in judged)]  # of X0, whose gap nobody asks for
    losses = measured_losses(config, data, source.classes, experiment, models, tops)
    rows = []
    for place, (horizon, (verdicts, _)) in enumerate(zip(horizons, judged, strict=True), 1):
        known = {
            "rounds": horizon,
            "untrained": float(right[0]),
            "accuracy": float(right[place]),
            "train_loss": losses[place].gap.empirical,
            "test_loss": float(test.loss[place]),
            "gap": losses[place].gap.gap,
            "gap_low": losses[place].gap.low,
            "gap_high": losses[place].gap.high,
        }
        rows += [known | row for row in _promised(verdicts)]
    head = {
        "start": config.task.initial,
        "lambda": config.orthogonalizer.lambda_,
        "lr": config.local.lr,
        "seed": config.federation.seed,
    }
    return {"rows": [head | row for row in rows]}


def _models(experiment: Experiment, seed: int, horizons: Sequence[int]) -> Params:
    """X0, and the model after each horizon, as a stack."""
    begun = begin(experiment.recipe, experiment.task, seed)
    kept = [
        done.state.params["weight"]
        for done in run_rounds(experiment, begun)
        if done.state.round in horizons
    ]
    return {"weight": torch.cat([begun.params["weight"], *kept])}


def _ending(config: Config, horizon: int, kind: str) -> Config:
    """The config of the run that ends there."""
    federation = config.federation.model_copy(update={"rounds": horizon})
    stability = config.stability.model_copy(update={"constants": kind})
    return config.model_copy(update={"federation": federation, "stability": stability})


def _promised(verdicts: Sequence[Verdict]) -> list[Record]:
    """Each kind's bound, and which part it is of B, the least range of the loss that is proved."""
    top = min(one.loss_bound for one in verdicts)
    values = [one.bound.value if one.bound else math.inf for one in verdicts]
    return [
        {"constants": kind, "bound": value, "range": top, "share": value / top}
        for kind, value in zip(KINDS, values, strict=True)
    ]


# Claims and numbers.

TENTH = 0.1  # of B, the range of the loss
HALF = 0.5  # of what training gains in accuracy
NOTHING = Slope(-1.0, -1.0, -1.0)  # where no setting learns, half of it is nothing to have
NAMES = {"ball": "the ball", "global": "all models"}
SHOWN = ("lr", "lambda", "rounds", "accuracy", "train_loss", "test_loss", "bound", "share")
STANDS_ON = (
    "Every bound is that of 001, Theorem 4.1 with no constant left open, of a run that ends after "
    "the round it stands at. B is the range of the loss over the ball that the iterates cannot "
    "leave: no gap exceeds it, so a bound above it says nothing, whatever constants it is made of. "
    "From X⁰ = 0 with small steps the loss hardly moves while the model already ranks the "
    "classes, so that B is small: hence bound / B, and accuracy beside it. Best settings are "
    "chosen by held-out accuracy, which the bound does not know of: a frontier says what can be "
    "had, and is no guarantee for a search. By construction the bound with the constants of the "
    "ball is never above the one with those of all models; what may fail is that this is worth "
    "anything. In the table the first line of a start and its constants is the most accurate "
    "model below B / 10, the others are, for each η, the longest run; `any` is the most accurate "
    "model of that start whatever its bound (with the ball). Bounds are held against the gap at "
    "the clients' label shares, test losses are plain means. Certificates after the run "
    "(`realized`) have no place here: they are of one run's neighbours, and bound no gap."
)


def of(rows: Columns, start: str, kind: str) -> np.ndarray:
    """The rows of a start with a kind of constants."""
    return (rows["start"] == start) & (rows["constants"] == kind)


def frontier(rows: Columns, mine: np.ndarray) -> np.ndarray:
    """The rows in rising order of bound / B that are more accurate than all before them; of equal
    bounds the first, and what has no finite bound is not among them."""
    mine = np.flatnonzero(mine & np.isfinite(rows["share"]))
    order = mine[np.lexsort((-rows["accuracy"][mine], rows["share"][mine]))]
    reached = np.maximum.accumulate(rows["accuracy"][order])
    return order[np.diff(reached, prepend=-np.inf) > 0]


def best(rows: Columns, mine: np.ndarray) -> int | None:
    """Where accuracy is best among those of a bound below a tenth of B, if there are any."""
    return _most_accurate(rows, mine & (rows["share"] < TENTH))


def _most_accurate(rows: Columns, mine: np.ndarray) -> int | None:
    inside = np.flatnonzero(mine)
    return int(inside[rows["accuracy"][inside].argmax()]) if len(inside) else None


def claims(rows: Columns) -> Sequence[Claim]:
    """The bounds hold; below B / 10 there is something learned; the ball's constants matter."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    every = [(learned(rows, start), ahead(rows, start)) for start in starts]
    return [within(rows), *itertools.chain(*every)]


def within(rows: Columns) -> Claim:
    """gap <= bound in every row: within only if the gap's interval is."""
    gap, bound = rows["gap"], rows["bound"]
    low, high = (rows.get(name, gap) for name in ("gap_low", "gap_high"))
    away = Effect("gap − bound", gap - bound, low - bound, high - bound, seeded=False, unit="loss")
    detail = (
        f"{(gap <= bound).sum()} of {len(gap)} bounds, {(high <= bound).sum()} at the upper end"
    )
    return Claim("Every gap is at most its bound.", away, Rule(high=0.0), detail)


def learned(rows: Columns, start: str) -> Claim:
    """With the ball's constants: half of the accuracy that any setting gains over X0, on average
    over seeds."""
    here, kept = rows["start"] == start, _covered(rows, start, "ball")
    first = np.array([rows["untrained"][one][0] for one in _by_seed(rows, here)])
    top = np.array([rows["accuracy"][one].max() for one in _by_seed(rows, here)])
    half = mean_of(kept - first - HALF * (top - first))  # seed by seed
    learns = float((top - first).mean()) > 0
    return Claim(
        f"From X⁰ {start}, half of what training gains in accuracy is had with a bound below "
        "B / 10, with the ball.",
        Effect.between(
            "accuracy gained beyond half of the best",
            {"": half if learns else NOTHING},
            unit=POINTS,
        ),
        Rule(low=0.0),
        f"X⁰ {first.mean():.3f}, covered {kept.mean():.3f}, best of all {top.mean():.3f}",
    )


def ahead(rows: Columns, start: str) -> Claim:
    """With a bound below a tenth of B accuracy is higher with the constants of the ball, at every
    seed. Where nothing is covered, X0 counts: it needs no stability."""
    ball, wide = (_covered(rows, start, kind) for kind in NAMES)
    small = (rows["start"] == start) & (rows["share"] < TENTH)
    said = ", ".join(
        f"{values.mean():.3f} with {name}" + (" (X⁰)" * (best(rows, of(rows, start, kind)) is None))
        for values, (kind, name) in zip((ball, wide), NAMES.items(), strict=True)
    )
    return Claim(
        f"From X⁰ {start}, the best model with a bound below B / 10 is better with the ball than "
        "with all models, or than X⁰ where these cover none, at every seed.",
        Effect.exact(
            "gain in accuracy of a seed", ball - wide if small.any() else np.nan, unit=POINTS
        ),
        POSITIVE,
        f"{(ball > wide).sum()} of {len(ball)} seeds; best accuracy: {said}",
    )


def _covered(rows: Columns, start: str, kind: str) -> np.ndarray:
    """At each seed the best accuracy with a bound below a tenth of B, or X0's [seeds]."""
    found = []
    for one in _by_seed(rows, of(rows, start, kind)):
        place = best(rows, one)
        found.append(rows["untrained"][one][0] if place is None else rows["accuracy"][place])
    return np.array(found)


def _by_seed(rows: Columns, mine: np.ndarray) -> list[np.ndarray]:
    return [mine & (rows["seed"] == seed) for seed in np.unique(rows["seed"][mine])]


def numbers(rows: Columns) -> Rows:
    """By start: the models below a tenth of B with each kind of constants, and the best of all."""
    lines: Rows = [("X⁰, constants: η, λ, R", "accuracy", "train loss", "test loss", "bound",
                    "bound / B")]  # fmt: skip
    for start in dict.fromkeys(rows["start"].tolist()):
        for kind in NAMES:
            mine = of(rows, start, kind)
            places = best(rows, mine), *_longest(rows, mine)
            lines.append((f"{start}, {kind}:", *("" for _ in range(5))))
            lines += dict.fromkeys(_line(rows, place) for place in places)
        lines.append((f"{start}, any:", *("" for _ in range(5))))
        lines.append(_line(rows, _most_accurate(rows, of(rows, start, "ball"))))
    return lines


def _longest(rows: Columns, mine: np.ndarray) -> list[int]:
    """For each step size, the largest R (and there the most accurate) with such a bound."""
    inside = np.flatnonzero(mine & (rows["share"] < TENTH))
    found = []
    for lr in np.unique(rows["lr"][inside]):
        same = inside[rows["lr"][inside] == lr]
        found.append(int(same[np.lexsort((rows["accuracy"][same], rows["rounds"][same]))[-1]]))
    return found


def _line(rows: Columns, place: int | None) -> tuple[str, ...]:
    """A point; dashes where there is none."""
    if place is None:
        return ("  none", *("–" for _ in range(5)))
    at = {name: float(column[place]) for name, column in rows.items() if name in SHOWN}
    setting = f"  {at['lr']:g}, {at['lambda']:g}, {at['rounds']:g}"
    losses = (f"{at[name]:.5f}" for name in ("train_loss", "test_loss"))
    bounds = (number(at[name], 2) for name in ("bound", "share"))
    return (setting, f"{at['accuracy']:.3f}", *losses, *bounds)


# The figure.

LINES = dict(zip(NAMES, ("-", "--"), strict=True))
MANY = 300  # points, which are small


@style.styled
def by_share(rows: Columns, narrow: bool = False) -> Figure:
    """Above, every run and horizon as a point, and the best accuracy up to each bound / B as a
    step; below, the test and train losses of these best."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    figure, panels = style.canvas(2 * len(starts), narrow, 2.3, len(starts))
    above, below = panels[: len(starts)], panels[len(starts) :]
    for axes, under, start in zip(above, below, starts, strict=True):
        for (kind, name), look in zip(NAMES.items(), style.SERIES, strict=False):
            _draw(axes, under, rows, of(rows, start, kind) & (rows["share"] < 10), look, kind, name)
        axes.set_title(f"X⁰ {start}", loc="left")
        under.set_title(f"X⁰ {start}: losses of the best", loc="left")
    for axes in panels:
        axes.axvline(TENTH, color=style.GREY, lw=1, ls=":")
        axes.set_xlim(0.8 * rows["share"].min(), min(10.0, 1.25 * rows["share"].max()))
        style.log_x(axes)
        axes.set_xlabel("bound / B")
    for group in (above, below):
        style.alike(group)
    for axes in above:
        axes.set_ylim(bottom=0)
    for group, label in ((above, "held-out accuracy"), (below, "loss")):
        for axes in group[: len(starts) if narrow else 1]:
            axes.set_ylabel(label)
    style.legend_below(figure, _labels(above[0]), 1 if narrow else 3)
    return figure


def _draw(above: Axes, below: Axes, rows: Columns, seen: np.ndarray, look: tuple[str, str],
          kind: str, name: str) -> None:  # fmt: skip
    """One kind of constants in both panels."""
    colour, marker = look
    above.plot(rows["share"][seen], rows["accuracy"][seen], marker, color=colour, mew=0,
               ms=2 if seen.sum() > MANY else 4, rasterized=True)  # fmt: skip
    if not len(places := frontier(rows, seen)):
        return
    x, top = rows["share"][places], rows["accuracy"][places]
    end = rows["share"][seen].max()  # as far as there are points
    above.step([*x, end], [*top, top[-1]], LINES[kind], color=colour, where="post", lw=1.4,
               label=f"best with constants of {name}")  # fmt: skip
    for loss, full in (("test_loss", colour), ("train_loss", "none")):
        below.plot(x, rows[loss][places], marker, color=colour, ms=4, mfc=full, mew=0.9)


def _labels(axes: Axes) -> Axes:
    """With what tells test from train below."""
    for label, full in (("test loss", style.BLACK), ("train loss", "none")):
        axes.plot([], [], "o", color=style.BLACK, ms=4, mfc=full, mew=0.9, label=label)
    axes.plot([], [], ":", color=style.GREY, lw=1, label="a tenth of B")
    return axes


PICTURES = (
    Picture(
        "frontier",
        by_share,
        "Held-out accuracy against the bound as a part of the loss's range",
        "Above, each point is a run after some round, with the bound of a run that ends there; "
        "lines are the best accuracy at a bound that is no larger. Below are the losses of these "
        "best: full marks held out, hollow ones on the clients' samples. Left of the dotted line "
        "the bound is below a tenth of B. Higher and further left is better; right of 1 a bound "
        "says nothing. Certificates after the run (`realized`) are not drawn: they certify one "
        "run's neighbours, and are no bound of the gap.",
    ),
)

STUDY = Study(
    "frontier",
    Settings,
    cells,
    claims,
    numbers,
    STANDS_ON,
    PICTURES,
)
