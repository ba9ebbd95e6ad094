"""Study `rank-dependence`: log-log slopes of the gradient's nuclear norm in the rank (004, H.2)."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Findings, Picture, Rows
from fedmuon.analysis.report.slopes import curve
from fedmuon.experiments.studies.findings import assemble
from fedmuon.experiments.studies.rank_dependence import figure as ranks

NAMES = {"sgd-m": "SGD-M", "muon-svd": "Muon, SVD", "muon-ns-1": "Muon, q = 1",
         "muon-ns-2": "Muon, q = 2", "muon-ns-3": "Muon, q = 3"}  # fmt: skip
FLAT = 0.1  # a slope of at most this size is about flat
PUBLISHED = 0.5  # of SGD-M (004, section 5)
STANDS_ON = (
    "The model is a matrix regression whose loss is a mean over outputs, its target has r singular "
    "values 1: f(X₀) − f* = 1/2 and L = 1 in 004's norms for every r, and step sizes are the same "
    "for all r. 004's theorems bound the mean of ‖∇f‖_* by √r times a constant for SGD-M, and by "
    "a constant for Muon; upper bounds, which a problem need not attain. 004 measures a "
    "convolution of a network on CIFAR-10 instead."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder."""
    return assemble(folder, about, claims, pictures, numbers, stands_on=STANDS_ON)


def claims(rows: Columns) -> Sequence[Claim]:
    """SGD-M grows with r, Muon does not."""
    flat = [about_flat(rows, name) for name in NAMES if name != "sgd-m"]
    return [grows(rows), *flat, steepest(rows)]


def grows(rows: Columns) -> Claim:
    """SGD-M has a slope that is positive beyond doubt, and at most the 1/2 of its bound or more."""
    slopes = {length: _slope(rows, "sgd-m", length) for length in _lengths(rows)}
    last = slopes[max(slopes)]
    told = "; ".join(f"K = {length:.0f}: {slope}" for length, slope in slopes.items())
    return Claim(
        "SGD-M's nuclear norm of the gradient grows with the rank, about like √r.",
        bool(last.low > 0 and abs(last.value - PUBLISHED) <= 0.25),
        f"{told}; published about +{PUBLISHED}, judged at the largest K and with ±0.25",
    )


def about_flat(rows: Columns, method: str) -> Claim:
    """At every length, the slope is at most 0.1 in size."""
    slopes = {length: _slope(rows, method, length) for length in _lengths(rows)}
    told = "; ".join(f"K = {length:.0f}: {slope}" for length, slope in slopes.items())
    return Claim(
        f"{NAMES[method]}: about flat in the rank, with a slope within ±{FLAT} at every K.",
        all(abs(slope.value) <= FLAT for slope in slopes.values()),
        told,
    )


def steepest(rows: Columns) -> Claim:
    """Every Muon grows less with r than SGD-M."""
    last = max(_lengths(rows))
    found = {name: _slope(rows, name, last) for name in NAMES}
    return Claim(
        "Every Muon grows less with the rank than SGD-M, at the largest K.",
        all(found[name].high < found["sgd-m"].low for name in NAMES if name != "sgd-m"),
        "; ".join(f"{NAMES[name]} {slope}" for name, slope in found.items()),
    )


def pictures(rows: Columns) -> Sequence[Picture]:
    """The means against the rank, and the slopes against the length."""
    return [
        Picture(
            "rank-dependence",
            functools.partial(ranks.dependence, rows, NAMES),
            "Mean nuclear norm of the gradient against the rank",
            "Left: means over the longest run, with 95% intervals over seeds; the dotted line has "
            "slope 1/2. Right: the slope in r of means over K steps. One Newton–Schulz step from "
            "M/‖M‖_F leaves small singular values where r is large, so q = 1 follows SGD-M part "
            "of the way; the exact map does not.",
        )
    ]


def numbers(rows: Columns) -> Rows:
    """Slopes by method and length."""
    lengths = _lengths(rows)
    found: Rows = [("method", *(f"slope over K = {length:.0f}" for length in lengths))]
    for name, told in NAMES.items():
        found.append((told, *(str(_slope(rows, name, length)) for length in lengths)))
    return found


def _lengths(rows: Columns) -> np.ndarray:
    return np.unique(rows["steps"])


def _slope(rows: Columns, method: str, length: float) -> Any:
    return curve(rows, "rank", "mean_nuclear", method=method, steps=float(length)).slope
