"""LoRA-Muon: Muon steps on the factors of low-rank adapters (arXiv:2606.12921).

With the factors A [r, n] and B [m, r] of an adapter B A, and their momenta m_A and m_B,

    R_A = (A A^T)^(-1/2),   R_B = (B^T B)^(-1/2),   s = sqrt(1 - lr weight_decay)
    D_B = Orth(m_B R_A) R_A / 2,   D_A = R_B Orth(R_B m_A) / 2
    B <- s B - lr D_B / s,   A <- s A - lr D_A / s.

The product changes by -lr (D_B A + B D_A) to first order, and shrinks by 1 - lr weight_decay. If A
and B become T^-1 A and B T with an invertible matrix T, this change of the product stays the same.
The momenta become T^T m_A and m_B T^-T. R_A becomes Q^T R_A T for an orthogonal matrix Q, so that
Orth(m_B R_A) becomes Orth(m_B R_A) Q, and D_B becomes D_B T. D_A becomes T^-1 D_A in the same way.

An eigenvalue of A A^T or B^T B below `floor` times the largest one counts as `floor` times the
largest one. If this happens, the change stays the same only for multiples T of orthogonal matrices.
A factor that is 0, such as B at the start of LoRA, has R = 0. The gradient of the other factor is
then 0, too, so that this factor waits for one step.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedmuon.core.errors import Guard, InputError
from fedmuon.optim.adapters import Pair, factors_of, find_pairs, require_pairs
from fedmuon.optim.chain import Context, Link, Number, State, per_replica
from fedmuon.optim.muon import Orthogonalizer, PortableOptimizer, check_orthogonalizer, map_of
from fedmuon.optim.shards import aligned, local, part_of, require_matrix, whole
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.spectral import eigenpairs
from fedmuon.tasks.base import Params

__all__ = ["LoRAMuon"]

UNNAMED = (
    "LoRAMuon needs the names of parameters. Pass pairs (name, parameter), such as "
    "model.named_parameters()."
)
FLOOR = 1e-6  # float32 rounds the eigenvalues of A A^T to about 1e-7 times the largest one


def inverse_root(gram: Tensor, floor: float = FLOOR) -> Tensor:
    """Return S^(-1/2) for positive semidefinite matrices S [..., r, r], or 0 for S = 0.

    Eigenvalues below `floor` times the largest eigenvalue are raised to this value.
    """
    values, vectors = eigenpairs(gram, gram.double)
    largest = values[..., -1:]
    raised = torch.where(largest > 0, values.maximum(floor * largest), torch.inf)
    return ((vectors * raised.rsqrt()[..., None, :]) @ vectors.mT).to(gram.dtype)


def roots(a: Tensor, b: Tensor, floor: float = FLOOR) -> tuple[Tensor, Tensor]:
    """Return R_A = (A A^T)^(-1/2) and R_B = (B^T B)^(-1/2) for A [..., r, n] and B [..., m, r]."""
    return inverse_root(a @ a.mT, floor), inverse_root(b.mT @ b, floor)


# Links


def whitened(orthogonal: Link, chosen: Callable[[str], bool], floor: float = FLOOR) -> Link:
    """Return a link that orthogonalizes the momenta of factors as LoRA-Muon does.

    Args:
        orthogonal: The link that orthogonalizes.
        chosen: Function of a parameter name: whether `orthogonal` applies to this parameter.
            Factors for which it returns False, and parameters that are no factors, pass to
            `orthogonal` unchanged.
        floor: Smallest eigenvalue, divided by the largest one.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        whitening: dict[str, Callable[[Tensor], Tensor]] = {}
        for pair in require_pairs(context.params, "LoRA-Muon"):
            root_a, root_b = roots(*factors_of(context.params, pair), floor)
            whitening |= {pair.a: _from_left(root_b), pair.b: _from_right(root_a)}
        factors = [name for name in direction if name in whitening and chosen(name)]
        white = {name: whitening[name](direction[name]) for name in factors}
        images, after = orthogonal.update({**direction, **white}, state, context)
        return {**images, **{name: whitening[name](images[name]) / 2 for name in factors}}, after

    return replace(orthogonal, update=update)


