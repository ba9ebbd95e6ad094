"""The accountant against closed forms, quadrature, dp-accounting, and the published table."""

import csv
import dataclasses
import itertools
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
from conftest import quick
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ndtr
from typer.testing import CliRunner

from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import app
from fedmuon.privacy.accounting import composition, pld, renyi
from fedmuon.privacy.accounting.composition import (
    account,
    epsilon,
    event,
    noise_for,
    require_supported,
)
from fedmuon.privacy.accounting.dominating_pairs import Event, bottom, hardest, outcome, top

ROOT = Path(__file__).resolve().parents[3]
E2E = (2.3395, 1024 / 42043, 410, 8e-6)
DART = (2.3614, 1024 / 60591, 885, 1e-5)
ARGUMENTS = ["--noise", "2.3395", "--lot", "1024", "--population", "42043", "--steps", "410",
             "--delta", "8e-6"]  # fmt: skip


def gaussian_epsilon(noise: Any, delta: float) -> float:
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


def density(q: float, s: float, shift: float, x: Any) -> Any:
    return (1 - q) * mpmath.npdf(x, 0, s) + q * mpmath.npdf(x, shift, s)


def _loss(q: float, s: float, x: Any, back: int = 1) -> Any:
    """ln(P/Q)(x). Q is shifted back by 1 under replace-one, and by 0 under zero-out."""
    return mpmath.log(density(q, s, 1, x) / density(q, s, -back, x))


def once(q: float, s: float, eps: float, back: int = 1) -> float:
    """delta(eps) of a release: the positive part of P - e^eps Q, by quadrature over the line, cut
    where it begins."""

    def positive(x: Any) -> Any:
        return max(0, density(q, s, 1, x) - mpmath.exp(eps) * density(q, s, -back, x))

    with mpmath.workdps(16):
        start = mpmath.findroot(lambda x: _loss(q, s, x, back) - eps, (0, 1))
        ends = [-1 - 12 * s, start, start + s, start + 4 * s, start + 1 + 12 * s]
        return float(mpmath.quad(positive, ends))  # pyright: ignore


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
    assert "is not a privacy guarantee" in printed.note


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
    """Negative control: blocks that are forgotten, or noise per example taken for noise per sum."""
    exact = gaussian_epsilon(20 / math.sqrt(100), 1e-5)
    steps, blocks = epsilon(20, 1.0, 100, 1e-5), epsilon(20, 1.0, 1, 1e-5, blocks=100)
    assert steps.lower <= exact <= steps.upper
    assert blocks.lower <= exact <= blocks.upper
    assert epsilon(20, 1.0, 25, 1e-5, blocks=4).upper == pytest.approx(exact, rel=1e-3)
    exact = gaussian_epsilon(5 / math.sqrt(49), 1e-5)
    assert epsilon(5, 1.0, 1, 1e-5, blocks=1).upper < 0.5 * exact
    assert epsilon(5, 1.0, 1, 1e-5, blocks=49).upper >= exact


@pytest.mark.parametrize(("q", "noise"), [(0.02, 1.0), (0.3, 0.7), (0.5, 3.0)])
@pytest.mark.parametrize("eps", [0.05, 0.4])
def test_one_subsampled_release_by_quadrature(q: float, noise: float, eps: float) -> None:
    delta = once(q, noise, eps, back=0)
    found = account([Event(q, noise)], delta)
    assert found.lower <= eps * (1 + 1e-9)
    assert found.upper >= eps * (1 - 1e-9)
    assert found.upper - found.lower < 1.1e-3


RENYI = [*itertools.product((0.02, 0.4), (0.7, 1.5, 2.5), (1.3, 2, 3.7, 8, 32), (False,)),
         (1.0, 0.8, 1.3, False), (1.0, 0.8, 8, False), (0.02, 0.7, 1.3, True),
         (0.4, 1.5, 20, True), (0.3, 0.8, 3.7, True), (1.0, 0.8, 3.7, True)]  # fmt: skip
QUICK = {(0.02, 2.5, 8, False), (0.4, 1.5, 1.3, False), (1.0, 0.8, 1.3, False),
         (0.02, 0.7, 1.3, True)}  # fmt: skip


