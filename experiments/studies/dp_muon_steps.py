"""Study `dp-muon-steps`: how long the steps of DP-Muon and DP-MuonBC are at published settings.

Algorithm 1 of the DP-Muon paper orthogonalizes the momentum M_t. Section 4 and Appendix C.5
orthogonalize M_t / s_t with s_t = (1 - mu^t) / (1 - mu). Both divide by max(1, ||.||_F) before five
Newton-Schulz steps. This divisor does not shorten a matrix whose norm is below 1, so the two inputs
lead to steps of unequal length, whatever the correction does.

The study draws the momentum of the paper's frozen-path model. The clipped mean gradient G is fixed,
so M_t = s_t G + w E with a standard normal matrix E and w = (sigma C / B) sqrt((1 - mu^(2t)) / (1 -
mu^2)). The norm of G is between 0 and C, and the study uses G = 0 and a matrix of rank 1 and norm
C.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.style import SERIES, canvas, legend_below, styled
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, half_width
from fedmuon.analysis.theory.private_stationarity import Release, averages
from fedmuon.config.schema import Count, Positive
from fedmuon.core.rng import Draw, generator
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study, distinct
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.orthogonalize import newton_schulz
from fedmuon.runs.directory import Record

SEED = 0
TAYLOR = {"cubic": 1, "quintic": 2}  # coefficients of the paper's polynomial -> its degree kappa
SIGNALS = {"no gradient": 0.0, "gradient of norm C": 1.0}  # name -> ||G||_F / C


class Settings(Table):
    """The keys that the suite's TOML file may contain.

    `times` are the steps t at which momenta are drawn. The last one is the number T of all steps.
    """

    shapes: Annotated[
        list[Annotated[list[Count], Field(min_length=2, max_length=2)]], Field(min_length=1)
    ]
    bound: Positive  # C
    lot: Positive  # B
    noise: Positive  # sigma
    momentum: Annotated[float, Field(ge=0, lt=1)]  # mu
    times: Annotated[list[Count], Field(min_length=1)]
    iterations: Count  # Newton-Schulz steps
    coefficients: Annotated[list[str], Field(min_length=1)]
    draws: Annotated[int, Field(ge=2)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each shape and draw."""
    return [
        Call(f"{rows}x{columns}-draw{draw}", partial(measure, settings, (rows, columns), draw))
        for rows, columns in settings.shapes
        for draw in range(settings.draws)
    ]


# Measurements


def startup(memory: float, time: int) -> float:
    """Return s_t, the sum of the momentum's weights after t steps."""
    return (1 - memory**time) / (1 - memory)


def noise_of_momentum(settings: Settings, time: int) -> float:
    """Return w, the standard deviation of the noise in each entry of M_t."""
    squares = (1 - settings.momentum ** (2 * time)) / (1 - settings.momentum**2)
    return settings.noise * settings.bound / settings.lot * math.sqrt(squares)


def measure(settings: Settings, shape: tuple[int, int], draw: int) -> Record:
    """Return a row for each time, gradient and set of coefficients."""
    rng = generator(SEED, Draw.NOISE, step=draw, block=shape[0] * shape[1])
    noise, probe = torch.from_numpy(rng.standard_normal((2, *shape)))
    left, right = (torch.from_numpy(rng.standard_normal((side, 1))) for side in shape)
    unit = left @ right.mT
    unit /= torch.linalg.matrix_norm(unit)
    rows = []
    for time in settings.times:
        total, width = startup(settings.momentum, time), noise_of_momentum(settings, time)
        for signal, share in SIGNALS.items():
            mean = share * settings.bound * unit
            momentum = total * mean + width * noise
            rows += [
                {
                    "shape": f"{shape[0]} × {shape[1]}", "draw": draw, "time": time,
                    "signal": signal, "coefficients": name,
                    **_steps(settings, momentum, total, width * probe, name),
                    "slowdown": slowdown(settings, momentum, name),
                    "noise_term": noise_term(settings, shape),
                    "largest_gradient": math.sqrt(min(shape)) * settings.bound,
                }
                for name in settings.coefficients
            ]  # fmt: skip
    return {"rows": rows}


def _steps(
    settings: Settings, momentum: Tensor, total: float, shift: Tensor, coefficients: str
) -> Record:
    """Return norms of the inputs, and root mean square singular values of the steps.

    `length` is Q(M), `length_unit` is Q(M / s), and `length_corrected` is the step of DP-MuonBC
    with one pair of probes. `correction` is the relative distance of the last two.
    """

    def mapped(matrix: Tensor) -> Tensor:
        return newton_schulz(matrix, settings.iterations, coefficients, normalization="unit")

    unit, shift = momentum / total, shift / total
    plain = mapped(unit)
    corrected = 2 * plain - (mapped(unit + shift) + mapped(unit - shift)) / 2
    moved = torch.linalg.matrix_norm(corrected - plain) / torch.linalg.matrix_norm(plain)
    return {
        "norm": float(torch.linalg.matrix_norm(momentum)),
        "norm_unit": float(torch.linalg.matrix_norm(unit)),
        "length": length(mapped(momentum)),
        "length_unit": length(plain),
        "length_corrected": length(corrected),
        "correction": float(moved),
    }


