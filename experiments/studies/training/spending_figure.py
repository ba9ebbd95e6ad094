"""What each client of a private run has spent, from the one that spent least."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmuon.analysis.report.comparisons import here
from fedmuon.analysis.report.style import BLACK, Columns, canvas, styled
from fedmuon.experiments.studies.training.figure import LINES, legend_of_all


@styled
def by_client(
    rows: Columns, variants: Sequence[str], x: float = np.nan, narrow: bool = False
) -> Figure:
    """The clients' own epsilons in rising order, below their target: a line a seed.

    What is spent does not depend on the optimizer, so variants lie on each other unless they clip
    differently.
    """
    figure, (axes,) = canvas(1, narrow, 2.9)
    for place, seed in enumerate(np.unique(rows["seed"])):
        colour, marker = LINES[place % len(LINES)]
        for number, spent in enumerate(_distinct(rows, variants, x, seed)):
            axes.plot(np.arange(1, len(spent) + 1), spent, color=colour, marker=marker, ms=3.5,
                      lw=1, mfc="none", label="" if number else f"seed {seed:g}")  # fmt: skip
    for target in np.unique(rows["target"][_at(rows, x)]):
        axes.axhline(target, color=BLACK, lw=1, ls="--", label="target")
    axes.set_xlabel("clients that took part, from the least spent")
    axes.set_ylabel("ε of the client (joint, upper end)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_of_all(figure, axes, narrow)
    return figure


def _distinct(
    rows: Columns, variants: Sequence[str], x: float, seed: float
) -> Iterator[np.ndarray]:
    """The epsilons of a seed in rising order, once for all variants that spent the same."""
    seen = set()
    for name in variants:
        spent = np.sort(rows["epsilon"][here(rows, name, x) & (rows["seed"] == seed)])
        if tuple(spent) not in seen:
            seen.add(tuple(spent))
            yield spent


def _at(rows: Columns, x: float) -> np.ndarray:
    return np.isnan(rows["x"]) if np.isnan(x) else rows["x"] == x
