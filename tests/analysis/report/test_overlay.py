"""The curves of all runs on one page: where they should be, and hidden where nobody ticks them."""

import itertools
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from conftest import small
from contrast import STYLE
from fontTools.ttLib import TTFont

from fedmuon.analysis.report.overlay import COLOURS, DASHES, WIDTH, Axis, DrawnRun, drawing
from fedmuon.analysis.report.write import render
from fedmuon.experiments.report import write_report
from fedmuon.experiments.run import execute


def overlay(runs: list[DrawnRun]) -> str:
    """The drawing of these runs as HTML on one line; nothing where there is nothing to draw."""
    drawn = drawing(runs)
    return " ".join(render("overlay.html", drawing=drawn).split()) if drawn else ""


PAPERS = (1.0, 1.0, 1.0), (0x15 / 255, 0x17 / 255, 0x1A / 255)


def runs() -> list[DrawnRun]:
    long = [(float(n), 1.0 / n) for n in range(1, 1001)]
    return [
        DrawnRun("<b>one", "& only", {"loss": long, "accuracy": [(10.0, 0.5), (20.0, 0.75)]}),
        DrawnRun("two", "", {"loss": [(1.0, 2.0), (2.0, float("nan")), (500.0, 1.0)]}),
        DrawnRun("three", "failed", {}),
    ]


