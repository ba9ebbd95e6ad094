"""The theory: stability and generalization of FedMuon (001), stationarity of Muon (002, 004)."""

from fedmuon.analysis.theory.alignment import aligned_amplification
from fedmuon.analysis.theory.call_by_call import follow
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
from fedmuon.analysis.theory.exact_sign import Obstruction, Tube, certify, scalar_obstruction
from fedmuon.analysis.theory.gap import MeasuredGap, label_shares, measured_gap
from fedmuon.analysis.theory.generalization import Bound, bound, g_alone
from fedmuon.analysis.theory.methods import Method
from fedmuon.analysis.theory.participation import (
    batch_exposure,
    exposure,
    full_batch_sensitivity,
    loss_stability,
    mini_batch_sensitivity,
    perturbation,
    psi,
)
from fedmuon.analysis.theory.recursion import (
    amplification,
    spectral_radius,
    spectral_radius_bound,
    step_amplification,
    transition,
)
from fedmuon.analysis.theory.schedules import Schedule, alpha_free, heavy_tailed
from fedmuon.analysis.theory.stationarity import Noise, Stationarity, nesterov_muon

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
    "certify",
    "exposure",
    "follow",
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
]
