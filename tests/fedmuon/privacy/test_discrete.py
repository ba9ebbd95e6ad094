"""The discrete Gaussian: every decision against mpmath, and counts against probabilities."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedmuon.privacy.mechanisms import discrete
from fedmuon.privacy.mechanisms.discrete import (
    LAST,
    MOST_BITS,
    SCALE,
    SLOTS,
    STRIPS,
    gaussian,
    less,
)


class Given:
    """Words that were written down, first these, then those one by one."""

    def __init__(self, first: np.ndarray, more: list[int]) -> None:
        self.first, self.more = first, more

    def __call__(self, count: int) -> np.ndarray:
        if count == len(self.first):
            return self.first
        return np.array([self.more.pop(0) for _ in range(count)], np.uint64)


def accepted(slot: int, rest: int, uniform: int, bits: int, more: list[int]) -> np.ndarray:
    first = slot << 48 | rest
    return discrete._accepted(Given(np.array([first, uniform], np.uint64), more), 1, bits)


def counts() -> np.ndarray:
    return discrete._table()[2]


def test_the_strips_cover_their_density() -> None:
    """c_k >= b rho(k w), in N slots of which one is for what lies beyond; b is the largest."""
    found = counts()
    assert found.sum() == SLOTS and found[LAST] == 1 and len(found) == LAST + 1
    with mpmath.workdps(40):
        for k in range(LAST):
            assert found[k] >= SCALE * mpmath.exp(-mpmath.mpf(k * k) / 8192)
        more = [int(mpmath.ceil((SCALE + 1) * mpmath.exp(-mpmath.mpf(k * k) / 8192)))
                for k in range(LAST)]  # fmt: skip
    assert sum(more) > SLOTS - 1
    slots = discrete._table()[0]
    assert np.array_equal(np.bincount(slots), found)


def around(chance: Any) -> list[list[int]]:
    """The first words of uniforms that are less than the chance by 2^-256 or so, and greater."""
    border = int(chance * mpmath.mpf(2) ** 256)
    return [[(border + far) >> 64 * place & 2**64 - 1 for place in (3, 2, 1, 0)] for far in (-1, 1)]


def density(size: int, bits: int) -> Any:
    return mpmath.exp(-(mpmath.mpf(size) ** 2) / (2 * mpmath.mpf(STRIPS << bits) ** 2))


@pytest.mark.parametrize("bits", [0, 26, MOST_BITS])
def test_every_acceptance_is_exact(bits: int) -> None:
    """A uniform's first word just below and just above, and those where only later ones decide."""
    rng, starts = np.random.default_rng(bits), np.cumsum([0, *counts()])
    for k in (0, 1, 2, *range(3, LAST, 23), LAST - 1):
        rest, slot = int(rng.integers(2**bits)), int(starts[k + 1]) - 1
        size = (k << bits) + rest
        with mpmath.workdps(100):
            weight = mpmath.mpf(SCALE) / int(counts()[k])
            below, above = around(weight * density(size, bits))
        for (first, *more), expected in ((below, [size]), (above, [])):
            assert accepted(slot, rest, first, bits, more).tolist() == expected
        assert accepted(slot, rest, below[0] - 1, bits, []).tolist() == [size]
        assert accepted(slot, rest, above[0] + 1, bits, []).tolist() == []


def test_signs_are_fair_and_zero_counts_once() -> None:
    sign, slot = 1 << 47, int(np.cumsum(counts())[2]) - 1
    assert accepted(slot, 5 | sign, 0, 26, []).tolist() == [-(2 << 26) - 5]
    assert accepted(0, 0, 0, 26, []).tolist() == [0] and accepted(0, sign, 0, 26, []).size == 0


