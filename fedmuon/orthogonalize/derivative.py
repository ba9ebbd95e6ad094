"""The derivative of a spectral map F(M) = U f(S) V^T, f odd, by Daleckii and Krein.

F is the gradient of M -> sum_i int_0^{s_i} f, so its derivative is self-adjoint: it serves a
reverse pass as it is. With M = U S V^T thin, K = U^T H V, w_i = f(s_i) / s_i and K = K_+ + K_-, the
symmetric and the skew part,

    DF(M)[H] = U (A o K_+ + B o K_-) V^T + (H - U K V^T) V w V^T + U w U^T (H - U K V^T)
    A_ij = (f_i - f_j) / (s_i - s_j)        B_ij = (f_i + f_j) / (s_i + s_j)

since dU = U a and dV = V b of skew a, b solve s_j a_ij - s_i b_ij = K_ij off the diagonal, and the
last two terms turn the spans themselves (one is 0, as U or V is square, and left out). A and B are
bounded by the Lipschitz constant of f, whatever the gaps between singular values; torch's own
derivative of eigh divides by them, and the softmax's gradients have s_q = 0.

With f = s / h, the product rule of divided differences keeps A free of cancellation:
2 A_ij = w_i + w_j - (s_i + s_j) w_i w_j (h_i - h_j) / (s_i - s_j).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Divisor = Callable[[Tensor, Tensor], Tensor]  # (s [..., q], root [..., 1]) -> s / f(s)


class Spectral(torch.autograd.Function):
    """A spectral map of M, by whatever `compute` does, with this derivative in M."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, root: Tensor, divisor: Divisor, compute: Any) -> Tensor:
        """The map's image [..., m, n] of M [..., m, n]; root [...] or []."""
        ctx.save_for_backward(*factors(matrix, root, divisor))
        return compute(matrix.detach())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """DF(M)[H] of the cotangent H."""
        return derivative(ctx.saved_tensors, cotangents[0]), None, None, None


def factors(matrix: Tensor, root: Tensor, divisor: Divisor) -> tuple[Tensor, ...]:
    """U, V^T, w, A and B of M."""
    u, s, vh = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
    h = divisor(s, root.detach().double().unsqueeze(-1))
    w = h.reciprocal()
    one, other = s.unsqueeze(-1), s.unsqueeze(-2)
    total, weights = one + other, w.unsqueeze(-1) + w.unsqueeze(-2)
    bent = total * w.unsqueeze(-1) * w.unsqueeze(-2) * _slope(s, h, root, divisor)
    turned = ((s * w).unsqueeze(-1) + (s * w).unsqueeze(-2)) / total
    turned = torch.where(total > 0, turned, weights / 2)
    return tuple(one.to(matrix.dtype) for one in (u, vh, w, (weights - bent) / 2, turned))


def _slope(s: Tensor, h: Tensor, root: Tensor, divisor: Divisor) -> Tensor:
    """(h_i - h_j) / (s_i - s_j), of a hypotenuse or of what is linear in pieces."""
    if divisor is torch.hypot:
        return (s.unsqueeze(-1) + s.unsqueeze(-2)) / (h.unsqueeze(-1) + h.unsqueeze(-2))
    gap = s.unsqueeze(-1) - s.unsqueeze(-2)
    above = (s > root.double().unsqueeze(-1)).double().unsqueeze(-1)
    return torch.where(gap == 0, above, (h.unsqueeze(-1) - h.unsqueeze(-2)) / gap)


def derivative(found: tuple[Tensor, ...], towards: Tensor) -> Tensor:
    """DF(M)[H] [..., m, n] of H, from the factors of M."""
    u, vh, w, even, odd = found
    right = towards @ vh.mT
    inner = u.mT @ right
    core = even * (inner + inner.mT) / 2 + odd * (inner - inner.mT) / 2
    if vh.shape[-2] == vh.shape[-1]:  # V is square
        return (u @ core + (right - u @ inner) * w.unsqueeze(-2)) @ vh
    return u @ (core @ vh + (u.mT @ towards - inner @ vh) * w.unsqueeze(-1))
