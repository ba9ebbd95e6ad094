"""Links of the local chain: pairs of pure functions over stacks.

    init(params) -> state            update(direction, state, context) -> (direction, state)

A local step starts with no direction; the first link asks the context for a gradient, the later
ones turn it into an update, and `step` adds the last direction to the parameters. A new optimizer
is a new link or a new chain of links, never a new loop.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import sent
from fedmuon.core.errors import InputError, plain
from fedmuon.privacy.mechanisms.gaussian import Released
from fedmuon.tasks.base import Params, Points

Number = float | Tensor  # one value for all replicas, or one per replica [S]
State = Params
States = dict[str, State]


def _nothing(points: Points, bounds: Tensor | None = None) -> Released:
    raise InputError("this chain is private, but its step was given no release")


@dataclass(frozen=True)
class Context:
    """What one local step of a cohort may see besides its direction.

    The stack is K blocks of S replicas, one block for each client of the cohort; every client has
    its own draws, shared by its replicas. Links of a private chain see no gradient: they ask for
    what is released of the lot's gradients at some points.
    """

    params: Params
    gradient: Callable[[Params], tuple[Tensor, Params]]  # params -> (loss [K S], gradient)
    draws: Sequence[Callable[..., np.random.Generator]]  # draws[k](what, block=...) of this step
    released: Callable[..., Released] = _nothing  # (points), and bounds if they follow a quantile
    factor: float = 1.0  # what step sizes are times in this round


@dataclass(frozen=True)
class Link:
    """A named transformation; the name is where its state is kept. A `lasting` state is worth
    keeping from round to round. One that follows how noise averages has in `averaged` what the
    server makes of the clients' mean state and the sum of the squares of their weights."""

    name: str
    init: Callable[[Params], State]
    update: Callable[[Params, State, Context], tuple[Params, State]]
    lasting: bool = False
    averaged: Callable[[State, float], State] | None = None

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

    Of several links of one name each has its own state: that of the second `momentum` is called
    `momentum-2`, here and where a recipe names it.
    """

    links: tuple[Link, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        given = self.links
        if not isinstance(given, tuple | list) or not all(isinstance(x, Link) for x in given):
            raise InputError("a Chain is made of links alone: give it a tuple of fedmuon.Link")
        taken: set[str] = set()
        links = tuple(_named_apart(link, taken) for link in self.links)
        object.__setattr__(self, "links", links)

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


def _named_apart(link: Link, taken: set[str]) -> Link:
    """The link by a name that is not taken yet, and now is."""
    names = (f"{link.name}-{place}" if place > 1 else link.name for place in itertools.count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return link if name == link.name else replace(link, name=name)


def stateless(name: str, update: Callable[[Params, Context], Params]) -> Link:
    """A link without a state."""
    return Link(name, lambda params: {}, lambda d, state, context: (update(d, context), state))


def zeros(params: Params) -> State:
    """A state shaped like the parameters."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def forbidden_gradient(at: Params) -> tuple[Tensor, Params]:
    """The gradient oracle of a private step: there is none."""
    raise AssertionError("a link of a private chain asked for a gradient that is not released")


def has_stepped(state: State) -> Tensor:
    """1 [S] once a state with `steps` [S] has seen a step, 0 before."""
    return (state["steps"] > 0).to(state["steps"].dtype)


def per_client(number: Number, template: Tensor) -> Number:
    """A number per replica [S], repeated for the K blocks of a template [K S, ...]; floats pass."""
    if isinstance(number, float | int):
        return float(number)
    return sent(number, template.device, template.dtype).repeat(len(template) // len(number))


def per_replica(number: Number, template: Tensor) -> Number:
    """The same, made to broadcast against the template."""
    number = per_client(number, template)
    return number if isinstance(number, float) else number.view(-1, *[1] * (template.ndim - 1))
