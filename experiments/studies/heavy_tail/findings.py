"""Study `heavy-tail`: fitted rates beside those of 002, Theorem 3.4 and Corollary 3.6."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Findings, Picture, Rows, number
from fedmuon.analysis.report.slopes import Curve, Slope, curve, quotient
from fedmuon.experiments.studies.findings import assemble
from fedmuon.experiments.studies.heavy_tail import figure as tails
from fedmuon.experiments.studies.heavy_tail.rates import (
    FREE,
    MUON,
    NAMES,
    THEOREM,
    best_sgd,
    promised,
)

TOLERANCE = 0.03  # what terms of lower order may do to a slope at such K
STANDS_ON = (
    "The objective is 1-smooth and not convex, its minimum is 0. The entries of the noise are "
    "symmetric stable with an index just above α (2 at α = 2), so (2) of 002 holds with the "
    "σ₀ and σ₁ of rows.csv. The mean over k of ‖∇f(X_k)‖_F is measured, which is at "
    "least the minimum that the theorems bound. Sketches of the randomized map are shared by the "
    "runs of a step. A rate is an upper bound for large K: constants and lower orders show at "
    "small K. SGD's means have no variance at α < 2, so their intervals are too narrow."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder."""
    return assemble(folder, about, claims, pictures, numbers, stands_on=STANDS_ON)


def claims(rows: Columns) -> Sequence[Claim]:
    """Every Muon map keeps both rates; SGD falls behind as the tail grows heavier."""
    judged = [rate_kept(rows, method, schedule) for schedule in (THEOREM, FREE) for method in MUON]
    return [*judged, sgd_loses_ground(rows), sgd_behind(rows)]


def rate_kept(rows: Columns, method: str, schedule: str) -> Claim:
    """The fitted slope is at most the theory's, up to lower orders, at every alpha."""
    sentence = (
        f"{NAMES[method]} on the {SCHEDULES[schedule]}: the gradient shrinks at least at the "
        f"promised rate at every α, up to {TOLERANCE} in the slope."
    )
    held, strictly, told = [], 0, []
    for alpha in np.unique(rows["alpha"]):
        slope = _curve(rows, method, schedule, alpha).slope
        rate = promised(alpha, schedule)
        held.append(slope.low <= rate + TOLERANCE)
        strictly += slope.low <= rate
        told.append(f"α = {alpha:g}: {slope} for {_minus(rate)}")
    detail = f"{'; '.join(told)}; without the allowance in {strictly} of {len(held)}"
    return Claim(sentence, all(held), detail)


def sgd_loses_ground(rows: Columns) -> Claim:
    """SGD's measure over exact Muon's, at the largest K, falls as alpha rises."""
    found = _against_sgd(rows)
    values = [ratio.value for ratio in found.values()]
    return Claim(
        "The heavier the tail, the more SGD loses against exact Muon.",
        bool(np.all(np.diff(values) < 0)),
        _ratios(rows, found),
    )


def sgd_behind(rows: Columns) -> Claim:
    """At the smallest alpha the ratio is above 1, beyond its 95% interval."""
    found = _against_sgd(rows)
    heaviest = min(found)
    return Claim(
        f"At the heaviest tail, α = {heaviest:g}, SGD is behind exact Muon beyond doubt.",
        found[heaviest].low > 1,
        _ratios(rows, {heaviest: found[heaviest]}),
    )


def _against_sgd(rows: Columns) -> dict[float, Slope]:
    """By alpha, at the largest K: SGD with its best step size over Muon with its best schedule."""
    found = {}
    for alpha in np.unique(rows["alpha"]):
        muon = [_curve(rows, "muon-exact", schedule, alpha).runs[-1] for schedule in SCHEDULES]
        best = min(muon, key=lambda runs: runs.mean())
        found[float(alpha)] = quotient(best_sgd(rows, alpha)[1].runs[-1], best)
    return found


def _ratios(rows: Columns, found: Mapping[float, Slope]) -> str:
    told = "; ".join(
        f"α = {alpha:g}: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        for alpha, ratio in found.items()
    )
    return (
        "SGD's mean gradient norm with the best of its step sizes over Muon's with the better "
        f"schedule, at K = {rows['steps'].max():.0f}: {told}"
    )


def pictures(rows: Columns) -> Sequence[Picture]:
    """Curves with their rates, and all slopes."""
    return [
        Picture(
            "heavy-tail",
            functools.partial(tails.curves, rows),
            "Mean gradient norm against the number of steps, by tail index",
            "The Muon maps and normalized SGD on the schedule of 002, Theorem 3.4, SGD with its "
            "best step size at each α; 95% intervals over seeds. The dashed line has the slope "
            "−(α − 1)/(3α − 2) of the theorem: curves at least as steep bear it out.",
        ),
        Picture(
            "heavy-tail-slopes",
            functools.partial(tails.slopes, rows),
            "Fitted slopes beside the promised ones",
            "Points at or below the line shrink at least as fast as promised. Left with the "
            "schedule that knows α, right with the one that does not, whose guarantee is weaker.",
        ),
    ]


def numbers(rows: Columns) -> Rows:
    """Slopes by method, schedule and alpha, and the measure at the largest K."""
    head = ("method", "schedule", "α", "slope (95%)", "larger half of K", "promised", "at the end")
    found: Rows = [head]
    for schedule in (THEOREM, FREE):
        for method in (*MUON, "normalized-sgd"):
            for alpha in np.unique(rows["alpha"]):
                one = _curve(rows, method, schedule, alpha)
                found.append((NAMES[method], SCHEDULES[schedule], *_line(one, alpha, schedule)))
    for alpha in np.unique(rows["alpha"]):
        factor, one = best_sgd(rows, alpha)
        rule = f"{factor:g} / √K, the best"
        found.append((NAMES["sgd"], rule, *_line(one, alpha, None)))
    return found


def _line(one: Curve, alpha: float, schedule: str | None) -> tuple[str, ...]:
    """alpha, both slopes, what is promised and the measure at the largest K."""
    rate = _minus(promised(alpha, schedule)) if schedule else "–"
    return f"{alpha:g}", str(one.slope), str(one.late), rate, number(one.means[-1])


def _curve(rows: Columns, method: str, schedule: str, alpha: float) -> Curve:
    where: dict[str, Any] = {"method": method, "schedule": schedule, "alpha": alpha}
    return curve(rows, "steps", "mean_gradient", **where)


def _minus(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


SCHEDULES = {THEOREM: "schedule that knows α", FREE: "schedule without α"}
