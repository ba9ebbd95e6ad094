"""How far hostile clients can move a model, if the server clips the change of each client.

Compare a run with hostile clients with the same run in which all clients are honest. Both runs have
the same participants, batches and step sizes, and in both runs the server clips the change of each
client's model to a ball of radius rho, and each returned momentum to the norm mu. For E local Muon
steps, rho = eta E sqrt(q) (`optim/ball.py`), and mu is the bound on the norm of a gradient, or with
Polyak's form this bound divided by 1 - beta. Then neither clipping changes an honest client. With
another radius, clipping can change honest clients. It never moves two changes apart, so y_e still
bounds their distance. Weight decay no longer shrinks the distance of the models, because clipping
can cut off the pull towards 0. So with weight decay, the code uses x + y_e in place of x_e.

Let x, m, v, d bound the distances of the two runs as in `recursion.py`, and let a be the weight of
the hostile clients in the mean of a round. An honest client follows eq. (1) of that module with
Delta = 0, because its samples are the same in both runs. Its last values are x_e, m_e and y_e. A
hostile client returns X + D in one run and X' + D' in the other with ||D||, ||D'|| <= rho. So its
models are at most x + 2 rho apart, its changes at most 2 rho, and its momenta at most 2 mu.
The mean of all clients gives

    x+ = (1 - a) x_e + a (x + 2 rho) + b v,    m+ = (1 - a) m_e + a 2 mu,
    v+ = b v + (1 - a) y_e + a 2 rho,          d+ = v+ without b v, divided by eta E.

Bounds of honest clients grow or shrink as in the recursion of the matrix task. All bounds are also
at most those of two runs that only share X0: without server momentum, x <= 2 rho R.
The bounds must also hold for fewer hostile clients than `a` counts. So the code uses max(x_e, x + 2
rho) in place of x + 2 rho, and max(m_e, 2 mu) in place of 2 mu.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.checks import at_least, values, whole
from fedmuon.analysis.theory.recursion import Method, saturated
from fedmuon.core.errors import InputError


@dataclass(frozen=True)
class HostileBound:
    """A bound on the distance between a run with hostile clients and the honest run.

    Attributes:
        distances: The bound on ||X^r - X'^r|| after each round `[R]`, in the Frobenius norm.
        trivial: The bound after each round `[R]` that uses only the radius of the ball: two times
            the sum of the radii. It also holds if all clients are hostile.

    Example:
        >>> from fedmuon.analysis.theory.hostile import HostileBound
        >>> import numpy as np
        >>> HostileBound(np.array([0.1, 0.2]), np.array([1.0, 2.0])).last
        0.2
    """

    distances: np.ndarray
    trivial: np.ndarray

    @property
    def last(self) -> float:
        """The smaller of both bounds after the last round."""
        return float(min(self.distances[-1], self.trivial[-1]))


def hostile_bound(
    method: Method,
    rates: ArrayLike,
    l_orth: float,
    l_g: float,
    radii: ArrayLike,
    weights: ArrayLike,
    momentum_bound: float = 0.0,
    local_steps: int = 1,
) -> HostileBound:
    """Return how far hostile clients can move the model, round by round.

    Args:
        method: The recursion of the optimizer.
        rates: Step size η of each round `[R]`.
        l_orth: Lipschitz constant L of the orthogonalizer.
        l_g: Smoothness L_g of the loss, for all models.
        radii: Radius ρ of the ball in each round `[R]`.
        weights: Total weight a of the hostile clients in the mean of each round `[R]`.
        momentum_bound: Largest norm μ of a returned momentum. It has no effect if each round starts
            with a new momentum.
        local_steps: Number of local steps E in a round.

    Returns:
        The bounds. Entries that overflow a double are infinite.

    Raises:
        InputError: If a number is out of range, or the shapes do not match.

    Example:
        >>> from fedmuon.analysis import Method
        >>> from fedmuon.analysis.theory.hostile import hostile_bound
        >>> bound = hostile_bound(Method(0.9, afresh=True), [0.1, 0.1], 1.0, 0.2, [0.3, 0.3],
        ...                       [0.2, 0.2])
        >>> bound.distances.round(4).tolist(), bound.trivial.tolist()
        ([0.12, 0.2402], [0.6, 1.2])
    """
    step_sizes = values("rates", rates)
    rounds, steps = len(step_sizes), whole("local_steps", local_steps)
    radius, shares = values("radii", radii, rounds), values("weights", weights, rounds)
    slope, smooth = at_least("l_orth", l_orth), at_least("l_g", l_g)
    momentum = at_least("momentum_bound", momentum_bound)
    if not (shares <= 1).all():
        raise InputError(
            f"weights contains {shares.max():g}, but the weight of the hostile clients in a round "
            "must lie in [0, 1]. Divide the weights by their sum over all clients of the round."
        )
    x = m = v = d = 0.0
    distances = np.empty(rounds)
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(rounds):
            rate, rho, share = float(step_sizes[r]), float(radius[r]), float(shares[r])
            honest, m_e, y_e = _local(method, rate, slope, smooth, steps, (x, m, d))
            honest = x + y_e if method.decay else honest  # equal without weight decay
            farthest = max(honest, x + 2 * rho)
            update = (1 - share) * y_e + share * max(y_e, 2 * rho)
            x = (1 - share) * honest + share * farthest + method.server * v
            m = 0.0 if method.afresh else (1 - share) * m_e + share * max(m_e, 2 * momentum)
            v = method.server * v + update
            d = update / (rate * steps) if rate else 0.0
            distances[r] = x
        # X+ = X + V+ with V+ = b V + the mean of clipped changes; b = 0 without server momentum.
        trivial = np.cumsum(_velocities(method.server, 2 * radius))
    return HostileBound(saturated(distances), saturated(trivial))


def _local(
    method: Method,
    rate: float,
    slope: float,
    smooth: float,
    steps: int,
    start: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Return x, m and y of an honest client after its local steps (eq. (1) of `recursion.py`)."""
    x, m, d = start
    m, y, decay = 0.0 if method.afresh else m, 0.0, rate * method.decay
    for _ in range(steps):
        g = smooth * x
        m = method.beta * m + method.fresh * g
        direction = method.beta * m + method.fresh * g if method.looks_ahead else m
        step = rate * ((1 - method.alignment) * slope * direction + method.alignment * d)
        y += step + decay * x
        x = abs(1 - decay) * x + step
    return x, m, y


def _velocities(memory: float, updates: np.ndarray) -> np.ndarray:
    """Return the norm bounds v+ = b v + update of each round [R]."""
    velocity, bounds = 0.0, np.empty(len(updates))
    for r, update in enumerate(updates.tolist()):
        velocity = memory * velocity + update
        bounds[r] = velocity
    return bounds
