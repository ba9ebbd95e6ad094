"""Divergences of releases against quadrature, closed forms, and the inversion of a transform."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import ndtr

from fedmuon.privacy.accounting import divergences
from fedmuon.privacy.accounting.divergences import (
    Limits,
    hockey_stick,
    relative_entropy,
    total_variation,
)
from fedmuon.privacy.accounting.dominating_pairs import Event

Array = NDArray[Any]
EPSILONS = np.array([-3.0, -1.0, -0.3, -0.05, 0.0, 0.05, 0.3, 1.0, 2.0, 4.0])
RATES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.999)
NOISES = (0.3, 0.5, 1.0, 2.0, 10.0, 40.0)
QUICK = [(0.1, 1.0), (0.5, 0.5), (0.9, 3.0)]
ORACLE = 1e-11  # relative error of the quadrature


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer grid points, so that a test is quick. The limits stay valid."""
    monkeypatch.setattr(divergences, "COMPOSED", 2**16)
    monkeypatch.setattr(divergences, "MOST_INTERVALS", 2**15)


def normal(x: Any, mean: float, s: float) -> Any:
    return np.exp(-(((x - mean) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))


def mixture_entropy(q: float, s: float, p_mean: float, q_mean: float) -> float:
    """KL of (1 - q) N(0) + q N(p_mean) against (1 - q) N(0) + q N(q_mean), on a fine grid.

    The trapezoidal rule converges exponentially.
    """
    x = np.linspace(-2 - 14 * s, 2 + 14 * s, 4001)
    p, other = ((1 - q) * normal(x, 0, s) + q * normal(x, mean, s) for mean in (p_mean, q_mean))
    return float((p * np.log(p / other)).sum() * (x[1] - x[0]))


def entropy(q: float, s: float) -> float:
    """KL of the zero-out pair by quadrature, without the cancellation of ln(1 - q + q y)."""

    def integrand(x: float) -> float:
        t = q * math.expm1((2 * x - 1) / (2 * s * s))
        series = sum((-t) ** k / (k * (k - 1)) for k in range(2, 8))
        return normal(x, 0.0, s) * (series if abs(t) < 1e-3 else (1 + t) * math.log1p(t) - t)

    crossing = s * s * math.log((1 - q) / q) + 0.5  # here, both parts of P are equally likely
    steps = [m + k * s for m in (0, 1) for k in (-14, -7, -4, -2, 0, 2, 4, 7, 14)]
    places = sorted({*steps, *([crossing] if min(steps) < crossing < max(steps) else [])})
    return sum(
        quad(integrand, low, high, epsabs=0, epsrel=1e-11, limit=200)[0]
        for low, high in itertools.pairwise(places)
    )


def precise_entropy(q: float, s: float) -> float:
    """KL of the zero-out pair in 30 digits."""
    with mpmath.workdps(30):
        rate, noise = mpmath.mpf(q), mpmath.mpf(s)

        def integrand(x: Any) -> Any:
            ratio = 1 - rate + rate * mpmath.exp((2 * x - 1) / (2 * noise**2))
            return mpmath.npdf(x, 0, noise) * ratio * mpmath.log(ratio)

        ends = sorted(m + k * noise for m in (0, 1) for k in (-14, -5, -2, 2, 5, 14))
        value: Any = mpmath.quad(integrand, ends)
        return float(value)


def require_nested(limits: Limits, oracle: float) -> None:
    error = ORACLE * oracle
    assert limits.lower - error <= oracle <= limits.upper + error
    assert limits.upper == pytest.approx(oracle, rel=1e-6, abs=2e-14)
    if oracle > 1e-8:
        assert limits.upper - limits.lower <= 1e-6 * oracle


def gaussian_curve(s: float, epsilons: Array) -> Array:
    """H_a(N(1, s^2) || N(0, s^2)), Balle and Wang 2018."""
    return ndtr(0.5 / s - epsilons * s) - np.exp(epsilons) * ndtr(-0.5 / s - epsilons * s)


def one_release(q: float, s: float, epsilons: Array, back: bool) -> Array:
    """H_a of one subsampled release from the set of outcomes on which P > a Q (or Q > a P)."""
    bounds = np.exp(-epsilons if back else epsilons)  # dP/dQ at the end of the set
    with np.errstate(invalid="ignore", divide="ignore"):
        end = np.where(bounds > 1 - q, s * s * np.log((bounds - 1 + q) / q) + 0.5, -np.inf)
    sign = 1 if back else -1
    of_q = ndtr(sign * end / s)
    of_p = (1 - q) * of_q + q * ndtr(sign * (end - 1) / s)
    return of_q - np.exp(epsilons) * of_p if back else of_p - np.exp(epsilons) * of_q


def log_ratio(q: float, s: float, x: Array) -> Array:
    """Return ln of the density of (1 - q) N(0) + q N(1) against N(0)."""
    return np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * s * s))


