"""Orthogonalization as a link: any map of `fedmuon.orthogonalize` by its configured name.

A tensor [out, ...] of a network is the matrix [out, -1], or several of them side by side, as in a
fused projection; matrices of one shape share a program while they are small, unless the map draws,
as every matrix has draws of its own.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.config.schema import OrthogonalizerTable
from fedmuon.core.device import sent
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, normal
from fedmuon.optim.chain import Context, Link, Number, per_client, stateless
from fedmuon.optim.orthogonalizers import Orthogonalizer
from fedmuon.optim.probe import require_sound
from fedmuon.tasks.base import Params, concatenate

Map = Callable[[Tensor, Context, int], Tensor]  # (M [S, m, n], context, block number) -> [S, m, n]
Pieces = dict[tuple[str, int], Tensor]  # (name, place in it) -> matrices [S, m, n]

STACKED_ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 26}  # entries that are worth stacking, as in optim
PROBES = 1024  # most probe draws of a matrix at a step
RANDOMIZED_MAPS = ("gaussian-smoothed-sign", "randomized-polar")
# s(m, n) of an orthogonalized step, as torch.optim.Muon names them
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "none": lambda m, n: 1.0,
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match-rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


def orthogonalize(
    apply: Map, adjust: str = "none", grouped: bool = False, blocks: Mapping[str, int] | None = None
) -> Link:
    """Replace every matrix by its orthogonalization (001 (2)), times s(m, n) of `adjust`.

    `grouped` lets small matrices of one shape be one stack for the map; `blocks` says how many
    matrices a named parameter holds, if more than one.
    """

    def update(direction: Params, context: Context) -> Params:
        pieces = _cut(direction, blocks or {})
        number = {piece: block for block, piece in enumerate(pieces)}
        found: Pieces = {}
        for names in _groups(pieces, grouped):
            stack = concatenate([pieces[name] for name in names])
            scale = ADJUSTMENTS[adjust](*stack.shape[-2:])
            image = apply(stack, context, number[names[0]])
            image = image if scale == 1 else image * scale
            found |= zip(names, image.chunk(len(names)), strict=True)
        return _uncut(found, direction)

    return stateless("orthogonalize", update)


def _cut(direction: Params, blocks: Mapping[str, int]) -> Pieces:
    """Tensors [S, out, ...] as matrices [S, out, -1], cut along the longer side."""
    return {
        (name, place): piece
        for name, value in direction.items()
        for place, piece in enumerate(value.flatten(2).chunk(blocks.get(name, 1), _longer(value)))
    }


def _uncut(pieces: Pieces, template: Params) -> Params:
    """The inverse of `_cut`, for tensors of the template's shapes."""
    parts: dict[str, list[Tensor]] = {name: [] for name in template}
    for name, place in sorted(pieces):  # pieces of other shapes were grouped apart
        parts[name].append(pieces[name, place])
    return {
        name: concatenate(parts[name], _longer(value)).reshape(value.shape)
        for name, value in template.items()
    }


def _longer(value: Tensor) -> int:
    """The longer axis of the matrices [S, out, -1]."""
    return 1 if value.shape[1] >= value.shape[2:].numel() else 2


def _groups(pieces: Pieces, grouped: bool) -> Iterator[list[tuple[str, int]]]:
    """Names of matrices to stack: of one shape, and small enough to gain by it."""
    alike: dict[object, list[tuple[str, int]]] = {}
    for name, value in pieces.items():
        alike.setdefault((value.shape, value.device) if grouped else name, []).append(name)
    for names in alike.values():
        first = pieces[names[0]]
        size = max(1, STACKED_ENTRIES.get(first.device.type, 1 << 26) // max(1, first.numel()))
        for start in range(0, len(names), size):
            yield names[start : start + size]


def of_value(value: Orthogonalizer) -> Map:
    """A map of the user's, which draws nothing; what it returns must be as what it was given, of
    which it has a copy, should it work in place. It is probed at the first matrix of each shape."""
    probed: set[object] = set()

    def apply(m: Tensor, context: Context, block: int) -> Tensor:
        found = value.apply(m.clone())
        if not isinstance(found, Tensor) or found.shape != m.shape or found.dtype != m.dtype:
            raise InputError(
                f"the map returns {getattr(found, 'shape', type(found).__name__)} "
                f"{getattr(found, 'dtype', '')} for {m.shape} {m.dtype}: return a like stack"
            )
        if (kind := (m.shape[-2:], m.dtype, m.device)) not in probed:
            require_sound(value, m)
            probed.add(kind)
        return found

    return apply


def named(
    table: OrthogonalizerTable, regularization: Number | None = None, centred: bool = False
) -> Map:
    """The map that the table names; `regularization` overrides lambda, one value per replica.
    `centred` says that all rows would sum to 0, were it not for rounding."""
    sign = maps.quotient_sign if centred else maps.exact_sign
    lam = table.lambda_ if regularization is None else regularization
    steps, eps, kind = table.steps, table.eps, table.normalization
    table_of_maps: dict[str, Map] = {
        "smoothed-polar": lambda m, context, block: maps.smoothed_polar(m, per_client(lam, m)),
        "newton-schulz": lambda m, context, block: maps.newton_schulz(
            m, steps, table.coefficients, eps, kind
        ),
        "clipped-sign": lambda m, context, block: maps.clipped_sign(m, table.clip_level),
        "exact-sign": lambda m, context, block: sign(m),
        "gaussian-smoothed-sign": lambda m, context, block: maps.gaussian_smoothed_sign(
            m, table.sigma, _gaussian(m, context, Draw.SMOOTHING, block)
        ),
        "randomized-polar": lambda m, context, block: _sketched(table, m, context, block),
    }
    return table_of_maps[table.name]


def probe(matrix: Tensor, context: Context, block: int, number: int) -> Tensor:
    """The Gaussian probe of that number for a tensor [K S, ...]."""
    return _gaussian(matrix, context, Draw.PROBE, block * PROBES + number)


def _gaussian(matrix: Tensor, context: Context, what: Draw, block: int) -> Tensor:
    """Like the matrix [K S, ...], one a client, shared by its replicas: they stay coupled."""
    draws = [draw(what, block=block) for draw in context.draws]
    return sent(normal(draws, tuple(matrix.shape)), matrix.device, matrix.dtype)


def _sketched(table: OrthogonalizerTable, matrix: Tensor, context: Context, block: int) -> Tensor:
    """One sketch a client, shared by its replicas."""
    parts = zip(matrix.chunk(len(context.draws)), context.draws, strict=True)
    names = ("rank", "oversample", "power", "steps", "coefficients", "sketch")
    sketched = partial(maps.randomized_polar, **{name: getattr(table, name) for name in names})
    return torch.cat([sketched(m, generator=draw(Draw.SKETCH, block=block)) for m, draw in parts])
