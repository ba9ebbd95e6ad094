"""The named federated methods and optimizers, as functions that return a `Recipe`.

    fedmuon.recipes.fedmuon(lr=0.02, orthogonalizer=fedmuon.orthogonalizers.newton_schulz())

Notation: X is the model, G is the gradient on a client's batch, M is the momentum, and Orth is the
orthogonalizer. If a client's model differs from the server's model X, the client's model is called
x. Each of the K clients of a round takes E local steps, and then the server averages. A step size
is one number, or a tensor [replicas] with one number per replica.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

import fedmuon.optim.links as links
from fedmuon import orthogonalize as maps
from fedmuon.config.incompatible import one_matrix_problems
from fedmuon.config.method import Method, by_parameter, parameter
from fedmuon.config.methods import BUILT_IN, METHODS, function_of
from fedmuon.config.registered import guard_of
from fedmuon.config.schema import (
    NETWORK_TASK,
    Local,
    OrthogonalizerTable,
    Privacy,
    is_default,
    without_effect,
)
from fedmuon.core.choices import with_fact
from fedmuon.core.errors import InputError
from fedmuon.core.registry import takes
from fedmuon.core.tables import validate_values
from fedmuon.optim.chain import (
    Chain,
    Context,
    Link,
    Number,
    State,
    States,
    per_replica,
    stateless,
    zeros,
)
from fedmuon.optim.growing_momentum import falling, growing_momentum
from fedmuon.optim.inner_momentum import inner_momentum
from fedmuon.optim.links import descend, gradient, only
from fedmuon.optim.lora_muon import require_decay, split_descent, whitened
from fedmuon.optim.low_rank import EncodedStates, low_rank
from fedmuon.optim.noise_floor import noise_floor
from fedmuon.optim.orthogonalizers import (
    Orthogonalizer,
    as_orthogonalizer,
    map_of_table,
    map_of_value,
)
from fedmuon.optim.personal_parameters import PersonalParameters
from fedmuon.optim.recipe import Recipe
from fedmuon.optim.server_rules import (
    adaptive_step,
    remember_direction,
    replace_by_mean,
    server_chain,
    server_step,
)
from fedmuon.optim.sign_muon import Votes, majority, require_matrix
from fedmuon.optim.stage import Stage
from fedmuon.optim.user_recipe import as_recipe, centralized
from fedmuon.privacy.mechanisms.buffered import optimized
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling
from fedmuon.privacy.mechanisms.gaussian import SHARE, Mechanism, Quantile
from fedmuon.tasks.base import Params
from fedmuon.tasks.per_example.clipping import Clipping

__all__ = ["Chain", "Link", "Recipe", "adamw", "as_recipe", "demuon", "diloco", "ditto",
           "ef21_muon", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedmuon", "fedmuon_aligned",
           "fedmuon_corrected", "fedmuon_svd", "fednova", "fedper", "fedprox", "fedyogi",
           "local_adamw", "local_muon", "lora_muon", "muloco", "muon", "normalized_sgd",
           "ringmaster", "ringmaster_free", "scaffold", "sgd", "sign_muon"]  # fmt: skip

Arguments = ParamSpec("Arguments")
Answered = Sequence[tuple[float, int]]  # each reply's weight in the mean, and its local steps
MOMENTUM = ("momentum",)


def _recipe(function: Callable[Arguments, Recipe]) -> Callable[Arguments, Recipe]:
    """Reject arguments that have no effect, and values that [local] does not allow."""
    signature, recipe = inspect.signature(function), function.__name__.replace("_", "-")

    @wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Recipe:
        for name in kwargs:
            key = name.replace("_", "-")
            if name not in signature.parameters:
                mend = f"Set {key} in [local] of the config, or leave {key} out."
                mend = mend if name in Local.model_fields else f"Leave {key} out."
                raise InputError(
                    f"{key} has no effect, because the recipe {recipe} has no such option. {mend}"
                )
        arguments = signature.bind(*args, **kwargs).arguments
        values = {
            name: value
            for name, value in arguments.items()
            if name in Local.model_fields and not isinstance(value, Tensor)
        }
        valid = validate_values(Local, "local", values)
        if not arguments.get("routes"):
            _require_one_matrix(valid)
        return function(*args, **kwargs)

    return checked


def _require_one_matrix(values: Mapping[str, Any]) -> None:
    """Reject values that only networks use. Without `routes`, a parameter is one matrix."""
    for problem in one_matrix_problems(values.get("adjust", "none")):
        raise InputError(problem)
    for name in ("aux", "aux_lr"):
        key = f"local.{name.replace('_', '-')}"
        if name in values and not is_default(key, values[name]):
            matrix = "[task] name = 'matrix'"
            raise InputError(without_effect(key, values[name], NETWORK_TASK, matrix))


# Federated methods


@_recipe
def fedavg(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """FedAvg: clients take SGD steps, and the server averages their models.

    A local step is X <- X - lr G. The next model is the mean of the clients' models.

    State: none. Guarantee: the recursion of the Stability note holds with the Lipschitz constant L
    = 1 and beta = 0. Source: McMahan et al. 2017.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedavg(lr=0.1).sent
        ()
    """
    return Recipe(Chain((gradient(), descend(lr, {}, weight_decay))), replace_by_mean)


@_recipe
def fedavgm(lr: Number = 1.0, server_momentum: float = 0.9, weight_decay: float = 0.0) -> Recipe:
    """FedAvgM: FedAvg with momentum on the server.

    Clients take SGD steps. With D, the mean of the clients' models minus X, the server computes

        v <- server_momentum v + D,   X <- X + v.

    State: the server stores v. Guarantee: the recursion of the Stability note holds with the
    Lipschitz constant L = 1 and the additional state v. Source: Hsu et al. 2019.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_momentum: The momentum coefficient of v.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedavgm(lr=0.1).kept
        ('momentum',)
    """
    chain = Chain((gradient(), descend(lr, {}, weight_decay)))
    return Recipe(chain, server_step(1.0, server_momentum), kept=MOMENTUM)


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
    """Local Muon: clients take Muon steps, and the server averages their models.

    The momentum M starts at 0 in every round. Each local step computes

        M <- momentum M + (1 - momentum) G,   X <- X - lr Orth(M).

    State: none between rounds. Guarantee: as for `fedmuon`, but the perturbation of M is 0 at the
    start of each round. Source: Stability note.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.local_muon(lr=0.02).sent
        ()
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
    """FedMuon: clients take Muon steps, and the server averages models and momenta.

    Each local step computes

        M <- momentum M + (1 - momentum) G,   X <- X - lr Orth(M).

    State: the server sends M to the clients, and averages the momenta that the clients return.
    Guarantee: if the orthogonalizer is Lipschitz, the stability recursion (section 4.2) and Theorem
    4.1 hold. Source: Stability note, Algorithm 1.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import orthogonalizers, recipes
        >>> recipe = recipes.fedmuon(lr=0.02, orthogonalizer=orthogonalizers.newton_schulz())
        >>> [link.name for link in recipe.chain.links], recipe.sent
        (['gradient', 'momentum', 'orthogonalize', 'descend'], ('momentum',))
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return Recipe(
        Chain((gradient(), *steps)),
        replace_by_mean,
        sent=MOMENTUM,
        returned=MOMENTUM,
        kept=MOMENTUM,
    )


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

    The global direction D is the mean direction of the last round. A local step computes

        X <- X - lr ((1 - alignment) Orth(M) + alignment D).

    D is the last change of the server's model, divided by -lr E.

    State: the server sends M and D to the clients. The server averages the momenta M that the
    clients return. Guarantee: the stability recursion holds with the additional state D, and with
    constants for all models. Source: Stability note, Remark 3.2.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        alignment: The weight alpha of the global direction D, from 0 to 1.
        steps: The number E of local steps in a round.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedmuon_aligned(lr=0.02, alignment=0.5).sent
        ('momentum', 'global-direction')
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
        steps=steps,
    )


@_recipe
def fedprox(lr: Number = 1.0, proximal: float = 0.01, weight_decay: float = 0.0) -> Recipe:
    """FedProx: FedAvg with a proximal term that pulls each client to the server's model.

    A client starts from the server's model X. Each local step computes

        x <- x - lr (G + proximal (x - X)).

    The server averages the clients' models.

    State: none. Guarantee: no stability bound is known. Source: Li et al. 2020 (arXiv:1812.06127).

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        proximal: The strength mu of the pull towards the received model X, or 0 for FedAvg.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> [link.name for link in recipes.fedprox(proximal=0.1).chain.links]
        ['gradient', 'proximal', 'descend']
    """
    chain = Chain((gradient(), links.proximal(proximal), descend(lr, {}, weight_decay)))
    return Recipe(chain, replace_by_mean)


@_recipe
def fedper(lr: Number = 1.0, personal: str = "", weight_decay: float = 0.0) -> Recipe:
    """FedPer: FedAvg for the shared part of the model, with a personal part for each client.

    Client i trains the shared part x and its personal part z_i together:

        (x, z_i) <- (x, z_i) - lr G(x, z_i).

    The next shared model X is the mean of the clients' shared parts x.

    State: client i stores z_i, which starts from the first model. With `data.client-test`, client i
    tests the model (X, z_i). Guarantee: no stability bound is known. Source: Arivazhagan et al.
    2019 (arXiv:1912.00818).

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        personal: Name patterns of the personal part z, such as "head.*", separated by commas (none
            for FedAvg, and all parameters and statistics of BatchNorm layers for FedBN,
            arXiv:2102.07623).
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedper(personal="head.*").is_personal("head.weight")
        True
    """
    patterns = tuple(filter(None, (pattern.strip() for pattern in personal.split(","))))
    chain = Chain((gradient(), descend(lr, {}, weight_decay)))
    stages = (PersonalParameters(patterns),) if patterns else ()
    return Recipe(chain, replace_by_mean, stages=stages)


@_recipe
def ditto(lr: Number = 1.0, personal_weight: float = 0.1, weight_decay: float = 0.0) -> Recipe:
    """Ditto: FedAvg, and each client also trains its own model near the server's model.

    A client trains a copy x of the server's model X and its own model v_i. Each local step computes

        x <- x - lr G(x),   v_i <- v_i - lr (G(v_i) + personal_weight (v_i - X)).

    The next X is the mean of the clients' models x.

    State: client i stores v_i, which starts from the first model. v_i takes the same number of
    steps as x, with the same batches. With `data.client-test`, client i tests v_i. Guarantee: no
    stability bound is known. Source: Li et al. 2021 (arXiv:2012.04221), Algorithm 1.

    Args:
        lr: Step size η of both models, one number or one per replica `[replicas]`.
        personal_weight: The strength lambda of the pull of v_i towards the received model X.
        weight_decay: Decoupled weight decay of both models.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.ditto(personal_weight=0.5).persistent
        ('personal',)
    """
    personal_model = links.personal_model(lr, personal_weight, weight_decay)
    chain = Chain((gradient(), personal_model, descend(lr, {}, weight_decay)))
    return Recipe(chain, replace_by_mean, persistent=(personal_model.name,))


def _adaptive(
    kind: str,
    lr: Number,
    server_lr: float,
    server_momentum: float,
    server_memory: float,
    tau: float,
    weight_decay: float,
) -> Recipe:
    """Return FedAdam, FedYogi or FedAdagrad. The three methods differ only in the server's rule."""
    rule = adaptive_step(kind, server_lr or 0.1, server_momentum, server_memory, tau)
    chain = Chain((gradient(), descend(lr, {}, weight_decay)))

    def first(params: Params) -> State:
        return {name: torch.full_like(value, tau**2) for name, value in params.items()}

    return Recipe(chain, rule, kept=("momentum", "square"), initial={"square": first})


