"""Upper limits of mean losses from held-out samples."""

import numpy as np

from fedmuon.analysis.theory.certified_risk import chernoff, clopper_pearson, empirical_bernstein
from fedmuon.core.errors import InputError


def loss_limit(losses: np.ndarray, failure: float) -> tuple[float, str]:
    """Return an upper limit of the mean of independent losses in [0, 1], and its inequality.

    Losses that are all 0 or 1 get Clopper and Pearson's limit, and others the smaller one of
    Chernoff's and the empirical Bernstein limit, each with half of the failure probability.

    Args:
        losses: The losses of the held-out samples, at least one.
        failure: The probability that the limit fails.
    """
    if not len(losses):
        raise InputError("there are no losses. A limit needs at least 1 held-out sample.")
    count, mean = len(losses), float(losses.mean())
    if np.isin(losses, (0, 1)).all():
        return clopper_pearson(int(losses.sum()), count, failure), "Clopper-Pearson"
    if count < 2:  # no empirical variance
        return chernoff(mean, count, failure), "Chernoff (kl)"
    return min(
        (chernoff(mean, count, failure / 2), "Chernoff (kl)"),
        (empirical_bernstein(losses, 1.0, failure / 2), "empirical Bernstein"),
    )


def change_limit(changes: np.ndarray, failure: float, width: float = 2.0) -> float:
    """Return an upper limit of the mean change of a loss in [0, 1] between two fixed models.

    Args:
        changes: The change of the loss of each held-out sample.
        failure: The probability that the limit fails.
        width: The length of an interval that contains the change of every possible sample.
    """
    if len(changes) < 2:  # no empirical variance
        return 1.0
    if np.ptp(changes) > width:  # by rounding, because the width is proved
        width = 2.0
    return min(1.0, empirical_bernstein(changes, width, failure))
