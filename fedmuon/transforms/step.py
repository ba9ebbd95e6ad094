"""The last links: scaling, mixing with the global direction, and the step itself."""

from collections.abc import Mapping

import torch

from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, Number, State, per_replica, stateless, zeros


def align(share: float) -> Link:
    """(1 - alpha) O + alpha Delta_G (001 Remark 3.2); the state Delta_G is the server's to set."""

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        mixed = {name: value.lerp(state[name], share) for name, value in direction.items()}
        return mixed, state

    return Link("global-direction", zeros, update)


def normalize() -> Link:
    """D / ||D||_F over all parameters of a replica together; 0 stays 0."""

    def update(direction: Params, context: Context) -> Params:
        squares = sum(value.flatten(1).square().sum(1) for value in direction.values())
        size = torch.as_tensor(squares).sqrt()
        inverse = torch.where(size > 0, 1 / size, size)
        return {name: value * per_replica(inverse, value) for name, value in direction.items()}

    return stateless("normalize", update)


def descend(lr: Number, others: Mapping[str, Number] | None = None, decay: float = 0.0) -> Link:
    """-eta times the direction (001 (3)), and times decay X beside it; eta is times the round's
    factor, and may differ per replica, and by parameter: `others` names those that do not take
    `lr`."""
    rates = others or {}

    def update(direction: Params, context: Context) -> Params:
        if decay:
            direction = {
                name: value.add(context.params[name], alpha=decay)
                for name, value in direction.items()
            }
        moved = {
            name: value * -per_replica(rates.get(name, lr), value)
            for name, value in direction.items()
        }
        if context.factor == 1:
            return moved
        return {name: value * context.factor for name, value in moved.items()}

    return stateless("descend", update)
