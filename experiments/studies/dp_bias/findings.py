"""Study `dp-bias`: the orders of the bias that noise leaves in a direction (000, Theorem 4.1)."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.columns import where
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.slopes import NORMAL

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


def claims(rows: Columns) -> Sequence[Claim]:
    """Orders, leading coefficients, which is smaller, what one direction gains, and how far probes
    scatter."""
    orders = [order(rows, kind) for kind in ORDERS]
    last = [smaller(rows), no_less_noise(rows), probes(rows)]
    return [*orders, *(leading(rows, kind) for kind in ORDERS), *last]


def order(rows: Columns, kind: str) -> Claim:
    """The bias goes to 0 like rho^2 without the correction, like rho^4 with it."""
    slopes = {name: _slope(part, kind) for name, part in _measured(rows).items()}
    return Claim(
        f"{WORDS[kind]} the bias of the direction has order ρ^{ORDERS[kind]}.",
        all(abs(slope - ORDERS[kind]) <= NEAR for slope in slopes.values()),
        "slope for ρ ≤ 1/32: "
        + "; ".join(f"{', '.join(name)} {slope:.3f}" for name, slope in slopes.items()),
    )


def leading(rows: Columns, kind: str) -> Claim:
    """The bias comes as near to its leading term, sign and direction too, as it should: its
    relative distance falls with rho, to 10% at the smallest, but for its standard errors."""
    shares, held = [], []
    for (shape, way), part in _measured(rows).items():
        term, used = _part(rows, shape, "taylor")[kind], part["rho"] <= SMALL
        away, reach = (part[f"{kind}_off"] / term)[used], (part[f"{kind}_error"] / term)[used]
        reach *= NORMAL
        sure = f" (± {reach[0]:.2g})" if reach[0] else ""
        shares.append(f"{shape}, {way} {number(away[0])}{sure}, {number(away[-1])}")
        held.append(away[0] <= NEAR + reach[0] and (np.diff(away) > -reach[:-1]).all())
    return Claim(
        f"{WORDS[kind]} the leading term is {TERMS[kind]}, sign and direction included.",
        all(held),
        "‖bias − term‖ / ‖term‖ at the smallest ρ, and at ρ = 1/32: " + "; ".join(shares),
    )


def smaller(rows: Columns) -> Claim:
    """The correction makes the bias smaller at every rho that was tried."""
    parts = _measured(rows).values()
    ratio = np.concatenate([part["corrected"] / part["plain"] for part in parts])
    held = ratio < 1
    return Claim(
        "The correction makes the bias smaller at every ρ.",
        bool(held.all()),
        f"in {held.sum()} of {len(held)}; corrected over plain is {ratio.max():.3g} at most",
    )


def no_less_noise(rows: Columns) -> Claim:
    """The error of a single direction is noise far more than bias, and does not shrink."""
    ratios = {
        shape: part["corrected_spread"] / part["plain_spread"]
        for (shape, way), part in _measured(rows).items()
        if way == MEASURED["monte-carlo"]
    }
    return Claim(
        "The correction helps on average only: with one probe, a single direction is no nearer to "
        "Q(H) than without.",
        all(ratio.min() >= 0.99 for ratio in ratios.values()),
        "root mean square error, corrected over plain, by ρ: "
        + "; ".join(f"{name} {one.min():.3f} to {one.max():.3f}" for name, one in ratios.items()),
    )


def probes(rows: Columns) -> Claim:
    """000, C.6 for one pair: below K_Q, and below what Poincare's inequality gives of even maps."""
    part = where(rows, way="monte-carlo")
    share, gain = part["probe"] / part["probe_bound"], part["probe_any"] / part["probe_bound"]
    return Claim(
        "A pair of probes scatters by at most min(K_Q, ρ√(d/2) Lip(Q)), never more than the K_Q of "
        "000, C.6.",
        bool((share <= 1).all() and (gain >= 1).all()),
        f"root mean square over the bound {share.min():.3g} to {share.max():.3g}; K_Q is up to "
        f"{gain.max():.3g} times the bound",
    )


def numbers(rows: Columns) -> Rows:
    """Slopes and ratios by matrix and way."""
    lines: Rows = [("matrix", "way", "plain slope", "corrected slope", "plain at ρ", "corrected")]
    for name, part in _measured(rows).items():
        slopes = [f"{_slope(part, kind):.3f}" for kind in ORDERS]
        for place in (0, len(part["rho"]) - 1):
            at = f"{number(part['plain'][place])} at {part['rho'][place]:.4g}"
            lines.append((*name, *slopes, at, number(part["corrected"][place])))
    return lines


def _measured(rows: Columns) -> dict[tuple[str, str], Columns]:
    """The curves of all that was measured, by matrix and way."""
    pairs = dict.fromkeys(zip(rows["shape"].tolist(), rows["way"].tolist(), strict=True))
    return {
        (shape, MEASURED[way]): _part(rows, shape, way) for shape, way in pairs if way in MEASURED
    }


def _part(rows: Columns, shape: str, way: str) -> Columns:
    """The rows of one curve, in rising order of rho."""
    part = where(rows, shape=shape, way=way)
    order = np.argsort(part["rho"])
    return {name: column[order] for name, column in part.items()}


def _slope(part: Columns, kind: str) -> float:
    used = part["rho"] <= SMALL
    return float(np.polyfit(np.log(part["rho"][used]), np.log(part[kind][used]), 1)[0])


WORDS = {"plain": "Without correction", "corrected": "With DP-MuonBC's correction"}
TERMS = {"plain": "(ρ²/2) ΔQ", "corrected": "−(ρ⁴/4) Δ²Q"}
