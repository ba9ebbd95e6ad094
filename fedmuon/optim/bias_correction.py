"""DP-MuonBC: what Gaussian noise in the momentum does to the mean of an orthogonalized step, undone
to leading order (000, section 4).

    M^ = M / s_t,   O = 2 Q(M^) - mean_j [Q(M^ + rho_t U_j) + Q(M^ - rho_t U_j)] / 2

with standard Gaussian U_j and rho_t the standard deviation of the noise in an entry of M^. Q alone
has the bias (rho^2 / 2) Laplacian Q; the second term has twice that, so O keeps -(rho^4 / 4) times
the bilaplacian. Probes are post-processing and cost no privacy.

With f the released gradient, or what a Kalman filter makes of it, and m the momentum, an entry's
noise in (f, m) is linear in the draws w of the releases, which are independent and of one variance,
on a path of gradients that noise does not change (000):

    f <- (1 - kappa) f + kappa w (f <- w at first; kappa = 1 without a filter),  m <- mu m + f   (1)

All clients begin a round with the server's (f, m) and add draws of their own, so client i has
(f, m)_i = Phi c + o_i: Phi, from (1), and the law of o_i are the same for all, and the o_i are
independent of each other and of c, whoever took part before. The server's next is
sum_i p_i (f, m)_i = Phi c + sum_i p_i o_i, with the covariance

    Cov(Phi c) + (sum_i p_i^2) Cov(o).                                                           (2)

So `common`, Cov(Phi c), and `own`, Cov(o), are kept apart; their sum is a client's.
"""

import torch
from torch import Tensor

from fedmuon.optim.chain import Context, Link, State, has_stepped, per_replica
from fedmuon.optim.orthogonal import probe
from fedmuon.tasks.base import Params


def corrected(
    orthogonal: Link,
    probes: int,
    noise: float,
    memory: float,
    average: bool = False,
    gain: float = 1.0,
) -> Link:
    """The map of a momentum M <- mu M + g~, or of its `average`, (1 - mu) times that, with
    the startup scale and the correction.

    `noise` is the standard deviation of a released gradient's entry, `gain` that of a Kalman filter
    before the momentum. The state is the steps made [S] and the moments of the noise [S, 3].
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        stack = len(first)
        moments = {name: first.new_zeros(stack, 3) for name in ("common", "own")}
        return {"steps": first.new_zeros(stack), **moments}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = spread(state, memory, gain)
        total = (1 - memory ** state["steps"]) / (1 - memory)
        scale = total * (1 - memory) if average else total
        unit = {name: value / per_replica(scale, value) for name, value in direction.items()}
        width = noise * (state["common"] + state["own"])[:, 2].sqrt() / total
        return _unbiased(orthogonal, unit, width, context, probes), state

    return Link("orthogonalize", init, update, lasting=True, averaged=averaged)


def _unbiased(
    orthogonal: Link, unit: Params, width: Tensor, context: Context, probes: int
) -> Params:
    """O of every matrix M^ [S, m, n], for rho [S]."""
    smooth = [_probed(orthogonal, unit, width, context, number) for number in range(probes)]
    return {
        name: 2 * value - sum(one[name] for one in smooth) / probes
        for name, value in _mapped(orthogonal, unit, context).items()
    }


def _probed(orthogonal: Link, unit: Params, width: Tensor, context: Context, number: int) -> Params:
    """[Q(M^ + rho U) + Q(M^ - rho U)] / 2 of every matrix."""
    shift = {
        name: per_replica(width, value) * probe(value, context, block, number)
        for block, (name, value) in enumerate(unit.items())
    }
    raised = {name: value + shift[name] for name, value in unit.items()}
    lowered = {name: value - shift[name] for name, value in unit.items()}
    above, below = _mapped(orthogonal, raised, context), _mapped(orthogonal, lowered, context)
    return {name: (above[name] + below[name]) / 2 for name in unit}


def _mapped(orthogonal: Link, matrices: Params, context: Context) -> Params:
    """Q of every matrix; the map has no state."""
    return orthogonal.update(matrices, {}, context)[0]


def spread(state: State, memory: float, gain: float) -> State:
    """The covariances (E f^2, E f m, E m^2), over the variance of w, after one more step (1), whose
    draw is the client's own.

    Without a filter E m^2 of a lone client is (1 - mu^(2t)) / (1 - mu^2), and over s_t^2 it is
    000's (1 - mu) / (1 + mu) (1 + mu^t) / (1 - mu^t).
    """
    weight = 1 + has_stepped(state) * (gain - 1)

    def carried(moments: Tensor) -> Tensor:
        f, cross, m = moments.unbind(-1)
        f, cross = (1 - weight) ** 2 * f, memory * (1 - weight) * cross
        return torch.stack([f, cross + f, memory**2 * m + 2 * cross + f], -1)

    own = carried(state["own"]) + weight[:, None] ** 2
    return {"steps": state["steps"] + 1, "common": carried(state["common"]), "own": own}


def averaged(state: State, squares: float) -> State:
    """(2): what the server holds is common to all clients of the next round."""
    common = state["common"] + squares * state["own"]
    return {**state, "common": common, "own": torch.zeros_like(common)}
