"""Randomized low-rank polar maps (Nesterov Muon, Algorithms 1 and 2).

The map is Q p_T(Q^T M / delta), where Q is an orthonormal basis of the range of Y = (M M^T)^h M
Omega. Only the range of Y matters. Between products, Y is therefore replaced by a well-conditioned
basis of its range, so that no digits are lost.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.device import holds, to_device
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.polynomial import scaled_newton_schulz
from fedmuon.orthogonalize.spectral import add_product, gram, norm, peak, per_matrix

Generator = np.random.Generator | torch.Generator
Generators = Generator | Sequence[Generator] | None
Sketch = Callable[[Tensor, int, list[np.random.Generator]], Tensor]  # M -> samples [B, m, l]
Axis = Literal["columns", "rows"]
Delta = Literal["frobenius", "operator"]

# The divisor that the paper Nesterov Muon uses with each sketch.
DELTAS: dict[str, Delta] = {"gaussian": "frobenius", "kaczmarz": "operator"}
# Squared sine of the angle between a column and those before it. Below this value, rounding in the
# float64 Gram matrix (about 1e-13 for a thousand columns) becomes visible in the factor.
_LEAST_PIVOT = 1e-10
_LOW, _HIGH = 1e-15, 1e15  # norms in this range can be squared in float32


def randomized_polar(
    M: Tensor,
    rank: int,
    oversample: int = 2,
    power: int = 1,
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    sketch: str = "gaussian",
    generator: Generators = None,
    axis: Axis = "columns",
    delta: Delta | float | Tensor | None = None,
) -> Tensor:
    """Return Q p_T(Q^T M / delta), a polar factor of rank at most l = rank + oversample.

    Q [m, l] is an orthonormal basis of the range of (M M^T)^power M Omega, and p_T is the
    Newton–Schulz polynomial of `newton_schulz`.

    Guarantee: no Lipschitz constant, because a small change of M can make the sketch miss a
    direction. The paper Nesterov Muon instead bounds how good the result is as a polar factor
    (gamma, nu).

    Source: Nesterov Muon, Algorithm 1 (`gaussian`) and Algorithm 2 (`kaczmarz`).

    Args:
        M: The stack `[..., m, n]`.
        rank: Target rank, at least 1.
        oversample: Number of extra columns of the sketch, at least 0.
        power: The number h of power iterations, at least 0.
        steps: The number T of Newton–Schulz steps.
        coefficients: Coefficients of the steps, as for `newton_schulz`.
        sketch: `gaussian` mixes all columns at random. `kaczmarz` samples columns with
            probabilities proportional to their squared norms.
        generator: One NumPy or torch generator for all matrices, or a sequence of k generators for
            k equal groups of consecutive matrices. None uses torch's default generator.
        axis: The axis that the sketch mixes or samples: `columns` as in the paper, or `rows`.
        delta: The divisor of B = Q^T M: `frobenius` for ||M||_F, `operator` for ||B||_op, or
            numbers of at least ||M||_op, one for all matrices or one per matrix `[...]`. None
            selects the divisor that the paper uses with this sketch.

    Returns:
        The low-rank polar factors `[..., m, n]`, with the dtype and device of M.

    Raises:
        InputError: If an option is out of range or a name is unknown.
        NonFinite: If M contains NaN or infinity.

    Example:
        >>> import torch
        >>> from fedmuon.orthogonalize import randomized_polar
        >>> matrix = torch.diag(torch.tensor([8.0, 1.0, 0.1, 0.1]))
        >>> drawn = torch.Generator().manual_seed(0)
        >>> found = randomized_polar(matrix, rank=1, oversample=0, generator=drawn)
        >>> int(torch.linalg.matrix_rank(found))
        1
    """
    if axis not in ("columns", "rows"):
        raise InputError(f"axis is {axis!r}, but it must be 'columns' or 'rows'.")
    if axis == "rows":
        arguments = (rank, oversample, power, steps, coefficients, sketch, generator)
        return randomized_polar(M.mT, *arguments, delta=delta).mT
    width, max_width = rank + oversample, min(M.shape[-2:])
    for name, value, minimum in (("rank", rank, 1), ("oversample", oversample, 0)):
        if value < minimum:
            raise InputError(f"{name} is {value}, but it must be an integer of {minimum} or more.")
    if width > max_width:
        raise InputError(
            f"rank + oversample is {width}, but it must be at most {max_width} for matrices of "
            f"shape {tuple(M.shape[-2:])}. Lower rank or oversample."
        )
    if power < 0 or power != int(power):
        raise InputError(f"power is {power!r}, but it must be an integer of 0 or more.")
    if sketch not in SKETCHES:
        raise InputError(f"The sketch {sketch!r} is unknown. Use one of {', '.join(SKETCHES)}.")
    if M.numel() == 0:
        return M.clone()
    work = M.dtype if M.dtype in (torch.float32, torch.float64) else torch.float32
    stack, scale = _scale_into_range(M.reshape(-1, *M.shape[-2:]).to(work))
    samples = SKETCHES[sketch](stack, width, _numpy_generators(generator, len(stack)))
    for _ in range(power):  # the basis is replaced before every product
        across = add_product(stack.mT, _condition(samples))
        samples = add_product(stack, _condition(across))
    basis = orthonormal(samples)
    reduced = add_product(basis.mT, stack)
    divisor = _divisor(DELTAS[sketch] if delta is None else delta, M, stack, reduced, scale)
    small = scaled_newton_schulz(reduced, divisor, steps, coefficients)
    return add_product(basis, small).view(M.shape).to(M.dtype)


def _scale_into_range(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices that can be squared without overflow, and the divisors [B] of the input."""
    size = torch.linalg.vector_norm(stack, dim=(-2, -1))
    if holds(((size >= _LOW) & (size <= _HIGH)).all()):
        return stack, torch.ones_like(size)
    largest = peak(stack)
    scale = torch.where(largest > 0, largest, 1.0)
    return stack / scale[:, None, None], scale


