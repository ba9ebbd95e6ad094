"""Canaries against the accountant: below what holds, above what does not."""

import json
import math
from typing import Any

import mpmath
import numpy as np
import pytest
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.auditing import trials as laboratory
from fedmuon.experiments.cli import app
from fedmuon.privacy import audit
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import Setting, Statistics, counted, likelihood_ratio, projected, tilted

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


@pytest.mark.slow
def test_of_trials_that_are_refused_nothing_is_said_beforehand() -> None:
    """A control: of a hundred, which can run and cannot test the claim, it is said."""
    heard: list[str] = []
    with pytest.raises(InputError, match="use at least 100"):
        laboratory.audit(Setting(0.3, 0.25, 2, 1), 1e-3, 20, 0, "release", 10, 40, heard.append)
    assert not any(heard)
    laboratory.audit(Setting(0.3, 0.25, 2, 1), 1e-3, 100, 0, "release", 10, 40, heard.append)
    assert "100 trials can show" in heard[0]


@pytest.mark.parametrize("code", ["projected", pytest.param("release", marks=pytest.mark.slow)])
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
    assert counted(apart, 1e-3).epsilon == pytest.approx(audit.most_counted(count, 1e-3))
    hidden = found(Setting(2.0, 0.5, 1, 1), count)
    assert counted(hidden, 1e-3).epsilon < audit.most_counted(count, 1e-3)
    assert audit.most_counted(count, 0.999) == 0.0


@pytest.mark.parametrize(
    ("code", "noise", "few"),
    [("release", 0.3, True), ("release", 3.0, False), ("projected", 0.3, False)],
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
    assert str(laboratory.table(record).caption).count("cannot test the") == few
