"""A recipe: a chain of links for the clients, and a rule for the server.

Links have states. The server sends the states in `sent` to the clients. Clients return the states
in `returned`, and the server averages them. Clients store the states in `persistent` between
rounds. The server's rule computes the next model from the old model. Everything else in a federated
round is the same for all recipes. `recipes.py` defines the named recipes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from fedmuon.core.errors import Guard, InputError, mapping, plain, shown
from fedmuon.core.registry import unfit
from fedmuon.optim.aggregators import Aggregator, as_aggregator, mean
from fedmuon.optim.chain import (
    PERSONAL,
    Chain,
    Context,
    Link,
    Number,
    State,
    States,
    per_replica,
    zeros,
)
from fedmuon.optim.compression import ESTIMATE, MODEL, Compression
from fedmuon.optim.low_rank import Codec
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Params, split_statistics, stack_results
from fedmuon.tasks.per_example.clipping import Clipping

# (old model, mean of the clients' models, states) -> (next model, next states)
ServerRule = Callable[..., tuple[Params, States]]
# (received model, model after the local steps, states, steps) -> (model to return, states)
ClientRule = Callable[..., tuple[Params, States]]


@dataclass(frozen=True)
class Recipe:
    """A federated optimizer: a local chain for the clients and a rule for the server.

    Attributes:
        chain: The links of a client.
        server: Function that receives `(old model, mean of the clients' models, states)` and
            returns `(next model, next states)`.
        sent: Names of the states that clients receive.
        returned: Names of the states that clients return, and that the server averages. A state
            that belongs to no link comes from the rule `client`. Its tensors have the shapes
            `[replicas, ...]`, which may differ from those of the model but never change.
        kept: Names of the states that the server stores between rounds.
        mechanism: The privacy mechanism, through which a private chain reads the data.
        aggregate: The aggregator, which combines the replies.
        scaled: Whether both rules also accept `factor`, the step-size factor of the round.
        steps: The number of local steps that the server's rule assumes, or 0 if any number is
            possible.
        thread_safe: Whether several threads may train clients at once.
        client_level: The client-level privacy mechanism, which replaces the mean of the clients'
            updates by a noisy mean.
        persistent: Names of the links whose state each client stores between rounds and never
            sends. The state of a link named `personal` is the client's own model.
        client: The client's rule, called at the end of the client's round: a function that receives
            `(received model, model after the local steps, states, number of local steps)` and
            returns `(model to return, states)`.
        counted: Whether the server's rule also accepts `answered`, a list of each reply's weight in
            the mean and number of local steps.
        initial: Mapping from a state name to a function that receives the model and returns the
            server's first state, in place of zeros. It also defines the shapes of the state.
        personal: Name patterns, such as `head.*`, of parameters that never leave the client.
        codecs: Mapping from a state name to the codec that compresses this state in messages.
        clients: The total number N of clients that the server's rule assumes, or 0 if any number is
            possible.
        compression: The compression of messages, from the table `[compression]`.
        direction: Whether clients return a direction, with the shapes of the model, instead of a
            model.
        knows_samples: Whether the rule `client` also accepts `samples`, a tensor `[replicas]` with
            the number n_i of the client's samples.

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
    mechanism: Mechanism | None = None
    aggregate: Aggregator = field(default_factory=mean)
    scaled: bool = False
    steps: int = 0
    thread_safe: bool = True
    client_level: ClientLevel | None = None
    persistent: tuple[str, ...] = ()
    client: ClientRule | None = None
    counted: bool = False
    initial: Mapping[str, Callable[[Params], State]] = field(default_factory=dict, hash=False)
    personal: tuple[str, ...] = ()
    codecs: Mapping[str, Codec] = field(default_factory=dict, hash=False)
    clients: int = 0
    compression: Compression | None = None
    direction: bool = False
    knows_samples: bool = False

    def encoded(self, states: States) -> States:
        """Encode the states for a message.

        Args:
            states: Mapping of state name to state.

        Returns:
            The states for the message, of which those with an entry in `codecs` are encoded.
        """
        if not self.codecs:
            return states
        own = self.codecs
        return {n: own[n].encode(one) if n in own else one for n, one in states.items()}

    def decoded(self, states: States, like: Params) -> States:
        """Decode the states of a message, with the shapes of a model.

        Args:
            states: Mapping of state name to a state in a message.
            like: A model with the shapes of the result.

        Returns:
            Mapping of state name to decoded state.
        """
        if not self.codecs:
            return states
        own = self.codecs
        return {n: own[n].decode(one, like) if n in own else one for n, one in states.items()}

    @property
    def keeps_states(self) -> bool:
        """Whether a client stores anything between the rounds in which it takes part."""
        remembers = self.compression is not None and self.compression.keeps
        return bool(self.persistent or self.personal) or remembers

    @property
    def personalizes(self) -> bool:
        """Whether each client has its own model."""
        return bool(self.personal) or PERSONAL in self.persistent

    def is_personal(self, name: str) -> bool:
        """Return whether a parameter never leaves the client.

        Args:
            name: Name of the parameter.

        Returns:
            Whether a pattern in `personal` matches the name.
        """
        return any(fnmatchcase(name, pattern) for pattern in self.personal)

    @property
    def private(self) -> bool:
        """Whether the recipe has a privacy mechanism."""
        return self.mechanism is not None or self.client_level is not None

    @property
    def masked(self) -> bool:
        """Whether clients return masked integers, of which the server can read only the sum."""
        return self.client_level is not None and self.client_level.shared

    def __post_init__(self) -> None:
        with Guard("recipe", self.server):
            # A field of the wrong type would raise an error only in the middle of a run.
            wanted = {
                "chain": (isinstance(self.chain, Chain), "a fedmuon.Chain of links"),
                "server": (callable(self.server), "a function (old, mean, states)"),
                "aggregate": (isinstance(self.aggregate, Aggregator), "a fedmuon.Aggregator"),
                "scaled": (isinstance(self.scaled, bool), "True or False"),
            }
            for name in ("steps", "clients"):
                held = getattr(self, name)
                wanted[name] = type(held) is int and held >= 0, "an integer of 0 or more"
            wanted["client"] = (
                self.client is None or callable(self.client),
                "a function (received, params, states, steps)",
            )
            for name in ("counted", "direction", "knows_samples"):
                wanted[name] = isinstance(getattr(self, name), bool), "True or False"
            for name in ("sent", "returned", "kept", "persistent", "personal"):
                held, of = getattr(self, name), "patterns" if name == "personal" else "state names"
                named = isinstance(held, tuple | list) and all(isinstance(one, str) for one in held)
                wanted[name] = named, f"a tuple of {of}"
            wanted["codecs"] = (
                isinstance(self.codecs, Mapping)
                and all(isinstance(one, Codec) for one in self.codecs.values())
                and {*self.codecs} <= {*self.sent, *self.returned},
                "a mapping of names in `sent` or `returned` to codecs, such as low_rank(8)",
            )
            for name, (sound, mend) in wanted.items():
                if not sound:
                    found = shown(getattr(self, name))
                    raise InputError(f"{name} of a Recipe is {found}, but it must be {mend}.")
            if clash := set(aggregate_states(self)) & set(self.kept):
                raise InputError(
                    f"the recipe has a state {min(clash)!r} in `kept`, but its aggregator "
                    "already has a state of this name. Rename the link with this state."
                )
            if self.personal and (self.sent or self.returned or PERSONAL in self.persistent):
                clash_with = next(
                    (
                        f"{key} = {getattr(self, key)!r}"
                        for key in ("sent", "returned")
                        if getattr(self, key)
                    ),
                    "a link `personal`",
                )
                raise InputError(
                    f"the recipe has personal = {', '.join(self.personal)}, but the recipe also "
                    f"has {clash_with}. Personal parameters must stay on the client, so this "
                    "combination is not allowed. Remove `personal`, or remove `sent`, `returned` "
                    "and the link `personal`."
                )
            knowing = [f"the link {one.name}" for one in self.chain.links if one.knows_samples]
            if self.private and (knowing or self.knows_samples):
                raise InputError(
                    f"{[*knowing, 'the rule `client`'][0]} has knows_samples=True, but the recipe "
                    "is private, and a client's number of samples is protected. Set "
                    "knows_samples=False."
                )
        for link in self.chain.links:
            lost = [key for key in ("sent", "kept") if link.name not in getattr(self, key)]
            if link.lasting and link.name in self.returned and lost:
                raise InputError(
                    f"the link {link.name} has lasting=True, but its state is reset in every "
                    f"round because {link.name} is missing in {' and '.join(lost)}. Add "
                    f"{link.name} to {' and '.join(lost)}, or set lasting=False."
                )
        follows = [one.name for one in self.chain.links if one.averaged is not None]
        if self.aggregate.shares is None and set(follows) & set(self.returned):
            raise InputError(
                f"the link {follows[0]} corrects for noise, but the variance of the noise is "
                "known only for weighted means. Set [federation] aggregate = 'mean' or "
                "'by-samples', or use a fedmuon.Aggregator with `shares`."
            )


