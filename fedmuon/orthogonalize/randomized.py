"""Randomized low-rank polar maps (002, Algorithms 1 and 2): a quality, not a Lipschitz constant.

With Q an orthonormal basis of the range of Y = (M M^T)^h M Omega, the map is Q p_T(Q^T M / delta).
It depends on Y through its range alone, so between the products any well-conditioned basis may
stand for Y: powers lose no digits, and in exact arithmetic nothing changes.
"""

from typing import Literal

import torch
from torch import Tensor

from fedmuon.errors import InputError, NonFinite
from fedmuon.orthogonalize.basis import conditioned, multiply, orthonormal
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.polynomial import scaled_newton_schulz
from fedmuon.orthogonalize.sketches import SKETCHES, Generators, listed
from fedmuon.orthogonalize.spectral import gram, per_matrix

Axis = Literal["columns", "rows"]
Delta = Literal["frobenius", "operator"]

DELTAS: dict[str, Delta] = {"gaussian": "frobenius", "kaczmarz": "operator"}  # as 002 pairs them
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
        return randomized_polar(
            M.mT, rank, oversample, power, steps, coefficients, sketch, generator, "columns", delta
        ).mT
    width = _width(M, rank, oversample, power, sketch)
    if M.numel() == 0:
        return M.clone()
    work = M.dtype if M.dtype in (torch.float32, torch.float64) else torch.float32
    stack, scale = _in_range(M.reshape(-1, *M.shape[-2:]).to(work))
    samples = SKETCHES[sketch](stack, width, listed(generator, len(stack)))
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
    if bool(((size >= _LOW) & (size <= _HIGH)).all()):
        return stack, torch.ones_like(size)
    peak = stack.abs().amax((-2, -1))
    if not bool(peak.isfinite().all()):
        raise NonFinite("A matrix to orthogonalize holds NaN or infinity: lower the learning rate.")
    scale = torch.where(peak > 0, peak, 1.0)
    return stack / scale[:, None, None], scale


def _range(stack: Tensor, samples: Tensor, power: int) -> Tensor:
    """An orthonormal basis [B, m, l] of (M M^T)^h samples, reconditioned before every product."""
    for _ in range(power):
        across = multiply(stack.mT, conditioned(samples))
        samples = multiply(stack, conditioned(across))
    return orthonormal(samples)


def _divisor(
    delta: Delta | float | Tensor, M: Tensor, stack: Tensor, reduced: Tensor, scale: Tensor
) -> Tensor:
    """delta [B] in the units of the stack; 1 for a matrix that is zero."""
    if isinstance(delta, str):
        if delta not in ("frobenius", "operator"):
            raise InputError(f"delta is {delta!r}: use 'frobenius', 'operator' or a number.")
        size = _operator_norm(reduced) if delta == "operator" else _frobenius_norm(stack)
        return torch.where(size > 0, size, 1.0)
    given = per_matrix("delta", delta, M, "choose delta > 0, at least ||M||_op.")
    return given.expand(M.shape[:-2]).reshape(-1) / scale


def _frobenius_norm(stack: Tensor) -> Tensor:
    return torch.linalg.vector_norm(stack, dim=(-2, -1)).double()


def _operator_norm(reduced: Tensor) -> Tensor:
    """||B||_op [B] of the wide B, from the largest eigenvalue of B B^T."""
    return torch.linalg.eigvalsh(gram(reduced, torch.float64))[:, -1].clamp_min(0).sqrt()
