"""Releases on a lattice: the proof's steps by mpmath and direct sums, and an attack on low bits."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.privacy.accounting.composition import account
from fedmuon.privacy.accounting.pld import Event
from fedmuon.privacy.mechanisms.gaussian import release, release_on_grid
from fedmuon.privacy.mechanisms.lattice import DEVIATION, rounded, spacing
from fedmuon.privacy.noise import KeyStream, Streams, normals, secret_streams
from fedmuon.tasks.base import Batch, Params
from fedmuon.tasks.models import network
from fedmuon.tasks.networks import NetworkTask
from fedmuon.tasks.per_example.clipping import Clipping, slack

# --- Sensitivity: (1) and (2) ---------------------------------------------------------------------


def test_rounding_stays_within_three_quarters() -> None:
    """Of the exact quotient, clamped, for sums and spacings of any scale."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        step = float(10.0 ** rng.uniform(-12, 3) * rng.uniform(1, 10))
        value = float(rng.standard_normal() * step * 10.0 ** rng.uniform(-2, 18))
        found = int(rounded(torch.tensor([value], dtype=torch.float64), step)[0])
        true = max(-(2**52), min(2**52, Fraction(value) / Fraction(step)))
        assert abs(found - true) <= Fraction(3, 4)
    assert rounded(torch.tensor([math.inf, -1e300, 2.5]), 1.0).tolist() == [2**52, -(2**52), 2]


@pytest.mark.parametrize("noise, entries", [(1e-6, 1), (0.7, 10**9), (30.0, 7), (1e4, 10**8)])
def test_the_noise_covers_reach_and_rounding(noise: float, entries: int) -> None:
    """sqrt(s^2 - t^2) >= sigma (C' / g + 2 sqrt(D)), in exact numbers; 2^-39 more is too much."""
    reach = 0.3
    step = spacing(reach, noise, entries)
    with mpmath.workdps(60):
        needed = mpmath.mpf(noise) * (mpmath.mpf(reach) / step + 2 * mpmath.sqrt(entries))
        had = mpmath.sqrt(mpmath.mpf(DEVIATION) ** 2 - 64**2)
        assert needed <= had < needed * (1 + mpmath.mpf(2) ** -39)
    if noise <= 30:  # the lattice costs nothing
        assert step * DEVIATION / (noise * reach) - 1 < 1e-3 * max(noise, 1e-3) * entries**0.5
    with pytest.raises(InputError, match="arithmetic = 'continuous'"):
        spacing(1.0, 1e9, 10**6)


def test_neighbours_differ_by_less_than_delta() -> None:
    """An example of the full reach, on a lattice so coarse that its rounding shows."""
    torch.manual_seed(0)
    reach, entries, step, most = 1.0, 400, 0.05, 0.0
    for _ in range(200):
        total, one = torch.randn(2, entries, dtype=torch.float64)
        one = one * reach / one.norm()
        moved = step * float((rounded(total + one, step) - rounded(total, step)).double().norm())
        most = max(most, moved)
        assert moved <= reach + 2 * step * math.sqrt(entries)
    assert most > reach  # the control: without its part for rounding the bound fails


def test_neighbouring_sums_hardly_round_apart() -> None:
    """What no proof has, measured: sums of 65 and of 64 clipped examples and the odd one out, by a
    hundredth of the slack for which noise is drawn."""
    task = NetworkTask(network("mlp", (4, 20), 5), (4, 20))
    at = [(1.0, task.initial(generator(0, Draw.INITIAL)))]
    inputs, labels = torch.randn(65, 80), torch.arange(65) % 5

    def clipped(rows: slice) -> Params:
        return task.clipped(at, [Batch(inputs[rows], labels[rows])], Clipping())[1]

    whole, without, one = (clipped(slice(*ends)) for ends in ((0, 65), (0, 64), (64, 65)))
    for name, total in whole.items():
        apart = total.double() - without[name].double() - one[name].double()
        assert float(apart.norm()) < 0.01 * slack(torch.float32) < 0.1 * float(one[name].norm())


