"""From a study's command to its report; and claims, which must be able to fail."""

import csv
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from conftest import quick
from contrast import pale
from rich.console import Console
from rich.text import Text
from scipy.stats import ttest_ind, ttest_rel
from small_suites import FILES, STUDIES
from study_rows import one_seed, overprinted, rows_of, verdicts
from test_pitfalls import unnamed

from fedmuon.analysis.report import style
from fedmuon.analysis.report import verdicts as report_verdicts
from fedmuon.analysis.report.claims import Columns
from fedmuon.analysis.report.findings import Findings
from fedmuon.analysis.report.verdicts import Curve, curve, log_slope, quotient
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.report import suite_tables
from fedmuon.experiments.studies import (
    attribution,
    disk_regression,
    disk_stationarity,
    dp_bias,
    frontier,
    heavy_tail,
    rank_dependence,
    wall_clock,
)
from fedmuon.experiments.studies import find as kinds
from fedmuon.experiments.studies.disk_regression import compared
from fedmuon.experiments.studies.heavy_tail import FREE, THEOREM, promised
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.suite import execute

# Others take a second or so, or run from the command to the report in the files of their studies.
QUICK = ("rank-dependence", "disk-regression", "dp-muon-steps", "wall-clock")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", quick(STUDIES, QUICK))
def test_a_study_from_its_command_to_its_report(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = _tiny(name, tmp_path)
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    FILES.get(name, lambda folder: None)(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["suite", str(file), "--out", str(out)])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "claims hold" in page or "claim holds" in page
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf", ".png"}
    rows = list(csv.DictReader((out / "rows.csv").read_text().splitlines()))
    cells = [json.loads(path.read_text()) for path in (out / "cells").iterdir()]
    assert len(rows) == sum(len(cell["rows"]) for cell in cells)
    assert name != "dp-muon-printed" or not unnamed(out)  # elsewhere ε is the error of a factor
    found = kinds.KINDS[name].findings(out, json.loads((out / "suite.json").read_text()))
    whole = "".join(rendered(found, 2000).split())
    for claim in found.claims:
        told = (*claim.shown, claim.accepted if claim.shown[0] else "")
        assert all("".join(one.split()) in whole for one in (claim.verdict, *told)), claim.sentence
    printed = rendered(found)
    assert printed in capsys.readouterr().out and "…" not in printed
    for picture, slim in itertools.product(found.pictures, (False, True)):
        drawn = picture.draw(slim)
        assert not overprinted(drawn) and not pale(drawn), (picture.name, slim)
    before = (out / "rows.csv").read_bytes()
    next((out / "cells").iterdir()).unlink()
    execute(kinds.find(str(file), None, "full", {}), out, resume=True)
    assert (out / "rows.csv").read_bytes() == before
    capsys.readouterr()


def rendered(found: Findings, width: int = 80) -> str:
    """What a terminal of that width shows of it."""
    console = Console(width=width, file=io.StringIO())
    for one in suite_tables(found):
        console.print(one, soft_wrap=isinstance(one, Text))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_labels_that_cover_each_other_would_be_seen() -> None:
    figure, panels = style.canvas(3, False, 2.9)
    for axes in panels:
        axes.plot([0.05, 0.7], [1, 2])
    assert not overprinted(figure)
    panels[0].set_xscale("log")
    assert overprinted(figure)
    panels[0].set_xscale("linear")
    panels[2].set_title("a title of one panel that is far too long", loc="left")
    assert overprinted(figure) == [panels[2].get_title("left")]


def test_a_line_that_is_too_pale_would_be_seen() -> None:
    """Where it is so by itself, or as light shines through; a black one turns on a dark page."""
    figure, (axes,) = style.canvas(1, False, 2.9)
    axes.plot([1, 2], [1, 2], color=style.BLUE)
    axes.axhline(1, color=style.BLACK)
    assert not pale(figure)
    axes.plot([1, 2], [1, 2], color="#cccccc")
    axes.vlines([1], [0], [1], color=style.BLUE, alpha=0.3)
    assert len(pale(figure)) == 2


def unjudged(head: tuple[str, ...], numbers: list[tuple[str, ...]], claims: Any = ()) -> Findings:
    return Findings("", "", "", claims, "Numbers", head, numbers, "", [], "", [])


def test_a_table_that_is_too_wide_turns_to_rows_and_a_cut_one_would_be_seen() -> None:
    wide, few = (
        unjudged((name,) * n, [("0.1234567",) * n]) for name, n in (("measured", 9), ("T", 6))
    )
    assert rendered(wide).count("measured │ 0.1234567") == 9 and "…" in rendered(wide, 12)
    assert "0.1234567 │ 0.1234567" in rendered(few)  # columns, where they fit


def test_tables_of_whole_studies_fit_a_terminal() -> None:
    """Of as many methods, settings and digits as the suites' own files have."""
    scores = rows_of(
        lambda test, **_: {"rho": -0.1234 + test},
        variant=("FedAvg", "FedMuon, small steps"),
        truth=attribution.TRUTHS,
        method=("trajectory", "tracin", "last product", "influence, 1", "influence, 10000", "trak"),
        test=range(2),
    )
    points = rows_of(
        lambda **_: {
            "seed": 0.0, "rounds": 200.0, "lambda": 0.01, "untrained": 0.1, "accuracy": 0.5,
            "train_loss": 0.8, "test_loss": 0.8, "gap": 0.0, "bound": 1.234e-5, "range": 0.01,
            "share": 1.234e-3,
        },
        start=("zero", "gaussian"), constants=frontier.NAMES, lr=(0.003, 0.1),
    )  # fmt: skip
    for study, rows in ((attribution, scores), (frontier, points)):
        head, *lines = study.numbers(rows)
        assert "…" not in rendered(unjudged(head, lines, study.claims(rows)))


def _tiny(name: str, folder: Path) -> Path:
    """The suite of that name with settings that take a moment."""
    settings = {**contents.read(name), **STUDIES[name]}
    settings.pop("small", None)
    file = folder / f"{name}.toml"
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return file


def test_what_a_study_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _tiny("disk-regression", tmp_path)
    file.write_text(file.read_text().replace("shared-lr = 0.5", "shared-lr = 0.3"))
    with pytest.raises(SystemExit, match="2"):
        main(["suite", str(file), "--out", str(tmp_path / "out")])
    assert "shared-lr is 0.3, but the list lrs does not contain" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["suite", "dp-bias", "--data", "digits", "--out", str(tmp_path / "out")])
    assert "leave --data out" in capsys.readouterr().err


