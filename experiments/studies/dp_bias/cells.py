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

from fedmuon.analysis.theory.private_rates import largest_output, probe_error
from fedmuon.config.schema import Count, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call
from fedmuon.experiments.suites.contents import Asked
from fedmuon.orthogonalize import newton_schulz
from fedmuon.runs.directory import Record

Map = Callable[[Tensor], Tensor]  # [..., m, n] -> [..., m, n]
SEED = 0
NOT_ALL = ("probe", "probe_bound", "probe_any", "probe_error", "gain_error")  # of Monte Carlo alone
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
        torch.stack([_smoothed(apply, at, width * rho, settings.nodes) - apply(at) for rho in rhos])
        for width in (1, math.sqrt(2))
    )
    terms = leading_terms(apply, at, rhos, settings.spacing)
    return _record(shape, QUADRATURE, rhos, torch.stack([heat, 2 * heat - twice]), terms)


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
    sampled = [_sampled(apply, at, rho, settings.samples) for rho in rhos]
    *parts, doubts = zip(*sampled, strict=True)
    biases, errors, spreads = (torch.stack(part, 1) for part in parts)
    terms = leading_terms(apply, at, rhos, settings.spacing)
    record = _record(shape, MONTE_CARLO, rhos, biases, terms, errors, spreads)
    given = settings.coefficients, settings.steps
    for row, (quotient, probe) in zip(record["rows"], doubts, strict=True):
        row["gain_error"], row["probe_error"] = quotient, probe
        # phi(U) is a pair of probes at M = H, so its deviation is that of 000, C.6, for J = 1.
        row["probe"] = row["plain_error"] * math.sqrt(settings.samples)
        row["probe_bound"] = probe_error(*given, SHAPES[shape], row["rho"])
        row["probe_any"] = largest_output(*given, min(SHAPES[shape]))
    return record


def _sampled(
    apply: Map, at: Tensor, rho: float, samples: int
) -> tuple[Tensor, Tensor, Tensor, tuple[float, float]]:
    """Both biases [2, m, n], their standard errors [2] and those of a single O [2], each the root
    of a mean square; and the relative standard errors of the quotient of the last two, and of the
    root of phi's mean square.

    To first order log sqrt(mean a) is off by mean(a / mean a - 1) / 2, and draws are independent.
    """
    chunks = [_chunk(apply, at, *pair, rho) for pair in _pairs(at, samples)]
    *both, alone, bettered = (torch.cat(part) for part in zip(*chunks, strict=True))
    errors = [(one.var(0).sum() / samples).sqrt() for one in both]
    spreads = [one.mean().sqrt() for one in (alone, bettered)]
    scatter = (both[0] - both[0].mean(0)).square().sum((-2, -1))
    away = bettered / bettered.mean() - alone / alone.mean(), scatter / scatter.mean()
    quotient, probe = (float(one.std()) / 2 / math.sqrt(samples) for one in away)
    biases = torch.stack([one.mean(0) for one in both])
    return biases, torch.stack(errors), torch.stack(spreads), (quotient, probe)


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
    return _record(shape, TAYLOR, settings.rhos, terms, terms)


def leading_terms(apply: Map, at: Tensor, rhos: Sequence[float], spacing: float) -> Tensor:
    """rho^2 / 2 Lap Q(H) and -rho^4 / 4 Lap^2 Q(H), by finite differences, [2, rhos, m, n]."""
    first, second = laplacians(apply, at, spacing)
    both = [rho**2 / 2 * first for rho in rhos], [-(rho**4) / 4 * second for rho in rhos]
    return torch.stack([torch.stack(one) for one in both])


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


def _record(
    shape: str, way: str, rhos: Sequence[float], biases: Tensor, terms: Tensor,
    errors: Tensor | None = None, spreads: Tensor | None = None,
) -> Record:  # fmt: skip
    """A row for each rho. Norms of both biases [2, rhos, m, n], plain and corrected; `off`: of what
    is left of them without their leading terms; and errors [2, rhos].

    A norm alone would take a term of the wrong sign or direction for the bias.
    """
    nothing = torch.zeros(biases.shape[:2])
    columns = {
        "": torch.linalg.matrix_norm(biases),
        "_off": torch.linalg.matrix_norm(biases - terms),
        "_error": nothing if errors is None else errors,
        "_spread": nothing if spreads is None else spreads,
    }
    unknown = dict.fromkeys(NOT_ALL, math.nan)
    rows = [{"shape": shape, "way": way, "rho": rho} | unknown for rho in rhos]
    for what, pair in columns.items():
        for kind, values in zip(("plain", "corrected"), pair.tolist(), strict=True):
            for row, value in zip(rows, values, strict=True):
                row[f"{kind}{what}"] = value
    return {"rows": rows}
