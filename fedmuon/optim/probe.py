"""What a user's map and links are held to before they are believed: drawn tensors, always the same.

A probe proves nothing: it refuses what is seen to be false.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.chain import Chain, Context
from fedmuon.optim.orthogonalizers import Orthogonalizer
from fedmuon.tasks.base import Params

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


def same(one: Tensor, other: Any) -> bool:
    """Whether that is a tensor of the same numbers."""
    return isinstance(other, Tensor) and _equal(one, other)


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


def require_apart(chain: Chain, start: Params) -> None:
    """Refuse links that move one of two clients otherwise beside the other than alone: some engines
    step them as one stack, others each by itself. `start` [1, ...] is like their parameters."""
    centres = _centres(start)
    together = _moved(chain, start, centres, (0, 1))
    for client in (0, 1):
        alone = _moved(chain, start, centres, (client,))
        if any(apart(alone[name], together[name][client : client + 1]) for name in start):
            raise InputError(
                "your recipe moves a client otherwise beside others than alone, so engines would "
                "differ: let links take norms and means over the last axes, for each replica, and "
                "draw from context.draws alone"
            )


def reads_factor(chain: Chain, start: Params) -> bool:
    """Whether two steps are others where the schedule says another factor."""
    centres = _centres(start)
    one, other = (_moved(chain, start, centres, (0,), factor) for factor in (1.0, 0.5))
    return any(not torch.equal(one[name], other[name]) for name in start)


def _centres(start: Params) -> Params:
    """Where the losses of two clients are least, [2, ...]."""
    drawn = torch.Generator().manual_seed(0)
    return {
        name: torch.cat([torch.randn(value.shape, generator=drawn) for _ in range(2)]).to(value)
        for name, value in start.items()
    }


def _moved(
    chain: Chain, start: Params, centres: Params, clients: Sequence[int], factor: float = 1.0
) -> Params:
    """How far two steps down the squared distance to their centres take these clients."""
    params = {name: torch.cat([value] * len(clients)) for name, value in start.items()}
    mine = {name: value[list(clients)] for name, value in centres.items()}

    def gradient(at: Params) -> tuple[Tensor, Params]:
        slope = {name: value - mine[name] for name, value in at.items()}
        return sum(one.flatten(1).square().sum(1) / 2 for one in slope.values()), slope  # type: ignore

    first, states = params, chain.init(params, {})
    for _ in range(2):
        draws = [partial(drawn_for, client) for client in clients]
        context = Context(params, gradient, draws, factor=factor)
        params, states = chain.step(params, states, context)
    return {name: value - first[name] for name, value in params.items()}


def drawn_for(client: int, what: Draw, block: int = 0, step: int = 0) -> np.random.Generator:
    """What a client's links draw from in a probe."""
    return generator(0, what, client=client, step=step, block=block)