def test_one_seed_of_a_suite_that_counts_them_is_refused() -> None:
    with pytest.raises(InputError, match=r"^the suite heavy-tail .* leave --seed out$"):
        kinds.find("heavy-tail", None, "small", {}, seed=3)
    with pytest.raises(InputError, match=r"^the suite dp-bias has no seeds.* leave --seed out$"):
        kinds.find("dp-bias", None, "small", {}, seed=3)
    listed = kinds.find("cnn", "digits", "small", {}, seed=3)  # these are names
    assert listed.request.repeats["seeds"] == [3]


# slopes


def test_slopes_and_quotients_have_intervals_of_95_percent() -> None:
    sizes = [2, 4, 8, 16]
    exact = log_slope(sizes, [np.full(3, 5 * size**-0.3) for size in sizes])
    assert exact.value == pytest.approx(-0.3)
    assert exact.low == pytest.approx(exact.high)
    rng, covered = np.random.default_rng(0), []
    for _ in range(1000):
        slope = log_slope(sizes, [size**-0.3 * rng.gamma(20, 1 / 20, 40) for size in sizes])
        ratio = quotient(rng.normal(3, 0.5, 30), rng.normal(2, 0.4, 30))
        covered.append([
            one.low <= at <= one.high
            for one, at in ((slope, -0.3), (ratio, 1.5), (slope, -0.33), (ratio, 1.7))
        ])  # fmt: skip
    *right, wrong_slope, wrong_ratio = np.mean(covered, axis=0)
    assert all(0.92 < one < 0.97 for one in right)  # with 1000 trials
    assert wrong_slope < 0.9 and wrong_ratio < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "sizes"), [(2, 3), (3, 4), (5, 5)])
