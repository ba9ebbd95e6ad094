"""Orthogonalization maps on stacks of matrices [..., m, n], and how Lipschitz each one is."""

from fedmuon.orthogonalize.certificates import Uncertified, lipschitz
from fedmuon.orthogonalize.coefficients import COEFFICIENTS, schedule
from fedmuon.orthogonalize.newton_schulz import NORMALIZATIONS, newton_schulz
from fedmuon.orthogonalize.polar import clipped_sign, smoothed_polar
from fedmuon.orthogonalize.randomized import randomized_polar
from fedmuon.orthogonalize.sign import exact_sign, gaussian_smoothed_sign

__all__ = [
    "COEFFICIENTS",
    "NORMALIZATIONS",
    "Uncertified",
    "clipped_sign",
    "exact_sign",
    "gaussian_smoothed_sign",
    "lipschitz",
    "newton_schulz",
    "randomized_polar",
    "schedule",
    "smoothed_polar",
]
