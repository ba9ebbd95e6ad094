"""A recipe: a chain of links for the clients, and a rule for the server.

A recipe names the link states that are sent to the clients (`sent`) and those that come back and
are averaged (`returned`). Its rule moves the server from the old model to the next one. Everything
else in a federated round is the same for all recipes. `recipes.py` has the named ones.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedmuon.core.errors import Guard, InputError, mapping, plain
from fedmuon.core.registry import unfit
from fedmuon.optim.aggregators import Aggregator, as_aggregator, mean
from fedmuon.optim.chain import Chain, Context, Link, Number, States, per_replica, zeros
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Params, stack_results
from fedmuon.tasks.per_example.clipping import Clipping

# (old model, mean of the clients' models, states) -> (next model, next states)
ServerRule = Callable[..., tuple[Params, States]]


@dataclass(frozen=True)
class Recipe:
    """A federated optimizer: a local chain and a server rule.

    Attributes:
        chain: The links of a client.
        server: (old model, mean of the clients' models, states) -> (next model, next states).
        sent: Names of the states that clients receive.
        returned: Names of the states that clients return; the server averages them.
        kept: Names of the server's states between rounds.
        mechanism: The mechanism of a private chain, which is all that it sees of the data.
        aggregate: How replies are combined.
        scaled: Whether the rule also takes `factor`, what the round's step sizes were multiplied
            by.
        steps: The number of local steps that the rule assumes, 0 if it assumes none.
        thread_safe: Whether several threads may train clients at once.
        client_level: How whole updates are released, instead of their mean.
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

    @property
    def private(self) -> bool:
        """Whether an accountant covers its releases."""
        return self.mechanism is not None or self.client_level is not None

    @property
    def masked(self) -> bool:
        """Whether clients return masked integers, of which only the sum has a meaning."""
        return self.client_level is not None and self.client_level.shared

    def __post_init__(self) -> None:
        with Guard("recipe", self.server):
            # Fields of other types would fail in the middle of a run.
            wanted = {
                "chain": (isinstance(self.chain, Chain), "a fedmuon.Chain of links"),
                "server": (callable(self.server), "a function (old, mean, states)"),
                "aggregate": (isinstance(self.aggregate, Aggregator), "a fedmuon.Aggregator"),
                "scaled": (isinstance(self.scaled, bool), "True or False"),
                "steps": (
                    type(self.steps) is int and self.steps >= 0,
                    "a whole number of 0 or more",
                ),
            }
            for name in ("sent", "returned", "kept"):
                held = getattr(self, name)
                named = isinstance(held, tuple | list) and all(isinstance(one, str) for one in held)
                wanted[name] = named, "a tuple of names of states"
            for name, (sound, mend) in wanted.items():
                if not sound:
                    kind = type(getattr(self, name)).__name__
                    raise InputError(f"{name} of a Recipe has type {kind}: give {mend}")
            if clash := set(aggregate_states(self)) & set(self.kept):
                raise InputError(
                    f"the recipe keeps a state {min(clash)!r}, which is also the name of a state "
                    "of its aggregator: give the link another name"
                )
        for link in self.chain.links:
            lost = [key for key in ("sent", "kept") if link.name not in getattr(self, key)]
            if link.lasting and link.name in self.returned and lost:
                raise InputError(
                    f"the link {link.name} is lasting and its state is returned, but it begins "
                    f"afresh in every round: name it in {' and in '.join(lost)}, too, or set "
                    "lasting=False"
                )
        follows = [one.name for one in self.chain.links if one.averaged is not None]
        if self.aggregate.shares is None and set(follows) & set(self.returned):
            raise InputError(
                f"the link {follows[0]} corrects for noise whose variance is only known in "
                "weighted means: set [federation] aggregate = 'mean' or 'by-samples', or give a "
                "fedmuon.Aggregator with `shares`"
            )


# Rules of the server


def replace_by_mean(old: Params, mean: Params, states: States) -> tuple[Params, States]:
    """X <- mean of the clients' X (Stability note, eq. (4))."""
    return mean, states


def server_momentum(memory: float) -> ServerRule:
    """FedAvgM: v <- beta v + (mean - X), X <- X + v."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        velocity = states["momentum"]
        after = {name: memory * velocity[name] + (mean[name] - old[name]) for name in old}
        return {name: old[name] + after[name] for name in old}, {**states, "momentum": after}

    return rule


def remember_direction(lr: Number, steps: int, others: Mapping[str, Number]) -> ServerRule:
    """X <- mean, and D <- (X - mean) / (lr E), the global direction (Stability note, Remark 3.2).

    Args:
        lr: Step size of the clients.
        steps: E, their number of local steps.
        others: Step sizes of the parameters that do not use `lr`, by name.
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


def centralized(*links: Link) -> Recipe:
    """The recipe of a centralized optimizer.

    Every lasting state continues from round to round. Several clients average it.
    """
    chain = Chain(links)
    lasting = tuple(link.name for link in chain.links if link.lasting)
    return Recipe(chain, replace_by_mean, lasting, lasting, lasting)


# States of the server


def initial_states(recipe: Recipe, params: Params) -> States:
    """The server's states before the first round.

    These are the states of its links, zeros for its own, and what its aggregator declares.
    """
    made = {link.name: link.init for link in recipe.chain.links}
    states = {name: made.get(name, zeros)(params) for name in recipe.kept}
    if recipe.aggregate.init is None:
        return states
    first = _declared_state(recipe.aggregate, params)
    others = {one: _declared_state(recipe.aggregate, made[one](params)) for one in recipe.returned}
    named = {aggregate_state(name): state for name, state in others.items()}
    return states | {aggregate_state(): first} | named


def _declared_state(aggregator: Aggregator, like: Params) -> Params:
    """The state that an aggregator declares for tensors like these [S, ...], in new memory."""
    assert aggregator.init is not None

    def declared(params: Params) -> dict[str, Tensor]:
        found = dict(aggregator.init(params))  # type: ignore[misc]
        for name, value in found.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise InputError(
                    f"init of an Aggregator returns a {type(value).__name__} for "
                    f"{plain(name, 60)}: return a mapping of names to tensors"
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
    """The name of the aggregator's state, for models or for the returned state of a link."""
    return f"aggregate-{link}" if link else "aggregate"


def aggregate_states(recipe: Recipe) -> tuple[str, ...]:
    """The names of all states of the aggregator; empty if it declares none."""
    names = ("", *recipe.returned) if recipe.aggregate.init is not None else ()
    return tuple(map(aggregate_state, names))


# Custom recipes


def as_recipe(found: Any, guard: Guard | None = None) -> Recipe:
    """Turn a recipe, a chain or a list of links into a recipe.

    A chain alone keeps its lasting states. With a guard, the functions of a custom recipe are
    called within it.
    """
    if guard is not None:
        with guard:
            return _guard_recipe(as_recipe(found), guard)
    if isinstance(found, Recipe):
        if found.mechanism is not None:
            for one, ours in ((found.mechanism, Mechanism), (found.mechanism.clipping, Clipping)):
                if type(one) is not ours:
                    raise InputError(
                        f"a mechanism of class {type(one).__name__} may release what no account "
                        f"has counted: give fedmuon's {ours.__name__} itself"
                    )
        return found
    links = found.links if isinstance(found, Chain) else found
    if isinstance(links, tuple | list) and links and all(isinstance(one, Link) for one in links):
        return centralized(*links)
    raise unfit(
        found,
        "recipe",
        "a fedmuon.Recipe (fedmuon.recipes makes ours), a fedmuon.Chain or a list of links "
        "(fedmuon.links); an optimizer of torch's is no recipe",
    )


@dataclass(frozen=True)
class _Chain(Chain):
    """A custom chain."""

    guard: Guard = field(default_factory=lambda: Guard("recipe"))

    def init(self, params: Params, given: States) -> States:
        with self.guard:
            return super().init(params, given)

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        with self.guard:
            return super().step(params, states, context)


def _guard_recipe(found: Recipe, guard: Guard) -> Recipe:
    """The recipe, with guards around its functions."""

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
    return dataclasses.replace(
        found,
        chain=_Chain(tuple(links), guard),
        server=server.calling(found.server, _pair_of_mappings),
        aggregate=as_aggregator(aggregate, guard.part("aggregate", aggregate.apply)),
    )


def _pair_of_mappings(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A direction or model with its state or states, as plain dictionaries."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"it returns a {type(found).__name__} and no pair of mappings")
    return mapping(found[0]), mapping(found[1])