# --- Accounting: (3) and (4) ----------------------------------------------------------------------


def theta(spread: float) -> float:
    """h(t)."""
    return 2 * sum(math.exp(-2 * (math.pi * spread * k) ** 2) for k in range(1, 9))


def discrete_mass(y: int, centre: np.ndarray, deviation: float) -> np.ndarray:
    """Of N_Z(centre, deviation^2) at y, over all integers that matter."""
    around = np.arange(-40, 41)[:, None]
    weights = np.exp(-((around - centre) ** 2) / (2 * deviation**2))
    return weights[y + 40] / weights.sum(0)


@pytest.mark.parametrize("spread", [0.5, 0.6, 0.75])
def test_the_discrete_gaussian_is_nearly_made_from_the_real_one(spread: float) -> None:
    """Masses of N_Z(v, s^2) over those of y ~ N_Z(X, t^2), X ~ N(v, s^2 - t^2), by quadrature (of a
    smooth integrand, so by sums): never beyond eta. The control: X ~ N(v, s^2) is."""
    deviation, centre, width = 1.5, 2, 1 / 128
    x = np.arange(centre - 12, centre + 12, width)

    def furthest(real: float) -> float:
        density = np.exp(-((x - centre) ** 2) / (2 * real**2)) / (real * math.sqrt(2 * math.pi))
        made = [float((density * discrete_mass(y, x, spread)).sum() * width) for y in range(-3, 8)]
        true = [float(discrete_mass(y, np.array([centre]), deviation)[0]) for y in range(-3, 8)]
        return max(abs(math.log(p / q)) for p, q in zip(made, true, strict=True))

    eta = 3 * theta(spread)
    assert 1e-10 < furthest(math.sqrt(deviation**2 - spread**2)) <= eta < furthest(deviation)