@pytest.mark.parametrize("bits", [0, 26, MOST_BITS])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_beyond_eight_deviations(bits: int, steps: int) -> None:
    """One slot for all of it: proposed with 2^-(G + 1) / 64 w, accepted with (2), exactly."""
    rest = 12345 % (STRIPS << bits)
    coins, size = [0] * steps + [rest << 1 | 1], (LAST + STRIPS * steps << bits) + rest
    with mpmath.workdps(100):
        chance = 64 * SCALE * mpmath.mpf(2) ** (steps + 1) * density(size, bits)
        assert chance < mpmath.mpf(2) ** -28
        below, above = around(chance)
    for (first, *more), expected in ((below, [size]), (above, [])):
        assert accepted(SLOTS - 1, 0, first, bits, coins + more).tolist() == expected
    assert accepted(SLOTS - 1, 0, 2**36, bits, []).size == 0  # and no coin is thrown


def test_enclosures_hold_and_narrow() -> None:
    for exponent in (Fraction(0), Fraction(1, 3), Fraction(123456789, 2**20), Fraction(40)):
        low, high = discrete.enclosed(Fraction(7, 3), exponent, 40)
        with mpmath.workdps(80):
            true = (
                mpmath.mpf(7)
                / 3
                * mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator)
            )
            assert mpmath.mpf(low.numerator) / low.denominator < true
            assert true < mpmath.mpf(high.numerator) / high.denominator
        assert high - low <= high * Fraction(1, 10**36)
    # Half of the uniforms are less than a half, and it may take any number of bits to see.
    for first, more, answer in ((2**63 - 1, [2**64 - 1, 5], True), (2**63, [0, 5], False)):
        assert less(first, Fraction(1, 2), Fraction(0), Given(np.empty(9), more)) is answer


def test_floats_and_enclosures_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a float64 is trusted with little, decimals decide: the same integers."""
    words = lambda: np.random.default_rng(5).bit_generator.random_raw  # noqa: E731
    quick = gaussian(words(), 20_000, 3)
    monkeypatch.setattr(discrete, "DOUBT", 0.3)
    slow = gaussian(words(), 20_000, 3)
    assert np.array_equal(quick, slow)
    monkeypatch.setattr(discrete, "SCALE", SCALE - 100)  # control: another acceptance
    assert not np.array_equal(quick, gaussian(words(), 20_000, 3))


def chi_square(drawn: np.ndarray, sigma: float) -> float:
    """The p-value of integers against their probabilities, tails pooled where fewer than 25 are
    expected."""
    at = np.arange(-int(9 * sigma), int(9 * sigma) + 1)
    mass = np.exp(-(at**2) / (2 * sigma**2))
    mass *= len(drawn) / mass.sum()
    within = np.flatnonzero(mass >= 25)
    low, high = at[within[0]], at[within[-1]]
    seen = np.bincount(np.clip(drawn, low - 1, high + 1) - low + 1, minlength=high - low + 3)
    tails = mass[at < low].sum(), mass[at > high].sum()
    expected = np.array([tails[0], *mass[within], tails[1]])
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def test_counts_fit_the_probabilities() -> None:
    """100,000 draws, each integer a cell; the control is 3% too wide."""
    drawn = gaussian(np.random.default_rng(11).bit_generator.random_raw, 100_000, 0)
    assert len(drawn) == 100_000 and drawn.dtype == np.int64
    assert chi_square(drawn, 64.0) > 1e-3 > chi_square(drawn, 62.0)
    for far in (2, 3, 4):
        expected = 2 * stats.norm.sf((far * 64 + 0.5) / 64) * len(drawn)
        assert abs((np.abs(drawn) > far * 64).sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize("bits", [26, MOST_BITS])
def test_fine_lattices_are_as_the_normal(bits: int) -> None:
    rng = np.random.default_rng(bits)
    drawn = gaussian(rng.bit_generator.random_raw, 50_000, bits) / (STRIPS << bits)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert np.unique(drawn).size == len(drawn)
    low = gaussian(rng.bit_generator.random_raw, 20_000, bits) % 16  # the last bits are uniform
    assert stats.chisquare(np.bincount(low, minlength=16)).pvalue > 1e-3


def test_draws_of_another_dtype_and_of_none() -> None:
    words = lambda: np.random.default_rng(2).bit_generator.random_raw  # noqa: E731
    assert np.array_equal(gaussian(words(), 99, 5, np.float64), gaussian(words(), 99, 5))
    assert gaussian(words(), 0, 5).shape == (0,)
