"""From a config to the rules of a round: the local chain, the server's rule, the aggregate."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from fedmuon.config.incompatible import unprivate_run, without_noise
from fedmuon.config.load import Config
from fedmuon.config.read_if import NEEDS, is_default, reads, unread_by_own_recipe
from fedmuon.config.user_objects import guard, own_objects, value
from fedmuon.core.choices import PRIVATE
from fedmuon.core.errors import InputError
from fedmuon.core.registry import required, takes
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import attribute
from fedmuon.federated.checks import require_memoryless, require_round
from fedmuon.optim.aggregators import AGGREGATORS, Aggregator, as_aggregator
from fedmuon.optim.chain import Chain, Number
from fedmuon.optim.orthogonalizers import Orthogonalizer, as_map, as_orthogonalizer, of_table
from fedmuon.optim.probe import reads_factor, require_apart
from fedmuon.optim.recipe import Recipe, as_recipe
from fedmuon.optim.recipe_tables import make_recipe
from fedmuon.optim.routing import RoutingTable, routing_table
from fedmuon.privacy.mechanisms.client_level import ClientLevel
from fedmuon.tasks.base import Params, Task
from fedmuon.tasks.matrix import MatrixTask
from fedmuon.tasks.networks import NetworkTask

AGGREGATE = "federation.aggregate"
UNWEIGHTED = ("median", "trimmed-mean", "krum")  # that do not look at how many samples there are


def recipe(
    config: Config,
    what: Task,
    lr: Number | None = None,
    regularization: Number | None = None,
) -> Recipe:
    """The configured recipe, with the routes of a network's parameters, and how its replies are
    released at client level."""
    found = _averaging(config, what, lr, regularization)
    _require_public_weights(found, config.federation.aggregate)
    if config.privacy.level != "client":
        return found
    _require_told_apart(found)
    if not found.aggregate.averages:
        raise InputError(
            "[privacy] level = 'client' releases the plain mean of clipped updates: leave the "
            "aggregate of your recipe out"
        )
    return replace(found, client_level=_client_level(config))


def _client_level(config: Config) -> ClientLevel:
    privacy, federation = config.privacy, config.federation
    return ClientLevel(
        privacy.bound,
        privacy.noise,
        federation.per_round,
        federation.clients,
        privacy.trust,
        privacy.cohorts == "poisson",
        federation.seed if privacy.insecure_reproducible_noise else None,
        privacy.state_weight,
        privacy.noise_source,
        privacy.arithmetic,
        privacy.honest,
    )


def _require_public_weights(found: Recipe, named: str) -> None:
    """Refuse weights that may tell how many samples a client has, where that is to be hidden."""
    hidden = found.mechanism is not None and found.mechanism.adjacency == "add-remove"
    if hidden and not found.aggregate.averages and named not in UNWEIGHTED:
        raise InputError(
            "a mechanism with adjacency = 'add-remove' hides how many samples a client has, which "
            "the aggregate may tell: use the plain mean, or adjacency = 'zero-out'"
        )


def _require_told_apart(found: Recipe) -> None:
    """Refuse a state that comes back and was not sent: nobody knows how far it moved."""
    for name in found.returned:
        if name not in found.sent:
            raise InputError(
                f"[privacy] level = 'client' clips how far the state {name!r} moves, and your "
                "recipe returns it without sending it: name it in sent, too"
            )


def _averaging(
    config: Config, what: Task, lr: Number | None, regularization: Number | None
) -> Recipe:
    """The recipe and its aggregate: that of a recipe of the user's holds where the config says
    nothing but the plain mean."""
    mine = _own_recipe(config, what)
    if mine is not None:
        mine = replace(mine, apart=False)  # its links may keep something between calls
    if mine is not None and is_default(config, AGGREGATE, config.federation.aggregate):
        return mine
    found = mine or _named_recipe(config, what, lr, regularization)
    average = value(config, "aggregate", AGGREGATORS, (Aggregator,))
    if own_objects(config).aggregate is None:
        return replace(found, aggregate=as_aggregator(average))
    return replace(found, aggregate=as_aggregator(average, guard(config, "aggregate")))


@lru_cache(maxsize=4)
def _own_recipe(config: Config, what: Task) -> Recipe | None:
    """The user's, tried once for all clients of a worker process; None if it is one of ours."""
    if (mine := own_objects(config).recipe) is None:
        return None
    facts: dict[str, Any] = {"task": what} | _map_for(config, mine)
    if isinstance(what, NetworkTask) and "routes" in takes(mine, {"routes": 0}):
        facts["routes"] = counts(what.module, config.local.route)
    made = value(config, "recipe", None, (Recipe, Chain, tuple, list), facts)
    within = guard(config, "recipe")
    found = as_recipe(made, within)
    _require_keys_of(config, private=found.mechanism is not None)
    start = what.initial(generator(0, Draw.INITIAL))
    with within:
        _require_scheduled(config, found, start)
        entries = sum(one.numel() for one in start.values())
        require_round(found, start)
        if found.mechanism is None and 2 * entries <= what.stack_limit:  # larger: not stacked
            require_apart(found.chain, start)
    return found


