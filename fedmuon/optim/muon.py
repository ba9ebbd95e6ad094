"""Muon as a torch optimizer: orthogonalized momentum with decoupled weight decay.

Recipes of federated runs consist of links (`links.py`) instead.

    B <- mu B + (1 - mu) G            averages, as in torch.optim.Muon and Stability note, eq. (1)
    M  = (1 - mu) G + mu B            with Nesterov; else M = B
    X <- (1 - eta lambda) X - eta s(m, n) Orth(M)

In the Stability note, eqs. (1)-(3), M = B, s = 1 and lambda = 0. The paper Nesterov Muon replaces
the average B by the sum C (`polyak`):

    C <- mu C + G
    M  = G + mu C                     with Nesterov; else M = C

C and the second M are 1 / (1 - mu) times B and the first M. If Orth ignores scale, both forms take
the same steps. A map with a regularization, or with eps above the norm of M, depends on scale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import (
    Tensor,
    _foreach_add,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_lerp,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_lerp_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
)
from torch._compile import _disable_dynamo
from torch.optim import AdamW, Optimizer

from fedmuon import orthogonalize as maps
from fedmuon.core.device import without_checks
from fedmuon.core.errors import Guard, InputError, shown
from fedmuon.core.rng import Draw, generator
from fedmuon.core.threads import without_autocast
from fedmuon.optim.links import ADJUSTMENTS, POLARGRAD, even_rows
from fedmuon.optim.shards import aligned, like, local, part_of, require_matrix, whole
from fedmuon.orthogonalize.coefficients import Coefficients, divisor_floor
from fedmuon.orthogonalize.lipschitz_constants import positive_schedule

__all__ = ["NAMED", "Muon", "MuonWithAux", "Orthogonalizer"]

Orthogonalizer = Callable[[Tensor], Tensor]  # [B, m, n] -> [B, m, n]

# Orthogonalizers by name, with the default regularization of `fedmuon run`.
NAMED: dict[str, Orthogonalizer] = {
    "smoothed-polar": partial(maps.smoothed_polar, lam=1e-4),
    "clipped-sign": partial(maps.clipped_sign, gamma=0.1),
    "exact-sign": maps.exact_sign,
}
RANDOMIZED = "randomized-polar"
_NAMES = ("newton-schulz", RANDOMIZED, *NAMED)
_ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {  # names of torch.optim.Muon
    None: ADJUSTMENTS["original"],
    "original": ADJUSTMENTS["original"],
    "match_rms_adamw": ADJUSTMENTS["match-rms"],
    "scion": ADJUSTMENTS["scion"],
    POLARGRAD: ADJUSTMENTS[POLARGRAD],
}
_STACKED_ENTRIES = {"cpu": 2**18, "cuda": 2**26}  # largest useful stack of matrices, in entries
_ALONE = 256  # from this side length on, oneDNN is faster for half-precision matrices one by one


class PortableOptimizer(Optimizer):
    """An optimizer whose parameter groups may contain functions as options.

    Saved states do not contain these functions, and loading a state keeps the current functions.
    You can load a state that lacks some options. These options keep their current values.
    """

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Parameters without a gradient do not change.

        Inside `torch.autocast`, the closure runs with autocast. The update of the parameters runs
        without autocast.

        Args:
            closure: Function that computes the loss and its gradients again, as for any torch
                optimizer.

        Returns:
            The loss that the closure returns, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            self._update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. After an error, the group is not added.

        Args:
            param_group: The parameters and their options.
        """
        super().add_param_group(param_group)
        try:
            self._accept(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _accept(self, group: dict[str, Any]) -> None:
        raise NotImplementedError  # subclasses check the group

    def _update(self) -> None:
        raise NotImplementedError  # subclasses update the parameters from their gradients

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, without the options that are functions.

        Data types are text, such as "torch.float32", because torch.distributed.checkpoint saves
        only numbers, text and tensors.
        """
        state = super().state_dict()
        groups = [
            {
                key: str(value) if isinstance(value, torch.dtype) else value
                for key, value in group.items()
                if not callable(value)
            }
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch. Options that the saved groups lack keep their current values.

        Args:
            state_dict: The result of `state_dict()`.
        """
        saved = [
            {key: _dtype_of(value) for key, value in group.items()}
            for group in state_dict["param_groups"]
        ]
        if len(saved) == len(self.param_groups):
            saved = [
                {**{key: value for key, value in current.items() if key != "params"}, **group}
                for current, group in zip(self.param_groups, saved, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": saved})


def _dtype_of(value: Any) -> Any:
    """Return the data type that a saved option names, or the option itself."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


class Muon(PortableOptimizer):
    """An extended torch.optim.Muon, for tensors with two or more axes and any orthogonalizer.

    The first nine arguments and their defaults are those of torch.optim.Muon. With
    `ns_dtype=torch.bfloat16`, the trajectory is also the same. A tensor [out, ...] is the matrix
    [out, -1]. If a group has `blocks: k`, Muon cuts each matrix of the group into k pieces along
    the longer side. If a group has `rows: (r_1, ..., r_k)`, Muon cuts each matrix into k pieces
    with these numbers of rows, such as attention heads. If a group has `transposed: True`, the
    matrices are stored as [in, out], so that columns count as rows. Even with torch.compile, `step`
    runs uncompiled.

    If several processes divide a matrix with `torch.distributed.fsdp.fully_shard`, each process
    gathers the whole matrix, computes the whole update, and applies its part. Create the optimizer
    after `fully_shard`.

    On a CPU, NaN in a gradient raises an error. On a GPU, NaN in a gradient makes the parameters
    NaN, as with torch's optimizers, because a check would have to wait for the GPU.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Step size η.
        weight_decay: The coefficient λ of the decoupled weight decay.
        momentum: The momentum coefficient μ.
        nesterov: Whether the momentum has Nesterov's look-ahead.
        ns_coefficients: Newton–Schulz coefficients: (a, b, c), a list with one such step per
            iteration, or a name in `fedmuon.orthogonalize.COEFFICIENTS`.
        eps: Lower bound of the divisor in Newton–Schulz.
        ns_steps: Number of Newton–Schulz steps.
        adjust_lr_fn: Scale s(m, n) of a step. "original", "match_rms_adamw" and None mean the same
            as in torch; "scion" is sqrt(m/n) (arXiv:2502.07529), and "polargrad" is <M, Orth(M)>
            (arXiv:2505.21799).
        ns_dtype: The dtype in which the orthogonalizer computes.
        ns_normalization: "max" as in torch, "plus", "unit", or "aol" (Turbo-Muon), as for
            `fedmuon.orthogonalize.newton_schulz`.
        orthogonalizer: Replacement for Newton–Schulz: a function on stacks `[B, m, n]`, or one of
            the names "newton-schulz", "smoothed-polar", "clipped-sign", "exact-sign" and
            "randomized-polar". A function must not change its argument.
        momentum_form: "ema" averages the gradients, and "polyak" sums the gradients.
        row_memory: The coefficient beta_2 of NorMuon (arXiv:2510.05491), as in
            `fedmuon.links.normalize_rows`, or 0 without scaling of rows.
        rank: Target rank, only for randomized-polar.
        oversample: Number of extra columns of the sketch.
        power: Number of power iterations.
        sketch: "gaussian" or "kaczmarz".
        seed: Seed of the sketches. The state dictionary stores the number of the next sketch.

    Raises:
        InputError: If an option is out of range, or a parameter is complex or has fewer than two
            axes.

    Example:
        >>> import torch
        >>> from fedmuon.optim import Muon
        >>> weight = torch.nn.Parameter(torch.zeros(4, 4))
        >>> optimizer = Muon([weight], lr=0.1, weight_decay=0.0)
        >>> torch.trace(weight).backward()
        >>> optimizer.step()
        >>> bool((weight.diagonal() < 0).all())
        True
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
        ns_normalization: str = "max",
        orthogonalizer: Orthogonalizer | str | None = None,
        momentum_form: str = "ema",
        row_memory: float = 0.0,
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
            "ns_normalization": ns_normalization,
            "orthogonalizer": orthogonalizer,
            "momentum_form": momentum_form,
            "row_memory": row_memory,
            "rank": rank,
            "oversample": oversample,
            "power": power,
            "sketch": sketch,
            "seed": seed,
            "draws": 0,  # number of steps, and therefore of sketches, so far
            "blocks": 1,
            "rows": (),
            "transposed": False,
        }
        with Guard("params", params):
            super().__init__(params, defaults)

    def _accept(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "momentum", "eps"):
            value = group[name]
            if isinstance(value, Tensor) and value.numel() != 1:
                raise InputError(
                    f"{name} is a tensor of {value.numel()} values, but it must be one value. "
                    "Pass a number."
                )
            with Guard(name, value):
                if not float(value) >= 0:
                    raise InputError(f"{name} is {value}, but it must be 0 or more.")
        adjust, form, dtype = group["adjust_lr_fn"], group["momentum_form"], group["ns_dtype"]
        if not isinstance(adjust, str | None) or adjust not in _ADJUSTMENTS:
            names = ", ".join(repr(name) for name in _ADJUSTMENTS)
            raise InputError(f"adjust_lr_fn is {shown(adjust)}, but it must be one of {names}.")
        if not isinstance(form, str) or form not in ("ema", "polyak"):
            raise InputError(f"momentum_form is {shown(form)}, but it must be 'ema' or 'polyak'.")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"ns_dtype is {shown(dtype)}, but it must be a floating-point dtype. Use "
                "torch.float32, for example."
            )
        _check_row_memory(group["row_memory"], adjust)
        with Guard("ns_steps", group["ns_steps"]):
            int(group["ns_steps"])
        with Guard("ns_coefficients", group["ns_coefficients"]):
            positive_schedule(group["ns_coefficients"], group["ns_steps"])
        with Guard("ns_normalization", group["ns_normalization"]):
            divisor_floor(1.0, group["ns_normalization"])
        with Guard("orthogonalizer", group["orthogonalizer"]):
            check_orthogonalizer(group)
        for param in group["params"]:
            shape, blocks = tuple(param.shape), group["blocks"]
            if param.ndim < 2:
                raise InputError(
                    f"Muon accepts only matrices, but a parameter has shape {shape}. Use "
                    "MuonWithAux with param_groups_for_muon(model), which passes other "
                    "parameters to another optimizer."
                )
            if param.is_complex():
                raise InputError(
                    f"A parameter of shape {shape} is complex, but Muon accepts only real "
                    "parameters. Pass this parameter to another optimizer."
                )
            _check_pieces(group, shape)
            longer = max(shape[0], param.shape[1:].numel())
            if blocks < 1:
                raise InputError(f"blocks is {blocks}, but it must be an integer of 1 or more.")
            if longer % blocks:
                raise InputError(
                    f"A matrix of shape {shape} cannot be divided into {blocks} equal blocks, "
                    f"because {longer} is not a multiple of {blocks}. Set blocks to 1, or to a "
                    f"divisor of {longer}."
                )

    def _update(self) -> None:
        for group in self.param_groups:
            members = self._members(group)
            orthogonalize = map_of(group)
            for batch in group_by_shape(members, group["ns_dtype"]):
                params = [member.param for member in batch]
                states = [self.state[param] for param in params]
                directions = [whole(direction) for direction in _directions(batch, group)]
                steps, scale = _steps(directions, states, group, orthogonalize)
                _descend(params, steps, scale, group)
            group["draws"] += 1

    def _members(self, group: Mapping[str, Any]) -> list["Member"]:
        """Return the parameters that have a gradient, with their momenta."""
        members = []
        for param in group["params"]:
            if (gradient := param.grad) is None:
                continue
            require_matrix(param)
            if gradient.layout != torch.strided:
                raise InputError(
                    f"A parameter of shape {tuple(param.shape)} has a sparse gradient, which "
                    "Muon does not support. Use another optimizer for this parameter, or "
                    "make its layer dense (nn.Embedding(..., sparse=False))."
                )
            gradient = aligned(gradient, param)
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            members.append(Member(param, gradient, state["momentum_buffer"]))
        return members


class MuonWithAux(PortableOptimizer):
    """Muon for hidden matrices and another optimizer for other parameters, as one torch optimizer.

    For schedulers, GradScaler and state dictionaries, this is one optimizer with all groups.

    Args:
        groups: The result of `param_groups_for_muon(model)`, or your own groups. Groups with
            `use_muon: True` go to Muon, and groups with `use_muon: False` to `auxiliary`. Options
            in a group override `muon` and `aux`.
        muon: Options of Muon, such as `{"lr": 0.02}`.
        aux: Options of the auxiliary optimizer, such as `{"lr": 3e-4}`.
        auxiliary: Class of the auxiliary optimizer.

    Raises:
        InputError: If no group has `use_muon: True`, or a group has no valid `use_muon`.

    Example:
        >>> import torch
        >>> from fedmuon.optim import MuonWithAux, param_groups_for_muon
        >>> sizes = (8, 16), (16, 16), (16, 2)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        >>> groups = param_groups_for_muon(model)
        >>> optimizer = MuonWithAux(groups, muon={"lr": 0.02}, aux={"lr": 3e-4})
        >>> [(group["use_muon"], group["lr"]) for group in optimizer.param_groups]
        [(True, 0.02), (False, 0.0003)]
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        muon: Mapping[str, Any] | None = None,
        aux: Mapping[str, Any] | None = None,
        auxiliary: type[Optimizer] = AdamW,
    ) -> None:
        copies = [dict(group) for group in groups]
        if not any(_for_muon(group) for group in copies):
            raise InputError(
                "No parameter group has use_muon = True, so Muon would update nothing. Pass "
                "param_groups_for_muon(model), or set use_muon = True in a group of matrices."
            )
        self._parts: dict[bool, Optimizer] = {}
        self._make = {True: (Muon, dict(muon or {})), False: (auxiliary, dict(aux or {}))}
        super().__init__(copies, {})

    def _accept(self, group: dict[str, Any]) -> None:
        """Add the group itself, not a copy, to Muon or to the auxiliary optimizer.

        Both use the state of this object.
        """
        which = _for_muon(group)
        if which in self._parts:
            self._parts[which].add_param_group(group)
            return
        make, options = self._make[which]
        self._parts[which] = make([group], **options)
        self._parts[which].state = self.state

    def _update(self) -> None:
        for part in self._parts.values():
            part.step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts, "_make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pass the loaded groups and the loaded state to Muon and to the auxiliary optimizer."""
        super().__setstate__(state)
        for which, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if _for_muon(group) == which]