def test_intervals_of_few_seeds_are_wide_enough(
    seeds: int, sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Student's, with the degrees of freedom that few seeds leave; 1.96 standard errors are not."""
    at = 2.0 ** np.arange(1, sizes + 1)

    def covered() -> np.ndarray:
        rng, found = np.random.default_rng(seeds), []
        for _ in range(1500):
            runs = [size**-0.3 * (1 + 0.05 * rng.standard_normal(seeds)) for size in at]
            slope, ratio = log_slope(at, runs), quotient(runs[0], runs[-1])
            middle, reach = runs[0].mean(), Curve(at, runs).reach[0]
            found.append([
                slope.low <= -0.3 <= slope.high,
                ratio.low <= (at[0] / at[-1]) ** -0.3 <= ratio.high,
                abs(middle - at[0] ** -0.3) <= reach,
            ])  # fmt: skip
        return np.mean(found, axis=0)

    right = covered()
    assert (right > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 1500)).all() and (right < 0.995).all()
    monkeypatch.setattr(report_verdicts.student, "ppf", lambda *_: 1.96)  # negative control
    assert (covered() < 0.935).all()


def test_two_samples_of_unlike_spread_have_welchs_interval() -> None:
    """To first order a quotient is a difference of logarithms: scipy's interval of that."""
    above, below = np.array([2.1, 1.9, 2.4]), np.array([1.0, 1.0001, 1.0003, 0.9999])
    known = ttest_ind(np.log(above.mean()) + above / above.mean() - 1,
                      np.log(below.mean()) + below / below.mean() - 1, equal_var=False)  # fmt: skip
    ends, found = known.confidence_interval(0.95), quotient(above, below)
    half = (ends.high - ends.low) / 2 * found.value
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=1e-12)
    lone = quotient(above, below[:1])
    assert lone.value > 0 and math.isnan(lone.low) and math.isnan(lone.high)


def test_differences_seed_by_seed_have_students_interval() -> None:
    """In the studies of DiSK, against scipy; one of three is wider by Bonferroni's level."""
    plain, own = np.array([1.0, 1.2, 0.9, 1.4]), np.array([0.8, 1.1, 0.95, 1.0])
    part = {"gain": np.repeat([1.0, 0.5], 4), "seed": np.tile(np.arange(4.0), 2),
            "mean_square": np.concatenate([plain, own])}  # fmt: skip
    for many in (1, 3):
        known = ttest_rel(plain, own).confidence_interval(1 - 0.05 / many)
        value, reach = disk_stationarity._saved(part, 0.5, many)
        ends = (np.array([value - reach, value + reach]) * plain.mean()).tolist()
        assert ends == pytest.approx([known.low, known.high])
    rows = {"loss": np.concatenate([own, plain]), "floor": np.zeros(8), "noise": np.ones(8),
            "method": np.repeat(["disk", "noisy-gd"], 4), "gain": np.ones(8), "lr": np.ones(8),
            "shared": np.ones(8)}  # fmt: skip
    known = ttest_rel(own, plain).confidence_interval(0.95)
    found = compared(rows, next(iter(disk_regression.TUNED)), "disk", "noisy-gd", 1.0)
    assert found.low * plain.mean() == pytest.approx(known.low)
    assert found.high * plain.mean() == pytest.approx(known.high) and found.free == 3


# claims on made-up rows


def tails(bend: float = 0.0, sgd: float = 1.0, best: float = 1.0) -> Columns:
    """Every method at the theorem's rate, times K^bend; SGD is worse at 1.2 by the factor sgd.

    The step sizes of SGD and exact Muon are best at the factor `best`.
    """
    groups = [(method, name, 1.0) for method in heavy_tail.METHODS for name in (THEOREM, FREE)]
    groups = [one for one in groups if one[0] != "sgd"]
    groups += [("sgd", "classical", c) for c in (0.5, 1.0, 2.0)]
    groups += [(heavy_tail.TUNED, FREE, c) for c in (0.5, 2.0)]

    def value(alpha: float, group: tuple[str, str, float], steps: int, seed: int) -> dict[str, Any]:
        method, schedule, factor = group
        scale = 0.9 * sgd ** ((2 - alpha) / 0.8) if method == "sgd" else 1.0
        rate = promised(alpha, FREE if method == "sgd" else schedule)
        size = scale * steps ** (rate + bend) * (1 + 0.001 * seed)
        size *= 1 + 0.1 * abs(math.log2(factor / best)) * (method in ("sgd", heavy_tail.TUNED))
        return {"method": method, "schedule": schedule, "factor": factor, "mean_gradient": size}

    found = rows_of(value, group=groups, alpha=(1.2, 1.6, 2.0), steps=(64, 256, 1024),
                    seed=(0, 1, 2, 3))  # fmt: skip
    return {name: column for name, column in found.items() if name != "group"}


