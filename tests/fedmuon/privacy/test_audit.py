"""Canaries against the accountant: below what holds, above what does not."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from conftest import quick
from scipy import stats
from scipy.optimize import linprog
from scipy.stats import binom, norm
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.auditing import trials as laboratory
from fedmuon.experiments.auditing.private_step import Step, examples, step
from fedmuon.experiments.cli import app
from fedmuon.federated.shards import Shard
from fedmuon.privacy import audit
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.audit import (
    Claims,
    Guesses,
    Setting,
    Statistics,
    binomial_tail,
    bounds_by_counts,
    counted,
    likelihood_ratio,
    projected,
    tilted,
)
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.base import Batch
from fedmuon.tasks.matrix import MatrixTask

E2E = Setting(2.3395, 1024 / 42043, 410, 49)
SMALL = Setting(1.2, 0.25, 12, 4)


def found(setting: Setting, count: int, seed: int = 0) -> Statistics:
    return audit.trials(setting, projected(setting, np.random.default_rng(seed)), count)


@pytest.mark.slow
def test_the_published_claim_is_refuted_and_the_joint_one_is_not() -> None:
    """000's own setting: printed 7.985, joint 61.98; counts alone show more than 7.985."""
    shown = counted(found(E2E, 60_000), 8e-6)
    joint = epsilon(E2E.noise_multiplier, E2E.sampling_probability, E2E.steps, 8e-6, E2E.blocks)
    assert 7.9852 < shown.epsilon < joint.lower


@pytest.mark.parametrize(
    "setting", [SMALL, Setting(3.0, 0.5, 20, 1), Setting(2.0, 1.0, 3, 2), Setting(0.8, 0.05, 30, 1)]
)
def test_both_bounds_stay_below_the_joint_epsilon(setting: Setting) -> None:
    delta, statistics = 1e-3, found(setting, 20_000)
    joint = epsilon(*setting[:3], delta, setting.blocks).upper
    by_counts = counted(statistics, delta)
    by_tilt = tilted(statistics, delta, np.random.default_rng(1))
    assert 0 < by_counts.epsilon < joint
    assert 0.5 * joint < by_tilt.epsilon < joint


def test_an_audit_of_a_wrong_claim_fails_it() -> None:
    """Negative control: five times less noise than the accountant was told."""
    delta, claimed = 1e-3, Setting(5 * SMALL.noise_multiplier, *SMALL[1:])
    joint = epsilon(*claimed[:3], delta, claimed.blocks).upper
    assert counted(found(claimed, 20_000), delta).epsilon < joint
    assert counted(found(SMALL, 20_000), delta).epsilon > joint


@pytest.mark.slow
def test_the_bounds_hold_with_their_confidence() -> None:
    """A Gaussian whose epsilon is known exactly: of 100 audits about 5 may claim more."""
    delta, setting = 0.05, Setting(1.0, 1.0, 1, 1)
    exact = epsilon(1.0, 1.0, 1, delta).upper
    above = {counted: 0, tilted: 0}
    for seed in range(100):
        statistics = found(setting, 1000, seed)
        above[counted] += counted(statistics, delta).epsilon > exact
        above[tilted] += (
            tilted(statistics, delta, np.random.default_rng(seed), 0.95).epsilon > exact
        )
    assert max(above.values()) <= 12


def test_both_bounds_hold_together() -> None:
    """The larger one has the confidence asked for: each may fail half as often."""
    statistics, seed = found(SMALL, 20_000), np.random.default_rng
    both = audit.both_bounds(statistics, 1e-3, seed(1), 0.9)
    by_counts = counted(statistics, 1e-3, 0.95)
    assert both == (by_counts, tilted(statistics, 1e-3, seed(1), 0.95))
    assert {bound.confidence for bound in both} == {0.95}


def test_the_statistic_is_the_likelihood_ratio() -> None:
    sums = np.array([[0.3, -1.2, 4.0], [0.0, 7.5, -2.0]])
    for row, value in zip(sums, likelihood_ratio(SMALL, sums), strict=True):
        exact = mpmath.mpf(0)
        for at in row:
            without = mpmath.npdf(at, 0, SMALL.noise_multiplier)
            within = mpmath.npdf(at, math.sqrt(SMALL.blocks), SMALL.noise_multiplier)
            exact += mpmath.log(0.75 + 0.25 * within / without)
        assert value == pytest.approx(float(exact), rel=1e-12)


