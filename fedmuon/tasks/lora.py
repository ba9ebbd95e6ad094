"""Adapters of low rank beside a decoder that stays as it is (LoRA: Hu et al. 2022).

Every projection to queries, keys and values, x W + b, becomes x W + b + (x A) B with A [d, r] and
B [r, 3 d], of which A and B alone are learned: 4 d r numbers a block in place of 12 d^2. B begins
at 0, so that the first outputs are the decoder's; the paper's factor alpha / r is 1. Both are
linear layers, whose per-example gradients come, as any's, from what they read and their slopes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Params
from fedmuon.tasks.decoder import Decoder, fitted
from fedmuon.tasks.layers import fresh

INNER = ".base"  # in the names of what is fixed within an adapted projection


class Adapted(nn.Module):
    """A projection [d, p] of transformers', and what is learned beside it."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        inner, outer = base.get_parameter("weight").shape
        self.base = base
        self.down = nn.Linear(inner, rank, bias=False)
        self.up = nn.Linear(rank, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, d] -> [n, T, p]."""
        return self.base(x) + self.up(self.down(x))


def adapted(
    network: Decoder, rank: int, weights: Mapping[str, np.ndarray], like: Tensor
) -> Decoder:
    """The decoder with the stored weights as buffers, of the type and on the device of `like`, and
    with adapters on `meta`; it is changed itself."""
    width = network.transformer.wte.weight.shape[1]
    if rank > width:
        raise InputError(
            f"[task] lora-rank = {rank} is above width = {width}: adapters of a rank so high would "
            "hold more than what they stand beside"
        )
    stored = fitted(weights, network)
    with torch.device("meta"):
        for block in network.transformer.h:
            block.attn.c_attn = Adapted(block.attn.c_attn, rank).to(like.dtype)
    _fix(network, {name: torch.as_tensor(value).to(like) for name, value in stored.items()})
    return network


def beside_zero(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The first adapters: A by torch's law for linear layers, B = 0."""
    drawn = fresh(network, rng)
    return {name: 0 * v if name.endswith("up.weight") else v for name, v in drawn.items()}


def folded(network: nn.Module, params: Params) -> Params:
    """The parameters of a decoder without adapters that computes the same: W + A B in place of W;
    `params` themselves where there are no adapters."""
    layers = {name: one for name, one in network.named_modules() if isinstance(one, Adapted)}
    if not layers:
        return params
    fixed = {name: value for name, value in network.named_buffers() if not value.is_meta}
    for name in layers:
        down, up = (params[f"{name}.{key}.weight"] for key in ("down", "up"))
        whole = f"{name}{INNER}.weight"
        fixed[whole] = fixed[whole] + (up @ down).mT
    return {name.replace(INNER, ""): value for name, value in fixed.items()}


def _fix(network: nn.Module, numbers: Mapping[str, Tensor]) -> None:
    """Parameters that have numbers become buffers; tied ones stay one."""
    held = {id(param): name for name, param in network.named_parameters()}
    for layer in network.modules():
        for key, param in list(layer.named_parameters(recurse=False)):
            number = numbers.get(held[id(param)].replace(INNER, ""))
            if number is not None:
                delattr(layer, key)
                layer.register_buffer(key, number)
