"""Poisson lots with a maximum size: how often they are cut, and what this adds to delta."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from conftest import small
from scipy.stats import norm
from typer.testing import CliRunner

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.experiments.run import execute
from fedmuon.experiments.spending import spent
from fedmuon.privacy.accounting.composition import Answer, account
from fedmuon.privacy.accounting.dominating_pairs import Event
from fedmuon.privacy.accounting.truncated import account_cut, cut_probability, delta_left
from fedmuon.privacy.mechanisms.fixed_order import FixedOrderSampling
from fedmuon.privacy.mechanisms.gaussian import Mechanism
from fedmuon.tasks.per_example.clipping import Clipping


def private(**privacy: Any) -> Config:
    """40 samples in lots of 8 on average; 6 steps."""
    return small(
        data={"train": 40},
        federation={"rounds": 3, "clients": 1, "per-round": 1},
        local={"recipe": "dp-sgd", "lr": 0.1, "steps": 2},
        privacy={"noise": 2.0, "lot": 8.0, "bound": 0.2, "delta": 1e-3} | privacy,
    )


def tail(size: int, rate: Fraction, most: int) -> float:
    """P(Bin(size, rate) > most), exactly."""
    each = (
        math.comb(size, k) * rate**k * (1 - rate) ** (size - k) for k in range(most + 1, size + 1)
    )
    return float(sum(each, Fraction(0)))


@pytest.mark.parametrize(("size", "lot", "most"), [(40, 8, 8), (40, 8, 20), (600, 32, 70)])
def test_how_often_a_lot_is_cut(size: int, lot: int, most: int) -> None:
    rate = Fraction(lot, size)
    exact, found = tail(size, rate, most), cut_probability(size, lot / size, most)
    assert exact <= found <= exact * (1 + 1e-5)
    if exact > 0.1:
        drawn = np.random.default_rng(0).binomial(size, lot / size, 100_000)
        assert (drawn > most).mean() == pytest.approx(exact, abs=0.01)
    else:  # negative control: a normal law in its place has less
        spread = math.sqrt(lot * (1 - lot / size))
        assert norm.sf((most + 0.5 - lot) / spread) < 0.5 * exact
    assert cut_probability(size, lot / size, size) == 0


def hockey(noise: float, rate: float, epsilon: float) -> tuple[float, float]:
    """H of (1 - r) N(0) + r N(1) from N(0), and of N(0) from it, at e^epsilon."""

    def of(x: float) -> tuple[float, float]:
        rest, moved = float(norm.sf(x / noise)), float(norm.sf((x - 1) / noise))
        return (1 - rate) * rest + rate * moved, rest

    def outcome(ratio: float) -> float:
        return 0.5 + noise**2 * math.log((ratio - 1 + rate) / rate)

    p, q = of(outcome(math.exp(epsilon)))
    forth = p - math.exp(epsilon) * q
    if math.exp(-epsilon) <= 1 - rate:
        return forth, 0.0
    p, q = of(outcome(math.exp(-epsilon)))
    return forth, (1 - q) - math.exp(epsilon) * (1 - p)


def exact_delta(
    size: int, rate: float, most: int, noise: float, epsilon: float
) -> tuple[float, float]:
    """delta of one release, both ways, for somebody who sees which other examples were kept.

    Given the others T, the example is in the lot with its own probability: q if |T| < B - 1, more
    than q if |T| = B - 1, and 0 if |T| = B.
    """
    others = size - 1
    found = np.zeros(2)
    for kept in range(most):
        ways = math.comb(others, kept) * rate**kept * (1 - rate) ** (others - kept)
        without, with_it = (1 - rate) * ways, rate * ways
        if kept == most - 1:
            with_it += sum(
                math.comb(size, k) * rate**k * (1 - rate) ** (size - k) * most / size
                for k in range(most + 1, size + 1)
            )
        given = with_it / (with_it + without)
        found += (with_it + without) * np.array(hockey(noise, given, epsilon))
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("most", [8, 12, 16, 20, 26])
def test_delta_of_lots_that_are_cut_is_at_most_what_is_claimed(most: int) -> None:
    size, rate, noise, delta = 40, 0.2, 1.0, 1e-2
    cut = cut_probability(size, rate, most)
    answer = account_cut(lambda at: account([Event(rate, noise)], at), delta, cut)
    if most < 16:
        assert (
            math.isinf(answer.upper)
            and not answer.certified
            and "larger than max-lot" in answer.note
        )
        return
    assert answer.certified and answer.lower <= answer.upper
    forth, back = exact_delta(size, rate, most, noise, answer.upper)
    assert max(forth, back) <= delta
    # What cutting adds could as well have been taken away.
    wider = delta + cut * (1 + math.exp(answer.upper))
    assert answer.lower == account([Event(rate, noise)], wider).lower
    assert max(exact_delta(size, rate, most, noise, answer.lower)) >= delta
    # delta_0, by an integral, and what cutting adds: the account is the least that meets both.
    uncut = max(hockey(noise, rate, answer.upper))
    assert uncut + cut * (1 + math.exp(answer.upper)) == pytest.approx(delta, rel=0.02)
    plain = account([Event(rate, noise)], delta)
    assert plain.upper <= answer.upper
    assert (answer.upper > 1.05 * plain.upper) == (most == 16)


def test_poisson_lots_do_not_stand_for_those_that_are_cut() -> None:
    """Negative control: the loss of an example that is missing may exceed -ln(1 - q)."""
    size, rate, most, noise = 6, 0.3, 1, 0.3
    epsilon = -math.log(1 - rate) + 1e-6
    assert hockey(noise, rate, epsilon)[1] == 0
    assert exact_delta(size, rate, most, noise, epsilon)[1] > 0.01
    uncut = [exact_delta(size, rate, size, noise, one) for one in (0.2, 0.5)]
    for epsilon, found in zip((0.2, 0.5), uncut, strict=True):
        assert found == pytest.approx(hockey(noise, rate, epsilon), abs=1e-12)


@pytest.mark.slow
def test_the_library_has_a_tighter_analysis_and_never_a_larger_epsilon() -> None:
    """dp-accounting 0.5.1 knows the pair of one step (arXiv:2508.15089), and cuts more lots."""
    size, rate, noise, steps, delta = 40, 0.2, 2.0, 6, 1e-3
    known = dp_accounting.pld.privacy_loss_distribution

    def by_library(most: int) -> float:
        one = known.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=size,
            sampling_probability=rate,
            truncated_batch_size=most,
            noise_multiplier=noise,
            value_discretization_interval=1e-3,
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        )
        return float(one.self_compose(steps).get_epsilon_for_delta(delta))

    def ours(most: int) -> float:
        cut = steps * cut_probability(size, rate, most)
        return account_cut(lambda at: account([Event(rate, noise, steps)], at), delta, cut).upper

    plain = account([Event(rate, noise, steps)], delta).upper
    assert by_library(size) == pytest.approx(plain, rel=2e-3)
    for most in (19, 20, 22, 30):
        assert by_library(most) <= ours(most) * (1 + 2e-3)
    assert ours(20) > 1.01 * plain and ours(30) == pytest.approx(plain, rel=1e-4)
    assert math.isinf(ours(12)) and plain * (1 - 2e-3) < by_library(12) < 3 * plain


def test_an_epsilon_that_delta_does_not_allow_is_not_claimed() -> None:
    """The point that is found meets its own equation, whatever the account without cuts is."""

    def answer_at(delta: float) -> Answer:
        upper = math.sqrt(2 * math.log(1 / delta))
        return Answer(upper, upper, upper, upper, "joint", "", "zero-out", "poisson", True, "")

    for cut in (0.0, 1e-12, 1e-8, 3e-8):
        found = account_cut(answer_at, 1e-5, cut)
        assert answer_at(delta_left(1e-5, cut, found.upper)).upper <= found.upper
        assert found.lower <= answer_at(1e-5).upper <= found.upper
    assert math.isinf(account_cut(answer_at, 1e-5, 1e-6).upper)


def test_lots_are_at_most_their_maximum_and_all_rows_alike() -> None:
    mechanism = Mechanism(Clipping(), 1.0, 8.0, max_lot=10)
    whole = Mechanism(Clipping(), 1.0, 8.0)
    lots = [mechanism.rows(lambda *a, **k: np.random.default_rng(), 40) for _ in range(4000)]
    sizes = np.array([len(rows) for rows in lots])
    assert sizes.max() == 10 and all((np.diff(rows) > 0).all() for rows in lots)
    exact = tail(40, Fraction(1, 5), 9)
    assert (sizes == 10).mean() == pytest.approx(exact, abs=0.04)
    counts = np.bincount(np.concatenate(lots), minlength=40)
    assert np.abs(counts - counts.mean()).max() < 5 * math.sqrt(counts.mean())
    free = [len(whole.rows(lambda *a, **k: np.random.default_rng(), 40)) for _ in range(400)]
    assert max(free) > 10  # control
    known = Mechanism(Clipping(), 1.0, 8.0, repeatable=True, max_lot=8)
    again = [known.rows(lambda *a, **k: np.random.default_rng(3), 40) for _ in range(2)]
    assert np.array_equal(again[0], again[1])


def test_a_run_with_a_maximum(tmp_path: Path) -> None:
    """Its epsilon is that of its ledger, which says of what lots it is."""
    found = execute(private(**{"max-lot": 20}), tmp_path)["privacy"]
    first = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert (first["max_lot"], first["lot"], found["max_lot"]) == (20, 8.0, 20)
    cut = 6 * tail(40, Fraction(1, 5), 20)
    steps = [Event(0.2, 2.0 / math.sqrt(found["blocks"]), 6)]
    left = 1e-3 - cut * (1 + math.exp(found["epsilon"]))
    assert found["epsilon"] == pytest.approx(account(steps, left).upper, rel=1e-4)
    assert spent(tmp_path)["epsilon"] == found["epsilon"]
    plain = execute(private(), tmp_path / "plain")["privacy"]  # control
    assert "max_lot" not in plain and plain["epsilon"] < found["epsilon"] * (1 - 1e-4)


def test_a_target_is_met_with_a_maximum(tmp_path: Path) -> None:
    found = execute(private(epsilon=2.0, noise=0.0, **{"max-lot": 20}), tmp_path)["privacy"]
    assert 1.98 < found["epsilon"] <= 2.0 and found["certified"]


@pytest.mark.parametrize(("privacy", "why"), [
    ({"max-lot": 20, "population": 40}, "leave rate and population out"),
    ({"max-lot": 20, "adjacency": "add-remove", "rate": 0.2}, "leave rate and population out"),
    ({"max-lot": 7}, "most lots would be cut"),
    ({"max-lot": 20, "sampling": "cyclic"}, "max-lot = 20 has no effect"),
])  # fmt: skip
def test_what_has_no_maximum(privacy: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        private(**privacy)


@pytest.mark.parametrize("given", [
    {"max-lot": 12},
    {"max-lot": 12, "epsilon": 5.0, "noise": 0.0},
    {"max-lot": 20, "noise": 0.4},  # delta - 2 p is left, but not at the epsilon of this noise
])  # fmt: skip
def test_a_maximum_that_uses_delta_up_is_rejected(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="these cuts use up more than half of delta"):
        execute(private(**given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mechanism_of_ones_own_has_the_same_limits() -> None:
    for given in (
        {"adjacency": "add-remove", "public_rate": 0.2},
        {"fixed_order": FixedOrderSampling("cyclic")},
        {"lot": 30.0},
    ):
        with pytest.raises(InputError, match=r"max.lot"):
            Mechanism(**{"clipping": Clipping(), "noise": 1.0, "lot": 8.0, "max_lot": 20, **given})
    with pytest.raises(InputError, match="max-lot is 0, but it must be at least 1"):
        cut_probability(40, 0.2, 0)


def test_sigma_is_told_with_the_account_of_cut_lots() -> None:
    """Both ends are those of lots with the maximum, at the whole delta."""
    given = ["--lot", "100", "--population", "10000", "--steps", "200", "--delta", "1e-5", "--json"]

    def told(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["privacy", *words, *given])
        assert not done.exit_code, done.output
        return json.loads(done.stdout)

    found = told("sigma", "--epsilon", "2", "--max-lot", "162")
    whole = told("epsilon", "--noise", str(found["noise"]))
    assert found["lower"] <= whole["upper"] < found["upper"] <= 2.0
