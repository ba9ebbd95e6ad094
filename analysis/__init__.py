"""Formulas of the papers: stability, generalization and stationarity of Muon optimizers.

The formulas of the Stability note bound the stability and the generalization gap of FedMuon. The
formulas of Nesterov Muon and of Newton–Schulz convergence bound the gradient norms that Muon
reaches.

Python imports each name only when the name is first used (PEP 562). Importing this package
therefore does not load NumPy, so commands that only show a run start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmuon.analysis.theory.client_neighbours import client_certificate
    from fedmuon.analysis.theory.corollaries import (
        Rate,
        Realized,
        Run,
        Uniform,
        certificate,
        full_participation,
        gaussian_smoothed_sign,
        newton_schulz,
        partial_participation,
        smoothed_polar,
        stability,
        theorem,
    )
    from fedmuon.analysis.theory.exact_polar import (
        Obstruction,
        Tube,
        path_certificate,
        scalar_obstruction,
        tube_certificate,
    )
    from fedmuon.analysis.theory.generalization import (
        Bound,
        MeasuredGap,
        bound,
        g_alone,
        label_shares,
        measured_gap,
    )
    from fedmuon.analysis.theory.recursion import (
        Method,
        aligned_amplification,
        amplification,
        batch_exposure,
        exposure,
        full_batch_sensitivity,
        loss_stability,
        mini_batch_sensitivity,
        perturbation,
        psi,
        spectral_radius,
        spectral_radius_bound,
        step_amplification,
        transition,
    )
    from fedmuon.analysis.theory.stationarity import (
        Noise,
        Schedule,
        Stationarity,
        alpha_free,
        heavy_tailed,
        nesterov_muon,
    )
else:
    _NAMES = {
        "client_neighbours": ("client_certificate",),
        "corollaries": (
            "Rate",
            "Realized",
            "Run",
            "Uniform",
            "certificate",
            "full_participation",
            "gaussian_smoothed_sign",
            "newton_schulz",
            "partial_participation",
            "smoothed_polar",
            "stability",
            "theorem",
        ),
        "exact_polar": (
            "Obstruction",
            "Tube",
            "path_certificate",
            "scalar_obstruction",
            "tube_certificate",
        ),
        "generalization": (
            "Bound",
            "MeasuredGap",
            "bound",
            "g_alone",
            "label_shares",
            "measured_gap",
        ),
        "recursion": (
            "Method",
            "aligned_amplification",
            "amplification",
            "batch_exposure",
            "exposure",
            "full_batch_sensitivity",
            "loss_stability",
            "mini_batch_sensitivity",
            "perturbation",
            "psi",
            "spectral_radius",
            "spectral_radius_bound",
            "step_amplification",
            "transition",
        ),
        "stationarity": (
            "Noise",
            "Schedule",
            "Stationarity",
            "alpha_free",
            "heavy_tailed",
            "nesterov_muon",
        ),
    }
    _PLACES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import the public object `name` at its first use, and store it in this module."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.theory.{_PLACES[name]}")
        return globals().setdefault(name, getattr(module, name))


__all__ = [
    "Bound",
    "MeasuredGap",
    "Method",
    "Noise",
    "Obstruction",
    "Rate",
    "Realized",
    "Run",
    "Schedule",
    "Stationarity",
    "Tube",
    "Uniform",
    "aligned_amplification",
    "alpha_free",
    "amplification",
    "batch_exposure",
    "bound",
    "certificate",
    "client_certificate",
    "exposure",
    "full_batch_sensitivity",
    "full_participation",
    "g_alone",
    "gaussian_smoothed_sign",
    "heavy_tailed",
    "label_shares",
    "loss_stability",
    "measured_gap",
    "mini_batch_sensitivity",
    "nesterov_muon",
    "newton_schulz",
    "partial_participation",
    "path_certificate",
    "perturbation",
    "psi",
    "scalar_obstruction",
    "smoothed_polar",
    "spectral_radius",
    "spectral_radius_bound",
    "stability",
    "step_amplification",
    "theorem",
    "transition",
    "tube_certificate",
]
