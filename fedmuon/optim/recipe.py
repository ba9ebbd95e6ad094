"""A recipe: a chain of links for the clients, and a rule for the server.

Links have states. The server sends the states in `sent` to the clients. Clients return the states
in `returned`, and the server averages them. Clients store the states in `persistent` between
rounds. The server's rule computes the next model from the old model. Everything else in a federated
round is the same for all recipes. `recipes.py` defines the named recipes.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedmuon.core.errors import Guard, InputError, object_name, plain, shown
from fedmuon.optim.aggregator import Aggregator, mean
from fedmuon.optim.chain import (
    PERSONAL,
    Chain,
    State,
    States,
    zeros,
)
from fedmuon.optim.stage import MODEL, Reply, Stage
from fedmuon.tasks.base import Params, split_statistics, stack_results

if TYPE_CHECKING:
    from fedmuon.privacy.mechanisms.gaussian import Mechanism

# (old model, mean of the clients' models, states) -> (next model, next states)
ServerRule = Callable[..., tuple[Params, States]]
# (received model, model after the local steps, states, steps) -> (model to return, states)
ClientRule = Callable[..., tuple[Params, States]]
# Arguments and attributes of version 1.0 (`first_version.py`).
REPLACED = ("personal", "codecs", "compression", "client_level")
FLAGS = ("scaled", "counted")
ASKING = "the rule `client` has a parameter `samples`"


@dataclass(frozen=True)
class Recipe:
    """A federated optimizer: a local chain for the clients and a rule for the server.

    Attributes:
        chain: The links of a client.
        server: Function that receives `(old model, mean of the clients' models, states)` and
            returns `(next model, next states)`. It may also have a parameter `factor`, the
            step-size factor of the round, and a parameter `answered`, a list of each reply's weight
            in the mean and number of local steps.
        sent: Names of the states that clients receive.
        returned: Names of the states that clients return, and that the server averages. A state
            that belongs to no link comes from the rule `client`. Its tensors have the shapes
            `[replicas, ...]`, which may differ from those of the model but never change.
        kept: Names of the states that the server stores between rounds.
        mechanism: The privacy mechanism, through which a private chain reads the data.
        aggregate: The aggregator, which combines the replies.
        steps: The number of local steps that the server's rule assumes, or 0 if any number is
            possible.
        thread_safe: Whether several threads may train clients at once.
        persistent: Names of the links whose state each client stores between rounds and never
            sends. The state of a link named `personal` is the client's own model.
        client: The client's rule, called at the end of the client's round: a function that receives
            `(received model, model after the local steps, states, number of local steps)` and
            returns `(model to return, states)`. It may also have a parameter `factor`, and a
            parameter `samples`, a tensor `[replicas]` with the number n_i of the client's samples.
        initial: Mapping from a state name to a function that receives the model and returns the
            server's first state, in place of zeros. It also defines the shapes of the state.
        clients: The total number N of clients that the server's rule assumes, or 0 if any number is
            possible.
        direction: Whether clients return a direction, with the shapes of the model, instead of a
            model.
        stages: The stages that change messages, such as compression (`fedmuon.Stage`).

    Raises:
        InputError: If an attribute has the wrong type, or attributes contradict each other.

    Example:
        >>> import fedmuon
        >>> from fedmuon import links
        >>> chain = fedmuon.Chain((links.gradient(), links.descend(0.1)))
        >>> recipe = fedmuon.Recipe(chain, lambda old, mean, states: (mean, states))
        >>> recipe.private, recipe.keeps_states
        (False, False)
    """

    chain: Chain
    server: ServerRule
    sent: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    mechanism: "Mechanism | None" = None
    aggregate: Aggregator = field(default_factory=mean)
    steps: int = 0
    thread_safe: bool = True
    persistent: tuple[str, ...] = ()
    client: ClientRule | None = None
    initial: Mapping[str, Callable[[Params], State]] = field(default_factory=dict, hash=False)
    clients: int = 0
    direction: bool = False
    stages: tuple[Stage, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name not in (*REPLACED, "masked"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        from fedmuon.optim.first_version import attribute  # loads all stages

        return attribute(self, name)

    @property
    def scaled(self) -> bool:
        """Whether a rule has a parameter `factor`."""
        return "factor" in self.facts_for_server | self.facts_for_client

    @property
    def counted(self) -> bool:
        """Whether the server's rule has a parameter `answered`."""
        return "answered" in self.facts_for_server

    @property
    def knows_samples(self) -> bool:
        """Whether the clients' rule has a parameter `samples`."""
        return "samples" in self.facts_for_client

    @cached_property
    def facts_for_server(self) -> frozenset[str]:
        """The facts of a round that the server's rule asks for, by the names of its parameters."""
        return parameters_of(self.server) & {"factor", "answered"}

    @cached_property
    def facts_for_client(self) -> frozenset[str]:
        """The facts of a round that the clients' rule asks for, by the names of its parameters."""
        return parameters_of(self.client) & {"factor", "samples"}

    @property
    def stores(self) -> tuple[str, ...]:
        """The names of the states that a client stores between the rounds in which it takes part.

        The states of links come first, followed by those of stages.
        """
        return (*self.persistent, *(name for stage in self.stages for name in stage.stores))

    @property
    def keeps_states(self) -> bool:
        """Whether a client stores anything between the rounds in which it takes part."""
        return bool(self.stores)

    @property
    def personalizes(self) -> bool:
        """Whether each client has its own model."""
        return PERSONAL in self.stores

    @property
    def isolates(self) -> bool:
        """Whether a client's reply must not depend on other clients."""
        return any(stage.isolates for stage in self.stages)

    @property
    def masked_clients(self) -> int:
        """The number of clients whose replies are masked, or 0 if replies are not masked."""
        return max((stage.masked_clients for stage in self.stages), default=0)

    @property
    def private(self) -> bool:
        """Whether the recipe has a privacy mechanism."""
        return self.mechanism is not None or self.isolates

    def is_personal(self, name: str) -> bool:
        """Return whether a parameter never leaves the client.

        Args:
            name: Name of the parameter.

        Returns:
            Whether a stage leaves this parameter with the client.
        """
        return any(stage.is_personal(name) for stage in self.stages)

    def apply_client(
        self,
        received: Params,
        params: Params,
        states: States,
        steps: int,
        factor: float,
        samples: Tensor | None,
    ) -> tuple[Params, States]:
        """Apply the client's rule, if there is one, to the model and states after local steps.

        Args:
            received: The model at the start of the local steps.
            params: The model after the local steps.
            states: The states of the chain after the local steps.
            steps: Number of local steps.
            factor: The step-size factor of the round.
            samples: The number n_i of each replica's samples, if a rule or link asks for it.

        Returns:
            The model to return, and the states.
        """
        if self.client is None:
            return params, states
        known = {"factor": factor, "samples": samples}
        facts = {name: known[name] for name in self.facts_for_client}
        return self.client(received, params, states, steps, **facts)

    def apply_server(
        self,
        old: Params,
        mean: Params,
        states: States,
        factor: float,
        answered: Callable[[], list[tuple[float, int]]],
    ) -> tuple[Params, States]:
        """Apply the server's rule to the mean of the clients' models.

        Args:
            old: The server's model.
            mean: The mean of the clients' models.
            states: The server's states and the means of the returned states.
            factor: The step-size factor of the round.
            answered: Function that returns the weight and the number of local steps of each reply.

        Returns:
            The next model and the next states.
        """
        known: dict[str, Callable[[], Any]] = {"factor": lambda: factor, "answered": answered}
        facts = {name: known[name]() for name in self.facts_for_server}
        return self.server(old, mean, states, **facts)

    def __post_init__(self) -> None:
        with Guard("recipe", self.server):
            _require_types(self)
            if clash := set(aggregate_states(self)) & set(self.kept):
                raise InputError(
                    f"the recipe has a state {min(clash)!r} in `kept`, but its aggregator "
                    "already has a state of this name. Rename the link with this state."
                )
            if MODEL in (*self.sent, *self.returned, *self.kept):
                raise InputError(
                    f"the recipe has a state {MODEL!r}, but messages use this name for the model. "
                    "Rename the link with this state."
                )
            for stage in self.stages:
                stage.require(self)
            _require_own_names(
                ((stage, stage.stores) for stage in self.stages), self.persistent, "stores a client"
            )
            knowing = [f"the link {link.name}" for link in self.chain.links if link.knows_samples]
            if self.private and (knowing or self.knows_samples):
                asking = f"{knowing[0]} has knows_samples=True" if knowing else ASKING
                raise InputError(
                    f"{asking}, but the recipe is private, and a client's number of samples is "
                    f"protected. {'Set knows_samples=False.' if knowing else 'Remove it.'}"
                )
        for link in self.chain.links:
            lost = [key for key in ("sent", "kept") if link.name not in getattr(self, key)]
            if link.lasting and link.name in self.returned and lost:
                raise InputError(
                    f"the link {link.name} has lasting=True, but its state is reset in every "
                    f"round because {link.name} is missing in {' and '.join(lost)}. Add "
                    f"{link.name} to {' and '.join(lost)}, or set lasting=False."
                )
        follows = [link.name for link in self.chain.links if link.averaged is not None]
        if self.aggregate.shares is None and set(follows) & set(self.returned):
            raise InputError(
                f"the link {follows[0]} corrects for noise, but the variance of the noise is "
                "known only for weighted means. Set [federation] aggregate = 'mean' or "
                "'by-samples', or use a fedmuon.Aggregator with `shares`."
            )


