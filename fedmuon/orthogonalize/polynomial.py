"""Newton–Schulz iterations, which apply odd polynomials to a matrix with matrix products only.

Half precision (bfloat16, float16) works as in torch.optim.Muon: operands and results of every
product are rounded to this dtype, and sums are float32. A CPU without half-precision products uses
float32 products with the same roundings. These products are a hundred times faster than torch's
fallback. Matrices that arrive in half precision take torch's steps. Longer matrices in full
precision take several steps on the Gram matrix before they are multiplied (`half_segments`).
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fedmuon.core.device import assumed, holds
from fedmuon.orthogonalize.coefficients import (
    AOL,
    NORMALIZATIONS,
    Coefficients,
    Schedule,
    Step,
    divisor_floor,
    schedule,
)
from fedmuon.orthogonalize.lipschitz_constants import positive_schedule
from fedmuon.orthogonalize.spectral import (
    WORK_DTYPES,
    add_product,
    apply,
    gram,
    norm,
    peak,
    symmetric_product,
    wide,
)

# Divisors in this range can be squared without overflow and without relevant underflow.
_RANGE = {torch.float16: (1e-2, 6e4), torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}
# (||M||_F [B], scale by which M was already divided: [B] or 1) -> divisor of M [B]
Divide = Callable[[Tensor, Tensor | float], Tensor]

_HALF = (torch.bfloat16, torch.float16)
# Largest relative error of the Gram matrix in half precision, at its small eigenvalues.
_DRIFT = 0.2
_SMALL = 64  # a product with a shorter side than this is as slow as reading its operands
_WIDER = 2  # slowdown of a product in the next wider dtype


def newton_schulz(
    matrix: Tensor,
    steps: int,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
    products: torch.dtype | None = None,
) -> Tensor:
    """Start with Z = M / divisor, and iterate Z <- a Z + b (Z Z^T) Z + c (Z Z^T)^2 Z + ...

    The result is U p_T(S) V^T, where M / divisor = U S V^T and p_T is the composed polynomial. The
    result is close to U V^T if the coefficients converge and no positive singular value is very
    small.

    Guarantee: L-Lipschitz in the Frobenius norm, where L is the steepest slope of p_T on [0, 1]
    divided by the floor of the divisor (eps, or 1 for `unit`). The Stability note states a larger
    constant, Lambda_T. With `aol`, no constant L exists, and U and V are those of the
    preconditioned matrix.

    Source: Stability note, Lemma D.3. Each table in `COEFFICIENTS` names its own source.

    Args:
        matrix: The stack M `[..., m, n]`.
        steps: Number of steps T, at least 0.
        coefficients: A name in `COEFFICIENTS`, one step (a, b, c, ...), or a list of steps, of
            which the last one repeats.
        eps: Positive lower bound of the divisor, except for `unit`.
        normalization: Name of the divisor. `plus` is ||M||_F + eps, `max` is max(||M||_F, eps), and
            `unit` is max(||M||_F, 1). `aol` replaces the division by the preconditioning of
            Turbo-Muon.
        products: The dtype of the iterates after the division, such as torch.bfloat16, or None for
            the dtype of M. If a dtype is set, rounding errors are a few eps of this dtype, and no
            constant L exists.

    Returns:
        Z after the last step `[..., m, n]`, with the dtype and device of M.

    Raises:
        InputError: If an option is out of range, a name is unknown, or the polynomial of a named
            set reverses singular values, as that of `turbo`.
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import newton_schulz
        >>> newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), steps=10).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    polynomials = positive_schedule(coefficients, steps)
    floor = divisor_floor(eps, normalization)
    if normalization == AOL:
        started = precondition(matrix, floor)
        ones_like = torch.ones_like
        return _iterate(started, polynomials, lambda size, scale: ones_like(size) / scale, products)
    rule = NORMALIZATIONS[normalization]
    return _iterate(matrix, polynomials, lambda size, scale: rule(size, floor / scale), products)


def precondition(matrix: Tensor, floor: float) -> Tensor:
    """Divide row i of M by max(sqrt(sum_j |G_ij|), floor), with G = M M^T (AOL preconditioning).

    For a matrix with more rows than columns, the columns are divided and G = M^T M, as in the
    paper. The operator norm of the result is at most 1. Proof: let D be the diagonal matrix of the
    divisors. The Gram matrix D^-1 G D^-1 of the result is similar to D^-2 G. In D^-2 G, the
    absolute values of a row sum to at most 1. The singular values of the result are usually nearer
    to 1 than those of M / ||M||_F. The polar factor of the result differs from the polar factor of
    M, unless G is diagonal or all divisors are equal.

    Source: Turbo-Muon (arXiv:2512.04632), based on almost-orthogonal layers (arXiv:2208.03160). In
    the authors' code, eps bounds the sum over j instead of its square root.

    Args:
        matrix: The stack M [..., m, n].
        floor: The smallest divisor, which must be positive. Rows that are zero stay zero.
    """
    if matrix.numel() == 0:
        return matrix.clone()
    flipped = matrix.shape[-2] > matrix.shape[-1]
    view = matrix.mT if flipped else matrix
    work = torch.float64 if view.dtype == torch.float64 else torch.float32
    largest = peak(view.to(work))[..., None, None]
    largest = torch.where(largest > 0, largest, 1.0)
    rows = view.to(work) / largest
    sums = symmetric_product(rows, rows.mT).abs().sum(-1, keepdim=True)
    scaled_floor = (floor / largest).clamp_min(torch.finfo(work).tiny)
    out = (rows / torch.maximum(sums.sqrt(), scaled_floor)).to(view.dtype)
    return out.mT if flipped else out