def masses(shift: int, deviation: float, rate: float, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """With and without the example, all but what lies beyond 14 deviations."""
    at = np.arange(-reach, reach + 1)
    without = np.exp(-(at**2) / (2 * deviation**2))
    moved = np.exp(-((at - shift) ** 2) / (2 * deviation**2))
    total = float(np.exp(-(at**2) / (2 * deviation**2)).sum())
    return ((1 - rate) * without + rate * moved) / total, without / total


def exact_epsilon(one: np.ndarray, other: np.ndarray, delta: float) -> float:
    """The epsilon at which sum max(0, P - e^eps Q) is delta: by bisection, the worse of the two."""

    def excess(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
        return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())

    worst = 0.0
    for p, q in ((one, other), (other, one)):
        low, high = 0.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(p, q, middle) > delta else (low, middle)
        worst = max(worst, high)
    return worst


CASES = [(2.0, 2, 0.2, 1), (2.0, 3, 1.0, 1), (3.0, 2, 0.1, 2), (64.0, 80, 0.3, 1)]


@pytest.mark.parametrize("deviation, shift, rate, steps", CASES)
def test_the_accountant_of_real_noise_brackets_the_discrete_mechanism(
    deviation: float, shift: int, rate: float, steps: int
) -> None:
    """Summed outcome by outcome, in one dimension, composed with itself: (4) with t = s / 2."""
    one, other = masses(shift, deviation, rate, int(14 * deviation) + shift)
    for _ in range(steps - 1):
        one, other = np.outer(one, one).ravel(), np.outer(other, other).ravel()
    true, spread = exact_epsilon(one, other, 1e-5), min(deviation / 4, 2.0)
    eta, real = 3 * steps * theta(spread), math.sqrt(deviation**2 - spread**2)
    bound = account([Event(rate, real / shift, steps)], math.exp(-eta) * 1e-5)
    assert true <= bound.upper + 2 * eta
    direct = account([Event(rate, deviation / shift, steps)], 1e-5)
    assert true > 0.95 * direct.lower > 0.1  # the bound says something
    if deviation == 2:  # the control: at s = 0.4, a shift by 1 tells much more, or less
        coarse = exact_epsilon(*masses(1, 0.4, 0.2, 12), 1e-5)
        taken = account([Event(0.2, 0.4, 1)], 1e-5)
        assert not 0.98 * taken.lower <= coarse <= 1.02 * taken.upper
    if deviation == 64:  # the coarsest that can be drawn: as if it were real, up to 1 / s^2
        assert direct.lower - 1e-3 <= true <= direct.upper + 1e-3


def test_what_the_proof_adds_is_below_every_number() -> None:
    with mpmath.workdps(30):
        h = 2 * mpmath.nsum(lambda k: mpmath.exp(-2 * mpmath.pi**2 * 64**2 * k**2), [1, 5])
        assert 0 < 3 * h < mpmath.mpf(10) ** -35000
        relative = 1 - mpmath.sqrt(1 - mpmath.mpf(64) ** 2 / mpmath.mpf(DEVIATION) ** 2)
        assert relative < mpmath.mpf(2) ** -52


# --- What is released -----------------------------------------------------------------------------


def streams_of(seed: int, clients: int) -> Streams:
    return lambda block: [
        generator(seed, Draw.NOISE, client=client, block=block) for client in range(clients)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_is_the_sum_and_noise_on_the_lattice(dtype: torch.dtype) -> None:
    sums = {"a": torch.randn(4, 30, 40, dtype=dtype), "b": torch.full((4, 2000), 1e3, dtype=dtype)}
    clipping, noise, lot = Clipping("block", 0.5), 2.0, 8.0
    found = release_on_grid(sums, clipping, noise, lot, streams_of(1, 2)).gradient
    again = release_on_grid(sums, clipping, noise, lot, streams_of(1, 2)).gradient
    other = release_on_grid(sums, clipping, noise, lot, streams_of(2, 2)).gradient
    scale = 0.5 * noise * (1 + slack(dtype))
    for name, value in sums.items():
        assert found[name].dtype == dtype and torch.equal(found[name], again[name])
        assert not torch.equal(found[name], other[name])
        noisy = (found[name] * lot - value).double() / scale
        assert torch.allclose(noisy[0], noisy[1], atol=1e-3)  # replicas share it
        assert (noisy[0] - noisy[2]).abs().mean() > 0.5  # clients do not
        assert abs(float(noisy[::2].var()) - 1) < 0.15 and abs(float(noisy.mean())) < 0.1
    if dtype == torch.float64:
        step = spacing(0.5 * (1 + slack(dtype)), noise, 3200)
        parts = found["a"].numpy() * lot / step
        assert np.abs(parts - np.rint(parts)).max() < 1e-4  # on the lattice
        plain = (
            release(sums, clipping, noise, lot, normals(secret_streams(2))).gradient["a"].numpy()
            * lot
            / step
        )
        assert np.abs(plain - np.rint(plain)).max() > 0.4  # the control is not


def test_what_has_no_place_on_a_lattice() -> None:
    """No number stays none, for all to see; what is beyond the lattice ends with it. Blocks have
    noise of their own."""
    sums = {"a": torch.tensor([[1.0, math.nan, math.inf]])}
    found = release_on_grid(sums, Clipping(), 1.0, 1.0, streams_of(0, 1)).gradient["a"][0]
    assert found.isfinite().tolist() == [True, False, True] and found[2] > 2**19
    with pytest.raises(
        InputError,
        match=r"clipping bound is infinite, but noise = .* needs a finite clipping bound",
    ):
        release_on_grid(sums, Clipping("flat", math.inf), 1.0, 1.0, streams_of(0, 1))
    key, zeros = KeyStream(), {"a": torch.zeros(1, 500), "b": torch.zeros(1, 500)}
    apart = release_on_grid(zeros, Clipping(), 1.0, 1.0, lambda block: [key]).gradient
    assert abs(np.corrcoef(apart["a"][0].numpy(), apart["b"][0].numpy())[0, 1]) < 0.25


# --- Mironov's attack -----------------------------------------------------------------------------
# One sum in one dimension, 0 or 1/3, at a bound of 1. A release in floating point tells which one
# it was if the other, with any noise at all that the generator has, cannot give these very bits.

TRIES, ZERO, THIRD = 4000, 0.0, 1 / 3
Attempt = Callable[[np.ndarray, float], np.ndarray]  # which releases may come of this sum


def by_inverse(count: int, rng: np.random.Generator) -> np.ndarray:
    return ndtri((rng.integers(1, 2**53, count)) * 2.0**-53)


def of_inverse(released: np.ndarray, total: float) -> np.ndarray:
    """Uniforms near the one that the noise would be of, one after the other."""
    near = np.rint(ndtr(released - total) * 2.0**53)
    return np.logical_or.reduce(
        [total + ndtri((near + far) * 2.0**-53) == released for far in range(-40, 41)]
    )


def of_ours(released: np.ndarray, total: float, scale: float) -> np.ndarray:
    """Normals are multiples of 2^-52: those near the one that the noise would be."""
    near = np.rint((released - total) / scale * 2.0**52)
    return np.logical_or.reduce(
        [total + scale * ((near + far) * 2.0**-52) == released for far in (-2, -1, 0, 1, 2)]
    )


def of_lattice(released: np.ndarray, total: float, step: float) -> np.ndarray:
    """Noise is any integer, as its tails end nowhere."""
    own = np.rint(total / step)
    return released == step * (own + np.rint(released / step - own))


def continuous(total: float) -> np.ndarray:
    sums = {"a": torch.full((1, TRIES), total, dtype=torch.float64)}
    return release(sums, Clipping(), 1.0, 1.0, normals(secret_streams(1))).gradient["a"][0].numpy()


def on_grid(total: float) -> np.ndarray:
    sums = {"a": torch.full((1, TRIES), total, dtype=torch.float64)}
    found = release_on_grid(sums, Clipping(), 1.0, 1.0, lambda block: [KeyStream()])
    return found.gradient["a"][0].numpy()


def told(releases: Sequence[np.ndarray], possible: Attempt) -> tuple[float, float]:
    """The shares of releases of 0 and of 1/3 that rule the other sum out; none does its own."""
    for released, total in zip(releases, (ZERO, THIRD), strict=True):
        assert possible(released, total).all()
    one, other = releases
    return 1 - float(possible(one, THIRD).mean()), 1 - float(possible(other, ZERO).mean())


SCALE = 1 + slack(torch.float64)


def test_low_bits_tell_what_floating_point_noise_was_added_to() -> None:
    """Of textbook noise, and of our own continuous one: delta = 1e-5 allows one in 100,000."""
    rng = np.random.default_rng(0)
    textbook = [total + by_inverse(TRIES, rng) for total in (ZERO, THIRD)]
    assert min(told(textbook, of_inverse)) > 0.2
    ours = [continuous(total) for total in (ZERO, THIRD)]
    assert min(told(ours, partial(of_ours, scale=SCALE))) > 0.2


def test_low_bits_of_a_lattice_tell_nothing() -> None:
    """Neither sum is ever ruled out; the integers' last bits are uniform, whichever it was."""
    step = spacing(SCALE, 1.0, TRIES)
    found = [on_grid(total) for total in (ZERO, THIRD)]
    assert told(found, partial(of_lattice, step=step)) == (0.0, 0.0)
    for released in found:
        last = np.rint(released / step).astype(np.int64) % 8
        counted = np.bincount(last, minlength=8)
        assert ((counted - TRIES / 8) ** 2).sum() / (TRIES / 8) < 35  # chi-square, 7 degrees
