"""Who ends lower and who gets there sooner: from made columns, each with a negative control."""

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_rel

from fedmuon.analysis.report.comparisons import (
    judge,
    luck,
    near,
    near_chance,
    rows_of,
    sooner,
    terminal,
)
from fedmuon.analysis.report.verdicts import POINTS, UNTESTED, by_seed, with_command
from fedmuon.experiments.studies import training_findings
from fedmuon.experiments.studies.training_findings import looks


def columns(**ends: list[list[float]]) -> tuple[dict, dict]:
    """runs and curves of variants, each a list of train losses by round (its seconds) a seed."""
    rows = [
        (name, np.nan, seed, number, number * (2.0 if name == "slow" else 1.0), loss)
        for name, seeds in ends.items()
        for seed, losses in enumerate(seeds)
        for number, loss in enumerate(losses, 1)
    ]
    names = ("variant", "x", "seed", "round", "train_seconds", "train_loss")
    curves = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True))}  # noqa: B905
    last = np.append(np.diff(curves["round"]) <= 0, True)
    more = {"accuracy": 1 - curves["train_loss"], "test_loss": curves["train_loss"]}
    return {name: column[last] for name, column in (curves | more).items()}, curves | more


def test_terminal_claims_are_about_means_over_seeds() -> None:
    runs, _ = columns(good=[[0.9, 0.2], [0.9, 0.5]], bad=[[0.9, 0.4], [0.9, 0.4]])
    claim = terminal("good", "bad", "train_loss", runs)
    assert claim.verdict == "inconclusive"
    assert claim.detail.startswith("0.35 against 0.4 (−0.05 ± 1.9); ± is half of a 95%")
    assert claim.detail.endswith("0 of 1 intervals exclude 0")
    sure, _ = columns(good=[[0.2], [0.21]], bad=[[0.4], [0.41]])
    assert terminal("good", "bad", "train_loss", sure).detail.endswith("1 of 1 intervals exclude 0")
    ahead = terminal("good", "bad", "train_loss", sure)
    assert ahead.holds and ahead.effect.unit == "loss"
    assert terminal("bad", "good", "train_loss", sure).holds is False
    higher = terminal("good", "bad", "accuracy", sure)
    assert higher.holds and higher.effect.unit == POINTS
    assert terminal("bad", "good", "accuracy", sure).holds is False
    alone, _ = columns(good=[[0.2]], bad=[[0.4]])
    assert terminal("good", "bad", "train_loss", alone).verdict == UNTESTED
    assert terminal("good", "good", "train_loss", runs).holds  # at or below
    assert terminal("good", "bad", "epsilon", runs).holds is None
    sure["train_loss"][:2] += 0.21  # worse by a hundredth
    assert terminal("good", "bad", "train_loss", sure).holds is False


def test_models_that_only_guess_compare_nothing() -> None:
    """Of ten classes on 100 samples, an accuracy up to 0.19 may be a guess."""
    assert luck(10, 100) == pytest.approx(0.19)
    runs, _ = columns(good=[[0.84], [0.85]], bad=[[0.88], [0.89]])
    for chance, verdict in ((0.19, UNTESTED), (0.15, "holds")):
        found = terminal("good", "bad", "accuracy", runs, chance=chance)
        assert found.verdict == verdict and ("guess" in found.detail) == (chance == 0.19)
        close = near("good", "bad", "train_loss", runs, 0.1, chance=chance)
        assert close.verdict == verdict
        assert all(one.effect.seeded == (chance == 0.15) for one in (found, close))
        about = {"suite": "cnn", "scale": "full", "seeds": [0, 1],
                 "again": "fedmuon suite cnn --scale full"}  # fmt: skip
        assert not with_command(found, about).command  # more seeds guess no better
    alone, _ = columns(good=[[0.84]], bad=[[0.88]])  # negative control: the seed is missing
    bare = terminal("good", "bad", "accuracy", alone, chance=0.15)
    assert bare.verdict == UNTESTED and with_command(bare, about).command


def test_models_near_chance_are_counted() -> None:
    """Up to half above a guess's accuracy, or three standard deviations of few samples; diverged
    runs are not counted, which is said, nor is anything said of a task without classes."""
    found = np.array([0.1, 0.149, 0.151, np.nan])
    end = "ended near chance, with an accuracy of 0.1 to 0.149. A guess "
    end += "among 10 classes has an accuracy of 0.1."
    assert near_chance(found, 10, 5000) == f"2 of 3 runs that did not diverge {end}"
    assert near_chance(found[:3], 10, 5000) == f"2 of 3 runs {end}"
    assert near_chance(found, 10, 100).startswith("Every run that did not diverge ended")
    lone = near_chance(np.array([0.1, np.nan, np.nan]), 10, 5000)
    assert lone.startswith("Every run that did not diverge")
    assert near_chance(found[:2], 10, 5000) == f"Every run {end}"  # of which none diverged
    assert near_chance(found[2:], 10, 5000) == "" == near_chance(found, 1, 5000)
    assert near_chance(np.array([0.6]), 2, 5000) == "" != near_chance(np.array([0.54]), 2, 5000)


