"""Lower bounds on epsilon from canaries: one canary in many runs, or many canaries in one run.

# Many runs with one canary, present or absent

This is the white-box worst case. The auditor knows the clipped gradient of one example, the canary.
The gradient has norm C in each of the m blocks, and all other examples contribute nothing. Let b_t
be 1 if the Poisson lot of step t contains the canary, and otherwise 0. In each block, step t
releases b_t + sigma N(0, 1) along the canary, in units of C. The sum over blocks divided by sqrt(m)
is a sufficient statistic: s_t = sqrt(m) b_t + sigma N(0, 1). The strongest test statistic is the
log-likelihood ratio, sum_t ln(1 - q + q exp((sqrt(m) s_t - m / 2) / sigma^2)).

There are two bounds. The bound `counted` needs no assumption about the noise. It counts how often
the statistic is above a threshold with and without the canary. The first half of the trials selects
the threshold, and the other half gives Clopper-Pearson bounds. N trials cannot show an epsilon
above about ln N. The bound `tilted` assumes that the noise is the declared Gaussian. By the
definition of the hockey-stick divergence, delta(epsilon) is then the mean, over all trials with the
canary, of

    max(0, 1 - exp(epsilon - statistic)).

Each trial tosses a coin that shows heads with this probability. A Clopper-Pearson bound on the
number of heads bounds delta(epsilon) from below. `tilted` can show any epsilon. It tests the
account of the declared noise, but not whether a release really contains this noise.

If two bounds have confidence 1 - f / 2 each, the larger one has confidence 1 - f: see
`both_bounds`.

# One run with many canaries: bounds from the number of right guesses

For each of m canaries, a separate fair coin decides whether the canary is in the data: S in {0,
1}^m. An auditor sees all releases of the run, but not the coins, and guesses r of the coins. The
number r is fixed in advance. The auditor may use all releases to select these r coins. V of the
guesses are right. Changing a coin removes a canary or adds it. If the run is (epsilon,
delta)-private for this change, many right guesses are unlikely. Two bounds limit their probability.

**Binomial** (Steinke, Nasr, Jagielski 2023, Theorem 5.2). With W ~ Bin(r, 1 / (1 + e^-epsilon))

    P[V >= v] <= P[W >= v] + 2 m delta max_{i = 1..v} P[v > W >= v - i] / i.

Let delta = 0. Given the release and the earlier coins, the odds of a coin are the ratio of two
mixtures of neighbouring runs, which is at most e^epsilon. Every guess is therefore right with
probability at most 1 / (1 + e^-epsilon), for all values of the other guesses. Hence W dominates V.
Randomized response attains this bound. If delta > 0, W + F dominates V. The number F counts the
coins about which the release reveals more, and E F <= 2 m delta.

**Trade-off** (Mahloujifar, Melis, Chaudhuri 2024: auditing f-DP in one run). Let P(E) <= f(P'(E))
for all events E and neighbours, with f concave and increasing. In this module, f(x) = min_k
(e^epsilon_k x + delta_k), which combines all claims (epsilon_k, delta_k). Let p_j = P[V = j]. For
every set J

    (1/m) sum_{j in J} j p_j <= f( (1/m) sum_{j in J} (r - j + 1) p_{j-1} ).                     (1)

Proof. Consider a canary i, the other coins s, and a side b. Let E be the event that the guess for i
is b, and that the number j of guesses that agree with (s, b) is in J. If the coin is 1 - b, the
guess for i is wrong for the same release, and j - 1 guesses are correct. Therefore, P[E | s, b] <=
f(P[E | s, 1 - b]). Average over s, b and i, and use that f is concave (Jensen). The left side of
(1) then counts the correct guesses of each outcome, and the other side counts the wrong guesses.

Let J = {j, ..., r}, H_j = sum_{i >= j} i p_i and R_j = sum_{i >= j} (r - i) p_i. Then H_j + R_j = r
P[V >= j], and (1) says R_{j-1} >= g(H_j). The function g(h) = m f^-1(h / m) is increasing. Suppose
P[V >= v] = tau. A greedy choice gives the smallest total probability sum_j p_j: set H_v = v tau and
R_v = (r - v) tau. For j = v, v - 1, ..., take the smallest p_{j-1} that (1) allows. If the total
exceeds 1, then P[V >= v] < tau. If P[V >= v] were larger than tau, all p_j could be scaled down to
reach tau, because f is concave and f(0) >= 0.

No other choice has a smaller total. To prove this, write (H, R) <=_j (H', R') if H' - H >= 0 and
-(H' - H) <= R' - R <= (r - j) / j (H' - H). If a part of tau is at i > v instead of v, the start
(H_v, R_v) is larger in this order, because a multiple of (i - v)(1, -1) is added. Choosing more
than the smallest p_j adds a multiple of (j, r - j). A greedy step preserves the order, because <=_j
implies <=_{j-1}. First case: the step adds y > 0 less to R' than to R. As g is increasing, y is at
most R' - R. The step then adds (j - 1) / (r - j + 1) y <= H' - H less to H'. Second case: the step
adds at least as much to R' as to R. The additional part is a multiple of (j - 1, r - j + 1). A
larger element of the order has a larger total (H + R) / r.

Both bounds apply to the same probability P[V >= v]. The smaller bound is therefore valid too, at
the same confidence.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting import pld
from fedmuon.privacy.accounting.composition import account, event
from fedmuon.privacy.accounting.dominating_pairs import Event, hardest

FEWEST = 100
CONFIDENCE = 0.95
LEVEL = 0.01  # distance between the epsilons that are tested
CHUNK = 2**22  # normal numbers stored at a time
PRECISION = 1e-4  # precision of an epsilon
MOST_EPSILON = 700.0  # exp of this value is still finite
NEAR = 1.03  # precision factor of the refuted noise
MOST_TIMES = 32  # multiples of the declared noise that are tested
POINTS = 32  # number of claims that represent a mechanism
SLIGHT, MOST_POINTS = 0.1, 16  # share of the noise's variance; maximum points of an integral
# The largest epsilon that an audit can show is known in advance. If it is below the claim, no
# outcome of the audit can contradict the claim.
FEW = (
    "{} an epsilon of at most {:.4g} by counting. The claimed epsilon is {:.4g}, so this audit "
    "cannot refute it. Use more {}."
)
TRIALS, MORE_TRIALS = "{} trials can show", "--trials, or more --noise"
GUESSES = "Even if all of the {} guesses about {} canaries were right, the audit could show"
MORE_CANARIES = "canaries, or lower the claimed epsilon: raise [privacy] noise"
MORE_HONEST = f"{MORE_CANARIES} or honest"


class Setting(NamedTuple):
    """The private run that an audit tests.

    `noise_multiplier` is the noise multiplier of one block.
    """

    noise_multiplier: float
    sampling_probability: float
    steps: int
    blocks: int


class Statistics(NamedTuple):
    """The log-likelihood ratios of the trials with the canary and of the trials without it."""

    present: np.ndarray
    absent: np.ndarray


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon at a given delta, and the confidence of this bound."""

    epsilon: float
    method: str
    delta: float
    confidence: float
    trials: int


