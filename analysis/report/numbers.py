"""Numbers as a report writes them."""

import math
from typing import Any


def number(value: Any, digits: int = 4) -> str:
    """Four digits, or as many as are asked for; a dash for what is unknown."""
    unknown = value is None or not isinstance(value, int | float) or value != value
    if not unknown and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return "–" if unknown else f"{value:.{digits}g}".replace("-", "−")


def interval(low: float, high: float, digits: int = 3) -> str:
    """`−0.174 to 0.037`; nothing where it is unknown."""
    known = low == low and high == high
    return f"{number(low, digits)} to {number(high, digits)}" if known else ""


def count(quantity: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"
