"""What the layers of a network are: which are refused, and by which law their parameters start."""

import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedmuon.core.errors import InputError

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _InstanceNorm)


def refuse(network: nn.Module) -> None:
    """Refuse layers that tie samples together, keep statistics, make draws that have no key, or
    change their weights."""
    for name, layer in network.named_modules():
        if problem := _problem(layer):
            raise InputError(f"{name or 'The network'} is a {type(layer).__name__}, {problem}")


def _problem(layer: nn.Module) -> str:
    if isinstance(layer, _NormBase) and (
        layer.track_running_stats or not isinstance(layer, _InstanceNorm)
    ):
        return (
            "whose running statistics are neither averaged nor of one sample alone: use GroupNorm"
        )
    if _draws(layer):
        return (
            "which draws from torch's global generator, so that no run repeats: take it out, or "
            "its dropout"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "which rescales its weights when it reads them: take max_norm out"
    return ""


def _draws(layer: nn.Module) -> bool:
    """Whether a call in training draws numbers."""
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    if isinstance(layer, nn.RReLU):
        return layer.lower < layer.upper
    if isinstance(layer, nn.RNNBase):
        return layer.dropout > 0 and layer.num_layers > 1
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def fresh(network: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """First parameters by torch's default laws, drawn in the order of `named_parameters`.

    Linear layers and convolutions, weights and biases alike, are uniform in +-1/sqrt(fan-in);
    embeddings are standard normal; norms start at 1 and 0.
    """
    first: dict[int, tuple[str, nn.Module, str]] = {}
    for name, owner, key, param in owned(network):
        first.setdefault(id(param), (name, owner, key))
    return {name: _drawn(rng, name, owner, key) for name, owner, key in first.values()}


def owned(network: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(name, the layer that owns it, its name there, itself) of every parameter, tied ones under
    each of their names."""
    for prefix, owner in network.named_modules(remove_duplicate=False):
        for key, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{key}" if prefix else key, owner, key, param


def _drawn(rng: np.random.Generator, name: str, owner: nn.Module, key: str) -> np.ndarray:
    shape = tuple(getattr(owner, key).shape)
    if isinstance(owner, nn.Linear | _ConvNd):
        weight: Tensor = owner.weight
        bound = 1 / math.sqrt(weight[0].numel())
        return rng.uniform(-bound, bound, shape)
    if isinstance(owner, nn.Embedding):
        return rng.standard_normal(shape)
    if isinstance(owner, _NORMS):
        return np.full(shape, 1.0 if key == "weight" else 0.0)
    raise InputError(
        f"No law is known for the first {name} of a {type(owner).__name__}: build the network from "
        "linear layers, convolutions, embeddings and norms"
    )
