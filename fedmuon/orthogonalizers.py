"""The maps as values: `fedmuon.orthogonalizers.smoothed_polar(lam=0.1)`, with their constants."""

from functools import partial

from torch import Tensor

from fedmuon import orthogonalize as maps
from fedmuon.orthogonalize import lipschitz
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.value import Orthogonalizer

__all__ = ["Orthogonalizer", "clipped_sign", "newton_schulz", "smoothed_polar"]


def smoothed_polar(lam: float = 1e-4) -> Orthogonalizer:
    """sigma -> sigma / sqrt(sigma^2 + lam) (001, D.1)."""
    return Orthogonalizer(
        partial(maps.smoothed_polar, lam=lam), lipschitz("smoothed-polar", "sharp", lam=lam)
    )


def newton_schulz(
    steps: int = 5,
    coefficients: Coefficients = "cubic",
    eps: float = 1e-7,
    normalization: str = "plus",
) -> Orthogonalizer:
    """Newton-Schulz steps behind a normalization with a floor (001, D.3)."""
    given = {"steps": steps, "coefficients": coefficients, "eps": eps}
    constant = lipschitz("newton-schulz", "sharp", **given, normalization=normalization)

    def apply(m: Tensor) -> Tensor:
        return maps.newton_schulz(m, steps, coefficients, eps, normalization)

    return Orthogonalizer(apply, constant)


def clipped_sign(gamma: float = 0.1) -> Orthogonalizer:
    """sigma -> min(sigma / gamma, 1) (001, D.9)."""
    return Orthogonalizer(
        partial(maps.clipped_sign, gamma=gamma), lipschitz("clipped-sign", "sharp", gamma=gamma)
    )
