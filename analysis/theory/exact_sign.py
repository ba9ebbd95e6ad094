"""The exact sign: why it needs help (001, Proposition D.6), and where it does not.

Inside a spectral-gap tube it needs none: Lemma D.12, for one realized run.

Let sigma_tau be the smallest singular value s_q of the run's momentum at sign call tau. A gap
gamma certifies the run if at every call, for every replaced client c,

    radius_{c,tau}(L) + gamma <= sigma_tau,     L = 1/gamma,

where radius is Delta_c times the momentum component of the recursion up to this call. For then, by
induction over the calls, the neighbour's momentum at tau is within the radius (the momentum moves
before the sign is taken, so this uses the sign's constant at earlier calls only), Weyl's inequality
keeps its s_q >= gamma, both momenta lie in {s_q >= gamma}, and there the sign is 1/gamma-Lipschitz
(Lemma D.7). The paper asks for more, sigma >= 2 gamma and radius <= gamma, at L = 2/gamma.

Which gamma? The radius is a polynomial in L with coefficients >= 0, so it is convex in gamma at
L = 1/gamma, and so is the worst violation over all calls: the good gammas form an interval. Its
right end gives the smallest L. In the paper's form the radius only falls as gamma grows, so
gamma = min sigma / 2 is the best and the only one to try.

**In the quotient.** Where every gradient's rows sum to 0, G 1 = 0, as a softmax's do, the momentum
[d, c] has no full rank, and yet all of this holds with sigma_tau = s_{min(d, c-1)}. Let the columns
of Q [c, c-1] be an orthonormal basis of the vectors across from 1. M is a weighted sum of
gradients, so M = N Q^T with N = M Q, whose singular values are those of M but for one 0 (if
d >= c). From N = U S V^T follows M = U S (Q V)^T, hence sign(M) = sign(N) Q^T. Right multiplication
by Q^T keeps Frobenius norms: distances of momenta, of signs, and so of models are those in
R^{d x (c-1)}, where the lemma is applied; Lg and Delta bound norms, which are the same there.

`call_by_call` needs no gamma.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedmuon.analysis.theory.checks import at_least, entries, rounds_of, values, whole
from fedmuon.analysis.theory.recursion import Steps, by_step, transition
from fedmuon.analysis.theory.search import least
from fedmuon.core.errors import InputError
from fedmuon.orthogonalize import Uncertified
from fedmuon.orthogonalize.certificates import Kind

SCOPE = (
    "It holds for this run on this sample and its neighbours; Theorem 4.1 would need the same "
    "tube for every sample (Remark D.2)."
)


@dataclass(frozen=True)
class Tube:
    """A gap that every neighbour keeps, the sign's constant there, and what follows."""

    gamma: float
    l_orth: float
    perturbation: np.ndarray  # [N]: ||X^R(S) - X^R(S')||_F for every neighbour in client i
    scope: str = SCOPE


