"""Right guesses about canaries: the bounds by linear programs, randomized response, jax_privacy."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq, linprog
from scipy.special import ndtr
from scipy.stats import binom, norm

from fedmuon.privacy import audit
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.audit import Claims, Guesses, Setting, binomial_tail, by_binomial, by_trade_off

FAILURE = 0.05


def claims(*pairs: tuple[float, float]) -> Claims:
    return Claims(*map(np.array, zip(*pairs, strict=True)))


def most_right(canaries: int, made: int, right: int, held: Claims) -> float:
    """The largest P[V >= v] of any mechanism that keeps the claims: a linear program over P(y | s),
    y all ways to guess `made` coins."""
    sides = list(itertools.product((0, 1), repeat=canaries))
    guesses = [y for y in itertools.product((0, 1, None), repeat=canaries)
               if sum(one is not None for one in y) == made]  # fmt: skip
    many = len(sides) * len(guesses)
    near = [(a, b) for a, b in itertools.permutations(range(len(sides)), 2)
            if sum(x != y for x, y in zip(sides[a], sides[b], strict=True)) == 1]  # fmt: skip
    pairs = [(a, b, e, d) for a, b in near for e, d in zip(*held, strict=True)]
    size = many + len(pairs) * len(guesses)  # and the excess max(0, P - e^eps P') of each outcome
    rows, most = [], []
    for k, (a, b, epsilon, delta) in enumerate(pairs):
        first, whole = many + k * len(guesses), np.zeros(size)
        whole[first : first + len(guesses)] = 1
        for j in range(len(guesses)):
            row = np.zeros(size)
            row[[a * len(guesses) + j, b * len(guesses) + j]] = 1, -math.exp(epsilon)
            row[first + j] = -1
            rows.append(row)
            most.append(0.0)
        rows.append(whole)
        most.append(delta)
    value, sums = np.zeros(size), np.zeros((len(sides), size))
    for a, s in enumerate(sides):
        sums[a, a * len(guesses) : (a + 1) * len(guesses)] = 1
        for j, y in enumerate(guesses):
            hits = sum(x == z for x, z in zip(s, y, strict=True))
            value[a * len(guesses) + j] = -(hits >= right) / len(sides)
    found = linprog(value, np.array(rows), most, sums, np.ones(len(sides)))
    assert found.status == 0
    return -found.fun


def least_tail(guesses: Guesses, held: Claims) -> float:
    """The smallest failure at which the trade-off bound refutes: its tail."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if audit.refuted(guesses, held, middle) else (middle, high)
    return high


@pytest.mark.parametrize(("canaries", "made", "right"), [(2, 2, 2), (2, 1, 1), (3, 3, 2)])
@pytest.mark.parametrize("claim", [(0.7, 0.0), (1.2, 0.05), (2.0, 0.01)])
def test_no_mechanism_exceeds_a_tail(
    canaries: int, made: int, right: int, claim: tuple[float, float]
) -> None:
    """The best of all mechanisms, found by a linear program; with delta = 0 both bounds of a
    canary that is always guessed are that best one."""
    guesses, held = Guesses(canaries, made, right), claims(claim)
    best = most_right(canaries, made, right, held)
    tails = binomial_tail(guesses, *claim), least_tail(guesses, held)
    assert best <= min(tails) + 1e-7
    if not claim[1]:
        assert tails[0] == pytest.approx(best, abs=1e-7)
    else:  # negative control: what is left out of a bound is missed
        assert best > binomial_tail(guesses, claim[0], 0.0)


def test_several_claims_at_once_are_a_tighter_bound() -> None:
    """And still no less than the best of all mechanisms that keep both."""
    guesses, pairs = Guesses(3, 3, 3), [(0.0, 0.3), (1.0, 0.1)]
    both, each = claims(*pairs), [claims(one) for one in pairs]
    tail = least_tail(guesses, both)
    assert tail == pytest.approx(most_right(*guesses, both), abs=1e-7)
    assert tail < 0.96 * min(least_tail(guesses, one) for one in each)


