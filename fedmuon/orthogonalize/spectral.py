"""Apply an odd function f to the singular values of a stack of matrices.

The result is O = U diag(f(s)) V^T. The fast method applies f(s)/s to the q x q Gram matrix of M,
where q is the smaller side, and multiplies the result by M. This method needs two large products
and a q x q eigenproblem. The fast method is used if an error bound shows that no digits are lost.
Otherwise, an SVD in float64 is used.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedmuon.core.device import at_hand, holds, to_device
from fedmuon.core.errors import InputError, NonFinite

Divisor = Callable[[Tensor, Tensor], Tensor]  # (s [..., q], root [..., 1]) -> s / f(s)

# The relative error that the Gram path may have, by dtype of the input. The tests allow ten times
# this error, because of the constants of the eigensolver.
TARGETS = {torch.bfloat16: 1e-6, torch.float16: 1e-6, torch.float32: 1e-6, torch.float64: 1e-12}
# The dtypes that the Gram path tries, cheapest first, by dtype of the input.
WORK_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float64,),
    torch.float16: (torch.float64,),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
}


# A CPU computes large symmetric products by panels of rows. Of each panel, it computes only the
# entries on and right of the diagonal. In one thread, the product M M^T then takes 0.65 to 0.85 of
# the time. Below this number of multiplications, panels save nothing.
PANEL, PANELS_FROM = 64, 1 << 25
# On these devices, the inverse root is computed by products, from this shortest side on. An
# eigensolver is sequential: for 12 matrices of side 768, it takes 91 ms on an H200, and products
# take 9 ms.
BY_PRODUCTS, SHORTEST = {"cuda"}, 64
# Odd quintics (a, b, c). Each is the best uniform approximation of 1 on the image of [REACH, 1]
# under the quintics before it. Together they map [REACH, 1] into 1 +- 1e-15 (Polar Express,
# arXiv:2505.16932).
REACH = 1.4e-5
QUINTICS = (
    (8.513683634202, -25.279306963066, 18.765504137293),
    (4.256088275446, -3.159483654837, 0.586398899668),
    (4.252630927953, -3.157091958762, 0.586126086305),
    (4.237990058223, -3.146958307669, 0.584970190672),
    (4.177039225305, -3.104674056980, 0.580147397491),
    (3.940501330326, -2.938996210645, 0.561259029173),
    (3.234191799517, -2.425418449772, 0.502910864415),
    (2.232392079495, -1.606956286340, 0.412137364917),
    (1.885252753260, -1.261345372765, 0.376136336284),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
)


def wide(matrix: Tensor) -> tuple[Tensor, bool]:
    """Return a view [..., q, d] of M [..., m, n] with q <= d, and whether it is transposed.

    Square matrices are transposed if this makes the last axis contiguous. A stack is copied if
    neither the stack nor its transpose is contiguous, because matrix products need contiguous
    matrices.
    """
    rows, columns = matrix.shape[-2:]
    flipped = rows > columns or (rows == columns and matrix.stride(-1) != 1)
    view = matrix.mT if flipped else matrix
    packed = view.is_contiguous() or view.mT.is_contiguous()
    return (view if packed else view.contiguous()), flipped


def left(small: Tensor, stack: Tensor, template: Tensor | None = None) -> Tensor:
    """Return the product `small` times `stack`, in the memory layout of `stack` or `template`."""
    if (stack if template is None else template).stride(-1) == 1:
        return add_product(small, stack)
    return add_product(stack.mT, small.mT).mT


def add_product(
    a: Tensor, b: Tensor, addend: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta C + alpha A B for matrices or stacks of matrices. Without an addend, C is 0.

    For a single matrix, a plain product is faster than a batched product.
    """
    if a.ndim == b.ndim == 3 and len(a) == len(b) == 1:
        first = None if addend is None else addend[0]
        return add_product(a[0], b[0], first, beta, alpha)[None]
    if addend is None:
        return a @ b if alpha == 1 else (a @ b).mul_(alpha)
    add = torch.addmm if a.ndim == 2 else torch.baddbmm
    return add(addend, a, b, beta=beta, alpha=alpha)


