"""The pairs of each adjacency against quadrature, group privacy, and what is not a pair."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ndtr
from test_accounting import gaussian_epsilon

from fedmuon.core.errors import InputError
from fedmuon.privacy.accounting import composition, pld, renyi
from fedmuon.privacy.accounting.calibration import noise_for
from fedmuon.privacy.accounting.composition import account, epsilon
from fedmuon.privacy.accounting.dominating_pairs import Event, bottom, outcome, top

REPLACED: Any = {"adjacency": "replace-one"}


def density(q: float, s: float, shift: float, x: Any) -> Any:
    return (1 - q) * mpmath.npdf(x, 0, s) + q * mpmath.npdf(x, shift, s)


def _loss(q: float, s: float, x: Any) -> Any:
    return mpmath.log(density(q, s, 1, x) / density(q, s, -1, x))


def once(q: float, s: float, eps: float) -> Any:
    """delta(eps) of a release under replace-one: the positive part of P - e^eps Q, by quadrature
    over the line, cut where it begins."""

    def positive(x: Any) -> Any:
        return max(0, density(q, s, 1, x) - mpmath.exp(eps) * density(q, s, -1, x))

    start = mpmath.findroot(lambda x: _loss(q, s, x) - eps, (0, 1))
    return mpmath.quad(positive, [-1 - 12 * s, start, start + s, start + 4 * s, start + 1 + 12 * s])


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
    with mpmath.workdps(16):
        delta = float((once if count == 1 else twice)(q, s, eps))
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


EVENTS = [[Event(0.02, 0.8, 40)], [Event(0.5, 3.0, 30)], [Event(0.02, 0.8, 90), Event(0.1, 2.0)]]


@pytest.mark.parametrize("events", EVENTS)
def test_replacing_is_removing_and_adding(events: list[Event]) -> None:
    """At most, by group privacy: (2 e, (1 + exp e) delta); and at least what one of them is."""
    one = account(events, 1e-6).upper
    both = account(events, (1 + math.exp(one)) * 1e-6, **REPLACED)
    assert both.upper <= 2 * one
    assert account(events, 1e-5).lower < account(events, 1e-5, **REPLACED).upper


@pytest.mark.parametrize("events", EVENTS)
def test_it_agrees_with_the_librarys_distributions(events: list[Event]) -> None:
    """On the same grid, to what either drops in the tails."""
    replaced = [Event(one.sampling_probability, one.noise_multiplier, one.count, True)
                for one in events]  # fmt: skip
    lower, upper, rdp = composition.ends_by_library(replaced, 1e-5)
    assert pld.lower(replaced, 1e-5, pld.GRID) == pytest.approx(lower, rel=1e-4)
    assert pld.upper(replaced, 1e-5, pld.GRID) == pytest.approx(upper, rel=1e-4)
    assert upper < rdp == renyi.epsilon(replaced, 1e-5)


@pytest.mark.parametrize(
    ("q", "s", "order"),
    [
        (0.02, 0.7, 1.3),
        pytest.param(0.4, 1.5, 20, marks=pytest.mark.slow),
        pytest.param(0.3, 0.8, 3.7, marks=pytest.mark.slow),
        (1.0, 0.8, 3.7),
    ],
)
def test_the_renyi_divergence_by_quadrature(q: float, s: float, order: float) -> None:
    with mpmath.workdps(20):
        points = sorted({-12 * s, -1, 0, 1, order / 2, order, 2 * order - 1, 2 * order + 12 * s})

        def moment(x: Any) -> Any:
            return density(q, s, 1, x) ** order * density(q, s, -1, x) ** (1 - order)

        exact = mpmath.log(mpmath.quad(moment, points, maxdegree=7)) / (order - 1)
    assert renyi.divergence(Event(q, s, 1, True), order) == pytest.approx(float(exact), rel=1e-9)


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
    quick = epsilon(1.0, 0.1, 20, 1e-5, **REPLACED)
    slow = epsilon(1.0, 0.1, 20, 1e-5, accountant="dp-accounting", **REPLACED)
    assert quick.lower <= slow.upper and slow.lower <= quick.upper and quick.rdp == slow.rdp


def test_doubling_the_sensitivity_is_another_pair() -> None:
    """Figures of the docstring, at delta = 1e-5."""
    doubled = account([Event(0.02, 0.5, 200)], 1e-5)
    found = epsilon(1.0, 0.02, 200, 1e-5, **REPLACED)
    assert (doubled.upper, found.upper) == pytest.approx((12.2, 2.59), rel=2e-3)


@pytest.mark.slow
def test_little_noise_and_rare_examples_are_answered() -> None:
    for q, s, steps in ((1.0, 0.003, 1), (0.5, 1e-4, 1), (0.02, 0.05, 2), (1e-4, 0.5, 100)):
        found = epsilon(s, q, steps, 1e-5, **REPLACED)
        assert 0 < found.lower <= found.upper <= found.rdp < math.inf
        assert found.upper >= epsilon(s, q, steps, 1e-5).lower


@pytest.mark.parametrize("adjacency", ["zero-out", "add-remove", "replace-one"])
def test_the_least_noise_meets_its_target(adjacency: str) -> None:
    noise, found = noise_for(3.0, 0.1, 50, 1e-5, blocks=4, adjacency=adjacency)
    assert 2.99 < found.upper <= 3.0 and found.adjacency == adjacency
    assert epsilon(noise, 0.1, 50, 1e-5, blocks=4, adjacency=adjacency) == found
    assert epsilon(noise / 1.001, 0.1, 50, 1e-5, blocks=4, adjacency=adjacency).upper > 3.0


def test_an_adjacency_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="use zero-out, add-remove, replace-one"):
        account([Event(0.1, 1.0)], 1e-5, adjacency="substitute")
