"""What one run's trajectory certifies: its realized constants, and the ball it cannot leave.

Realized constants
------------------
A certificate after the run: 001's recursion with what the run itself had for constants.

Let client k of round r be at X at its local step e, and the neighbour's model at X' there, with
||X - X'||_F <= x. With H(X) the Hessian of the client's mean loss,

    ||grad F_k(X') - grad F_k(X)|| <= (||H(X)|| + B_3 x / 2) x,

the mean of H over the segment, since the Hessian of a sample is B_3-Lipschitz. Where the neighbour
replaces z by z' (one of n_i samples, i = k) its gradient differs by this and by at most

    (||g_z(X) - g_z'(X)|| + 2 Lg x) / n_i,

because sample gradients are Lg-Lipschitz. So both runs obey M <- beta M + (1 - beta) G and
X <- X - eta Orth(M), with an L-Lipschitz Orth, as in the proof of 001 (6), but with these numbers,
which the finished run shows: means over participants and the sum over steps go through unchanged.

**B_3 for the matrix task** (||u|| <= 1): with f = log p_y, d = Df[v] = v_y - E_p v and
D^2 f = -Var_p(v), D^3 f = -E_p (v - E_p v)^3,

    D^3 p_y [v, v, v] = p_y (d^3 - 3 d Var_p(v) + D^3 f),

where ||v|| = 1 gives |d| <= sqrt 2, Var <= 1/2 and |D^3 f| <= sqrt(2)/2: at most 4 sqrt 2. A
symmetric form is largest on its diagonal (Banach).

It holds for this run and the neighbours asked about, in real arithmetic, if ||H|| is not
underestimated. So its status is `realized`, and never `certified`. It enters no bound of a gap, not
even with high probability: Theorem 4.1 needs differences that hold for every sample, and these are
this sample's own. McDiarmid's inequality with an exceptional set would need to know how often a
fresh sample exceeds them. Here that is proved only by suprema over a ball (`reach`, below).

Reachable ball
--------------
How far the iterates of FedMuon can get from X0, and the constants that hold so far, by step.

The momentum starts at 0 and is a mean of sample gradients, on every client and at the server, with
weights of sum at most 1. Where gradients are at most g_t at step t, hence

    m_t = beta m_(t-1) + (1 - beta) g_t >= ||M_t||_op,      rho_(t+1) = rho_t + eta_t phi(m_t),

if ||Orth(M)||_op <= phi(s) for all ||M||_op <= s. With rho_0 = 0 and g_t the supremum of sample
gradients on the ball {||X - X0||_op <= rho_t}, induction over t says: after t local steps, counted
over rounds, every client's model is in the ball of radius rho_t, for every sample that there may
be; means of models stay in it, as it is convex. X0 does not know the samples.

**Other recipes.** Sizes add up as in `recursion`: m' = beta m + f g_t, the direction is
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
from typing import NamedTuple

import numpy as np

from fedmuon.analysis.theory.recursion import Method
from fedmuon.tasks.constants import Constants, suprema

BEND = 4 * math.sqrt(2)


@dataclass(frozen=True)
class Path:
    """A finished run.

    Attributes:
        schedule: Participants, [R, K].
        curvature: ||H|| of each client's mean loss at each local step, [R, K, E].
        spread: The largest ||g_z - g_z'|| there, [R, K, E].
        sizes: Samples n_i, [N].
        steps: Step size of each round, [R].
        beta: Momentum.
        l_orth: Lipschitz constant of the orthogonalizer.
        l_g: Smoothness Lg.
    """

    schedule: np.ndarray
    curvature: np.ndarray
    spread: np.ndarray
    sizes: np.ndarray
    steps: np.ndarray
    beta: float
    l_orth: float
    l_g: float


class StepBounds(NamedTuple):
    """What a replaced sample can do at each local step of each participant, [R, K, E] each.

    Attributes:
        weights: How far X^R moves for a unit change of the participant's gradient there.
        radius: How far the model of a run with another sample of the participant can be by then.
    """

    weights: np.ndarray
    radius: np.ndarray


def step_bounds(path: Path) -> StepBounds:
    """Follow 001 (6) with the run's own constants: distances forwards, then weights backwards.

    Forwards, x[c] and m[c] bound how far a run that differs in one sample of client c is away, in
    the model and in the momentum. The distance says how much larger than along the path Lg may be
    in between: ||H|| + B_3 x / 2, and at most the Lg of all models. Backwards, as for a_{s,k} of
    001, Appendix J, a unit of the model's distance counts x in the last model, and a unit of the
    momentum's m.
    """
    rounds, participants, local_steps = path.curvature.shape
    smooth, radius = path.curvature.copy(), np.zeros(path.curvature.shape)
    x, m = np.zeros((2, len(path.sizes)))
    for r, chosen in enumerate(path.schedule):
        each, n = np.arange(participants), path.sizes[chosen]
        here, memory = np.tile(x, (participants, 1)), np.tile(m, (participants, 1))  # [K, N]
        for e in range(local_steps):
            smooth[r, :, e] = np.minimum(smooth[r, :, e] + BEND * here.max(1) / 2, path.l_g)
            radius[r, :, e] = here[each, chosen]
            moved = smooth[r, :, e, None] * here  # of the gradients
            moved[each, chosen] += (path.spread[r, :, e] + 2 * path.l_g * radius[r, :, e]) / n
            memory = path.beta * memory + (1 - path.beta) * moved
            here = here + path.steps[r] * path.l_orth * memory
        x, m = here.mean(0), memory.mean(0)

    weights, after = np.empty(smooth.shape), np.array([1.0, 0.0])
    for r in reversed(range(rounds)):
        push = path.steps[r] * path.l_orth
        x, m = np.tile(after[:, None] / participants, participants)  # a mean over participants
        for e in reversed(range(local_steps)):
            gradient = (1 - path.beta) * (push * x + m)  # what a unit of its change counts
            weights[r, :, e] = gradient
            x, m = x + smooth[r, :, e] * gradient, path.beta * (push * x + m)
        after = np.array([x.sum(), m.sum()])
    return StepBounds(weights, radius)


def certificate(path: Path, bounds: StepBounds, client: int, distances: np.ndarray) -> np.ndarray:
    """Bound on how far X^R moves for each pair (z, z') of a client, [T].

    `distances` are ||g_z - g_z'|| at its local steps, [T, P E], in the order of its P rounds.
    """
    own = path.schedule == client
    moved = (distances + 2 * path.l_g * bounds.radius[own].ravel()) / path.sizes[client]
    return moved @ bounds.weights[own].ravel()


# Cells of radii in [0, 1] and in every octave above: a radius counts as its cell's upper end.
CELLS = 1024
FAR = 64.0  # from here on the suprema are those of all models


@dataclass(frozen=True)
class Start:
    """Properties of the start and of the data that hold for every sample.

    Attributes:
        classes: Number of classes c.
        reach: ||X0 (I - 11^T/c)||_op.
        nonnegative: Whether no sample can have a negative entry.
    """

    classes: int
    reach: float = 0.0
    nonnegative: bool = False


@dataclass(frozen=True)
class Reach:
    """The last radius, Lg_t and diam_t of each local step, [R, E], and what holds at the end: the
    constants, and sup of |loss - (1 - 1/c)|."""

    radius: float
    smoothness: np.ndarray
    diameters: np.ndarray
    last: Constants
    deviation: float


def reach(
    start: Start,
    steps: np.ndarray,
    method: Method | float,
    growth: Callable[[float], float],
    local_steps: int = 1,
) -> Reach:
    """Compute the constants of every step of a run.

    Args:
        start: Properties that hold for every sample.
        steps: Step size of each round, [R].
        method: The recipe's recursion; a number is the beta of FedMuon.
        growth: phi of the orthogonalizer.
        local_steps: Local steps E.
    """
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
    gradient, _, smoothness, spread, deviation = _at(start, radius)
    diameters, curved = np.array(seen).T.reshape(2, len(steps), local_steps)
    last = Constants(spread, gradient, gradient, smoothness)
    return Reach(radius, curved, diameters, last, deviation)


def _at(start: Start, radius: float) -> tuple[float, ...]:
    """Supremum of gradients, diameter, Lg, range and deviation on the ball of that radius."""
    far = min(start.reach + radius, FAR)
    width = 2.0 ** math.floor(math.log2(max(far, 1.0))) / CELLS
    return _in_cell(start.classes, start.nonnegative, math.ceil(far / width) * width)


@lru_cache(maxsize=1 << 15)
def _in_cell(classes: int, nonnegative: bool, radius: float) -> tuple[float, ...]:
    found = suprema(classes, radius, nonnegative)
    every = found.gradient, found.diameter, found.smoothness, found.spread, found.deviation
    return tuple(float(one) for one in every)
