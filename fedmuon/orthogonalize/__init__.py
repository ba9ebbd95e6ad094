"""Orthogonalizers on stacks of matrices [..., m, n], and their Lipschitz constants.

A public name is imported at its first use (PEP 562). Configs and tables of coefficients can
therefore be read without torch and numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedmuon.orthogonalize.coefficients import COEFFICIENTS, NORMALIZATIONS, schedule, with_safety

if TYPE_CHECKING:
    from fedmuon.orthogonalize.lipschitz_constants import Uncertified, lipschitz
    from fedmuon.orthogonalize.polar import (
        clipped_sign,
        exact_sign,
        gaussian_smoothed_sign,
        quotient_sign,
        smoothed_polar,
    )
    from fedmuon.orthogonalize.polynomial import newton_schulz
    from fedmuon.orthogonalize.randomized import randomized_polar
else:
    # A module must not have the same name as a function, because importing it would hide the
    # function.
    _MODULES = {
        "Uncertified": "lipschitz_constants",
        "lipschitz": "lipschitz_constants",
        "newton_schulz": "polynomial",
        "randomized_polar": "randomized",
    }

    def __getattr__(name: str) -> object:
        """Import the public object with this name at its first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_MODULES.get(name, 'polar')}")
        return globals().setdefault(name, getattr(module, name))


__all__ = [
    "COEFFICIENTS",
    "NORMALIZATIONS",
    "Uncertified",
    "clipped_sign",
    "exact_sign",
    "gaussian_smoothed_sign",
    "lipschitz",
    "newton_schulz",
    "quotient_sign",
    "randomized_polar",
    "schedule",
    "smoothed_polar",
    "with_safety",
]
