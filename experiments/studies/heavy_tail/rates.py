"""Rates under heavy-tailed noise (002, section 3), and the names of what is compared with them."""

import numpy as np

from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.slopes import Curve, curve

THEOREM, FREE = "theorem", "alpha-free"
MUON = ("muon-exact", "muon-ns", "muon-randomized")
NAMES = {
    "muon-exact": "Muon, exact",
    "muon-ns": "Muon, Newton–Schulz",
    "muon-randomized": "Muon, randomized",
    "normalized-sgd": "normalized SGD",
    "sgd": "SGD",
}


def promised(alpha: float, schedule: str) -> float:
    """The exponent of K: -(alpha - 1) / (3 alpha - 2) (Theorem 3.4), or, for the schedule without
    alpha, the slower of -1/4 and -(alpha - 1) / (2 alpha) (Corollary 3.6)."""
    if schedule == THEOREM:
        return -(alpha - 1) / (3 * alpha - 2)
    return max(-0.25, -(alpha - 1) / (2 * alpha))


def best_sgd(rows: Columns, alpha: float) -> tuple[float, Curve]:
    """SGD's step-size factor of the smallest mean at the largest K, and its curve."""
    mine = (rows["method"] == "sgd") & (rows["alpha"] == alpha)
    every = {
        float(factor): curve(
            rows, "steps", "mean_gradient", method="sgd", alpha=alpha, factor=float(factor)
        )
        for factor in np.unique(rows["factor"][mine])
    }
    return min(every.items(), key=lambda pair: pair[1].means[-1])