# Function from (trials, steps), and whether the canary is present, to the aligned sums s.
Observe = Callable[[tuple[int, int], bool], np.ndarray]


def projected(setting: Setting, rng: np.random.Generator) -> Observe:
    """Return a function that simulates the released sums along the canary without training."""

    def observe(shape: tuple[int, int], present: bool) -> np.ndarray:
        included = present * (rng.random(shape) < setting.sampling_probability)
        noise = setting.noise_multiplier * rng.standard_normal(shape)
        return math.sqrt(setting.blocks) * included + noise

    return observe


def likelihood_ratio(setting: Setting, sums: np.ndarray) -> np.ndarray:
    """Return the log-likelihood ratio of the sums with and without the canary, one per trial."""
    q, noise = setting.sampling_probability, setting.noise_multiplier
    exponent = (math.sqrt(setting.blocks) * sums - setting.blocks / 2) / noise**2
    if q == 1:
        return exponent.sum(1)
    return np.logaddexp(math.log1p(-q), math.log(q) + exponent).sum(1)


def require_enough(count: int) -> None:
    """Raise an error if there are too few trials to show any positive epsilon."""
    if count < FEWEST:
        raise InputError(
            f"trials = {count} is too low, because so few trials cannot prove an epsilon above 0. "
            f"Set trials = {FEWEST} or more."
        )


