"""The exact matrix sign (polar factor) U V^T, and smoothed variants that are Lipschitz.

Each function applies a scalar function to the singular values s of a stack of matrices M = U
diag(s) V^T. `fedmuon.orthogonalize.lipschitz` returns the functions' Lipschitz constants.
"""

import torch
from torch import Tensor

from fedmuon.core.device import at_hand, holds, to_device
from fedmuon.orthogonalize.spectral import (
    TARGETS,
    Divisor,
    Spectral,
    apply,
    by_svd,
    gram,
    inverse,
    per_matrix,
    spectral_map,
    wide,
)

# Within this range, the squares of float64 entries are normal numbers. Float32 inputs are always
# within it.
_LOW, _HIGH = 1e-280, 1e280


def smoothed_polar(matrix: Tensor, lam: float | Tensor) -> Tensor:
    """Replace each singular value s by s / sqrt(s^2 + lam).

    The result is M (M^T M + lam I)^(-1/2).

    Guarantee: 1/sqrt(lam)-Lipschitz in the Frobenius norm. This constant is the smallest possible
    one, because the slope at s = 0 is 1/sqrt(lam). For lam -> 0, the result approaches that of
    `exact_sign`.

    Source: Stability note, Lemma D.1.

    Args:
        matrix: The stack M `[..., m, n]`.
        lam: The smoothing λ > 0, one number or a tensor that broadcasts over the leading axes.

    Returns:
        The smoothed polar factors `[..., m, n]`, with the dtype and device of M.

    Raises:
        InputError: If `lam` is not positive and finite, or does not broadcast.
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import smoothed_polar
        >>> smoothed_polar(torch.diag(torch.tensor([3.0, 4.0])), lam=16.0)
        tensor([[0.6000, 0.0000],
                [0.0000, 0.7071]])
    """
    mend = "lam must be positive and finite. For lam = 0, use exact_sign."
    root = per_matrix("lam", lam, matrix, mend).sqrt()
    return spectral_map(matrix, root, torch.hypot)


def clipped_sign(matrix: Tensor, gamma: float | Tensor) -> Tensor:
    """Replace each singular value s by min(s / gamma, 1).

    Guarantee: 1/gamma-Lipschitz in the Frobenius norm. This constant is the smallest possible one,
    because the map is M / gamma for small M. The result equals `exact_sign` if all singular values
    are at least gamma.

    Source: Stability note, Lemma D.9.

    Args:
        matrix: The stack M `[..., m, n]`.
        gamma: The clipping level γ > 0, one number or a tensor that broadcasts over the leading
            axes.

    Returns:
        The clipped signs `[..., m, n]`, with the dtype and device of M.

    Raises:
        InputError: If `gamma` is not positive and finite, or does not broadcast.
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import clipped_sign
        >>> clipped_sign(torch.diag(torch.tensor([0.05, 4.0])), gamma=0.1)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])
    """
    mend = "gamma must be positive and finite. For gamma = 0, use exact_sign."
    root = per_matrix("gamma", gamma, matrix, mend)
    return spectral_map(matrix, root, torch.maximum)


