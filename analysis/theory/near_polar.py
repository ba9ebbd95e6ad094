"""Runs whose map is near a Lipschitz one: what 001's Proposition D.4 leaves to be said.

001 bounds the distance of Newton-Schulz from the polar factor, and uses it nowhere. Here it enters
the recursion. A run uses the map T; the same run with S in its place (same samples, schedule,
batches) has momenta M~, and S is L-Lipschitz; no more is asked of T than that the errors

    e_t = ||T(M_t) - S(M_t)||_F

are known at T's own momenta, and when the run is done they are. At each call, by the triangle
inequality, ||T(M) - S(M~)|| <= e + L ||M - M~||, so that the pair (||X - X~||, ||M - M~||) obeys
the recursion of 001 (6) with (eta e, 0) for what a replaced sample adds, and averaging is convex:

    ||X^R_T - X^R_S||_F <= D = eta sum_{s,k} e1^T A^{E(R-1-s)+E-1-k} e1 (1/K) sum_{i in C_s} e_ski.

*Neighbours.* ||X_T(Z) - X_T(Z')|| <= Delta_i Y_i + D(Z) + D(Z'), with the certificate of S. It does
not go to 0 with 1/n_i, and must not: T may be the exact sign (001, Proposition D.6).

*From the run alone.* D(Z') asks for the neighbour's own run. Without it: for spectral T and S the
error is a function of singular values, and by Weyl's inequality those of M' are within m of those
of M where ||M - M'||_F <= m. With e*(m) the largest error of any such values (`furthest`),

    ||T(M) - T(M')|| <= e + L m + e*(m),    and at most 2 sqrt(q) where no value of T exceeds 1,

so that (6), with eta times that for what a step adds, bounds every neighbour in client i by
induction over the calls, as in `call_by_call` (`around`). e* does not vanish as m -> 0, like D.

*Generalization.* F and F_hat are L_loss-Lipschitz, so on every sample

    F(X_T) - F_hat(X_T) <= F(X_S) - F_hat(X_S) + 2 L_loss D.

The first difference on the right is what Theorem 4.1 bounds, for S; the rest is arithmetic on the
sample at hand. So D may be computed from the run, and nothing is added to the failure probability.
With S a smoothed polar factor this is a certificate for runs of the exact sign and of steep
Newton-Schulz maps, whose own constants are infinite or useless. Remark D.2 asks for a tube that is
the same for all data sets; this asks for none. Several S may be tried if the failures are added, or
one is named before the sample is drawn. S = 0, which does not move, has L = 0 and makes D the
length of T's path: a bound that owes nothing to stability, against which others should be held.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory import checks, recursion
from fedmuon.analysis.theory.exact_sign import Tube, certify
from fedmuon.analysis.theory.generalization import Bound
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.certificates import Kind
from fedmuon.orthogonalize.coefficients import Coefficients

Error = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of values [K, q] and radii [N, K], [N, K]
TINY = np.finfo(float).tiny
NEAR = "The run's errors |T(M) - S(M)|_F are those that it had, S the map of the bound."


def drift(errors: ArrayLike, lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """D, from the errors [R, E, K] of all calls, and S's constant."""
    found = np.asarray(errors, dtype=float)
    if found.ndim != 3 or not found.size or not (found >= 0).all():
        raise InputError("errors must be numbers >= 0 of shape [rounds, local steps, per round].")
    change, _ = recursion.increment(lr, beta, l_orth, l_g)
    with np.errstate(over="ignore", invalid="ignore"):
        growth = 1 + recursion.first_rows(change, found.shape[0] * found.shape[1])[:, 0]
        pushed = found.mean(2).ravel()[::-1]  # the last call is not amplified
        total = np.where(pushed > 0, recursion.saturated(growth) * pushed, 0.0).sum()
    return float(checks.at_least("lr", lr) * total)


