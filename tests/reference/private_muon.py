"""DP-Muon with inner momentum and noise-aware smoothing, example by example, in a federation.

The variance of the noise is not computed by a recursion: each momentum stores its coefficient of
every draw of noise in the whole run, and the variance is the sum of their squares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedmuon.core.rng import Draw, generator
from reference.private_methods import ROUNDING, Clip
from reference.rounds import Problem, Visit
from reference.trees import Tree, each, zeros

Coefficients = Mapping[tuple[int, int, int], float]  # (round, client, step) -> of this draw


@dataclass(frozen=True)
class Settings:
    """The constants of a run.

    Attributes:
        lr: Step size.
        clip: Clipping of the gradient of an example.
        noise: Standard deviation sigma C of the noise in a sum.
        lot: Expected lot size.
        memory: Coefficient beta of the momentum.
        weights: Weights of the current model and of the models before it.
        form: Form of the momentum.
        floor: The factor c in lambda = c e^2, or None for the problem's orthogonalizer.
        average: Average over models and clip, in this order, of gradients in the order of weights.
    """

    lr: float
    clip: Clip
    noise: float
    lot: float
    memory: float
    weights: Sequence[float] = (1.0,)
    form: str = "ema"
    floor: float | None = None
    average: Callable[[Clip, Sequence[float], Sequence[Tree]], Tree] | None = None


def average_then_clip(clip: Clip, weights: Sequence[float], gradients: Sequence[Tree]) -> Tree:
    """The gradient of DP-Muon-IM."""
    return clip(combined(weights, gradients))


def clip_then_average(clip: Clip, weights: Sequence[float], gradients: Sequence[Tree]) -> Tree:
    """Another method, for negative controls."""
    return combined(weights, [clip(G) for G in gradients])


def combined(weights: Sequence[float], trees: Sequence[Tree]) -> Tree:
    """The sum of trees with these weights."""
    total = zeros(trees[0])
    for weight, tree in zip(weights, trees, strict=True):
        total = each(lambda t, x, weight=weight: t + weight * x, total, tree)
    return total


def polar(M: np.ndarray, lam: float) -> np.ndarray:
    """The smoothed polar map."""
    U, s, Vt = np.linalg.svd(M, full_matrices=False)
    return (U * (s / np.sqrt(s**2 + lam))) @ Vt


def edge(deviation: float, M: np.ndarray) -> float:
    return deviation * (math.sqrt(M.shape[0]) + math.sqrt(M.shape[1]))


def run(problem: Problem, settings: Settings) -> Tree:
    """The model after all rounds."""
    s = settings
    X, M, past = problem.start, zeros(problem.start), [problem.start] * (len(s.weights) - 1)
    common: Coefficients = {}
    for round in range(problem.rounds):
        replies = []
        for client, _ in problem.cohort(round):
            state = X, M, past, common
            for step in range(problem.steps):
                state = local_step(Visit(problem, round, client), step, s, *state)
            replies.append(state)
        share = [1 / len(replies)] * len(replies)
        X, M = (combined(share, [reply[part] for reply in replies]) for part in (0, 1))
        past = [combined(share, [reply[2][age] for reply in replies]) for age in range(len(past))]
        draws = {key for reply in replies for key in reply[3]}
        common = {key: sum(reply[3].get(key, 0.0) for reply in replies) / len(replies)
                  for key in draws}  # fmt: skip
    return X


def local_step(
    visit: Visit, step: int, s: Settings, x: Tree, M: Tree, past: list[Tree], common: Coefficients
) -> tuple[Tree, Tree, list[Tree], Coefficients]:
    """A local step of a client."""
    G = release(visit, step, s, [x, *past])
    fresh = (visit.round, visit.client, step)
    gain = 1 - s.memory if s.form.startswith("ema") else 1.0
    M = each(lambda m, g: s.memory * m + gain * g, M, G)
    common = {**{key: s.memory * c for key, c in common.items()}, fresh: gain}
    direction, coefficients = M, common
    if s.form.endswith("nesterov"):
        direction = each(lambda m, g: s.memory * m + gain * g, M, G)
        coefficients = {key: s.memory * c for key, c in common.items()}
        coefficients[fresh] += gain
    floor = s.floor
    if floor is None:
        D = visit.orthogonal(direction, step)
    else:
        deviation = s.noise / s.lot * math.sqrt(sum(c**2 for c in coefficients.values()))
        D = each(lambda m: polar(m, floor * edge(deviation, m) ** 2), direction)
    return each(lambda x, d: x - s.lr * d, x, D), M, [x, *past][: len(past)], common


def release(visit: Visit, step: int, s: Settings, models: Sequence[Tree]) -> Tree:
    """The noisy mean of clipped gradients of a lot, each averaged over models."""
    inputs, labels = visit.problem.samples[visit.client]
    key = {"round": visit.round, "client": visit.client, "step": step}
    drawn = generator(visit.problem.seed, Draw.LOT, **key).random(len(labels))
    total = zeros(models[0])
    for row in np.flatnonzero(drawn < s.lot / len(labels)):
        example = inputs[row : row + 1], labels[row : row + 1]
        gradients = [visit.problem.gradient(model, *example) for model in models]
        average = s.average or average_then_clip
        total = each(np.add, total, average(s.clip, s.weights, gradients))
    for number, (name, value) in enumerate(total.items()):
        rng = generator(visit.problem.seed, Draw.NOISE, **key, block=number)
        entries = (1 + ROUNDING) * s.noise * rng.standard_normal(value.shape)
        total[name] = (value + entries) / s.lot
    return total