@_recipe
def fedadam(
    lr: Number = 1.0,
    server_lr: float = 0.0,
    server_momentum: float = 0.9,
    server_memory: float = 0.99,
    tau: float = 1e-3,
    weight_decay: float = 0.0,
) -> Recipe:
    """FedAdam: clients take SGD steps, and the server takes Adam steps.

    With D, the mean of the clients' models minus X, the server computes

        m <- server_momentum m + (1 - server_momentum) D,
        v <- server_memory v + (1 - server_memory) D^2,
        X <- X + server_lr m / (sqrt(v) + tau).

    State: the server stores m and v. Guarantee: no stability bound is known. Source: Reddi et al.
    2021 (arXiv:2003.00295), Algorithm 2, without bias correction.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_lr: Step size of the server, or 0 for the default 0.1.
        server_momentum: The momentum coefficient of m.
        server_memory: The coefficient beta_2 of the second moment v.
        tau: A constant that is added to sqrt(v), to limit the step where v is small; v starts at
            tau^2.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedadam(lr=0.1, server_lr=0.01).kept
        ('momentum', 'square')
    """
    return _adaptive("adam", lr, server_lr, server_momentum, server_memory, tau, weight_decay)


@_recipe
def fedyogi(
    lr: Number = 1.0,
    server_lr: float = 0.0,
    server_momentum: float = 0.9,
    server_memory: float = 0.99,
    tau: float = 1e-3,
    weight_decay: float = 0.0,
) -> Recipe:
    """FedYogi: clients take SGD steps, and the server takes Yogi steps.

    With D, the mean of the clients' models minus X, the server computes

        m <- server_momentum m + (1 - server_momentum) D,
        v <- v - (1 - server_memory) D^2 sign(v - D^2),
        X <- X + server_lr m / (sqrt(v) + tau).

    State: the server stores m and v. In each round, no entry of v changes by more than (1 -
    server_memory) D^2. Guarantee: no stability bound is known. Source: Reddi et al. 2021
    (arXiv:2003.00295), Algorithm 2.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_lr: Step size of the server, or 0 for the default 0.1.
        server_momentum: The momentum coefficient of m.
        server_memory: The coefficient beta_2 of the second moment v.
        tau: A constant that is added to sqrt(v), to limit the step where v is small; v starts at
            tau^2.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedyogi(lr=0.1, server_lr=0.01).kept
        ('momentum', 'square')
    """
    return _adaptive("yogi", lr, server_lr, server_momentum, server_memory, tau, weight_decay)


