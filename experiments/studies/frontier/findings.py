"""Study `frontier`: accuracy against a proved bound, with constants of both kinds."""

import itertools
from collections.abc import Sequence

import numpy as np

from fedmuon.analysis.report.columns import Columns
from fedmuon.analysis.report.findings import Rows, number
from fedmuon.analysis.report.slopes import Slope, mean_of
from fedmuon.analysis.report.verdicts import POSITIVE, Claim, Effect, Rule

TENTH = 0.1  # of B, the range of the loss
HALF = 0.5  # of what training gains in accuracy
NOTHING = Slope(-1.0, -1.0, -1.0)  # where no setting learns, half of it is nothing to have
NAMES = {"ball": "the ball", "global": "all models"}
SHOWN = ("lr", "lambda", "rounds", "accuracy", "train_loss", "test_loss", "bound", "share")
STANDS_ON = (
    "Every bound is that of 001, Theorem 4.1 with no constant left open, of a run that ends after "
    "the round it stands at. B is the range of the loss over the ball that the iterates cannot "
    "leave: no gap exceeds it, so a bound above it says nothing, whatever constants it is made of. "
    "From X⁰ = 0 with small steps the loss hardly moves while the model already ranks the "
    "classes, so that B is small: hence bound / B, and accuracy beside it. Best settings are "
    "chosen by held-out accuracy, which the bound does not know of: a frontier says what can be "
    "had, and is no guarantee for a search. By construction the bound with the constants of the "
    "ball is never above the one with those of all models; what may fail is that this is worth "
    "anything. In the table the first line of a start and its constants is the most accurate "
    "model below B / 10, the others are, for each η, the longest run; `any` is the most accurate "
    "model of that start whatever its bound (with the ball). Bounds are held against the gap at "
    "the clients' label shares, test losses are plain means. Certificates after the run "
    "(`realized`) have no place here: they are of one run's neighbours, and bound no gap."
)


def of(rows: Columns, start: str, kind: str) -> np.ndarray:
    """The rows of a start with a kind of constants."""
    return (rows["start"] == start) & (rows["constants"] == kind)


def frontier(rows: Columns, mine: np.ndarray) -> np.ndarray:
    """The rows in rising order of bound / B that are more accurate than all before them; of equal
    bounds the first, and what has no finite bound is not among them."""
    mine = np.flatnonzero(mine & np.isfinite(rows["share"]))
    order = mine[np.lexsort((-rows["accuracy"][mine], rows["share"][mine]))]
    reached = np.maximum.accumulate(rows["accuracy"][order])
    return order[np.diff(reached, prepend=-np.inf) > 0]


def best(rows: Columns, mine: np.ndarray) -> int | None:
    """Where accuracy is best among those of a bound below a tenth of B, if there are any."""
    return _most_accurate(rows, mine & (rows["share"] < TENTH))


def _most_accurate(rows: Columns, mine: np.ndarray) -> int | None:
    inside = np.flatnonzero(mine)
    return int(inside[rows["accuracy"][inside].argmax()]) if len(inside) else None


def claims(rows: Columns) -> Sequence[Claim]:
    """The bounds hold; below B / 10 there is something learned; the ball's constants matter."""
    starts = list(dict.fromkeys(rows["start"].tolist()))
    every = [(learned(rows, start), ahead(rows, start)) for start in starts]
    return [within(rows), *itertools.chain(*every)]


def within(rows: Columns) -> Claim:
    """gap <= bound in every row: within only if the gap's interval is."""
    gap, bound = rows["gap"], rows["bound"]
    low, high = (rows.get(name, gap) for name in ("gap_low", "gap_high"))
    away = Effect("gap − bound", gap - bound, low - bound, high - bound, seeded=False)
    detail = (
        f"{(gap <= bound).sum()} of {len(gap)} bounds, {(high <= bound).sum()} at the upper end"
    )
    return Claim("Every gap is at most its bound.", away, Rule(high=0.0), detail)


