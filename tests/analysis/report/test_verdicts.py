"""A verdict is where an interval lies beside a rule: against naive loops, and with false claims."""

import ast
import itertools
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import sem, ttest_ind
from scipy.stats import t as student

from fedmuon.analysis.report.verdicts import (
    ALL,
    HOLDS,
    INCONCLUSIVE,
    POINTS,
    REFUTED,
    UNTESTED,
    VERDICTS,
    Claim,
    Effect,
    Rule,
    Slope,
    counted,
    counts,
    log_slope,
    mean_of,
    mean_with_interval,
    tally,
    times_as_many,
    unknown,
    with_command,
)
from fedmuon.experiments.studies import find as kinds

GRID = np.arange(-3, 4) / 2.0


def naive(low: float, high: float, rule: Rule) -> str:
    """Of the points of a fine grid: all accepted, none, or some."""

    def accepted(point: float) -> bool:
        if rule.strict:
            return rule.low < point < rule.high
        return rule.low <= point <= rule.high

    points = [low, *(p for p in np.linspace(-2, 2, 81) if low < p < high), high]
    held = [accepted(point) for point in points]
    return HOLDS if all(held) else INCONCLUSIVE if any(held) else REFUTED


@pytest.mark.parametrize("strict", [False, True])
def test_one_place_against_a_loop_over_its_points(strict: bool) -> None:
    seen = set()
    ends = [pair for pair in itertools.product(GRID, GRID) if pair[0] <= pair[1]]
    rules = [*ends, *((-math.inf, end) for end in GRID), *((end, math.inf) for end in GRID)]
    for (low, high), (least, most) in itertools.product(ends, rules):
        if strict and least == most:
            continue  # accepts nothing
        rule = Rule(least, most, strict)
        claim = Claim("", Effect.between("", {"": Slope((low + high) / 2, low, high)}), rule)
        assert claim.verdict == naive(low, high, rule), (low, high, rule)
        seen.add(claim.verdict)
    assert seen == {HOLDS, REFUTED, INCONCLUSIVE}


def test_several_places_are_judged_together() -> None:
    """All must hold, one that fails is enough; and every pair of the three, by hand."""
    inside, outside, across = (0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1)
    wanted = {
        (inside, inside): HOLDS, (inside, outside): REFUTED, (inside, across): INCONCLUSIVE,
        (across, outside): REFUTED, (across, across): INCONCLUSIVE, (outside, outside): REFUTED,
    }  # fmt: skip
    for pair, verdict in wanted.items():
        for order in (pair, pair[::-1]):
            found = Effect.between("", {str(k): Slope(0, *one) for k, one in enumerate(order)})
            assert Claim("", found, Rule(low=0.0)).verdict == verdict


def test_one_seed_tests_nothing_and_a_divergence_is_beyond_doubt() -> None:
    alone = Effect.around("", 0.3, np.nan)
    assert Claim("", alone, Rule(high=1.0)).verdict == UNTESTED
    assert mean_of(np.array([0.3])).value == 0.3 and math.isnan(mean_of(np.array([0.3])).low)
    for value, verdict in ((np.inf, REFUTED), (-np.inf, HOLDS), (np.nan, INCONCLUSIVE)):
        assert Claim("", Effect.around("", value, np.nan), Rule(high=0.0)).verdict == verdict
    limited = Claim("", Effect.exact("", 0.3), Rule(high=1.0), limit="nothing was learned")
    assert limited.verdict == UNTESTED and limited.holds is None
    assert unknown("", "refused").verdict == INCONCLUSIVE


def test_of_false_claims_few_hold_and_of_true_ones_few_fail() -> None:
    """As the intervals promise, for one place and for several; a narrower interval is seen."""
    rng, places, trials = np.random.default_rng(0), 3, 150

    def share(true: float, verdict: str, width: float = 1.0) -> float:
        found = 0
        for _ in range(trials):
            slopes = {}
            for k in range(places):
                middle = mean_of(rng.normal(true if k == 0 else 5.0, 1.0, 4))
                half = (middle.high - middle.value) * width
                slopes[str(k)] = Slope(middle.value, middle.value - half, middle.value + half)
            found += Claim("", Effect.between("", slopes), Rule(low=0.0)).verdict == verdict
        return found / trials

    error = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert share(-1e-9, HOLDS) <= 0.025 + error and share(0.0, REFUTED) <= 0.025 + error
    assert share(-1e-9, HOLDS, width=0.2) > 0.1
    assert share(9.0, HOLDS) > 0.9  # and clear ones are decided


