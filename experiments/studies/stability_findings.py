"""The text and the figures of reports about suites of kind `stability`."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator

from fedmuon.analysis.report import style, tables
from fedmuon.analysis.report.claims import Columns, by_label, spearman, suite_claims, varying
from fedmuon.analysis.report.comparisons import near_chance
from fedmuon.analysis.report.findings import Findings, Picture, Rows, Titled, number
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.verdicts import with_range
from fedmuon.experiments.stability.neighbours_report import stands_on

KEYS = ("trajectories", "published", "trajectories_per_second", "note", "constant", "delta",
        "status", "assumptions")  # fmt: skip
ASIDE = {
    "accuracy": ("mean accuracy", np.mean),
    "train_loss": ("mean train loss", np.mean),
    "test_loss": ("mean test loss", np.mean),
    "bound_global": ("mean bound, constants of all models", np.mean),
    "range": ("mean range B of the loss", np.mean),
    "share": ("largest perturbation / certificate", np.max),
    "share_global": ("largest perturbation / certificate, constants of all models", np.max),
}
TABLE_2 = ("gap_within_bound", "mean_gap", "mean_bound", "mean_perturbation")


def findings(folder: Path, about: Mapping[str, Any]) -> Findings:
    """Return the findings of a suite folder of this kind.

    `about` is the content of its suite.json.
    """
    tables.require(about, KEYS, folder / "suite.json")
    runs = tables.read_csv(folder / "runs.csv", tables.RUNS, tables.ASIDE)
    neighbours = tables.read_csv(folder / "neighbours.csv", tables.NEIGHBOURS)
    tables.require_consistent(runs, neighbours, folder)
    head, numbers = _beside(runs, about["published"])
    of_gap, *others = suite_claims(runs, neighbours)
    factors, pictures = varying(runs), []
    if {"lr", "lambda"} <= set(factors):
        pictures.append(Picture.known("phase", phase, runs))
    for factor in ("lr", "lambda", "n"):
        if factor in factors and (factor == "n" or not pictures):
            name = f"scaling-{factor}"
            pictures.append(Picture.known(name, scaling, runs, neighbours, factor))
    if {"per_round", "alpha"} & set(factors):
        pictures.append(Picture.known("exposure", exposure, neighbours))
    return Findings.of_suite(
        folder,
        about,
        claims=[with_range(of_gap, about), *others],
        numbers_title="Measured and published values" if about["published"] else "Measured",
        head=head,
        numbers=numbers,
        pictures=[*pictures, Picture.known("gap", gap_and_bound, runs)],
        stands_on=stands_on({**about, "c_hp": "explicit"}, str(about["constant"])),
        assumptions=[str(text) for text in about["assumptions"]],
        facts=("suite", "data", "scale", "trajectories", "seconds", "trajectories_per_second"),
        runs=_every(runs),
        caution=near_chance(runs["accuracy"], *about["guess"])
        if "guess" in about and "accuracy" in runs
        else "",
    )


def _every(runs: Columns) -> Titled:
    """Return a table of all runs: the varied keys, the final measures, the gap and the bound."""
    factors = (*varying(runs), "seed")
    names = [k for k in ("accuracy", "train_loss", "test_loss") if k in runs]
    share = runs["bound"] / runs.get("range", np.ones(len(runs["bound"])))
    head = (", ".join(factors), *(k.replace("_", " ") for k in names), "gap (95%)", "bound",
            "bound / B", "mean perturbation")  # fmt: skip
    lines: Rows = []
    for at in range(len(share)):
        gap, low, high = (number(float(runs[k][at]), 3) for k in ("gap", "gap_low", "gap_high"))
        learnt = (number(float(runs[k][at])) for k in names)
        ends = runs["bound"][at], share[at], runs["mean_perturbation"][at]
        setting = ", ".join(f"{runs[k][at]:g}" for k in factors)
        lines.append((setting, *learnt, f"{gap} ({low} to {high})",
                      *(number(float(value), 3) for value in ends)))  # fmt: skip
    return "All runs", head, lines


def _beside(runs: Columns, published: Mapping[str, Any] | None) -> tuple[tuple[str, ...], Rows]:
    """Return the head and the rows of the table that compares our means with published means.

    If the paper has no value for this suite, the table shows only our means.
    """
    measured = {
        "runs": str(len(runs["gap"])),
        "gap ≤ bound": number(float((runs["gap"] <= runs["bound"]).mean())),
        "mean gap": number(float(runs["table_gap"].mean())),
        "mean bound": number(float(runs["bound"].mean())),
        "mean perturbation": number(float(runs["mean_perturbation"].mean())),
        "mean bound with C_hp = 1": number(float(runs["bound_one"].mean())),
        "mean gap at the clients' label shares": number(float(runs["gap"].mean())),
        **{
            words: number(float(statistic(runs[name])))
            for name, (words, statistic) in ASIDE.items()
            if name in runs
        },
        "mean bound / B": number(float((runs["bound"] / runs.get("range", 1.0)).mean())),
    }
    if not published:
        return ("", "measured"), list(measured.items())
    printed = [str(published.get("runs", "–")), *(number(published.get(name)) for name in TABLE_2)]
    rows = itertools.zip_longest(measured, measured.values(), printed, fillvalue="–")
    return ("", "measured", f"Stability note, Table 2 ({published.get('data', '')})"), list(rows)


# Figures

QUANTITIES = ("bound", "mean_perturbation")


@style.styled
def phase(runs: Columns, narrow: bool = False) -> Figure:
    """Draw heat maps of the mean bound and the mean perturbation.

    The axes are eta and 1/sqrt(lambda), as in the Stability note, Figure 2. Means are taken over
    the values of all other keys. `runs` has the columns of runs.csv. A cell of the heat map without
    a run is white. Light cells have small values, which are the better ones.
    """
    figure, panels = style.canvas(2, narrow, 2.7)
    lrs, lambdas = np.unique(runs["lr"]), np.unique(runs["lambda"])[::-1]
    for axes, quantity in zip(panels, QUANTITIES, strict=True):
        table = np.full((len(lambdas), len(lrs)), np.nan)
        for row, column in np.ndindex(*table.shape):
            mask = (runs["lr"] == lrs[column]) & (runs["lambda"] == lambdas[row])
            if mask.any():
                table[row, column] = runs[quantity][mask].mean()
        texts = np.vectorize(style.compact, otypes=[object])(table)
        drawn = np.where(table > 0, table, np.nan)  # a logarithmic scale has no zero
        finite = drawn[np.isfinite(drawn)]
        norm = LogNorm(finite.min(), finite.max()) if len(finite) else Normalize()
        style.heat_map(axes, drawn, texts, norm, highest_is_best=False, size=8)
        axes.set_xticks(range(len(lrs)), [style.plain(value) for value in lrs])
        axes.set_yticks(range(len(lambdas)), [f"{value:.3g}" for value in 1 / np.sqrt(lambdas)])
        axes.tick_params(length=0)
        axes.set_xlabel(style.NAMES["lr"])
        axes.set_ylabel(style.NAMES["lambda"])
        axes.set_title(style.NAMES[quantity])
    return figure


@style.styled
def scaling(runs: Columns, neighbours: Columns, factor: str, narrow: bool = False) -> Figure:
    """Draw bound, mean perturbation and certificate against n, eta or lambda.

    The source is the Stability note, Figures 3a and 3b. Points are runs, and lines are means over
    runs. The certificate is a mean over all neighbours.
    """
    figure, (left, right) = style.canvas(2, narrow, 2.9)
    x, moved = _place(runs, factor), runs["mean_perturbation"]
    levels = np.unique(x)
    _series(left, x, runs["bound"], "bound")
    _series(right, x, moved, "mean perturbation")
    at = _place(neighbours, factor)
    promised = [neighbours["certificate"][at == level].mean() for level in levels]
    right.plot(
        levels, promised, "--", color=style.ORANGE, marker="s", ms=4, label="mean certificate"
    )
    for axes, values in ((left, runs["bound"]), (right, moved)):
        style.levels_on_x(axes, levels)
        axes.set_xlabel(style.NAMES[factor])
        if factor == "n":
            first = values[x == levels[0]].mean()  # the line of slope -1 starts at this value
            axes.plot(levels, first * levels[0] / levels, ":", color=style.GREY, lw=1.2,
                      label="slope −1")  # fmt: skip
        style.log_y(axes)
        style.legend(axes, 2)
    left.set_ylabel(style.NAMES["bound"])
    right.set_ylabel(r"perturbation $\Vert X-X'\Vert_F$")
    return figure


def _place(columns: Columns, factor: str) -> np.ndarray:
    return 1 / np.sqrt(columns["lambda"]) if factor == "lambda" else columns[factor]


def _series(axes: Axes, x: np.ndarray, y: np.ndarray, label: str) -> None:
    """Draw every run as a hollow point, and a line through the means at each x."""
    levels = np.unique(x)
    axes.plot(x, y, "o", color=style.BLUE, ms=3, mfc="none", mew=0.6, label="runs")
    average = [y[x == level].mean() for level in levels]
    axes.plot(levels, average, color=style.BLUE, marker="o", ms=4.5, label=label)


@style.styled
def exposure(neighbours: Columns, narrow: bool = False) -> Figure:
    """Draw perturbation against exposure per sample Y_i(C)/n_i (Stability note, Figure 3c).

    A point is one neighbouring data set. Values of 0 have a separate mark at the edge of the
    figure, because a log axis cannot show 0. Neighbouring data sets with infinite exposure are not
    drawn, but the legend counts them.
    """
    figure, (axes,) = style.canvas(1, narrow, 3.6)
    x, y = neighbours["exposure"] / neighbours["size"], neighbours["perturbation"]
    floors = _floor(x), _floor(y)
    at = np.where(x > 0, x, floors[0]), np.where(y > 0, y, floors[1])
    finite, positive = np.isfinite(x), (x > 0) & (y > 0) & np.isfinite(x)
    names = ("another label", "the same label")
    kinds = zip(names, by_label(neighbours), style.SERIES, strict=False)
    for label, part, (colour, marker) in kinds:
        mask = part & positive
        axes.plot(at[0][mask], at[1][mask], marker, color=colour, ms=2.5, mew=0,
                  rasterized=True, label=label)  # fmt: skip
    zero = finite & ~positive
    if zero.any():
        axes.plot(at[0][zero], at[1][zero], "x", color=style.BLACK, ms=6, clip_on=False,
                  label=f"zero, so not on log axes: {zero.sum()}")  # fmt: skip
    if not finite.all():
        axes.plot([], [], " ", label=f"exposure unknown or infinite: {(~finite).sum()}")
    # Draw the certificate 2 G_max Y_i / n_i as a line if it is proportional to the exposure.
    promised = neighbours["certificate"]
    used = (x > 0) & finite & np.isfinite(promised)
    ratio = promised[used] / x[used]
    if len(ratio) and np.ptp(ratio) <= 1e-6 * ratio.max():
        ends = np.array([x[used].min(), x[used].max()])
        axes.plot(ends, ratio[0] * ends, color=style.BLACK, lw=1, label="certificate")
    if positive.any():
        style.log_x(axes)
    style.log_y(axes)
    axes.set_xlabel(r"exposure per sample $Y_i(C)/n_i$")
    axes.set_ylabel(r"perturbation $\Vert X-X'\Vert_F$")
    axes.set_title(f"Spearman's ρ = {spearman(x, y):.3f}, {len(x)} neighbours", loc="left")
    style.legend(axes, 2 if narrow else 4)
    return figure


def _floor(values: np.ndarray) -> float:
    positive = values[values > 0]
    return float(positive.min()) / 3 if len(positive) else 1.0


@style.styled
def gap_and_bound(runs: Columns, narrow: bool = False) -> Figure:
    """Draw the gap with its 95% interval, the bound, and the bound with C_hp = 1, for every run.

    The runs are sorted by their bound. If the bounds are much larger than the gaps, the axis is
    linear around zero and logarithmic above.
    """
    figure, (axes,) = style.canvas(1, narrow, 3.2)
    order = np.argsort(runs["bound"], kind="stable")
    place, gap = np.arange(1, len(order) + 1), runs["gap"][order]
    reach = np.stack([gap - runs["gap_low"][order], runs["gap_high"][order] - gap])
    axes.axhline(0, color=style.GREY, lw=0.8)
    size = max(2.0, min(6.0, (300 if not narrow else 130) / len(order)))
    axes.errorbar(place, gap, reach, fmt="o", color=style.BLUE, ms=min(size, 4), elinewidth=0.9,
                  label="gap, 95% interval")  # fmt: skip
    axes.plot(
        place, runs["bound"][order], "_", color=style.BLACK, ms=size + 1, mew=1.6, label="bound"
    )
    axes.plot(place, runs["bound_one"][order], "d", color=style.ORANGE, ms=size, mfc="none",
              label="bound with $C_{hp}$ = 1")  # fmt: skip
    if "bound_global" in runs:
        axes.plot(place, runs["bound_global"][order], "s", color=style.GREY, ms=size, mfc="none",
                  label="bound, constants of all models")  # fmt: skip
    # symmetric log axis if the largest bound exceeds ten times every end of an interval
    ends = np.abs(np.concatenate([runs["gap_low"], runs["gap_high"]]))
    ends, bounds = (values[np.isfinite(values)] for values in (ends, runs["bound"]))
    if len(ends) and len(bounds) and bounds.max() > 10 * ends.max():
        linear = 10 ** np.ceil(np.log10(ends.max()))
        axes.set_yscale("symlog", linthresh=linear)
        axes.yaxis.set_minor_locator(
            SymmetricalLogLocator(base=10, linthresh=linear, subs=list(range(2, 10)))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, "g")))
    if (runs["bound"] >= 1).any():
        axes.axhline(1, color=style.GREY, lw=1, ls=":", label="1, which no loss exceeds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("run, in order of its bound")
    axes.set_ylabel(r"test minus train risk $F-\hat F$")
    style.legend(axes, 2 if narrow else 4)
    return figure
