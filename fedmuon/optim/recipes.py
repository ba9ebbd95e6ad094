"""The federated methods and optimizers by name, each a plain function that returns a `Recipe`.

    fedmuon.recipes.fedmuon(lr=0.02, orthogonalizer=fedmuon.orthogonalizers.newton_schulz())

Notation: X is the model, G the gradient of a client's batch, M the momentum, Orth the
orthogonalizer. A client takes E local steps; then the server averages over the K clients of the
round. A step size may be one number, or one per replica [S].
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor

import fedmuon.optim.links as links
from fedmuon import orthogonalize as maps
from fedmuon.config.load import parse
from fedmuon.config.schema import Local
from fedmuon.core.errors import InputError
from fedmuon.optim.chain import Chain, Link, Number
from fedmuon.optim.links import descend, gradient, only
from fedmuon.optim.orthogonalizers import as_orthogonalizer, map_of_value
from fedmuon.optim.recipe import (
    Recipe,
    as_recipe,
    centralized,
    remember_direction,
    replace_by_mean,
)
from fedmuon.optim.recipe import server_momentum as fedavgm_rule
from fedmuon.privacy.mechanisms.gaussian import Mechanism

__all__ = ["Chain", "Link", "Recipe", "adamw", "as_recipe", "fedavg", "fedavgm", "fedmuon",
           "fedmuon_aligned", "local_muon", "muon", "normalized_sgd", "sgd"]  # fmt: skip

Arguments = ParamSpec("Arguments")
Disk = tuple[float, float]  # kappa and gamma of the DiSK filter
MOMENTUM = ("momentum",)


def _recipe(function: Callable[Arguments, Recipe]) -> Callable[Arguments, Recipe]:
    """Reject arguments that have no effect, and values that [local] cannot have."""
    signature, recipe = inspect.signature(function), function.__name__.replace("_", "-")

    @wraps(function)
    def made(*args: Arguments.args, **given: Arguments.kwargs) -> Recipe:
        for name in given:
            key = name.replace("_", "-")
            if name not in signature.parameters:
                mend = f"set it in [local] of the run, or leave {key} out"
                mend = mend if name in Local.model_fields else f"leave {key} out"
                raise InputError(
                    f"{key} has no effect: the recipe {recipe} does not read it, so {mend}"
                )
        arguments = signature.bind(*args, **given).arguments
        values = {
            name.replace("_", "-"): value
            for name, value in arguments.items()
            if name in Local.model_fields and not isinstance(value, Tensor)
        }
        task = "network" if arguments.get("routes") else "matrix"
        parse({"local": {**values, "recipe": recipe}, "task": {"name": task}})
        return function(*args, **given)

    return made


# Federated methods


@_recipe
def fedavg(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """FedAvg: local SGD, models averaged.

    X <- X - lr G;  the server takes the mean of the clients' models.

    Args:
        lr: Step size.
        weight_decay: Decoupled: X is also stepped by -lr weight_decay X.

    State: none. Guarantee: the stability recursion with L = 1 and beta = 0.
    Source: McMahan et al. 2017.
    """
    return Recipe(Chain((gradient(), descend(lr, {}, weight_decay))), replace_by_mean)


@_recipe
def fedavgm(lr: Number = 1.0, server_momentum: float = 0.9, weight_decay: float = 0.0) -> Recipe:
    """FedAvgM: FedAvg with momentum on the server.

    v <- server_momentum v + (mean - X);  X <- X + v.

    Args:
        lr: Step size of the clients.
        server_momentum: Memory of the server's momentum.
        weight_decay: Decoupled, on the clients.

    State: v, on the server. Guarantee: the stability recursion with L = 1, extended by v.
    Source: Hsu et al. 2019.
    """
    chain = Chain((gradient(), descend(lr, {}, weight_decay)))
    return Recipe(chain, fedavgm_rule(server_momentum), kept=MOMENTUM)


@_recipe
def local_muon(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """Local Muon: Muon steps whose momentum begins afresh in every round.

    M <- momentum M + (1 - momentum) G;  X <- X - lr Orth(M);  models are averaged.

    Args and guarantee are those of `fedmuon`; the perturbation of M is 0 at the start of a round.
    State: none between rounds.
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return Recipe(Chain((gradient(), *steps)), replace_by_mean)