def symmetric_product(
    a: Tensor, b: Tensor, addend: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta C + alpha A B, which must be symmetric, with less arithmetic on a CPU.

    Such products are M M^T, and products of polynomials of the same symmetric matrix.
    """
    rows, inner = a.shape[-2:]
    if a.device.type != "cpu" or symmetric_share(rows, inner) == 1:
        return add_product(a, b, addend, beta, alpha)
    out = a.new_empty((*a.shape[:-1], rows))
    for start in range(0, rows, PANEL):
        stop = min(rows, start + PANEL)
        panel = None if addend is None else addend[..., start:stop, start:]
        values = add_product(a[..., start:stop, :], b[..., start:], panel, beta, alpha)
        out[..., start:stop, start:] = values
        out[..., stop:, start:stop] = values[..., stop - start :].mT
    return out


def symmetric_share(rows: int, inner: int) -> float:
    """Return the share of the entries of a symmetric product that a CPU computes.

    `inner` is the number of columns of the first matrix.
    """
    if rows < 2 * PANEL or rows * rows * inner < PANELS_FROM:
        return 1.0
    starts = range(0, rows, PANEL)
    return sum(min(PANEL, rows - start) * (rows - start) for start in starts) / rows**2


def gram(view: Tensor, work: torch.dtype) -> Tensor:
    """Return the Gram matrices M M^T of a stack M, in the dtype `work`."""
    stacks = (piece.to(work) for piece in _pieces(view, work))
    products = torch.cat([symmetric_product(stack, stack.mT) for stack in stacks])
    return products.view(*view.shape[:-1], view.shape[-2])


def apply(small: Tensor, view: Tensor, work: torch.dtype) -> Tensor:
    """Return `small` times M with the dtype and layout of M, but computed in the dtype `work`."""
    if view.dtype == work:
        return left(small.to(work), view)
    out = torch.empty_like(view)
    pieces = _pieces(view, work)
    parts = small.reshape(-1, *small.shape[-2:]).split(len(pieces[0]))
    for target, part, piece in zip(_pieces(out, work), parts, pieces, strict=True):
        target.copy_(left(part.to(work), piece.to(work)))
    return out


def _pieces(view: Tensor, work: torch.dtype) -> tuple[Tensor, ...]:
    """Split M into stacks [k, q, d] of 1 MiB if a CPU must convert M to another dtype.

    A converted copy of the whole M would take more time than the arithmetic.
    """
    flat = view.view(-1, *view.shape[-2:])
    unsplit = view.dtype == work or view.device.type != "cpu"
    return flat.split(len(flat) if unsplit else max(1, 2**17 // flat[0].numel()))


def norm(stack: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix as float64. If a norm overflows, it is infinite."""
    return torch.linalg.vector_norm(stack, dim=(-2, -1)).double()


def peak(stack: Tensor) -> Tensor:
    """Return the largest absolute entry of each matrix. All entries must be finite."""
    largest = stack.abs().amax((-2, -1))
    if not holds(largest.isfinite().all()):
        raise NonFinite(
            "A matrix to orthogonalize contains NaN or infinity. Lower the learning rate."
        )
    return largest


def per_matrix(
    name: str, value: float | Tensor, matrix: Tensor, mend: str, zero: bool = False
) -> Tensor:
    """Return `value` as float64, after a check that `value` is positive and broadcastable."""
    if isinstance(value, int | float):  # created on the device, so nothing is copied
        parameter = torch.full((), value, dtype=torch.float64, device=matrix.device)
        sound = (value >= 0 if zero else value > 0) and value < math.inf
    else:
        parameter = to_device(torch.as_tensor(value, dtype=torch.float64), matrix.device)
        smallest, largest = parameter.detach().aminmax()
        sound = holds((smallest >= 0 if zero else smallest > 0) & (largest < math.inf))
    if not sound:
        raise InputError(f"{name} is {value}, but {mend}")
    lead, shape = matrix.shape[:-2], parameter.shape
    fits = len(shape) <= len(lead) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(lead), strict=False)
    )
    if not fits:
        raise InputError(
            f"{name} has shape {tuple(shape)}, which does not match matrices of shape "
            f"{tuple(matrix.shape)}. Pass one number, or a tensor of shape {tuple(lead)} with one "
            "number per matrix."
        )
    return parameter