def ticks(panel: str) -> tuple[dict[float, float], dict[float, float]]:
    """Value -> place of the ticks of x and of y, as a reader sees them."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([−\de.+]+)<', panel)
    found = [(*one, value.replace("−", "-")) for *one, value in found]
    below = {float(value): float(x) for x, _, kind, value in found if kind == "middle"}
    beside = {float(value): float(y) - 4 for _, y, kind, value in found if kind == "end"}
    return below, beside


def test_curves_are_where_their_ticks_say() -> None:
    """Read back through a line through the ticks; values over two decades by logarithms."""
    panels = dict(re.findall(r'<g class="(measure-\d)">(.*?)</g>', overlay(runs())))
    for measure, name, scale in (("measure-0", "loss", np.log10), ("measure-1", "accuracy", float)):
        below, beside = ticks(panels[measure])
        to_x = np.polyfit([*below.values()], [*below], 1)
        to_y = np.polyfit([*beside.values()], [float(scale(one)) for one in beside], 1)
        assert len(beside) >= 2 and len(below) >= 2
        for place, run in enumerate(runs()[: 2 - (name == "accuracy")]):
            (path,) = re.findall(rf'class="run-{place}" d="M(.*?)"', panels[measure])
            points = np.array([one.split() for one in path.split("L")], float)
            known = np.array([point for point in run.curves[name] if np.isfinite(point[1])])
            xs, ys = np.polyval(to_x, points[:, 0]), np.polyval(to_y, points[:, 1])
            assert xs[[0, -1]] == pytest.approx(known[[0, -1], 0], abs=1)
            for x, y in zip(xs, ys, strict=True):  # within a round of where it should be
                near = [scale(one) for one in np.interp([x - 1, x, x + 1], *known.T)]
                assert min(near) - 0.01 <= y <= max(near) + 0.01
    assert "nan" not in panels["measure-0"] and len(panels) == 2


def test_it_opens_on_what_the_most_runs_have() -> None:
    """Not on what one has at more rounds than all others; of equals on the held-out loss."""
    often = [(float(n), 1.0) for n in range(50)]
    few = {"accuracy": often[:2], "train loss": often[:3], "test loss": often[:2]}
    lost = {"client loss": often, "test loss": [(1.0, float("nan"))]}
    text = overlay([DrawnRun("a", "", {"client loss": often, **few}), DrawnRun("b", "", few)])
    wanted = ["test loss", "train loss", "accuracy", "client loss"]
    assert re.findall(r'id="measure-\d"(?: checked)?>([\w ]+)<', text) == wanted
    assert overlay([DrawnRun("a", "", lost)]).index("client loss") < text.index("test loss")


def test_short_runs_are_seen_beside_long_ones() -> None:
    """Four rounds beside four hundred have a part of the axis that can be read; where no run is
    ten times as long as another, rounds are as far apart as they are many."""

    def shares(*lengths: int) -> list[float]:
        curves = [[(n, 1 / n) for n in map(float, range(1, many + 1))] for many in lengths]
        text = overlay([DrawnRun(str(n), "", {"loss": one}) for n, one in enumerate(curves)])
        assert ("logarithmic" in text) == (max(lengths) > 10 * min(lengths))
        found = [one.split("L") for one in re.findall(r'class="run-\d" d="M(.*?)"', text)]
        assert all(len(one) <= 202 for one in found)
        xs = [[float(point.split()[0]) for point in one] for one in found]
        assert all(one == sorted(one) for one in xs)
        return [round((one[-1] - one[0]) / (max(map(max, xs)) - one[0]), 2) for one in xs]

    assert shares(4, 400) == [0.23, 1.0] and shares(40, 400) == [0.1, 1.0]
    assert shares(2, 10_000) == [0.08, 1.0]


def test_many_rounds_are_drawn_where_the_axis_has_room() -> None:
    """The first rounds of ten thousand, too, if the axis is logarithmic."""
    long = [(float(n), 1.0 / n) for n in range(1, 10_001)]
    text = overlay([DrawnRun("a", "", {"loss": long}), DrawnRun("b", "", {"loss": long[:2]})])
    (path, _) = re.findall(r'class="run-\d" d="M(.*?)"', text)
    points = np.array([one.split() for one in path.split("L")], float)
    assert len(points) > 100 and np.ptp(np.diff(points[:, 1]) / np.diff(points[:, 0])) < 0.02


def test_words_of_runs_are_words() -> None:
    text = overlay(runs())
    assert "&lt;b&gt;one" in text and "<b>" not in text and "&amp; only" in text
    assert text.count("checked>") == 3 + 1  # every run, and the first measure
    assert "<script" not in text and overlay([runs()[2]]) == ""
    one = overlay([DrawnRun("a", "", {"x": [(3.0, float("inf"))]})])
    assert "no finite value was measured" in one


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1.0, 1e9], [1e-9, 1.0], [1e17], [-1e300]])
def test_an_axis_holds_all_values(values: list[float]) -> None:
    axis = Axis.of(values, 10.0, 20.0, wide=100.0)
    assert all(10 <= axis.at(one) <= 20 for one in values)
    assert axis.log == (min(values) > 0 and max(values) > 100 * min(values))
    assert all(10 <= axis.at(one) <= 20 for one in axis.ticks())


FONT: Any = TTFont(browser.FONT)


def advance(text: str) -> float:
    """The width of a text in DejaVu Sans as matplotlib ships it, in units of the size."""
    names, wide = FONT.getBestCmap(), FONT["hmtx"]
    return sum(wide[names[ord(one)]][0] for one in text) / FONT["head"].unitsPerEm


SPANS = [
    (sign * factor * 10.0**power, sign * factor * 10.0**power * (1 + wide))
    for sign in (1, -1)
    for factor in (1.0, 1.23456, 9.9)
    for power in (-300, -10, -5, -4, -2, 0, 3, 5, 6, 12, 300)
    for wide in (1e-4, 1.0, 50.0, 1e5)
] + [(-1.5e-5, 0.0), (-2e-5, 1e-5), (-1e9, 1e-9), (0.0, 0.0)]


def test_there_is_room_for_labels_of_every_size() -> None:
    """In the size of wide screens and of narrow ones (page.css), with a wide font that is the same
    on every machine. Rounds keep apart, too."""
    sizes = [float(one) for one in re.findall(r"\.overlay text {[^}]*font-size: (\d+)px", STYLE)]
    assert sorted(sizes) == [12, 16]
    needed = []
    for rounds, values in itertools.product(((1.0, 50.0), (1000.0, 250_000.0)), SPANS):
        first, last = zip(rounds, values, strict=True)
        curves = {"a": [first, last], "b": [first]}
        drawn = overlay([DrawnRun(name, "", {"x": points}) for name, points in curves.items()])
        found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([−\de.+]+)<', drawn)
        for size in sizes:
            beside = [(float(x), size * advance(text)) for x, kind, text in found if kind == "end"]
            assert beside and all(x - wide >= 4 for x, wide in beside), (values, beside)
            needed += [wide for _, wide in beside]
            below = [(float(x), size * advance(text) / 2) for x, kind, text in found
                     if kind == "middle"]  # fmt: skip
            assert len(below) > 1 and all(x + half <= WIDTH for x, half in below), (rounds, below)
            assert all(b - a > one + other for (a, one), (b, other) in itertools.pairwise(below))
    assert max(needed) > 120 > 88 > max(sizes) * advance("0.0001")  # some need more than most


def light(colour: tuple[float, ...]) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return float(np.dot((0.2126, 0.7152, 0.0722), parts))


@pytest.mark.parametrize("paper", PAPERS)
def test_lines_are_seen_on_light_and_dark(paper: tuple[float, ...]) -> None:
    """Three to one to what they are drawn on (WCAG 2.2, 1.4.11); and each looks like no other."""

    def contrast(name: str) -> float:
        one = tuple(int(name[at : at + 2], 16) / 255 for at in (1, 3, 5))
        low, high = sorted((light(one), light(paper)))
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, COLOURS)) >= 3
    assert contrast("#e69f00" if paper[0] == 1 else "#3d4248") < 3  # which others would not be
    many = len(COLOURS) * len(DASHES)
    drawn = drawing([DrawnRun(str(place), "", {"x": [(1.0, 1.0)]}) for place in range(many)])[
        "runs"
    ]
    assert len({(one["colour"], one["dash"]) for one in drawn}) == many


SCRIPT = """<script>
const shown = () => [...document.querySelectorAll('.overlay > svg path[class^=run]')]
  .filter(one => one.getBoundingClientRect().width).map(one =>
    one.parentElement.className.baseVal + ' ' + one.className.baseVal);
