"""DeMuon node by node (arXiv:2510.01377), in NumPy with float64."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reference.rounds import Problem, Visit
from reference.trees import Tree, each, zeros

Weights = Callable[[int], np.ndarray]  # round -> W


@dataclass
class Nodes:
    """The models, momenta and trackers of all nodes after all rounds."""

    models: list[Tree]
    momenta: list[Tree]
    trackers: list[Tree]


def weighted(row: np.ndarray, trees: list[Tree]) -> Tree:
    """The sum of the trees with the weights of one node."""
    total = zeros(trees[0])
    for weight, tree in zip(row, trees, strict=True):
        total = {name: total[name] + weight * tree[name] for name in total}
    return total


def demuon(
    problem: Problem,
    weights: Weights,
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
    tracking: bool = True,
) -> Nodes:
    """All rounds of all nodes. Without `tracking`, V_i is the average of the neighbours' M_j."""
    count = len(problem.samples)
    X = [dict(problem.start) for _ in range(count)]
    M, V = ([zeros(problem.start) for _ in range(count)] for _ in range(2))
    for number in range(problem.rounds):
        W, before = weights(number), [dict(tree) for tree in M]
        for i in range(count):
            visit = Visit(problem, number, i)
            for k in range(visit.steps):
                G = visit.gradient(X[i], k)
                M[i] = each(lambda m, g: momentum * m + (1 - momentum) * g, M[i], G)
        sent = [each(lambda v, m, b: v + m - b, *trees) for trees in zip(V, M, before, strict=True)]
        V = [weighted(W[i], sent if tracking else M) for i in range(count)]
        rate, steps = lr * (problem.factors[number] if problem.factors else 1.0), []
        for i in range(count):
            D = each(lambda v: problem.orthogonal(v, 0, 0, 0), V[i])
            step = each(lambda x, d: d + weight_decay * x, X[i], D)
            steps.append({name: X[i][name] - rate * value for name, value in step.items()})
        X = [weighted(W[i], steps) for i in range(count)]
    return Nodes(X, M, V)


def mean(trees: list[Tree]) -> Tree:
    return each(lambda *values: np.asarray(np.mean(values, axis=0)), *trees)
