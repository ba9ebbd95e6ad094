"""From a config to the rules of a round: the local chain, the server's rule, the aggregate."""

from dataclasses import replace

from fedmuon.aggregators import AGGREGATORS, Aggregator, as_aggregator
from fedmuon.config import Config
from fedmuon.federated.routing import counts
from fedmuon.orthogonalizers import Orthogonalizer, as_orthogonalizer
from fedmuon.own import own_objects, value
from fedmuon.reading import reads
from fedmuon.registry import takes
from fedmuon.tasks.base import Task
from fedmuon.tasks.networks import NetworkTask
from fedmuon.transforms.base import Chain, Number
from fedmuon.transforms.recipes import Recipe, as_recipe, build


def recipe(
    config: Config,
    what: Task,
    lr: Number | None = None,
    regularization: Number | None = None,
) -> Recipe:
    """The configured recipe, with the routes of a network's parameters, and its aggregate."""
    found = _own_recipe(config, what) or _named_recipe(config, what, lr, regularization)
    average = value(config, "aggregate", AGGREGATORS, (Aggregator,))
    return replace(found, aggregate=as_aggregator(average))


def _own_recipe(config: Config, what: Task) -> Recipe | None:
    """The user's, None if it is one of ours."""
    if (mine := own_objects(config).recipe) is None:
        return None
    facts = {"orthogonalizer": own_map(config), "task": what}
    if isinstance(what, NetworkTask) and "routes" in takes(mine, {"routes": 0}):
        facts["routes"] = counts(what.module, config.local.route)
    return as_recipe(value(config, "recipe", None, (Recipe, Chain, tuple, list), facts))


def _named_recipe(
    config: Config, what: Task, lr: Number | None, regularization: Number | None
) -> Recipe:
    routed, table = None, config.orthogonalizer
    if isinstance(what, NetworkTask) and reads(config, "orthogonalizer.name"):
        routed = counts(what.module, config.local.route)
    mine = own_map(config)
    return build(config.local, table, lr, regularization, routed, config.privacy, mine)


def own_map(config: Config) -> Orthogonalizer | None:
    """The user's map, None if it is one of ours."""
    found = value(config, "orthogonalizer", values=(Orthogonalizer,))
    return None if found is None else as_orthogonalizer(found)