def test_the_ratio_is_stronger_than_the_plain_sum() -> None:
    """The optimal test, against adding up the aligned sums."""
    setting = Setting(1.0, 0.05, 100, 4)
    observe = projected(setting, np.random.default_rng(0))
    sums = [observe((4000, 100), present) for present in (True, False)]
    ratio = Statistics(*(likelihood_ratio(setting, part) for part in sums))
    plain = Statistics(*(part.sum(1) for part in sums))
    assert counted(ratio, 1e-3).epsilon > counted(plain, 1e-3).epsilon


def test_clopper_pearson_by_its_definition() -> None:
    low, high = audit.at_least(7, 50, 0.025), audit.at_most(7, 50, 0.025)
    tail = [math.comb(50, k) for k in range(51)]
    at = lambda p, ks: sum(tail[k] * p**k * (1 - p) ** (50 - k) for k in ks)  # noqa: E731
    assert at(low, range(7, 51)) == pytest.approx(0.025)
    assert at(high, range(8)) == pytest.approx(0.025)
    assert audit.at_least(0, 50, 0.05) == 0
    assert audit.at_most(50, 50, 0.05) == 1


def test_what_shows_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="trials"):
        found(SMALL, 10)
    with pytest.raises(InputError, match="noise"):
        found(Setting(0.0, 0.1, 2, 1), 1000)
    heard: list[str] = []
    with pytest.raises(InputError, match="Set trials = 100 or more"):
        laboratory.audit(Setting(0.3, 0.25, 2, 1), 1e-3, 20, 0, "release", 10, 40, heard.append)
    assert not any(heard)


@pytest.mark.parametrize("code", quick(["projected", "release"], {"projected"}))
def test_the_command(code: str) -> None:
    arguments = ["privacy", "audit", "--noise", "1.2", "--lot", "10", "--population", "40",
                 "--steps", "2", "--delta", "0.1", "--blocks", "2", "--trials", "100",
                 "--code", code]  # fmt: skip
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output + str(done.exception)
    record = json.loads(done.output)
    assert 0 <= record["counted"] <= record["epsilon_at_least"]
    assert ("tilted" in record) == (code == "projected")  # which takes the noise on trust
    assert record["below_joint"] == (record["epsilon_at_least"] <= record["joint"])


@pytest.mark.parametrize(("code", "word"), [("mine", "code"), ("release", "projected")])
def test_the_command_refuses(code: str, word: str) -> None:
    """A code that does not exist, and settings that would take hours of real steps."""
    done = CliRunner().invoke(app, ["privacy", "audit", "--noise", "2.3395", "--lot", "1024",
                                    "--population", "42043", "--steps", "410", "--delta", "8e-6",
                                    "--blocks", "49", "--code", code])  # fmt: skip
    assert isinstance(done.exception, InputError)
    assert word in str(done.exception)


@pytest.mark.parametrize("count", [100, 101, 1000])
def test_the_most_that_counts_can_show(count: int) -> None:
    """Of trials that nothing hides, which `counted` takes apart; of others it is never reached."""
    apart = Statistics(np.full(count, 9.0), np.full(count, -9.0))
    assert counted(apart, 1e-3).epsilon == pytest.approx(
        audit.limits_of_trials(count, 1e-3, 0.0)["most_by_counts"]
    )
    hidden = found(Setting(2.0, 0.5, 1, 1), count)
    assert (
        counted(hidden, 1e-3).epsilon < audit.limits_of_trials(count, 1e-3, 0.0)["most_by_counts"]
    )
    assert audit.limits_of_trials(count, 0.999, 0.0)["most_by_counts"] == 0.0


