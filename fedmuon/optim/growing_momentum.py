"""A growing momentum and a falling step size, for methods without constants of the problem."""

from fedmuon.optim.chain import Context, Link, State, per_replica, zeros
from fedmuon.tasks.base import Params


def growing_momentum(power: float) -> Link:
    """Return a link with the momentum M <- (1 - a) M + a G, where a = k^(-power) in step k.

    Args:
        power: The power, above 0.
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        return {"steps": first.new_zeros(len(first)), **_named(zeros(params))}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        steps = state["steps"] + 1
        share = steps.double() ** -power
        momentum = {
            name: state[f"momentum {name}"].lerp(value, per_replica(share, value))
            for name, value in direction.items()
        }
        return momentum, {"steps": steps, **_named(momentum)}

    return Link("momentum", init, update, lasting=True)


def falling(power: float) -> Link:
    """Return a link that multiplies the direction of step k by k^(-power).

    Args:
        power: The power, above 0.
    """

    def init(params: Params) -> State:
        first = next(iter(params.values()))
        return {"steps": first.new_zeros(len(first))}

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        steps = state["steps"] + 1
        factor = steps.double() ** -power
        shorter = {name: value * per_replica(factor, value) for name, value in direction.items()}
        return shorter, {"steps": steps}

    return Link("falling", init, update, lasting=True)


def _named(momentum: Params) -> State:
    return {f"momentum {name}": value for name, value in momentum.items()}
