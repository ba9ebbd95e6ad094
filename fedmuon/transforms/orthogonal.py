"""Orthogonalization as a link: any map of `fedmuon.orthogonalize` by its configured name.

A tensor [out, ...] of a network is the matrix [out, -1]; tensors of one shape share a program while
they are small, unless the map draws, as every matrix has draws of its own.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config import OrthogonalizerTable
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, Number, stateless, tiled

Map = Callable[[Tensor, Context, int], Tensor]  # (M [S, m, n], context, block number) -> [S, m, n]


TOGETHER = {"cpu": 1 << 18, "cuda": 1 << 26}  # entries that are worth stacking, as in optim
PROBES = 1024  # most probe draws of a matrix at a step
DRAWING = ("gaussian-smoothed-sign", "randomized-polar")
# s(m, n) of an orthogonalized step, as torch.optim.Muon names them
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "none": lambda m, n: 1.0,
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match-rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


def orthogonalize(apply: Map, adjust: str = "none", grouped: bool = False) -> Link:
    """Replace every matrix by its orthogonalization (001 (2)), times s(m, n) of `adjust`.

    `grouped` lets small matrices of one shape be one stack for the map.
    """

    def update(direction: Params, context: Context) -> Params:
        number = {name: block for block, name in enumerate(direction)}
        found: Params = {}
        for names in _groups(direction, grouped):
            views = [direction[name].flatten(2) for name in names]
            stack = views[0] if len(views) == 1 else torch.cat(views)
            scale = ADJUSTMENTS[adjust](*stack.shape[-2:])
            done = apply(stack, context, number[names[0]])
            done = done if scale == 1 else done * scale
            for name, part in zip(names, done.chunk(len(names)), strict=True):
                found[name] = part.reshape(direction[name].shape)
        return found

    return stateless("orthogonalize", update)


def _groups(direction: Params, grouped: bool) -> Iterator[list[str]]:
    """Names of tensors to stack: of one shape, and small enough to gain by it."""
    alike: dict[object, list[str]] = {}
    for name, value in direction.items():
        alike.setdefault((value.shape, value.device) if grouped else name, []).append(name)
    for names in alike.values():
        first = direction[names[0]]
        size = max(1, TOGETHER.get(first.device.type, 1 << 26) // max(1, first.numel()))
        for start in range(0, len(names), size):
            yield names[start : start + size]


def named(table: OrthogonalizerTable, regularization: Number | None = None) -> Map:
    """The map that the table names; `regularization` overrides lambda, one value per replica."""
    lam = table.lambda_ if regularization is None else regularization
    steps, eps, kind = table.steps, table.eps, table.normalization
    table_of_maps: dict[str, Map] = {
        "smoothed-polar": lambda m, context, block: maps.smoothed_polar(m, tiled(lam, m)),
        "newton-schulz": lambda m, context, block: maps.newton_schulz(
            m, steps, table.coefficients, eps, kind
        ),
        "clipped-sign": lambda m, context, block: maps.clipped_sign(m, table.gamma),
        "exact-sign": lambda m, context, block: maps.exact_sign(m),
        "gaussian-smoothed-sign": lambda m, context, block: maps.gaussian_smoothed_sign(
            m, table.sigma, _noise(m, context, block)
        ),
        "randomized-polar": lambda m, context, block: _sketched(table, m, context, block),
    }
    return table_of_maps[table.name]


def _noise(matrix: Tensor, context: Context, block: int) -> Tensor:
    """A Gaussian matrix for each client [K S, m, n], shared by its replicas: they stay coupled."""
    shape, clients = tuple(matrix.shape[-2:]), len(context.draws)
    draws = [draw(Draw.SMOOTHING, block=block).standard_normal(shape) for draw in context.draws]
    noise = torch.from_numpy(np.stack(draws)).to(matrix.device, matrix.dtype)
    return noise.repeat_interleave(len(matrix) // clients, 0)


def probe(matrix: Tensor, context: Context, block: int, number: int) -> Tensor:
    """The Gaussian probe of that number for a tensor [K S, ...], one a client."""
    key = block * PROBES + number
    draws = [draw(Draw.PROBE, block=key) for draw in context.draws]
    each = np.stack([rng.standard_normal(tuple(matrix.shape[1:])) for rng in draws])
    spread = torch.from_numpy(each).to(matrix.device, matrix.dtype)
    return spread.repeat_interleave(len(matrix) // len(draws), 0)


def _sketched(table: OrthogonalizerTable, matrix: Tensor, context: Context, block: int) -> Tensor:
    """One sketch a client, shared by its replicas."""
    parts = zip(matrix.chunk(len(context.draws)), context.draws, strict=True)
    return torch.cat(
        [
            maps.randomized_polar(
                part,
                table.rank,
                table.oversample,
                table.power,
                table.steps,
                table.coefficients,
                table.sketch,
                draw(Draw.SKETCH, block=block),
            )
            for part, draw in parts
        ]
    )
