"""Certificates of runs with the exact polar factor, or with a map close to the polar factor.

A tube
------
The exact sign is discontinuous where a singular value is 0, so no bound holds for all runs
(Stability note, Proposition D.6). The sign is Lipschitz where all singular values are at least some
gamma > 0, which is called the gap. Suppose that a finished run and all its neighbours maintain a
gap. Then they stay in a tube around the run, and Lemma D.12 bounds the distances of their final
models.

Let sigma_tau be the smallest singular value s_q of the run's momentum at sign call tau. A gap
gamma certifies the run if at every call, for every replaced client c,

    radius_{c,tau}(L) + gamma <= sigma_tau,     L = 1/gamma,

where the radius is Delta_c times the momentum component of the recursion up to this call. The proof
is by induction over the calls. At call tau, the momenta of the run and of the neighbour differ by
at most the radius. The momentum is updated before the sign is taken, so this step uses the
Lipschitz constant of the sign at earlier calls only. By Weyl's inequality s_q of the neighbour's
momentum is at least gamma. So both momenta lie in {s_q >= gamma}, where the sign is
1/gamma-Lipschitz (Lemma D.7). The paper requires more: sigma >= 2 gamma and radius <= gamma, at L =
2/gamma.

The search for gamma uses convexity. The radius is a polynomial in L with coefficients >= 0, so at L
= 1/gamma the radius is convex in gamma. So the largest violation radius + gamma - sigma_tau over
all calls is convex, and the valid gammas form an interval. The right end of this interval gives the
smallest L. With the paper's two conditions, the radius falls as gamma grows, so only gamma = min
sigma / 2 needs to be tried.

**Gradients whose rows sum to 0.** If every gradient satisfies G 1 = 0, as for softmax, the momentum
[d, c] does not have full rank. All statements above still hold with sigma_tau = s_{min(d, c-1)}.
Let the columns of Q [c, c-1] be an orthonormal basis of the vectors orthogonal to 1. M is a
weighted sum of gradients, so M = N Q^T with N = M Q. N has the singular values of M, except for one
0 (if d >= c). N = U S V^T implies M = U S (Q V)^T, hence sign(M) = sign(N) Q^T. Right
multiplication by Q^T preserves Frobenius norms. So the distances of momenta, of signs, and of
models equal the distances in R^{d x (c-1)}, where the lemma is applied. Lg and Delta bound norms,
which are the same in R^{d x (c-1)}.

Call by call
------------
`path_certificate` does not need gamma: each call has its own Lipschitz constant, which depends on
the singular values at this call. By Lemma D.7 of the Stability note, for matrices [d, q] of rank
q <= d (transpose them otherwise),

    ||sign(M) - sign(M')||_F <= 2 ||M - M'||_F / (s_q(M) + s_q(M')).                             (*)

Let sigma be s_q of the matrix whose sign the run takes at a call, and let radius < sigma bound the
distance to the corresponding matrix of the neighbour. By Weyl's inequality s_q(M') >= sigma - ||M -
M'||_F, and 2 t / (2 sigma - t) rises in t. So the two signs are at most 2 radius / (2 sigma -
radius) apart. The induction of Lemma D.12 then continues with this distance in place of L radius,
because the induction uses the sign at earlier calls only. If a tube of gamma is valid (radius +
gamma <= sigma, L = 1/gamma), then 2 / (2 sigma - radius) <= 2 / (sigma + gamma) <= 1 / gamma. So
this certificate is never worse than the best tube. The certificate also holds if the rows of
gradients sum to 0, as in the section "A tube". For other optimizers, use (1) and (2) of
`recursion`, and replace only L t by the distance of the two signs.

Proof of (*). All norms are Frobenius norms. Let M = U S V^T, M' = W T Z^T, X = V^T Z (orthogonal),
Y = U^T W and E = M - M', and let s and t be the smallest entries of S and of T. Define
E_1 = U^T E Z = S X - Y T and E_2 = (W^T E V)^T = S Y - X T. Then S (X - Y) + (X - Y) T = E_1 - E_2
and (s + t) ||X - Y|| <= ||E_1|| + ||E_2||. Let U_o and W_o be orthogonal complements of U and W,
and let w = ||U_o^T W|| = ||W_o^T U||. Then ||sign(M) - sign(M')||^2 = ||X - Y||^2 + w^2. As
U_o^T E Z = -U_o^T W T, ||E_1||^2 <= ||E||^2 - t^2 w^2, and likewise ||E_2||^2 <= ||E||^2 - s^2 w^2.
As (a + b)^2 <= 2 a^2 + 2 b^2, (s + t)^2 (||X - Y||^2 + w^2)
<= 4 ||E||^2 - 2 (s^2 + t^2) w^2 + (s + t)^2 w^2 <= 4 ||E||^2.

Maps near the polar factor
--------------------------
Proposition D.4 of the Stability note bounds the distance of Newton-Schulz from the polar factor.
This section uses this bound in the recursion. A run uses the map T. A second run uses a map S in
place of T, with the same samples, schedule and batches. The second run has momenta M~. S is
L-Lipschitz. T needs no Lipschitz constant. Only the errors

    e_t = ||T(M_t) - S(M_t)||_F

at the momenta of the first run must be known. The errors can be computed when the run is finished.
At each call, the triangle inequality gives ||T(M) - S(M~)|| <= e + L ||M - M~||. So the pair (||X -
X~||, ||M - M~||) follows the recursion of the Stability note, eq. (6), with (eta e, 0) in place of
the contribution of a replaced sample. Averaging is convex, so

    ||X^R_T - X^R_S||_F <= D = eta sum_{s,k} e1^T A^{E(R-1-s)+E-1-k} e1 (1/K) sum_{i in C_s} e_ski.

*Neighbours.* ||X_T(Z) - X_T(Z')|| <= Delta_i Y_i + D(Z) + D(Z'), with the certificate of S. The
bound does not go to 0 with 1/n_i. No better bound is possible in general, because T may be the
exact sign (Stability note, Proposition D.6).

*From one run only.* D(Z') requires the run of the neighbour. This run is not needed if T and S are
spectral maps, because the error is then a function of singular values. If ||M - M'||_F <= m, Weyl's
inequality shows that the singular values of M' are within m of the singular values of M. Let e*(m)
be the largest error over all singular values in this range (`furthest`). Then

    ||T(M) - T(M')|| <= e + L m + e*(m),    and at most 2 sqrt(q) if no value of T exceeds 1.

Use this bound, times eta, for the contribution of a step in eq. (6). By induction over the calls,
as in `path_certificate`, the result bounds every neighbour in client i (`around`). Like D, e* does
not vanish as m -> 0.

*Generalization.* F and F_hat are L_loss-Lipschitz, so on every sample

    F(X_T) - F_hat(X_T) <= F(X_S) - F_hat(X_S) + 2 L_loss D.

Theorem 4.1 bounds the first difference on the right, for S. The remaining term is computed from the
given sample. So D may be computed from the run, and the failure probability does not change. If S
is a smoothed polar factor, this bound certifies runs of the exact sign and of steep Newton-Schulz
maps. The Lipschitz constants of these maps are infinite or too large to be useful. Remark D.2
requires a tube that is the same for all data sets. This certificate does not require a tube. You
may try several S if you add their failure probabilities. Nothing is added if you choose S before
the sample is drawn. For S = 0, the second model does not move, so L = 0 and D is the length of the
path of T. The resulting bound does not use stability, and serves as a baseline for other bounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory import checks, recursion
from fedmuon.analysis.theory.checks import at_least, entries, rounds_of, values, whole
from fedmuon.analysis.theory.generalization import Bound, least
from fedmuon.analysis.theory.recursion import Method, Steps, by_step, saturated, transition
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.coefficients import Coefficients
from fedmuon.orthogonalize.lipschitz_constants import Kind

SCOPE = (
    "The bound holds for this run on these samples and their neighbours. Theorem 4.1 would need "
    "the same tube for all samples (Remark D.2)."
)


@dataclass(frozen=True)
class Tube:
    """A certificate of a run with the exact polar factor and of its neighbours (Lemma D.12).

    Attributes:
        gamma: The gap γ. At every call, all singular values of the momentum are at least γ.
        l_orth: Lipschitz constant of the polar factor where the gap holds.
        perturbation: Bound on ||X^R(S) - X^R(S')||_F for every neighbour in client i `[N]`.
        scope: A sentence that states for which runs the certificate holds.

    Example:
        >>> from fedmuon.analysis import tube_certificate
        >>> tube = tube_certificate(1.0, [[0], [1]], [0.01, 0.01], lr=0.1, beta=0.9, l_g=1.0)
        >>> round(tube.gamma, 3)
        0.999
    """

    gamma: float
    l_orth: float
    perturbation: np.ndarray
    scope: str = SCOPE


def tube_certificate(
    smallest: ArrayLike,
    schedule: ArrayLike,
    sensitivity: ArrayLike,
    lr: ArrayLike,
    beta: float,
    l_g: Steps,
    local_steps: int = 1,
    kind: Kind = "sharp",
    scale: Steps = 1.0,
) -> Tube:
    """Return the certificate of a finished run whose orthogonalizer is the exact polar factor.

    The source is the Stability note, Lemma D.12.

    Args:
        smallest: Lower bound of the smallest singular value s_q(M) of the momentum. Pass one number
            for all calls, or one number per call `[R, E, K]`.
        schedule: Participants of each round `[R, K]`, integers.
        sensitivity: Sensitivity Δ_i of each client `[N]`.
        lr: Step size η, one number or one per round `[R]`.
        beta: Momentum β.
        l_g: Smoothness L_g, one number or one per step `[R, E]`.
        local_steps: Number of local steps E in a round.
        kind: Use "paper" for the gap of the Stability note, and "sharp" for the largest valid gap.
        scale: Factor of Δ_i at each step, one number or `[R, E]`.

    Returns:
        The gap, its Lipschitz constant and the certificates.

    Raises:
        Uncertified: If a singular value may fall below the gap. The error names the first such
            call.
        InputError: If the shapes do not match.

    Example:
        >>> from fedmuon.analysis import tube_certificate
        >>> tube = tube_certificate(1.0, [[0], [1]], [0.01, 0.01], lr=0.1, beta=0.9, l_g=1.0)
        >>> tube.perturbation.round(5).tolist()
        [0.00019, 0.0001]
    """
    run = sign_run(smallest, schedule, sensitivity, lr, beta, l_g, local_steps, scale)
    if kind == "paper":
        gamma = float(run.gaps.min()) / 2
        l_orth = 2 / gamma
        left = run.propagate(l_orth)[0] > gamma
        run.refuse_where(left, f"a neighbour may have a singular value below {gamma:.3g}")
    else:
        gamma = _sharp_gap(run)
        l_orth = 1 / gamma
    return Tube(gamma, l_orth, run.propagate(l_orth)[1])


def sign_run(
    smallest: ArrayLike,
    schedule: ArrayLike,
    sensitivity: ArrayLike,
    lr: ArrayLike,
    beta: float,
    l_g: Steps,
    local_steps: int,
    scale: Steps,
) -> "SignRun":
    """Check the arguments of `tube_certificate`, and return them as a `SignRun`.

    Raises:
        Uncertified: If the momentum does not have full rank at some call.
        InputError: If a shape does not match or a number is out of range.
    """
    moved = values("sensitivity", sensitivity)
    cohorts = rounds_of(schedule, len(moved))
    calls = (len(cohorts), local_steps, cohorts.shape[1])
    gaps = np.asarray(smallest, dtype=float)
    if gaps.ndim and gaps.shape != calls:
        raise InputError(
            f"smallest has shape {gaps.shape}, but it must be one number or an array of shape "
            f"{calls}."
        )
    rates = np.broadcast_to(np.asarray(lr, dtype=float), len(cohorts))
    if not (np.isfinite(rates).all() and (rates >= 0).all()):
        raise InputError(
            "lr contains a negative number, NaN or infinity, but every step size must be a finite "
            "number that is at least 0."
        )
    if not np.isfinite(moved).all():
        raise InputError("sensitivity contains infinity, but every entry must be finite.")
    if not (gaps >= 0).all():
        raise InputError(
            "smallest contains a negative number or NaN, but singular values are at least 0."
        )
    smooth, hits = (by_step(constant, *calls[:2]).reshape(calls[:2]) for constant in (l_g, scale))
    run = SignRun(np.broadcast_to(gaps, calls), cohorts, moved, rates, beta, smooth, hits)
    run.refuse_where(run.gaps <= 0, "the momentum does not have full rank")
    return run


@dataclass(frozen=True)
class SignRun:
    """The properties of a finished run with the exact sign that its certificate needs.

    Attributes:
        gaps: Array [R, E, K] of the smallest singular value s_q of the momentum at each call.
        schedule: Array [R, K] of the participants of each round.
        sensitivity: Array [N] of the sensitivities Delta_i of the clients.
        lr: Array [R] of the step sizes of the rounds.
        beta: Momentum beta.
        l_g: Array [R, E] of the smoothness Lg at each step.
        scale: Array [R, E] of the factors of Delta_i at each step.
    """

    gaps: np.ndarray
    schedule: np.ndarray
    sensitivity: np.ndarray
    lr: np.ndarray
    beta: float
    l_g: np.ndarray
    scale: np.ndarray

    def propagate(self, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
        """Apply eq. (6) of the Stability note as if the sign were `l_orth`-Lipschitz at all calls.

        Each row of an array contains distances between two runs that differ in one sample of one
        client. The distances are ||dX|| between the models, and ||dM|| between the momenta. Within
        a round, `own` contains the distances at this client, and `others` contains the distances at
        all other clients.

        Returns:
            Two arrays. The first has shape [R, E, K] and contains the largest distance between
            momenta at each call, max_c radius_{c,tau}. The second has shape [N] and contains the
            distance ||dX^R|| between the final models.
        """
        server = np.zeros((len(self.sensitivity), 2))
        radii = np.empty(self.gaps.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            for r, cohort in enumerate(self.schedule):
                others = own = server
                for k, smooth in enumerate(self.l_g[r].tolist()):
                    step, kick = transition(float(self.lr[r]), self.beta, l_orth, smooth)
                    others = others @ step.T
                    own = own @ step.T + self.scale[r, k] * self.sensitivity[:, None] * kick
                    # `others` never exceeds `own`, so the maximum may include c = i.
                    radii[r, k] = np.maximum(own[cohort, 1], others[:, 1].max())
                server = others.copy()
                server[cohort] += (own[cohort] - others[cohort]) / len(cohort)
        return np.nan_to_num(radii, nan=np.inf, posinf=np.inf), server[:, 0]

    def refuse_where(self, failing: np.ndarray, why: str) -> None:
        """Raise Uncertified if `failing` is True for a call, and name the first such call."""
        if failing.any():
            r, k, position = np.argwhere(failing)[0]
            raise Uncertified(
                "This run has no certificate, because the conditions of its proof are not "
                f"satisfied at round {r}, local step {k}, client {self.schedule[r, position]}. "
                f"There, {why} (smallest singular value s_q = {self.gaps[r, k, position]:.3g})."
            )


def _sharp_gap(run: SignRun) -> float:
    """Return the largest valid gamma by bisection.

    The violation of a gamma is radius + gamma - sigma. A gamma is valid if its violation is at most
    0 at every call. The largest violation over all calls is convex in gamma.
    """
    top = float(run.gaps.min())

    def violation(gamma: float) -> float:
        return float((run.propagate(1 / gamma)[0] + gamma - run.gaps).max())

    # For small gamma the violation may be infinite.
    minimizer = top * math.exp(least(lambda log: violation(top * math.exp(log)), -30, 0))
    good, bad = min((minimizer, top), key=violation), top
    outside = run.propagate(1 / good)[0] + good > run.gaps
    run.refuse_where(outside, "a neighbour may have a singular value below every possible gap")
    if violation(bad) <= 0:
        return bad
    for _ in range(60):  # bisection; `good` always remains valid
        middle = (good + bad) / 2
        good, bad = (middle, bad) if violation(middle) <= 0 else (good, middle)
    return good


@dataclass(frozen=True)
class Obstruction:
    """Two runs with the exact sign, whose data sets differ in one of n samples.

    Attributes:
        trajectory: Models x^0 ... x^steps on S `[steps + 1]`.
        neighbour: Models x^0 ... x^steps on S' `[steps + 1]`.
        gradient_gap: |G_S(0) - G_S'(0)| = 2 a / n.
        loss_gap: |loss(x(S), +1) - loss(x(S'), +1)| at the end. After one step, the loss gap is 2 a
            tanh(η).

    Example:
        >>> from fedmuon.analysis import scalar_obstruction
        >>> found = scalar_obstruction(samples=1001, lr=0.1)
        >>> found.trajectory.tolist(), found.neighbour.tolist()
        ([0.0, -0.1], [0.0, 0.1])
    """

    trajectory: np.ndarray  # x^0 .. x^steps on S
    neighbour: np.ndarray  # x^0 .. x^steps on S'
    gradient_gap: float  # |G_S(0) - G_S'(0)| = 2 a / n
    loss_gap: float  # |loss(x(S), +1) - loss(x(S'), +1)| at the end; 2 a tanh(eta) after one step


def scalar_obstruction(
    samples: int, lr: float, steps: int = 1, slope: float = 0.5, loss_bound: float = 1.0
) -> Obstruction:
    """Return an example in which one sample decides the direction of a step of the exact sign.

    Scalar Muon with β = 0 runs on loss(x, z) = B/2 + a z tanh x, with z = +1 or -1. The data set S
    contains (n+1)/2 times +1 and (n-1)/2 times -1. In S' one +1 is replaced by -1. The gradients at
    0 are a/n and -a/n, and after one step the models are 2 η apart for every n.

    Args:
        samples: Number of samples n, odd.
        lr: Step size η.
        steps: Number of steps.
        slope: The factor a of the loss, with 0 < a <= B/2.
        loss_bound: Length B of the interval that contains all losses.

    Returns:
        Both trajectories and their distances.

    Raises:
        InputError: If `samples` is even, or a number is out of range.

    Example:
        >>> from fedmuon.analysis import scalar_obstruction
        >>> found = scalar_obstruction(samples=1001, lr=0.1)
        >>> round(found.gradient_gap, 6), round(found.loss_gap, 4)
        (0.000999, 0.0997)
    """
    if whole("samples", samples) % 2 == 0:
        raise InputError(
            f"samples is {samples}, but it must be odd, so that +1 is in the majority in one data "
            "set and -1 in the other."
        )
    if not 0 < slope <= loss_bound / 2:
        raise InputError(
            f"slope is {slope}, but it must be above 0 and at most loss_bound / 2 = "
            f"{loss_bound / 2:g}. Use a smaller slope or a larger loss_bound."
        )
    entries("samples", samples)
    data = np.repeat([1.0, -1.0], [(samples + 1) // 2, samples // 2])
    other = data.copy()
    other[0] = -1.0
    rate, count = at_least("lr", lr), entries("steps", whole("steps", steps))
    gradients, paths = [], []
    for z in (data, other):
        at_zero = slope * float(z.sum()) / len(z)  # a mean(z) / cosh^2 x at x = 0
        path = np.zeros(count + 1)
        for k in range(count):
            gradient = at_zero * (1 - math.tanh(path[k]) ** 2)
            path[k + 1] = path[k] - rate * np.sign(gradient)
        gradients.append(at_zero)
        paths.append(path)
    first, second = paths
    loss_gap = slope * abs(math.tanh(first[-1]) - math.tanh(second[-1]))
    return Obstruction(first, second, abs(gradients[0] - gradients[1]), loss_gap)


def path_certificate(
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
    """Return the certificate of a finished run, with one Lipschitz constant per sign call.

    The certificate is never worse than the best tube of `tube_certificate`.

    Args:
        smallest: Lower bound of the smallest singular value s_q(M) of the momentum. Pass one number
            for all calls, or one number per call `[R, E, K]`.
        schedule: Participants of each round `[R, K]`, integers.
        sensitivity: Sensitivity Δ_i of each client `[N]`.
        lr: Step size η, one number or one per round `[R]`.
        method: The recursion of the optimizer. Pass a number β for FedMuon with momentum β.
        l_g: Smoothness L_g, one number or one per step `[R, E]`.
        local_steps: Number of local steps E in a round.
        scale: Factor of Δ_i at each step, one number or `[R, E]`.
        shares: Weights of the server's average `[R, K]`; 1/K by default.

    Returns:
        The gap γ that holds for all neighbours, the largest Lipschitz constant of a call as
        `l_orth`, and the certificates.

    Raises:
        Uncertified: If s_q of a neighbour's momentum may reach 0. The error names the first such
            call.
        InputError: If the shapes do not match.

    Example:
        >>> from fedmuon.analysis import path_certificate, tube_certificate
        >>> run = (1.0, [[0], [1]], [0.01, 0.01], 0.1, 0.9, 1.0)
        >>> path, tube = path_certificate(*run), tube_certificate(*run)
        >>> bool((path.perturbation <= tube.perturbation).all())
        True
    """
    rule = method if isinstance(method, Method) else Method(method)
    run = sign_run(smallest, schedule, sensitivity, lr, rule.beta, l_g, local_steps, scale)
    averaged = np.ones(run.schedule.shape) if shares is None else shares
    x, m = np.zeros((2, len(run.sensitivity)))  # distances for a replacement in each client
    radii = np.zeros(run.gaps.shape)  # distances of the direction t, maximum over replaced clients
    for r, cohort in enumerate(run.schedule):
        replaced = np.arange(len(x))[:, None] == cohort  # [replaced client, participant]
        hit, shrink = replaced * run.sensitivity[:, None], abs(1 - run.lr[r] * rule.decay)
        xs, ms = (
            np.repeat(distance[:, None], len(cohort), 1) for distance in (x, m * (not rule.afresh))
        )
        for k, gaps in enumerate(run.gaps[r]):
            fresh = rule.fresh * (run.l_g[r, k] * xs + run.scale[r, k] * hit)  # f g in (1)
            ms = rule.beta * ms + fresh
            apart = rule.beta * ms + fresh if rule.looks_ahead else ms  # t in (1)
            radii[r, k] = apart.max(0)
            run.refuse_where(
                ~(radii < run.gaps), "a neighbour may have a momentum without full rank"
            )
            xs = shrink * xs + run.lr[r] * 2 * apart / (2 * gaps - apart)  # (*) replaces L t
        x, m = (np.average(distance, 1, averaged[r]) for distance in (xs, ms))
    gamma = float((run.gaps - radii).min())
    return Tube(gamma, float((2 / (2 * run.gaps - radii)).max()), saturated(x))


Error = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (values [K, q], radii [N, K]) -> [N, K]
TINY = np.finfo(float).tiny
NEAR = (
    "The run's errors |T(M) - S(M)|_F were measured in the run. S is the orthogonalizer of the "
    "bound."
)


def drift(errors: ArrayLike, lr: float, beta: float, l_orth: float, l_g: float) -> float:
    """Return the bound D on the distance between the final models of the runs with T and with S.

    `errors` contains the errors of T at each call. The module docstring states the formula for D.
    """
    array = np.asarray(errors, dtype=float)
    if array.ndim != 3 or not array.size:
        raise InputError(
            f"errors has shape {array.shape}, but its shape must be [rounds, local steps, "
            "participants per round]."
        )
    if not (array >= 0).all():
        raise InputError(
            "errors contains a negative number or NaN, but every entry must be at least 0."
        )
    change, _ = recursion.increment(lr, beta, l_orth, l_g)
    with np.errstate(over="ignore", invalid="ignore"):
        growth = 1 + recursion.first_rows(change, array.shape[0] * array.shape[1])[:, 0]
        pushed = array.mean(2).ravel()[::-1]  # the last call is not amplified
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
    """For each client, bound the distance between the final models of the run and of a neighbour.

    The bound holds for all neighbours of the run with the map T. `values` is an array [R, E, K, q]
    of the singular values of the momentum at each call. The singular values that T returns must be
    at most 1.
    """
    hits, singular = checks.values("sensitivity", sensitivity), np.asarray(values, dtype=float)
    cohorts = checks.rounds_of(schedule, len(hits))
    if singular.ndim != 4 or (len(singular), singular.shape[2]) != cohorts.shape:
        raise InputError(
            f"values has shape {singular.shape}, but its shape must be [rounds, local steps, "
            f"participants per round, q] with {cohorts.shape[0]} rounds and {cohorts.shape[1]} "
            "participants per round, as in the schedule."
        )
    if not (singular >= 0).all():
        raise InputError(
            "values contains a negative number or NaN, but singular values are at least 0."
        )
    x, m = np.zeros((2, len(hits)))
    for cohort, calls in zip(cohorts, singular, strict=True):
        hit = (np.arange(len(hits))[:, None] == cohort) * hits[:, None]
        xs, ms = (np.repeat(distance[:, None], len(cohort), 1) for distance in (x, m))
        for call in calls:
            ms = beta * ms + (1 - beta) * (l_g * xs + hit)
            apart = error(call, 0 * ms) + l_orth * ms + error(call, ms)
            xs = xs + lr * np.minimum(apart, 2 * math.sqrt(call.shape[1]))
        x, m = xs.mean(1), ms.mean(1)
    return x


def furthest(
    values: np.ndarray, radius: np.ndarray, lam: float, own: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the largest error e* = sup ||T(M') - S(M')||_F near the given singular values.

    `values` has shape [K, q], `radius` has shape [N, K], and the result has shape [N, K]. The
    supremum is over all M' whose singular values are within `radius` of `values`. S is the smoothed
    polar factor. T maps a singular value s to own(s / ||M'||_F), where `own` must be nondecreasing.

    Both maps increase with s, and T decreases as the norm ||M'||_F increases. So each singular
    value of T - S lies between the minimum of T minus the maximum of S, and the maximum of T minus
    the minimum of S.
    """
    size, reach = np.linalg.norm(values, axis=-1)[..., None], radius[..., None]
    low, high = np.maximum(values - reach, 0), values + reach
    ratio = np.minimum(1, high / np.maximum(size - reach, TINY))
    smallest = own(low / np.maximum(size + reach, TINY)) - high / np.sqrt(high**2 + lam)
    largest = own(ratio) - low / np.sqrt(low**2 + lam)
    return np.linalg.norm(np.maximum(np.abs(smallest), np.abs(largest)), axis=-1)


def transferred(found: Bound, loss_lipschitz: float, moved: float) -> Bound:
    """Convert a bound for the run with the map S into a bound for the run with the map T.

    `moved` is D, an upper bound on the distance between the final models of the two runs.
    """
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
    """Return the certificate of Remark D.1 for Newton-Schulz that starts from M / ||M||_F.

    `norms` contains the norms ||M||_F at all calls, in the shape of `smallest` in
    `tube_certificate`. If the norms are at least nu at all calls, the map is slope/nu-Lipschitz.
    For neighbours, ||M'||_F >= ||M||_F - radius, just as s_q(M') >= s_q(M) - radius by Weyl's
    inequality. So Lemma D.12 holds with ||M||_F in place of s_q. The recursion of the lemma uses L
    only in the product lr L, so this function scales the step size instead of L.
    """
    options = {"steps": steps, "coefficients": coefficients, "eps": 1.0, "normalization": "max"}
    slope, factor = lipschitz("newton-schulz", kind, **options), 2 if kind == "paper" else 1
    step = (lr * slope / factor, beta, l_g, local_steps, kind)
    try:
        tube = tube_certificate(norms, schedule, sensitivity, *step)
    except Uncertified as error:
        raise Uncertified(
            f"The smallest singular value s_q was replaced by the norm |M|_F. {error}"
        ) from None
    return replace(tube, l_orth=slope / tube.gamma)
