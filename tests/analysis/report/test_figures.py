"""What a figure shows is read back from it; what it saves repeats to the byte."""

import re
import struct
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from contrast import PAPERS, contrast, inks
from made_suite import changed, made, phase_grid
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from fedmuon.analysis.report import style
from fedmuon.analysis.report.claims import expected_maximum, share
from fedmuon.analysis.report.findings import CAPTIONS, OF_LABELS, of_drawn
from fedmuon.analysis.report.style import by_round, compact, in_words
from fedmuon.experiments.stability.figure import bound_words, census_figure, in_order
from fedmuon.experiments.studies.stability_findings import exposure, gap_and_bound, phase, scaling
from fedmuon.experiments.studies.training_findings import by_client


def line(axes: Axes, label: str) -> Line2D:
    """The line whose label begins so."""
    (found,) = [one for one in axes.lines if str(one.get_label()).startswith(label)]
    return found


def points(axes: Axes, label: str) -> np.ndarray:
    return np.column_stack([np.asarray(part, float) for part in line(axes, label).get_data()])


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


SHIFTS = {
    "round": np.arange(1.0, 6), "client": np.full(5, 3.0), "trial": np.full(5, 1.0),
    "shift": np.array([0, 0, 1e-4, 3e-4, 4e-4]), "certificate": np.array([0, 0, 2e-4, 7e-4, 1e-3]),
}  # fmt: skip


def every_figure(narrow: bool = False) -> dict[str, Figure]:
    grid, sizes, cohorts = phase_grid(), made(n=[500, 1000, 2000]), made(per_round=[2, 5])
    return {
        "phase": phase(grid[0], narrow),
        "scaling": scaling(*sizes, "n", narrow),
        "exposure": exposure(cohorts[1], narrow),
        "gap": gap_and_bound(grid[0], narrow),
        "census": census_figure(made(per_round=[2], trials=50)[1], narrow),
        "clients": census_figure(made(per_round=[2], trials=50)[1], narrow, shifts=SHIFTS),
    }


def test_the_phase_maps_hold_the_means() -> None:
    runs, _ = phase_grid()
    figure = phase(runs)
    for axes, name in zip(figure.axes, ("bound", "mean_perturbation"), strict=True):
        shown = np.asarray(axes.images[0].get_array())
        xs = [text.get_text() for text in axes.get_xticklabels()]
        ys = [text.get_text() for text in axes.get_yticklabels()]
        assert xs == ["0.005", "0.01", "0.03"] and ys == ["3.16", "10", "31.6"]
        written = {text.get_position(): text.get_text() for text in axes.texts}
        for row, lam in enumerate([1e-1, 1e-2, 1e-3]):  # rising 1/sqrt(lambda)
            for column, lr in enumerate([0.005, 0.01, 0.03]):
                here = (runs["lr"] == lr) & (runs["lambda"] == lam)
                assert here.sum() == 2
                assert shown[row, column] == pytest.approx(runs[name][here].mean(), rel=1e-15)
                assert written[(column, row)] == compact(shown[row, column])
    kept = ~((runs["lr"] == 0.01) & (runs["lambda"] == 1e-2))  # a missing cell is said
    axes = phase({name: column[kept] for name, column in runs.items()}).axes[0]
    assert [text.get_text() for text in axes.texts].count("–") == 1


def test_the_last_panel_has_the_shifts_below_their_certificates() -> None:
    axes = every_figure()["clients"].axes[2]
    certificate, shift = (np.asarray(line.get_ydata(), dtype=float) for line in axes.lines)
    assert np.isnan(shift[:2]).all() and shift[2:].tolist() == SHIFTS["shift"][2:].tolist()
    assert certificate[2:].tolist() == SHIFTS["certificate"][2:].tolist()
    unknown = {**SHIFTS, "certificate": np.full(5, np.nan)}
    (line,) = census_figure(made()[1], shifts=unknown).axes[2].lines
    assert "client 3" in str(line.get_label())


