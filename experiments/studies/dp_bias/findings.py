"""Study `dp-bias`: the orders of the bias that noise leaves in a direction (000, Theorem 4.1)."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Findings, Picture, Rows, number
from fedmuon.analysis.report.slopes import NORMAL
from fedmuon.experiments.studies.dp_bias import figure as bias
from fedmuon.experiments.studies.findings import assemble

MEASURED = {"quadrature": "quadrature", "monte-carlo": "Monte Carlo"}
SMALL = 1 / 32  # slopes are fitted up to this rho, where the next term is small
ORDERS = {"plain": 2, "corrected": 4}
NEAR = 0.1  # of a slope, and of a leading coefficient relative to it
STANDS_ON = (
    "H is fixed with ‖H‖_F = 2, where Q is smooth; the released momentum is M = H + ρE, and "
    "biases are averages over E and the probes U, both standard normal and independent, as in "
    "000's model of a frozen path. Quadrature and Monte Carlo use nothing of the expansion; the "
    "leading terms are finite differences of Q alone. Monte Carlo exchanges E and U, which have "
    "one law, so that terms of order ρ² of the corrected direction cancel draw by draw."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """The findings of such a folder."""
    return assemble(folder, about, claims, pictures, numbers, stands_on=STANDS_ON)


def claims(rows: Columns) -> Sequence[Claim]:
    """Orders, leading coefficients, which is smaller, and what one direction gains."""
    orders = [order(rows, kind) for kind in ORDERS]
    return [*orders, *(leading(rows, kind) for kind in ORDERS), smaller(rows), no_less_noise(rows)]


def order(rows: Columns, kind: str) -> Claim:
    """The bias goes to 0 like rho^2 without the correction, like rho^4 with it."""
    found = {
        f"{shape}, {MEASURED[way]}": _slope(_part(rows, shape, way), kind)
        for shape, way in _measured(rows)
    }
    return Claim(
        f"{WORDS[kind]} the bias of the direction has order ρ^{ORDERS[kind]}.",
        all(abs(value - ORDERS[kind]) <= NEAR for value in found.values()),
        f"slope for ρ ≤ 1/32: {_told(found)}",
    )


def leading(rows: Columns, kind: str) -> Claim:
    """The bias comes as near to its leading term, sign and direction too, as it should: its
    relative distance falls with rho, to 10% at the smallest, but for its standard errors."""
    found, held = [], []
    for shape, way in _measured(rows):
        away, reach = _distance(rows, shape, way, kind)
        sure = f" (± {reach[0]:.2g})" if reach[0] else ""
        told = f"{number(away[0])}{sure}, {number(away[-1])}"
        found.append(f"{shape}, {MEASURED[way]} {told}")
        held.append(away[0] <= NEAR + reach[0] and (np.diff(away) > -reach[:-1]).all())
    return Claim(
        f"{WORDS[kind]} the leading term is {TERMS[kind]}, sign and direction included.",
        all(held),
        "‖bias − term‖ / ‖term‖ at the smallest ρ, and at ρ = 1/32: " + "; ".join(found),
    )


def smaller(rows: Columns) -> Claim:
    """The correction makes the bias smaller at every rho that was tried."""
    held = np.concatenate([
        _part(rows, shape, way)["corrected"] < _part(rows, shape, way)["plain"]
        for shape, way in _measured(rows)
    ])  # fmt: skip
    worst = max(
        float((part["corrected"] / part["plain"]).max())
        for part in (_part(rows, shape, way) for shape, way in _measured(rows))
    )
    return Claim(
        "The correction makes the bias smaller at every ρ.",
        bool(held.all()),
        f"in {held.sum()} of {len(held)}; corrected over plain is {worst:.3g} at most",
    )


def no_less_noise(rows: Columns) -> Claim:
    """The error of a single direction is noise far more than bias, and does not shrink."""
    found = {}
    for shape, way in _measured(rows):
        if way == "monte-carlo":
            part = _part(rows, shape, way)
            ratio = part["corrected_spread"] / part["plain_spread"]
            found[shape] = (float(ratio.min()), float(ratio.max()))
    return Claim(
        "The correction helps on average only: with one probe, a single direction is no nearer to "
        "Q(H) than without.",
        all(low >= 0.99 for low, _ in found.values()),
        "root mean square error, corrected over plain, by ρ: "
        + "; ".join(f"{shape} {low:.3f} to {high:.3f}" for shape, (low, high) in found.items()),
    )


def pictures(rows: Columns) -> Sequence[Picture]:
    """Both biases against rho."""
    return [
        Picture(
            "dp-bias",
            functools.partial(bias.orders, rows),
            "Bias of the orthogonalized direction against the noise in the momentum",
            "Points are measured, with 95% intervals of Monte Carlo; lines are the leading terms "
            "(ρ²/2) ΔQ and −(ρ⁴/4) Δ²Q, from finite differences of Q. Points leave the lines where "
            "ρ is no longer small beside the smallest singular value.",
        )
    ]


def numbers(rows: Columns) -> Rows:
    """Slopes and ratios by matrix and way."""
    found: Rows = [("matrix", "way", "plain slope", "corrected slope", "plain at ρ", "corrected")]
    for shape, way in _measured(rows):
        part = _part(rows, shape, way)
        slopes = tuple(f"{_slope(part, kind):.3f}" for kind in ORDERS)
        for place in (0, len(part["rho"]) - 1):
            at = f"{number(part['plain'][place])} at {part['rho'][place]:.4g}"
            found.append((shape, MEASURED[way], *slopes, at, number(part["corrected"][place])))
    return found


def _measured(rows: Columns) -> list[tuple[str, str]]:
    """(matrix, way) of all that was measured."""
    pairs = dict.fromkeys(zip(rows["shape"].tolist(), rows["way"].tolist(), strict=True))
    return [(shape, way) for shape, way in pairs if way in MEASURED]


def _part(rows: Columns, shape: str, way: str) -> Columns:
    """The rows of one curve, in rising order of rho."""
    chosen = np.flatnonzero((rows["shape"] == shape) & (rows["way"] == way))
    chosen = chosen[np.argsort(rows["rho"][chosen])]
    return {name: column[chosen] for name, column in rows.items()}


def _distance(rows: Columns, shape: str, way: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """||bias - term|| / ||term|| up to rho = 1/32, and 1.96 standard errors of the bias on top."""
    part, term = _part(rows, shape, way), _part(rows, shape, "taylor")[kind]
    used = part["rho"] <= SMALL
    away, error = (part[f"{kind}_{what}"] / term for what in ("off", "error"))
    return away[used], NORMAL * error[used]


def _slope(part: Columns, kind: str) -> float:
    used = part["rho"] <= SMALL
    return float(np.polyfit(np.log(part["rho"][used]), np.log(part[kind][used]), 1)[0])


def _told(found: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {value:.3f}" for name, value in found.items())


WORDS = {"plain": "Without correction", "corrected": "With DP-MuonBC's correction"}
TERMS = {"plain": "(ρ²/2) ΔQ", "corrected": "−(ρ⁴/4) Δ²Q"}
