"""Study `dp-bias`: the orders of the bias that noise leaves in a direction (000, Theorem 4.1)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.slopes import NORMAL
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, Claim, Effect, Rule

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
    reach = [_reach(part, kind) for part in _measured(rows).values()]
    named = [", ".join(name) for name in slopes]
    return Claim(
        f"{WORDS[kind]} the bias of the direction has order ρ^{ORDERS[kind]}.",
        Effect.around("log-log slope in ρ", [*slopes.values()], reach, named),
        Rule(ORDERS[kind] - NEAR, ORDERS[kind] + NEAR),
        "slope for ρ ≤ 1/32: "
        + "; ".join(f"{', '.join(name)} {slope:.3f}" for name, slope in slopes.items()),
    )


def leading(rows: Columns, kind: str) -> Claim:
    """The bias comes as near to its leading term, sign and direction too, as it should: its
    relative distance is at most 10% at the smallest rho, and from rho to rho at most what it is at
    the next, each with its standard errors."""
    shares, ratios, reaches, places = [], [], [], []
    for (shape, way), part in _measured(rows).items():
        term, used = _part(rows, shape, "taylor")[kind], part["rho"] <= SMALL
        away, reach = (part[f"{kind}_off"] / term)[used], (part[f"{kind}_error"] / term)[used]
        reach *= NORMAL
        sure = f" (± {number(reach[0], 2)})" if reach[0] else ""
        shares.append(f"{shape}, {way} {number(away[0])}{sure}, {number(away[-1])}")
        ratios += [away[0] / NEAR, *(away[:-1] / away[1:])]
        reaches += [reach[0] / NEAR, *(reach[:-1] / away[1:])]
        places += [
            f"{shape}, {way}, smallest ρ, over {NEAR}",
            *(
                f"{shape}, {way}, next ρ over ρ = {number(one, 3)}"
                for one in part["rho"][used][:-1]
            ),
        ]
    return Claim(
        f"{WORDS[kind]} the leading term is {TERMS[kind]}, sign and direction included.",
        Effect.around("relative distance", ratios, reaches, places),
        Rule(high=1.0, strict=True),
        "‖bias − term‖ / ‖term‖ at the smallest ρ, and at ρ = 1/32: " + "; ".join(shares),
    )


def smaller(rows: Columns) -> Claim:
    """The correction makes the bias smaller at every rho that was tried."""
    parts = _measured(rows).values()
    ratio = np.concatenate([part["corrected"] / part["plain"] for part in parts])
    held = ratio < 1
    spread = [
        part[f"{kind}_error"] * NORMAL / part["plain"]
        for part in parts
        for kind in ("plain", "corrected")
    ]
    reach = np.concatenate(
        [np.hypot(*both) for both in zip(spread[::2], spread[1::2], strict=True)]
    )
    return Claim(
        "The correction makes the bias smaller at every ρ.",
        Effect.around("corrected over plain bias", ratio, reach),
        Rule(high=1.0, strict=True),
        f"in {held.sum()} of {len(held)}; corrected over plain is {number(ratio.max(), 3)} at most",
    )


def no_less_noise(rows: Columns) -> Claim:
    """The error of a single direction is noise far more than bias, and does not shrink."""
    parts = {shape: part for (shape, way), part in _measured(rows).items()
             if way == MEASURED["monte-carlo"]}  # fmt: skip
    ratios = {name: part["corrected_spread"] / part["plain_spread"] for name, part in parts.items()}
    least = [(one.min(), one.min() * NORMAL * _errors(parts[name], "gain")[one.argmin()])
             for name, one in ratios.items()]  # fmt: skip
    return Claim(
        "The correction helps on average only: with one probe, a single direction is no nearer to "
        "Q(H) than without.",
        _drawn("error, corrected over plain", least, list(ratios)),
        Rule(low=0.99),
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
        _drawn(
            "scatter over bound, and bound over K_Q",
            [
                (share.max(), share.max() * NORMAL * _errors(part, "probe")[share.argmax()]),
                ((1 / gain).max(), 0.0),
            ],
            ("scatter over bound", "bound over K_Q"),
        ),
        AT_MOST_ONE,
        f"root mean square over the bound {share.min():.3g} to {share.max():.3g}; K_Q is up to "
        f"{number(gain.max(), 3)} times the bound",
    )


def _drawn(name: str, found: Sequence[tuple[float, float]], places: Sequence[str]) -> Effect:
    """Values of one draw of samples, with half of their intervals; no seeds would shorten them."""
    return replace(Effect.around(name, *np.array(found).T, places), seeded=False)


def _errors(part: Columns, of: str) -> np.ndarray:
    """Relative standard errors; tables of earlier versions have none."""
    return part.get(f"{of}_error", np.full(len(part["rho"]), np.nan))


def numbers(rows: Columns) -> Rows:
    """Slopes and ratios by matrix and way."""
    lines: Rows = [("matrix", "way", "plain slope", "corrected slope", "plain at ρ", "corrected")]
    for name, part in _measured(rows).items():
        slopes = [f"{_slope(part, kind):.3f}" for kind in ORDERS]
        for place in (0, len(part["rho"]) - 1):
            at = f"{number(part['plain'][place])} at {number(part['rho'][place])}"
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


def _reach(part: Columns, kind: str) -> float:
    """Half of an interval of that slope, sum_k w_k log b_k: errors of one draw may go one way, so
    that they add up."""
    used = part["rho"] <= SMALL
    x = np.log(part["rho"][used])
    weights = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
    return float(NORMAL * np.abs(weights) @ (part[f"{kind}_error"] / part[kind])[used])


WORDS = {"plain": "Without correction", "corrected": "With DP-MuonBC's correction"}
TERMS = {"plain": "(ρ²/2) ΔQ", "corrected": "−(ρ⁴/4) Δ²Q"}
