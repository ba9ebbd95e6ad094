"""Lower bounds on epsilon from canaries: in many runs, or many canaries in one run.

# Many runs: one canary, there or not

White box, worst case: one example's clipped gradient is known, has norm C in all m blocks at once,
and all other examples contribute nothing. With or without it, step t releases in block w the noise
sigma xi plus b_t (in units of C, along the canary), where b_t says whether the Poisson lot drew it.
The sum over blocks over sqrt(m) is sufficient: s_t = sqrt(m) b_t + sigma N(0, 1). The strongest
statistic is the log-likelihood ratio, sum_t ln(1 - q + q exp((sqrt(m) s_t - m / 2) / sigma^2)).

There are two bounds. `counted` trusts nothing about the release. It counts how often the statistic
passes a threshold with and without the canary. The threshold is chosen on half of the trials, and
the others give Clopper-Pearson bounds; N trials can show no epsilon above about ln N. `tilted`
trusts that the noise is the declared Gaussian: delta(epsilon) = E_with max(0, 1 - exp(epsilon -
statistic)) is then the definition of the hockey-stick divergence. Each trial throws a coin with
this bias, and Clopper-Pearson on the heads bounds delta(epsilon) from below, so it reaches any
epsilon. It tests whether the accountant is right about this noise, not whether a release draws it.

The larger of two bounds of confidence 1 - f / 2 each has confidence 1 - f: see `both_bounds`.

# One run: many canaries, and how many right guesses refute which epsilon

A fair coin of its own decides whether each of m canaries is in the data: S in {0, 1}^m. An auditor
sees what the run released, but no coin, and guesses r of the coins. r is fixed beforehand; which
ones may depend on all that was seen. V of the guesses are right. Changing a coin leaves one canary
out, or puts it in. In a run that is (epsilon, delta)-private for this, many right guesses are
unlikely, by two bounds.

**Binomial** (Steinke, Nasr, Jagielski 2023, Theorem 5.2). With W ~ Bin(r, 1 / (1 + e^-epsilon))

    P[V >= v] <= P[W >= v] + 2 m delta max_{i = 1..v} P[v > W >= v - i] / i.

At delta = 0, given the release and the coins before it, a coin's odds are the ratio of two mixtures
of neighbouring runs, at most e^epsilon. So every guess is right with a chance of at most
1 / (1 + e^-epsilon), whatever the others were. Hence V lies below W; randomized response attains
this. At delta > 0, V lies below W + F, where F counts the coins of which the release tells more,
and E F <= 2 m delta.

**Trade-off** (Mahloujifar, Melis, Chaudhuri 2024: auditing f-DP in one run). Let P(E) <= f(P'(E))
for all events E and neighbours, f concave and rising: here f(x) = min_k (e^epsilon_k x + delta_k),
that is all of the claims (epsilon_k, delta_k) at once. Let p_j = P[V = j]. For every set J

    (1/m) sum_{j in J} j p_j <= f( (1/m) sum_{j in J} (r - j + 1) p_{j-1} ).                     (1)

Proof. For canary i, the other coins s and a side b let E be the event that i is guessed to be b
and that the guesses about (s, b) have j in J right ones. With the coin 1 - b the same release has
i wrong and j - 1 right. So P[E | s, b] <= f(P[E | s, 1 - b]). Average over s, b and i; f is concave
(Jensen). On the left each outcome counts its right guesses, on the right its wrong ones.

Let J = {j, ..., r}, H_j = sum_{i >= j} i p_i and R_j = sum_{i >= j} (r - i) p_i, so that H_j + R_j
= r P[V >= j], and (1) says R_{j-1} >= g(H_j) with the rising g(h) = m f^-1(h / m). Suppose P[V >=
v] = tau. The least total mass is found greedily: H_v = v tau, R_v = (r - v) tau and then, for j =
v, v - 1, ..., the least p_{j-1} that (1) allows. If it exceeds 1, then P[V >= v] < tau: were it
more, all p_j could be scaled down to tau, as f is concave and f(0) >= 0.
    Greedy is least: write (H, R) <=_j (H', R') if H' - H >= 0 and -(H' - H) <= R' - R <= (r - j) /
j (H' - H). Other masses above v start from more in this order: mass at i > v instead of v adds
(i - v)(1, -1). More than the least p_j adds a multiple of (j, r - j). And a greedy step keeps the
order, as <=_j implies <=_{j-1}: if R' - R = x > 0, it adds less to R' than to R by y <= x, and at
most (j - 1) / (r - j + 1) y <= H' - H less to H'; if not, at least as much to R' as to R, and
along (j - 1, r - j + 1) itself. Larger in the order is more in mass, (H + R) / r.

Both bound the same tail, so the smaller of the two does, with no loss of confidence.
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
LEVEL = 0.01  # between the epsilons that are tested
CHUNK = 2**22  # normal numbers held at a time
PRECISION = 1e-4  # precision of an epsilon
MOST_EPSILON = 700.0  # exp of it is still finite
NEAR = 1.03  # how near the noise comes to that which is refuted
MOST_TIMES = 32  # the declared noise, beyond which nothing is refuted
POINTS = 32  # claims that stand for a mechanism
SLIGHT, MOST_POINTS = 0.1, 16  # share of the noise's variance; points of an integral
# What an audit can show at best is known before it. If that is below the claim, no outcome of the
# audit speaks against the claim.
FEW = (
    "{} an epsilon of at most {:.4g} by counts, so this audit cannot test the claimed {:.4g}: "
    "use more {}."
)
TRIALS, MORE_TRIALS = "{} trials can show", "--trials, or more --noise"
GUESSES = "Even if all of {} guesses about {} canaries were right, they would show"
MORE_CANARIES = "canaries, or claim a smaller epsilon with more [privacy] noise"
MORE_HONEST = f"{MORE_CANARIES}, or with a larger honest"


class Setting(NamedTuple):
    """The setting of an audit. The noise is that of one block; the blocks share their lots."""

    noise_multiplier: float
    sampling_probability: float
    steps: int
    blocks: int


class Statistics(NamedTuple):
    """The log-likelihood ratio in trials with and without the canary."""

    present: np.ndarray
    absent: np.ndarray


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon at delta that holds with this confidence."""

    epsilon: float
    method: str
    delta: float
    confidence: float
    trials: int


