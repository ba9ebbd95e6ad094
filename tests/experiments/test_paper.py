"""Curves as axes, tables as DataFrames and in LaTeX."""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import quick
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedmuon
from fedmuon.analysis.report import style
from fedmuon.analysis.report.curves import WIDTHS
from fedmuon.analysis.report.latex import latex
from fedmuon.core.choices import SPREAD
from fedmuon.runs.directory import AXES

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
    "federation": {"clients": 3, "rounds": 3},
    "output": {"evaluate-every": 1},
}
BOUNDED = {"local": {"lr": 0.01, "steps": 1}, "orthogonalizer": {"lambda": 0.1}}


@pytest.fixture(scope="module")
def result() -> fedmuon.Result:
    return fedmuon.run(SMALL)


def test_a_plot_returns_its_axes(result: fedmuon.Result) -> None:
    panels = result.plot()
    loss, accuracy = panels
    assert panels.figure is loss.figure and panels.axes == [loss, accuracy]
    png = panels._repr_png_()
    assert png and png[0][:4] == b"\x89PNG"
    axes = result.plot("test_loss", x="bytes")
    (line,) = axes.lines
    sent = [one["bytes_up"] + one["bytes_down"] for one in result.rounds]
    first, *later = np.asarray(line.get_ydata()).tolist()
    assert first == result.summary["untrained"]["test_loss"]
    assert later == [one["test_loss"] for one in result.rounds]
    assert np.asarray(line.get_xdata())[-1] == pytest.approx(sum(sent) / 1e6)
    assert axes.get_xlabel() == "MB sent up and down" and axes.get_ylabel() == "test loss"
    shown = axes._repr_png_()  # pyright: ignore[reportAttributeAccessIssue]
    assert shown[0][:4] == b"\x89PNG"
    assert len(result.plot("loss").lines) == len(loss.lines)


def test_it_draws_in_axes_of_the_caller(result: fedmuon.Result) -> None:
    mine: Axes = Figure().subplots()
    mine.plot([1, 3], [0, 1], label="theirs")
    assert result.plot("test-accuracy", ax=mine) is mine
    assert len(mine.lines) == 2
    assert result.plot(ax=mine) is mine and len(mine.lines) > 2  # all losses
    with pytest.raises(fedmuon.InputError, match="no effect if you pass ax"):
        result.plot("loss", ax=mine, width="text")  # pyright: ignore


def test_a_list_of_axes_has_a_panel_each(result: fedmuon.Result) -> None:
    """The panels share one legend, and each is the curve that its axis draws alone."""
    swept = fedmuon.sweep(SMALL, grid={"local.lr": [0.1, 1.0]}, select="train-loss")
    for one, lines in ((result, 1), (fedmuon.compare({"a": result, "b": result}), 2), (swept, 2)):
        panels = one.plot("accuracy", ["rounds", "bytes"], width="column")
        assert [panel.get_xlabel() for panel in panels] == [AXES["rounds"], AXES["bytes"]]
        for panel, x in zip(panels, ("rounds", "bytes"), strict=True):
            alone = one.plot("accuracy", x)
            assert len(panel.lines) == len(alone.lines) == lines
            for mine, other in zip(panel.lines, alone.lines, strict=True):
                assert np.array_equal(mine.get_xydata(), other.get_xydata())
            assert panel.get_legend() is None
        assert panels.figure.get_figwidth() == WIDTHS["column"]
        assert len(panels.figure.legends) == (lines > 1)
    assert len(result.plot("loss", ("rounds", "bytes", "bytes-up"))) == 3


@pytest.mark.parametrize("width", quick(WIDTHS, ["column"]))
def test_a_paper_s_figure_has_its_width_and_letters(width: str, result: fedmuon.Result) -> None:
    figure = result.plot(width=width).figure
    assert figure.get_figwidth() == WIDTHS[width]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="pdf")
    fonts = set(re.findall(rb"/BaseFont /[A-Z]{6}\+([\w-]+)", buffer.getvalue()))
    assert fonts and all(b"STIX" in one for one in fonts)
    plain = io.BytesIO()
    result.plot().figure.savefig(plain, format="pdf")
    assert b"STIX" not in plain.getvalue()


def test_what_cannot_be_drawn_is_rejected(result: fedmuon.Result) -> None:
    with pytest.raises(fedmuon.InputError, match=r"metric = 'los' .* did you mean loss"):
        result.plot("los")
    with pytest.raises(fedmuon.InputError, match="width = 'wide' is unknown: use 'column' or"):
        result.plot(width="wide")
    axes = ["rounds", "bytes"]
    with pytest.raises(fedmuon.InputError, match="is a list, but no metric is set"):
        result.plot(x=axes)  # pyright: ignore
    with pytest.raises(fedmuon.InputError, match="Leave ax out"):
        result.plot("loss", axes, ax=result.plot("loss"))  # pyright: ignore
    with pytest.raises(fedmuon.InputError, match="x is an empty list"):
        result.plot("loss", [])
    with pytest.raises(fedmuon.InputError, match="byte"):
        result.plot("loss", ["rounds", "byte"])