def scaled_newton_schulz(
    matrix: Tensor, divisor: Tensor, steps: int, coefficients: Coefficients = "cubic"
) -> Tensor:
    """Iterate like `newton_schulz`, but with the given divisor.

    Source: Nesterov Muon, section 2.

    Args:
        matrix: The stack M [..., m, n].
        divisor: A tensor [...] with one positive number per matrix. Below ||M||_op, the iteration
            may diverge.
        steps: Number of steps T, at least 0.
        coefficients: As for `newton_schulz`.

    Returns:
        p_T(M / divisor) [..., m, n].
    """
    divisors = divisor.expand(matrix.shape[:-2]).reshape(-1)
    polynomials = schedule(coefficients, steps)
    return _iterate(matrix, polynomials, lambda size, scale: (divisors / scale).to(size))


def _iterate(
    matrix: Tensor, polynomials: Schedule, divide: Divide, products: torch.dtype | None = None
) -> Tensor:
    if matrix.numel() == 0:
        return matrix.clone()
    view, flipped = wide(matrix)
    stack = view.view(-1, *view.shape[-2:])
    out = _iterate_on_gram(stack, polynomials, divide) if products not in _HALF else None
    if out is None:  # iterate on Z itself, with two large products per step
        segments = half_segments(*stack.shape[-2:], stack.dtype, products, polynomials)
        z = _normalize(stack, divide).to(products)
        if z.dtype not in _HALF or native_half(z.dtype, z.device):
            out = _iterate_on_matrix(segments, z, lambda x: x)
        else:
            half = z.dtype
            out = _iterate_on_matrix(segments, z.float(), lambda x: x.to(half).float()).to(half)
    out = out.to(matrix.dtype).view(view.shape)
    return out.mT if flipped else out


def _normalize(stack: Tensor, divide: Divide) -> Tensor:
    """Return M divided by its divisor. Very large or small matrices are first divided by max|M|."""
    divisor = divide(torch.linalg.vector_norm(stack, dim=(-2, -1)), 1.0)
    if _in_range(divisor):
        return stack / divisor[..., None, None]
    wide_stack = stack.double()
    largest = peak(wide_stack)
    scale = torch.where(largest > 0, largest, 1.0)
    unit = wide_stack / scale[..., None, None]
    return (unit / divide(norm(unit), scale)[..., None, None]).to(stack.dtype)


def _in_range(divisor: Tensor) -> bool:
    if assumed(divisor.device):
        return True
    low, high = _RANGE.get(divisor.dtype, _RANGE[torch.float32])
    return holds(((divisor >= low) & (divisor <= high)).all())


def native_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device multiplies matrices of this half-precision dtype."""
    if device.type != "cpu":
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def half_segments(
    short: int, long: int, given: torch.dtype, products: torch.dtype | None, polynomials: Schedule
) -> list[Schedule]:
    """Divide the steps into segments, after each of which Z and its Gram matrix are new.

    A segment of one step is an ordinary step. In a longer segment, only the Gram matrix G of the
    segment's first Z changes (see `_iterate_on_gram`). Step t multiplies the errors of its small
    eigenvalues by a_t^2, so the product of these factors before the last step is bounded. The
    restarts are those of Gram Newton-Schulz (Dao AI Lab): with float16, their three quintic steps
    after two of polar-express follow from the bound.
    """
    alone: list[Schedule] = [[step] for step in polynomials]
    if products not in _HALF or given in _HALF or short < _SMALL:
        return alone
    segments, error = list[Schedule](), float(torch.finfo(products).eps)
    for step in polynomials:
        last = segments[-1] if segments else []
        polynomial = degree(step) and last and degree(last[-1])
        if polynomial and error * _gain(last) ** 2 <= _DRIFT:
            segments[-1] = [*last, step]
        else:
            segments.append([step])
    aspect = long / short
    cost = sum(2 * aspect + 4 * len(steps) - 3 for steps in segments)
    return segments if cost < len(polynomials) * (2 * aspect + 1) else alone


def _iterate_on_matrix(
    segments: list[Schedule], z: Tensor, rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return Z_T [B, q, d], from steps Z <- a Z + U Z with U = b G + c G^2 + ... and G = Z Z^T.

    A single matrix is not batched, because plain products are faster.
    """
    if len(z) == 1 and z.ndim == 3:
        return _iterate_on_matrix(segments, z[0], rounded)[None]
    for first, *others in segments:
        if degree(first) == 0:
            z = rounded(z * first[0])
            continue
        g = rounded(symmetric_product(z, z.mT))
        if not others:
            small, scale = _bracket(first, g, rounded)
            z = rounded(add_product(small, z, z, first[0], scale))
            continue
        product = factor = rounded(_polynomial(first, g, rounded))
        for step in others:
            g = rounded(symmetric_product(factor, g))
            g = rounded(symmetric_product(g, factor))
            factor = rounded(_polynomial(step, g, rounded))
            product = rounded(symmetric_product(factor, product))
        z = rounded(add_product(product, z))
    return z


