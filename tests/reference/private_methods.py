"""DP-SGD and DP-Muon, example by example, written from the papers."""

from collections.abc import Callable

import numpy as np

from fedmuon.core.rng import Draw, generator
from reference.rounds import MODEL, Method, Visit
from reference.trees import Tree, Trees, each, zeros

ROUNDING = 2.0**-32  # the share by which noise exceeds sigma C, for rounding errors of norms
Clip = Callable[[Tree], Tree]


def flat(bound: float) -> Clip:
    """One norm over all arrays."""

    def clip(G: Tree) -> Tree:
        return each(lambda g: factor(bound, *G.values()) * g, G)

    return clip


def block(bound: float) -> Clip:
    """The norm of each array."""
    return lambda G: each(lambda g: factor(bound, g) * g, G)


def factor(bound: float, *blocks: np.ndarray) -> float:
    """The factor that clips the joint norm of these arrays. The gradient of A is 0 where B is 0."""
    norm = np.sqrt(sum((g**2).sum() for g in blocks))
    return bound / norm if norm > bound else 1.0


def private(
    lr: float, clip: Clip, noise: float, lot: float, memory: float, orthogonal: bool
) -> Method:
    """M <- memory M + (sum of clipped gradients + noise) / lot, x <- x - lr Orth(M).

    `noise` is sigma C. Lots and noise are drawn from the seed. The server averages M.
    """

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        x, M = received[MODEL], received["momentum"]
        inputs, labels = visit.problem.samples[visit.client]
        for step in range(visit.steps):
            key = {"round": visit.round, "client": visit.client, "step": step}
            drawn = generator(visit.problem.seed, Draw.LOT, **key).random(len(labels))
            total = zeros(x)
            for row in np.flatnonzero(drawn < lot / len(labels)):
                of_row = slice(row, row + 1)
                G = clip(visit.problem.gradient(x, inputs[of_row], labels[of_row]))
                total = each(np.add, total, G)
            for number, (name, value) in enumerate(total.items()):
                rng = generator(visit.problem.seed, Draw.NOISE, **key, block=number)
                entries = (1 + ROUNDING) * noise * rng.standard_normal(value.shape)
                total[name] = (value + entries) / lot
            M = each(lambda m, g: memory * m + g, M, total)
            step_of = visit.orthogonal(M, step) if orthogonal else M
            x = each(lambda x, d: x - lr * d, x, step_of)
        return {MODEL: x, "momentum": M}

    return Method(client, first=lambda x: {"momentum": zeros(x)}, sent=("momentum",))