@_recipe
def fedadagrad(
    lr: Number = 1.0,
    server_lr: float = 0.0,
    tau: float = 1e-3,
    weight_decay: float = 0.0,
) -> Recipe:
    """FedAdagrad: clients take SGD steps, and the server takes Adagrad steps without momentum.

    With D, the mean of the clients' models minus X, the server computes

        v <- v + D^2,   X <- X + server_lr D / (sqrt(v) + tau).

    State: the server stores v and the last D. Guarantee: no stability bound is known. Source: Reddi
    et al. 2021 (arXiv:2003.00295), Algorithm 2.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_lr: Step size of the server, or 0 for the default 0.1.
        tau: A constant that is added to sqrt(v), to limit the step where v is small; v starts at
            tau^2.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedadagrad(lr=0.1, server_lr=0.01).kept
        ('momentum', 'square')
    """
    return _adaptive("adagrad", lr, server_lr, 0.0, 0.0, tau, weight_decay)


@_recipe
def fednova(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """FedNova: the server averages updates that are divided by each client's number of local steps.

    Client i takes t_i local steps and returns the model x_i. The server computes

        X <- X + t mean_i[(x_i - X) / t_i],   where t = mean_i t_i.

    Both means use the weights of the aggregator. With `[local] epochs`, clients with more samples
    take more steps. These steps increase a client's influence in FedAvg, but not in FedNova.

    State: none. Guarantee: no stability bound is known. Source: Wang et al. 2020
    (arXiv:2007.07481), for SGD without momentum.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fednova(lr=0.1).counted
        True
    """

    def client(
        received: Params, params: Params, states: States, steps: int
    ) -> tuple[Params, States]:
        return {
            name: received[name] + (value - received[name]) / steps
            for name, value in params.items()
        }, states

    def server(
        old: Params, mean: Params, states: States, answered: Answered
    ) -> tuple[Params, States]:
        count = sum(weight * steps for weight, steps in answered)
        return {name: old[name] + count * (mean[name] - old[name]) for name in old}, states

    chain = Chain((gradient(), descend(lr, {}, weight_decay)))
    return Recipe(chain, server, client=client)


def _require_clients(clients: int) -> None:
    if not isinstance(clients, int) or clients < 1:
        raise InputError(
            f"clients is {clients}, but it must be the number of all clients of the run. Set an "
            "integer of 1 or more."
        )


@_recipe
def scaffold(
    lr: Number = 1.0, server_lr: float = 0.0, weight_decay: float = 0.0, *, clients: int
) -> Recipe:
    """SCAFFOLD: each client corrects its gradients with control variates.

    The control variate c_i estimates the gradient of client i. The control variate c estimates the
    mean gradient of all clients. Client i starts from the server's model X, and takes E local steps

        x <- x - lr (G - c_i + c).

    At the end of the round, the client replaces c_i by the new control variate

        c_i+ = c_i - c + (X - x) / (E lr).

    Without weight decay, c_i+ is the mean of the client's E gradients. From the replies of K
    clients, the server computes the next X and the next c:

        X <- X + server_lr (mean(x) - X),   c <- c + (K / N) mean(c_i+ - c_i).

    State: Each client stores its c_i. The server sends c, and clients return c_i+ - c_i. Guarantee:
    no stability bound is known. Source: Karimireddy et al. 2020 (arXiv:1910.06378), option II.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_lr: Step size of the server, or 0 for the default 1.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        clients: The total number N of clients in the run.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipe = recipes.scaffold(lr=0.1, clients=20)
        >>> recipe.sent, recipe.persistent
        (('server-control',), ('client-control',))
    """
    _require_clients(clients)
    step = server_step(server_lr or 1.0, 0.0)

    def client(
        received: Params, params: Params, states: States, steps: int, factor: float
    ) -> tuple[Params, States]:
        control, shared = states["client-control"], states["server-control"]
        if factor == 0:  # no step was taken, so the mean gradient is unknown
            return params, {**states, "control-change": zeros(params)}
        moved = {
            name: (received[name] - value) / (per_replica(lr, value) * (factor * steps))
            for name, value in params.items()
        }
        change = {name: moved[name] - shared[name] for name in params}
        after = {name: control[name] + change[name] for name in params}
        return params, {**states, "client-control": after, "control-change": change}

    def server(
        old: Params, mean: Params, states: States, answered: Answered, factor: float
    ) -> tuple[Params, States]:
        after = step(old, mean, {})[0]
        share = len(answered) / clients
        control = {
            name: value.add(states["control-change"][name], alpha=share)
            for name, value in states["server-control"].items()
        }
        return after, {**states, "server-control": control}

    client_shift, server_shift = (
        links.shift("client-control", -1.0),
        links.shift("server-control", 1.0),
    )
    return Recipe(
        Chain((gradient(), client_shift, server_shift, descend(lr, {}, weight_decay))),
        server,
        sent=("server-control",),
        returned=("control-change",),
        kept=("server-control",),
        persistent=("client-control",),
        clients=clients,
        client=client,
    )


@_recipe
def fedmuon_corrected(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    clients: int,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """FedMuon with bias correction: clients orthogonalize a corrected momentum.

    Client i stores its momentum M_i, and the value C_i that M_i had at the end of the client's last
    round. The server stores C, the mean of all C_i. Each local step computes

        M_i <- momentum M_i + (1 - momentum) G,   x <- x - lr Orth(M_i - C_i + C).

    After its last step, client i returns M_i - C_i and x_i, and sets C_i <- M_i. With sums over the
    K clients of the round, the server computes

        C <- C + (1/N) sum_i (M_i - C_i),   X <- (1 - K/N) X + (1/N) sum_i x_i.

    State: client i stores M_i and C_i, and the server stores C. Guarantee: no stability bound is
    known. Source: FedMuon with bias-corrected LMO (arXiv:2509.26337). This paper claims convergence
    for any number of Newton-Schulz steps.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        clients: The total number N of clients in the run.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.fedmuon_corrected(lr=0.02, clients=20).persistent
        ('momentum', 'client-correction')
    """
    _require_clients(clients)
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    apart = _others(routes, aux, aux_lr) if aux == "adamw" else {}  # parameters without a momentum

    def client(
        received: Params, params: Params, states: States, steps: int
    ) -> tuple[Params, States]:
        before, after = states["client-correction"], states["momentum"]
        change = zeros(params) | {name: after[name] - before[name] for name in after}
        return params, {**states, "client-correction": after, "correction-change": change}

    def server(
        old: Params, mean: Params, states: States, answered: Answered
    ) -> tuple[Params, States]:
        share = len(answered) / clients
        correction = {
            name: value.add(states["correction-change"][name], alpha=share)
            for name, value in states["server-correction"].items()
        }
        after = {name: old[name].lerp(mean[name], share) for name in old}
        return after, {**states, "server-correction": correction}

    client_shift, server_shift = (
        only(lambda name: name not in apart, link)
        for link in (links.shift("client-correction", -1.0), links.shift("server-correction", 1.0))
    )
    return Recipe(
        Chain((gradient(), *steps[:-2], client_shift, server_shift, *steps[-2:])),
        server,
        sent=("server-correction",),
        returned=("correction-change",),
        kept=("server-correction",),
        persistent=("momentum", "client-correction"),
        clients=clients,
        client=client,
    )


@_recipe
def fedmuon_svd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    rank: int = 8,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """FedMuon with compressed momentum: clients and server send the momentum as low-rank factors.

    Each local step computes

        M <- momentum M + (1 - momentum) G,   x <- x - lr Orth(M).

    Let M = U S V^T be the singular value decomposition of M. A message contains the factors
    L = U_r S_r and R = V_r^T of the r largest singular values. The receiver uses L R as M.

    State: the server sends M as factors, clients return M as factors, and the server averages M.
    The rest of M is lost, because clients use no error feedback. Guarantee: no stability bound is
    known. Source: Liu et al. 2025 (arXiv:2510.27403). The method `fedmuon-aligned` implements the
    alignment of that paper.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        rank: The rank r of the factors. An m x n matrix with r (m + n) >= m n is sent uncompressed,
            as in FedMuon.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> sorted(recipes.fedmuon_svd(lr=0.02, rank=4).codecs)
        ['momentum']
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    chain, factored = Chain((gradient(), *steps)), EncodedStates({"momentum": low_rank(rank)})
    return Recipe(
        chain, replace_by_mean, sent=MOMENTUM, returned=MOMENTUM, kept=MOMENTUM, stages=(factored,)
    )


@_recipe
def lora_muon(
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
    """LoRA-Muon: FedMuon on low-rank adapters, with steps that do not depend on their scale.

    An adapter changes a weight by B A, with the momenta M_A and M_B. With R_A = (A Aᵀ)^(-1/2),
    R_B = (Bᵀ B)^(-1/2) and s = sqrt(1 - lr weight_decay), each local step computes

        B <- s B - lr Orth(M_B R_A) R_A / (2 s),   A <- s A - lr R_B Orth(R_B M_A) / (2 s).

    Other matrices take the steps of FedMuon. Eigenvalues of A Aᵀ and Bᵀ B below 1e-6 times the
    largest one are raised to this value. A factor that is 0 counts as R = 0.

    State: the server sends M to the clients, and averages the momenta that the clients return.
    Guarantee: no stability bound is known. Source: LoRA-Muon (arXiv:2606.12921).

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay. A step multiplies the product B A of an adapter by
            1 - lr * weight_decay, and subtracts lr * weight_decay * x from any other parameter x.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, an argument has no effect on this optimizer, or lr *
            weight_decay is 1 or more.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.lora_muon(lr=0.02).sent
        ('momentum',)
    """
    require_decay(lr, weight_decay)
    *before, orthogonal, descent = _muon_links(
        lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes, aux, aux_lr
    )
    others = _others(routes, aux, aux_lr)

    def by_muon(name: str) -> bool:
        return name not in others

    steps = whitened(orthogonal, by_muon), split_descent(descent, lr, weight_decay, by_muon)
    return Recipe(
        Chain((gradient(), *before, *steps)),
        replace_by_mean,
        sent=MOMENTUM,
        returned=MOMENTUM,
        kept=MOMENTUM,
    )


@_recipe
def ef21_muon(
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
    """EF21-Muon: clients send their momenta, and the server orthogonalizes the mean.

    Client i updates its momentum M_i, sends the compressed difference C(M_i - g_i), and updates its
    memory g_i:

        M_i <- momentum M_i + (1 - momentum) G,   g_i <- g_i + C(M_i - g_i).

    The server orthogonalizes the mean g of all memories g_i:

        X <- X - lr Orth(g).

    The config table [compression] with feedback = "ef21" defines the compressor C and the memories
    g_i. Without this feedback, g is the mean of the momenta M_i of this round. The gradients of all
    E local steps are computed at X, and the paper uses E = 1. With `aux="adamw"`, the server takes
    an AdamW step on the mean gradient.

    State: client i stores M_i, and the server stores the states of its own step. Guarantee: no
    stability bound is known. Source: Gruntkowska et al. 2025 (arXiv:2510.00643).

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.ef21_muon(lr=0.02).direction
        True
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    heavy = next(step for step in steps if step.name == "momentum")
    of_server = tuple(step for step in steps if step is not heavy)
    return _with_server_steps("ef21-muon", (heavy,), of_server)


@_recipe
def sign_muon(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
    seed: int = 0,
) -> Recipe:
    """SignMuon: clients vote with one bit per entry, and the server takes the majority.

    Client i updates its momentum M_i and sends the signs of Orth(M_i):

        M_i <- momentum M_i + (1 - momentum) G,   s_i = sign(Orth(M_i)).

    The server takes the majority of the votes in each entry:

        s = sign(s_1 + ... + s_K),   X <- X - lr (s + weight_decay X).

    Ties, and the votes of entries that are exactly 0, are decided by random coins. A vote needs one
    bit per entry of a matrix. The gradients of all E local steps are computed at X. Parameters that
    Muon does not update are sent uncompressed: with `aux="sgd"` the server subtracts aux_lr times
    the mean of M_i, and with `aux="adamw"` it takes an AdamW step on the mean gradient.

    State: client i stores M_i, and the server stores the moments of its AdamW step. Guarantee: no
    stability bound is known. Source: arXiv:2605.16311.

    Args:
        lr: Step size η of the server, one number or one per replica `[replicas]`. Each entry of a
            matrix moves by exactly η, so use smaller values than for other Muon methods.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * X from the model X
            in each round.
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".
        seed: Seed of the coins. In a run from a config, this is the seed of the run.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, an argument has no effect on this optimizer, or
            there is no matrix.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.sign_muon(lr=0.001).direction
        True
    """
    require_matrix(routes)
    *auxiliary, heavy, orthogonal, descent = _muon_links(
        *(lr, momentum, orthogonalizer, momentum_form, weight_decay, "none", routes, aux, aux_lr)
    )
    votes = Votes(seed, routes)
    elected = stateless("majority", lambda mean, context: majority(votes, mean))
    of_server = (elected, *auxiliary, descent)
    return _with_server_steps("sign-muon", (heavy, orthogonal), of_server, votes)


@_recipe
def ringmaster(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """Ringmaster LMO: clients send gradients, and the server takes Muon's steps.

    With the mean G of the gradients that have arrived, the server computes

        M <- momentum M + (1 - momentum) G,   X <- X - lr Orth(M).

    The server can update X with each gradient, while other clients still compute theirs: see
    `[devices] mode = "threshold"`, which discards gradients that are too late. A client returns the
    mean of the gradients of its E local steps, which are all computed at the received model. The
    paper uses E = 1.

    State: the server stores M. Guarantee: no stability bound is known. Source: Sadiev et al. 2026
    (arXiv:2605.18174).

    Args:
        lr: Step size η of the server, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * X from the model X
            in each update.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.ringmaster(lr=0.02).kept
        ('momentum',)
    """
    steps = _muon_links(lr, momentum, orthogonalizer, "ema", weight_decay, adjust, routes, aux,
                        aux_lr)  # fmt: skip
    return _of_gradients("ringmaster", steps)


@_recipe
def ringmaster_free(
    lr: Number = 1.0,
    orthogonalizer: Any = None,
    *,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """Ringmaster LMO without constants of the problem.

    Update k = 1, 2, ... of the server has a growing momentum and a falling step size:

        M <- (1 - a) M + a G with a = k^(-1/2),   X <- X - lr k^(-3/4) Orth(M).

    No smoothness and no variance is needed to choose the powers, also with late gradients below a
    threshold of the order k^(1/2): `[devices] mode = "threshold"` with `threshold-growth = 0.5`.
    See `ringmaster` for the messages.

    State: the server stores M and k. Guarantee: no stability bound is known. Source: Sadiev et al.
    2026 (arXiv:2605.18174).

    Args:
        lr: Step size of the first update, one number or one per replica `[replicas]`.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw". It falls like `lr`.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.ringmaster_free(lr=1.0).kept
        ('momentum', 'falling')
    """
    *others, descent = _muon_links(lr, growing_momentum(0.5), orthogonalizer, "ema", 0.0, adjust,
                                   routes, aux, aux_lr)  # fmt: skip
    return _of_gradients("ringmaster-free", (*others, falling(0.75), descent))


def _of_gradients(method: str, steps: Sequence[Link]) -> Recipe:
    """Return a recipe whose clients send mean gradients, and whose server takes these steps."""
    lasting = {step.name: step.init for step in steps if step.lasting}

    def stay(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return zeros(direction), {name: state[name] + value for name, value in direction.items()}

    def client(
        received: Params, params: Params, states: States, steps: int
    ) -> tuple[Params, States]:
        return {name: value / max(1, steps) for name, value in states["sum"].items()}, states

    return Recipe(
        Chain((gradient(), Link("sum", zeros, stay))),
        server_chain(method, steps),
        kept=tuple(lasting),
        initial=lasting,
        client=client,
        direction=True,
    )


@_recipe
def demuon(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux_lr: float = 0.0,
) -> Recipe:
    """DeMuon: nodes take Muon steps and average with their neighbours, without a server.

    Node i has a model X_i, a momentum M_i, and a tracker V_i of the mean momentum of all nodes. In
    each round, with the weights w_ij of a graph,

        M_i <- momentum M_i + (1 - momentum) G,
        V_i <- sum_j w_ij (V_j + M_j - M_j_before),
        X_i <- sum_j w_ij (X_j - lr Orth(V_j)).

    The config keys [federation] graph, edge-share, graph-file and varying-graph select the graph.
    If this recipe is passed in Python, all nodes have the weights w_ij = 1/K, so that all models
    are equal. The gradients of all E local steps are computed at X_i, and the paper uses E = 1.

    State: node i stores X_i, M_i and V_i. Guarantee: no stability bound is known. Source: He et al.
    2025 (arXiv:2510.01377).

    Args:
        lr: Step size η of the nodes, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M, which is 1 - θ in the paper.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * X from the model X
            in each round.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of V and Orth(V).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the step X - aux_lr V. By default, every parameter is one matrix.
        aux_lr: Step size for parameters with 0 matrices, or 0 for the default 0.05.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.demuon(lr=0.02).persistent
        ('momentum',)
    """
    heavy, *steps = _muon_links(
        *(lr, momentum, orthogonalizer, "ema", weight_decay, adjust, routes, "sgd", aux_lr)
    )
    return _with_server_steps("demuon", (heavy,), tuple(steps))


@_recipe
def local_adamw(lr: Number = 0.001, weight_decay: float = 0.0) -> Recipe:
    """Local AdamW: clients take AdamW steps, and the server averages their models.

    In each round, the moments m and v start at 0. The local step k = 1, 2, ... computes

        m <- 0.9 m + 0.1 G,   v <- 0.999 v + 0.001 G^2,
        x <- x - lr (m / (1 - 0.9^k)) / (sqrt(v / (1 - 0.999^k)) + 1e-8).

    State: none between rounds. Guarantee: no stability bound is known. Source: Loshchilov, Hutter
    2019.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.local_adamw(lr=0.001).kept
        ()
    """
    chain = Chain((gradient(), links.adamw(decay=0.0), descend(lr, {}, weight_decay)))
    return Recipe(chain, replace_by_mean)


@_recipe
def diloco(
    lr: Number = 0.001,
    server_lr: float = 0.0,
    server_momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> Recipe:
    """DiLoCo: clients take AdamW steps, and the server uses Nesterov momentum.

    With D, the mean of the clients' models minus X, the server computes

        v <- server_momentum v + D,   X <- X + server_lr (D + server_momentum v).

    State: the server stores v. The clients' moments start at 0 in every round. In the paper, the
    few clients store their moments between rounds. Guarantee: no stability bound is known. Source:
    Douillard et al. 2023 (arXiv:2311.08105).

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        server_lr: Step size of the server, or 0 for the default 0.7.
        server_momentum: The momentum coefficient of v, which is 0 in Local AdamW (with server_lr =
            1).
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.diloco(lr=0.001).kept
        ('momentum',)
    """
    chain = Chain((gradient(), links.adamw(decay=0.0), descend(lr, {}, weight_decay)))
    return Recipe(chain, server_step(server_lr or 0.7, server_momentum, True), kept=MOMENTUM)


@_recipe
def muloco(
    lr: Number = 1.0,
    momentum: float = 0.9,
    orthogonalizer: Any = None,
    *,
    server_lr: float = 0.0,
    server_momentum: float = 0.9,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
    adjust: str = "none",
    routes: Mapping[str, int] | None = None,
    aux: str = "sgd",
    aux_lr: float = 0.0,
) -> Recipe:
    """MuLoCo: clients take Muon steps, and the server uses Nesterov momentum.

    With D, the mean of the clients' models minus X, the server computes

        v <- server_momentum v + D,   X <- X + server_lr (D + server_momentum v).

    State: the server stores v. The clients' momenta start at 0 in every round. Guarantee: no
    stability bound is known. Source: arXiv:2505.23725.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        server_lr: Step size of the server, or 0 for the default 0.7.
        server_momentum: The momentum coefficient of v, which is 0 in Local Muon (with server_lr =
            1).
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.muloco(lr=0.02).kept
        ('momentum',)
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    # The server's momentum v has another meaning than the clients' M, so M gets another name.
    steps = tuple(
        replace(step, name="local-momentum") if step.name == "momentum" else step for step in steps
    )
    rule = server_step(server_lr or 0.7, server_momentum, True)
    return Recipe(Chain((gradient(), *steps)), rule, kept=MOMENTUM)


# Centralized optimizers. With several clients, the server averages models and lasting states.


@_recipe
def sgd(
    lr: Number = 1.0,
    momentum: float = 0.9,
    *,
    momentum_form: str = "ema",
    weight_decay: float = 0.0,
) -> Recipe:
    """SGD with momentum: X <- X - lr M.

    This is an optimizer for centralized training. With several clients, the server averages the
    models and the momenta M.

    State: the server averages the momenta M of the clients. Guarantee: the recursion of the
    Stability note holds with the Lipschitz constant L = 1.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.sgd(lr=0.1).sent
        ('momentum',)
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
    """Normalized SGD with momentum: X <- X - lr M / ||M||_F.

    This is an optimizer for centralized training. With several clients, the server averages the
    models and the momenta M.

    State: the server averages the momenta M of the clients. Guarantee: no stability bound, because
    M / ||M|| is not continuous at M = 0.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> [link.name for link in recipes.normalized_sgd().chain.links]
        ['gradient', 'momentum', 'normalize', 'descend']
    """
    heavy = links.momentum(momentum, momentum_form)
    return centralized(gradient(), heavy, links.normalize(), descend(lr, {}, weight_decay))


@_recipe
def adamw(lr: Number = 1.0, weight_decay: float = 0.0) -> Recipe:
    """AdamW with the constants of torch.optim.AdamW (Loshchilov, Hutter 2019).

    This is an optimizer for centralized training. With several clients, the server averages their
    models and both moments.

    State: the server averages both moments. Guarantee: no stability bound, because the stability
    recursion does not cover second moments.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.adamw(lr=0.001).sent
        ('adamw',)
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
    """Muon: X <- X - lr Orth(M).

    This is an optimizer for centralized training. With several clients, the server averages their
    models and all states that last between rounds.

    State: the server averages all states that last between rounds. Guarantee: that of `fedmuon`,
    for one client. Source: Jordan et al. 2024; Nesterov Muon.

    Args:
        lr: Step size η of the local steps, one number or one per replica `[replicas]`.
        momentum: The momentum coefficient beta of M.
        orthogonalizer: A `fedmuon.Orthogonalizer`, a function on stacks of matrices `[..., m, n]`,
            or a link such as `links.orthogonalize(...)`, by default smoothed polar with λ = 1e-4.
        momentum_form: "ema" for M <- momentum M + (1 - momentum) G, "polyak" for M <- momentum M +
            G, and "ema-nesterov" or "nesterov" for these two forms with Nesterov's look-ahead.
        weight_decay: Decoupled weight decay, which subtracts lr * weight_decay * x from the model x
            in each local step.
        adjust: Name of the scale that multiplies the orthogonalized step of an m x n matrix: "none"
            means 1, "original" means sqrt(max(1, m/n)), "match-rms" means 0.2 sqrt(max(m, n)),
            "scion" means sqrt(m/n), and "polargrad" means the inner product of M and Orth(M).
        routes: Mapping from a parameter name to the number of matrices in this parameter, or 0 for
            the auxiliary step. By default, every parameter is one matrix.
        aux: The auxiliary step for parameters with 0 matrices: "sgd" adds -aux_lr M, and "adamw"
            takes an AdamW step.
        aux_lr: Step size of the auxiliary step, or 0 for the default: 0.05 for "sgd" and 0.001 for
            "adamw".

    Returns:
        The optimizer, for `fedmuon.run(recipe=...)`.

    Raises:
        InputError: If a value is out of range, or an argument has no effect on this optimizer.

    Example:
        >>> from fedmuon import recipes
        >>> recipes.muon(lr=0.02).sent
        ('momentum',)
    """
    steps = _muon_links(lr, momentum, orthogonalizer, momentum_form, weight_decay, adjust, routes,
                        aux, aux_lr)  # fmt: skip
    return centralized(gradient(), *steps)


# From the tables [local], [orthogonalizer] and [privacy] of a config to recipes


def make_recipe(
    local: Local,
    orthogonalizer: OrthogonalizerTable,
    lr: Number | None = None,
    regularization: Number | None = None,
    routed: Mapping[str, int] | None = None,
    privacy: Privacy | None = None,
    custom_map: Orthogonalizer | None = None,
    centred: bool = False,
    clients: int = 1,
    seed: int = 0,
    joint_block: frozenset[str] | None = None,
    turns: tuple[int, int] = (1, 1),
) -> Recipe:
    """Return the recipe that the config tables select.

    Args:
        local: The table [local] with the name and the options of the recipe.
        orthogonalizer: The table [orthogonalizer] with the name and the options of the
            orthogonalizer.
        lr: Step sizes [replicas], which replace the value in the table.
        regularization: Values of lambda [replicas], which replace the value in the table.
        routed: Mapping from a parameter name of a network to the number of matrices in this
            parameter. A parameter with 0 matrices takes the auxiliary step. By default, every
            parameter is one matrix.
        privacy: The table [privacy], if the recipe is private.
        custom_map: A custom orthogonalizer, which replaces the one in the table.
        centred: Whether the rows of every gradient sum to 0.
        clients: The total number N of clients, for recipes that need this number.
        seed: The seed of the run, for recipes that draw outside local steps.
        joint_block: Names of the parameters that a private recipe clips together as one block. By
            default, these are the parameters that take the auxiliary step.
        turns: The number of steps in the run, and the number of lots in an epoch. These two numbers
            determine the optimal correlated noise.
    """
    if custom_map:
        apply = map_of_value(custom_map)
    else:
        apply = map_of_table(orthogonalizer, regularization, centred)
    # A map that draws random numbers has its own draws for each matrix.
    drawn = with_fact("orthogonalizer.name", "draws random numbers")
    grouped = custom_map is not None or orthogonalizer.name not in drawn
    link = links.map_matrices(apply, local.adjust, grouped, routed)
    if orthogonalizer.shards > 1:  # MuonBP
        sharded = links.map_matrices(apply, local.adjust, grouped, routed, orthogonalizer.shards)
        link = links.block_periodic(link, sharded, orthogonalizer.full_every)
    if orthogonalizer.row_memory:  # NorMuon
        link = links.normalize_rows(link, orthogonalizer.row_memory, routed)
    of_map = {"orthogonalizer": link, "routes": routed}
    rate = local.lr if lr is None else lr
    method = METHODS[local.recipe]
    function = inspect.unwrap(function_of(method))  # the config checked its values before
    if "private" in method.facts:
        smoothed = custom_map is None and orthogonalizer.name == "smoothed-polar"
        floor = orthogonalizer.noise_floor if smoothed else 0.0
        recipe = function(local, privacy or Privacy(), rate, of_map, joint_block, turns, floor)
        return _renormalized(recipe, local, routed)
    arguments = takes(function, {**of_map, "clients": clients, "seed": seed})
    arguments |= _values_of(method, local) | {"lr": rate}
    if method.name in BUILT_IN:
        return _renormalized(function(**arguments), local, routed)
    with (guard := guard_of(method, function)):
        recipe = as_recipe(function(**arguments), guard)
    return _renormalized(recipe, local, routed)


def _values_of(method: Method, local: Local) -> dict[str, Any]:
    """Return the keys and options of [local] that a method takes, by parameter name."""
    options = by_parameter(dict(local.options))
    return {
        **{parameter(key): getattr(local, parameter(key)) for key in method.keys},
        **{name: options[name] for name in by_parameter(method.options) if name in options},
    }


def _renormalized(recipe: Recipe, local: Local, routed: Mapping[str, int] | None) -> Recipe:
    """Return the recipe with the last link `renormalize`, if the config asks for it.

    The key has no effect on the matrix task and on recipes that take no local Muon steps.
    """
    facts = METHODS[local.recipe].facts
    muon = "orthogonalizes" in facts and "server orthogonalizes" not in facts
    if not (local.renormalize and muon and routed):
        return recipe
    return replace(recipe, chain=Chain((*recipe.chain.links, links.renormalize(routed))))


def private(
    local: Local, privacy: Privacy, lr: Number, of_map: dict[str, Any],
    joint_block: frozenset[str] | None = None, turns: tuple[int, int] = (1, 1),
    floor: float = 0.0,
) -> Recipe:  # fmt: skip
    """Return the recipe dp-BASE or disk-BASE: a base optimizer on noisy clipped gradients.

    disk-BASE filters the noisy gradients (DiSK, Algorithm 2), and dp-BASE uses them directly
    (DP-Muon, Algorithm 1 and Section 4). The auxiliary parameters are clipped as one block.
    `floor` is the factor c of noise-aware smoothing, or 0.
    """
    method = METHODS[local.recipe]
    routed = of_map["routes"] or {}
    if joint_block is None:
        joint_block = frozenset(name for name, count in routed.items() if not count)
    quantile, fixed_order = None, None
    if privacy.quantile:
        count_noise = privacy.count_noise or max(privacy.lot / SHARE, privacy.noise)
        quantile = Quantile(privacy.quantile, privacy.quantile_rate, count_noise)
    if privacy.sampling != "poisson":
        of_momentum = privacy.noise_correlation.endswith("momentum")
        memory = local.momentum if of_momentum else 1.0
        ahead = of_momentum and local.momentum_form.endswith("nesterov")
        if privacy.noise_correlation == "none" or not memory:
            fixed_order = FixedOrderSampling(privacy.sampling, 1, memory, ahead)
        elif privacy.noise_correlation.startswith("blt"):
            buffers = optimized(*turns, privacy.buffers, memory, ahead)
            fixed_order = FixedOrderSampling(privacy.sampling, 0, memory, ahead, buffers)
        else:
            fixed_order = FixedOrderSampling(privacy.sampling, privacy.band, memory, ahead)
    mechanism = Mechanism(
        Clipping(privacy.clipping, privacy.bound, joint_block),
        privacy.noise,
        privacy.lot,
        privacy.insecure_reproducible_noise,
        privacy.public_rate,
        privacy.adjacency,
        privacy.noise_source,
        privacy.arithmetic,
        fixed_order=fixed_order,
        quantile=quantile,
        max_lot=privacy.max_lot if fixed_order is None else 0,
    )
    disk = (privacy.kappa, privacy.lookahead) if "filtered" in method.facts else None
    release = links.private_gradient() if disk is None else links.disk_filter(*disk)
    if "inner momentum" in method.facts and len(privacy.past_weights) > 1:
        release = inner_momentum(privacy.past_weights)
    if quantile is not None:
        release = links.adaptive_bound(release, quantile, privacy.bound)
    if "orthogonalizes" not in method.facts:
        heavy = links.momentum(local.momentum, local.momentum_form)
        inner = heavy if "momentum" in method.keys else links.adamw(decay=0.0)
        steps = inner, descend(lr, {}, local.weight_decay)
    else:
        options = _values_of(method, local) | of_map | {"lr": lr}
        if "bias-corrected" in method.facts and privacy.probes:
            options["orthogonalizer"] = links.bias_correction(
                of_map["orthogonalizer"],
                privacy.probes,
                mechanism.spread,
                local.momentum,
                average=local.momentum_form == "ema",
                gain=disk[0] if disk else 1.0,
            )
        elif floor and mechanism.spread:
            options["orthogonalizer"] = noise_floor(
                floor,
                mechanism.spread,
                local.momentum,
                local.momentum_form,
                disk[0] if disk else 1.0,
                local.adjust,
                of_map["routes"],
            )
        steps = _muon_links(**options)
    return replace(centralized(release, *steps), mechanism=mechanism)


def aux_rate(local: Local) -> float:
    """Return the auxiliary step size of the config table, or the default if the table has none."""
    return aux_step_size(local.aux, local.aux_lr)


# Parts


def _with_server_steps(
    method: str, of_client: tuple[Link, ...], of_server: tuple[Link, ...], *stages: Stage
) -> Recipe:
    """Return a recipe whose clients return directions, and whose server takes the steps.

    Args:
        method: Name of the method, for errors.
        of_client: The links that make the returned direction from the gradient at the server's
            model. The clients store the state of the first one, the momentum.
        of_server: The links that make the server's update from the mean direction.
        stages: The stages of the recipe.
    """
    lasting = {step.name: step.init for step in of_server if step.lasting}

    def stay(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        return zeros(direction), direction  # only the server changes the model

    def client(
        received: Params, params: Params, states: States, steps: int, factor: float
    ) -> tuple[Params, States]:
        return states["direction"], states

    return Recipe(
        Chain((gradient(), *of_client, Link("direction", zeros, stay))),
        server_chain(method, of_server),
        kept=tuple(lasting),
        initial=lasting,
        persistent=MOMENTUM,
        client=client,
        direction=True,
        stages=stages,
    )


def _muon_links(
    lr: Number,
    momentum: float | Link,
    orthogonalizer: Any,
    momentum_form: str,
    weight_decay: float,
    adjust: str,
    routes: Mapping[str, int] | None,
    aux: str,
    aux_lr: float,
) -> tuple[Link, ...]:
    """Return the links that orthogonalize the momentum and subtract the step from the model.

    `orthogonalizer` and `momentum` may also be links. Parameters that are not orthogonalized take a
    step along M or an AdamW step. Federated recipes do not send the moments of AdamW, so these
    moments start again in every round.
    """
    if type(orthogonalizer) is Link:  # isinstance may run the object's own code, which may raise
        orthogonal = orthogonalizer
    elif orthogonalizer is None:
        orthogonal = links.map_matrices(
            lambda m, context, block: maps.smoothed_polar(m, 1e-4), adjust, True, routes
        )
    else:
        apply = map_of_value(as_orthogonalizer(orthogonalizer))
        orthogonal = links.map_matrices(apply, adjust, True, routes)
    heavy = momentum if isinstance(momentum, Link) else links.momentum(momentum, momentum_form)
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
    """Return a step size for each parameter that is not orthogonalized."""
    return {name: aux_step_size(aux, aux_lr) for name, count in (routes or {}).items() if not count}


def aux_step_size(aux: str, aux_lr: float) -> float:
    """Return `aux_lr`, or the default auxiliary step size if `aux_lr` is 0.

    The default for SGD is FedAvg's step size in the Stability note (Table 3). The default for AdamW
    is that of torch.
    """
    return aux_lr or (0.05 if aux == "sgd" else 1e-3)
