"""How often a rule refutes a true claim: simulations with as many seeds and places as suites have.

    PYTHONPATH=tests:tests/helpers python -m tests.analysis.report.test_levels  # 10,000 draws each

Every claim here is true at the very end of its rule at all places, where "refuted" is likeliest.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from conftest import quick
from scipy.stats import norm

from docs.making import papers
from fedmuon.analysis.report.claims import spearman
from fedmuon.analysis.report.tuning import Tuned, objection
from fedmuon.analysis.report.verdicts import (
    FEWEST,
    HOLDS,
    INCONCLUSIVE,
    NORMAL,
    REFUTED,
    Claim,
    Effect,
    Rule,
    Slope,
    correlation,
    log_slope,
    mean_of,
    paired,
    quotient,
)
from fedmuon.analysis.theory.generalization import _half_width

PROMISED = 0.05
Draw = Callable[[np.random.Generator, int], Slope]
SPREAD = 0.3  # of the logarithm of what a run measures


def differences(rng: np.random.Generator, seeds: int) -> Slope:
    value, half = paired([(float(one), 0.0) for one in rng.standard_t(8, seeds)])
    return Slope(value, value - half, value + half, seeds - 1.0)


def means(rng: np.random.Generator, seeds: int) -> Slope:
    return mean_of(rng.normal(size=seeds))


def slopes(rng: np.random.Generator, seeds: int) -> Slope:
    sizes = 4 ** np.arange(3, 7)
    return log_slope(sizes, [np.exp(SPREAD * rng.normal(size=seeds)) for _ in sizes])


def quotients(rng: np.random.Generator, seeds: int) -> Slope:
    one, other = np.exp(SPREAD * rng.normal(size=(2, seeds)))
    found = quotient(one, other)
    return Slope(found.value - 1, found.low - 1, found.high - 1, found.free)


# What is drawn, the rule, seeds and places, and a suite of that size.
BELOW, ABOVE = Rule(high=0.0), Rule(low=0.0)
SIZES: list[tuple[Draw, Rule, int, int, str]] = [
    (differences, ABOVE, 2, 5, "solver"), (differences, ABOVE, 3, 5, "rank"),
    (differences, ABOVE, 5, 7, "federated-comparison"), (means, BELOW, 2, 10, "none"),
    (means, BELOW, 16, 30, "bias"), (means, BELOW, 64, 12, "disk-regression"),
    (means, BELOW, 16, 156, "disk-stationarity"), (slopes, BELOW, 16, 5, "heavy-tail"),
    (slopes, Rule(0.0, 0.0), 8, 5, "rank-dependence"), (quotients, BELOW, 16, 4, "heavy-tail"),
]  # fmt: skip


def rates(
    draw: Draw, rule: Rule, seeds: int, places: int, tries: int
) -> tuple[float, float, float]:
    """How often the claim fails; and if one interval were enough, or errors were known."""
    rng, found = np.random.default_rng(seeds * places), np.zeros(3)
    for _ in range(tries):
        every = {str(k): draw(rng, seeds) for k in range(places)}
        effect = Effect.between("", every)
        known = Effect("", effect.value, effect.low, effect.high)  # with a normal's longer ones
        found += [
            rule.refuses(*effect.together).any(),
            rule.refuses(effect.low, effect.high).any(),
            rule.refuses(*known.together).any(),
        ]
    fails, alone, normal = (found / tries).tolist()
    return fails, alone, normal


@pytest.mark.parametrize(("draw", "rule", "seeds", "places", "suite"), quick(SIZES, SIZES[2:3]))
def test_a_true_claim_fails_as_seldom_as_promised(
    draw: Draw, rule: Rule, seeds: int, places: int, suite: str
) -> None:
    tries = max(200, 4000 // places)
    error = 3 * math.sqrt(PROMISED * (1 - PROMISED) / tries)
    fails, alone, _ = rates(draw, rule, seeds, places, tries)
    assert fails <= PROMISED + error
    assert alone > fails


def test_a_normal_quantile_would_refute_too_often() -> None:
    """With few seeds, where Student's intervals must grow by more than a normal's."""
    fails, _, normal = rates(means, Rule(0.0, 0.0), 2, 10, 250)
    assert fails < PROMISED + 0.03 and normal > 0.18


PAIRS = [size[:4] for size in SIZES[:5]]


@pytest.mark.parametrize(("draw", "rule", "seeds", "places"), quick(PAIRS, PAIRS[1:2]))
def test_p_values_agree_with_verdicts(draw: Draw, rule: Rule, seeds: int, places: int) -> None:
    rng = np.random.default_rng(seeds)
    for shift in np.repeat((-3.0, -1.0, 0.0, 1.0, 3.0), 20):
        drawn = {str(k): draw(rng, seeds) for k in range(places)}
        moved = {name: Slope(one.value + shift, one.low + shift, one.high + shift, one.free)
                 for name, one in drawn.items()}  # fmt: skip
        claim = Claim("", Effect.between("", moved), rule)
        assert (claim.chances[REFUTED] <= PROMISED) == (claim.verdict == REFUTED)
        assert (claim.chances[HOLDS] <= PROMISED) == (claim.verdict == HOLDS)


@pytest.mark.parametrize("against", quick([False, True], [False]))
def test_a_paper_is_refuted_as_seldom_as_promised(against: bool) -> None:
    """By eight true claims, each at the end of its rule; without the correction, far more often."""
    rng, many, tries, found = np.random.default_rng(4), 8, 150, np.zeros(2)
    rule = Rule(low=0.0, strict=True) if against else BELOW
    asked = {"basis": papers.OWN, "against" if against else "claim": "Well"}
    for _ in range(tries):
        claims = [Claim("Well", Effect.between("", {"": means(rng, 3)}), rule) for _ in range(many)]
        kept = {"claims": [one.record() for one in claims]}
        found += [REFUTED in papers.corrected(asked, kept), REFUTED in papers.judged(asked, kept)]
    error = 3 * math.sqrt(PROMISED * (1 - PROMISED) / tries)
    assert found[0] / tries <= PROMISED + error < 0.12 < found[1] / tries


def uneven(rng: np.random.Generator, seeds: int) -> Slope:
    """The slope of equal means, whose runs are spread more at small sizes."""
    spreads = 0.4 * 0.4 ** np.arange(4)
    return log_slope(4 ** np.arange(3, 7),
                     [np.exp(s * rng.normal(size=seeds) - s * s / 2) for s in spreads])  # fmt: skip


def test_slopes_of_few_runs_decide_nothing() -> None:
    """Their intervals refute more than one true claim in twenty."""
    rng, tries, rule = np.random.default_rng(2), 150, Rule(0.0, 0.0)
    for seeds in (2, 3, FEWEST):
        fails = shown = 0
        for _ in range(tries):
            effect = Effect.between("", {str(k): uneven(rng, seeds) for k in range(5)})
            fails += rule.refuses(*effect.together).any()
            shown += Claim("", effect, rule).verdict == REFUTED
        assert fails / tries > 0.07 if seeds == 2 else fails > 0
        assert shown == (fails if seeds == FEWEST else 0)
    steep = {"": Slope(-1.0, -1.1, -0.9, 5.0, few=True)}
    claim = Claim("", Effect.between("", steep), Rule(high=0.0))
    assert claim.verdict == INCONCLUSIVE and "fewer than 4 runs" in claim.why


def ranked(rng: np.random.Generator, seeds: int, items: int = 21) -> np.ndarray:
    """Rank correlations of settings, one for each seed, as of gap and bound in `gap-bound`."""
    x = np.arange(items) / items
    return np.array([spearman(x, x + 0.06 * rng.normal(size=items)) for _ in range(seeds)])


@pytest.mark.parametrize("seeds", quick([2, 3, 12], [2]))
def test_intervals_of_correlations_cover_and_stay_below_1(seeds: int) -> None:
    rng, tries = np.random.default_rng(seeds), 300
    truth = correlation(ranked(np.random.default_rng(0), 3000), 21)
    assert truth.high - truth.low < 0.003
    covered = beyond = 0
    for _ in range(tries):
        values = ranked(rng, seeds)
        one, plain = correlation(values, 21), mean_of(values)
        assert -1 < one.low <= one.value <= one.high < 1 and one.correlation
        covered += one.low <= truth.value <= one.high
        beyond += plain.high > 1
        if one.low < one.high:
            longer = Effect.between("", {"a": one, "b": one}).together
            assert -1 <= longer[0].min() < one.low and one.high < longer[1].max() <= 1
    assert covered / tries >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / tries)
    assert beyond > (0.2 * tries if seeds == 2 else -1)  # the control: intervals of plain means


@pytest.mark.parametrize("points", quick([10, 40], [10]))
def test_the_best_point_needs_new_seeds(points: int) -> None:
    """The interval from the runs that chose it covers too seldom; from new runs, it covers."""
    rng, tries, covered = np.random.default_rng(points), 400, np.zeros(2)
    for _ in range(tries):
        tried = [mean_of(rng.normal(size=5)) for _ in range(points)]
        best, again = min(tried, key=lambda one: one.value), mean_of(rng.normal(size=5))
        covered += [one.low <= 0 <= one.high for one in (best, again)]
    error = 3 * math.sqrt(PROMISED * (1 - PROMISED) / tries)
    assert covered[0] / tries < 0.95 - error <= covered[1] / tries


def losses(rng: np.random.Generator) -> list[np.ndarray]:
    """Held-out losses of three classes, few of which are 1."""
    return [(rng.random(size) < 0.03).astype(float) for size in (40, 60, 100)]


@pytest.mark.parametrize("places", quick([36, 100, 2520], [100]))
def test_intervals_of_gaps_are_right_together(places: int) -> None:
    """Those of the family are no shorter than intervals that each fail with 1/K of the chance."""
    rng, weights, needed = np.random.default_rng(places), np.array([0.2, 0.3, 0.5]), []
    effect = Effect.of_gaps(*(np.full(places, one) for one in (0.0, -1.0, 1.0, 0.0)))
    for kind in ("shorter", "bernstein", "hoeffding"):
        for _ in range(50):
            groups = losses(rng)
            one, all_ = (_half_width(weights, groups, PROMISED / many, 1.0, kind)
                         for many in (1, places))  # fmt: skip
            needed.append(all_ / one)
    assert max(needed) <= effect.longer[0] < 1.2 * max(needed)
    assert max(needed) > norm.ppf(1 - PROMISED / 2 / places) / NORMAL  # a normal's is too short


@pytest.mark.slow
def test_gaps_at_their_bounds_are_seldom_refuted() -> None:
    rng, weights, places, tries = np.random.default_rng(1), np.array([0.2, 0.3, 0.5]), 100, 60
    fails = 0
    for _ in range(tries):
        drawn = [losses(rng) for _ in range(places)]
        gap = np.array([sum(w * one.mean() for w, one in zip(weights, groups, strict=True))
                        for groups in drawn]) - 0.03  # fmt: skip
        half = np.array(
            [_half_width(weights, groups, PROMISED, 1.0, "shorter") for groups in drawn]
        )
        effect = Effect.of_gaps(gap, gap - half, gap + half, np.zeros(places))
        fails += Rule(high=0.0).refuses(*effect.together).any()
    assert fails / tries <= PROMISED + 3 * math.sqrt(PROMISED * (1 - PROMISED) / tries)


# Tuned comparisons: both methods are equally good at their best step size.

FULL = 2.0 ** np.arange(-3, 4)  # the best step size is 1
GRIDS = {"equal grids": (FULL, FULL), "one grid ends before the best value": (FULL, FULL[:3]),
         "as before, with equal numbers of values": (FULL[2:5], FULL[:3]),
         "one method has a single guess": (FULL, FULL[5:6])}  # fmt: skip


def score(lr: float, rng: np.random.Generator, seeds: int) -> np.ndarray:
    """Losses of runs with this step size. The loss is quadratic in log lr."""
    return 0.3 * math.log2(lr) ** 2 + 0.1 * rng.normal(size=seeds)


def decided(grids: tuple[np.ndarray, np.ndarray], tries: int, seeds: int = 5) -> np.ndarray:
    """How often `better` is refuted and how often it holds, without and with the rule."""
    rng, found = np.random.default_rng(len(grids[1])), np.zeros(4)
    for _ in range(tries):
        tuned = {
            name: Tuned(name, "local.lr", list(grid), [float(score(lr, rng, 1)[0]) for lr in grid])
            for name, grid in zip(("than", "better"), grids, strict=True)
        }
        one, other = (score(tuned[name].best, rng, seeds) for name in ("better", "than"))
        value, half = paired(list(zip(one, other, strict=True)))
        effect = Effect.around("", [value], [half], free=seeds - 1)
        why = objection(["better", "than"], {name: [one] for name, one in tuned.items()})
        for at, text in enumerate(("", why)):
            verdict = Claim("", effect, Rule(high=0.0), untuned=text).verdict
            found[2 * at : 2 * at + 2] += verdict == REFUTED, verdict == HOLDS
    return found / tries


@pytest.mark.parametrize("case", quick(GRIDS, [*GRIDS][:2]))
def test_the_rule_forbids_verdicts_that_tuning_made(case: str) -> None:
    """Without the rule, a truncated grid refutes a true claim nearly always."""
    refuted, _, with_rule, held = decided(GRIDS[case], 300)
    assert with_rule <= PROMISED
    if case == "equal grids":
        assert 0.0 < refuted + held <= 3 * PROMISED  # the rule still permits a decision
    else:
        assert refuted > 0.5 and with_rule < 0.05


if __name__ == "__main__":
    print("rule, seeds, places: fails; by one interval alone; by a normal's ratio")
    for draw, rule, seeds, places, suite in SIZES:
        shown = ", ".join(f"{one:.1%}" for one in rates(draw, rule, seeds, places, 10_000))
        print(f"{draw.__name__} {rule}, {seeds}, {places} ({suite}): {shown}")
    print("tuning: refuted and holds without the rule; refuted and holds with the rule")
    for case, grids in GRIDS.items():
        print(f"{case}: {', '.join(f'{one:.1%}' for one in decided(grids, 10_000))}")