@pytest.mark.parametrize(("q", "s", "order", "replaced"), quick(RENYI, QUICK))
def test_the_renyi_divergence_by_quadrature_and_by_binomials(
    q: float, s: float, order: float, replaced: bool
) -> None:
    far = 2 * order if replaced else order
    with mpmath.workdps(30):
        points = sorted({-12 * s, -1, 0, 0.5, 1, order / 2, order, far - 1, far, far + 12 * s})

        def moment(x: Any) -> Any:
            p, q_back = (
                1 - q + q * mpmath.exp((2 * shift * x - 1) / (2 * mpmath.mpf(s) ** 2))
                for shift in (1, -1)
            )  # over N(0, s^2), as Q is without `replaced`
            return mpmath.npdf(x, 0, s) * p**order * (q_back ** (1 - order) if replaced else 1)

        exact = mpmath.log(mpmath.quad(moment, points, maxdegree=8)) / (order - 1)
        found = renyi.divergence(Event(q, s, 1, replaced), order)
        assert found == pytest.approx(float(exact), rel=1e-9)
        if order == int(order) and not replaced:  # Mironov, Talwar, Zhang 2019
            terms = (
                mpmath.binomial(order, k)
                * mpmath.mpf(1 - q) ** (int(order) - k)
                * mpmath.mpf(q) ** k
                * mpmath.exp(mpmath.mpf(k * k - k) / (2 * mpmath.mpf(s) ** 2))
                for k in range(int(order) + 1)
            )
            assert float(mpmath.log(sum(terms)) / (order - 1)) == pytest.approx(float(exact))


EVENTS = [[Event(0.02, 0.8, 40)], [Event(0.5, 3.0, 30)], [Event(0.02, 0.8, 90), Event(0.1, 2.0)]]


BOTH = [*itertools.product([*EVENTS, [Event(1.0, 8.0, 10)]], (False, True))]


@pytest.mark.parametrize(("events", "replaced"), quick(BOTH, [BOTH[1], BOTH[4]]))
def test_it_agrees_with_dp_accounting(events: list[Event], replaced: bool) -> None:
    """On the same grid, to what either drops in the tails; Renyi where its series is tight."""
    events = [dataclasses.replace(one, replaced=replaced) for one in events]
    lower, upper, rdp = composition.ends_by_library(events, 1e-5)
    assert pld.bound(events, 1e-5, pld.GRID, up=False) == pytest.approx(lower, rel=1e-4)
    assert pld.bound(events, 1e-5, pld.GRID) == pytest.approx(upper, rel=1e-4)
    if replaced:
        assert upper < rdp == renyi.epsilon(events, 1e-5)
        return
    assert rdp * 0.99 <= renyi.epsilon(events, 1e-5) <= rdp * (1 + 1e-6)
    found = account(events, 1e-5)
    assert lower <= found.upper
    assert found.lower <= upper <= found.rdp
    assert account(events, 1e-5, accountant="dp-accounting").upper == pytest.approx(upper)


def test_a_finer_grid_closes_the_bracket() -> None:
    spent = [Event(0.02, 0.8, 200)]
    both = [[pld.bound(spent, 1e-5, grid, up) for up in (True, False)] for grid in (1e-2, 1e-3)]
    gaps = [upper - lower for upper, lower in both]
    assert 0 < gaps[1] < 0.2 * gaps[0]


def test_order_and_grouping_of_events_do_not_matter() -> None:
    one = account([Event(0.02, 0.8, 60), Event(0.1, 2.0, 5)], 1e-5)
    other = account([Event(0.1, 2.0, 5), *[Event(0.02, 0.8, 20)] * 3, Event(0.0, 1.0, 9)], 1e-5)
    assert other.upper == pytest.approx(one.upper, rel=1e-9)
    assert account([], 1e-5).epsilon == 0
    found = account([Event(0.1, 0.0, 1), Event(0.1, 1.0, 5)], 1e-5)  # one without noise
    assert math.isinf(found.epsilon) and not found.certified
    assert event(2.0, 0.1, 5, blocks=4) == Event(0.1, 1.0, 5)
    assert event(2.0, 0.1, 5, blocks=4, mode="per-release") == Event(0.1, 2.0, 20)


def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps() -> None:
    base = epsilon(1.0, 0.02, 100, 1e-5).upper
    assert epsilon(1.1, 0.02, 100, 1e-5).upper < base < epsilon(1.0, 0.02, 120, 1e-5).upper
    assert epsilon(1.0, 0.02, 100, 1e-4).upper < base < epsilon(1.0, 0.03, 100, 1e-5).upper


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
        (lambda: require_supported(sampling="shuffled"), "Use 'poisson'"),
        (lambda: noise_for(0, 0.1, 10, 1e-5), "epsilon"),
        (lambda: noise_for(1, 0.1, 10, 1e-5, adjacency="neighbours"), "zero-out, add-remove"),
        (
            lambda: account([Event(0.1, 1.0)], 1e-5, adjacency="substitute"),
            "one of zero-out, add-r",
        ),
    ],
)
def test_what_is_not_accounted_for_is_refused(refused, word: str) -> None:
    with pytest.raises(InputError, match=word):
        refused()