# Rules of the server


def replace_by_mean(old: Params, mean: Params, states: States) -> tuple[Params, States]:
    """Return the mean of the clients' models as the next model (Stability note, eq. (4))."""
    return mean, states


def remember_direction(lr: Number, steps: int, others: Mapping[str, Number]) -> ServerRule:
    """Return a server rule that averages the models and stores the global direction D.

    D = (X - mean) / (lr E), where X is the old model, mean is the mean of the clients' models, and
    E is the number of local steps. Source: Stability note, Remark 3.2.

    Args:
        lr: Step size of the clients.
        steps: The number E of local steps of the clients.
        others: Mapping from a parameter name to a step size, for parameters that do not use `lr`.
    """

    def rule(
        old: Params, mean: Params, states: States, factor: float = 1.0
    ) -> tuple[Params, States]:
        count = factor * steps
        moved = {name: old[name] - mean[name] for name in old}
        rates = {name: per_replica(others.get(name, lr), old[name]) * count for name in old}
        direction = {name: moved[name] / rates[name] for name in old} if count else zeros(old)
        return mean, {**states, "global-direction": direction}

    return rule


def server_step(lr: float, memory: float, nesterov: bool = False) -> ServerRule:
    """Return a server rule that takes a step of SGD with momentum.

    With D, the mean of the clients' models minus X, the rule computes v <- memory v + D. The next
    model is X + lr v, or X + lr (D + memory v) with Nesterov's look-ahead.
    """

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        if lr == 1 and memory == 0:
            return mean, states  # exactly FedAvg, bit for bit
        if memory == 0:
            return {name: old[name].lerp(mean[name], lr) for name in old}, states
        moved = {name: mean[name] - old[name] for name in old}
        velocity = {name: moved[name] + memory * states["momentum"][name] for name in old}
        ahead = {name: moved[name] + memory * velocity[name] for name in old}
        step = ahead if nesterov else velocity
        after = {name: old[name] + lr * step[name] for name in old}
        return after, {**states, "momentum": velocity}

    return rule