def parameters_of(rule: Callable[..., Any] | None) -> frozenset[str]:
    """Return the names of a rule's parameters, or no names if they are unknown."""
    if rule is None:
        return frozenset()
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(rule).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return frozenset(entry.name for entry in parameters if entry.kind in named)
    return frozenset()


def _require_types(recipe: Recipe) -> None:
    """Reject fields of the wrong type, which would raise an error only in the middle of a run."""
    needs = {
        "chain": (isinstance(recipe.chain, Chain), "a fedmuon.Chain of links"),
        "server": (callable(recipe.server), "a function (old, mean, states)"),
        "aggregate": (isinstance(recipe.aggregate, Aggregator), "a fedmuon.Aggregator"),
    }
    for name in ("steps", "clients"):
        number = getattr(recipe, name)
        needs[name] = type(number) is int and number >= 0, "an integer of 0 or more"
    needs["client"] = (
        recipe.client is None or callable(recipe.client),
        "a function (received, params, states, steps)",
    )
    needs["direction"] = isinstance(recipe.direction, bool), "True or False"
    for name in ("sent", "returned", "kept", "persistent"):
        names = getattr(recipe, name)
        are_names = isinstance(names, tuple | list) and all(isinstance(item, str) for item in names)
        needs[name] = are_names, "a tuple of state names"
    needs["stages"] = (
        isinstance(recipe.stages, tuple | list)
        and all(isinstance(stage, Stage) for stage in recipe.stages),
        "a tuple of stages, such as fedmuon.Stage()",
    )
    for name, (sound, needed) in needs.items():
        if not sound:
            value = shown(getattr(recipe, name))
            raise InputError(f"{name} of a Recipe is {value}, but it must be {needed}.")