def test_numbers_in_cells() -> None:
    assert [compact(value) for value in (0.0507, 0.4, 12.3, 1.18e-5, -0.02, 0.0)] == [
        "0.051", "0.40", "12", "1.2e−5", "−0.020", "0.0",
    ]  # fmt: skip


@pytest.mark.parametrize("factor", ["n", "lr", "lambda"])
def test_scaling_shows_runs_means_and_certificates(factor: str) -> None:
    levels = {"n": [500, 1000, 2000], "lr": [0.01, 0.02], "lambda": [0.01, 0.1]}[factor]
    runs, neighbours = made(**{factor: levels})
    left, right = scaling(runs, neighbours, factor).axes
    at = runs[factor] if factor != "lambda" else runs[factor] ** -0.5
    beside = neighbours[factor] if factor != "lambda" else neighbours[factor] ** -0.5
    np.testing.assert_allclose(points(left, "runs"), np.column_stack([at, runs["bound"]]))
    moved = np.column_stack([at, runs["mean_perturbation"]])
    np.testing.assert_allclose(points(right, "runs"), moved)
    for axes, label, x, y in (
        (left, "bound", at, runs["bound"]),
        (right, "mean perturbation", at, runs["mean_perturbation"]),
        (right, "mean certificate", beside, neighbours["certificate"]),
    ):
        wanted = [(level, y[x == level].mean()) for level in np.unique(x)]
        np.testing.assert_allclose(points(axes, label), wanted)
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert ("slope −1" in labels(left)) == (factor == "n")
    if factor == "n":
        guide = points(right, "slope")
        np.testing.assert_allclose(guide[:, 0] * guide[:, 1], guide[0].prod())


def test_every_neighbour_is_a_point_or_is_counted() -> None:
    _, neighbours = made(per_round=[2, 5], trials=20)
    x, y = neighbours["exposure"] / neighbours["size"], neighbours["perturbation"]
    (axes,) = exposure(neighbours).axes
    other = neighbours["old_label"] != neighbours["new_label"]
    for name, kind in (("another label", other), ("the same label", ~other)):
        part = kind & (y > 0)
        drawn = line(axes, name)
        np.testing.assert_array_equal(points(axes, name), np.column_stack([x, y])[part])
        assert drawn.get_rasterized()
    zeros = int((y == 0).sum())
    assert zeros and len(points(axes, "zero")) == zeros and str(zeros) in labels(axes)[-2]
    promise = points(axes, "certificate")
    np.testing.assert_allclose(promise[:, 1] / promise[:, 0], 2.0)
    assert "ρ = " in axes.get_title(loc="left")


def test_bent_certificates_are_not_drawn_and_infinite_exposures_are_counted() -> None:
    _, neighbours = made(per_round=[5, 10])
    bent = changed(neighbours, "certificate", 0, 9.0)
    assert "certificate" not in labels(exposure(bent).axes[0])
    (axes,) = exposure(changed(neighbours, "exposure", 0, np.inf)).axes
    assert "exposure unknown or infinite: 1" in labels(axes)


def test_every_gap_stands_beside_its_bound() -> None:
    runs, _ = phase_grid()
    (axes,) = gap_and_bound(runs).axes
    order = np.argsort(runs["bound"], kind="stable")
    (bound,) = [one for one in axes.lines if one.get_label() == "bound"]
    np.testing.assert_array_equal(np.asarray(bound.get_ydata()), runs["bound"][order])
    np.testing.assert_array_equal(points(axes, "bound with")[:, 1], runs["bound_one"][order])
    (bars,) = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    np.testing.assert_array_equal(bars.lines[0].get_ydata(), runs["gap"][order])
    ends = np.array([segment[:, 1] for segment in bars.lines[2][0].get_segments()])
    wanted = np.column_stack([runs["gap_low"][order], runs["gap_high"][order]])
    np.testing.assert_allclose(ends, wanted)
    flat = [one for one in axes.lines if list(np.asarray(one.get_ydata())) == [0, 0]]
    assert len(flat) == 1  # the zero line


