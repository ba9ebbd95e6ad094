"""Study `attribution`: whose weight changed what the model says, against exact runs without them.

Leave-one-out: the run again with one sample's gradient left out, n_i as it was. Linear datamodeling
score (Park et al. 2023): the run again on half of every client's samples, for many such halves, and
for each test sample Spearman's rho between its losses and the sums of the scores of those who
stayed. All runs share every draw but that, so what is compared has no noise.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report.claims import spearman
from fedmuon.config.load import Config
from fedmuon.config.schema import Count, Positive
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Scalar, Table
from fedmuon.data.neighbours import Neighbours
from fedmuon.experiments.studies.attribution.scores import Trained, methods
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked, cell
from fedmuon.federated import build
from fedmuon.federated.rounds import begin, run_neighbours, simulate
from fedmuon.runs.directory import Record
from fedmuon.tasks.base import Batch, Params

STACK = 64  # runs at once
Nested = dict[str, dict[str, Scalar]]


class Settings(Table):
    """What the suite's file holds: config tables that all runs share, and those of each variant."""

    tests: Annotated[int, Field(ge=2)]  # test samples
    left_out: Annotated[int, Field(ge=3)]  # samples that are left out, one at a time
    subsets: Annotated[int, Field(ge=3)]  # halves
    dampings: Annotated[list[Positive], Field(min_length=1)]  # of influence, relative
    projections: Count  # of TRAK
    variants: Annotated[dict[str, Nested], Field(min_length=1)]
    base: Nested = Field(default_factory=dict)


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """A cell for each variant and each truth."""
    source = {"data": {"name": asked.data}, "engine": {"dtype": "float64", "device": "cpu"}}
    return [
        Call(f"{place}-{truth}", partial(measured, settings, name, config, truth))
        for place, (name, tables) in enumerate(settings.variants.items())
        for config in [_require_matrix(cell(source, settings.base, tables))]
        for truth in TRUTHS
    ]


def _require_matrix(config: Config) -> Config:
    if config.task.name != "matrix" or config.local.batch:
        raise InputError("attribution is for the matrix task and full batches: leave them out")
    return config


def measured(asked: Settings, variant: str, config: Config, truth: str) -> Record:
    """A row for each method and test sample: the correlation of its scores with the truth."""
    run = trained(config, asked.tests)
    known, weights = TRUTHS[truth](run, asked)
    rows = []
    for name, method in methods(asked.dampings, asked.projections).items():
        foretold = (method(run) @ weights.T).numpy()  # [T, exact runs]
        for t, (one, other) in enumerate(zip(foretold, known.T, strict=True)):
            rows.append({"variant": variant, "truth": truth, "method": name, "test": t,
                         "rho": spearman(one, other)})  # fmt: skip
    return {"rows": rows}


def trained(config: Config, tests: int) -> Trained:
    """The run with its first test samples."""
    config = build.resolve(config)
    source = build.source(config)
    data = build.federated_data(config, source)
    experiment = build.experiment(config, data, source.classes)
    held = experiment.shards.held_out
    return Trained(
        experiment, config.federation.seed, Batch(held.inputs[:tests], held.labels[:tests])
    )


def left_out(run: Trained, asked: Settings) -> tuple[np.ndarray, Tensor]:
    """Test losses of runs without one of some participants' samples, over those of the run with
    all [runs, T], and the weights that the runs change [runs, n].

    A sample of zeros in its place has no gradient.
    """
    shards, plan = run.experiment.shards, run.experiment.plan
    owner = np.repeat(np.arange(plan.clients), np.diff(shards.offsets))
    used = np.flatnonzero(np.isin(owner, plan.schedule()))
    rng = generator(run.seed, Draw.NEIGHBOUR)
    rows = rng.choice(used, min(asked.left_out, len(used)), replace=False)
    found = []
    for some in np.split(rows, range(STACK, len(rows), STACK)):
        every = np.concatenate([[-1], some])
        client = np.where(every < 0, -1, owner[every])
        position = np.where(every < 0, -1, every - shards.offsets[client])
        nothing = np.zeros((len(every), shards.inputs.shape[1]))
        labels = np.zeros(len(every), np.int64)
        neighbours = Neighbours(client, position, position, nothing, labels)
        losses = _losses(run, run_neighbours(run.experiment, neighbours, run.seed))
        found.append(losses[1:] - losses[:1])
    return np.concatenate(found), -torch.eye(len(owner), dtype=torch.float64)[rows]


def halves(run: Trained, asked: Settings) -> tuple[np.ndarray, Tensor]:
    """Test losses of runs on half of every client's samples [runs, T], and who stayed [runs, n]."""
    shards, found, stayed = run.experiment.shards, [], []
    for number in range(asked.subsets):
        rng = generator(run.seed, Draw.NEIGHBOUR, round=number, block=1)
        kept = [
            first + rng.permutation(size)[: (size + 1) // 2]
            for first, size in zip(shards.offsets, np.diff(shards.offsets), strict=False)
        ]
        stay = np.isin(np.arange(len(shards.labels)), np.concatenate(kept))
        experiment = replace(run.experiment, shards=shards.only(stay))
        end = simulate(experiment, begin(experiment.recipe, experiment.task, run.seed)).params
        found.append(_losses(run, end))
        stayed.append(stay)
    return np.concatenate(found), torch.from_numpy(np.stack(stayed)).double()


def _losses(run: Trained, params: Params) -> np.ndarray:
    return run.experiment.task.losses(params, run.test)[0].numpy()


TRUTHS = {"leave-one-out": left_out, "halves": halves}
