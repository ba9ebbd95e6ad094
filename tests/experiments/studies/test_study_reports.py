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
from contrast import pale
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text
from scipy.stats import ttest_ind, ttest_rel

from fedmuon.analysis.report import style, verdicts
from fedmuon.analysis.report.claims import Claim, Columns
from fedmuon.analysis.report.findings import Findings
from fedmuon.analysis.report.verdicts import Curve, curve, fitted, quotient
from fedmuon.core.errors import InputError
from fedmuon.experiments.cli import main
from fedmuon.experiments.cli.show import suite_tables
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

TINY: dict[str, dict[str, Any]] = {
    "heavy-tail": {"alphas": [1.4, 2.0], "steps": [4, 16], "seeds": 2, "factors": [0.5, 1.0]},
    "rank-dependence": {"ranks": [2, 4], "steps": [2, 4], "seeds": 2, "inputs": 6, "batch": 8},
    "dp-bias": {"rhos": [0.015625, 0.03125], "nodes": 4, "samples": 200},
    "disk-regression": {"noises": [0.1, 1.0], "lrs": [0.1, 0.5], "gains": [0.7], "seeds": 2,
                        "steps": 5, "samples": 20, "features": 3},
    "dp-stationarity": {"noises": [0.0, 4.0], "steps": [4, 8], "seeds": 2, "rows": 2, "columns": 3,
                        "people": 20, "lot": 5.0},
    "dp-vanishing": {"noises": [4.0], "steps": [4, 8], "seeds": 2, "rows": 2, "columns": 3,
                     "people": 20, "lot": 5.0},
    "disk-stationarity": {"reaches": [-1.0], "gains": [0.5, 1.0], "lrs": [0.1], "steps": 5,
                          "noises": [1.0], "batches": [0], "horizons": [350, 400], "seeds": 2},
    "wall-clock": {"shapes": [[8, 8], [8, 16]], "iterations": [1, 3], "repeats": 1},
    "polar-error": {"degrees": ["cubic"], "iterations": [1], "draws": 20, "samples": 40,
                    "held-out": 30, "steps": 6, "neighbours": 3, "lrs": [0.0001],
                    "lambdas": [1e-6, 1e-4]},
}  # fmt: skip


# These take a second or so.
LONG = "heavy-tail", "dp-bias", "dp-stationarity", "disk-stationarity", "polar-error"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in TINY]
)
def test_a_study_from_its_command_to_its_report(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _tiny(name, tmp_path)
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["suite", str(file), "--out", str(out)])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "claims hold" in page or "claim holds" in page
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf", ".png"}
    rows = list(csv.DictReader((out / "rows.csv").read_text().splitlines()))
    cells = [json.loads(path.read_text()) for path in (out / "cells").iterdir()]
    assert len(rows) == sum(len(cell["rows"]) for cell in cells)
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


def overprinted(figure: Figure) -> list[str]:
    """Labels of ticks that cover the next one's, and titles that leave the figure."""
    figure.draw_without_rendering()
    wrong = []
    for axes in figure.axes:
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            shown = [one for one in ticks if low <= one.get_loc() <= high and one.label1.get_text()]
            boxes = sorted(
                (one.label1.get_window_extent() for one in shown), key=lambda box: box.x0
            )
            if side == "y":
                boxes.sort(key=lambda box: box.y0)
            pairs = itertools.pairwise(boxes)
            wrong += [
                f"{side} {a}" for a, b in pairs if getattr(a, f"{side}1") > getattr(b, f"{side}0")
            ]
        title = axes._left_title.get_window_extent()  # type: ignore[attr-defined]
        wrong += [axes.get_title("left")] if title.x1 > figure.bbox.x1 else []
    return wrong


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


def test_a_table_that_is_too_wide_turns_to_rows_and_a_cut_one_would_be_seen() -> None:
    def found(head: tuple[str, ...]) -> Findings:
        return Findings(
            "", "", "", [], "Numbers", head, [("0.1234567",) * len(head)], "", [], "", []
        )

    wide = found(("measured",) * 9)
    assert rendered(wide).count("measured │ 0.1234567") == 9 and "…" in rendered(wide, 12)
    assert "0.1234567 │ 0.1234567" in rendered(found(("T",) * 6))  # columns, where they fit


