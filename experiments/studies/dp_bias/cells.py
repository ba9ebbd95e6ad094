"""Study `dp-bias`: what noise does to a Newton-Schulz direction on average (000, section 4).

The released momentum is M = H + rho E. Averages are over E and over the probes U of the correction
O = 2 Q(M) - (Q(M + rho U) + Q(M - rho U)) / 2, so the uncorrected bias is P_rho Q(H) - Q(H) and
the corrected one (2 P_rho - P_(sqrt 2 rho)) Q(H) - Q(H), P the Gaussian heat operator.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked
from fedmuon.orthogonalize import newton_schulz
from fedmuon.randomness import Draw, generator
from fedmuon.settings import Count, Positive
from fedmuon.storage import Record
from fedmuon.tables import Table

Map = Callable[[Tensor], Tensor]  # [..., m, n] -> [..., m, n]
Biases = tuple[Sequence[Tensor], Sequence[Tensor]]  # plain and corrected, for each rho
SEED = 0
AT_ONCE = 1 << 14  # samples of a chunk
SHAPES = {"2 × 2": (2, 2), "3 × 4": (3, 4)}
QUADRATURE, MONTE_CARLO, TAYLOR = "quadrature", "monte-carlo", "taylor"


class Settings(Table):
    """What the suite's file holds; `norm` is ||H||_F, which must stay clear of 1, where Q kinks."""

    rhos: Annotated[list[Positive], Field(min_length=2)]
    norm: Positive
    steps: Count
    coefficients: str
    nodes: Annotated[int, Field(ge=2)]  # of Gauss-Hermite quadrature, in each of four dimensions
    samples: Annotated[int, Field(ge=100)]  # pairs (E, U) of the Monte Carlo estimate
    spacing: Positive  # of finite differences


def cells(settings: Settings, asked: Asked) -> Sequence[Call]:
    """Every way to know the bias, for each matrix: quadrature where there are few entries."""
    ways = [("2 × 2", by_quadrature)]
    ways += [(shape, made) for shape in SHAPES for made in (by_monte_carlo, by_taylor)]
    return [
        Call(f"{made.__name__}-{shape.replace(' × ', 'x')}", partial(made, settings, shape))
        for shape, made in ways
    ]


def output_map(settings: Settings) -> Map:
    """Q of 000: Newton-Schulz from M / max(1, ||M||_F)."""
    steps, coefficients = settings.steps, settings.coefficients
    return lambda matrix: newton_schulz(matrix, steps, coefficients, normalization="unit")


def momentum(shape: str, norm: float) -> Tensor:
    """H [m, n] of this Frobenius norm, with singular values 1 : 2 : 3 ... in random directions."""
    m, n = SHAPES[shape]
    rng = generator(SEED, Draw.SYNTHETIC, block=m * n)
    left, right = (np.linalg.qr(rng.standard_normal((k, m)))[0] for k in (m, n))
    values = np.arange(1, m + 1)
    return torch.from_numpy(left * (norm * values / np.linalg.norm(values)) @ right.T)


def by_quadrature(settings: Settings, shape: str) -> Record:
    """Both biases to many digits: Gauss-Hermite quadrature over all entries."""
    apply, at, rhos = output_map(settings), momentum(shape, settings.norm), settings.rhos
    heat, twice = (
        [_smoothed(apply, at, width * rho, settings.nodes) - apply(at) for rho in rhos]
        for width in (1, math.sqrt(2))
    )
    corrected = [2 * one - two for one, two in zip(heat, twice, strict=True)]
    terms = leading_terms(apply, at, rhos, settings.spacing)
    return {"rows": _rows(shape, QUADRATURE, rhos, (heat, corrected), terms)}