def inverted(event: Event, epsilons: Array, *, back: bool = False, most: float = 40.0) -> Array:
    """H_a of many releases, from the moments of the loss by an inverse Laplace transform.

    E max(0, 1 - exp(e - L)) has the two-sided transform E exp(z L) / (z (z + 1)) for Re z > 0. The
    trapezoidal rule converges exponentially on both axes.
    """
    q, s, spacing = event.sampling_probability, event.noise_multiplier, 0.1
    frequencies = np.arange(0, most, spacing)
    z = 1 + 1j * frequencies
    x = np.linspace(-3 - 12 * s, 3 + 12 * s, 700)
    loss = log_ratio(q, s, x)
    p = (1 - q) * normal(x, 0, s) + q * normal(x, 1, s)
    other = normal(x, 0, s)
    if event.replaced:
        loss = loss - log_ratio(q, s, -x)
        other = (1 - q) * other + q * normal(x, -1, s)
    density, loss = (other, -loss) if back else (p, loss)
    moments = np.exp(np.outer(z, loss)) @ density * (x[1] - x[0])
    transform = moments**event.count / (z * (z + 1))
    transform[0] /= 2
    waves = np.exp(-1j * np.outer(epsilons, frequencies))
    return np.exp(-epsilons) * (waves @ transform).real * spacing / math.pi


def both_directions(event: Event, epsilons: Array, most: float = 40.0) -> Array:
    return np.maximum(*(inverted(event, epsilons, back=b, most=most) for b in (False, True)))


def require_curve(event: Event, oracle: Array, within: float, error: float = 1e-10) -> None:
    lower, upper = hockey_stick([event], EPSILONS)
    assert (lower <= oracle + error).all() and (oracle <= upper + error).all()
    np.testing.assert_allclose(upper, oracle, rtol=0, atol=within)
    assert (upper - lower < 0.02).all()


# Relative entropy


@pytest.mark.parametrize(("q", "s"), QUICK)
def test_limits_of_relative_entropy_contain_the_quadrature(q: float, s: float) -> None:
    require_nested(relative_entropy([Event(q, s)]), entropy(q, s))


@pytest.mark.usefixtures("coarse")
def test_limits_of_a_tiny_relative_entropy_allow_for_rounding() -> None:
    require_nested(relative_entropy([Event(1e-4, 40.0)]), entropy(1e-4, 40.0))


@pytest.mark.slow
@pytest.mark.parametrize("s", NOISES)
def test_limits_of_relative_entropy_contain_the_quadrature_for_all_rates(s: float) -> None:
    for q in RATES:
        require_nested(relative_entropy([Event(q, s)]), entropy(q, s))


@pytest.mark.slow
@pytest.mark.parametrize(("q", "s"), [(1e-4, 0.3), (1e-2, 0.5), (0.3, 0.4), (0.5, 40.0)])
def test_limits_of_relative_entropy_contain_the_value_in_thirty_digits(q: float, s: float) -> None:
    oracle = precise_entropy(q, s)
    assert entropy(q, s) == pytest.approx(oracle, rel=ORACLE)
    require_nested(relative_entropy([Event(q, s)]), oracle)


@pytest.mark.parametrize("s", NOISES)
def test_relative_entropy_of_full_lots_has_a_closed_form(s: float) -> None:
    assert relative_entropy([Event(1.0, s, 7)]) == pytest.approx((3.5 / s**2,) * 2, rel=1e-15)


def test_relative_entropy_is_continuous_at_full_lots() -> None:
    lower, upper = relative_entropy([Event(1 - 1e-9, 1.0)])
    assert lower <= 0.5 and upper == pytest.approx(0.5, rel=1e-7)


@pytest.mark.usefixtures("coarse")
def test_relative_entropy_adds_up_over_releases() -> None:
    events = [Event(0.5, 1.0, 40), Event(1.0, 3.0, 5), Event(1.0, 2.0, 2)]
    separate = [relative_entropy([dataclasses.replace(event, count=1)]) for event in events]
    for side in (0, 1):
        total = sum(part[side] * event.count for part, event in zip(separate, events, strict=True))
        assert relative_entropy(events)[side] == pytest.approx(total, rel=1e-14)
    assert relative_entropy([]) == (0, 0)


def test_relative_entropy_of_many_releases_is_the_mean_of_their_summed_loss() -> None:
    """The derivative of E exp(z L) at 0 is the mean of the loss of all 50 releases."""
    q, s, count = 0.5, 1.0, 50
    x = np.linspace(-12, 13, 4001)
    p = ((1 - q) * normal(x, 0, s) + q * normal(x, 1, s)) * (x[1] - x[0])
    ratio = 1 - q + q * np.exp(x - 0.5)
    small = 1e-4j
    moment = (p @ ratio**small) ** count
    mean = (np.log(moment) / small).real
    assert relative_entropy([Event(q, s, count)]).upper == pytest.approx(mean, rel=1e-5)


