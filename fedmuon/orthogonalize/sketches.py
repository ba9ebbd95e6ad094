"""What a sketch sees of a stack of matrices [B, m, n]: samples [B, m, l] of their column space.

Each generator draws one sketch, the same numbers for any dtype and device. k of them serve a stack
in k equal runs of consecutive matrices: coupled replicas share a sketch, others need not.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmuon.errors import InputError
from fedmuon.orthogonalize.basis import multiply

Generator = np.random.Generator | torch.Generator
Generators = Generator | Sequence[Generator] | None
Sketch = Callable[[Tensor, int, list[np.random.Generator]], Tensor]


def listed(generator: Generators, count: int) -> list[np.random.Generator]:
    """The generators of a stack of `count` matrices; without any, torch's own is asked. One of
    torch's gives a seed, and so goes on by a number at each call."""
    alone = generator is None or isinstance(generator, Generator)
    asked = [generator] if alone else list(generator)  # pyright: ignore[reportArgumentType]
    found = [one if isinstance(one, np.random.Generator) else _seeded(one) for one in asked]
    if not found or count % len(found):
        raise InputError(
            f"{len(found)} generators cannot share {count} matrices evenly: give one, or one for "
            "each run of as many matrices."
        )
    return found


def _seeded(generator: torch.Generator | None) -> np.random.Generator:
    place = "cpu" if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (), generator=generator, device=place)
    return np.random.default_rng(int(seed))


def gaussian(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
    """M Omega with Omega [n, l] standard Gaussian (002, Algorithm 1, line 1)."""
    shape = (stack.shape[-1], width)
    omega = torch.from_numpy(np.stack([draw.standard_normal(shape) for draw in generators]))
    runs = stack.reshape(len(generators), -1, shape[0])
    samples = multiply(runs, omega.to(stack.device, stack.dtype))
    return samples.view(*stack.shape[:-1], width)


def kaczmarz(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
    """l columns, drawn with probability pi_j = ||M_j||^2 / ||M||_F^2 (002, Algorithm 2, lines 1-3).

    Matrices that share a generator invert their own distributions at the same uniforms. The factor
    1/sqrt(l pi_j) and repeated draws change the samples, not their range, which is all that is
    used: a column drawn again is left zero instead of asking the basis to see that it is the same.
    """
    # In blocks of rows that fit a cache: several times faster than one reduction on a CPU.
    blocks = [rows.square().sum(-2).double() for rows in stack.split(256, dim=-2)]
    share = torch.stack(blocks).sum(0)
    edges = share.cumsum(-1)
    uniforms = torch.from_numpy(np.stack([draw.random(width) for draw in generators]))
    uniforms = uniforms.to(stack.device).repeat_interleave(len(stack) // len(generators), 0)
    points = (uniforms * edges[..., -1:]).sort(-1).values
    chosen = torch.searchsorted(edges, points, right=True).clamp_max(stack.shape[-1] - 1)
    columns = stack.gather(-1, chosen.unsqueeze(-2).expand(*stack.shape[:-1], width))
    repeated = chosen[..., 1:] == chosen[..., :-1]
    columns[..., 1:].masked_fill_(repeated.unsqueeze(-2), 0.0)
    return columns


SKETCHES: dict[str, Sketch] = {"gaussian": gaussian, "kaczmarz": kaczmarz}