def learned(rows: Columns, start: str) -> Claim:
    """With the ball's constants: half of the accuracy that any setting gains over X0, on average
    over seeds."""
    here, kept = rows["start"] == start, _covered(rows, start, "ball")
    first = np.array([rows["untrained"][one][0] for one in _by_seed(rows, here)])
    top = np.array([rows["accuracy"][one].max() for one in _by_seed(rows, here)])
    half = mean_of(kept - first - HALF * (top - first))  # seed by seed
    learns = float((top - first).mean()) > 0
    return Claim(
        f"From X⁰ {start}, half of what training gains in accuracy is had with a bound below "
        "B / 10, with the ball.",
        Effect.between(
            "accuracy gained beyond half of the best", {"": half if learns else NOTHING}
        ),
        Rule(low=0.0),
        f"X⁰ {first.mean():.3f}, covered {kept.mean():.3f}, best of all {top.mean():.3f}",
    )


def ahead(rows: Columns, start: str) -> Claim:
    """With a bound below a tenth of B accuracy is higher with the constants of the ball, at every
    seed. Where nothing is covered, X0 counts: it needs no stability."""
    ball, wide = (_covered(rows, start, kind) for kind in NAMES)
    small = (rows["start"] == start) & (rows["share"] < TENTH)
    said = ", ".join(
        f"{values.mean():.3f} with {name}" + (" (X⁰)" * (best(rows, of(rows, start, kind)) is None))
        for values, (kind, name) in zip((ball, wide), NAMES.items(), strict=True)
    )
    return Claim(
        f"From X⁰ {start}, the best model with a bound below B / 10 is better with the ball than "
        "with all models, or than X⁰ where these cover none, at every seed.",
        Effect.exact("gain in accuracy of a seed", ball - wide if small.any() else np.nan),
        POSITIVE,
        f"{(ball > wide).sum()} of {len(ball)} seeds; best accuracy: {said}",
    )


def _covered(rows: Columns, start: str, kind: str) -> np.ndarray:
    """At each seed the best accuracy with a bound below a tenth of B, or X0's [seeds]."""
    found = []
    for one in _by_seed(rows, of(rows, start, kind)):
        place = best(rows, one)
        found.append(rows["untrained"][one][0] if place is None else rows["accuracy"][place])
    return np.array(found)


def _by_seed(rows: Columns, mine: np.ndarray) -> list[np.ndarray]:
    return [mine & (rows["seed"] == seed) for seed in np.unique(rows["seed"][mine])]


def numbers(rows: Columns) -> Rows:
    """By start: the models below a tenth of B with each kind of constants, and the best of all."""
    lines: Rows = [("X⁰, constants: η, λ, R", "accuracy", "train loss", "test loss", "bound",
                    "bound / B")]  # fmt: skip
    for start in dict.fromkeys(rows["start"].tolist()):
        for kind in NAMES:
            mine = of(rows, start, kind)
            places = best(rows, mine), *_longest(rows, mine)
            lines.append((f"{start}, {kind}:", *("" for _ in range(5))))
            lines += dict.fromkeys(_line(rows, place) for place in places)
        lines.append((f"{start}, any:", *("" for _ in range(5))))
        lines.append(_line(rows, _most_accurate(rows, of(rows, start, "ball"))))
    return lines


def _longest(rows: Columns, mine: np.ndarray) -> list[int]:
    """For each step size, the largest R (and there the most accurate) with such a bound."""
    inside = np.flatnonzero(mine & (rows["share"] < TENTH))
    found = []
    for lr in np.unique(rows["lr"][inside]):
        same = inside[rows["lr"][inside] == lr]
        found.append(int(same[np.lexsort((rows["accuracy"][same], rows["rounds"][same]))[-1]]))
    return found


def _line(rows: Columns, place: int | None) -> tuple[str, ...]:
    """A point; dashes where there is none."""
    if place is None:
        return ("  none", *("–" for _ in range(5)))
    at = {name: float(column[place]) for name, column in rows.items() if name in SHOWN}
    setting = f"  {at['lr']:g}, {at['lambda']:g}, {at['rounds']:g}"
    losses = (f"{at[name]:.5f}" for name in ("train_loss", "test_loss"))
    bounds = (number(at[name], 2) for name in ("bound", "share"))
    return (setting, f"{at['accuracy']:.3f}", *losses, *bounds)
