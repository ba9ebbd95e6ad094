"""From the tables [local], [orthogonalizer] and [privacy] to a recipe."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.choices import PRIVATE
from fedmuon.optim.chain import Number
from fedmuon.optim.orthogonal import RANDOMIZED_MAPS, named, of_value, orthogonalize
from fedmuon.optim.orthogonalizers import Orthogonalizer
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.recipes import (
    adamw,
    aux_step_size,
    fedavg,
    fedavgm,
    fedmuon,
    fedmuon_aligned,
    local_muon,
    muon,
    normalized_sgd,
    private_adam,
    private_muon,
    private_sgd,
    sgd,
)
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling
from fedmuon.privacy.mechanisms.gaussian import SHARE, Mechanism, Quantile
from fedmuon.tasks.per_example.clipping import Clipping

# Each recipe with the keys of [local] that it reads; Muon recipes take the map and the routes, too.
MUON = ("momentum", "momentum_form", "weight_decay", "adjust", "aux", "aux_lr")
HEAVY = ("momentum", "momentum_form", "weight_decay")
RECIPES: dict[str, tuple[Callable[..., Recipe], tuple[str, ...]]] = {
    "sgd": (sgd, HEAVY),
    "normalized-sgd": (normalized_sgd, HEAVY),
    "adamw": (adamw, ("weight_decay",)),
    "muon": (muon, MUON),
    "fedavg": (fedavg, ("weight_decay",)),
    "fedavgm": (fedavgm, ("server_momentum", "weight_decay")),
    "local-muon": (local_muon, MUON),
    "fedmuon": (fedmuon, MUON),
    "fedmuon-aligned": (fedmuon_aligned, (*MUON, "alignment", "steps")),
}


def make_recipe(
    local: Local,
    orthogonalizer: OrthogonalizerTable,
    lr: Number | None = None,
    regularization: Number | None = None,
    routed: Mapping[str, int] | None = None,
    privacy: Privacy | None = None,
    own_map: Orthogonalizer | None = None,
    centred: bool = False,
) -> Recipe:
    """The recipe that the tables name.

    Args:
        local: The recipe and its options.
        orthogonalizer: The map.
        lr: A step size per replica [S] instead of the table's.
        regularization: A lambda per replica [S] instead of the table's.
        routed: How many matrices each parameter of a network holds; 0 takes the auxiliary step.
            Without it, all parameters are matrices.
        privacy: The mechanism of a private recipe.
        own_map: A map of the user's instead of the table's.
        centred: Whether the rows of all gradients sum to 0.
    """
    apply = of_value(own_map) if own_map else named(orthogonalizer, regularization, centred)
    stacks = own_map is not None or orthogonalizer.name not in RANDOMIZED_MAPS
    of_map = {
        "orthogonalizer": orthogonalize(apply, local.adjust, stacks, routed),
        "routes": routed,
    }
    rate = local.lr if lr is None else lr
    if local.recipe in PRIVATE:
        return _private(local, privacy or Privacy(), rate, of_map)
    recipe, keys = RECIPES[local.recipe]
    given = {name: getattr(local, name) for name in keys}
    unchecked = inspect.unwrap(recipe)  # the config was checked when it was read
    return unchecked(rate, **given, **(of_map if "muon" in local.recipe else {}))


def _private(local: Local, privacy: Privacy, lr: Number, of_map: dict[str, Any]) -> Recipe:
    """dp-BASE and disk-BASE: a base optimizer on what the mechanism releases, plain or through the
    Kalman filter. The auxiliary parameters are one block."""
    first, base = local.recipe.split("-")
    auxiliary = [name for name, count in (of_map["routes"] or {}).items() if not count]
    quantile, fixed_order = None, None
    if privacy.quantile:
        count_noise = privacy.count_noise or max(privacy.lot / SHARE, privacy.noise)
        quantile = Quantile(privacy.quantile, privacy.quantile_rate, count_noise)
    if privacy.sampling != "poisson":
        correlated = privacy.noise_correlation != "none"
        fixed_order = FixedOrderSampling(privacy.sampling, privacy.band if correlated else 1)
    mechanism = Mechanism(
        Clipping(privacy.clipping, privacy.bound, frozenset(auxiliary)),
        privacy.noise,
        privacy.lot,
        privacy.insecure_reproducible_noise,
        privacy.public_rate,
        privacy.adjacency,
        privacy.noise_source,
        privacy.arithmetic,
        fixed_order=fixed_order,
        quantile=quantile,
    )
    disk = (privacy.kappa, privacy.lookahead) if first == "disk" else None
    if base == "sgd":
        given = {name: getattr(local, name) for name in HEAVY}
        return private_sgd(mechanism, lr, **given, disk=disk)
    if base == "adam":
        return private_adam(mechanism, lr, weight_decay=local.weight_decay, disk=disk)
    given = {name: getattr(local, name) for name in MUON}
    probes = privacy.probes if base == "muonbc" else 0
    return private_muon(mechanism, lr, **of_map, **given, probes=probes, disk=disk)


def aux_rate(local: Local) -> float:
    """The auxiliary step size of the table."""
    return aux_step_size(local.aux, local.aux_lr)
