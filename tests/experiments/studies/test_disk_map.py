"""The map of Figure 6 of 003: what is chosen, what is run, and claims that can fail."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from study_rows import overprinted, rows_of, verdicts
from suite_files import command, suite_of

from fedmuon.analysis.report.tables import Columns
from fedmuon.core.errors import InputError
from fedmuon.experiments.studies import disk_map as study

SUITE = """
kind = "disk-map"
title = "A small map"
data = "digits"
seeds = [0, 1]
tuning-seeds = [9]
epsilons = [8.0]
gains = [0.5, 0.8]
reaches = [1.0, 2.0]
single = true
shared-reach = 2.0
lrs = [0.001, 1.0]
base.data = { train = 200, test = 100, validation = 60 }
base.task = { name = "matrix" }
base.federation = { clients = 1, per-round = 1, rounds = 3 }
base.engine = { dtype = "float64", device = "cpu" }

[base.local]
recipe = "disk-sgd"
steps = 1
momentum = 0.0
schedule = "cosine"
options = { warm = 1 }

[base.privacy]
lot = 32.0
delta = 1e-3
clipping = "automatic-flat"
insecure-reproducible-noise = true
"""
TRIED = rows_of(lambda lr, **_: {"validation_accuracy": 0.6 - 0.1 * abs(lr - 2)},
                epsilon=(1.0, 8.0), lr=(1.0, 2.0, 4.0))  # fmt: skip
EPSILONS, GAINS, CHOICES = (1.0, 8.0), (0.5, 0.7, 0.9), ("0.5", "2")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("map")
    work = suite_of(place, SUITE)
    (cell,) = work.within(place)
    made = cell.compute()
    # One run of the search is also in the map, and at κ = 0.5 two reaches are the same.
    assert cell.size == 2 * 1 + 7 * 3 == len(list(place.glob("runs/*/*/summary.json"))) + 1 + 3
    return made


def test_the_step_size_is_the_best_without_the_filter(record: dict[str, Any]) -> None:
    tried = {one["lr"]: one["validation_accuracy"] for one in record["tuning"]}
    assert tried[1.0] > tried[0.001] and {one["lr"] for one in record["rows"]} == {1.0}
    (chosen,) = (one for one in record["tuning"] if one["chosen"])
    assert chosen["lr"] == 1.0
    plain = [one for one in record["rows"] if one["choice"] == "no filter"]
    assert [one["kappa"] for one in plain] == [1.0] * 3
    assert [one["tunes"] for one in plain] == [1, 0, 0]


def test_a_cell_of_the_map_is_a_run_of_that_gain_and_reach(
    record: dict[str, Any], tmp_path: Path
) -> None:
    """At κ = 0.5, γ = (1 − κ)/κ is γ = 1; at κ = 0.8 it is not."""

    def held(choice: str, gain: float) -> list[float]:
        return [one["test_loss"] for one in record["rows"]
                if one["choice"] == choice and one["kappa"] == gain]  # fmt: skip

    assert held(study.SINGLE, 0.5) == held("1", 0.5) != held("2", 0.5)
    assert held(study.SINGLE, 0.8) != held("1", 0.8)
    assert [one["gamma"] for one in record["rows"] if one["choice"] == study.SINGLE] == (
        pytest.approx([1.0] * 3 + [0.25] * 3)
    )
    config = SUITE[SUITE.index("base.data") :].replace("base.", "")
    for old, new in (
        ("rounds = 3", "rounds = 3, seed = 1"), ("steps = 1", "lr = 1.0\nsteps = 1"),
        ("data = { ", 'data = { name = "digits", '),
        ("lot = 32.0", "lot = 32.0\nepsilon = 8.0\nkappa = 0.8\nlookahead = 2.0"),
    ):  # fmt: skip
        config = config.replace(old, new)
    (tmp_path / "run.toml").write_text(config)
    command("run", tmp_path / "run.toml", "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert held("2", 0.8)[2] == summary["test_loss"]  # seeds 9, 0, 1
    assert held("2", 0.8)[1] != summary["test_loss"]


@pytest.mark.parametrize(("change", "said"), [
    (("tuning-seeds = [9]", "tuning-seeds = [1]"), "seed 1 is in seeds and in tuning-seeds"),
    (("shared-reach = 2.0", "shared-reach = 3.0"), "shared-reach is 3, but the list reaches does"),
    (('"disk-sgd"', '"dp-sgd"'), "recipe = 'dp-sgd' has no filter"),
    (("validation = 60", "validation = 0"), "validation = 0, but validation samples choose"),
    (("lot = 32.0", "lot = 32.0\nkappa = 0.7"), "set by gains"),
    (("gains = [0.5, 0.8]", "gains = [0.5, 1.0]"), "gains"),
])  # fmt: skip
def test_what_cannot_be_judged_is_rejected(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        suite_of(tmp_path, SUITE, change)


def surface(
    trend: float, noise: float = 0.004, turned: bool = False, epsilon_trend: float = 0.1
) -> Columns:
    """Accuracies with a trend in κ and ε, noise of a seed, and noise of a cell."""
    draws = np.random.default_rng(1)
    of_seed = {seed: draws.normal(0, 0.02) for seed in range(8)}

    def value(epsilon: float, kappa: float, choice: str, seed: int) -> dict[str, Any]:
        slope = -trend if turned and seed >= 2 else trend
        mean = 0.6 + slope * (kappa - 0.7) + epsilon_trend * (epsilon > 1) + of_seed[seed]
        return {
            "accuracy": mean + noise * draws.standard_normal(), "tunes": int(seed < 2),
            "shared": int(choice == "0.5"), "lr": 1.0,
        }  # fmt: skip

    rows = rows_of(value, epsilon=EPSILONS, kappa=GAINS, choice=CHOICES, seed=range(8))
    plain = rows_of(value, epsilon=EPSILONS, kappa=(1.0,), choice=("no filter",), seed=range(8))
    return {name: np.concatenate([plain[name], rows[name]]) for name in rows}


@pytest.mark.parametrize(("rows", "wanted"), [
    (surface(0.1), [True, True, True]),
    (surface(-0.1), [True, True, True]),  # a trend may rise or fall
    (surface(0.0), [None, True, None]),  # there is none but that in ε
    (surface(0.0, epsilon_trend=0.0), [None, None, None]),
    (surface(0.1, turned=True, epsilon_trend=0.0), [False, False, False]),
])  # fmt: skip
def test_claims_hold_where_the_trend_repeats(rows: Columns, wanted: list[bool | None]) -> None:
    assert verdicts(study.claims(rows, TRIED)) == wanted


def test_no_claim_is_decided_at_an_end_of_the_grid() -> None:
    """At one of two ε, the best step size is the largest."""
    worse = {**TRIED, "validation_accuracy": np.array([0.5, 0.6, 0.5, 0.5, 0.6, 0.7])}
    claims = study.claims(surface(0.1), worse)
    assert verdicts(claims) == [None] * 3
    said = "no filter (ε = 8)'s best step size 4 is the largest of its grid"
    assert {claim.untuned for claim in claims} == {said}


def test_the_share_of_a_trend_by_loops() -> None:
    """Against a regression of each map on the trend; any constant per seed drops out."""
    rng = np.random.default_rng(0)
    tuning, others = rng.random((2, 6)), rng.random((3, 6))
    trend = [sum(column) / 2 for column in zip(*tuning.tolist(), strict=True)]
    middle = sum(trend) / 6
    for at, one in enumerate(others.tolist()):
        slope, _ = np.polyfit([t - middle for t in trend], one, 1)  # its fit has this RMS size
        wanted = slope * math.sqrt(sum((t - middle) ** 2 for t in trend) / 6)
        assert study.shared_trend(tuning, others + 0.3)[at] == pytest.approx(wanted)
    best = max(range(6), key=lambda place: trend[place])
    wanted_gains = [one[best] - sum(one) / 6 for one in others.tolist()]
    assert study.gains_of_best(tuning, others).tolist() == pytest.approx(wanted_gains)
    assert study.shared_trend(np.ones((2, 6)), others).tolist() == [0.0] * 3


def test_chance_alone_seldom_makes_a_trend() -> None:
    """Maps of seeds that have nothing in common: the claim holds in about 1 of 40."""
    rng, held = np.random.default_rng(3), 0
    for _ in range(400):
        shared = study.shared_trend(rng.standard_normal((2, 12)), rng.standard_normal((4, 12)))
        held += study.mean_of(shared).low > 0
    assert 1 <= held <= 22  # 10 expected


@pytest.mark.parametrize("narrow", [False, True])
def test_the_figure_frames_the_best_and_says_what_no_filter_does(narrow: bool) -> None:
    made = surface(0.1)
    rows = {**made, "choice": np.where(made["choice"] == "2", study.SINGLE, made["choice"])}
    rows["accuracy"][-1] = np.nan  # one run diverged
    figure = study.heat_maps(rows, {}, narrow=narrow)
    assert not overprinted(figure) and len(figure.axes) == 4  # three maps and a colour bar
    ((low, high),) = {one.images[0].get_clim() for one in figure.axes[:3]}
    assert low is not None and high is not None and high - low >= study.SPAN - 1e-9
    first = figure.axes[0]
    assert len(first.texts) == 6 and "without filter" in first.get_title("left")
    assert [one.get_text() for one in first.get_yticklabels()] == ["0.5", study.SINGLE]
    (frame,) = first.patches
    assert isinstance(frame, Rectangle)
    image = first.images[0].get_array()
    assert image is not None
    row, column = np.unravel_index(np.asarray(image).argmax(), image.shape)
    assert (frame.get_x() + 0.5, frame.get_y() + 0.5) == (column, row)


def test_numbers_name_the_best_pair_of_the_tuning_seeds() -> None:
    head, *lines = study.numbers(surface(0.1), {})
    assert len(lines) == 2 and all(len(one) == len(head) for one in lines)
    assert all("κ = 0.9" in one[5] for one in lines)
    assert [one[1] for one in lines] == ["1", "1"] and lines[0][4].startswith("0.58")
