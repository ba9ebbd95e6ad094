"""A server state as one flat dictionary of named tensors, for messages and for files.

Names are `model.<parameter>` and `<link>.<parameter>`; each array appears once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmuon.errors import InputError
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import States


def pack(params: Params, states: States) -> dict[str, Tensor]:
    """Model and states -> flat tensors on the CPU."""
    trees = {"model": params, **states}
    return {
        f"{tree}.{name}": value.detach().cpu()
        for tree, values in trees.items()
        for name, value in values.items()
    }


def unpack(tensors: Mapping[str, Tensor], like: Params, states: States) -> tuple[Params, States]:
    """Flat tensors -> model and states of links, shaped and placed like the given ones.

    Anything missing, left over, or of another shape or precision is refused.
    """
    trees = {"model": like, **states}
    wanted = {f"{tree}.{name}" for tree, values in trees.items() for name in values}
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise InputError(f"the arrays {', '.join(odd)} are missing or not expected")
    found = {
        tree: {name: _fitted(tensors[f"{tree}.{name}"], one, name) for name, one in values.items()}
        for tree, values in trees.items()
    }
    return found.pop("model"), found


def _fitted(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """The tensor in the memory order and on the device of `like`."""
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise InputError(
            f"the array {name} is {tuple(tensor.shape)} {tensor.dtype}, not the expected "
            f"{tuple(like.shape)} {like.dtype}"
        )
    return torch.empty_like(like).copy_(tensor)
