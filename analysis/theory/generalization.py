"""The generalization bound of 001, Theorem 4.1, as a number that says what it stands on."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory import checks, concentration
from fedmuon.analysis.theory.concentration import Constant
from fedmuon.core.errors import InputError

Status = Literal["certified", "real-arithmetic", "estimated"]

INDEPENDENCE = "The samples are independent, those of client i draws of one law (Assumption 4.1)."
STABILITY = "Replacing one sample of client i changes every loss by at most eps_i, whatever it is."
RANGE = "Every loss lies in [0, B]."


@dataclass(frozen=True)
class Bound:
    """F - F_hat <= value, except with probability `failure`; only the gap's upper side.

    `h` and `g` are the branches 001 (10), (11) at their shares of delta, `value` the smaller.
    `failure` adds to delta whatever else may go wrong. `status` is certified when every constant
    is proved, and estimated otherwise; real-arithmetic when all are proved, but of a run whose
    rounding may be larger than what the bound allows. All hold only under `assumptions`.
    """

    value: float
    h: float
    g: float
    n_eff: float
    c_hp: Constant
    delta: float
    failure: float
    status: Status
    assumptions: tuple[str, ...]


def bound(
    eps: ArrayLike,
    sizes: ArrayLike,
    weights: ArrayLike,
    delta: float,
    loss_bound: float = 1.0,
    c_hp: Constant = "explicit",
    *,
    shares: tuple[float, float] = (0.5, 0.5),
    status: Status = "certified",
    assumptions: tuple[str, ...] = (INDEPENDENCE, STABILITY, RANGE),
    other_failure: float = 0.0,
) -> Bound:
    """B_delta of 001 (12): min(H, G) at delta/2 each, from eps, sizes n_i and weights p_i, all [N].

    `shares` are the parts of delta given to H and to G. The eps_i do not depend on the sample, so
    the minimum is one of two fixed numbers, known before the data: it fails no more often than
    that one. Hence any shares up to (1, 1), fixed in advance, hold at level delta; the halves are
    the paper's.
    """
    stable = _checked(eps, sizes, weights, loss_bound)
    delta = checks.probability("delta", delta)
    if not all(0 < share <= 1 for share in shares):
        raise InputError(f"shares are {shares}: give H and G each a part of delta in (0, 1].")
    h = concentration.sharp_stability(*stable, shares[0] * delta, loss_bound, c_hp)
    g = concentration.bounded_differences(*stable, shares[1] * delta, loss_bound)
    if not isinstance(c_hp, str) and h < g:
        status = "estimated"
        assumptions = (*assumptions, f"C_hp = {c_hp:g} is the caller's: nothing proves it.")
    failure = delta + checks.at_least("other_failure", other_failure)
    n_eff = concentration.effective_size(*stable[1:])
    return Bound(min(h, g), h, g, n_eff, c_hp, delta, failure, status, assumptions)


def g_alone(
    eps: ArrayLike, sizes: ArrayLike, weights: ArrayLike, delta: float, loss_bound: float = 1.0
) -> float:
    """G at the full delta (001, Lemmas C.1 and C.5): no split, and no constant left open."""
    stable, delta = _checked(eps, sizes, weights, loss_bound), checks.probability("delta", delta)
    return concentration.bounded_differences(*stable, delta, loss_bound)


def _checked(
    eps: ArrayLike, sizes: ArrayLike, weights: ArrayLike, loss_bound: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """min(B, eps_i), n_i and p_i."""
    counts = checks.sample_sizes(sizes)
    chances = checks.client_weights(weights, len(counts))
    top = checks.at_least("loss_bound", loss_bound)
    return np.minimum(top, checks.values("eps", eps, len(counts))), counts, chances