def _require_own_names(
    names_of: Iterable[tuple[Stage, Iterable[str]]], taken: Iterable[str], action: str
) -> None:
    """Reject a stage's state whose name is taken, because one state would replace the other."""
    others = {*taken}
    for stage, names in names_of:
        if clash := others & {*names}:
            raise InputError(
                f"the stage {object_name(vars(stage).get('stage', stage))} {action} state "
                f"{min(clash)!r}, but this name is already used by the recipe, by its aggregator "
                "or by another stage. Rename the state of your stage."
            )
        others.update(names)


def _with_older_arguments(create: Callable[..., None]) -> Callable[..., None]:
    """Let `Recipe` accept the arguments of version 1.0 that stages have replaced."""

    @wraps(create)
    def create_from(self: Recipe, *args: Any, **arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in [*arguments] if name in FLAGS}
        older = {name: arguments.pop(name) for name in [*arguments] if name in REPLACED}
        if older:
            from fedmuon.optim.first_version import with_arguments

            stages = arguments.get("stages", ())
            returned = arguments.get("returned", args[3] if len(args) > 3 else ())
            arguments["stages"] = with_arguments(stages, returned, older)
        create(self, *args, **arguments)
        if flags:
            from fedmuon.optim.first_version import require_flags

            require_flags(self, flags)

    return create_from


Recipe.__init__ = _with_older_arguments(Recipe.__init__)  # type: ignore[method-assign]


# States of the server


def shared_part(recipe: Recipe, params: Params) -> Params:
    """Return the parameters that clients receive and return: all except personal parameters."""
    return {name: value for name, value in params.items() if not recipe.is_personal(name)}