@pytest.mark.usefixtures("coarse")
def test_adjacency_does_not_change_the_relative_entropy() -> None:
    events = [Event(0.5, 1.0, 3, replaced) for replaced in (False, True)]
    assert relative_entropy(events[:1]) == relative_entropy(events[1:])


@pytest.mark.usefixtures("coarse")
def test_relative_entropy_falls_with_noise_and_grows_with_the_rate() -> None:
    values = [relative_entropy([Event(q, s)]) for q, s in [(0.5, 3.0), (0.5, 2.0), (0.9, 2.0)]]
    assert values[0].upper < values[1].lower and values[1].upper < values[2].lower


@pytest.mark.usefixtures("coarse")
def test_a_large_loss_stays_finite() -> None:
    limits = relative_entropy([Event(0.5, 0.01)])
    assert limits.lower <= 2500 + math.log(0.5) <= limits.upper  # both parts of P are separate
    assert limits.upper == pytest.approx(limits.lower, rel=1e-4)


def test_releases_without_noise_have_the_largest_divergences() -> None:
    events = [Event(0.5, 1.0), Event(0.5, 0.0)]
    assert relative_entropy(events) == (math.inf, math.inf)
    assert total_variation(events) == (1, 1)
    assert [(curve == 1).all() for curve in hockey_stick(events, EPSILONS)] == [True, True]


# Hockey-stick curve


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("count", [5, 300])
def test_curve_of_full_lots_is_the_gaussian_curve(count: int) -> None:
    oracle = gaussian_curve(20 / math.sqrt(count), EPSILONS)
    require_curve(Event(1.0, 20.0, count), oracle, within=1e-5)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(("q", "s"), [(0.1, 2.0), (0.5, 6.0)])
def test_curve_of_one_release_is_that_of_the_largest_set(q: float, s: float) -> None:
    oracle = np.maximum(*(one_release(q, s, EPSILONS, back) for back in (False, True)))
    require_curve(Event(q, s), oracle, within=1e-9)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("replaced", [False, True])
def test_curve_of_subsampled_releases_is_the_inverted_transform(replaced: bool) -> None:
    event = Event(0.1, 2.0, 300, replaced)
    require_curve(event, both_directions(event, EPSILONS), within=1e-5)


SLOW = [(1e-2, 0.8), (0.02, 1.0), (0.1, 2.0), (0.3, 1.5), (0.5, 6.0), (0.9, 20.0), (1.0, 10.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("q", "s"), SLOW)
def test_upper_limits_of_the_curve_are_within_a_millionth(q: float, s: float) -> None:
    for count in (1, 60, 300):
        event = Event(q, s, count)
        if q == 1:
            oracle = gaussian_curve(s / math.sqrt(count), EPSILONS)
        elif count == 1:
            oracle = np.maximum(*(one_release(q, s, EPSILONS, back) for back in (False, True)))
        else:
            oracle = both_directions(event, EPSILONS, most=120.0)
        require_curve(event, oracle, within=1e-6, error=1e-9)


@pytest.mark.slow
def test_upper_limits_of_the_curve_agree_with_dp_accounting() -> None:
    import dp_accounting  # slow to load

    bounds = []
    for pessimistic in (False, True):
        release = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
            1.0,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-4,
            sampling_prob=0.1,
            use_connect_dots=pessimistic,
        )
        composed = release.self_compose(60)
        bounds.append(np.array([composed.get_delta_for_epsilon(e) for e in EPSILONS[4:]]))
    lower, upper = hockey_stick([Event(0.1, 1.0, 60)], EPSILONS[4:])
    assert (upper >= bounds[0]).all() and (lower <= bounds[1]).all()
    np.testing.assert_allclose(upper, bounds[1], rtol=0, atol=1e-6)


def test_curve_of_no_releases_is_that_of_equal_distributions() -> None:
    for curve in hockey_stick([], EPSILONS):
        np.testing.assert_allclose(curve, np.maximum(0, 1 - np.exp(EPSILONS)), rtol=1e-15)
    assert total_variation([]) == (0, 0)


@pytest.mark.usefixtures("coarse")
def test_curve_falls_and_is_convex_in_the_factor() -> None:
    factors = np.linspace(0.05, 5, 100)
    for curve in hockey_stick([Event(0.1, 1.0, 30)], np.log(factors)):
        assert (np.diff(curve) <= 1e-12).all()
        assert (np.diff(curve, 2) >= -1e-10).all()