def test_the_census_shows_every_neighbour_and_both_maxima() -> None:
    _, neighbours = made(per_round=[2], trials=50)
    left, right = census_figure(neighbours).axes
    moved = neighbours["perturbation"]
    drawn = points(left, "one neighbour")
    np.testing.assert_array_equal(np.sort(drawn[:, 1]), np.sort(moved[moved > 0]))
    clients, order = in_order(neighbours)
    assert order == "certificate" and left.get_xlabel().endswith("order of certificate")
    assert left.get_yscale() == "log" and left.get_ylabel().endswith("(log scale)")
    assert right.get_xscale() == "linear" and "log" not in right.get_xlabel()
    for place, i in enumerate(clients, 1):
        mine = np.sort(moved[(neighbours["client"] == i) & (moved > 0)])
        inside = drawn[np.abs(drawn[:, 0] - place) < 0.5]
        np.testing.assert_array_equal(np.sort(inside[:, 1]), mine)
    assert f"{(moved == 0).sum()} of {len(moved)}" in " ".join(labels(left))
    assert "random" not in " ".join(labels(census_figure(made()[1]).axes[1]))  # ten of twelve
    (bars,) = left.collections
    heights = sorted({segment[0, 1] for segment in bars.get_segments()})  # type: ignore[attr-defined]
    positive = neighbours["certificate"][neighbours["certificate"] > 0]
    np.testing.assert_array_equal(heights, np.unique(positive))
    part = share(neighbours)
    x, y = line(right, "all").get_data()
    np.testing.assert_array_equal(np.asarray(x)[1:], np.sort(part))
    assert np.asarray(y)[-1] == 1
    assert line(right, "largest: ").get_xdata()[0] == part.max()  # type: ignore[index]
    assert line(right, "largest of 10").get_xdata()[0] == expected_maximum(part, 10)  # type: ignore[index]


def test_clients_are_in_order_of_their_certificates() -> None:
    columns = {
        "client": np.array([5, 7, 9]),
        "exposure": np.array([1.0, 2.0, 3.0]),
        "perturbation": np.array([2.0, 1.0, 3.0]),
        "certificate": np.array([9.0, 8.0, 7.0]),
    }
    lost = np.full(3, np.nan)
    assert [*in_order(columns)[0]] == [9, 7, 5]
    assert [*in_order({**columns, "certificate": lost})[0]] == [5, 7, 9]
    clients, order = in_order({**columns, "certificate": lost, "exposure": lost})
    assert ([*clients], order) == ([7, 5, 9], "largest perturbation")


def test_the_legend_of_a_census_has_the_bound_in_units_of_the_range() -> None:
    _, neighbours = made(trials=20)
    record = {"value": 0.5, "range": 2.0}
    left = census_figure(neighbours, bound=record).axes[0]
    (entry,) = [one for one in labels(left) if "bound" in one]
    assert entry == bound_words(record) and "0.5 = 0.25 $B$\n" in entry
    assert "6 = 3 $B$, vacuous\n" in bound_words({**record, "value": 6.0})
    assert "no bound" in bound_words({**record, "value": None})
    assert "4 = 4 $B$, vacuous" in bound_words({"value": 4.0})  # early folders: the range is 1
    assert not [one for one in labels(census_figure(neighbours).axes[0]) if "bound" in one]


def test_a_census_without_certificates() -> None:
    _, neighbours = made(trials=20)
    lost = np.full(len(neighbours["n"]), np.nan)
    left, right = census_figure({**neighbours, "exposure": lost, "certificate": lost}).axes
    assert "certificate" not in labels(left) and "certificate" not in right.get_xlabel()
    assert line(right, "largest: ").get_xdata()[0] == neighbours["perturbation"].max()  # type: ignore[index]


@pytest.mark.slow
def test_what_the_theory_refuses_is_left_out() -> None:
    """No certificate, exposure or bound, or infinite ones: the measurements are still drawn."""
    for value in (np.nan, np.inf):
        runs, neighbours = phase_grid(per_round=[2, 5], n=[500, 1000])
        runs |= dict.fromkeys(("bound", "bound_one"), np.full(len(runs["n"]), value))
        unknown = np.full(len(neighbours["n"]), value)
        neighbours |= {"certificate": unknown, "exposure": unknown}
        drawn = [scaling(runs, neighbours, "n"), phase(runs)]
        drawn += [exposure(neighbours), gap_and_bound(runs)]
        for figure in drawn:
            figure.draw_without_rendering()
        moved = points(drawn[0].axes[1], "runs")[:, 1]
        np.testing.assert_array_equal(moved, runs["mean_perturbation"])
        assert all(text.get_text() == "–" for text in drawn[1].axes[0].texts)


