"""How far the iterates of FedMuon can get from X0, and the constants that hold so far, by step.

The momentum starts at 0 and is a mean of sample gradients, on every client and at the server, with
weights of sum at most 1. Where gradients are at most g_t at step t, hence

    m_t = beta m_(t-1) + (1 - beta) g_t >= ||M_t||_op,      rho_(t+1) = rho_t + eta_t phi(m_t),

if ||Orth(M)||_op <= phi(s) for all ||M||_op <= s. With rho_0 = 0 and g_t the supremum of sample
gradients on the ball {||X - X0||_op <= rho_t}, induction over t says: after t local steps, counted
over rounds, every client's model is in the ball of radius rho_t, for every sample that there may
be; means of models stay in it, as it is convex. X0 does not know the samples.

**Other recipes** (`methods`). Sizes add up as they do there: m' = beta m + f g_t, the direction is
at most t = m', or beta m' + f g_t in Nesterov's forms, and without a map phi(t) = t. A momentum
that begins afresh is no larger. FedAvgM's velocity is at most v+ = b v + (how far the round's moves
reach), and X+ = X + V+: each round ends in rho + v+, which is the last rho of its steps for b = 0.

So at step t a run and its neighbour are both where Lg_t and the diameter diam_t of the set of
sample gradients are known: one replaced sample moves a mean of n_i gradients by at most
diam_t / n_i, and a_t (of `recursion`, with Lg_t) says what that comes to. At the end the loss is
g_T-Lipschitz and has the range of the last ball: F - F_hat does not feel a constant that is taken
from the loss, so Theorem 4.1 holds with B = sup - inf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedmuon.analysis.theory.methods import Method
from fedmuon.tasks.ball import suprema
from fedmuon.tasks.constants import Constants

CELLS = (
    1024  # of radii in [0, 1] and in every octave above: a radius counts as its cell's upper end
)
FAR = 64.0  # from here on the suprema are those of all models


@dataclass(frozen=True)
class Start:
    """What is known before the first sample: c classes, ||X0 (I - 11^T/c)||_op, and whether no
    sample can have a negative entry."""

    classes: int
    reach: float = 0.0
    nonnegative: bool = False


@dataclass(frozen=True)
class Reach:
    """The last radius, Lg_t and diam_t of every local step [R, E], and what holds at the end."""

    radius: float
    smoothness: np.ndarray
    diameters: np.ndarray
    last: Constants


def reach(
    start: Start,
    steps: np.ndarray,
    method: Method | float,
    growth: Callable[[float], float],
    local_steps: int = 1,
) -> Reach:
    """The constants along the way: `steps` [R] are the step sizes, `growth` is phi of the map; a
    method that is a number is the beta of FedMuon's."""
    how = method if isinstance(method, Method) else Method(method)
    radius, size, velocity, seen = 0.0, 0.0, 0.0, []
    for lr in steps.tolist():
        begun = radius
        for _ in range(local_steps):
            gradient, *found = _at(start, radius)
            seen.append(found[:2])
            size = how.beta * size + how.fresh * gradient
            ahead = how.beta * size + how.fresh * gradient if how.looks_ahead else size
            radius += lr * growth(ahead)
        velocity = how.server * velocity + radius - begun
        radius = begun + velocity if how.server else radius
    gradient, _, smoothness, spread = _at(start, radius)
    diameters, curved = np.array(seen).T.reshape(2, len(steps), local_steps)
    return Reach(radius, curved, diameters, Constants(spread, gradient, gradient, smoothness))


def _at(start: Start, radius: float) -> tuple[float, ...]:
    """Supremum of gradients, diameter, Lg and range on the ball of that radius."""
    far = min(start.reach + radius, FAR)
    width = 2.0 ** math.floor(math.log2(max(far, 1.0))) / CELLS
    return _in_cell(start.classes, start.nonnegative, math.ceil(far / width) * width)


@lru_cache(maxsize=1 << 15)
def _in_cell(classes: int, nonnegative: bool, radius: float) -> tuple[float, ...]:
    found = suprema(classes, radius, nonnegative)
    every = found.gradient, found.diameter, found.smoothness, found.spread
    return tuple(float(one) for one in every)
