"""Orthogonalization maps on stacks of matrices [..., m, n], and how Lipschitz each one is.

A map is imported when it is first asked for (PEP 562), because it needs torch: coefficients and
certificates, and hence configs and bounds, come without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedmuon.orthogonalize.certificates import Uncertified, lipschitz
from fedmuon.orthogonalize.coefficients import COEFFICIENTS, schedule
from fedmuon.orthogonalize.normalization import NORMALIZATIONS

if TYPE_CHECKING:
    from fedmuon.orthogonalize.polar import clipped_sign, smoothed_polar
    from fedmuon.orthogonalize.polynomial import newton_schulz
    from fedmuon.orthogonalize.randomized import randomized_polar
    from fedmuon.orthogonalize.sign import exact_sign, gaussian_smoothed_sign
else:
    # No map is called like its module: importing the module would put it in the map's place.
    _MODULES = {
        "clipped_sign": "polar",
        "exact_sign": "sign",
        "gaussian_smoothed_sign": "sign",
        "newton_schulz": "polynomial",
        "randomized_polar": "randomized",
        "smoothed_polar": "polar",
    }

    def __getattr__(name: str) -> object:
        """The map of that name, kept for the next time."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = found
        return found


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
