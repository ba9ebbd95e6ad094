"""Study `heavy-tail`: fitted rates beside those of 002, Theorem 3.4 and Corollary 3.6."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.slopes import Curve, Slope, curve, quotient
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule
from fedmuon.analysis.theory.schedules import rate

THEOREM, FREE = "theorem", "alpha-free"
SCHEDULES = {THEOREM: "schedule that knows α", FREE: "schedule without α"}
MUON = {
    "muon-exact": "Muon, exact",
    "muon-ns": "Muon, Newton–Schulz",
    "muon-randomized": "Muon, randomized",
}
NAMES = {**MUON, "normalized-sgd": "normalized SGD", "sgd": "SGD"}
TOLERANCE = 0.03  # what terms of lower order may do to a slope at such K
STANDS_ON = (
    "The objective is 1-smooth and not convex, its minimum is 0. The entries of the noise are "
    "symmetric stable with an index just above α (2 at α = 2), so (2) of 002 holds with the "
    "σ₀ and σ₁ of rows.csv. The mean over k of ‖∇f(X_k)‖_F is measured, which is at "
    "least the minimum that the theorems bound. Sketches of the randomized map are shared by the "
    "runs of a step. A rate is an upper bound for large K: constants and lower orders show at "
    "small K. SGD's means have no variance at α < 2, so their intervals are too narrow."
)


def promised(alpha: float, schedule: str) -> float:
    """The exponent of K (002, Theorem 3.4), or without alpha that of Corollary 3.6."""
    return -rate(alpha, "heavy-tailed" if schedule == THEOREM else FREE)


def norms(rows: Columns, method: str, alpha: float, schedule: str = THEOREM) -> Curve:
    """The mean gradient norms of a method by K; SGD has its best step size and no schedule."""
    if method == "sgd":
        return best_sgd(rows, alpha)[1]
    given: dict[str, Any] = {"method": method, "schedule": schedule, "alpha": alpha}
    return curve(rows, "steps", "mean_gradient", **given)


def best_sgd(rows: Columns, alpha: float) -> tuple[float, Curve]:
    """SGD's step-size factor of the smallest mean at the largest K, and its curve."""
    mine = where(rows, method="sgd", alpha=alpha)
    every = {
        float(factor): curve(mine, "steps", "mean_gradient", factor=float(factor))
        for factor in np.unique(mine["factor"])
    }
    return min(every.items(), key=lambda pair: pair[1].means[-1])


def claims(rows: Columns) -> Sequence[Claim]:
    """Every Muon map keeps both rates; SGD falls behind as the tail grows heavier."""
    judged = [rate_kept(rows, method, schedule) for schedule in (THEOREM, FREE) for method in MUON]
    return [*judged, sgd_loses_ground(rows), sgd_behind(rows)]


def rate_kept(rows: Columns, method: str, schedule: str) -> Claim:
    """The fitted slope is at most the theory's, up to lower orders, at every alpha."""
    found, slopes = {}, []
    for alpha in np.unique(rows["alpha"]):
        slope, wanted = norms(rows, method, alpha, schedule).slope, promised(alpha, schedule)
        found[f"α = {alpha:g}"] = Slope(
            *(one - wanted for one in (slope.value, slope.low, slope.high))
        )
        slopes.append(f"α = {alpha:g}: {slope} for {_minus(wanted)}")
    strictly = sum(one.low <= 0 for one in found.values())
    return Claim(
        f"{NAMES[method]} on the {SCHEDULES[schedule]}: the gradient shrinks at least at the "
        f"promised rate at every α, up to {TOLERANCE} in the slope.",
        Effect.between("slope − promised", found),
        Rule(high=TOLERANCE),
        f"{'; '.join(slopes)}; without the allowance in {strictly} of {len(found)}",
    )