# How many (trials, steps), and whether the canary is there -> the aligned sums s, so many.
Observe = Callable[[tuple[int, int], bool], np.ndarray]


def projected(setting: Setting, rng: np.random.Generator) -> Observe:
    """The aligned sums without the tensors around them."""

    def observe(shape: tuple[int, int], present: bool) -> np.ndarray:
        held = present * (rng.random(shape) < setting.sampling_probability)
        noise = setting.noise_multiplier * rng.standard_normal(shape)
        return math.sqrt(setting.blocks) * held + noise

    return observe


def likelihood_ratio(setting: Setting, sums: np.ndarray) -> np.ndarray:
    """ln P(s_1, ..., s_T | with) / P(s_1, ..., s_T | without), from sums [trials, steps]."""
    q, noise = setting.sampling_probability, setting.noise_multiplier
    exponent = (math.sqrt(setting.blocks) * sums - setting.blocks / 2) / noise**2
    if q == 1:
        return exponent.sum(1)
    return np.logaddexp(math.log1p(-q), math.log(q) + exponent).sum(1)


def require_enough(count: int) -> None:
    """Reject trials that can show nothing."""
    if count < FEWEST:
        raise InputError(f"trials = {count} is too few to show anything: use at least {FEWEST}")


def trials(setting: Setting, observe: Observe, count: int) -> Statistics:
    """`count` trials with the canary, and as many without it."""
    require_enough(count)
    if not setting.noise_multiplier > 0:
        raise InputError("noise = 0 hides nothing, so epsilon is infinite: set noise above 0")
    size = max(1, CHUNK // setting.steps)
    ratios = [
        [
            likelihood_ratio(setting, observe((rows, setting.steps), there))
            for there in (True, False)
        ]
        for rows in (min(size, count - start) for start in range(0, count, size))
    ]
    return Statistics(*map(np.concatenate, zip(*ratios, strict=True)))


def at_least(hits: int, of: int, failure: float) -> float:
    """Clopper-Pearson: the true probability is smaller with a chance of at most `failure`."""
    return float(betaincinv(hits, of - hits + 1, failure)) if hits else 0.0


def at_most(hits: int, of: int, failure: float) -> float:
    """Clopper-Pearson from the other side."""
    return float(betaincinv(hits + 1, of - hits, 1 - failure)) if hits < of else 1.0


def counted(found: Statistics, delta: float, confidence: float = CONFIDENCE) -> LowerBound:
    """From counts alone: P_with(A) <= e^epsilon P_without(A) + delta, and the other way round.

    The event A is a half-line of the statistic, chosen on the first half of the trials together
    with its direction; the failure is shared by the two probabilities.
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


def _bound(found: Statistics, threshold: float, up: bool, delta: float, failure: float) -> float:
    """ln((P(A) - delta) / P'(A)), P(A) bounded from below and P'(A) from above.

    A is what lies above the threshold and P is with the canary, or both are turned around.
    """
    if up:
        hits, false = (int((part > threshold).sum()) for part in found)
    else:
        false, hits = (int((part <= threshold).sum()) for part in found)
    of = len(found.present)
    least = at_least(hits, of, failure) - delta
    return math.log(least / at_most(false, of, failure)) if least > 0 else -math.inf


def tilted(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> LowerBound:
    """From the declared noise: the largest epsilon at which delta is surely exceeded.

    Heads of coins with mean delta(epsilon) are counted at epsilon = 0, LEVEL, 2 LEVEL, ... until
    delta is no longer surely exceeded. A claim that is false needs a first false one, at a level
    fixed beforehand, so the confidence of that one test is the confidence of all.
    """
    coins, of = rng.random(len(found.present)), len(found.present)

    def exceeded(level: int) -> bool:
        bias = -np.expm1(np.minimum(0.0, level * LEVEL - found.present))
        return at_least(int((coins < bias).sum()), of, 1 - confidence) > delta

    low, high = 0, max(1, math.ceil(found.present.max() / LEVEL))  # heads get fewer with the level
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if exceeded(middle) else (low, middle - 1)
    return LowerBound(low * LEVEL, "tilted", delta, confidence, of)


def both_bounds(
    found: Statistics, delta: float, rng: np.random.Generator, confidence: float = CONFIDENCE
) -> tuple[LowerBound, LowerBound]:
    """Both bounds, each with half of the failure.

    With this confidence both hold, and so does the larger one.
    """
    each = (1 + confidence) / 2
    return counted(found, delta, each), tilted(found, delta, rng, each)


class Guesses(NamedTuple):
    """How many canaries there are, how many coins were guessed, and how many guesses are right."""

    canaries: int
    made: int
    right: int


class Claims(NamedTuple):
    """The run is (epsilons[k], deltas[k])-private for every k."""

    epsilons: np.ndarray
    deltas: np.ndarray


def guess_coins(scores: np.ndarray, included: np.ndarray, made: int) -> Guesses:
    """Guess the canaries with the largest |score|: those with a positive score are in the data.

    Args:
        scores: What the release says of each canary [m], best a log-likelihood ratio.
        included: The coins [m].
        made: How many guesses to make.
    """
    chosen = np.argsort(-np.abs(scores), kind="stable")[:made]
    right = int(((scores > 0) == included)[chosen].sum())
    return Guesses(len(scores), made, right)


def worthwhile(ratios: np.ndarray, canaries: int, failure: float) -> int:
    """How many guesses promise the largest bound.

    Args:
        ratios: Rehearsed log-likelihood ratios of canaries in and out of the data. A guess by a
            ratio is wrong with chance 1 / (1 + e^|ratio|).
        canaries: How many canaries the run has.
        failure: The chance that the bound may fail.
    """
    share = canaries / len(ratios)
    wrong = np.cumsum(1 / (1 + np.exp(np.sort(np.abs(ratios))[::-1]))) * share
    made = np.arange(1, len(ratios) + 1) * share
    right = betaincinv(made - wrong, wrong + 1, failure)
    return max(1, round(float(made[np.argmax(right)])))


def binomial_tail(guesses: Guesses, epsilon: float, delta: float) -> float:
    """An upper bound on the chance of so many right guesses in an (epsilon, delta)-private run."""
    canaries, made, right = guesses
    if right == 0:
        return 1.0
    reached = np.ones(right + 1)  # P[W >= right - i]
    least = np.arange(right, 0, -1)
    reached[:right] = betainc(least, made - least + 1, 1 / (1 + math.exp(-epsilon)))
    most = ((reached[1:] - reached[0]) / np.arange(1, right + 1)).max()
    return min(1.0, float(reached[0] + 2 * canaries * delta * most))


def refuted(guesses: Guesses, claims: Claims, failure: float) -> bool:
    """Whether so many right guesses have a chance below `failure` wherever the claims hold."""
    canaries, made, right = guesses
    shrink = np.exp(-claims.epsilons)
    hit, miss = failure * right, failure * (made - right)  # H_j and R_j
    for place in range(right, 0, -1):
        least = canaries * float(((hit / canaries - claims.deltas) * shrink).max())
        if least <= miss:  # now and for all smaller places
            return False
        hit += (place - 1) / (made - place + 1) * (least - miss)
        miss = least
        if hit + miss > made:
            return True
    return False


def bounds_by_counts(guesses: Guesses, delta: float) -> dict[str, float]:
    """The bounds that stand on the number of right guesses alone.

    `binomial` is the largest epsilon that Theorem 5.2 refutes. If 2 m delta <= 1, its tail grows
    with epsilon, because it is a maximum of means of P[W >= v] and P[W >= v - i]. Otherwise nothing
    is claimed. `trade_off` is the largest one for which the single claim (epsilon, delta) is.
    """
    deltas, failure, binomial = np.array([delta]), 1 - CONFIDENCE, 0.0
    if 2 * guesses.canaries * delta <= 1:
        binomial = _largest(lambda epsilon: binomial_tail(guesses, epsilon, delta) < failure)
    trade_off = _largest(
        lambda epsilon: refuted(guesses, Claims(np.array([epsilon]), deltas), failure)
    )
    return {"binomial": binomial, "trade_off": trade_off}


def _largest(beyond: Callable[[float], bool]) -> float:
    """The largest epsilon up to which all are refuted."""
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
    """The accountant's claims at `POINTS` epsilons up to `most`.

    The claims hold whether the example is added or removed, and for each of these kinds of
    releases.
    """
    epsilons = most * np.linspace(0, 1, POINTS) ** 3
    deltas, tail = np.zeros(len(epsilons)), 1e-6 * delta
    for one in spent:
        grid = pld.grid_for([one], delta, epsilons[-1], coarsest=True)
        for part in pld.estimates(one, grid):
            parts = [(part, one.count)]
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
    """An upper bound on the noise, in units of the declared noise; inf if no noise is refuted.

    It stands on more than counts: the mechanism must be the declared one, with Poisson lots and
    Gaussian noise, and only the multiplier is in doubt.

    Args:
        guesses: The guesses.
        spent: The `hardest` of what the run released.
        most: About its epsilon.
        delta: The delta of its account.
        confidence: The chance that the bound holds.
    """

    def beyond(times: float) -> bool:
        louder = [
            dataclasses.replace(one, noise_multiplier=times * one.noise_multiplier) for one in spent
        ]
        return refuted(guesses, claims_of(louder, most, delta), 1 - confidence)

    low = high = 1.0
    while not beyond(high):
        low, high = high, 2 * high
        if high > MOST_TIMES:
            return math.inf
    while low == high or (low > 1 / MOST_TIMES and beyond(low)):  # more than is declared
        low, high = low / 2, low
    while high > low * NEAR:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high


def log_ratio(y: np.ndarray, s: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """The log-likelihood ratio of releases along a canary, with it and without it.

    With the canary, y_t is (1 - q) N(b, s_t) + q N(b + s_t, s_t); without it, N(b, s_t). Here b is
    what other samples do at a canary's places in every release. It is N(0, t^2), where t^2 is the
    part of the variance over canaries of the mean over time that noise and canaries do not explain.
    If there is none, the ratio is sum_t ln(1 - q + q exp(y_t - s_t / 2)). Otherwise b is integrated
    out, on a grid around its mean given y that is wide enough for both cases.

    Args:
        y: Releases along the canaries [T, m].
        s: Squared lengths of a canary over the noise [T].
        rate: q, for all or for each [T, m]; 0 where a canary has no part in a release.

    Returns:
        The ratios [m].
    """
    steps, mean, share = len(y), float(s.mean()), float(np.mean(rate))
    ours = (share * mean) ** 2 / 4 + share * (1 - share) * mean**2 / steps / 2
    shared = float(np.var(y.mean(0))) - mean / steps - ours
    if shared <= SLIGHT * mean / steps:
        return _ratio(y - s[:, None] / 2, rate)
    precision = float((1 / s).sum()) + 1 / shared
    center, spread = (y / s[:, None]).sum(0) / precision, precision**-0.5
    low = -share * mean / spread - 3
    grid = np.linspace(low, 3, max(7, min(MOST_POINTS, math.ceil(3 - low)))) * spread
    # Up to what no b changes, ln P(b | y) without the canary is -(b - center)^2 precision / 2.
    weights = -(grid**2) * precision / 2
    within = [
        weight + _ratio(y - (center + b) - s[:, None] / 2, rate)
        for b, weight in zip(grid, weights, strict=True)
    ]
    return np.logaddexp.reduce(within) - np.logaddexp.reduce(weights)


def _ratio(x: np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """sum_t ln(1 - q + q e^x)."""
    with np.errstate(divide="ignore"):  # q may be 0 or 1
        return np.logaddexp(np.log1p(-np.asarray(rate)), np.log(rate) + x).sum(0)


class Claimed(NamedTuple):
    """The expected account of a run at `delta`, from the releases of each participating client,
    with canaries or without."""

    settings: Sequence[Setting]
    delta: float
    adjacency: str


def limits_of_trials(count: int, delta: float, claimed: float) -> dict[str, Any]:
    """The largest epsilon that `counted` can show, with a note if it is below the claim.

    It shows this if the statistic separates all trials with the canary from all without.
    """
    of, failure = count - count // 2, (1 - CONFIDENCE) / 2
    least = at_least(of, of, failure) - delta
    most = max(0.0, math.log(least / at_most(0, of, failure))) if least > 0 else 0.0
    head = TRIALS.format(count)
    note = "" if most > claimed else FEW.format(head, most, claimed, MORE_TRIALS)
    return {"most_by_counts": most, "note": note}


def limits_of_guesses(canaries: int, made: int, claimed: Claimed, more: str) -> dict[str, Any]:
    """The same of so many guesses; no note if any bound could refute the claim.

    `more` says what to raise if they are too few.
    """
    best, delta = Guesses(canaries, made, made), claimed.delta
    most = max(bounds_by_counts(best, delta).values())
    spent = hardest(event(one.noise_multiplier, *one[1:]) for one in claimed.settings if one.steps)
    total = max(
        (account([one], delta, adjacency=claimed.adjacency).upper for one in spent), default=0.0
    )
    enough = most > total or refuted(best, claims_of(spent, total, delta), 1 - CONFIDENCE)
    head = GUESSES.format(made, canaries)
    return {"most_by_counts": most, "note": "" if enough else FEW.format(head, most, total, more)}
