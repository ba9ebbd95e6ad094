"""Links and chains: the optimizer of a client as pure functions on stacks of models.

    init(params) -> state            update(direction, state, context) -> (direction, state)

In each local step, the first link requests a gradient from the context, and the other links
transform this gradient into an update. `Chain.step` adds the update to the parameters. To add an
optimizer, you write a link or a chain of links; the training loop stays the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import to_device
from fedmuon.core.errors import InputError, plain, shown
from fedmuon.core.rng import Draw, normal
from fedmuon.tasks.base import Params, Points, Released

Number = float | Tensor  # one value for all replicas, or one per replica [S]
State = Params
States = dict[str, State]
PERSONAL = "personal"  # name of the state with a client's own model, or its personal parameters


def _no_release(points: Points, bounds: Tensor | None = None) -> Released:
    raise InputError(
        "this chain is private, but its Context has no function `released`. Pass "
        "Context(..., released=mechanism.releases(task, batches, draws))."
    )


@dataclass(frozen=True)
class Context:
    """The values that a link may read at one local step, in addition to its direction.

    Tensors contain K blocks of S replicas `[K S, ...]`, one block per client. The replicas of a
    client share the same random draws, and different clients have different draws. Links of a
    private chain call `released` instead of `gradient`.

    Attributes:
        params: The model X.
        gradient: Function that receives a model, and returns the losses `[K S]` of the batch and
            the gradient.
        draws: A list of functions, one per client: `draws[k](what, block=...)` returns a random
            generator of client k for this step.
        released: Function that receives points, and returns the lot's noisy clipped gradient at
            these points. For quantile clipping, the function also accepts clipping bounds `[K S]`.
        factor: Factor that multiplies all step sizes in this round.
        clients: Numbers of the K clients, only for links with `knows_client`.
        received: The model that the client received at the start of the round.
        samples: The number n_i of each client's samples as a tensor `[K S]`, only for links with
            `knows_samples`.
        round: The round whose model the client received.

    Example:
        >>> import torch
        >>> from fedmuon.links import Context
        >>> model = {"w": torch.ones(1, 2)}
        >>> context = Context(model, lambda at: (torch.zeros(1), at), draws=[])
        >>> loss, slope = context.gradient(context.params)
        >>> slope["w"].tolist(), context.factor
        ([[1.0, 1.0]], 1.0)
    """

    params: Params
    gradient: Callable[[Params], tuple[Tensor, Params]]
    draws: Sequence[Callable[..., np.random.Generator]]
    released: Callable[..., Released] = _no_release
    factor: float = 1.0
    clients: tuple[int, ...] = ()
    received: Params = field(default_factory=dict)
    samples: Tensor | None = None
    round: int = 0


@dataclass(frozen=True)
class Link:
    """A gradient transformation with a name and a state.

    Attributes:
        name: The name of the link and of its state, without a dot.
        init: Function that receives the parameters and returns the first state.
        update: Function that receives `(direction, state, context)` and returns `(direction,
            state)`, with new tensors.
        lasting: Whether the next round should continue with this state.
        averaged: For a link that tracks how averaging reduces noise: function that receives the
            mean of the clients' states and the sum of the clients' squared weights, and returns the
            server's state.
        knows_client: Whether the link receives `context.clients`.
        knows_samples: Whether the link receives `context.samples`.

    Raises:
        InputError: If an attribute has the wrong type, or the name is empty or contains a dot.

    Example:
        >>> import fedmuon
        >>> def update(direction, state, context):
        ...     return {name: value.sign() for name, value in direction.items()}, state
        >>> sign = fedmuon.Link("sign", lambda params: {}, update)
        >>> sign.name, sign.lasting
        ('sign', False)
    """

    name: str
    init: Callable[[Params], State]
    update: Callable[[Params, State, Context], tuple[Params, State]]
    lasting: bool = False
    averaged: Callable[[State, float], State] | None = None
    knows_client: bool = False
    knows_samples: bool = False

    def __post_init__(self) -> None:
        checks = {
            "init": (callable(self.init), "a function (params)"),
            "update": (callable(self.update), "a function (direction, state, context)"),
            "averaged": (self.averaged is None or callable(self.averaged), "a function or None"),
            "lasting": (isinstance(self.lasting, bool), "True or False"),
        }
        for name, (sound, needed) in checks.items():
            if not sound:
                raise InputError(
                    f"{name} of the link {plain(self.name, 60)} is {shown(getattr(self, name))}, "
                    f"which is not valid. Pass {needed}."
                )
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise InputError(
                f"a link has the name {plain(self.name, 60)!r}, which is not valid. Use a "
                "non-empty name without a dot."
            )


@dataclass(frozen=True)
class Chain:
    """A sequence of links, applied in order: the local optimizer of a client.

    The states of a chain are `{link name: state}`. Links with the same name are numbered: a second
    `momentum` is called `momentum-2`.

    Attributes:
        links: The links, from the link that computes a gradient to the link that returns the update
            of the model.

    Raises:
        InputError: If an element is not a link.

    Example:
        >>> import fedmuon
        >>> from fedmuon import links
        >>> chain = fedmuon.Chain((links.gradient(), links.momentum(0.9), links.descend(0.1)))
        >>> [link.name for link in chain.links]
        ['gradient', 'momentum', 'descend']
    """

    links: tuple[Link, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        links = self.links
        sequence = isinstance(links, tuple | list)
        wrong = [x for x in links if not isinstance(x, Link)] if sequence else [links]
        if wrong:
            raise InputError(
                "Chain needs a tuple of links, but it got a value of type "
                f"{type(wrong[0]).__name__}. For example, pass "
                "fedmuon.Chain((links.gradient(), links.descend(0.1)))."
            )
        links_by_name: dict[str, Link] = {}
        for link in links:
            name, place = link.name, 2
            while name in links_by_name:
                name, place = f"{link.name}-{place}", place + 1
            links_by_name[name] = link if name == link.name else replace(link, name=name)
        object.__setattr__(self, "links", tuple(links_by_name.values()))

    def init(self, params: Params, given: States) -> States:
        """Return the states at the start of a client's round.

        Args:
            params: The model, name -> tensor `[replicas, ...]`.
            given: Mapping from a link name to a state that the server has sent or the client has
                stored. All other links start with a new state.

        Returns:
            Mapping of link name to state.
        """
        return {
            link.name: given[link.name] if link.name in given else link.init(params)
            for link in self.links
        }

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        """Take one local step.

        Args:
            params: The model X.
            states: Mapping of link name to state.
            context: The values that links may read.

        Returns:
            The next model, which is the model plus the update of the last link, and the next
                states.
        """
        direction: Params = {}
        after: States = {}
        for link in self.links:
            visible_context = visible(link, context)
            direction, after[link.name] = link.update(direction, states[link.name], visible_context)
        return {name: value + direction[name] for name, value in params.items()}, after


def visible(link: Link, context: Context) -> Context:
    """Return the context without the values that the link does not ask for."""
    hidden: dict[str, Any] = {}
    if context.clients and not link.knows_client:
        hidden["clients"] = ()
    if context.samples is not None and not link.knows_samples:
        hidden["samples"] = None
    return replace(context, **hidden) if hidden else context


def stateless(name: str, update: Callable[[Params, Context], Params]) -> Link:
    """Make a link without a state.

    Args:
        name: The name of the link.
        update: Function that receives `(direction, context)` and returns the new direction.

    Returns:
        The link.

    Example:
        >>> from fedmuon import links
        >>> double = links.stateless("double", lambda d, context: {n: 2 * v for n, v in d.items()})
        >>> double.name
        'double'
    """
    return Link(name, lambda params: {}, lambda d, state, context: (update(d, context), state))


def zeros(params: Params) -> State:
    """Return a state of zeros with the shapes of the parameters.

    Args:
        params: Mapping of parameter name to tensor `[replicas, ...]`.

    Returns:
        Zero tensors under the same names, with the same device and dtype.

    Example:
        >>> import torch
        >>> from fedmuon import links
        >>> links.zeros({"w": torch.ones(1, 2)})
        {'w': tensor([[0., 0.]])}
    """
    return {name: torch.zeros_like(value) for name, value in params.items()}


def forbidden_gradient(at: Params) -> tuple[Tensor, Params]:
    """Raise an error, because links of a private chain must not read the exact gradient."""
    raise AssertionError(
        "a link of a private chain calls context.gradient, but links of a private chain may use "
        "only private releases. Call context.released instead."
    )


def per_client(number: Number, template: Tensor) -> Number:
    """Repeat the S values of `number` for each of the K clients of the template.

    `number` [S] has one value per replica, and the template is a tensor [K S, ...]. A single number
    is returned as a float.
    """
    if isinstance(number, float | int):
        return float(number)
    return to_device(number, template.device, template.dtype).repeat(len(template) // len(number))


def per_replica(number: Number, template: Tensor) -> Number:
    """Return the values of `per_client` in a shape that broadcasts against the template."""
    number = per_client(number, template)
    return (
        number if isinstance(number, float | int) else number.view(-1, *[1] * (template.ndim - 1))
    )


def gaussian_like(matrix: Tensor, context: Context, what: Draw, block: int) -> Tensor:
    """Draw a standard normal tensor with the shape of `matrix`.

    The replicas of a client get equal entries.
    """
    draws = [draw(what, block=block) for draw in context.draws]
    return to_device(normal(draws, tuple(matrix.shape)), matrix.device, matrix.dtype)
