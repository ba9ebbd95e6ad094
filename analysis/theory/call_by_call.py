"""Exact sign without a tube: what each of a run's calls may add to how far a neighbour is away.

By Lemma D.7 of 001, for matrices [d, q] of rank q <= d (else transpose),

    ||sign(M) - sign(M')||_F <= 2 ||M - M'||_F / (s_q(M) + s_q(M')).                             (*)

Let sigma be s_q of what the run takes the sign of at a call, and radius < sigma a bound on how far
the neighbour's is away. By Weyl's inequality s_q(M') >= sigma - ||M - M'||_F, and
t -> 2 t / (2 sigma - t) rises: the signs are at most 2 radius / (2 sigma - radius) apart. So the
induction of Lemma D.12 goes on with that instead of L radius; it uses the sign at earlier calls
only. Where a tube of gamma holds (radius + gamma <= sigma, L = 1/gamma), 2 / (2 sigma - radius)
<= 2 / (sigma + gamma) <= 1 / gamma: this is never worse than the best tube. In the quotient by the
ones vector it holds as that does (`exact_sign`), and for other recipes with (1) and (2) of
`methods`, in which only L t is replaced.

Proof of (*), norms being Frobenius. M = U S V^T, M' = W T Z^T, X = V^T Z (orthogonal), Y = U^T W,
E = M - M', s and t the least of S and of T. E_1 = U^T E Z = S X - Y T and E_2 = (W^T E V)^T =
S Y - X T, so S (X - Y) + (X - Y) T = E_1 - E_2 and (s + t) ||X - Y|| <= ||E_1|| + ||E_2||. With U_o
across from U and w = ||U_o^T W|| = ||W_o^T U||, ||sign(M) - sign(M')||^2 = ||X - Y||^2 + w^2. As
U_o^T E Z = -U_o^T W T, ||E_1||^2 <= ||E||^2 - t^2 w^2, likewise ||E_2||^2 <= ||E||^2 - s^2 w^2. As
(a + b)^2 <= 2 a^2 + 2 b^2, (s + t)^2 (||X - Y||^2 + w^2)
<= 4 ||E||^2 - 2 (s^2 + t^2) w^2 + (s + t)^2 w^2 <= 4 ||E||^2.
"""

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.exact_sign import SignRun, Tube, sign_run
from fedmuon.analysis.theory.methods import Method
from fedmuon.analysis.theory.recursion import Steps, saturated


def follow(
    smallest: ArrayLike,
    schedule: ArrayLike,
    sensitivity: ArrayLike,
    lr: ArrayLike,
    method: Method | float,
    l_g: Steps,
    local_steps: int = 1,
    scale: Steps = 1.0,
    shares: np.ndarray | None = None,
) -> Tube:
    """Certificates of this run's neighbours, or a refusal that names the first call which fails.

    Arguments are those of `certify`; a method that is a number is the beta of FedMuon's. `shares`
    [R, K] are the weights of the server's average, if not 1/K. gamma is what all neighbours keep,
    l_orth the largest 2 / (s + s').
    """
    how = method if isinstance(method, Method) else Method(method)
    run = sign_run(smallest, schedule, sensitivity, lr, how.beta, l_g, local_steps, scale)
    equal = np.ones(run.schedule.shape)
    radii, ends = _followed(run, how, equal if shares is None else shares)
    least = float((run.gaps - radii).min())
    return Tube(least, float((2 / (2 * run.gaps - radii)).max()), ends)


def _followed(run: SignRun, how: Method, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """max_c radius_{c,tau} [R, E, K] and ||dX^R|| for a replacement in each client [N]."""
    x, m = np.zeros((2, len(run.sensitivity)))
    radii = np.zeros(run.gaps.shape)
    for r, cohort in enumerate(run.schedule):
        own = np.arange(len(x))[:, None] == cohort  # [replaced client, participant]
        hit, kept = own * run.sensitivity[:, None], abs(1 - run.lr[r] * how.decay)
        xs, ms = (np.repeat(one[:, None], len(cohort), 1) for one in (x, m * (not how.afresh)))
        for k, gaps in enumerate(run.gaps[r]):
            fresh = how.fresh * (run.l_g[r, k] * xs + run.scale[r, k] * hit)
            ms = how.beta * ms + fresh
            apart = how.beta * ms + fresh if how.looks_ahead else ms
            radii[r, k] = apart.max(0)
            run.refuse_where(~(radii < run.gaps), "a neighbour may lose the gap")
            xs = kept * xs + run.lr[r] * 2 * apart / (2 * gaps - apart)
        x, m = (np.average(one, 1, shares[r]) for one in (xs, ms))
    return radii, saturated(x)
