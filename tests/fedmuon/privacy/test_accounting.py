"""The accountant against closed forms, quadrature, dp-accounting, and the published table."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.privacy.accounting import composition, pld, renyi
from fedmuon.privacy.accounting.calibration import noise_for
from fedmuon.privacy.accounting.composition import account, epsilon, event, require_supported
from fedmuon.privacy.accounting.dominating_pairs import Event, hardest

ROOT = Path(__file__).resolve().parents[3]
E2E = (2.3395, 1024 / 42043, 410, 8e-6)
DART = (2.3614, 1024 / 60591, 885, 1e-5)
ARGUMENTS = ["--noise", "2.3395", "--lot", "1024", "--population", "42043", "--steps", "410",
             "--delta", "8e-6"]  # fmt: skip


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The analytic Gaussian mechanism (Balle, Wang 2018), in 30 digits."""
    with mpmath.workdps(30):
        noise, half = mpmath.mpf(noise), 1 / (2 * mpmath.mpf(noise))

        def excess(eps: Any) -> Any:
            tail = mpmath.exp(eps) * mpmath.ncdf(-half - eps * noise)
            return mpmath.ncdf(half - eps * noise) - tail - delta

        low, high = mpmath.mpf(0), 1 / noise**2 + 20 / noise
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(high)


def hockey_stick(q: float, noise: float, eps: float) -> float:
    """delta(eps) of one Poisson-subsampled Gaussian when the example is removed, by quadrature."""
    with mpmath.workdps(20):

        def difference(x: float) -> Any:
            without = mpmath.npdf(x, 0, noise)
            within = (1 - q) * without + q * mpmath.npdf(x, 1, noise)
            return max(mpmath.mpf(0), within - mpmath.exp(eps) * without)

        start = noise**2 * math.log((math.exp(eps) - 1 + q) / q) + 0.5
        points = [start, start + noise, start + 4 * noise, 30 * noise]
        return float(mpmath.mpf(mpmath.quad(difference, points)))  # pyright: ignore


@pytest.mark.parametrize(
    ("setting", "rdp", "lower", "upper"),
    [(E2E, 7.98505, 61.78, 61.98), (DART, 7.97976, 67.15, 67.63)],
    ids=["e2e", "dart"],
)
def test_the_published_settings(setting: tuple, rdp: float, lower: float, upper: float) -> None:
    joint = epsilon(*setting, blocks=49)
    assert (joint.lower, joint.upper) == pytest.approx((lower, upper), abs=0.01)
    assert joint.epsilon == joint.upper < joint.rdp
    assert joint.certified
    printed = epsilon(*setting, blocks=49, mode="per-release")
    assert printed.rdp == pytest.approx(rdp, abs=2e-5)
    assert printed.lower < printed.epsilon == printed.rdp
    assert not printed.certified
    assert "certifies nothing" in printed.note


def test_every_row_of_the_published_table() -> None:
    """What was printed is the per-release Renyi epsilon, to 0.3%: sigma has four digits."""
    file = ROOT / "tests" / "helpers" / "published_accounting.csv"
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 4
    for row in rows:
        rate = float(row["lot"]) / float(row["population"])
        asked = (float(row["sigma"]), rate, int(row["steps"]), float(row["delta"]))
        blocks = int(row["releases_per_step"])
        found = epsilon(*asked, blocks=blocks, mode="per-release")
        assert found.rdp == pytest.approx(float(row["printed_epsilon"]), rel=3e-3)
        if blocks == 1:
            joint = epsilon(*asked)
            assert joint.rdp == found.rdp
            assert 6.8 < joint.lower < joint.upper < 7.0


@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_without_sampling_it_is_the_analytic_gaussian(noise: float, delta: float) -> None:
    found = epsilon(noise, 1.0, 1, delta)
    exact = gaussian_epsilon(noise, delta)
    assert found.lower <= exact <= found.upper
    assert found.upper == pytest.approx(exact, rel=1e-3, abs=2e-4)