def _divisor(
    delta: Delta | float | Tensor, M: Tensor, stack: Tensor, reduced: Tensor, scale: Tensor
) -> Tensor:
    """Return the divisor delta of each scaled matrix."""
    if isinstance(delta, str):
        if delta not in ("frobenius", "operator"):
            raise InputError(
                f"delta is {delta!r}, but it must be 'frobenius', 'operator' or a number."
            )
        if delta == "operator":  # ||B||_op from the largest eigenvalue of B B^T
            values = torch.linalg.eigvalsh(gram(reduced, torch.float64))
            size = values[:, -1].clamp_min(0).sqrt()
        else:
            size = norm(stack)
        return torch.where(size > 0, size, 1.0)
    advice = "delta must be positive and finite. Use the largest singular value of M, or more."
    divisors = per_matrix("delta", delta, M, advice)
    return divisors.expand(M.shape[:-2]).reshape(-1) / scale


def orthonormal(samples: Tensor) -> Tensor:
    """Return an orthonormal basis Q [B, m, l] of the range of tall `samples` [B, m, l].

    If the rank is below l, the additional columns of Q are 0. The method is Cholesky QR, applied
    twice, which is faster than Householder QR. The Gram matrix is float64, because its condition
    number is cond^2 for samples with the condition number cond. The first pass makes the columns
    orthonormal up to eps cond, and the second pass up to eps. If rounding errors dominate the
    pivots, a rank-revealing QR is used.
    """
    return _condition(_condition(samples))


def _condition(samples: Tensor) -> Tensor:
    """Return a basis of the same range with nearly orthonormal columns.

    The columns are orthonormal up to eps cond, where cond is the condition number.
    """
    product = gram(samples.mT, torch.float64)
    size = product.diagonal(dim1=-2, dim2=-1).sqrt()  # norms of the columns, [B, l]
    empty = size == 0
    size = torch.where(empty, 1.0, size)
    product = product / (size.unsqueeze(-1) * size.unsqueeze(-2))
    product.diagonal(dim1=-2, dim2=-1).add_(empty)  # a zero column stays zero
    factor, failed = torch.linalg.cholesky_ex(product)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    ill_conditioned = (failed != 0) | ~(pivots >= _LEAST_PIVOT)
    well_conditioned = holds(~ill_conditioned.any())
    if not well_conditioned and bool(ill_conditioned.all()):
        return _rank_revealing(samples, size)
    inverse = torch.linalg.solve_triangular(factor, torch.diag_embed(1 / size), upper=False)
    out = add_product(samples, inverse.mT.to(samples.dtype))
    if not well_conditioned:
        out[ill_conditioned] = _rank_revealing(samples[ill_conditioned], size[ill_conditioned])
    return out