def test_every_table_is_a_frame_and_latex(result: fedmuon.Result, tmp_path: Path) -> None:
    other = fedmuon.run(SMALL | {"federation": SMALL["federation"] | {"seed": 1}})
    found = fedmuon.compare([result, other])
    swept = fedmuon.sweep(SMALL, grid={"local.lr": [0.1, 1.0]}, select="train-loss", seeds=2)
    stable = fedmuon.stability(SMALL | BOUNDED, trials=2)
    for one, rows in ((result, 3), (found, 1), (swept, 2), (stable, 2)):
        assert len(one.to_frame()) == rows
        text = one.to_latex("A caption.", "tab:one")
        lines = text.splitlines()
        assert lines[0] == r"\begin{table}[t]" and lines[-1] == r"\end{table}"
        (head,) = [place for place, line in enumerate(lines) if line == r"\midrule"]
        body = [line for line in lines[head + 1 :] if line.endswith(r"\\")]
        assert len(body) == rows and len({line.count(" & ") for line in body}) == 1
    few = swept.to_latex(columns=["test_loss", "local.lr"]).splitlines()
    assert few[0] == r"\begin{tabular}{rr}" and few[2] == r"test loss & local.lr \\"
    with pytest.raises(fedmuon.InputError, match=r"no column 'test-los'.* did you mean test_loss"):
        swept.to_latex(columns=["test-los"])
    assert "participants" in result.rounds[0] and "participants" not in result.to_latex()
    assert r"\pm" in found.to_latex() and "±" not in found.to_latex()
    assert "[$" in swept.to_latex() and r"\_" not in found.to_latex().partition(r"\midrule")[0]
    axes = swept.plot("test_loss")
    assert {"lr=0.1", "lr=1.0"} <= {str(line.get_label()) for line in axes.lines}
    assert len(stable.plot()) == 2 and isinstance(stable.plot("perturbation"), Axes)
    assert stable.plot("test_loss").get_ylabel() == "test loss"


def test_frames_need_pandas(result: fedmuon.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedmuon.InputError, match=r"to_frame.. needs pandas.*pip install pandas"):
        result.to_frame()


ODD = [{"run": "a_b & 50% {x}^~#$\\", "η": 1e-7, "n": 3, "gap": float("inf"), "none": None},
       {"run": "ε ≤ 1", "η": 0.5, "n": 4, "gap": -0.25, "none": ""}]  # fmt: skip


def test_latex_escapes_every_special_sign() -> None:
    text = latex(ODD)
    assert text.startswith("\\begin{tabular}{lrrrr}\n\\toprule\nrun & $\\eta$ & n")
    assert r"a\_b \& 50\% \{x\}\textasciicircum{}\textasciitilde{}\#\$\textbackslash{}" in text
    assert r"$1 \cdot 10^{-7}$" in text and r"$\infty$" in text and r"$-0.25$" in text
    plain = re.sub(r"\\.", "", text)
    assert not set("#%") & set(plain) and plain.count("$") % 2 == 0


def test_latex_rounds_to_the_spread_and_breaks_long_cells() -> None:
    row = {"loss": 0.2964, f"loss{SPREAD}": 0.04777, "gap": 0.1329, "gap_low": -1.1013,
           "gap_high": 1.3672, "tiny": 2e-8, f"tiny{SPREAD}": 3e-9,
           "claim": "a sentence " * 5}  # fmt: skip
    text = latex([row])
    assert r"$0.296 \pm 0.048$ & $0.1$ [$-1.1$, $1.4$]" in text
    assert r"$2 \cdot 10^{-8} \pm 3 \cdot 10^{-9}$" in text
    assert text.startswith(r"\begin{tabular}{rrrp{0.50\linewidth}}")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(result: fedmuon.Result, tmp_path: Path) -> None:
    tables = latex(ODD, "Odd signs.", "tab:odd") + result.to_latex("Rounds.", "tab:rounds")
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{head}\n{tables}\n\\end{{document}}\n", encoding="utf-8")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 0
    assert (tmp_path / "a.pdf").exists()


@pytest.mark.slow
def test_a_suite_draws_its_figures_and_prints_its_tables(tmp_path: Path) -> None:
    found = fedmuon.suite("dp-muon-printed", scale="small")
    assert found.figures
    for name in (None, *found.figures):
        panels = found.plot(name)
        panels.savefig(tmp_path / "a.pdf")
        assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
        assert panels.figure.axes == panels.axes and all(one.has_data() for one in panels)
    with pytest.raises(fedmuon.InputError, match="figure = 'other' is unknown: use one of"):
        found.plot("other")
    claims = found.to_latex(columns=["claim", "verdict"])
    assert "p{0.50" in claims and claims.count(r"\\") == 1 + len(found.claims)
    rows = found.to_latex("rows", columns=["name", "printed"])
    assert rows.startswith(r"\begin{tabular}{lr}")


def test_figures_of_pages_keep_their_style() -> None:
    assert style.SETTINGS["font.family"] == "DejaVu Sans"
