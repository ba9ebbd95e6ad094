"""Quality of inexact polar maps: what is proved of it, from a spectrum, and what is measured.

(gamma, nu) of 002, Assumption 2.1: <M, T(M)> >= (1 - gamma) ||M||_* and ||T(M)||_op <= 1 + nu.
delta_q, eps_q of 004, Definition 3: how far Z Z^T is from a projector, and Z from the polar factor.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.orthogonalize.coefficients import Coefficients, schedule


def newton_schulz_quality(
    singular: ArrayLike, delta: float, steps: int, coefficients: Coefficients = "quintic"
) -> tuple[float, float]:
    """(gamma, nu) of p_q(M / delta), delta >= ||M||_op, from the singular values (002, Prop. 2.2).

    gamma = sum s_i (1 - p_q(s_i / delta)) / sum s_i for any odd polynomials. The cubic and the
    quintic keep [0, 1], so their nu is 0; of other schedules it is what p_q overshoots 1 by.
    """
    s = _spectrum(singular)
    if not delta >= s[0]:
        raise InputError(f"delta is {delta}: choose delta >= ||M||_op = {s[0]:g}.")
    image = s / delta
    for step in schedule(coefficients, steps):
        image = sum(c * image ** (2 * k + 1) for k, c in enumerate(step))
    lost = float(np.dot(s, 1 - image) / s.sum())
    return lost, max(0.0, float(np.abs(image).max()) - 1)


def randomized_alignment(
    singular: ArrayLike, rank: int, oversample: int, power: int, delta: float
) -> float:
    """A floor of E <M, T(M)> over Gaussian sketches, delta >= ||M||_op (002, Prop. 2.3 (2)).

    It holds for any number of cubic or quintic steps, as both keep [0, 1] and exceed the identity.
    """
    s = _spectrum(singular)
    if not delta >= s[0]:
        raise InputError(f"delta is {delta}: choose delta >= ||M||_op = {s[0]:g}.")
    head, tail, ratio = _split(s, rank, oversample)
    return max(0.0, head - rank / (oversample - 1) * ratio ** (4 * power) * tail) / delta


def randomized_quality(
    singular: ArrayLike, rank: int, oversample: int, power: int, delta: float
) -> tuple[float, float]:
    """(gamma, nu) that Prop. 2.3 proves of the randomized map; gamma = 1 proves nothing (B.3)."""
    floor = randomized_alignment(singular, rank, oversample, power, delta)
    return 1 - floor / float(_spectrum(singular).sum()), 0.0


def power_count(singular: ArrayLike, rank: int, oversample: int) -> int:
    """The fewest power iterations h for which Prop. 2.3 proves a positive alignment, 002 (18)."""
    head, tail, ratio = _split(_spectrum(singular), rank, oversample)
    penalty = rank * tail / ((oversample - 1) * head)
    if penalty < 1:
        return 0
    if ratio >= 1:
        raise InputError(
            f"s_{rank} = s_{rank + 1}, and power iterations need a gap there: choose a rank at a "
            f"gap, or oversample > {1 + rank * tail / head:.4g}."
        )
    return 1 + math.floor(math.log(penalty) / (-4 * math.log(ratio)))


def _spectrum(singular: ArrayLike) -> np.ndarray:
    """The positive singular values, falling."""
    s = np.sort(np.asarray(singular, dtype=float).ravel())[::-1]
    if not (np.isfinite(s).all() and s.size and s[0] > 0 and s[-1] >= 0):
        raise InputError("singular values must be finite and at least 0, one of them positive.")
    return s[s > 0]


def _split(s: np.ndarray, rank: int, oversample: int) -> tuple[float, float, float]:
    """H_s, T_s and s_{s+1} / s_s of 002, B.3, of a falling spectrum."""
    if not 1 <= rank <= len(s) or oversample < 2:
        raise InputError(
            f"rank is {rank}, oversample {oversample}: choose 1 <= rank <= {len(s)}, the rank of "
            "M, and oversample >= 2."
        )
    ratio = float(s[rank] / s[rank - 1]) if rank < len(s) else 0.0
    squares = s**2
    return float(squares[:rank].sum()), float(squares[rank:].sum()), ratio


def residual_bound(initial: float, degree: int, steps: int) -> float:
    """delta_0^((k+1)^q) >= delta_q (004, Theorem 2), on all of [0, 1].

    With a_s = (2s)!/(4^s s!^2) and p = sum_{s<=k} a_s d^s one has phi' = (2k+1) a_k d^k p (004,
    Lemma 3), a series with positive coefficients from d^k on. Hence phi(d) / d^(k+1) rises, to
    phi(1) = 1 at d = 1, and phi(d) <= d^(k+1): there is no need for d to be small.
    """
    with np.errstate(over="ignore"):
        return float(np.float64(initial) ** np.power(float(degree + 1), steps))


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
