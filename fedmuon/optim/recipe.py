"""What a recipe is: a chain for the clients, and a rule for the server.

A recipe says which link states travel to the clients (`sent`), which come back and are averaged
(`returned`), and how the server moves from the old model to the next one. Everything else about
a federated round is the same for all. `recipes.py` has the named ones.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedmuon.core.errors import InputError, plain
from fedmuon.core.guard import Guard, mapping
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
    """A local chain with its server: `kept` are the server's states between rounds. A private chain
    has a mechanism, which is all that it sees of the data."""

    chain: Chain
    server: ServerRule
    sent: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    mechanism: Mechanism | None = None
    aggregate: Aggregator = field(default_factory=mean)
    scaled: bool = False  # the server's rule also takes what the round's step sizes were times
    steps: int = 0  # local steps that the server's rule counts on, 0 if it does not count them
    apart: bool = True  # whether several threads may step clients at once
    client_level: ClientLevel | None = None  # how whole updates are released, in place of a mean

    @property
    def private(self) -> bool:
        """Whether what it releases is accounted for."""
        return self.mechanism is not None or self.client_level is not None

    @property
    def masked(self) -> bool:
        """Whether clients return integers, of which their sum alone says something."""
        return self.client_level is not None and self.client_level.shared

    def __post_init__(self) -> None:
        with Guard("recipe", self.server):
            self._require_fields()
        self._require_lasting()
        follows = [one.name for one in self.chain.links if one.averaged is not None]
        if self.aggregate.shares is None and set(follows) & set(self.returned):
            raise InputError(
                f"the link {follows[0]} corrects for noise whose variance is known in weighted "
                "means alone: set [federation] aggregate = 'mean' or 'by-samples', or give a "
                "fedmuon.Aggregator with `shares`"
            )

    def _require_fields(self) -> None:
        """Refuse fields of other types, which would fail in the midst of a run."""
        wanted = {
            "chain": (isinstance(self.chain, Chain), "a fedmuon.Chain of links"),
            "server": (callable(self.server), "a function (old, mean, states)"),
            "aggregate": (isinstance(self.aggregate, Aggregator), "a fedmuon.Aggregator"),
            "scaled": (isinstance(self.scaled, bool), "True or False"),
            "steps": (type(self.steps) is int and self.steps >= 0, "a whole number of 0 or more"),
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
                f"the recipe keeps a state {min(clash)!r}, which is the name of its aggregator's: "
                "give the link another name"
            )

    def _require_lasting(self) -> None:
        """Refuse a state that is to last and to come back, and begins afresh in every round."""
        for link in self.chain.links:
            lost = [key for key in ("sent", "kept") if link.name not in getattr(self, key)]
            if link.lasting and link.name in self.returned and lost:
                raise InputError(
                    f"the link {link.name} is lasting and its state is returned, but it begins "
                    f"afresh in every round: name it in {' and in '.join(lost)}, too, or set "
                    "lasting=False"
                )


def replace_by_mean(old: Params, mean: Params, states: States) -> tuple[Params, States]:
    """X <- mean of the clients' X (001 (4))."""
    return mean, states


def server_momentum(memory: float) -> ServerRule:
    """FedAvgM: v <- beta v + (mean - X), X <- X + v."""

    def rule(old: Params, mean: Params, states: States) -> tuple[Params, States]:
        velocity = states["momentum"]
        after = {name: memory * velocity[name] + (mean[name] - old[name]) for name in old}
        return {name: old[name] + after[name] for name in old}, {**states, "momentum": after}

    return rule


def remember_direction(
    lr: Number, steps: int, others: Mapping[str, Number]
) -> Callable[..., tuple[Params, States]]:
    """Delta_G <- (X - mean) / (eta E): the last global update direction (001 Remark 3.2); `others`
    names the parameters with a step size of their own."""

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
    """The chain of a centralized optimizer.

    Every lasting state lives from round to round, and is averaged where there are several clients.
    """
    chain = Chain(links)
    lasting = tuple(link.name for link in chain.links if link.lasting)
    return Recipe(chain, replace_by_mean, lasting, lasting, lasting)


