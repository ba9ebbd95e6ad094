"""Study `dp-vanishing`: measured nuclear norms beside the rate of 000, Corollary B.6."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.slopes import curve

TERMS = ("descent", "step", "clipping", "noise", "drift")
POWER = -1 / 6
STANDS_ON = (
    "f is a mean over people of cᵢ√(cᵢ² + ‖W − Aᵢ‖²) − cᵢ² with Pareto slopes cᵢ, so E‖G‖_F² ≤ G₂² "
    "= mean cᵢ² everywhere, L = min(m, n) from ‖·‖_op to ‖·‖_*, f(W₀) − f* computed. η₀ = √(D/L), "
    "and C₀ balances clipping and noise. Lots are Poisson lots of all people; one matrix moves. "
    "The polar error is the largest that was met. The corollary bounds an expectation; each run is "
    "held against it."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound; its rate, with its constant; falling; what clipping takes."""
    return [within(rows), rate(rows), falling(rows), clipped(rows)]


def within(rows: Columns) -> Claim:
    """Run by run."""
    share = rows["mean_nuclear"] / rows["bound"]
    return Claim(
        "The mean nuclear norm of the gradient is at most the bound with Corollary B.6's rule in "
        "every run.",
        bool((share <= 1).all()),
        f"{(share <= 1).sum()} of {len(share)} runs; the largest is {share.max():.2f} of its "
        f"bound; polar error ε ≤ {rows['polar_error'].max():.3g}",
    )


def rate(rows: Columns) -> Claim:
    """From each T on, the bound is at most K_T T'^(-1/6)."""
    held, shown = [], []
    for noise in _noises(rows):
        one = where(rows, noise=noise)
        order = np.argsort(one["steps"])
        scaled = (one["exact"] * one["steps"] ** -POWER)[order]
        constant = one["constant"][order]
        held.append(all((scaled[k:] <= constant[k]).all() for k in range(len(scaled))))
        known = (constant[-1] / one["ceiling"][0]) ** (-1 / POWER)
        shown.append(
            f"σ = {noise:g}: T^(1/6) bound {number(scaled[-1])} ≤ {number(constant[-1])}, which is "
            f"more than is known of any gradient from T = {known:.2g} on"
        )
    return Claim(
        "From every T on, the bound is at most K_T T'^(−1/6), with the constant K_T that 000 "
        "leaves open.",
        all(held),
        "at the largest T, for exact polar factors: " + "; ".join(shown),
    )


def falling(rows: Columns) -> Claim:
    """Longer runs have smaller norms on average."""
    slopes = {noise: curve(rows, "steps", "mean_nuclear", noise=noise).slope
              for noise in _noises(rows)}  # fmt: skip
    return Claim(
        "The norm falls with T at every noise, although gradients have no third moment as people "
        "grow in number.",
        all(slope.high < 0 for slope in slopes.values()),
        "log-log slopes (the bound's goes to −1/6): "
        + "; ".join(f"σ = {noise:g}: {slope}" for noise, slope in slopes.items()),
    )


def clipped(rows: Columns) -> Claim:
    """Clipping cuts at every T, by at most G2^2 / (4 C)."""
    share = rows["excess"] / rows["excess_bound"]
    return Claim(
        "Clipping cuts gradients at every T, by at most G₂²/(4C) on average; 000 has four times "
        "that.",
        bool(((share > 0) & (share <= 1)).all()),
        f"{share.min():.3f} to {share.max():.3f} of G₂²/(4C)",
    )


def numbers(rows: Columns) -> Rows:
    """The bound's terms by noise and T, and what was measured."""
    lines: Rows = [("σ", "T", "C", *TERMS, "bound", "any gradient", "measured")]
    names = ("clip", *(f"term_{name}" for name in TERMS), "bound", "ceiling")
    for noise in _noises(rows):
        for steps in np.unique(rows["steps"]).tolist():
            one = where(rows, noise=noise, steps=steps)
            shown = [f"{one[name][0]:.2f}" for name in names]
            measured = f"{one['mean_nuclear'].mean():.2f}"
            lines.append((f"{noise:g}", f"{steps:.0f}", *shown, measured))
    return lines


def _noises(rows: Columns) -> list[float]:
    return np.unique(rows["noise"]).tolist()
