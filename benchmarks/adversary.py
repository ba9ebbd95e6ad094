"""Neighbours chosen by an adversary who may run the experiment any number of times."""

import dataclasses
from collections.abc import Callable

import numpy as np

from fedmuon.core.errors import InputError
from fedmuon.data.neighbours import Neighbours
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import rank_replacements
from fedmuon.federated.neighbour_runs import distances, run_neighbours

CHAINS = 48  # number of pairs from `chains`
FRESH, GENERATIONS, BEST = 12, 3, 4  # new pairs per generation, generations, pairs that are varied
WIDTH, NARROWER = 0.5, 4.0  # first size of a variation, and its divisor per generation

Admissible = Callable[[np.ndarray], np.ndarray]  # converts vectors [T, d] into admissible samples


def search(
    there: FinishedRun, certificates: np.ndarray, admissible: Admissible, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Search for neighbours that move the last model as far as possible.

    Only clients that participate are tried.

    Returns:
        The client of each neighbour that was tried [T], and how far it moved the last model [T].
    """
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
    """Return the distances divided by the certificates [T]; 0 / 0 counts as 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(moved > 0, moved / promised, 0.0)


def chains(there: FinishedRun, admissible: Admissible, rng: np.random.Generator) -> Neighbours:
    """Return a random selection of replacements that are known to be bad.

    For each sample u the candidates are -u, u with another label, and a random vector with another
    label. With -u or another label, the gradients near model 0 differ by the diameter of their set,
    and later differences point in the same direction.
    """
    data, classes = there.data, there.source.classes
    n, client = len(data.labels), np.repeat(np.arange(len(data.sizes)), data.sizes)
    position = np.arange(n) - data.offsets[client]
    other = rng.standard_normal(data.inputs.shape)
    inputs = admissible(np.concatenate([-data.inputs, data.inputs, other]))
    changed = (data.labels + rng.integers(1, classes, n)) % classes
    labels = np.concatenate([data.labels, changed, changed])
    unnamed = np.full(3 * n, -1)  # these samples are not in the data source
    every = Neighbours(np.tile(client, 3), np.tile(position, 3), unnamed, inputs, labels)
    return some(every, rng.permutation(3 * n)[:CHAINS])


def by_derivatives(there: FinishedRun) -> Neighbours:
    """Return the replacements that `rank_replacements` ranks highest, if it supports the run."""
    try:
        found = rank_replacements(there)
    except InputError:
        return Neighbours.of(there.source, np.empty((0, 3), int))
    return Neighbours.of(there.source, found.rows[: found.top])


def moved_about(
    near: Neighbours, classes: int, admissible: Admissible, rng: np.random.Generator, width: float
) -> Neighbours:
    """Return new samples near the given samples. A fifth of them get a random label."""
    inputs = admissible(near.inputs + width * rng.standard_normal(near.inputs.shape))
    drawn = rng.integers(classes, size=len(near.labels))
    labels = np.where(rng.random(len(drawn)) < 0.2, drawn, near.labels)
    return dataclasses.replace(near, inputs=inputs, labels=labels)


def perturbed(there: FinishedRun, neighbours: Neighbours) -> np.ndarray:
    """Return the distances ||X_s^R - X_0^R||_F from the unchanged run [T]."""
    unchanged = Neighbours.of(there.source, np.full((1, 3), -1))
    seed = there.config.federation.seed
    return distances(run_neighbours(there.experiment, joined(unchanged, neighbours), seed))[0]


def joined(*parts: Neighbours) -> Neighbours:
    """Concatenate neighbours."""
    each = zip(*(vars(one).values() for one in parts), strict=True)
    return Neighbours(*map(np.concatenate, each))


def some(of: Neighbours, rows: np.ndarray) -> Neighbours:
    """Select rows of neighbours."""
    return Neighbours(*(one[rows] for one in vars(of).values()))
