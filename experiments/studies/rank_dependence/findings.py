"""Study `rank-dependence`: log-log slopes of the gradient's nuclear norm in the rank (004, H.2)."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.slopes import Curve, Slope, curve
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule

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


def claims(rows: Columns) -> Sequence[Claim]:
    """SGD-M grows with r, Muon does not."""
    flat = [about_flat(rows, name) for name in NAMES if name != "sgd-m"]
    return [grows(rows), *flat, steepest(rows)]


def norms(rows: Columns, method: str, length: float) -> Curve:
    """The mean nuclear norms of a method over K steps, by rank."""
    return curve(rows, "rank", "mean_nuclear", method=method, steps=length)


def slopes(rows: Columns, method: str) -> dict[float, Slope]:
    """By length, in rising order."""
    return {length: norms(rows, method, length).slope for length in np.unique(rows["steps"])}


def grows(rows: Columns) -> Claim:
    """SGD-M's slope is within 1/4 of the 1/2 of its bound: positive, then, too."""
    every = slopes(rows, "sgd-m")
    last = every[max(every)]
    return Claim(
        "SGD-M's nuclear norm of the gradient grows with the rank, about like √r.",
        Effect.between("log-log slope", {"": last}),
        Rule(PUBLISHED - 0.25, PUBLISHED + 0.25),
        f"{_by_length(every)}; published about +{PUBLISHED}, judged at the largest K and with "
        "±0.25",
    )


def about_flat(rows: Columns, method: str) -> Claim:
    """At every length, the slope is at most 0.1 in size."""
    every = slopes(rows, method)
    return Claim(
        f"{NAMES[method]}: about flat in the rank, with a slope within ±{FLAT} at every K.",
        Effect.between(
            "log-log slope", {f"K = {length:.0f}": one for length, one in every.items()}
        ),
        Rule(-FLAT, FLAT),
        _by_length(every),
    )


def _by_length(every: dict[float, Slope]) -> str:
    return "; ".join(f"K = {length:.0f}: {slope}" for length, slope in every.items())


def steepest(rows: Columns) -> Claim:
    """Every Muon grows less with r than SGD-M: differences from the ends of both intervals, as
    methods share their draws."""
    last = {name: norms(rows, name, rows["steps"].max()).slope for name in NAMES}
    sgd = last["sgd-m"]
    less = {NAMES[name]: Slope(sgd.value - one.value, sgd.low - one.high, sgd.high - one.low)
            for name, one in last.items() if name != "sgd-m"}  # fmt: skip
    return Claim(
        "Every Muon grows less with the rank than SGD-M, at the largest K.",
        Effect.between("SGD-M's slope − Muon's", less),
        POSITIVE,
        "; ".join(f"{NAMES[name]} {slope}" for name, slope in last.items()),
    )


def numbers(rows: Columns) -> Rows:
    """Slopes by method and length."""
    head = ("method", *(f"slope over K = {length:.0f}" for length in np.unique(rows["steps"])))
    return [head, *((NAMES[name], *map(str, slopes(rows, name).values())) for name in NAMES)]