def _for_muon(group: Mapping[str, Any]) -> bool:
    if not isinstance(group.get("use_muon"), bool):
        setting = f"use_muon = {shown(group['use_muon'])}" if "use_muon" in group else "no use_muon"
        raise InputError(
            f"A parameter group has {setting}, but each group needs use_muon = True or use_muon = "
            "False. Set use_muon, or pass param_groups_for_muon(model)."
        )
    return group["use_muon"]


# The parts of a step of Muon


def _directions(members: list["Member"], group: Mapping[str, Any]) -> list[Tensor]:
    """Update the momenta of the members, and return their directions M, divided as they are."""
    memory = group["momentum"]
    momenta = [local(member.momentum) for member in members]
    gradients = [local(member.gradient) for member in members]
    if group["momentum_form"] == "polyak":
        _foreach_mul_(momenta, memory)
        _foreach_add_(momenta, gradients)
    else:
        _foreach_lerp_(momenta, gradients, 1 - memory)
    if not group["nesterov"]:
        ahead = momenta
    elif group["momentum_form"] == "polyak":
        ahead = _foreach_add(gradients, momenta, alpha=memory)
    else:
        ahead = _foreach_lerp(gradients, momenta, memory)
    return [like(part, member.param) for part, member in zip(ahead, members, strict=True)]


