"""Neighbours chosen by an adversary who may run the experiment as often as it likes."""

import dataclasses
from collections.abc import Callable

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import Neighbours
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import rank_replacements
from fedmuon.federated.rounds import distances, run_neighbours

CHAINS = 48  # pairs that are known to be bad
FRESH, GENERATIONS, BEST = 12, 3, 4  # pairs near the worst, so many times, and how many worst
WIDTH, NARROWER = 0.5, 4.0  # how near at first, and each time

Admissible = Callable[[np.ndarray], np.ndarray]  # vectors [T, d] to samples that there may be


def search(
    there: FinishedRun, certificates: np.ndarray, admissible: Admissible, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The clients [T] of the neighbours that were tried, all of which take part, and how far each
    moved the last model [T]."""
    tried = joined(chains(there, admissible, rng), by_derivatives(there))
    tried = some(tried, np.isin(tried.client, there.experiment.plan.schedule()))
    moved = perturbed(there, tried)
    for width in WIDTH / NARROWER ** np.arange(GENERATIONS * bool(len(moved))):
        worst = np.argsort(shares(moved, certificates[tried.client]))[-BEST:]
        near = some(tried, np.tile(worst, FRESH // BEST))
        fresh = moved_about(near, there.source.classes, admissible, rng, width)
        tried, moved = joined(tried, fresh), np.append(moved, perturbed(there, fresh))
    return tried.client, moved


def shares(moved: np.ndarray, promised: np.ndarray) -> np.ndarray:
    """Of what was promised, [T]; nothing of nothing is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(moved > 0, moved / promised, 0.0)


def chains(there: FinishedRun, admissible: Admissible, rng: np.random.Generator) -> Neighbours:
    """For each sample u: -u; u with another label; any vector with one; some of all these. The
    first two part gradients by their diameter where models are near 0, and then go one way."""
    data, classes = there.data, there.source.classes
    n, client = len(data.labels), np.repeat(np.arange(len(data.sizes)), data.sizes)
    position = np.arange(n) - data.offsets[client]
    other = rng.standard_normal(data.inputs.shape)
    inputs = admissible(np.concatenate([-data.inputs, data.inputs, other]))
    changed = (data.labels + rng.integers(1, classes, n)) % classes
    labels = np.concatenate([data.labels, changed, changed])
    unnamed = np.full(3 * n, -1)  # they are in no source
    every = Neighbours(np.tile(client, 3), np.tile(position, 3), unnamed, inputs, labels)
    return some(every, rng.permutation(3 * n)[:CHAINS])


def by_derivatives(there: FinishedRun) -> Neighbours:
    """The [stability] trials of the product's own ranking of held-out samples, if it has one."""
    try:
        found = rank_replacements(there)
    except InputError:
        return Neighbours.of(there.source, np.empty((0, 3), int))
    return Neighbours.of(there.source, found.rows[: found.top])


def moved_about(
    near: Neighbours, classes: int, admissible: Admissible, rng: np.random.Generator, width: float
) -> Neighbours:
    """Other samples near those, a fifth of them with any label."""
    inputs = admissible(near.inputs + width * rng.standard_normal(near.inputs.shape))
    drawn = rng.integers(classes, size=len(near.labels))
    labels = np.where(rng.random(len(drawn)) < 0.2, drawn, near.labels)
    return dataclasses.replace(near, inputs=inputs, labels=labels)


def perturbed(there: FinishedRun, neighbours: Neighbours) -> np.ndarray:
    """||X_s^R - X_0^R||_F, [T]."""
    unchanged = Neighbours.of(there.source, np.full((1, 3), -1))
    seed = there.config.federation.seed
    return distances(run_neighbours(there.experiment, joined(unchanged, neighbours), seed))[0]


def joined(*parts: Neighbours) -> Neighbours:
    """One after the other."""
    each = zip(*(vars(one).values() for one in parts), strict=True)
    return Neighbours(*map(np.concatenate, each))


def some(of: Neighbours, rows: np.ndarray) -> Neighbours:
    """Those of them."""
    return Neighbours(*(one[rows] for one in vars(of).values()))
