"""Study `dp-muon-printed`: the epsilon of the settings in Table 3 of DP-Muon, in both modes."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from pydantic import Field

from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.style import BLACK, BLUE, RED, canvas, legend_below, styled
from fedmuon.analysis.report.tables import Columns
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, unknown
from fedmuon.config.schema import Chance, Count, Positive
from fedmuon.core.tables import Table
from fedmuon.experiments.studies.study import Call, Study
from fedmuon.experiments.suites.contents import SuiteRequest
from fedmuon.privacy.accounting.composition import epsilon, noise_for
from fedmuon.runs.directory import Record


class Row(Table):
    """A published setting: T steps of m blocks on Poisson lots, and a published epsilon."""

    population: Count
    lot: Positive
    steps: Count
    blocks: Count
    delta: Chance
    noise: Positive
    printed: Positive


class Settings(Table):
    """The keys of the suite's file: published settings by name."""

    rows: Annotated[dict[str, Row], Field(min_length=1)]


def cells(settings: Settings, request: SuiteRequest) -> Sequence[Call]:
    """Return a cell for each row."""
    return [
        Call(f"row-{number}", partial(account, name, row))
        for number, (name, row) in enumerate(settings.rows.items())
    ]


# Measurements


def account(name: str, row: Row) -> Record:
    """Return a record for one published setting.

    The record contains the published epsilon, our epsilon in each mode, and the noise that mode
    `joint` requires for the published epsilon.
    """
    releases = row.lot / row.population, row.steps, row.delta, row.blocks
    joint = epsilon(row.noise, *releases)
    spent = {
        "per_release": epsilon(row.noise, *releases, "per-release").epsilon,
        "joint_lower": joint.lower,
        "joint_upper": joint.upper,
        "joint_rdp": joint.rdp,
        "needed": noise_for(row.printed, *releases)[0],
        "adjacency": joint.adjacency,
        "sampling": joint.sampling,
    }
    return {"rows": [{"name": name} | row.model_dump(exclude={"population", "lot"}) | spent]}


# Claims

NEAR = 0.003  # relative tolerance around the published value
STANDS_ON = (
    "Every ε in this suite is zero-out: the data are compared with data in which one example "
    "contributes 0. If N is public, the ε for add-remove is the same. The joint ε is for Poisson "
    "lots and m blocks that are clipped to C each and released on one lot. Together, they are "
    "one Gaussian release of sensitivity C√m. The upper and lower bounds of the joint ε come "
    "from privacy loss distributions. The per-release ε is Rényi accounting of m T releases, as "
    "if each release had its own lot. No mechanism in this suite has such lots, so the "
    "per-release ε certifies nothing. The paper's own runs did not draw Poisson lots, but every "
    "ε in this suite assumes them. The paper's appendix names a shuffled sampler of fixed size, "
    "for which q = 1024/N is an approximation."
)


def claims(rows: Columns) -> Sequence[Claim]:
    """Return the claims about the published values.

    The claims say how the published values were computed, and what these values guarantee.
    """
    off = np.abs(rows["per_release"] / rows["printed"] - 1)
    names = rows["name"]
    multi_block = rows["blocks"] > 1
    far = "With many blocks on one lot, the joint ε (zero-out) is far above the published ε."
    agree = (
        "With one block per step, the published ε would be certified for Poisson lots (zero-out)."
    )
    exceeded = unknown(far, "no row has more than one block")
    honest = unknown(agree, "every row has more than one block")
    if multi_block.any():
        times = rows["joint_lower"][multi_block] / rows["printed"][multi_block]
        effect = Effect.exact(
            "joint ε / published ε", times, names[multi_block].tolist(), unit="ratio"
        )
        detail = f"at least {number(times.min(), 3)} to {number(times.max(), 3)} times as large"
        exceeded = Claim(far, effect, Rule(low=2.0, strict=True), detail)
    if not multi_block.all():
        share = rows["joint_upper"][~multi_block] / rows["printed"][~multi_block]
        effect = Effect.exact(
            "joint ε / published ε", share, names[~multi_block].tolist(), unit="ratio"
        )
        detail = f"the certified ε is {share.min():.3g} to {share.max():.3g} times the published ε"
        honest = Claim(agree, effect, Rule(high=1 + NEAR), detail)
    reproduced = Claim(
        "Per-release accounting reproduces every published ε to within 0.3%.",
        Effect.exact("per-release ε / published ε − 1", off, names.tolist(), unit="ratio"),
        Rule(high=NEAR),
        f"{(off <= NEAR).sum()} of {len(off)} values; the largest difference is {off.max():.2%}",
    )
    return [reproduced, exceeded, honest]


def numbers(rows: Columns) -> Rows:
    """Return a table row per setting, with the noise that the published epsilon would require."""
    lines: Rows = [("setting", "m", "δ", "σ", "published ε", "per-release ε", "joint ε, zero-out",
                    "σ for the published ε")]  # fmt: skip
    for at in range(len(rows["name"])):
        row = {name: column[at] for name, column in rows.items()}
        bracket = f"{number(float(row['joint_lower']))} – {number(float(row['joint_upper']))}"
        entries = [f"{row['blocks']:g}", written(row["delta"], ".0e").replace("e−0", "e−")]
        entries += [number(row[name], 5) for name in ("noise", "printed", "per_release")]
        lines.append((str(row["name"]), *entries, bracket, number(row["needed"], 5)))
    return lines


# Figures

TICKS = (1, 2, 5, 10, 20, 50, 100)


@styled
def printed(rows: Columns, narrow: bool = False) -> Figure:
    """Draw a line for each published setting against epsilon.

    The axis of epsilon is logarithmic.
    """
    figure, (axes,) = canvas(1, narrow, 2.4 if narrow else 2.2)
    at = np.arange(len(rows["name"]))[::-1]
    low, high = rows["joint_lower"], rows["joint_upper"]
    axes.hlines(at, rows["printed"], high, color=RED, lw=0.8)
    axes.errorbar(high, at, xerr=[high - low, np.zeros_like(high)], fmt="s", color=RED, ms=5,
                  label="certified (joint)")  # fmt: skip
    axes.plot(rows["printed"], at, "o", color=BLACK, mfc="none", ms=8, label="published")
    axes.plot(
        rows["per_release"], at, "x", color=BLUE, ms=5, label="per-release, certifies nothing"
    )
    for place, value in zip(at, high, strict=True):
        axes.annotate(f"{value:.3g}", (value, place), (0, 5), textcoords="offset points",
                      ha="center", color=RED)  # fmt: skip
    axes.set_yticks(at, [str(name).replace(", ", "\n", 1) for name in rows["name"]])
    axes.set_ylim(-0.5, len(at) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(0.6 * min(rows["printed"].min(), high.min()), 1.6 * high.max())
    axes.set_xticks([tick for tick in TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ε, zero-out")
    legend_below(figure, axes, 1 if narrow else 3)
    return figure


STUDY = Study(
    "dp-muon-printed", Settings, cells, claims, numbers, STANDS_ON, {"dp-muon-printed": printed}
)