def test_near_is_within_a_share_either_way() -> None:
    runs, curves = columns(one=[[0.98], [1.0]], two=[[1.0], [1.02]], lost=[[np.nan], [0.9]])
    for pair in (("one", "two"), ("two", "one")):
        assert near(*pair, "train_loss", runs, 0.021).holds
        assert near(*pair, "train_loss", runs, 0.019).holds is False
        assert near(*pair, "epsilon", runs, 0.5).holds is None
    for pair in (("one", "lost"), ("lost", "one"), ("lost", "lost")):
        assert near(*pair, "train_loss", runs, 0.9).holds is False
    claim = {"kind": "near", "better": "one", "than": "two", "measure": "test_loss",
             "within": 0.03, "sentence": ""}  # fmt: skip
    found = judge(claim, runs, curves)
    assert found.effect.unit == "ratio"
    assert found.holds and found.sentence == (
        "one and two end with a test loss within 3% of each other."
    )
    assert judge({**claim, "sentence": "Alike."}, runs, curves).sentence == "Alike."


def test_margins_are_paired_by_seed() -> None:
    """Against scipy's interval of a paired test, with the seeds of one variant out of order."""
    mine, other = np.array([0.2, 0.5, 0.3, 0.9]), np.array([0.3, 0.52, 0.45, 0.8])
    runs, _ = columns(good=[[v] for v in mine], bad=[[v] for v in other])

    def margin(rows: dict) -> tuple[float, float]:
        masks = (rows_of(rows, name, np.nan) for name in ("good", "bad"))
        return by_seed(rows, "train_loss", *masks)

    known = ttest_rel(mine, other).confidence_interval(0.95)
    middle, half = (known.high + known.low) / 2, (known.high - known.low) / 2
    order = np.array([0, 1, 2, 3, 6, 4, 7, 5])
    shuffled = {name: column[order] for name, column in runs.items()}
    for rows in (runs, shuffled):
        np.testing.assert_allclose(margin(rows), (middle, half), rtol=1e-12)
    unpaired = runs | {"train_loss": shuffled["train_loss"]}  # negative control
    assert abs(margin(unpaired)[1] - half) > 0.01
    alone, _ = columns(good=[[0.2]], bad=[[0.3]])
    assert np.isnan(margin(alone)).all()


def test_a_diverged_run_is_infinitely_bad() -> None:
    runs, curves = columns(good=[[0.9, 0.2]], lost=[[0.9, np.nan]])
    for measure in ("train_loss", "accuracy"):
        assert terminal("good", "lost", measure, runs).holds
        assert terminal("lost", "good", measure, runs).holds is False
    assert "diverged" in terminal("good", "lost", "train_loss", runs).detail
    assert sooner("good", "lost", runs, curves).holds is None
    assert sooner("lost", "good", runs, curves).holds is False


def test_sooner_is_about_seconds_and_not_rounds() -> None:
    good, slow = [[0.5, 0.3, 0.2]] * 2, [[0.5, 0.4, 0.3]] * 2
    runs, curves = columns(good=good, slow=slow)
    claim = sooner("good", "slow", runs, curves)
    assert claim.effect.unit == "s"
    assert claim.holds and claim.detail == "2 of 2 runs reach this loss, after 2 s against 6 s"
    assert sooner("slow", "good", runs, curves).holds is False  # never gets there
    runs, curves = columns(slow=[[0.5, 0.3]], other=[[0.5, 0.4, 0.3]])  # 2 rounds of 2 s each
    assert sooner("slow", "other", runs, curves).verdict == UNTESTED  # of one seed
    twice = {name: np.tile(column, 2) for name, column in curves.items()}
    twice["seed"] = np.repeat([0, 1], len(curves["seed"]))
    ends = {name: np.tile(column, 2) for name, column in runs.items()}
    ends["seed"] = np.repeat([0, 1], len(runs["seed"]))
    assert sooner("slow", "other", ends, twice).holds is False
    curves["train_seconds"][1] = 2.9
    twice["train_seconds"] = np.tile(curves["train_seconds"], 2)
    assert sooner("slow", "other", ends, twice).holds