def certify(
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
    """The certificate of Lemma D.12, or a refusal that names the first call which fails.

    `smallest` is a floor of s_q(M) at all calls, or one number for each call, [R, E, K] in the
    order of the schedule [R, K]; `sensitivity` is Delta_i [N]; `lr` is one number, or [R]; `l_g`
    and `scale`, which Delta_i is times, may be given for each step [R, E].
    """
    run = sign_run(smallest, schedule, sensitivity, lr, beta, l_g, local_steps, scale)
    gamma = _paper_gap(run) if kind == "paper" else _sharp_gap(run)
    l_orth = (2 if kind == "paper" else 1) / gamma
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
    """The run, if its momentum has full rank at every call."""
    moved = values("sensitivity", sensitivity)
    chosen = rounds_of(schedule, len(moved))
    calls = (len(chosen), local_steps, chosen.shape[1])
    given = np.asarray(smallest, dtype=float)
    if given.ndim and given.shape != calls:
        raise InputError(f"smallest has shape {given.shape}: give one number or an array {calls}.")
    rates = np.broadcast_to(np.asarray(lr, dtype=float), len(chosen))
    if not (np.isfinite(rates).all() and (rates >= 0).all() and np.isfinite(moved).all()):
        raise InputError("lr and sensitivity must be finite numbers that are at least 0.")
    if not (given >= 0).all():
        raise InputError("smallest holds a negative number or a NaN: singular values are >= 0.")
    smooth, hits = (by_step(one, *calls[:2]).reshape(calls[:2]) for one in (l_g, scale))
    run = SignRun(np.broadcast_to(given, calls), chosen, moved, rates, beta, smooth, hits)
    run.refuse_where(run.gaps <= 0, "the momentum has no full rank")
    return run


@dataclass(frozen=True)
class SignRun:
    """A run as its sign calls see it: `gaps` [R, E, K] are s_q, `l_g` and `scale` [R, E]."""

    gaps: np.ndarray
    schedule: np.ndarray
    sensitivity: np.ndarray
    lr: np.ndarray
    beta: float
    l_g: np.ndarray
    scale: np.ndarray

    def propagate(self, l_orth: float) -> tuple[np.ndarray, np.ndarray]:
        """max_c radius_{c,tau} [R, E, K] and ||dX^R|| for a replacement in each client [N]."""
        server = np.zeros((len(self.sensitivity), 2))
        radii = np.empty(self.gaps.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            for r, cohort in enumerate(self.schedule):
                others = own = server
                for k, smooth in enumerate(self.l_g[r].tolist()):
                    step, kick = transition(float(self.lr[r]), self.beta, l_orth, smooth)
                    others = others @ step.T
                    own = own @ step.T + self.scale[r, k] * self.sensitivity[:, None] * kick
                    # Another client's radius never exceeds its own, so c = i need not be left out.
                    radii[r, k] = np.maximum(own[cohort, 1], others[:, 1].max())
                server = others.copy()
                server[cohort] += (own[cohort] - others[cohort]) / len(cohort)
        return np.nan_to_num(radii, nan=np.inf, posinf=np.inf), server[:, 0]

    def refuse_where(self, failing: np.ndarray, why: str) -> None:
        """Name the first call that fails, if one does."""
        if failing.any():
            r, k, position = np.argwhere(failing)[0]
            raise Uncertified(
                f"No tube: at round {r}, local step {k}, client {self.schedule[r, position]}, "
                f"{why} (s_q = {self.gaps[r, k, position]:.3g})."
            )


def _paper_gap(run: SignRun) -> float:
    gamma = float(run.gaps.min()) / 2
    run.refuse_where(
        run.propagate(2 / gamma)[0] > gamma, f"a neighbour leaves the tube of {gamma:.3g}"
    )
    return gamma


def _sharp_gap(run: SignRun) -> float:
    """The largest gamma whose worst violation is at most 0; the violation is convex in gamma."""
    top = float(run.gaps.min())

    def violation(gamma: float) -> float:
        return float((run.propagate(1 / gamma)[0] + gamma - run.gaps).max())

    # where gamma is small the violation may be infinite
    found = top * math.exp(least(lambda log: violation(top * math.exp(log)), -30, 0))
    good, bad = min((found, top), key=violation), top
    outside = run.propagate(1 / good)[0] + good > run.gaps
    run.refuse_where(outside, "a neighbour may lose the gap for every gamma")
    if violation(bad) <= 0:
        return bad
    for _ in range(60):  # bisection that never leaves the good side
        middle = (good + bad) / 2
        good, bad = (middle, bad) if violation(middle) <= 0 else (good, middle)
    return good


@dataclass(frozen=True)
class Obstruction:
    """Two data sets that differ in one of n samples, and what exact sign makes of that."""

    trajectory: np.ndarray  # x^0 .. x^steps on S
    neighbour: np.ndarray  # the same on S'
    gradient_gap: float  # |G_S(0) - G_S'(0)| = 2 a / n
    loss_gap: float  # |loss(x(S), +1) - loss(x(S'), +1)| at the end; 2 a tanh(eta) after one step


def scalar_obstruction(
    samples: int, lr: float, steps: int = 1, slope: float = 0.5, loss_bound: float = 1.0
) -> Obstruction:
    """Scalar Muon with beta = 0 and exact sign on loss(x, z) = B/2 + a z tanh x, z = +1 or -1.

    S holds (n+1)/2 times +1 and (n-1)/2 times -1, S' one +1 less: the gradients at 0 are a/n and
    -a/n, and after one step the models are 2 eta apart for every n.
    """
    if whole("samples", samples) % 2 == 0:
        raise InputError(f"samples = {samples}: the two majorities differ only for an odd number.")
    if not 0 < slope <= loss_bound / 2:
        raise InputError(f"slope = {slope}: the loss lies in [0, B] for 0 < slope <= B/2.")
    entries("samples", samples)
    data = np.repeat([1.0, -1.0], [(samples + 1) // 2, samples // 2])
    other = data.copy()
    other[0] = -1.0
    rate, count = at_least("lr", lr), entries("steps", whole("steps", steps))
    first, second = (_descend(z, slope, rate, count) for z in (data, other))
    gradients = [_gradient(0.0, z, slope) for z in (data, other)]
    loss_gap = slope * abs(math.tanh(first[-1]) - math.tanh(second[-1]))
    return Obstruction(first, second, abs(gradients[0] - gradients[1]), loss_gap)


def _gradient(x: float, data: np.ndarray, slope: float) -> float:
    """The full-batch gradient a mean(z) / cosh^2 x, with the mean of the +-1 exact."""
    return slope * float(data.sum()) / len(data) * (1 - math.tanh(x) ** 2)


def _descend(data: np.ndarray, slope: float, lr: float, steps: int) -> np.ndarray:
    path = np.zeros(steps + 1)
    for k in range(steps):
        path[k + 1] = path[k] - lr * np.sign(_gradient(path[k], data, slope))
    return path