@pytest.mark.parametrize("narrow", [pytest.param(False, marks=pytest.mark.slow), True])
def test_text_is_readable_and_nothing_is_clipped(narrow: bool) -> None:
    for name, figure in every_figure(narrow).items():
        assert figure.get_figwidth() <= (3.5 if narrow else 6.8), name
        figure.draw_without_rendering()
        box = figure.bbox
        for text in figure.findobj(Text):
            assert isinstance(text, Text)
            if text.get_text().strip() and text.get_visible():
                assert float(text.get_fontsize()) >= 8, (name, text.get_text())
        for axes in figure.axes:
            tight = axes.get_tightbbox(figure.canvas.get_renderer())  # type: ignore[attr-defined]
            assert tight is not None
            assert tight.x0 >= box.x0 - 1 and tight.x1 <= box.x1 + 1, name
            assert tight.y0 >= box.y0 - 1 and tight.y1 <= box.y1 + 1, name


@pytest.mark.slow
def test_saved_bytes_repeat(tmp_path: Path) -> None:
    """With text, vectors, and points as pixels."""
    _, neighbours = made(per_round=[2, 5])
    first = exposure(neighbours)
    one = style.save(first, tmp_path / "a.b")
    two = style.save(exposure(neighbours), tmp_path / "c")
    assert [file.name for file in one] == ["a.b.pdf", "a.b.png"]
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
    pdf, png = (file.read_bytes() for file in one)
    assert b"CreationDate" not in pdf and b"/Type3" not in pdf
    assert struct.unpack(">I", png[16:20])[0] == 1360  # 6.8 inches at 200 dpi
    assert style.image(exposure(neighbours, narrow=True), "png") != png


