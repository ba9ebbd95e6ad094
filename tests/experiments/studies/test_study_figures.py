"""The figures of studies show the numbers of their rows, wide and narrow."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from conftest import quick
from contrast import pale
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study_rows import one_seed, overprinted, rows_of
from test_study_reports import biases, tails

from fedmuon.analysis.report.claims import Columns
from fedmuon.experiments.studies import (
    attribution,
    disk_stationarity,
    dp_bias,
    dp_stationarity,
    dp_text,
    heavy_tail,
    polar_error,
)
from fedmuon.experiments.studies.find import KINDS
from fedmuon.experiments.studies.study import Study


def scores() -> Columns:
    """Our scores correlate at 0.8, all others at 0.2, give or take 0.1."""
    return rows_of(
        lambda method, test, **_: {
            "rho": (0.8 if method == attribution.OURS else 0.2) + 0.1 * (-1) ** test
        },
        variant=("FedAvg", "FedMuon"), truth=attribution.TRUTHS,
        method=(attribution.OURS, "tracin", "trak"), test=range(4),
    )  # fmt: skip


TARGETS = {"DP-SGD": 8.0, "DP-Muon": 8.0}


def texts(targets: Mapping[str, float] = TARGETS) -> tuple[Columns, Columns]:
    """Losses of two seeds fall by step. The table of ends has the ε of each method."""
    ends = rows_of(lambda method, **_: {"target": targets[method]}, method=targets, seed=(0, 1))
    return ends, rows_of(
        lambda step, seed, **_: {"loss": 3.0 - 0.1 * step + 0.2 * seed},
        method=targets, step=(5, 10, 15), seed=(0, 1),
    )  # fmt: skip


def gains() -> Columns:
    """The squared gradient is the gain, its bound three times that."""
    return rows_of(
        lambda gain, seed, **_: {"mean_square": gain * (1 + 0.01 * seed), "bound": 3 * gain},
        corollary=(0,), noise=(0.1, 0.3), batch=(0.0, 32.0), reach=(-1.0, 0.5), lr=(0.05, 0.2),
        gain=(0.2, 0.7, 1.0), seed=(0, 1),
    )  # fmt: skip


def drifts() -> tuple[Columns, Columns]:
    """Runs are as far apart as lambda, and one drift is too large to be drawn."""
    return {}, rows_of(
        lambda **one: {"distance": one["lambda"], "drift": 1e3 if one["lambda"] == 1 else 2.0},
        map=polar_error.NAMES, lr=(0.001, 0.01), **{"lambda": (0.01, 1.0)},
    )  # fmt: skip


def norms() -> Columns:
    """Nuclear norms fall with T, below twice as large bounds."""
    return rows_of(
        lambda steps, seed, noise, **_: {
            "mean_nuclear": (1 + noise) / steps * (1 + 0.01 * seed),
            "bound": 2 * (1 + noise) / steps, "ceiling": 5.0,
        },
        method=dp_stationarity.NAMES, noise=(0.0, 4.0), steps=(4, 16), seed=(0, 1),
    )  # fmt: skip


GIVEN: dict[str, tuple[Columns, ...]] = {"attribution": (scores(),),
                                         "heavy-tail": (tails(sgd=3.0),), "dp-text": texts(),
                                         "disk-stationarity": (gains(),), "polar-error": drifts(),
                                         "dp-stationarity": (norms(),),
                                         "dp-bias": (biases(),)}  # fmt: skip
STUDIES = {name: study for name, study in KINDS.items() if isinstance(study, Study)}


def seen(axes: Axes) -> set[float]:
    """All finite heights at which a panel has points or lines."""
    every = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    return {round(float(one), 9) for line in every for one in line if np.isfinite(one)}


@pytest.mark.parametrize("name", quick(GIVEN, ("attribution", "dp-text", "dp-stationarity")))
def test_figures_have_room_and_are_not_pale(name: str) -> None:
    for draw, narrow in itertools.product(STUDIES[name].figures.values(), (False, True)):
        figure = draw(*GIVEN[name], narrow)
        assert not overprinted(figure) and not pale(figure), (draw, narrow)


def test_scores_are_drawn_at_their_mean_correlation() -> None:
    left, *others = attribution.correlations(scores()).axes
    assert left.get_yticklabels()[0].get_text() == attribution.name_of("trajectory")
    assert len(others) == 2
    for axes in (left, *others):
        points = [line for line in axes.lines if len(np.asarray(line.get_xdata())) == 3]
        assert len(points) >= 2  # one of each variant
        for line in points[:1]:
            assert np.asarray(line.get_xdata(), float).tolist() == pytest.approx([0.8, 0.2, 0.2])


def test_learning_is_the_mean_over_seeds_with_a_band() -> None:
    figure = dp_text.learning(*texts())
    (axes,) = figure.axes
    assert seen(axes) == {2.6, 2.1, 1.6}
    assert len(axes.collections) == 2 and "band" in dp_text.in_words(figure)
    more = texts(TARGETS | {"DP-Muon, ε = 1": 1.0, "DP-Muon-IM, ε = 1": 1.0})
    panels = dp_text.learning(*more).axes
    assert [axes.get_title("left") for axes in panels] == ["ε = 1", "ε = 8"]
    colours = [{line.get_label(): line.get_color() for line in axes.lines} for axes in panels]
    assert [{*names} for names in colours] == [{"DP-Muon", "DP-Muon-IM"}, {*TARGETS}]
    assert colours[0]["DP-Muon"] == colours[1]["DP-Muon"]
    assert len({*colours[0].values(), *colours[1].values()}) == 3
    ends, curves = texts()
    assert dp_text.in_words(dp_text.learning(ends, one_seed(curves))) == ""  # no band, no sentence


def test_gains_are_drawn_at_the_most_noise_with_full_batches() -> None:
    found = disk_stationarity.gains(gains())
    assert [axes.get_title("left") for axes in found.axes] == ["γ = −1", "γ = 0.5"]
    for axes in found.axes:
        assert {0.201, 0.7035, 1.005, 0.6, 2.1, 3.0} <= seen(axes)


def test_drifts_beyond_the_panel_are_left_out() -> None:
    for axes in polar_error.drifts(*drifts()).axes:
        assert seen(axes) == {0.01, 1.0, 2.0}


def test_norms_are_drawn_with_their_bounds_and_the_largest_norm() -> None:
    panels = dp_stationarity.norms_and_bounds(norms()).axes
    assert "outside the theorem" in panels[1].get_title("left")
    for axes in panels:
        assert {0.5, 0.125, 2.5, 0.625, 5.0} <= seen(axes)  # bounds of both noises; the ceiling
        assert {0.25125, 1.25625} <= seen(axes)  # the means at T = 4


def test_biases_are_drawn_beside_their_leading_terms() -> None:
    for axes in dp_bias.orders(biases()).axes:
        rho = 1 / 64
        assert {round(rho**2, 9), round(rho**4, 9)} <= seen(axes)
        assert any("Monte Carlo" in str(one) for one in axes.get_legend_handles_labels()[1])


def test_heavy_tails_are_drawn_by_index_and_their_slopes_by_schedule() -> None:
    rows = tails(sgd=3.0)
    by_index, by_schedule = (draw(rows) for draw in heavy_tail.STUDY.figures.values())
    assert [axes.get_title("left") for axes in by_index.axes] == ["α = 1.2", "α = 1.6", "α = 2"]
    for axes, schedule in zip(by_schedule.axes, heavy_tail.SCHEDULES, strict=True):
        wanted = {round(heavy_tail.promised(alpha, schedule), 6) for alpha in (1.2, 1.6, 2.0)}
        assert wanted <= {round(one, 6) for one in seen(axes)}


def test_a_figure_of_other_rows_is_another() -> None:
    def heights(figure: Figure) -> list[set[float]]:
        return [seen(axes) for axes in figure.axes]

    rows = norms()
    other = {**rows, "mean_nuclear": 2 * rows["mean_nuclear"]}
    drawn = (heights(dp_stationarity.norms_and_bounds(one)) for one in (rows, rows, other))
    first, again, changed = drawn
    assert first == again != changed
