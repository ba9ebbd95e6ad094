"""Momentum: the state that FedMuon averages on the server."""

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, State, zeros


def ema(memory: float) -> Link:
    """M <- beta M + (1 - beta) G (001 (1)); beta is the memory coefficient."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        state = {name: state[name].lerp(value, 1 - memory) for name, value in direction.items()}
        return state, state

    return Link("momentum", zeros, update)
