"""Study `dp-bias`: how noise changes the mean of a Newton–Schulz direction.

The study is about DP-Muon, section 4. In that section, the server releases the momentum M = H + rho
E with Gaussian noise E. Q is the Newton–Schulz map, so the uncorrected direction is Q(M). The
corrected direction is O = 2 Q(M) - (Q(M + rho U) + Q(M - rho U)) / 2 with random probes U. A bias
is the mean of a direction over E and U, minus Q(H). Let P be the Gaussian heat operator, P_rho Q(H)
= E Q(H + rho U). The uncorrected bias is then P_rho Q(H) - Q(H). The corrected bias is (2 P_rho -
P_(sqrt 2 rho)) Q(H) - Q(H).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import AT_MOST_ONE, NORMAL, Claim, Effect, Rule
from fedmuon.analysis.theory.private_stationarity import largest_output, probe_error
from fedmuon.config.schema import Count, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study, distinct
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.orthogonalize import newton_schulz
from fedmuon.runs.directory import Record

Map = Callable[[Tensor], Tensor]  # [..., m, n] -> [..., m, n]
SEED = 0
NOT_ALL = ("probe", "probe_bound", "probe_any", "probe_error", "gain_error")  # only Monte Carlo
AT_ONCE = 1 << 14  # number of samples of a chunk
SHAPES = {"2 × 2": (2, 2), "3 × 4": (3, 4)}
QUADRATURE, MONTE_CARLO, TAYLOR = "quadrature", "monte-carlo", "taylor"


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `norm` is ||H||_F. The value 1 is not allowed, because Q has a kink there.
    """

    rhos: Annotated[list[Positive], Field(min_length=2)]
    norm: Positive
    steps: Count
    coefficients: str
    nodes: Annotated[int, Field(ge=2)]  # nodes of Gauss-Hermite quadrature per dimension (of four)
    samples: Annotated[int, Field(ge=100)]  # number of pairs (E, U) of the Monte Carlo estimate
    spacing: Positive  # step of finite differences


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each matrix and method. Only small matrices are computed by quadrature."""
    ways = [("2 × 2", by_quadrature)]
    ways += [(shape, compute) for shape in SHAPES for compute in (by_monte_carlo, by_taylor)]
    return [
        Call(f"{compute.__name__}-{shape.replace(' × ', 'x')}", partial(compute, settings, shape))
        for shape, compute in ways
    ]


# Measurements


def output_map(settings: Settings) -> Map:
    """Return the map Q of DP-Muon: Newton–Schulz steps that start from M / max(1, ||M||_F)."""
    steps, coefficients = settings.steps, settings.coefficients
    return lambda matrix: newton_schulz(matrix, steps, coefficients, normalization="unit")


def momentum(shape: str, norm: float) -> Tensor:
    """Return a random matrix H with the Frobenius norm `norm`.

    The singular values are proportional to 1, 2, 3, ...
    """
    m, n = SHAPES[shape]
    rng = generator(SEED, Draw.SYNTHETIC, block=m * n)
    left, right = (np.linalg.qr(rng.standard_normal((k, m)))[0] for k in (m, n))
    values = np.arange(1, m + 1)
    return torch.from_numpy(left * (norm * values / np.linalg.norm(values)) @ right.T)


def by_quadrature(settings: Settings, shape: str) -> Record:
    """Compute both biases accurately by Gauss-Hermite quadrature over all matrix entries."""
    apply, at, rhos = output_map(settings), momentum(shape, settings.norm), settings.rhos
    heat, twice = (
        torch.stack([_smoothed(apply, at, width * rho, settings.nodes) - apply(at) for rho in rhos])
        for width in (1, math.sqrt(2))
    )
    terms = leading_terms(apply, at, rhos, settings.spacing)
    return _record(shape, QUADRATURE, rhos, torch.stack([heat, 2 * heat - twice]), terms)


def _smoothed(apply: Map, at: Tensor, rho: float, nodes: int) -> Tensor:
    """Return the smoothed map P_rho Q(H) = E Q(H + rho U).

    The mean over the Gaussian matrix U is computed by the product rule of quadrature.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[points] * at.numel(), indexing="ij"), -1)
    mass = weights / weights.sum()
    weight = torch.from_numpy(mass)
    for _ in range(at.numel() - 1):
        weight = weight[..., None] * torch.from_numpy(mass)
    moved = at + rho * torch.from_numpy(grid).reshape(-1, *at.shape)
    return torch.einsum("b,bij->ij", weight.flatten(), apply(moved))


