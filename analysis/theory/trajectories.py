"""Certificates that use constants measured along one run, or constants of a ball of models.

Realized constants
------------------
After a run, the recursion of the Stability note can use constants that were measured along this
run. The result is a certificate for this run only.

Let client k of round r be at X at its local step e, and let the neighbouring run be at X' at the
same step, with ||X - X'||_F <= x. If H(X) is the Hessian of the client's mean loss, then

    ||grad F_k(X') - grad F_k(X)|| <= (||H(X)|| + B_3 x / 2) x.

The factor ||H(X)|| + B_3 x / 2 bounds the mean of H over the segment, because the Hessian of a
sample is B_3-Lipschitz. If client k is the client i whose sample z is replaced by z', the gradients
of the two runs differ by this amount plus at most

    (||g_z(X) - g_z'(X)|| + 2 Lg x) / n_i,

because sample gradients are Lg-Lipschitz. Both runs follow M <- beta M + (1 - beta) G and X <- X -
eta Orth(M) with an L-Lipschitz Orth, so the proof of the Stability note, eq. (6), applies. The
finished run determines the numbers above, which replace the constants of eq. (6). Means over
participants and the sum over steps do not change.

**B_3 for the matrix task** (||u|| <= 1): with f = log p_y, d = Df[v] = v_y - E_p v and
D^2 f = -Var_p(v), D^3 f = -E_p (v - E_p v)^3,

    D^3 p_y [v, v, v] = p_y (d^3 - 3 d Var_p(v) + D^3 f).

||v|| = 1 implies |d| <= sqrt 2, Var <= 1/2 and |D^3 f| <= sqrt(2)/2, so the value is at most
4 sqrt 2. A symmetric form is largest on its diagonal (Banach).

The certificate holds in real arithmetic for this run and for the neighbours that were evaluated, if
||H|| is not underestimated. So the status of the certificate is `realized` and never `certified`.
This certificate cannot bound a gap, not even with high probability. Theorem 4.1 requires
differences that are valid for every training set, but the measured differences are valid only for
this training set. McDiarmid's inequality with an exceptional set would require the probability that
a fresh training set has larger differences. This module proves bounds for every sample only through
suprema over a ball (`reach`, below).

Reachable ball
--------------
This section bounds how far the iterates of FedMuon can move from X0. For each step, the result is a
set of constants that are valid for all models up to this distance.

The momentum starts at 0. On every client and at the server, the momentum is a weighted mean of
sample gradients, with weights that sum to at most 1. If gradients are at most g_t at step t, then

    m_t = beta m_(t-1) + (1 - beta) g_t >= ||M_t||_op,      rho_(t+1) = rho_t + eta_t phi(m_t),

if ||Orth(M)||_op <= phi(s) for all ||M||_op <= s. Let rho_0 = 0, and let g_t be the supremum of
sample gradients on the ball {||X - X0||_op <= rho_t}. Induction over t shows: after t local steps,
counted over rounds, the model of every client is in the ball of radius rho_t, for every possible
sample. Means of models stay in the ball, because the ball is convex. X0 does not depend on the
samples.

**Other optimizers.** Bounds of the norms add up as in `recursion`: m' = beta m + f g_t. The
direction is at most t = m', or beta m' + f g_t in Nesterov forms. Without an orthogonalizer phi(t)
= t. A reset of the momentum cannot make the bound m larger. The velocity of FedAvgM is at most v+ =
b v + (the maximum distance moved in the round), and X+ = X + V+. So each round ends in rho + v+.
For b = 0, rho + v+ is the rho of the last step of the round.

**Constants on the ball.** At step t, a run and its neighbour are both in a ball on which Lg_t and
diam_t are known. Here diam_t is the diameter of the set of sample gradients. One replaced sample
moves a mean of n_i gradients by at most diam_t / n_i, and a_t (of `recursion`, with Lg_t) converts
this into a change of the final model. At the end, the loss is g_T-Lipschitz on the last ball. Let
sup and inf be the largest and the smallest value of the loss on this ball. F - F_hat does not
change if a constant is subtracted from the loss, so Theorem 4.1 holds with B = sup - inf.
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
    """Constants of a finished run, measured at its models.

    Attributes:
        schedule: Participants of each round [R, K].
        curvature: ||H|| of each client's mean loss at each local step [R, K, E].
        spread: The largest ||g_z - g_z'|| at each local step [R, K, E].
        sizes: Number of samples n_i of each client [N].
        steps: Step size of each round [R].
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
    """The effect of a replaced sample, for each local step of each participant.

    Attributes:
        weights: Array [R, K, E] of the distances by which X^R moves for a unit change of the
            participant's gradient at this step.
        radius: Array [R, K, E] of the largest distances between the models at this step if one
            sample of the participant is replaced.
    """

    weights: np.ndarray
    radius: np.ndarray


