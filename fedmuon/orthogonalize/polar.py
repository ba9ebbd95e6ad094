"""The polar factor U V^T, the exact matrix sign, and the forms that a parameter makes Lipschitz."""

import torch
from torch import Tensor

from fedmuon.core.device import at_hand, holds, sent
from fedmuon.orthogonalize.spectral import (
    Divisor,
    Spectral,
    apply,
    by_svd,
    gram,
    inverse,
    per_matrix,
    spectral_map,
    target,
    wide,
)

# Squares of float64 entries stay normal numbers between these; float32 inputs always do.
_LOW, _HIGH = 1e-280, 1e280


def smoothed_polar(matrix: Tensor, lam: float | Tensor) -> Tensor:
    """s -> s / sqrt(s^2 + lam) on the singular values (001 Lemma D.1).

    M [..., m, n] -> [..., m, n]; `lam` > 0 is one number or broadcasts over the leading axes.
    """
    mend = "choose lam > 0 (exact_sign is the limit lam -> 0)."
    root = per_matrix("lam", lam, matrix, mend).sqrt()
    return spectral_map(matrix, root, torch.hypot)


def clipped_sign(matrix: Tensor, gamma: float | Tensor) -> Tensor:
    """s -> min(s / gamma, 1) on the singular values (001 Lemma D.9).

    M [..., m, n] -> [..., m, n]; `gamma` > 0 is one number or broadcasts over the leading axes.
    """
    mend = "choose gamma > 0 (exact_sign is the limit gamma -> 0)."
    root = per_matrix("gamma", gamma, matrix, mend)
    return spectral_map(matrix, root, torch.maximum)


def exact_sign(matrix: Tensor) -> Tensor:
    """s -> 1 on the singular values, 0 -> 0 (001, section 3): M [..., m, n] -> U V^T [..., m, n].

    Singular values up to max(m, n) eps s_max count as zero, eps of the input's dtype: they are
    what rounding leaves of a zero.
    """
    if matrix.numel() == 0:
        return matrix.clone()
    if matrix.requires_grad:  # its derivative, where no singular value is 0
        return Spectral.apply(matrix, matrix.new_zeros(()), lambda s, _: s, exact_sign)
    view, flipped = wide(matrix)
    cut = view.shape[-1] * torch.finfo(matrix.dtype).eps
    # Float64's own cut is about its noise: a rank that is not full is a no, not for granted a yes.
    out = _by_gram(view, cut) if at_hand(view.device) or view.dtype != torch.float64 else None
    if out is None:
        out = by_svd(view, torch.zeros((), dtype=torch.float64, device=view.device), _kept(cut))
    return out.mT if flipped else out


def quotient_sign(matrix: Tensor) -> Tensor:
    """exact_sign of M [..., m, n] whose rows sum to 0, in the quotient by the ones vector.

    Where the columns of Q [n, n-1] are an orthonormal basis of what is across from it, M is
    (M Q) Q^T and U V^T is sign(M Q) Q^T. Rounding leaves some M 1 beside 0, which exact_sign takes
    for a direction like others where M is small beside the gradients that it is the sum of.
    """
    across = sent(_across(matrix.shape[-1]), matrix.device, matrix.dtype)
    return (across @ exact_sign(across.mT @ matrix.mT)).mT


def _across(n: int) -> Tensor:
    """Helmert's basis: column k is (1, ..., 1, -k, 0, ...) over its norm, for k = 1 .. n-1."""
    count = torch.arange(1, n, dtype=torch.float64)
    basis = torch.ones(n, n - 1, dtype=torch.float64).triu()
    basis[1:].diagonal().copy_(-count)
    return basis / (count * (count + 1)).sqrt()


def gaussian_smoothed_sign(matrix: Tensor, sigma: float | Tensor, noise: Tensor) -> Tensor:
    """exact_sign(M + sigma H) (001 Corollary D.11), H the caller's standard normal draw.

    M [..., m, n]; `noise` [m, n] or with leading axes that broadcast, so that coupled replicas
    share one H; `sigma` >= 0 is one number or broadcasts over the leading axes.
    """
    mend = "choose sigma >= 0 (0 is exact_sign)."
    level = per_matrix("sigma", sigma, matrix, mend, zero=True).to(matrix.dtype)
    shift = sent(noise, matrix.device, matrix.dtype) * level[..., None, None]
    return exact_sign(matrix + shift)


def _kept(cut: float) -> Divisor:
    """s -> s where s is above the cut, infinity (so that its weight is 0) where it is not."""

    def divisor(s: Tensor, _: Tensor) -> Tensor:
        return torch.where(s > cut * s.amax(-1, keepdim=True), s, torch.inf)

    return divisor


def _by_gram(view: Tensor, cut: float) -> Tensor | None:
    """U V^T of [..., q, d] through the float64 Gram matrix, or None where that is not accurate.

    Its eigenvalues are off by about noise = eps tr G, so one of size w is worth noise / w. Every
    eigenvalue must be worth the target, or be below the cut by a margin that noise cannot fake
    (which float32 inputs offer: their own cut lies far above float64's noise).
    """
    product = gram(view, torch.float64)
    trace = product.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    normal = (trace > _LOW) & (trace < _HIGH)
    if view.dtype != torch.float64:
        normal |= trace == 0
    if not holds(normal.all()):
        return None
    values, vectors = torch.linalg.eigh(product)
    noise = torch.finfo(torch.float64).eps * trace
    threshold = cut**2 * values.amax(-1, keepdim=True)
    gone = (values <= threshold) & (threshold >= 100 * noise)
    if not holds(((noise <= target(view.dtype) * values) | gone).all()):
        return None
    zero = torch.zeros_like(trace[..., 0])
    small = inverse(values.clamp_min(0).sqrt(), vectors, zero, _kept(cut))
    # An inverse of norm 1/s_min times M costs eps of the dtype that multiplies them, times cond M.
    info = torch.finfo(view.dtype)
    mild = info.eps**2 * trace <= target(view.dtype) ** 2 * values
    narrow = at_hand(view.device) and bool(mild.all())  # of float32 rarely: not taken for granted
    return apply(small, view, view.dtype if narrow else torch.float64)
