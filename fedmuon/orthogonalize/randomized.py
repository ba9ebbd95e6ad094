"""Randomized low-rank polar maps (002, Algorithms 1 and 2): a quality, not a Lipschitz constant.

With Q an orthonormal basis of the range of Y = (M M^T)^h M Omega, the map is Q p_T(Q^T M / delta).
It depends on Y through its range alone, so between the products any well-conditioned basis may
stand for Y: powers lose no digits, and in exact arithmetic nothing changes.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import holds, sent
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.polynomial import scaled_newton_schulz
from fedmuon.orthogonalize.spectral import gram, multiply, norm, peak, per_matrix

Generator = np.random.Generator | torch.Generator
Generators = Generator | Sequence[Generator] | None
Sketch = Callable[[Tensor, int, list[np.random.Generator]], Tensor]  # M -> samples [B, m, l]
Axis = Literal["columns", "rows"]
Delta = Literal["frobenius", "operator"]

DELTAS: dict[str, Delta] = {"gaussian": "frobenius", "kaczmarz": "operator"}  # as 002 pairs them
# Squared sine of the angle between a column and the ones before it: below this, rounding of the
# float64 Gram matrix (about 1e-13 for a thousand columns) starts to show in the factor.
_LEAST_PIVOT = 1e-10
_LOW, _HIGH = 1e-15, 1e15  # norms between these square safely in float32


def randomized_polar(
    M: Tensor,
    rank: int,
    oversample: int = 2,
    power: int = 1,
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    sketch: str = "gaussian",
    generator: Generators = None,
    axis: Axis = "columns",
    delta: Delta | float | Tensor | None = None,
) -> Tensor:
    """Q p_T(Q^T M / delta) of rank at most l = rank + oversample: M [..., m, n] -> [..., m, n].

    `axis` is what the sketch mixes or samples: columns as in 002, or rows, which is the same map of
    M^T. `delta` divides B = Q^T M: ||M||_F ("frobenius", of Algorithm 1), ||B||_op ("operator", of
    Algorithm 2), or numbers [...] that are at least ||M||_op; None is the sketch's own algorithm's.
    `generator`, numpy's or torch's, is one for all matrices, or k for k equal runs of consecutive
    ones; without it torch's default one is asked, which `torch.manual_seed` seeds.
    """
    if axis not in ("columns", "rows"):
        raise InputError(f"axis is {axis!r}: sample 'columns' or 'rows'.")
    if axis == "rows":
        given = (rank, oversample, power, steps, coefficients, sketch, generator)
        return randomized_polar(M.mT, *given, delta=delta).mT
    width = _width(M, rank, oversample, power, sketch)
    if M.numel() == 0:
        return M.clone()
    work = M.dtype if M.dtype in (torch.float32, torch.float64) else torch.float32
    stack, scale = _in_range(M.reshape(-1, *M.shape[-2:]).to(work))
    samples = SKETCHES[sketch](stack, width, _listed(generator, len(stack)))
    basis = _range(stack, samples, power)
    reduced = multiply(basis.mT, stack)
    divisor = _divisor(DELTAS[sketch] if delta is None else delta, M, stack, reduced, scale)
    small = scaled_newton_schulz(reduced, divisor, steps, coefficients)
    return multiply(basis, small).view(M.shape).to(M.dtype)


def _width(M: Tensor, rank: int, oversample: int, power: int, sketch: str) -> int:
    """l = rank + oversample, once everything that decides the sketch is checked."""
    width, most = rank + oversample, min(M.shape[-2:])
    if rank < 1 or oversample < 0 or width > most:
        raise InputError(
            f"rank is {rank}, oversample {oversample}: choose rank >= 1, oversample >= 0 and "
            f"rank + oversample <= {most} for matrices of shape {tuple(M.shape[-2:])}."
        )
    if power < 0 or power != int(power):
        raise InputError(f"power is {power!r}: give a whole number of power iterations, 0 or more.")
    if sketch not in SKETCHES:
        raise InputError(f"No sketch is called {sketch!r}: use one of {', '.join(SKETCHES)}.")
    return width


def _in_range(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices whose squares are safe, and the factors [B] that were taken out."""
    size = torch.linalg.vector_norm(stack, dim=(-2, -1))
    if holds(((size >= _LOW) & (size <= _HIGH)).all()):
        return stack, torch.ones_like(size)
    largest = peak(stack)
    scale = torch.where(largest > 0, largest, 1.0)
    return stack / scale[:, None, None], scale


def _range(stack: Tensor, samples: Tensor, power: int) -> Tensor:
    """An orthonormal basis [B, m, l] of (M M^T)^h samples, reconditioned before every product."""
    for _ in range(power):
        across = multiply(stack.mT, _conditioned(samples))
        samples = multiply(stack, _conditioned(across))
    return orthonormal(samples)