def _bracket(
    step: Step, g: Tensor, rounded: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, float]:
    """Return U [B, q, q] and a number s with s U = b G + c G^2 + ..., for a degree >= 1."""
    top = degree(step)
    if top == 1:
        return g, step[1]
    out = rounded(symmetric_product(g, g, g, step[top - 1], step[top]))
    for k in range(top - 2, 0, -1):
        out = rounded(symmetric_product(out, g, g, step[k]))
    return out, 1.0


def degree(step: Step) -> int:
    """Return the degree of a step, which is the largest k with a term x^(2k+1)."""
    top = len(step) - 1
    while top > 0 and not step[top]:
        top -= 1
    return max(top, 0)


def _iterate_on_gram(view: Tensor, polynomials: Schedule, divide: Divide) -> Tensor | None:
    """Return Z_T from an iteration on G = Z Z^T, or None if the iteration on Z is better.

    This iteration needs only two products of the size of M. Z_T is P Z_0, where P is the product of
    the small matrices Q_t = a I + b G_t + c G_t^2 + ... [B, q, q], and G_{t+1} = Q_t G_t Q_t. All
    these matrices are polynomials of G_0, so their products are symmetric. Let gain be the product
    of all a_t, which is the slope of p_T at 0. Rounding changes small eigenvalues of G_0 by eps,
    and step t multiplies this error by a_t^2. The final error is therefore eps gain^2, and that of
    the direct iteration is eps gain. The function uses the first dtype for which eps gain^2 is
    within tolerance.
    """
    for work in gram_dtypes(view.shape[-2], view.shape[-1], view.dtype, polynomials):
        product = gram(view, work)
        size = product.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        divisor = divide(size, 1.0)
        if _in_range(divisor):
            g = product / divisor.square()[..., None, None]
            small = q = _polynomial(polynomials[0], g)
            for step in polynomials[1:]:
                g = symmetric_product(symmetric_product(q, g), q)
                q = _polynomial(step, g)
                small = symmetric_product(q, small)
            mild = torch.finfo(view.dtype).eps * _gain(polynomials) <= 10 * _tolerance(view.dtype)
            return apply(small / divisor[..., None, None], view, view.dtype if mild else work)
    return None


def gram_dtypes(
    short: int, long: int, dtype: torch.dtype, polynomials: Schedule
) -> tuple[torch.dtype, ...]:
    """Return the dtypes for the Gram iteration on matrices [short, long], the best dtype first.

    The result is empty if the iteration on Z itself is better. The Gram iteration is faster if it
    needs less arithmetic, or if reading Z takes most of the time. Let q be the shorter side, and r
    q the longer side. For T quintic steps, the Gram iteration needs 2 r + 4 T - 3 products of 2 q^3
    flop, which cost `_WIDER` times as much in a wider dtype. The iteration on Z needs T (2 r + 1)
    products.
    """
    if dtype in _HALF or not polynomials:
        return ()
    steps, aspect = len(polynomials), long / short
    allowed = _tolerance(dtype) / _gain(polynomials) ** 2
    dtypes = tuple(work for work in WORK_DTYPES[dtype] if torch.finfo(work).eps <= allowed)
    if not dtypes or short < _SMALL:
        return dtypes if aspect >= 2 else ()
    price = _WIDER if dtypes[0] != dtype else 1
    faster = price * (2 * aspect + 4 * steps - 3) < steps * (2 * aspect + 1)
    return dtypes if faster else ()


def _gain(polynomials: Schedule) -> float:
    """Return an upper bound on the slope of the composed polynomial p_T at 0."""
    return prod(max(1.0, abs(step[0])) for step in polynomials)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative error that is allowed for the iteration on the Gram matrix."""
    return 1e-10 if dtype == torch.float64 else 1e-5


def _polynomial(step: Step, g: Tensor, rounded: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Return a I + b G + c G^2 + ... [B, q, q]."""
    if degree(step) == 0:
        out = torch.zeros_like(g)
    else:
        small, scale = _bracket(step, g, rounded)
        out = small * scale if small is g else small
    out.diagonal(dim1=-2, dim2=-1).add_(step[0])
    return out