def test_settings_of_the_caller_neither_matter_nor_change() -> None:
    runs, _ = phase_grid()
    plain = style.image(gap_and_bound(runs), "png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert style.image(gap_and_bound(runs), "png") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_a_run_that_was_evaluated_once_has_a_curve_and_whole_rounds() -> None:
    records: list[dict] = [{"round": r, "client_loss": 1 / r} for r in (1, 2, 3)]
    records[-1] |= {"train_loss": 0.4, "test_loss": 0.5, "accuracy": 0.5}
    figure = by_round({"a": [records]})
    losses, accuracy = figure.axes
    train, test, client = losses.lines
    assert list(np.asarray(client.get_xdata())) == [1, 2, 3]
    assert client.get_linewidth() < train.get_linewidth()
    assert train.get_marker() != test.get_marker()
    assert len({one.get_color() for one in losses.lines}) == 3
    assert all(float(tick).is_integer() for axes in figure.axes for tick in axes.get_xticks())
    assert losses.get_xlim() == accuracy.get_xlim()


def test_a_single_measurement_is_a_number_and_not_a_lonely_dot() -> None:
    last = {"round": 3, "train_loss": 0.4, "test_loss": 0.5, "accuracy": 0.25}
    losses, accuracy = by_round({"a": [[last]]}).axes
    for axes, numbers in ((losses, ["train loss 0.4000", "test loss 0.5000"]),
                          (accuracy, ["accuracy 0.2500"])):  # fmt: skip
        assert not axes.axison and not any(line.get_visible() for line in axes.lines)
        assert [text.get_text() for text in axes.texts] == [*numbers, "measured only at round 3"]
    start = {"round": 0, "train_loss": 0.9, "test_loss": 0.9, "accuracy": 0.1}
    for axes in by_round({"a": [[start, last]]}).axes:
        assert axes.axison and not axes.texts


def test_the_loss_on_unseen_clients_is_drawn_with_the_losses() -> None:
    records = [{"round": r, "train_loss": 1 / r, "unseen_loss": 2 / r} for r in (1, 2, 3)]
    (losses,) = by_round({"a": [records]}).axes
    drawn = {str(line.get_label()): line for line in losses.lines}
    assert list(np.asarray(drawn["unseen loss"].get_ydata())) == [2, 1, 2 / 3]
    assert "dash-dotted the unseen loss" in in_words(by_round({"a": [records]}))


@pytest.mark.parametrize(("long", "columns"), [(5, 4), (35, 2), (400, 1)])
def test_a_legend_of_long_names_has_fewer_columns(long: int, columns: int) -> None:
    records = [{"round": r, "train_loss": 1 / r, "test_loss": 2 / r} for r in (1, 2)]
    figure = by_round({str(k) * long: [records] for k in range(4)})
    (legend,) = figure.legends
    assert vars(legend)["_ncols"] <= columns
    figure.draw_without_rendering()
    assert legend.get_window_extent().width <= figure.bbox.width
    assert len(legend.get_texts()) == 4 + 2  # and a key to solid and dashed
    foot = legend.get_window_extent().y1
    panels = [axes.get_window_extent() for axes in figure.axes]
    assert all(one.height >= 1.5 * figure.dpi and one.y0 > foot for one in panels)


def test_solid_dashed_and_thin_have_a_key_where_colours_are_runs() -> None:
    """A gray line each, as the losses are drawn; none where all lines are of one loss."""
    records = [dict.fromkeys(("train_loss", "test_loss", "client_loss"), 1 / r) | {"round": r}
               for r in (1, 2)]  # fmt: skip
    (legend,) = by_round({"a": [records], "b": [records]}).legends
    drawn = {text.get_text(): line for text, line in
             zip(legend.get_texts(), legend.get_lines(), strict=True)}  # fmt: skip
    assert [*drawn] == ["a", "b", "train loss", "test loss", "client loss"]
    assert drawn["test loss"].get_linestyle() == "--" != drawn["train loss"].get_linestyle()
    assert drawn["client loss"].get_linewidth() < drawn["train loss"].get_linewidth()
    lone = [{"round": r, "train_loss": 1 / r} for r in (1, 2)]
    (legend,) = by_round({"a": [lone], "b": [lone]}).legends
    assert [one.get_text() for one in legend.get_texts()] == ["a", "b"]


def test_short_curves_are_seen_beside_long_ones() -> None:
    long = [{"round": r, "train_loss": 1 / r} for r in range(1, 401)]
    for many, scale in ((4, "log"), (40, "linear")):
        figure = by_round({"a": [long], "b": [long[:many]]})
        assert {axes.get_xscale() for axes in figure.axes} == {scale}
        assert ("logarithmic" in in_words(figure)) == (scale == "log")
    start = {"round": 0, "train_loss": 2.0}  # which a logarithmic axis does not have
    figure = by_round({"a": [[start, *long]], "b": [[start, *long[:4]]]})
    figure.draw_without_rendering()
    assert figure.axes[0].get_xscale() == "log" and figure.axes[0].get_xlim()[0] > 0.3


@pytest.mark.parametrize(("ends", "said"), [
    ((1.1e-5, 1.9e-5), ["1.2e−5", "1.4e−5", "1.6e−5", "1.8e−5"]),
    ((1e-5, 5e-4), ["1e−5", "2e−5", "5e−5", "1e−4", "2e−4", "5e−4"]),  # as short as they were
])  # fmt: skip
def test_ticks_of_a_log_axis_are_told_apart(ends: tuple[float, float], said: list[str]) -> None:
    axes = Figure().subplots()
    axes.plot([1, 2], ends)
    axes.set_ylim(*ends)
    style.log_y(axes)
    format_tick = axes.yaxis.get_major_formatter()
    low, high = ends[0] * (1 - 1e-9), ends[1] * (1 + 1e-9)
    assert [format_tick(at) for at in axes.get_yticks() if low <= at <= high] == said


def test_lines_and_dots_are_seen_on_light_and_on_dark() -> None:
    """Three to one to both papers (WCAG 2.2, 1.4.11), what is drawn on top of each other too."""
    drawn = {name: inks(figure) for name, figure in every_figure().items() if name != "phase"}
    assert all(drawn.values())
    used = set().union(*drawn.values()) | {to_rgba(one) for one, _ in style.SERIES}
    assert len(used) > 6
    for paper in PAPERS:
        assert all(contrast(one, paper) >= 3 for one in used), paper
    assert contrast("#e69f00", PAPERS[0]) < 3  # which orange was
    assert contrast((*to_rgb(style.BLUE), 0.5), PAPERS[1]) < 3  # and dots on a dark page


# What is said below a figure is of what was drawn in it.


def of(**more: np.ndarray) -> Figure:
    """Two runs with a gap and a bound."""
    runs = {"gap": [0.0, 0.01], "gap_low": [-0.01, 0.0], "gap_high": [0.01, 0.02],
            "bound": [0.03, 0.04], "bound_one": [0.02, 0.03]}  # fmt: skip
    return gap_and_bound({name: np.array(one) for name, one in runs.items()} | more)


def test_marks_are_named_where_there_are_any() -> None:
    text = of_drawn("gap", of())
    assert "Diamonds" in text and "Squares" not in text and "logarithmic" not in text
    assert "Squares" in of_drawn("gap", of(bound_global=np.array([0.5, 0.6])))
    assert "logarithmic beyond" in of_drawn("gap", of(bound=np.array([3e2, 4e2])))


def test_every_sentence_is_said_of_its_label_alone() -> None:
    for name, sentences in OF_LABELS.items():
        for label, sentence in sentences.items():
            figure = Figure()
            axes = figure.subplots()
            axes.plot([], [], label=label)
            axes.plot([1], [np.nan], label=label)
            assert of_drawn(name, figure) == ""  # nothing was drawn
            if label == "symlog":
                axes.set_yscale("symlog")
            else:
                axes.plot([1], [1], label=f"{label} and more")
            assert of_drawn(name, figure) == sentence
    assert of_drawn("curves", Figure()) == ""


def rounds(*names: str) -> list[dict[str, float]]:
    return [{"round": n, **dict.fromkeys(names, 1.0 / n)} for n in (1, 2, 3)]


def test_curves_by_round_are_told_as_they_are() -> None:
    alone = by_round({"a": [rounds("train_loss")]})
    assert in_words(alone) == "By round: solid the train loss."
    both = by_round({"a": [rounds("train_loss", "test_loss", "client_loss")]})
    assert in_words(both) == (
        "By round: solid the train loss, dashed the test loss, thin the client loss."
    )
    two = [rounds("train_loss"), rounds("train_loss")]
    many = by_round({"a": two, "b": two[:1]})
    assert "one colour per row" in in_words(many) and "bands of their 95%" in in_words(many)
    assert "bands" not in in_words(by_round({"a": two[:1], "b": two[1:]}))


def accounts(target: float) -> Figure:
    """Two clients of two variants that spend alike."""
    rows = {"variant": ["a", "a", "b", "b"], "x": [np.nan] * 4, "seed": [0] * 4,
            "epsilon": [1.0, 2.0] * 2, "target": [target] * 4}  # fmt: skip
    return by_client({name: np.array(one) for name, one in rows.items()}, ["a", "b"])


def test_a_target_is_told_and_drawn_where_there_is_one() -> None:
    """Runs whose noise is given have none: 0 in their table."""
    held, given = accounts(4.0), accounts(0.0)
    assert "dashed" in of_drawn("clients", held) and of_drawn("clients", given) == ""
    assert [len(one.axes[0].lines) for one in (held, given)] == [2, 1]


SIDES = re.compile(r"Left(?! of)|Right(?! of)|[;,] right(?! of)|[Oo]n the (?:left|right)")


def test_captions_name_no_side_of_a_picture() -> None:
    """On a narrow page panels lie below each other."""
    assert len(CAPTIONS) > 20 and SIDES.search("Left the bound, right the perturbation")
    assert not [text for text in CAPTIONS.values() if SIDES.search(text)]
