"""Orthogonalization maps on stacks of matrices [..., m, n], and how Lipschitz each one is.

A map is imported when it is first asked for (PEP 562), because it needs torch: coefficients and
certificates, and hence configs and bounds, come without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedmuon.orthogonalize.coefficients import COEFFICIENTS, NORMALIZATIONS, schedule
from fedmuon.orthogonalize.lipschitz_constants import Uncertified, lipschitz

if TYPE_CHECKING:
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
    # No map is called like its module: importing the module would put it in the map's place.
    _MODULES = {"newton_schulz": "polynomial", "randomized_polar": "randomized"}

    def __getattr__(name: str) -> object:
        """The map of that name, kept for the next time."""
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
]
