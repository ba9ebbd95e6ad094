"""Symmetric stable noise: matrices whose entries have moments below an index, and none above."""

import math

import numpy as np
from scipy.special import gamma


def stable(index: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws of characteristic function exp(-|t|^a), a = `index` in (1, 2] broadcast to `shape`.

    The method of Chambers, Mallows and Stuck (1976); at a = 2 they are normal of variance 2.
    """
    angle = (rng.random(shape) - 0.5) * math.pi
    wait = rng.exponential(size=shape)
    turned = np.cos((1 - index) * angle) / wait
    return np.sin(index * angle) / np.cos(angle) ** (1 / index) * turned ** ((1 - index) / index)


def moment(index: float, order: float) -> float:
    """E |X|^p of one such draw; infinite from p = a on, unless a = 2."""
    if index == 2:
        return 2**order * gamma((1 + order) / 2) / math.sqrt(math.pi)
    if order >= index:
        return math.inf
    top = 2 ** (order + 1) * gamma((order + 1) / 2) * gamma(-order / index)
    return float(top / (index * math.sqrt(math.pi) * gamma(-order / 2)))