@pytest.mark.usefixtures("coarse")
def test_extreme_epsilons_have_finite_limits() -> None:
    lower, upper = hockey_stick([Event(0.5, 2.0, 10)], np.array([-800.0, -50.0, 50.0, 800.0]))
    assert lower[:2] == pytest.approx(1, abs=1e-9) and upper[:2] == pytest.approx(1, abs=1e-9)
    assert (lower[2:] == 0).all() and (upper[2:] < 1e-9).all()


@pytest.mark.usefixtures("coarse")
def test_curve_of_little_noise_reaches_beyond_the_exponents_of_doubles() -> None:
    lower, upper = hockey_stick([Event(1.0, 0.02)], np.array([-1300.0, 600.0, 1300.0]))
    exact = ndtr(25 - np.array([-1300.0, 600.0, 1300.0]) * 0.02)  # the other part is negligible
    assert (lower <= exact).all() and (exact <= upper).all()
    assert lower[:2] == pytest.approx(1) and lower[2] == 0


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("event", [Event(0.1, 1.0, 30), Event(0.5, 3.0, 10), Event(1.0, 2.0)])
def test_total_variation_satisfies_the_inequality_of_pinsker(event: Event) -> None:
    variation, divergence = total_variation([event]), relative_entropy([event])
    assert 0 < variation.lower <= variation.upper <= math.sqrt(divergence.upper / 2)
    assert variation.upper <= math.sqrt(1 - math.exp(-divergence.upper))  # Bretagnolle, Huber


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("event", [Event(0.1, 1.0, 30), Event(0.9, 2.0, 3), Event(1.0, 2.0)])
def test_relative_entropy_is_a_mixture_of_the_curve(event: Event) -> None:
    """KL(P || Q) is the integral of H_a(P || Q) / a + H_a(Q || P) / a^2 over a > 1."""
    epsilons = np.linspace(0, 20, 4001)
    _, upper = hockey_stick([event], epsilons)
    mixture = np.trapezoid(np.maximum(upper - 1e-9, 0) * (1 + np.exp(-epsilons)), epsilons)
    divergence = relative_entropy([event])
    assert divergence.upper <= mixture * (1 + 1e-4)
    if event.sampling_probability == 1:  # both directions have the same curve
        assert divergence.lower == pytest.approx(mixture, rel=1e-4)


# Wrong pairs are outside of the limits


@pytest.mark.parametrize("q", [0.1, 1.0])
def test_half_of_the_sensitivity_has_too_small_a_relative_entropy(q: float) -> None:
    right, wrong = (relative_entropy([Event(q, s)]) for s in (1.0, 2.0))
    assert wrong.upper < right.lower / 3.9


@pytest.mark.usefixtures("coarse")
def test_half_of_the_sensitivity_has_too_small_a_curve() -> None:
    _, wrong = hockey_stick([Event(0.1, 4.0, 300)], EPSILONS)
    right, _ = hockey_stick([Event(0.1, 2.0, 300)], EPSILONS)
    assert (wrong < right)[4:-1].all()


def test_lots_without_replacement_exceed_the_limits_of_poisson_lots() -> None:
    """All other contributions are 1. Then the example's -1 replaces a 1 and not a 0."""
    q, s = 0.1, 0.5
    wrong_design = mixture_entropy(q, s, -2, -1)
    poisson = mixture_entropy(q, s, 1, 0)
    limits = relative_entropy([Event(q, s)])
    require_nested(limits, poisson)
    assert wrong_design > 2.7 * limits.upper


@pytest.mark.usefixtures("coarse")
def test_lots_without_replacement_exceed_the_curve_of_poisson_lots() -> None:
    """The same contributions exceed the curve of Poisson lots at a = exp(1)."""
    q, s = 0.1, 0.5
    x = np.linspace(-7, 5, 4001)
    base = (1 - q) * normal(x, 0, s)
    excess = np.maximum(0, base + q * normal(x, -2, s) - math.e * (base + q * normal(x, -1, s)))
    _, upper = hockey_stick([Event(q, s)], np.array([1.0]))
    assert excess.sum() * (x[1] - x[0]) > 2.5 * upper[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "noise", [5e-324, 1e-300, 1e-155, 1e-149, 0.3, 7.0, 1e149, 1e155, 1e300, math.inf]
)
def test_the_divergence_of_two_gaussians_has_limits_for_every_noise(noise: float) -> None:
    lower, upper = relative_entropy([Event(1.0, np.float64(noise))])
    exact = Fraction(0) if math.isinf(noise) else Fraction(1, 2) / Fraction(noise) ** 2
    assert math.isinf(upper) or exact <= Fraction(upper) * (1 + Fraction(1, 10**15))
    assert Fraction(lower) <= exact * (1 + Fraction(1, 10**15))
    if 1e-150 < noise < 1e150:  # negative control: the limits are equal to rounding
        assert lower == upper and float(exact) == pytest.approx(upper, rel=1e-14)
