"""Why the sign needs help: 001, Proposition D.6, as a run."""

import math
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import at_least, whole
from fedmuon.errors import InputError


@dataclass(frozen=True)
class Obstruction:
    """Two data sets that differ in one of n samples, and what exact sign makes of that."""

    trajectory: np.ndarray  # x^0 .. x^steps on S
    neighbour: np.ndarray  # the same on S'
    gradient_gap: float  # |G_S(0) - G_S'(0)| = 2 a / n
    loss_gap: float  # |loss(x(S), +1) - loss(x(S'), +1)| at the end; 2 a tanh(eta) after one step


def scalar_obstruction(
    samples: int, lr: float, steps: int = 1, slope: float = 0.5, loss_bound: float = 1.0
) -> Obstruction:
    """Scalar Muon with beta = 0 and exact sign on loss(x, z) = B/2 + a z tanh x, z = +1 or -1.

    S holds (n+1)/2 times +1 and (n-1)/2 times -1, S' one +1 less: the gradients at 0 are a/n and
    -a/n, and after one step the models are 2 eta apart for every n.
    """
    if whole("samples", samples) % 2 == 0:
        raise InputError(f"samples = {samples}: the two majorities differ only for an odd number.")
    if not 0 < slope <= loss_bound / 2:
        raise InputError(f"slope = {slope}: the loss lies in [0, B] for 0 < slope <= B/2.")
    data = np.repeat([1.0, -1.0], [(samples + 1) // 2, samples // 2])
    other = data.copy()
    other[0] = -1.0
    rate, count = at_least("lr", lr), whole("steps", steps)
    first, second = (_descend(z, slope, rate, count) for z in (data, other))
    gradients = [_gradient(0.0, z, slope) for z in (data, other)]
    loss_gap = slope * abs(math.tanh(first[-1]) - math.tanh(second[-1]))
    return Obstruction(first, second, abs(gradients[0] - gradients[1]), loss_gap)


def _gradient(x: float, data: np.ndarray, slope: float) -> float:
    """The full-batch gradient a mean(z) / cosh^2 x, with the mean of the +-1 exact."""
    return slope * float(data.sum()) / len(data) * (1 - math.tanh(x) ** 2)


def _descend(data: np.ndarray, slope: float, lr: float, steps: int) -> np.ndarray:
    path = np.zeros(steps + 1)
    for k in range(steps):
        path[k + 1] = path[k] - lr * np.sign(_gradient(path[k], data, slope))
    return path