@pytest.mark.parametrize(
    ("target", "adjacency"),
    quick(
        [(1.0, "zero-out"), (8.0, "zero-out"), (3.0, "add-remove"), (3.0, "replace-one")],
        [(8.0, "zero-out"), (3.0, "replace-one")],
    ),
)
def test_calibration_meets_its_target_and_wastes_little(target: float, adjacency: str) -> None:
    given: Any = {"blocks": 4, "adjacency": adjacency}
    noise, found = noise_for(target, 0.02, 200, 1e-5, **given)
    assert found.upper <= target and found.adjacency == adjacency
    assert found == epsilon(noise, 0.02, 200, 1e-5, **given)
    assert epsilon(noise * 0.999, 0.02, 200, 1e-5, **given).upper > target


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
    quick([(1e-3, 256 / 60000, 400), (0.01, 256 / 60000, 2000), (2, 0.1, 50)], {(2, 0.1, 50)}),
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


def shown(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["privacy", *arguments, "--json"])
    assert done.exit_code == 0, done.output + str(done.exception)
    return json.loads(done.output)


def test_the_command_answers_and_refuses() -> None:
    found = shown("epsilon", *ARGUMENTS, "--blocks", "49")
    assert list(found) == ["epsilon", "lower", "upper", "rdp", "mode", "accountant", "adjacency",
                           "sampling", "certified", "note"]  # fmt: skip
    assert found["epsilon"] == pytest.approx(61.98, abs=0.01)
    noise = shown("sigma", "--epsilon", "8", *ARGUMENTS[2:], "--blocks", "49")
    assert noise["upper"] <= 8 < noise["rdp"]
    assert noise["noise"] == pytest.approx(4.778, abs=0.002)
    told = CliRunner().invoke(app, ["privacy", "epsilon", *ARGUMENTS, "--mode", "per-release"])
    assert "guarantee" in " ".join(told.output.split())
    for more in (["--adjacency", "neighbours"], ["--sampling", "shuffled"], ["--lot", "99999"]):
        done = CliRunner().invoke(app, ["privacy", "epsilon", *ARGUMENTS, *more])
        assert isinstance(done.exception, InputError)


@pytest.mark.parametrize(
    "options", quick(["--mode joint", "--mode per-release", "--sampling cyclic --band 4"],
                     {"--mode joint"})
)  # fmt: skip
def test_the_command_answers_quickly_without_heavy_packages(options: str) -> None:
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
         *options.split(), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 10.0
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "ray", "flwr", "dp_accounting", "matplotlib", "sklearn"}
    assert np.isfinite(json.loads(done.stdout)["epsilon"])


# The pairs of each adjacency against quadrature, group privacy, and what is not a pair.

REPLACED: Any = {"adjacency": "replace-one"}


