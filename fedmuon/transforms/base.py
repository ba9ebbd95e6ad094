"""Links of the local chain: pairs of pure functions over stacks.

    init(params) -> state            update(direction, state, context) -> (direction, state)

A local step starts with no direction; the first link asks the context for a gradient, the later
ones turn it into an update, and `step` adds the last direction to the parameters. A new optimizer
is a new link or a new chain of links, never a new loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedmuon.tasks.base import Params

Number = float | Tensor  # one value for all replicas, or one per replica [S]
State = Params
States = dict[str, State]


@dataclass(frozen=True)
class Context:
    """What one local step may see besides its direction."""

    params: Params
    gradient: Callable[[Params], tuple[Tensor, Params]]  # params -> (loss [S], gradient)
    draw: Callable[..., np.random.Generator]  # draw(what, block=...) -> this step's generator


@dataclass(frozen=True)
class Link:
    """A named transformation; the name is where its state is kept."""

    name: str
    init: Callable[[Params], State]
    update: Callable[[Params, State, Context], tuple[Params, State]]


@dataclass(frozen=True)
class Chain:
    """Links applied in order; the chain's states are `{link name: state}`."""

    links: tuple[Link, ...] = field(default_factory=tuple)

    def init(self, params: Params, given: States) -> States:
        """The states of all links at the start of a local round: those given, the others fresh."""
        return {
            link.name: given[link.name] if link.name in given else link.init(params)
            for link in self.links
        }

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        """One local step: X + direction, and the links' next states."""
        direction: Params = {}
        after: States = {}
        for link in self.links:
            direction, after[link.name] = link.update(direction, states[link.name], context)
        return {name: value + direction[name] for name, value in params.items()}, after


def stateless(name: str, update: Callable[[Params, Context], Params]) -> Link:
    """A link without a state."""
    return Link(name, lambda params: {}, lambda d, state, context: (update(d, context), state))


def zeros(params: Params) -> State:
    """A state shaped like the parameters."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def per_replica(number: Number, like: Tensor) -> Number:
    """A number per replica [S], made to broadcast against like [S, ...]; floats pass unchanged."""
    if isinstance(number, float | int):
        return float(number)
    return number.to(like.device, like.dtype).reshape(-1, *[1] * (like.ndim - 1))