@pytest.mark.parametrize(
    ("code", "noise", "few"),
    quick(
        [("release", 0.3, True), ("release", 3.0, False), ("projected", 0.3, False)],
        [("release", 3.0, False)],
    ),
)
def test_trials_that_cannot_test_a_claim_say_so_beforehand(
    code: str, noise: float, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counts alone; `tilted` reaches further. Control: all are told before they begin."""
    told: list[str] = []
    true = laboratory.trials

    def trials(*given: Any) -> Statistics:
        assert len(told) == 1
        return true(*given)

    monkeypatch.setattr(laboratory, "trials", trials)
    setting = Setting(noise, 0.5, 1, 1)
    record = laboratory.audit(setting, 1e-5, 100, 0, code, 8.0, 16, told.append)
    assert told == [record["note"]] and bool(record["note"]) == few
    assert record.get("most_by_counts", math.inf) >= record["epsilon_at_least"]
    assert ("most_by_counts" in record) == (code != "projected")
    assert code == "projected" or (record["most_by_counts"] < record["joint"]) == few
    assert str(laboratory.table(record).caption).count("cannot refute it") == few
    assert ("100 trials can show" in record["note"]) == few


# The code of private steps under audit: within its claim as it is, caught where it breaks it.

POPULATION = 16
NETWORK = Setting(1.0, 0.5, 1, 2)
MATRIX = Setting(0.7, 0.25, 2, 1)
DELTA = 0.05
SURE = 1 - 1e-7  # for what nobody can repeat


def of_network(blocks: int = NETWORK.blocks, seed: int = 0) -> Step:
    noise, rate = NETWORK[:2]
    return step(noise, rate * POPULATION, POPULATION, blocks, np.random.default_rng(seed))


def of_matrix() -> Step:
    """The matrix classifier, whose clipped gradients are another code."""
    one, rng = of_network(1), np.random.default_rng(0)
    data = examples(POPULATION, 1)
    shard, task = Shard(Batch(data.inputs.flatten(1), data.labels)), MatrixTask(4, 3)
    return replace(one, task=task, shard=shard, at=task.initial(rng), rng=rng)


def repeatable(own: Step, setting: Setting, kind: type[Mechanism] = Mechanism) -> Step:
    """The same, with a mechanism of that kind that draws from a seed."""
    noise, rate = setting[:2]
    mechanism = kind(own.mechanism.clipping, noise, rate * POPULATION, repeatable=True)
    return replace(own, mechanism=mechanism)


def shown(own: Step, setting: Setting, count: int, confidence: float = 0.95) -> float:
    return counted(audit.trials(setting, own.observe, count), DELTA, confidence).epsilon


def claimed(setting: Setting) -> float:
    return epsilon(*setting[:3], DELTA, setting.blocks).upper


@pytest.mark.slow
def test_a_private_step_keeps_its_claim() -> None:
    """And an audit sees a good part of what it spends."""
    own = repeatable(of_network(), NETWORK)
    assert 0.4 * claimed(NETWORK) < shown(own, NETWORK, 1500) < claimed(NETWORK)


class HalfNoise(Mechanism):
    """Draws half the noise that it is asked for."""

    def releases(self, task, batches, draws, step=0, round=0):
        quiet = Mechanism(self.clipping, self.noise / 2, self.lot, self.repeatable)
        return quiet.releases(task, batches, draws, step, round)


class TwiceTheBound(Mechanism):
    """Clips at 2 C, with noise for C."""

    def releases(self, task, batches, draws, step=0, round=0):
        loose = replace(self.clipping, bound=2 * self.clipping.bound)
        same = Mechanism(loose, self.noise / 2, self.lot, self.repeatable)
        return same.releases(task, batches, draws, step, round)


class WholeLots(Mechanism):
    """Every lot is all of the data."""

    def rows(self, draw, size):
        return np.arange(size)


@pytest.mark.parametrize("defect", quick([HalfNoise, TwiceTheBound, WholeLots, None], {HalfNoise}))
def test_a_defect_is_caught(defect: type[Mechanism] | None) -> None:
    """Negative controls: each shows more than is claimed; where there is none, less is shown."""
    own = repeatable(of_matrix(), MATRIX, defect or Mechanism)
    found = shown(own, MATRIX, 700)
    assert found > 1.5 * claimed(MATRIX) if defect else found < claimed(MATRIX)


def with_the_canary(x: np.ndarray) -> np.ndarray:
    """The law of an aligned sum: N(sqrt(2), 1) in half of the lots, else N(0, 1)."""
    return (stats.norm.cdf(x) + stats.norm.cdf(x - np.sqrt(2))) / 2


@pytest.mark.slow
def test_secret_noise_and_lots_have_the_projected_law() -> None:
    """As in a run, where nothing is keyed: no two audits agree."""
    own = of_network()
    present, absent = own.observe((300, 1), True).ravel(), own.observe((300, 1), False).ravel()
    assert stats.kstest(present, with_the_canary)[1] > 1e-7
    assert stats.kstest(absent, "norm")[1] > 1e-7
    assert stats.kstest(absent, with_the_canary)[1] < 1e-7
    assert not np.array_equal(own.observe((2, 2), True), own.observe((2, 2), True))
    assert shown(own, NETWORK, 100, SURE) < claimed(NETWORK)


@pytest.mark.parametrize("blocks", [1, 3, 49])
def test_the_canary_is_clipped_in_every_block_and_orthogonal_to_all_others(blocks: int) -> None:
    own = of_network(blocks, seed=blocks)
    clipping, point = own.mechanism.clipping, [(1.0, own.at)]
    lengths = [float(value.norm()) for value in own.canary.values()]
    assert len(lengths) == blocks and min(lengths) > 5 * clipping.bound
    assert {value.dtype for value in own.at.values()} == {torch.float32}
    alone, others = (
        own.task.clipped(point, [own.shard.batch(rows)], clipping)[1]
        for rows in (np.array([POPULATION - 1]), np.arange(POPULATION - 1))
    )
    for name, unit in own.directions.items():
        assert float((alone[name] * unit).sum()) == pytest.approx(clipping.bound, rel=1e-5)
        assert float(others[name].norm()) > 0 == float((others[name] * unit).sum())


# Right guesses about canaries: the bounds by linear programs and randomized response.

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
    for k, (a, b, eps, delta) in enumerate(pairs):
        first, whole = many + k * len(guesses), np.zeros(size)
        whole[first : first + len(guesses)] = 1
        for j in range(len(guesses)):
            row = np.zeros(size)
            row[[a * len(guesses) + j, b * len(guesses) + j]] = 1, -math.exp(eps)
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
            for eps, delta in zip(*held, strict=True):
                hit = np.where(j >= start, j, 0.0)
                miss = np.where(j >= start - 1, made - j, 0.0)
                rows.append((hit - math.exp(eps) * miss) / canaries)
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
    assert (
        bounds_by_counts(Guesses(60, 40, 40), 0.01)["binomial"] == 0
    )  # 2 m delta > 1: nothing is claimed


@pytest.mark.parametrize("bound", ["binomial", "trade_off"])
@pytest.mark.parametrize(("count", "epsilon"), [(50, 0.5), (200, 2.0), (1000, 4.0)])
def test_randomized_response_attains_the_bounds(bound, count: int, epsilon: float) -> None:
    """V is binomial, so the chance to claim too much is known: at most 5%, and the binomial bound
    cannot do with one right guess fewer, nor the other with two."""
    law = binom(count, 1 / (1 + math.exp(-epsilon)))
    allowed = int(law.isf(FAILURE)) + 1  # the least v with P[V >= v] <= 5%
    claimed = [
        bounds_by_counts(Guesses(count, count, v), 0.0)[bound] > epsilon
        for v in range(allowed - 1, allowed + 2)
    ]
    assert claimed == sorted(claimed) and not claimed[0] and claimed[-1]
    assert claimed[1] or bound == "trade_off"


@pytest.mark.parametrize("leak", [1, 2])
def test_of_many_repetitions_few_claim_too_much(leak: int) -> None:
    """1000 runs of randomized response, and as a negative control one that leaks twice as much."""
    epsilon, delta, count = 1.5, 1e-6, 300
    law = binom(count, 1 / (1 + math.exp(-leak * epsilon)))
    right, times = np.unique(law.rvs(1000, random_state=0), return_counts=True)
    above = sum(
        times[k] * (max(bounds_by_counts(one, delta).values()) > epsilon)
        for k, one in enumerate(Guesses(count, count, int(v)) for v in right)
    )
    assert above > 990 if leak == 2 else 10 <= above <= 75


def test_guesses_are_those_of_which_most_is_known() -> None:
    """Worthwhile are all, where all are alike; few, where few are known well and others not."""
    scores = np.array([3.0, -4.0, 0.1, -0.2, 5.0])
    included = np.array([True, True, True, True, True])
    assert audit.guess_coins(scores, included, 3) == Guesses(5, 3, 2)
    assert audit.guess_coins(scores, ~included, 5) == Guesses(5, 5, 2)
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
    guesses = audit.guess_coins(scores, np.arange(40_000) < 20_000, made)
    spent = [Event(setting.sampling_probability, setting.noise_multiplier / 7, 410)]
    assert 7.9852 + 0.25 < bounds_by_counts(guesses, delta)["trade_off"] < 61.78
    assert bounds_by_counts(guesses, delta)["binomial"] < 7.9852  # its delta costs more
    assert 1 < audit.noise_below(guesses, spent, 62.0, delta, 0.95) < 1.6