def _rank_revealing(samples: Tensor, size: Tensor) -> Tensor:
    """Compute the same basis as `_condition` by QR and an SVD of the small factor.

    Columns that contain only rounding errors become 0.
    """
    q, r = torch.linalg.qr(samples.double() / size.unsqueeze(-2))
    u, s, _ = torch.linalg.svd(r)
    cut = 10 * samples.shape[-2] * torch.finfo(torch.float64).eps
    significant = (s > cut * s.amax(-1, keepdim=True)).unsqueeze(-2)
    return (q @ (u * significant)).to(samples.dtype)


def _numpy_generators(generator: Generators, count: int) -> list[np.random.Generator]:
    """Return NumPy generators for a stack of `count` matrices.

    A torch generator supplies one seed per call. Each generator draws one sketch, independent of
    dtype and device. With k generators, the stack is cut into k equal groups of consecutive
    matrices. All matrices of a group, such as replicas of one matrix, use the same sketch.
    """
    alone = generator is None or isinstance(generator, Generator)
    sources: list[Generator | None] = [generator] if alone else list(generator)  # pyright: ignore
    generators = []
    for source in sources:
        if not isinstance(source, np.random.Generator):
            place = "cpu" if source is None else source.device
            seed = torch.randint(2**63 - 1, (), generator=source, device=place)
            source = np.random.default_rng(int(seed))
        generators.append(source)
    if not generators or count % len(generators):
        raise InputError(
            f"generator contains {len(generators)} generators, but {count} matrices cannot be "
            f"divided into {len(generators)} groups of equal size. Pass one generator, or a number "
            f"of generators that divides {count}."
        )
    return generators


def _gaussian(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
    """Return M Omega with Omega [n, l] standard Gaussian (Nesterov Muon, Algorithm 1, line 1)."""
    shape = (stack.shape[-1], width)
    omega = torch.from_numpy(np.stack([draw.standard_normal(shape) for draw in generators]))
    runs = stack.reshape(len(generators), -1, shape[0])
    samples = add_product(runs, to_device(omega, stack.device, stack.dtype))
    return samples.view(*stack.shape[:-1], width)


def _kaczmarz(stack: Tensor, width: int, generators: list[np.random.Generator]) -> Tensor:
    """Draw l columns of M, column j with the probability pi_j = ||M_j||^2 / ||M||_F^2.

    This is Algorithm 2, lines 1-3, of Nesterov Muon. Matrices that share a generator use the same
    uniform numbers, but their own probabilities. Only the range of the drawn columns matters. The
    paper's factor 1/sqrt(l pi_j) is therefore left out, and repeated columns are set to 0.
    """
    # Blocks of rows fit into a cache. On a CPU, this is several times faster than one reduction.
    blocks = [rows.square().sum(-2).double() for rows in stack.split(256, dim=-2)]
    share = torch.stack(blocks).sum(0)
    edges = share.cumsum(-1)
    uniforms = torch.from_numpy(np.stack([draw.random(width) for draw in generators]))
    uniforms = to_device(uniforms, stack.device).repeat_interleave(len(stack) // len(generators), 0)
    points = (uniforms * edges[..., -1:]).sort(-1).values
    indices = torch.searchsorted(edges, points, right=True).clamp_max(stack.shape[-1] - 1)
    columns = stack.gather(-1, indices.unsqueeze(-2).expand(*stack.shape[:-1], width))
    repeated = indices[..., 1:] == indices[..., :-1]
    columns[..., 1:].masked_fill_(repeated.unsqueeze(-2), 0.0)
    return columns


SKETCHES: dict[str, Sketch] = {"gaussian": _gaussian, "kaczmarz": _kaczmarz}