def _steps(
    directions: list[Tensor],
    states: list[dict[str, Any]],
    group: Mapping[str, Any],
    orthogonalize: Orthogonalizer,
) -> tuple[list[Tensor], float]:
    """Return the steps of parameters of equal shape, and the scale s of all these steps."""
    blocks = group["blocks"]
    if group["transposed"]:
        directions = [direction.mT for direction in directions]
    if group["rows"]:
        steps = _steps_of_rows(directions, states, group, orthogonalize)
        factor = 1.0
    else:
        stack = _images(stack_matrices(directions, blocks), states, group, orthogonalize)
        steps = _unstacked(stack, directions[0].shape, blocks)
        adjust = _ADJUSTMENTS[group["adjust_lr_fn"]]
        factor = adjust(*matrix_shape(directions[0].shape, blocks))
    return ([step.mT for step in steps] if group["transposed"] else steps), factor


def _steps_of_rows(
    directions: list[Tensor],
    states: list[dict[str, Any]],
    group: Mapping[str, Any],
    orthogonalize: Orthogonalizer,
) -> list[Tensor]:
    """Return the scaled steps of parameters that are cut into pieces with `rows` rows each.

    All pieces with the same number of rows are one stack.
    """
    shape = directions[0].shape
    pieces = [direction.flatten(1).split(group["rows"]) for direction in directions]
    images: dict[int, Iterator[Tensor]] = {}
    for size in dict.fromkeys(group["rows"]):
        stack = torch.stack([piece for parts in pieces for piece in parts if len(piece) == size])
        image = _images(stack, states, group, orthogonalize, f"row_squares_{size}")
        scale = _ADJUSTMENTS[group["adjust_lr_fn"]](size, stack.shape[-1])
        images[size] = iter((image * scale).unbind())
    return [
        torch.cat([next(images[len(piece)]) for piece in parts]).reshape(shape) for parts in pieces
    ]


