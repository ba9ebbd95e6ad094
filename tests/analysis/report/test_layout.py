"""Pages laid out by Chromium: nothing clipped, covered or pale, narrow or wide."""

import itertools
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import PATIENT, dom, in_one_font
from made_suite import phase_grid, write

from fedmuon.analysis.report.findings import Findings, Picture
from fedmuon.analysis.report.overlay import DrawnRun
from fedmuon.analysis.report.style import canvas, legend_below
from fedmuon.analysis.report.verdicts import Claim, Effect, Rule, unknown
from fedmuon.analysis.report.write import write_page
from fedmuon.experiments.report import write_report

WIDTHS = (390, 1280, 1600)
SCHEMES = {"dark": 0, "light": 1}
SMALLEST = 9  # pixels of a label
LEGIBLE = 4.5  # of text to what it stands on (WCAG 2.2, 1.4.3)


def measured(
    browser: str, pages: dict[str, Path], scheme: str, folder: Path
) -> dict[tuple[str, int], Any]:
    """What each page looks like in a frame of each width, where phones fit too: a headless window
    has a least width of its own."""
    frames = []
    for (name, page), width in itertools.product(pages.items(), WIDTHS):
        text = in_one_font(page.read_text(encoding="utf-8"))
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        style = f"border:0;width:{width}px;height:900px"
        frames.append(f'<iframe src="{name}.html" data-width="{width}" style="{style}"></iframe>')
    outer, dark = folder / f"{scheme}.html", SCHEMES[scheme]
    script = (Path(__file__).parents[2] / "helpers" / "layout.js").read_text(encoding="utf-8")
    outer.write_text(f"<body>{''.join(frames)}<script>{script}</script></body>", encoding="utf-8")
    options = "--hide-scrollbars", PATIENT, f"--blink-settings=preferredColorScheme={dark}"
    shown = dom(browser, outer.as_uri(), folder, "--allow-file-access-from-files", *options)
    found = re.search(r"found(\[.*\])end", shown, re.DOTALL)
    assert found, shown[-300:]
    every = json.loads(unescape(found[1]))
    return {
        (one["page"].removesuffix(".html"), width): one
        for one, (_, width) in zip(every, itertools.product(pages, WIDTHS), strict=True)
    }


def crowded(folder: Path) -> Path:
    """A page with long words, every verdict, and a table as wide as the widest of any suite."""

    def draw(narrow: bool = False) -> Any:
        figure, panels = canvas(2, narrow, 2.9)
        for axes, name in itertools.product(panels, ("one", "another", "a third method")):
            axes.plot([1, 2], [1, 2], label=name)
            axes.set_xlabel("steps")
        legend_below(figure, panels[0], 3)
        return figure

    sentence = "Muon, Newton–Schulz, keeps the promised rate at every tail index. " * 2
    ends = (0.5, 0.1), (-0.5, 0.1), (0.05, 0.1), (0.05, np.nan)
    claims = [Claim(sentence, Effect.around("slope", *one), Rule(low=0.0), "detail " * 40, "also",
                    command="fedmuon suite x") for one in ends]  # fmt: skip
    head = "method", *(f"slope over K = {4**k}" for k in range(4)), "promised", "at the end"
    row = "Muon, randomized", *("−0.069 (−0.174 to +0.037)" for _ in range(4)), "−0.125", "0.2455"
    found = Findings(
        "crowded", "Rates of Muon under heavy-tailed noise (Nesterov Muon)", "",
        [*claims, unknown(sentence, "refused")], "Numbers", head,
        [("Muon, schedule that knows α:", *[""] * 6), row], "note " * 40,
        [Picture("a", draw, "Losses by round", "caption " * 30)],
        "fedmuon suite heavy-tail --set data.folder=/a/very/long/path/to/some/data/of/ours",
        [("versions", "python 3.11.7, fedmuon 0.1.0, torch 2.13.0+cpu")],
        stands_on="The bound of Y_i(C) is certified. " * 9, card=[("η: step size", "0.1, 0.3")],
        about=[("scale", "small"), ("seeds", "4")],
        told="What it prints.\n- This and\n  that.\n    1  2\n",
    )  # fmt: skip
    return write_page(folder, [found])


def many_runs(folder: Path) -> Path:
    """All that a drawing of runs may have to show: as many as have looks, short ones beside long
    ones, long names and reasons, values of every size."""
    rounds = {"short": range(1, 5), "long": range(1, 100_001, 50)}
    scales = {"test loss": 1.0, "train loss": 1e-7, "client loss": -1.5e-5, "accuracy": 1e-3,
              "a measure that has a long name": 123456.0}  # fmt: skip
    curves = {
        kind: {name: [(float(n), scale * n**-0.7) for n in every] for name, scale in scales.items()}
        for kind, every in rounds.items()
    }
    about = "fedmuon on mnist5k, seed 0, failed: " + "the loss is not finite " * 4
    runs = [DrawnRun(f"{kind}-run-of-a-name-{'long' * 9}-{place}", about, curves[kind])
            for place in range(13) for kind in rounds]  # fmt: skip
    return write_page(folder, [plain("Runs side by side")], runs)