def spectral_map(matrix: Tensor, root: Tensor, divisor: Divisor) -> Tensor:
    """Return U diag(s / divisor(s, root)) V^T for M [..., m, n], where divisor >= root.

    The output has a relative error of about eps ||M||_F^2 / root^2, which determines the working
    dtype. Proof: the Gram matrix has an error of about eps ||M||_F^2. The divided differences of
    1/divisor as a function of the Gram matrix, times s, are at most 1/root^2.

    Args:
        matrix: The stack M [..., m, n].
        root: Lower bound of the divisor, [...] or [].
        divisor: Function from (s [..., q], root [..., 1]) to s / f(s).

    Returns:
        The stack [..., m, n], differentiable in M.
    """
    if matrix.numel() == 0:
        return matrix.clone()
    if matrix.requires_grad:
        return Spectral.apply(matrix, root, divisor, lambda m: spectral_map(m, root, divisor))
    view, flipped = wide(matrix)
    work = accurate_dtype(norm(view), root, matrix.dtype)
    if work is None:
        out = by_svd(view, root, divisor)
    elif divisor is torch.hypot and _products_are_faster(view):
        out = apply(inverse_root(gram(view, torch.float64), root), view, torch.float64)
    else:
        values, vectors = eigenpairs(gram(view, work), lambda: gram(view, torch.float64))
        small = inverse(values.clamp_min(0).sqrt(), vectors, root, divisor)
        out = apply(small, view, work)
    return out.mT if flipped else out


