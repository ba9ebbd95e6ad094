"""One training run with many canaries: how many right guesses refute which epsilon.

Each of m canaries is in the data or not by a fair coin of its own, S in {0, 1}^m. Who sees what the
run released, but no coin, guesses r of them; r is fixed beforehand, which ones may depend on all
that was seen. V of the guesses are right. Changing a coin leaves one canary out, or puts it in: in
a run that is (epsilon, delta)-private for that, many right guesses are unlikely, in two ways.

**Binomial** (Steinke, Nasr, Jagielski 2023, Theorem 5.2). With W ~ Bin(r, 1 / (1 + e^-epsilon))

    P[V >= v] <= P[W >= v] + 2 m delta max_{i = 1..v} P[v > W >= v - i] / i.

At delta = 0: given the release and the coins before it, a coin's odds are the ratio of two mixtures
of neighbouring runs, at most e^epsilon. So every guess is right with a chance of 1 / (1 +
e^-epsilon) at most, whatever the others were, and V lies below W; randomized response attains it.
Else V lies below W + F, where F counts the coins of which the release tells more: E F <= 2 m delta.

**Trade-off** (Mahloujifar, Melis, Chaudhuri 2024: auditing f-DP in one run). Let P(E) <= f(P'(E))
for all events E and neighbours, f concave and rising: here f(x) = min_k (e^epsilon_k x + delta_k),
that is all of the claims (epsilon_k, delta_k) at once. Let p_j = P[V = j]. For every set J

    (1/m) sum_{j in J} j p_j <= f( (1/m) sum_{j in J} (r - j + 1) p_{j-1} ).                     (1)

Proof. For canary i, the other coins s and a side b let E be the event that i is guessed to be b
and that the guesses about (s, b) have j in J right ones. Beside the coin 1 - b the same release has
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
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv

from fedmuon.privacy import loss
from fedmuon.privacy.pairs import Event

PRECISION = 1e-4  # of an epsilon
MOST_EPSILON = 700.0  # whose exponential is a number
NEAR = 1.03  # how near the noise comes to that which is refuted
MOST_TIMES = 32  # the declared noise, beyond which nothing is refuted
POINTS = 32  # claims that stand for a mechanism


class Guesses(NamedTuple):
    """Of m canaries so many were guessed, and so many of these rightly."""

    canaries: int
    made: int
    right: int


class Claims(NamedTuple):
    """The run is (epsilons[k], deltas[k])-private for every k."""

    epsilons: np.ndarray
    deltas: np.ndarray


def guessed(scores: np.ndarray, included: np.ndarray, made: int) -> Guesses:
    """The `made` canaries with the largest |score| are guessed: in the data where it is positive.

    A score is what the release says, best as a log-likelihood ratio; `included` are the coins.
    """
    chosen = np.argsort(-np.abs(scores), kind="stable")[:made]
    right = int(((scores > 0) == included)[chosen].sum())
    return Guesses(len(scores), made, right)


def worthwhile(ratios: np.ndarray, canaries: int, failure: float) -> int:
    """How many guesses promise the largest bound, by rehearsed log-likelihood ratios, in and out
    of the data alike: the guess of one is wrong with chance 1 / (1 + e^|ratio|)."""
    share = canaries / len(ratios)
    wrong = np.cumsum(1 / (1 + np.exp(np.sort(np.abs(ratios))[::-1]))) * share
    made = np.arange(1, len(ratios) + 1) * share
    right = betaincinv(made - wrong, wrong + 1, failure)
    return max(1, round(float(made[np.argmax(right)])))


def binomial_tail(guesses: Guesses, epsilon: float, delta: float) -> float:
    """At least the chance of so many right guesses in an (epsilon, delta)-private run."""
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


def by_binomial(guesses: Guesses, delta: float, confidence: float) -> float:
    """The largest epsilon that Theorem 5.2 refutes.

    Its tail grows with epsilon where 2 m delta <= 1, as then it is a maximum of means of P[W >= v]
    and P[W >= v - i]; beyond, nothing is claimed.
    """
    if 2 * guesses.canaries * delta > 1:
        return 0.0
    return _largest(lambda epsilon: binomial_tail(guesses, epsilon, delta) < 1 - confidence)


def by_trade_off(guesses: Guesses, delta: float, confidence: float) -> float:
    """The largest epsilon of which the one claim (epsilon, delta) is refuted."""

    def beyond(epsilon: float) -> bool:
        claim = Claims(np.array([epsilon]), np.array([delta]))
        return refuted(guesses, claim, 1 - confidence)

    return _largest(beyond)


def _largest(beyond: Callable[[float], bool]) -> float:
    """The last epsilon that is refuted, of those from 0 on."""
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
    """What the accountant certifies at `POINTS` epsilons up to `most`, be the example added or
    removed, and be it part of whichever of these kinds of releases."""
    epsilons = most * np.linspace(0, 1, POINTS) ** 3
    return Claims(epsilons, np.max([_deltas(one, epsilons, delta) for one in spent], axis=0))


def _deltas(spent: Event, epsilons: np.ndarray, delta: float) -> np.ndarray:
    """Of one kind of releases."""
    grid, deltas = loss.coarsest([spent], delta, epsilons[-1]), np.zeros(len(epsilons))
    for part in loss.estimates(spent, grid):
        tail, parts = 1e-6 * delta, [(part, spent.count)]
        composed = loss.compose(parts, grid, tail)
        losses = (composed.start + np.arange(len(composed.masses))) * grid
        beyond = composed.infinite + loss.slack(parts, composed, tail)
        for k, first in enumerate(np.searchsorted(losses, epsilons)):
            excess = -np.expm1(epsilons[k] - losses[first:]) @ composed.masses[first:]
            deltas[k] = max(deltas[k], excess + beyond)
    return deltas


def noise_below(
    guesses: Guesses, spent: Sequence[Event], most: float, delta: float, confidence: float
) -> float:
    """With this confidence the noise was less than so many times the declared one; inf if the
    guesses refute none.

    It stands on more than counts: on the mechanism being the declared one, Poisson lots and
    Gaussian noise, of which only the multiplier is in doubt. `spent` are the `hardest` of what the
    run released, `most` is about its epsilon.
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
