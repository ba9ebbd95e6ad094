"""Predictions of `influence` beside exact runs: of the neighbours that should hurt most, and of as
many drawn from all that were ranked."""

import numpy as np

from fedmuon.analysis.report.claims import spearman
from fedmuon.experiments.stability.influence import Ranking
from fedmuon.runs.directory import Record

PREDICTED = "predicted.csv"
HEADER = "client,index,replacement,predicted,perturbation\n"
LEAST = 1e-6  # of the largest perturbation: smaller ones are rounding
CALIBRATION = {"pairs": "replacements ranked by derivatives (first order, estimated)",
               "largest_predicted": "largest predicted", "largest_drawn": "largest of drawn ones",
               "spearman": "Spearman's rho of predicted and exact",
               "largest_error": "largest relative error of a prediction"}  # fmt: skip


def calibrated(ranking: Ranking, moved: np.ndarray) -> Record:
    """What the perturbations [T] of all rows say of the ranking. Its numbers are first order and
    estimated, so they certify nothing."""
    predicted, least = ranking.predicted, LEAST * moved.max()
    error = np.abs(predicted - moved) / np.maximum(moved, least) if least else np.zeros(1)
    rho = spearman(predicted, moved)
    return {
        "pairs": ranking.pairs,
        "compared": len(moved),
        "spearman": rho if np.isfinite(rho) else None,
        "largest_error": float(error.max()),
        "largest_predicted": float(predicted.max()),
        "largest": float(moved.max()),
        "largest_drawn": float(moved[ranking.top :].max()),
    }


def lines(ranking: Ranking, index: np.ndarray, moved: np.ndarray) -> bytes:
    """predicted.csv; `index` [T] are the replaced samples in the source's order."""
    columns = (ranking.rows[:, 0], index, ranking.rows[:, 2], ranking.predicted, moved)
    rows = zip(*(one.tolist() for one in columns), strict=True)
    return "".join([HEADER, *(",".join(map(repr, row)) + "\n" for row in rows)]).encode()