def test_the_worst_place_is_shown_and_recorded() -> None:
    effect = Effect.between("slope", {"a": Slope(-1, -2, 0.1), "b": Slope(0.5, -3, 4.0)})
    claim = Claim("It falls.", effect, Rule(high=0.0, strict=True), "more", command="do this")
    assert claim.shown == ("slope, b: 0.5", "−3 to 4") and str(claim.rule) == "< 0"
    assert claim.record() == {
        "claim": "It falls.", "verdict": INCONCLUSIVE, "places": 2, "held": 0, "rule": "< 0",
            "p": {REFUTED: 1.0, "holds": 1.0},
        "effect": {"name": "slope", "unit": "", "value": 0.5, "low": -3.0, "high": 4.0, "at": "b"},
        "command": "do this", "detail": "more", "also": "", "why": "",
    }  # fmt: skip
    assert replace(claim, also="but").in_words == "more; but"
    lost = Claim("", Effect.around("", [0.1, np.nan, np.inf], [0.1, 0.1, np.nan]), Rule(high=1.0))
    assert lost.worst == 2 and lost.record()["effect"]["value"] is None  # JSON has no infinity
    tiny = Claim("", Effect.exact("share", [1e-26, 1e-18, 1e-20]), Rule(high=1.0))
    assert tiny.worst == 1  # though 1 - 1e-18 rounds to 1
    assert unknown("", "why").shown == ("", "") and unknown("", "").worst is None


def test_effects_are_shown_in_their_unit() -> None:
    """Accuracy in points, its interval and its rule too; JSON has the same numbers."""
    found = Effect.around("accuracy, A − B", 0.031, 0.01, unit=POINTS)
    claim = Claim("", found, Rule(low=0.02))
    assert claim.shown == ("accuracy, A − B: 3.1 accuracy points", "2.1 to 4.1")
    assert claim.accepted == "≥ 2" and claim.verdict == HOLDS
    assert claim.record()["effect"]["value"] == pytest.approx(3.1)
    assert claim.record()["effect"]["unit"] == "accuracy points"
    shown = {"s": "0.5 s", "loss": "0.5 (loss)", "ratio": "0.5 (ratio)", "slope": "0.5 (slope)",
             "": "0.5"}  # fmt: skip
    for unit, words in shown.items():
        assert Claim("", Effect.exact("a", 0.5, unit=unit), ALL).shown[0] == f"a: {words}"
    assert counted("", True, "cases").effect.unit == "ratio"


# effects without a unit
PURE = {"", "Spearman's ρ", "Spearman's ρ of gap and bound",
        "Spearman's ρ of predicted and measured gap", "mean ρ over test samples",
        "lead in ρ", "‖M_t/s_t‖_F", "difference of relative shifts"}  # fmt: skip


def test_every_effect_of_the_product_has_a_unit() -> None:
    """Read from the sources; effects that are pure numbers are named here."""
    root, seen, bare = Path(__file__).resolve().parents[3], 0, set()
    for file in [*(root / "analysis").rglob("*.py"), *(root / "experiments").rglob("*.py")]:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if name.split(".")[0] == "Effect" and name != "Effect.of_gaps":  # of losses
                seen += 1
                units = [one.value for one in call.keywords if one.arg == "unit"]
                bare |= set() if units else {ast.literal_eval(call.args[0])}
    assert seen > 40 and bare == PURE


def test_rules_in_words() -> None:
    rules = Rule(high=1.0), Rule(low=0.99), Rule(high=0.0, strict=True), Rule(-0.1, 0.1)
    assert [str(rule) for rule in rules] == ["≤ 1", "≥ 0.99", "< 0", "−0.1 to 0.1"]


def test_counts_have_every_verdict() -> None:
    claims = [counted("", held, "cases") for held in ([True] * 3, [True, False], np.nan)]
    claims.append(Claim("", Effect.around("", 1.0, np.nan), Rule(high=2.0)))
    assert counts(claims) == dict.fromkeys(VERDICTS, 1)
    assert tally(claims, "digits") == (
        "1 of 4 claims holds on digits; 1 is refuted, 1 is inconclusive, 1 is not tested here"
    )
    assert tally(claims[:1] * 2) == "2 of 2 claims hold"