def sgd_loses_ground(rows: Columns) -> Claim:
    """SGD's measure over exact Muon's, at the largest K, falls as alpha rises: from each alpha to
    the next, whose runs are others. Who is ahead is another question, and said beside it."""
    ratios = _against_sgd(rows)
    steps = {f"from α = {low:g} to {high:g}": _over(ratios[high], ratios[low])
             for low, high in itertools.pairwise(ratios)}  # fmt: skip
    behind, ahead = (sum(test(one) for one in ratios.values())
                     for test in (lambda one: one.low > 1, lambda one: one.high < 1))  # fmt: skip
    return Claim(
        "The heavier the tail, the more SGD loses against exact Muon.",
        Effect.between("SGD over Muon, over the same at the heavier tail", steps),
        Rule(high=1.0, strict=True),
        _in_words(rows, ratios),
        f"Beyond doubt SGD is behind Muon at {behind} of {len(ratios)} α, and ahead at {ahead}",
    )


def _over(above: Slope, below: Slope) -> Slope:
    """The quotient of two independent estimates, to first order."""
    value = above.value / below.value
    errors = [(one.high - one.low) / 2 / one.value for one in (above, below)]
    half = abs(value) * math.hypot(*errors)
    return Slope(value, value - half, value + half)


def sgd_behind(rows: Columns) -> Claim:
    """At the smallest alpha the ratio is above 1, beyond its 95% interval."""
    heaviest, ratio = min(_against_sgd(rows).items())
    return Claim(
        f"At the heaviest tail, α = {heaviest:g}, SGD is behind exact Muon beyond doubt.",
        Effect.between("SGD over Muon", {"": ratio}),
        Rule(low=1.0, strict=True),
        _in_words(rows, {heaviest: ratio}),
    )


def _against_sgd(rows: Columns) -> dict[float, Slope]:
    """By alpha, at the largest K: SGD with its best step size over Muon with its best schedule."""
    ratios = {}
    for alpha in np.unique(rows["alpha"]):
        muon = [norms(rows, "muon-exact", alpha, schedule).runs[-1] for schedule in SCHEDULES]
        best = min(muon, key=lambda runs: runs.mean())
        ratios[float(alpha)] = quotient(norms(rows, "sgd", alpha).runs[-1], best)
    return ratios


def _in_words(rows: Columns, ratios: dict[float, Slope]) -> str:
    return (
        "SGD's mean gradient norm with the best of its step sizes over Muon's with the better "
        f"schedule, at K = {rows['steps'].max():.0f}: "
    ) + "; ".join(
        f"α = {alpha:g}: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        for alpha, ratio in ratios.items()
    )


def numbers(rows: Columns) -> Rows:
    """Slopes by method, schedule and alpha, and the measure at the largest K; a method with its
    schedule has a line of its own."""
    alphas = np.unique(rows["alpha"])
    lines: Rows = [("method: α", "slope (95%)", "larger half of K", "promised", "at the end")]
    for schedule, name in SCHEDULES.items():
        for method in (*MUON, "normalized-sgd"):
            lines.append((f"{NAMES[method]}, {name}:", "", "", "", ""))
            lines += [
                _line(
                    norms(rows, method, alpha, schedule), alpha, _minus(promised(alpha, schedule))
                )
                for alpha in alphas
            ]
    lines.append((f"{NAMES['sgd']}, the best c / √K:", "", "", "", ""))
    for alpha in alphas:
        factor, one = best_sgd(rows, alpha)
        lines.append(_line(one, alpha, "–", f", c = {factor:g}"))
    return lines


def _line(one: Curve, alpha: float, wanted: str, more: str = "") -> tuple[str, ...]:
    """alpha, both slopes, what is promised and the measure at the largest K."""
    slopes = (
        f"{_minus(each.value)} ± {each.high - each.value:.3f}" for each in (one.slope, one.late)
    )
    return f"  {alpha:g}{more}", *slopes, wanted, number(one.means[-1])


def _minus(value: float) -> str:
    return written(value, ".3f")