def _smoothed(apply: Map, at: Tensor, rho: float, nodes: int) -> Tensor:
    """P_rho Q(H) = E Q(H + rho U) by the product rule."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[points] * at.numel(), indexing="ij"), -1)
    mass = weights / weights.sum()
    weight = torch.from_numpy(mass)
    for _ in range(at.numel() - 1):
        weight = weight[..., None] * torch.from_numpy(mass)
    moved = at + rho * torch.from_numpy(grid).reshape(-1, *at.shape)
    return torch.einsum("b,bij->ij", weight.flatten(), apply(moved))


def by_monte_carlo(settings: Settings, shape: str) -> Record:
    """Both biases from draws of (E, U), with their standard errors and the error of one direction.

    phi(E) = (Q(H + rho E) + Q(H - rho E)) / 2 - Q(H) is averaged for the plain bias. Exchanging E
    and U, which have one law, the corrected direction is on average phi(E) + phi(U) - (phi(E + U)
    + phi(E - U)) / 2: its terms of order rho^2 cancel draw by draw, by the parallelogram law.
    """
    apply, at, rhos = output_map(settings), momentum(shape, settings.norm), settings.rhos
    means = [_sampled(apply, at, rho, settings.samples) for rho in rhos]
    heat, corrected, errors, spreads = zip(*means, strict=True)
    terms = leading_terms(apply, at, rhos, settings.spacing)
    return {"rows": _rows(shape, MONTE_CARLO, rhos, (heat, corrected), terms, errors, spreads)}


Pair = tuple[float, float]


def _sampled(apply: Map, at: Tensor, rho: float, samples: int) -> tuple[Tensor, Tensor, Pair, Pair]:
    """Means of both biases, their standard errors, and the root mean square errors of one O."""
    chunks = [_chunk(apply, at, *pair, rho) for pair in _pairs(at, samples)]
    heat, corrected, alone, bettered = (torch.cat(part) for part in zip(*chunks, strict=True))
    errors = tuple(
        float((values.var(0).sum() / len(values)).sqrt()) for values in (heat, corrected)
    )
    spreads = tuple(float(values.mean().sqrt()) for values in (alone, bettered))
    return heat.mean(0), corrected.mean(0), errors, spreads  # type: ignore[return-value]


def _pairs(at: Tensor, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """E and U [chunk, m, n]; the same draws for every rho, so that the curves are smooth."""
    for chunk, start in enumerate(range(0, samples, AT_ONCE)):
        rng = generator(SEED, Draw.SMOOTHING, step=chunk, block=at.numel())
        count = min(AT_ONCE, samples - start)
        both = torch.from_numpy(rng.standard_normal((2, count, *at.shape)))
        yield both[0], both[1]


def _chunk(apply: Map, at: Tensor, e: Tensor, u: Tensor, rho: float) -> tuple[Tensor, ...]:
    """For each pair: phi(E), the symmetrized correction, and the squared errors of both O's."""
    exact, both = apply(at), torch.stack([e, u, e + u, e - u])
    forth, back = apply(at + rho * both), apply(at - rho * both)
    even = (forth + back) / 2 - exact
    corrected = even[0] + even[1] - (even[2] + even[3]) / 2
    one = 2 * forth[0] - (forth[2] + forth[3]) / 2 - exact
    plain = forth[0] - exact
    return even[0], corrected, plain.square().sum((-2, -1)), one.square().sum((-2, -1))


def by_taylor(settings: Settings, shape: str) -> Record:
    """The leading terms alone, in the place of biases."""
    apply, at = output_map(settings), momentum(shape, settings.norm)
    terms = leading_terms(apply, at, settings.rhos, settings.spacing)
    return {"rows": _rows(shape, TAYLOR, settings.rhos, terms, terms)}


def leading_terms(apply: Map, at: Tensor, rhos: Sequence[float], spacing: float) -> Biases:
    """rho^2 / 2 Lap Q(H) and -rho^4 / 4 Lap^2 Q(H) for each rho, by finite differences."""
    first, second = laplacians(apply, at, spacing)
    return [rho**2 / 2 * first for rho in rhos], [-(rho**4) / 4 * second for rho in rhos]


def laplacians(apply: Map, at: Tensor, spacing: float) -> tuple[Tensor, Tensor]:
    """Lap Q and Lap^2 Q at H, entrywise: central differences at h and 2h, extrapolated."""
    fine, coarse = _stencils(apply, at, spacing), _stencils(apply, at, 2 * spacing)
    first, second = ((4 * a - b) / 3 for a, b in zip(fine, coarse, strict=True))
    return first, second


def _stencils(apply: Map, at: Tensor, spacing: float) -> tuple[Tensor, Tensor]:
    """sum_i d_i^2 and sum_ij d_i^2 d_j^2 with d_i^2 f(x) = (f(x + h) - 2 f(x) + f(x - h)) / h^2."""
    d = at.numel()
    unit = torch.eye(d, dtype=at.dtype).view(d, *at.shape) * spacing
    moves = torch.cat([unit, -unit, torch.zeros_like(unit[:1])])
    weights = torch.cat([torch.ones(2 * d), torch.tensor([-2.0 * d])]).double() / spacing**2
    once = torch.einsum("b,bij->ij", weights, apply(at + moves))
    values = apply(at + moves[:, None] + moves)
    return once, torch.einsum("a,b,abij->ij", weights, weights, values)


def _rows(
    shape: str, way: str, rhos: Sequence[float], biases: Biases, terms: Biases,
    errors: Sequence[Pair] = (), spreads: Sequence[Pair] = (),
) -> list[Record]:  # fmt: skip
    """Norms of the biases, `off`: of what is left of them without their leading terms, and errors.

    A norm alone would take a term of the wrong sign or direction for the bias.
    """
    nothing, left = [(0.0, 0.0)] * len(rhos), []
    for bias, term in zip(biases, terms, strict=True):
        left.append([one - other for one, other in zip(bias, term, strict=True)])
    columns = {"": _norms(biases), "_off": _norms(left), "_error": errors or nothing,
               "_spread": spreads or nothing}  # fmt: skip
    return [
        {"shape": shape, "way": way, "rho": rho}
        | {
            f"{kind}{what}": pairs[place][which]
            for what, pairs in columns.items()
            for which, kind in enumerate(("plain", "corrected"))
        }
        for place, rho in enumerate(rhos)
    ]


def _norms(both: Sequence[Sequence[Tensor]]) -> list[Pair]:
    """||.||_F of the plain and of the corrected one for each rho."""
    plain, corrected = (torch.linalg.matrix_norm(torch.stack(list(one))) for one in both)
    return list(zip(plain.tolist(), corrected.tolist(), strict=True))