ABOUT = {"suite": "heavy-tail", "scale": "full", "seeds": 20,
         "again": "fedmuon suite heavy-tail --scale full"}  # fmt: skip


def open_claim(value: float = 0.1, half: float = 0.2) -> Claim:
    return Claim("", Effect.around("", value, half), Rule(low=0.0))


def suite_of(command: str) -> Any:
    """The suite that the command runs."""
    words = shlex.split(command)
    assert words[:2] == ["fedmuon", "suite"] and words[-2] == "--out"
    given = dict(zip(words[3::2], words[4::2], strict=True))
    seeds = int(given["--seeds"]) if "--seeds" in given else None
    return kinds.find(words[2], given.get("--data"), given["--scale"], {}, None, seeds)


@pytest.mark.parametrize(
    ("name", "data", "seeds"), [("heavy-tail", "", 20), ("cnn", "digits", [0, 1, 2])]
)
def test_the_command_that_would_decide_is_a_true_one(name: str, data: str, seeds: Any) -> None:
    again = f"fedmuon suite {name}{' --data ' * bool(data)}{data} --scale "
    about = {**ABOUT, "suite": name, "seeds": seeds, "again": f"{again}small", "scale": "small"}
    first = with_command(open_claim(), about).command
    assert first == f"{again}full --out runs/{name}-full"
    full = suite_of(first)
    second = with_command(open_claim(), {**about, "scale": "full", "again": f"{again}full"}).command
    more = suite_of(second)
    many = needed(0.2 / 0.1, len(seeds) if data else seeds)
    assert many == (7 if data else 108)
    asked = more.request.repeats["seeds"]
    assert asked == ([*range(many)] if data else many)
    assert len(more.cells) * (len(seeds) if data else 1) == len(full.cells) * (many if data else 1)


def test_of_many_places_a_true_claim_seldom_fails() -> None:
    """At the very end of the rule at ten places, three seeds each: one 95% interval alone would
    refute it in more than a tenth of all draws, all of them together in a twentieth at most."""
    rng, places, seeds, tries = np.random.default_rng(5), 10, 3, 2000
    draws = rng.normal(size=(tries, places, seeds))
    reach = student.ppf(0.975, seeds - 1) * draws.std(-1, ddof=1) / math.sqrt(seeds)
    found = [Effect.around("", mean, half, free=seeds - 1)
             for mean, half in zip(draws.mean(-1), reach, strict=True)]  # fmt: skip
    rule = Rule(low=0.0)
    fails = np.mean([Claim("", one, rule).verdict == REFUTED for one in found])
    alone = np.mean([rule.refuses(one.low, one.high).any() for one in found])
    assert fails < 0.05 and alone > 0.1
    assert found[0].longer == pytest.approx(student.ppf(1 - 0.0025, 2) / student.ppf(0.975, 2))
    open_one = next(one for one in found if rule.refuses(one.low, one.high).any()
                    and Claim("", one, rule).verdict == INCONCLUSIVE)  # fmt: skip
    claim = Claim("", open_one, rule)
    assert "one interval of many" in claim.why and times_as_many(claim, seeds) > 1
    lone = Claim("", Effect.around("", -1.0, 0.9), rule)
    assert lone.verdict == REFUTED and lone.effect.longer == 1.0 and not lone.why
    exact = Claim("", Effect.exact("", [-1.0, 1.0]), rule)
    assert exact.verdict == REFUTED  # what was computed without chance is beyond it


def needed(ratio: float, seeds: int) -> int:
    """The least number of which Student's interval is shorter by that ratio, and by sqrt(1.5)."""
    width = student.ppf(0.975, seeds - 1) / math.sqrt(seeds) / ratio / math.sqrt(1.5)
    many = seeds
    while student.ppf(0.975, many - 1) / math.sqrt(many) > width:
        many += 1
    return many


def test_more_seeds_are_as_many_as_an_interval_needs() -> None:
    """Drawn again with so many, the claim is decided; with as many as there were, mostly not."""
    rng = np.random.default_rng(3)
    effect, noise, seeds = 0.5, 1.0, 6
    half = float(student.ppf(0.975, seeds - 1)) * noise / math.sqrt(seeds)
    times = times_as_many(open_claim(effect, half), seeds)
    assert times == needed(half / effect, seeds) / seeds

    def decided(count: int) -> float:
        means = (mean_of(rng.normal(effect, noise, count)) for _ in range(200))
        return float(np.mean([one.low >= 0 or one.high < 0 for one in means]))

    assert decided(math.ceil(seeds * times)) > 0.5 > 0.3 > decided(seeds)