def exact_sign(matrix: Tensor) -> Tensor:
    """Return the polar factor U V^T, which replaces all positive singular values by 1.

    Singular values up to max(m, n) eps s_max count as zero, because rounding errors have this size.
    Here, eps is the machine epsilon of M's dtype.

    Guarantee: no Lipschitz constant for all matrices, because the map jumps where a singular value
    crosses 0. The map is 1/gamma-Lipschitz between matrices whose smallest singular value is at
    least gamma. The Stability note states the larger constant 2/gamma (Lemma D.12).

    Source: Stability note, section 3.

    Args:
        matrix: The stack M `[..., m, n]`.

    Returns:
        The polar factors `[..., m, n]`, with the dtype and device of M.

    Raises:
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import exact_sign
        >>> exact_sign(torch.tensor([[0.0, 2.0], [5.0, 0.0]]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    if matrix.numel() == 0:
        return matrix.clone()
    if matrix.requires_grad:  # the derivative exists where no singular value is 0
        return Spectral.apply(matrix, matrix.new_zeros(()), lambda s, _: s, exact_sign)
    view, flipped = wide(matrix)
    cut = view.shape[-1] * torch.finfo(matrix.dtype).eps
    # With float64, the Gram path fails if M does not have full rank. If checks are deferred, its
    # success is therefore not assumed.
    out = _by_gram(view, cut) if at_hand(view.device) or view.dtype != torch.float64 else None
    if out is None:
        zero = torch.zeros((), dtype=torch.float64, device=view.device)
        out = by_svd(view, zero, _drop_below(cut))
    return out.mT if flipped else out


def quotient_sign(matrix: Tensor) -> Tensor:
    """Return the exact sign of matrices whose rows sum to 0, without effects of rounding errors.

    The columns of Q [n, n-1] are an orthonormal basis of the vectors with sum 0. Then M equals (M
    Q) Q^T, and U V^T equals sign(M Q) Q^T. In floating point, the sums of rows have rounding
    errors. If M is a small sum of large gradients, `exact_sign` would treat this error as another
    singular direction.

    Guarantee: the same as for `exact_sign`.

    Args:
        matrix: The stack M `[..., m, n]` with M 1 = 0 up to rounding.

    Returns:
        The polar factors `[..., m, n]`, with the dtype and device of M.

    Raises:
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import quotient_sign
        >>> quotient_sign(torch.tensor([[2.0, -2.0]]))
        tensor([[ 0.7071, -0.7071]])
    """
    # Helmert's basis: column k is (1, ..., 1, -k, 0, ...) over its norm, for k = 1 .. n-1.
    n = matrix.shape[-1]
    count = torch.arange(1, n, dtype=torch.float64)
    helmert = torch.ones(n, n - 1, dtype=torch.float64).triu()
    helmert[1:].diagonal().copy_(-count)
    basis = to_device(helmert / (count * (count + 1)).sqrt(), matrix.device, matrix.dtype)
    return (basis @ exact_sign(basis.mT @ matrix.mT)).mT


def gaussian_smoothed_sign(matrix: Tensor, sigma: float | Tensor, noise: Tensor) -> Tensor:
    """Return exact_sign(M + sigma H) for a standard normal matrix H that the caller draws.

    Guarantee: 1/gamma-Lipschitz with probability 1 - alpha, where gamma bounds the smallest
    singular value of M + sigma H from below (Lemma D.10). gamma depends on sigma, alpha, the number
    of calls and the shape.

    Source: Stability note, Corollary D.11.

    Args:
        matrix: The stack M `[..., m, n]`.
        sigma: The noise level σ >= 0, one number or a tensor that broadcasts over the leading axes.
        noise: The matrix H `[m, n]`, or a stack of matrices with leading axes that broadcast. Runs
            on neighbouring data sets must use the same H.

    Returns:
        The polar factors `[..., m, n]`, with the dtype and device of M.

    Raises:
        InputError: If `sigma` is negative or not finite, or does not broadcast.
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import gaussian_smoothed_sign
        >>> gaussian_smoothed_sign(torch.zeros(2, 2), sigma=0.1, noise=torch.eye(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    mend = "sigma must be finite and 0 or more. With sigma = 0, the result is exact_sign."
    level = per_matrix("sigma", sigma, matrix, mend, zero=True).to(matrix.dtype)
    shift = to_device(noise, matrix.device, matrix.dtype) * level[..., None, None]
    return exact_sign(matrix + shift)


def _drop_below(cut: float) -> Divisor:
    """Return a divisor that is s for s > cut max(s), and infinite for smaller s.

    Smaller singular values are therefore replaced by 0.
    """

    def divisor(s: Tensor, _: Tensor) -> Tensor:
        return torch.where(s > cut * s.amax(-1, keepdim=True), s, torch.inf)

    return divisor


def _by_gram(view: Tensor, cut: float) -> Tensor | None:
    """Return U V^T of [..., q, d] from the float64 Gram matrix G, or None if G is inaccurate.

    An eigenvalue w of G has a relative error of about eps tr G / w. This error must be within the
    target, except for eigenvalues below the cut if the cut is far above eps tr G. For float32
    inputs, the cut is always far above eps tr G, because G is float64.
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
    if not holds(((noise <= TARGETS[view.dtype] * values) | gone).all()):
        return None
    zero = torch.zeros_like(trace[..., 0])
    small = inverse(values.clamp_min(0).sqrt(), vectors, zero, _drop_below(cut))
    # The last product multiplies an inverse of norm 1/s_min by M. Its error is cond(M) times the
    # eps of the dtype in which it is computed.
    info = torch.finfo(view.dtype)
    mild = info.eps**2 * trace <= TARGETS[view.dtype] ** 2 * values
    narrow = at_hand(view.device) and bool(
        mild.all()
    )  # rare, so not assumed if checks are deferred
    return apply(small, view, view.dtype if narrow else torch.float64)
