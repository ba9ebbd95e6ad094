"""Recipes as values: `fedmuon.recipes.fedmuon(lr=0.02)`; keys are those of [local], with _ for -.

Each is what the config builds by that name, for tasks whose parameters are all matrices; a network
is routed where a recipe is named in the config, or is a function that asks for `routes`.
"""

from collections.abc import Mapping
from typing import Any

from fedmuon.config.load import parse
from fedmuon.config.schema import Local, OrthogonalizerTable
from fedmuon.core.errors import InputError
from fedmuon.optim.orthogonalizers import as_orthogonalizer
from fedmuon.optim.recipe_chains import Chain, Link, Recipe, as_recipe, make_recipe

__all__ = ["Chain", "Link", "Recipe", "as_recipe", "fedavg", "fedavgm", "fedmuon",
           "fedmuon_aligned", "local_muon", "sgd"]  # fmt: skip


KEYS = ("lr", "momentum", "momentum-form", "weight-decay", "alignment", "server-momentum", "aux",
        "aux-lr", "adjust")  # fmt: skip
MUON = ("fedmuon", "fedmuon-aligned", "local-muon")  # have a map, for parameters that are routed
COUNTS = ("fedmuon-aligned",)  # has [local] steps in its server's rule


def _of(name: str, given: Mapping[str, Any]) -> Recipe:
    """The recipe of that name; `orthogonalizer` is the map, `routes` those of a network."""
    held = {key.replace("_", "-"): value for key, value in given.items()}
    _require_read(name, held)
    found, routes = held.pop("orthogonalizer", None), held.pop("routes", None)
    config = parse({"local": {"recipe": name, **held}})
    own_map = None if found is None else as_orthogonalizer(found)
    return make_recipe(config.local, OrthogonalizerTable(), routed=routes, own_map=own_map)


def _require_read(name: str, held: Mapping[str, Any]) -> None:
    """Refuse what the recipe of that name does not read."""
    known = (
        *KEYS,
        *(("orthogonalizer", "routes") * (name in MUON)),
        *("steps",) * (name in COUNTS),
    )
    for key in held:
        if key not in known:
            mend = f"set it in [local] of the run, or leave {key} out"
            mend = mend if key in Local.model_fields else f"leave {key} out"
            raise InputError(f"{key} has no effect: the recipe {name} does not read it, so {mend}")


def fedavg(**local: Any) -> Recipe:
    """Local SGD, models averaged."""
    return _of("fedavg", local)


def fedavgm(**local: Any) -> Recipe:
    """The same with momentum on the server."""
    return _of("fedavgm", local)


def local_muon(**local: Any) -> Recipe:
    """Muon whose momentum begins afresh every round."""
    return _of("local-muon", local)


def fedmuon(**local: Any) -> Recipe:
    """001, Algorithm 1: model and momentum are averaged; `orthogonalizer` is the map."""
    return _of("fedmuon", local)


def fedmuon_aligned(**local: Any) -> Recipe:
    """The same, mixed with the last global direction (001, Remark 3.2)."""
    return _of("fedmuon-aligned", local)


def sgd(**local: Any) -> Recipe:
    """SGD with local momentum."""
    return _of("sgd", local)
