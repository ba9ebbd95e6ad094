"""The federated methods and optimizers by name, each a plain function that returns a `Recipe`.

    fedmuon.recipes.fedmuon(lr=0.02, orthogonalizer=fedmuon.orthogonalizers.newton_schulz())

Notation: X is the model, G the gradient of a client's batch, M the momentum, Orth the
orthogonalizer. A client takes E local steps; then the server averages over the K clients of the
round. A step size may be one number, or one per replica [S].
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config.load import parse
from fedmuon.config.schema import Local
from fedmuon.core.errors import InputError
from fedmuon.optim.bias_correction import corrected
from fedmuon.optim.chain import Chain, Link, Number
from fedmuon.optim.gradients import adapting, filtered, gradient, released
from fedmuon.optim.orthogonal import of_value, orthogonalize
from fedmuon.optim.orthogonalizers import as_orthogonalizer
from fedmuon.optim.recipe import (
    Recipe,
    as_recipe,
    centralized,
    remember_direction,
    replace_by_mean,
)
from fedmuon.optim.recipe import server_momentum as fedavgm_rule
from fedmuon.optim.steps import adamw as adamw_step
from fedmuon.optim.steps import align, descend, normalize, only
from fedmuon.optim.steps import momentum as momentum_step
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

    State: v, on the server. Guarantee: none known. Source: Hsu et al. 2019.
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
    chain = _muon_chain(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return Recipe(Chain(chain), replace_by_mean)


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
    chain = _muon_chain(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return Recipe(Chain(chain), replace_by_mean, MOMENTUM, MOMENTUM, MOMENTUM)


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
    *chain, descent = _muon_chain(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust,
                                  routes, aux, aux_lr)  # fmt: skip
    shared = ("momentum", "global-direction")
    return Recipe(
        Chain((*chain, align(alignment), descent)),
        remember_direction(lr, steps, others),
        sent=shared,
        returned=MOMENTUM,
        kept=shared,
        scaled=True,
        steps=steps,
    )


# Centralized optimizers; with several clients, models and lasting states are averaged


@_recipe
def sgd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
) -> Recipe:
    """SGD with momentum: X <- X - lr M. State: M, averaged."""
    heavy = momentum_step(momentum, momentum_form)
    return centralized(gradient(), heavy, descend(lr, {}, weight_decay))


@_recipe
def normalized_sgd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
) -> Recipe:
    """Normalized SGD with momentum: X <- X - lr M / ||M||. State: M, averaged."""
    heavy = momentum_step(momentum, momentum_form)
    return centralized(gradient(), heavy, normalize(), descend(lr, {}, weight_decay))


@_recipe
def adamw(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """AdamW with torch's constants (Loshchilov, Hutter 2019). State: both moments, averaged."""
    return centralized(gradient(), adamw_step(decay=0.0), descend(lr, {}, weight_decay))


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
    chain = _muon_chain(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return centralized(*chain)


# Private recipes: the base optimizer sees what the mechanism releases, and nothing else


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
    heavy = momentum_step(momentum, momentum_form)
    return _private(mechanism, disk, heavy, descend(lr, {}, weight_decay))


def private_adam(
    mechanism: Mechanism, lr: Number, *, weight_decay: float = 0.0, disk: Disk | None = None
) -> Recipe:
    """DP-Adam, or DiSK on AdamW."""
    return _private(mechanism, disk, adamw_step(decay=0.0), descend(lr, {}, weight_decay))


def private_muon(
    mechanism: Mechanism,
    lr: Number,
    momentum: float,
    orthogonalizer: Any,
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
        probes: J, antithetic pairs of the bias correction: O = 2 Q(M) - mean of Q(M +- rho U);
            0 is DP-Muon without it.
        disk: kappa and gamma of the Kalman filter, if there is one.

    The other arguments are those of `fedmuon`.
    """
    orthogonal = _orthogonal(orthogonalizer, adjust, routes)
    if probes:
        average, gain = momentum_form == "ema", disk[0] if disk else 1.0
        orthogonal = corrected(orthogonal, probes, mechanism.spread, momentum, average, gain)
    others = _others(routes, aux, aux_lr)
    heavy = momentum_step(momentum, momentum_form)
    return _private(
        mechanism,
        disk,
        *_routed(heavy, orthogonal, others, aux),
        descend(lr, others, weight_decay),
    )


# Parts


def _private(mechanism: Mechanism, disk: Disk | None, *links: Link) -> Recipe:
    oracle = released() if disk is None else filtered(*disk)
    if mechanism.quantile is not None:
        oracle = adapting(oracle, mechanism.quantile, mechanism.clipping.bound)
    return replace(centralized(oracle, *links), mechanism=mechanism)


def _muon_chain(
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
    """Gradient, momentum, orthogonalization, descent."""
    others = _others(routes, aux, aux_lr)
    heavy = momentum_step(momentum, momentum_form)
    orthogonal = _orthogonal(orthogonalizer, adjust, routes)
    descent = descend(lr, others, weight_decay)
    return gradient(), *_routed(heavy, orthogonal, others, aux), descent


def _orthogonal(orthogonalizer: Any, adjust: str, routes: Mapping[str, int] | None) -> Link:
    """The link of a map: a ready link, a value or function, or the smoothed polar factor."""
    if type(orthogonalizer) is Link:  # isinstance asks the object, which may raise anything
        return orthogonalizer
    if orthogonalizer is None:
        return orthogonalize(lambda m, context, block: maps.smoothed_polar(m, 1e-4), adjust, True,
                             routes)  # fmt: skip
    return orthogonalize(of_value(as_orthogonalizer(orthogonalizer)), adjust, True, routes)


def aux_step_size(aux: str, aux_lr: float) -> float:
    """The auxiliary step size: by default that of FedAvg in the Stability note (Table 3), or
    torch's for AdamW."""
    return aux_lr or (0.05 if aux == "sgd" else 1e-3)


def _others(routes: Mapping[str, int] | None, aux: str, aux_lr: float) -> dict[str, float]:
    """Step sizes of the parameters that are not orthogonalized."""
    return {name: aux_step_size(aux, aux_lr) for name, count in (routes or {}).items() if not count}


def _routed(heavy: Link, orthogonal: Link, others: Collection[str], aux: str) -> tuple[Link, ...]:
    """Momentum and orthogonalization; `others` keep M, or take AdamW's step, whose moments the
    federated recipes do not send: it begins every local round afresh."""
    if not others:
        return heavy, orthogonal

    def hidden(name: str, value: Tensor) -> bool:
        return name not in others

    if aux == "sgd":
        return heavy, only(hidden, orthogonal)
    auxiliary = only(lambda name, value: name in others, adamw_step())
    return auxiliary, only(hidden, heavy), only(hidden, orthogonal)
