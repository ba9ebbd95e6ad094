"""Limits are rounded up, so that what is printed is a limit, too."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmuon.analysis.report.numbers import at_most, rounded_up


@given(st.floats(1e-9, 1e9), st.integers(1, 8))
def test_a_limit_is_rounded_up_to_the_next_number_with_these_digits(
    value: float, count: int
) -> None:
    shown = rounded_up(value, count)
    assert shown is not None and shown >= value
    unit = Fraction(10) ** (math.floor(math.log10(value)) - count + 1)
    assert Fraction(shown) - Fraction(value) <= unit * Fraction(11, 10)
    assert float(f"{shown:.{count}g}") == shown


@pytest.mark.parametrize(("value", "text"), [
    (0.448335, "0.4484"), (0.950023, "0.9501"), (0.95, "0.95"), (1.0, "1"), (0.9000499, "0.9001"),
    (math.inf, "∞"), (None, "–"),
])  # fmt: skip
def test_printed_limits(value: float | None, text: str) -> None:
    assert at_most(value) == text
