"""Study `frontier`: accuracy against a proved bound, with constants of both kinds."""

from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Rows, number

TENTH = 0.1  # of B, the range of the loss
NAMES = {"ball": "the ball", "global": "all models"}
STANDS_ON = (
    "Every bound is that of 001, Theorem 4.1 with no constant left open, of a run that ends after "
    "the round it stands at. B is the range of the loss over the ball that the iterates cannot "
    "leave: no gap exceeds it, so a bound above it says nothing, whatever constants it is made of. "
    "From X⁰ = 0 with small steps the loss hardly moves while the model already ranks the "
    "classes, so that B is small: hence bound / B, and accuracy beside it. Best settings are "
    "chosen by held-out accuracy, which the bound does not know of: a frontier says what can be "
    "had, and is no guarantee for a search."
)


def of(rows: Columns, start: str, kind: str) -> np.ndarray:
    """The rows of a start with a kind of constants."""
    return (rows["start"] == start) & (rows["constants"] == kind)


def frontier(rows: Columns, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bound / B in rising order, and the best accuracy up to there; what is no number is not."""
    mine = mine & np.isfinite(rows["share"])
    order = np.argsort(rows["share"][mine], kind="stable")
    best = np.maximum.accumulate(rows["accuracy"][mine][order])
    return rows["share"][mine][order], best


def best(rows: Columns, mine: np.ndarray) -> int | None:
    """Where accuracy is best among those of a bound below a tenth of B, if there are any."""
    inside = np.flatnonzero(mine & (rows["share"] < TENTH))
    return int(inside[rows["accuracy"][inside].argmax()]) if len(inside) else None


def claims(rows: Columns) -> Sequence[Claim]:
    """The bounds hold; the ball's says more."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    return [within(rows), *(ahead(rows, start) for start in starts)]


def within(rows: Columns) -> Claim:
    """gap <= bound in every row."""
    held = rows["gap"] <= rows["bound"]
    detail = f"{held.sum()} of {len(held)} bounds"
    return Claim("Every measured gap is at most its bound.", bool(held.all()), detail)


def ahead(rows: Columns, start: str) -> Claim:
    """With a bound below a tenth of B, accuracy is higher with the constants of the ball."""
    found = [best(rows, of(rows, start, kind)) for kind in NAMES]
    said = [
        f"{rows['accuracy'][one]:.3f} with {NAMES[kind]}"
        if one is not None
        else f"none with {name}"
        for one, (kind, name) in zip(found, NAMES.items(), strict=True)
    ]
    ball, wide = (-1.0 if one is None else float(rows["accuracy"][one]) for one in found)
    sentence = f"From X⁰ {start}, models with a bound below B / 10 are better with the ball."
    known = any(one is not None for one in found)
    return Claim(sentence, ball > wide if known else None, "best accuracy: " + ", ".join(said))


def numbers(rows: Columns) -> Rows:
    """The best model below a tenth of B, and the largest horizon of every step size."""
    lines: Rows = [
        ("start", "constants", "bound < B / 10", "η", "λ", "R", "bound", "B", "accuracy")
    ]
    for start in dict.fromkeys(rows["start"].tolist()):
        for kind, name in NAMES.items():
            mine = of(rows, start, kind)
            lines.append(_line(rows, start, name, "most accurate", best(rows, mine)))
            lines += [_line(rows, start, name, "longest", place) for place in _longest(rows, mine)]
    return lines


def _longest(rows: Columns, mine: np.ndarray) -> list[int]:
    """For each step size, the largest R (and there the most accurate) with such a bound."""
    inside = np.flatnonzero(mine & (rows["share"] < TENTH))
    found = []
    for lr in np.unique(rows["lr"][inside]):
        same = inside[rows["lr"][inside] == lr]
        found.append(int(same[np.lexsort((rows["accuracy"][same], rows["rounds"][same]))[-1]]))
    return found


def _line(rows: Columns, start: str, name: str, what: str, place: int | None) -> tuple[str, ...]:
    keys = ("lr", "lambda", "rounds", "bound", "range", "accuracy")
    cells = ["–"] * 6 if place is None else [number(float(rows[key][place])) for key in keys]
    return (start, name, what, *cells)
