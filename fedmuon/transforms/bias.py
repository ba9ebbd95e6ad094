"""DP-MuonBC: what Gaussian noise in the momentum does to the mean of an orthogonalized step, undone
to leading order (000, section 4).

    M^ = M / s_t,   O = 2 Q(M^) - mean_j [Q(M^ + rho_t U_j) + Q(M^ - rho_t U_j)] / 2

with standard Gaussian U_j and rho_t the standard deviation of the noise in an entry of M^. Q alone
has the bias (rho^2 / 2) Laplacian Q; the second term has twice that, so O keeps -(rho^4 / 4) times
the bilaplacian. Probes are post-processing and cost no privacy.
"""

from torch import Tensor

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, State, has_stepped, per_replica
from fedmuon.transforms.orthogonal import probe


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
    before the momentum. The state is the steps made and the noise's second moments [S].
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        names = ("steps", "filter", "cross", "momentum")
        return {name: first.new_zeros(len(first)) for name in names}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = spread(state, memory, gain)
        total = (1 - memory ** state["steps"]) / (1 - memory)
        scale = total * (1 - memory) if average else total
        unit = {name: value / per_replica(scale, value) for name, value in direction.items()}
        width = noise * state["momentum"].sqrt() / total
        return _unbiased(orthogonal, unit, width, context, probes), state

    return Link("orthogonalize", init, update, lasting=True)


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
    """Second moments, in units of the released noise, of the filter's and the momentum's noise
    after one more step: f <- (1 - kappa) f + kappa w (f <- w at first), m <- mu m + f.

    Without a filter the last is (1 - mu^(2t)) / (1 - mu^2), and over s_t^2 it is 000's
    (1 - mu) / (1 + mu) (1 + mu^t) / (1 - mu^t).
    """
    weight = 1 + has_stepped(state) * (gain - 1)
    kept = 1 - weight
    filtered = kept**2 * state["filter"] + weight**2
    carried = memory * kept * state["cross"]
    return {
        "steps": state["steps"] + 1,
        "filter": filtered,
        "cross": carried + filtered,
        "momentum": memory**2 * state["momentum"] + 2 * carried + filtered,
    }
