"""Recipes as values: `fedmuon.recipes.fedmuon(lr=0.02)`; keys are those of [local], with _ for -.

Each is what the config builds by that name, for tasks whose parameters are all matrices; a network
is routed where a recipe is named in the config, or is a function that asks for `routes`.
"""

from functools import partial
from typing import Any

from fedmuon.config import parse
from fedmuon.orthogonalizers import as_orthogonalizer
from fedmuon.settings import OrthogonalizerTable
from fedmuon.transforms.recipes import Chain, Link, Recipe, as_recipe, build

__all__ = ["Chain", "Link", "Recipe", "as_recipe", "fedavg", "fedavgm", "fedmuon",
           "fedmuon_aligned", "local_muon", "sgd"]  # fmt: skip


def _of(name: str, **local: Any) -> Recipe:
    """The recipe of that name; `orthogonalizer` is the map, `routes` those of a network."""
    given, routes = local.pop("orthogonalizer", None), local.pop("routes", None)
    keys = {key.replace("_", "-"): value for key, value in local.items()}
    config = parse({"local": {"recipe": name, **keys}})
    own_map = None if given is None else as_orthogonalizer(given)
    return build(config.local, OrthogonalizerTable(), routed=routes, own_map=own_map)


fedavg = partial(_of, "fedavg")  # local SGD, models averaged
fedavgm = partial(_of, "fedavgm")  # the same with momentum on the server
local_muon = partial(_of, "local-muon")  # Muon whose momentum begins afresh every round
fedmuon = partial(_of, "fedmuon")  # 001, Algorithm 1: model and momentum are averaged
fedmuon_aligned = partial(_of, "fedmuon-aligned")  # with the last global direction (Remark 3.2)
sgd = partial(_of, "sgd")  # SGD with local momentum