def adaptive_step(
    kind: str, lr: float, memory: float, square_memory: float, tau: float
) -> ServerRule:
    """Return a server rule that takes a step of Adam, Yogi or Adagrad.

    Let D be the mean of the clients' models minus X, and b = square_memory. The rule computes
    m <- memory m + (1 - memory) D. Then "adam" sets v <- b v + (1 - b) D^2, "yogi" sets
    v <- v - (1 - b) D^2 sign(v - D^2), and "adagrad" sets v <- v + D^2. The next model is
    X + lr m / (sqrt(v) + tau), without bias correction. v starts at tau^2.

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        found, momentum, squares = {}, {}, {}
        for name, before in old.items():
            moved = mean[name] - before
            square, v = moved.square(), states["square"][name]
            momentum[name] = m = moved.lerp(states["momentum"][name], memory)
            if kind == "adam":
                v = square.lerp(v, square_memory)
            elif kind == "yogi":
                v = v - (1 - square_memory) * square * (v - square).sign()
            else:
                v = v + square
            squares[name] = v
            found[name] = before + lr * m / (v.sqrt() + tau)
        return found, {**states, "momentum": momentum, "square": squares}

    return rule


def centralized(*links: Link) -> Recipe:
    """Return a recipe for centralized training with these links.

    With several clients, the server averages their models and all states that last between rounds.
    """
    chain = Chain(links)
    lasting = tuple(link.name for link in chain.links if link.lasting)
    return Recipe(chain, replace_by_mean, lasting, lasting, lasting)


# Personal parameters of a client


def shared_part(recipe: Recipe, params: Params) -> Params:
    """Return the parameters that clients receive and return: all except personal parameters."""
    if not recipe.personal:
        return params
    return {name: value for name, value in params.items() if not recipe.is_personal(name)}


def personal_part(recipe: Recipe, params: Params) -> Params:
    """Return the personal parameters of a model, which never leave a client."""
    return {name: value for name, value in params.items() if recipe.is_personal(name)}


# States of the server


def initial_states(recipe: Recipe, params: Params) -> States:
    """Return the server's states before the first round.

    A state of a link starts with the link's first state, a state of the aggregator with the state
    that `init` returns, and any other state with zeros. Only the aggregator has states for running
    statistics, such as those of BatchNorm.
    """
    params = shared_part(recipe, params)
    learned, _ = split_statistics(params)
    states = {name: first_state(recipe, name, learned) for name in recipe.kept}
    if recipe.compression is not None and recipe.compression.estimates:
        states |= {f"{ESTIMATE}{tree}": zeros(learned) for tree in (MODEL, *recipe.returned)}
    if recipe.aggregate.init is None:
        return states
    first = _declared_state(recipe.aggregate, params)
    others = {
        one: _declared_state(recipe.aggregate, first_state(recipe, one, learned))
        for one in recipe.returned
    }
    named = {aggregate_state(name): state for name, state in others.items()}
    return states | {aggregate_state(): first} | named


def first_state(recipe: Recipe, name: str, learned: Params) -> State:
    """Return the first value of a state, whose names and shapes all later values have."""
    made = {link.name: link.init for link in recipe.chain.links} | dict(recipe.initial)
    return made.get(name, zeros)(learned)


def _declared_state(aggregator: Aggregator, like: Params) -> Params:
    """Return a copy of the aggregator's first state for the given tensors."""
    assert aggregator.init is not None

    def declared(params: Params) -> dict[str, Tensor]:
        found = dict(aggregator.init(params))  # type: ignore[misc]
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise InputError(
                    "init of an Aggregator must return a mapping of strings to tensors, but it "
                    f"returns a {type(value).__name__} for {plain(name, 60)}. Return a mapping of "
                    "names to tensors."
                )
        return found

    if aggregator.stacked:
        found = declared(like)
    else:
        count = len(next(iter(like.values())))
        alone = [{name: value[s] for name, value in like.items()} for s in range(count)]
        found = stack_results([declared(one) for one in alone])
    return {name: value.detach().clone() for name, value in found.items()}