def _normal(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def twice(q: float, s: float, eps: float) -> float:
    """The same of two: over the first outcome, and of the second in normal tails beyond a root."""

    def density(shift: float, x: float) -> float:
        return (1 - q) * _normal(x / s) / s + q * _normal((x - shift) / s) / s

    def integrand(x: float) -> float:
        first = math.log(density(1, x) / density(-1, x))
        start: Any = brentq(
            lambda y: math.log(density(1, y) / density(-1, y)) + first - eps, -20, 20, xtol=1e-14
        )
        none, one, other = (float(ndtr((shift - start) / s)) for shift in (0, 1, -1))
        beyond, under = ((1 - q) * none + q * tail for tail in (one, other))
        return density(1, x) * beyond - math.exp(eps) * density(-1, x) * under

    found = quad(integrand, -1 - 8 * s, 1 + 8 * s, points=(0, 1), epsabs=1e-13, epsrel=1e-11)
    return found[0]


@pytest.mark.parametrize(
    ("q", "s", "eps", "count"),
    [(0.02, 1.0, 0.1, 1), (0.3, 0.7, 0.4, 1), (0.5, 3.0, 0.05, 1), (1.0, 0.8, 3.0, 1),
     (0.02, 0.4, 2.0, 1), (0.3, 0.7, 1.0, 2),
     pytest.param(0.6, 2.0, 0.5, 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_replace_one_by_quadrature(q: float, s: float, eps: float, count: int) -> None:
    delta = (once if count == 1 else twice)(q, s, eps)
    found = account([Event(q, s, count)], delta, **REPLACED)
    assert found.lower <= eps * (1 + 1e-9) and eps * (1 - 1e-9) <= found.upper <= found.rdp
    assert found.upper - found.lower < 1.1e-3 * count and found.adjacency == "replace-one"
    assert account([Event(q, s, count)], delta).upper < found.lower  # control: zero-out


@pytest.mark.parametrize(("q", "s"), [(0.3, 0.7), (0.05, 1.5), (1.0, 1.0)])
def test_no_two_contributions_are_told_apart_better(q: float, s: float) -> None:
    """H_a of any P_u from Q_v in the plane, by a sum over a grid, against that of the pair on the
    line in closed form: the sup over half-lines, as in the proof. u = -v attains it."""
    line = np.arange(-1 - 7 * s, 1 + 7 * s, s / 20)
    plane = np.stack(np.meshgrid(line, line))
    cell, at = (s / 20) ** 2, np.linspace(-1 - 7 * s, 1 + 7 * s, 4001)

    def density(shift: np.ndarray) -> np.ndarray:
        far = plane - shift[:, None, None]
        return np.exp(-(far**2).sum(0) / (2 * s * s)) / (2 * np.pi * s * s)

    def mixed(shift: np.ndarray) -> np.ndarray:
        return (1 - q) * density(np.zeros(2)) + q * density(shift)

    def best(a: float, back: float) -> float:
        """Of the pair whose Q is shifted back so far: 1 for replace-one, 0 for zero-out."""
        tails = [ndtr((shift - at) / s) for shift in (0, 1, -back)]
        one, other = ((1 - q) * tails[0] + q * tail for tail in tails[1:])
        return float((one - a * other).max())

    rng = np.random.default_rng(0)
    ends = [(np.array([1.0, 0.0]), np.array([-1.0, 0.0]))]
    for radius in (1.0, 0.6):
        angles = rng.uniform(0, 2 * np.pi, (5, 2))
        ends += [(np.array([np.cos(i), np.sin(i)]), radius * np.array([np.cos(j), np.sin(j)]))
                 for i, j in angles]  # fmt: skip
    for a in (0.4, 1.0, 1.6, 4.0):
        found = [float(np.maximum(mixed(u) - a * mixed(v), 0).sum() * cell) for u, v in ends]
        assert found[0] == pytest.approx(best(a, 1), abs=2e-4)  # the sum's own error
        assert max(found) <= best(a, 1) + 2e-4
        assert found[0] > best(a, 0) + 5e-3 or a != 1  # control: the pair of zero-out is exceeded


def test_what_is_told_of_the_loss_is_where_it_is_attained() -> None:
    for q, s in ((0.02, 1.0), (0.3, 0.05), (0.9, 5.0), (1.0, 0.5), (1e-6, 0.3)):
        event = Event(q, s, 1, replaced=True)
        wanted = np.linspace(bottom(event), top(event), 9)
        with mpmath.workdps(30):
            found = [float(_loss(q, mpmath.mpf(s), s * x)) for x in outcome(event, wanted)]
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("events", EVENTS)
def test_replacing_is_removing_and_adding(events: list[Event]) -> None:
    """At most, by group privacy: (2 e, (1 + exp e) delta); and at least what one of them is."""
    one = account(events, 1e-6).upper
    both = account(events, (1 + math.exp(one)) * 1e-6, **REPLACED)
    assert both.upper <= 2 * one
    assert account(events, 1e-5).lower < account(events, 1e-5, **REPLACED).upper


def test_the_trap_of_sensitivity_one() -> None:
    """Without sampling it is a Gaussian of twice the shift; dp-accounting's Renyi accountant leaves
    the shift at 1 under replace-one, less than half of what its own distributions say."""
    import dp_accounting  # slow, and collecting needs it not

    found = []
    for accountant in (dp_accounting.rdp.RdpAccountant, dp_accounting.pld.PLDAccountant):
        one = accountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        one.compose(dp_accounting.GaussianDpEvent(1.0))
        found.append(one.get_epsilon(1e-5))
    assert found == pytest.approx([4.73, 10.00], abs=0.01)
    ours, exact = epsilon(1.0, 1.0, 1, 1e-5, **REPLACED), gaussian_epsilon(0.5, 1e-5)
    assert ours.lower <= exact <= ours.upper < exact + 1e-3 < ours.rdp
    assert found[0] < ours.lower
    own = epsilon(1.0, 0.1, 20, 1e-5, **REPLACED)
    slow = epsilon(1.0, 0.1, 20, 1e-5, accountant="dp-accounting", **REPLACED)
    assert own.lower <= slow.upper and slow.lower <= own.upper and own.rdp == slow.rdp
    doubled = account([Event(0.02, 0.5, 200)], 1e-5)  # another pair: figures of the docstring
    replaced = epsilon(1.0, 0.02, 200, 1e-5, **REPLACED)
    assert (doubled.upper, replaced.upper) == pytest.approx((12.2, 2.59), rel=2e-3)


@pytest.mark.slow
def test_little_noise_and_rare_examples_are_answered() -> None:
    for q, s, steps in ((1.0, 0.003, 1), (0.5, 1e-4, 1), (0.02, 0.05, 2), (1e-4, 0.5, 100)):
        found = epsilon(s, q, steps, 1e-5, **REPLACED)
        assert 0 < found.lower <= found.upper <= found.rdp < math.inf
        assert found.upper >= epsilon(s, q, steps, 1e-5).lower
