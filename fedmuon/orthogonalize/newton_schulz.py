"""Newton–Schulz iterations: odd polynomials of a normalized matrix, by matrix products alone."""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fedmuon.errors import InputError, NonFinite
from fedmuon.orthogonalize.coefficients import Coefficients, Schedule, Step, schedule
from fedmuon.orthogonalize.spectral import apply, gram, ladder, left, norm, wide


def _plus(size: Tensor, floor: Tensor | float) -> Tensor:
    return size + floor


def _larger(size: Tensor, floor: Tensor | float) -> Tensor:
    return size.clamp_min(floor)


# What ||M||_F and a floor become as the divisor of M; the floor is eps, for `unit` it is 1.
NORMALIZATIONS: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "plus": _plus,  # ||M||_F + eps (001 Lemma D.3)
    "max": _larger,  # max(||M||_F, eps), as in torch.optim.Muon
    "unit": _larger,  # max(||M||_F, 1) (000)
}

# Largest relative error that a rearranged computation may cost, by dtype of the input.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Divisors between these square without overflow, and without an underflow that matters.
_RANGE = {torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}


def newton_schulz(
    matrix: Tensor,
    steps: int,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> Tensor:
    """`steps` times Z <- a Z + b (Z Z^T) Z + c (Z Z^T)^2 Z + ... (001 Lemma D.3).

    M [..., m, n] -> [..., m, n], starting at Z = M / divisor as `NORMALIZATIONS` has it. The result
    is U p_T(S) V^T with the composed polynomial p_T: near U V^T where the schedule converges, and
    not more than that.
    """
    polynomials = schedule(coefficients, steps)
    floor = divisor_floor(eps, normalization)
    if matrix.numel() == 0:
        return matrix.clone()
    view, flipped = wide(matrix)
    out = _on_gram(view, polynomials, floor, normalization)
    if out is None:
        out = _on_matrix(view, polynomials, floor, normalization)
    return out.mT if flipped else out


def divisor_floor(eps: float, normalization: str) -> float:
    """The floor of the normalization: eps, or 1 for `unit`. Its divisor is 1/floor-Lipschitz."""
    if normalization not in NORMALIZATIONS:
        names = ", ".join(NORMALIZATIONS)
        raise InputError(f"No normalization is called {normalization!r}: use one of {names}.")
    if not 0 < eps < float("inf"):
        raise InputError(f"eps is {eps}: choose eps > 0, or no Lipschitz constant exists.")
    return 1.0 if normalization == "unit" else float(eps)


def _on_matrix(view: Tensor, polynomials: Schedule, floor: float, normalization: str) -> Tensor:
    """The iteration on Z [..., q, d] itself, in the input's dtype: two large products a step."""
    z = _normalized(view, floor, normalization)
    for step in polynomials:
        z = left(_polynomial(step, z @ z.mT), z)
    return z


def _on_gram(
    view: Tensor, polynomials: Schedule, floor: float, normalization: str
) -> Tensor | None:
    """The iteration on G = Z Z^T [..., q, q] alone: two large products in all, or None.

    Z_T = P Z_0 with P the product of the small Q_t = a I + b G_t + c G_t^2 + ..., all polynomials
    of one matrix, and G_{t+1} = Q_t G_t Q_t. The slope of p_T at 0 is gain = prod a_t. Rounding G_0
    moves its small eigenvalues by eps, and every step multiplies that by a_t^2, so the price is
    eps gain^2, against the eps gain that rounding Z_0 costs the direct iteration. Hence the dtype
    to iterate in is the first whose eps gain^2 is within tolerance.
    """
    rows, columns = view.shape[-2:]
    if columns < 2 * rows or not polynomials:
        return None
    gain = prod(max(1.0, abs(step[0])) for step in polynomials)
    tolerance = _TOLERANCE.get(view.dtype, 1e-5)
    for work in ladder(view.dtype):
        if torch.finfo(work).eps * gain**2 > tolerance:
            continue
        product = gram(view, work)
        size = product.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        divisor = NORMALIZATIONS[normalization](size, floor)
        if _in_range(divisor):
            small = _composed(polynomials, product / divisor.square()[..., None, None])
            mild = torch.finfo(view.dtype).eps * gain <= tolerance
            return apply(small / divisor[..., None, None], view, view.dtype if mild else work)
    return None


def _composed(polynomials: Schedule, g: Tensor) -> Tensor:
    """P [..., q, q] with Z_T = P Z_0, from G_0 = Z_0 Z_0^T."""
    product = q = _polynomial(polynomials[0], g)
    for step in polynomials[1:]:
        g = q @ g @ q
        q = _polynomial(step, g)
        product = q @ product
    return product


def _polynomial(step: Step, g: Tensor) -> Tensor:
    """a I + b G + c G^2 + ... [..., q, q] by Horner's rule."""
    degree = max((k for k, c in enumerate(step) if c), default=0)
    out = g * step[degree] if degree else torch.zeros_like(g)
    for k in range(max(degree - 1, 0), -1, -1):
        out.diagonal(dim1=-2, dim2=-1).add_(step[k])
        out = out @ g if k else out
    return out


def _in_range(divisor: Tensor) -> bool:
    low, high = _RANGE.get(divisor.dtype, _RANGE[torch.float32])
    return bool(((divisor >= low) & (divisor <= high)).all())


def _normalized(view: Tensor, floor: float, normalization: str) -> Tensor:
    """M over its divisor, same shape and dtype; matrices of extreme size go through max|M|."""
    divide = NORMALIZATIONS[normalization]
    divisor = divide(norm(view).to(view.dtype), floor)
    if _in_range(divisor):
        return view / divisor[..., None, None]
    stack = view.double()
    peak = stack.abs().amax((-2, -1))
    if not bool(peak.isfinite().all()):
        raise NonFinite("A matrix to orthogonalize holds NaN or infinity: lower the learning rate.")
    scale = torch.where(peak > 0, peak, 1.0)
    unit = stack / scale[..., None, None]
    return (unit / divide(norm(unit), floor / scale)[..., None, None]).to(view.dtype)