def as_recipe(found: Any, guard: Guard | None = None) -> Recipe:
    """What was given: a recipe, or a chain or its links, of which lasting states are kept; one of
    the user's is called within its `guard`."""
    if guard is not None:
        with guard:
            return _guarded(as_recipe(found), guard)
    if isinstance(found, Recipe):
        _require_accounted(found.mechanism)
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
    """A chain of the user's."""

    guard: Guard = field(default_factory=lambda: Guard("recipe"))

    def init(self, params: Params, given: States) -> States:
        with self.guard:
            return super().init(params, given)

    def step(self, params: Params, states: States, context: Context) -> tuple[Params, States]:
        with self.guard:
            return super().step(params, states, context)


def _guarded(found: Recipe, guard: Guard) -> Recipe:
    """The recipe, whose functions are called within guards of their own."""
    server, mine = guard.part("server rule", found.server), found.aggregate
    return dataclasses.replace(
        found,
        chain=_Chain(tuple(_link(one, guard) for one in found.chain.links), guard),
        server=server.calling(found.server, _two_mappings),
        aggregate=as_aggregator(mine, guard.part("aggregate", mine.apply)),
    )


def _link(link: Link, guard: Guard) -> Link:
    def within(part: str, function: Any, read: Callable[[Any], Any]) -> Any:
        of = guard.part(f"{part} of the link {link.name}", function)
        return None if function is None else of.calling(function, read)

    return dataclasses.replace(
        link,
        init=within("init", link.init, mapping),
        update=within("update", link.update, _two_mappings),
        averaged=within("averaged", link.averaged, mapping),
    )


def _two_mappings(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A direction or model, and the state or states that go with it."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"it returns a {type(found).__name__} and no pair of mappings")
    return mapping(found[0]), mapping(found[1])


def _require_accounted(mechanism: Mechanism | None) -> None:
    """Refuse a mechanism that may release otherwise than the account has it."""
    if mechanism is None:
        return
    for one, ours in ((mechanism, Mechanism), (mechanism.clipping, Clipping)):
        if type(one) is not ours:
            raise InputError(
                f"a mechanism of class {type(one).__name__} may release what no account has "
                f"counted: give fedmuon's {ours.__name__} itself"
            )


def initial_states(recipe: Recipe, params: Params) -> States:
    """The server's states before the first round: those of its links, 0 for its own, and those that
    its aggregator declares."""
    made = {link.name: link.init for link in recipe.chain.links}
    states = {name: made.get(name, zeros)(params) for name in recipe.kept}
    if recipe.aggregate.init is None:
        return states
    first = _first_state(recipe.aggregate, params)
    others = {one: _first_state(recipe.aggregate, made[one](params)) for one in recipe.returned}
    named = {aggregate_state(name): state for name, state in others.items()}
    return states | {aggregate_state(): first} | named


def _first_state(aggregator: Aggregator, like: Params) -> Params:
    """What an aggregator declares for tensors like these [S, ...], each in memory of its own."""
    assert aggregator.init is not None
    if aggregator.stacked:
        found = dict(aggregator.init(like))
    else:
        count = len(next(iter(like.values())))
        alone = [{name: value[s] for name, value in like.items()} for s in range(count)]
        found = stack_results([_tensors(aggregator.init(one)) for one in alone])
    return {name: value.detach().clone() for name, value in _tensors(found).items()}


def _tensors(found: Mapping[str, Any]) -> dict[str, Tensor]:
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"init of an Aggregator returns a {type(value).__name__} for {plain(name, 60)}: "
                "return a mapping of names to tensors"
            )
    return dict(found)


def aggregate_state(link: str = "") -> str:
    """The name of the aggregator's state: that for models, or for a state that comes back."""
    return f"aggregate-{link}" if link else "aggregate"


def aggregate_states(recipe: Recipe) -> tuple[str, ...]:
    """The names of all states of the aggregator; none of one that declares none."""
    names = ("", *recipe.returned) if recipe.aggregate.init is not None else ()
    return tuple(map(aggregate_state, names))