def _images(
    direction: Tensor,
    states: list[dict[str, Any]],
    group: Mapping[str, Any],
    orthogonalize: Orthogonalizer,
    key: str = "row_squares",
) -> Tensor:
    """Return the orthogonalized stack [B, m, n]. Matrices of one parameter are consecutive."""
    stored, direction = direction.dtype, direction.to(group["ns_dtype"])
    if len(direction) > 1 and direction.shape[1] > direction.shape[2]:
        # Matrix products read several tall matrices faster as [B, n, m] in memory.
        direction = direction.mT.contiguous().mT
    update = orthogonalize(direction)
    if group["adjust_lr_fn"] == POLARGRAD:
        work = torch.promote_types(update.dtype, torch.float32)
        products = direction.to(work) * update.to(work)
        update = update * products.sum((-2, -1), keepdim=True).to(update.dtype)
    if group["row_memory"]:
        update = _even_rows(update, states, group["row_memory"], key)
    exact = torch.promote_types(update.dtype, stored) == stored
    return update.to(stored) if exact else update  # avoids a conversion per tensor


def map_of(group: Mapping[str, Any]) -> Orthogonalizer:
    """Return the orthogonalizer that the options of a parameter group select."""
    orthogonalizer = group["orthogonalizer"]
    if isinstance(orthogonalizer, str) and orthogonalizer == RANDOMIZED:
        return partial(_randomized, group=group)
    if isinstance(orthogonalizer, str) and orthogonalizer != "newton-schulz":
        return NAMED[orthogonalizer]
    if orthogonalizer is None or isinstance(orthogonalizer, str):
        return partial(_newton_schulz, group=group)
    guard = Guard("orthogonalizer", orthogonalizer)

    def custom(stack: Tensor) -> Tensor:
        with guard:
            result = orthogonalizer(stack)
            if not isinstance(result, Tensor) or result.shape != stack.shape or result.is_meta:
                raise InputError(
                    f"the orthogonalizer returns {shown(getattr(result, 'shape', result))} for "
                    f"matrices of shape {tuple(stack.shape)}. Return a tensor of shape "
                    f"{tuple(stack.shape)}."
                )
            return result

    return custom


