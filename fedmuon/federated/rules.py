"""From a config to the rules of a round: the local chain, the server's rule, the aggregate."""

from dataclasses import replace

from fedmuon.aggregators import AGGREGATORS, Aggregator, as_aggregator
from fedmuon.config import Config
from fedmuon.federated.routing import counts
from fedmuon.orthogonalize.value import Orthogonalizer, as_orthogonalizer
from fedmuon.own import NOTHING, Own, options, own_objects
from fedmuon.reading import reads
from fedmuon.registry import made, takes
from fedmuon.tasks.base import Task
from fedmuon.tasks.networks import NetworkTask
from fedmuon.transforms.base import Chain, Number
from fedmuon.transforms.recipes import Recipe, as_recipe, build


def recipe(
    config: Config,
    what: Task,
    lr: Number | None = None,
    regularization: Number | None = None,
    own: Own = NOTHING,
) -> Recipe:
    """The configured recipe, with the routes of a network's parameters, and its aggregate."""
    own = own_objects(config, own)
    found = _own_recipe(config, what, own) or _named_recipe(config, what, lr, regularization, own)
    return replace(found, aggregate=_aggregator(config, own))


def _own_recipe(config: Config, what: Task, own: Own) -> Recipe | None:
    """The user's, None if it is one of ours."""
    if own.recipe is None:
        return None
    facts = {"orthogonalizer": own_map(config, own), "task": what}
    if isinstance(what, NetworkTask) and "routes" in takes(own.recipe, {"routes": 0}):
        facts["routes"] = counts(what.module, config.local.route)
    return as_recipe(own.value("recipe", config, (Recipe, Chain, tuple, list), facts))


def _named_recipe(
    config: Config, what: Task, lr: Number | None, regularization: Number | None, own: Own
) -> Recipe:
    routed, table = None, config.orthogonalizer
    if isinstance(what, NetworkTask) and reads(config, "orthogonalizer.name"):
        routed = counts(what.module, config.local.route)
    mine = own_map(config, own)
    return build(config.local, table, lr, regularization, routed, config.privacy, mine)


def own_map(config: Config, own: Own) -> Orthogonalizer | None:
    """The user's map, None if it is one of ours."""
    if own.orthogonalizer is None:
        return None
    return as_orthogonalizer(own.value("orthogonalizer", config, (Orthogonalizer,)))


def _aggregator(config: Config, own: Own) -> Aggregator:
    if own.aggregate is not None:
        return as_aggregator(own.value("aggregate", config, (Aggregator,)))
    maker = AGGREGATORS[config.federation.aggregate]
    return made(maker, options(config, "federation"))