def test_tables_of_whole_studies_fit_a_terminal() -> None:
    """Of as many methods, settings and digits as the suites' own files have."""
    methods = (
        "trajectory",
        "tracin",
        "last product",
        *(f"influence, {d:g}" for d in (1, 1e4)),
        "trak",
    )
    scores = _columns([
        {"variant": variant, "truth": truth, "method": method, "test": t, "rho": -0.1234 + t}
        for variant, truth, method, t in itertools.product(
            ("FedAvg", "FedMuon, small steps"), attribution.TRUTHS, methods, range(2))
    ])  # fmt: skip
    points = _columns([
        {"start": start, "constants": kind, "seed": 0.0, "rounds": 200.0, "lr": lr, "lambda": 0.01,
         "untrained": 0.1, "accuracy": 0.5, "train_loss": 0.8, "test_loss": 0.8, "gap": 0.0,
         "bound": 1.234e-5, "range": 0.01, "share": 1.234e-3}
        for start, kind, lr in itertools.product(("zero", "gaussian"), frontier.NAMES, (0.003, 0.1))
    ])  # fmt: skip
    for study, rows in ((attribution, scores), (frontier, points)):
        head, *lines = study.numbers(rows)
        found = Findings("", "", "", study.claims(rows), "Numbers", head, lines, "", [], "", [])
        assert "…" not in rendered(found)


def _tiny(name: str, folder: Path) -> Path:
    """The suite of that name with settings that take a moment."""
    settings = {**contents.read(name), **TINY[name]}
    settings.pop("small")
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    file = folder / f"{name}.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _toml(value: Any) -> str:
    """Inline."""
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return (
        "{" + ", ".join(f"{json.dumps(key)} = {_toml(held)}" for key, held in value.items()) + "}"
    )


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_the_suites_files_are_valid(name: str, scale: str) -> None:
    work = kinds.find(name, None, scale, {})
    assert len({one.name for one in work.cells}) == len(work.cells) > 2


def test_what_a_study_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _tiny("disk-regression", tmp_path)
    file.write_text(file.read_text().replace("shared-lr = 0.5", "shared-lr = 0.3"))
    with pytest.raises(SystemExit, match="2"):
        main(["suite", str(file), "--out", str(tmp_path / "out")])
    assert "shared-lr and shared-gain must be among lrs and gains" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["suite", "dp-bias", "--data", "digits", "--out", str(tmp_path / "out")])
    assert "leave --data out" in capsys.readouterr().err


def test_one_seed_of_a_suite_that_counts_them_is_refused() -> None:
    with pytest.raises(InputError, match=r"^the suite heavy-tail counts its seeds: leave --seed"):
        kinds.find("heavy-tail", None, "small", {}, seed=3)
    with pytest.raises(InputError, match=r"^the suite dp-bias has no seeds: leave --seed out$"):
        kinds.find("dp-bias", None, "small", {}, seed=3)
    listed = kinds.find("cnn", "digits", "small", {}, seed=3)  # these are names
    assert listed.asked.told["seeds"] == [3]


# slopes


def test_slopes_of_power_laws_and_their_intervals() -> None:
    sizes = [2, 4, 8, 16]
    exact = fitted(sizes, [np.full(3, 5 * size**-0.3) for size in sizes])
    assert exact.value == pytest.approx(-0.3)
    assert exact.low == pytest.approx(exact.high)
    rng, covered = np.random.default_rng(0), []
    for _ in range(1000):
        runs = [size**-0.3 * rng.gamma(20, 1 / 20, 40) for size in sizes]
        slope = fitted(sizes, runs)
        covered.append([slope.low <= -0.3 <= slope.high, slope.low <= -0.33 <= slope.high])
    right, wrong = np.mean(covered, axis=0)
    assert 0.92 < right < 0.97  # 95%, with 1000 trials
    assert wrong < 0.9


def test_quotients_and_their_intervals() -> None:
    rng, covered = np.random.default_rng(1), []
    for _ in range(1000):
        ratio = quotient(rng.normal(3, 0.5, 30), rng.normal(2, 0.4, 30))
        covered.append([ratio.low <= 1.5 <= ratio.high, ratio.low <= 1.7 <= ratio.high])
    right, wrong = np.mean(covered, axis=0)
    assert 0.92 < right < 0.97
    assert wrong < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "sizes"),
    [(2, 3), (3, 4), (5, 5)],
)
def test_intervals_of_few_seeds_are_wide_enough(
    seeds: int, sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Student's, with the degrees of freedom that few seeds leave; 1.96 standard errors are not."""
    at = 2.0 ** np.arange(1, sizes + 1)

    def covered() -> np.ndarray:
        rng, found = np.random.default_rng(seeds), []
        for _ in range(1500):
            runs = [size**-0.3 * (1 + 0.05 * rng.standard_normal(seeds)) for size in at]
            slope, ratio = fitted(at, runs), quotient(runs[0], runs[-1])
            middle, reach = runs[0].mean(), Curve(at, runs).reach[0]
            found.append([
                slope.low <= -0.3 <= slope.high,
                ratio.low <= (at[0] / at[-1]) ** -0.3 <= ratio.high,
                abs(middle - at[0] ** -0.3) <= reach,
            ])  # fmt: skip
        return np.mean(found, axis=0)

    right = covered()
    assert (right > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 1500)).all() and (right < 0.995).all()
    monkeypatch.setattr(verdicts.student, "ppf", lambda *_: 1.96)  # negative control
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
    assert np.array(found) * plain.mean() == pytest.approx([known.low, known.high])


