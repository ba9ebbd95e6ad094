"""Links and chains: the optimizer of a client as pure functions over stacks of models.

    init(params) -> state            update(direction, state, context) -> (direction, state)

A local step starts without a direction. The first link asks the context for a gradient, and the
others turn it into an update. `Chain.step` adds the last direction to the parameters. A new
optimizer is a new link or a new chain of links, never a new loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import to_device
from fedmuon.core.errors import InputError, plain
from fedmuon.core.rng import Draw, normal
from fedmuon.privacy.mechanisms.gaussian import Released
from fedmuon.tasks.base import Params, Points

Number = float | Tensor  # one value for all replicas, or one per replica [S]
State = Params
States = dict[str, State]
PERSONAL = "personal"  # the state that holds a client's own model, or its own part of the model


def _no_release(points: Points, bounds: Tensor | None = None) -> Released:
    raise InputError("this chain is private, but its step was given no release")


@dataclass(frozen=True)
class Context:
    """What links may see at one local step, in addition to their direction.

    The tensors hold K blocks of S replicas [K S, ...], one block per client. Each client has its
    own draws, which its replicas share. Links of a private chain cannot see a gradient; they call
    `released`.

    Attributes:
        params: The model X.
        gradient: params -> (loss [K S], gradient).
        draws: draws[k](what, block=...) is a generator of client k for this step.
        released: points -> what the mechanism releases of the lot's gradients there. It also takes
            clipping bounds [K S] if they follow a quantile.
        factor: What step sizes are multiplied by in this round.
        clients: The numbers of the K clients, for links that declare `knows_client`.
        received: The model with which the client began the round.
    """

    params: Params
    gradient: Callable[[Params], tuple[Tensor, Params]]
    draws: Sequence[Callable[..., np.random.Generator]]
    released: Callable[..., Released] = _no_release
    factor: float = 1.0
    clients: tuple[int, ...] = ()
    received: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A gradient transformation with a name and a state.

    Attributes:
        name: Where its state is stored.
        init: params -> state.
        update: (direction, state, context) -> (direction, state).
        lasting: Whether its state is useful in the next round.
        averaged: For a link that tracks how averaging reduces noise: (mean of the clients' states,
            sum of the squares of their weights) -> state of the server.
        knows_client: Whether it sees `context.clients`, the clients' public numbers.
    """

    name: str
    init: Callable[[Params], State]
    update: Callable[[Params, State, Context], tuple[Params, State]]
    lasting: bool = False
    averaged: Callable[[State, float], State] | None = None
    knows_client: bool = False

    def __post_init__(self) -> None:
        functions = [self.init, self.update]
        if self.averaged is not None:
            functions.append(self.averaged)
        if not all(map(callable, functions)) or not isinstance(self.lasting, bool):
            raise InputError(
                "a Link has a name, functions init(params) and update(direction, state, context), "
                "and lasting = True or False: give these"
            )
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise InputError(
                f"a link cannot be called {plain(self.name, 60)}: give a word without a dot"
            )


@dataclass(frozen=True)
class Chain:
    """Links applied in order; the chain's states are `{link name: state}`.

    Links of one name are numbered: a second `momentum` is called `momentum-2`, here and where a
    recipe names it.
    """

    links: tuple[Link, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        given = self.links
        if not isinstance(given, tuple | list) or not all(isinstance(x, Link) for x in given):
            raise InputError("a Chain is made of links alone: give it a tuple of fedmuon.Link")
        named: dict[str, Link] = {}
        for link in given:
            name, place = link.name, 2
            while name in named:
                name, place = f"{link.name}-{place}", place + 1
            named[name] = link if name == link.name else replace(link, name=name)
        object.__setattr__(self, "links", tuple(named.values()))

    def init(self, params: Params, given: States) -> States:
        """The states of all links at the start of a local round: the given ones, others fresh."""
        return {
            link.name: given[link.name] if link.name in given else link.init(params)
            for link in self.links
        }

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        """One local step: X + direction, and the links' next states."""
        direction: Params = {}
        after: States = {}
        anonymous = replace(context, clients=()) if context.clients else context
        for link in self.links:
            seen = context if link.knows_client else anonymous
            direction, after[link.name] = link.update(direction, states[link.name], seen)
        return {name: value + direction[name] for name, value in params.items()}, after


def stateless(name: str, update: Callable[[Params, Context], Params]) -> Link:
    """A link without a state, from a function (direction, context) -> direction."""
    return Link(name, lambda params: {}, lambda d, state, context: (update(d, context), state))


def zeros(params: Params) -> State:
    """A state of zeros with the shapes of the parameters."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def forbidden_gradient(at: Params) -> tuple[Tensor, Params]:
    """The gradient of a private step: links that ask for it are a bug."""
    raise AssertionError("a link of a private chain asked for a gradient that is not released")


def per_client(number: Number, template: Tensor) -> Number:
    """Repeat a number per replica [S] for the K blocks of a template [K S, ...]; floats pass."""
    if isinstance(number, float | int):
        return float(number)
    return to_device(number, template.device, template.dtype).repeat(len(template) // len(number))


def per_replica(number: Number, template: Tensor) -> Number:
    """The same, shaped to broadcast against the template."""
    number = per_client(number, template)
    return (
        number if isinstance(number, float | int) else number.view(-1, *[1] * (template.ndim - 1))
    )


def gaussian_like(matrix: Tensor, context: Context, what: Draw, block: int) -> Tensor:
    """A standard normal tensor like [K S, ...]: one draw per client, shared by its replicas."""
    draws = [draw(what, block=block) for draw in context.draws]
    return to_device(normal(draws, tuple(matrix.shape)), matrix.device, matrix.dtype)
