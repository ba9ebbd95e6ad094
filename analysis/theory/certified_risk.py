"""Upper limits of the risk of a trained model: from held-out samples, and from the privacy account.

Losses are in [0, 1] (a loss in [0, B] is divided by B). R is the risk, the expected loss on a new
sample, and R_hat the mean loss on the training samples. kl(a || b) is the relative entropy of two
Bernoulli distributions.

Held-out samples
----------------
The model does not depend on m held-out samples, so their losses are independent.

- 0-1 errors: Clopper and Pearson's limit, the largest risk for which so few errors have a
  probability above the failure probability. It is exact.
- Losses in [0, 1]: with probability at most b, the mean is below R and m kl(mean || R) exceeds
  ln(1/b) (Chernoff; Hoeffding 1963, eq. 2.1).
- Losses in [0, B] with a small variance: Maurer and Pontil's empirical Bernstein bound (2009,
  Theorem 4), R <= mean + sqrt(2 V ln(2/b) / m) + 7 B ln(2/b) / (3 (m - 1)).
- The decrease of the loss against another fixed model: the same bound for the paired differences,
  which are in an interval of twice the length.

The privacy account
-------------------
A private run A is a random function of n independent samples. Everything after its noisy sums is
post-processing. The theorem therefore holds for every network, optimizer, number of parameters and
loss in [0, 1].

KL_a is the relative entropy of all releases with sample a and without its contribution (the pair of
zero-out adjacency, `fedmuon.privacy.accounting.divergences`). Let w_a be the weights of the samples
in R and R_hat, for example 1/n, and KL_0 = sum_a w_a KL_a.

**In expectation:** kl(E R_hat || E R) <= KL_0. Proof. Let z' be a fresh copy of sample z_a.

- The model and z_a have the joint distribution of (A, z_a), and the model and z' the product of its
  marginals. By data processing, kl(E loss(A, z_a) || E loss(A, z')) <= I(z_a; A).
- The samples are independent, so I(z_a; A) <= I(z_a; A | other samples). The golden formula bounds
  the latter by E KL(law of A given all samples || any law that does not depend on z_a). As this
  law, take that of the run in which sample a contributes 0. The dominating pair bounds KL by KL_a,
  because KL is a mixture of hockey-stick divergences, and KL of adaptive steps is additive.
- kl is jointly convex, so the mean over a with weights w_a preserves the inequality (Jensen).

If one run's R_hat replaces E R_hat, the result is an estimate and not a limit.

**By the whole privacy profile:** E R <= a E R_hat + H(a) for every a >= 0. H(a) is the weighted
mean of the hockey-stick divergences of replacing one sample. Proof. E f(A(S), z') = E f(A(S^i),
z_i) for every f in [0, 1], where S^i has z' in place of z_i, because (S^i, z_i) and (S, z') have
the same law. For a fixed pair of data sets, the mean of f changes to at most a E f + H_i(a).

**For one run, with probability 1 - b:** the run also releases u = R_hat + s g, where g is a
standard normal number and s a public one. H(a) is that of all releases, including u. Let a >= 1,
t >= 0, and psi(x) the mean of the positive part of g - x. Then, except with probability b,

    R <= a (u + t) + c,             c = (H(a) + a s psi(t / s)) / b,
    R <= 1 - (1 - u - t - c') / a,  c' = (H(a) + s psi(t / s)) / b,

each for itself. Proof. Let E be the event R > a (u + t) + c. It depends only on the releases, so
f = 1_E loss is allowed above: E 1_E (R - a R_hat) <= H(a). On E, R - a R_hat > c + a (s g + t). So
c P(E) + a E 1_E (s g + t) <= H(a). The second term is at least -a s psi(t / s), because -g has the
law of g. The other line is the same proof for 1 - loss, with R and R_hat exchanged:
E 1_E ((1 - R_hat) - a (1 - R)) <= H(a).

A sample changes u by at most 1 / (2 n) from its value for the loss 1/2. Given A, u is thus a
Gaussian release with the noise multiplier 2 n s, and H(a) of both follows by adaptive composition.
H(a) bounds both directions, because the pairs of replaced samples are symmetric. The numbers a, t
and s may depend on the account, b, n and a guess of the train error that was fixed in advance, but
neither on the samples nor on g. The guess changes only how small the limit is.

The limits above do not divide the whole relative entropy of the run by b, as Markov's inequality
for the information density does: n kl(R_hat || R) <= (sum KL_a + 1/e) / b_1 + ln(2 sqrt(n) / b_2).
For a small b, and thus for many settings, they are much smaller.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedmuon.analysis.theory.checks import probability, share, whole
from fedmuon.core.errors import InputError
from fedmuon.core.gaussian_pair import gaussian_hockey_stick

STEPS = 200  # of a bisection in doubles
ROUNDING = 1e-14  # exceeds the rounding errors of a limit
LARGEST_SHIFT = 20.0  # a replaced sample is certain to be recognized


def binary_divergence(a: float, b: float) -> float:
    """Return kl(a || b), the relative entropy of Bernoulli distributions."""
    share("a", a)
    share("b", b)
    first = a * math.log(a / b) if a > 0 and b > 0 else math.inf if a > 0 else 0.0
    other = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 and b < 1 else math.inf if a < 1 else 0.0
    return first + other


def largest_risk(mean: float, budget: float) -> float:
    """Return an upper limit of the largest R with kl(mean || R) <= budget."""
    share("the mean loss", mean)
    if math.isinf(budget):
        return 1.0
    low, high = mean, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if binary_divergence(mean, middle) > budget:
            high = middle
        else:
            low = middle
    return high


# Held-out samples


def clopper_pearson(errors: int, samples: int, failure: float = 0.05) -> float:
    """Return an upper limit of the error rate, from the number of errors on held-out samples.

    Example:
        >>> from fedmuon.analysis.theory.certified_risk import clopper_pearson
        >>> round(clopper_pearson(234, 1000), 4)
        0.2571
    """
    from scipy.special import betaincinv  # takes longer to load than everything else here

    errors, samples = whole("errors", errors, 0), whole("samples", samples)
    probability("failure", failure)
    if errors > samples:
        raise InputError(f"{errors} errors exceed the number of samples, {samples}.")
    return (
        1.0 if errors == samples else float(betaincinv(errors + 1, samples - errors, 1 - failure))
    )


def chernoff(mean: float, samples: int, failure: float = 0.05) -> float:
    """Return an upper limit of the risk, from the mean of independent losses in [0, 1]."""
    return largest_risk(
        mean, -math.log(probability("failure", failure)) / whole("samples", samples)
    )


def empirical_bernstein(losses: np.ndarray, width: float = 1.0, failure: float = 0.05) -> float:
    """Return an upper limit of the mean of independent losses in an interval of length `width`."""
    count = len(losses)
    if count < 2:
        raise InputError(f"an empirical variance needs 2 losses, but there are {count}.")
    spread = float(np.ptp(losses))
    if not np.isfinite(losses).all() or spread > width * (1 + 1e-9):
        raise InputError(
            f"the losses are not finite numbers in an interval of length {width:g}, so they have "
            "no empirical Bernstein bound. Use a bounded loss, such as the error."
        )
    logarithm = math.log(2 / probability("failure", failure))
    deviation = math.sqrt(2 * float(np.var(losses, ddof=1)) * logarithm / count)
    return float(np.mean(losses)) + deviation + 7 * width * logarithm / (3 * (count - 1))


# The privacy account


def expected_risk(mean: float, divergence: float) -> float:
    """Return an upper limit of E R, if `mean` is E R_hat and `divergence` is KL_0."""
    return largest_risk(mean, divergence)


def risk_by_profile(
    mean: float, curve: Callable[[np.ndarray], np.ndarray], epsilons: Sequence[float] | None = None
) -> float:
    """Return an upper limit of E R by the whole privacy profile.

    Args:
        mean: E R_hat.
        curve: Function that receives epsilons, and returns upper limits of H_a of replacing one
            sample at a = exp(epsilon).
        epsilons: The epsilons among which the limit is minimized.
    """
    tried = np.linspace(-3, 3, 1201) if epsilons is None else np.asarray(epsilons, float)
    with np.errstate(over="ignore", invalid="ignore"):  # a limit with an infinite a is useless
        limits = np.exp(tried) * mean + curve(tried)
    return float(np.fmin.reduce(limits, initial=1.0))


@dataclass(frozen=True)
class ReleasedLimit:
    """A limit of the risk of the model of one run, from its released train error u.

    Attributes:
        noise: The standard deviation s of the noise on the train error.
        slope: The factor of u in the limit.
        intercept: The limit for u = 0.
    """

    noise: float
    slope: float
    intercept: float

    def risk(self, released: float) -> float:
        """Return the limit for a released train error."""
        return min(1.0, max(0.0, self.slope * released + self.intercept + ROUNDING))


Profile = Callable[[float, np.ndarray], np.ndarray]


def released_limit(
    profile: Profile, shift: float, samples: int, failure: float = 0.05, guess: float = 0.2
) -> ReleasedLimit:
    """Return the limit that is smallest if the released train error equals the guess.

    Args:
        profile: Function that receives the noise s on the train error and epsilons. It returns
            upper limits of H(a) of replacing one sample at a = exp(epsilon), for all releases
            including the train error.
        shift: About the distance of two Gaussians with the profile of the run without the train
            error. It only determines s, so every value leads to a valid limit.
        samples: The number n of samples.
        failure: The probability b that the limit fails.
        guess: The train error that is expected, fixed in advance.
    """
    probability("failure", failure)
    share("guess", guess)
    count = whole("samples", samples)
    if not shift < LARGEST_SHIFT:  # the releases say everything about a sample
        return ReleasedLimit(1 / math.sqrt(count), 0.0, 1.0)

    def of_gaussians(noise: float) -> tuple[ReleasedLimit, float]:
        width = math.hypot(shift, 1 / (count * noise))
        epsilons = width * np.linspace(0.2, 6, 60)
        return _smallest(epsilons, gaussian_hockey_stick(width, epsilons), noise, failure, guess)

    scale = math.sqrt(max(min(guess, 1 - guess), 1 / count) / count)
    noise = min((scale * np.geomspace(0.05, 20, 60)).tolist(), key=lambda s: of_gaussians(s)[1])
    epsilons = math.hypot(shift, 1 / (count * noise)) * np.linspace(0.2, 8, 400)
    return _smallest(epsilons, profile(noise, epsilons), noise, failure, guess)[0]


def _smallest(
    epsilons: np.ndarray, heights: np.ndarray, noise: float, failure: float, guess: float
) -> tuple[ReleasedLimit, float]:
    """Return the limit with the best epsilon and t, and its value at the guess."""
    from scipy.special import ndtr

    scaled = np.linspace(0.2, 6, 117)
    density = np.exp(-(scaled**2) / 2) / math.sqrt(2 * math.pi)
    moved, above = noise * scaled, noise * (density - scaled * ndtr(-scaled))
    factor, height = np.exp(epsilons)[:, None], heights[:, None]
    if guess <= 0.5:
        slopes = np.broadcast_to(factor, (len(epsilons), len(scaled)))
        intercepts = factor * moved + (height + factor * above) / failure
    else:
        slopes = np.broadcast_to(1 / factor, (len(epsilons), len(scaled)))
        intercepts = 1 - (1 - moved - (height + above) / failure) / factor
    values = slopes * guess + intercepts
    best = np.unravel_index(values.argmin(), values.shape)
    limit = ReleasedLimit(noise, float(slopes[best]), float(intercepts[best]))
    return limit, float(values[best])
