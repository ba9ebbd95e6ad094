"""The hockey-stick divergence of two Gaussians, for privacy accounts and for the theory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def gaussian_hockey_stick(distance: float, epsilons: np.ndarray) -> np.ndarray:
    """Return H_a of N(distance, 1) and N(0, 1) at a = exp(epsilon), for each epsilon.

    H_a(P || Q) is the supremum of P(A) - a Q(A) over all sets A.
    """
    # Late, because commands that only show a run need neither
    import numpy as np
    from scipy.special import log_ndtr, ndtr

    with np.errstate(over="ignore"):
        other = np.exp(epsilons + log_ndtr(-distance / 2 - epsilons / distance))
    return ndtr(distance / 2 - epsilons / distance) - other