def test_promised_rates() -> None:
    assert [promised(alpha, THEOREM) for alpha in (1.2, 2.0)] == pytest.approx([-0.125, -0.25])
    assert [promised(alpha, FREE) for alpha in (1.2, 2.0)] == pytest.approx([-1 / 12, -0.25])


# claims on made-up rows


def _columns(rows: list[dict[str, Any]]) -> Columns:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _tails(bend: float = 0.0, sgd: float = 1.0) -> Columns:
    """Every method at the theorem's rate, times K^bend; SGD is worse at 1.2 by the factor sgd."""
    rows = []
    methods = ("muon-exact", "muon-ns", "muon-randomized", "normalized-sgd", "sgd")
    for method, alpha, steps, seed in itertools.product(
        methods, (1.2, 1.6, 2.0), (64, 256, 1024), (0, 1, 2)
    ):
        for schedule in ("classical",) if method == "sgd" else (THEOREM, FREE):
            rate = promised(alpha, THEOREM if method == "sgd" else schedule)
            scale = sgd ** ((2 - alpha) / 0.8) * 0.9 if method == "sgd" else 1.0
            value = scale * steps ** (rate + bend) * (1 + 0.001 * seed)
            rows.append({"method": method, "schedule": schedule, "alpha": alpha, "factor": 1.0,
                         "steps": steps, "seed": seed, "mean_gradient": value})  # fmt: skip
    return _columns(rows)


def test_heavy_tail_claims_hold_and_fail() -> None:
    assert _verdicts(heavy_tail.claims(_tails(sgd=3.0))) == [True] * 8
    assert _verdicts(heavy_tail.claims(_tails(bend=0.1, sgd=3.0))) == [False] * 6 + [True] * 2
    assert _verdicts(heavy_tail.claims(_tails(sgd=1 / 3.0)))[-2:] == [False, False]
    assert "without the allowance in 0 of 3" in heavy_tail.claims(_tails(bend=0.02))[0].detail


def test_a_claim_that_holds_says_who_is_ahead_all_the_same() -> None:
    found = heavy_tail.claims(_tails(sgd=1.2))[-2]
    assert found.holds and "behind Muon at 1 of 3 α, and ahead at 2" in found.also


def test_noisy_seeds_leave_claims_undecided_and_one_seed_tests_none() -> None:
    studies = ((heavy_tail, _tails(sgd=1.1), "mean_gradient"), (rank_dependence, _ranks(sgd_m=0.5),
               "mean_nuclear"), (disk_regression, _filters(0.95), "loss"))  # fmt: skip
    for study, rows, name in studies:
        noise = np.exp(0.6 * np.random.default_rng(0).standard_normal(len(rows[name])))
        loud = {claim.verdict for claim in study.claims({**rows, name: rows[name] * noise})}
        assert "undecided" in loud and "holds" not in loud, study.__name__
    for study, rows, _ in studies[:2]:
        one = {name: column[rows["seed"] == 0] for name, column in rows.items()}
        assert {claim.verdict for claim in study.claims(one)} == {"not testable at this scale"}


def _ranks(**slopes: float) -> Columns:
    rows = [
        {"method": method, "rank": rank, "steps": steps, "seed": seed,
         "mean_nuclear": rank ** slopes.get(method.replace("-", "_"), 0.0) * (1 + 0.001 * seed)}
        for method, rank, steps, seed in itertools.product(
            rank_dependence.NAMES, (2, 4, 8), (16, 64), (0, 1, 2)
        )
    ]  # fmt: skip
    return _columns(rows)


def test_rank_claims_hold_and_fail() -> None:
    assert all(_verdicts(rank_dependence.claims(_ranks(sgd_m=0.5))))
    found = _verdicts(rank_dependence.claims(_ranks(sgd_m=0.5, muon_ns_1=0.4)))
    assert found == [True, True, False, True, True, True]
    assert _verdicts(rank_dependence.claims(_ranks(sgd_m=0.0)))[0] is False
    assert _verdicts(rank_dependence.claims(_ranks(sgd_m=0.5, muon_svd=0.6)))[-1] is False


