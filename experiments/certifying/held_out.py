"""Upper limits of mean losses from held-out samples."""

import numpy as np

from fedmuon.analysis.theory.certified_risk import chernoff, clopper_pearson, empirical_bernstein


def loss_limit(losses: np.ndarray, failure: float) -> tuple[float, str]:
    """Return an upper limit of the mean of independent losses in [0, 1], and its inequality.

    Args:
        losses: The losses of the held-out samples, at least one.
        failure: The probability that the limit fails.
    """
    count, mean = len(losses), float(losses.mean())
    if np.isin(losses, (0, 1)).all():
        return clopper_pearson(int(losses.sum()), count, failure), "Clopper-Pearson"
    if count < 2:  # no empirical variance
        return chernoff(mean, count, failure), "Chernoff (kl)"
    return min(  # both limits hold at half of the failure probability
        (chernoff(mean, count, failure / 2), "Chernoff (kl)"),
        (empirical_bernstein(losses, 1.0, failure / 2), "empirical Bernstein"),
    )


def change_limit(changes: np.ndarray, failure: float) -> float:
    """Return an upper limit of the mean change of a loss in [0, 1] between two fixed models."""
    if len(changes) < 2:
        return 1.0
    return empirical_bernstein(changes, 2.0, failure)