def by_monte_carlo(settings: Settings, shape: str) -> Record:
    """Estimate both biases, and the errors of single directions, from random pairs (E, U).

    Let phi(E) = (Q(H + rho E) + Q(H - rho E)) / 2 - Q(H). The mean of phi(E) is the uncorrected
    bias. E and U have the same distribution and can be exchanged, so the corrected bias is the mean
    of phi(E) + phi(U) - (phi(E + U) + phi(E - U)) / 2. For every pair (E, U), the terms of order
    rho^2 cancel by the parallelogram law.
    """
    apply, at, rhos = output_map(settings), momentum(shape, settings.norm), settings.rhos
    sampled = [_sampled(apply, at, rho, settings.samples) for rho in rhos]
    *parts, doubts = zip(*sampled, strict=True)
    biases, errors, spreads = (torch.stack(part, 1) for part in parts)
    terms = leading_terms(apply, at, rhos, settings.spacing)
    record = _record(shape, MONTE_CARLO, rhos, biases, terms, errors, spreads)
    polynomial = settings.coefficients, settings.steps
    for row, (quotient, probe) in zip(record["rows"], doubts, strict=True):
        row["gain_error"], row["probe_error"] = quotient, probe
        # phi(U) is a pair of probes at M = H, so its deviation is that of DP-Muon (C.6) for J = 1.
        row["probe"] = row["plain_error"] * math.sqrt(settings.samples)
        row["probe_bound"] = probe_error(*polynomial, SHAPES[shape], row["rho"])
        row["probe_any"] = largest_output(*polynomial, min(SHAPES[shape]))
    return record


def _sampled(
    apply: Map, at: Tensor, rho: float, samples: int
) -> tuple[Tensor, Tensor, Tensor, tuple[float, float]]:
    """Estimate the biases and errors at one rho.

    Returns:
        Four elements. The first contains both biases, as an array of shape [2, m, n]. The second
        contains the standard errors of the biases. The third contains the root mean square errors
        of a single direction O, without and with the correction. The last contains two relative
        standard errors: that of the ratio of the two root mean square errors, and that of the root
        mean square of phi.

    To first order, the error of log sqrt(mean a) is mean(a / mean a - 1) / 2. The pairs (E, U) are
    independent.
    """
    chunks = []
    for chunk, start in enumerate(range(0, samples, AT_ONCE)):
        # use the same draws (E, U) for every rho, so that the curves are smooth
        rng = generator(SEED, Draw.SMOOTHING, step=chunk, block=at.numel())
        count = min(AT_ONCE, samples - start)
        e, u = torch.from_numpy(rng.standard_normal((2, count, *at.shape)))
        chunks.append(_chunk(apply, at, e, u, rho))
    *deviations, alone, bettered = (torch.cat(part) for part in zip(*chunks, strict=True))
    errors = [(deviation.var(0).sum() / samples).sqrt() for deviation in deviations]
    spreads = [squares.mean().sqrt() for squares in (alone, bettered)]
    scatter = (deviations[0] - deviations[0].mean(0)).square().sum((-2, -1))
    terms = bettered / bettered.mean() - alone / alone.mean(), scatter / scatter.mean()
    quotient, probe = (float(term.std()) / 2 / math.sqrt(samples) for term in terms)
    biases = torch.stack([deviation.mean(0) for deviation in deviations])
    return biases, torch.stack(errors), torch.stack(spreads), (quotient, probe)


def _chunk(apply: Map, at: Tensor, e: Tensor, u: Tensor, rho: float) -> tuple[Tensor, ...]:
    """Return three arrays with one value for each pair (E, U).

    The arrays contain phi(E), the corrected phi, and the squared errors of both directions O.
    """
    exact, noises = apply(at), torch.stack([e, u, e + u, e - u])
    forth, back = apply(at + rho * noises), apply(at - rho * noises)
    even = (forth + back) / 2 - exact
    corrected = even[0] + even[1] - (even[2] + even[3]) / 2
    bettered = 2 * forth[0] - (forth[2] + forth[3]) / 2 - exact
    plain = forth[0] - exact
    return even[0], corrected, plain.square().sum((-2, -1)), bettered.square().sum((-2, -1))


def by_taylor(settings: Settings, shape: str) -> Record:
    """Return the leading terms in the same form as the records of measured biases."""
    apply, at = output_map(settings), momentum(shape, settings.norm)
    terms = leading_terms(apply, at, settings.rhos, settings.spacing)
    return _record(shape, TAYLOR, settings.rhos, terms, terms)


