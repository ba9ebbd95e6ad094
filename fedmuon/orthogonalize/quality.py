"""How good an inexact polar map was at given matrices, measured in float64, whatever the map.

(gamma, nu) of 002, Assumption 2.1, and the residual and polar error of 004, Definition 3; what is
proved of them is in `guarantees`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Quality(NamedTuple):
    """<M, T(M)> = (1 - gamma) ||M||_* and ||T(M)||_op = 1 + nu, or less where nu = 0; both [...].

    A zero matrix, which any output serves equally, has gamma = 0.
    """

    gamma: Tensor
    nu: Tensor


def quality(matrix: Tensor, output: Tensor) -> Quality:
    """(gamma, nu) of a map that took M [..., m, n] to the output [..., m, n]."""
    alignment = (matrix.double() * output.double()).sum((-2, -1))
    return Quality(_lost(matrix, alignment), (_operator_norm(output) - 1).clamp_min(0))


def mean_quality(matrix: Tensor, outputs: Tensor) -> Quality:
    """(gamma, nu) of a random map from draws [k, ..., m, n]: means stand for the expectations."""
    alignment = (matrix.double() * outputs.double()).sum((-2, -1)).mean(0)
    size = _operator_norm(outputs).square().mean(0).sqrt()
    return Quality(_lost(matrix, alignment), (size - 1).clamp_min(0))


def orthogonality_residual(matrix: Tensor, output: Tensor) -> Tensor:
    """||Pi - Z Z^T||_op [...], Pi the projector onto the column space of M (004, Definition 3)."""
    u, kept, _ = _compact(matrix)
    basis, z = u * kept.unsqueeze(-2), output.double()
    return torch.linalg.eigvalsh(basis @ basis.mT - z @ z.mT).abs().amax(-1)


def polar_error(matrix: Tensor, output: Tensor) -> Tensor:
    """||U V^T - Z||_op [...] from the compact SVD of M (004, Definition 3)."""
    u, kept, vh = _compact(matrix)
    return _operator_norm((u * kept.unsqueeze(-2)) @ vh - output.double())


def initial_residual(matrix: Tensor) -> Tensor:
    """delta_0 [...] of M / ||M||_F: 1 - (s_r / ||M||_F)^2, s_r the least positive (004, App. D)."""
    s = torch.linalg.svdvals(matrix.double())
    kept = s > _cut(matrix) * s[..., :1]
    least = torch.where(kept, s, torch.inf).amin(-1)
    size = s.square().sum(-1)
    return torch.where(size > 0, 1 - least.square() / size, 0.0)


def _lost(matrix: Tensor, alignment: Tensor) -> Tensor:
    nuclear = torch.linalg.svdvals(matrix.double()).sum(-1)
    return torch.where(nuclear > 0, 1 - alignment / nuclear, 0.0)


def _operator_norm(stack: Tensor) -> Tensor:
    return torch.linalg.svdvals(stack.double())[..., 0]


def _compact(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, which singular values are not zero, and V^T."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u, s > _cut(matrix) * s[..., :1], vh


def _cut(matrix: Tensor) -> float:
    """The share of the largest singular value that rounding of the input may leave of a zero."""
    return max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps
