"""Numbers as people read them: on a page, in a figure, in a terminal.

They have the minus sign U+2212. What programs read (CSV, JSON, LaTeX) has the hyphen of ASCII.
"""

import math
from typing import Any


def written(value: float, form: str) -> str:
    """A number in that format: `written(-0.5, "+.3g")` is `−0.5`."""
    return f"{value:{form}}".replace("-", "−")


def number(value: Any, count: int = 4) -> str:
    """A number with `count` digits; a dash if it is unknown."""
    unknown = value is None or not isinstance(value, int | float) or value != value
    if not unknown and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return "–" if unknown else written(value, f".{count}g")


def digits(value: float, count: int = 4) -> str:
    """A measured number with `count` significant digits, zeros too, so that columns compare.

    Numbers with more digits before the point keep all of them, up to a million.
    """
    if 10**count <= abs(value) < 10**6:
        return written(value, ".0f")
    return written(value, f"#.{count}g").removesuffix(".")


def interval(low: float, high: float, count: int = 3) -> str:
    """`−0.174 to 0.037`; empty if it is unknown."""
    known = low == low and high == high
    return f"{number(low, count)} to {number(high, count)}" if known else ""


def count(quantity: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"


def quantity(value: float, unit: str) -> str:
    """`1.2 accuracy points`, `0.31 (ratio)`; the value counts units."""
    plain = unit in ("ratio", "slope", "loss")
    return f"{number(value)} ({unit})" if plain else f"{number(value)} {unit}".strip()


def in_bytes(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} EB"
