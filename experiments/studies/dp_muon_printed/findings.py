"""Study `dp-muon-printed`: how the epsilons of 000's Table 3 came about, and which hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedmuon.analysis.report.columns import Columns
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, unknown

NEAR = 0.003  # of the printed value
STANDS_ON = (
    "Every ε here is zero-out: an example adds 0 instead; where N is public, the same number is "
    "that of add-remove. Joint: Poisson lots, m blocks clipped to C each and released on one lot, "
    "which is one Gaussian release of sensitivity C√m; both ends of the bracket come from privacy "
    "loss distributions. Per-release: Rényi accounting of m T releases as if each had a lot of its "
    "own, which no mechanism here has; it certifies nothing. 000's own runs drew no Poisson lots, "
    "which every ε here assumes: its appendix names a shuffled fixed-size sampler, for which q = "
    "1024/N is an approximation."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Where the print comes from, and what it means with many blocks and with one."""
    return [reproduced(rows), exceeded(rows), kept(rows)]


def reproduced(rows: Columns) -> Claim:
    """Per-release accounting gives every printed number."""
    off = np.abs(rows["per_release"] / rows["printed"] - 1)
    return Claim(
        "Per-release accounting gives every printed ε to 0.3%.",
        Effect.exact("per-release over printed, less 1", off, _names(rows)),
        Rule(high=NEAR),
        f"{(off <= NEAR).sum()} of {len(off)} do; the furthest is off by {off.max():.2%}",
    )


def exceeded(rows: Columns) -> Claim:
    """With several blocks even the lower end of the joint bracket is above the print."""
    many = rows["blocks"] > 1
    sentence = "With many blocks on one lot, the joint ε (zero-out) is far above the printed one."
    if not many.any():
        return unknown(sentence, "no row has more than one block")
    times = rows["joint_lower"][many] / rows["printed"][many]
    detail = f"at least {number(times.min(), 3)} to {number(times.max(), 3)} times as large"
    found = Effect.exact("joint over printed ε", times, _names(rows, many))
    return Claim(sentence, found, Rule(low=2.0, strict=True), detail)


def kept(rows: Columns) -> Claim:
    """With one block the modes agree, and Poisson lots would spend no more than the print."""
    one = rows["blocks"] == 1
    sentence = "With one block a step the printed ε would be certified for Poisson lots, zero-out."
    if not one.any():
        return unknown(sentence, "every row has more than one block")
    share = rows["joint_upper"][one] / rows["printed"][one]
    detail = f"then certified ε is {share.min():.3g} to {share.max():.3g} times the printed one"
    found = Effect.exact("joint over printed ε", share, _names(rows, one))
    return Claim(sentence, found, Rule(high=1 + NEAR), detail)


def _names(rows: Columns, part: Any = slice(None)) -> list[str]:
    """What the rows are called; tables that a test made have no names."""
    return rows["name"][part].tolist() if "name" in rows else []


def numbers(rows: Columns) -> Rows:
    """Every row, with the noise that the printed epsilon would take."""
    lines: Rows = [
        (
            "setting",
            "m",
            "δ",
            "σ",
            "printed ε",
            "per-release ε",
            "joint ε, zero-out",
            "σ for printed ε",
        )
    ]
    for at in range(len(rows["name"])):
        held = {name: column[at] for name, column in rows.items()}
        bracket = f"{number(float(held['joint_lower']))} – {number(float(held['joint_upper']))}"
        cells = [f"{held['blocks']:g}", written(held["delta"], ".0e").replace("e−0", "e−")]
        cells += [number(held[name], 5) for name in ("noise", "printed", "per_release")]
        lines.append((str(held["name"]), *cells, bracket, number(held["needed"], 5)))
    return lines