def ranks(usual: float = 0.5, ends: dict[str, float] | None = None, **slopes: float) -> Columns:
    """Norms with the given slopes at the factor 2, which is the best, or at an end of the grid.

    At the factor 1, the slope of SGD-M is `usual`.
    """
    worse = {0.5: 30.0, 1.0: 20.0, 2.0: 1.0, 4.0: 2.0}

    def value(method: str, rank: int, factor: float, seed: int, **_: Any) -> dict[str, float]:
        slope = slopes.get(method.replace("-", "_"), 0.0)
        if method == "sgd-m" and factor == 1:
            slope = usual
        best = (ends or {}).get(method) == factor
        return {"mean_nuclear": rank**slope * (1 + 0.001 * seed) * (worse[factor], 0.5)[best]}

    return rows_of(value, method=rank_dependence.METHODS, rank=(2, 4, 8), steps=(16, 64),
                   factor=tuple(worse), seed=(0, 1, 2, 3))  # fmt: skip


def biases(plain: float = 2, corrected: float = 4, factor: float = 1.0, **changes: Any) -> Columns:
    """Leading terms rho^2 and rho^4; biases rho^plain and factor rho^corrected, and a next term."""

    def value(way: str, rho: float, **_: Any) -> dict[str, float]:
        term = way == "taylor"
        return {
            "plain": rho**2 if term else rho**plain,
            "corrected": rho**4 if term else abs(factor) * rho**corrected,
            "plain_off": 0.0 if term else abs(rho**plain - rho**2) + rho**4,
            "corrected_off": 0.0 if term else abs(factor * rho**corrected - rho**4) + rho**6,
            "plain_error": 0.0, "corrected_error": 0.0,
            "plain_spread": 0.1, "corrected_spread": 0.105,
            "probe": rho, "probe_bound": 2 * rho, "probe_any": 1.0,
            "probe_error": 0.01, "gain_error": 0.01,
        }  # fmt: skip

    found = rows_of(value, shape=("2 × 2", "3 × 4"), way=("monte-carlo", "taylor"),
                    rho=(1 / 128, 1 / 64, 1 / 32))  # fmt: skip
    more = {name: np.full(12, one) if np.isscalar(one) else one(found)
            for name, one in changes.items()}  # fmt: skip
    return {**found, **more}


def near_term(rows: Columns) -> np.ndarray:
    """Distances that are small, and no smaller at smaller noise."""
    return np.where(rows["way"] == "taylor", 0.0, 0.05 * rows["corrected"])


def filters(disk: float) -> Columns:
    """Excess losses of plain descent around 1, of the low-pass filter 2% less, of DiSK `disk`."""
    shared = np.random.default_rng(0).normal(1, 0.3, 30)
    sizes = {"noisy-gd": 1.0, "low-pass": 0.98, "disk": disk}
    return rows_of(
        lambda method, noise, lr, seed: {
            "loss": 0.2 + noise * sizes[method] * shared[seed] * (1 + (lr == 0.1)),
            "gain": 1.0 if method == "noisy-gd" else 0.7, "shared": int(lr == 0.5), "floor": 0.2,
        },
        method=sizes, noise=(0.1, 1.0), lr=(0.1, 0.5), seed=range(30),
    )  # fmt: skip


YES, NO = True, False


