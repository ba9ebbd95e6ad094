"""Study `attribution`: which scores foretell exact runs, on average over test samples."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns, where
from fedmuon.analysis.report.findings import Rows
from fedmuon.analysis.report.numbers import written
from fedmuon.analysis.report.slopes import Slope, mean_of
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule

OURS = "trajectory"
NAMES = {"trajectory": "derivative through the run (ours)", "tracin": "TracIn, before each round",
         "last product": "gradient product, last model", "trak": "TRAK, last model"}  # fmt: skip
TRUTHS = {"leave-one-out": "leave-one-out", "halves": "halves (linear datamodeling score)"}
STANDS_ON = (
    "Scores estimate how the loss of a test sample answers to the weight of a train sample; "
    "Spearman's ρ is between them and exact runs that share every other draw: without one "
    "sample, n_i as it was (leave-one-out), or on half of each client's samples, foretold by the "
    "sum of the scores of those who stayed. It is taken for each test sample and averaged; "
    "intervals are 95% over test samples, of one seed. Methods of the literature know neither the "
    "optimizer nor who took part, so their scores are times the share of updates, participations "
    "over n_i. Influence has the Gauss–Newton matrix, damped by the given multiple of its mean "
    "eigenvalue, and 30 steps of conjugate gradients; TRAK has one model and no ridge."
)


def name_of(method: str) -> str:
    """The method in words."""
    return NAMES.get(method) or method.replace("influence,", "influence, damping")


def rhos(rows: Columns, variant: str, truth: str, method: str) -> np.ndarray:
    """Of each test sample; one whose loss never changes has none."""
    found = where(rows, variant=variant, truth=truth, method=method)["rho"]
    return found[np.isfinite(found)]


def mean(values: np.ndarray) -> tuple[float, float]:
    """The mean with half the width of its 95% interval; nan of less than two."""
    found = mean_of(values) if len(values) > 1 else Slope(np.nan, np.nan, np.nan)
    return found.value, found.high - found.value


def settings(rows: Columns) -> list[tuple[str, str]]:
    """(variant, truth) in their order."""
    pairs = zip(rows["variant"].tolist(), rows["truth"].tolist(), strict=True)
    return list(dict.fromkeys(pairs))


def claims(rows: Columns) -> Sequence[Claim]:
    """Ours foretells each truth, and is ahead of every other."""
    every = settings(rows)
    return [*(foretells(rows, *one) for one in every if one[1] == "leave-one-out"),
            *(ahead(rows, *one) for one in every)]  # fmt: skip


def foretells(rows: Columns, variant: str, truth: str) -> Claim:
    """What one sample less does is nearly of first order."""
    value, reach = mean(rhos(rows, variant, truth, OURS))
    return Claim(
        f"{variant}: the derivative through the run ranks leave-one-out runs with ρ ≥ 0.99.",
        Effect.around("mean ρ over test samples", value, reach),
        Rule(low=0.99),
        f"mean ρ {value:.4f} ± {reach:.4f}",
    )


def ahead(rows: Columns, variant: str, truth: str) -> Claim:
    """By paired differences over test samples, beyond their 95% interval."""
    mine, others = where(rows, variant=variant, truth=truth, method=OURS)["rho"], {}
    for method in dict.fromkeys(rows["method"].tolist()):
        theirs = where(rows, variant=variant, truth=truth, method=method)["rho"]
        gain = mine - theirs
        others[method] = mean(gain[np.isfinite(gain)])
    del others[OURS]
    return Claim(
        f"{variant}, {TRUTHS[truth]}: the derivative through the run is ahead of all other scores.",
        Effect.around("lead in ρ", *np.array(list(others.values())).T, [*map(name_of, others)]),
        POSITIVE,
        "ahead in ρ by "
        + "; ".join(f"{_shown(*value, 4)} of {name_of(one)}" for one, value in others.items()),
    )


def numbers(rows: Columns) -> Rows:
    """Mean correlations by variant, method and truth; a variant's name has a line of its own."""
    truths = list(dict.fromkeys(rows["truth"].tolist()))
    lines: Rows = [("scores", *truths)]
    for variant in dict.fromkeys(rows["variant"].tolist()):
        lines.append((f"{variant}:", *("" for _ in truths)))
        for method in dict.fromkeys(rows["method"].tolist()):
            found = (mean(rhos(rows, variant, truth, method)) for truth in truths)
            lines.append((f"  {name_of(method)}", *(_shown(*one, 3) for one in found)))
    return lines


def _shown(value: float, reach: float, digits: int) -> str:
    return f"{written(value, f'.{digits}f')} ± {reach:.{digits}f}"