def eigenpairs(product: Tensor, in_float64: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of finite symmetric matrices.

    In float32, LAPACK fails for some finite matrices without full rank: squares of small numbers
    underflow, and it returns NaN or raises an error. Float64 then repeats the computation.

    Args:
        product: The symmetric matrices [..., q, q].
        in_float64: Function that returns the same matrices in float64.
    """
    if product.dtype != torch.float32 or not at_hand(product.device):
        values, vectors = torch.linalg.eigh(product)
        return values, vectors
    try:
        values, vectors = torch.linalg.eigh(product)
        if math.isfinite(float(values.sum() + vectors.sum())):
            return values, vectors
    except torch.linalg.LinAlgError:
        pass
    values, vectors = torch.linalg.eigh(in_float64())
    return values, vectors


def accurate_dtype(size: Tensor, root: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the cheapest dtype whose Gram matrix is accurate for the whole stack, or None.

    The function compares the largest norm with the smallest root. During a round on a GPU, only the
    widest dtype is considered, so that the GPU need not synchronize.
    """
    largest: Any = size.detach().max()
    floor: Any = root.detach().min()
    candidates = WORK_DTYPES[dtype]
    if at_hand(size.device):
        largest, floor = float(largest), float(floor)
    else:
        candidates = candidates[-1:]
    largest, floor = largest * largest, floor * floor
    for work in candidates:
        info = torch.finfo(work)
        accurate = info.eps * largest <= TARGETS[dtype] * floor
        accurate = accurate & (largest <= info.max / 4) & (floor >= info.tiny / info.eps)
        if accurate if isinstance(accurate, bool) else holds(accurate):
            return work
    return None


def _products_are_faster(view: Tensor) -> bool:
    return view.device.type in BY_PRODUCTS and view.shape[-2] >= SHORTEST


def inverse_root(product: Tensor, root: Tensor) -> Tensor:
    """Return (G + root^2 I)^(-1/2) with matrix products only, without synchronizing a GPU.

    Start with R = (G + root^2 I) / c, where c = tr G + root^2. The eigenvalues of R are in [root^2
    / c, 1]. Each step computes q = q(R), R <- q R q and Z <- Z q, where the quintic x q(x^2) moves
    the roots of the eigenvalues towards 1. Z approaches the inverse root of the first R. The
    relative error is about eps c / root^2, as with an eigensolver.

    Args:
        product: G [..., q, q] in float64, positive semi-definite.
        root: The number root [...] or [], with root^2 >= REACH^2 c.

    Returns:
        The inverse roots [..., q, q].
    """
    square = root.square().expand(product.shape[:-2])
    size = product.diagonal(dim1=-2, dim2=-1).sum(-1) + square
    r = product / size[..., None, None]
    r.diagonal(dim1=-2, dim2=-1).add_((square / size)[..., None])
    r, z = r.view(-1, *product.shape[-2:]), None
    for step, (a, b, c) in enumerate(QUINTICS, 1):
        q = torch.baddbmm(r, r, r, beta=b, alpha=c)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        z = q if z is None else z @ q
        if step < len(QUINTICS):  # the last one is not needed
            r = q @ r @ q
    assert z is not None
    return z.view(product.shape) / size.sqrt()[..., None, None]


def inverse(s: Tensor, vectors: Tensor, root: Tensor, divisor: Divisor) -> Tensor:
    """Return V diag(1 / divisor(s)) V^T [..., q, q] for singular values s and vectors V."""
    weights = divisor(s, root.to(s.dtype).unsqueeze(-1)).reciprocal()
    return symmetric_product(vectors * weights.unsqueeze(-2), vectors.mT)


def by_svd(view: Tensor, root: Tensor, divisor: Divisor) -> Tensor:
    """Return U diag(f(s)) V^T from a float64 SVD of M / max(max|M|, root).

    The division prevents overflow.
    """
    stack = view.double()
    scale = torch.maximum(peak(stack), root)
    scale = torch.where(scale > 0, scale, 1.0)
    u, s, vh = torch.linalg.svd(stack / scale[..., None, None], full_matrices=False)
    weights = s / divisor(s, (root / scale).unsqueeze(-1))
    return left(u * weights.unsqueeze(-2), vh, template=view).to(view.dtype)


# The derivative of a spectral map F(M) = U f(S) V^T with odd f, by Daleckii and Krein.
#
# F is the gradient of M -> sum_i int_0^{s_i} f. Its derivative is therefore self-adjoint, and a
# reverse pass can use it directly. Let M = U S V^T be the thin decomposition, K = U^T H V = K_+ +
# K_- the sum of a symmetric and a skew part, and w_i = f(s_i) / s_i. Then
#
#     DF(M)[H] = U (A o K_+ + B o K_-) V^T + (H - U K V^T) V w V^T + U w U^T (H - U K V^T)
#     A_ij = (f_i - f_j) / (s_i - s_j)        B_ij = (f_i + f_j) / (s_i + s_j)
#
# This holds because dU = U a and dV = V b with skew a, b solve s_j a_ij - s_i b_ij = K_ij off the
# diagonal. The last two terms rotate the spans. One of them is 0, because U or V is square, and is
# omitted. A and B are bounded by the Lipschitz constant of f, whatever the gaps between singular
# values. Torch's derivative of eigh divides by these gaps, and gradients of the softmax have
# s_q = 0.
#
# With f = s / h, the product rule of divided differences avoids cancellation in A:
# 2 A_ij = w_i + w_j - (s_i + s_j) w_i w_j (h_i - h_j) / (s_i - s_j).


class Spectral(torch.autograd.Function):
    """A spectral map F(M), computed by `compute`, with the exact derivative DF(M)[H]."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, root: Tensor, divisor: Divisor, compute: Any) -> Tensor:
        """Return F(M) for a stack M."""
        ctx.save_for_backward(*factors(matrix, root, divisor))
        return compute(matrix.detach())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Return the derivative DF(M)[H], where H is the cotangent of the result."""
        return derivative(ctx.saved_tensors, cotangents[0]), None, None, None


def factors(matrix: Tensor, root: Tensor, divisor: Divisor) -> tuple[Tensor, ...]:
    """Return the factors U, V^T, w, A and B, from which `derivative` computes DF(M)[H]."""
    u, s, vh = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
    h = divisor(s, root.detach().double().unsqueeze(-1))
    w = h.reciprocal()
    s_i, s_j = s.unsqueeze(-1), s.unsqueeze(-2)
    if divisor is torch.hypot:  # (h_i - h_j) / (s_i - s_j)
        slope = (s_i + s_j) / (h.unsqueeze(-1) + h.unsqueeze(-2))
    else:  # h is piecewise linear
        gap = s_i - s_j
        above = (s > root.double().unsqueeze(-1)).double().unsqueeze(-1)
        slope = torch.where(gap == 0, above, (h.unsqueeze(-1) - h.unsqueeze(-2)) / gap)
    total, weights = s_i + s_j, w.unsqueeze(-1) + w.unsqueeze(-2)
    bent = total * w.unsqueeze(-1) * w.unsqueeze(-2) * slope
    turned = ((s * w).unsqueeze(-1) + (s * w).unsqueeze(-2)) / total
    turned = torch.where(total > 0, turned, weights / 2)
    return tuple(factor.to(matrix.dtype) for factor in (u, vh, w, (weights - bent) / 2, turned))


def derivative(found: tuple[Tensor, ...], towards: Tensor) -> Tensor:
    """Return the derivative DF(M)[H] in the direction H, from the factors of M."""
    u, vh, w, even, odd = found
    right = towards @ vh.mT
    inner = u.mT @ right
    core = even * (inner + inner.mT) / 2 + odd * (inner - inner.mT) / 2
    if vh.shape[-2] == vh.shape[-1]:  # V is square
        return (u @ core + (right - u @ inner) * w.unsqueeze(-2)) @ vh
    return u @ (core @ vh + (u.mT @ towards - inner @ vh) * w.unsqueeze(-1))