def length(step: Tensor) -> float:
    """Return the root mean square singular value of a step."""
    return float(torch.linalg.matrix_norm(step)) / math.sqrt(min(step.shape))


def slowdown(settings: Settings, momentum: Tensor, coefficients: str) -> float:
    """Return 1 / (1 - eps_q) with the residual delta_0 of this momentum (DP-Muon, Lemma 3.3).

    The factor chi_q of Theorem 3.4 takes the maximum of delta_0 over all steps, so it is at least
    this number. The lemma covers Taylor polynomials only; for other coefficients the result is nan.
    """
    if coefficients not in TAYLOR:
        return math.nan
    smallest = float(torch.linalg.svdvals(momentum)[-1])
    square = (smallest / max(1.0, float(torch.linalg.matrix_norm(momentum)))) ** 2
    power = (TAYLOR[coefficients] + 1) ** settings.iterations
    # 1 - (1 - x)^p without cancellation for a small x
    return 1 / math.sqrt(-math.expm1(power * math.log1p(-square)))


def noise_term(settings: Settings, shape: tuple[int, int]) -> float:
    """Return sqrt(r) v_C Gamma_T(mu), the noise term of Theorem 3.4 without chi_q (2 - eps_q)."""
    release = Release(settings.bound, settings.noise, settings.lot, shape)
    memory = averages(settings.momentum, settings.times[-1])[0]
    return math.sqrt(min(shape)) * release.spread * memory


# Claims

