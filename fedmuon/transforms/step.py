"""The last links: mixing with the global direction, and the step itself."""

from collections.abc import Mapping

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, Number, State, per_replica, stateless, zeros


def align(share: float) -> Link:
    """(1 - alpha) O + alpha Delta_G (001 Remark 3.2); the state Delta_G is the server's to set."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        mixed = {name: value.lerp(state[name], share) for name, value in direction.items()}
        return mixed, state

    return Link("global-direction", zeros, update)


def descend(lr: Number, others: Mapping[str, Number] | None = None) -> Link:
    """-eta times the direction (001 (3)); eta may differ per replica, and by parameter: `others`
    names those that do not take `lr`."""
    rates = others or {}

    def update(direction: Params, context: Context) -> Params:
        return {
            name: value * -per_replica(rates.get(name, lr), value)
            for name, value in direction.items()
        }

    return stateless("descend", update)