def around(
    values: ArrayLike,
    schedule: ArrayLike,
    sensitivity: ArrayLike,
    lr: float,
    beta: float,
    l_orth: float,
    l_g: float,
    error: Error,
) -> np.ndarray:
    """||X^R_T(Z) - X^R_T(Z')|| of every neighbour in each client [N], of this run, from the
    singular values [R, E, K, q] at its calls; T's are at most 1."""
    hits, seen = checks.values("sensitivity", sensitivity), np.asarray(values, dtype=float)
    cohorts = checks.rounds_of(schedule, len(hits))
    if seen.ndim != 4 or (len(seen), seen.shape[2]) != cohorts.shape or not (seen >= 0).all():
        raise InputError("values must be numbers >= 0 [rounds, local steps, per round, q].")
    x, m = np.zeros((2, len(hits)))
    for cohort, calls in zip(cohorts, seen, strict=True):
        hit = (np.arange(len(hits))[:, None] == cohort) * hits[:, None]
        xs, ms = (np.repeat(one[:, None], len(cohort), 1) for one in (x, m))
        for call in calls:
            ms = beta * ms + (1 - beta) * (l_g * xs + hit)
            apart = error(call, 0 * ms) + l_orth * ms + error(call, ms)
            xs = xs + lr * np.minimum(apart, 2 * math.sqrt(call.shape[1]))
        x, m = xs.mean(1), ms.mean(1)
    return x


def furthest(
    values: np.ndarray, radius: np.ndarray, lam: float, own: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """e*: sup ||T(M') - S(M')||_F [N, K] over M' whose singular values are within `radius` [N, K]
    of `values` [K, q]; S is smoothed polar, T has own(s / ||M'||_F) for s, which never falls.

    Both rise in s, and T falls in the norm: each value of T - S lies between T at its least with S
    at its most, and the reverse.
    """
    size, reach = np.linalg.norm(values, axis=-1)[..., None], radius[..., None]
    low, high = np.maximum(values - reach, 0), values + reach
    most = np.minimum(1, high / np.maximum(size - reach, TINY))
    least = own(low / np.maximum(size + reach, TINY)) - high / np.sqrt(high**2 + lam)
    largest = own(most) - low / np.sqrt(low**2 + lam)
    return np.linalg.norm(np.maximum(np.abs(least), np.abs(largest)), axis=-1)


def transferred(found: Bound, loss_lipschitz: float, moved: float) -> Bound:
    """The bound of S's run for the run of T, which ends within `moved` = D of it."""
    cost = 2 * checks.at_least("loss_lipschitz", loss_lipschitz) * checks.at_least("moved", moved)
    names = ("value", "h", "g")
    larger = {name: getattr(found, name) + cost for name in names}
    return replace(found, **larger, assumptions=(*found.assumptions, NEAR))


def norm_tube(
    norms: ArrayLike,
    schedule: ArrayLike,
    sensitivity: ArrayLike,
    lr: float,
    beta: float,
    l_g: float,
    local_steps: int = 1,
    kind: Kind = "sharp",
    *,
    coefficients: Coefficients = "cubic",
    steps: int = 5,
) -> Tube:
    """Remark D.1's tube for Newton-Schulz from M / ||M||_F, found as the exact sign's is.

    `norms` are ||M||_F at all calls, as `certify` wants s_q. In the tube ||M||_F >= nu the map is
    slope/nu-Lipschitz, and ||M'||_F >= ||M||_F - radius for neighbours, as Weyl's inequality gives
    for s_q. So Lemma D.12 holds word for word with the norm in the place of s_q. L enters its
    recursion only as lr L: a step size `slope` times as large stands for it.
    """
    given = {"steps": steps, "coefficients": coefficients, "eps": 1.0, "normalization": "max"}
    slope, own = lipschitz("newton-schulz", kind, **given), 2 if kind == "paper" else 1
    step = (lr * slope / own, beta, l_g, local_steps, kind)
    try:
        tube = certify(norms, schedule, sensitivity, *step)
    except Uncertified as error:
        raise Uncertified(f"With |M|_F in the place of s_q: {error}") from None
    return replace(tube, l_orth=slope / tube.gamma)
