"""Maps with a parameter that makes them Lipschitz: the smoothed polar factor, the clipped sign."""

import torch
from torch import Tensor

from fedmuon.orthogonalize.spectral import per_matrix, spectral_map


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
