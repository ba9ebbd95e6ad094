"""Numbers as text for pages, figures and the terminal.

These texts use the minus sign U+2212. Files for programs (CSV, JSON, LaTeX) use the ASCII hyphen.
"""

import math
from decimal import ROUND_CEILING, Context
from typing import Any


def written(value: float, form: str) -> str:
    """Return a number as text in a Python format. `written(-0.5, "+.3g")` returns `−0.5`."""
    return f"{value:{form}}".replace("-", "−")


def number(value: Any, count: int = 4) -> str:
    """Return a number with `count` significant digits, or a dash if it is unknown."""
    unknown = value is None or not isinstance(value, int | float) or value != value
    if not unknown and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return "–" if unknown else written(value, f".{count}g")


def at_most(value: float | None, count: int = 4) -> str:
    """Return an upper limit, rounded up to `count` significant digits, so that it stays a limit."""
    return number(rounded_up(value, count), count)


def rounded_up(value: float | None, count: int = 4) -> float | None:
    """Return the smallest number with `count` significant digits that is not below `value`."""
    if value is None or not math.isfinite(value):
        return value
    return float(Context(prec=count, rounding=ROUND_CEILING).create_decimal(repr(float(value))))


def digits(value: float, count: int = 4) -> str:
    """Return a measured number with `count` significant digits, including trailing zeros.

    Numbers below a million keep all digits before the decimal point.
    """
    if 10**count <= abs(value) < 10**6:
        return written(value, ".0f")
    return written(value, f"#.{count}g").removesuffix(".")


def interval(low: float, high: float, count: int = 3) -> str:
    """Return an interval as text, such as `−0.174 to 0.037`, or "" if an end is unknown."""
    valid = low == low and high == high
    return f"{number(low, count)} to {number(high, count)}" if valid else ""


def count(quantity: int, noun: str) -> str:
    """Return a number with its noun: `1 run`, `2 runs`."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: `1.2 accuracy points`, `0.31 (ratio)`."""
    plain = unit in ("ratio", "slope", "loss")
    return f"{number(value)} ({unit})" if plain else f"{number(value)} {unit}".strip()


def in_bytes(count: float) -> str:
    """Return a number of bytes in a suitable unit: `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} EB"
