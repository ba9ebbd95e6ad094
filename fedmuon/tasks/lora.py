"""Low-rank adapters for a decoder whose weights stay fixed (LoRA: Hu et al. 2022).

Every projection to queries, keys and values, x W + b, becomes x W + b + (x A) B with A [d, r] and
B [r, 3 d]. Only A and B are learned: 4 d r numbers per block instead of 12 d^2. B starts at 0, so
the first outputs are those of the decoder. The factor alpha / r of the paper is 1. Both adapters
are linear layers, so their per-example gradients are computed like those of other layers.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedmuon.core.errors import InputError
from fedmuon.tasks.base import Params
from fedmuon.tasks.decoder import Decoder, fitted
from fedmuon.tasks.models import fresh

INNER = ".base"  # part of the names of the fixed tensors within an adapted projection


class Adapted(nn.Module):
    """A fixed projection [d, p] of transformers, and its learned adapters."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        inner, outer = base.get_parameter("weight").shape
        self.base = base
        self.down = nn.Linear(inner, rank, bias=False)
        self.up = nn.Linear(rank, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, T, d] to [n, T, p]."""
        return self.base(x) + self.up(self.down(x))


def adapted(
    network: Decoder, rank: int, weights: Mapping[str, np.ndarray], like: Tensor
) -> Decoder:
    """Change a decoder in place: stored weights become buffers, and adapters are added on `meta`.

    The buffers have the dtype and device of `like`.

    Raises:
        InputError: If the rank exceeds the width, or the weights do not fit.
    """
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


def lora_law(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw the initial adapters: A by torch's law for linear layers, B = 0."""
    drawn = fresh(network, rng)
    return {name: 0 * v if name.endswith("up.weight") else v for name, v in drawn.items()}


def folded(network: nn.Module, params: Params) -> Params:
    """Return parameters of a decoder without adapters that computes the same: W + A B for each W.

    If the network has no adapters, `params` are returned.
    """
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
    """Replace the parameters that have numbers by buffers; tied ones stay tied."""
    held = {id(param): name for name, param in network.named_parameters()}
    for layer in network.modules():
        for key, param in list(layer.named_parameters(recurse=False)):
            number = numbers.get(held[id(param)].replace(INNER, ""))
            if number is not None:
                delattr(layer, key)
                layer.register_buffer(key, number)
