"""Randomized low-rank polar maps (002, Algorithms 1 and 2): a quality, not a Lipschitz constant."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmuon.orthogonalize.polynomial import newton_schulz

TINY = 1e-30  # keeps the zero matrix at zero; below any norm that matters


def randomized_polar(
    M: Tensor,
    rank: int,
    oversample: int = 2,
    power: int = 1,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "quintic",
    sketch: str = "gaussian",
    generator: np.random.Generator | None = None,
) -> Tensor:
    """Q Z_q with Q a basis of (M M^T)^h M Omega and Z_q Newton-Schulz on Q^T M / ||M||_F.

    M is [..., m, n], the columns are sketched; the output has rank at most l = rank + oversample.
    One realization of the sketch serves the whole stack, so that coupled runs stay coupled.
    """
    width = rank + oversample
    if not 1 <= width <= min(M.shape[-2:]):
        raise ValueError(
            f"rank + oversample = {width} must lie in 1..{min(M.shape[-2:])} for matrices of shape "
            f"{tuple(M.shape[-2:])}: lower rank or oversample"
        )
    rng = np.random.default_rng() if generator is None else generator
    if sketch not in SKETCHES:
        raise ValueError(f"sketch '{sketch}' is unknown: choose one of {', '.join(SKETCHES)}")
    scale = M.abs().amax((-2, -1), keepdim=True).clamp_min(TINY)
    Z = M / scale
    Z = Z / torch.linalg.matrix_norm(Z, keepdim=True).clamp_min(TINY)
    basis = _range(Z, SKETCHES[sketch](Z, width, rng), power)
    reduced = newton_schulz(basis.mT @ Z, steps, coefficients, normalization="unit")
    return basis @ reduced


def _range(Z: Tensor, samples: Tensor, power: int) -> Tensor:
    """An orthonormal basis [..., m, l] of (Z Z^T)^h samples, orthonormalized between the powers."""
    basis = torch.linalg.qr(samples).Q
    for _ in range(power):
        basis = torch.linalg.qr(Z @ torch.linalg.qr(Z.mT @ basis).Q).Q
    return basis


def _gaussian(Z: Tensor, width: int, rng: np.random.Generator) -> Tensor:
    """Z Omega with Omega [n, l] standard Gaussian (002, Algorithm 1, line 1)."""
    omega = torch.from_numpy(rng.standard_normal((Z.shape[-1], width)))
    return Z @ omega.to(Z.device, Z.dtype)


def _kaczmarz(Z: Tensor, width: int, rng: np.random.Generator) -> Tensor:
    """l columns drawn with probability pi_j = ||Z_j||^2 / ||Z||_F^2, scaled by 1/sqrt(l pi_j)
    (002, Algorithm 2); all matrices of a stack invert their own distribution at shared uniforms."""
    share = Z.square().sum(-2).double()
    edges = share.cumsum(-1)
    uniforms = torch.from_numpy(rng.random(width)).to(Z.device)
    points = uniforms * edges[..., -1:]
    chosen = torch.searchsorted(edges, points.contiguous(), right=True).clamp_max(Z.shape[-1] - 1)
    probability = (share / edges[..., -1:].clamp_min(TINY)).gather(-1, chosen).clamp_min(TINY)
    columns = Z.gather(-1, chosen[..., None, :].expand(*Z.shape[:-1], width))
    return columns * (width * probability).rsqrt()[..., None, :].to(Z.dtype)


SKETCHES = {"gaussian": _gaussian, "kaczmarz": _kaczmarz}