def aggregate_state(link: str = "") -> str:
    """Return the name of an aggregator's state.

    An aggregator has one state for models, and one for each link whose state is returned.
    """
    return f"aggregate-{link}" if link else "aggregate"


def aggregate_states(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of all states of the aggregator. The tuple is empty if there is no state."""
    names = ("", *recipe.returned) if recipe.aggregate.init is not None else ()
    return tuple(map(aggregate_state, names))


# Custom recipes


def as_recipe(found: Any, guard: Guard | None = None) -> Recipe:
    """Convert a chain or a sequence of links to a recipe, or check a custom recipe.

    Args:
        found: A `fedmuon.Recipe`, a `fedmuon.Chain`, or a sequence of links.
        guard: A guard, whose object is named in errors of the recipe's functions.

    Returns:
        The recipe. A chain becomes a centralized optimizer (`centralized`).

    Raises:
        InputError: If the object is not a recipe, a chain or a sequence of links.

    Example:
        >>> from fedmuon import links, recipes
        >>> made = recipes.as_recipe([links.gradient(), links.momentum(0.9), links.descend(0.1)])
        >>> made.kept
        ('momentum',)
    """
    if guard is not None:
        with guard:
            return _guard_recipe(_converted(found, guard.named), guard)
    return _converted(found)


def _converted(found: Any, named: str = "") -> Recipe:
    """Convert an object to a recipe. `named` is the key of the config that names the object."""
    if isinstance(found, Recipe):
        if found.mechanism is not None:
            for one, ours in ((found.mechanism, Mechanism), (found.mechanism.clipping, Clipping)):
                if type(one) is not ours:
                    raise InputError(
                        f"the recipe uses the class {type(one).__name__}, which may release data "
                        "that no privacy account counts. Private recipes accept only fedmuon's "
                        f"own class {ours.__name__}. Use {ours.__name__}."
                    )
        return found
    links = found.links if isinstance(found, Chain) else found
    if isinstance(links, tuple | list) and links and all(isinstance(one, Link) for one in links):
        return centralized(*links)
    raise unfit(
        found,
        "recipe",
        "a fedmuon.Recipe (from fedmuon.recipes, for example), a fedmuon.Chain or a list of "
        "links (from fedmuon.links); a torch optimizer is not a recipe",
        named,
    )


@dataclass(frozen=True)
class _Chain(Chain):
    """A custom chain, whose errors name the custom object."""

    guard: Guard = field(default_factory=lambda: Guard("recipe"))

    def init(self, params: Params, given: States) -> States:
        with self.guard:
            return super().init(params, given)

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        with self.guard:
            return super().step(params, states, context)


def _guard_recipe(found: Recipe, guard: Guard) -> Recipe:
    """Return the recipe with functions whose errors name the custom object."""

    def within(link: Link, part: str, read: Callable[[Any], Any]) -> Any:
        function = getattr(link, part)
        of = guard.part(f"{part} of the link {link.name}", function)
        return None if function is None else of.calling(function, read)

    links = [
        dataclasses.replace(
            link,
            init=within(link, "init", mapping),
            update=within(link, "update", _pair_of_mappings),
            averaged=within(link, "averaged", mapping),
        )
        for link in found.chain.links
    ]
    server, aggregate = guard.part("server rule", found.server), found.aggregate
    client = found.client
    if client is not None:
        client = guard.part("client rule", client).calling(client, _pair_of_mappings)
    return dataclasses.replace(
        found,
        client=client,
        chain=_Chain(tuple(links), guard),
        server=server.calling(found.server, _pair_of_mappings),
        aggregate=as_aggregator(aggregate, guard.part("aggregate", aggregate.apply)),
    )


def _pair_of_mappings(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two mappings in the result of a custom function as two dictionaries."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(
            f"the function returns a {type(found).__name__}, but a pair of mappings is required"
        )
    return mapping(found[0]), mapping(found[1])
