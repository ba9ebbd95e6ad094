"""Newton–Schulz iterations: odd polynomials of a normalized matrix, by matrix products alone.

Half precision (bfloat16, float16) iterates as torch.optim.Muon does: operands and results of every
product are rounded to it, sums are float32. A CPU without such products gets them from float32
ones, which round in the same places and are a hundred times faster than torch's fallback there.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fedmuon.core.device import holds
from fedmuon.orthogonalize.coefficients import (
    NORMALIZATIONS,
    Coefficients,
    Schedule,
    Step,
    divisor_floor,
    schedule,
)
from fedmuon.orthogonalize.spectral import apply, gram, ladder, multiply, norm, peak, wide

# Divisors between these square without overflow, and without an underflow that matters.
_RANGE = {
    torch.float16: (1e-2, 6e4),
    torch.float32: (1e-15, 1e15),
    torch.float64: (1e-140, 1e140),
}
# What ||M||_F [B], and the scale that was taken out of M, [B] or 1, become as its divisor.
Divide = Callable[[Tensor, Tensor | float], Tensor]

_HALF = (torch.bfloat16, torch.float16)
_SMALL = 64  # below this side, products take as long as reading their operands
_WIDER = 2  # how much longer a product takes in the next wider dtype


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
    floor, rule = divisor_floor(eps, normalization), NORMALIZATIONS[normalization]
    return _applied(matrix, polynomials, lambda size, scale: rule(size, floor / scale))


def scaled_newton_schulz(
    matrix: Tensor, divisor: Tensor, steps: int, coefficients: Coefficients = "cubic"
) -> Tensor:
    """p_T(M / divisor) for a caller whose divisor [...] > 0 is at least ||M||_op (002, section 2).

    M [..., m, n] -> [..., m, n]. Nothing else normalizes M: below ||M||_op the iteration diverges.
    """
    given = divisor.expand(matrix.shape[:-2]).reshape(-1)
    polynomials = schedule(coefficients, steps)
    return _applied(matrix, polynomials, lambda size, scale: (given / scale).to(size))


def _applied(matrix: Tensor, polynomials: Schedule, divide: Divide) -> Tensor:
    if matrix.numel() == 0:
        return matrix.clone()
    view, flipped = wide(matrix)
    stack = view.view(-1, *view.shape[-2:])
    out = _on_gram(stack, polynomials, divide)
    out = (_on_matrix(stack, polynomials, divide) if out is None else out).view(view.shape)
    return out.mT if flipped else out


def native_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of that half precision run in hardware; on a CPU, oneDNN knows."""
    if device.type != "cpu":
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _on_matrix(stack: Tensor, polynomials: Schedule, divide: Divide) -> Tensor:
    """The iteration on Z [B, q, d] itself, in the input's dtype: two large products a step."""
    z = _normalized(stack, divide)
    if z.dtype not in _HALF or native_half(z.dtype, z.device):
        return _iterated(polynomials, z, lambda x: x)
    return _iterated(polynomials, z.float(), lambda x: x.to(stack.dtype).float()).to(stack.dtype)