def trials(setting: Setting, observe: Observe, count: int) -> Statistics:
    """Run `count` trials with the canary, and `count` trials without the canary."""
    require_enough(count)
    if not setting.noise_multiplier > 0:
        raise InputError(
            "noise is 0, so the releases hide nothing and epsilon is infinite. Set noise above 0."
        )
    size = max(1, CHUNK // setting.steps)
    ratios = [
        [
            likelihood_ratio(setting, observe((rows, setting.steps), present))
            for present in (True, False)
        ]
        for rows in (min(size, count - start) for start in range(0, count, size))
    ]
    return Statistics(*map(np.concatenate, zip(*ratios, strict=True)))


def at_least(hits: int, of: int, failure: float) -> float:
    """Return a Clopper-Pearson lower bound on a probability, at confidence 1 - `failure`."""
    return float(betaincinv(hits, of - hits + 1, failure)) if hits else 0.0


def at_most(hits: int, of: int, failure: float) -> float:
    """Return a Clopper-Pearson upper bound on a probability, at confidence 1 - `failure`."""
    return float(betaincinv(hits + 1, of - hits, 1 - failure)) if hits < of else 1.0


def counted(found: Statistics, delta: float, confidence: float = CONFIDENCE) -> LowerBound:
    """Return the bound from counts, which uses P_with(A) <= e^epsilon P_without(A) + delta.

    The event A says that the statistic is above a threshold. Alternatively, A says that the
    statistic is below a threshold, and the two probabilities are exchanged. The first half of the
    trials selects the threshold and the direction. The other half gives a bound on each of the two
    probabilities, each with half of the failure probability.
    """
    half, failure = len(found.present) // 2, (1 - confidence) / 2
    first = Statistics(*(part[:half] for part in found))
    second = Statistics(*(part[half:] for part in found))
    choices = [
        (_bound(first, threshold, up, delta, failure), float(threshold), up)
        for threshold in np.quantile(np.concatenate(first), np.linspace(0, 1, 401))
        for up in (True, False)
    ]
    _, threshold, up = max(choices)
    value = max(0.0, _bound(second, threshold, up, delta, failure))
    return LowerBound(value, "counted", delta, confidence, len(second.present))


def _bound(
    statistics: Statistics, threshold: float, up: bool, delta: float, failure: float
) -> float:
    """Return ln((P(A) - delta) / P'(A)), from a lower bound on P(A) and an upper bound on P'(A).

    A is the event that the statistic is above the threshold, and P is the distribution with the
    canary. If `up` is false, A is the event below the threshold, and P is without the canary.
    """
    if up:
        hits, false = (int((part > threshold).sum()) for part in statistics)
    else:
        false, hits = (int((part <= threshold).sum()) for part in statistics)
    count = len(statistics.present)
    lower = at_least(hits, count, failure) - delta
    return math.log(lower / at_most(false, count, failure)) if lower > 0 else -math.inf


def tilted(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> LowerBound:
    """Return the largest epsilon that the trials refute, if the noise is the declared Gaussian.

    For epsilon = 0, LEVEL, 2 LEVEL, ..., each trial tosses a coin with mean delta(epsilon), and the
    number of heads bounds delta(epsilon) from below. The search stops when this bound no longer
    exceeds the claimed delta. Consider the first level at which the run is (epsilon,
    delta)-private. The result is wrong only if the test at this level fails. All tests together
    therefore have the confidence of one test.
    """
    coins, count = rng.random(len(found.present)), len(found.present)

    def exceeded(level: int) -> bool:
        bias = -np.expm1(np.minimum(0.0, level * LEVEL - found.present))
        return at_least(int((coins < bias).sum()), count, 1 - confidence) > delta

    low, high = 0, max(1, math.ceil(found.present.max() / LEVEL))  # heads decrease with the level
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if exceeded(middle) else (low, middle - 1)
    return LowerBound(low * LEVEL, "tilted", delta, confidence, count)


def both_bounds(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> tuple[LowerBound, LowerBound]:
    """Return the bounds `counted` and `tilted`, each with half of the failure probability.

    With probability `confidence`, both bounds are valid, and therefore also the larger bound.
    """
    per_bound = (1 + confidence) / 2
    return counted(found, delta, per_bound), tilted(found, delta, rng, per_bound)


class Guesses(NamedTuple):
    """The result of an audit: the number of canaries, of guesses, and of right guesses."""

    canaries: int
    made: int
    right: int


class Claims(NamedTuple):
    """Privacy claims. The run is claimed to be (epsilons[k], deltas[k])-private for every k."""

    epsilons: np.ndarray
    deltas: np.ndarray


def guess_coins(scores: np.ndarray, included: np.ndarray, made: int) -> Guesses:
    """Guess the coins of the canaries with the largest absolute scores.

    A positive score is a guess that the canary is in the data, and a negative score is a guess that
    it is not.

    Args:
        scores: One score per canary, which measures the evidence in the releases that this canary
            is in the data. The best score is a log-likelihood ratio.
        included: The true coin of each canary.
        made: Number of guesses to make.
    """
    guessed = np.argsort(-np.abs(scores), kind="stable")[:made]
    right = int(((scores > 0) == included)[guessed].sum())
    return Guesses(len(scores), made, right)


def worthwhile(ratios: np.ndarray, canaries: int, failure: float) -> int:
    """Return the number of guesses with the largest expected lower bound on epsilon.

    Args:
        ratios: Log-likelihood ratios of simulated canaries in and out of the data. A guess by a
            ratio is wrong with probability 1 / (1 + e^|ratio|).
        canaries: Number of canaries in the run.
        failure: Failure probability of the bound.
    """
    share = canaries / len(ratios)
    wrong = np.cumsum(1 / (1 + np.exp(np.sort(np.abs(ratios))[::-1]))) * share
    guesses = np.arange(1, len(ratios) + 1) * share
    right = betaincinv(guesses - wrong, wrong + 1, failure)
    return max(1, round(float(guesses[np.argmax(right)])))


def binomial_tail(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of at least this many right guesses.

    The bound applies to every (epsilon, delta)-private run.
    """
    canaries, guessed, right = guesses
    if right == 0:
        return 1.0
    reached = np.ones(right + 1)  # P[W >= right - i]
    thresholds = np.arange(right, 0, -1)
    reached[:right] = betainc(thresholds, guessed - thresholds + 1, 1 / (1 + math.exp(-epsilon)))
    max_increase = ((reached[1:] - reached[0]) / np.arange(1, right + 1)).max()
    return min(1.0, float(reached[0] + 2 * canaries * delta * max_increase))


def refuted(guesses: Guesses, claims: Claims, failure: float) -> bool:
    """Return whether the number of right guesses refutes the claims at confidence 1 - `failure`."""
    canaries, guessed, right = guesses
    shrink = np.exp(-claims.epsilons)
    hit, miss = failure * right, failure * (guessed - right)  # H_j and R_j
    for place in range(right, 0, -1):
        next_miss = canaries * float(((hit / canaries - claims.deltas) * shrink).max())
        if next_miss <= miss:  # the same holds for all smaller places
            return False
        hit += (place - 1) / (guessed - place + 1) * (next_miss - miss)
        miss = next_miss
        if hit + miss > guessed:
            return True
    return False


def bounds_by_counts(guesses: Guesses, delta: float) -> dict[str, float]:
    """Return the bounds that depend only on the number of right guesses.

    `binomial` is the largest epsilon that Theorem 5.2 refutes. If 2 m delta <= 1, the tail of the
    theorem increases with epsilon, because it is a maximum of means of P[W >= v] and P[W >= v - i].
    Otherwise, `binomial` is 0. `trade_off` is the largest epsilon for which the single claim
    (epsilon, delta) is refuted.
    """
    deltas, failure, binomial = np.array([delta]), 1 - CONFIDENCE, 0.0
    if 2 * guesses.canaries * delta <= 1:
        binomial = _largest(lambda epsilon: binomial_tail(guesses, epsilon, delta) < failure)
    trade_off = _largest(
        lambda epsilon: refuted(guesses, Claims(np.array([epsilon]), deltas), failure)
    )
    return {"binomial": binomial, "trade_off": trade_off}


def _largest(beyond: Callable[[float], bool]) -> float:
    """Return the largest epsilon for which every smaller epsilon is refuted."""
    low, high = 0.0, 1.0
    if not beyond(low):
        return 0.0
    while high < MOST_EPSILON and beyond(high):
        low, high = high, 2 * high
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) else (low, middle)
    return low


def claims_of(spent: Sequence[Event], most: float, delta: float) -> Claims:
    """Return the accountant's claims for these releases, at `POINTS` epsilons up to `most`.

    Each claim holds for adding and for removing an example. If there are several events, each claim
    holds for every event.
    """
    epsilons = most * np.linspace(0, 1, POINTS) ** 3
    deltas, tail = np.zeros(len(epsilons)), 1e-6 * delta
    for release in spent:
        grid = pld.grid_for([release], delta, epsilons[-1], coarsest=True)
        for part in pld.estimates(release, grid):
            parts = [(part, release.count)]
            composed = pld.compose(parts, grid, tail)
            losses = (composed.start + np.arange(len(composed.masses))) * grid
            beyond = composed.infinite + pld.slack(parts, composed, tail)
            for k, first in enumerate(np.searchsorted(losses, epsilons)):
                excess = -np.expm1(epsilons[k] - losses[first:]) @ composed.masses[first:]
                deltas[k] = max(deltas[k], excess + beyond)
    return Claims(epsilons, deltas)


def noise_below(
    guesses: Guesses, spent: Sequence[Event], most: float, delta: float, confidence: float
) -> float:
    """Return an upper bound on the actual noise divided by the declared noise. It may be infinity.

    Unlike a bound by counts, this bound assumes that the mechanism is as declared (Poisson lots and
    Gaussian noise), except for the size of the noise.

    Args:
        guesses: The guesses.
        spent: The events with the largest privacy cost in the run, as `hardest` returns them.
        most: The approximate epsilon of these events.
        delta: The delta of the account.
        confidence: Probability that the bound holds.
    """

    def beyond(times: float) -> bool:
        louder = [
            dataclasses.replace(release, noise_multiplier=times * release.noise_multiplier)
            for release in spent
        ]
        return refuted(guesses, claims_of(louder, most, delta), 1 - confidence)

    low = high = 1.0
    while not beyond(high):
        low, high = high, 2 * high
        if high > MOST_TIMES:
            return math.inf
    while low == high or (low > 1 / MOST_TIMES and beyond(low)):  # the noise may be below `low`
        low, high = low / 2, low
    while high > low * NEAR:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high


def log_ratio(y: np.ndarray, s: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """Return the log-likelihood ratio of the releases, with and without each canary.

    With the canary, y_t is distributed as (1 - q) N(b, s_t) + q N(b + s_t, s_t), and without it as
    N(b, s_t). The number b is the contribution of other samples along the canary, which is the same
    in every release. Over all canaries, b has the distribution N(0, t^2). The function estimates
    t^2 as the variance of the mean releases over canaries, minus the part that noise and canaries
    explain. If t^2 is 0, the ratio is sum_t ln(1 - q + q exp(y_t - s_t / 2)). Otherwise, the
    function integrates over b, on a grid that is wide enough with and without the canary.

    Args:
        y: Array [T, m] with the releases of T steps along m canaries.
        s: Array [T] with the squared length of a canary, divided by the noise variance, in each
            step.
        rate: The sampling probability q. Pass one number for all canaries, or an array [T, m]. An
            entry is 0 if the canary cannot take part in the release.

    Returns:
        One log-likelihood ratio per canary.
    """
    steps, mean, share = len(y), float(s.mean()), float(np.mean(rate))
    sampling_variance = (share * mean) ** 2 / 4 + share * (1 - share) * mean**2 / steps / 2
    shared = float(np.var(y.mean(0))) - mean / steps - sampling_variance
    if shared <= SLIGHT * mean / steps:
        return _ratio(y - s[:, None] / 2, rate)
    precision = float((1 / s).sum()) + 1 / shared
    center, spread = (y / s[:, None]).sum(0) / precision, precision**-0.5
    low = -share * mean / spread - 3
    grid = np.linspace(low, 3, max(7, min(MOST_POINTS, math.ceil(3 - low)))) * spread
    # Without the canary, ln P(b | y) is -(b - center)^2 precision / 2, up to terms that do not
    # depend on b.
    weights = -(grid**2) * precision / 2
    within = [
        weight + _ratio(y - (center + b) - s[:, None] / 2, rate)
        for b, weight in zip(grid, weights, strict=True)
    ]
    return np.logaddexp.reduce(within) - np.logaddexp.reduce(weights)


def _ratio(x: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """Return sum_t ln(1 - q + q e^x)."""
    with np.errstate(divide="ignore"):  # q may be 0 or 1
        return np.logaddexp(np.log1p(-np.asarray(rate)), np.log(rate) + x).sum(0)


class Claimed(NamedTuple):
    """The releases that each participating client is expected to make, and the claim to test.

    The settings are the same with and without canaries.
    """

    settings: Sequence[Setting]
    delta: float
    adjacency: str


def limits_of_trials(count: int, delta: float, claimed: float) -> dict[str, Any]:
    """Return the largest epsilon that `counted` can show, and a note about this limit.

    The note is empty unless the claim is larger than this epsilon. An audit shows this epsilon if
    the statistic separates all trials with the canary from all trials without the canary.
    """
    half, failure = count - count // 2, (1 - CONFIDENCE) / 2
    lower = at_least(half, half, failure) - delta
    largest = max(0.0, math.log(lower / at_most(0, half, failure))) if lower > 0 else 0.0
    head = TRIALS.format(count)
    note = "" if largest > claimed else FEW.format(head, largest, claimed, MORE_TRIALS)
    return {"most_by_counts": largest, "note": note}


def limits_of_guesses(canaries: int, made: int, claimed: Claimed, more: str) -> dict[str, Any]:
    """Return the largest epsilon that `made` guesses can show, and a note about this limit.

    The text `more` ends the note and says what to increase. The note is empty if a bound could
    refute the claim.
    """
    best, delta = Guesses(canaries, made, made), claimed.delta
    largest = max(bounds_by_counts(best, delta).values())
    spent = hardest(
        event(setting.noise_multiplier, *setting[1:])
        for setting in claimed.settings
        if setting.steps
    )
    total = max(
        (account([release], delta, adjacency=claimed.adjacency).upper for release in spent),
        default=0.0,
    )
    enough = largest > total or refuted(best, claims_of(spent, total, delta), 1 - CONFIDENCE)
    head = GUESSES.format(made, canaries)
    return {
        "most_by_counts": largest,
        "note": "" if enough else FEW.format(head, largest, total, more),
    }
