"""Study `wall-clock`: 004's Lemma 11 beside times, and what its printed tables bear out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Findings, Rows, number
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule, counted
from fedmuon.analysis.theory.wall_clock import least_efficiency
from fedmuon.experiments.studies.findings import assemble

MUON = ("q1", "q2", "q3")
METHODS = ("sgd", "svd", *MUON)
NEAR = 4.0  # how far a prediction that knows two throughputs may be off
STANDS_ON = (
    "Lemma 11's counts are 14nm² + 8m³ for a thin SVD, 2nm² for U Vᵀ, 2q(κ + 1)nm² for q steps of "
    "degree κ by Horner's rule. Products take this machine's speed for a square matrix of the "
    "longer side, SVDs the speed that they have at that shape: what is left to predict is that "
    "Newton–Schulz runs at the speed of products. Printed tables are 004's: losses at equal "
    "seconds, linear between them. That SVD and q = 3 reach the same loss by the same number of "
    "steps is what 004 says of its Figure 1."
)


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """From rows.csv, of printed tables, and times.csv."""
    return assemble(
        "wall-clock", folder, about, claims, numbers, STANDS_ON, tables=("rows", "times")
    )


def claims(rows: Columns, times: Columns) -> Sequence[Claim]:
    """The lemma here; the tables there."""
    printed = [ahead(where(rows, table=name), name) for name in _tables(rows)]
    return [predicted(times), sooner(times), *printed, slower(rows), curved(rows)]


def predicted(times: Columns) -> Claim:
    """Lemma 11 with the products that are made is a ceiling, and not far. The SVD's own time drops
    out of predicted over measured: it is q steps' time over that of as many flops of a product."""
    measured = times["svd_seconds"] / times["seconds"]
    off = times["made"] / measured
    return Claim(
        "Lemma 11 with two throughputs of this machine, and the products made here, predicts how "
        "much longer an SVD takes, within a factor of 4.",
        _timed("predicted over measured", off, times, "to_product"),
        Rule(1 / NEAR, NEAR),
        f"predicted over measured {off.min():.2f} to {off.max():.2f}; with 004's count of products "
        f"{(times['lemma'] / measured).min():.2f} to {(times['lemma'] / measured).max():.2f}; "
        f"products run {times['efficiency'].min():.2g} to {times['efficiency'].max():.2g} times as "
        "fast as an SVD",
    )


def sooner(times: Columns) -> Claim:
    """Newton-Schulz with up to three steps takes less time at every shape."""
    part = {name: column[times["steps"] <= 3] for name, column in times.items()}
    ratio = part["svd_seconds"] / part["seconds"]
    return Claim(
        "Up to three Newton–Schulz steps take less time than an SVD at every shape, here as there.",
        _timed("SVD's time over Newton–Schulz's", ratio, part, "to_svd"),
        Rule(low=1.0, strict=True),
        f"the SVD takes {number(ratio.min(), 2)} to {number(ratio.max(), 2)} times as long",
    )


def _timed(name: str, ratio: np.ndarray, times: Columns, reach: str) -> Effect:
    """A quotient of times, whose interval is a factor; tables of earlier versions have none."""
    by = times.get(reach, np.full(len(ratio), np.nan))
    return Effect(name, ratio, ratio / by, ratio * by, _shapes(times), seeded=False)


def ahead(table: Columns, name: str) -> Claim:
    """Printed: at every second every q is below SVD and SGD."""
    best = np.minimum(table["sgd"], table["svd"])
    lead = best - np.max([table[one] for one in MUON], axis=0)
    behind = ", ".join(f"{second:.0f} s" for second in table["seconds"][lead <= 0])
    return Claim(
        f"{name}, as printed: Muon with q = 1, 2, 3 has a smaller loss than SGD-M and than Muon by "
        "SVD at every second.",
        Effect.exact("lead in loss", lead, [f"{second:.0f} s" for second in table["seconds"]]),
        POSITIVE,
        f"{(lead > 0).sum()} of {len(lead)}; the least lead is {number(float(lead.min()))}"
        + (f"; not at {behind}" if behind else ""),
    )


def curved(rows: Columns) -> Claim:
    """Whether a printed column is a straight line to its last digit, as no measurement is."""
    straight = [
        f"{name.split()[0]} {method}"
        for name in _tables(rows)
        for method in METHODS
        if np.abs(np.diff(where(rows, table=name)[method], 2)).max() < 1e-9
    ]
    return counted(
        "No printed curve falls by the same amount from each second to the next.",
        not straight,
        "tables",
        f"to the last printed digit: {', '.join(straight) or 'none'}",
    )


def slower(rows: Columns) -> Claim:
    """Printed: how much longer SVD takes to its last loss than q = 3, and what that says."""
    found = {name: slowdown(where(rows, table=name)) for name in _tables(rows)}
    shown = [
        f"{name.split()[0]} {'≥ ' if bare else ''}{number(times, 2)} "
        f"(P_gemm/P_svd ≥ {number(least_efficiency(times, 3, 2), 2)})"
        for name, (times, bare) in found.items()
    ]
    return Claim(
        "As printed: SVD takes at least 4/3 times as long as q = 3 to its last loss, more than "
        "Lemma 11's counts explain: the rest is the machine's.",
        Effect.exact("times as long", [times for times, _ in found.values()], list(found)),
        Rule(low=4 / 3, strict=True),
        "times as long: " + "; ".join(shown),
    )


def slowdown(table: Columns) -> tuple[float, bool]:
    """SVD's last second over when q = 3 has its loss; True if that was before the first second."""
    seconds, losses, goal = table["seconds"], table["q3"], table["svd"][-1]
    if losses[0] <= goal:
        return float(seconds[-1] / seconds[0]), True
    after = int(np.argmax(losses <= goal))
    share = (losses[after - 1] - goal) / (losses[after - 1] - losses[after])
    reached = seconds[after - 1] + share * (seconds[after] - seconds[after - 1])
    return float(seconds[-1] / reached), False


def numbers(rows: Columns, times: Columns) -> Rows:
    """Shape by shape, then the printed tables' ends."""
    lines: Rows = [("shape or table", "q", "SVD / NS", "Lemma 11, made here", "Lemma 11, 004's")]
    for k in range(len(times["m"])):
        shape = f"{times['m'][k]:.0f} × {times['n'][k]:.0f}"
        measured = times["svd_seconds"][k] / times["seconds"][k]
        shown = [number(float(value)) for value in (measured, times["made"][k], times["lemma"][k])]
        lines.append((shape, f"{times['steps'][k]:.0f}", *shown))
    for name in _tables(rows):
        ratio, bare = slowdown(where(rows, table=name))
        lines.append((name, "3", f"{'≥ ' if bare else ''}{number(ratio, 3)}, printed", "–", "–"))
    return lines


def _shapes(times: Columns) -> list[str]:
    """Shape and steps of each row; tables that a test made may lack them."""
    if "m" not in times:
        return []
    every = zip(times["m"], times["n"], times["steps"], strict=True)
    return [f"{m:.0f} × {n:.0f}, q = {q:.0f}" for m, n, q in every]


def _tables(rows: Columns) -> list[str]:
    return list(dict.fromkeys(rows["table"].tolist()))
