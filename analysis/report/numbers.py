"""Numbers and units as people read them.

Numbers
-------
Numbers as people read them, on a page, in a figure, in a terminal: with the minus sign U+2212.

What programs read (CSV, JSON, LaTeX) has the hyphen of ASCII; a setting stands as it was set.

Units
-----
The unit of every effect that a claim shows, by the name of the effect up to its first comma.

A name that says `a over b` is of a ratio; that of another is in the table. What a user's own
measure counts is not known, and it has none.
"""

import math
from typing import Any


def written(value: float, form: str) -> str:
    """The number in that format: `written(-0.5, "+.3g")` is `−0.5`."""
    return f"{value:{form}}".replace("-", "−")


def number(value: Any, count: int = 4) -> str:
    """Four digits, or as many as are asked for; a dash for what is unknown."""
    unknown = value is None or not isinstance(value, int | float) or value != value
    if not unknown and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return "–" if unknown else written(value, f".{count}g")


def digits(value: float, count: int = 4) -> str:
    """A measured number: so many significant digits, zeros too, so that columns compare; whole
    numbers up to a million have all of theirs."""
    if 10**count <= abs(value) < 10**6:
        return written(value, ".0f")
    return written(value, f"#.{count}g").removesuffix(".")


def interval(low: float, high: float, count: int = 3) -> str:
    """`−0.174 to 0.037`; nothing where it is unknown."""
    known = low == low and high == high
    return f"{number(low, count)} to {number(high, count)}" if known else ""


def count(quantity: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"


POINTS = "accuracy points"  # hundredths; an accuracy is computed as a share
UNITS = {
    "accuracy": POINTS,
    "accuracy gained beyond half of the best": POINTS,
    "gain in accuracy of a seed": POINTS,
    "train loss": "loss",
    "test loss": "loss",
    "test minus train loss": "loss",
    "gap − bound": "loss",
    "lead in loss": "loss",
    "seconds": "s",
    "seconds of training": "s",
    "NLL per target token": "nats",
    "BLEU": "points",
    "ROUGE-L": "points",
    "certified ε": "",
    "Spearman's ρ": "",
    "mean ρ over test samples": "",
    "lead in ρ": "",
    "growth of the bound": "ratio",
    "growth of the mean perturbation": "ratio",
    "relative distance": "ratio",
    "error": "ratio",
    "saved by the best gain": "ratio",
    "saved by the gain whose bound is least": "ratio",
    "times as long": "ratio",
    "log-log slope": "slope",
    "log-log slope in ρ": "slope",
    "slope − promised": "slope",
    "SGD-M's slope − Muon's": "slope",
}


def unit_of(effect: str) -> str:
    """The unit of an effect; none of pure numbers that are no ratio, and of the unknown."""
    name = effect.partition(",")[0].removeprefix("change of the ")
    ratio = " over " in name or name.startswith("share of the ")
    return UNITS.get(name, "ratio" if ratio else "")


def factor(unit: str) -> float:
    """How many of it are 1."""
    return 100.0 if unit == POINTS else 1.0


def quantity(value: float, unit: str) -> str:
    """`1.2 accuracy points`, `0.31 (ratio)`; the value counts units."""
    plain = unit in ("ratio", "slope", "loss")
    return f"{number(value)} ({unit})" if plain else f"{number(value)} {unit}".strip()