def _from_left(root: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: (root @ value.flatten(2)).reshape(value.shape)


def _from_right(root: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: (value.flatten(2) @ root).reshape(value.shape)


def split_descent(plain: Link, lr: Number, decay: float, chosen: Callable[[str], bool]) -> Link:
    """Return a link like `plain`, which divides the weight decay of a product among its factors.

    A factor X with direction D becomes s X - lr D / s with s = sqrt(1 - lr decay), so that a step
    shrinks the product of both factors by 1 - lr decay. The step size includes the factor of the
    round.

    Args:
        plain: The link `descend` for all other parameters.
        lr: Step size, one number or one per replica [replicas].
        decay: Decoupled weight decay.
        chosen: Function of a parameter name: whether a factor with this name takes such steps.
    """

    def update(direction: Params, state: State, context: Context) -> tuple[Params, State]:
        names = {name for pair in find_pairs(context.params) for name in (pair.a, pair.b)}
        factors = {name: value for name, value in direction.items()
                   if name in names and chosen(name)}  # fmt: skip
        others = {name: value for name, value in direction.items() if name not in factors}
        moved, after = plain.update(others, state, context)
        for name, value in factors.items():
            rate = per_replica(lr, value) * context.factor
            root = (1 - rate * decay) ** 0.5
            moved[name] = (root - 1) * context.params[name] - rate / root * value
        return {name: moved[name] for name in direction}, after

    return replace(plain, update=update)


def require_decay(lr: Number, decay: float) -> None:
    """Raise an error if a step would shrink the product to 0 or beyond."""
    largest = float(torch.as_tensor(lr).max())
    if decay and not largest * decay < 1:
        raise InputError(
            f"lr = {largest:g} times weight-decay = {decay:g} is {largest * decay:g}, but it must "
            "be below 1, because LoRA-Muon multiplies adapters by 1 - lr weight-decay in each "
            "step. Lower weight-decay."
        )


# The torch optimizer


class LoRAMuon(PortableOptimizer):
    """LoRA-Muon for the low-rank adapters of a model, as a torch optimizer.

    Pass the named parameters of the model, because the names tell which factors belong together.
    Frozen parameters are left out, except if they are factors: then they keep their values, and the
    optimizer still reads them. The momentum is m <- momentum m + (1 - momentum) G.

    Source: LoRA-Muon (arXiv:2606.12921).

    Args:
        params: Pairs (name, parameter), such as `model.named_parameters()`.
        lr: Step size η.
        weight_decay: Decoupled weight decay of the product of both factors.
        momentum: The momentum coefficient β.
        orthogonalizer: A function on stacks `[B, m, n]`, or one of the names of
            `fedmuon.optim.Muon`. The default is Newton–Schulz.
        floor: Smallest eigenvalue of A Aᵀ and Bᵀ B, divided by the largest one. Smaller eigenvalues
            are raised to this value.
        ns_steps: Number of Newton–Schulz steps.
        ns_coefficients: Newton–Schulz coefficients, as for `fedmuon.optim.Muon`.
        eps: Lower bound of the divisor in Newton–Schulz.

    Raises:
        InputError: If an option is out of range, there is no pair of factors, or a trained
            parameter belongs to no pair.

    Example:
        >>> import torch
        >>> from fedmuon.optim import LoRAMuon
        >>> layer = torch.nn.ParameterDict(
        ...     {"lora_A": torch.ones(1, 3), "lora_B": torch.zeros(2, 1)}
        ... )
        >>> optimizer = LoRAMuon(layer.named_parameters(), lr=0.1)
        >>> (layer["lora_B"] @ layer["lora_A"]).sum().backward()
        >>> optimizer.step()
        >>> bool((layer["lora_B"] < 0).all())
        True
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        orthogonalizer: Orthogonalizer | str | None = None,
        floor: float = FLOOR,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
    ) -> None:
        if isinstance(params, nn.Module):
            raise InputError(UNNAMED)
        with Guard("params", params):
            entries = list(params)
        if not all(isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], str) for e in entries):
            raise InputError(UNNAMED)
        named = dict(entries)
        pairs = require_pairs(named, "LoRAMuon")
        factors = [name for pair in pairs for name in (pair.a, pair.b)]
        others = [
            name for name, param in named.items() if param.requires_grad and name not in factors
        ]
        if others:
            raise InputError(
                f"the parameter {others[0]} is trained, but it is no factor of a low-rank adapter. "
                "LoRAMuon trains only adapters. Freeze the parameter, or pass only the parameters "
                "of adapters and train the others with another optimizer."
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "floor": floor,
            "orthogonalizer": orthogonalizer, "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_normalization": "max",
            "ns_dtype": torch.float32, "rank": 32, "oversample": 10, "power": 1,
            "sketch": "gaussian", "seed": 0, "draws": 0,
        }  # fmt: skip
        super().__init__([(name, named[name]) for name in factors], defaults)

    def _accept(self, group: dict[str, Any]) -> None:
        for name, most in (("lr", None), ("weight_decay", None), ("momentum", 1), ("floor", 1)):
            value = group[name]
            with Guard(name, value):
                if not float(value) >= 0 or (most and not float(value) < most):
                    limit = f" and below {most}" if most else ""
                    raise InputError(f"{name} is {value}, but it must be at least 0{limit}.")
        require_decay(float(group["lr"]), float(group["weight_decay"]))
        with Guard("orthogonalizer", group["orthogonalizer"]):
            check_orthogonalizer(group)
        for param in group["params"]:
            require_matrix(param)
        if "param_names" not in group:
            raise InputError(UNNAMED)

    def _update(self) -> None:
        for group in self.param_groups:
            named = dict(zip(group["param_names"], group["params"], strict=True))
            orthogonal = map_of(group)
            for pair in find_pairs(named):
                self._step(pair, named, group, orthogonal)
            group["draws"] += 1

    def _step(
        self, pair: Pair, named: dict[str, Tensor], group: dict[str, Any], orthogonal: Any
    ) -> None:
        for name in (pair.a, pair.b):
            require_matrix(named[name])
        a, b = (whole(named[name].detach()).flatten(1) for name in (pair.a, pair.b))
        work = torch.promote_types(a.dtype, torch.float32)
        root_a, root_b = roots(a.to(work), b.to(work), group["floor"])
        lr = float(group["lr"])
        shrink = (1 - lr * group["weight_decay"]) ** 0.5
        for name, is_b in ((pair.b, True), (pair.a, False)):
            param = named[name]
            if param.grad is None:
                continue
            gradient, state = aligned(param.grad, param), self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"]
            local(momentum).lerp_(local(gradient), 1 - group["momentum"])
            matrix = whole(momentum).flatten(1).to(work)
            white = matrix @ root_a if is_b else root_b @ matrix
            image = orthogonal(white[None])[0].to(work)
            step = image @ root_a if is_b else root_b @ image
            step = part_of(step.reshape(param.shape).to(param.dtype), param)
            local(param).mul_(shrink).add_(step, alpha=-lr / (2 * shrink))