def initial_states(recipe: Recipe, params: Params) -> States:
    """Return the server's states before the first round.

    A state of a link starts with the link's first state, a state of the aggregator with the state
    that `init` returns, and any other state with zeros. Only the aggregator has states for running
    statistics, such as those of BatchNorm.
    """
    params = shared_part(recipe, params)
    learned, _ = split_statistics(params)
    states = {name: first_state(recipe, name, learned) for name in recipe.kept}
    of_stages = [(stage, stage.initial(learned, recipe.returned)) for stage in recipe.stages]
    taken = (MODEL, *recipe.kept, *recipe.sent, *recipe.returned, *aggregate_states(recipe))
    _require_own_names(of_stages, taken, "returns from `initial` a server")
    for _, initial in of_stages:
        states |= initial
    if recipe.aggregate.init is None:
        return states
    first = _declared_state(recipe.aggregate, params)
    others = {
        name: _declared_state(recipe.aggregate, first_state(recipe, name, learned))
        for name in recipe.returned
    }
    named = {aggregate_state(name): state for name, state in others.items()}
    return states | {aggregate_state(): first} | named


def first_state(recipe: Recipe, name: str, learned: Params) -> State:
    """Return the first value of a state, whose names and shapes all later values have."""
    first = {link.name: link.init for link in recipe.chain.links} | dict(recipe.initial)
    return first.get(name, zeros)(learned)


def _declared_state(aggregator: Aggregator, like: Params) -> Params:
    """Return a copy of the aggregator's first state for the given tensors."""
    assert aggregator.init is not None

    def declared(params: Params) -> dict[str, Tensor]:
        state = dict(aggregator.init(params))  # type: ignore[misc]
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise InputError(
                    "init of an Aggregator must return a mapping of strings to tensors, but it "
                    f"returns a {type(value).__name__} for {plain(name, 60)}. Return a mapping of "
                    "names to tensors."
                )
        return state

    if aggregator.stacked:
        state = declared(like)
    else:
        count = len(next(iter(like.values())))
        alone = [{name: value[s] for name, value in like.items()} for s in range(count)]
        state = stack_results([declared(one) for one in alone])
    return {name: value.detach().clone() for name, value in state.items()}


def aggregate_state(link: str = "") -> str:
    """Return the name of an aggregator's state.

    An aggregator has one state for models, and one for each link whose state is returned.
    """
    return f"aggregate-{link}" if link else "aggregate"


def aggregate_states(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of all states of the aggregator. The tuple is empty if there is no state."""
    names = ("", *recipe.returned) if recipe.aggregate.init is not None else ()
    return tuple(map(aggregate_state, names))


# The replies of a round


def aggregated(
    recipe: Recipe, before: States, replies: Sequence[Reply]
) -> tuple[Params, States, States]:
    """Combine the replies of a round, first the returned states and then the models.

    Args:
        recipe: The optimizer.
        before: The server's states before the round.
        replies: The replies in the order of the clients.

    Returns:
        The combined model, the combined returned states, and the aggregator's own states.
    """
    replies = [replace(reply, own={}) for reply in replies]  # aggregators never see these states
    memory = {name: before.get(name, {}) for name in aggregate_states(recipe)}
    of_aggregator: States = {}

    def combine(name: str, replies: Sequence[Reply]) -> Params:
        combined, after = recipe.aggregate.combine(replies, memory.get(name))
        if memory:
            of_aggregator[name] = after
        return combined

    states = {
        name: combine(
            aggregate_state(name),
            [replace(reply, params=reply.states[name], part=name) for reply in replies],
        )
        for name in recipe.returned
    }
    if recipe.aggregate.shares is not None:  # for states that depend on the averaging of noise
        squares = sum(share**2 for share in recipe.aggregate.shares(replies))
        states |= {
            link.name: link.averaged(states[link.name], squares)
            for link in recipe.chain.links
            if link.averaged is not None and link.name in states
        }
    return combine(aggregate_state(), replies), states, of_aggregator


def weights_and_steps(recipe: Recipe, replies: Sequence[Reply]) -> list[tuple[float, int]]:
    """Return the weight in the mean and the number of local steps of each reply."""
    assert recipe.aggregate.shares is not None  # build_recipe requires it
    steps = [reply.steps for reply in replies]
    return list(zip(recipe.aggregate.shares(replies), steps, strict=True))
