"""Orthogonalization as a link: any map of `fedmuon.orthogonalize` by its configured name."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config import OrthogonalizerTable
from fedmuon.randomness import Draw
from fedmuon.tasks.base import Params
from fedmuon.transforms.base import Context, Link, Number, stateless, tiled

Map = Callable[[Tensor, Context, int], Tensor]  # (M [S, m, n], context, block number) -> [S, m, n]


def orthogonalize(apply: Map) -> Link:
    """Replace every matrix by its orthogonalization (001 (2))."""

    def update(direction: Params, context: Context) -> Params:
        return {
            name: apply(matrix, context, block)
            for block, (name, matrix) in enumerate(direction.items())
        }

    return stateless("orthogonalize", update)


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