def require_own_aggregate(config: Config, found: Recipe, what: Task) -> None:
    """Refuse an aggregate of the user's that remembers what it saw."""
    own = own_objects(config)
    if own.aggregate is not None or own.recipe is not None:
        start = what.initial(generator(0, Draw.INITIAL))
        require_memoryless(found, start, config.federation.per_round)


def _require_keys_of(config: Config, private: bool) -> None:
    """Refuse what is set beside a recipe of the user's that does not read it, or that what it
    releases cannot be accounted for with."""
    problems = [
        *unread_by_own_recipe(config, private),
        *(unprivate_run(config) if private else without_noise(config)),
    ]
    if problems:
        raise InputError(problems[0])


def _map_for(config: Config, mine: Any) -> dict[str, Orthogonalizer]:
    """The map for a recipe of the user's that asks for it: the user's, or the one of ours that the
    config names; where it says nothing, the recipe keeps its own if it has one. A map that nobody
    asks for is refused."""
    keys = [key for key, one in _of_map(config) if not is_default(config, key, one)]
    if not takes(mine, {"orthogonalizer": 0}):
        for key in keys:
            table, _, name = key.partition(".")
            raise InputError(
                f"[{table}] {name} has no effect: your recipe does not ask for the map by a "
                f"parameter `orthogonalizer`, so add that to it, or leave {name} out"
            )
        return {}
    if (brought := value(config, "orthogonalizer", values=(Orthogonalizer,))) is not None:
        with guard(config, "orthogonalizer"):
            return {"orthogonalizer": as_map(brought)}
    asked = keys or "orthogonalizer" in required(mine)
    return {"orthogonalizer": of_table(config.orthogonalizer)} if asked else {}


def _of_map(config: Config) -> list[tuple[str, Any]]:
    """The keys of the map's table with their values."""
    table = config.orthogonalizer
    return [
        (f"orthogonalizer.{key}", getattr(table, attribute(type(table), key)))
        for key in NEEDS["orthogonalizer"]
    ]


def _require_scheduled(config: Config, found: Recipe, start: Params) -> None:
    """Refuse a schedule beside links of the user's that do not read what it says, and another
    number of steps than a recipe counts on."""
    name, steps = config.local.schedule, config.local.steps
    seen = found.mechanism is None and not found.scaled  # by a probe of the links alone
    idle = seen and not is_default(config, "local.schedule", name)
    if idle and not reads_factor(found.chain, start):
        raise InputError(
            f"[local] schedule = '{name}' has no effect: no link of your recipe reads "
            "`context.factor`, so end it with links.descend(lr), or leave schedule out"
        )
    if found.steps and found.steps != steps:
        raise InputError(
            f"[local] steps = {steps} is not what your recipe counts on: make it with "
            f"steps={steps}, or set steps = {found.steps}"
        )


def _named_recipe(
    config: Config, what: Task, lr: Number | None, regularization: Number | None
) -> Recipe:
    routed, table = None, config.orthogonalizer
    if isinstance(what, NetworkTask) and reads(config, "orthogonalizer.name"):
        routed = counts(what.module, config.local.route)
    mine = own_map(config)
    privacy, centred = config.privacy, _is_centred(config, what)
    found = make_recipe(config.local, table, lr, regularization, routed, privacy, mine, centred)
    return replace(found, apart=mine is None)


def _is_centred(config: Config, what: Task) -> bool:
    """Whether the rows of all momenta sum to 0: a softmax's gradients do, and so do their weighted
    sums, but not with noise, and not what takes entries from several."""
    summed = config.federation.aggregate in ("mean", "by-samples")
    return isinstance(what, MatrixTask) and config.local.recipe not in PRIVATE and summed


def own_map(config: Config) -> Orthogonalizer | None:
    """The user's map, None if it is one of ours."""
    found = value(config, "orthogonalizer", values=(Orthogonalizer,))
    return None if found is None else as_orthogonalizer(found, guard(config, "orthogonalizer"))


# Which parameters of a network are orthogonalized, and by which matrix view.


def routes(network: nn.Module, rule: str) -> RoutingTable:
    """Every parameter with its shape, its matrix view [out, -1] and its optimizer; print it.

    `hidden` leaves vectors, embeddings, norms, the first and the last layer to the auxiliary
    optimizer (see `fedmuon.optim.routing`); `all-matrices` only what has fewer than two axes.
    Fused projections are cut into their matrices.
    """
    every = [name for name, param in network.named_parameters() if param.ndim >= 2]
    return routing_table(network, to_muon=every if rule == "all-matrices" else ())


def counts(network: nn.Module, rule: str) -> dict[str, int]:
    """Into how many matrices each parameter is cut to be orthogonalized: 0 for the auxiliary
    optimizer's, 1 unless it is fused. A rule that finds none is refused."""
    found = {one.name: one.matrices[0] if one.matrices else 0 for one in routes(network, rule)}
    if not any(found.values()):
        raise InputError(
            f"[local] route = '{rule}' finds no matrix to orthogonalize in this network: set "
            "route = 'all-matrices', take a deeper [task] model, or recipe = 'fedavg'"
        )
    return found
