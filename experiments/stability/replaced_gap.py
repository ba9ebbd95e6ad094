"""The generalization gap by exact replacements of a few samples.

The expected gap is the mean change of a sample's own loss when the sample is replaced by a fresh
sample (`predicted_gap.py`). Here, the run is trained again for each of K random samples, with a
held-out sample of the same label in place of the sample. No derivative is needed, so this estimate
also checks predictions where the orthogonalizer is not smooth or the steps are large.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedmuon.analysis.theory.checks import whole
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.data.neighbours import classes_of, held_out, stack
from fedmuon.data.partition import weights
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.predicted_gap import standard_error
from fedmuon.federated.neighbour_runs import run_neighbours
from fedmuon.tasks.base import Batch

STACK = 16  # runs that train together


@dataclass(frozen=True)
class ReplacedGap:
    """The gap by exact replacements.

    Attributes:
        changes: The change of each replaced sample's own loss [K].
    """

    changes: np.ndarray

    @property
    def value(self) -> float:
        """The mean over the replaced samples."""
        return float(self.changes.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, or NaN for a single sample."""
        return standard_error(self.changes)


def replace_samples(run: FinishedRun, count: int) -> ReplacedGap:
    """Retrain a finished run with one sample replaced, for `count` random samples.

    A sample is drawn with its weight in the train loss. A sample without a held-out sample of its
    label stays, so it changes nothing.

    Raises:
        InputError: If no sample can be replaced.
    """
    rows = draw_replacements(run, whole("replacements", count))
    usable = rows[:, 2] >= 0
    if not usable.any():
        raise InputError(
            "no held-out sample has the label of a training sample, so no sample can be replaced. "
            "Lower [data] train to hold out more samples."
        )
    changes = np.zeros(len(rows))
    parts = np.array_split(np.flatnonzero(usable), math.ceil(usable.sum() / STACK))
    for part in parts:
        changes[part] = _changes(run, rows[part])
    return ReplacedGap(changes)


def draw_replacements(run: FinishedRun, count: int) -> np.ndarray:
    """Draw samples to replace, as an array [K, 3] of client, position and replacement.

    The replacement is an index in the source, or -1 if no held-out sample has the label.
    """
    data, source, sizes = run.data, run.source, run.data.sizes
    labels, of_class = classes_of(data.labels), classes_of(source.labels)
    if labels.ndim > 1:
        raise InputError(
            "a sample of this run has many labels, so there is no replacement with the same label. "
            "Use a task with one label for each sample."
        )
    owner = np.repeat(np.arange(len(sizes)), sizes)
    chances = weights(sizes, run.config.federation.risk_weights)
    of_sample = (chances / np.maximum(sizes, 1))[owner]
    rng = generator(run.config.federation.seed, Draw.NEIGHBOUR, block=5)
    drawn = rng.choice(len(owner), count, p=of_sample / of_sample.sum())
    pools = {int(i): held_out(data, source, int(i)) for i in np.unique(owner[drawn])}
    rows = np.full((count, 3), -1)
    for row, a in zip(rows, drawn.tolist(), strict=True):
        client = int(owner[a])
        pool = pools[client]
        usable = pool[of_class[pool] == labels[a]]
        row[:2] = client, a - data.offsets[client]
        if len(usable):
            row[2] = usable[rng.integers(len(usable))]
    return rows


def _changes(run: FinishedRun, rows: np.ndarray) -> np.ndarray:
    """Return the change of each replaced sample's own loss, from one stack of runs."""
    config, experiment = run.config, run.experiment
    shards = experiment.shards
    neighbours = stack(run.source, rows, config.data.normalize)
    ends = run_neighbours(experiment, neighbours, config.federation.seed)
    samples = torch.from_numpy(run.data.offsets[rows[:, 0]] + rows[:, 1]).to(shards.labels.device)
    batch = Batch(shards.inputs[samples], shards.labels[samples])
    losses = experiment.task.losses(ends, batch)[0].double().cpu().numpy()  # [1 + K, K]
    return losses.diagonal(-1) - losses[0]