def _newton_schulz(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    options = steps, coefficients, group["eps"], group["ns_normalization"]
    with without_checks() if stack.dtype != torch.float16 else nullcontext():
        return maps.newton_schulz(stack, *options)


def _randomized(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalize with a sketch of the shorter side (Nesterov Muon, Algorithms 1 and 2).

    If the sketch is at least as wide as the shorter side, the function uses Newton–Schulz without a
    sketch. The sketch depends only on the seed, the step and the shape. A resumed run therefore
    uses the same sketches.
    """
    short, long = sorted(stack.shape[-2:])
    if group["rank"] + group["oversample"] >= short:
        return _newton_schulz(stack, group)
    draw = generator(group["seed"], Draw.SKETCH, step=group["draws"], block=long * 2**20 + short)
    return maps.randomized_polar(
        stack,
        **{name: group[name] for name in ("rank", "oversample", "power", "sketch")},
        steps=group["ns_steps"],
        coefficients=group["ns_coefficients"],
        generator=draw,
        axis="rows" if stack.shape[-2] < stack.shape[-1] else "columns",
    )


def _even_rows(orthogonal: Tensor, states: list[dict[str, Any]], memory: float, key: str) -> Tensor:
    """Return NorMuon's step [B, m, n] for orthogonalized matrices O [B, m, n].

    The step preserves the norm of each matrix. Matrices of one parameter are consecutive. The
    parameter's state contains the running mean squares v [matrices, m, 1] of their rows.
    """
    squares = orthogonal.square().mean(-1, keepdim=True)
    for state, chunk in zip(states, squares.chunk(len(states)), strict=True):
        if key not in state:
            state[key] = torch.zeros_like(chunk)
        state[key].lerp_(chunk.to(state[key].dtype), 1 - memory)
    rows = torch.cat([state[key] for state in states]).to(orthogonal.dtype)
    return even_rows(orthogonal, rows)


def _check_pieces(group: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Reject pieces that are not the rows of the matrix."""
    sizes, blocks = group["rows"], group["blocks"]
    if group["transposed"] and len(shape) != 2:
        raise InputError(
            f"transposed is True for a parameter of shape {shape}, but only a parameter with two "
            "axes can be transposed. Leave out transposed."
        )
    if not sizes:
        return
    rows = shape[1] if group["transposed"] else shape[0]
    if sum(sizes) != rows or min(sizes) < 1:
        raise InputError(
            f"rows is {shown(sizes)} for a parameter of shape {shape}, but the sum of rows must be "
            f"{rows}. Set rows to numbers of 1 or more with this sum."
        )
    if blocks != 1:
        raise InputError(
            f"blocks is {blocks} and rows is {shown(sizes)}, but both divide the matrix into "
            "pieces. Use one of them."
        )


def _check_row_memory(memory: Any, adjust: str | None) -> None:
    with Guard("row_memory", memory):
        if not 0 <= float(memory) < 1:
            raise InputError(f"row_memory is {memory}, but it must be at least 0 and below 1.")
    if memory and adjust == POLARGRAD:
        raise InputError(
            f"row_memory = {memory} cannot be combined with adjust_lr_fn = 'polargrad', because "
            "polargrad changes the scale of the averaged row norms in each step. Set row_memory "
            "= 0, or use another adjust_lr_fn."
        )


def _descend(
    params: list[Tensor], steps: list[Tensor], scale: float, group: Mapping[str, Any]
) -> None:
    """Apply X <- (1 - eta lambda) X - eta s O to parameters of the same shape."""
    lr = float(group["lr"])
    parts = [part_of(step, param) for step, param in zip(steps, params, strict=True)]
    targets = [local(param) for param in params]
    _foreach_mul_(targets, 1 - lr * group["weight_decay"])
    _foreach_add_(targets, parts, alpha=-(lr * scale))


# Parameters as stacks of matrices. Many small products run faster as one batched product, as long
# as their operands fit into the cache. Large products use the whole machine, so stacking them would
# only add a copy.


class Member(NamedTuple):
    """A parameter, its gradient and its momentum, all with the same shape."""

    param: Tensor
    gradient: Tensor
    momentum: Tensor


def matrix_shape(shape: torch.Size, blocks: int = 1) -> tuple[int, int]:
    """Return the shape (m, n) of the matrices into which a tensor [out, ...] is cut."""
    rows, columns = shape[0], shape[1:].numel()
    return (rows // blocks, columns) if rows >= columns else (rows, columns // blocks)


def as_matrices(tensor: Tensor, blocks: int = 1) -> Tensor:
    """View a tensor [out, ...] as a stack of matrices, cut from [out, -1] along the longer side."""
    matrix = tensor.flatten(1)
    rows, columns = matrix.shape
    if rows >= columns:
        return matrix.reshape(blocks, rows // blocks, columns)
    return matrix.reshape(rows, blocks, columns // blocks).transpose(0, 1)


def stack_matrices(tensors: list[Tensor], blocks: int) -> Tensor:
    """Stack tensors of equal shape as matrices [B, m, n]."""
    if len(tensors) == 1:
        return as_matrices(tensors[0], blocks)
    if blocks == 1:
        return torch.stack(tensors).flatten(2)
    return torch.cat([as_matrices(tensor, blocks) for tensor in tensors])


def _unstacked(stack: Tensor, shape: torch.Size, blocks: int) -> list[Tensor]:
    """Return tensors of this shape from their stack of matrices, as `stack_matrices` makes it."""
    if blocks == 1:
        return [*(stack if len(shape) == 2 else stack.reshape(len(stack), *shape)).unbind()]
    tall = shape[0] >= shape[1:].numel()
    return [(part if tall else part.transpose(0, 1)).reshape(shape) for part in stack.split(blocks)]


def group_by_shape(members: Iterable[Member], work: torch.dtype) -> Iterator[list[Member]]:
    """Yield groups of members with equal shape, dtype and device."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        alike.setdefault(
            (member.param.shape, member.gradient.dtype, member.gradient.device), []
        ).append(member)
    for (shape, _, device), group in alike.items():
        entries = _STACKED_ENTRIES.get(device.type, _STACKED_ENTRIES["cuda"])
        size = max(1, entries // max(1, shape.numel()))
        side = min(shape[0], shape[1:].numel())
        if device.type == "cpu" and work.itemsize == 2 and side >= _ALONE:
            size = 1
        for start in range(0, len(group), size):
            yield group[start : start + size]


def check_orthogonalizer(group: Mapping[str, Any]) -> None:
    """Reject unknown names, and sketch options that are out of range."""
    orthogonalizer = group["orthogonalizer"]
    if isinstance(orthogonalizer, str) and orthogonalizer not in _NAMES:
        names = ", ".join(_NAMES)
        raise InputError(
            f"The orthogonalizer {orthogonalizer!r} is unknown. Use a function, or one of {names}."
        )
    if (
        orthogonalizer is not None
        and not isinstance(orthogonalizer, str)
        and not callable(orthogonalizer)
    ):
        raise InputError(
            f"orthogonalizer is {shown(orthogonalizer)}, but it must be a name or a function "
            "on matrices [B, m, n]."
        )
    if not isinstance(orthogonalizer, str) or orthogonalizer != RANDOMIZED:
        return
    if group["ns_dtype"].itemsize < 4:
        raise InputError(
            f"ns_dtype is {group['ns_dtype']}, but randomized-polar needs a QR factorization, "
            "which does not exist for this dtype. Set ns_dtype to torch.float32."
        )
    if group["sketch"] not in ("gaussian", "kaczmarz"):
        raise InputError(f"sketch is {group['sketch']!r}, but it must be 'gaussian' or 'kaczmarz'.")
    for name, minimum in (("rank", 1), ("oversample", 0), ("power", 0), ("seed", 0)):
        if not isinstance(group[name], int) or group[name] < minimum:
            raise InputError(
                f"{name} is {group[name]!r}, but it must be an integer of {minimum} or more."
            )