def step_bounds(path: Path) -> StepBounds:
    """Apply eq. (6) of the Stability note with the constants that were measured along the run.

    The forward pass computes distances. For each client c, consider a run that differs in one
    sample of c. x[c] bounds the distance of its model, and m[c] bounds the distance of its
    momentum. Between the two models, the smoothness is at most the smaller of ||H|| + B_3 x / 2 and
    the Lg that is valid for all models.

    The backward pass computes weights, like a_{s,k} in the Stability note, Appendix J. There, x is
    the distance by which the last model moves for a unit distance of the model, and m is the same
    for a unit distance of the momentum.
    """
    rounds, participants, local_steps = path.curvature.shape
    smooth, radius = path.curvature.copy(), np.zeros(path.curvature.shape)
    x, m = np.zeros((2, len(path.sizes)))
    for r, cohort in enumerate(path.schedule):
        rows, n = np.arange(participants), path.sizes[cohort]
        local, memory = np.tile(x, (participants, 1)), np.tile(m, (participants, 1))  # [K, N]
        for e in range(local_steps):
            smooth[r, :, e] = np.minimum(smooth[r, :, e] + BEND * local.max(1) / 2, path.l_g)
            radius[r, :, e] = local[rows, cohort]
            moved = smooth[r, :, e, None] * local  # distance of the gradients
            moved[rows, cohort] += (path.spread[r, :, e] + 2 * path.l_g * radius[r, :, e]) / n
            memory = path.beta * memory + (1 - path.beta) * moved
            local = local + path.steps[r] * path.l_orth * memory
        x, m = local.mean(0), memory.mean(0)

    weights, after = np.empty(smooth.shape), np.array([1.0, 0.0])
    for r in reversed(range(rounds)):
        push = path.steps[r] * path.l_orth
        x, m = np.tile(after[:, None] / participants, participants)  # a mean over participants
        for e in reversed(range(local_steps)):
            gradient = (1 - path.beta) * (push * x + m)  # effect of a unit change of the gradient
            weights[r, :, e] = gradient
            x, m = x + smooth[r, :, e] * gradient, path.beta * (push * x + m)
        after = np.array([x.sum(), m.sum()])
    return StepBounds(weights, radius)


def certificate(path: Path, bounds: StepBounds, client: int, distances: np.ndarray) -> np.ndarray:
    """Return a bound on the change of X^R, for each of T replacements of a client's sample.

    `distances` is an array [T, P E] of ||g_z - g_z'|| at the local steps of the client, in the
    order of the P rounds in which the client participates.
    """
    mask = path.schedule == client
    moved = (distances + 2 * path.l_g * bounds.radius[mask].ravel()) / path.sizes[client]
    return moved @ bounds.weights[mask].ravel()


# Number of cells of radii in [0, 1), and in every octave [2^k, 2^(k+1)) above. Each radius is
# rounded up to the end of its cell, so that suprema are computed once per cell.
CELLS = 1024
FAR = 64.0  # from this radius on, the suprema are the same as over all models


@dataclass(frozen=True)
class Start:
    """Properties of X0 and of the data that hold for every sample.

    Attributes:
        classes: Number of classes c.
        reach: ||X0 (I - 11^T/c)||_op.
        nonnegative: Whether all entries of all possible samples are nonnegative.
    """

    classes: int
    reach: float = 0.0
    nonnegative: bool = False


@dataclass(frozen=True)
class Reach:
    """Constants of each step of a run, and of its final model.

    Attributes:
        radius: The radius of the ball at the end.
        smoothness: Lg_t of each local step [R, E].
        diameters: diam_t of each local step [R, E].
        gradients: g_t of each local step [R, E].
        last: The constants at the end.
        deviation: The supremum of |loss - (1 - 1/c)| at the end.
    """

    radius: float
    smoothness: np.ndarray
    diameters: np.ndarray
    gradients: np.ndarray
    last: Constants
    deviation: float


def reach(
    start: Start,
    steps: np.ndarray,
    method: Method | float,
    growth: Callable[[float], float],
    local_steps: int = 1,
) -> Reach:
    """Compute the constants of every step of a run on the ball that its models cannot leave.

    Args:
        start: Properties that hold for every sample.
        steps: Step size of each round [R].
        method: The recursion of the optimizer; a number is the beta of FedMuon.
        growth: The function phi of the orthogonalizer.
        local_steps: Number of local steps E.
    """
    rule = method if isinstance(method, Method) else Method(method)
    radius, size, velocity, triples = 0.0, 0.0, 0.0, []
    for lr in steps.tolist():
        begun = radius
        for _ in range(local_steps):
            gradient, *others = _at(start, radius)
            triples.append((gradient, *others[:2]))
            size = rule.beta * size + rule.fresh * gradient
            ahead = rule.beta * size + rule.fresh * gradient if rule.looks_ahead else size
            radius += lr * growth(ahead)
        velocity = rule.server * velocity + radius - begun
        radius = begun + velocity if rule.server else radius
    gradient, _, smoothness, spread, deviation = _at(start, radius)
    shape = 3, len(steps), local_steps
    gradients, diameters, curved = np.array(triples).T.reshape(shape)
    last = Constants(spread, gradient, gradient, smoothness)
    return Reach(radius, curved, diameters, gradients, last, deviation)


def _at(start: Start, radius: float) -> tuple[float, ...]:
    """Return constants on a ball: gradient norm, diameter, Lg, loss range and loss deviation."""
    far = min(start.reach + radius, FAR)
    width = 2.0 ** math.floor(math.log2(max(far, 1.0))) / CELLS
    return _in_cell(start.classes, start.nonnegative, math.ceil(far / width) * width)


@lru_cache(maxsize=1 << 15)
def _in_cell(classes: int, nonnegative: bool, radius: float) -> tuple[float, ...]:
    sup = suprema(classes, radius, nonnegative)
    values = sup.gradient, sup.diameter, sup.smoothness, sup.spread, sup.deviation
    return tuple(float(value) for value in values)
