"""The rule for comparisons of tuned methods, and the extension of grids, on made-up numbers."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedmuon.analysis.report.tuning import Tuned, objection, widened
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, with_command

GRID = [0.01, 0.02, 0.04, 0.08, 0.16]
VALLEY = [3.0, 2.0, 1.0, 2.0, 3.0]


def tuned(name: str, scores: list[float], values: list[float] = GRID, **more: object) -> Tuned:
    return Tuned(name, "local.lr", values, scores, **more)  # pyright: ignore[reportArgumentType]


def said(*methods: Tuned) -> str:
    return objection([one.method for one in methods], {one.method: [one] for one in methods})


INSIDE = tuned("SGD", VALLEY)


@pytest.mark.parametrize("other", [
    tuned("AdamW", VALLEY),
    tuned("Muon", VALLEY, [0.0001, 0.02, 0.04, 0.08, 9.0]),  # a wide step far from the best value
    tuned("Muon", VALLEY, [0.01, 0.03, 0.1, 0.3, 1.0]),  # 10 / 3 times apart
    tuned("Muon", [3.0, 1.0, 2.0, math.nan, math.inf]),  # a diverged end
])  # fmt: skip
def test_equal_grids_with_best_values_inside_are_accepted(other: Tuned) -> None:
    assert said(INSIDE, other) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (tuned("DP-Adam", [5, 4, 3, 2, 1]), "DP-Adam's best step size 0.16 is the largest of"),
        (tuned("DP-Adam", [1, 2, 3, 4, 5]), "DP-Adam's best step size 0.01 is the smallest of"),
        (tuned("AdamW", VALLEY[1:4], GRID[1:4]), "the numbers of tuned values differ"),
        (tuned("Muon", VALLEY, fits=False), "Muon was tuned for other settings"),
        (tuned("Muon", [math.nan] * 5), "Muon diverged with every value"),
        (tuned("Muon", [1.0, 2.0, 1.0, 2.0, 3.0]), "is the smallest of its grid"),
        (tuned("Muon", [2.0, 2.0, 2.0, 2.0, 2.0]), "of its grid"),
        (tuned("Muon", [1.0], [0.1]), "of its grid"),
        (tuned("Muon", [.1, .2, .3, .4, .5], measure="accuracy"), "0.16 is the largest"),
        (tuned("Muon", VALLEY, [1e-6, 1e-5, 1e-4, 1e9, 1e10]), "up to 1e+13 times apart"),
        (tuned("Muon", VALLEY, [0.01, 0.02, 0.1, 0.2, 0.4]), "0.1, but the next values of its"),
        (tuned("Muon", [4, 1, 1, 2, 3, 4], [1, 2, 2, 9, 10, 64]), "up to 4.5 times apart"),
        (tuned("Muon", VALLEY, [0.1, 0.1001, 0.1002, 0.1003, 0.1004]), "ends at 1.004 times its"),
    ],
)  # fmt: skip
def test_unequal_tuning_is_named(other: Tuned, words: str) -> None:
    assert words in said(INSIDE, other)
    assert words in said(other, INSIDE)


def test_the_numbers_of_values_and_an_end_that_ties_are_named() -> None:
    words = said(INSIDE, tuned("AdamW", VALLEY[1:4], GRID[1:4]))
    assert words == "the numbers of tuned values differ: SGD 5, AdamW 3"
    words = said(tuned("Muon", [1.0, 2.0, 1.0, 2.0, 3.0]), INSIDE)
    assert words == "Muon's best step size 0.01 is the smallest of its grid"


def test_a_method_without_tuning_is_named() -> None:
    assert objection(["SGD", "Muon"], {"SGD": [INSIDE]}) == "the step sizes of Muon were not tuned"


def test_a_tie_inside_the_grid_takes_the_smaller_value() -> None:
    one = tuned("Muon", [2.0, 1.0, 1.0, 2.0, 3.0])
    assert one.inside and one.best == 0.02
    assert tuned("Muon", [1.0, 1.0, 2.0, 3.0, 4.0]).end == "smallest"
    assert tuned("Muon", [math.nan, 1.0, 2.0, 3.0, 4.0]).best == 0.02


@pytest.mark.parametrize("away", [-1.0, 1.0])
def test_a_decided_claim_becomes_inconclusive_and_gives_the_reason(away: float) -> None:
    effect = Effect.around("loss", [away], [0.1], unit="loss")
    claim = Claim("Muon ends lower.", effect, Rule(high=0.0))
    assert claim.verdict == ("holds" if away < 0 else "refuted")  # the intervals alone
    bad = Claim("Muon ends lower.", effect, Rule(high=0.0), untuned="Muon had 1 value")
    assert bad.verdict == "inconclusive" and bad.why == "Muon had 1 value"
    assert bad.record()["why"] == "Muon had 1 value"
    one_seed = Effect.around("loss", [away], [math.nan], unit="loss")
    untested = Claim("", one_seed, Rule(high=0.0), untuned="Muon had 1 value")
    assert untested.verdict == "not tested here"  # the rule never makes a verdict stronger


@pytest.mark.parametrize(("kind", "said"), [
    ("training", "the suite has no [tuning]"), ("systems", "its grids of step sizes must change"),
])  # fmt: skip
def test_a_suite_that_cannot_be_tuned_by_command_says_what_is_missing(kind: str, said: str) -> None:
    claim = Claim("", Effect.around("loss", [1.0], [0.1], unit="loss"), Rule(high=0.0), untuned="x")
    about = {"again": "fedmuon suite some", "scale": "full", "kind": kind}
    judged = with_command(claim, about)
    assert said in judged.also and not judged.command
    tuned_by_command = with_command(claim, about | {"tuning": {"at": "each"}})
    assert tuned_by_command.command == "fedmuon tune some"


def extended(
    grids: dict[str, list[float]], loss: Callable[[str, float], float], passes: int = 20
) -> tuple[dict[str, list[float]], list[Tuned]]:
    """Extend grids until they no longer change."""
    for _ in range(passes):
        every = [Tuned(name, "local.lr", values, [loss(name, one) for one in values])
                 for name, values in grids.items()]  # fmt: skip
        if (wider := widened(grids, every)) == grids:
            return grids, every
        assert len({len(values) for values in wider.values()}) == 1
        grids = wider
    raise AssertionError("the grids never stopped growing")


@pytest.mark.parametrize("centres", [(1e-4, 10.0), (3.0, 3.0), (0.04, 0.04), (1e-3, 0.05)])
def test_grids_grow_until_a_parabola_s_minimum_is_inside(centres: tuple[float, float]) -> None:
    """The loss is quadratic in log lr, so the best value is the nearest one in log lr."""
    where: dict[str, float] = {"SGD": centres[0], "Muon": centres[1]}

    def loss(name: str, lr: float) -> float:
        return math.log(lr / where[name]) ** 2

    grids, every = extended({"SGD": GRID, "Muon": GRID}, loss)
    assert len(grids["SGD"]) == len(grids["Muon"])
    for one in every:
        assert one.inside
        assert abs(math.log(one.best / where[one.method])) <= math.log(2.1) / 2
        assert np.allclose(np.diff(np.log(grids[one.method])), math.log(2), atol=0.02)
    assert objection(["SGD", "Muon"], {one.method: [one] for one in every}) == ""


def test_grids_grow_on_both_sides_and_not_where_runs_diverged() -> None:
    """A method of several settings grows at both ends."""
    every = [tuned("Muon", [1, 2, 3, 4, 5]), tuned("Muon", [5, 4, 3, 2, 1]), INSIDE]
    wider = widened({"Muon": GRID, "SGD": GRID}, every)
    assert wider["Muon"] == [0.005, *GRID, 0.32] and len(wider["SGD"]) == 7
    assert widened({"Muon": GRID}, [tuned("Muon", [math.nan] * 5)]) == {"Muon": GRID}


def test_opponents_get_the_same_number_of_values_but_their_best_value_stays() -> None:
    every = [tuned("SGD", [5, 4, 3, 2, 1]), tuned("Muon", VALLEY)]
    wider = widened({"SGD": GRID, "Muon": GRID}, every)
    assert wider["SGD"] == [*GRID, 0.32]
    assert wider["Muon"] == [*GRID, 0.32]  # inside: one more at a side
    assert widened({"SGD": GRID, "Muon": GRID[1:]}, [INSIDE])["Muon"] == GRID