def _iterated(polynomials: Schedule, z: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Z_T [B, q, d]: every step is Z <- a Z + U Z with U = b G + c G^2 + ... of G = Z Z^T."""
    for step in polynomials:
        if degree(step) == 0:
            z = rounded(z * step[0])
            continue
        g = rounded(multiply(z, z.mT))
        small, scale = _bracket(step, g, rounded)
        z = rounded(_sum(step[0], z, scale, small, z))
    return z


def _bracket(
    step: Step, g: Tensor, rounded: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, float]:
    """U [B, q, q] and s with s U = b G + c G^2 + ..., by Horner's rule; the degree is 1 or more."""
    top = degree(step)
    if top == 1:
        return g, step[1]
    out = rounded(_sum(step[top - 1], g, step[top], g, g))
    for k in range(top - 2, 0, -1):
        out = rounded(_sum(step[k], g, 1.0, out, g))
    return out, 1.0


def degree(step: Step) -> int:
    """The largest k with a term x^(2k+1)."""
    return max((k for k, c in enumerate(step) if c), default=0)


def _sum(beta: float, c: Tensor, alpha: float, a: Tensor, b: Tensor) -> Tensor:
    """beta C + alpha A B of stacks [B, ., .]; one matrix alone goes to the plain product."""
    if len(a) == 1:
        return torch.addmm(c[0], a[0], b[0], beta=beta, alpha=alpha)[None]
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def _on_gram(view: Tensor, polynomials: Schedule, divide: Divide) -> Tensor | None:
    """The iteration on G = Z Z^T [B, q, q] alone: two large products in all, or None.

    Z_T = P Z_0 with P the product of the small Q_t = a I + b G_t + c G_t^2 + ..., all polynomials
    of one matrix, and G_{t+1} = Q_t G_t Q_t. The slope of p_T at 0 is gain = prod a_t. Rounding G_0
    moves its small eigenvalues by eps, and every step multiplies that by a_t^2, so the price is
    eps gain^2, against the eps gain that rounding Z_0 costs the direct iteration. Hence the dtype
    to iterate in is the first whose eps gain^2 is within tolerance.
    """
    for work in gram_dtypes(view.shape[-2], view.shape[-1], view.dtype, polynomials):
        product = gram(view, work)
        size = product.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        divisor = divide(size, 1.0)
        if _in_range(divisor):
            small = _composed(polynomials, product / divisor.square()[..., None, None])
            mild = torch.finfo(view.dtype).eps * _gain(polynomials) <= 10 * _tolerance(view.dtype)
            return apply(small / divisor[..., None, None], view, view.dtype if mild else work)
    return None


def gram_dtypes(
    short: int, long: int, dtype: torch.dtype, polynomials: Schedule
) -> tuple[torch.dtype, ...]:
    """The dtypes to iterate in on the Gram matrix of [short, long], best first; none: on Z."""
    if dtype in _HALF or not polynomials:
        return ()
    gain, steps = _gain(polynomials), len(polynomials)
    allowed = _tolerance(dtype) / gain**2
    found = [work for work in ladder(dtype) if torch.finfo(work).eps <= allowed]
    if found and not _shorter(short, long, steps, _WIDER if found[0] != dtype else 1):
        return ()
    return tuple(found)


def _gain(polynomials: Schedule) -> float:
    """A bound of the composed polynomial's slope at 0."""
    return prod(max(1.0, abs(step[0])) for step in polynomials)


def _tolerance(dtype: torch.dtype) -> float:
    """The largest relative error that a rearranged computation may cost, by dtype of the input."""
    return 1e-10 if dtype == torch.float64 else 1e-5


def _composed(polynomials: Schedule, g: Tensor) -> Tensor:
    """P [..., q, q] with Z_T = P Z_0, from G_0 = Z_0 Z_0^T."""
    product = q = _polynomial(polynomials[0], g)
    for step in polynomials[1:]:
        g = q @ g @ q
        q = _polynomial(step, g)
        product = q @ product
    return product


def _polynomial(step: Step, g: Tensor) -> Tensor:
    """a I + b G + c G^2 + ... [B, q, q]."""
    if degree(step) == 0:
        out = torch.zeros_like(g)
    else:
        small, scale = _bracket(step, g)
        out = small * scale if scale != 1 else small
    out.diagonal(dim1=-2, dim2=-1).add_(step[0])
    return out


def _shorter(short: int, long: int, steps: int, price: int) -> bool:
    """Whether the Gram side is worth it: less arithmetic, or small enough to save passes over Z.

    In units of 2 q^3 flop, d = r q, quintic steps: 2 r + 4 T - 3 at `price` each; T (2 r + 1) on Z.
    """
    aspect = long / short
    if short < _SMALL:
        return aspect >= 2
    return price * (2 * aspect + 4 * steps - 3) < steps * (2 * aspect + 1)


def _in_range(divisor: Tensor) -> bool:
    low, high = _RANGE.get(divisor.dtype, _RANGE[torch.float32])
    return holds(((divisor >= low) & (divisor <= high)).all())


def _normalized(view: Tensor, divide: Divide) -> Tensor:
    """M over its divisor, same shape and dtype; matrices of extreme size go through max|M|."""
    divisor = divide(norm(view).to(view.dtype), 1.0)
    if _in_range(divisor):
        return view / divisor[..., None, None]
    stack = view.double()
    largest = peak(stack)
    scale = torch.where(largest > 0, largest, 1.0)
    unit = stack / scale[..., None, None]
    return (unit / divide(norm(unit), scale)[..., None, None]).to(view.dtype)