@pytest.mark.parametrize("noise", [0.003, pytest.param(0.05, marks=pytest.mark.slow)])
def test_little_noise_is_answered_on_a_coarser_grid(noise: float) -> None:
    """400 releases without sampling are one, whose loss would take 1e8 points of the grid."""
    exact = gaussian_epsilon(noise / 20, 1e-6)
    found = epsilon(noise, 1.0, 400, 1e-6)
    assert found.lower <= exact <= found.upper <= 1.2 * exact
    sampled = epsilon(noise, 0.01, 2000, 1e-5)
    assert 0.5 * sampled.upper < sampled.lower <= sampled.upper <= sampled.rdp


def test_many_gaussians_are_one_and_many_blocks_are_one() -> None:
    exact = gaussian_epsilon(20 / math.sqrt(100), 1e-5)
    steps, blocks = epsilon(20, 1.0, 100, 1e-5), epsilon(20, 1.0, 1, 1e-5, blocks=100)
    assert steps.lower <= exact <= steps.upper
    assert blocks.lower <= exact <= blocks.upper
    assert epsilon(20, 1.0, 25, 1e-5, blocks=4).upper == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("q", "noise"), [(0.02, 1.0), (0.3, 0.7), (0.5, 3.0)])
@pytest.mark.parametrize("eps", [0.05, 0.4])
def test_one_subsampled_release_by_quadrature(q: float, noise: float, eps: float) -> None:
    delta = hockey_stick(q, noise, eps)
    found = account([Event(q, noise)], delta)
    assert found.lower <= eps * (1 + 1e-9)
    assert found.upper >= eps * (1 - 1e-9)
    assert found.upper - found.lower < 1.1e-3


@pytest.mark.parametrize(("q", "noise"), [(0.02, 0.7), (0.02, 2.5), (0.4, 1.5), (1.0, 0.8)])
@pytest.mark.parametrize(
    "order",
    [
        1.3,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 3.7)),
        8,
        pytest.param(32, marks=pytest.mark.slow),
    ],
)
def test_the_renyi_divergence_by_quadrature_and_by_binomials(
    q: float, noise: float, order: float
) -> None:
    with mpmath.workdps(30):
        points = sorted({-12 * noise, 0, 0.5, 1, order / 2, order, order + 12 * noise})

        def moment(x):
            ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * mpmath.mpf(noise) ** 2))
            return mpmath.npdf(x, 0, noise) * ratio**order

        exact = mpmath.log(mpmath.quad(moment, points, maxdegree=8)) / (order - 1)
        assert renyi.divergence(Event(q, noise), order) == pytest.approx(float(exact), rel=1e-9)
        if order == int(order):  # Mironov, Talwar, Zhang 2019
            terms = (
                mpmath.binomial(order, k)
                * mpmath.mpf(1 - q) ** (int(order) - k)
                * mpmath.mpf(q) ** k
                * mpmath.exp(mpmath.mpf(k * k - k) / (2 * mpmath.mpf(noise) ** 2))
                for k in range(int(order) + 1)
            )
            assert float(mpmath.log(sum(terms)) / (order - 1)) == pytest.approx(float(exact))