def test_the_greedy_mass_is_the_least() -> None:
    """Of all (p_0, ..., p_r) that keep (1), by a linear program."""
    rng = np.random.default_rng(0)
    for made in (4, 7, 12):
        canaries = made + int(rng.integers(0, 9))
        right = int(rng.integers(made // 2 + 1, made + 1))
        held = claims((float(rng.uniform(0, 2)), 0.01), (3.0, 0.001))
        j = np.arange(made + 1)
        rows, most = [], []
        for start in range(1, right + 1):
            for epsilon, delta in zip(*held, strict=True):
                hit = np.where(j >= start, j, 0.0)
                miss = np.where(j >= start - 1, made - j, 0.0)
                rows.append((hit - math.exp(epsilon) * miss) / canaries)
                most.append(delta)
        best = linprog(-(j >= right).astype(float), rows, most, [np.ones(made + 1)], [1.0])
        assert least_tail(Guesses(canaries, made, right), held) == pytest.approx(
            min(1.0, -best.fun), abs=1e-7
        )


def test_the_binomial_tail_by_its_formula() -> None:
    guesses, epsilon, delta = Guesses(60, 40, 33), 1.1, 2e-3
    p = 1 / (1 + math.exp(-epsilon))
    reached = lambda v: sum(  # noqa: E731
        math.comb(40, w) * p**w * (1 - p) ** (40 - w) for w in range(v, 41)
    )
    most = max((reached(33 - i) - reached(33)) / i for i in range(1, 34))
    exact = reached(33) + 2 * 60 * delta * most
    assert binomial_tail(guesses, epsilon, delta) == pytest.approx(exact, rel=1e-9)
    assert binomial_tail(Guesses(60, 40, 0), epsilon, delta) == 1
    assert by_binomial(Guesses(60, 40, 40), 0.01, 0.95) == 0  # 2 m delta > 1: nothing is claimed


@pytest.mark.parametrize("bound", [by_binomial, by_trade_off])
@pytest.mark.parametrize(("count", "epsilon"), [(50, 0.5), (200, 2.0), (1000, 4.0)])
def test_randomized_response_attains_the_bounds(bound, count: int, epsilon: float) -> None:
    """V is binomial, so the chance to claim too much is known: at most 5%, and the binomial bound
    cannot do with one right guess fewer, nor the other with two."""
    law = binom(count, 1 / (1 + math.exp(-epsilon)))
    allowed = int(law.isf(FAILURE)) + 1  # the least v with P[V >= v] <= 5%
    claimed = [bound(Guesses(count, count, v), 0.0, 0.95) > epsilon for v in range(allowed - 1,
               allowed + 2)]  # fmt: skip
    assert claimed == sorted(claimed) and not claimed[0] and claimed[-1]
    assert claimed[1] or bound is by_trade_off


@pytest.mark.parametrize("leak", [1, 2])
def test_of_many_repetitions_few_claim_too_much(leak: int) -> None:
    """1000 runs of randomized response, and as a negative control one that leaks twice as much."""
    epsilon, delta, count = 1.5, 1e-6, 300
    law = binom(count, 1 / (1 + math.exp(-leak * epsilon)))
    right, times = np.unique(law.rvs(1000, random_state=0), return_counts=True)
    above = sum(
        times[k] * (max(by_binomial(one, delta, 0.95), by_trade_off(one, delta, 0.95)) > epsilon)
        for k, one in enumerate(Guesses(count, count, int(v)) for v in right)
    )
    assert above > 990 if leak == 2 else 10 <= above <= 75


def test_guesses_are_those_of_which_most_is_known() -> None:
    scores = np.array([3.0, -4.0, 0.1, -0.2, 5.0])
    included = np.array([True, True, True, True, True])
    assert audit.guessed(scores, included, 3) == Guesses(5, 3, 2)
    assert audit.guessed(scores, ~included, 5) == Guesses(5, 5, 2)


def test_the_number_of_guesses_that_is_worthwhile() -> None:
    """All, where all are alike; few, where few are known well and the others not at all."""
    alike = np.array([2.0, -2.0] * 500)
    mixed = np.concatenate([np.full(100, 6.0), np.full(900, 0.01)])
    assert audit.worthwhile(alike, 400, FAILURE) == 400
    assert audit.worthwhile(mixed, 400, FAILURE) == 40


def test_claims_hold_of_the_mechanism_and_no_less_noise_is_refuted() -> None:
    """Against the Gaussian's own delta; guesses of a Gaussian with noise 1 refute some noise."""
    sigma, most = 0.5, 12.0
    held = audit.claims_of([Event(1.0, sigma, 1)], most, 1e-5)
    exact = norm.cdf(0.5 / sigma - held.epsilons * sigma) - np.exp(held.epsilons) * norm.cdf(
        -0.5 / sigma - held.epsilons * sigma
    )
    assert (held.deltas >= exact).all()
    np.testing.assert_allclose(held.deltas, exact, rtol=2e-3, atol=1e-10)
    often = Event(0.1, sigma, 20)  # of another client, about whom the run tells more, or less
    both, other = (audit.claims_of([*one, often], most, 1e-5) for one in ([Event(1.0, sigma)], []))
    np.testing.assert_array_equal(both.deltas, np.maximum(held.deltas, other.deltas))
    assert (other.deltas > held.deltas).any() and (other.deltas < held.deltas).any()
    spent, law = [Event(1.0, sigma, 1)], binom(400, norm.cdf(0.5 / sigma))  # guessed by their sides

    def below(right: float) -> float:
        return audit.noise_below(Guesses(400, 400, int(right)), spent, most, 1e-5, 0.95)

    assert 1 < below(law.ppf(0.95)) < below(law.ppf(0.5)) < 4
    assert below(200) == math.inf
    assert below(400) < 1  # a control: it must have been quieter than declared


@pytest.mark.slow
def test_one_run_at_the_published_setting_refutes_what_is_printed() -> None:
    """000's E2E prints 7.985; 40000 canaries along what is released of them show more by counts
    alone, and the joint epsilon is more than all bounds (benchmarks/one_run.py: real steps)."""
    setting, delta, rng = Setting(2.3395, 1024 / 42043, 410, 49), 8e-6, np.random.default_rng(0)
    seen = [audit.trials(setting, audit.projected(setting, rng), n) for n in (5000, 20_000)]
    rehearsed, scores = (np.concatenate(one) for one in seen)
    made = audit.worthwhile(rehearsed, 40_000, FAILURE)
    guesses = audit.guessed(scores, np.arange(40_000) < 20_000, made)
    spent = [Event(setting.sampling_probability, setting.noise_multiplier / 7, 410)]
    assert 7.9852 + 0.25 < by_trade_off(guesses, delta, 0.95) < 61.78
    assert by_binomial(guesses, delta, 0.95) < 7.9852  # its delta costs more
    assert 1 < audit.noise_below(guesses, spent, 62.0, delta, 0.95) < 1.6


def auditing_of_jax_privacy() -> Any:
    """Its module alone: the package loads jax, which this one does not need."""
    package = importlib.util.find_spec("jax_privacy")
    if package is None or package.origin is None:
        pytest.skip("jax_privacy is not installed")
    file = Path(package.origin).with_name("auditing.py")
    spec = importlib.util.spec_from_file_location("auditing_of_jax_privacy", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("right", "made", "delta"), [(70, 80, 1e-3), (80, 80, 1e-4), (45, 60, 0.0)]
)
def test_jax_privacy_has_the_same_bounds(
    right: int, made: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its binomial bound; and its recursion for a Gaussian, where ours has claims of that Gaussian:
    more of them come nearer to it, from below."""
    jax = auditing_of_jax_privacy()
    guesses = Guesses(100, made, right)
    tail = jax._one_run_p_value(100, made, right, 1.3, delta)
    assert binomial_tail(guesses, 1.3, delta) == pytest.approx(tail, rel=1e-9)
    theirs = jax._epsilon_one_run(0.0, 100, made, right, FAILURE, delta)
    assert by_binomial(guesses, delta, 0.95) == pytest.approx(theirs, abs=2e-4)
    blow_up = lambda epsilon, delta: lambda x: norm.cdf(norm.ppf(x) - mu_of(epsilon, delta))  # noqa: E731
    monkeypatch.setattr(jax, "_gaussian_dp_blow_up_inverse", blow_up)  # needs a newer dp-accounting
    gaussian = jax._epsilon_one_run_fdp(0.0, 100, made, right, FAILURE, 1e-5)
    at = [refuted_gaussian(guesses, gaussian * times, 1e-5) for times in (0.9, 0.995, 1.005)]
    assert at == [True, True, False]


def refuted_gaussian(guesses: Guesses, epsilon: float, delta: float) -> bool:
    """Whether a Gaussian mechanism that is (epsilon, delta)-private is refuted, by 4000 claims."""
    mu = mu_of(epsilon, delta)
    epsilons = np.linspace(-2, 4 * epsilon, 4000)
    held = Claims(epsilons, np.array([gaussian_delta(one, mu) for one in epsilons]))
    return audit.refuted(guesses, held, FAILURE)


def mu_of(epsilon: float, delta: float) -> float:
    """Of the Gaussian mechanism whose delta at epsilon this is."""
    found = brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-6, 50, xtol=1e-14)
    assert isinstance(found, float)
    return found


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Of a Gaussian mechanism with sensitivity mu and noise 1 (Balle and Wang 2018, Theorem 8)."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
