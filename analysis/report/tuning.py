"""The tuning of methods, and the rule for comparisons of tuned methods.

A comparison of two methods depends on their step sizes. The rule makes the comparison
`inconclusive` in each of the following cases:

- The best value of a method is at an end of its grid. A better value may lie outside the grid.
- A method's best value is far from the next values of its grid, or its whole grid is narrow. A
  better value may lie between two values or outside the grid.
- A method has fewer tuned values than its opponent.
- A method was tuned for other settings, or was not tuned.

The verdict names the method and the case. A verdict of `holds` or `refuted` is therefore possible
only if both methods had the same number of values, and their best values are inside grids that are
neither coarse nor narrow.

Suites of kind `federated-comparison` and `systems` do not use `objection`. They check only the ends
of the grids and the numbers of values, not whether a grid is coarse or narrow.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmuon.analysis.report.comparisons import HIGHER

COARSEST = 4.0  # largest quotient of the best value and the next values of its grid
NARROWEST = 2.0  # smallest quotient of the largest and the smallest value of a grid
UNTUNED = "the step sizes of {} were not tuned"


@dataclass(frozen=True)
class Tuned:
    """The tuning of one method.

    Attributes:
        method: The name of the method.
        key: The config key that was tuned, such as `local.lr`.
        values: The values that were tried.
        scores: For each value, the mean of the measure over the tuning seeds. A score that is not
            finite means that a run diverged.
        measure: The measure of the scores.
        fits: Whether the method was tuned for the settings in which it is compared.
    """

    method: str
    key: str
    values: Sequence[float]
    scores: Sequence[float]
    measure: str = "test_loss"
    fits: bool = True

    @classmethod
    def of(cls, record: Mapping[str, Any], about: Mapping[str, Any], name: str = "") -> "Tuned":
        """Return the tuning in a record of tuned/SUITE.json, or of a suite's suite.json.

        Args:
            record: The record of a method. A score of a run that diverged is None.
            about: The file's content, with the key and the measure of all methods.
            name: The name of the method, in place of the name in the record.
        """
        scores = [math.nan if score is None else float(score) for score in record["scores"]]
        values = [float(value) for value in record["values"]]
        key, measure = str(about["key"]), str(about["measure"])
        return cls(
            name or str(record["method"]), key, values, scores, measure,
            bool(record.get("fits", True)),
        )  # fmt: skip

    @property
    def losses(self) -> list[float]:
        """The scores in increasing order of the values. Lower is better, infinite if diverged."""
        sign = -1 if self.measure in HIGHER else 1
        pairs = sorted(zip(self.values, self.scores, strict=True))
        return [sign * score if math.isfinite(score) else math.inf for _, score in pairs]

    @property
    def best(self) -> float:
        """The value with the best score, or nan if all runs diverged.

        In a tie, values inside the grid come first, and then the smallest value.
        """
        losses, grid = self.losses, sorted(self.values)
        if not losses or math.isinf(lowest := min(losses)):
            return math.nan
        tied = [at for at, loss in enumerate(losses) if loss == lowest]
        within = [at for at in tied if 0 < at < len(grid) - 1]
        return grid[(within or tied)[0]]

    @property
    def end(self) -> str:
        """Return "smallest" or "largest" if an end of the grid is at least as good as all others.

        The result is "" if the best value is strictly inside the grid.
        """
        losses = self.losses
        if not losses or math.isinf(lowest := min(losses)):
            return ""
        ends = {"smallest": losses[0], "largest": losses[-1]}
        return next((name for name, loss in ends.items() if loss == lowest), "")

    @property
    def flaw_of_grid(self) -> str:
        """Return why the grid is too coarse at its best value or too narrow, or ""."""
        grid = sorted(set(self.values))
        if grid[0] <= 0:
            return ""
        if (width := grid[-1] / grid[0]) < NARROWEST:
            return f"its grid ends at {width:.6g} times its smallest value"
        at = grid.index(self.best)
        apart = max(high / low for low, high in itertools.pairwise(grid[max(0, at - 1) : at + 2]))
        far = apart > COARSEST
        return f"the next values of its grid are up to {apart:.3g} times apart" if far else ""

    @property
    def inside(self) -> bool:
        """Whether the best value is strictly inside the grid."""
        return not math.isnan(self.best) and not self.end


def objection(methods: Sequence[str], tuned: Mapping[str, Sequence[Tuned]]) -> str:
    """Return why the rule forbids a decision about a comparison of methods, or "".

    Args:
        methods: The names of the compared methods.
        tuned: The tunings of each method, one for each setting in which it was tuned.

    Example:
        >>> wide = Tuned("SGD", "local.lr", [0.1, 0.2, 0.4], [2.0, 1.0, 2.0])
        >>> end = Tuned("AdamW", "local.lr", [0.1, 0.2, 0.4], [3.0, 2.0, 1.0])
        >>> objection(["SGD", "AdamW"], {"SGD": [wide], "AdamW": [end]})
        "AdamW's best local.lr 0.4 is the largest of its grid"
    """
    names = list(dict.fromkeys(methods))
    if absent := [name for name in names if not tuned.get(name)]:
        return UNTUNED.format(" and ".join(absent))
    tunings = [tuning for name in names for tuning in tuned[name]]
    reasons = [
        f"{tuning.method} was tuned for other settings" for tuning in tunings if not tuning.fits
    ]
    for tuning in tunings:
        word = tuning.key.removeprefix("local.") if tuning.key != "local.lr" else "step size"
        if math.isnan(tuning.best):
            reasons.append(f"{tuning.method} diverged with every value of its grid")
        elif tuning.end:
            value = {"smallest": min, "largest": max}[tuning.end](tuning.values)
            reasons.append(
                f"{tuning.method}'s best {word} {value:g} is the {tuning.end} of its grid"
            )
        elif tuning.flaw_of_grid:
            reasons.append(
                f"{tuning.method}'s best {word} is {tuning.best:g}, but {tuning.flaw_of_grid}"
            )
    counts = {name: {len(set(tuning.values)) for tuning in tuned[name]} for name in names}
    if len(set().union(*counts.values())) > 1:
        parts = (f"{name} {' to '.join(map(str, sorted(sizes)))}" for name, sizes in counts.items())
        reasons.append(f"the numbers of tuned values differ: {', '.join(parts)}")
    return "; ".join(dict.fromkeys(reasons))


def widened(grids: Mapping[str, Sequence[float]], tuned: Iterable[Tuned]) -> dict[str, list[float]]:
    """Return grids that extend beyond each end that has a best value.

    New values continue the grid geometrically. Afterwards, all grids are extended to the same
    number of values, on the side where the best value has fewer neighbours. If every best value is
    inside its grid and all grids have the same size, the grids do not change.

    Args:
        grids: The values of each method. A grid has at least two values.
        tuned: The tunings of these grids. A method can have several tunings, one for each setting.
    """
    wider = {name: sorted(values) for name, values in grids.items()}
    tunings = list(tuned)
    for tuning in tunings:
        values = wider[tuning.method]
        tried = (
            [tuning.values[0], tuning.values[-1]] if not tuning.values else sorted(tuning.values)
        )
        if tuning.end == "smallest" and values[0] == tried[0]:
            _lower(values)
        elif tuning.end == "largest" and values[-1] == tried[-1]:
            _higher(values)
    size = max(map(len, wider.values()))
    for name, values in wider.items():
        places = [values.index(tuning.best) for tuning in tunings
                  if tuning.method == name and tuning.best in values]  # fmt: skip
        for _ in itertools.repeat(None, size - len(values)):
            middle = sum(places) / len(places) if places else 0.0
            if middle < (len(values) - 1) / 2:
                _lower(values)
                places = [place + 1 for place in places]
            else:
                _higher(values)
    return wider


def _lower(values: list[float]) -> None:
    values.insert(0, float(f"{values[0] ** 2 / values[1]:.3g}"))


def _higher(values: list[float]) -> None:
    values.append(float(f"{values[-1] ** 2 / values[-2]:.3g}"))