def _divisor(
    delta: Delta | float | Tensor, M: Tensor, stack: Tensor, reduced: Tensor, scale: Tensor
) -> Tensor:
    """delta [B] in the units of the stack; 1 for a matrix that is zero."""
    if isinstance(delta, str):
        if delta not in ("frobenius", "operator"):
            raise InputError(f"delta is {delta!r}: use 'frobenius', 'operator' or a number.")
        if delta == "operator":  # of the wide B, from the largest eigenvalue of B B^T
            values = torch.linalg.eigvalsh(gram(reduced, torch.float64))
            size = values[:, -1].clamp_min(0).sqrt()
        else:
            size = norm(stack)
        return torch.where(size > 0, size, 1.0)
    given = per_matrix("delta", delta, M, "choose delta > 0, at least ||M||_op.")
    return given.expand(M.shape[:-2]).reshape(-1) / scale


def orthonormal(samples: Tensor) -> Tensor:
    """Q [B, m, l] with the range of tall `samples` [B, m, l]; columns beyond its rank are zero.

    Products rather than reflections: a Gram matrix and its Cholesky factor cost a few GEMMs, where
    Householder QR works column by column. They square the condition number, so the Gram matrix is
    float64, and matrices whose pivots are lost in rounding go to a QR with a decision on the rank.

    Cholesky QR twice: the first pass leaves columns that are orthonormal to eps cond, the second
    mends that to eps.
    """
    return _conditioned(_conditioned(samples))


def _conditioned(samples: Tensor) -> Tensor:
    """One pass: the same range, columns orthonormal up to eps cond, which is far below 1."""
    product = gram(samples.mT, torch.float64)
    size = product.diagonal(dim1=-2, dim2=-1).sqrt()  # of columns, [B, l]
    empty = size == 0
    size = torch.where(empty, 1.0, size)
    product = product / (size.unsqueeze(-1) * size.unsqueeze(-2))
    product.diagonal(dim1=-2, dim2=-1).add_(empty)  # an empty column stays empty
    factor, failed = torch.linalg.cholesky_ex(product)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    lost = (failed != 0) | ~(pivots >= _LEAST_PIVOT)
    kept = holds(~lost.any())
    if not kept and bool(lost.all()):
        return _ranked(samples, size)
    inverse = torch.linalg.solve_triangular(factor, torch.diag_embed(1 / size), upper=False)
    out = multiply(samples, inverse.mT.to(samples.dtype))
    if not kept:
        out[lost] = _ranked(samples[lost], size[lost])
    return out


def _ranked(samples: Tensor, size: Tensor) -> Tensor:
    """The same by QR and an SVD of the small factor; directions that rounding made are zeroed."""
    q, r = torch.linalg.qr(samples.double() / size.unsqueeze(-2))
    u, s, _ = torch.linalg.svd(r)
    cut = 10 * samples.shape[-2] * torch.finfo(torch.float64).eps
    kept = (s > cut * s.amax(-1, keepdim=True)).unsqueeze(-2)
    return (q @ (u * kept)).to(samples.dtype)


def _listed(generator: Generators, count: int) -> list[np.random.Generator]:
    """The generators of a stack of `count` matrices; without any, torch's own is asked. One of
    torch's gives a seed, and so goes on by a number at each call.

    Each draws one sketch, the same numbers for any dtype and device. k of them serve a stack in k
    equal runs of consecutive matrices: coupled replicas share a sketch, others need not.
    """
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


def _gaussian(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
    """M Omega with Omega [n, l] standard Gaussian (002, Algorithm 1, line 1)."""
    shape = (stack.shape[-1], width)
    omega = torch.from_numpy(np.stack([draw.standard_normal(shape) for draw in generators]))
    runs = stack.reshape(len(generators), -1, shape[0])
    samples = multiply(runs, sent(omega, stack.device, stack.dtype))
    return samples.view(*stack.shape[:-1], width)


def _kaczmarz(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
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
    uniforms = sent(uniforms, stack.device).repeat_interleave(len(stack) // len(generators), 0)
    points = (uniforms * edges[..., -1:]).sort(-1).values
    chosen = torch.searchsorted(edges, points, right=True).clamp_max(stack.shape[-1] - 1)
    columns = stack.gather(-1, chosen.unsqueeze(-2).expand(*stack.shape[:-1], width))
    repeated = chosen[..., 1:] == chosen[..., :-1]
    columns[..., 1:].masked_fill_(repeated.unsqueeze(-2), 0.0)
    return columns


SKETCHES: dict[str, Sketch] = {"gaussian": _gaussian, "kaczmarz": _kaczmarz}
