"""A certificate after the run: 001's recursion with what the run itself had for constants.

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
underestimated: `realized`, and never `certified`. It enters no bound of a
gap, not even with high probability: Theorem 4.1 bounds functions of the sample by differences that
are to hold for every sample, and these are this sample's own. McDiarmid's inequality with an
exceptional set would ask how often a fresh sample exceeds them, of which nothing is proved here but
by suprema over a ball, and these are the certificate of `reach`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BEND = 4 * math.sqrt(2)


@dataclass(frozen=True)
class Path:
    """A finished run: who took part [R, K], ||H|| of each client's mean loss at each local step
    [R, K, E], the largest ||g_z - g_z'|| that is asked about there, sizes n_i [N], eta by round
    [R], beta, L_orth and Lg."""

    schedule: np.ndarray
    curvature: np.ndarray
    spread: np.ndarray
    sizes: np.ndarray
    steps: np.ndarray
    beta: float
    l_orth: float
    l_g: float


class Tube(NamedTuple):
    """At each local step [R, K, E]: how far X^R moves for each unit that the gradient is moved
    there, and how far a neighbour in that very client can be by then."""

    weights: np.ndarray
    radius: np.ndarray


def tube(path: Path) -> Tube:
    """Forward for the radii and what is Lipschitz within them, then backward for the weights."""
    smooth, radius = _forward(path)
    return Tube(_backward(path, smooth), radius)


def certificate(path: Path, around: Tube, client: int, distances: np.ndarray) -> np.ndarray:
    """How far X^R can be for each pair (z, z') of that client, [T], from ||g_z - g_z'|| at its
    local steps [T, P E], in the order of the rounds that it took part in."""
    own = path.schedule == client
    moved = (distances + 2 * path.l_g * around.radius[own].ravel()) / path.sizes[client]
    return moved @ around.weights[own].ravel()


def _forward(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Lg within the tube and the radii [R, K, E]: (x, m) for a neighbour in each client [N]."""
    clients, smooth, radius = len(path.sizes), path.curvature.copy(), np.zeros(path.curvature.shape)
    x, m = np.zeros((2, clients))
    for r, chosen in enumerate(path.schedule):
        each, n = np.arange(len(chosen)), path.sizes[chosen]
        here, memory = np.tile(x, (len(chosen), 1)), np.tile(m, (len(chosen), 1))
        for e in range(path.curvature.shape[2]):
            smooth[r, :, e] = np.minimum(smooth[r, :, e] + BEND * here.max(1) / 2, path.l_g)
            radius[r, :, e] = here[each, chosen]
            moved = smooth[r, :, e, None] * here
            moved[each, chosen] += (path.spread[r, :, e] + 2 * path.l_g * radius[r, :, e]) / n
            memory = path.beta * memory + (1 - path.beta) * moved
            here = here + path.steps[r] * path.l_orth * memory
        x, m = here.mean(0), memory.mean(0)
    return smooth, radius


def _backward(path: Path, smooth: np.ndarray) -> np.ndarray:
    """e1^T of all that comes after a step, times what a moved gradient does in it."""
    weights, fresh, after = np.empty(smooth.shape), 1 - path.beta, np.array([1.0, 0.0])
    for r in reversed(range(len(path.schedule))):
        push = path.steps[r] * path.l_orth
        x, m = np.tile(after[:, None] / path.schedule.shape[1], path.schedule.shape[1])
        for e in reversed(range(smooth.shape[2])):
            kicked = fresh * (push * x + m)
            weights[r, :, e] = kicked
            x, m = x + smooth[r, :, e] * kicked, path.beta * (push * x + m)
        after = np.array([x.sum(), m.sum()])
    return weights