const found = [shown()];
document.querySelector('#run-0').click(); found.push(shown());
document.querySelector('#measure-1').click(); found.push(shown());
document.body.textContent = 'found' + JSON.stringify(found) + 'end';
</script>"""


@pytest.mark.needs_browser
def test_a_report_of_several_runs_draws_those_that_are_ticked(
    tmp_path: Path, chromium: str
) -> None:
    """All of one measure at first, then without one run, then of another measure; failed runs too,
    with the reason."""
    folder = tmp_path / "runs"
    execute(small(), folder / "a")
    execute(small(federation={"seed": 4}), folder / "b")
    shutil.copytree(folder / "a", folder / "half")
    (folder / "half" / "summary.json").unlink()
    (folder / "half" / "failed.txt").write_text("the loss is not finite (round 3): lower lr")
    page = write_report(folder)
    text = page.read_text(encoding="utf-8")
    assert text.count('type="checkbox"') == 3 and "<script" not in text
    assert "failed: the loss is not finite (round 3), " in text and "lower lr" not in text
    assert not re.search(r"https?://", text)
    page.write_text(text.replace("</body>", f"{SCRIPT}</body>"), encoding="utf-8")
    seen = browser.dom(chromium, page.as_uri(), tmp_path)
    found = json.loads(unescape(re.search(r"found(\[.*\])end", seen, re.DOTALL)[1]))  # pyright: ignore
    every = [f"measure-0 run-{place}" for place in range(3)]
    assert found == [every, every[1:], [one.replace("0 r", "1 r") for one in every[1:]]]
    alone = write_report(folder / "a").read_text(encoding="utf-8")
    assert 'class="overlay"' not in alone


@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_runs_at_any_depth(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    execute(small(), folder / "a")
    execute(small(federation={"seed": 4}), folder / "monday" / "first" / "b")
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.count('type="checkbox"') == 2 and "monday/first/b" in text
