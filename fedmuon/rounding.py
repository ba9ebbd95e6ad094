"""Numbers that a sentence asks for, in few digits."""

from decimal import ROUND_CEILING, Context


def rounded_up(least: float) -> str:
    """A positive number in three digits that is no less, so that what is set is enough."""
    digits = Context(prec=3, rounding=ROUND_CEILING)
    return f"{float(digits.create_decimal(repr(least))):g}"