@pytest.mark.parametrize(("study", "rows", "wanted"), [
    (heavy_tail, tails(sgd=3.0), [YES] * 8),
    (heavy_tail, tails(bend=0.1, sgd=3.0), [NO] * 6 + [YES] * 2),
    (heavy_tail, tails(sgd=1 / 3.0), [..., ..., ..., ..., ..., ..., NO, NO]),
    (heavy_tail, tails(sgd=3.0, best=0.5), [YES] * 6 + [None] * 2),  # at the end of the grid
    (rank_dependence, ranks(sgd_m=0.5), [YES] * 7),
    (rank_dependence, ranks(sgd_m=0.5, muon_ns_1=0.4), [YES, YES, YES, NO, YES, YES, YES]),
    (rank_dependence, ranks(usual=0.0, sgd_m=0.5), [NO, YES, ..., ..., ..., ..., ...]),
    (rank_dependence, ranks(sgd_m=-0.1), [YES, NO, ..., ..., ..., ..., NO]),
    (rank_dependence, ranks(sgd_m=0.5, muon_svd=0.6), [..., ..., ..., ..., ..., ..., NO]),
    (rank_dependence, ranks(sgd_m=0.5, ends={"sgd-m": 4.0}),
     [YES, None, YES, YES, YES, YES, None]),
    (dp_bias, biases(), [YES] * 7),
    (dp_bias, biases(corrected=2.5), [..., NO, ..., ..., ..., ..., ...]),
    (dp_bias, biases(plain=1.8), [NO, ..., ..., ..., ..., ..., ...]),
    (dp_bias, biases(factor=1.3), [YES, YES, YES, NO, YES, YES, YES]),  # of another size
    (dp_bias, biases(factor=-1.0), [YES, YES, YES, NO, YES, YES, YES]),  # of the wrong sign
    (dp_bias, biases(probe=lambda rows: 3 * rows["probe"]), [YES] * 6 + [NO]),
    (dp_bias, biases(probe_any=lambda rows: rows["probe"]), [YES] * 6 + [NO]),
    (dp_bias, biases(gain_error=0.1, probe_error=1.0), [YES] * 5 + [None] * 2),  # of few draws
    (dp_bias, biases(corrected_off=near_term),
     [..., ..., ..., NO, ..., ..., ...]),
    (disk_regression, filters(0.95), [YES, YES]),
    (disk_regression, filters(0.99), [NO, NO]),
])  # fmt: skip
def test_claims_hold_and_fail(study: Any, rows: Columns, wanted: list[Any]) -> None:
    found = verdicts(study.claims(rows))
    assert len(found) == len(wanted)
    assert all(one is other for one, other in zip(found, wanted, strict=True) if other is not ...)


def test_details_of_heavy_tails() -> None:
    assert "without the tolerance in 0 of 3" in heavy_tail.claims(tails(bend=0.02))[0].detail
    found = heavy_tail.claims(tails(sgd=1.2))[-2]  # it holds, and says who is ahead all the same
    assert found.holds and "behind Muon at 1 of 3 values of α, and clearly ahead at 2" in found.also


def test_noisy_seeds_leave_claims_inconclusive_and_one_seed_tests_none() -> None:
    studies = ((heavy_tail, tails(sgd=1.1), "mean_gradient"), (rank_dependence, ranks(sgd_m=0.1),
               "mean_nuclear"), (disk_regression, filters(0.95), "loss"))  # fmt: skip
    for study, rows, name in studies:
        noise = np.exp(0.6 * np.random.default_rng(0).standard_normal(len(rows[name])))
        loud = {claim.verdict for claim in study.claims({**rows, name: rows[name] * noise})}
        assert "inconclusive" in loud and "holds" not in loud, study.__name__
    for study, rows, _ in studies[:2]:
        alone = {claim.verdict for claim in study.claims(one_seed(rows))}
        assert alone == {"not tested here"}


def test_differences_are_sharp_seed_by_seed_although_losses_scatter() -> None:
    found = compared(filters(0.95), "one step size", "disk", "noisy-gd", 1.0)
    assert found.low < -0.05 < found.high < -0.03


def test_curves_pick_their_rows_and_have_the_promised_rates() -> None:
    assert [promised(alpha, THEOREM) for alpha in (1.2, 2.0)] == pytest.approx([-0.125, -0.25])
    assert [promised(alpha, FREE) for alpha in (1.2, 2.0)] == pytest.approx([-1 / 12, -0.25])
    one = curve(tails(), "steps", "mean_gradient", method="muon-ns", schedule=THEOREM, alpha=1.6)
    assert one.sizes.tolist() == [64, 256, 1024]
    assert [len(values) for values in one.runs] == [4, 4, 4]
    assert one.slope.value == pytest.approx(promised(1.6, THEOREM))


@pytest.mark.parametrize("low, high", [(0.9, 1.1), (1.3, 1.4), (0.01, 70.0), (0.001, 5000.0)])
def test_ratios_of_times_have_room_on_any_machine(low: float, high: float) -> None:
    times = {
        "svd_seconds": np.array([low, high]), "seconds": np.ones(2), "made": np.array([1.0, high]),
        "steps": np.array([1.0, 5.0]),
    }  # fmt: skip
    for slim in (False, True):
        assert not overprinted(wall_clock.ratios({}, times, slim))