@pytest.mark.parametrize(
    "events",
    [
        [Event(0.02, 0.8, 200)],
        [Event(0.5, 3.0, 30)],
        [Event(1.0, 8.0, 10)],
        pytest.param(
            [Event(0.02, 0.8, 100), Event(0.1, 2.0, 50), Event(1.0, 20.0, 3)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_agrees_with_dp_accounting(events: list[Event]) -> None:
    """On the same grid, to what either drops in the tails; Renyi where its series is tight."""
    lower, upper, rdp = composition.ends_by_library(events, 1e-5)
    assert pld.lower(events, 1e-5, pld.GRID) == pytest.approx(lower, rel=1e-4)
    assert pld.upper(events, 1e-5, pld.GRID) == pytest.approx(upper, rel=1e-4)
    assert rdp * 0.99 <= renyi.epsilon(events, 1e-5) <= rdp * (1 + 1e-6)
    found = account(events, 1e-5)
    assert lower <= found.upper
    assert found.lower <= upper <= found.rdp
    assert account(events, 1e-5, accountant="dp-accounting").upper == pytest.approx(upper)


def test_a_finer_grid_closes_the_bracket() -> None:
    spent = [Event(0.02, 0.8, 200)]
    gaps = [pld.upper(spent, 1e-5, grid) - pld.lower(spent, 1e-5, grid) for grid in (1e-2, 1e-3)]
    assert 0 < gaps[1] < 0.2 * gaps[0]


def test_order_and_grouping_of_events_do_not_matter() -> None:
    one = account([Event(0.02, 0.8, 60), Event(0.1, 2.0, 5)], 1e-5)
    other = account([Event(0.1, 2.0, 5), *[Event(0.02, 0.8, 20)] * 3, Event(0.0, 1.0, 9)], 1e-5)
    assert other.upper == pytest.approx(one.upper, rel=1e-9)
    assert account([], 1e-5).epsilon == 0


def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps() -> None:
    base = epsilon(1.0, 0.02, 100, 1e-5).upper
    assert epsilon(1.1, 0.02, 100, 1e-5).upper < base < epsilon(1.0, 0.02, 120, 1e-5).upper
    assert epsilon(1.0, 0.02, 100, 1e-4).upper < base < epsilon(1.0, 0.03, 100, 1e-5).upper


def test_wrong_sensitivity_is_seen() -> None:
    """Negative control: blocks that are forgotten, or noise per example taken for noise per sum."""
    exact = gaussian_epsilon(5 / math.sqrt(49), 1e-5)
    assert epsilon(5, 1.0, 1, 1e-5, blocks=1).upper < 0.5 * exact
    assert epsilon(5, 1.0, 1, 1e-5, blocks=49).upper >= exact


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (lambda: epsilon(0, 0.1, 10, 1e-5), "infinite"),
        (lambda: epsilon(-1, 0.1, 10, 1e-5), "noise"),
        (lambda: epsilon(1, 1.5, 10, 1e-5), "population"),
        (lambda: epsilon(1, 0.1, 0, 1e-5), "steps"),
        (lambda: epsilon(1, 0.1, 10, 1e-5, blocks=0), "blocks"),
        (lambda: epsilon(1, 0.1, 10, 1.0), "delta"),
        (lambda: epsilon(1, 0.1, 10, 1e-5, mode="each"), "mode"),
        (lambda: epsilon(1, 0.1, 10, 1e-5, accountant="mine"), "accountant"),
        (lambda: require_supported(sampling="shuffled"), "Poisson"),
        (lambda: noise_for(0, 0.1, 10, 1e-5), "epsilon"),
        (lambda: noise_for(1, 0.1, 10, 1e-5, adjacency="neighbours"), "zero-out, add-remove"),
    ],
)
def test_what_is_not_accounted_for_is_refused(refused, word: str) -> None:
    with pytest.raises(InputError, match=word):
        refused()


def test_a_release_without_noise_in_a_list_is_infinite() -> None:
    found = account([Event(0.1, 0.0, 1), Event(0.1, 1.0, 5)], 1e-5)
    assert math.isinf(found.epsilon)
    assert not found.certified


@pytest.mark.parametrize("target", [1.0, 8.0])
def test_calibration_meets_its_target_and_wastes_little(target: float) -> None:
    noise, found = noise_for(target, 0.02, 200, 1e-5, blocks=4)
    assert found.upper <= target
    assert found.upper == epsilon(noise, 0.02, 200, 1e-5, blocks=4).upper
    assert epsilon(noise * 0.999, 0.02, 200, 1e-5, blocks=4).upper > target


def least_by_halving(target: float, rate: float, steps: int, delta: float) -> float:
    """The least noise that the accountant lets pass, to 1e-5, by halving alone."""
    low, high = 0.5, 1e3
    while high > low * (1 + 1e-5):
        middle = math.sqrt(low * high)
        passes = epsilon(middle, rate, steps, delta).upper <= target
        low, high = (low, middle) if passes else (middle, high)
    return high


@pytest.mark.parametrize(
    ("target", "rate", "steps"),
    [
        pytest.param(1e-3, 256 / 60000, 400, marks=pytest.mark.slow),
        pytest.param(0.01, 256 / 60000, 2000, marks=pytest.mark.slow),
        (2, 0.1, 50),
    ],
)
def test_the_least_noise_is_that_of_the_accountant_at_small_targets_too(
    target: float, rate: float, steps: int
) -> None:
    """A control: the Renyi epsilon, which is never too small, asks for more of it."""
    releases = rate, steps, 1e-5
    noise, found = noise_for(target, *releases)
    least = least_by_halving(target, *releases)
    assert found.upper <= target
    assert noise == pytest.approx(least, rel=1.5e-4)
    assert renyi.epsilon([Event(rate, 1.05 * least, steps)], 1e-5) > target


def test_the_hardest_releases_spend_the_most() -> None:
    """Of two of which neither exceeds the other in rate, count and quiet, either may spend more, so
    that both are kept (a control: the larger rate alone would hide 4000 lots)."""
    once, often, more = Event(1.0, 2.0, 1), Event(0.02, 2.0, 1000), Event(0.02, 2.0, 4000)
    assert hardest([once, often, once]) == [often, once]
    assert hardest([once, often, more]) == [more, once]
    assert hardest([Event(0.1, 1.0, 5, True), Event(0.1, 1.0, 5)]) == [Event(0.1, 1.0, 5, True)]
    for easier in EASIER:
        assert hardest([easier, more]) == [more]


EASIER = Event(0.02, 2.0, 3999), Event(0.01, 2.0, 4000), Event(0.02, 2.1, 4000)


@pytest.mark.slow
def test_what_exceeds_in_rate_count_and_quiet_spends_more() -> None:
    once, often, more = Event(1.0, 2.0, 1), Event(0.02, 2.0, 1000), Event(0.02, 2.0, 4000)
    spent = [account([one], 1e-4).upper for one in (often, once, more)]
    assert spent == sorted(spent)
    for easier in EASIER:
        assert account([easier], 1e-4).upper < spent[2]


def test_calibration_per_release_reproduces_the_published_sigma() -> None:
    noise, found = noise_for(7.9852, *E2E[1:], blocks=49, mode="per-release")
    assert noise == pytest.approx(2.3395, abs=5e-4)
    assert not found.certified


def test_events_of_a_run() -> None:
    assert event(2.0, 0.1, 5, blocks=4) == Event(0.1, 1.0, 5)
    assert event(2.0, 0.1, 5, blocks=4, mode="per-release") == Event(0.1, 2.0, 20)


def shown(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["privacy", *arguments, "--json"])
    assert done.exit_code == 0, done.output + str(done.exception)
    return json.loads(done.output)


def test_the_command_answers_in_json() -> None:
    found = shown("epsilon", *ARGUMENTS, "--blocks", "49")
    assert list(found) == ["epsilon", "lower", "upper", "rdp", "mode", "accountant", "adjacency",
                           "sampling", "certified", "note"]  # fmt: skip
    assert found["epsilon"] == pytest.approx(61.98, abs=0.01)
    noise = shown("sigma", "--epsilon", "8", *ARGUMENTS[2:], "--blocks", "49")
    assert noise["upper"] <= 8 < noise["rdp"]
    assert noise["noise"] == pytest.approx(4.778, abs=0.002)


def test_the_command_refuses_and_shows() -> None:
    told = CliRunner().invoke(app, ["privacy", "epsilon", *ARGUMENTS, "--mode", "per-release"])
    assert "certifies nothing" in " ".join(told.output.split())
    for more in (["--adjacency", "neighbours"], ["--sampling", "shuffled"], ["--lot", "99999"]):
        done = CliRunner().invoke(app, ["privacy", "epsilon", *ARGUMENTS, *more])
        assert isinstance(done.exception, InputError)


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "joint"),
        pytest.param(("--mode", "per-release"), marks=pytest.mark.slow),
        pytest.param(("--sampling", "cyclic", "--band", "4"), marks=pytest.mark.slow),
    ],
)
def test_the_command_answers_quickly_without_heavy_packages(options: tuple[str, ...]) -> None:
    """A second of processor time, start-up included; ten, so that no machine is too slow."""
    code = (
        "import sys\n"
        "from fedmuon.experiments.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "privacy", "epsilon", *ARGUMENTS, "--blocks", "49",
         *options, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 10.0
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "ray", "flwr", "dp_accounting", "matplotlib", "sklearn"}
    assert np.isfinite(json.loads(done.stdout)["epsilon"])
