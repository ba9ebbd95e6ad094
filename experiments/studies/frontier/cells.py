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

import torch
from pydantic import Field

from fedmuon.analysis import Realized
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Natural, Positive
from fedmuon.core.tables import Scalar, Table
from fedmuon.experiments.stability.certified_setting import Case
from fedmuon.experiments.stability.certify import Verdict, judge
from fedmuon.experiments.stability.gap import proved_range
from fedmuon.experiments.stability.measure import measured_losses
from fedmuon.experiments.stability.reachable_ball import start_of
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked, cell, require_free, require_read
from fedmuon.federated import build
from fedmuon.federated.evaluate import risk
from fedmuon.federated.rounds import Experiment, begin, run_rounds
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


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
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
    config = build.resolve(config)
    source = build.source(config)
    data = build.federated_data(config, source)
    experiment = build.experiment(config, data, source.classes)
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
