"""From the tables [local], [orthogonalizer] and [privacy] of a config to recipes and maps."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config.schema import Local, OrthogonalizerTable, Privacy
from fedmuon.core.choices import PRIVATE
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw
from fedmuon.optim.chain import Context, Number, per_client
from fedmuon.optim.links import gaussian_like, map_matrices
from fedmuon.optim.orthogonalizers import (
    Map,
    Orthogonalizer,
    clipped_sign,
    map_of_value,
    newton_schulz,
    smoothed_polar,
)
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
RANDOMIZED_MAPS = ("gaussian-smoothed-sign", "randomized-polar")  # every matrix has its own draws


def make_recipe(
    local: Local,
    orthogonalizer: OrthogonalizerTable,
    lr: Number | None = None,
    regularization: Number | None = None,
    routed: Mapping[str, int] | None = None,
    privacy: Privacy | None = None,
    custom_map: Orthogonalizer | None = None,
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
        custom_map: A custom map instead of the table's.
        centred: Whether the rows of all gradients sum to 0.
    """
    if custom_map:
        apply = map_of_value(custom_map)
    else:
        apply = map_of_table(orthogonalizer, regularization, centred)
    grouped = custom_map is not None or orthogonalizer.name not in RANDOMIZED_MAPS
    of_map = {
        "orthogonalizer": map_matrices(apply, local.adjust, grouped, routed),
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
    """dp-BASE or disk-BASE: a base optimizer on private gradients, plain or filtered.

    Clipping takes the auxiliary parameters as one block.
    """
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


def map_of_table(
    table: OrthogonalizerTable, regularization: Number | None = None, centred: bool = False
) -> Map:
    """The map that the table names.

    Args:
        table: Name and options.
        regularization: lambda instead of the table's, one value or one per replica [S].
        centred: Whether the rows of all matrices sum to 0, up to rounding.
    """
    sign = maps.quotient_sign if centred else maps.exact_sign
    lam = table.lambda_ if regularization is None else regularization
    steps, eps, kind = table.steps, table.eps, table.normalization

    def sketched(m: Tensor, context: Context, block: int) -> Tensor:
        parts = zip(m.chunk(len(context.draws)), context.draws, strict=True)
        names = ("rank", "oversample", "power", "steps", "coefficients", "sketch")
        given = {name: getattr(table, name) for name in names}
        return torch.cat([  # replicas of a client share its sketch
            maps.randomized_polar(part, **given, generator=draw(Draw.SKETCH, block=block))
            for part, draw in parts
        ])  # fmt: skip

    table_of_maps: dict[str, Map] = {
        "smoothed-polar": lambda m, context, block: maps.smoothed_polar(m, per_client(lam, m)),
        "newton-schulz": lambda m, context, block: maps.newton_schulz(
            m, steps, table.coefficients, eps, kind
        ),
        "clipped-sign": lambda m, context, block: maps.clipped_sign(m, table.clip_level),
        "exact-sign": lambda m, context, block: sign(m),
        "gaussian-smoothed-sign": lambda m, context, block: maps.gaussian_smoothed_sign(
            m, table.sigma, gaussian_like(m, context, Draw.SMOOTHING, block)
        ),
        "randomized-polar": sketched,
    }
    return table_of_maps[table.name]


def value_of_table(table: OrthogonalizerTable) -> Orthogonalizer:
    """The map that the table names, as a value for a custom recipe that asks for one.

    Maps that draw at every step are rejected, because such a value draws nothing.
    """
    made: dict[str, Callable[[], Orthogonalizer]] = {
        "smoothed-polar": partial(smoothed_polar, table.lambda_),
        "newton-schulz": partial(
            newton_schulz,
            table.steps,
            table.coefficients,
            table.eps,
            table.normalization,
        ),
        "clipped-sign": partial(clipped_sign, table.clip_level),
        "exact-sign": partial(Orthogonalizer, maps.exact_sign),
    }
    if table.name not in made:
        raise InputError(
            f"[orthogonalizer] name = '{table.name}' draws at every step, but a map that is passed "
            f"to a custom recipe cannot draw: choose one of {', '.join(made)}"
        )
    return made[table.name]()