def _biases(plain: float = 2, corrected: float = 4, factor: float = 1.0) -> Columns:
    """Leading terms rho^2 and rho^4, measured biases rho^plain and factor rho^corrected beside a
    next term."""
    rows = []
    for shape, way in itertools.product(("2 × 2", "3 × 4"), ("monte-carlo", "taylor")):
        for rho in (1 / 128, 1 / 64, 1 / 32):
            term = way == "taylor"
            rows.append({
                "shape": shape, "way": way, "rho": rho,
                "plain": rho**2 if term else rho**plain,
                "corrected": rho**4 if term else abs(factor) * rho**corrected,
                "plain_off": 0.0 if term else abs(rho**plain - rho**2) + rho**4,
                "corrected_off": 0.0 if term else abs(factor * rho**corrected - rho**4) + rho**6,
                "plain_error": 0.0, "corrected_error": 0.0,
                "plain_spread": 0.1, "corrected_spread": 0.105,
                "probe": rho, "probe_bound": 2 * rho, "probe_any": 1.0,
                "probe_error": 0.01, "gain_error": 0.01,
            })  # fmt: skip
    return _columns(rows)


def test_bias_claims_hold_and_fail() -> None:
    assert all(_verdicts(dp_bias.claims(_biases())))
    assert _verdicts(dp_bias.claims(_biases(corrected=2.5)))[1] is False
    assert _verdicts(dp_bias.claims(_biases(plain=1.8)))[0] is False
    for factor in (1.3, -1.0):  # of another size, or of the wrong sign
        found = _verdicts(dp_bias.claims(_biases(factor=factor)))
        assert found == [True, True, True, False, True, True, True]
    rows = _biases()
    for loose in ({"probe": 3 * rows["probe"]}, {"probe_any": rows["probe"]}):
        assert _verdicts(dp_bias.claims({**rows, **loose})) == [True] * 6 + [False]
    few = {**rows, "gain_error": np.full(len(rows["rho"]), 0.1),
           "probe_error": np.full(len(rows["rho"]), 1.0)}  # fmt: skip
    assert _verdicts(dp_bias.claims(few)) == [True] * 5 + [None] * 2  # of few draws
    near = np.where(rows["way"] == "taylor", 0.0, 0.05 * rows["corrected"])
    kept = dp_bias.claims({**rows, "corrected_off": near})
    assert _verdicts(kept)[3] is False  # small, but never smaller


def _filters(disk: float) -> Columns:
    """Excess losses of plain descent around 1, of the low-pass filter 2% less, of DiSK `disk`."""
    rng, rows = np.random.default_rng(0), []
    shared = rng.normal(1, 0.3, 30)
    sizes = {("noisy-gd", 1.0): 1.0, ("low-pass", 0.7): 0.98, ("disk", 0.7): disk}
    for ((method, gain), size), noise, lr in itertools.product(
        sizes.items(), (0.1, 1.0), (0.1, 0.5)
    ):
        for seed in range(30):
            loss = 0.2 + noise * size * shared[seed] * (1 + (lr == 0.1))
            rows.append({"method": method, "gain": gain, "noise": noise, "lr": lr, "seed": seed,
                         "shared": int(lr == 0.5), "loss": loss, "floor": 0.2})  # fmt: skip
    return _columns(rows)


def test_filter_claims_hold_and_fail() -> None:
    assert _verdicts(disk_regression.claims(_filters(0.95))) == [True, True]
    assert _verdicts(disk_regression.claims(_filters(0.99))) == [False, False]
    # Seed by seed the difference is sharp, although the losses scatter by 30%.
    low, high = compared(_filters(0.95), "one step size", "disk", "noisy-gd", 1.0)
    assert low < -0.05 < high < -0.03


def test_curves_pick_their_rows() -> None:
    rows = _tails()
    one = curve(rows, "steps", "mean_gradient", method="muon-ns", schedule=THEOREM, alpha=1.6)
    assert one.sizes.tolist() == [64, 256, 1024]
    assert [len(values) for values in one.runs] == [3, 3, 3]
    assert one.slope.value == pytest.approx(promised(1.6, THEOREM))


def _verdicts(claims: Any) -> list[bool | None]:
    return [claim.holds for claim in claims if isinstance(claim, Claim)]


@pytest.mark.parametrize("low, high", [(0.9, 1.1), (1.3, 1.4), (0.01, 70.0), (0.001, 5000.0)])
def test_ratios_of_times_have_room_on_any_machine(low: float, high: float) -> None:
    times = {
        "svd_seconds": np.array([low, high]), "seconds": np.ones(2), "made": np.array([1.0, high]),
        "steps": np.array([1.0, 5.0]),
    }  # fmt: skip
    for slim in (False, True):
        assert not overprinted(wall_clock.ratios({}, times, slim))
