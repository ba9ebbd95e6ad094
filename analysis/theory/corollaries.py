"""Bounds that follow from the stability of a run: corollaries, rates, and certified unlearning.

Corollaries
-----------
Each corollary of the Stability note combines the Lipschitz constant of an orthogonalizer, an
exposure, and the generalization bound.

A `Run` describes the training. The participation (`Realized` or `Uniform`) describes which clients
take part in each round. `smoothed_polar` (Corollary D.2), `newton_schulz` (D.5) and
`gaussian_smoothed_sign` (D.11) look up the constant L of their orthogonalizer and call `theorem`.
`theorem` combines Theorem 4.1 with Corollary 4.2 (full batches), Corollary 4.3 (random
participation) or Theorem J.1 (known batches). `full_participation` (Corollary K.2) and
`partial_participation` (K.3) return the bound and its rate for equal clients.

Certified unlearning by output perturbation
-------------------------------------------
After samples are removed, noise on the model can hide that they were training data.
`noise_multiplier` computes how much noise is needed.

**Removing a sample moves the model no further than replacing it.** Let client i have n_i >= 2
samples and lose the sample z. The client's full-batch gradient grad F is the mean over all n_i
samples, and grad F' is the mean over the remaining samples:

    grad F - grad F' = (g_z - grad F') / n_i.

grad F' is a mean of sample gradients, so it lies in the convex hull of these gradients. The convex
hull has the same diameter, diam <= 2 G_max, as the set of gradients. So the difference is at most
diam / n_i. A replacement has the same bound. F' is Lg-smooth, because F' is a mean of Lg-smooth
losses. Let the server's weights not depend on n_i. Then the recursion of the Stability note and the
certificate Delta_i Y_i also hold for the run without z. If several samples are removed, treat them
one after the other. Removal number j of client i, counted from 0, divides by n_i - j. So removing
k_i samples of each client moves X^R by at most

    Delta = sum_i Delta_i Y_i n_i (1/n_i + 1/(n_i - 1) + ... + 1/(n_i - k_i + 1)).

**Noise.** Add sigma N(0, I) to X^R and to the model that retraining would return. The results are
two Gaussians at a distance d <= Delta. The two Gaussians are (epsilon, delta)-indistinguishable, in
both directions, if and only if

    Phi(d/(2 sigma) - epsilon sigma/d) - e^epsilon Phi(-d/(2 sigma) - epsilon sigma/d) <= delta

(Balle and Wang 2018, Theorem 8). The left side rises with d/sigma. The statement is about real
numbers and does not cover rounding errors. sigma must not depend on the samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmuon.analysis.theory import recursion
from fedmuon.analysis.theory.checks import at_least, in_doubles, probability, sample_sizes, whole
from fedmuon.analysis.theory.generalization import INDEPENDENCE, RANGE, Bound, Constant, bound
from fedmuon.analysis.theory.recursion import Method, Rows, Steps, method_amplification
from fedmuon.analysis.theory.trajectories import Reach
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified, lipschitz
from fedmuon.orthogonalize.lipschitz_constants import Kind
from fedmuon.tasks.constants import Constants

COUPLING = (
    "The schedule, the batches and the noise do not depend on the samples, and all sampled "
    "clients replied."
)
REACHED = (
    "X0 does not depend on the samples. So ||X - X0||_op <= {:.4g} at all times, and the losses "
    "lie in an interval of length B = {:.4g}."
)
NONNEGATIVE = "No sample has a negative entry, before or after the replacement."
LIPSCHITZ_LOSS = (
    "Every loss is Lipschitz with the constant L_loss in the Frobenius norm (Assumption 4.3)."
)
GRADIENTS = (
    "The gradient of every sample is Lg-Lipschitz, and its norm is at most G_max (Assumption 4.4)."
)
GLOBAL_MAP = "Every orthogonalization call is L_orth-Lipschitz on all matrices (Condition 4.1)."
UNIFORM = (
    "Each round draws K of N clients uniformly and independently (Corollary 4.3: failure + rho)."
)
NO_CLIPPING = (
    "Fresh Gaussian noise keeps the smallest singular value s_q above gamma at every call (D.11: "
    "failure + alpha)."
)
LAW = (
    "With the aggregate 'by-samples', a client's weight in a round depends on the other "
    "participants, so the bound needs the schedule of a run. Pass a run folder, or set "
    "[federation] aggregate = 'mean'."
)
MEASURED = "The constants L_loss, Lg and G_max are estimates, because no proof covers this model."


@dataclass(frozen=True)
class Run:
    """A run of Algorithm 1 of the Stability note, with the constants of its task.

    Attributes:
        lr: Step size η.
        beta: Momentum β.
        rounds: Number of rounds R.
        local_steps: Number of local steps E in a round.
        sizes: Number of samples n_i of each client `[N]`.
        weights: Weight p_i of each client `[N]`.
        constants: Constants of the task. If `reach` is set, these are the constants of the final
            model.
        proved: Whether a proof guarantees the constants. Use False for estimated constants.
        batch: Mini-batch size. Use 0 for full batches.
        factors: Factor of the step size in each round `[R]`. Use None if the factor is always 1.
        reach: Constants of every step, if known.
        method: The recursion of the optimizer. Use None for the recursion of FedMuon.
        by_samples: Whether the server weights its participants by their sample sizes n_i.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(10, 100), np.full(10, 0.1)
        >>> run = Run(lr=1e-4, beta=0.9, rounds=50, local_steps=1, sizes=sizes, weights=weights,
        ...           constants=constants())
        >>> run.proved
        True
    """

    lr: float
    beta: float
    rounds: int
    local_steps: int
    sizes: np.ndarray
    weights: np.ndarray
    constants: Constants
    proved: bool = True
    batch: int = 0
    factors: np.ndarray | None = None
    reach: Reach | None = None
    method: Method | None = None
    by_samples: bool = False


@dataclass(frozen=True)
class Realized:
    """Participation with a known schedule: the clients of every round.

    Attributes:
        schedule: Participants of each round `[R, K]`, as integers.
        rows: Function `(round, client, local step, n_i)` that returns the rows in the batch. If
            `rows` is None, every batch of a client may contain the replaced sample.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Realized
        >>> Realized(np.array([[0, 1], [1, 2]])).rows is None
        True
    """

    schedule: np.ndarray
    rows: Rows | None = None


@dataclass(frozen=True)
class Uniform:
    """Random participation: in each round, K of N clients are chosen uniformly.

    The random choice adds ρ to the failure probability of the bound.

    Attributes:
        per_round: Number of participants K.
        rho: Failure probability ρ of the random choice of participants.

    Example:
        >>> from fedmuon.analysis import Uniform
        >>> Uniform(per_round=10, rho=0.01).per_round
        10
    """

    per_round: int
    rho: float


Participation = Realized | Uniform


def theorem(
    run: Run,
    l_orth: float,
    participation: Participation,
    delta: float,
    c_hp: Constant = "explicit",
    *,
    shares: tuple[float, float] = (0.5, 0.5),
    assumptions: tuple[str, ...] = (GLOBAL_MAP,),
    other_failure: float = 0.0,
) -> Bound:
    """Return the bound of Theorem 4.1 for an orthogonalizer with a proved Lipschitz constant.

    The bound covers full batches (Stability note, eq. (14)) and mini-batches (eq. (17)).

    Args:
        run: The run: its steps, clients and constants.
        l_orth: Lipschitz constant L of the orthogonalizer.
        participation: What is known about the participants: `Realized` or `Uniform`.
        delta: Failure probability δ of the two branches of the bound.
        c_hp: The constant of the branch H: "explicit" or "sharp" (both proved), "variance", or a
            number.
        shares: Parts of δ for the branches H and G.
        assumptions: Assumptions on the orthogonalizer, as sentences.
        other_failure: Probability of other failures, added to δ.

    Returns:
        The bound with its assumptions.

    Raises:
        InputError: If a number is out of range.
        Uncertified: If no certificate is known for this participation.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, Uniform, theorem
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(100, 1000), np.full(100, 0.01)
        >>> run = Run(lr=1e-4, beta=0.9, rounds=100, local_steps=1, sizes=sizes, weights=weights,
        ...           constants=constants())
        >>> found = theorem(run, 3.2, Uniform(per_round=10, rho=0.01), delta=0.05)
        >>> found.status, round(found.value, 4), round(found.failure, 3)
        ('certified', 0.0045, 0.06)
    """
    stood_on = (INDEPENDENCE, RANGE, LIPSCHITZ_LOSS, GRADIENTS, COUPLING, *assumptions)
    if isinstance(participation, Uniform) and participation.per_round < len(run.sizes):
        stood_on, other_failure = (*stood_on, UNIFORM), other_failure + participation.rho
    return bound(
        stability(run, l_orth, participation),
        run.sizes,
        run.weights,
        delta,
        run.constants.loss_bound,
        c_hp,
        shares=shares,
        status="certified" if run.proved else "estimated",
        assumptions=stood_on if run.proved else (*stood_on, MEASURED),
        other_failure=other_failure,
    )


def stability(run: Run, l_orth: float, participation: Participation) -> np.ndarray:
    """Return ε_i, the maximum change of any loss if one sample of client i is replaced.

    The source is the Stability note, eqs. (13) and (16) and Theorem J.1.

    Args:
        run: The run: its steps, clients and constants.
        l_orth: Lipschitz constant L of the orthogonalizer.
        participation: What is known about the participants: `Realized` or `Uniform`.

    Returns:
        ε_i `[N]`.

    Raises:
        Uncertified: If no certificate is known for this participation.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Realized, Run, stability
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(2, 100), np.full(2, 0.5)
        >>> run = Run(0.01, 0.9, 2, 1, sizes, weights, constants())
        >>> bool((stability(run, 3.2, Realized(np.array([[0], [0]]))) >= 0).all())
        True
    """
    moved = certificate(run, l_orth, participation)
    return recursion.loss_stability(moved, run.constants.lipschitz, run.constants.loss_bound)


def certificate(run: Run, l_orth: float, participation: Participation) -> np.ndarray:
    """Return Δ_i Y_i, the maximum change of the final model if a sample of client i is replaced.

    The change is measured in the Frobenius norm (Stability note, Appendices F and J). One replaced
    sample changes the gradient at step (s, k) by at most diam_{s,k} / n_i. If `run.reach` is set,
    a_{s,k} is therefore multiplied by diam_{s,k} / (2 G_max).

    Args:
        run: The run: its steps, clients and constants.
        l_orth: Lipschitz constant L of the orthogonalizer.
        participation: What is known about the participants: `Realized` or `Uniform`.

    Returns:
        The certificates `[N]`. The certificate of a client that never participates is 0.

    Raises:
        Uncertified: If no certificate is known for this participation.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Realized, Run, certificate
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(2, 100), np.full(2, 0.5)
        >>> run = Run(0.01, 0.9, 2, 1, sizes, weights, constants())
        >>> float(certificate(run, 3.2, Realized(np.array([[0], [0]])))[1])
        0.0
    """
    steps = amplified(run, l_orth)
    clients, top = len(run.sizes), run.constants.gradient_bound
    if isinstance(participation, Uniform):
        a = recursion.of_rounds(steps)
        if not run.by_samples or np.all(run.sizes == run.sizes[0]):  # then each weight is 1/K
            psi = recursion.psi(a, clients, participation.per_round, participation.rho)
            return recursion.perturbation(sensitivity(run), np.full(clients, psi))
        if participation.per_round < clients:
            raise Uncertified(LAW)
        by_size = recursion.product(run.sizes / run.sizes.sum(), a.sum())  # all participate
        return recursion.perturbation(sensitivity(run), by_size)
    shares = recursion.by_samples(participation.schedule, run.sizes) if run.by_samples else None
    if run.batch and participation.rows is not None:
        drawn = recursion.batch_exposure(
            steps, participation.schedule, run.sizes, participation.rows, shares
        )
        return recursion.perturbation(np.full(clients, 2 * top), drawn)
    realized = recursion.exposure(
        recursion.of_rounds(steps), participation.schedule, clients, shares
    )
    return recursion.perturbation(sensitivity(run), realized)


def amplified(run: Run, l_orth: float) -> np.ndarray:
    """Return a_{s,k} of the run as an array [R, E], multiplied by `scale_of` at each step."""
    smooth = run.reach.smoothness if run.reach else run.constants.smoothness
    step = run.lr, run.beta, l_orth, smooth
    if run.method is not None:
        rates = run.lr * (np.ones(run.rounds) if run.factors is None else run.factors)
        steps = method_amplification(run.method, rates, l_orth, smooth, run.local_steps)
    elif run.factors is None:
        steps = recursion.step_amplification(*step, run.rounds, run.local_steps)
    else:
        steps = recursion.scheduled_amplification(*step, run.factors, run.local_steps)
    return steps if run.reach is None else recursion.product(scale_of(run), steps)


def scale_of(run: Run) -> Steps:
    """Return the factor by which the sensitivity Delta_i is multiplied at each step.

    The factor is diam_{s,k} / (2 G_max). Without a `reach`, the factor is 1.
    """
    return run.reach.diameters / (2 * run.constants.gradient_bound) if run.reach else 1.0


def sensitivity(run: Run) -> np.ndarray:
    """Return the sensitivity Delta_i of each client.

    For full batches, Delta_i is 2 G_max / n_i. For mini-batches of size b, Delta_i is 2 G_max /
    min(b, n_i) (Stability note, Remark 4.1).
    """
    top = run.constants.gradient_bound
    if run.batch:
        return recursion.mini_batch_sensitivity(top, run.batch, run.sizes)
    return recursion.full_batch_sensitivity(top, run.sizes)


def smoothed_polar(
    run: Run, lam: float, participation: Participation, delta: float, **given: Any
) -> Bound:
    """Return the bound for smoothed polar, with L = 1/sqrt(λ) (Stability note, Corollary D.2).

    Args:
        run: The run: its steps, clients and constants.
        lam: Smoothing λ > 0.
        participation: What is known about the participants: `Realized` or `Uniform`.
        delta: Failure probability δ of the two branches of the bound.
        given: Further arguments of `theorem`: `c_hp`, `shares`.

    Returns:
        The bound with its assumptions.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, Uniform, smoothed_polar
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(100, 1000), np.full(100, 0.01)
        >>> run = Run(1e-4, 0.9, 100, 1, sizes, weights, constants())
        >>> smoothed_polar(run, 0.1, Uniform(10, 0.01), delta=0.05).status
        'certified'
    """
    l_orth = lipschitz("smoothed-polar", "sharp", lam=lam)
    return theorem(run, l_orth, participation, delta, **given)


def newton_schulz(
    run: Run,
    participation: Participation,
    delta: float,
    *,
    kind: Kind = "sharp",
    polynomial: dict[str, Any],
    **given: Any,
) -> Bound:
    """Return the bound for Newton–Schulz (Stability note, Corollary D.5).

    Args:
        run: The run: its steps, clients and constants.
        participation: What is known about the participants: `Realized` or `Uniform`.
        delta: Failure probability δ of the two branches of the bound.
        kind: The Lipschitz constant: "paper" is the published constant, and "sharp" is never
            larger.
        polynomial: Arguments of the orthogonalizer: `steps`, `coefficients`, `eps`,
            `normalization`.
        given: Further arguments of `theorem`: `c_hp`, `shares`.

    Returns:
        The bound with its assumptions.

    Raises:
        Uncertified: If the constant overflows, or is not known.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, Uniform, newton_schulz
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(100, 1000), np.full(100, 0.01)
        >>> run = Run(1e-5, 0.9, 100, 1, sizes, weights, constants())
        >>> steps = {"steps": 5, "eps": 0.1}
        >>> newton_schulz(run, Uniform(10, 0.01), 0.05, polynomial=steps).status
        'certified'
    """
    l_orth = lipschitz("newton-schulz", kind, **polynomial)
    if not np.isfinite(l_orth):
        raise Uncertified(
            "The Lipschitz constant of this Newton-Schulz orthogonalizer exceeds double "
            "precision. Use kind='sharp'."
        )
    return theorem(run, l_orth, participation, delta, **given)


@in_doubles
def gaussian_smoothed_sign(
    run: Run,
    participation: Participation,
    delta: float,
    *,
    sigma: float,
    alpha: float,
    shape: tuple[int, int],
    kind: Kind = "sharp",
    **given: Any,
) -> Bound:
    """Return the bound for sign(M + sigma H) (Stability note, Corollary D.11).

    A run calls this orthogonalizer R E K times for each matrix. The theorem holds for a clipped
    version of the orthogonalizer. If clipping changes no call, the run does not change.

    Args:
        run: The run: its steps, clients and constants.
        participation: What is known about the participants: `Realized` or `Uniform`.
        delta: Failure probability δ of the two branches of the bound.
        sigma: Noise level σ.
        alpha: Probability that clipping changes at least one call. alpha is added to the failure
            probability.
        shape: Shape (m, n) of the matrix.
        kind: The Lipschitz constant: "paper" is the published constant, and "sharp" is never
            larger.
        given: Further arguments of `theorem`: `c_hp`, `shares`.

    Returns:
        The bound with its assumptions.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, Uniform, gaussian_smoothed_sign
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(100, 1000), np.full(100, 0.01)
        >>> run = Run(1e-6, 0.9, 10, 1, sizes, weights, constants())
        >>> noise = {"sigma": 1.0, "alpha": 0.01, "shape": (20, 4)}
        >>> round(gaussian_smoothed_sign(run, Uniform(10, 0.01), 0.05, **noise).failure, 2)
        0.07
    """
    realized = isinstance(participation, Realized)
    per_round = participation.schedule.shape[1] if realized else participation.per_round
    calls = whole("rounds", run.rounds) * whole("local_steps", run.local_steps)
    calls *= whole("per_round", per_round)
    alpha = probability("alpha", alpha)
    noise = {"sigma": sigma, "alpha": alpha, "calls": calls, "shape": shape}
    l_orth = lipschitz("gaussian-smoothed-sign", kind, **noise)
    given |= {"assumptions": (NO_CLIPPING,), "other_failure": alpha}
    return theorem(run, l_orth, participation, delta, **given)


@dataclass(frozen=True)
class Rate:
    """The bound for equal clients, and the rate at which the bound falls.

    Attributes:
        bound: The bound. The field `h` of the bound is eq. (27) of the Stability note, or the
            corresponding equation of Corollary K.3, with log(2n) in place of log(4n).
        eps: The stability ε that all clients share.
        amplified: The constant of the rate. In Corollary K.2 the constant is C_amp, where sum_s a_s
            = C_amp η L E R. In Corollary K.3 the constant is C_a, where max_s a_s = C_a η L E.
        order: The rate with the constant `amplified`, but without logarithms and without C_hp.
            `order` is not a bound.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, full_participation
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(10, 100), np.full(10, 0.1)
        >>> run = Run(1e-4, 0.9, 50, 1, sizes, weights, constants())
        >>> rate = full_participation(run, 3.2, delta=0.05)
        >>> rate.order < rate.bound.value
        True
    """

    bound: Bound
    eps: float
    amplified: float
    order: float


def full_participation(run: Run, l_orth: float, delta: float, c_hp: Constant = "explicit") -> Rate:
    """Return the bound and rate if all N equal clients participate (Stability note, eq. (27)).

    The stability is ε = (2 G_max L_loss / n) sum_s a_s. The bound falls like G L C η L E R / n + B
    / sqrt(n).

    Args:
        run: A run with equal n_i, p_i = 1/N and full batches.
        l_orth: Lipschitz constant L of the orthogonalizer.
        delta: Failure probability δ of the two branches of the bound.
        c_hp: The constant of the branch H: "explicit" or "sharp" (both proved), "variance", or a
            number.

    Returns:
        The bound and its rate.

    Raises:
        InputError: If clients differ, or batches are not full.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, full_participation
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(10, 100), np.full(10, 0.1)
        >>> run = Run(1e-4, 0.9, 50, 1, sizes, weights, constants())
        >>> round(full_participation(run, 3.2, delta=0.05).eps, 6)
        3e-06
    """
    a, clients = _amplified(run, l_orth), len(run.sizes)
    samples, total = equal_clients(run) * clients, float(a.sum())
    slope = run.constants.gradient_bound * run.constants.lipschitz
    order = slope * total / samples + run.constants.loss_bound / math.sqrt(samples)
    # At K = N the schedule is not random, so this value of rho has no effect.
    result = theorem(run, l_orth, Uniform(clients, 0.5), delta, c_hp)
    pace = run.lr * l_orth * run.local_steps * run.rounds  # 0 for a run that does not move
    return Rate(result, 2 * slope / samples * total, total / pace if pace else 0.0, order)


def partial_participation(
    run: Run, l_orth: float, per_round: int, delta: float, rho: float, c_hp: Constant = "explicit"
) -> Rate:
    """Return the bound and rate if K of N equal clients participate (Stability note, K.3).

    The stability is ε = (2 G_max L_loss / m) Ψ(ρ). The field `order` is computed from the largest
    a_s.

    Args:
        run: A run with equal n_i = m, p_i = 1/N and full batches.
        l_orth: Lipschitz constant L of the orthogonalizer.
        per_round: Number of participants K.
        delta: Failure probability δ of the two branches of the bound.
        rho: Failure probability ρ of the random choice of participants.
        c_hp: The constant of the branch H: "explicit" or "sharp" (both proved), "variance", or a
            number.

    Returns:
        The bound and its rate.

    Raises:
        InputError: If clients differ, or batches are not full.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Run, partial_participation
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(10, 100), np.full(10, 0.1)
        >>> run = Run(1e-4, 0.9, 50, 1, sizes, weights, constants())
        >>> partial_participation(run, 3.2, per_round=2, delta=0.05, rho=0.01).bound.status
        'certified'
    """
    a, size, clients = _amplified(run, l_orth), equal_clients(run), len(run.sizes)
    slope = run.constants.gradient_bound * run.constants.lipschitz
    eps = 2 * slope / size * recursion.psi(a, clients, per_round, probability("rho", rho))
    mean, log = run.rounds / clients, math.log(clients) - math.log(rho)
    wave = math.sqrt(run.rounds * (1 - per_round / clients) / (per_round * clients) * log)
    reach = float(a.max()) * (mean + wave + log / per_round)
    order = slope / size * reach + run.constants.loss_bound / math.sqrt(size * clients)
    result = theorem(run, l_orth, Uniform(per_round, rho), delta, c_hp)
    pace = run.lr * l_orth * run.local_steps
    return Rate(result, eps, float(a.max()) / pace if pace else 0.0, order)


def _amplified(run: Run, l_orth: float) -> np.ndarray:
    smoothness = run.constants.smoothness
    a = recursion.amplification(run.lr, run.beta, l_orth, smoothness, run.rounds, run.local_steps)
    if not math.isfinite(float(a.max()) * len(a)):
        raise InputError(f"There is no convergence rate, because {recursion.OVERFLOW}")
    return a


def equal_clients(run: Run) -> int:
    """Check the conditions of Corollaries K.2 and K.3, and return m, the n_i of every client.

    The corollaries also require p_i = 1/N, full batches and the recursion of FedMuon.
    """
    sizes, weights = sample_sizes(run.sizes), np.asarray(run.weights)
    if (sizes != sizes[0]).any() or not np.allclose(weights, 1 / len(sizes), rtol=1e-9):
        raise InputError(
            "the clients have different sizes or weights, but Corollaries K.2 and K.3 need equal "
            "sizes and equal weights (p_i = 1/N). Use the function `theorem` instead."
        )
    if run.batch:
        raise InputError(
            f"batch is {run.batch}, but Corollaries K.2 and K.3 need full batches. Set batch to "
            "0, or use the function `theorem` instead."
        )
    changing = {
        "the recursion of FedMuon": run.method is not None,
        "the same step size in every round": run.factors is not None,
        "the same constants at every step": bool(run.reach),
        "equal weights of the participants": run.by_samples,
    }
    if violated := [name for name, changes in changing.items() if changes]:
        raise InputError(
            f"Corollaries K.2 and K.3 need {violated[0]}, which this run does not have. Use the "
            "function `theorem` instead."
        )
    return int(sizes[0])


FAR = 1e9  # search range of d / sigma: from 1 / FAR to FAR
PRECISION = 1e-12
ROUNDING = 1e-6  # relative rounding error of delta at the smallest shifts


def removal(certificates: np.ndarray, sizes: np.ndarray, leaving: Mapping[int, int]) -> float:
    """Return an upper bound on the distance by which the final model moves if samples are removed.

    Client i loses leaving[i] samples. `certificates` contains Delta_i Y_i of each client, and
    `sizes` contains n_i of each client.
    """
    moved = 0.0
    for client, count in leaving.items():
        size = int(sizes[client])
        if count >= size:
            raise InputError(
                f"client {client} would lose all of its {size} samples. Leave the client at "
                "least one sample."
            )
        shares = sum(1 / (size - gone) for gone in range(count))
        moved += float(certificates[client]) * size * shares
    return moved


def indistinguishable(shift: float, epsilon: float) -> float:
    """Return the delta at which two unit Gaussians are (epsilon, delta)-indistinguishable.

    The distance of the Gaussians is `shift` = d/sigma. The result is the smallest such delta: the
    left side of the inequality in the module docstring. Let a = shift/2 - epsilon/shift and b = a -
    shift. Then phi(a) = e^epsilon phi(b), so delta is phi(a) times the difference of Mills' ratios
    at -a and -b. This form of the formula loses no significant digits.
    """
    from scipy.special import erfcx, log_ndtr, ndtr  # imported late, as bounds do not need SciPy

    shift, epsilon = at_least("shift", shift), at_least("epsilon", epsilon)
    if shift == 0:
        return 0.0
    a, root = shift / 2 - epsilon / shift, math.sqrt(2)
    if a > 0:
        return float(ndtr(a)) - math.exp(min(epsilon + float(log_ndtr(a - shift)), 0.0))
    ratios = float(erfcx(-a / root)) - float(erfcx((shift - a) / root))
    return max(0.0, math.exp(-a * a / 2) / 2 * ratios)


def noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier sigma / Delta that hides the removal of samples.

    With this noise, the result is (epsilon, delta)-indistinguishable from a run without the
    samples. The multiplier is rounded up.
    """
    if not 0 <= epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}, but it must be a finite number that is at least 0")
    low, high = 1 / FAR, FAR  # range of the shift d / sigma
    delta = probability("delta", delta)
    if indistinguishable(low, epsilon) > delta:
        raise InputError(
            f"epsilon = {epsilon:g} and delta = {delta:g} are too small, because the noise would "
            f"exceed {FAR:g} times the certificate. Use a larger epsilon or delta."
        )
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if indistinguishable(middle, epsilon) <= delta else (low, middle)
    return (1 + ROUNDING) / low
