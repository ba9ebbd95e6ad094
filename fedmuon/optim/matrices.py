"""Parameters as stacks of matrices, and the stacks that are worth orthogonalizing together.

Many small products run faster as one batched product, and as long as their operands stay in cache.
Large ones fill the machine alone: stacking them only copies. So tensors of one shape are stacked up
to a size, and whatever is larger than that goes alone, uncopied.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_STACKED_ENTRIES = {"cpu": 2**18, "cuda": 2**26}  # in a stack, by device
_ALONE = 256  # from this side on, oneDNN's half-precision products are faster one by one


class Member(NamedTuple):
    """A parameter, its gradient and its momentum, all of one shape."""

    param: Tensor
    gradient: Tensor
    momentum: Tensor


def matrices(tensor: Tensor, blocks: int = 1) -> Tensor:
    """A tensor [out, ...] as [blocks, m, n]: read as [out, -1], cut along the longer side."""
    matrix = tensor.flatten(1)
    rows, columns = matrix.shape
    if rows >= columns:
        return matrix.reshape(blocks, rows // blocks, columns)
    return matrix.reshape(rows, blocks, columns // blocks).transpose(0, 1)


def restored(
    stack: Tensor, shape: torch.Size, blocks: int = 1
) -> tuple[Tensor, ...] | list[Tensor]:
    """The inverse of `stacked`: [B, m, n] -> tensors of that shape."""
    if blocks == 1:
        return (stack if len(shape) == 2 else stack.reshape(len(stack), *shape)).unbind()
    tall = shape[0] >= shape[1:].numel()
    parts = stack.split(blocks)
    return [(part if tall else part.transpose(0, 1)).reshape(shape) for part in parts]


def matrix_shape(shape: torch.Size, blocks: int = 1) -> tuple[int, int]:
    """(m, n) of the matrices that a tensor of this shape [out, ...] is made of."""
    rows, columns = shape[0], shape[1:].numel()
    return (rows // blocks, columns) if rows >= columns else (rows, columns // blocks)


def group_by_shape(members: Iterable[Member], work: torch.dtype) -> Iterator[list[Member]]:
    """Members of one shape, dtype and device, in lists whose stack, in `work`, is one program."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Member]] = {}
    for one in members:
        alike.setdefault((one.param.shape, one.gradient.dtype, one.gradient.device), []).append(one)
    for (shape, _, device), found in alike.items():
        size = _most(shape, device.type, work)
        for start in range(0, len(found), size):
            yield found[start : start + size]


def _most(shape: torch.Size, device: str, work: torch.dtype) -> int:
    """How many tensors of a shape [out, ...] to stack."""
    side = min(shape[0], shape[1:].numel())
    if device == "cpu" and work.itemsize == 2 and side >= _ALONE:
        return 1
    return max(1, _STACKED_ENTRIES.get(device, _STACKED_ENTRIES["cuda"]) // max(1, shape.numel()))


def stacked(tensors: list[Tensor], blocks: int) -> Tensor:
    """Tensors of one shape as matrices [B, m, n]; one alone is not copied."""
    if len(tensors) == 1:
        return matrices(tensors[0], blocks)
    if blocks == 1:
        return torch.stack(tensors).flatten(2)
    return torch.cat([matrices(one, blocks) for one in tensors])


def wide_in_memory(stack: Tensor) -> Tensor:
    """The same [B, m, n], several tall matrices as [B, n, m] in memory: products read that faster.

    A single matrix is large, or too small to matter, and stays as it is.
    """
    count, rows, columns = stack.shape
    return stack.mT.contiguous().mT if count > 1 and rows > columns else stack
