"""The measured gap F - F_hat, with F from held-out samples weighted like the clients.

Client i's law is the mixture sum_y q_i(y) D(. | y) of class-conditional laws that all clients
share (label skew, as Dirichlet partitions make it), so F = sum_i p_i F_i = sum_y w_y E[loss | y]
with w_y = sum_i p_i q_i(y). Each E[loss | y] is a mean over the held-out samples of class y.

**What an interval covers.** F - F_hat of one finished model, not its mean over training samples
or runs. F_hat is a mean over all training samples, computed and not sampled: only F is estimated.
Given the training samples, the model and the held-out samples' labels, the held-out losses are
independent, those of a class of one law, if nothing of the held-out set was used to make or choose
the model; an interval that holds given all that holds without. The q_i are given, too: where they
are the clients' training shares, F is the risk at those shares. Half-widths scale with B, the
length of an interval that has all losses of that model, whatever the sample: 1 for 1 - p_y, and
the B that is proved on a ball (`reach`) for a model that cannot leave it, whatever it has learned.

**Half-widths** at failure d, with T_y losses of variance V_y (unbiased) in class y. The estimate of
F is a sum of independent terms w_y loss / T_y, each in an interval of length w_y B / T_y:

    hoeffding    B sqrt(ln(2/d)/2 sum_y w_y^2 / T_y)
    bernstein    sqrt(2 l v) + B l (2 r' + r/3),   l = ln(3/d),   v = sum_y w_y^2 V_y / T_y,
                 r = max_y w_y / T_y,   r' = max_y w_y / sqrt(T_y (T_y - 1))
    shorter      the shorter of these two at d/2 each

*Bernstein* is Maurer and Pontil's (2009, Theorem 4) for strata. Centred, the terms are at most r B
in size, so the sum is above its mean by at most sqrt(2 l s) + r B l / 3, where s is its variance,
except with chance e^-l = d/3 (Bernstein); as often it is below. It remains that sqrt(s) <=
sqrt(v) + r' B sqrt(2 l) but for d/3. Let B = 1. Z_y = T_y V_y falls by at most 1 when one loss is
replaced, and the squares of these falls over its losses sum to at most T_y / (T_y - 1) Z_y (their
proof of Theorem 10). So Z = sum_y c_y Z_y = v / r^2 with c_y = (w_y / (T_y r))^2 <= 1, the largest
of which is 1, falls by at most 1, and the squares sum to at most a Z, a = max_y c_y T_y / (T_y - 1)
= (r' / r)^2 >= 1. Their Theorem 7 gives P(EZ - Z > t) <= exp(-t^2 / (2 a EZ)); with t = sqrt(2 a l
EZ), that is sqrt(EZ) <= sqrt(Z) + sqrt(2 a l). Times r, with s = r^2 EZ, this is the claim.
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
from fedmuon.core.errors import InputError

ROUNDING = 1e-6  # of a loss, relative to B, which is float32's at worst

Interval = Literal["hoeffding", "bernstein", "shorter", "normal"]


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
    variances: np.ndarray  # unbiased; infinite for one sample
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

    `hoeffding` is exact for any losses in an interval of length B = `loss_bound`. `bernstein`
    (Maurer and Pontil's empirical form) is exact too and shorter when losses vary little;
    `shorter` is exact and never much longer than either. `normal` is the usual approximation for
    many samples of each class, exact for none, and does not read B.
    """
    fitted = values("train_losses", train_losses)
    chances = client_weights(weights, len(fitted))
    strata = stratify(class_weights(chances, shares), test_losses, test_labels)
    top = at_least("loss_bound", loss_bound)
    if interval != "normal" and np.ptp(test_losses) > top * (1 + ROUNDING):
        raise InputError(
            "held-out losses are further apart than loss_bound: raise it, or use interval='normal'."
        )
    empirical, population = float(chances @ fitted), float(strata.weights @ strata.means)
    if interval not in _HALF_WIDTHS:
        raise InputError(f"interval is {interval!r}: use one of {', '.join(_HALF_WIDTHS)}.")
    if interval in ("bernstein", "normal") and (strata.counts < 2).any():
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
    each = [(one.mean(), one.var(ddof=1) if len(one) > 1 else math.inf, len(one)) for one in groups]
    return Strata(class_weight[present], *np.array(list(zip(*each, strict=True))))


def _hoeffding(strata: Strata, failure: float, top: float) -> float:
    """Independent terms w_y loss / T_y of range w_y B / T_y, both tails."""
    squares = (np.square(strata.weights) / strata.counts).sum()
    return top * math.sqrt(math.log(2 / failure) / 2 * float(squares))


def _bernstein(strata: Strata, failure: float, top: float) -> float:
    """Infinite where a class has a single sample, whose variance nobody knows."""
    log, each = math.log(3 / failure), strata.weights / strata.counts
    with np.errstate(divide="ignore"):
        scaled = strata.weights / np.sqrt(strata.counts * (strata.counts - 1))
    variance = float((np.square(strata.weights) * strata.variances / strata.counts).sum())
    return math.sqrt(2 * log * variance) + top * log * float(2 * scaled.max() + each.max() / 3)


def _shorter(strata: Strata, failure: float, top: float) -> float:
    """The union bound: which of the two is shorter may depend on the losses."""
    return min(one(strata, failure / 2, top) for one in (_hoeffding, _bernstein))


def _normal(strata: Strata, failure: float, top: float) -> float:
    from scipy.special import ndtri  # here, because it takes long to load

    variance = (np.square(strata.weights) * strata.variances / strata.counts).sum()
    return float(ndtri(1 - failure / 2)) * math.sqrt(variance)


_HALF_WIDTHS: dict[str, Callable[[Strata, float, float], float]] = {
    "hoeffding": _hoeffding,
    "bernstein": _bernstein,
    "shorter": _shorter,
    "normal": _normal,
}