def leading_terms(apply: Map, at: Tensor, rhos: Sequence[float], spacing: float) -> Tensor:
    """Return the leading terms of both biases for each rho.

    The leading terms are rho^2 / 2 Lap Q(H) without the correction, and -rho^4 / 4 Lap^2 Q(H) with
    the correction. Lap is the Laplacian.
    """
    first, second = laplacians(apply, at, spacing)
    terms = [rho**2 / 2 * first for rho in rhos], [-(rho**4) / 4 * second for rho in rhos]
    return torch.stack([torch.stack(series) for series in terms])


def laplacians(apply: Map, at: Tensor, spacing: float) -> tuple[Tensor, Tensor]:
    """Return the Laplacian Lap Q and its square Lap^2 Q at H, computed by central differences.

    The results for the spacings h and 2h are extrapolated. Let d_i^2 f(x) = (f(x + h) - 2 f(x) +
    f(x - h)) / h^2. For each entry of Q, the results are sum_i d_i^2 Q and sum_ij d_i^2 d_j^2 Q.
    """
    d, results = at.numel(), []
    for h in (spacing, 2 * spacing):
        unit = torch.eye(d, dtype=at.dtype).view(d, *at.shape) * h
        moves = torch.cat([unit, -unit, torch.zeros_like(unit[:1])])
        weights = torch.cat([torch.ones(2 * d), torch.tensor([-2.0 * d])]).double() / h**2
        once = torch.einsum("b,bij->ij", weights, apply(at + moves))
        values = apply(at + moves[:, None] + moves)
        results.append((once, torch.einsum("a,b,abij->ij", weights, weights, values)))
    first, second = ((4 * fine - coarse) / 3 for fine, coarse in zip(*results, strict=True))
    return first, second


def _record(
    shape: str, way: str, rhos: Sequence[float], biases: Tensor, terms: Tensor,
    errors: Tensor | None = None, spreads: Tensor | None = None,
) -> Record:  # fmt: skip
    """Return a row for each rho with the norms of both biases.

    `off` is the norm of the difference between a bias and its leading term. The norms alone cannot
    show that the leading term has a wrong sign or direction. `biases` has the shape [2, rhos, m,
    n], and `errors` has the shape [2, rhos].
    """
    nothing = torch.zeros(biases.shape[:2])
    columns = {
        "": torch.linalg.matrix_norm(biases),
        "_off": torch.linalg.matrix_norm(biases - terms),
        "_error": nothing if errors is None else errors,
        "_spread": nothing if spreads is None else spreads,
    }
    unknown = dict.fromkeys(NOT_ALL, math.nan)
    rows = [{"shape": shape, "way": way, "rho": rho} | unknown for rho in rhos]
    for suffix, pair in columns.items():
        for kind, values in zip(("plain", "corrected"), pair.tolist(), strict=True):
            for row, value in zip(rows, values, strict=True):
                row[f"{kind}{suffix}"] = value
    return {"rows": rows}


# Claims

