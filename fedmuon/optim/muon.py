"""Muon: momentum, orthogonalized, with decoupled weight decay.

    B <- mu B + (1 - mu) G            averages, as in torch.optim.Muon and 001 (1)
    M  = (1 - mu) G + mu B            with Nesterov; else M = B
    X <- (1 - eta lambda) X - eta s(m, n) Orth(M)

001 (1)-(3) is M = B and s = 1 without decay. The other convention is 002's, `polyak`:

    C <- mu C + G                     sums
    M  = G + mu C                     with Nesterov; else M = C

C is B over 1 - mu, and so is M: the step is the same wherever Orth ignores scale, which a
regularized map (lambda, or eps above the norm of M) does not.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_lerp_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
)

from fedmuon.core.errors import InputError, shown
from fedmuon.core.guard import Guard
from fedmuon.optim.maps import NAMED, Orthogonalizer, check_orthogonalizer, orthogonalizer
from fedmuon.optim.matrices import (
    Member,
    group_by_shape,
    matrix_shape,
    restored,
    stacked,
    wide_in_memory,
)
from fedmuon.optim.portable import PortableOptimizer
from fedmuon.orthogonalize import schedule
from fedmuon.orthogonalize.coefficients import Coefficients

__all__ = ["NAMED", "Muon", "Orthogonalizer"]
_ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda m, n: math.sqrt(max(1.0, m / n)),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


class Muon(PortableOptimizer):
    """torch.optim.Muon for tensors of two or more axes, with any orthogonalization map.

    The first nine arguments, their defaults and the trajectory are torch.optim.Muon's; it iterates
    in bfloat16, which is `ns_dtype=torch.bfloat16` here. A tensor [out, ...] is the matrix
    [out, -1]; a group with `blocks: k` cuts each of its matrices into k along the longer side.

    `ns_coefficients` is (a, b, c), a list of those for successive steps, or a name of
    `fedmuon.orthogonalize.COEFFICIENTS`. `orthogonalizer` replaces Newton-Schulz: a function on
    stacks [B, m, n] of any matrices of one shape, which leaves its argument as it is (that may be
    the momentum), a name of `NAMED`, or "randomized-polar" (002) with `rank`, `oversample`,
    `power`, `sketch` ("gaussian" or "kaczmarz") and `seed`; the state dictionary says which sketch
    is next. `momentum_form` is "ema" or "polyak".
    `step` is never compiled: torch.compile runs it as it is, beside compiled models.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.float32,
        orthogonalizer: Orthogonalizer | str | None = None,
        momentum_form: str = "ema",
        rank: int = 32,
        oversample: int = 10,
        power: int = 1,
        sketch: str = "gaussian",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "orthogonalizer": orthogonalizer,
            "momentum_form": momentum_form,
            "rank": rank,
            "oversample": oversample,
            "power": power,
            "sketch": sketch,
            "seed": seed,
            "draws": 0,  # steps taken, hence sketches drawn
            "blocks": 1,
        }
        with Guard("params", params):
            super().__init__(params, defaults)

    def _accept(self, group: dict[str, Any]) -> None:
        _check(group)

    def _update(self) -> None:
        for group in self.param_groups:
            self._step(group)

    def _step(self, group: dict[str, Any]) -> None:
        members = [
            Member(param, gradient, self._momentum(param, gradient))
            for param in group["params"]
            if (gradient := _gradient(param)) is not None
        ]
        orthogonalize = orthogonalizer(group)
        for some in group_by_shape(members, group["ns_dtype"]):
            direction = _direction(some, group).to(group["ns_dtype"])
            found = orthogonalize(wide_in_memory(direction))
            _descend([one.param for one in some], found, group)
        group["draws"] += 1

    def _momentum(self, param: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return state["momentum_buffer"]


def _direction(members: list[Member], group: Mapping[str, Any]) -> Tensor:
    """The momentum moved on, and M [B, m, n]."""
    memory, blocks = group["momentum"], group["blocks"]
    momenta, gradients = [one.momentum for one in members], [one.gradient for one in members]
    if group["momentum_form"] == "polyak":
        _foreach_mul_(momenta, memory)
        _foreach_add_(momenta, gradients)
    else:
        _foreach_lerp_(momenta, gradients, 1 - memory)
    ahead = stacked(momenta, blocks)
    if not group["nesterov"]:
        return ahead
    if group["momentum_form"] == "polyak":
        return stacked(gradients, blocks).add(ahead, alpha=memory)
    return stacked(gradients, blocks).lerp(ahead, memory)


def _descend(params: list[Tensor], found: Tensor, group: Mapping[str, Any]) -> None:
    """X <- (1 - eta lambda) X - eta s O for parameters of one shape, O [B, m, n] in their order."""
    lr, shape, blocks = float(group["lr"]), params[0].shape, group["blocks"]
    if torch.promote_types(found.dtype, params[0].dtype) == params[0].dtype:
        found = found.to(params[0].dtype)  # exact, and spares a conversion for each tensor
    directions = restored(found, shape, blocks)
    adjusted = lr * _ADJUSTMENTS[group["adjust_lr_fn"]](*matrix_shape(shape, blocks))
    _foreach_mul_(params, 1 - lr * group["weight_decay"])
    _foreach_add_(params, directions, alpha=-adjusted)


def _gradient(param: Tensor) -> Tensor | None:
    gradient = param.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise InputError(
            f"A parameter of shape {tuple(param.shape)} has a sparse gradient: give it to another "
            "optimizer, or make its layer dense (nn.Embedding(..., sparse=False))."
        )
    return gradient


def _check(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise InputError(f"{name} is a tensor of {value.numel()} values: give one value.")
        with Guard(name, value):
            if not float(value) >= 0:
                raise InputError(f"{name} is {value}: choose {name} >= 0.")
    _check_names(group)
    with Guard("ns_steps", group["ns_steps"]):
        int(group["ns_steps"])
    with Guard("ns_coefficients", group["ns_coefficients"]):
        schedule(group["ns_coefficients"], group["ns_steps"])
    with Guard("orthogonalizer", group["orthogonalizer"]):
        check_orthogonalizer(group)
    for param in group["params"]:
        _check_shape(param, group["blocks"])


def _check_names(group: Mapping[str, Any]) -> None:
    adjust, form, dtype = group["adjust_lr_fn"], group["momentum_form"], group["ns_dtype"]
    if not isinstance(adjust, str | None) or adjust not in _ADJUSTMENTS:
        names = ", ".join(repr(name) for name in _ADJUSTMENTS)
        raise InputError(f"adjust_lr_fn is {shown(adjust)}: use one of {names}.")
    if not isinstance(form, str) or form not in ("ema", "polyak"):
        raise InputError(f"momentum_form is {shown(form)}: use 'ema' or 'polyak'.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"ns_dtype is {shown(dtype)}: use a floating dtype, as torch.float32.")


def _check_shape(param: Tensor, blocks: int) -> None:
    shape = tuple(param.shape)
    if param.ndim < 2:
        raise InputError(
            f"Muon takes matrices, not a parameter of shape {shape}: use MuonWithAux with "
            "param_groups_for_muon(model), which gives such ones to another optimizer."
        )
    if param.is_complex():
        raise InputError(f"A parameter of shape {shape} is complex: give Muon real ones.")
    if blocks < 1 or max(shape[0], param.shape[1:].numel()) % blocks:
        raise InputError(
            f"A matrix of shape {shape} has no {blocks} equal blocks: set blocks to 1."
        )