STANDS_ON = (
    "C, B, σ, μ, the number of steps, the shapes of the matrices of GPT-2 and five Newton–Schulz "
    "steps are those of DP-Muon for E2E. The paper does not say which polynomial its experiments "
    "use. The momentum is that of the paper's frozen-path model: noise alone, or noise and a fixed "
    "gradient of rank 1 with the largest possible norm C. Both methods divide by max{1, ‖·‖_F}, "
    "as the paper's Algorithm 1 and Appendix C.2 do. Code that divides by ‖·‖_F itself makes both "
    "steps equally long. The length of a step is its root mean square singular value."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about lengths, about the correction, and about Theorem 3.4."""
    last = rows["time"] == rows["time"].max()
    taylor = np.isin(rows["coefficients"], [*TAYLOR])
    return [
        shorter(_part(rows, last & taylor)),
        *([evener(_part(rows, last))] if not taylor.all() else []),
        unscaled(rows),
        slight(_part(rows, last & taylor)),
        vacuous(_part(rows, taylor)),
    ]


def shorter(rows: Columns) -> Claim:
    """Return the claim that DP-MuonBC takes shorter steps with Taylor polynomials."""
    names, ratios, reach = _over_draws(rows, rows["length_corrected"] / rows["length"])
    lengths = (
        f"{number(rows[name].min(), 2)} to {number(rows[name].max(), 2)}"
        for name in ("length", "length_corrected")
    )
    return Claim(
        "As printed, the steps of DP-MuonBC are less than half as long as those of DP-Muon "
        "(Taylor polynomials, last step).",
        Effect.around("length, DP-MuonBC / DP-Muon", ratios, reach, names, unit="ratio"),
        Rule(high=0.5, strict=True),
        "root mean square singular value {} for DP-Muon and {} for DP-MuonBC".format(*lengths),
    )


def evener(rows: Columns) -> Claim:
    """Return the claim that other coefficients make the lengths less unequal."""
    taylor = np.isin(rows["coefficients"], [*TAYLOR])
    ratio = rows["length_corrected"] / rows["length"]
    apart = np.abs(np.log(ratio))
    names, values, reach = _over_draws(_part(rows, ~taylor), apart[~taylor])
    smallest = float(apart[taylor].min())
    return Claim(
        "With Jordan's coefficients, the two lengths differ by a smaller factor than with any "
        "Taylor polynomial.",
        Effect.around(
            "|log(length ratio)|, Jordan − Taylor", values - smallest, reach, names, unit="ratio"
        ),
        Rule(high=0.0, strict=True),
        f"DP-MuonBC / DP-Muon: {number(ratio[~taylor].min(), 2)} to "
        f"{number(ratio[~taylor].max(), 2)} with Jordan's coefficients, "
        f"{number(ratio[taylor].min(), 2)} to {number(ratio[taylor].max(), 2)} with Taylor "
        "polynomials",
    )


def unscaled(rows: Columns) -> Claim:
    """Return the claim that max(1, ||.||) does not act on the input of DP-MuonBC."""
    names, values, reach = _over_draws(rows, rows["norm_unit"])
    return Claim(
        "‖M_t/s_t‖_F is below 1, so the division by max{1, ‖·‖_F} never changes the input of "
        "DP-MuonBC.",
        Effect.around("‖M_t/s_t‖_F", values, reach, names),
        Rule(high=1.0, strict=True),
        f"‖M_t/s_t‖_F {number(values.min(), 2)} to {number(values.max(), 2)}; ‖M_t‖_F "
        f"{number(rows['norm'].min(), 2)} to {number(rows['norm'].max(), 2)}",
    )


def slight(rows: Columns) -> Claim:
    """Return the claim that the correction changes the direction little."""
    names, values, reach = _over_draws(rows, rows["correction"])
    return Claim(
        "The correction changes the direction by less than 5% (Taylor polynomials, last step).",
        Effect.around("‖O_bc − Q(M/s)‖ / ‖Q(M/s)‖", values, reach, names, unit="ratio"),
        Rule(high=0.05, strict=True),
        f"by {number(100 * values.min(), 2)}% to {number(100 * values.max(), 2)}%",
    )


def vacuous(rows: Columns) -> Claim:
    """Return the claim that Theorem 3.4 says nothing at these settings."""
    places = distinct(rows, "shape", "signal", "coefficients")
    slowest, ratios = [], []
    for shape, signal, coefficients in places:
        part = where(rows, shape=shape, signal=signal, coefficients=coefficients)
        slowdowns = [where(part, draw=draw)["slowdown"].max() for draw in np.unique(part["draw"])]
        slowest.append(min(slowdowns))  # chi_q is the maximum over the steps of a run
        ratios.append(slowest[-1] * part["noise_term"][0] / part["largest_gradient"][0])
    return Claim(
        "The noise term of Theorem 3.4 alone exceeds √r C, the largest nuclear norm of a mean of "
        "clipped gradients.",
        Effect.exact(
            "noise term / (√r C)", ratios, [", ".join(place) for place in places], unit="ratio"
        ),
        Rule(low=1.0, strict=True),
        f"χ_q is at least {number(min(slowest), 2)} to {number(max(slowest), 2)}; noise term / "
        f"(√r C) is at least {number(min(ratios), 2)} to {number(max(ratios), 2)}",
    )


def _part(rows: Columns, mask: np.ndarray) -> Columns:
    return {name: column[mask] for name, column in rows.items()}


def _named(rows: Columns) -> np.ndarray:
    keys = zip(rows["shape"], rows["time"], rows["signal"], rows["coefficients"], strict=True)
    return np.array([f"{s}, t = {t:g}, {g}, {c}" for s, t, g, c in keys])


def _over_draws(rows: Columns, values: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the settings, the means of values over draws, and half-widths of their intervals."""
    labels = _named(rows)
    names = list(dict.fromkeys(labels.tolist()))
    parts = [values[labels == name] for name in names]
    means = np.array([part.mean() for part in parts])
    errors = np.array([part.std(ddof=1) / math.sqrt(len(part)) for part in parts])
    return names, means, half_width(errors, len(parts[0]) - 1)


def numbers(rows: Columns) -> Rows:
    """Return a row for each shape, gradient and set of coefficients at the last step."""
    lines: Rows = [
        ("matrix", "gradient", "coefficients", "DP-Muon", "Q(M/s)", "DP-MuonBC", "correction")
    ]
    last = _part(rows, rows["time"] == rows["time"].max())
    for name in distinct(last, "shape", "signal", "coefficients"):
        part = where(last, **dict(zip(("shape", "signal", "coefficients"), name, strict=True)))
        lengths = (number(float(part[key].mean()), 2)
                   for key in ("length", "length_unit", "length_corrected"))  # fmt: skip
        lines.append((*name, *lengths, f"{number(100 * float(part['correction'].mean()), 2)}%"))
    return lines


# Figures


@styled
def lengths(rows: Columns, narrow: bool = False) -> Figure:
    """Draw the lengths of both methods' steps for each shape and gradient, a panel per map."""
    last = _part(rows, rows["time"] == rows["time"].max())
    maps = distinct(last, "coefficients")
    figure, panels = canvas(len(maps), narrow, 2.6)
    places = distinct(last, "shape", "signal")
    longest = max(1.0, *(1.05 * last[key].max() for key in ("length", "length_corrected")))
    for axes, name in zip(panels, maps, strict=True):
        for key, label, (colour, marker) in zip(
            ("length", "length_corrected"), ("DP-Muon", "DP-MuonBC"), SERIES, strict=False
        ):
            means = [
                where(last, shape=s, signal=g, coefficients=name)[key].mean() for s, g in places
            ]
            axes.plot(means, range(len(places)), marker, color=colour, mfc="none", label=label)
        labels = [f"{s}, ‖Ḡ‖ = {'C' if SIGNALS[str(g)] else '0'}" for s, g in places]
        axes.set_yticks(range(len(places)), labels if narrow or axes is panels[0] else [])
        axes.set_ylim(len(places) - 0.5, -0.5)
        axes.set_xlim(0, longest)
        axes.set_title(TITLES.get(str(name), str(name)), loc="left")
        axes.set_xlabel("length of a step")
    legend_below(figure, panels[0], 2)
    return figure


TITLES = {"cubic": "Taylor, degree 1", "quintic": "Taylor, degree 2", "jordan": "Jordan"}

STUDY = Study(
    "dp-muon-steps", Settings, cells, claims, numbers, STANDS_ON, {"dp-muon-steps": lengths}
)