MEASURED = {"quadrature": "quadrature", "monte-carlo": "Monte Carlo"}
SMALL = 1 / 32  # slopes are fitted up to this rho, where the next term is small
Curves = dict[tuple[str, str], Columns]  # (matrix, method) -> rows by increasing rho
ORDERS = {"plain": 2, "corrected": 4}
WORDS = {"plain": "Without correction", "corrected": "With DP-MuonBC's correction"}
TERMS = {"plain": "(ρ²/2) ΔQ", "corrected": "−(ρ⁴/4) Δ²Q"}
NEAR = 0.1  # tolerance of a slope, and relative tolerance of a leading coefficient
STANDS_ON = (
    "H is fixed with ‖H‖_F = 2, where Q is smooth. The released momentum is M = H + ρE. Biases "
    "are averages over E and the probes U, which are standard normal and independent, as in the "
    "paper's model of a frozen path. Quadrature and Monte Carlo do not use the expansion. The "
    "leading terms are finite differences of Q only. Monte Carlo exchanges E and U, which have "
    "the same distribution, so that terms of order ρ² of the corrected direction cancel in each "
    "draw."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims of the study.

    The claims are about orders, leading terms, the smaller bias, and single directions.
    """
    parts = _measured(rows)
    return [
        *(order(parts, kind) for kind in ORDERS),
        *(leading(rows, kind) for kind in ORDERS),
        smaller(parts),
        *_single_directions(where(rows, way="monte-carlo")),
    ]


def order(parts: Curves, kind: str) -> Claim:
    """Return the claim about the order of the bias in rho.

    The order is rho^2 without the correction, and rho^4 with the correction.
    """
    slopes = {", ".join(name): _slope(part, kind) for name, part in parts.items()}
    values, reach = zip(*slopes.values(), strict=True)
    return Claim(
        f"{WORDS[kind]}, the bias of the orthogonalized direction has order ρ^{ORDERS[kind]}.",
        Effect.around("log-log slope in ρ", values, reach, list(slopes), unit="slope"),
        Rule(ORDERS[kind] - NEAR, ORDERS[kind] + NEAR),
        "slope for ρ ≤ 1/32: "
        + "; ".join(f"{name} {slope:.3f}" for name, (slope, _) in slopes.items()),
    )


def leading(rows: Columns, kind: str) -> Claim:
    """Return the claim about leading terms.

    The claim says that the bias is close to its leading term, and closer for smaller rho.
    """
    shares, ratios, reaches, places = [], [], [], []
    for (shape, way), part in _measured(rows).items():
        term, used = _part(rows, shape, "taylor")[kind], part["rho"] <= SMALL
        distances, reach = (part[f"{kind}_off"] / term)[used], (part[f"{kind}_error"] / term)[used]
        reach *= NORMAL
        sure = f" (± {number(reach[0], 2)})" if reach[0] else ""
        shares.append(f"{shape}, {way} {number(distances[0])}{sure}, {number(distances[-1])}")
        ratios += [distances[0] / NEAR, *(distances[:-1] / distances[1:])]
        reaches += [reach[0] / NEAR, *(reach[:-1] / distances[1:])]
        places.append(f"{shape}, {way}, smallest ρ, over {NEAR}")
        following = [number(rho, 3) for rho in part["rho"][used][:-1]]
        places += [f"{shape}, {way}, next ρ over ρ = {rho}" for rho in following]
    return Claim(
        f"{WORDS[kind]}, the leading term of the bias is {TERMS[kind]}, including sign and "
        "direction.",
        Effect.around("relative distance", ratios, reaches, places, unit="ratio"),
        Rule(high=1.0, strict=True),
        "‖bias − term‖ / ‖term‖ at the smallest ρ, and at ρ = 1/32: " + "; ".join(shares),
    )


def smaller(parts: Curves) -> Claim:
    """Return the claim that the correction makes the bias smaller at every rho."""
    ratios, reaches = [], []
    for part in parts.values():
        plain, corrected = (
            part[f"{kind}_error"] * NORMAL / part["plain"] for kind in ("plain", "corrected")
        )
        ratios.append(part["corrected"] / part["plain"])
        reaches.append(np.hypot(plain, corrected))
    ratio = np.concatenate(ratios)
    return Claim(
        "The correction makes the bias smaller at every ρ.",
        Effect.around("corrected / uncorrected bias", ratio, np.concatenate(reaches), unit="ratio"),
        Rule(high=1.0, strict=True),
        f"in {(ratio < 1).sum()} of {len(ratio)} cases; corrected / uncorrected bias is at most "
        f"{number(ratio.max(), 3)}",
    )


def _single_directions(rows: Columns) -> Sequence[Claim]:
    """Return two claims about single directions.

    More seeds do not make the intervals of these claims shorter.
    """
    ratios, smallest = {}, []
    for shape in distinct(rows, "shape"):
        part = _part(rows, shape, "monte-carlo")
        ratio = part["corrected_spread"] / part["plain_spread"]
        at = ratio.argmin()
        smallest.append((ratio[at], ratio[at] * NORMAL * _errors(part, "gain")[at]))
        ratios[shape] = ratio
    share, gain = rows["probe"] / rows["probe_bound"], rows["probe_any"] / rows["probe_bound"]
    reach = share.max() * NORMAL * _errors(rows, "probe")[share.argmax()]
    largest = np.array([(share.max(), reach), ((1 / gain).max(), 0.0)])
    places = ("error / bound", "bound / K_Q")
    error = Effect.around(
        "error, corrected / uncorrected", *np.array(smallest).T, list(ratios), unit="ratio"
    )
    scatter = Effect.around("error / bound, and bound / K_Q", *largest.T, places, unit="ratio")
    return [
        Claim(
            "The correction helps on average only: with one pair of probes, a single corrected "
            "direction is no nearer to Q(H) than an uncorrected direction.",
            replace(error, seeded=False),
            Rule(low=0.99),
            "root mean square error, corrected / uncorrected, over all ρ: "
            + "; ".join(
                f"{k} {ratio.min():.3f} to {ratio.max():.3f}" for k, ratio in ratios.items()
            ),
        ),
        Claim(
            "A pair of probes has an error of at most min(K_Q, ρ√(d/2) Lip(Q)), which is never "
            "above the bound K_Q of DP-Muon, C.6.",
            replace(scatter, seeded=False),
            AT_MOST_ONE,
            f"root mean square error / bound {share.min():.3g} to {share.max():.3g}; K_Q is up "
            f"to {number(gain.max(), 3)} times the bound",
        ),
    ]


def _errors(part: Columns, name: str) -> np.ndarray:
    """Return the relative standard errors in a table.

    If an earlier version wrote the table, the errors are nan.
    """
    return part.get(f"{name}_error", np.full(len(part["rho"]), np.nan))


def numbers(rows: Columns) -> Rows:
    """Return the rows of the report's table.

    The rows contain slopes and ratios, by matrix and method.
    """
    lines: Rows = [("matrix", "method", "slope", "corrected slope", "bias at ρ", "corrected bias")]
    for name, part in _measured(rows).items():
        slopes = [f"{_slope(part, kind)[0]:.3f}" for kind in ORDERS]
        for place in (0, len(part["rho"]) - 1):
            at = f"{number(part['plain'][place])} at {number(part['rho'][place])}"
            lines.append((*name, *slopes, at, number(part["corrected"][place])))
    return lines


def _measured(rows: Columns) -> Curves:
    """Return a curve for each measured bias. Each curve belongs to one matrix and one method."""
    return {
        (shape, MEASURED[way]): _part(rows, shape, way)
        for shape, way in distinct(rows, "shape", "way")
        if way in MEASURED
    }


def _part(rows: Columns, shape: str, way: str) -> Columns:
    part = where(rows, shape=shape, way=way)
    order = np.argsort(part["rho"])
    return {name: column[order] for name, column in part.items()}


def _slope(part: Columns, kind: str) -> tuple[float, float]:
    """Return the slope of log bias against log rho, and half the length of its interval.

    The errors at different rho come from the same random pairs and may be correlated, so their
    absolute values are added.
    """
    used = part["rho"] <= SMALL
    x, bias = np.log(part["rho"][used]), part[kind][used]
    weights = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
    reach = NORMAL * np.abs(weights) @ (part[f"{kind}_error"][used] / bias)
    return float(np.polyfit(x, np.log(bias), 1)[0]), float(reach)


# Figures

KINDS = {
    "plain": (style.BLUE, "o", "without correction"),
    "corrected": (style.RED, "s", "corrected"),
}
TERMS_AS_TEX = {"plain": r"$(\rho^2/2)\,\Delta Q$", "corrected": r"$-(\rho^4/4)\,\Delta^2 Q$"}


@style.styled
def orders(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the norms of both biases and of their leading terms against rho.

    There is a panel for each matrix.
    """
    shapes = distinct(rows, "shape")
    figure, panels = style.canvas(len(shapes), narrow, 3.0)
    for axes, shape in zip(panels, shapes, strict=True):
        taylor, exact, sampled = (
            where(rows, shape=shape, way=way) for way in ("taylor", "quadrature", "monte-carlo")
        )
        for kind, (colour, marker, label) in KINDS.items():
            axes.plot(taylor["rho"], taylor[kind], color=colour, lw=1, label=TERMS_AS_TEX[kind])
            axes.plot(exact["rho"], exact[kind], marker, color=colour, ms=7, mfc="none", lw=0,
                      label=f"{label}, quadrature")  # fmt: skip
            reach = np.minimum(NORMAL * sampled[f"{kind}_error"], 0.999 * sampled[kind])
            axes.errorbar(sampled["rho"], sampled[kind], reach, fmt=marker, color=colour, ms=3,
                          elinewidth=1, label=f"{label}, Monte Carlo")  # fmt: skip
        axes.set_title(f"{shape} matrix", loc="left")
        axes.set_xlabel("noise ρ per entry of the momentum")
        style.powers_of_2(axes, np.unique(rows["rho"]))
    style.alike(panels, log=True)
    panels[0].set_ylabel("norm of the bias")
    style.legend_below(figure, panels[0], 2)
    return figure


STUDY = Study("dp-bias", Settings, cells, claims, numbers, STANDS_ON, {"dp-bias": orders})