@_recipe
def fedmuon(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """FedMuon: Muon steps, models and momenta averaged (Stability note, Algorithm 1).

    M <- momentum M + (1 - momentum) G;  X <- X - lr Orth(M).

    Args:
        lr: Step size.
        momentum: beta, the memory of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, or a function on stacks of matrices
            [..., m, n]. Smoothed polar with lambda = 1e-4 if not given.
        momentum_form: "ema" as above; "polyak" is M <- momentum M + G; "ema-nesterov" and
            "nesterov" look one step ahead.
        weight_decay: Decoupled: X is also stepped by -lr weight_decay X.
        adjust: Scale of an orthogonalized [m, n] step: "none" is 1, "original" sqrt(max(1, m/n)),
            "match-rms" 0.2 sqrt(max(m, n)).
        routes: How many matrices each parameter of a network holds; 0 leaves it to `aux`.
            All parameters are matrices if not given.
        aux: The step of the other parameters, "sgd" (-aux_lr M) or "adamw".
        aux_lr: Its step size; 0 means 0.05 for "sgd" and 0.001 for "adamw".

    State: M, sent to the clients and averaged. Guarantee: with a Lipschitz orthogonalizer, the
    stability recursion (section 4.2) and Theorem 4.1. Source: Stability note.
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return Recipe(Chain((gradient(), *steps)), replace_by_mean, MOMENTUM, MOMENTUM, MOMENTUM)


@_recipe
def fedmuon_aligned(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    alignment: float = 0.5,
    steps: int = 5,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """FedMuon with local-global alignment (Stability note, Remark 3.2).

    X <- X - lr ((1 - alignment) Orth(M) + alignment D), D the last global direction,
    (X - mean) / (lr steps).

    Args:
        alignment: alpha, the part of the global direction.
        steps: E, local steps of a round, which the server's rule counts on.

    The other arguments are those of `fedmuon`. State: M and D, sent to the clients; M is averaged.
    Guarantee: the recursion with a third state (global constants).
    """
    others = _others(routes, aux, aux_lr)
    *before, descent = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay,
                                   adjust, routes, aux, aux_lr)  # fmt: skip
    shared = ("momentum", "global-direction")
    return Recipe(
        Chain((gradient(), *before, links.align(alignment), descent)),
        remember_direction(lr, steps, others),
        sent=shared,
        returned=MOMENTUM,
        kept=shared,
        scaled=True,
        steps=steps,
    )


# Centralized optimizers; several clients average models and lasting states


@_recipe
def sgd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
) -> Recipe:
    """SGD with momentum: X <- X - lr M.

    Args are those of `fedmuon`. State: M, averaged. Guarantee: the stability recursion with
    L = 1.
    """
    heavy = links.momentum(momentum, momentum_form)
    return centralized(gradient(), heavy, descend(lr, {}, weight_decay))


@_recipe
def normalized_sgd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
) -> Recipe:
    """Normalized SGD with momentum: X <- X - lr M / ||M||.

    Args are those of `fedmuon`. State: M, averaged. Guarantee: none, because M / ||M|| jumps
    at M = 0.
    """
    heavy = links.momentum(momentum, momentum_form)
    return centralized(gradient(), heavy, links.normalize(), descend(lr, {}, weight_decay))


@_recipe
def adamw(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """AdamW with torch's constants (Loshchilov, Hutter 2019).

    Args:
        lr: Step size.
        weight_decay: Decoupled: X is also stepped by -lr weight_decay X.

    State: both moments, averaged. Guarantee: none; the recursion has no second moment.
    """
    return centralized(gradient(), links.adamw(decay=0.0), descend(lr, {}, weight_decay))


@_recipe
def muon(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """Muon as a centralized optimizer: X <- X - lr Orth(M).

    Args are those of `fedmuon`. State: every lasting state, averaged. Guarantee: with one client it
    is FedMuon. Source: Jordan et al. 2024; Nesterov Muon.
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return centralized(gradient(), *steps)


# Private recipes: the base optimizer sees only what the mechanism releases


def private_sgd(
    mechanism: Mechanism,
    lr: Number,
    momentum: float,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    disk: Disk | None = None,
) -> Recipe:
    """DP-SGD, or DiSK on SGD: clipped, noised lots, then momentum.

    Guarantee: epsilon of the mechanism (DP-Muon, Algorithm 1; DiSK, Algorithm 2).
    """
    heavy = links.momentum(momentum, momentum_form)
    return _private(mechanism, disk, heavy, descend(lr, {}, weight_decay))


def private_adam(
    mechanism: Mechanism, lr: Number, *, weight_decay: float = 0.0, disk: Disk | None = None
) -> Recipe:
    """DP-Adam, or DiSK on AdamW. Guarantee: epsilon of the mechanism."""
    return _private(mechanism, disk, links.adamw(decay=0.0), descend(lr, {}, weight_decay))


def private_muon(
    mechanism: Mechanism,
    lr: Number,
    momentum: float,
    orthogonalizer: Link,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
    probes: int = 0,
    disk: Disk | None = None,
) -> Recipe:
    """DP-Muon, DP-MuonBC and DiSK on either (DP-Muon, Algorithms 1 and 2).

    Args:
        mechanism: Clips and noises each lot.
        orthogonalizer: The link that orthogonalizes.
        probes: J, antithetic pairs of the bias correction: O = 2 Q(M) - mean of Q(M +- rho U);
            0 is DP-Muon without it.
        disk: kappa and gamma of the Kalman filter, if there is one.

    The other arguments, and the state, are those of `fedmuon`. Guarantee: epsilon of the mechanism.
    """
    orthogonal = orthogonalizer
    if probes:
        average, gain = momentum_form == "ema", disk[0] if disk else 1.0
        orthogonal = links.bias_correction(
            orthogonal, probes, mechanism.spread, momentum, average, gain
        )
    steps = _muon_links(lr, momentum, orthogonal, momentum_form, weight_decay, adjust, routes, aux,
                        aux_lr)  # fmt: skip
    return _private(mechanism, disk, *steps)


# Parts


def _private(mechanism: Mechanism, disk: Disk | None, *steps: Link) -> Recipe:
    """A private gradient, filtered if there is a `disk`, before the steps of a base optimizer."""
    first = links.private_gradient() if disk is None else links.disk_filter(*disk)
    if mechanism.quantile is not None:
        first = links.adaptive_bound(first, mechanism.quantile, mechanism.clipping.bound)
    return replace(centralized(first, *steps), mechanism=mechanism)


def _muon_links(
    lr: Number,
    momentum: float,
    orthogonalizer: Any,
    momentum_form: str,
    weight_decay: float,
    adjust: str,
    routes: Mapping[str, int] | None,
    aux: str,
    aux_lr: float,
) -> tuple[Link, ...]:
    """Momentum, orthogonalization and descent.

    The orthogonalizer may be a link already. Parameters that are not orthogonalized keep M, or take
    AdamW's step. The federated recipes do not send AdamW's moments, so they begin afresh in every
    round.
    """
    if type(orthogonalizer) is Link:  # isinstance would ask the object, which may raise anything
        orthogonal = orthogonalizer
    elif orthogonalizer is None:
        orthogonal = links.map_matrices(
            lambda m, context, block: maps.smoothed_polar(m, 1e-4), adjust, True, routes
        )
    else:
        apply = map_of_value(as_orthogonalizer(orthogonalizer))
        orthogonal = links.map_matrices(apply, adjust, True, routes)
    heavy = links.momentum(momentum, momentum_form)
    others = _others(routes, aux, aux_lr)
    descent = descend(lr, others, weight_decay)
    if not others:
        return heavy, orthogonal, descent
    orthogonal = only(lambda name: name not in others, orthogonal)
    if aux == "sgd":
        return heavy, orthogonal, descent
    auxiliary = only(lambda name: name in others, links.adamw())
    return auxiliary, only(lambda name: name not in others, heavy), orthogonal, descent


def _others(routes: Mapping[str, int] | None, aux: str, aux_lr: float) -> dict[str, float]:
    """Step sizes of the parameters that are not orthogonalized."""
    return {name: aux_step_size(aux, aux_lr) for name, count in (routes or {}).items() if not count}


def aux_step_size(aux: str, aux_lr: float) -> float:
    """The auxiliary step size. The default is FedAvg's in the Stability note (Table 3), or torch's
    for AdamW."""
    return aux_lr or (0.05 if aux == "sgd" else 1e-3)
