"""Study `dp-vanishing`: measured nuclear norms beside the rate of 000, Corollary B.6."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import number
from fedmuon.analysis.report.slopes import curve
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, NEGATIVE, Claim, Effect, Rule

TERMS = ("descent", "step", "clipping", "noise", "drift")
POWER = -1 / 6
STANDS_ON = (
    "f is a mean over people of cᵢ√(cᵢ² + ‖W − Aᵢ‖²) − cᵢ² with Pareto slopes cᵢ, so E‖G‖_F² ≤ G₂² "
    "= mean cᵢ² everywhere, L = min(m, n) from ‖·‖_op to ‖·‖_*, f(W₀) − f* computed. η₀ = √(D/L), "
    "and C₀ balances clipping and noise. Lots are Poisson lots of all people; one matrix moves. "
    "The polar error is the largest that was met. The corollary bounds an expectation; each run is "
    "held against it. That the bound keeps to K_T T'^(−1/6) from every T on is arithmetic, proved "
    "beside the formula, and no claim here."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Below the bound; whether it says much; whether its rate shows; falling; what clipping
    takes."""
    return [within(rows), telling(rows), shows(rows), falling(rows), clipped(rows)]


def within(rows: Columns) -> Claim:
    """Run by run, where the bound is below what no gradient exceeds: elsewhere no run could break
    it."""
    share, said = rows["mean_nuclear"] / rows["bound"], rows["bound"] < rows["ceiling"]
    held = share[said] <= 1
    judged = share[said] if said.any() else np.nan
    largest = f"; the largest is {share[said].max():.2f} of its bound" if said.any() else ""
    return Claim(
        "The mean nuclear norm of the gradient is at most the bound with Corollary B.6's rule in "
        "every run whose bound says more than ‖∇f‖_* ≤ √r mean cᵢ, which holds everywhere.",
        Effect.exact("measured over bound", judged),
        AT_MOST_ONE,
        f"{held.sum()} of {said.sum()} such runs, of {len(said)}{largest}; polar error ε ≤ "
        f"{number(rows['polar_error'].max(), 3)}",
    )


def telling(rows: Columns) -> Claim:
    """Whether the bound is below what holds of any gradient of this problem, and from where on
    K_T T^(-1/6) is, with the constant that 000 leaves open."""
    end, shown, ratios = where(rows, steps=rows["steps"].max()), [], []
    for noise in _noises(rows):
        one = where(end, noise=noise)
        ratios.append(one["bound"][0] / one["ceiling"][0])
        known = (one["constant"][0] / one["ceiling"][0]) ** (-1 / POWER)
        shown.append(f"σ = {noise:g}: {one['bound'][0] / one['ceiling'][0]:.2f} times that, and "
                     f"K_T T^(−1/6) is below it from T = {number(known, 2)} on")  # fmt: skip
    return Claim(
        "At the largest T the bound says more than ‖∇f‖_* ≤ √r mean cᵢ at every noise.",
        Effect.exact("bound over ceiling", ratios, [f"σ = {noise:g}" for noise in _noises(rows)]),
        Rule(high=1.0, strict=True),
        "; ".join(shown),
    )


def shows(rows: Columns) -> Claim:
    """The rate in what was measured; O() leaves any start, so 000 does not promise it here."""
    slopes = {noise: curve(rows, "steps", "mean_nuclear", noise=noise).late
              for noise in _noises(rows)}  # fmt: skip
    return Claim(
        "The rate shows in what is measured: over the larger half of T the norm falls like "
        "T^(−1/6) or faster. (000's O(·) promises it of large T only.)",
        Effect.between("log-log slope", {f"σ = {k:g}": one for k, one in slopes.items()}),
        Rule(high=POWER),
        "log-log slopes: " + "; ".join(f"σ = {noise:g}: {one}" for noise, one in slopes.items()),
    )


def falling(rows: Columns) -> Claim:
    """Longer runs have smaller norms on average."""
    slopes = {noise: curve(rows, "steps", "mean_nuclear", noise=noise).slope
              for noise in _noises(rows)}  # fmt: skip
    return Claim(
        "The norm falls with T at every noise, although gradients have no third moment as people "
        "grow in number.",
        Effect.between("log-log slope", {f"σ = {k:g}": one for k, one in slopes.items()}),
        NEGATIVE,
        "log-log slopes (the bound's goes to −1/6): "
        + "; ".join(f"σ = {noise:g}: {slope}" for noise, slope in slopes.items()),
    )


def clipped(rows: Columns) -> Claim:
    """Clipping cuts at every T, by at most G2^2 / (4 C)."""
    share = rows["excess"] / rows["excess_bound"]
    return Claim(
        "Clipping cuts gradients at every T, by at most G₂²/(4C) on average; 000 has four times "
        "that.",
        Effect.exact("excess over G₂²/(4C)", np.where(share > 0, share, np.inf)),
        AT_MOST_ONE,
        f"{share.min():.3f} to {share.max():.3f} of G₂²/(4C)",
    )


def numbers(rows: Columns) -> Rows:
    """The bound's terms by noise and T, and what was measured."""
    lines: Rows = [("σ", "T", *TERMS, "bound", "measured")]
    for noise in _noises(rows):
        for steps in np.unique(rows["steps"]).tolist():
            one = where(rows, noise=noise, steps=steps)
            shown = [f"{one[name][0]:.2f}" for name in (*(f"term_{k}" for k in TERMS), "bound")]
            measured = f"{one['mean_nuclear'].mean():.2f}"
            lines.append((f"{noise:g}", f"{steps:.0f}", *shown, measured))
    return lines


def _noises(rows: Columns) -> list[float]:
    return np.unique(rows["noise"]).tolist()
