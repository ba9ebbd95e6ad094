"""Study `wall-clock`: how much longer an SVD takes than Newton–Schulz steps.

The study tests Lemma 11 of Newton–Schulz convergence on this machine, and analyzes the paper's
table of losses by seconds. A cell is one shape of a matrix. A cell measures three computations in
float32: an SVD followed by U V^T, Newton–Schulz steps of degree 2, and a product of square matrices
with the longer side. The three computations alternate, and are repeated several times. Times are
geometric means over the repetitions. The ratio of two times has Student's interval for paired
differences of logarithms. The predictions use Lemma 11 with the measured speeds of the product and
of the SVD. One prediction uses the paper's number of matrix products in Newton–Schulz. The other
prediction uses fedmuon's number of matrix products, which is smaller.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from pydantic import Field, model_validator

from fedmuon.analysis.report import style
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.tables import Columns, where
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule, counted, paired
from fedmuon.analysis.theory.system_costs import horner_flops, least_efficiency, svd_flops
from fedmuon.config.schema import Count
from fedmuon.core.errors import InputError
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study, distinct
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.optim.flops import performed_newton_schulz
from fedmuon.orthogonalize import newton_schulz, schedule
from fedmuon.runs.directory import Record

DEGREE, COEFFICIENTS = 2, "quintic"
MUON = ("q1", "q2", "q3")
METHODS = ("sgd", "svd", *MUON)


class Printed(Table):
    """A published table: the train losses of several methods at given seconds."""

    seconds: Annotated[list[float], Field(min_length=2)]
    sgd: list[float]
    svd: list[float]
    q1: list[float]
    q2: list[float]
    q3: list[float]

    @model_validator(mode="after")
    def _alike(self) -> "Printed":
        lengths = {len(getattr(self, name)) for name in ("seconds", *METHODS)}
        if len(lengths) > 1:
            raise InputError(
                "A published table must list one loss of each method for every time in seconds, "
                "but its lists have different lengths. Make all lists equally long."
            )
        return self


class Settings(Table):
    """The keys that the suite's TOML file may contain."""

    shapes: Annotated[list[Annotated[list[Count], Field(min_length=2, max_length=2)]],
                      Field(min_length=1)]  # fmt: skip
    iterations: Annotated[list[Count], Field(min_length=1)]
    repeats: Count
    tables: Annotated[dict[str, Printed], Field(min_length=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each published table and each shape."""
    calls = [
        Call(f"printed-{number}", partial(printed_rows, name, table), 0)
        for number, (name, table) in enumerate(settings.tables.items())
    ]
    shapes = [(shape[0], shape[1]) for shape in settings.shapes]
    return calls + [
        Call(f"timed-{m}x{n}", partial(measure, settings, (m, n)), m * n) for m, n in shapes
    ]


# Measurements


def printed_rows(name: str, table: Printed) -> Record:
    """Return a row for each second of a published table."""
    columns = {method: getattr(table, method) for method in METHODS}
    rows = [
        {"table": name, "seconds": second}
        | {method: losses[k] for method, losses in columns.items()}
        for k, second in enumerate(table.seconds)
    ]
    return {"rows": rows, "times": []}


def measure(settings: Settings, shape: tuple[int, int]) -> Record:
    """Return a row for each number of steps.

    For each row, two ratios are known: the time of the steps divided by the time of an SVD, and
    divided by the time of a product. Each ratio has an interval from ratio / factor to ratio *
    factor. The factors are `to_svd` and `to_product`.
    """
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    square = torch.randn(max(shape), max(shape), generator=torch.Generator().manual_seed(1))

    def polar() -> torch.Tensor:
        """Return the polar factor U V^T from an SVD, as in the paper."""
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left @ right

    products = partial(torch.matmul, square, square)
    iterated = [partial(newton_schulz, matrix, q, COEFFICIENTS) for q in settings.iterations]
    logs = np.log(in_turn([polar, products, *iterated], settings.repeats))
    svd, product, *ns_seconds = np.exp(logs.mean(0)).tolist()
    efficiency = 2 * max(shape) ** 3 / product / (svd_flops(*shape) / svd)
    rows = []
    for at, (steps, seconds) in enumerate(zip(settings.iterations, ns_seconds, strict=True), 2):
        flops = performed_newton_schulz(*shape, schedule(COEFFICIENTS, steps), matrix.dtype)
        factors = [
            math.exp(paired([*zip(logs[:, at], logs[:, k], strict=True)])[1]) for k in (0, 1)
        ]
        rows.append({
            "m": shape[0], "n": shape[1], "steps": steps, "svd_seconds": svd,
            "seconds": seconds, "efficiency": efficiency,
            "lemma": svd_flops(*shape) / horner_flops(*shape, steps, DEGREE) * efficiency,
            "made": svd_flops(*shape) / flops * efficiency,
            "to_svd": factors[0], "to_product": factors[1],
        })  # fmt: skip
    return {"rows": [], "times": rows}


def in_turn(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Return the seconds of each call, measured `repeats` times, as an array [repeats, calls].

    The calls alternate, so that a slow period of the machine affects all calls. The first
    measurement of each call is dropped.
    """
    seconds = np.empty((repeats + 1, len(calls)))
    for row in seconds:
        for at, call in enumerate(calls):
            start = time.perf_counter()
            call()
            row[at] = time.perf_counter() - start
    return seconds[1:]


# Claims

NEAR = 4.0  # factor by which a prediction from two throughputs may differ from the measurement
STANDS_ON = (
    "Lemma 11 counts 14nm² + 8m³ operations for a thin SVD, 2nm² for U Vᵀ, and 2q(κ + 1)nm² for "
    "q steps of degree κ by Horner's rule. We assume that products have this machine's speed for "
    "a square matrix of the longer side, and that SVDs have the speed that was measured at their "
    "shape. So the only remaining prediction is that Newton–Schulz runs at the speed of "
    "products. Published tables are compared at their own times, without interpolation, so the "
    "factors from these tables are lower bounds. The paper says about its Figure 1 that SVD and "
    "q = 3 reach the same loss after the same number of steps."
)


def claims(rows: Columns, times: Columns) -> Sequence[Claim]:
    """Return the claims about Lemma 11 on this machine, and about the published tables."""
    return [*_time_claims(times), *_table_claims(rows)]


def _time_claims(times: Columns) -> Sequence[Claim]:
    """Return the claims that Lemma 11 predicts the measured ratio of times up to a factor.

    The measured time of the SVD cancels in the predicted ratio divided by the measured ratio. The
    quotient is the time of q Newton–Schulz steps divided by the time of a product with the same
    number of operations.
    """
    measured = times["svd_seconds"] / times["seconds"]
    off, lemma, fast = times["made"] / measured, times["lemma"] / measured, times["efficiency"]
    few = {name: column[times["steps"] <= 3] for name, column in times.items()}
    ratio = few["svd_seconds"] / few["seconds"]
    return [
        Claim(
            "Lemma 11, with two throughputs of this machine and our count of products, predicts "
            "within a factor of 4 how much longer an SVD takes than Newton–Schulz.",
            _quotient("predicted / measured", off, times, "to_product"),
            Rule(1 / NEAR, NEAR),
            f"predicted / measured {off.min():.2f} to {off.max():.2f}; with the paper's count of "
            f"products {lemma.min():.2f} to {lemma.max():.2f}; products run {fast.min():.2g} to "
            f"{fast.max():.2g} times as fast as an SVD",
        ),
        Claim(
            "Up to three Newton–Schulz steps take less time than an SVD at every shape, as in "
            "the paper.",
            _quotient("time, SVD / Newton–Schulz", ratio, few, "to_svd"),
            Rule(low=1.0, strict=True),
            f"the SVD takes {number(ratio.min(), 2)} to {number(ratio.max(), 2)} times as long",
        ),
    ]


def _quotient(name: str, ratio: np.ndarray, times: Columns, reach: str) -> Effect:
    """Return a ratio of times as an effect.

    If the table contains intervals, the effect has an interval.
    """
    by = times.get(reach, np.full(len(ratio), np.nan))
    shapes = [
        f"{m:.0f} × {n:.0f}, q = {q:.0f}"
        for m, n, q in zip(times["m"], times["n"], times["steps"], strict=True)
    ]
    return Effect(name, ratio, ratio / by, ratio * by, shapes, seeded=False, unit="ratio")


def _table_claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about the published tables of losses by seconds."""
    ahead, details, slower, straight = [], [], {}, []
    for name in distinct(rows, "table"):
        table = where(rows, table=name)
        lead = np.minimum(table["sgd"], table["svd"]) - np.max([table[q] for q in MUON], axis=0)
        seconds = [f"{second:.0f} s" for second in table["seconds"]]
        behind = ", ".join(np.array(seconds)[lead <= 0])
        ahead.append(
            Claim(
                f"Table {name}: at every published time, Muon with q = 1, 2, 3 has a smaller "
                "loss than SGD-M and than Muon with SVD.",
                Effect.exact("lead in loss", lead, seconds, unit="loss"),
                POSITIVE,
                f"at {(lead > 0).sum()} of {len(lead)} times; the smallest lead is "
                f"{number(float(lead.min()))}" + (f"; not at {behind}" if behind else ""),
            )
        )
        slower[name] = ratio = slowdown(table)
        efficiency = number(least_efficiency(ratio, 3, 2), 2) if ratio > 1 else ""
        floor = f" (P_gemm/P_svd ≥ {efficiency})" if efficiency else ""
        details.append(f"{name.split()[0]} ≥ {number(ratio, 2)}{floor}")
        straight += [
            f"{name.split()[0]} {method}"
            for method in METHODS
            if np.abs(np.diff(table[method], 2)).max() < 1e-9
        ]
    return [
        *ahead,
        Claim(
            "In the published tables, Muon with SVD takes more than 4/3 times as long to reach "
            "its last loss as Muon with q = 3. Lemma 11 explains a factor of 4/3 by operation "
            "counts, and the rest by the speed of the machine.",
            Effect.exact("times as long", list(slower.values()), list(slower), unit="ratio"),
            Rule(low=4 / 3, strict=True),
            "times as long: " + "; ".join(details),
        ),
        counted(
            "No published curve falls by the same amount between all successive times.",
            not straight,
            "tables",
            f"equal to the last published digit: {', '.join(straight) or 'none'}",
        ),
    ]


def slowdown(table: Columns) -> float:
    """Return how many times as long Muon with SVD takes to its last loss as q = 3, at least.

    Only published times count, without interpolation. At one of these times, q = 3 is first at or
    below the last loss of SVD. The result is the last time divided by this time. It is a lower
    bound, because q = 3 may have reached the loss earlier. If q = 3 never reaches this loss, the
    result is 0.
    """
    seconds = table["seconds"]
    reached = seconds[table["q3"] <= table["svd"][-1]]
    return float(seconds[-1] / reached.min()) if len(reached) else 0.0


def numbers(rows: Columns, times: Columns) -> Rows:
    """Return the rows of the report's table.

    The table has a row for each measurement, and then a row for each published table.
    """
    counts = "Lemma 11, our counts", "Lemma 11, its counts"
    lines: Rows = [("shape or table", "q", "SVD / NS", *counts)]
    for k in range(len(times["m"])):
        shape = f"{times['m'][k]:.0f} × {times['n'][k]:.0f}"
        measured = times["svd_seconds"][k] / times["seconds"][k]
        entries = [
            number(float(value)) for value in (measured, times["made"][k], times["lemma"][k])
        ]
        lines.append((shape, f"{times['steps'][k]:.0f}", *entries))
    for name in distinct(rows, "table"):
        ratio = slowdown(where(rows, table=name))
        lines.append((name, "3", f"≥ {number(ratio, 3)}, printed", "–", "–"))
    return lines


# Figures

LABELS = 5  # a narrow figure has space for one more power of two on an axis


@style.styled
def ratios(rows: Columns, times: Columns, narrow: bool = False) -> Figure:
    """Draw measured ratios against predicted ratios, with a colour for each number of steps."""
    figure, (axes,) = style.canvas(1, narrow, 3.2)
    measured = times["svd_seconds"] / times["seconds"]
    logs = np.log2(np.concatenate([measured, times["made"]]))
    low, high = np.floor(logs.min()), np.floor(logs.max()) + 1
    ends = 2.0 ** np.array([low, high])
    ticks = 2.0 ** np.arange(low, high + 1, max(1, np.ceil((high - low) / LABELS)))
    axes.plot(ends, ends, color=style.GREY, lw=1, label="prediction equals measurement")
    for steps, (colour, marker) in zip(np.unique(times["steps"]), style.SERIES, strict=False):
        part = where(times, steps=steps)
        axes.plot(part["made"], part["svd_seconds"] / part["seconds"], marker, color=colour,
                  ms=5, label=f"q = {steps:.0f}")  # fmt: skip
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        axes.set(**{f"{name}scale": "log", f"{name}lim": ends})
        axis.set_ticks(ticks, [*map(style.plain, ticks)])
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("predicted time, SVD / q steps")
    axes.set_ylabel("measured time, SVD / q steps")
    style.legend_below(figure, axes, 3)
    return figure


STUDY = Study(
    "wall-clock", Settings, cells, claims, numbers, STANDS_ON, {"wall-clock": ratios},
    tables=("rows", "times"),
)  # fmt: skip