def test_curves_show_mean_and_band() -> None:
    _, curves = columns(good=[[0.9, 0.2], [0.7, 0.4]], bad=[[0.9, 0.4], [0.8, np.nan]])
    drawn = training_findings.draw_curves(curves, ["good", "bad"], "round")
    loss, accuracy = drawn.axes
    solid, dashed, other, _ = loss.lines
    np.testing.assert_allclose(np.asarray(dashed.get_ydata()), [0.8, 0.3])
    np.testing.assert_allclose(np.asarray(solid.get_xdata()), [1, 2])
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert len(np.asarray(other.get_xdata())) == 1  # it ends where a seed diverged
    extent = np.asarray(loss.collections[0].get_paths()[0].vertices)[:, 1]
    half = student.ppf(0.975, 1) * 0.1  # of two values 0.2 apart
    np.testing.assert_allclose([extent.min(), extent.max()], [0.3 - half, 0.8 + half])
    assert loss.get_ylim()[0] > 0.1 and loss.get_ylim()[1] < 1  # the curves stay visible
    assert len(accuracy.lines) == 2 and len(drawn.legends[0].get_texts()) == 2


def test_a_single_round_is_seen_and_its_spread_is_bars() -> None:
    """A control: of two rounds the train loss has no marks, and the spread is a band."""
    _, once = columns(good=[[0.9], [0.7]])
    _, twice = columns(good=[[0.9, 0.3], [0.7, 0.2]])
    for curves, mark, spread in ((once, "_", "Bars show"), (twice, "", "Bands show")):
        drawn = training_findings.draw_curves(curves, ["good"], "train_seconds")
        loss, words = drawn.axes[0], training_findings.in_words(curves, drawn)
        dashed = loss.lines[1]
        assert dashed.get_linestyle() == "--" and dashed.get_marker() in (mark, "None")
        assert spread in words and ("flat mark" in words) == bool(mark)
        assert ("the gap grows" in words) == (not mark)
        extent = np.asarray(loss.collections[0].get_paths()[0].vertices)
        assert extent[:, 1].min() < extent[:, 1].max()
        ends = curves["train_seconds"].max()
        assert loss.get_xlim()[0] == 0 and loss.get_xlim()[1] >= 1.04 * ends


def test_what_adds_to_another_variant_has_its_colour() -> None:
    found = looks(["SGD", "SGD + DiSK", "Muon", "Adam + DiSK", "Muon + A", "Muon + B"])
    assert found["SGD + DiSK"].colour == found["SGD"].colour and found["SGD + DiSK"].added
    alone = [found[name] for name in ("SGD", "Muon", "Adam + DiSK", "Muon + A", "Muon + B")]
    assert len({look.colour for look in alone}) == 5 and not any(look.added for look in alone)


def test_terminal_bars_are_intervals_and_do_not_hide_the_means() -> None:
    runs, _ = columns(a=[[0.2], [0.4], [0.1], [0.9]])
    runs["x"] = np.array([1.0, 1.0, 8.0, 8.0])
    (axes,) = training_findings.terminal(runs, ["a"], ["accuracy"], "eps").axes
    bars = np.array([np.asarray(path.vertices)[:, 1] for path in axes.collections[0].get_paths()])
    half = student.ppf(0.975, 1) * np.array([0.1, 0.4])  # of two values
    np.testing.assert_allclose(
        bars, [[0.7 - half[0], 0.7 + half[0]], [0.5 - half[1], 0.5 + half[1]]]
    )
    assert 0.2 < axes.get_ylim()[0] < 0.5 and 0.7 < axes.get_ylim()[1] < 1
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), [0.7, 0.5])


def test_means_stand_on_their_bars_and_beside_those_of_other_variants() -> None:
    runs, _ = columns(a=[[0.2], [0.4], [0.1], [0.9]], b=[[0.2], [0.4], [0.1], [0.9]])
    runs["x"] = np.tile([1.0, 1.0, 8.0, 8.0], 2)
    drawn = training_findings.terminal(runs, ["a", "b"], ["accuracy"], "eps")
    drawn.canvas.draw()
    (axes,) = drawn.axes
    places = [
        (line.get_transform().transform((1, 0.7)), bars.get_transform().transform((1, 0.7)))
        for line, bars in zip(axes.lines, axes.collections, strict=True)
    ]
    for mean, bar in places:
        np.testing.assert_array_equal(mean, bar)
    apart = (places[1][0] - places[0][0]) * 72 / drawn.dpi
    np.testing.assert_allclose(apart, [training_findings.APART, 0], atol=1e-9)