def test_there_is_no_command_where_none_would_decide() -> None:
    none = [
        with_command(counted("", True, "runs"), ABOUT),  # decided
        with_command(open_claim(0.0), ABOUT),  # at the very end of the rule
        with_command(unknown("", "refused"), ABOUT),
        with_command(open_claim(), {**ABOUT, "seeds": None}),
        with_command(open_claim(), {**ABOUT, "again": "fedmuon stability config.toml"}),
    ]
    held = replace(open_claim().effect, seeded=False)  # a gap: more seeds leave it as it is
    none.append(with_command(replace(open_claim(), effect=held), ABOUT))
    assert [claim.command for claim in none] == [""] * 6
    for at, why in {1: "100 times", 2: "could not be", 3: "shorten", 5: "shorten"}.items():
        assert (
            none[at].also.startswith("no built-in suite can decide this claim")
            and why in none[at].also
        )
    assert not any(none[at].also for at in (0, 4))
    one = with_command(open_claim(0.1, np.nan), {**ABOUT, "seeds": [7]})
    assert " --seeds 5 " in one.command
    many = {**ABOUT, "seeds": [*range(9)]}
    for one in (open_claim(np.nan), open_claim(0.1, np.nan)):  # no number of seeds is named
        found = with_command(one, many)
        assert "100 times" not in found.also and not found.command


@pytest.mark.filterwarnings("error")
def test_more_seeds_bring_an_interval_only_where_few_left_none() -> None:
    """Not to five seeds or more, nor to models that guess; what is infinite needs no interval."""
    bare = open_claim(0.1, np.nan)
    assert [times_as_many(bare, seeds) for seeds in (1, 2, 5, 9)] == [5.0, 2.5, math.inf, math.inf]
    guess = replace(bare, effect=replace(bare.effect, seeded=False))
    assert times_as_many(guess, 1) == math.inf
    beside = Claim("", Effect.around("", [np.inf, 0.1], [np.nan, 0.2]), Rule(low=0.0))
    assert beside.verdict == INCONCLUSIVE
    assert times_as_many(beside, 3) == times_as_many(open_claim(0.1, 0.2), 3) == 7 / 3
    assert " --seeds 108 " in with_command(beside, ABOUT).command


@pytest.mark.parametrize("scale", ["small", "full"])
def test_the_command_that_would_decide_is_of_all_seeds(scale: str) -> None:
    """Also where one was asked for, which would override those of the file."""
    asked = kinds.find("cnn", "digits", scale, {"local": {"batch": 32}}, 3).request
    about = {**ABOUT, "suite": "cnn", "scale": scale, "seeds": [3], "again": asked.again}
    assert "--seed 3" in asked.again
    found = with_command(open_claim(0.1, np.nan), about).command
    assert "--seed " not in found and " --set local.batch=32" in found
    many = suite_of(found).request.repeats["seeds"]
    assert many == ([0, 1, 2] if scale == "small" else [0, 1, 2, 3, 4])


def test_intervals_are_welchs() -> None:
    """Means near 1 of small spread: the log-slope over one e-fold is the difference of means."""
    draw = np.random.default_rng(0)
    small, large = 1 + 1e-4 * draw.standard_normal(4), 1 + 5e-5 * draw.standard_normal(9)
    found = log_slope([1.0, math.e], [small, large])
    wanted = ttest_ind(large, small, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-3)


def test_a_band_is_students_interval_of_the_mean() -> None:
    """An independent formula; one run has no interval; the range of the runs is not it."""
    runs = np.random.default_rng(5).normal(size=(4, 7))
    mean, low, high = mean_with_interval(runs)
    for column, *ends in zip(runs.T, mean, low, high, strict=True):
        expected = student.interval(0.95, 3, column.mean(), sem(column))
        assert np.allclose(ends, [column.mean(), *expected], rtol=1e-12)
    assert not np.allclose(low, runs.min(0)) and not np.allclose(high, runs.max(0))
    alone = mean_with_interval(runs[:1])
    assert all((ends == runs[0]).all() for ends in alone)