def plain(title: str, *pictures: Picture) -> Findings:
    return Findings("a", title, "", [], "Numbers", ("", "x"), [("a", "1")], "", pictures, "", [])


BROKEN = """<body style="background:#fff"><h1 style="width:2000px">wide</h1>
<p style="position:absolute;top:200px">one label here</p>
<p style="position:absolute;top:205px">another label over it</p>
<p style="color:#ddd">pale</p>
<div class="scroll" aria-label="cut" style="width:300px;overflow-x:auto">
<p style="width:400px">x</p></div>
<section class="overlay"><input type="radio"><svg viewBox="0 0 560 320" width="300">
<text x="-9" y="20" font-size="12px">over</text><text x="-5" y="22" font-size="12px">each</text>
</svg></section>
</body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A suite's, one with more than any suite has, one of many runs, and one that is wrong in every
    way."""
    folder = tmp_path_factory.mktemp("pages")
    broken = folder / "made.html"
    broken.write_text(BROKEN, encoding="utf-8")
    suite = write_report(write(folder / "A1", *phase_grid()))
    runs = many_runs(folder / "runs")
    return {"suite": suite, "crowded": crowded(folder / "crowded"), "runs": runs, "broken": broken}


@pytest.mark.needs_browser
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_clipped_covered_or_pale(
    scheme: str, pages: dict[str, Path], tmp_path: Path, chromium: str
) -> None:
    for (name, width), one in measured(chromium, pages, scheme, tmp_path).items():
        assert abs(one["width"] - width) <= 20 and one["fonts"] == ["loaded"]
        if name == "broken":  # every one of these would be seen
            assert one["scroll"] > width and one["clipped"] == ["cut"]
            assert one["covered"] and one["contrast"] < LEGIBLE
            assert one["overlay"]["covered"] and one["overlay"]["outside"]
            assert min(one["overlay"]["sizes"]) < SMALLEST
            continue
        assert one["scroll"] <= width, (name, width)
        assert not one["covered"] and not one["labels"], (name, width)
        assert not one["clipped"] or width < 1280, (name, width)
        assert one["contrast"] >= LEGIBLE and (one["paper"] > 0.5) == (scheme == "light")
        drawn = one["overlay"]
        assert len(drawn["sizes"]) >= 40 * (name == "runs")
        assert not drawn["covered"] and not drawn["outside"], (width, drawn)
        assert min(drawn["sizes"], default=SMALLEST) >= SMALLEST, (name, width)


PIXELS = """<script>
onload = () => {
  const found = [...document.querySelectorAll('figure img')].map(image => {
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const brush = canvas.getContext('2d');
    brush.drawImage(image, 0, 0);
    const at = (x, y) => [...brush.getImageData(x * canvas.width, y * canvas.height, 1, 1).data];
    return [at(.01, .01), at(.3, .2), at(.6, .2)];
  });
  document.body.textContent = 'found' + JSON.stringify(found) + 'end';
};
</script>"""


@pytest.mark.needs_browser
def test_figures_are_dark_on_a_dark_page_and_colours_mean_the_same(
    tmp_path: Path, chromium: str
) -> None:
    """What is black or white changes; a patch of a heat map does not."""

    def draw(narrow: bool = False) -> Any:
        figure, (axes,) = canvas(1, narrow, 2.9)
        axes.set_position((0.2, 0.1, 0.7, 0.8))
        axes.imshow([[0.0, 1.0]], aspect="auto", cmap="viridis")
        axes.axis("off")
        figure.set_layout_engine("none")
        return figure

    picture = Picture("a", draw, "A map", "caption")
    page = write_page(tmp_path / "page", [plain("A map", picture)])
    text = page.read_text(encoding="utf-8").replace("</body>", f"{PIXELS}</body>")
    page.write_text(text, encoding="utf-8")
    seen = {}
    for scheme, number in SCHEMES.items():
        options = f"--blink-settings=preferredColorScheme={number}", "--window-size=1280,900"
        shown = dom(chromium, page.as_uri(), tmp_path / scheme, *options)
        ((seen[scheme],),) = [json.loads(unescape(re.findall(r"found(\[.*\])end", shown)[0]))]
    (dark, *patches), (light, *same) = seen["dark"], seen["light"]
    assert max(dark[:3]) < 40 and min(light[:3]) > 250
    assert patches == same and patches[0] != patches[1]
