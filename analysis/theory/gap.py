"""The measured gap F - F_hat, with F from held-out samples weighted like the clients.

Client i's law is the mixture sum_y q_i(y) D(. | y) of class-conditional laws that all clients
share (label skew, as Dirichlet partitions make it), so F = sum_i p_i F_i = sum_y w_y E[loss | y]
with w_y = sum_i p_i q_i(y). Each E[loss | y] is a mean over the held-out samples of class y. The
interval covers the finite held-out set alone: it is conditional on the model and on the shares q_i.
Where the q_i are the clients' training shares, F is the risk at those shares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.checks import (
    at_least,
    client_weights,
    entries,
    probability,
    values,
    whole,
)
from fedmuon.errors import InputError

Interval = Literal["hoeffding", "bernstein", "normal"]


@dataclass(frozen=True)
class MeasuredGap:
    """gap = population - empirical, and an interval that holds with the confidence asked for."""

    gap: float
    low: float
    high: float
    population: float
    empirical: float
    interval: Interval


@dataclass(frozen=True)
class Strata:
    """Held-out losses by class, for the classes of positive weight w_y."""

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray  # unbiased; NaN for one sample
    counts: np.ndarray


def measured_gap(
    train_losses: ArrayLike,
    weights: ArrayLike,
    shares: ArrayLike,
    test_losses: ArrayLike,
    test_labels: ArrayLike,
    *,
    confidence: float = 0.95,
    interval: Interval = "hoeffding",
    loss_bound: float = 1.0,
) -> MeasuredGap:
    """F - F_hat, from each client's mean training loss [N], p_i [N] and label shares [N, classes].

    The held-out samples come as losses [T] and labels [T].

    `hoeffding` is exact for any losses in [0, B]. `bernstein` (Maurer and Pontil's empirical form,
    united over the classes) is exact too and shorter when losses vary little. `normal` is the
    usual approximation for many samples of each class, exact for none.
    """
    fitted = values("train_losses", train_losses)
    chances = client_weights(weights, len(fitted))
    strata = stratify(class_weights(chances, shares), test_losses, test_labels)
    top = at_least("loss_bound", loss_bound)
    if interval != "normal" and not (np.asarray(test_losses) <= top).all():
        raise InputError("a held-out loss exceeds loss_bound: raise it, or use interval='normal'.")
    empirical, population = float(chances @ fitted), float(strata.weights @ strata.means)
    if interval not in _HALF_WIDTHS:
        raise InputError(f"interval is {interval!r}: use one of {', '.join(_HALF_WIDTHS)}.")
    if interval != "hoeffding" and (strata.counts < 2).any():
        raise InputError("a class has a single held-out sample: use interval='hoeffding'.")
    half = _HALF_WIDTHS[interval](strata, probability("1 - confidence", 1 - confidence), top)
    gap = population - empirical
    return MeasuredGap(gap, gap - half, gap + half, population, empirical, interval)


def class_weights(weights: np.ndarray, shares: ArrayLike) -> np.ndarray:
    """w_y = sum_i p_i q_i(y), [classes], from p [N] and q [N, classes]."""
    table = np.asarray(shares, dtype=float)
    if table.ndim != 2 or len(table) != len(weights) or not (table >= 0).all():
        raise InputError("shares must be numbers >= 0 of shape [clients, classes].")
    if (abs(table.sum(axis=1) - 1) > 1e-9).any():
        raise InputError("each client's label shares must sum to 1.")
    return weights @ table


def label_shares(labels: ArrayLike, owner: ArrayLike, clients: int, classes: int) -> np.ndarray:
    """q_i(y) [N, classes]: the share of label y among the samples that client i owns."""
    shape = whole("clients", clients), whole("classes", classes)
    entries("clients times classes", shape[0] * shape[1])
    places = _indices("owner", owner, clients), _indices("labels", labels, classes)
    if len(places[0]) != len(places[1]):
        raise InputError("labels and owner must have the same length.")
    table = np.zeros(shape)
    np.add.at(table, places, 1.0)
    if (table.sum(axis=1) == 0).any():
        raise InputError("a client without samples has no label shares: drop it.")
    return table / table.sum(axis=1, keepdims=True)


def _indices(name: str, given: ArrayLike, count: int) -> np.ndarray:
    """Whole numbers of 0 .. count-1."""
    found = np.asarray(given)
    if not (np.issubdtype(found.dtype, np.integer) and ((found >= 0) & (found < count)).all()):
        raise InputError(f"{name} must be whole numbers of 0 .. {count - 1}.")
    return found


def stratify(class_weight: np.ndarray, losses: ArrayLike, labels: ArrayLike) -> Strata:
    """The held-out losses by class."""
    lost = values("test_losses", losses)
    names, present = np.asarray(labels), np.flatnonzero(class_weight)
    if names.shape != lost.shape:
        raise InputError("test_losses and test_labels must have the same length.")
    groups = [lost[names == y] for y in present]
    if not all(len(group) for group in groups):
        raise InputError("a class that clients hold has no held-out sample: hold out more.")
    each = [(one.mean(), one.var(ddof=1) if len(one) > 1 else math.nan, len(one)) for one in groups]
    return Strata(class_weight[present], *np.array(list(zip(*each, strict=True))))


def _hoeffding(strata: Strata, failure: float, top: float) -> float:
    """Independent terms w_y loss / T_y of range w_y B / T_y, both tails."""
    squares = (np.square(strata.weights) / strata.counts).sum()
    return top * math.sqrt(math.log(2 / failure) / 2 * float(squares))


def _bernstein(strata: Strata, failure: float, top: float) -> float:
    """sum_y w_y (sqrt(2 V_y l / T_y) + 7 B l / (3 (T_y - 1))), l = log(4 classes / failure)."""
    log = math.log(4 * len(strata.counts) / failure)
    first = np.sqrt(2 * strata.variances * log / strata.counts)
    second = 7 * top * log / (3 * (strata.counts - 1))
    return float(strata.weights @ (first + second))


def _normal(strata: Strata, failure: float, top: float) -> float:
    from scipy.special import ndtri  # here, because it takes long to load

    variance = (np.square(strata.weights) * strata.variances / strata.counts).sum()
    return float(ndtri(1 - failure / 2)) * math.sqrt(variance)


_HALF_WIDTHS: dict[str, Callable[[Strata, float, float], float]] = {
    "hoeffding": _hoeffding,
    "bernstein": _bernstein,
    "normal": _normal,
}
