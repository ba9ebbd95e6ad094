"""What a user's map and links are held to before they are believed: drawn tensors, always the same.

A probe proves nothing: it refuses what is seen to be false.
"""

import itertools

import torch
from torch import Tensor

from fedmuon.errors import InputError
from fedmuon.orthogonalizers import Orthogonalizer

SCALES = (1e-3, 1.0, 1e3)  # of matrices, which may be small beside a map's own constants, or large
NEAR = 1e-2  # how far a small perturbation moves a matrix, as a share of it
MIXED = 0.02  # a difference beyond what a map's rounding explains, should it work in bfloat16
ROUNDING = 64  # in units in the last place of the images


def require_sound(value: Orthogonalizer, like: Tensor) -> None:
    """Refuse a map that draws, that mixes matrices of a stack, or that exceeds its constant, on
    matrices of that shape."""
    drawn = torch.Generator().manual_seed(0)
    shape = (len(SCALES), *like.shape[-2:])
    scales = torch.tensor(SCALES).view(-1, 1, 1)
    stack, other = (torch.randn(shape, generator=drawn) * scales for _ in range(2))
    stack, other = stack.to(like.device, like.dtype), other.to(like.device, like.dtype)
    image = value.apply(stack.clone())
    if not _equal(image, value.apply(stack.clone())):
        raise InputError(
            "the map gives other images of the same matrices at each call: let it draw nothing, or "
            "seed what it draws at each call"
        )
    for place in range(len(stack)):
        alone = value.apply(stack[place : place + 1].clone())
        if apart(alone, image[place : place + 1]):
            raise InputError(
                "the map gives another image of a matrix in a stack than of it alone: map each "
                "matrix [..., m, n] by itself, with norms and means over the last two axes"
            )
    if value.lipschitz is not None:
        near = stack + NEAR * other
        _require_constant(value, torch.cat([stack, other, near, torch.zeros_like(stack)]))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def apart(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by more than rounding may make them."""
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).norm() > MIXED * other.norm())


def _require_constant(value: Orthogonalizer, matrices: Tensor) -> None:
    """Refuse a constant that a pair of the matrices exceeds by more than rounding."""
    assert value.lipschitz is not None
    images = value.apply(matrices.clone()).double()
    unit = ROUNDING * torch.finfo(matrices.dtype).eps
    for a, b in itertools.combinations(range(len(matrices)), 2):
        moved = float((images[a] - images[b]).norm())
        distance = float((matrices[a].double() - matrices[b].double()).norm())
        rounding = unit * float(images[a].norm() + images[b].norm())
        if moved > value.lipschitz * distance * (1 + unit) + rounding:
            raise InputError(
                f"lipschitz = {value.lipschitz:g} is refused: the map moves two matrices of shape "
                f"{' x '.join(map(str, matrices.shape[-2:]))} apart by {moved / distance:.3g} "
                "times their distance, so give a constant that holds for all, or none"
            )
