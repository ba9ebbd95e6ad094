"""Orthonormal bases of what tall matrices [B, m, l] span, by products rather than reflections.

A Gram matrix and its Cholesky factor cost a few GEMMs, where Householder QR works column by column.
They square the condition number, so the Gram matrix is float64, its pivots are looked at, and
matrices whose pivots are lost in rounding go to a QR with a decision on the rank.
"""

import torch
from torch import Tensor

from fedmuon.orthogonalize.spectral import gram

# Squared sine of the angle between a column and the ones before it: below this, rounding of the
# float64 Gram matrix (about 1e-13 for a thousand columns) starts to show in the factor.
_LEAST_PIVOT = 1e-10


def orthonormal(samples: Tensor) -> Tensor:
    """Q [B, m, l] with the range of `samples`; columns beyond its rank are zero.

    Cholesky QR twice: the first pass leaves columns that are orthonormal to eps cond, the second
    mends that to eps.
    """
    return conditioned(conditioned(samples))


def conditioned(samples: Tensor) -> Tensor:
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
    if bool(lost.all()):
        return _ranked(samples, size)
    inverse = torch.linalg.solve_triangular(factor, torch.diag_embed(1 / size), upper=False)
    out = multiply(samples, inverse.mT.to(samples.dtype))
    if bool(lost.any()):
        out[lost] = _ranked(samples[lost], size[lost])
    return out


def _ranked(samples: Tensor, size: Tensor) -> Tensor:
    """The same by QR and an SVD of the small factor; directions that rounding made are zeroed."""
    q, r = torch.linalg.qr(samples.double() / size.unsqueeze(-2))
    u, s, _ = torch.linalg.svd(r)
    cut = 10 * samples.shape[-2] * torch.finfo(torch.float64).eps
    kept = (s > cut * s.amax(-1, keepdim=True)).unsqueeze(-2)
    return (q @ (u * kept)).to(samples.dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """A B of stacks [B, ., .]; one matrix alone goes to the plain product, which is faster."""
    return (a[0] @ b[0])[None] if len(a) == len(b) == 1 else a @ b
