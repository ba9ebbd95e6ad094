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

**For one run, with probability 1 - b:** for all b_1 + b_2 = b,

    n kl(R_hat || R) <= (sum_a KL_a + 1/e) / b_1 + ln(2 sqrt(n) / b_2),     w_a = 1/n.

Proof. Let i be the information density, the logarithm of the density of (S, A) with respect to the
product of its marginals. Its mean is I(S; A). By the chain rule and independence, I(S; A) = sum_a
I(z_a; A | z_1 ... z_{a-1}) <= sum_a I(z_a; A | all other samples) <= sum_a KL_a. Let
r = exp(i) be the density itself. The negative part of i has the mean E_product[r max(0, -ln r)].
This mean is at most 1/e, because -r ln r is at most 1/e for every r.
Markov's inequality for i^+ gives i <= (sum_a KL_a + 1/e) / b_1 except with probability b_1. Under
the product measure the samples are independent of A, and E exp(n kl(R_hat || R)) <= 2 sqrt(n)
(Maurer 2004). For samples with different laws, Hoeffding's comparison of a sum of independent
Bernoulli variables with a binomial one (1956, Theorem 3) leads to the same bound, because the
exponential is convex in the sum. A change of measure E exp(n kl - i) <= 2 sqrt(n) and Markov's
inequality give the last term.

The best b_1 depends on b and the account, but not on the samples. It may thus be chosen freely.

**By the whole privacy profile:** E R <= a E R_hat + H_a for every a >= 0, with the hockey-stick
divergence H_a of replacing one sample. Proof. E loss(A(S), z') = E loss(A(S^a), z_a), where S^a has
z' in place of z_a, because (S^a, z_a) and (S, z') have the same law. For a fixed pair of data sets
and a loss in [0, 1], the means under the two laws of A differ by E' loss <= a E loss + H_a.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedmuon.analysis.theory.checks import probability, whole
from fedmuon.core.errors import InputError

STEPS = 200  # of a bisection in doubles


def binary_divergence(a: float, b: float) -> float:
    """Return kl(a || b), the relative entropy of Bernoulli distributions."""
    _require_share("a", a)
    _require_share("b", b)
    first = a * math.log(a / b) if a > 0 and b > 0 else math.inf if a > 0 else 0.0
    other = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 and b < 1 else math.inf if a < 1 else 0.0
    return first + other


def largest_risk(mean: float, budget: float) -> float:
    """Return an upper limit of the largest R with kl(mean || R) <= budget."""
    _require_share("the mean loss", mean)
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
    return float(min(1.0, (np.exp(tried) * mean + curve(tried)).min()))


def one_draw_budget(total: float, samples: int, failure: float = 0.05) -> float:
    """Return an upper limit of kl(R_hat || R) for one run.

    Args:
        total: The sum of KL_a over all samples.
        samples: The number n of samples.
        failure: The probability b that the limit fails.
    """
    probability("failure", failure)
    if not total >= 0:
        raise InputError(f"total is {total}, but a sum of relative entropies is at least 0.")
    count, moment = whole("samples", samples), total + 1 / math.e

    def budget(share: float) -> float:
        first, other = share * failure, (1 - share) * failure
        return (moment / first + math.log(2 * math.sqrt(count) / other)) / count

    shares = 1 - np.geomspace(1e-6, 0.5, 400)  # any share is valid; the best one depends on no data
    return min(budget(float(share)) for share in shares)


def one_draw_risk(mean: float, total: float, samples: int, failure: float = 0.05) -> float:
    """Return an upper limit of the risk R of the model of one run, from its R_hat."""
    return largest_risk(mean, one_draw_budget(total, samples, failure))


def _require_share(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise InputError(f"{name} is {value}, but it must be from 0 to 1.")
